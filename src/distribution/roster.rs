//! Who the peers are, what each may read, which of them have content, and what all of them must
//! clear or put back: traits without an implementation. `peer` has the file of a standalone driver,
//! `k8s` has the API server, and `hub` has the catalog of the controller.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{oneshot, watch};

use crate::catalog::{Explained, NameHash, Part};
use crate::model::{
    ArtifactId, CacheKey, Clear, Coverage, Fence, Fences, Limits, Maker, Name, NamespacePolicy,
    NodeId, Pod, Reference, Sha256, SnapshotId, Tenant, Timestamp, VolumeId,
};

/// Another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: NodeId,
    /// HOST:PORT.
    pub address: String,
    /// The SHA-256 of its public key.
    pub key: Sha256,
}

/// Who the peers are.
pub trait Roster: fmt::Debug + Send + Sync {
    /// The peers that are asked about content of a tenant, in the order of preference.
    fn peers(&self, tenant: &Tenant) -> Vec<Peer>;

    /// How many peers there are.
    fn count(&self) -> u64;

    /// The name of the peer that has this key.
    fn named(&self, key: &Sha256) -> Option<NodeId>;

    /// The peer of this name.
    fn peer(&self, name: &NodeId) -> Option<Peer>;
}

/// A pod that waits for content.
#[derive(Debug, Clone)]
pub struct Reader {
    /// Its namespace. The content may be of another one.
    pub tenant: Tenant,
    /// The pod.
    pub pod: Pod,
}

/// What a peer asks for, and for which of its pods.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The name.
    pub name: Name,
    /// The namespace of the pod, as the peer tells it.
    pub reader: Tenant,
    /// The pod that waits, as the peer tells it.
    pub pod: Pod,
}

/// A snapshot of a persistent volume, and the volume of another node that is made of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedClone {
    /// The volume of the asking node.
    pub volume: VolumeId,
    /// The snapshot on the asked node.
    pub snapshot: SnapshotId,
}

/// Why a peer does not get content, for the log and for the peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It may not have the content.
    #[error("{0}")]
    Denied(String),
    /// It cannot be found out now whether it may. The peer can ask again.
    #[error("{0}")]
    Unknown(String),
}

/// What each peer may read.
#[async_trait]
pub trait Access: fmt::Debug + Send + Sync {
    /// Whether this peer may have this content now.
    async fn check(&self, peer: &NodeId, asked: &Asked) -> Result<(), Refusal>;

    /// Whether this peer may have this snapshot of a persistent volume now. Only the controller of
    /// a cluster can order that.
    async fn check_clone(&self, _peer: &NodeId, _asked: &AskedClone) -> Result<(), Refusal> {
        let why = "only the nodes of a cluster clone volumes of each other";
        Err(Refusal::Denied(why.to_owned()))
    }
}

/// Which nodes have the content of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Located {
    /// Not known: any peer may have it.
    Unknown,
    /// No peer has it now.
    Nothing,
    /// No peer has it now, and these are making it.
    Coming(Vec<NodeId>),
    /// These peers have it, the best one first.
    At(Vec<NodeId>),
}

/// The catalog of the cluster, as a node asks it.
#[async_trait]
pub trait Directory: fmt::Debug + Send + Sync {
    /// Whether it can be asked now.
    fn is_connected(&self) -> bool;

    /// Which nodes have the content of a name. Without content it waits so long for some.
    async fn locate(&self, name: &Name, wait: Duration) -> Located;

    /// The key of the newest commit of all task caches whose key begins so. `None`: there is none,
    /// or it is not known.
    async fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<CacheKey>;
}

/// Content that was committed under a name, and is still on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// The artifact's id on its node.
    pub id: ArtifactId,
    /// When it was committed.
    pub created: Timestamp,
    /// Whether the name points at it there.
    pub is_current: bool,
    /// Its size; `None`: not measured yet.
    pub bytes: Option<u64>,
    /// How many volumes are forks of it.
    pub in_use_by: u64,
    /// What committed it; `None`: not known.
    pub made_by: Option<Maker>,
}

/// The generations of a name on all nodes.
#[derive(Debug, Default)]
pub struct Generations {
    /// With the node that has each.
    pub found: Vec<(NodeId, Generation)>,
    /// The nodes that have not answered.
    pub silent: BTreeSet<String>,
}

/// The catalog of the cluster, as people ask the controller.
#[async_trait]
pub trait Overview: fmt::Debug + Send + Sync {
    /// Whether some nodes have not reported all that they have.
    fn is_incomplete(&self) -> bool;

    /// Whether any node has a stream. Without one, another controller may have the nodes.
    fn has_nodes(&self) -> bool;

    /// Some caches of a namespace or of all: those after `after`.
    fn caches(&self, tenant: Option<&Tenant>, after: Option<NameHash>) -> Part;

    /// All that is known of a name.
    fn explain(&self, name: &Name) -> Explained;

