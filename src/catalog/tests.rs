//! Unit tests of the catalog as a whole: sessions, completeness, orders to nodes, memory. Those of
//! answers are beside their code.

use std::collections::BTreeSet;
use std::time::Duration;

use super::*;
use crate::model::{Coverage, Fence, Fences, Name, Timestamp};

pub(super) fn name(text: &str) -> Name {
    Name {
        tenant: "ci".parse().expect("a label"),
        reference: text.parse().expect("a reference"),
    }
}

pub(super) fn entry(text: &str, state: State, stamp: u64) -> Entry {
    let name = name(text);
    Entry {
        name: NameHash::of(&name),
        kind: name.reference.kind(),
        state,
        version: Version {
            stamp: Timestamp(stamp),
            tie: 1,
        },
        bytes: 100,
        layers: 2,
        fence: 0,
    }
}

/// What a node tells of a cache that it used at this time.
pub(super) fn told(text: &str, tie: u32, pod: Option<&str>, used: u64) -> ToldCache {
    let author = |pod: &str| Author {
        account: Some("builder".into()),
        pod: pod.into(),
        node: Some("n1".into()),
    };
    ToldCache {
        name: name(text),
        tie,
        author: pod.map(|pod| Box::new(author(pod))),
        used: Timestamp(used),
    }
}

/// A catalog and the streams of some nodes. Odd nodes are in zone `odd`.
pub(super) struct Nodes {
    pub(super) catalog: Catalog,
    pub(super) now: Timestamp,
    names: Vec<String>,
    sessions: Vec<SessionId>,
    attempt: u64,
}

impl Nodes {
    /// All nodes have begun, and none has ended its account.
    fn new(names: &[&str]) -> Self {
        let now = Timestamp(1_795_400_000_000);
        let mut nodes = Self {
            catalog: Catalog::new(Fences::default(), now),
            now,
            names: names.iter().map(ToString::to_string).collect(),
            sessions: Vec::new(),
            attempt: 0,
        };
        let expected = nodes.names.iter().cloned().collect();
        nodes.catalog.expect(expected, now);
        for node in 0..names.len() {
            let session = nodes.hello(node, &Fences::default());
            nodes.sessions.push(session);
        }
        nodes
    }

    pub(super) fn complete(names: &[&str]) -> Self {
        let mut nodes = Self::new(names);
        (0..names.len()).for_each(|node| drop(nodes.account(node)));
        nodes
    }

    fn hello(&mut self, node: usize, fences: &Fences) -> SessionId {
        self.attempt += 1;
        let hello = Hello {
            node: &self.names[node],
            attempt: self.attempt,
            zone: if node % 2 == 1 { "odd" } else { "even" },
            fences,
        };
        self.catalog
            .hello(&hello, self.now)
            .expect("it is the newest")
    }

    pub(super) fn restart(&mut self, node: usize) {
        self.sessions[node] = self.hello(node, &Fences::default());
    }

    pub(super) fn report(&mut self, node: usize, report: &Report) -> Changes {
        self.catalog
            .report(self.sessions[node], report, self.now, self.now)
    }

    pub(super) fn account(&mut self, node: usize) -> Changes {
        let report = Report {
            complete: true,
            ..Report::default()
        };
        self.report(node, &report)
    }

    pub(super) fn put(&mut self, node: usize, entry: Entry) -> Changes {
        let report = Report {
            put: vec![entry],
            ..Report::default()
        };
        self.report(node, &report)
    }

    /// Reports an entry, with its name if it is a cache.
    pub(super) fn put_named(&mut self, node: usize, text: &str, state: State, stamp: u64) {
        self.put_entry(node, entry(text, state, stamp), text);
    }

    pub(super) fn put_entry(&mut self, node: usize, entry: Entry, text: &str) {
        let report = Report {
            put: vec![entry],
            caches: vec![told(text, 1, None, 0)],
            ..Report::default()
        };
        self.report(node, &report);
    }

    pub(super) fn remove(&mut self, node: usize, text: &str) {
        let report = Report {
            drop: vec![NameHash::of(&name(text))],
            ..Report::default()
        };
        self.report(node, &report);
    }

    /// Nodes that were lost are forgotten.
    pub(super) fn forget_lost(&mut self) {
        self.pass(KEEP.as_secs() + 1);
    }

    pub(super) fn lose(&mut self, node: usize) -> Changes {
        self.catalog.lost(self.sessions[node], self.now)
    }

    fn pass(&mut self, seconds: u64) -> Changes {
        self.now = self.now.after(Duration::from_secs(seconds));
        self.catalog.tick(self.now)
    }

    pub(super) fn find(&self, text: &str) -> Answer {
        self.catalog.find(&Asked::new(name(text), ""), self.now)
    }

