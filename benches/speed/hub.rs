//! The catalog of a large cluster over its real streams: 1,000 nodes with TLS, HTTP/2 and messages.
//! The controller's part runs in a process of its own, so that its processor time and memory are
//! measured alone. The nodes are simulated by this process: they have names, and no content.

use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use baggageclaim::catalog::NameHash;
use baggageclaim::distribution::roster::Members;
use baggageclaim::hub::{Hub, USAGE};
use baggageclaim::link::{Key, connect};
use baggageclaim::model::{Fences, Name, NodeId, Sha256};
use baggageclaim::proto::hub::v1 as wire;
use baggageclaim::server::Drain;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::Channel;
use wire::from_node::Kind as From;
use wire::hub_client::HubClient;
use wire::to_node::Kind as To;

use crate::table::{Goal, Row, median};

/// The argument that makes this program the controller's part.
pub const SERVE: &str = "--serve-hub";
/// Names on each node.
const NAMES: u64 = 1_000;
/// Entries in a report.
const PART: usize = 100;
/// Commits of a node in a minute, and questions of all nodes in a second.
const COMMITS: usize = 50;
const QUESTIONS: usize = 250;
/// The pause after a connection that was not made.
const AGAIN: Duration = Duration::from_millis(250);
/// How long the nodes may take for their accounts.
const PATIENCE: Duration = Duration::from_secs(120);

/// All rows of the hub, for so many nodes that commit for so long.
pub async fn measure(nodes: usize, time: Duration) -> Vec<Row> {
    let tasks = tokio::task::LocalSet::new();
    tasks.run_until(rows(nodes, time)).await
}

async fn rows(nodes: usize, time: Duration) -> Vec<Row> {
    let mut random = Random(7);
    let ids = (0..nodes).map(|n| (format!("node-{n}"), Key::generate().expect("a key")));
    let ids: Vec<(String, Key)> = ids.collect();
    let dir = tempfile::tempdir().expect("a directory");
    let list = dir.path().join("members");
    let lines = ids
        .iter()
        .map(|(name, key)| format!("{name} {}\n", key.name()));
    std::fs::write(&list, lines.collect::<String>()).expect("write");

    let controller = Controller::start(&list);
    let mut cluster = Cluster::join(&controller, &ids, None).await;
    let idle = controller.resident_mib();
    let (spent, began) = (controller.spent(), Instant::now());
    let mut finds = cluster.commit_for(time, &mut random).await;
    let share =
        controller.spent().saturating_sub(spent).as_secs_f64() / began.elapsed().as_secs_f64();
    let memory = controller.resident_mib().max(idle);
    finds.sort_by(f64::total_cmp);
    let late = finds[(finds.len() - 1) * 99 / 100];

    let killed = Instant::now();
    controller.kill();
    let controller = Controller::start(&list);
    let held = std::mem::take(&mut cluster.held);
    let cluster = Cluster::join(&controller, &ids, Some(held)).await;
    let again = killed.elapsed().as_secs_f64();
    drop(cluster);

    let name = |what: &str| format!("hub, {nodes} nodes with {NAMES} names: {what}");
    let row = |what: &str, unit, ours, goal| Row::new(name(what), unit, ours, None, goal);
    vec![
        row("processor", "%", share * 100.0, Goal::AtMost(25.0)),
        row("memory", "MiB", memory, Goal::AtMost(256.0)),
        row("Find, median", "ms", median(finds), Goal::None),
        row("Find, 99 of 100", "ms", late, Goal::AtMost(5.0)),
        row("complete after a kill", "s", again, Goal::AtMost(10.0)),
        row(
            "memory after that",
            "MiB",
            controller.resident_mib(),
            Goal::AtMost(256.0),
        ),
    ]
}

/// The controller's part, in a process of its own.
pub struct Controller {
    child: Child,
    /// Where it serves.
    pub address: String,
    /// Its key.
    pub key: Sha256,
}

impl Controller {
    /// Starts it for the nodes of this file.
    pub fn start(members: &Path) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.arg(SERVE).arg(members).stdin(Stdio::null());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let out = child.stdout.take().expect("it is piped");
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).expect("a line");
        let (address, key) = line.trim().split_once(' ').expect("an address and a key");
        Self {
            child,
            address: address.to_owned(),
            key: key.parse().expect("a digest"),
        }
    }

    /// The processor time that it has used.
    fn spent(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let stat = stat.expect("it runs");
        let (_, fields) = stat.rsplit_once(')').expect("proc(5)");
        // utime and stime are fields 14 and 15, in ticks of 10 ms; the text begins with field 3.
        let fields = fields.split_whitespace().skip(11).take(2);
        let ticks = fields.map(|it| it.parse::<u64>().expect("a number"));
        Duration::from_millis(10 * ticks.sum::<u64>())
    }

    fn resident_mib(&self) -> f64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("it runs");
        let line = status.lines().find_map(|it| it.strip_prefix("VmRSS:"));
        let kib = line.and_then(|it| it.split_whitespace().next());
        kib.and_then(|it| it.parse::<f64>().ok()).expect("a number") / 1024.0
    }

    /// Keeps its connections, and never answers again.
    pub fn hang(&self) {
        kill_process(Pid::from_child(&self.child), Signal::STOP).expect("it runs");
    }

    fn kill(mut self) {
        self.child.kill().expect("it runs");
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }
}

