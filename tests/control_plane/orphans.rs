//! Objects and definitions that were deleted: what PersistentVolumes and snapshot contents name
//! gets its objects again, with all data. Nothing is made again empty.

use std::fs;

use baggageclaim::api::{Phase, Pool, PoolSpec, Snapshot, Volume, Wanted};
use baggageclaim::engine::claims::{claim_id, snapshot_id};
use baggageclaim::proto::csi::v1 as csi;
use csi::group_controller_client::GroupControllerClient;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tonic::Code;

use crate::calls::{create, delete, mount, of_snapshot, request, snapshot, unmount};
use crate::common::{Fs, require_lab};
use crate::driver::{client, controller, kubelet, node};
use crate::objects::{claim, content, define_contents, persistent, phase};
use crate::plane::ControlPlane;
use crate::{await_pools, eventually, volumes};

async fn snapshots(plane: &ControlPlane) -> Vec<Snapshot> {
    let api: Api<Snapshot> = Api::all(plane.client.clone());
    api.list(&ListParams::default()).await.expect("list").items
}

/// How many orphans the node counts.
pub(crate) async fn orphans(plane: &ControlPlane, node: &str) -> i64 {
    let pool: Api<Pool> = Api::all(plane.client.clone());
    let pool = pool.get_opt(node).await.expect("get");
    let status = pool.and_then(|pool| pool.status);
    status.map_or(-1, |status| status.orphans.count)
}

fn is_kept(volume: &Volume, id: &str) -> bool {
    volume.name_any() == id
        && volume.spec.wanted == Wanted::Kept
        && volume.phase() == Some(Phase::Ready)
}

async fn group(socket: &std::path::Path, name: &str, of: &str) -> (String, String) {
    let mut client = GroupControllerClient::new(crate::common::driver::channel(socket).await);
    let request = csi::CreateVolumeGroupSnapshotRequest {
        name: name.to_owned(),
        source_volume_ids: vec![of.to_owned()],
        ..Default::default()
    };
    let group = client.create_volume_group_snapshot(request).await;
    let group = group.expect("taken").into_inner().group_snapshot;
    let group = group.expect("required");
    let member = group.snapshots[0].snapshot_id.clone();
    (group.group_snapshot_id, member)
}

#[tokio::test]
async fn deleted_objects_and_definitions_are_made_again_for_what_is_named() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let one = node(&plane, "node-1", &lab.dir("one"));
    let mut client = client(&controller).await;
    let kubelet = kubelet(&plane, "node-1", &one).await;
    await_pools(&client, 1).await;
    define_contents(&plane);

    let name = claim(&plane, "bound");
    let mut asked = request(&name, None, None);
    asked.mutable_parameters = [("ttl".to_owned(), "7d".to_owned())].into();
    let (bound, _) = create(&mut client, asked.clone()).await.expect("made");
    persistent(&plane, &name, &bound, "bound", "Delete");
    let target = mount(&kubelet, &bound).await;
    fs::write(target.join("file"), "content").expect("write");
    unmount(&kubelet, &bound).await;
    let taken = snapshot(&mut client, "s-1", &bound).await.expect("taken");
    content(&plane, false, "content-1", &taken);
    let unnamed = snapshot(&mut client, "s-2", &bound).await.expect("taken");
    let (of_group, member) = group(&controller.socket, "g-1", &bound).await;
    content(&plane, true, "content-2", &of_group);
    let other = create(&mut client, request("pvc-unnamed", None, None)).await;
    let (other, _) = other.expect("made");

    // The definitions go with all objects, and come back empty.
    for kind in ["volumes", "snapshots", "pools"] {
        let name = format!("{kind}.baggageclaim.concourse-ci.org");
        plane.kubectl(&["delete", "crd", &name]);
    }
    plane.define();
    let is_back = async || {
        let volumes = volumes(&plane).await;
        let snapshots = snapshots(&plane).await;
        let are_ready = snapshots
            .iter()
            .all(|one| one.phase() == Some(Phase::Ready));
        volumes.len() == 1 && is_kept(&volumes[0], &bound) && snapshots.len() == 2 && are_ready
    };
    eventually("what is named has its objects again", is_back).await;
    let kept = volumes(&plane).await;
    let status = kept[0].status.as_ref().expect("known");
    assert_eq!(status.mutable.ttl_seconds, Some(7 * 24 * 3600));
    let counted = async || orphans(&plane, "node-1").await == 2;
    eventually("the rest is counted as orphans", counted).await;

    // A repeated request finds it, and all works on.
    let again = create(&mut client, asked).await.expect("it is there");
    assert_eq!(again.0, bound);
    for (name, source) in [("restored", &taken), ("of-group", &member)] {
        let restored = request(name, None, Some(of_snapshot(source)));
        // The controller finds a member of a group by its watch, which may be late.
        let is_restored = async || create(&mut client.clone(), restored.clone()).await.is_ok();
        eventually("the snapshot is found", is_restored).await;
        let (restored, _) = create(&mut client, restored).await.expect("restored");
        let target = mount(&kubelet, &restored).await;
        let text = fs::read_to_string(target.join("file")).expect("read");
        assert_eq!(text, "content", "{name}");
        unmount(&kubelet, &restored).await;
        delete(&mut client, &restored).await.expect("deleted");
    }
    // A snapshot whose object is lost is deleted all the same.
    crate::calls::delete_snapshot(&mut client, &unnamed)
        .await
        .expect("deleted");
    let counted = async || orphans(&plane, "node-1").await == 1;
    eventually("only the unnamed volume is an orphan", counted).await;
    phase(&plane, &name, "Released");
    delete(&mut client, &bound).await.expect("deleted");
    // Without a PersistentVolume, nothing says that the orphan may go.
    delete(&mut client, &other).await.expect("nothing to do");
    assert_eq!(orphans(&plane, "node-1").await, 1);
}

