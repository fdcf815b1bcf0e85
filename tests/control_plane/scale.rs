//! Many claims on many nodes, whose agents are simulated: they answer each order at once. Not part
//! of the default run: `cargo test --test control_plane -- --ignored --nocapture many`.
//! `BAGGAGECLAIM_TEST_CLAIMS` and `BAGGAGECLAIM_TEST_NODES` set other sizes.

use std::sync::Arc;
use std::time::Instant;

use baggageclaim::api::{Phase, Pool, PoolSpec, Volume, Wanted};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::calls::{Client, create, delete, request, selected};
use crate::driver::{client, controller};
use crate::eventually;
use crate::plane::ControlPlane;

/// How many calls run at once.
const AT_ONCE: usize = 100;

#[expect(clippy::disallowed_methods, reason = "a setting of this test only")]
fn size(name: &str, usual: usize) -> usize {
    let told = std::env::var(name).ok();
    told.map_or(usual, |text| text.parse().expect("a number"))
}

/// The status that a node would report.
fn answer(volume: &Volume) -> Option<serde_json::Value> {
    if volume.answer().is_some() {
        return None;
    }
    let phase = match volume.spec.wanted {
        Wanted::Absent => Phase::Gone,
        Wanted::Present | Wanted::Kept => Phase::Ready,
    };
    Some(json!({ "status": {
        "observedGeneration": volume.metadata.generation,
        "phase": phase,
        "pool": "simulated",
        "capacity": volume.spec.capacity,
    } }))
}

/// Answers all orders.
async fn agents(plane: &ControlPlane) {
    let volumes: Api<Volume> = Api::all(plane.client.clone());
    let events = watcher(volumes.clone(), watcher::Config::default());
    let touched = events.default_backoff().touched_objects();
    let answered = touched.for_each_concurrent(AT_ONCE, async |volume| {
        let volume = volume.expect("the watch runs");
        if let Some(status) = answer(&volume) {
            let patch = Patch::Merge(status);
            let params = PatchParams::default();
            // An object that was deleted needs no answer.
            let _ = volumes
                .patch_status(&volume.name_any(), &params, &patch)
                .await;
        }
    });
    answered.await;
}

async fn nodes(plane: &ControlPlane, count: usize) {
    let nodes: Api<Node> = Api::all(plane.client.clone());
    let pools: Api<Pool> = Api::all(plane.client.clone());
    let make = async |number: usize| {
        let name = format!("node-{number}");
        let mut node = Node::default();
        node.metadata.name = Some(name.clone());
        let post = PostParams::default();
        nodes.create(&post, &node).await.expect("a Node");
        let pool = Pool::new(&name, PoolSpec {});
        pools.create(&post, &pool).await.expect("a Pool");
        let labels = selected(&name).requisite.remove(0).segments;
        let status = json!({ "status": {
            "pool": name, "topology": labels, "bytes": 1_i64 << 40, "available": 1_i64 << 40,
        } });
        let patch = Patch::Merge(status);
        let params = PatchParams::default();
        let done = pools.patch_status(&name, &params, &patch).await;
        done.expect("a status");
    };
    stream::iter(0..count)
        .for_each_concurrent(AT_ONCE, make)
        .await;
}

/// The writes to our kinds that the API server has counted.
async fn writes(plane: &ControlPlane) -> f64 {
    let request = hyper::Request::get("/metrics").body(Vec::new());
    let text = plane.client.request_text(request.expect("valid")).await;
    let text = text.expect("metrics");
    let ours = text.lines().filter(|line| {
        line.starts_with("apiserver_request_total{")
            && line.contains("group=\"baggageclaim.concourse-ci.org\"")
            && line.contains("resource=\"volumes\"")
            && ["POST", "PATCH", "PUT", "DELETE"]
                .iter()
                .any(|verb| line.contains(&format!("verb=\"{verb}\"")))
    });
    let counts = ours.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    counts.sum()
}

/// The most memory that a process had, in MiB.
fn peak(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kib.expect("a line")
        .trim()
        .parse::<u64>()
        .expect("a number")
        / 1024
}

fn persistent(name: &str, id: &str) -> PersistentVolume {
    let object = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Mi" },
            "csi": { "driver": "baggageclaim.csi.concourse-ci.org", "volumeHandle": id },
        },
    });
    serde_json::from_value(object).expect("a PersistentVolume")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes; for figures"]
async fn many_claims_on_many_nodes() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let claims = size("BAGGAGECLAIM_TEST_CLAIMS", 5_000);
    let count = size("BAGGAGECLAIM_TEST_NODES", 1_000);
    let plane = Arc::new(plane);
    let controller = controller(&plane);
    let client = client(&controller).await;
    nodes(&plane, count).await;
    let all = plane.clone();
    let answering = tokio::spawn(async move { agents(&all).await });
    let persistents: Api<PersistentVolume> = Api::all(plane.client.clone());
    let before = writes(&plane).await;

    let began = Instant::now();
    let make = async |mut client: Client, number: usize| {
        let name = format!("pvc-{number}");
        let at = format!("node-{}", number % count);
        // csi-provisioner repeats a call whose node the controller does not know yet.
        let id = loop {
            let asked = request(&name, Some(selected(&at)), None);
            match create(&mut client, asked).await {
                Ok((id, _)) => break id,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
            }
        };
        let made = persistent(&name, &id);
        let made = persistents.create(&PostParams::default(), &made).await;
        made.map(|_| id)
    };
    let ids = stream::iter(0..claims).map(|number| make(client.clone(), number));
    let ids: Vec<String> = ids
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await
        .expect("all are made");
    let took = began.elapsed();
    let all_marked = async || {
        let volumes = crate::volumes(&plane).await;
        let marked = volumes
            .iter()
            .filter(|one| one.annotations().contains_key(baggageclaim::api::BOUND));
        marked.count() == claims
    };
    eventually("all are marked as bound", all_marked).await;

    let began = Instant::now();
    let drop_one = async |mut client: Client, id: String| {
        while delete(&mut client, &id).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    stream::iter(ids)
        .for_each_concurrent(AT_ONCE, |id| drop_one(client.clone(), id))
        .await;
    let deleted = began.elapsed();
    let none = async || crate::volumes(&plane).await.is_empty();
    eventually("no object is left", none).await;
    let after = writes(&plane).await;
    let all = f64::from(u32::try_from(claims).expect("small"));
    println!(
        "claims={claims} nodes={count} made={:.1}/s deleted={:.1}/s controller_peak_mib={} writes_per_claim={:.2}",
        all / took.as_secs_f64(),
        all / deleted.as_secs_f64(),
        peak(controller.id()),
        (after - before) / all,
    );
    answering.abort();
    let (params, all) = (DeleteParams::default(), ListParams::default());
    let done = persistents.delete_collection(&params, &all).await;
    done.expect("deleted");
}
