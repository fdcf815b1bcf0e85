//! A PersistentVolume that was written by hand and names the volume of another, and the same of a
//! VolumeSnapshotContent. The data stays as long as either is in use, whichever is deleted first.

use std::collections::BTreeSet;
use std::fs;

use crate::calls::{mount, unmount};
use crate::common::{Fs, require_lab};
use crate::driver::{client, controller, kubelet, node};
use crate::plane::ControlPlane;
use crate::programs::{controller_manager, sidecar, snapshot_controller};
use crate::standard::{
    ask, assert_no_snapshots, assert_only, bound, define, delete_claim, delete_snapshot, held,
    of_snapshot, ready, register, snapshot, volume_of,
};
use crate::{await_pools, eventually};

/// Makes a PersistentVolume that csi-provisioner deletes like its own, and a claim of it.
async fn write(plane: &ControlPlane, name: &str, id: &str, node: &str) {
    let driver = "baggageclaim.csi.concourse-ci.org";
    let text = format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: {name}, \
         annotations: {{pv.kubernetes.io/provisioned-by: {driver}}}}}, \
         spec: {{accessModes: [ReadWriteOnce], capacity: {{storage: 1Mi}}, \
         persistentVolumeReclaimPolicy: Delete, claimRef: {{namespace: default, name: {name}}}, \
         nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{\
         key: topology.{driver}/node, operator: In, values: [{node}]}}]}}]}}}}, \
         csi: {{driver: {driver}, volumeHandle: {id}}}}}}}\n---\n\
         {{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: {name}}}, \
         spec: {{accessModes: [ReadWriteOnce], storageClassName: '', volumeName: {name}, \
         resources: {{requests: {{storage: 1Mi}}}}}}}}\n"
    );
    plane.apply(name, &text);
    assert_eq!(bound(plane, name, None).await.0, id);
}

/// Waits until csi-provisioner could not delete a PersistentVolume, since another needs the data.
async fn is_refused(plane: &ControlPlane, volume: &str, needed_by: &str) {
    let why = format!("because PersistentVolume \"{needed_by}\" needs it");
    is_refused_because(plane, volume, &why).await;
}

/// Waits until csi-provisioner could not delete a PersistentVolume for this reason.
async fn is_refused_because(plane: &ControlPlane, volume: &str, why: &str) {
    let of = format!("involvedObject.name={volume},reason=VolumeFailedDelete");
    let get = ["get", "events", "--field-selector", &of];
    let message = [&get[..], &["-o=jsonpath={.items[*].message}"]].concat();
    let is_told = async || plane.kubectl(&message).contains(why);
    eventually(&format!("{volume}: {why}"), is_told).await;
}

#[tokio::test]
async fn the_data_stays_as_long_as_another_persistent_volume_needs_it() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    define(&plane, false);
    register(&plane, "node-1");
    let _manager = controller_manager(&plane);
    let socket = controller.socket.to_str().expect("text").to_owned();
    let _provisioner = sidecar(&plane, &socket, "csi-provisioner", &[]);
    let one = node(&plane, "node-1", &lab.dir("one"));
    await_pools(&client(&controller).await, 1).await;
    let kubelet = kubelet(&plane, "node-1", &one).await;

    ask(&plane, "first", Some("node-1"), None).await;
    let (id, _) = bound(&plane, "first", Some("node-1")).await;
    let first = volume_of(&plane, "first").await;
    let target = mount(&kubelet, &id).await;
    fs::write(target.join("file"), "content").expect("write");
    unmount(&kubelet, &id).await;
    let wanted = || {
        let get = ["get", "volume", &id, "-o=jsonpath={.spec.wanted}"];
        plane.try_kubectl(&get).1
    };
    let is_kept = async || {
        assert_ne!(wanted(), "Absent");
        let target = mount(&kubelet, &id).await;
        let text = fs::read_to_string(target.join("file")).expect("read");
        assert_eq!(text, "content");
        unmount(&kubelet, &id).await;
    };

    // The claim that the volume was made for is in use.
    write(&plane, "second", &id, "node-1").await;
    delete_claim(&plane, "second").await;
    is_refused(&plane, "second", &first).await;
    is_kept().await;
    // Its object is made again if it is lost, whichever PersistentVolume is seen first.
    plane.kubectl(&["delete", "volume", &id]);
    eventually("it has an object again", async || wanted() == "Kept").await;
    is_kept().await;

    // Only another is in use.
    write(&plane, "third", &id, "node-1").await;
    delete_claim(&plane, "first").await;
    is_refused(&plane, &first, "third").await;
    is_kept().await;

    // Nothing is.
    delete_claim(&plane, "third").await;
    assert_only(&plane, &BTreeSet::new()).await;
    // A PersistentVolume names the volume after its data is gone.
    write(&plane, "fourth", &id, "node-1").await;
    delete_claim(&plane, "fourth").await;
    assert_only(&plane, &BTreeSet::new()).await;
    // One names a node without a driver. Nothing would answer an order to that node.
    plane.apply(
        "node-2",
        "{apiVersion: v1, kind: Node, metadata: {name: node-2}}",
    );
    write(&plane, "fifth", &id, "node-2").await;
    delete_claim(&plane, "fifth").await;
    is_refused_because(&plane, "fifth", "names no node with a driver").await;
    let orders = plane.kubectl(&["get", "volumes", "-o=name"]);
    assert_eq!(orders, "", "an order that nothing answers");
    drop(one);
    let left = held(&lab.dir("one")).await;
    assert!(left.is_empty(), "{left:?}");
}

