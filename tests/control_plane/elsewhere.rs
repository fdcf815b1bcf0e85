//! Clones and restores on another node than their source's (`cloneElsewhere`): the content comes
//! from the source's node, for a volume that the controller ordered, and for nothing else.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baggageclaim::api::{
    Fetch, Mutable, Parameters, Phase, Pool, PoolPeer, PoolSpec, PoolStatus, Snapshot, Volume,
    VolumeSpec, Wanted,
};
use baggageclaim::kubelet_double::Kubelet;
use baggageclaim::link::{Key, connect};
use baggageclaim::proto::csi::v1 as csi;
use baggageclaim::proto::peer::v1 as wire;
use csi::volume_content_source::Type;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use rustix::process::Signal;
use serde_json::json;
use tonic::Code;
use wire::get_artifact_response::State;
use wire::peer_client::PeerClient;

use crate::calls::{
    Client, create, delete, delete_snapshot, mount, of_snapshot, of_volume, request, selected,
    snapshot, unmount,
};
use crate::common::{Fs, Lab, require_lab, skip};
use crate::driver::{Process, client, controller, controller_with, kubelet, node, node_with};
use crate::objects::claim;
use crate::peers::{knows, nodes, peer};
use crate::plane::{ControlPlane, free_port};
use crate::{await_pools, eventually, volumes};

/// How a node is started: the cluster, its name and its pool.
type Start = fn(&ControlPlane, &str, &Path) -> Process;

/// Two nodes, a controller that knows their pools, and a volume with content on node 1: the source
/// of the clones. The fields are dropped in their order: the processes before what they use.
struct Cluster {
    client: Client,
    kubelet_one: Kubelet,
    two: Process,
    one: Process,
    controller: Process,
    source: String,
    pools: [PathBuf; 2],
    _lab: Lab,
    plane: ControlPlane,
}

impl Cluster {
    /// Starts it. `bytes`: how much of the content cannot be compressed. `None`: this machine
    /// cannot, which was reported.
    async fn start(flags: &[&str], nodes_of: [Start; 2], bytes: usize) -> Option<Self> {
        let plane = ControlPlane::start().await?;
        let lab = Lab::try_new(Fs::Ext4).map_err(|why| skip(&why)).ok()?;
        nodes(&plane, 2);
        let controller = controller_with(&plane, flags);
        let pools = [lab.dir("one"), lab.dir("two")];
        let one = nodes_of[0](&plane, "node-1", &pools[0]);
        let two = nodes_of[1](&plane, "node-2", &pools[1]);
        let mut client = client(&controller).await;
        let kubelet_one = kubelet(&plane, "node-1", &one).await;
        await_pools(&client, 2).await;
        let source = source(&mut client, &kubelet_one, bytes).await;
        Some(Self {
            client,
            kubelet_one,
            two,
            one,
            controller,
            source,
            pools,
            _lab: lab,
            plane,
        })
    }
}

/// A request of a class with `cloneElsewhere`, for a pod on node 2.
fn elsewhere(name: &str, source: Type) -> csi::CreateVolumeRequest {
    let mut request = request(name, Some(selected("node-2")), Some(source));
    request
        .parameters
        .insert("cloneElsewhere".to_owned(), "true".to_owned());
    request
}

/// Creates a volume as csi-provisioner does: ABORTED is repeated.
async fn provision(client: &mut Client, request: csi::CreateVolumeRequest) -> (String, String) {
    let made = async {
        loop {
            match create(client, request.clone()).await {
                Err(status) if status.code() == Code::Aborted => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                made => return made.expect("made"),
            }
        }
    };
    let made = tokio::time::timeout(Duration::from_secs(120), made).await;
    made.expect("never made")
}

async fn snapshots(plane: &ControlPlane) -> Vec<Snapshot> {
    let api: Api<Snapshot> = Api::all(plane.client.clone());
    api.list(&ListParams::default()).await.expect("list").items
}

/// Waits until only the snapshots that a person took are there.
async fn no_more_snapshots(plane: &ControlPlane, left: usize) {
    eventually("the snapshot for the clone is deleted", async || {
        snapshots(plane).await.len() == left
    })
    .await;
}

/// Whether no layer and no incoming content is in a pool.
fn is_empty(pool: &Path) -> bool {
    let count = |name: &str| fs::read_dir(pool.join(name)).map_or(0, Iterator::count);
    count("layers") == 0 && count("incoming") == 0
}