    fn stamp(&self, name: &str) -> Option<u64> {
        match self.find(name) {
            Answer::Found(found) => Some(found.version.stamp.0),
            _ => None,
        }
    }
}

#[test]
fn there_is_nothing_only_after_all_accounts_or_a_minute() {
    let mut nodes = Nodes::new(&["n1", "n2"]);
    assert_eq!(nodes.find("artifact/a"), Answer::Incomplete);
    assert!(nodes.account(0).all);
    assert_eq!(nodes.find("artifact/a"), Answer::Incomplete);
    // An account that does not end is awaited for a minute.
    nodes.pass(60);
    assert_eq!(nodes.find("artifact/a"), Answer::Incomplete);
    assert!(nodes.pass(1).all);
    assert_eq!(nodes.find("artifact/a"), Answer::Nothing);
    // A node comes back: its account is awaited.
    nodes.restart(0);
    assert_eq!(nodes.find("artifact/a"), Answer::Incomplete);
    nodes.account(0);
    assert_eq!(nodes.find("artifact/a"), Answer::Nothing);

    // Without the list of nodes, no account is enough.
    let now = nodes.now;
    let mut fresh = Catalog::new(Fences::default(), now);
    let asked = Asked::new(name("artifact/a"), "");
    assert_eq!(fresh.find(&asked, now), Answer::Incomplete);
    assert!(fresh.expect(BTreeSet::new(), now).all);
    assert_eq!(fresh.find(&asked, now), Answer::Nothing);
}

#[test]
fn a_new_account_replaces_the_old_one_at_once_and_a_lost_stream_counts_for_two_minutes() {
    let mut nodes = Nodes::complete(&["n1"]);
    for (text, stamp) in [("artifact/a", 5), ("artifact/b", 6)] {
        nodes.put(0, entry(text, State::Durable, stamp));
    }
    nodes.restart(0);
    nodes.put(0, entry("artifact/b", State::Durable, 4));
    assert_eq!(nodes.stamp("artifact/a"), Some(5));
    // The later stream's word counts, whichever is newer.
    assert_eq!(nodes.stamp("artifact/b"), Some(4));
    nodes.account(0);
    assert_eq!(nodes.stamp("artifact/a"), None);
    assert_eq!(nodes.stamp("artifact/b"), Some(4));
    assert_eq!(nodes.catalog.len(), 1);

    nodes.lose(0);
    // What arrives late on a lost stream changes nothing.
    nodes.put(0, entry("artifact/b", State::Durable, 9));
    nodes.pass(120);
    assert_eq!(nodes.stamp("artifact/b"), Some(4));
    assert!(nodes.pass(1).all);
    assert_eq!(nodes.find("artifact/b"), Answer::Nothing);
    assert!(nodes.catalog.is_empty());
}

#[test]
fn the_late_beginning_of_an_earlier_stream_is_refused() {
    let mut nodes = Nodes::complete(&["n1", "n2"]);
    nodes.put(0, entry("artifact/a", State::Durable, 5));
    for attempt in [0, 1] {
        let hello = Hello {
            node: "n1",
            zone: "",
            attempt,
            fences: &Fences::default(),
        };
        assert_eq!(nodes.catalog.hello(&hello, nodes.now), None);
    }
    nodes.put(0, entry("artifact/a", State::Durable, 6));
    assert_eq!(nodes.stamp("artifact/a"), Some(6));
}

#[test]
fn older_holders_of_an_output_lose_its_name() {
    let mut nodes = Nodes::complete(&["n1", "n2", "n3"]);
    let orders = |changes: Changes| -> Vec<(SessionId, u64)> {
        let orders = changes.supersede.iter();
        orders
            .map(|order| (order.session, order.version.stamp.0))
            .collect()
    };
    nodes.put(0, entry("artifact/a", State::Durable, 5));
    let changes = nodes.put(1, entry("artifact/a", State::Durable, 9));
    assert_eq!(orders(changes), [(nodes.sessions[0], 9)]);
    // A copy keeps its version, and what comes late is the one that goes.
    let changes = nodes.put(2, entry("artifact/a", State::Durable, 9));
    assert_eq!(orders(changes), [(nodes.sessions[0], 9)]);
    nodes.catalog.report(
        nodes.sessions[0],
        &Report {
            drop: vec![NameHash::of(&name("artifact/a"))],
            ..Report::default()
        },
        nodes.now,
        nodes.now,
    );
    let changes = nodes.put(0, entry("artifact/a", State::Durable, 7));
    assert_eq!(orders(changes), [(nodes.sessions[0], 9)]);
    // A node that has cleared the name since does not drop it for content from before.
    let order = nodes
        .put(0, entry("artifact/a", State::Durable, 7))
        .supersede[0];
    let takes = |stamp, covering| {
        let own = entry("artifact/a", State::Durable, stamp).version;
        supersedes((order.version, order.fence), own, covering)
    };
    assert!(takes(8, 0) && !takes(9, 0) && !takes(8, 1));
    for kind in ["task-cache/a", "resource-cache/a"] {
        nodes.put(0, entry(kind, State::Durable, 5));
        assert_eq!(orders(nodes.put(1, entry(kind, State::Durable, 9))), []);
    }
}

