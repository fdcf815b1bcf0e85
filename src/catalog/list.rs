//! What the catalog has, for people: the caches by name, and every node that has a name. Only reads
//! the catalog.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

use crate::model::{Name, Tenant, Timestamp};

use super::entry::{Entry, Session};
use super::find::{Answer, Asked, current};
use super::name::NameHash;
use super::names::{Author, Named};
use super::packed::Packed;
use super::state::Catalog;

/// A cache of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: Name,
    /// The content that counts; `None`: there is none, but a node may commit some.
    pub content: Option<Entry>,
    /// The nodes that have this content, or may commit some.
    pub nodes: BTreeSet<Arc<str>>,
    /// Who committed this content; `None`: not known.
    pub author: Option<Box<Author>>,
    /// The last use on any node, up to 10 minutes late; `None`: not known.
    pub used: Option<Timestamp>,
}

/// A part of the caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Some caches.
    pub caches: Vec<Listed>,
    /// Where the next part begins; `None`: this is the last one.
    pub next: Option<NameHash>,
}

/// What a node has of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfNode {
    /// The node.
    pub node: Arc<str>,
    /// Its zone; empty: unknown.
    pub zone: Box<str>,
    /// What it has.
    pub entry: Entry,
    /// Whether its content is the one that counts: the newest, or the first of a resource cache.
    pub is_current: bool,
    /// Whether its content was cleared, and is not used.
    pub is_cleared: bool,
    /// Whether the node has no stream. Then its entry is soon forgotten.
    pub is_away: bool,
}

/// All that is known of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explained {
    /// What a node that asks now is told.
    pub answer: Answer,
    /// What the nodes have, by their names.
    pub nodes: Vec<OfNode>,
}

impl Catalog {
    /// The caches of a namespace or of all, without those that were cleared. Looks at no more than
    /// `most` names, those after `after`.
    #[must_use]
    pub fn caches(&self, tenant: Option<&Tenant>, after: Option<NameHash>, most: usize) -> Part {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let names = self.names.all.range((from, Bound::Unbounded));
        let (mut caches, mut next) = (Vec::new(), None);
        for (place, (hash, named)) in names.enumerate() {
            if place == most {
                return Part { caches, next };
            }
            next = Some(*hash);
            if tenant.is_none_or(|tenant| named.name.tenant == *tenant) {
                caches.extend(self.listed(*hash, named));
            }
        }
        Part { caches, next: None }
    }

    fn listed(&self, hash: NameHash, named: &Named) -> Option<Listed> {
        let name = &named.name;
        let entries = self.valid(hash, name);
        let current = current(name, &entries);
        // A node that has just fetched a copy has not measured it.
        let content = current.iter().map(|(_, entry)| *entry);
        let content = content.max_by_key(|entry| entry.bytes);
        let is_its = |(tie, _): &&(u32, _)| content.is_some_and(|it| it.version.tie == *tie);
        let author = named.author.as_ref().filter(is_its);
        // Without content, all that is left is coming.
        let shown = if current.is_empty() { entries } else { current };
        let nodes = shown.iter().map(|(session, _)| Arc::clone(&session.node));
        (!shown.is_empty()).then(|| Listed {
            name: name.clone(),
            content,
            nodes: nodes.collect(),
            author: author.map(|(_, author)| author.clone()),
            used: Some(named.used).filter(|at| *at > Timestamp::default()),
        })
    }

    /// What each node has of a name, by their names.
    #[must_use]
    pub fn on_nodes(&self, name: &Name) -> Vec<OfNode> {
        let hash = NameHash::of(name);
        let fence = self.fences.covering(name);
        let current = current(name, &self.valid(hash, name));
        let of_node = |(_, session, packed): (_, &Session, Packed)| {
            let entry = packed.entry(hash);
            let has_it = |(of, _): &(&Session, Entry)| of.node == session.node;
            OfNode {
                node: Arc::clone(&session.node),
                zone: session.zone.clone(),
                entry,
                is_current: current.iter().any(has_it),
                is_cleared: entry.fence < fence,
                is_away: session.lost.is_some(),
            }
        };
        let mut nodes: Vec<OfNode> = self.entries_of(hash).map(of_node).collect();
        nodes.sort_by(|one, other| one.node.cmp(&other.node));
        nodes
    }