/// A volume on node 1 with some content.
async fn source(client: &mut Client, kubelet: &Kubelet, bytes: usize) -> String {
    let asked = request("pvc-source", Some(selected("node-1")), None);
    let (id, at) = create(client, asked).await.expect("made");
    assert_eq!(at, "node-1");
    let target = mount(kubelet, &id).await;
    fs::create_dir(target.join("dir")).expect("mkdir");
    fs::write(target.join("dir/text"), "first").expect("write");
    fs::set_permissions(target.join("dir/text"), fs::Permissions::from_mode(0o640)).expect("mode");
    std::os::unix::fs::symlink("dir/text", target.join("link")).expect("symlink");
    // No two blocks are the same, and they do not become shorter.
    let mut state = 1_u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_be_bytes()[0]
    })
    .take(bytes)
    .collect();
    fs::write(target.join("noise"), noise).expect("write");
    unmount(kubelet, &id).await;
    id
}

fn assert_content(target: &Path, text: &str) {
    let read = fs::read_to_string(target.join("link")).expect("read");
    assert_eq!(read, text);
    let mode = fs::metadata(target.join("dir/text")).expect("stat");
    assert_eq!(mode.permissions().mode() & 0o777, 0o640);
}

#[tokio::test]
async fn a_clone_elsewhere_has_the_content_and_is_a_volume_of_its_own() {
    let Some(mut cluster) = Cluster::start(&[], [peer, peer], 3 << 20).await else {
        return;
    };
    let Cluster {
        client,
        kubelet_one,
        two,
        controller,
        source: id,
        pools,
        plane,
        ..
    } = &mut cluster;
    let kubelet_two = kubelet(plane, "node-2", two).await;
    knows(&pools[0], 1).await;
    knows(&pools[1], 1).await;

    // Another class: the clone is where its source is, so it cannot be here.
    let strict = request("pvc-strict", Some(selected("node-2")), Some(of_volume(id)));
    let refused = create(client, strict).await.expect_err("strict");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");

    let asked = elsewhere("pvc-clone", of_volume(id));
    let (clone, at) = provision(client, asked.clone()).await;
    assert_eq!(at, "node-2");
    let again = create(client, asked).await.expect("it is there");
    assert_eq!(again, (clone.clone(), at));
    no_more_snapshots(plane, 0).await;

    let (there, here) = (
        mount(&kubelet_two, &clone).await,
        mount(kubelet_one, id).await,
    );
    assert_content(&there, "first");
    let noise = fs::read(there.join("noise")).expect("read");
    assert!(noise == fs::read(here.join("noise")).expect("read"));
    fs::write(there.join("dir/text"), "clone").expect("write");
    fs::write(here.join("dir/text"), "source").expect("write");
    assert_content(&there, "clone");
    assert_content(&here, "source");
    unmount(&kubelet_two, &clone).await;
    unmount(kubelet_one, id).await;

    // A clone of it on its own node, and one of a snapshot that stays.
    let mut local = elsewhere("pvc-local", of_volume(id));
    local.accessibility_requirements = Some(selected("node-1"));
    let (local, at) = create(client, local).await.expect("made");
    assert_eq!(at, "node-1");
    let taken = snapshot(client, "snapshot-1", id).await.expect("taken");
    let restored = elsewhere("pvc-restored", of_snapshot(&taken));
    let (restored, _) = provision(client, restored).await;
    let target = mount(&kubelet_two, &restored).await;
    assert_content(&target, "source");
    unmount(&kubelet_two, &restored).await;
    assert_eq!(snapshots(plane).await.len(), 1, "{}", controller.tail());

    // An empty source.
    let empty = request("pvc-empty", Some(selected("node-1")), None);
    let (empty, _) = create(client, empty).await.expect("made");
    let of_empty = elsewhere("pvc-of-empty", of_volume(&empty));
    let (of_empty, _) = provision(client, of_empty).await;
    let target = mount(&kubelet_two, &of_empty).await;
    assert_eq!(fs::read_dir(&target).expect("read").count(), 0);
    unmount(&kubelet_two, &of_empty).await;

    // Its source may go, and then nothing is left.
    for volume in [&*id, &local, &empty] {
        delete(client, volume).await.expect("deleted");
    }
    delete_snapshot(client, &taken).await.expect("deleted");
    let target = mount(&kubelet_two, &clone).await;
    assert_content(&target, "clone");
    unmount(&kubelet_two, &clone).await;
    for volume in [&clone, &restored, &of_empty] {
        delete(client, volume).await.expect("deleted");
    }
    eventually("nothing is left", async || {
        let objects = volumes(plane).await.len() + snapshots(plane).await.len();
        objects == 0 && pools.iter().all(|pool| is_empty(pool))
    })
    .await;
}

#[tokio::test]
async fn a_node_that_is_no_peer_is_told_before_anything_is_made() {
    let Some(mut cluster) = Cluster::start(&[], [peer, node], 1).await else {
        return;
    };
    let asked = elsewhere("pvc-clone", of_volume(&cluster.source));
    let refused = create(&mut cluster.client, asked).await;
    let refused = refused.expect_err("no peer");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(
        refused.message().contains("node node-2 is no peer"),
        "{refused}"
    );
    assert_eq!(volumes(&cluster.plane).await.len(), 1);
    assert_eq!(snapshots(&cluster.plane).await.len(), 0);
}

