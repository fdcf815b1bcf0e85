//! More at once than a node fetches and sends: what is refused comes from another holder, or later.

use std::fs;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baggageclaim::link;
use baggageclaim::model::Outcome;
use baggageclaim::proto::peer::v1 as wire;
use futures_util::future::join_all;
use tokio::net::TcpStream;
use tonic::Code;
use wire::get_layer_request::Part;
use wire::peer_client::PeerClient;

use crate::common::bench::eventually;
use crate::nodes::{Node, finish_all, introduce, peers, random, text};

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
            // On a slow machine a stream may end before the last one begins.
            figures.sent >= before + STREAMS && figures.sending == STREAMS
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

fn ask(output: &str) -> wire::Ask {
    wire::Ask {
        tenant: "ci".to_owned(),
        reference: format!("artifact/{output}"),
        pod: "p".to_owned(),
        pod_uid: "p".to_owned(),
        pod_namespace: String::new(),
        clone: None,
    }
}

/// How many calls of a peer ask the API server at once.
const CHECKS: u64 = 8;

/// Each check may ask the API server, and that may be away.
#[tokio::test]
async fn few_checks_of_a_peer_run_at_once_and_what_was_checked_before_waits_for_none() {
    let holder = Node::with("holder", |start| start.remembers = true).await;
    let (Some(holder), Some(greedy)) = (holder, Node::new("greedy").await) else {
        return;
    };
    let Some(reader) = Node::new("reader").await else {
        return;
    };
    let nodes = [holder, greedy, reader];
    introduce(&nodes);
    let [holder, greedy, reader] = &nodes;
    holder
        .commit("makes-small", &output("small"), "small")
        .await;
    let client = |node: &Node| {
        let channel = link::connect(&node.key, holder.key.name(), holder.address.to_string());
        PeerClient::new(channel.expect("TLS"))
    };
    let calls = |client: PeerClient<tonic::transport::Channel>, pods: std::ops::Range<u64>| {
        let calls = pods.map(|pod| {
            let mut ask = ask("small");
            ask.pod_uid = format!("p-{pod}");
            let request = wire::GetArtifactRequest { ask: Some(ask) };
            let mut client = client.clone();
            tokio::spawn(async move { client.get_artifact(request).await.map(drop) })
        });
        calls.collect::<Vec<_>>()
    };
    let mut known = client(greedy);
    let found = loop {
        let request = wire::GetArtifactRequest {
            ask: Some(ask("small")),
        };
        let answer = known.get_artifact(request).await.expect("an answer");
        if let Some(artifact) = answer.into_inner().artifact {
            break artifact;
        }
        holder.bench.engine.content_changed().await;
    };
    let before = holder.known.checks.load(Ordering::SeqCst);
    let checks = || holder.known.checks.load(Ordering::SeqCst) - before;
    let gate = holder.known.gate.write().await;
    // One connection has no more calls than this.
    let of_one = [calls(client(greedy), 0..50), calls(client(greedy), 50..100)];
    eventually("some are checked", || checks() >= CHECKS).await;
    let of_another = calls(client(reader), 0..1);
    eventually("the other peer's is, too", || checks() > CHECKS).await;
    assert_eq!(checks(), CHECKS + 1);
    // A transfer that runs goes on.
    let table = wire::GetLayerRequest {
        ask: Some(ask("small")),
        artifact: found.id,
        layer: found.layers[0].digest.clone(),
        part: Some(Part::Table(wire::Table {})),
    };
    let table = tokio::time::timeout(PATIENCE, known.get_layer(table)).await;
    table.expect("it waits for no check").expect("it may");
    drop(gate);
    for call in of_one.into_iter().flatten().chain(of_another) {
        call.await.expect("no panic").expect("an answer");
    }
    assert_eq!(checks(), 101);
    finish_all(nodes).await;
}

/// Less than the time in which two times 256 connections end, one after the other.
const PATIENCE: Duration = Duration::from_secs(15);

/// A pod that reaches the port opens many connections and says nothing. Each lasts for ten seconds.
#[tokio::test]
async fn silent_connections_keep_no_peer_out() {
    let [holder, reader] = peers!("holder", "reader");
    holder
        .commit("makes-small", &output("small"), "small")
        .await;
    let reads_beside_them = async {
        let mut silent = Vec::new();
        // More than may be in their handshake.
        for _ in 0..600 {
            let stream = TcpStream::connect(holder.address).await;
            silent.push(stream.expect("it listens"));
        }
        reads(&reader, "small").await;
    };
    let read = tokio::time::timeout(PATIENCE, reads_beside_them).await;
    read.expect("the port serves a new connection before the silent ones end");
    assert_eq!(seen(&reader, "small"), text("small"));
    ends(&reader, "small").await;
    finish_all([holder, reader]).await;
}

/// More than travels before a peer reads it.
const LARGE: usize = 16 << 20;

/// It was taken over, or hangs. Its streams last for half a minute, or hours if it reads a little.
#[tokio::test]
async fn a_peer_that_does_not_read_leaves_half_of_the_streams_to_others() {
    let [holder, greedy, reader] = peers!("holder", "greedy", "reader");
    holder
        .commits("makes-large", &output("large"), |target| {
            fs::write(target.join("random"), random(LARGE)).expect("write");
        })
        .await;
    holder
        .commit("makes-small", &output("small"), "small")
        .await;
    let channel = link::connect(&greedy.key, holder.key.name(), holder.address.to_string());
    let mut client = PeerClient::new(channel.expect("TLS"));
    let ask = Some(ask("large"));
    let found = loop {
        let request = wire::GetArtifactRequest { ask: ask.clone() };
        let answer = client.get_artifact(request).await.expect("an answer");
        if let Some(artifact) = answer.into_inner().artifact {
            break artifact;
        }
        holder.bench.engine.content_changed().await;
    };
    let wants = vec![wire::Want {
        count: 1,
        ..wire::Want::default()
    }];
    let request = wire::GetLayerRequest {
        ask,
        artifact: found.id,
        layer: found.layers[0].digest.clone(),
        part: Some(Part::Content(wire::Content { wants })),
    };
    let all = (0..STREAMS).map(|_| {
        let (mut client, request) = (client.clone(), request.clone());
        async move { client.get_layer(request).await }
    });
    let (given, refused): (Vec<_>, Vec<_>) =
        join_all(all).await.into_iter().partition(Result::is_ok);
    for refused in &refused {
        let code = refused.as_ref().err().map(tonic::Status::code);
        assert_eq!(code, Some(Code::ResourceExhausted));
    }
    assert_eq!(refused.len() as u64, STREAMS / 2);
    let figures = holder.figures();
    assert_eq!((figures.sending, figures.busy), (STREAMS / 2, STREAMS / 2));

    reads(&reader, "small").await;
    assert_eq!(seen(&reader, "small"), text("small"));
    let is_left = || holder.figures().sending == STREAMS / 2;
    eventually("the other streams are left", is_left).await;
    assert_eq!(holder.figures().busy, STREAMS / 2);
    drop((given, client));
    ends(&reader, "small").await;
    // Its places are free again, for itself, too.
    reads(&greedy, "large").await;
    ends(&greedy, "large").await;
    finish_all([holder, greedy, reader]).await;
}
