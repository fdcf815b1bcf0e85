//! The messages of nodes over their streams (accounts, changes, losses), and the passing of time.
//! Each function returns what the hub must do next.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::model::{Clear, Fence, Fences, NameKind, Timestamp, counted};

use super::entry::{Entry, Session, SessionId, State, Version};
use super::find::current;
use super::name::NameHash;
use super::names::ToldCache;
use super::packed::{Key, Packed};
use super::state::{Catalog, KEEP, MAX_INCOMPLETE};
use super::table::Table;

/// The first message of a stream.
#[derive(Debug)]
pub struct Hello<'a> {
    /// The node.
    pub node: &'a str,
    /// Its zone; empty: unknown.
    pub zone: &'a str,
    /// Higher than in each earlier stream of this node: a stamp of its clock.
    pub attempt: u64,
    /// The fences that it has applied, and has not forgotten.
    pub fences: &'a Fences,
}

/// A batch of changes.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// New and changed entries.
    pub put: Vec<Entry>,
    /// The new entries that are caches, with their names.
    pub caches: Vec<ToldCache>,
    /// Names that the node no longer has.
    pub drop: Vec<NameHash>,
    /// With this batch the account is complete.
    pub complete: bool,
}

/// An order to a node: this output has newer content elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Supersede {
    /// The node's stream.
    pub session: SessionId,
    /// The name.
    pub name: NameHash,
    /// The newer version.
    pub version: Version,
    /// The fence of the newer content.
    pub fence: u64,
}

/// Whether newer content with this fence takes the name from a node's own content. `covering` is
/// the highest fence of the node that covers the name: content that was cleared takes no name.
#[must_use]
pub fn supersedes((newer, fence): (Version, u64), own: Version, covering: u64) -> bool {
    own < newer && covering <= fence
}

/// What the hub must do after a change.
#[derive(Debug, Default)]
pub struct Changes {
    /// Answers for these names may have changed.
    pub names: Vec<NameHash>,
    /// Answers for any name may have changed.
    pub all: bool,
    /// Orders to send.
    pub supersede: Vec<Supersede>,
}

/// An entry with a time that counts: not far ahead of the cluster's. `holders`: what nodes have of
/// the name. Content that is told again, by this node or by one with a copy, keeps the time that it
/// got first.
fn dated(told: &Entry, holders: impl Iterator<Item = Packed>, time: Timestamp) -> Packed {
    let lowered = holders.filter(|it| it.is_lowered());
    let mut lowered = lowered.map(|it| it.entry(told.name).version);
    let first = lowered.find(|it| it.tie == told.version.tie);
    let stamp = first.map_or_else(|| counted(told.version.stamp, time), |first| first.stamp);
    let is_lowered = first.is_some() || stamp < told.version.stamp;
    let mut entry = *told;
    entry.version.stamp = stamp;
    let packed = Packed::new(&entry);
    if is_lowered { packed.lowered() } else { packed }
}

/// Marks the copies of content whose commit time is not known. A node with a copy may report before
/// the one whose stamp shows that, and may be the only holder later.
fn lower_copies(entries: &mut Table, of: &Entry) {
    let all: Vec<(SessionId, Packed)> = entries.of(of.name).collect();
    for (session, packed) in all {
        let mut copy = packed.entry(of.name);
        let is_copy = copy.state == State::Durable && copy.version.tie == of.version.tie;
        if is_copy && !packed.is_lowered() {
            copy.version = of.version;
            entries.insert(Key::new(of.name, session), Packed::new(&copy).lowered());
        }
    }
}

impl Catalog {
    /// The nodes of the cluster: their accounts make the catalog complete. A node that is not among
    /// them and has no stream is gone, and its entries with it.
    pub fn expect(&mut self, mut nodes: BTreeSet<String>, now: Timestamp) -> Changes {
        let is_gone = |session: &Session| session.lost.is_some() && !nodes.contains(&*session.node);
        let gone = self.sessions.iter().filter(|(_, session)| is_gone(session));
        let gone: Vec<SessionId> = gone.map(|(id, _)| *id).collect();
        for id in &gone {
            self.end(*id);
        }
        for session in self.sessions.values() {
            if session.account_since.is_none() {
                nodes.remove(&*session.node);
            }
        }
        self.awaited = Some(nodes);
        let mut changes = self.complete(now);
        changes.all |= !gone.is_empty();
        changes
    }

