//! Fetches that go on where they ended: a holder restarts with another key, another node becomes a
//! holder, the pod that asked first ends, or the whole fetch failed.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use baggageclaim::engine::notice::What;
use baggageclaim::model::Outcome;

use crate::common::bench::{Ground, eventually};
use crate::nodes::{INPUT, Node, OUTPUT, TASK, finish_all, introduce, random, read};

/// Files of the content, their bytes, and how many bytes leave the first holder in a second. A
/// frame has four files.
const FILES: usize = 16;
const FILE: usize = 256 << 10;
const RATE: u64 = 2 << 20;
/// A frame that is cut comes again, and tables come beside content.
const MORE: u64 = (1 << 20) + (128 << 10);

/// A node whose content leaves slowly, and others; all know each other.
async fn slow_and<const N: usize>(others: [&str; N]) -> Option<Vec<Node>> {
    let mut nodes = vec![Node::with("a", |start| start.bandwidth = Some(RATE)).await?];
    for other in others {
        nodes.push(Node::new(other).await?);
    }
    introduce(&nodes);
    Some(nodes)
}

/// The node has a part of what it fetches.
async fn is_fetching(node: &Node, bytes: u64) {
    eventually("a part of it came", || {
        let fetching = node.distribution.fetching();
        fetching.first().is_some_and(|it| it.bytes >= bytes)
    })
    .await;
}

fn assert_came_once(node: &Node) {
    let received = node.figures().received_bytes;
    let whole = u64::try_from(FILES * FILE).expect("small");
    assert!(
        (whole..whole + MORE).contains(&received),
        "{received} bytes"
    );
}

type Files = BTreeMap<String, Vec<u8>>;

fn files(kind: &str, count: usize) -> Files {
    let files = (0..count).map(|file| (format!("{kind}-{file}"), random(FILE)));
    files.collect()
}

async fn commits(node: &Node, volume: &str, attributes: &[(&str, &str)], made: &Files) {
    node.commits(volume, attributes, |target| {
        for (name, bytes) in made {
            fs::write(target.join(name), bytes).expect("write");
        }
    })
    .await;
}

#[tokio::test]
async fn a_holder_that_restarts_mid_fetch_gives_only_the_rest() {
    let Some(mut nodes) = slow_and(["b"]).await else {
        return;
    };
    let made = files("made", FILES);
    commits(&nodes[0], "made", &OUTPUT, &made).await;
    let [a, b] = &mut nodes[..] else {
        unreachable!("two were made");
    };
    let restarts = async {
        is_fetching(b, 1 << 20).await;
        a.goes().await;
        a.returns().await;
        b.knows(a);
    };
    tokio::join!(b.publish("read", &INPUT), restarts);
    assert!(read(&b.bench.target("read")) == made);
    assert_came_once(b);
    let whole = u64::try_from(FILES * FILE).expect("small");
    assert!(a.figures().sent_bytes < whole, "it was not cut");
    b.end("read", Outcome::Failed).await;
    finish_all(nodes).await;
}

#[tokio::test]
async fn a_node_that_got_the_content_meanwhile_gives_the_rest() {
    let Some(mut nodes) = slow_and(["b", "c"]).await else {
        return;
    };
    let made = files("made", FILES);
    commits(&nodes[0], "made", &OUTPUT, &made).await;
    nodes[2].publish("copy", &INPUT).await;
    let [a, b, c] = &mut nodes[..] else {
        unreachable!("three were made");
    };
    b.known_forgets();
    b.knows(a);
    let goes = async {
        is_fetching(b, 1 << 20).await;
        b.knows(c);
        a.goes().await;
    };
    tokio::join!(b.publish("read", &INPUT), goes);
    assert!(read(&b.bench.target("read")) == made);
    assert_came_once(b);
    let sent = [a.figures().sent_bytes, c.figures().sent_bytes];
    assert!(sent[1] > 1 << 20, "{sent:?}");
    b.end("read", Outcome::Failed).await;
    c.end("copy", Outcome::Failed).await;
    finish_all(nodes).await;
}