/// The controller's part: serves the nodes of this file until the program that has started it ends.
pub async fn serve(members: &str) {
    set_parent_process_death_signal(Some(Signal::KILL)).expect("prctl");
    let text = std::fs::read_to_string(members).expect("the list");
    let nodes = text.lines().map(|line| {
        let (name, key) = line.split_once(' ').expect("a name and a key");
        let key: Sha256 = key.parse().expect("a digest");
        (key, NodeId::new(name).expect("a name"))
    });
    let by_key: HashMap<Sha256, NodeId> = nodes.collect();
    let by_name = by_key.iter().map(|(key, node)| (node.clone(), *key));
    let by_name = by_name.collect();
    let listed = Arc::new(Listed { by_key, by_name });
    let any = "127.0.0.1:0".parse().expect("an address");
    let hub = Hub::open(any, listed, USAGE).await.expect("it is bound");
    hub.handle().load_fences(Fences::default());
    let mut out = std::io::stdout();
    let address = hub.address().expect("an address");
    writeln!(out, "{address} {}", hub.key()).expect("a reader");
    hub.serve(Drain::new(Duration::ZERO))
        .await
        .expect("it serves");
}

#[derive(Debug)]
struct Listed {
    by_key: HashMap<Sha256, NodeId>,
    by_name: HashMap<NodeId, Sha256>,
}

impl Members for Listed {
    fn named(&self, key: &Sha256) -> Option<NodeId> {
        self.by_key.get(key).cloned()
    }

    fn key(&self, node: &NodeId) -> Option<Sha256> {
        self.by_name.get(node).copied()
    }

    fn zone(&self, _: &NodeId) -> String {
        "a".to_owned()
    }

    fn expected(&self) -> Option<BTreeSet<String>> {
        let names = self.by_name.keys().map(|node| node.as_str().to_owned());
        Some(names.collect())
    }
}

/// Numbers that are the same in each run (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("it was one")
    }
}

/// Nodes that have reported all that they have.
struct Cluster {
    streams: Vec<Stream>,
    /// The numbers of the names that each node has.
    held: Vec<Vec<u64>>,
    /// The number of the next name.
    next: u64,
}

#[derive(Debug)]
struct Stream {
    to: mpsc::Sender<wire::FromNode>,
    client: HubClient<Channel>,
}

