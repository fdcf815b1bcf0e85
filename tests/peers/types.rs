//! Each type of volume, and where its content is: here, on one other node, on two, nowhere, or on a
//! node that is away. Tenants do not mix, and many pods of one artifact are one fetch.

use baggageclaim::engine::ContentSource;
use baggageclaim::engine::notice::What;
use baggageclaim::model::{NodeId, Outcome};
use futures_util::future::join_all;

use crate::catalog::{Hub, finish};
use crate::common::bench::Ground;
use crate::nodes::{INPUT, Node, OUTPUT, RESOURCE, TASK, introduce, odd, peers, text, write};

/// The attributes of a volume.
type Attributes = &'static [(&'static str, &'static str)];

/// What each type of volume is committed as, and read as.
const TYPES: [(Attributes, Attributes); 3] =
    [(&OUTPUT, &INPUT), (&RESOURCE, &RESOURCE), (&TASK, &TASK)];

#[tokio::test]
async fn content_here_asks_no_peer_and_content_of_one_other_node_comes() {
    let [a, mut b] = peers!("a", "b");
    for (made, read) in TYPES {
        let kind = read[0].1;
        a.commit(&format!("{kind}-made"), made, kind).await;
        let asked = a.figures().questions;
        assert_eq!(a.sees(&format!("{kind}-here"), read).await, text(kind));
        assert_eq!(a.figures().questions, asked, "{kind}: a peer was asked");
        assert_eq!(b.sees(&format!("{kind}-there"), read).await, text(kind));
        let from = b.heard().into_iter().find_map(|what| match what {
            What::Fetching { from, .. } => Some(from),
            _ => None,
        });
        assert_eq!(from.as_deref(), Some("peer a"), "{kind}");
        // It is here now.
        let asked = b.figures().questions;
        assert_eq!(b.sees(&format!("{kind}-again"), read).await, text(kind));
        assert_eq!(b.figures().questions, asked, "{kind}: a peer was asked");
    }
    b.has_fetched(ContentSource::Peer, 3).await;
    let fetched = b.fetches(ContentSource::Peer);
    assert_eq!((fetched.artifacts, fetched.failures), (3, 0));
    assert_eq!(fetched.bytes, bytes_of_all_types());
    assert_eq!(b.fetches(ContentSource::Shared).artifacts, 0);
    // It keeps its age and its origin, and is a copy.
    let rows = |node: &Node| {
        let mut rows = node.bench.engine.artifacts(None);
        rows.sort_by_key(|row| row.id);
        rows
    };
    for (original, copy) in rows(&a).into_iter().zip(rows(&b)) {
        assert_eq!(original.id, copy.id);
        assert_eq!(original.created, copy.created);
        assert!(copy.sharing.copied && !original.sharing.copied);
        assert_eq!(original.made_by, copy.made_by);
        let maker = copy.made_by.expect("it is known");
        assert_eq!(maker.node, NodeId::new("a").ok());
        assert!(!copy.sharing.is_wanted());
    }
    a.finish().await;
    b.finish().await;
}

/// The bytes of a file with the name of each type.
fn bytes_of_all_types() -> u64 {
    TYPES.iter().map(|(_, read)| read[0].1.len() as u64).sum()
}

