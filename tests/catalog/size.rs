//! The catalog of a large cluster: the memory of a million entries, in every run of the tests, and
//! the processor's time, on request.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

use baggageclaim::catalog::{
    Asked, Catalog, Entry, Hello, NameHash, Report, SessionId, State, Version, WaitingQuestions,
};
use baggageclaim::model::{Fences, Name, NameKind, Timestamp};

use crate::common::random::Random;

/// A part of a million: an entry's size does not depend on how many there are.
const ENTRIES: u64 = 250_000;
const BEGAN: u64 = 1_795_400_000_000;
/// What follows a measured number.
const UNIT: &str = " bytes an entry";

/// The resident memory of this process.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: u64 = text
        .split(' ')
        .nth(1)
        .expect("resident")
        .parse()
        .expect("a number");
    pages * 4096
}

fn hash(random: &mut Random) -> NameHash {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&random.next().to_be_bytes());
    name[8..].copy_from_slice(&random.next().to_be_bytes());
    NameHash(name)
}

fn entry(name: NameHash, stamp: u64, tie: u32) -> Entry {
    Entry {
        name,
        kind: NameKind::TaskCache,
        state: State::Durable,
        version: Version {
            stamp: Timestamp(stamp),
            tie,
        },
        bytes: 734_003_200,
        layers: 3,
        fence: BEGAN,
    }
}

fn hello(catalog: &mut Catalog, node: &str) -> SessionId {
    let hello = Hello {
        node,
        zone: "a",
        attempt: 1,
        fences: &Fences::default(),
    };
    catalog
        .hello(&hello, Timestamp(BEGAN))
        .expect("it is the first")
}

