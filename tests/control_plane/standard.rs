//! Claims and snapshots as users make them: the standard objects, and waiting for what Kubernetes
//! says about them.

use std::collections::BTreeSet;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use baggageclaim::api::{Phase, Pool, Volume};
use baggageclaim::csi::DRIVER_NAME;
use baggageclaim::engine::claims::SnapshotFilter;
use baggageclaim::engine::{Config, Engine};
use futures_util::StreamExt as _;
use kube::ResourceExt as _;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch,
    PatchParams, PostParams,
};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::watch_object;
use serde_json::{Value, json};

use crate::plane::{ControlPlane, programs};
use crate::{eventually, volumes};

/// The StorageClass for a claim on the node of its pod, and that for a claim that needs no pod.
pub(crate) const ON_NODE: &str = "baggageclaim";
pub(crate) const AT_ONCE: &str = "baggageclaim-clone";

const SELECTED: &str = "volume.kubernetes.io/selected-node";

/// The longest that anything here takes while processes are killed.
const PATIENCE: Duration = Duration::from_secs(180);

/// Makes the classes of deploy/ and, for snapshots, the kinds and the class.
pub(crate) fn define(plane: &ControlPlane, with_snapshots: bool) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![
        root.join("deploy/node/csidriver.yaml"),
        root.join("deploy/controller/storageclasses.yaml"),
    ];
    if with_snapshots {
        files.push(
            programs()
                .expect("they were there")
                .join("snapshot-crds.yaml"),
        );
    }
    for file in &files {
        plane.kubectl(&["apply", "--filename", file.to_str().expect("text")]);
    }
    if with_snapshots {
        let file = files[2].to_str().expect("text");
        let wait = ["wait", "--for=condition=Established", "--timeout=60s"];
        plane.kubectl(&[&wait[..], &["--filename", file]].concat());
        let text = format!(
            "{{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshotClass, \
             metadata: {{name: snapshots}}, driver: {DRIVER_NAME}, deletionPolicy: Delete}}"
        );
        plane.apply("snapshot-class", &text);
    }
}

/// Makes a node's objects, as kubelet does after the driver has registered.
pub(crate) fn register(plane: &ControlPlane, name: &str) {
    let prefix = "topology.baggageclaim.csi.concourse-ci.org";
    let text = format!(
        "{{apiVersion: v1, kind: Node, metadata: {{name: {name}, \
         labels: {{{prefix}/node: {name}, {prefix}/backend: overlay}}}}}}\n---\n\
         {{apiVersion: storage.k8s.io/v1, kind: CSINode, metadata: {{name: {name}}}, \
         spec: {{drivers: [{{name: {DRIVER_NAME}, nodeID: {name}, \
         topologyKeys: [{prefix}/node, {prefix}/backend]}}]}}}}\n"
    );
    plane.apply(&format!("node-{name}"), &text);
}

fn api(plane: &ControlPlane, group: &str, kind: &str) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
    Api::default_namespaced_with(plane.client.clone(), &kind)
}

pub(crate) fn claims(plane: &ControlPlane) -> Api<DynamicObject> {
    api(plane, "", "PersistentVolumeClaim")
}

fn of_cluster(plane: &ControlPlane, group: &str, kind: &str) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
    Api::all_with(plane.client.clone(), &kind)
}

fn snapshots(plane: &ControlPlane) -> Api<DynamicObject> {
    api(plane, "snapshot.storage.k8s.io", "VolumeSnapshot")
}

/// What a claim is made of.
pub(crate) fn of_claim(name: &str) -> Value {
    json!({ "kind": "PersistentVolumeClaim", "name": name })
}

pub(crate) fn of_snapshot(name: &str) -> Value {
    json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name })
}

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).expect("an object")
}

/// Makes a claim: on a node, as if the scheduler had selected that, or of a source.
pub(crate) async fn ask(
    plane: &ControlPlane,
    name: &str,
    node: Option<&str>,
    source: Option<Value>,
) {
    let class = if node.is_some() { ON_NODE } else { AT_ONCE };
    let mut claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Mi" } },
        },
    });
    if let Some(node) = node {
        claim["metadata"]["annotations"] = json!({ SELECTED: node });
    }
    if let Some(source) = source {
        claim["spec"]["dataSource"] = source;
    }
    let (claim, params) = (object(claim), PostParams::default());
    let made = claims(plane).create(&params, &claim).await;
    made.expect("made");
}