    /// All that is known of a name.
    #[must_use]
    pub fn explain(&self, name: &Name, now: Timestamp) -> Explained {
        Explained {
            answer: self.find(&Asked::new(name.clone(), ""), now),
            nodes: self.on_nodes(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Nodes, entry, name, told};
    use super::super::{Report, State};
    use super::*;
    use crate::model::{Coverage, Fence};

    fn names(part: &Part) -> Vec<String> {
        let names = part.caches.iter();
        names.map(|it| it.name.reference.to_string()).collect()
    }

    #[test]
    fn caches_are_listed_in_parts_with_the_nodes_of_the_current_content() {
        let mut nodes = Nodes::complete(&["n1", "n2", "n3"]);
        for (node, reference, stamp) in [
            (0, "task-cache/a", 5),
            (1, "task-cache/a", 9),
            (2, "task-cache/a", 9),
            (0, "resource-cache/b", 5),
            (1, "resource-cache/b", 9),
        ] {
            nodes.put_named(node, reference, State::Durable, stamp);
        }
        nodes.put_named(2, "task-cache/c", State::Coming, 0);
        assert_eq!(nodes.catalog.coming(), 1);
        nodes.put(0, entry("artifact/output", State::Durable, 1));
        let mut all = nodes.catalog.caches(None, None, 100);
        assert_eq!(all.next, None);
        all.caches
            .sort_by_key(|listed| listed.name.reference.to_string());
        assert_eq!(
            names(&all),
            ["resource-cache/b", "task-cache/a", "task-cache/c"]
        );
        let of = |place: usize| {
            let listed = &all.caches[place];
            let nodes: Vec<&str> = listed.nodes.iter().map(|node| &**node).collect();
            (listed.content.map(|it| it.version.stamp.0), nodes)
        };
        assert_eq!(of(0), (Some(5), vec!["n1"]));
        assert_eq!(of(1), (Some(9), vec!["n2", "n3"]));
        assert_eq!(of(2), (None, vec!["n3"]));

        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let part = nodes.catalog.caches(None, after, 2);
            seen.extend(names(&part));
            after = part.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen.len(), 3);
        let other: Tenant = "other".parse().expect("a label");
        assert!(
            nodes
                .catalog
                .caches(Some(&other), None, 9)
                .caches
                .is_empty()
        );
    }

    #[test]
    fn a_cache_is_listed_with_its_author_and_its_last_use_on_any_node() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        let now = nodes.now.0;
        let put = |nodes: &mut Nodes, node, stamp, tie, pod, used| {
            let mut entry = entry("task-cache/a", State::Durable, stamp);
            (entry.version.tie, entry.bytes) = (tie, 100 * u64::from(tie));
            let report = Report {
                put: vec![entry],
                caches: vec![told("task-cache/a", tie, pod, used)],
                ..Report::default()
            };
            nodes.report(node, &report);
            let part = nodes.catalog.caches(None, None, 9);
            let [listed] = &part.caches[..] else {
                panic!("one cache");
            };
            let author = listed.author.as_ref().map(|author| author.pod.to_string());
            (author, listed.used.map(|at| at.0))
        };
        let text = |text: &str| Some(text.to_owned());
        // Of an older version of the driver.
        assert_eq!(put(&mut nodes, 0, 5, 1, None, 0), (None, None));
        assert_eq!(
            put(&mut nodes, 0, 5, 1, Some("first"), 50),
            (text("first"), Some(50))
        );
        // Older content elsewhere, used later.
        assert_eq!(
            put(&mut nodes, 1, 3, 2, Some("older"), 60),
            (text("first"), Some(60))
        );
        assert_eq!(
            put(&mut nodes, 1, 9, 3, Some("newest"), 55),
            (text("newest"), Some(60))
        );
        // The author of the newest content is not known.
        assert_eq!(put(&mut nodes, 0, 10, 4, None, 61), (None, Some(61)));
        // A wrong clock.
        let (_, used) = put(&mut nodes, 0, 10, 4, None, now * 2);
        assert_eq!(used, Some(now));
    }

    #[test]
    fn a_cache_that_no_node_has_is_not_listed() {
        let mut nodes = Nodes::complete(&["n1", "n2"]);
        nodes.put_named(0, "task-cache/a", State::Durable, 5);
        nodes.put_named(1, "task-cache/b", State::Durable, 5);
        nodes.remove(0, "task-cache/a");
        assert_eq!(
            names(&nodes.catalog.caches(None, None, 9)),
            ["task-cache/b"]
        );
        assert_eq!(nodes.catalog.names.all.len(), 1);
        // The node goes for good.
        nodes.lose(1);
        nodes.forget_lost();
        assert!(nodes.catalog.caches(None, None, 9).caches.is_empty());
        let names = &nodes.catalog.names;
        assert!(names.all.is_empty(), "its memory is free");
        let key = "b".parse().expect("a key");
        assert_eq!(names.newest(&name("task-cache/b").tenant, &key), None);
    }

    #[test]
    fn a_name_is_explained_with_older_cleared_and_coming_content_of_every_node() {
        let mut nodes = Nodes::complete(&["n1", "n2", "n3", "n4"]);
        let at = |fence, stamp, state| Entry {
            fence,
            ..entry("artifact/a", state, stamp)
        };
        nodes.catalog.fence(Fence {
            number: 50,
            previous: 0,
            id: 1,
            covers: Coverage::Name(name("artifact/a")),
            repeats: Vec::new(),
        });
        nodes.put(0, at(0, 99, State::Durable));
        nodes.put(1, at(50, 5, State::Durable));
        nodes.put(2, at(50, 7, State::Durable));
        nodes.put(3, at(50, 0, State::Coming));
        nodes.lose(1);
        let explained = nodes.catalog.explain(&name("artifact/a"), nodes.now);
        assert!(matches!(explained.answer, Answer::Found(_)));
        let told = explained.nodes.iter();
        let told: Vec<_> = told
            .map(|it| (&*it.node, it.is_current, it.is_cleared, it.is_away))
            .collect();
        assert_eq!(
            told,
            [
                ("n1", false, true, false),
                ("n2", false, false, true),
                ("n3", true, false, false),
                ("n4", false, false, false),
            ]
        );
        assert_eq!(explained.nodes[3].entry.state, State::Coming);
        let none = nodes.catalog.explain(&name("artifact/b"), nodes.now);
        assert_eq!((none.answer, none.nodes), (Answer::Nothing, Vec::new()));
    }
}