    /// How long ago the caches of a namespace were used last on any node, up to 10 minutes late.
    fn uses(&self, tenant: &Tenant) -> HashMap<Reference, Duration>;

    /// The generations of a name. Asks the nodes, and waits a few seconds for them.
    async fn generations(&self, name: &Name) -> Generations;
}

/// A user's order to put an earlier generation of a name back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RollbackOrder {
    /// The name.
    pub name: Name,
    /// The id of the generation on the node that gets the order.
    pub to: ArtifactId,
    /// The id of the new artifact. An order that is repeated has the same one.
    pub id: ArtifactId,
    /// When the new artifact counts as committed.
    pub stamp: Timestamp,
    /// The user.
    pub by: String,
}

/// The nodes of the cluster, as they are told to put an earlier generation of a name back.
#[async_trait]
pub trait Rollbacks: Overview {
    /// A time for a new commit of this name: now, or after all content that is known. `told`: when
    /// the newest generation was committed, as the nodes say. If that is far ahead, it does not
    /// count, as in the catalog.
    fn commit_time(&self, name: &Name, told: Timestamp) -> Timestamp;

    /// Orders it of this node, and waits a few seconds. The error says why the node did nothing.
    /// `None`: it has not answered, or cannot say yet. Order it again.
    async fn roll_back(&self, node: &NodeId, order: &RollbackOrder) -> Option<Result<(), String>>;

    /// Orders the nodes that have content of this name which is older than this commit to drop the
    /// name, if that commit or newer content is on some node. The commit counts as the catalog
    /// dates it, and not later than `stamp`.
    fn withdraw_older(&self, name: &Name, stamp: Timestamp, artifact: ArtifactId);
}

/// Where the controller of a cluster is, and how it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// IP:PORT.
    pub address: String,
    /// The SHA-256 of its public key.
    pub key: Sha256,
}

/// The nodes of a cluster, as its controller knows them.
pub trait Members: fmt::Debug + Send + Sync {
    /// The name of the node that has this key.
    fn named(&self, key: &Sha256) -> Option<NodeId>;

    /// The zone of a node; empty: unknown.
    fn zone(&self, node: &NodeId) -> String;

    /// The nodes that report what they have; `None`: not known yet.
    fn expected(&self) -> Option<BTreeSet<String>>;
}

/// A person's order to clear names on all nodes.
#[derive(Debug)]
pub struct ClearOrder {
    /// The names.
    pub covers: Coverage,
    /// Gets an answer when the order is in the API server, or why it may not be.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// The chain of fences, as the catalog knows it and the nodes get it.
pub trait Fencing: fmt::Debug + Send + Sync {
    /// The fences of the API server, as they are listed. Until the first call no node's account
    /// begins. Another call is for a chain that was set back: all nodes begin again, so that they
    /// show their fences.
    fn load(&self, fences: Fences);

    /// A fence of the API server, new or known. It counts at once. The nodes get it when nothing
    /// is [owed](Fencing::owed).
    fn learn(&self, fence: Fence);

    /// Fences up to this number are deleted, because all nodes have applied them.
    fn forget(&self, up_to: u64);

    /// The next fence, to be made at the API server.
    fn next(&self, clear: Clear) -> Fence;

    /// The fences that are known.
    fn fences(&self) -> Fences;

    /// What must be fenced once more before any node gets a fence, or its account begins.
    fn owed(&self) -> Vec<Clear>;

    /// So many objects of the API server are malformed, for a metric.
    fn malformed(&self, count: usize);

    /// Tells that what is owed may have changed.
    fn changes(&self) -> watch::Receiver<()>;

    /// How old the oldest name of each namespace is that has names, by the cluster's time. Names
    /// that a fence of the whole namespace is about to clear are left out.
    fn ages(&self) -> BTreeMap<Tenant, Duration>;

    /// The highest fence that each node with a stream has applied.
    fn applied(&self) -> BTreeMap<String, u64>;
}

/// The cache policies of the cluster, as the nodes get them.
pub trait Policing: fmt::Debug + Send + Sync {
    /// The policies of all namespaces that have some, each within
    /// [`NamespacePolicy::MOST_BYTES`]. The nodes get what changed.
    fn set(&self, policies: BTreeMap<Tenant, NamespacePolicy>);
}

/// What a namespace uses on all nodes that report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// Bytes.
    pub bytes: u64,
    /// Artifacts; each copy counts.
    pub artifacts: u64,
    /// Content in use alone exceeds the budget.
    pub over_budget: bool,
}

/// The limits of namespaces over all nodes.
pub trait Budgets: fmt::Debug + Send + Sync {
    /// Orders the nodes to evict what exceeds the limits of a namespace. Called again and again: an
    /// order may be lost, and is computed from what the nodes have reported since.
    fn keep_within(&self, namespace: &Tenant, limits: &Limits) -> Used;

    /// Whether some nodes have not reported yet, so that too little may count as used.
    fn is_incomplete(&self) -> bool;
}
