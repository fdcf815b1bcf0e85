//! All that the catalog knows, and simple questions about it. Its changes are in `apply`, its
//! answers in `find`, `newest`, `list` and `usage`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::entry::{Session, SessionId};
use super::names::CacheNames;
use super::table::Table;
use crate::model::{Clear, Fences, Timestamp};

/// How long entries stay when their node's stream is lost.
pub const KEEP: Duration = Duration::from_secs(120);

/// How long a catalog waits for accounts. Then it answers as if it were complete.
pub const MAX_INCOMPLETE: Duration = Duration::from_secs(60);

/// The catalog of a cluster; see the module.
#[derive(Debug)]
pub struct Catalog {
    /// By name, then by session. Entries of sessions that ended are skipped, and swept together.
    pub(super) entries: Table,
    /// The names of caches.
    pub(super) names: CacheNames,
    pub(super) sessions: BTreeMap<SessionId, Session>,
    pub(super) last_session: u32,
    /// Entries of sessions that ended.
    pub(super) dead: usize,
    pub(super) fences: Fences,
    /// The highest fence that any node has applied.
    pub(super) applied: u64,
    /// What must be fenced once more, because an older etcd was put back ([`Fences::owed_to`]).
    pub(super) owed: Vec<Clear>,
    pub(super) began: Timestamp,
    /// The nodes whose accounts are missing. `None`: not known yet.
    pub(super) awaited: Option<BTreeSet<String>>,
    /// All expected accounts have arrived once, or the time for it is over.
    pub(super) is_complete: bool,
}

impl Catalog {
    /// An empty catalog of a controller that starts now, with the fences of the API server.
    #[must_use]
    pub fn new(fences: Fences, now: Timestamp) -> Self {
        Self {
            entries: Table::default(),
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
