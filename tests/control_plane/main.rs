//! Claims in a cluster: the controller and nodes of the driver as processes, around a real
//! kube-apiserver. There is no kubelet; the tests make its calls. Most tests make the calls of the
//! sidecars, too; `sidecars` and `crash_points` run the real ones.
//!
//! `make e2e` runs it, since it builds the control plane.

#![expect(
    clippy::disallowed_types,
    reason = "the control plane and the driver are processes"
)]

#[path = "../common/mod.rs"]
mod common;

mod away;
mod budgets;
mod by_hand;
mod calls;
mod clears;
mod clocks;
mod crash_points;
mod driver;
mod elsewhere;
mod leaks;
mod locality;
mod matrix;
mod mirror;
mod nodes;
mod objects;
mod orphans;
mod peers;
mod places;
mod plane;
mod policies;
mod programs;
#[path = "../sanity/report.rs"]
mod report;
mod rights;
mod rollbacks;
mod rules;
mod sanity;
mod scale;
mod shared_budgets;
mod sidecars;
mod standard;
mod tier_clears;
#[path = "../sanity/tool.rs"]
mod tool;
mod two;
mod user_clears;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baggageclaim::api::{Phase, Snapshot, Volume};
use baggageclaim::engine::{Config, Engine};
use baggageclaim::proto::csi::v1 as csi;
use baggageclaim::proto::csi::v1::controller_client::ControllerClient;
use calls::{
    create, delete, delete_snapshot, mount, of_snapshot, of_volume, request, selected, snapshot,
    unmount,
};
use common::{Fs, require_lab};
use driver::{client, controller, kubelet, node};
use futures_util::future::join_all;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use plane::ControlPlane;
use rustix::process::Signal;
use serde_json::json;
use tonic::Code;
use tonic::transport::Channel;

async fn volumes(plane: &ControlPlane) -> Vec<Volume> {
    let api: Api<Volume> = Api::all(plane.client.clone());
    api.list(&ListParams::default()).await.expect("list").items
}

/// Waits until a condition holds. The API server is asked each time, so that no watch hides
/// anything.
async fn eventually(what: &str, condition: impl AsyncFn() -> bool) {
    let holds = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let done = tokio::time::timeout(Duration::from_secs(60), holds).await;
    assert!(done.is_ok(), "never: {what}");
}

/// Waits until `node-1` to `node-COUNT` have published their pools, and this controller has seen
/// that.
async fn await_pools(controller: &ControllerClient<Channel>, count: usize) {
    for number in 1..=count {
        await_pool(controller, &format!("node-{number}")).await;
    }
}

/// The same of one node. The watch of a controller over a definition that was just made can begin
/// late.
async fn await_pool(controller: &ControllerClient<Channel>, node: &str) {
    let request = csi::GetCapacityRequest {
        accessible_topology: selected(node).preferred.pop(),
        ..csi::GetCapacityRequest::default()
    };
    eventually("the controller has seen a pool", async || {
        let answer = controller.clone().get_capacity(request.clone()).await;
        answer.expect("an answer").into_inner().available_capacity > 0
    })
    .await;
}

#[tokio::test]
async fn a_claim_is_on_the_selected_node_until_an_order_deletes_it() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let _one = node(&plane, "node-1", &lab.dir("one"));
    let two = node(&plane, "node-2", &lab.dir("two"));
    let mut client = client(&controller).await;
    let kubelet = kubelet(&plane, "node-2", &two).await;
    await_pools(&client, 2).await;

    let asked = request("pvc-1", Some(selected("node-2")), None);
    let (id, at) = create(&mut client, asked.clone()).await.expect("made");
    assert_eq!(at, "node-2");
    let again = create(&mut client, asked.clone()).await.expect("there");
    assert_eq!(again, (id.clone(), at));
    let elsewhere = request("pvc-1", Some(selected("node-1")), None);
    let elsewhere = create(&mut client, elsewhere).await.expect_err("it stays");
    assert_eq!(elsewhere.code(), Code::AlreadyExists, "{elsewhere}");

    let target = mount(&kubelet, &id).await;
    fs::write(target.join("file"), "content").expect("write");
    let used = delete(&mut client, &id).await.expect_err("mounted");
    assert_eq!(used.code(), Code::FailedPrecondition, "{used}");
    unmount(&kubelet, &id).await;
    eventually("the order that stands is carried out", async || {
        volumes(&plane).await.is_empty()
    })
    .await;

    let (id, _) = create(&mut client, asked).await.expect("made again");
    let target = mount(&kubelet, &id).await;
    assert!(!target.join("file").exists(), "the data came back");
    unmount(&kubelet, &id).await;
}

