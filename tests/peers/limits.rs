//! More at once than a node fetches and sends: what is refused comes from another holder, or later.

use std::fs;

use baggageclaim::model::Outcome;
use futures_util::future::join_all;

use crate::common::bench::eventually;
use crate::nodes::{Node, introduce, random, text};

/// How many artifacts a node fetches at once, and how many streams it sends.
const FETCHES: usize = 4;
const STREAMS: u64 = 8;

fn output(name: &str) -> [(&str, &str); 2] {
    [("type", "output"), ("name", name)]
}

/// A pod starts from an output; its volume has the name of the output.
async fn reads(node: &Node, name: &str) {
    let from = format!("artifact/{name}");
    let input = [("type", "input"), ("from", from.as_str())];
    node.publish(&format!("reads-{name}"), &input).await;
}

async fn ends(node: &Node, name: &str) {
    node.end(&format!("reads-{name}"), Outcome::Failed).await;
}

fn seen(node: &Node, name: &str) -> Option<String> {
    fs::read_to_string(node.bench.target(&format!("reads-{name}")).join("text")).ok()
}

#[tokio::test]
async fn a_holder_that_sends_as_much_as_it_may_refuses_and_the_content_comes_all_the_same() {
    // All streams together take about ten seconds, and a stream waits two for its turn.
    let holder = Node::with("holder", |start| start.bandwidth = Some(1 << 20)).await;
    let Some(holder) = holder else {
        return;
    };
    let mut nodes = vec![holder];
    for id in ["second", "left", "right", "reader"] {
        let Some(node) = Node::new(id).await else {
            return;
        };
        nodes.push(node);
    }
    introduce(&nodes);
    let [holder, second, left, right, reader] = &nodes[..] else {
        unreachable!("five");
    };
    // One more for each of two nodes than it fetches at once.
    let names = |node: &str| -> Vec<String> {
        let all = 0..=FETCHES;
        all.map(|number| format!("{node}{number}")).collect()
    };
    let of_nodes = [(left, names("left")), (right, names("right"))];
    for name in of_nodes.iter().flat_map(|(_, names)| names) {
        holder
            .commits(&format!("makes-{name}"), &output(name), |target| {
                fs::write(target.join("random"), random(1 << 20)).expect("write");
            })
            .await;
    }
    for name in ["both", "alone"] {
        holder
            .commit(&format!("makes-{name}"), &output(name), name)
            .await;
    }
    // The second node holds this one, too.
    reads(second, "both").await;
    assert_eq!(holder.figures().busy, 0);

    let all = of_nodes.iter();
    let all = all.flat_map(|(node, names)| names.iter().map(|name| reads(node, name)));
    let before = holder.figures().sent;
    let others = async {
        // The tables were sent. The content that follows takes seconds.
        eventually("it sends as much as it may", || {
            let figures = holder.figures();
            (figures.sent, figures.sending) == (before + STREAMS, STREAMS)
        })
        .await;
        for node in [left, right] {
            let fetching = node.distribution.fetching().len();
            assert_eq!(fetching, FETCHES, "{:?}", node.id);
        }
        let sent = second.figures().sent;
        let from_another = async {
            reads(reader, "both").await;
            assert!(holder.figures().busy > 0, "the holder was asked first");
            assert!(second.figures().sent > sent, "the second one has it");
        };
        // The holder alone has the other one.
        tokio::join!(from_another, reads(reader, "alone"));
    };
    tokio::join!(join_all(all), others);
    for name in ["both", "alone"] {
        assert_eq!(seen(reader, name), text(name));
        ends(reader, name).await;
    }
    ends(second, "both").await;
    for (node, names) in &of_nodes {
        for name in names {
            ends(node, name).await;
        }
    }
    let failures = |node: &Node| {
        let fetched = node.fetches(baggageclaim::engine::ContentSource::Peer);
        fetched.failures
    };
    assert_eq!(nodes.iter().map(failures).sum::<u64>(), 0);
    for node in nodes {
        node.finish().await;
    }
}
