//! The order of the sources: peers and a shared tier that have the same content, sources that are
//! left out, and clears beside a tier.

use std::fs;
use std::path::Path;

use baggageclaim::distribution::Sources;
use baggageclaim::distribution::roster::Controller;
use baggageclaim::engine::ContentSource;
use baggageclaim::model::{Coverage, Outcome};
use baggageclaim::shared::{Store, Times, Url};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::catalog::Hub;
use crate::common::bench::eventually;
use crate::nodes::{
    INPUT, Node, OUTPUT, RESOURCE, TASK, finish_all, introduce, tenant, text, write,
};

pub(crate) fn store(dir: &Path) -> Store {
    let url = format!("file://{}", dir.display());
    let url: Url = url.parse().expect("a URL");
    url.open_later(Handle::current(), Times::default())
}

/// A node that made an output, a resource cache and a task cache, and put them into a tier; and one
/// that has nothing. The other one takes content from these sources.
async fn two(sources: Sources) -> Option<(TempDir, [Node; 2])> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let a = Node::with("a", |start| start.store = Some(store(dir.path()))).await?;
    let b = Node::with("b", |start| {
        start.store = Some(store(dir.path()));
        start.settings.sources = sources;
        start.settings.input_wait = std::time::Duration::from_secs(5);
    });
    let nodes = [a, b.await?];
    introduce(&nodes);
    for (made, kind) in [
        (&OUTPUT, "output"),
        (&RESOURCE, "resource"),
        (&TASK, "task"),
    ] {
        nodes[0].commit(&format!("{kind}-made"), made, kind).await;
    }
    eventually("all is in the tier", || {
        let metrics = nodes[0].distribution.metrics();
        (metrics.uploads, metrics.uploads_waiting) == (3, 0)
    })
    .await;
    Some((dir, nodes))
}

const READ: [(&[(&str, &str)], &str); 3] =
    [(&INPUT, "output"), (&RESOURCE, "resource"), (&TASK, "task")];

