//! What the catalog knows of one name on one node, and of a node's stream.
//! Only values are here.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::name::NameHash;
use crate::model::{NameKind, NamespaceUsage, Tenant, Timestamp};

/// The state of a name on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A volume is published that will be sealed under this name, and there is no content yet.
    Coming,
    /// The content is sealed and survives a power cut.
    Durable,
}

/// The identity of content under a name, and its place in the order of commits. Copies on other
/// nodes keep it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// When it was committed, in the cluster's time. A node gives each stamp once.
    pub stamp: Timestamp,
    /// Decides between two commits of one millisecond: the first 32 bits of the artifact's id,
    /// which all copies share.
    pub tie: u32,
}

/// A name on a node. A node reports one entry for a name: its content, else what is coming.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: NameHash,
    /// Its kind.
    pub kind: NameKind,
    /// Its state.
    pub state: State,
    /// Which content. Without meaning for [`State::Coming`].
    pub version: Version,
    /// Its size, at most 2^48 - 1.
    pub bytes: u64,
    /// Its layers.
    pub layers: u16,
    /// The highest fence that its maker's node had applied when the volume was published.
    pub fence: u64,
}

/// A stream of a node, from its Hello on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub(super) u32);

#[derive(Debug)]
pub(super) struct Session {
    pub(super) node: Arc<str>,
    pub(super) zone: Box<str>,
    pub(super) attempt: u64,
    /// When the stream was lost. Its entries stay for [`KEEP`].
    pub(super) lost: Option<Timestamp>,
    /// When the account began, while it is not complete.
    pub(super) account_since: Option<Timestamp>,
    /// The next stream of this node. What it has reported replaces what this one has.
    pub(super) followed_by: Option<SessionId>,
    pub(super) entries: usize,
    /// Entries without content.
    pub(super) coming: usize,
    /// What namespaces use on the node.
    pub(super) usage: BTreeMap<Tenant, NamespaceUsage>,
}
