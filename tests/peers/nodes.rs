//! Nodes that are peers of each other, steps of pods on these nodes, and a link between two of them
//! that can be cut or hang.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use baggageclaim::distribution::roster::{Controller, Directory};
use baggageclaim::distribution::{
    Distribution, Fetched, FindDistribution, PeerFigures, Peers, Settings,
};
use baggageclaim::engine::notice::{Forked, What};
use baggageclaim::engine::{ContentSource, Error, Notice, Notices, Published};
use baggageclaim::hub;
use baggageclaim::k8s::checked::Checked;
use baggageclaim::link::Key;
use baggageclaim::model::{Name, NodeId, Outcome, Sha256, Tenant};
use baggageclaim::peer::{self, Access, Asked, Peer, Refusal, Roster};
use baggageclaim::server::Drain;
use baggageclaim::shared::Store;
use baggageclaim::telemetry::metrics;
use parking_lot::Mutex;
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, RwLock, mpsc, watch};
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use crate::common::bench::{Bench, Ground, NEVER, eventually, soon};

pub(crate) const OUTPUT: [(&str, &str); 2] = [("type", "output"), ("name", "built")];
pub(crate) const INPUT: [(&str, &str); 2] = [("type", "input"), ("from", "artifact/built")];
pub(crate) const RESOURCE: [(&str, &str); 2] = [("type", "resource-cache"), ("key", "git")];
pub(crate) const TASK: [(&str, &str); 2] = [("type", "task-cache"), ("key", "go")];

pub(crate) fn tenant(text: &str) -> Tenant {
    text.parse().expect("a label")
}

pub(crate) fn name(reference: &str) -> Name {
    Name {
        tenant: tenant("ci"),
        reference: reference.parse().expect("a reference"),
    }
}

/// What one node knows of the others.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Its peers, and the tenants that each may read; `None`: all.
    peers: Mutex<Vec<(Peer, Option<Vec<Tenant>>)>>,
    /// The names of pods that give no right any more.
    denied: Mutex<Vec<String>>,
    /// Held for writing: rights are not known yet.
    pub(crate) gate: RwLock<()>,
    /// How often a right was looked up.
    pub(crate) checks: AtomicU64,
}

impl Roster for Known {
    fn peers(&self, _tenant: &Tenant) -> Vec<Peer> {
        self.peers
            .lock()
            .iter()
            .map(|(peer, _)| peer.clone())
            .collect()
    }

    fn count(&self) -> u64 {
        self.peers.lock().len() as u64
    }

    fn named(&self, key: &Sha256) -> Option<NodeId> {
        let known = self.peers.lock();
        let found = known.iter().find(|(peer, _)| peer.key == *key);
        found.map(|(peer, _)| peer.name.clone())
    }

    fn peer(&self, name: &NodeId) -> Option<Peer> {
        let known = self.peers.lock();
        let found = known.iter().find(|(peer, _)| peer.name == *name);
        found.map(|(peer, _)| peer.clone())
    }
}

#[async_trait]
impl Access for Known {
    async fn check(&self, peer: &NodeId, asked: &Asked) -> Result<(), Refusal> {
        self.checks.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.read().await);
        if self.denied.lock().contains(&asked.pod.name) {
            return Err(Refusal::Denied("the pod has ended".to_owned()));
        }
        let known = self.peers.lock();
        let found = known.iter().find(|(it, _)| it.name == *peer);
        match found {
            Some((_, None)) => Ok(()),
            Some((_, Some(tenants))) if tenants.contains(&asked.name.tenant) => Ok(()),
            _ => Err(Refusal::Denied(
                "it has no pod of that namespace".to_owned(),
            )),
        }
    }
}

/// A node: an engine, its distribution, and its service for peers.
pub(crate) struct Node {
    pub(crate) bench: Bench,
    pub(crate) distribution: Arc<Distribution>,
    pub(crate) key: Key,
    pub(crate) address: SocketAddr,
    pub(crate) known: Arc<Known>,
    peers: Arc<dyn Peers>,
    pub(crate) id: NodeId,
    drain: Drain,
    serving: JoinHandle<Result<(), peer::Error>>,
    reporting: Option<JoinHandle<()>>,
    notices: mpsc::Receiver<Notice>,
}

pub(crate) struct Start {
    pub(crate) settings: Settings,
    pub(crate) store: Option<Store>,
    pub(crate) bandwidth: Option<u64>,
    pub(crate) ground: Ground,
    /// The part of the pool, in percent, above which content is evicted.
    pub(crate) high_watermark: Option<u8>,
    /// Whether it remembers the rights of peers, as the nodes of a cluster do.
    pub(crate) remembers: bool,
    /// Where the controller is, if there is one.
    pub(crate) controller: Option<watch::Receiver<Option<Controller>>>,
}