#[tokio::test]
async fn clones_snapshots_and_changes_follow_their_volume() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let _one = node(&plane, "node-1", &lab.dir("one"));
    let two = node(&plane, "node-2", &lab.dir("two"));
    let mut client = client(&controller).await;
    let kubelet = kubelet(&plane, "node-2", &two).await;
    await_pools(&client, 2).await;
    let asked = request("pvc-1", Some(selected("node-2")), None);
    let (id, _) = create(&mut client, asked).await.expect("made");
    let target = mount(&kubelet, &id).await;
    fs::write(target.join("file"), "content").expect("write");
    unmount(&kubelet, &id).await;

    // Anywhere: where the source is. On another node: the pod is scheduled again.
    let (clone, at) = create(&mut client, request("clone", None, Some(of_volume(&id))))
        .await
        .expect("cloned");
    assert_eq!(at, "node-2");
    let wrong = request("wrong", Some(selected("node-1")), Some(of_volume(&id)));
    let wrong = create(&mut client, wrong).await.expect_err("elsewhere");
    assert_eq!(wrong.code(), Code::ResourceExhausted, "{wrong}");
    let taken = snapshot(&mut client, "s-1", &id).await.expect("taken");
    assert_eq!(
        snapshot(&mut client, "s-1", &id).await.expect("again"),
        taken
    );
    delete(&mut client, &id).await.expect("deleted");
    let (restored, at) = create(
        &mut client,
        request("restored", None, Some(of_snapshot(&taken))),
    )
    .await
    .expect("restored");
    assert_eq!(at, "node-2");
    for id in [&clone, &restored] {
        let target = mount(&kubelet, id).await;
        assert_eq!(
            fs::read_to_string(target.join("file")).expect("read"),
            "content"
        );
        unmount(&kubelet, id).await;
    }

    grow_and_modify(&plane, &mut client, &clone).await;
    show(&plane);

    delete_snapshot(&mut client, &taken).await.expect("deleted");
    for id in [&clone, &restored] {
        delete(&mut client, id).await.expect("deleted");
        delete(&mut client, id).await.expect("deleted already");
    }
    let snapshots: Api<Snapshot> = Api::all(plane.client.clone());
    let snapshots = snapshots.list(&ListParams::default()).await.expect("list");
    assert!(snapshots.items.is_empty() && volumes(&plane).await.is_empty());
}

/// A larger size and other parameters apply; a size that the node refuses is taken back.
async fn grow_and_modify(plane: &ControlPlane, client: &mut calls::Client, clone: &str) {
    let larger = csi::ControllerExpandVolumeRequest {
        volume_id: clone.to_owned(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 2 << 20,
            limit_bytes: 0,
        }),
        ..Default::default()
    };
    let grown = client
        .controller_expand_volume(larger.clone())
        .await
        .expect("grown")
        .into_inner();
    assert_eq!(grown.capacity_bytes, 2 << 20);
    let mut huge = larger.clone();
    huge.capacity_range = Some(csi::CapacityRange {
        required_bytes: 1 << 60,
        limit_bytes: 0,
    });
    let refused = client
        .controller_expand_volume(huge.clone())
        .await
        .expect_err("too large");
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    let seen = with_ttl(plane, client, clone, "7d").await;
    let status = seen.status.as_ref().expect("known");
    assert_eq!(
        (status.capacity, seen.spec.capacity),
        (2 << 20, 2 << 20),
        "the refused size is taken back"
    );
    assert_eq!(status.mutable.ttl_seconds, Some(7 * 24 * 3600));
    // A ttl that was taken away does not come back: it would delete the data.
    let seen = with_ttl(plane, client, clone, "never").await;
    assert_eq!(seen.status.expect("known").mutable.ttl_seconds, None);
    let grown = client.controller_expand_volume(larger).await;
    grown.expect("as large as before");
    let refused = client.controller_expand_volume(huge.clone()).await;
    refused.expect_err("too large");
    let seen = volume_of_clone(plane).await;
    assert_eq!(seen.spec.mutable.ttl_seconds, None);
    assert_eq!(seen.status.expect("known").mutable.ttl_seconds, None);
    // A controller that ended before it took the refused size back holds up no other change.
    let all: Api<Volume> = Api::all(plane.client.clone());
    let size = json!({ "spec": { "capacity": 1_u64 << 60 } });
    let params = PatchParams::default();
    let left = all.patch(clone, &params, &Patch::Merge(size)).await;
    left.expect("written");
    let seen = with_ttl(plane, client, clone, "7d").await;
    let status = seen.status.expect("known");
    assert_eq!(status.mutable.ttl_seconds, Some(7 * 24 * 3600));
    assert_eq!(seen.spec.mutable.ttl_seconds, Some(7 * 24 * 3600));
    assert_eq!((seen.spec.capacity, status.capacity), (1 << 60, 2 << 20));
    let refused = client.controller_expand_volume(huge).await;
    refused.expect_err("too large");
    let seen = volume_of_clone(plane).await;
    assert_eq!(seen.spec.capacity, 2 << 20, "it is taken back now");
    assert_eq!(seen.spec.mutable.ttl_seconds, Some(7 * 24 * 3600));
}