#[tokio::test]
async fn a_node_that_has_other_layers_gives_them_when_the_first_holder_is_gone() {
    let c = Node::with("c", |start| start.ground = Ground::ALL[2]).await;
    let (Some(mut nodes), Some(c)) = (slow_and(["b"]).await, c) else {
        return;
    };
    nodes.push(c);
    introduce(&nodes);
    let made = layers();
    commits(&nodes[0], "old", &TASK, &made[0]).await;
    commits(&nodes[0], "new", &TASK, &made[1]).await;
    let made: Files = made.into_iter().flatten().collect();
    let [a, b, c] = &mut nodes[..] else {
        unreachable!("three were made");
    };
    // One layer, as on each node without stacks of layers.
    c.publish("copy", &TASK).await;
    let goes = async {
        is_fetching(b, 1 << 20).await;
        a.goes().await;
    };
    // A cache would start empty if no node had the rest.
    tokio::join!(b.publish("read", &TASK), goes);
    assert!(read(&b.bench.target("read")) == made);
    let whole = u64::try_from(FILES * FILE).expect("small");
    assert!(c.figures().sent_bytes >= whole, "{:?}", c.figures());
    b.end("read", Outcome::Failed).await;
    c.end("copy", Outcome::Failed).await;
    finish_all(nodes).await;
}

#[tokio::test]
async fn a_fetch_goes_on_with_the_right_of_another_pod_that_waits() {
    let Some(nodes) = slow_and(["b"]).await else {
        return;
    };
    let [a, b] = &nodes[..] else {
        unreachable!("two were made");
    };
    let mut made = Files::new();
    for layer in ["old", "new"] {
        let more = files(layer, FILES / 2);
        commits(a, layer, &TASK, &more).await;
        made.extend(more);
    }
    let ends = async {
        is_fetching(b, 1).await;
        // The layer that comes needs no further right; the next one does.
        let second = b.publish("second", &TASK);
        let denied = async {
            eventually("the second pod asked", || a.figures().offered == 2).await;
            a.denies("first");
        };
        tokio::join!(second, denied);
    };
    tokio::join!(b.publish("first", &TASK), ends);
    for volume in ["first", "second"] {
        assert!(read(&b.bench.target(volume)) == made, "{volume}");
    }
    assert!(a.figures().refused > 0, "the first pod was not denied");
    assert_came_once(b);
    for volume in ["first", "second"] {
        b.end(volume, Outcome::Failed).await;
    }
    finish_all(nodes).await;
}

/// Twice: the first layer is whole, and then a part of the second one.
fn layers() -> [Files; 2] {
    ["old", "new"].map(|layer| files(layer, FILES / 2))
}

#[tokio::test]
async fn a_cache_does_not_wait_for_a_holder_that_is_gone_and_the_next_pod_gets_only_the_rest() {
    for reap in [false, true] {
        let Some(mut nodes) = slow_and(["b"]).await else {
            return;
        };
        let made = layers();
        commits(&nodes[0], "old", &TASK, &made[0]).await;
        commits(&nodes[0], "new", &TASK, &made[1]).await;
        let made: Files = made.into_iter().flatten().collect();
        let [a, b] = &mut nodes[..] else {
            unreachable!("two were made");
        };
        let goes = async {
            is_fetching(b, 3 << 20).await;
            a.goes().await;
        };
        let began = Instant::now();
        tokio::join!(b.publish("early", &TASK), goes);
        // The default for a whole transfer is 90 s.
        let took = began.elapsed();
        assert!(took < Duration::from_secs(40), "{took:?}");
        assert!(read(&b.bench.target("early")).is_empty(), "it starts empty");
        let why = b.heard().into_iter().find_map(|what| match what {
            What::NotFetched { why, .. } => Some(why),
            _ => None,
        });
        let why = why.expect("the pod is told");
        assert!(why.contains("no node that has the rest"), "{why}");
        b.end("early", Outcome::Failed).await;
        eventually("the fetch ends", || b.distribution.fetching().is_empty()).await;
        assert!(b.bench.engine.artifacts(None).is_empty());
        if reap {
            // A person wants the space.
            b.bench.engine.reap().await.expect("reap");
        }
        a.returns().await;
        b.knows(a);
        b.publish("late", &TASK).await;
        assert!(read(&b.bench.target("late")) == made);
        if reap {
            let received = b.figures().received_bytes;
            assert!(received > (4 << 20) + (2 << 20), "{received} bytes");
        } else {
            assert_came_once(b);
        }
        b.end("late", Outcome::Failed).await;
        finish_all(nodes).await;
    }
}