impl Default for Start {
    fn default() -> Self {
        Self {
            settings: Settings {
                // Chance must not decide a test.
                ask: NEVER,
                fetch_wait: NEVER,
                fresh_wait: NEVER,
                input_wait: NEVER,
                ..Settings::default()
            },
            store: None,
            bandwidth: None,
            ground: Ground::ALL[0],
            high_watermark: None,
            remembers: false,
            controller: None,
        }
    }
}

impl Node {
    pub(crate) async fn new(id: &str) -> Option<Self> {
        Self::with(id, |_| {}).await
    }

    /// `None`: this machine cannot make one.
    pub(crate) async fn with(id: &str, change: impl FnOnce(&mut Start)) -> Option<Self> {
        let mut start = Start::default();
        change(&mut start);
        let id = NodeId::new(id).expect("a name");
        let (notices, heard) = Notices::channel(1000);
        let bench = start.ground.bench_with(|config| {
            config.node = Some(id.clone());
            config.notices = Some(notices.clone());
            config.high_watermark = start.high_watermark.unwrap_or(config.high_watermark);
        });
        let bench = match bench.await {
            Ok(bench) => bench,
            Err(reason) => {
                crate::common::skip(&reason);
                return None;
            }
        };
        let dir = tempfile::tempdir().expect("a temporary directory");
        let key = Key::open(&dir.path().join("key")).expect("a key");
        let known = Arc::new(Known::default());
        let access: Arc<dyn Access> = if start.remembers {
            Arc::new(Checked::new(known.clone()))
        } else {
            known.clone()
        };
        let controller = start.controller;
        let catalog = controller.map(|it| hub::Node::new(id.clone(), key.clone(), it));
        let directory = catalog.clone().map(|it| -> Arc<dyn Directory> { it });
        let config = peer::Config {
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            members: peer::Members::Given {
                key: key.clone(),
                roster: known.clone(),
                access,
                directory,
                away: Arc::default(),
            },
            bandwidth: start.bandwidth.and_then(|rate| rate.try_into().ok()),
        };
        let node = peer::Node::open(config).await.expect("a node");
        let address = node.address().expect("it is served");
        let engine = bench.engine.clone();
        let settings = Settings {
            notices: Some(notices),
            ..start.settings
        };
        let peers = node.peers();
        let asked = Some(Arc::clone(&peers));
        let distribution = Distribution::start(engine.clone(), start.store, asked, settings);
        let found = Arc::clone(&distribution);
        let tier: FindDistribution = Arc::new(move || Some(Arc::clone(&found)));
        let reporting = catalog.map(|it| tokio::spawn(it.run(engine.clone(), tier)));
        let drain = Drain::new(Duration::from_secs(10));
        Some(Self {
            serving: tokio::spawn(node.serve(engine, drain.clone())),
            reporting,
            id,
            bench,
            distribution,
            peers,
            key,
            address,
            known,
            drain,
            notices: heard,
        })
    }

    /// This node asks the other one, and gives it all that it asks for.
    pub(crate) fn knows(&self, other: &Self) {
        self.knows_at(other, other.address, other.key.name(), None);
    }

    pub(crate) fn knows_at(
        &self,
        other: &Self,
        address: SocketAddr,
        key: Sha256,
        tenants: Option<Vec<Tenant>>,
    ) {
        let peer = Peer {
            name: other.id.clone(),
            address: address.to_string(),
            key,
        };
        let mut known = self.known.peers.lock();
        known.retain(|(it, _)| it.name != peer.name);
        known.push((peer, tenants));
    }

    /// Publishes a volume as the CSI service does.
    pub(crate) async fn try_publish(
        &self,
        volume: &str,
        attributes: &[(&str, &str)],
    ) -> Result<Published, Error> {
        let pod = format!("pod-{volume}");
        let mut request = self.bench.request(&pod, volume, attributes);
        request.share = !attributes.contains(&("share", "never"));
        self.distribution.bring(&mut request).await?;
        self.bench.engine.publish(request).await
    }

    pub(crate) async fn publish(&self, volume: &str, attributes: &[(&str, &str)]) -> Published {
        let published = self.try_publish(volume, attributes).await;
        published.unwrap_or_else(|error| panic!("{volume}: {error}"))
    }

    pub(crate) async fn end(&self, volume: &str, outcome: Outcome) {
        self.bench.outcome(&format!("pod-{volume}"), outcome).await;
        self.bench.unpublish(volume).await;
        self.bench.quiet().await;
    }

    /// A step that changes its volume, and succeeds.
    pub(crate) async fn commits(
        &self,
        volume: &str,
        attributes: &[(&str, &str)],
        work: impl FnOnce(&Path),
    ) {
        self.publish(volume, attributes).await;
        work(&self.bench.target(volume));
        self.end(volume, Outcome::Succeeded).await;
    }

