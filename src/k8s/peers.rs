//! The nodes of a cluster as peers: who they are, from a watch over `Pool` objects, and what each
//! may read, from a live read of the pod that it names. Both are decided by functions without I/O.
//!
//! A node publishes the address and the key of its peer service in the status of its own `Pool`.
//! The admission policy of deploy/ lets no other driver write there. A deleted `Pool`, or one with
//! another key, takes effect with the event of the watch.
//!
//! A node gets a snapshot of a persistent volume only for a `Volume` of its own that the controller
//! ordered to be made of it (`may_clone`).
//!
//! It needs `get`, `list` and `watch` on `pools`, and `get` on `pods` and `volumes`.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt as _;
use kube::{Api, Client, ResourceExt as _};

use super::client;
use super::watched::{self, Watched};
use crate::api::{Phase, Pool, Volume, Wanted};
use crate::distribution::roster::{Access, Asked, AskedClone, Peer, Refusal, Roster};
use crate::model::{DRIVER_NAME, KUBELET, NodeId, Sha256, Tenant, TenantOrigin, VolumeSpec};

/// How long the API server may take to tell a pod. No peer waits as long as this.
const ANSWER: Duration = Duration::from_secs(10);
/// A pod that kubelet made on its own, and whose object kubelet may make in any namespace.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// The longest name of a pod.
const MOST_NAME: usize = 253;

/// The other nodes of the cluster. [`Peers::watch`] has to run.
pub struct Peers {
    /// This node.
    own: NodeId,
    pools: Watched<Pool>,
    client: Arc<OnceLock<Client>>,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = &self.own;
        f.debug_struct("Peers")
            .field("own", own)
            .finish_non_exhaustive()
    }
}

impl Peers {
    /// The peers of `own`, and the watch that keeps them up to date until it is dropped.
    pub fn new(
        own: NodeId,
        kubeconfig: Option<PathBuf>,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send + 'static) {
        let client = Arc::new(OnceLock::new());
        let connected = Arc::clone(&client);
        let events = async move {
            let client = client::connect(kubeconfig.as_deref()).await;
            connected.get_or_init(|| client.clone());
            watched::events(Api::all(client), "the Pools of peers")
        };
        // Only the peer is read, and the rest is long.
        let events = events.flatten_stream().modify(|pool: &mut Pool| {
            if let Some(status) = &mut pool.status {
                status.orphans = crate::api::Orphans::default();
            }
        });
        let (pools, watch) = Watched::over(events);
        (Arc::new(Self { own, pools, client }), watch)
    }
}

/// What a node published, if it can be used.
pub(super) fn published(pool: &Pool) -> Option<Peer> {
    let peer = pool.status.as_ref()?.peer.as_ref()?;
    Some(Peer {
        name: NodeId::new(pool.metadata.name.as_deref()?).ok()?,
        address: peer.address.parse::<SocketAddr>().ok()?.to_string(),
        key: peer.key.parse().ok()?,
    })
}

/// The nodes that are peers of a node.
fn others(own: &NodeId, pools: &[Arc<Pool>]) -> impl Iterator<Item = Peer> {
    let peers = pools.iter().filter_map(|pool| published(pool));
    peers.filter(|peer| peer.name != *own)
}

/// The peers of a node, in the order in which it asks them if the controller tells no better one.
/// Only the controller knows the zones: it reads Nodes. The order is stable, and another one on
/// each node, so that a node is not the first choice of all others.
fn peers_of(own: &NodeId, pools: &[Arc<Pool>]) -> Vec<Peer> {
    let mut peers: Vec<Peer> = others(own, pools).collect();
    peers.sort_by_cached_key(|peer| {
        let mut hasher = DefaultHasher::new();
        (own.as_str(), peer.name.as_str()).hash(&mut hasher);
        (hasher.finish(), peer.name.as_str().to_owned())
    });
    peers
}

