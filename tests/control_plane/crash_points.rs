//! A claim that is deleted while its creation was cut off at a crash point: nothing is left of it.
//!
//! The points of the node are those of `engine::failpoint` that an engine passes while it makes a
//! claim; a process of its own lists them, since they are counted for a whole process. The state of
//! the controller is in the API server: it dies before and after each of its writes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use baggageclaim::api::{Phase, Volume};
use baggageclaim::engine::claims::{CreateClaim, MountClaim};
use baggageclaim::engine::failpoint::{Point, visits};
use baggageclaim::engine::{Config, Engine};
use baggageclaim::model::{ClaimSource, PersistentVolume};
use baggageclaim::store::PoolDirs;
use futures_util::future::join_all;
use kube::Api;
use kube::api::ListParams;
use rustix::process::Signal;

use crate::calls;
use crate::common::bench::empty_claim;
use crate::common::{Fs, require_lab};
use crate::driver::{Process, client, controller_with, kubelet, node};
use crate::plane::ControlPlane;
use crate::programs::{Program, controller_manager, sidecar, snapshot_controller};
use crate::standard::{
    ask, assert_no_snapshots, assert_only, bound, claims, define, delete_claim, delete_snapshot,
    held, of_claim, of_snapshot, register, snapshot,
};
use crate::{await_pool, eventually, volumes};

/// The test that lists the points, and how it says one.
const LISTS: &str = "crash_points::a_creation_passes_points";
const SAYS: &str = "a creation passes ";
/// The same of a clone, and of a claim that is restored from a snapshot.
const CLONES: &str = "a clone passes ";
const RESTORES: &str = "a restore passes ";

/// What a claim that is cut off is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Made {
    Empty,
    Clone,
    Restore,
}

/// How often this process has passed each point.
fn passed() -> Vec<usize> {
    Point::ALL.iter().map(|point| visits(*point)).collect()
}

/// Mounts a claim, writes a file, and unmounts it.
async fn write(engine: &Engine, claim: &PersistentVolume, staging: &Path) {
    std::fs::create_dir(staging).expect("mkdir");
    let mount = MountClaim {
        claim: claim.id.clone(),
        target: staging.to_owned(),
        staging: true,
        staged_at: None,
        read_only: false,
        multiple_targets: false,
        mount_group: None,
    };
    engine.mount_claim(mount).await.expect("mounted");
    std::fs::write(staging.join("file"), "content").expect("write");
    let id = claim.id.as_str();
    let unmounted = engine.unmount_claim(id, staging, true).await;
    unmounted.expect("unmounted");
}

#[tokio::test]
async fn a_creation_passes_points() {
    let lab = require_lab!(Fs::Ext4);
    let open = async |pool: &str| {
        let engine = Engine::open(Config::new(lab.dir(pool))).await;
        engine.expect("it opens")
    };
    let engine = open("pool").await;
    let by_opening = passed();
    let say = |prefix: &str, before: &[usize]| {
        // Tables of contents are made some time after a creation.
        let is_later = |point: &Point| matches!(point, Point::TableWritten | Point::TablePlaced);
        let names = Point::ALL.iter().zip(before.iter().zip(&by_opening));
        let names = names.filter(|(point, (before, opening))| {
            **opening == 0 && visits(**point) > **before && !is_later(point)
        });
        let names: Vec<&str> = names.map(|(point, _)| point.name()).collect();
        assert!(!names.is_empty(), "{prefix}");
        for name in names {
            println!("{prefix}{name}");
        }
    };
    let before = passed();
    let source = engine.create_claim(empty_claim("source")).await;
    let source = source.expect("made");
    say(SAYS, &before);
    write(&engine, &source, &lab.path().join("staging")).await;
    let before = passed();
    let clone = CreateClaim {
        source: Some(ClaimSource::Claim(source.id)),
        ..empty_claim("clone")
    };
    engine.create_claim(clone).await.expect("cloned");
    // A part of the work follows the answer.
    engine.shutdown().await;
    say(CLONES, &before);

    // In a pool without a clone. The node of the test starts again, too, before it restores.
    let engine = open("another").await;
    let source = engine.create_claim(empty_claim("source")).await;
    let source = source.expect("made");
    write(&engine, &source, &lab.path().join("another-staging")).await;
    let taken = engine.create_snapshot("taken", source.id.as_str()).await;
    let taken = taken.expect("taken");
    engine.shutdown().await;
    drop(engine);
    let is_let_go = async || PoolDirs::open(&lab.dir("another")).is_ok();
    eventually("the pool is let go", is_let_go).await;
    let engine = open("another").await;
    let before = passed();
    let restored = CreateClaim {
        source: Some(ClaimSource::Snapshot(taken.id)),
        ..empty_claim("restored")
    };
    engine.create_claim(restored).await.expect("restored");
    engine.shutdown().await;
    say(RESTORES, &before);
}