#[tokio::test]
async fn what_was_ready_is_never_made_again_on_another_disk() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let mut one = node(&plane, "node-1", &lab.dir("one"));
    let mut client = client(&controller).await;
    await_pools(&client, 1).await;
    let name = claim(&plane, "bound");
    let asked = request(&name, None, None);
    let (bound, _) = create(&mut client, asked.clone()).await.expect("made");
    persistent(&plane, &name, &bound, "bound", "Delete");

    // Both the object and the disk are gone.
    one.kill();
    plane.kubectl(&["delete", "volumes", "--all"]);
    let mut other = node(&plane, "node-1", &lab.dir("other"));
    other.ready().await;
    let is_kept_only = async || {
        // A provisioner with a late watch asks again.
        let refused = create(&mut client.clone(), asked.clone()).await;
        let refused = refused.expect_err("it is lost");
        refused.code() == Code::FailedPrecondition
    };
    eventually("the claim is lost", is_kept_only).await;
    let told = async || {
        let said = plane.kubectl(&["get", "events", "-o=jsonpath={.items[*].reason}"]);
        said.split_whitespace()
            .filter(|one| *one == "VolumeLost")
            .count()
            == 1
    };
    eventually("an event says so", told).await;
    other.kill();
    one.start();
    let is_back = async || {
        let volumes = volumes(&plane).await;
        volumes.len() == 1 && is_kept(&volumes[0], &bound)
    };
    eventually("the disk is back", is_back).await;
    let (again, _) = create(&mut client, asked).await.expect("it is there");
    assert_eq!(again, bound);
}

/// A `Pool` whose node reports snapshots for clones: first one that the API server refuses as an
/// object, and then `count` others.
async fn hostile(plane: &ControlPlane, name: &str, count: usize) {
    let too_long = format!("for-clone/{}", "x".repeat(200));
    let clone = |number: usize| format!("for-clone/{}", claim_id(&format!("{name}-{number}")));
    let names = std::iter::once(too_long).chain((0..count).map(clone));
    let orphan = |name: String| {
        let id = snapshot_id(&name);
        json!({ "id": id, "name": name, "sources": ["vol-1"], "members": [id], "group": false })
    };
    let snapshots: Vec<_> = names.map(orphan).collect();
    let pools: Api<Pool> = Api::all(plane.client.clone());
    let post = PostParams::default();
    let pool = Pool::new(name, PoolSpec {});
    pools.create(&post, &pool).await.expect("a Pool");
    let status = json!({ "status": {
        "pool": name, "topology": {}, "bytes": 1, "available": 1,
        "orphans": { "count": snapshots.len(), "volumes": [], "snapshots": snapshots },
    } });
    let (params, patch) = (PatchParams::default(), Patch::Merge(status));
    let done = pools.patch_status(name, &params, &patch).await;
    done.expect("a status");
}

#[tokio::test]
async fn what_a_hostile_node_reports_hinders_no_other_and_is_limited() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = controller(&plane);
    let _one = node(&plane, "node-1", &lab.dir("one"));
    let mut client = client(&controller).await;
    await_pools(&client, 1).await;
    define_contents(&plane);
    let name = claim(&plane, "bound");
    let made = create(&mut client, request(&name, None, None)).await;
    let (bound, _) = made.expect("made");
    persistent(&plane, &name, &bound, "bound", "Delete");
    let taken = snapshot(&mut client, "s-1", &bound).await.expect("taken");
    content(&plane, false, "content-1", &taken);
    // The controller looks at the nodes in any order: most of these come before the honest one.
    hostile(&plane, "hostile-0", 150).await;
    for number in 1..8 {
        hostile(&plane, &format!("hostile-{number}"), 0).await;
    }
    let orders = async || {
        let all = snapshots(&plane).await;
        let of_hostile = |one: &&Snapshot| one.spec.node_name == "hostile-0";
        all.iter().filter(of_hostile).count()
    };
    eventually("its snapshots are ordered to be deleted", async || {
        orders().await == 100
    })
    .await;

    plane.kubectl(&["delete", "volume", &bound]);
    plane.kubectl(&["delete", "snapshots.baggageclaim.concourse-ci.org", &taken]);
    let is_back = async || {
        let snapshots = snapshots(&plane).await;
        let is_ready = |one: &Snapshot| one.phase() == Some(Phase::Ready);
        let mut snapshots = snapshots.iter();
        let snapshot = snapshots.any(|one| one.name_any() == taken && is_ready(one));
        snapshot && volumes(&plane).await.iter().any(|one| is_kept(one, &bound))
    };
    eventually("the honest node's data has its objects again", is_back).await;
    assert_eq!(orders().await, 100);
}
