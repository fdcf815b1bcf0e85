//! The catalog of a large cluster: the memory of a million entries, in every run of the tests, and
//! the processor's time, on request.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use baggageclaim::catalog::{
    Asked, Catalog, Entry, Held, Hello, Kind, NameHash, Report, SessionId, State, Version, origin,
};
use baggageclaim::model::{Fences, Name, Timestamp};

use crate::common::random::Random;

const ENTRIES: u64 = 1_000_000;
const BEGAN: u64 = 1_795_400_000_000;

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

fn entry(name: NameHash, stamp: u64, origin: u32) -> Entry {
    Entry {
        name,
        kind: Kind::TaskCache,
        state: State::Durable,
        version: Version {
            stamp: Timestamp(stamp),
            origin,
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
fn a_million_entries_take_less_than_96_mib() {
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
    println!("{bytes} bytes an entry");
    assert!((45..=100).contains(&bytes), "{bytes} bytes an entry");
}

const NODES: usize = 1_000;
const SECONDS: u64 = 600;

fn key(n: u64) -> Name {
    Name {
        tenant: "ci".parse().expect("a label"),
        reference: format!("task-cache/branch-{n}").parse().expect("a key"),
    }
}

/// A catalog, its streams, and the time that it took.
struct Cluster {
    random: Random,
    catalog: Catalog,
    held: Held<usize>,
    /// For each node its stream, its number in versions, and its names.
    nodes: Vec<(SessionId, u32, Vec<u64>)>,
    next: u64,
    reports: Duration,
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
            held: Held::default(),
            nodes: Vec::new(),
            next: 0,
            reports: Duration::ZERO,
            finds: Vec::new(),
        };
        for node in &names {
            let put: Vec<u64> = (cluster.next..).take(1_000).collect();
            cluster.next += 1_000;
            let from = origin(node);
            let entries = put
                .iter()
                .map(|n| entry(NameHash::of(&key(*n)), BEGAN - n, from));
            let report = Report {
                put: entries.collect(),
                complete: true,
                ..Report::default()
            };
            let began = Instant::now();
            let session = hello(&mut cluster.catalog, node);
            cluster.catalog.report(session, &report, now, now);
            cluster.reports += began.elapsed();
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
        let began = Instant::now();
        let changes = self.catalog.report(*session, &report, now, now);
        self.held.changed(&self.catalog, &changes, now);
        self.reports += began.elapsed();
    }

    /// A node asks for a key that will exist soon, and for two restore keys that may exist.
    fn ask(&mut self, now: Timestamp) {
        let keys = [
            self.next + self.random.below(1_000),
            self.random.below(self.next),
            self.random.below(self.next),
        ];
        let node = self.random.index(NODES);
        let began = Instant::now();
        let asked = Asked::new(keys.map(key).to_vec(), "a");
        let until = Timestamp(now.0 + 2_000);
        self.held.ask(&self.catalog, asked, node, now, until);
        self.finds.push(began.elapsed());
    }

    fn tick(&mut self, now: Timestamp) {
        let began = Instant::now();
        self.catalog.tick(now);
        self.held.over(&self.catalog, now);
        self.reports += began.elapsed();
    }
}

fn share(what: &str, spent: Duration) {
    let share = 100.0 * spent.as_secs_f64() / Duration::from_secs(SECONDS).as_secs_f64();
    println!(
        "{what}: {:.2} s, {share:.3} % of a core",
        spent.as_secs_f64()
    );
}

/// 1,000 nodes with a million names; each commits 50 a minute and drops as many. Ten minutes of it.
#[test]
#[ignore = "a measurement: cargo test --release --test catalog large -- --ignored --nocapture"]
fn a_large_cluster() {
    let before = resident();
    let mut cluster = Cluster::new();
    println!("all accounts: {:?}", std::mem::take(&mut cluster.reports));
    for second in 0..SECONDS {
        let now = Timestamp(BEGAN + 1_000 * second);
        (0..NODES * 50 / 60).for_each(|_| cluster.commit(now));
        (0..250).for_each(|_| cluster.ask(now));
        cluster.tick(now);
    }
    share("50,000 commits a minute", cluster.reports);
    share(
        "250 questions of 3 keys a second",
        cluster.finds.iter().sum(),
    );
    cluster.finds.sort_unstable();
    for percent in [50, 99, 100] {
        let place = (cluster.finds.len() - 1) * percent / 100;
        println!("Find p{percent}: {:?}", cluster.finds[place]);
    }
    let entries = cluster.catalog.len();
    let memory = resident().saturating_sub(before) / (1 << 20);
    println!("{entries} entries, {memory} MiB with the simulated nodes");
    let began = Instant::now();
    for (session, _, _) in &cluster.nodes {
        cluster.catalog.lost(*session, Timestamp(BEGAN));
    }
    cluster.catalog.tick(Timestamp(BEGAN + 200_000));
    println!("all streams lost and swept: {:?}", began.elapsed());
    assert!(cluster.catalog.is_empty());
}