/// The points of an empty claim, of a clone and of a restore.
fn points() -> Vec<(String, Made)> {
    let this = std::env::current_exe().expect("a path");
    let list = Command::new(this)
        .args(["--exact", LISTS, "--nocapture"])
        .output()
        .expect("it runs");
    assert!(list.status.success(), "{list:?}");
    let list = String::from_utf8(list.stdout).expect("text");
    let said = |prefix: &str, made: Made| {
        let names = list.lines().filter_map(|line| line.split_once(prefix));
        let names = names.map(|(_, name)| (name.to_owned(), made));
        let names: Vec<_> = names.collect();
        assert!(!names.is_empty(), "{prefix}: {list}");
        names
    };
    [
        said(SAYS, Made::Empty),
        said(CLONES, Made::Clone),
        said(RESTORES, Made::Restore),
    ]
    .concat()
}

/// Nothing of `node` is left but the volume `source`.
async fn only(plane: &ControlPlane, node: &str, source: Option<&str>) {
    let is_so = async || {
        let volumes = volumes(plane).await;
        let here = volumes.iter().filter(|one| one.spec.node_name == node);
        let names = here.filter_map(|one| one.metadata.name.as_deref());
        names.eq(source)
    };
    eventually(&format!("{node} has {source:?} only"), is_so).await;
}

/// The node dies at a point of the creation of a claim, a clone or a restore. It is returned, since
/// csi-provisioner may repeat a call that was answered.
async fn dies_at(
    plane: &ControlPlane,
    controller: &calls::Client,
    (name, pool): (&str, &Path),
    (point, made): &(String, Made),
) -> Process {
    let [source, taken, victim] =
        ["source", "taken", "victim"].map(|what| format!("{what}-{name}"));
    let mut process = node(plane, name, pool);
    process.ready().await;
    await_pool(controller, name).await;
    let mut kept = None;
    if *made != Made::Empty {
        ask(plane, &source, Some(name), None).await;
        let (id, _) = bound(plane, &source, Some(name)).await;
        let kubelet = kubelet(plane, name, &process).await;
        let target = calls::mount(&kubelet, &id).await;
        std::fs::write(target.join("file"), "content").expect("write");
        calls::unmount(&kubelet, &id).await;
        kept = Some(id);
    }
    let (at, of) = match made {
        Made::Empty => (Some(name), None),
        Made::Clone => (None, Some(of_claim(&source))),
        Made::Restore => {
            snapshot(plane, &taken, &source).await;
            (None, Some(of_snapshot(&taken)))
        }
    };
    process.restart_with_point(Some(point));
    process.ready().await;
    ask(plane, &victim, at, of).await;
    process.ended().await;
    delete_claim(plane, &victim).await;
    process.restart_with_point(None);
    only(plane, name, kept.as_deref()).await;
    if let Some(id) = &kept {
        let kubelet = kubelet(plane, name, &process).await;
        let target = calls::mount(&kubelet, id).await;
        let text = std::fs::read_to_string(target.join("file"));
        assert_eq!(text.expect("read"), "content", "{point}");
        calls::unmount(&kubelet, id).await;
        if *made == Made::Restore {
            delete_snapshot(plane, &taken).await;
        }
        delete_claim(plane, &source).await;
        only(plane, name, None).await;
    }
    process
}

/// Where the controller, or the sidecar, dies.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// It is called, and has made no order.
    Called,
    /// The order exists, and the node has not answered.
    Ordered,
    /// The node has answered, and the controller has not.
    Made,
    /// The controller has answered, and the sidecar has made no PersistentVolume.
    Answered,
    /// The PersistentVolume exists, and the claim is not bound.
    Saved,
}

const CUTS: [Cut; 5] = [
    Cut::Called,
    Cut::Ordered,
    Cut::Made,
    Cut::Answered,
    Cut::Saved,
];

/// Waits for an event of csi-provisioner: it is about to call.
async fn is_called(plane: &ControlPlane, claim: &str) {
    let events: Api<k8s_openapi::api::core::v1::Event> =
        Api::default_namespaced(plane.client.clone());
    let of = format!("involvedObject.name={claim},reason=Provisioning");
    let of = ListParams::default().fields(&of);
    let is_called = async || !events.list(&of).await.expect("list").items.is_empty();
    eventually("csi-provisioner is about to call", is_called).await;
}