async fn volume_of_clone(plane: &ControlPlane) -> Volume {
    let all = volumes(plane).await.into_iter();
    let mut clones = all.filter(|volume| volume.spec.name == "clone");
    clones.next().expect("there")
}

/// Gives the clone a ttl, and returns its object.
async fn with_ttl(
    plane: &ControlPlane,
    client: &mut calls::Client,
    clone: &str,
    ttl: &str,
) -> Volume {
    let changed = csi::ControllerModifyVolumeRequest {
        volume_id: clone.to_owned(),
        mutable_parameters: [("ttl".to_owned(), ttl.to_owned())].into(),
        ..Default::default()
    };
    let changed = client.controller_modify_volume(changed).await;
    changed.expect("changed");
    volume_of_clone(plane).await
}

/// The tables that people see name the node, the state and the source.
fn show(plane: &ControlPlane) {
    let table = |kind: &str| {
        let kind = format!("{kind}.baggageclaim.concourse-ci.org");
        plane.kubectl(&["get", &kind, "--output=wide"])
    };
    let volumes = table("volumes");
    let clone = volumes.lines().find(|line| line.contains(" clone "));
    let clone = clone.unwrap_or_else(|| panic!("{volumes}"));
    for cell in ["node-2", "Present", "Ready", "2097152", "vol-"] {
        assert!(clone.contains(cell), "{cell}: {volumes}");
    }
    let snapshots = table("snapshots");
    assert!(
        ["s-1", "Ready", "1048576"]
            .iter()
            .all(|cell| snapshots.contains(cell)),
        "{snapshots}"
    );
    let pools = table("pools");
    assert!(
        pools.contains("node-1") && pools.contains("overlay") && pools.contains("Ready"),
        "{pools}"
    );
}

#[tokio::test]
async fn a_deleted_object_and_another_pool_never_cost_data() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let mut one = node(&plane, "node-1", &lab.dir("one"));
    let mut client = client(&controller).await;
    one.ready().await;
    await_pools(&client, 1).await;
    let asked = request("pvc-1", None, None);
    let (id, _) = create(&mut client, asked.clone()).await.expect("made");

    // Another disk in the node of the same name: the claim is lost, and not made again.
    one.kill();
    let mut other = node(&plane, "node-1", &lab.dir("other"));
    other.ready().await;
    let is_lost = async || {
        volumes(&plane)
            .await
            .iter()
            .all(|volume| volume.phase() == Some(Phase::Lost))
    };
    eventually("the claim is lost", is_lost).await;
    let lost = create(&mut client, asked.clone()).await.expect_err("lost");
    assert_eq!(lost.code(), Code::FailedPrecondition, "{lost}");
    other.kill();
    let engine = Engine::open(Config::new(lab.dir("other")))
        .await
        .expect("it opens");
    assert!(!engine.has_claim(&id), "the claim was made again");
    engine.shutdown().await;

    // The first disk is back.
    one.start();
    one.ready().await;
    let is_ready = async || {
        volumes(&plane)
            .await
            .iter()
            .all(|volume| volume.phase() == Some(Phase::Ready))
    };
    eventually("the claim is back", is_ready).await;
    let kubelet = kubelet(&plane, "node-1", &one).await;
    let target = mount(&kubelet, &id).await;
    fs::write(target.join("file"), "content").expect("write");
    plane.kubectl(&["delete", "volumes", "--all"]);
    plane.kubectl(&["delete", "crd", "volumes.baggageclaim.concourse-ci.org"]);
    assert_eq!(
        fs::read_to_string(target.join("file")).expect("read"),
        "content"
    );
    unmount(&kubelet, &id).await;
    one.kill();
    let engine = Engine::open(Config::new(lab.dir("one")))
        .await
        .expect("it opens");
    assert!(engine.has_claim(&id), "a deleted object deleted data");
    engine.shutdown().await;
}

#[tokio::test]
async fn a_silent_node_gives_an_empty_claim_up_and_leaves_nothing() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let one = node(&plane, "node-1", &lab.dir("one"));
    let _two = node(&plane, "node-2", &lab.dir("two"));
    let mut client = client(&controller).await;
    await_pools(&client, 2).await;
    one.signal(Signal::STOP);
    let asked = request("pvc-1", Some(selected("node-1")), None);
    let silent = create(&mut client, asked).await.expect_err("silent");
    assert_eq!(silent.code(), Code::ResourceExhausted, "{silent}");
    let asked = request("pvc-1", Some(selected("node-2")), None);
    let (id, at) = create(&mut client, asked).await.expect("made elsewhere");
    assert_eq!(at, "node-2");
    one.signal(Signal::CONT);
    let only_one = async || volumes(&plane).await.len() == 1;
    eventually("the abandoned attempt is gone", only_one).await;
    drop(one);
    let left = standard::held(&lab.dir("one")).await;
    assert!(left.is_empty(), "{left:?}");
    delete(&mut client, &id).await.expect("deleted");
}