#[tokio::test(flavor = "multi_thread")]
async fn content_that_two_sources_have_comes_from_the_preferred_one() {
    for (sources, from_peers, from_tier) in [
        (Sources::PeersThenShared, 3, 0),
        (Sources::SharedThenPeers, 0, 3),
        (Sources::Peers, 3, 0),
        (Sources::Shared, 0, 3),
    ] {
        let Some((_dir, mut nodes)) = two(sources).await else {
            return;
        };
        for (read, kind) in READ {
            let seen = nodes[1].sees(&format!("{kind}-read"), read).await;
            assert_eq!(seen, text(kind), "{sources}");
        }
        for (source, count) in [
            (ContentSource::Peer, from_peers),
            (ContentSource::Shared, from_tier),
        ] {
            nodes[1].has_fetched(source, count).await;
        }
        // What is told is what happened.
        let sent = nodes[0].figures().sent > 0;
        assert_eq!(sent, from_peers > 0, "{sources}");
        let asked = nodes[1].figures().questions > 0;
        assert_eq!(asked, sources != Sources::Shared, "{sources}");
        let from = if from_peers > 0 {
            "peer a"
        } else {
            "the shared tier"
        };
        let hits = nodes[1].hits();
        let told = hits.iter().map(|hit| hit.fetched_from.as_deref());
        assert_eq!(told.collect::<Vec<_>>(), [Some(from); 3], "{sources}");
        finish_all(nodes).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_preferred_source_lacks_comes_from_the_other_one() {
    // The names are in the tier, and the content is not.
    let Some((dir, nodes)) = two(Sources::SharedThenPeers).await else {
        return;
    };
    let ours = dir.path().join("v1/ci");
    fs::rename(ours.join("layers"), ours.join("lost")).expect("renamed");
    assert_eq!(nodes[1].sees("read", &RESOURCE).await, text("resource"));
    assert!(nodes[0].figures().sent > 0);
    // A commit that the tier does not have yet is newer.
    nodes[0]
        .commit("again", &[("share", "auto"), TASK[0], TASK[1]], "newer")
        .await;
    assert_eq!(nodes[1].sees("newer", &TASK).await, text("newer"));
    finish_all(nodes).await;

    let Some((_dir, mut nodes)) = two(Sources::PeersThenShared).await else {
        return;
    };
    nodes[0].goes().await;
    assert_eq!(nodes[1].sees("read", &RESOURCE).await, text("resource"));
    finish_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_left_out_gives_nothing_and_its_clears_count() {
    let Some((_dir, mut nodes)) = two(Sources::Peers).await else {
        return;
    };
    // The tier gets what this node commits, and gives nothing.
    let own = [("type", "task-cache"), ("key", "own")];
    nodes[1].commit("writes", &own, "own").await;
    eventually("it is uploaded", || {
        nodes[1].distribution.metrics().uploads == 1
    })
    .await;
    // A name that was cleared in the tier is cleared on peers that did not hear of it.
    let resource = baggageclaim::model::Reference::ResourceCache("git".parse().expect("a key"));
    let tenant = crate::nodes::tenant("ci");
    let cleared = nodes[1].distribution.clear(&tenant, &resource).await;
    cleared.expect("it is cleared");
    assert_eq!(nodes[1].sees("cleared", &RESOURCE).await, None);
    assert_eq!(nodes[1].sees("task", &TASK).await, text("task"));
    nodes[0].goes().await;
    nodes[1].forget("task-cache/go").await;
    assert_eq!(nodes[1].sees("nowhere", &TASK).await, None);
    let waited = nodes[1].try_publish("input", &INPUT).await;
    let error = waited.expect_err("the tier is not asked").to_string();
    assert!(error.contains("no peer has it yet"), "{error}");
    assert_eq!(nodes[1].fetches(ContentSource::Shared).artifacts, 0);
    finish_all(nodes).await;

    let Some((dir, nodes)) = two(Sources::Shared).await else {
        return;
    };
    let ours = dir.path().join("v1/ci");
    fs::rename(&ours, dir.path().join("lost")).expect("renamed");
    assert_eq!(nodes[1].sees("nowhere", &TASK).await, None);
    // It gives content all the same.
    nodes[1].commit("writes", &own, "own").await;
    assert_eq!(nodes[0].sees("reads", &own).await, text("own"));
    nodes[0].has_fetched(ContentSource::Peer, 1).await;
    finish_all(nodes).await;
}

/// A node of a cluster with a tier, which finds the controller at this place.
async fn member(
    hub: &Hub,
    id: &str,
    dir: &Path,
    sources: Sources,
    place: &watch::Sender<Option<Controller>>,
) -> Option<Node> {
    let place = place.subscribe();
    let node = Node::with(id, |start| {
        start.store = Some(store(dir));
        start.settings.sources = sources;
        start.controller = Some(place);
    });
    let node = node.await?;
    let known = (node.id.clone(), node.key.name());
    hub.nodes.0.lock().push(known);
    Some(node)
}

/// The uploads of a node that the tier has, and those that it refused.
async fn uploads(node: &Node, expected: (u64, u64)) {
    eventually("the tier has answered", || {
        let metrics = node.distribution.metrics();
        let uploads = (metrics.uploads, metrics.uploads_refused);
        (uploads, metrics.uploads_waiting) == (expected, 0)
    })
    .await;
}

/// A name without content before the clear.
const FIRST: [(&str, &str); 2] = [("type", "task-cache"), ("key", "first")];

#[tokio::test(flavor = "multi_thread")]
async fn new_content_takes_the_place_of_cleared_content_in_the_tier_and_old_never_returns() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut hub = Hub::start().await;
    let place = hub.place.clone();
    // This node finds the controller by itself. It always reaches the tier.
    let own = watch::Sender::new(hub.place.borrow().clone());
    let mut nodes = Vec::new();
    for (id, sources, place) in [
        ("a", Sources::default(), &place),
        ("b", Sources::default(), &place),
        ("reader", Sources::Shared, &place),
        ("away", Sources::default(), &own),
    ] {
        let Some(node) = member(&hub, id, dir.path(), sources, place).await else {
            return;
        };
        nodes.push(node);
    }
    introduce(&nodes);
    hub.has_all(&nodes).await;
    let [a, b, reader, away] = &nodes[..] else {
        unreachable!("there are four")
    };

    a.commit("old-resource", &RESOURCE, "old").await;
    a.commit("old-task", &TASK, "old").await;
    uploads(a, (2, 0)).await;
    for (volume, of, seen) in [("w-task", TASK, text("old")), ("w-first", FIRST, None)] {
        away.publish(volume, &of).await;
        let target = away.bench.target(volume);
        assert_eq!(fs::read_to_string(target.join("text")).ok(), seen);
        write(&target, "old");
    }
    own.send_replace(None);
    eventually("the stream ends", || (hub.figures)().nodes == 3).await;
    let fence = hub.clear(Coverage::Namespace(tenant("ci")));
    hub.is_applied(&fence, 3).await;

    // What only the tier has is cleared, too.
    for (volume, of) in [("r-resource", RESOURCE), ("r-task", TASK)] {
        assert_eq!(reader.sees(volume, &of).await, None, "{volume}");
    }
    // Two steps begin at the same time. Both commit: the last one wins.
    b.publish("early", &TASK).await;
    a.publish("late", &TASK).await;
    write(&b.bench.target("early"), "new");
    write(&a.bench.target("late"), "newest");
    b.end("early", Outcome::Succeeded).await;
    uploads(b, (1, 0)).await;
    a.end("late", Outcome::Succeeded).await;
    uploads(a, (3, 0)).await;
    assert_eq!(b.sees("empty", &RESOURCE).await, None);
    b.commit("new-resource", &RESOURCE, "new").await;
    b.commit("new-first", &FIRST, "new").await;
    uploads(b, (3, 0)).await;

    // This node has not heard of the clear.
    for volume in ["w-task", "w-first"] {
        away.end(volume, Outcome::Succeeded).await;
    }
    uploads(away, (0, 2)).await;
    for (volume, of, expected) in [
        ("resource", RESOURCE, "new"),
        ("task", TASK, "newest"),
        ("first", FIRST, "new"),
    ] {
        for node in [reader, away] {
            assert_eq!(node.sees(volume, &of).await, text(expected), "{volume}");
        }
    }
    reader.has_fetched(ContentSource::Shared, 3).await;
    crate::catalog::finish(hub, nodes).await;
}
