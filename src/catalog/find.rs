//! The answer for a name: where its content is, that it is coming, or that there is none. Reads
//! only the catalog.

use std::sync::Arc;

use crate::model::{Name, Origin, TenantOrigin, Timestamp};

use super::entry::{Entry, Session, SessionId, State, Version};
use super::name::NameHash;
use super::newest::Newest;
use super::packed::{Key, Packed};
use super::state::Catalog;

/// The most holders in an answer.
pub const MAX_HOLDERS: usize = 5;

/// A question where the content of a name is.
#[derive(Debug, Clone)]
pub struct Asked {
    name: Name,
    /// The digest of the name.
    pub(super) hash: NameHash,
    zone: Box<str>,
}

impl Asked {
    /// A question of a node in this zone; empty: unknown.
    #[must_use]
    pub fn new(name: Name, zone: &str) -> Self {
        Self {
            hash: NameHash::of(&name),
            name,
            zone: zone.into(),
        }
    }
}

/// The answer to [`Asked`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// No node with a stream has content of the name, and none is making it.
    Nothing,
    /// There is content.
    Found(Found),
    /// There is no content yet, but these nodes are making it: at most [`MAX_HOLDERS`].
    Coming(Vec<Arc<str>>),
    /// Not known yet: accounts are missing.
    Incomplete,
}

/// Content and its holders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Which content.
    pub version: Version,
    /// Its size; 0: no holder has measured it yet.
    pub bytes: u64,
    /// Its layers.
    pub layers: u16,
    /// Its fence. The asking node uses it only if its own fences allow it.
    pub fence: u64,
    /// Nodes that have it: those with a stream first, then those of the same zone, then by name.
    pub holders: Vec<Arc<str>>,
}

impl Catalog {
    /// The content that a new pod would start from, with all nodes that have it and a stream: the
    /// scheduler chooses among them. `None`: there is none, or no such node.
    pub fn placement(&mut self, wanted: &[TenantOrigin], now: Timestamp) -> Option<Found> {
        for TenantOrigin { tenant, origin } in wanted {
            let tenant = tenant.clone();
            let name = match origin {
                Origin::Name(reference) => {
                    let reference = reference.clone();
                    Name { tenant, reference }
                }
                Origin::Newest(prefix) => match self.newest(&tenant, prefix, now) {
                    Newest::Of(name) => name,
                    Newest::Nothing | Newest::Incomplete => continue,
                },
            };
            let mut current = current(&name, &self.valid(NameHash::of(&name), &name));
            if !current.is_empty() {
                current.retain(|(session, _)| session.lost.is_none());
                return found("", usize::MAX, current);
            }
        }
        None
    }

    /// Answers a question.
    #[must_use]
    pub fn find(&self, asked: &Asked, now: Timestamp) -> Answer {
        let name = &asked.name;
        if self.owed.iter().any(|owed| owed.covers.covers(name)) {
            return Answer::Incomplete;
        }
        let entries = self.valid(asked.hash, name);
        if let Some(found) = found(&asked.zone, MAX_HOLDERS, current(name, &entries)) {
            return Answer::Found(found);
        }
        // Content may be on a node that has not reported it, and then a cache must not start empty.
        if self.is_incomplete(now) {
            return Answer::Incomplete;
        }
        let makers = entries.iter();
        let mut makers: Vec<_> = makers.map(|(it, _)| Arc::clone(&it.node)).collect();
        makers.sort_unstable();
        makers.dedup();
        makers.truncate(MAX_HOLDERS);
        if makers.is_empty() {
            Answer::Nothing
        } else {
            Answer::Coming(makers)
        }
    }

    /// The entries of a name that were not cleared. If there is content with a known commit time,
    /// only such content.
    pub(super) fn valid(&self, hash: NameHash, name: &Name) -> Vec<(&Session, Entry)> {
        let fence = self.fences.covering(name);
        let entries = self.entries_of(hash);
        let entries = entries.map(|(_, session, packed)| (session, packed));
        let mut valid: Vec<_> = entries
            .filter(|(_, packed)| packed.entry(hash).fence >= fence)
            .collect();
        let is_dated =
            |(_, packed): &(&Session, Packed)| !packed.is_coming() && !packed.is_lowered();
        if valid.iter().any(|(_, packed)| packed.is_lowered()) && valid.iter().any(is_dated) {
            valid.retain(is_dated);
        }
        let valid = valid.into_iter();
        let valid = valid.map(|(session, packed)| (session, packed.entry(hash)));
        valid.collect()
    }

