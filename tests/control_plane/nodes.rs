//! Nodes that are gone for good, and one that comes back all the same.

use std::fs;
use std::time::{Duration, Instant};

use baggageclaim::api::{Phase, Volume, Wanted};
use kube::ResourceExt as _;
use tonic::Code;

use crate::calls::{
    create, delete, mount, of_snapshot, of_volume, request, selected, snapshot, unmount,
};
use crate::common::{Fs, require_lab};
use crate::driver::{client, controller_with, kubelet, node};
use crate::leaks::metrics;
use crate::objects::{claim, events, node_object, persistent_on, phase};
use crate::orphans::orphans;
use crate::plane::{ControlPlane, free_port};
use crate::{await_pools, eventually, volumes};

/// What kubectl shows of a kind of ours, with single spaces.
fn table(plane: &ControlPlane, kind: &str) -> String {
    let shown = plane.kubectl(&["get", &format!("{kind}.baggageclaim.concourse-ci.org")]);
    let words: Vec<&str> = shown.split_whitespace().collect();
    words.join(" ")
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "the life of one node, in order")]
async fn a_node_that_is_gone_blocks_nothing_and_loses_nothing() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let port = free_port();
    let http = format!("--http=127.0.0.1:{port}");
    let controller = controller_with(&plane, &["--node-grace=3s", &http]);
    let counts = async |kind: &str, state: &str| {
        let line = format!("baggageclaim_cluster_{kind}{{state=\"{state}\"}} 1");
        metrics(port).await.lines().any(|found| found == line)
    };
    let _other = node(&plane, "node-1", &lab.dir("one"));
    let mut second = node(&plane, "node-2", &lab.dir("two"));
    for name in ["node-1", "node-2"] {
        node_object(&plane, name);
    }
    let mut client = client(&controller).await;
    let kubelet_two = kubelet(&plane, "node-2", &second).await;
    await_pools(&client, 2).await;
    let on_two = |name: &str| request(name, Some(selected("node-2")), None);
    let mut made = Vec::new();
    for name in ["bound", "released"] {
        let volume = claim(&plane, name);
        let (id, _) = create(&mut client, on_two(&volume)).await.expect("made");
        persistent_on(&plane, &volume, &id, name, "Delete", "node-2");
        made.push((volume, id));
    }
    let [(_, bound), (released_name, released)] = &made[..] else {
        unreachable!("two were made");
    };
    let target = mount(&kubelet_two, bound).await;
    fs::write(target.join("file"), "content").expect("write");
    unmount(&kubelet_two, bound).await;
    let taken = snapshot(&mut client, "s-1", bound).await.expect("taken");
    let stays = snapshot(&mut client, "s-2", bound).await.expect("taken");

    // The node is silent: it only delays.
    second.kill();
    phase(&plane, released_name, "Released");
    let pending = claim(&plane, "pending");
    let mut also = client.clone();
    let (late, refused) = tokio::join!(
        delete(&mut client, released),
        create(&mut also, on_two(&pending)),
    );
    assert_eq!(late.expect_err("silent").code(), Code::Aborted);
    let refused = refused.expect_err("silent");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert_eq!(volumes(&plane).await.len(), 3);

    plane.kubectl(&["delete", "node", "node-2"]);
    let deleted = Instant::now();
    let is_given_up = async || {
        let pools = plane.kubectl(&["get", "pools", "-o=jsonpath={.items[*].metadata.name}"]);
        let left = volumes(&plane).await;
        pools.trim() == "node-1" && left.len() == 1 && left[0].name_any() == *bound
    };
    eventually(
        "what was to be deleted, and what was pending, is gone",
        is_given_up,
    )
    .await;
    // `--node-grace`, and the goal.
    assert!(deleted.elapsed() <= Duration::from_secs(3 + 30));
    delete(&mut client, released)
        .await
        .expect("nothing to wait for");
    crate::calls::delete_snapshot(&mut client, &taken)
        .await
        .expect("nothing to wait for");
    plane.delete("pv", released_name);
    let told = async || {
        let said = events(&plane);
        said.split(';')
            .filter(|one| one.trim() == "bound NodeGone")
            .count()
            == 1
            && !said.contains("released")
    };
    eventually("the bound claim's event says it, once", told).await;
    // The metrics say it as long as it is so, also without the Pool.
    assert!(counts("volumes", "node_gone").await);
    assert!(!counts("volumes", "ready").await);
    // The tables say it.
    for kind in ["volumes", "snapshots"] {
        let shown = table(&plane, kind);
        assert!(shown.contains(" Lost "), "{shown}");
        assert!(
            shown.contains("node node-2, which has the data, was deleted"),
            "{shown}"
        );
    }
    for source in [of_volume(bound), of_snapshot(&stays)] {
        let clone = request("clone", None, Some(source));
        let refused = create(&mut client, clone).await.expect_err("gone");
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        let told = refused.message();
        assert!(told.contains("was deleted from the cluster"), "{told}");
    }

    // The disk is back.
    node_object(&plane, "node-2");
    second.start();
    second.ready().await;
    let is_back = async || {
        let left = volumes(&plane).await;
        left.len() == 1
            && left[0].phase() == Some(Phase::Ready)
            && orphans(&plane, "node-2").await == 2
    };
    eventually("the claim works again, the rest are orphans", is_back).await;
    let told = async || {
        let said = events(&plane);
        said.contains("bound VolumeBack;")
            && counts("volumes", "ready").await
            && counts("snapshots", "ready").await
            && table(&plane, "snapshots").contains(" Ready ")
    };
    eventually("the claim's event and the metrics say it", told).await;
    let kubelet_two = kubelet(&plane, "node-2", &second).await;
    let target = mount(&kubelet_two, bound).await;
    let text = fs::read_to_string(target.join("file")).expect("read");
    assert_eq!(text, "content");
    unmount(&kubelet_two, bound).await;
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "the life of one node, in order")]
async fn what_is_lost_with_its_node_is_ready_again_with_its_disk_only() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller_with(&plane, &["--node-grace=3s"]);
    let _other = node(&plane, "node-1", &lab.dir("one"));
    let mut second = node(&plane, "node-2", &lab.dir("two"));
    for name in ["node-1", "node-2"] {
        node_object(&plane, name);
    }
    let mut client = client(&controller).await;
    await_pools(&client, 2).await;
    let mut made = Vec::new();
    for (name, node, policy) in [
        ("here", "node-1", "Delete"),
        ("bound", "node-2", "Delete"),
        ("retained", "node-2", "Retain"),
    ] {
        let volume = claim(&plane, name);
        let asked = request(&volume, Some(selected(node)), None);
        let (id, _) = create(&mut client, asked).await.expect("made");
        persistent_on(&plane, &volume, &id, name, policy, node);
        made.push((volume, id));
    }
    let [(_, here), (_, bound), (retained_name, retained)] = &made[..] else {
        unreachable!("three were made");
    };
    let of = async |id: &str| -> Option<Volume> {
        let all = volumes(&plane).await;
        all.into_iter().find(|one| one.name_any() == id)
    };
    let is = async |id: &str, phase: Phase, is_node_gone: bool| {
        let found = of(id).await;
        found.is_some_and(|one| one.phase() == Some(phase) && one.is_node_gone() == is_node_gone)
    };
    let made_again = async |id: &str| {
        plane.kubectl(&["delete", "volume", id]);
        let is_kept = async || {
            let found = of(id).await;
            let kept = found.filter(|one| one.phase() == Some(Phase::Ready));
            kept.is_some_and(|one| one.spec.wanted == Wanted::Kept)
        };
        eventually("the object is made again", is_kept).await;
    };
    // The data stays without a PersistentVolume, and its object was made to keep it.
    made_again(retained).await;
    plane.delete("pv", retained_name);

    let lose_node = async |second: &mut crate::driver::Process| {
        second.kill();
        plane.kubectl(&["delete", "node", "node-2"]);
        for id in [bound, retained] {
            let is_lost = async || is(id, Phase::Lost, true).await;
            eventually("it is lost with its node", is_lost).await;
        }
    };
    lose_node(&mut second).await;
    // Looks for objects without data go on, and leave it. Each has ended when the next has begun.
    for _ in 0..2 {
        made_again(here).await;
    }
    assert!(is(retained, Phase::Lost, true).await);

    node_object(&plane, "node-2");
    second.start();
    for id in [bound, retained] {
        let is_back = async || is(id, Phase::Ready, false).await;
        eventually("it is back with its disk", is_back).await;
    }

    lose_node(&mut second).await;
    let mut other_disk = node(&plane, "node-2", &lab.dir("other"));
    node_object(&plane, "node-2");
    other_disk.ready().await;
    let is_lost = async || is(bound, Phase::Lost, false).await && of(retained).await.is_none();
    eventually("it is not on the other disk", is_lost).await;
    let shown = table(&plane, "volumes");
    assert!(shown.contains("is not in pool"), "{shown}");
    let told = async || events(&plane).contains("bound VolumeLost;");
    eventually("the claim's event says so", told).await;
    other_disk.kill();
    second.start();
    let is_back = async || is(bound, Phase::Ready, false).await;
    eventually("the first disk has it", is_back).await;
    let counted = async || orphans(&plane, "node-2").await == 1;
    eventually("the retained data is an orphan", counted).await;
}
