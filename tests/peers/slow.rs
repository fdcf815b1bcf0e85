//! A holder that answers, and then sends little.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baggageclaim::engine::{Error, Published};
use baggageclaim::link::{self, Key};
use baggageclaim::model::Outcome;
use baggageclaim::proto::peer::v1 as wire;
use baggageclaim::server::Drain;
use futures_util::Stream;
use futures_util::future::join_all;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use wire::get_layer_request::Part;
use wire::peer_client::PeerClient;
use wire::peer_server::{Peer, PeerServer};

use crate::common::bench::eventually;
use crate::nodes::{Node, finish_all, introduce, random, read, tenant};

/// The pause before each part.
const PAUSE: Duration = Duration::from_millis(250);
/// Bytes of a part: a few, and a quarter of what a holder must send if there is another one.
const FEW: usize = 4;
const QUARTER: usize = 64 << 10;

type Chunks = Pin<Box<dyn Stream<Item = Result<wire::Chunk, Status>> + Send>>;

/// A peer that gives what another one has: tables or content in parts of this size.
#[derive(Debug, Clone)]
struct Trickle {
    of: PeerClient<Channel>,
    /// Whether it is the content that comes in parts.
    content: bool,
    part: usize,
    parts: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Peer for Trickle {
    async fn get_artifact(
        &self,
        request: Request<wire::GetArtifactRequest>,
    ) -> Result<Response<wire::GetArtifactResponse>, Status> {
        self.of.clone().get_artifact(request.into_inner()).await
    }

    type GetLayerStream = Chunks;

    async fn get_layer(
        &self,
        request: Request<wire::GetLayerRequest>,
    ) -> Result<Response<Chunks>, Status> {
        let request = request.into_inner();
        let is_content = matches!(request.part, Some(Part::Content(_)));
        let mut stream = self.of.clone().get_layer(request).await?.into_inner();
        if is_content != self.content {
            return Ok(Response::new(Box::pin(stream)));
        }
        let (sender, receiver) = mpsc::channel(1);
        let (parts, size) = (Arc::clone(&self.parts), self.part);
        tokio::spawn(async move {
            let mut pause = tokio::time::interval(PAUSE);
            while let Ok(Some(chunk)) = stream.message().await {
                for part in chunk.data.chunks(size) {
                    pause.tick().await;
                    let data = part.to_vec().into();
                    if sender.send(Ok(wire::Chunk { data })).await.is_err() {
                        return;
                    }
                    parts.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn report_damage(
        &self,
        _request: Request<wire::ReportDamageRequest>,
    ) -> Result<Response<wire::ReportDamageResponse>, Status> {
        panic!("nothing is damaged")
    }
}

/// `to` has it in the place of `from`. Returns how many parts it sent.
async fn stands_between(from: &Node, to: &Node, content: bool, part: usize) -> Arc<AtomicU64> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let key = Key::open(&dir.path().join("key")).expect("a key");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("an address");
    // The holder takes it for the receiver.
    from.knows_at(to, address, key.name(), None);
    to.knows_at(from, address, key.name(), None);
    let channel = link::connect(&key, from.key.name(), from.address.to_string());
    let parts = Arc::new(AtomicU64::new(0));
    let trickle = Trickle {
        of: PeerClient::new(channel.expect("TLS")),
        content,
        part,
        parts: Arc::clone(&parts),
    };
    let drain = Drain::new(Duration::from_secs(1));
    let links = link::accept(&key, listener, Arc::new(|_| true), drain).expect("TLS");
    let served =
        tonic::transport::Server::builder().serve_with_incoming(PeerServer::new(trickle), links);
    tokio::spawn(served);
    parts
}

#[tokio::test]
async fn the_next_holder_takes_the_place_of_one_that_sends_a_few_bytes_a_second() {
    let mut nodes = Vec::new();
    for id in ["a", "b", "c"] {
        let Some(node) = Node::new(id).await else {
            return;
        };
        nodes.push(node);
    }
    introduce(&nodes);
    let [a, b, c] = &nodes[..] else {
        unreachable!("three were made");
    };
    for (kind, content) in [("table", false), ("content", true)] {
        let output = [("type", "output"), ("name", kind)];
        let from = format!("artifact/{kind}");
        let input = [("type", "input"), ("from", &*from)];
        let made = |target: &std::path::Path| {
            std::fs::write(target.join("random"), random(64 << 10)).expect("write");
        };
        a.knows(b);
        a.commits(&format!("{kind}-made"), &output, made).await;
        let (copy, reads) = (format!("{kind}-copy"), format!("{kind}-read"));
        c.publish(&copy, &input).await;
        b.known_forgets();
        let parts = stands_between(a, b, content, FEW).await;
        b.knows(c);
        let began = std::time::Instant::now();
        b.publish(&reads, &input).await;
        let took = began.elapsed();
        assert!(read(&b.bench.target(&reads)) == read(&c.bench.target(&copy)));
        // It sent all the time, and was given up after 5 s.
        assert!(parts.load(Ordering::SeqCst) > 5, "{kind}: {parts:?}");
        assert!(took < Duration::from_secs(15), "{kind}: {took:?}");
        b.end(&reads, Outcome::Failed).await;
        c.end(&copy, Outcome::Failed).await;
    }
    finish_all(nodes).await;
}

#[tokio::test]
async fn a_slow_holder_is_replaced_if_there_is_another_one_and_kept_if_not() {
    let mut nodes = Vec::new();
    for id in ["a", "b", "c"] {
        let Some(node) = Node::new(id).await else {
            return;
        };
        nodes.push(node);
    }
    introduce(&nodes);
    let [a, b, c] = &nodes[..] else {
        unreachable!("three were made");
    };
    // At the slow holder's rate the small one takes longer than a slow holder gets, and the large
    // one a minute.
    for (size, other) in [(2 << 20, false), (16 << 20, true)] {
        let name = format!("of-{size}");
        let output = [("type", "output"), ("name", &*name)];
        let from = format!("artifact/{name}");
        let input = [("type", "input"), ("from", &*from)];
        let made = |target: &std::path::Path| {
            std::fs::write(target.join("random"), random(size)).expect("write");
        };
        a.knows(b);
        a.commits(&format!("{name}-made"), &output, made).await;
        let (copy, reads) = (format!("{name}-copy"), format!("{name}-read"));
        c.publish(&copy, &input).await;
        b.known_forgets();
        let parts = stands_between(a, b, true, QUARTER).await;
        if other {
            b.knows(c);
        }
        let began = std::time::Instant::now();
        b.publish(&reads, &input).await;
        let took = began.elapsed();
        assert!(read(&b.bench.target(&reads)) == read(&c.bench.target(&copy)));
        let sent = parts.load(Ordering::SeqCst) * QUARTER as u64;
        if other {
            assert!(sent > 0 && sent < size as u64 / 2, "{sent} of {size}");
            assert!(took < Duration::from_secs(30), "{took:?}");
        } else {
            assert!(sent >= size as u64, "{sent} of {size}");
        }
        b.end(&reads, Outcome::Failed).await;
        c.end(&copy, Outcome::Failed).await;
    }
    finish_all(nodes).await;
}

/// A pod of this namespace.
async fn publish(
    node: &Node,
    namespace: &str,
    volume: &str,
    attributes: &[(&str, &str)],
) -> Result<Published, Error> {
    let pod = format!("pod-{volume}");
    let mut request = node.bench.request(&pod, volume, attributes);
    request.tenant = tenant(namespace);
    node.distribution.bring(&mut request).await?;
    node.bench.engine.publish(request).await
}

/// An output of this namespace, whose name it is, too.
async fn commits(node: &Node, namespace: &str, name: &str, bytes: usize) {
    let (volume, output) = (format!("made-{name}"), [("type", "output"), ("name", name)]);
    let made = publish(node, namespace, &volume, &output).await;
    made.expect("an empty volume");
    let target = node.bench.target(&volume);
    std::fs::write(target.join("random"), random(bytes)).expect("write");
    node.end(&volume, Outcome::Succeeded).await;
}

async fn reads(node: &Node, namespace: &str, name: &str) -> Result<Published, Error> {
    let from = format!("artifact/{name}");
    let input = [("type", "input"), ("from", &*from)];
    publish(node, namespace, &format!("read-{name}"), &input).await
}

/// The first and the last of three nodes send so slowly that 16 MiB take half a minute or more.
async fn two_slow_holders() -> Option<[Node; 3]> {
    let slow = |id: &'static str, bandwidth| {
        Node::with(id, move |start| start.bandwidth = Some(bandwidth))
    };
    let nodes = [
        slow("a", 512 << 10).await?,
        Node::new("b").await?,
        slow("c", 128 << 10).await?,
    ];
    introduce(&nodes);
    Some(nodes)
}

#[tokio::test]
async fn slow_fetches_whose_pods_have_ended_give_one_place_to_a_pod_that_waits() {
    let Some(nodes) = two_slow_holders().await else {
        return;
    };
    let [a, b, c] = &nodes;
    // All places: four for one namespace, and one for another.
    let pods = [
        ("one", "one-1"),
        ("one", "one-2"),
        ("one", "one-3"),
        ("one", "one-4"),
        ("two", "two-1"),
    ];
    for (namespace, name) in pods {
        let holder = if namespace == "one" { a } else { c };
        commits(holder, namespace, name, 16 << 20).await;
    }
    commits(c, "three", "three-1", 4 << 10).await;
    let slow = || {
        let fetching = b.distribution.fetching();
        fetching.iter().filter(|it| it.of > 1 << 20).count()
    };
    tokio::select! {
        all = join_all(pods.map(|(namespace, name)| reads(b, namespace, name))) => {
            panic!("they are not slow: {all:?}");
        }
        () = eventually("all places are taken", || slow() == pods.len()) => {}
    }
    // The pods have ended.
    let read_it = reads(b, "three", "three-1").await;
    read_it.expect("it gets a place");
    assert_eq!(slow(), pods.len() - 1, "the other fetches go on");
    b.end("read-three-1", Outcome::Failed).await;
    finish_all(nodes).await;
}

#[tokio::test]
async fn a_fetch_gives_its_place_to_a_pod_that_can_use_it_only() {
    let Some(nodes) = two_slow_holders().await else {
        return;
    };
    let [a, b, c] = &nodes;
    let of_one = ["one-1", "one-2", "one-3", "one-4"];
    for name in of_one {
        commits(a, "one", name, 16 << 20).await;
    }
    commits(c, "two", "two-1", 16 << 20).await;
    commits(c, "one", "one-5", 4 << 10).await;
    let fetches = |name: &str| {
        let reference = format!("artifact/{name}");
        let fetching = b.distribution.fetching();
        let mut fetching = fetching.iter();
        fetching.any(|it| it.reference.to_string() == reference)
    };
    let awaited = async {
        let all = join_all(of_one.map(|name| reads(b, "one", name))).await;
        panic!("they are not slow: {all:?}");
    };
    let mut fifth = Box::pin(reads(b, "one", "one-5"));
    tokio::select! {
        () = awaited => {}
        () = async {
            let all_run = || of_one.iter().all(|name| fetches(name));
            eventually("its namespace has all of its places", all_run).await;
            tokio::select! {
                two = reads(b, "two", "two-1") => panic!("it is not slow: {two:?}"),
                () = eventually("all places are taken", || fetches("two-1")) => {}
            }
            // Its pod has ended. The fifth pod of the other namespace has no use for its place. A
            // fetch that gives way does so after 15 s.
            tokio::select! {
                done = &mut fifth => panic!("four of its namespace run: {done:?}"),
                () = tokio::time::sleep(Duration::from_secs(25)) => {}
            }
            assert!(fetches("two-1"), "it goes on");
        } => {}
    }
    // Pods of its own namespace have ended.
    fifth.await.expect("it gets a place");
    let left = of_one.iter().filter(|name| fetches(name)).count();
    assert_eq!(left, of_one.len() - 1, "the other fetches go on");
    b.end("read-one-5", Outcome::Failed).await;
    finish_all(nodes).await;
}