#[tokio::test]
async fn a_hit_is_told_and_counted_with_its_source() {
    let [mut a, mut b] = peers!("a", "b");
    for (made, read) in TYPES {
        let kind = read[0].1;
        a.commit(&format!("{kind}-made"), made, kind).await;
        for (is_a, source, made_on, from) in [
            (true, "local", "this node", None),
            (false, "peer", "a", Some("peer a".to_owned())),
            (false, "local", "a", None),
        ] {
            let node = if is_a { &mut a } else { &mut b };
            node.heard();
            let series =
                |what: &str| format!("{what}_total{{type=\"{kind}\",source=\"{source}\"}}");
            let (hits, bytes) = (series("hits"), series("saved_bytes"));
            let before: (u64, u64) = (node.counted(&hits), node.counted(&bytes));
            let volume = format!("{kind}-{source}-{}", from.is_some());
            assert_eq!(node.sees(&volume, read).await, text(kind));
            let [hit] = &node.hits()[..] else {
                panic!("{volume}: one hit is told");
            };
            assert_eq!(hit.made_on.as_deref(), Some(made_on), "{volume}");
            assert_eq!(hit.fetched_from, from, "{volume}");
            if from.is_some() {
                // If it is not measured yet, the peer's manifest says how much it is.
                let least = kind.len() as u64;
                assert!(hit.bytes.is_some_and(|bytes| bytes >= least), "{volume}");
            }
            let saved = hit.bytes.unwrap_or_default();
            let after = (node.counted(&hits), node.counted(&bytes));
            assert_eq!(after, (before.0 + 1, before.1 + saved), "{volume}");
        }
    }
    assert_eq!(b.counted::<u64>("misses_total{type=\"input\"}"), 0);
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn of_two_nodes_the_last_commit_counts_or_the_first_resource_cache() {
    let [a, b, c] = peers!("a", "b", "c");
    for (made, read) in TYPES {
        let kind = read[0].1;
        // Each of them commits without seeing the other's.
        b.known_forgets();
        a.known_forgets();
        a.commit(&format!("{kind}-one"), made, "first").await;
        b.commit(&format!("{kind}-two"), made, "second").await;
        a.knows(&c);
        b.knows(&c);
        let expected = if kind == "resource-cache" {
            "first"
        } else {
            "second"
        };
        assert_eq!(c.sees(&format!("{kind}-there"), read).await, text(expected));
    }
    for node in [a, b, c] {
        node.finish().await;
    }
}

#[tokio::test]
async fn content_that_is_nowhere_or_on_a_node_that_is_away_is_a_miss() {
    let Some(a) = Node::new("a").await else {
        return;
    };
    let b = Node::with("b", |start| {
        start.settings.input_wait = std::time::Duration::from_secs(3);
    });
    let Some(b) = b.await else { return };
    let mut nodes = [a, b];
    introduce(&nodes);
    for moment in ["nowhere", "away"] {
        for (made, read) in TYPES {
            let kind = read[0].1;
            let volume = format!("{kind}-{moment}");
            if moment == "away" {
                nodes[0]
                    .commit(&format!("{volume}-made"), made, "text")
                    .await;
            }
        }
        if moment == "away" {
            nodes[0].goes().await;
        }
        let [_, b] = &nodes;
        for (_, read) in &TYPES[1..] {
            let volume = format!("{}-{moment}", read[0].1);
            assert_eq!(b.sees(&volume, read).await, None, "{volume}");
        }
        let waited = b.try_publish(&format!("input-{moment}"), &INPUT).await;
        let error = waited.expect_err("there is none").to_string();
        assert!(error.contains("no peer has it yet"), "{error}");
    }
    for kind in ["input", "resource-cache", "task-cache"] {
        let misses: u64 = nodes[1].counted(&format!("misses_total{{type=\"{kind}\"}}"));
        assert_eq!(misses, 2, "{kind}");
    }
    for node in nodes {
        node.finish().await;
    }
}

#[tokio::test]
async fn an_input_waits_until_another_node_has_made_it() {
    let [a, b] = peers!("a", "b");
    a.publish("made", &OUTPUT).await;
    let makes = async {
        // The reader asks at least once before it is there.
        crate::common::bench::eventually("the reader asks", || b.figures().questions > 0).await;
        write(&a.bench.target("made"), "made");
        a.end("made", Outcome::Succeeded).await;
    };
    let (seen, ()) = tokio::join!(b.sees("read", &INPUT), makes);
    assert_eq!(seen, text("made"));
    let waited: f64 = b.counted("content_wait_seconds_total{type=\"input\"}");
    assert!(waited > 0.0);
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn a_child_brings_only_its_own_layer_where_its_parent_is() {
    let [a, b] = peers!("a", "b");
    a.commits("one", &TASK, |target| {
        std::fs::write(target.join("large"), crate::nodes::random(3 << 20)).expect("write");
    })
    .await;
    assert_eq!(b.sees("reads", &TASK).await, None, "it has no file `text`");
    let first = b.figures().received_bytes;
    assert!(first > 3 << 20, "{first}");
    a.commit("two", &TASK, "child").await;
    // Content on this node asks no peer, so the name goes; the layers stay with their fork.
    b.publish("holds", &TASK).await;
    b.forget("task-cache/go").await;
    assert_eq!(b.sees("reads-child", &TASK).await, text("child"));
    let second = b.figures().received_bytes - first;
    assert!(second < 64 << 10, "only the child's layer comes: {second}");
    b.end("holds", Outcome::Failed).await;
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn every_backend_gives_to_every_other_one() {
    for (index, ground) in Ground::ALL.into_iter().enumerate() {
        let other = Ground::ALL[(index + 1) % 3];
        let a = Node::with("a", |start| start.ground = ground).await;
        let b = Node::with("b", |start| start.ground = other).await;
        let (Some(a), Some(b)) = (a, b) else { continue };
        b.knows(&a);
        a.knows(&b);
        a.commits("made", &OUTPUT, |target| {
            std::fs::create_dir(target.join("tree")).expect("mkdir");
            odd(&target.join("tree"));
        })
        .await;
        a.publish("here", &INPUT).await;
        b.publish("there", &INPUT).await;
        let snapshot = |node: &Node, volume: &str| {
            crate::common::Snapshot::of(&node.bench.target(volume).join("tree"))
        };
        crate::common::assert_same(&snapshot(&a, "here"), &snapshot(&b, "there"));
        a.end("here", Outcome::Failed).await;
        b.end("there", Outcome::Failed).await;
        a.finish().await;
        b.finish().await;
    }
}

#[tokio::test]
async fn a_hundred_pods_of_one_artifact_are_one_fetch() {
    let [a, b] = peers!("a", "b");
    a.commits("made", &OUTPUT, |target| {
        write(target, "made");
        std::fs::write(target.join("more"), crate::nodes::random(1 << 20)).expect("write");
    })
    .await;
    let names: Vec<String> = (0..100).map(|number| format!("pod{number}")).collect();
    join_all(names.iter().map(|name| b.publish(name, &INPUT))).await;
    b.has_fetched(ContentSource::Peer, 1).await;
    let received = b.figures().received_bytes;
    assert!(received < 2 << 20, "{received}");
    for name in &names {
        let seen = std::fs::read_to_string(b.bench.target(name).join("text"));
        assert_eq!(seen.ok(), text("made"));
        b.bench
            .outcome(&format!("pod-{name}"), Outcome::Failed)
            .await;
        b.bench.unpublish(name).await;
    }
    b.bench.quiet().await;
    a.finish().await;
    b.finish().await;
}

/// With a catalog. Pods on the node that has it fetch nothing.
#[tokio::test]
async fn a_hundred_pods_of_one_artifact_on_three_nodes_are_one_fetch_on_each_other_node() {
    let hub = Hub::start().await;
    let Some(nodes) = hub.nodes(&["a", "b", "c"]).await else {
        return;
    };
    nodes[0]
        .commits("made", &OUTPUT, |target| {
            write(target, "made");
            std::fs::write(target.join("more"), crate::nodes::random(1 << 20)).expect("write");
        })
        .await;
    hub.knows(1).await;
    let pods: Vec<(&Node, String)> = (0..100)
        .map(|number| (&nodes[number % 3], format!("pod{number}")))
        .collect();
    join_all(pods.iter().map(|(node, name)| node.publish(name, &INPUT))).await;
    // The copies are as good as the original.
    hub.knows(3).await;
    for (node, fetches) in nodes.iter().zip([0, 1, 1]) {
        node.has_fetched(ContentSource::Peer, fetches).await;
        let fetched = node.fetches(ContentSource::Peer);
        let counted = (fetched.artifacts, fetched.failures);
        assert_eq!(counted, (fetches, 0), "{:?}", node.id);
        let received = node.figures().received_bytes;
        assert!(received <= fetches * (2 << 20), "{:?}: {received}", node.id);
    }
    for (node, name) in &pods {
        let seen = std::fs::read_to_string(node.bench.target(name).join("text"));
        assert_eq!(seen.ok(), text("made"));
        node.bench
            .outcome(&format!("pod-{name}"), Outcome::Failed)
            .await;
        node.bench.unpublish(name).await;
    }
    for node in &nodes {
        node.bench.quiet().await;
    }
    finish(hub, nodes).await;
}