    /// The entries of a name, one for each node: the newest that the node has reported.
    pub(super) fn entries_of(
        &self,
        name: NameHash,
    ) -> impl Iterator<Item = (SessionId, &Session, Packed)> {
        self.entries.of(name).filter_map(move |(id, packed)| {
            // Else the session has ended.
            let session = self.sessions.get(&id)?;
            let is_newest = !self.is_in_later_session(name, session);
            is_newest.then_some((id, session, packed))
        })
    }

    /// Whether a later stream of the same node has reported this name.
    fn is_in_later_session(&self, name: NameHash, session: &Session) -> bool {
        let mut next = session.followed_by;
        while let Some(id) = next {
            if self.entries.get(Key::new(name, id)).is_some() {
                return true;
            }
            next = self.sessions.get(&id).and_then(|later| later.followed_by);
        }
        false
    }
}

/// The entries with the content that counts: the newest, or the first of a resource cache.
pub(super) fn current<'a>(
    name: &Name,
    entries: &[(&'a Session, Entry)],
) -> Vec<(&'a Session, Entry)> {
    let durable = entries
        .iter()
        .filter(|(_, entry)| entry.state == State::Durable);
    let versions = durable.clone().map(|(_, entry)| entry.version);
    let version = if name.reference.first_writer_wins() {
        versions.min()
    } else {
        versions.max()
    };
    let current = durable.filter(|(_, entry)| Some(entry.version) == version);
    current.copied().collect()
}

fn found(zone: &str, most: usize, mut holders: Vec<(&Session, Entry)>) -> Option<Found> {
    let is_elsewhere = |session: &Session| zone.is_empty() || *session.zone != *zone;
    holders.sort_unstable_by_key(|(session, _)| {
        (session.lost.is_some(), is_elsewhere(session), &session.node)
    });
    let (_, entry) = holders.first()?;
    // A node that has just fetched a copy has not measured it.
    let bytes = holders.iter().map(|(_, entry)| entry.bytes).max();
    let nodes = holders.iter().take(most);
    Some(Found {
        version: entry.version,
        bytes: bytes.unwrap_or_default(),
        layers: entry.layers,
        fence: entry.fence,
        holders: nodes
            .map(|(session, _)| Arc::clone(&session.node))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Nodes, entry};
    use super::*;
    use crate::model::{Coverage, Fence};

    #[test]
    fn the_newest_output_and_task_cache_and_the_first_resource_cache_are_found() {
        for (name, expected) in [
            ("artifact/a", 9),
            ("task-cache/a", 9),
            ("resource-cache/a", 3),
        ] {
            let mut nodes = Nodes::complete(&["n1", "n2", "n3", "n4"]);
            for (node, stamp) in [(0, 5), (1, 9), (2, 3), (3, 9)] {
                nodes.put(node, entry(name, State::Durable, stamp));
            }
            let Answer::Found(found) = nodes.find(name) else {
                panic!("{name}");
            };
            assert_eq!(found.version.stamp, Timestamp(expected), "{name}");
            let holders: Vec<&str> = found.holders.iter().map(AsRef::as_ref).collect();
            let expected: &[&str] = if expected == 9 {
                &["n2", "n4"]
            } else {
                &["n3"]
            };
            assert_eq!(holders, expected);
        }
    }

    #[test]
    fn holders_of_the_same_zone_and_with_a_stream_come_first_and_are_few() {
        let names: Vec<String> = (0..9).map(|n| format!("n{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut nodes = Nodes::complete(&names);
        for node in 0..9 {
            nodes.put(node, entry("artifact/a", State::Durable, 5));
        }
        // Odd nodes are in zone `odd`.
        nodes.lose(1);
        let asked = Asked::new(super::super::tests::name("artifact/a"), "odd");
        let Answer::Found(found) = nodes.catalog.find(&asked, nodes.now) else {
            panic!("it is there");
        };
        let holders: Vec<&str> = found.holders.iter().map(AsRef::as_ref).collect();
        assert_eq!(holders, ["n3", "n5", "n7", "n0", "n2"]);
    }

    #[test]
    fn the_size_is_that_of_a_holder_that_has_measured_it() {
        let mut nodes = Nodes::complete(&["n1", "n2", "n3"]);
        for (node, bytes) in [(0, 0), (1, 700), (2, 0)] {
            let entry = Entry {
                bytes,
                ..entry("artifact/a", State::Durable, 5)
            };
            nodes.put(node, entry);
        }
        let Answer::Found(found) = nodes.find("artifact/a") else {
            panic!("it is there");
        };
        assert_eq!((found.bytes, found.holders.len()), (700, 3));
    }

    #[test]
    fn a_pod_is_placed_by_all_holders_that_have_a_stream() {
        let names: Vec<String> = (0..9).map(|n| format!("n{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut nodes = Nodes::complete(&names);
        let name = super::super::tests::name("artifact/a");
        let placement = |nodes: &mut Nodes, names: &[Name]| {
            let wanted: Vec<TenantOrigin> = names.iter().cloned().map(TenantOrigin::from).collect();
            nodes.catalog.placement(&wanted, nodes.now)
        };
        assert_eq!(placement(&mut nodes, std::slice::from_ref(&name)), None);
        for node in 0..9 {
            nodes.put(node, entry("artifact/a", State::Durable, 5));
        }
        nodes.put(0, entry("artifact/a", State::Durable, 4));
        nodes.lose(1);
        let names = [super::super::tests::name("artifact/none"), name];
        let found = placement(&mut nodes, &names).expect("it is there");
        assert_eq!(found.holders.len(), 7);
        // The newest cache whose key begins so.
        for (node, reference) in [(2, "task-cache/main-1"), (3, "task-cache/main-2")] {
            nodes.put_named(node, reference, State::Durable, 7);
        }
        nodes.put_named(3, "task-cache/main-2", State::Durable, 8);
        let begins = |key: &str| TenantOrigin {
            tenant: names[0].tenant.clone(),
            origin: Origin::Newest(key.parse().expect("a key")),
        };
        let wanted = [begins("x"), begins("main-"), names[1].clone().into()];
        let found = nodes.catalog.placement(&wanted, nodes.now).expect("there");
        assert_eq!(found.holders, [Arc::from("n3")]);
        (2..9).for_each(|node| drop(nodes.lose(node)));
        assert_eq!(placement(&mut nodes, &names), None, "all are away");
    }

    #[test]
    fn content_counts_before_content_that_is_coming() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        let key = "task-cache/own";
        assert_eq!(nodes.find(key), Answer::Nothing);
        nodes.put(0, entry(key, State::Coming, 0));
        assert_eq!(nodes.find(key), Answer::Coming(vec![Arc::from("n1")]));
        nodes.put(1, entry(key, State::Durable, 4));
        let Answer::Found(found) = nodes.find(key) else {
            panic!("it is there");
        };
        assert_eq!(found.version.stamp, Timestamp(4));
        assert_eq!(found.holders, [Arc::from("n2")]);
    }

    #[test]
    fn cleared_content_is_skipped_and_later_content_is_not() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        nodes.put(0, entry("task-cache/a", State::Durable, 9));
        nodes.put(1, entry("task-cache/b", State::Durable, 9));
        let covers = Coverage::Name(super::super::tests::name("task-cache/a"));
        let fence = Fence {
            number: 100,
            previous: 0,
            id: 1,
            covers,
            repeats: Vec::new(),
        };
        assert!(nodes.catalog.fence(fence).all);
        assert_eq!(nodes.find("task-cache/a"), Answer::Nothing);
        assert!(matches!(nodes.find("task-cache/b"), Answer::Found(_)));
        let after = Entry {
            fence: 100,
            ..entry("task-cache/a", State::Durable, 8)
        };
        nodes.put(1, after);
        assert!(matches!(nodes.find("task-cache/a"), Answer::Found(_)));
    }
}