/// The node that has this key. A key that two nodes publish is no node's: one of them took it from
/// the other.
pub(super) fn named(pools: &[Arc<Pool>], key: &Sha256) -> Option<NodeId> {
    let text = key.to_string();
    let has_key = |pool: &&Arc<Pool>| {
        let peer = pool.status.as_ref().and_then(|status| status.peer.as_ref());
        peer.is_some_and(|peer| peer.key == text)
    };
    let mut found = pools.iter().filter(has_key);
    let pool = found.next().filter(|_| found.next().is_none())?;
    published(pool).map(|peer| peer.name)
}

/// The other node that has this key.
fn other_named(own: &NodeId, pools: &[Arc<Pool>], key: &Sha256) -> Option<NodeId> {
    named(pools, key).filter(|name| name != own)
}

impl Roster for Peers {
    fn peers(&self, _tenant: &Tenant) -> Vec<Peer> {
        peers_of(&self.own, &self.pools.all())
    }

    fn count(&self) -> u64 {
        others(&self.own, &self.pools.all()).count() as u64
    }

    fn named(&self, key: &Sha256) -> Option<NodeId> {
        other_named(&self.own, &self.pools.all(), key)
    }

    fn peer(&self, name: &NodeId) -> Option<Peer> {
        let pool = self.pools.get(name.as_str())?;
        published(&pool).filter(|peer| peer.name != self.own)
    }
}

impl Peers {
    /// Reads an object live.
    async fn look<K>(&self, api: Api<K>, name: &str, what: &str) -> Result<Option<K>, Refusal>
    where
        K: Clone + fmt::Debug + serde::de::DeserializeOwned,
    {
        let unknown = |error: &dyn fmt::Display| {
            Refusal::Unknown(format!("{what} {name} cannot be looked up: {error}"))
        };
        let found = tokio::time::timeout(ANSWER, api.get_opt(name)).await;
        found
            .map_err(|_| unknown(&"no answer of the API server"))?
            .map_err(|error| unknown(&error))
    }

    fn client(&self) -> Result<Client, Refusal> {
        let client = self.client.get().cloned();
        client.ok_or_else(|| Refusal::Unknown("the driver starts".to_owned()))
    }
}

#[async_trait]
impl Access for Peers {
    async fn check(&self, peer: &NodeId, asked: &Asked) -> Result<(), Refusal> {
        let name = &asked.pod.name;
        // It becomes a part of a URL.
        if !is_pod_name(name) {
            return Err(Refusal::Denied("the name of the pod is no name".to_owned()));
        }
        let pods: Api<Pod> = Api::namespaced(self.client()?, asked.reader.as_str());
        let pod = self.look(pods, name, "pod").await?;
        may_read(peer, asked, pod.as_ref()).map_err(Refusal::Denied)
    }

    /// Each call is a live read: after the volume is made or given up, its node gets no more.
    async fn check_clone(&self, peer: &NodeId, asked: &AskedClone) -> Result<(), Refusal> {
        let volumes: Api<Volume> = Api::all(self.client()?);
        let volume = self.look(volumes, asked.volume.as_str(), "volume").await?;
        may_clone(&self.own, peer, asked, volume.as_ref()).map_err(Refusal::Denied)
    }
}

/// Whether a peer may have a snapshot of this node for a volume, given the `Volume` of that name:
/// an order of the controller, which no node can write. The error is the reason.
fn may_clone(
    own: &NodeId,
    peer: &NodeId,
    asked: &AskedClone,
    volume: Option<&Volume>,
) -> Result<(), String> {
    let because = |why: &str| Err(format!("volume {} {why}", asked.volume));
    let Some(volume) = volume else {
        return because("does not exist");
    };
    let spec = &volume.spec;
    if spec.node_name != peer.as_str() {
        return because("is not on that node");
    }
    let is_it = spec.fetch.as_ref().is_some_and(|fetch| {
        fetch.node_name == own.as_str() && fetch.snapshot == asked.snapshot.as_str()
    });
    if !is_it {
        return because("is not made of this snapshot");
    }
    if spec.wanted != Wanted::Present {
        return because("is not to be made");
    }
    match volume.phase() {
        None | Some(Phase::Fetching) => Ok(()),
        Some(_) => because("was made, or has failed"),
    }
}