#[test]
fn a_stamp_far_ahead_counts_as_now() {
    let mut nodes = Nodes::complete(&["n1"]);
    let now = nodes.now.0;
    for (ahead, expected) in [(60_000, now + 60_000), (60_001, now)] {
        nodes.put(0, entry("artifact/a", State::Durable, now + ahead));
        assert_eq!(nodes.stamp("artifact/a"), Some(expected));
    }
    // When it was committed is not known, so it takes no name from other content.
    let mut nodes = Nodes::complete(&["n1", "n2"]);
    nodes.put(0, entry("artifact/a", State::Durable, now - 5));
    let mut ahead = entry("artifact/a", State::Durable, now + 60_001);
    ahead.version.tie = 7;
    let changes = nodes.put(1, ahead);
    assert!(changes.supersede.is_empty());
    assert_eq!(nodes.stamp("artifact/a"), Some(now - 5));
}

#[test]
fn a_copy_of_content_with_a_stamp_far_ahead_takes_no_name_either() {
    let of = |stamp, tie| {
        let mut entry = entry("artifact/a", State::Durable, stamp);
        entry.version.tie = tie;
        entry
    };
    // The copy has the time of its fetch. Its node may report before that of the original.
    for (original_is_first, is_told_again) in
        [(true, true), (true, false), (false, true), (false, false)]
    {
        let mut nodes = Nodes::complete(&["n1", "n2", "n3"]);
        let now = nodes.now.0;
        let mut told = [(0, of(now + 90_000, 7)), (2, of(now, 7))];
        if !original_is_first {
            told.reverse();
        }
        let right = (1, of(now - 5_000, 8));
        for (node, entry) in [told[0], told[1], right] {
            let changes = nodes.put(node, entry);
            assert!(changes.supersede.is_empty(), "{changes:?}");
        }
        assert_eq!(nodes.stamp("artifact/a"), Some(now - 5_000));
        // A new stream makes neither of them newer.
        for (node, entry) in told.into_iter().filter(|_| is_told_again) {
            nodes.pass(10);
            nodes.restart(node);
            let changes = nodes.put(node, entry);
            assert!(changes.supersede.is_empty(), "{changes:?}");
            nodes.account(node);
            assert_eq!(nodes.stamp("artifact/a"), Some(now - 5_000));
        }
        // Nor is a copy the newest when the original is gone.
        let dropped = Report {
            drop: vec![NameHash::of(&name("artifact/a"))],
            ..Report::default()
        };
        let changes = nodes.report(0, &dropped);
        assert!(changes.supersede.is_empty(), "{changes:?}");
        assert_eq!(nodes.stamp("artifact/a"), Some(now - 5_000));
        // Without other content, it counts.
        nodes.report(1, &dropped);
        assert!(nodes.stamp("artifact/a").is_some());
    }
}

#[test]
fn content_that_is_told_again_keeps_the_time_that_it_got_first() {
    let mut nodes = Nodes::complete(&["n1", "n2"]);
    let then = nodes.now.0;
    let ahead = entry("artifact/a", State::Durable, then + 90_000);
    nodes.put(0, ahead);
    nodes.pass(40);
    // Its size is known now, and its time is less than a minute ahead.
    let told = Entry {
        bytes: 999,
        ..ahead
    };
    let changes = nodes.put(0, told);
    assert_eq!(nodes.stamp("artifact/a"), Some(then));
    assert!(changes.supersede.is_empty());
    let mut other = entry("artifact/a", State::Durable, then + 20_000);
    other.version.tie = 6;
    let changes = nodes.put(1, other);
    let order = changes.supersede[0];
    let newer = Timestamp(then + 20_000);
    assert_eq!(
        (order.session, order.version.stamp),
        (nodes.sessions[0], newer)
    );
    // Other content is another thing.
    other.version.stamp.0 += 10_000;
    other.version.tie = 7;
    nodes.put(0, other);
    assert_eq!(nodes.stamp("artifact/a"), Some(then + 30_000));
}

#[test]
fn no_invented_fence_protects_content_from_the_next_one() {
    let mut nodes = Nodes::complete(&["n1"]);
    let invented = Entry {
        fence: u64::MAX,
        ..entry("task-cache/a", State::Durable, 5)
    };
    nodes.put(0, invented);
    assert_eq!(nodes.stamp("task-cache/a"), Some(5));
    let clear = Coverage::Name(name("task-cache/a")).into();
    let applied = nodes.catalog.applied();
    let fence = nodes.catalog.fences().next(clear, nodes.now, applied, 1);
    nodes.catalog.fence(fence);
    assert_eq!(nodes.find("task-cache/a"), Answer::Nothing);
}

