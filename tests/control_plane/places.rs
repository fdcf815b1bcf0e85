//! Where empty claims are made, a node without room, a node that has not got a volume, and a claim
//! that its ttl deletes.
//!
//! All run with a real API server, and drivers on small pools.

use std::collections::BTreeMap;
use std::fs;

use baggageclaim::api::Phase;
use futures_util::future::join_all;
use tonic::Code;

use crate::calls::{
    Client, create, delete, mount, of_volume, request, selected, try_mount, unmount,
};
use crate::common::{Fs, Lab, require_lab};
use crate::driver::{client, controller, kubelet, node, node_with};
use crate::objects::{claim, events, node_object, persistent, persistent_on, phase};
use crate::plane::ControlPlane;
use crate::standard::held;
use crate::{await_pools, eventually, volumes};

fn ready(plane: &ControlPlane, node: &str, ready: &str) {
    let patch = format!(r#"{{"status":{{"conditions":[{{"type":"Ready","status":"{ready}"}}]}}}}"#);
    let patch = format!("--patch={patch}");
    plane.kubectl(&[
        "patch",
        "node",
        node,
        "--type=merge",
        "--subresource=status",
        &patch,
    ]);
}

fn cordon(plane: &ControlPlane, node: &str, cordoned: bool) {
    let patch = format!(r#"--patch={{"spec":{{"unschedulable":{cordoned}}}}}"#);
    plane.kubectl(&["patch", "node", node, "--type=merge", &patch]);
}

/// How many of `count` claims for any node each node gets.
async fn spread(client: &Client, name: &str, count: usize) -> BTreeMap<String, usize> {
    let make = async |number: usize| {
        let asked = request(&format!("{name}-{number}"), None, None);
        create(&mut client.clone(), asked).await.expect("made").1
    };
    let mut nodes = BTreeMap::new();
    for node in join_all((0..count).map(make)).await {
        *nodes.entry(node).or_default() += 1;
    }
    nodes
}

/// The nodes' pools are on one disk, so all have equal room.
#[tokio::test]
async fn a_claim_for_any_node_goes_where_its_pod_can_run_and_many_spread() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let nodes = ["node-1", "node-2", "node-3", "node-4"];
    // The fourth has a pool and no Node object.
    for name in &nodes[..3] {
        node_object(&plane, name);
        ready(&plane, name, "True");
    }
    cordon(&plane, "node-1", true);
    ready(&plane, "node-2", "Unknown");
    let controller = controller(&plane);
    let _drivers = nodes.map(|name| node(&plane, name, &lab.dir(name)));
    let client = client(&controller).await;
    await_pools(&client, 4).await;
    let made = spread(&client, "one", 12).await;
    assert_eq!(made, BTreeMap::from([("node-3".to_owned(), 12)]));

    cordon(&plane, "node-1", false);
    ready(&plane, "node-2", "True");
    let made = spread(&client, "three", 30).await;
    assert!(
        made.len() == 3 && made.values().all(|count| *count >= 3),
        "{made:?}"
    );
    assert!(!made.contains_key("node-4"), "{made:?}");

    // No node takes pods now. One may, later.
    for name in &nodes[..3] {
        cordon(&plane, name, true);
    }
    assert_eq!(spread(&client, "none", 1).await.len(), 1);
}

#[tokio::test]
async fn a_full_node_refuses_an_empty_claim_and_keeps_nothing_of_it() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let small = match Lab::try_sized(Fs::Ext4, 128 << 20) {
        Ok(lab) => lab,
        Err(reason) => return crate::common::skip(&reason),
    };
    let controller = controller(&plane);
    let mut one = node(&plane, "node-1", &small.dir("pool"));
    let mut client = client(&controller).await;
    await_pools(&client, 1).await;
    let shows = async |words: &str| {
        eventually(words, async || {
            let pools = plane.kubectl(&["get", "pools"]);
            pools
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .contains(words)
        })
        .await;
    };
    shows("overlay Ready").await;
    crate::common::disk::fill(&small.path().join("filler"));
    let asked = request("pvc-1", Some(selected("node-1")), None);
    let full = create(&mut client, asked.clone()).await.expect_err("full");
    assert_eq!(full.code(), Code::ResourceExhausted, "{full}");
    assert!(
        full.message()
            .starts_with("node node-1: the pool has no room left"),
        "{full}"
    );
    assert!(volumes(&plane).await.is_empty());
    // Reported once a minute, and at the start.
    one.kill();
    one.start();
    shows("overlay Full").await;
    shows("too little can be written").await;
    fs::remove_file(small.path().join("filler")).expect("space again");
    // Else it may be there again after the repair: the journal does not have its end yet.
    crate::common::disk::sync(&small.path());
    one.ready().await;
    create(&mut client, asked).await.expect("there is space");

    // Whether it takes changes is reported at once.
    small.disk_fails();
    shows("overlay NotReady").await;
    shows("change something in the pool").await;
    // The disk is repaired, and the driver starts again.
    one.kill();
    small.repair();
    one.start();
    one.ready().await;
    shows("overlay Ready").await;
}

/// As for a PersistentVolume that was written by hand, and says another node.
#[tokio::test]
async fn a_node_refuses_a_volume_of_another_node_and_keeps_nothing_of_it() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let one = node(&plane, "node-1", &lab.dir("one"));
    let two = node(&plane, "node-2", &lab.dir("two"));
    let mut client = client(&controller).await;
    await_pools(&client, 2).await;
    let asked = request("pvc-1", Some(selected("node-1")), None);
    let (id, _) = create(&mut client, asked).await.expect("made");
    persistent_on(&plane, "by-hand", &id, "by-hand", "Retain", "node-2");
    let kubelet_two = kubelet(&plane, "node-2", &two).await;
    let refused = try_mount(&kubelet_two, &id).await.expect_err("elsewhere");
    assert_eq!(refused.code(), Code::NotFound, "{refused}");
    let told = "in the pool of this node: its PersistentVolume names another node's volume";
    assert!(refused.message().contains(told), "{refused}");
    // It goes on where it is.
    let kubelet_one = kubelet(&plane, "node-1", &one).await;
    let target = mount(&kubelet_one, &id).await;
    fs::write(target.join("file"), "content").expect("write");
    unmount(&kubelet_one, &id).await;
    drop(two);
    let left = held(&lab.dir("two")).await;
    assert!(left.is_empty(), "{left:?}");
    plane.delete("pv", "by-hand");
    delete(&mut client, &id).await.expect("deleted");
}

#[tokio::test]
async fn a_claim_that_its_ttl_deleted_is_lost_at_once() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let _one = node_with(&plane, "node-1", &lab.dir("one"), &["--reap-interval=1s"]);
    let mut client = client(&controller).await;
    await_pools(&client, 1).await;
    let name = claim(&plane, "short");
    let mut asked = request(&name, None, None);
    asked.mutable_parameters = [("ttl".to_owned(), "10s".to_owned())].into();
    let (id, _) = create(&mut client, asked).await.expect("made");
    persistent(&plane, &name, &id, "short", "Delete");
    eventually("the object says it", async || {
        let volumes = volumes(&plane).await;
        volumes.len() == 1 && volumes[0].phase() == Some(Phase::Lost)
    })
    .await;
    eventually("the claim's event says it", async || {
        events(&plane).contains("short VolumeLost;")
    })
    .await;
    let clone = request("clone", None, Some(of_volume(&id)));
    let refused = create(&mut client, clone).await.expect_err("lost");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    phase(&plane, &name, "Released");
    delete(&mut client, &id).await.expect("nothing is left");
    assert!(volumes(&plane).await.is_empty());
}