/// A node whose content leaves slowly: 1 MiB in a second. Its pool counts as nearly full, as that
/// of a node that one moves away from.
fn slow(plane: &ControlPlane, name: &str, pool: &Path) -> Process {
    let listen = format!("--peer-listen=127.0.0.1:{}", free_port());
    let full = ["--low-watermark=0", "--high-watermark=1"];
    let arguments = [&listen, "--peer-bandwidth=1Mi", full[0], full[1]];
    node_with(plane, name, pool, &arguments)
}

async fn is_fetching(plane: &ControlPlane) {
    eventually("content comes, and the object says so", async || {
        volumes(plane).await.iter().any(|volume| {
            let error = volume
                .status
                .as_ref()
                .and_then(|status| status.error.as_ref());
            volume.phase() == Some(Phase::Fetching)
                && error.is_some_and(|error| error.message.contains("fetched from node node-1"))
        })
    })
    .await;
}

#[tokio::test]
async fn a_clone_goes_on_after_each_process_was_killed() {
    let flags = ["--leak-grace=2s"];
    let Some(mut cluster) = Cluster::start(&flags, [slow, peer], 8 << 20).await else {
        return;
    };
    let Cluster {
        client: calls,
        two,
        one,
        controller,
        source: id,
        pools,
        plane,
        ..
    } = &mut cluster;
    knows(&pools[1], 1).await;

    let asked = elsewhere("pvc-clone", of_volume(id));
    let mut again = calls.clone();
    let first = asked.clone();
    let called = tokio::spawn(async move { create(&mut again, first).await });
    is_fetching(plane).await;
    two.kill();
    two.start();
    is_fetching(plane).await;
    controller.kill();
    called
        .await
        .expect("it ran")
        .expect_err("the controller was killed");
    controller.start();
    one.kill();
    one.start();
    let mut calls = client(controller).await;
    await_pools(&calls, 2).await;
    let (clone, at) = provision(&mut calls, asked).await;
    assert_eq!(at, "node-2", "{}", two.tail());
    let kubelet_two = kubelet(plane, "node-2", two).await;
    let target = mount(&kubelet_two, &clone).await;
    assert_content(&target, "first");
    unmount(&kubelet_two, &clone).await;
    no_more_snapshots(plane, 0).await;
    for volume in [&clone, id] {
        delete(&mut calls, volume).await.expect("deleted");
    }
    eventually("nothing is left", async || {
        volumes(plane).await.is_empty() && pools.iter().all(|pool| is_empty(pool))
    })
    .await;
}

#[tokio::test]
async fn nothing_is_left_of_a_clone_that_is_given_up() {
    let flags = ["--leak-grace=2s"];
    let Some(mut cluster) = Cluster::start(&flags, [slow, peer], 8 << 20).await else {
        return;
    };
    let Cluster {
        client: calls,
        two,
        one,
        controller,
        source: id,
        pools,
        plane,
        ..
    } = &mut cluster;
    knows(&pools[1], 1).await;

    // Killed when the snapshot was ordered: nothing asks for the volume again.
    one.signal(Signal::STOP);
    let begin = |name: String| {
        let (mut again, asked) = (calls.clone(), elsewhere(&name, of_volume(id)));
        tokio::spawn(async move { create(&mut again, asked).await })
    };
    let called = begin("pvc-given-up".to_owned());
    eventually("the snapshot is ordered", async || {
        snapshots(plane).await.len() == 1
    })
    .await;
    controller.kill();
    called
        .await
        .expect("it ran")
        .expect_err("the controller was killed");
    one.signal(Signal::CONT);
    controller.start();
    no_more_snapshots(plane, 0).await;
    assert_eq!(volumes(plane).await.len(), 1, "only the source");

    // Its claim is deleted while content comes.
    let calls = client(controller).await;
    await_pools(&calls, 2).await;
    let name = claim(plane, "given-up");
    let (mut again, asked) = (calls.clone(), elsewhere(&name, of_volume(id)));
    let called = tokio::spawn(async move { create(&mut again, asked).await });
    is_fetching(plane).await;
    controller.kill();
    called
        .await
        .expect("it ran")
        .expect_err("the controller was killed");
    plane.delete("pvc", "given-up");
    controller.start();
    eventually("only the source is left", async || {
        volumes(plane).await.len() == 1 && snapshots(plane).await.is_empty() && is_empty(&pools[1])
    })
    .await;
    assert!(!two.log().contains("received a volume"), "{}", two.tail());
}