    /// The same, with this text.
    pub(crate) async fn commit(&self, volume: &str, attributes: &[(&str, &str)], text: &str) {
        self.commits(volume, attributes, |target| write(target, text))
            .await;
    }

    /// The text that a new volume starts with; `None`: it starts empty.
    pub(crate) async fn sees(&self, volume: &str, attributes: &[(&str, &str)]) -> Option<String> {
        self.publish(volume, attributes).await;
        let text = fs::read_to_string(self.bench.target(volume).join("text")).ok();
        self.end(volume, Outcome::Failed).await;
        text
    }

    /// Deletes what this node has under a name.
    pub(crate) async fn forget(&self, reference: &str) {
        let name = name(reference);
        let destroyed = self.bench.engine.destroy(&name.tenant, &name.reference);
        destroyed.await.expect("it is destroyed");
    }

    pub(crate) fn figures(&self) -> PeerFigures {
        self.distribution.metrics().peers.expect("it has peers")
    }

    /// Waits until so many fetches have ended: a pod uses content before that.
    pub(crate) async fn has_fetched(&self, source: ContentSource, count: u64) {
        let what = format!("{source:?}: {count} fetches end");
        eventually(&what, || self.fetches(source).artifacts >= count).await;
        assert_eq!(self.fetches(source).artifacts, count, "{source:?}");
    }

    pub(crate) fn fetches(&self, source: ContentSource) -> Fetched {
        self.distribution.metrics().fetches.from(source)
    }

    /// The value of a series of the engine.
    pub(crate) fn counted<T: FromStr>(&self, series: &str) -> T {
        let mut registry = metrics::registry();
        self.bench.engine.counters().register(&mut registry);
        let text = metrics::encode(&registry);
        let series = format!("baggageclaim_{series} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&series));
        let value = value.unwrap_or_else(|| panic!("no {series}: {text}"));
        value.parse().ok().expect("a number")
    }

    /// The hits that were told.
    pub(crate) fn hits(&mut self) -> Vec<Forked> {
        let told = self.heard().into_iter();
        let hits = told.filter_map(|what| match what {
            What::Forked(hit) => Some(hit),
            _ => None,
        });
        hits.collect()
    }

    pub(crate) fn heard(&mut self) -> Vec<What> {
        let next = || self.notices.try_recv().ok();
        std::iter::from_fn(next).map(|notice| notice.what).collect()
    }

    /// The service for peers ends, as when the node goes.
    pub(crate) async fn goes(&mut self) {
        self.drain.close();
        let served = (&mut self.serving).await;
        served.expect("no panic").expect("it was served");
    }

    /// The service is there again, with another key and address, as after a restart of the driver.
    pub(crate) async fn returns(&mut self) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        self.key = Key::open(&dir.path().join("key")).expect("a key");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        self.address = listener.local_addr().expect("an address");
        let (key, known) = (self.key.clone(), Arc::clone(&self.known));
        let node = peer::Node::new(key, known.clone(), known, Some(listener), None);
        self.drain = Drain::new(Duration::from_secs(10));
        let engine = self.bench.engine.clone();
        self.serving = tokio::spawn(node.serve(engine, self.drain.clone()));
    }

    /// The pod of a volume of another node gives no right to content of this node any more.
    pub(crate) fn denies(&self, volume: &str) {
        self.known.denied.lock().push(format!("pod-{volume}"));
    }

    pub(crate) async fn finish(mut self) {
        if let Some(reporting) = self.reporting.take() {
            reporting.abort();
            let _aborted = reporting.await;
        }
        if !self.serving.is_finished() {
            self.goes().await;
        }
        self.distribution.stop().await;
        self.bench.finish().await;
    }
}

/// The text that a test expects to see.
#[expect(
    clippy::unnecessary_wraps,
    reason = "it is compared with what may be missing"
)]
pub(crate) fn text(text: &str) -> Option<String> {
    Some(text.to_owned())
}

pub(crate) fn write(target: &Path, text: &str) {
    fs::write(target.join("text"), text).expect("write");
}

/// One of everything that moves between nodes: no device, no socket, no attribute for root.
pub(crate) fn odd(root: &Path) {
    crate::common::tree::odd(root);
    for left_out in ["null", "disk", "socket"] {
        fs::remove_file(root.join(left_out)).expect("remove");
    }
    rustix::fs::lremovexattr(root.join("owned"), "trusted.note").expect("removexattr");
}

/// Bytes that no compression makes fewer.
pub(crate) fn random(bytes: usize) -> Vec<u8> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).expect("random bytes");
    random
}

/// A link to a node. It counts what the node sends, and can be cut or hang after some of that.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes that came from the node.
    passed: AtomicU64,
    /// After so many of them the link is cut, once.
    cut: AtomicU64,
    /// After that it stays cut.
    stays: AtomicBool,
    /// Or nothing moves any more.
    hangs: AtomicBool,
    /// It was cut, or hangs.
    met: AtomicBool,
    over: Notify,
}