#[test]
fn an_entry_takes_less_than_100_bytes_so_a_million_fit_in_96_mib() {
    // Other tests of this process take memory, too.
    let measured = Command::new(std::env::current_exe().expect("this program"))
        .args([
            "size::bytes_of_an_entry",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .output()
        .expect("run");
    let told = String::from_utf8_lossy(&measured.stderr);
    let bytes = told
        .lines()
        .find_map(|line| line.strip_suffix(UNIT)?.parse().ok());
    let bytes: u64 = bytes.unwrap_or_else(|| panic!("{}: {told}", measured.status));
    assert!((45..=100).contains(&bytes), "{bytes}{UNIT}");
}

#[test]
#[ignore = "a part of the test above, which gives it a process of its own"]
fn bytes_of_an_entry() {
    let mut random = Random::new(7);
    let mut catalog = Catalog::new(Fences::default(), Timestamp(BEGAN));
    let session = hello(&mut catalog, "node-1");
    let before = resident();
    for batch in 0..ENTRIES / 1_000 {
        let put = (0..1_000).map(|n| entry(hash(&mut random), BEGAN - batch - n, 1));
        let report = Report {
            put: put.collect(),
            ..Report::default()
        };
        catalog.report(session, &report, Timestamp(BEGAN), Timestamp(BEGAN));
    }
    assert_eq!(catalog.len() as u64, ENTRIES);
    let bytes = resident().saturating_sub(before) / ENTRIES;
    eprintln!("{bytes}{UNIT}");
}

const NODES: usize = 1_000;
const SECONDS: u64 = 600;

fn key(n: u64) -> Name {
    Name {
        tenant: "ci".parse().expect("a label"),
        reference: format!("task-cache/branch-{n}").parse().expect("a key"),
    }
}

/// A catalog and its streams.
struct Cluster {
    random: Random,
    catalog: Catalog,
    /// Each waits until this time.
    held: WaitingQuestions<Timestamp>,
    /// For each node its stream, its number in versions, and its names.
    nodes: Vec<(SessionId, u32, Vec<u64>)>,
    next: u64,
    finds: Vec<Duration>,
}

impl Cluster {
    fn new() -> Self {
        let now = Timestamp(BEGAN);
        let names: BTreeSet<String> = (0..NODES).map(|n| format!("node-{n}")).collect();
        let mut catalog = Catalog::new(Fences::default(), now);
        catalog.expect(names.clone(), now);
        let mut cluster = Self {
            random: Random::new(7),
            catalog,
            held: WaitingQuestions::default(),
            nodes: Vec::new(),
            next: 0,
            finds: Vec::new(),
        };
        for (index, node) in names.iter().enumerate() {
            let put: Vec<u64> = (cluster.next..).take(1_000).collect();
            cluster.next += 1_000;
            let from = u32::try_from(index).expect("few nodes");
            let entries = put
                .iter()
                .map(|n| entry(NameHash::of(&key(*n)), BEGAN - n, from));
            let report = Report {
                put: entries.collect(),
                complete: true,
                ..Report::default()
            };
            let session = hello(&mut cluster.catalog, node);
            cluster.catalog.report(session, &report, now, now);
            cluster.nodes.push((session, from, put));
        }
        cluster
    }

    /// A node commits a new name, and evicts one.
    fn commit(&mut self, now: Timestamp) {
        let node = self.random.index(NODES);
        let (session, from, put) = &mut self.nodes[node];
        let old = put.swap_remove(self.random.index(put.len()));
        put.push(self.next);
        let report = Report {
            put: vec![entry(NameHash::of(&key(self.next)), now.0, *from)],
            drop: vec![NameHash::of(&key(old))],
            ..Report::default()
        };
        self.next += 1;
        let changes = self.catalog.report(*session, &report, now, now);
        self.held.changed(&self.catalog, &changes, now);
    }

    /// A node asks for a key that will exist soon, or for one of two restore keys that may exist.
    fn ask(&mut self, now: Timestamp) {
        let keys = [
            self.next + self.random.below(1_000),
            self.random.below(self.next),
            self.random.below(self.next),
        ];
        let key = key(keys[self.random.index(keys.len())]);
        let began = Instant::now();
        let asked = Asked::new(key, "a");
        let until = Timestamp(now.0 + 2_000);
        self.held.ask(&self.catalog, asked, until, now);
        self.finds.push(began.elapsed());
    }

    fn tick(&mut self, now: Timestamp) {
        self.catalog.tick(now);
        self.held.retain(|until| *until > now);
    }
}

/// The processor's time of this thread, so that other programs do not count.
fn spent() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let first = text.split(' ').next().expect("time");
    Duration::from_nanos(first.parse().expect("a number"))
}

fn share(spent: Duration) -> String {
    let seconds = spent.as_secs_f64();
    let share = 100.0 * seconds / Duration::from_secs(SECONDS).as_secs_f64();
    format!("{seconds:.2} s, {share:.3} % of a core")
}

/// 1,000 nodes with a million names; each commits 50 a minute and drops as many. Ten minutes of it.
#[test]
#[ignore = "a measurement: cargo test --release --test catalog large -- --ignored --nocapture"]
fn a_large_cluster() {
    let (before, began) = (resident(), spent());
    let mut cluster = Cluster::new();
    println!("all accounts: {:?}", spent().saturating_sub(began));
    let (mut commits, mut questions) = (Duration::ZERO, Duration::ZERO);
    for second in 0..SECONDS {
        let now = Timestamp(BEGAN + 1_000 * second);
        let began = spent();
        for _ in 0..NODES * 50 / 60 {
            cluster.commit(now);
        }
        cluster.tick(now);
        let between = spent();
        for _ in 0..250 {
            cluster.ask(now);
        }
        commits += between.saturating_sub(began);
        questions += spent().saturating_sub(between);
    }
    println!("50,000 commits a minute: {}", share(commits));
    println!("250 questions of 3 keys a second: {}", share(questions));
    cluster.finds.sort_unstable();
    for percent in [50, 99, 100] {
        let place = (cluster.finds.len() - 1) * percent / 100;
        println!("Find p{percent}: {:?}", cluster.finds[place]);
    }
    let entries = cluster.catalog.len();
    let memory = resident().saturating_sub(before) / (1 << 20);
    println!("{entries} entries, {memory} MiB with the simulated nodes");
    let began = spent();
    for (session, _, _) in &cluster.nodes {
        cluster.catalog.lost(*session, Timestamp(BEGAN));
    }
    cluster.catalog.tick(Timestamp(BEGAN + 200_000));
    println!(
        "all streams lost and swept: {:?}",
        spent().saturating_sub(began)
    );
    assert!(cluster.catalog.is_empty());
}