/// Waits until a condition holds for an object, which is `None` while there is none.
async fn until(
    plane: &ControlPlane,
    api: Api<DynamicObject>,
    name: &str,
    what: &str,
    condition: impl AsyncFn(Option<&DynamicObject>) -> bool,
) -> Option<DynamicObject> {
    let holds = async {
        // A watch that fails begins again.
        let mut seen = pin!(watch_object(api, name).default_backoff());
        loop {
            if let Some(Ok(seen)) = seen.next().await
                && condition(seen.as_ref()).await
            {
                return seen;
            }
        }
    };
    let seen = tokio::time::timeout(PATIENCE, holds).await;
    seen.unwrap_or_else(|_| panic!("never: {name} {what}\n{}", all(plane)))
}

/// What there is, for the message of a failure.
pub(crate) fn all(plane: &ControlPlane) -> String {
    let kinds = "pvc,pv,volumes.baggageclaim.concourse-ci.org,\
                 snapshots.baggageclaim.concourse-ci.org,pools.baggageclaim.concourse-ci.org";
    let (_, objects) = plane.try_kubectl(&["get", kinds, "--output=wide"]);
    let kinds = "volumesnapshots,volumesnapshotcontents";
    let (_, taken) = plane.try_kubectl(&["get", kinds, "--output=yaml"]);
    let (_, claims) = plane.try_kubectl(&["get", "pvc,pv", "--output=yaml"]);
    let (_, events) = plane.try_kubectl(&["get", "events", "--sort-by=.lastTimestamp"]);
    format!("{objects}\n{taken}\n{claims}\n{events}")
}

/// Waits until a claim is Bound. Returns the id of its volume, and the volume's node.
pub(crate) async fn bound(
    plane: &ControlPlane,
    name: &str,
    node: Option<&str>,
) -> (String, String) {
    let claims = claims(plane);
    let condition = async |claim: Option<&DynamicObject>| {
        let claim = claim.expect("only this test deletes it");
        if claim.data["status"]["phase"] == "Bound" {
            return true;
        }
        if let Some(node) = node
            && !claim.annotations().contains_key(SELECTED)
        {
            // The node did not answer in time, and the pod is scheduled again.
            let patch = json!({ "metadata": { "annotations": { SELECTED: node } } });
            let params = PatchParams::default();
            let done = claims.patch(name, &params, &Patch::Merge(patch)).await;
            done.expect("selected");
        }
        false
    };
    until(plane, claims.clone(), name, "is Bound", condition).await;
    let volume = volume_of(plane, name).await;
    let volume = of_cluster(plane, "", "PersistentVolume").get(&volume).await;
    let volume = volume.expect("a Bound claim has one").data;
    let id = volume["spec"]["csi"]["volumeHandle"]
        .as_str()
        .expect("an id");
    let terms = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    let node = &terms[0]["matchExpressions"][0]["values"][0];
    (id.to_owned(), node.as_str().expect("a node").to_owned())
}

/// The name of the PersistentVolume of a Bound claim.
pub(crate) async fn volume_of(plane: &ControlPlane, claim: &str) -> String {
    let claim = claims(plane).get(claim).await.expect("it is there");
    let volume = claim.data["spec"]["volumeName"].as_str();
    volume.expect("Bound").to_owned()
}

/// Orders a larger size, and waits until the claim has it.
pub(crate) async fn grow(plane: &ControlPlane, name: &str, size: &str) {
    let claims = claims(plane);
    let patch = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
    let params = PatchParams::default();
    let asked = claims.patch(name, &params, &Patch::Merge(patch)).await;
    asked.expect("asked");
    let has_grown = async |claim: Option<&DynamicObject>| {
        claim.expect("there").data["status"]["capacity"]["storage"] == size
    };
    until(plane, claims, name, "has grown", has_grown).await;
}

/// Takes a snapshot of a claim, and waits until it is ready.
pub(crate) async fn snapshot(plane: &ControlPlane, name: &str, of: &str) {
    let taken = object(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": { "name": name },
        "spec": {
            "volumeSnapshotClassName": "snapshots",
            "source": { "persistentVolumeClaimName": of },
        },
    }));
    let (api, params) = (snapshots(plane), PostParams::default());
    let asked = api.create(&params, &taken).await;
    asked.expect("asked");
    ready(plane, name).await;
}