/// Whether a text can be the name of a pod: a DNS subdomain.
fn is_pod_name(text: &str) -> bool {
    let of_name = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    let is_label = |label: &str| !label.is_empty() && label.bytes().all(of_name);
    text.len() <= MOST_NAME && text.split('.').all(is_label)
}

/// Whether a peer may read what it asks for, given the pod of that name in the namespace that the
/// peer tells. Whether that namespace may read the content, the policies say. The error is the
/// reason.
fn may_read(peer: &NodeId, asked: &Asked, pod: Option<&Pod>) -> Result<(), String> {
    let (tenant, name) = (&asked.reader, &asked.pod.name);
    let because = |why: &str| Err(format!("pod {name} of namespace {tenant} {why}"));
    let Some(pod) = pod else {
        return because("does not exist");
    };
    if pod.metadata.uid.as_deref() != Some(&asked.pod.uid.to_string()) {
        return because("has another uid");
    }
    if pod.annotations().contains_key(MIRROR) {
        return because("is a mirror pod, which a node can make in any namespace");
    }
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return because("has ended");
    }
    let spec = pod.spec.as_ref();
    if spec.and_then(|spec| spec.node_name.as_deref()) != Some(peer.as_str()) {
        return because("does not run on that node");
    }
    let volumes = spec.and_then(|spec| spec.volumes.as_deref());
    let ours = volumes.unwrap_or_default().iter().filter_map(|volume| {
        let volume = volume
            .csi
            .as_ref()
            .filter(|csi| csi.driver == DRIVER_NAME)?;
        let mut attributes = volume.volume_attributes.clone().unwrap_or_default();
        attributes.retain(|key, _| !key.starts_with(KUBELET));
        VolumeSpec::parse(&attributes).ok()
    });
    let mut origins = ours.flat_map(|volume| volume.origins(&asked.reader));
    let is_asked = |it: TenantOrigin| {
        it.tenant == asked.name.tenant && it.origin.may_be(&asked.name.reference)
    };
    if origins.any(is_asked) {
        return Ok(());
    }
    because("has no volume that starts from this content")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::{PoolPeer, PoolSpec, PoolStatus};
    use crate::model::{Name, Pod as AskedPod};

    fn node(name: &str) -> NodeId {
        NodeId::new(name).expect("a node")
    }

    fn key(byte: u8) -> Sha256 {
        Sha256([byte; 32])
    }

    fn pool(name: &str, address: &str, key: &str) -> Arc<Pool> {
        let mut pool = Pool::new(name, PoolSpec {});
        pool.status = Some(PoolStatus {
            peer: Some(PoolPeer {
                address: address.to_owned(),
                key: key.to_owned(),
                catalog: true,
                away: Vec::new(),
            }),
            ..PoolStatus::default()
        });
        Arc::new(pool)
    }

    fn pools(count: u8) -> Vec<Arc<Pool>> {
        let pools = (1..=count).map(|number| {
            let address = format!("10.0.0.{number}:9810");
            pool(
                &format!("node-{number}"),
                &address,
                &key(number).to_string(),
            )
        });
        pools.collect()
    }

    #[test]
    fn a_peer_is_each_other_node_that_has_published_an_address_and_a_key() {
        let mut all = pools(3);
        all.push(Arc::new(Pool::new("new", PoolSpec {})));
        all.push(pool("wrong", "10.0.0.9", &key(9).to_string()));
        all.push(pool("wrong-too", "10.0.0.9:9810", "sha256:9"));
        let own = node("node-2");
        let mut names: Vec<String> = peers_of(&own, &all)
            .into_iter()
            .map(|peer| format!("{} {}", peer.name.as_str(), peer.address))
            .collect();
        names.sort();
        assert_eq!(names, ["node-1 10.0.0.1:9810", "node-3 10.0.0.3:9810"]);
        assert_eq!(other_named(&own, &all, &key(3)), Some(node("node-3")));
        assert_eq!(other_named(&own, &all, &key(2)), None, "that is this node");
        assert_eq!(other_named(&own, &all, &key(9)), None);
        // It publishes another key: the old one is no node's at once.
        all[2] = pool("node-3", "10.0.0.3:9810", &key(33).to_string());
        assert_eq!(other_named(&own, &all, &key(3)), None);
        assert_eq!(other_named(&own, &all, &key(33)), Some(node("node-3")));
        // A node that publishes the key of another does not speak for it.
        all[0] = pool("node-1", "10.0.0.1:9810", &key(33).to_string());
        assert_eq!(other_named(&own, &all, &key(33)), None);
    }

    #[test]
    fn each_node_prefers_others_in_an_order_of_its_own() {
        let all = pools(40);
        let order = |own: &str, pools: &[Arc<Pool>]| -> Vec<String> {
            let peers = peers_of(&node(own), pools).into_iter();
            peers.map(|peer| peer.name.as_str().to_owned()).collect()
        };
        let mut reversed = all.clone();
        reversed.reverse();
        let first = |number: usize| order(&format!("node-{number}"), &all).remove(0);
        assert_eq!(order("node-1", &all), order("node-1", &reversed));
        let firsts: std::collections::BTreeSet<String> = (1..=40).map(first).collect();
        assert!(firsts.len() > 10, "{firsts:?}");
    }

    #[test]
    fn what_is_no_name_never_becomes_a_url() {
        for name in ["a", "build-1", "a.b-c.d", &"a".repeat(253)] {
            assert!(is_pod_name(name), "{name}");
        }
        for name in [
            "", ".", "..", "a/b", "../x", "a..b", "A", "a?b", "a%2f", "ä",
        ] {
            assert!(!is_pod_name(name), "{name}");
        }
        assert!(!is_pod_name(&"a".repeat(254)));
    }

    #[test]
    fn a_node_gets_a_snapshot_for_a_volume_that_it_is_to_make_of_it() {
        let right = json!({
            "apiVersion": "baggageclaim.concourse-ci.org/v1alpha1",
            "kind": "Volume",
            "metadata": {"name": "vol-1"},
            "spec": {
                "name": "pvc-1", "nodeName": "node-2", "wanted": "Present",
                "source": {"kind": "Volume", "name": "vol-0"},
                "fetch": {"nodeName": "node-1", "snapshot": "snap-1"},
            },
            "status": null,
        });
        let asked = AskedClone {
            volume: "vol-1".parse().expect("an id"),
            snapshot: "snap-1".parse().expect("an id"),
        };
        let decided = |own: &str, peer: &str, volume: Option<&serde_json::Value>| {
            let volume = volume.cloned().map(serde_json::from_value);
            let volume: Option<Volume> = volume.transpose().expect("a volume");
            may_clone(&node(own), &node(peer), &asked, volume.as_ref())
        };
        decided("node-1", "node-2", Some(&right)).expect("ordered");
        let status = |phase: &str| json!({"observedGeneration": 1, "phase": phase, "pool": "p"});
        let mut fetching = right.clone();
        fetching["status"] = status("Fetching");
        decided("node-1", "node-2", Some(&fetching)).expect("it is being fetched");

        let why = decided("node-1", "node-2", None).expect_err("no volume");
        assert!(why.contains("does not exist"), "{why}");
        let why = decided("node-1", "node-3", Some(&right)).expect_err("another node");
        assert!(why.contains("not on that node"), "{why}");
        let why = decided("node-9", "node-2", Some(&right)).expect_err("another holder");
        assert!(why.contains("not made of this snapshot"), "{why}");
        for (pointer, value, expected) in [
            ("/spec/fetch/snapshot", json!("snap-2"), "not made of this"),
            ("/spec/fetch", json!(null), "not made of this"),
            ("/spec/wanted", json!("Absent"), "not to be made"),
            ("/spec/wanted", json!("Kept"), "not to be made"),
            ("/status", status("Ready"), "was made"),
            ("/status", status("Lost"), "was made"),
            ("/status", status("Failed"), "was made"),
        ] {
            let mut volume = right.clone();
            *volume.pointer_mut(pointer).expect("it is there") = value;
            let why = decided("node-1", "node-2", Some(&volume)).expect_err(pointer);
            assert!(why.contains(expected), "{pointer}: {why}");
        }
    }

    /// A pod that may read `task-cache/go`, `task-cache/main`, those that begin with `pr-`, and
    /// `artifact/built`.
    fn right() -> serde_json::Value {
        let volume = |name: &str, attributes| json!({"name": name, "csi": {"driver": DRIVER_NAME, "volumeAttributes": attributes}});
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "step", "namespace": "ci", "uid": "uid-1"},
            "spec": {
                "nodeName": "node-2",
                "containers": [],
                "volumes": [
                    {"name": "other", "emptyDir": {}},
                    volume("cache", json!({"type": "task-cache", "key": "go", "restoreKeys": "main, pr-*"})),
                    volume("input", json!({"type": "input", "from": "artifact/built",
                                           "csi.storage.k8s.io/pod.uid": "forged"})),
                    volume("output", json!({"type": "output", "name": "made"})),
                    volume("main", json!({"type": "task-cache", "key": "own",
                                          "restoreKeys": "its", "fromNamespace": "main"})),
                ],
            },
            "status": {"phase": "Pending"},
        })
    }

    fn decided(reference: &str, pod: Option<&serde_json::Value>) -> Result<(), String> {
        decided_of("ci", reference, pod)
    }

    /// The same of content in this namespace.
    fn decided_of(
        tenant: &str,
        reference: &str,
        pod: Option<&serde_json::Value>,
    ) -> Result<(), String> {
        let asked = Asked {
            reader: "ci".parse().expect("a label"),
            name: Name {
                tenant: tenant.parse().expect("a label"),
                reference: reference.parse().expect("a reference"),
            },
            pod: AskedPod {
                uid: "uid-1".parse().expect("a uid"),
                name: "step".to_owned(),
                service_account: None,
            },
        };
        let pod = pod.map(|pod| serde_json::from_value(pod.clone()).expect("a pod"));
        may_read(&node("node-2"), &asked, pod.as_ref())
    }

    #[test]
    fn a_node_reads_what_a_pod_of_its_own_starts_from() {
        let pod = right();
        for reference in [
            "task-cache/go",
            "task-cache/main",
            "task-cache/pr-7",
            "task-cache/pr-",
            "task-cache/pr-*",
            "artifact/built",
        ] {
            decided(reference, Some(&pod)).expect(reference);
        }
        for reference in [
            "task-cache/x",
            "task-cache/main-1",
            "task-cache/pr",
            "task-cache/go-1",
            "resource-cache/pr-7",
            "artifact/pr-7",
            "resource-cache/go",
            "artifact/made",
        ] {
            let why = decided(reference, Some(&pod)).expect_err(reference);
            assert!(why.contains("no volume that starts from"), "{why}");
        }
        // A volume reads in the namespace that it names, and in no other.
        for (tenant, reference, may) in [
            ("main", "task-cache/own", true),
            ("main", "task-cache/its", true),
            ("ci", "task-cache/its", false),
            ("main", "task-cache/go", false),
            ("other", "task-cache/own", false),
        ] {
            let decided = decided_of(tenant, reference, Some(&pod));
            assert_eq!(decided.is_ok(), may, "{tenant} {reference}");
        }
    }

    #[test]
    fn any_other_pod_gives_no_right() {
        let why = decided("task-cache/go", None).expect_err("no pod");
        assert!(why.contains("does not exist"), "{why}");
        for (pointer, value, expected) in [
            ("/metadata/uid", json!("uid-2"), "another uid"),
            ("/metadata/annotations", json!({MIRROR: "x"}), "mirror pod"),
            ("/status/phase", json!("Succeeded"), "has ended"),
            ("/status/phase", json!("Failed"), "has ended"),
            ("/spec/nodeName", json!("node-3"), "does not run on"),
            ("/spec/nodeName", json!(null), "does not run on"),
            ("/spec/volumes", json!([]), "no volume that starts from"),
            (
                "/spec/volumes/1/csi/driver",
                json!("other"),
                "no volume that",
            ),
        ] {
            let mut pod = right();
            let (parent, field) = pointer.rsplit_once('/').expect("a pointer");
            let parent = pod.pointer_mut(parent).expect("it is there");
            parent[field] = value;
            let why = decided("task-cache/go", Some(&pod)).expect_err(pointer);
            assert!(why.contains(expected), "{pointer}: {why}");
        }
    }
}
