//! Who the peers are, what each may read, and which of them have content: traits without an
//! implementation. `peer` has the file of a standalone driver, `k8s` has the API server, and `hub`
//! has the catalog of the controller.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::model::{CacheKey, Name, NodeId, Pod, Sha256, SnapshotId, Tenant, VolumeId};

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

    /// The key of a node.
    fn key(&self, node: &NodeId) -> Option<Sha256>;

    /// The zone of a node; empty: unknown.
    fn zone(&self, node: &NodeId) -> String;

    /// The nodes that report what they have; `None`: not known yet.
    fn expected(&self) -> Option<BTreeSet<String>>;
}

/// A cluster without nodes.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct NoNode;

#[cfg(test)]
impl Members for NoNode {
    fn named(&self, _: &Sha256) -> Option<NodeId> {
        None
    }

    fn key(&self, _: &NodeId) -> Option<Sha256> {
        None
    }

    fn zone(&self, _: &NodeId) -> String {
        String::new()
    }

    fn expected(&self) -> Option<BTreeSet<String>> {
        Some(BTreeSet::new())
    }
}