/// Waits until a snapshot is ready.
pub(crate) async fn ready(plane: &ControlPlane, name: &str) {
    let is_ready = async |seen: Option<&DynamicObject>| {
        seen.expect("there").data["status"]["readyToUse"] == true
    };
    until(plane, snapshots(plane), name, "is ready", is_ready).await;
}

/// Deletes an object, and waits until it is gone.
async fn delete(plane: &ControlPlane, api: Api<DynamicObject>, name: &str) {
    let deleted = api.delete(name, &DeleteParams::default()).await;
    deleted.expect("ordered");
    let is_gone = async |seen: Option<&DynamicObject>| seen.is_none();
    until(plane, api, name, "is gone", is_gone).await;
}

pub(crate) async fn delete_claim(plane: &ControlPlane, name: &str) {
    delete(plane, claims(plane), name).await;
}

pub(crate) async fn delete_snapshot(plane: &ControlPlane, name: &str) {
    delete(plane, snapshots(plane), name).await;
}

/// The volume ids of all PersistentVolumes, or `None` if one of them is being deleted.
async fn persistent(plane: &ControlPlane) -> Option<BTreeSet<String>> {
    let all = of_cluster(plane, "", "PersistentVolume");
    let all = all.list(&ListParams::default()).await.expect("list").items;
    let id = |volume: &DynamicObject| {
        let id = volume.data["spec"]["csi"]["volumeHandle"].as_str();
        let stays = volume.metadata.deletion_timestamp.is_none();
        id.filter(|_| stays).map(str::to_owned)
    };
    all.iter().map(id).collect()
}

/// Checks the invariant of claims: the PersistentVolumes are those of `ids`, and so are the
/// `Volume` objects, which are all Ready. No other data has a pool, and nothing is half deleted.
pub(crate) async fn assert_only(plane: &ControlPlane, ids: &BTreeSet<String>) {
    let is_so = async || {
        let volumes = volumes(plane).await;
        let are_ready = volumes.iter().all(|one| one.phase() == Some(Phase::Ready));
        let names: BTreeSet<String> = volumes.iter().map(Volume::name_any).collect();
        let pools: Api<Pool> = Api::all(plane.client.clone());
        let pools = pools.list(&ListParams::default()).await.expect("list");
        let mut statuses = pools.items.iter().filter_map(|pool| pool.status.as_ref());
        are_ready
            && names == *ids
            && persistent(plane).await.as_ref() == Some(ids)
            && statuses.all(|status| status.orphans.count == 0)
    };
    let waited = tokio::time::timeout(PATIENCE, async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    assert!(waited.await.is_ok(), "never only {ids:?}\n{}", all(plane));
    let claims = claims(plane).list(&ListParams::default()).await;
    for claim in claims.expect("list").items {
        assert!(claim.metadata.deletion_timestamp.is_none(), "{claim:?}");
        assert_eq!(claim.finalizers(), ["kubernetes.io/pvc-protection"]);
    }
}

/// No snapshot is left in the cluster.
pub(crate) async fn assert_no_snapshots(plane: &ControlPlane) {
    let contents = of_cluster(plane, "snapshot.storage.k8s.io", "VolumeSnapshotContent");
    let none = async || {
        let ours: Api<baggageclaim::api::Snapshot> = Api::all(plane.client.clone());
        let ours = ours.list(&ListParams::default()).await.expect("list").items;
        let contents = contents.list(&ListParams::default()).await;
        ours.is_empty() && contents.expect("list").items.is_empty()
    };
    eventually("no snapshot is left", none).await;
}

/// The claims in a pool whose driver is away. Nothing else is in it, and it is sound.
pub(crate) async fn held(pool: &Path) -> BTreeSet<String> {
    let engine = Engine::open(Config::new(pool)).await.expect("it opens");
    let claims = engine.claims(None, usize::MAX).items;
    let all = SnapshotFilter::default();
    let snapshots = engine.snapshots(&all, None, usize::MAX).expect("a list");
    assert!(snapshots.items.is_empty(), "{snapshots:?}");
    engine.settled().await;
    let findings = engine.check().await.expect("checked");
    assert!(findings.is_empty(), "{findings:?}");
    engine.shutdown().await;
    claims.iter().map(|claim| claim.id.to_string()).collect()
}