#[test]
fn what_is_owed_is_made_in_parts() {
    let mut nodes = Nodes::complete(&["n1"]);
    let covers = || Coverage::Name(name("task-cache/a"));
    let mut fences = Fences::default();
    for number in 1..=5 {
        fences.insert(Fence {
            number,
            previous: number - 1,
            id: 100 + number,
            covers: covers(),
            repeats: Vec::new(),
        });
    }
    nodes.sessions[0] = nodes.hello(0, &fences);
    for (part, left) in [(2, 3), (3, 0)] {
        let mut owed = nodes.catalog.owed()[0].clone();
        owed.repeats.truncate(part);
        let applied = nodes.catalog.applied();
        let next = nodes.catalog.fences().next(owed, Timestamp(0), applied, 7);
        nodes.catalog.fence(next);
        let owed = nodes.catalog.owed().iter();
        assert_eq!(owed.map(|owed| owed.repeats.len()).sum::<usize>(), left);
    }
}

#[test]
fn names_are_hidden_while_the_chain_of_fences_is_mended() {
    let mut nodes = Nodes::complete(&["n1"]);
    let fence = |number, previous, repeats| Fence {
        number,
        previous,
        id: number,
        covers: Coverage::Name(name("task-cache/a")),
        repeats,
    };
    // The node applied a fence that an older etcd does not have.
    let mut fences = Fences::default();
    fences.insert(fence(70, 0, vec![]));
    nodes.sessions[0] = nodes.hello(0, &fences);
    let cleared = Entry {
        fence: 71,
        ..entry("task-cache/a", State::Durable, 5)
    };
    nodes.account(0);
    let owed = nodes.catalog.owed()[0].clone();
    assert_eq!(owed.repeats, [70]);
    assert_eq!(nodes.find("task-cache/a"), Answer::Incomplete);
    let applied = nodes.catalog.applied();
    let next = nodes.catalog.fences().next(owed, Timestamp(60), applied, 1);
    assert_eq!((next.number, next.previous), (71, 0));
    nodes.catalog.fence(next);
    assert!(nodes.catalog.owed().is_empty());
    nodes.put(0, cleared);
    assert_eq!(nodes.stamp("task-cache/a"), Some(5));
    // Another controller makes a fence that the nodes have passed.
    nodes.catalog.fence_applied(71);
    nodes.catalog.fence(fence(65, 0, vec![]));
    assert_eq!(nodes.catalog.owed().len(), 1);
    nodes.catalog.fence(fence(72, 71, vec![65]));
    assert!(nodes.catalog.owed().is_empty());
    assert_eq!(nodes.find("task-cache/a"), Answer::Nothing);
}

#[test]
fn entries_of_ended_sessions_do_not_pile_up() {
    let mut nodes = Nodes::complete(&["n1", "n2"]);
    for n in 0..100 {
        nodes.put(1, entry(&format!("task-cache/{n}"), State::Durable, 1));
    }
    for _ in 0..50 {
        nodes.restart(0);
        for n in 0..100 {
            nodes.put(0, entry(&format!("task-cache/{n}"), State::Durable, 2));
        }
        nodes.account(0);
        assert_eq!(nodes.catalog.len(), 200);
        assert!(nodes.catalog.entries.len() < 400);
    }
}

#[test]
fn a_node_that_was_deleted_is_forgotten_when_its_stream_is_lost_and_nothing_waits_for_it() {
    let mut nodes = Nodes::complete(&["one", "two"]);
    let now = nodes.now;
    nodes.put(0, entry("artifact/a", State::Durable, 5));
    let asked = Asked::new(name("artifact/a"), "");
    let find = |nodes: &Nodes| nodes.catalog.find(&asked, now);
    let left = BTreeSet::from(["two".to_owned()]);
    // Its driver still runs.
    assert!(!nodes.catalog.expect(left.clone(), now).all);
    assert!(matches!(find(&nodes), Answer::Found(_)));
    nodes.catalog.lost(nodes.sessions[0], now);
    assert!(matches!(find(&nodes), Answer::Found(_)), "it may be back");
    assert!(nodes.catalog.expect(left.clone(), now).all);
    assert_eq!(find(&nodes), Answer::Nothing);

    // Nor for the account that it had begun.
    nodes.restart(0);
    assert_eq!(find(&nodes), Answer::Incomplete);
    nodes.catalog.lost(nodes.sessions[0], now);
    nodes.catalog.expect(left, now);
    assert_eq!(find(&nodes), Answer::Nothing);
}