    /// A node's stream begins. An earlier stream of the node is lost. Its entries answer until the
    /// new account is complete. `None`: this is the late beginning of an earlier stream; close it.
    ///
    /// Then the hub makes the fences that are [owed](Catalog::owed), and sends the node those that
    /// it lacks, in their order. Only then may the node begin its account.
    pub fn hello(&mut self, hello: &Hello<'_>, now: Timestamp) -> Option<SessionId> {
        let mut of_node = self
            .sessions
            .values()
            .filter(|session| *session.node == *hello.node);
        if of_node.any(|session| session.attempt >= hello.attempt) {
            return None;
        }
        self.last_session += 1;
        let id = SessionId(self.last_session);
        for session in self.sessions.values_mut() {
            if *session.node == *hello.node {
                session.lost.get_or_insert(now);
                session.followed_by.get_or_insert(id);
            }
        }
        self.applied = self.applied.max(hello.fences.newest());
        for clear in self.fences.owed_to(hello.fences) {
            clear.add_to(&mut self.owed);
        }
        let session = Session {
            node: Arc::from(hello.node),
            zone: hello.zone.into(),
            attempt: hello.attempt,
            lost: None,
            account_since: Some(now),
            followed_by: None,
            entries: 0,
            coming: 0,
            usage: BTreeMap::new(),
        };
        self.sessions.insert(id, session);
        Some(id)
    }

    /// A batch of a node's stream. One of a stream that is lost changes nothing. `time` is the
    /// cluster's time ([`crate::model::ClusterClock`]), which a stamp should not be ahead of.
    pub fn report(
        &mut self,
        id: SessionId,
        report: &Report,
        now: Timestamp,
        time: Timestamp,
    ) -> Changes {
        let mut changes = Changes::default();
        let Some(session) = self.sessions.get_mut(&id) else {
            return changes;
        };
        if session.lost.is_some() {
            return changes;
        }
        let newest_fence = self.fences.newest().max(self.applied);
        for told in &report.put {
            let key = Key::new(told.name, id);
            let old = self.entries.get(key);
            let mut entry = *told;
            // No fence that does not exist protects content from the next one.
            entry.fence = entry.fence.min(newest_fence);
            let holders = self.entries.of(told.name).map(|(_, packed)| packed);
            let packed = dated(&entry, holders, time);
            self.entries.insert(key, packed);
            if packed.is_lowered() {
                lower_copies(&mut self.entries, &packed.entry(told.name));
            }
            session.entries += usize::from(old.is_none());
            session.coming += usize::from(packed.is_coming());
            session.coming -= usize::from(old.is_some_and(Packed::is_coming));
            changes.names.push(told.name);
        }
        let mut outputs = Vec::new();
        let mut gone = Vec::new();
        for name in &report.drop {
            if let Some(packed) = self.entries.remove(Key::new(*name, id)) {
                session.entries -= 1;
                session.coming -= usize::from(packed.is_coming());
                // Another holder may be the newest now, for one that has refused this content.
                match packed.entry(*name).kind {
                    NameKind::Artifact => outputs.push(*name),
                    NameKind::ResourceCache | NameKind::TaskCache => gone.push(*name),
                }
            }
            changes.names.push(*name);
        }
        if report.complete && session.account_since.take().is_some() {
            let node = Arc::clone(&session.node);
            let earlier = self.sessions.iter();
            let earlier = earlier.filter(|(other, session)| **other != id && session.node == node);
            let earlier: Vec<SessionId> = earlier.map(|(id, _)| *id).collect();
            for earlier in earlier {
                self.end(earlier);
            }
            changes.all = true;
            if let Some(awaited) = &mut self.awaited {
                awaited.remove(&*node);
            }
            self.complete(now);
        }
        for told in &report.caches {
            self.keep_name(told, time);
        }
        for name in gone {
            if self.entries_of(name).next().is_none() {
                self.names.forget(&name);
            }
        }
        let durable = report.put.iter();
        let durable =
            durable.filter(|it| it.kind == NameKind::Artifact && it.state == State::Durable);
        outputs.extend(durable.map(|entry| entry.name));
        for name in outputs {
            self.supersede(name, &mut changes.supersede);
        }
        changes
    }

    /// Orders to the holders of older content of an output. A holder without a stream hears of it
    /// when it reports again; content that only such a holder has supersedes nothing. Nor does
    /// content whose stamp was too far ahead: when it was committed is not known.
    fn supersede(&self, name: NameHash, orders: &mut Vec<Supersede>) {
        let holders = || {
            let durable = self.entries_of(name);
            durable.filter(|(_, session, packed)| session.lost.is_none() && !packed.is_coming())
        };
        let dated = holders().filter(|(_, _, packed)| !packed.is_lowered());
        let dated = dated.map(|(_, _, packed)| packed.entry(name));
        let Some(newest) = dated.max_by_key(|entry| entry.version) else {
            return;
        };
        for (session, _, packed) in holders() {
            if packed.entry(name).version < newest.version {
                orders.push(Supersede {
                    session,
                    name,
                    version: newest.version,
                    fence: newest.fence,
                });
            }
        }
    }