/// Makes a VolumeSnapshotContent that csi-snapshotter deletes like its own, and its VolumeSnapshot.
async fn write_content(plane: &ControlPlane, name: &str, id: &str) {
    let driver = "baggageclaim.csi.concourse-ci.org";
    let text = format!(
        "{{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshotContent, \
         metadata: {{name: {name}}}, spec: {{driver: {driver}, deletionPolicy: Delete, \
         source: {{snapshotHandle: {id}}}, \
         volumeSnapshotRef: {{namespace: default, name: {name}}}}}}}\n---\n\
         {{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, \
         metadata: {{name: {name}}}, spec: {{source: {{volumeSnapshotContentName: {name}}}}}}}\n"
    );
    plane.apply(name, &text);
    ready(plane, name).await;
}

/// Orders to delete a snapshot, and waits until csi-snapshotter could not delete it.
async fn cannot_delete(plane: &ControlPlane, snapshot: &str, content: &str) {
    plane.kubectl(&["delete", "volumesnapshot", snapshot, "--wait=false"]);
    let of = format!("involvedObject.name={content},reason=SnapshotDeleteError");
    let get = ["get", "events", "-o=name", "--field-selector", &of];
    let is_told = async || !plane.kubectl(&get).is_empty();
    eventually(&format!("the content of {snapshot} stays"), is_told).await;
}

#[tokio::test]
async fn a_snapshot_stays_as_long_as_another_content_needs_it() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    define(&plane, true);
    register(&plane, "node-1");
    let _manager = controller_manager(&plane);
    let socket = controller.socket.to_str().expect("text").to_owned();
    let _provisioner = sidecar(&plane, &socket, "csi-provisioner", &[]);
    let _snapshotter = sidecar(&plane, &socket, "csi-snapshotter", &[]);
    let _snapshots = snapshot_controller(&plane);
    let one = node(&plane, "node-1", &lab.dir("one"));
    await_pools(&client(&controller).await, 1).await;
    let kubelet = kubelet(&plane, "node-1", &one).await;

    ask(&plane, "source", Some("node-1"), None).await;
    let (source, _) = bound(&plane, "source", Some("node-1")).await;
    let target = mount(&kubelet, &source).await;
    fs::write(target.join("file"), "content").expect("write");
    unmount(&kubelet, &source).await;
    snapshot(&plane, "first", "source").await;
    let of_first = "-o=jsonpath={.status.boundVolumeSnapshotContentName}";
    let first = plane.kubectl(&["get", "volumesnapshot", "first", of_first]);
    let id = "-o=jsonpath={.status.snapshotHandle}";
    let id = plane.kubectl(&["get", "volumesnapshotcontent", &first, id]);
    let restores = async |name: &str, from: &str| {
        ask(&plane, name, None, Some(of_snapshot(from))).await;
        let (restored, _) = bound(&plane, name, None).await;
        let target = mount(&kubelet, &restored).await;
        let text = fs::read_to_string(target.join("file")).expect("read");
        assert_eq!(text, "content");
        unmount(&kubelet, &restored).await;
        delete_claim(&plane, name).await;
    };

    let is_told = |needed_by: &str| {
        let told = format!("because VolumeSnapshotContent \\\"{needed_by}\\\" needs it");
        assert!(controller.log().contains(&told), "{}", controller.tail());
    };

    // The snapshot that was taken is in use.
    write_content(&plane, "second", &id).await;
    cannot_delete(&plane, "second", "second").await;
    is_told(&first);
    restores("from-first", "first").await;

    // Only another is in use.
    write_content(&plane, "third", &id).await;
    cannot_delete(&plane, "first", &first).await;
    is_told("third");
    restores("from-third", "third").await;

    // What the message says to do: only the other content goes.
    let retain = "{\"spec\": {\"deletionPolicy\": \"Retain\"}}";
    let patch = ["patch", "volumesnapshotcontent", &first, "--type=merge"];
    plane.kubectl(&[&patch[..], &["--patch", retain]].concat());
    let get = ["get", "volumesnapshotcontent", &first];
    let is_gone = async || !plane.try_kubectl(&get).0;
    eventually("the first content goes", is_gone).await;
    restores("from-third-again", "third").await;

    // Nothing is.
    delete_snapshot(&plane, "third").await;
    assert_no_snapshots(&plane).await;
    delete_claim(&plane, "source").await;
    assert_only(&plane, &BTreeSet::new()).await;
    drop(one);
    let left = held(&lab.dir("one")).await;
    assert!(left.is_empty(), "{left:?}");
}