impl Cluster {
    /// All nodes at once, until the controller's catalog is complete.
    async fn join(
        controller: &Controller,
        ids: &[(String, Key)],
        held: Option<Vec<Vec<u64>>>,
    ) -> Self {
        let fresh = || (0..ids.len() as u64).map(|n| (n * NAMES..(n + 1) * NAMES).collect());
        let held: Vec<Vec<u64>> = held.unwrap_or_else(|| fresh().collect());
        let joined = ids.iter().zip(&held).map(|((name, key), names)| {
            let channel = connect(key, controller.key, controller.address.clone());
            let client = HubClient::new(channel.expect("TLS"));
            tokio::task::spawn_local(join(client, name.clone(), names.clone()))
        });
        let joined: Vec<_> = joined.collect();
        let mut streams = Vec::new();
        for stream in joined {
            streams.push(stream.await.expect("it joins"));
        }
        let next = held.iter().flatten().max().map_or(0, |newest| newest + 1);
        let until = Instant::now() + PATIENCE;
        let nothing = question("missing");
        while answer(&streams[0], nothing.clone()).await != wire::Answer::Nothing {
            assert!(Instant::now() < until, "the catalog is not complete");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Self {
            streams,
            held,
            next,
        }
    }

    /// Commits and questions at an even pace. The times of the answers, in milliseconds.
    async fn commit_for(&mut self, time: Duration, random: &mut Random) -> Vec<f64> {
        let finds = Rc::new(std::cell::RefCell::new(Vec::new()));
        let commits = self.streams.len() * COMMITS / 60;
        let pace = Duration::from_secs(1) / u32::try_from(QUESTIONS).expect("few");
        let mut ticks = tokio::time::interval(pace);
        let until = Instant::now() + time;
        let (mut due, mut questions) = (0, Vec::new());
        while Instant::now() < until {
            ticks.tick().await;
            due += commits;
            while due >= QUESTIONS {
                due -= QUESTIONS;
                self.commit(random).await;
            }
            let soon = self.next + random.below(1_000);
            let keys = [soon, random.below(self.next), random.below(self.next)];
            let question = question(&key(keys[random.index(keys.len())]));
            let stream = &self.streams[random.index(self.streams.len())];
            let (mut client, finds) = (stream.client.clone(), Rc::clone(&finds));
            questions.push(tokio::task::spawn_local(async move {
                let began = Instant::now();
                client.find(question).await.expect("an answer");
                finds.borrow_mut().push(began.elapsed().as_secs_f64() * 1e3);
            }));
        }
        for question in questions {
            question.await.expect("it was answered");
        }
        finds.take()
    }

    /// A node commits a new name, and evicts one.
    async fn commit(&mut self, random: &mut Random) {
        let node = random.index(self.streams.len());
        let names = &mut self.held[node];
        let old = names.swap_remove(random.index(names.len()));
        names.push(self.next);
        let report = wire::Report {
            put: vec![entry(self.next)],
            drop: vec![NameHash::of(&name(old)).0.to_vec()],
            complete: false,
        };
        self.next += 1;
        send(&self.streams[node].to, From::Report(report)).await;
    }
}

/// Opens a stream, and reports these names. All nodes share this thread, so a connection may not
/// be made in time.
async fn join(mut client: HubClient<Channel>, node: String, names: Vec<u64>) -> Stream {
    let (to, mut messages) = loop {
        let (to, sent) = mpsc::channel(4);
        match client.attach(ReceiverStream::new(sent)).await {
            Ok(messages) => break (to, messages.into_inner()),
            Err(status) if status.code() == Code::Unavailable => {
                tokio::time::sleep(AGAIN).await;
            }
            Err(status) => panic!("no stream: {status}"),
        }
    };
    let beat = wire::Beat {
        sent: now(),
        time: 0,
    };
    send(&to, From::Beat(beat)).await;
    loop {
        let message = messages.message().await.expect("a stream");
        match message.expect("a message").kind {
            Some(To::Beat(_)) => {
                let hello = wire::Hello {
                    node: node.clone(),
                    attempt: now(),
                    ..wire::Hello::default()
                };
                send(&to, From::Hello(hello)).await;
            }
            Some(To::Welcome(_)) => break,
            _ => {}
        }
    }
    for part in names.chunks(PART) {
        let report = wire::Report {
            put: part.iter().map(|number| entry(*number)).collect(),
            ..wire::Report::default()
        };
        send(&to, From::Report(report)).await;
    }
    let complete = wire::Report {
        complete: true,
        ..wire::Report::default()
    };
    send(&to, From::Report(complete)).await;
    // It reads what it is told until its controller ends.
    tokio::task::spawn_local(async move { while let Ok(Some(_)) = messages.message().await {} });
    Stream { to, client }
}

async fn send(to: &mpsc::Sender<wire::FromNode>, kind: From) {
    let message = wire::FromNode { kind: Some(kind) };
    to.send(message).await.expect("the stream is open");
}

async fn answer(stream: &Stream, question: wire::FindRequest) -> wire::Answer {
    let answer = stream.client.clone().find(question).await;
    answer.expect("an answer").into_inner().answer()
}

fn question(key: &str) -> wire::FindRequest {
    wire::FindRequest {
        tenant: "ci".to_owned(),
        kind: wire::Kind::TaskCache.into(),
        keys: vec![key.to_owned()],
        ..wire::FindRequest::default()
    }
}

fn key(number: u64) -> String {
    format!("branch-{number}")
}

fn name(number: u64) -> Name {
    let reference = format!("task-cache/{}", key(number));
    Name {
        tenant: "ci".parse().expect("a label"),
        reference: reference.parse().expect("a key"),
    }
}

fn entry(number: u64) -> wire::Entry {
    wire::Entry {
        name: NameHash::of(&name(number)).0.to_vec(),
        kind: wire::Kind::TaskCache.into(),
        state: wire::State::Durable.into(),
        stamp: now(),
        tie: u32::try_from(number % 1_000_000).expect("it is small"),
        bytes: 734_003_200,
        layers: 3,
        tenant: "ci".to_owned(),
        key: key(number),
        service_account: "builds".to_owned(),
        pod: format!("build-{number}"),
        node: "node".to_owned(),
        ..wire::Entry::default()
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let millis = since.expect("after 1970").as_millis();
    u64::try_from(millis).expect("it fits")
}
