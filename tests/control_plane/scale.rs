//! Many claims on many nodes, whose agents are simulated: they answer each order at once.
//!
//! The size of the default run fits into CI. `BAGGAGECLAIM_TEST_CLAIMS=5000` and
//! `BAGGAGECLAIM_TEST_NODES=1000` are for figures, with `-- --nocapture many_claims`: two minutes.
//! `BAGGAGECLAIM_TEST_PROGRAM=target/release/baggageclaim` takes that program.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::api::{Phase, Pool, PoolSpec, Volume, Wanted};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt};
use parking_lot::Mutex;
use serde_json::json;

use crate::calls::{Client, create, delete, request, selected};
use crate::driver::{client, controller};
use crate::plane::ControlPlane;
use crate::{eventually, setting};

/// How many calls run at once.
const AT_ONCE: usize = 100;

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

/// Answers all orders, and collects the ids whose data is deleted.
async fn agents(plane: &ControlPlane, gone: &Mutex<HashSet<String>>) {
    let volumes: Api<Volume> = Api::all(plane.client.clone());
    let events = watcher(volumes.clone(), watcher::Config::default());
    let touched = events.default_backoff().touched_objects();
    let answered = touched.for_each_concurrent(AT_ONCE, async |volume| {
        let volume = volume.expect("the watch runs");
        if let Some(status) = answer(&volume) {
            if volume.spec.wanted == Wanted::Absent {
                gone.lock().insert(volume.name_any());
            }
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

fn persistent(name: &str, id: &str, node: &str) -> PersistentVolume {
    let object = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Mi" },
            "persistentVolumeReclaimPolicy": "Delete",
            "csi": { "driver": "baggageclaim.csi.concourse-ci.org", "volumeHandle": id },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [{
                "key": "topology.baggageclaim.csi.concourse-ci.org/node",
                "operator": "In", "values": [node],
            }] }] } },
        },
    });
    serde_json::from_value(object).expect("a PersistentVolume")
}

/// Makes claims, with their PersistentVolumes. Returns the ids of their volumes.
async fn make(
    plane: &ControlPlane,
    client: &Client,
    prefix: &str,
    (claims, nodes): (usize, usize),
) -> Vec<String> {
    let persistents: Api<PersistentVolume> = Api::all(plane.client.clone());
    let make = async |mut client: Client, number: usize| {
        let name = format!("{prefix}-{number}");
        let at = format!("node-{}", number % nodes);
        // csi-provisioner repeats a call whose node the controller does not know yet.
        let id = loop {
            let asked = request(&name, Some(selected(&at)), None);
            match create(&mut client, asked).await {
                Ok((id, made_at)) => {
                    assert_eq!(made_at, at, "{name}");
                    break id;
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        };
        let made = persistent(&name, &id, &at);
        let made = persistents.create(&PostParams::default(), &made).await;
        made.map(|_| id)
    };
    let ids = stream::iter(0..claims).map(|number| make(client.clone(), number));
    let ids = ids.buffer_unordered(AT_ONCE).try_collect().await;
    ids.expect("all are made")
}

/// Each claim has one volume, which is Ready, and is marked as bound.
async fn all_are_there(plane: &ControlPlane, ids: &[String]) {
    let all_marked = async || {
        let volumes = crate::volumes(plane).await;
        let mut volumes = volumes.iter();
        volumes.all(|one| one.annotations().contains_key(baggageclaim::api::BOUND))
    };
    eventually("all are marked as bound", all_marked).await;
    let volumes = crate::volumes(plane).await;
    let ready = |one: &&Volume| one.phase() == Some(Phase::Ready);
    let ready: HashSet<String> = volumes.iter().filter(ready).map(Volume::name_any).collect();
    assert_eq!(ready, ids.iter().cloned().collect());
    assert_eq!((volumes.len(), ready.len()), (ids.len(), ids.len()));
}

/// Releases all PersistentVolumes, as the controller manager does for claims that are gone.
async fn release(plane: &ControlPlane) {
    let persistents: Api<PersistentVolume> = Api::all(plane.client.clone());
    let list = persistents.list_metadata(&ListParams::default()).await;
    let names: Vec<String> = list
        .expect("list")
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    let release = async |name: &String| {
        let status = Patch::Merge(json!({ "status": { "phase": "Released" } }));
        let params = PatchParams::default();
        let done = persistents.patch_status(name, &params, &status).await;
        done.expect("a status");
    };
    let all = stream::iter(&names);
    all.for_each_concurrent(AT_ONCE, release).await;
}

/// Deletes the volumes of claims. Their PersistentVolumes stay: without a controller manager, they
/// have a finalizer.
async fn drop_all(plane: &ControlPlane, client: &Client, ids: &[String]) {
    let drop_one = async |mut client: Client, id: &str| {
        while delete(&mut client, id).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    stream::iter(ids)
        .for_each_concurrent(AT_ONCE, |id| drop_one(client.clone(), id))
        .await;
    let none = async || crate::volumes(plane).await.is_empty();
    eventually("no object is left", none).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_claims_on_many_nodes() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let claims = setting("BAGGAGECLAIM_TEST_CLAIMS", 300);
    let count = setting("BAGGAGECLAIM_TEST_NODES", 100);
    let plane = Arc::new(plane);
    let controller = controller(&plane);
    let client = client(&controller).await;
    nodes(&plane, count).await;
    let (all, gone) = (plane.clone(), Arc::new(Mutex::new(HashSet::new())));
    let deleted_data = gone.clone();
    let answering = tokio::spawn(async move { agents(&all, &deleted_data).await });
    let before = writes(&plane).await;

    let began = Instant::now();
    let ids = make(&plane, &client, "pvc", (claims, count)).await;
    let made = began.elapsed();
    all_are_there(&plane, &ids).await;
    release(&plane).await;
    let began = Instant::now();
    drop_all(&plane, &client, &ids).await;
    let deleted = began.elapsed();
    let after = writes(&plane).await;
    let all = f64::from(u32::try_from(claims).expect("small"));
    let each = (after - before) / all;
    println!(
        "claims={claims} nodes={count} made={:.1}/s deleted={:.1}/s controller_peak_mib={} writes_per_claim={each:.2}",
        all / made.as_secs_f64(),
        all / deleted.as_secs_f64(),
        peak(controller.id()),
    );
    assert!(each <= 8.0, "writes for each claim: {each}");
    assert_eq!(std::mem::take(&mut *gone.lock()).len(), claims);

    // The objects are lost, and the claims are deleted. Each call looks for the PersistentVolume.
    let ids = make(&plane, &client, "lost", (claims, count)).await;
    all_are_there(&plane, &ids).await;
    release(&plane).await;
    let volumes: Api<Volume> = Api::all(plane.client.clone());
    let (params, everything) = (DeleteParams::default(), ListParams::default());
    let lost = volumes.delete_collection(&params, &everything).await;
    lost.expect("deleted");
    let began = Instant::now();
    drop_all(&plane, &client, &ids).await;
    println!(
        "without_objects={:.1}/s controller_peak_mib={}",
        all / began.elapsed().as_secs_f64(),
        peak(controller.id()),
    );
    let ordered = gone.lock().clone();
    assert_eq!(
        ordered,
        ids.into_iter().collect(),
        "each is ordered to be deleted"
    );
    answering.abort();
}
