//! The order of the sources: peers and a shared tier that have the same content, and sources that
//! are left out.

use std::fs;
use std::path::Path;

use baggageclaim::distribution::Sources;
use baggageclaim::engine::ContentSource;
use baggageclaim::shared::{Store, Times, Url};
use tempfile::TempDir;
use tokio::runtime::Handle;

use crate::common::bench::eventually;
use crate::nodes::{INPUT, Node, OUTPUT, RESOURCE, TASK, introduce, text};

fn store(dir: &Path) -> Store {
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

async fn finish(nodes: [Node; 2]) {
    for node in nodes {
        node.finish().await;
    }
}

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
        let fetched = [ContentSource::Peer, ContentSource::Shared];
        let fetched = fetched.map(|source| nodes[1].fetches(source).artifacts);
        assert_eq!(fetched, [from_peers, from_tier], "{sources}");
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
        finish(nodes).await;
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
    finish(nodes).await;

    let Some((_dir, mut nodes)) = two(Sources::PeersThenShared).await else {
        return;
    };
    nodes[0].goes().await;
    assert_eq!(nodes[1].sees("read", &RESOURCE).await, text("resource"));
    finish(nodes).await;
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
    finish(nodes).await;

    let Some((dir, nodes)) = two(Sources::Shared).await else {
        return;
    };
    let ours = dir.path().join("v1/ci");
    fs::rename(&ours, dir.path().join("lost")).expect("renamed");
    assert_eq!(nodes[1].sees("nowhere", &TASK).await, None);
    // It gives content all the same.
    nodes[1].commit("writes", &own, "own").await;
    assert_eq!(nodes[0].sees("reads", &own).await, text("own"));
    assert_eq!(nodes[0].fetches(ContentSource::Peer).artifacts, 1);
    finish(nodes).await;
}