/// A question about a snapshot, by a program that has this key.
async fn ask(to: &Pool, key: &Key, volume: &str, snapshot: &str) -> Result<State, Code> {
    let peer = to.status.as_ref().and_then(|status| status.peer.clone());
    let peer = peer.expect("it is published");
    let pinned = peer.key.parse().expect("a key");
    let channel = connect(key, pinned, peer.address).expect("TLS");
    let ask = Some(wire::Ask {
        clone: Some(wire::Clone {
            volume: volume.to_owned(),
            snapshot: snapshot.to_owned(),
        }),
        ..wire::Ask::default()
    });
    let request = wire::GetArtifactRequest { ask };
    let answer = PeerClient::new(channel).get_artifact(request).await;
    answer
        .map(|answer| answer.into_inner().state())
        .map_err(|status| status.code())
}

/// Publishes the Pool of a node that is a program of this test, with this key.
async fn publish(plane: &ControlPlane, name: &str, key: &Key) {
    let pools: Api<Pool> = Api::all(plane.client.clone());
    let pool = Pool::new(name, PoolSpec {});
    pools
        .create(&PostParams::default(), &pool)
        .await
        .expect("made");
    let status = PoolStatus {
        peer: Some(PoolPeer {
            address: "127.0.0.1:1".to_owned(),
            key: key.name().to_string(),
            catalog: false,
            away: Vec::new(),
        }),
        ..PoolStatus::default()
    };
    let patch = Patch::Merge(json!({ "status": status }));
    let params = PatchParams::default();
    let written = pools.patch_status(name, &params, &patch);
    written.await.expect("written");
}

/// An order for a volume of node 2, made of a snapshot of node 1.
fn order(id: &str, node: &str, snapshot: &str) -> Volume {
    let spec = VolumeSpec {
        name: id.to_owned(),
        node_name: node.to_owned(),
        parameters: Parameters::default(),
        made_with: Mutable::default(),
        source: None,
        fetch: Some(Fetch {
            node_name: "node-1".to_owned(),
            snapshot: snapshot.to_owned(),
        }),
        wanted: Wanted::Present,
        capacity: 0,
        limit: 0,
        mutable: Mutable::default(),
    };
    Volume::new(id, spec)
}

#[tokio::test]
async fn only_the_node_of_an_ordered_clone_gets_the_snapshot_until_it_is_made() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    nodes(&plane, 3);
    let controller = controller(&plane);
    let pool = lab.dir("one");
    let one = peer(&plane, "node-1", &pool);
    let mut client = client(&controller).await;
    let kubelet = kubelet(&plane, "node-1", &one).await;
    await_pools(&client, 1).await;
    let id = source(&mut client, &kubelet, 1).await;
    let taken = snapshot(&mut client, "snapshot-1", &id)
        .await
        .expect("taken");
    let other = snapshot(&mut client, "snapshot-2", &id)
        .await
        .expect("taken");

    let keys = [
        Key::generate().expect("a key"),
        Key::generate().expect("a key"),
    ];
    publish(&plane, "node-2", &keys[0]).await;
    publish(&plane, "node-3", &keys[1]).await;
    knows(&pool, 2).await;
    let pools: Api<Pool> = Api::all(plane.client.clone());
    let to = pools.get("node-1").await.expect("its Pool");
    let all: Api<Volume> = Api::all(plane.client.clone());
    let right = order("vol-right", "node-2", &taken);
    all.create(&PostParams::default(), &right)
        .await
        .expect("made");

    eventually("the node gets what it is to make a volume of", async || {
        // Until the table of contents is made it is coming.
        ask(&to, &keys[0], "vol-right", &taken).await == Ok(State::Here)
    })
    .await;
    let unknown = Key::generate().expect("a key");
    for (key, volume, snapshot, why) in [
        (&keys[1], "vol-right", &*taken, "another node"),
        (&keys[0], "vol-right", &*other, "another snapshot"),
        (&keys[0], "vol-none", &*taken, "no order"),
        (&keys[0], &*id, &*taken, "a volume that is made"),
        (&unknown, "vol-right", &*taken, "no node has this key"),
    ] {
        let answer = ask(&to, key, volume, snapshot).await;
        assert_eq!(answer, Err(Code::PermissionDenied), "{why}");
    }
    assert!(
        one.log().contains("may not have this snapshot"),
        "{}",
        one.tail()
    );

    // It was made: the right ends.
    let made = json!({ "status": {
        "observedGeneration": 1, "phase": "Ready", "pool": "p", "capacity": 0,
    }});
    let (params, made) = (PatchParams::default(), Patch::Merge(made));
    let written = all.patch_status("vol-right", &params, &made);
    written.await.expect("written");
    let answer = ask(&to, &keys[0], "vol-right", &taken).await;
    assert_eq!(answer, Err(Code::PermissionDenied));
}