impl Link {
    pub(crate) async fn to(node: &Node) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State::default());
        state.cut.store(u64::MAX, Ordering::SeqCst);
        let (target, all) = (node.address, Arc::clone(&state));
        let accepting = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.expect("accept");
                let is_cut = all.met.load(Ordering::SeqCst) && all.stays.load(Ordering::SeqCst);
                if is_cut && !all.hangs.load(Ordering::SeqCst) {
                    continue;
                }
                tokio::spawn(pass(client, target, Arc::clone(&all)));
            }
        });
        Self {
            address,
            state,
            accepting,
        }
    }

    pub(crate) fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::SeqCst)
    }

    /// Cuts the link once so many more bytes have come from the node.
    pub(crate) fn cut_after(&self, bytes: u64) {
        self.state.met.store(false, Ordering::SeqCst);
        self.state
            .cut
            .store(self.passed().saturating_add(bytes), Ordering::SeqCst);
    }

    /// The same, and no new connection comes through.
    pub(crate) fn ends_after(&self, bytes: u64) {
        self.state.stays.store(true, Ordering::SeqCst);
        self.cut_after(bytes);
    }

    /// The same, but connections stay open.
    pub(crate) fn hangs_after(&self, bytes: u64) {
        self.state.hangs.store(true, Ordering::SeqCst);
        self.ends_after(bytes);
    }

    pub(crate) fn was_met(&self) -> bool {
        self.state.met.load(Ordering::SeqCst)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
        self.state.over.notify_waiters();
    }
}

async fn pass(client: TcpStream, target: SocketAddr, state: Arc<State>) {
    let Ok(server) = TcpStream::connect(target).await else {
        return;
    };
    let over = state.over.notified();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = async {
        let mut bytes = vec![0; 16 << 10];
        while let Ok(read @ 1..) = from_client.read(&mut bytes).await {
            if to_server.write_all(&bytes[..read]).await.is_err() {
                break;
            }
        }
    };
    let down = async {
        // Small, so that a link is cut where it should be.
        let mut bytes = vec![0; 1 << 10];
        loop {
            let passed = state.passed.load(Ordering::SeqCst);
            let left = state.cut.load(Ordering::SeqCst).saturating_sub(passed);
            if left == 0 {
                state.met.store(true, Ordering::SeqCst);
                if state.hangs.load(Ordering::SeqCst) {
                    std::future::pending::<()>().await;
                }
                state.cut.store(u64::MAX, Ordering::SeqCst);
                return;
            }
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            let Ok(read @ 1..) = from_server.read(&mut bytes[..most]).await else {
                return;
            };
            state.passed.fetch_add(read as u64, Ordering::SeqCst);
            if to_client.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
        () = over => {}
    }
}

/// Nodes that are peers of each other; the test is skipped if this machine cannot make them.
macro_rules! peers {
    ($($id:literal),+) => {{
        let nodes = [$($crate::nodes::Node::new($id).await),+];
        let Some(nodes) = nodes.into_iter().collect::<Option<Vec<_>>>() else {
            return;
        };
        $crate::nodes::introduce(&nodes);
        <[_; [$($id),+].len()]>::try_from(nodes).unwrap_or_else(|_| unreachable!("as many"))
    }};
}

/// The refusal of a call whose request never ends.
pub(crate) async fn endless<T>(channel: Channel, path: &'static str) -> Status
where
    T: Message + Default + 'static,
{
    let mut client = Grpc::new(channel);
    client.ready().await.expect("a connection");
    let request = tonic::Request::new(tokio_stream::pending::<T>());
    let codec = ProstCodec::<T, T>::default();
    let answer = client.client_streaming(request, PathAndQuery::from_static(path), codec);
    let answer: Result<tonic::Response<T>, Status> = soon("an answer", answer).await;
    answer.map(drop).expect_err("it is refused")
}

/// Each node knows each other one.
pub(crate) fn introduce(nodes: &[Node]) {
    for one in nodes {
        for other in nodes.iter().filter(|other| other.address != one.address) {
            one.knows(other);
        }
    }
}

pub(crate) use peers;

impl Node {
    /// How it asks the others.
    pub(crate) fn peers(&self) -> &dyn Peers {
        &*self.peers
    }

    /// It has no peers for a while.
    pub(crate) fn known_forgets(&self) {
        self.known.peers.lock().clear();
    }
}

/// The files of a directory.
pub(crate) fn read(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(root).expect("list").map(|entry| {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("text");
        (name, fs::read(entry.path()).expect("read"))
    });
    files.collect()
}

pub(crate) async fn finish_all(nodes: impl IntoIterator<Item = Node>) {
    for node in nodes {
        node.finish().await;
    }
}