/// The claim is deleted while it has a PersistentVolume and is not bound. The order of the
/// controller exists, and `node` is stopped.
async fn cut_unbound(
    plane: &ControlPlane,
    (manager, provisioner): (&Program, &Program),
    node: &Process,
    name: &str,
) {
    manager.signal(Signal::STOP);
    node.signal(Signal::CONT);
    let claim = claims(plane).get(name).await.expect("it is there");
    let volume = format!("pvc-{}", claim.metadata.uid.expect("the server's"));
    let is_saved = async || plane.try_kubectl(&["get", "pv", &volume]).0;
    eventually("the PersistentVolume exists", is_saved).await;
    let phase = ["get", "pvc", name, "-o=jsonpath={.status.phase}"];
    assert_eq!(plane.kubectl(&phase), "Pending");
    provisioner.kill().await;
    plane.kubectl(&["delete", "pvc", name, "--wait=false"]);
    manager.signal(Signal::CONT);
    let gone = ["wait", "--for=delete", "--timeout=60s"];
    for object in [format!("pvc/{name}"), format!("pv/{volume}")] {
        plane.kubectl(&[&gone[..], &[object.as_str()]].concat());
    }
}

async fn cut(
    plane: &ControlPlane,
    controller: &mut Process,
    (manager, provisioner): (&Program, &Program),
    node: &Process,
    cut: Cut,
) {
    let name = format!("cut-{cut:?}").to_lowercase();
    // csi-provisioner may still work on the claim of an earlier cut.
    let volume = async |phase: Option<Phase>| {
        let claim = claims(plane).get(&name).await.expect("it is there");
        let of = format!("pvc-{}", claim.metadata.uid.expect("the server's"));
        let is_so = async || {
            let volumes: Vec<Volume> = volumes(plane).await;
            let mut volumes = volumes.iter();
            volumes.any(|one| one.spec.name == of && one.phase() == phase)
        };
        eventually(&format!("the volume of {name} is {phase:?}"), is_so).await;
    };
    node.signal(Signal::STOP);
    if matches!(cut, Cut::Called) {
        controller.signal(Signal::STOP);
    }
    ask(plane, &name, Some("node-0"), None).await;
    match cut {
        Cut::Called => is_called(plane, &name).await,
        Cut::Ordered | Cut::Made | Cut::Answered | Cut::Saved => volume(None).await,
    }
    match cut {
        Cut::Saved => {
            cut_unbound(plane, (manager, provisioner), node, &name).await;
            return only(plane, "node-0", None).await;
        }
        Cut::Called | Cut::Ordered => {}
        Cut::Made => controller.signal(Signal::STOP),
        Cut::Answered => provisioner.signal(Signal::STOP),
    }
    if matches!(cut, Cut::Made | Cut::Answered) {
        node.signal(Signal::CONT);
        volume(Some(Phase::Ready)).await;
    }
    if !matches!(cut, Cut::Answered) {
        controller.kill();
    }
    delete_claim(plane, &name).await;
    node.signal(Signal::CONT);
    if matches!(cut, Cut::Answered) {
        provisioner.kill().await;
    } else {
        controller.start();
    }
    only(plane, "node-0", None).await;
}

#[tokio::test]
async fn nothing_is_left_of_a_claim_that_is_deleted_at_a_crash_point_of_its_creation() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    // Each node has a pool with its reserve.
    let lab = crate::common::Lab::try_sized(Fs::Ext4, 8 << 30);
    let Ok(lab) = lab.map_err(|reason| crate::common::skip(&reason)) else {
        return;
    };
    let points = points();
    println!("{points:?}");
    let mut controller = controller_with(&plane, &["--leak-grace=2s"]);
    define(&plane, true);
    for number in 0..=points.len() {
        register(&plane, &format!("node-{number}"));
    }
    let manager = controller_manager(&plane);
    let socket = controller.socket.to_str().expect("text").to_owned();
    let provisioner = sidecar(&plane, &socket, "csi-provisioner", &[]);
    let _snapshotter = sidecar(&plane, &socket, "csi-snapshotter", &[]);
    let _snapshots = snapshot_controller(&plane);
    let caller = client(&controller).await;
    let dies = points.iter().enumerate().map(|(index, point)| {
        let name = format!("node-{}", index + 1);
        let (pool, plane, caller) = (lab.dir(&name), &plane, &caller);
        async move { dies_at(plane, caller, (&name, &pool), point).await }
    });
    let others = join_all(dies).await;
    let node = node(&plane, "node-0", &lab.dir("node-0"));
    await_pool(&caller, "node-0").await;
    for one in CUTS {
        let programs = (&manager, &provisioner);
        cut(&plane, &mut controller, programs, &node, one).await;
    }
    // It forgets claims that it works on.
    provisioner.kill().await;
    assert_only(&plane, &BTreeSet::new()).await;
    assert_no_snapshots(&plane).await;
    drop((node, others));
    for number in 0..=points.len() {
        let left = held(&lab.dir(&format!("node-{number}"))).await;
        assert!(left.is_empty(), "node-{number}: {left:?}");
    }
}