    /// A node's stream is lost.
    pub fn lost(&mut self, id: SessionId, now: Timestamp) -> Changes {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.lost.get_or_insert(now);
        }
        // An account that was awaited is no longer.
        Changes {
            all: true,
            ..Changes::default()
        }
    }

    /// A node has applied this fence.
    pub fn fence_applied(&mut self, number: u64) {
        self.applied = self.applied.max(number);
    }

    /// A fence of the API server. It counts at once. The hub sends it to all streams after it has
    /// made what is [owed](Catalog::owed).
    pub fn fence(&mut self, fence: Fence) -> Changes {
        let mut changes = Changes::default();
        if self.fences.knows(&fence) {
            return changes;
        }
        changes.all = true;
        if fence.number > self.applied {
            let done: HashSet<u64> = fence.repeats.iter().copied().collect();
            self.owed.retain_mut(|owed| {
                owed.repeats.retain(|id| !done.contains(id));
                !owed.repeats.is_empty()
            });
        } else {
            // Nodes have passed this number, so they would not apply it.
            let clear = Clear {
                covers: fence.covers.clone(),
                repeats: vec![fence.id],
            };
            clear.add_to(&mut self.owed);
        }
        self.fences.insert(fence);
        changes
    }

    /// Forgets the fences up to this number, which are deleted because all nodes have applied them.
    pub fn forget_fences(&mut self, up_to: u64) -> Changes {
        self.fences.forget(up_to);
        Changes {
            all: true,
            ..Changes::default()
        }
    }

    /// Time has passed: call it every second.
    pub fn tick(&mut self, now: Timestamp) -> Changes {
        let is_over = |session: &Session| session.lost.is_some_and(|at| now.since(at) > KEEP);
        let over = self.sessions.iter().filter(|(_, session)| is_over(session));
        let over: Vec<SessionId> = over.map(|(id, _)| *id).collect();
        for id in &over {
            self.end(*id);
        }
        // An account that does not come to its end is awaited no longer. It goes on.
        let is_late = |since: Timestamp| now.since(since) > MAX_INCOMPLETE;
        let attached = self
            .sessions
            .values()
            .filter(|session| session.lost.is_none());
        let is_late = attached
            .filter_map(|session| session.account_since)
            .any(is_late);
        let mut changes = self.complete(now);
        changes.all |= is_late || !over.is_empty();
        changes
    }

    /// Notes that all expected accounts have arrived, or that the time for it is over.
    fn complete(&mut self, now: Timestamp) -> Changes {
        let was_complete = self.is_complete;
        let is_over = now.since(self.began) > MAX_INCOMPLETE;
        let none_awaited = self.awaited.as_ref().is_some_and(BTreeSet::is_empty);
        self.is_complete |= is_over || none_awaited;
        Changes {
            all: self.is_complete != was_complete,
            ..Changes::default()
        }
    }

    /// Ends a session. Its entries are swept when they are many, so the cost of an end is small
    /// and the memory is bounded.
    fn end(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else {
            return;
        };
        self.dead += session.entries;
        if self.dead > self.entries.len() / 4 {
            let sessions = &self.sessions;
            self.entries.retain(|id| sessions.contains_key(&id));
            self.dead = 0;
            let entries = &self.entries;
            self.names.retain(|name| entries.of(name).next().is_some());
        }
    }
}

impl Catalog {
    /// Keeps what a node tells of a cache, after its entry is there. `time` is the cluster's time.
    pub(super) fn keep_name(&mut self, told: &ToldCache, time: Timestamp) {
        let hash = NameHash::of(&told.name);
        let current = current(&told.name, &self.valid(hash, &told.name));
        let version = current.first().map(|(_, entry)| entry.version);
        let is_current = version.is_some_and(|version| version.tie == told.tie);
        if let Some(named) = self.names.keep(hash, &told.name, version) {
            named.used = named.used.max(counted(told.used, time));
            // Older content of another node does not hide the author of the content that counts.
            if is_current && let Some(author) = &told.author {
                named.author = Some((told.tie, author.clone()));
            }
        }
    }
}