/// A setting of the environment.
#[expect(clippy::disallowed_methods, reason = "a setting of these tests only")]
fn setting<T: std::str::FromStr<Err: std::fmt::Debug>>(name: &str, usual: T) -> T {
    let told = std::env::var(name).ok();
    told.map_or(usual, |text| text.parse().expect("a valid setting"))
}

/// Repeats a call as a sidecar does, until it succeeds.
async fn insist<T>(mut call: impl AsyncFnMut() -> Result<T, tonic::Status>) -> T {
    loop {
        match call().await {
            Ok(done) => return done,
            Err(status) => {
                let passes = [
                    Code::Unavailable,
                    Code::Aborted,
                    Code::Unknown,
                    Code::Cancelled,
                    Code::Internal,
                    Code::FailedPrecondition,
                ];
                assert!(passes.contains(&status.code()), "{status}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

#[tokio::test]
async fn kills_of_either_side_lose_no_claim_and_leak_none() {
    const CLAIMS: usize = 20;
    // `BAGGAGECLAIM_TEST_KILLS=1000` kills that often.
    let kills: usize = setting("BAGGAGECLAIM_TEST_KILLS", 10);
    let ended = AtomicBool::new(false);
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let mut controller = controller(&plane);
    let mut one = node(&plane, "node-1", &lab.dir("one"));
    await_pools(&client(&controller).await, 1).await;
    let socket = controller.socket.clone();
    let connect = async || {
        let socket = socket.clone();
        let connector = tower::service_fn(move |_: tonic::transport::Uri| {
            let socket = socket.clone();
            async move {
                tokio::net::UnixStream::connect(socket)
                    .await
                    .map(hyper_util::rt::TokioIo::new)
            }
        });
        let endpoint = tonic::transport::Endpoint::from_static("http://localhost");
        csi::controller_client::ControllerClient::new(
            endpoint.connect_with_connector_lazy(connector),
        )
    };
    let life = async |number: usize| {
        let name = format!("pvc-{number}");
        let mut client = connect().await;
        let mut rounds = 0;
        while rounds < 3 || !ended.load(Ordering::Relaxed) {
            rounds += 1;
            let made = insist(async || create(&mut client, request(&name, None, None)).await)
                .await
                .0;
            let clone = format!("clone-{number}");
            let clone = request(&clone, None, Some(of_volume(&made)));
            let clone = insist(async || create(&mut client, clone.clone()).await)
                .await
                .0;
            insist(async || delete(&mut client, &made).await).await;
            insist(async || delete(&mut client, &clone).await).await;
        }
        insist(async || create(&mut client, request(&name, None, None)).await)
            .await
            .0
    };
    let kill = async {
        for round in 0..kills {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let victim = if round % 2 == 0 {
                &mut controller
            } else {
                &mut one
            };
            victim.kill();
            victim.start();
            victim.ready().await;
        }
        ended.store(true, Ordering::Relaxed);
    };
    let (mut made, ()) = tokio::join!(join_all((0..CLAIMS).map(life)), kill);
    made.sort();
    let ready = async || {
        let volumes = volumes(&plane).await;
        volumes.len() == CLAIMS && volumes.iter().all(|one| one.phase() == Some(Phase::Ready))
    };
    eventually("each claim is Ready, once", ready).await;
    one.kill();
    let held = standard::held(&lab.dir("one")).await;
    assert_eq!(Vec::from_iter(held), made);
}

#[tokio::test]
async fn a_controller_that_ends_still_sees_what_its_running_calls_wait_for() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let mut controller = controller(&plane);
    let one = node(&plane, "node-1", &lab.dir("one"));
    let mut client = client(&controller).await;
    await_pools(&client, 1).await;
    one.signal(Signal::STOP);
    let asked = request("pvc-1", Some(selected("node-1")), None);
    let call = tokio::spawn(async move { create(&mut client, asked).await });
    let is_ordered = async || !volumes(&plane).await.is_empty();
    eventually("the volume is ordered", is_ordered).await;
    controller.signal(Signal::TERM);
    let socket = controller.socket.clone();
    eventually("it takes no more calls", async || {
        tokio::net::UnixStream::connect(&socket).await.is_err()
    })
    .await;
    one.signal(Signal::CONT);
    let (_, node) = call.await.expect("no panic").expect("an answer");
    assert_eq!(node, "node-1");
    controller.ended().await;
}
