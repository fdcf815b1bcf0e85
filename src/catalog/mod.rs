//! The catalog: which nodes of the cluster have the content of a name, which content is newest, and
//! whether some is coming.
//!
//! It is the controller's soft state. The nodes are the truth: each reports over a stream, and
//! reports everything again in a new stream. A catalog is lost with its controller's process.
//!
//! Pure: no I/O, no clock, no async, and of this package only `model`. Times are parameters. `now`
//! is a clock of the controller that runs evenly: the cluster's time may jump when the controller
//! adopts it from a node, and then no wait must end early.
//!
//! `docs/catalog.md` states what a reader may rely on; `tests/catalog/simulation.rs` tries to break
//! it.
//!
//! - `apply`: what nodes say, and what follows from it.
//! - `find`: the answer for a name.
//! - `newest`: the newest of all task caches whose key begins in one way.
//! - `list`: what people ask for: all caches, and every node that has a name.
//! - `held`: questions that wait for another answer.
//! - `usage`: what namespaces use on the nodes, and what goes for their limits.
//! - `names`: the names of caches, and who committed them.
//! - `name`: names as digests. `packed`: an entry in few bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::model::{Clear, Fences, NamespaceUsage, Reference, Tenant, Timestamp};
use names::CacheNames;
use packed::{Key, Packed};

mod apply;
mod find;
mod held;
mod list;
mod name;
mod names;
mod newest;
mod packed;
mod usage;

pub use apply::{Changes, Hello, Report, Supersede};
pub use find::{Answer, Asked, Found, MAX_HOLDERS};
pub use held::Held;
pub use list::{Explained, Listed, OfNode, Part};
pub use name::NameHash;
pub use names::{Author, MAX_NAMED, ToldCache};
pub use newest::Newest;
pub use usage::{MOST_NAMESPACES, Within};

/// How long entries stay when their node's stream is lost.
pub const KEEP: Duration = Duration::from_secs(120);

/// How long a catalog waits for accounts. Then it answers as if it were complete.
pub const MAX_INCOMPLETE: Duration = Duration::from_secs(60);

/// The kind of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An output: the last commit counts, and older ones lose the name.
    Output,
    /// A resource cache: the first commit counts.
    ResourceCache,
    /// A task cache: the last commit counts.
    TaskCache,
}

impl Kind {
    /// The kind of this name.
    #[must_use]
    pub fn of(reference: &Reference) -> Self {
        match reference {
            Reference::Artifact(_) => Self::Output,
            Reference::ResourceCache(_) => Self::ResourceCache,
            Reference::TaskCache(_) => Self::TaskCache,
        }
    }
}

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
    pub kind: Kind,
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
pub struct SessionId(u32);

#[derive(Debug)]
struct Session {
    node: Arc<str>,
    zone: Box<str>,
    attempt: u64,
    /// When the stream was lost. Its entries stay for [`KEEP`].
    lost: Option<Timestamp>,
    /// When the account began, while it is not complete.
    account_since: Option<Timestamp>,
    /// The next stream of this node. What it has reported replaces what this one has.
    followed_by: Option<SessionId>,
    entries: usize,
    /// Entries without content.
    coming: usize,
    /// What namespaces use on the node.
    usage: BTreeMap<Tenant, NamespaceUsage>,
}

/// See the module.
#[derive(Debug)]
pub struct Catalog {
    /// By name, then by session. Entries of sessions that ended are skipped, and swept together.
    entries: BTreeMap<Key, Packed>,
    /// The names of caches.
    names: CacheNames,
    sessions: BTreeMap<SessionId, Session>,
    last_session: u32,
    /// Entries of sessions that ended.
    dead: usize,
    fences: Fences,
    /// The highest fence that any node has applied.
    applied: u64,
    /// What must be fenced once more, because an older etcd was put back ([`Fences::owed_to`]).
    owed: Vec<Clear>,
    began: Timestamp,
    /// The nodes whose accounts are missing. `None`: not known yet.
    awaited: Option<BTreeSet<String>>,
    /// All expected accounts have arrived once, or the time for it is over.
    is_complete: bool,
}

impl Catalog {
    /// An empty catalog of a controller that starts now, with the fences of the API server.
    #[must_use]
    pub fn new(fences: Fences, now: Timestamp) -> Self {
        Self {
            entries: BTreeMap::new(),
            names: CacheNames::default(),
            sessions: BTreeMap::new(),
            last_session: 0,
            dead: 0,
            fences,
            applied: 0,
            owed: Vec::new(),
            began: now,
            awaited: None,
            is_complete: false,
        }
    }

    /// Begins again as a catalog of a controller that starts now: its chain of fences was set back.
    /// Streams from before are not known any more.
    pub fn begin_again(&mut self, fences: Fences, now: Timestamp) {
        let last_session = self.last_session;
        *self = Self::new(fences, now);
        self.last_session = last_session;
    }

    /// The fences.
    #[must_use]
    pub fn fences(&self) -> &Fences {
        &self.fences
    }

    /// The highest fence that any node is known to have applied, for [`Fences::next`].
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// What the controller must fence once more before it sends any fence or counts any account.
    #[must_use]
    pub fn owed(&self) -> &[Clear] {
        &self.owed
    }

    /// The number of entries, for metrics.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() - self.dead
    }

    /// Whether nodes have still to report all that they have.
    #[must_use]
    pub fn is_incomplete(&self, now: Timestamp) -> bool {
        let is_awaited = |session: &Session| {
            let since = session.account_since.filter(|_| session.lost.is_none());
            since.is_some_and(|since| now.since(since) <= MAX_INCOMPLETE)
        };
        !self.is_complete || self.sessions.values().any(is_awaited)
    }

    /// The number of entries without content, for metrics.
    #[must_use]
    pub fn coming(&self) -> usize {
        self.sessions.values().map(|session| session.coming).sum()
    }

    /// Whether it has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests;
