//! Content that is evicted while it is sent, damaged content, and the shared tier beside peers.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use baggageclaim::engine::ContentSource;
use baggageclaim::model::Outcome;

use crate::nodes::{INPUT, Node, OUTPUT, TASK, name, peers, random, text, write};

#[tokio::test]
async fn content_that_is_deleted_while_it_is_sent_still_arrives() {
    let a = Node::with("a", |start| start.bandwidth = Some(2 << 20)).await;
    let (Some(a), Some(b)) = (a, Node::new("b").await) else {
        return;
    };
    a.knows(&b);
    b.knows(&a);
    let made = random(3 << 20);
    a.commits("made", &TASK, |target| {
        fs::write(target.join("random"), &made).expect("write");
    })
    .await;
    let reads = b.publish("read", &TASK);
    let deletes = async {
        crate::common::bench::eventually("it is being sent", || {
            b.figures().received_bytes > 64 << 10
        })
        .await;
        let [fetch] = &b.distribution.fetching()[..] else {
            panic!("one fetch runs");
        };
        assert_eq!(fetch.from.as_deref(), Some("peer a"));
        assert_eq!((a.figures().sending, b.figures().sending), (1, 0));
        a.forget("task-cache/go").await;
        let left = name("task-cache/go");
        assert!(
            a.bench
                .engine
                .local(&left.tenant, &left.reference)
                .is_none()
        );
        assert_eq!(b.distribution.fetching().len(), 1, "it still runs");
    };
    tokio::join!(reads, deletes);
    let read = fs::read(b.bench.target("read").join("random"));
    assert!(read.expect("read") == made);
    b.end("read", Outcome::Failed).await;
    a.finish().await;
    b.finish().await;
}

/// The file of this content in the pool's layers.
fn find(dir: &Path, content: &[u8]) -> Option<PathBuf> {
    for entry in fs::read_dir(dir).expect("list") {
        let path = entry.expect("list").path();
        if path.is_dir() {
            if let Some(found) = find(&path, content) {
                return Some(found);
            }
        } else if path.is_file() && fs::read(&path).is_ok_and(|it| it == content) {
            return Some(path);
        }
    }
    None
}

#[tokio::test]
async fn damaged_content_is_refused_reported_and_taken_from_another_holder() {
    let [a, b, c] = peers!("a", "b", "c");
    let made = random(300 << 10);
    a.commits("made", &OUTPUT, |target| {
        fs::write(target.join("random"), &made).expect("write");
    })
    .await;
    c.publish("copy", &INPUT).await;
    // The table was made before.
    let file = find(&a.bench.pool().join("layers"), &made).expect("it is there");
    let file = fs::File::options().write(true).open(file).expect("open");
    file.write_all_at(b"damage", 1000).expect("write");
    drop(file);
    // Only the damaged holder: nothing wrong becomes visible.
    let alone = Node::with("d", |start| {
        start.settings.input_wait = std::time::Duration::from_secs(1);
    });
    let Some(d) = alone.await else { return };
    a.knows(&d);
    d.knows(&a);
    d.try_publish("read", &INPUT)
        .await
        .expect_err("it is damaged");
    assert!(d.bench.engine.artifacts(None).is_empty());
    assert_eq!((d.figures().damaged, a.figures().damaged), (1, 1));
    let marked = a.bench.artifact("artifact/built").expect("it is there");
    assert!(marked.sharing.damaged, "{marked:?}");
    // The holder offers it no more, and the other one's copy is whole.
    b.publish("read", &INPUT).await;
    let read = fs::read(b.bench.target("read").join("random"));
    assert!(read.expect("read") == made);
    assert_eq!(b.figures().damaged, 0);
    b.end("read", Outcome::Failed).await;
    c.end("copy", Outcome::Failed).await;
    // The damage was made on purpose: the pool is not checked.
    for node in [a, b, c, d] {
        node.finish().await;
    }
}

#[tokio::test]
async fn a_fetch_that_is_given_up_goes_on_and_the_next_pod_joins_it() {
    let a = Node::with("a", |start| start.bandwidth = Some(2 << 20)).await;
    let b = Node::with("b", |start| {
        start.settings.fetch_wait = std::time::Duration::from_millis(100);
    });
    let (Some(a), Some(mut b)) = (a, b.await) else {
        return;
    };
    a.knows(&b);
    b.knows(&a);
    a.commits("made", &TASK, |target| {
        write(target, "made");
        fs::write(target.join("random"), random(2 << 20)).expect("write");
    })
    .await;
    assert_eq!(b.sees("early", &TASK).await, None);
    let why = b.heard().into_iter().find_map(|what| match what {
        baggageclaim::engine::notice::What::NotFetched { from, why, .. } => Some((from, why)),
        _ => None,
    });
    let (from, why) = why.expect("the pod is told");
    assert!(
        from == "peer a" && why.contains("from peer a"),
        "{from}: {why}"
    );
    crate::common::bench::eventually("the fetch ends", || b.distribution.fetching().is_empty())
        .await;
    assert_eq!(b.sees("late", &TASK).await, text("made"));
    assert_eq!(b.fetches(ContentSource::Peer).artifacts, 1);
    a.finish().await;
    b.finish().await;
}
