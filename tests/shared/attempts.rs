//! The commits of one name without storage: writers take the product's own decisions in random
//! schedules, with acknowledgements that are lost, requests that take effect late or never, writers
//! that are killed, and clears. A commit that another one replaced must not come back over it.
//! Variants that break one rule must be caught.

use baggageclaim::model::{ArtifactId, Reference, Sha256, Timestamp};
use baggageclaim::shared::decide::{self, Decision, Writer};
use baggageclaim::shared::{FORMAT, NameRecord, NameState, ObjectId};

use crate::common::random::Random;

const SCHEDULES: u64 = 100_000;
const STEPS: u64 = 60;
const WRITERS: usize = 3;

/// The rules, and variants that break one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    Right,
    /// A node notes no number before its first attempt.
    NotesNothing,
    /// The client repeats a request whose answer was lost, and takes the second answer as the
    /// first one.
    RepeatsRequests,
}

/// A record as it is in the storage.
#[derive(Debug, Clone)]
struct Stored {
    version: u64,
    record: NameRecord,
}

impl Stored {
    fn shows(&self) -> Option<ArtifactId> {
        self.record.content().map(|(artifact, ..)| artifact)
    }
}

/// A conditional write of a record: over this version, or over none.
#[derive(Debug, Clone)]
struct Request {
    over: Option<u64>,
    record: NameRecord,
}

/// A node that commits one artifact after the other.
#[derive(Debug, Clone)]
struct Node {
    artifact: ArtifactId,
    base: u64,
    /// The number in its index.
    noted: Option<u64>,
    /// The number that this publication takes for the one before an attempt in doubt.
    attempted: Option<u64>,
    /// Whether it has read the name, and what it found.
    has_read: bool,
    seen: Option<Stored>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    replaced: u64,
    in_doubt: u64,
    kept_newer: u64,
    late: u64,
}

struct World {
    random: Random,
    rules: Rules,
    name: Reference,
    now: u64,
    versions: u64,
    artifacts: u128,
    stored: Option<Stored>,
    /// Artifacts that the name has shown.
    shown: Vec<ArtifactId>,
    nodes: Vec<Node>,
    late: Vec<Request>,
    counts: Counts,
}

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let mut world = Self {
            random: Random::new(seed),
            rules,
            name: "task-cache/x".parse().expect("a reference"),
            now: 1000,
            versions: 0,
            artifacts: 0,
            stored: None,
            shown: Vec::new(),
            nodes: Vec::new(),
            late: Vec::new(),
            counts: Counts::default(),
        };
        for _ in 0..WRITERS {
            let node = world.fork();
            world.nodes.push(node);
        }
        world
    }

    fn number(&self) -> u64 {
        self.stored.as_ref().map_or(0, |it| it.record.number)
    }

    /// A step begins, and will commit a new artifact.
    fn fork(&mut self) -> Node {
        self.artifacts += 1;
        Node {
            artifact: ArtifactId::from_bits(self.artifacts),
            base: self.number(),
            noted: None,
            attempted: None,
            has_read: false,
            seen: None,
        }
    }

    fn record(&self, number: u64, cleared: u64, state: NameState) -> NameRecord {
        NameRecord {
            format: FORMAT,
            tenant: "ci".parse().expect("a label"),
            reference: self.name.clone(),
            number,
            cleared,
            evicted: false,
            deleting: false,
            write: ObjectId::from_bits(1),
            committed: Timestamp(0),
            state,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for _ in 0..STEPS {
            self.now += 10;
            match self.random.below(12) {
                0 if !self.late.is_empty() => {
                    let place = self.random.index(self.late.len());
                    let request = self.late.swap_remove(place);
                    let is_done = self.apply(request)?;
                    self.counts.late += u64::from(is_done);
                }
                1 => self.lose()?,
                _ => {
                    let place = self.random.index(WRITERS);
                    self.step(place)?;
                }
            }
        }
        Ok(())
    }

    /// Now and then the name is cleared, or what it shows is lost, or its record is deleted.
    fn lose(&mut self) -> Result<(), String> {
        let Some(stored) = self.stored.clone() else {
            return Ok(());
        };
        let number = stored.record.number;
        let record = match self.random.below(8) {
            0 => {
                let number = decide::clear(Some(&stored.record), 0, self.now);
                self.record(number, number, NameState::Cleared)
            }
            1 => self.record(number + 1, stored.record.cleared, NameState::Expired),
            2 if stored.shows().is_none() => {
                // A record is deleted after a day, and a request takes effect within an hour.
                self.late.clear();
                self.stored = None;
                return Ok(());
            }
            _ => return Ok(()),
        };
        let over = Some(stored.version);
        self.apply(Request { over, record }).map(drop)
    }

    /// Returns whether it was done.
    fn apply(&mut self, request: Request) -> Result<bool, String> {
        if request.over != self.stored.as_ref().map(|it| it.version) {
            return Ok(false);
        }
        self.versions += 1;
        let after = Stored {
            version: self.versions,
            record: request.record,
        };
        let before = self.stored.as_ref().and_then(Stored::shows);
        if let Some(artifact) = after.shows() {
            let is_other = before.is_some_and(|before| before != artifact);
            if is_other && self.shown.contains(&artifact) {
                return Err(format!("{after:?} came back over {before:?}"));
            }
            self.counts.replaced += u64::from(is_other);
            self.shown.push(artifact);
        }
        self.stored = Some(after);
        Ok(true)
    }

    /// One step of a node: it reads, or writes by what it read.
    fn step(&mut self, place: usize) -> Result<(), String> {
        let mut node = self.nodes[place].clone();
        // It is killed, or gives the publication up: the next one has the notes only.
        if self.random.below(8) == 0 {
            node.attempted = node.noted;
            node.has_read = false;
        }
        let next = if node.has_read {
            node.has_read = false;
            let seen = node.seen.take();
            self.write(node, seen)?
        } else {
            node.has_read = true;
            node.seen.clone_from(&self.stored);
            Some(node)
        };
        self.nodes[place] = match next {
            Some(node) => node,
            None => self.fork(),
        };
        Ok(())
    }

    /// `None`: it is done with its artifact.
    fn write(&mut self, mut node: Node, seen: Option<Stored>) -> Result<Option<Node>, String> {
        if seen.as_ref().and_then(Stored::shows) == Some(node.artifact) {
            return Ok(None);
        }
        let current = seen.as_ref().map(|it| &it.record);
        let writer = Writer {
            base: Some(node.base),
            fence: 0,
            attempted: node.attempted,
        };
        let (number, cleared) = match decide::commit(current, &self.name, writer, false, self.now) {
            Decision::Write { number, cleared } => (number, cleared),
            Decision::KeepsNewer => {
                self.counts.kept_newer += 1;
                return Ok(None);
            }
            Decision::KeepsFirst | Decision::Cleared => return Ok(None),
        };
        let before = current.map_or(0, |it| it.number);
        if self.rules != Rules::NotesNothing {
            node.noted = node.noted.or(Some(before));
        }
        let content = NameState::Content {
            artifact: node.artifact,
            publication: ObjectId::from_bits(1),
            manifest: Sha256([0; 32]),
            ttl_seconds: None,
        };
        let request = Request {
            over: seen.map(|it| it.version),
            record: self.record(number, cleared, content),
        };
        let is_lost = self.random.below(3) == 0;
        if is_lost && self.random.below(2) == 0 {
            self.late.push(request);
        } else {
            let is_done = self.apply(request)?;
            if !is_lost {
                return Ok((!is_done).then_some(node));
            }
        }
        self.counts.in_doubt += 1;
        // The answer to the repeated request says that another writer was faster.
        if self.rules != Rules::RepeatsRequests {
            node.attempted = node.attempted.or(Some(before));
        }
        Ok(Some(node))
    }
}

fn search(rules: Rules, seeds: impl Iterator<Item = u64>) -> (Option<(u64, String)>, Counts) {
    let mut counts = Counts::default();
    for seed in seeds {
        let mut world = World::new(seed, rules);
        let ended = world.run();
        counts.replaced += world.counts.replaced;
        counts.in_doubt += world.counts.in_doubt;
        counts.kept_newer += world.counts.kept_newer;
        counts.late += world.counts.late;
        if let Err(wrong) = ended {
            return (Some((seed, wrong)), counts);
        }
    }
    (None, counts)
}

#[test]
fn no_commit_comes_back_over_the_one_that_replaced_it() {
    let (wrong, counts) = search(Rules::Right, 1..=SCHEDULES);
    assert_eq!(wrong, None);
    // The schedules must reach what they are about.
    assert!(
        counts.replaced > SCHEDULES
            && counts.in_doubt > SCHEDULES
            && counts.kept_newer > SCHEDULES
            && counts.late > SCHEDULES / 10,
        "{counts:?}"
    );
}

#[test]
fn broken_commits_are_caught() {
    for rules in [Rules::NotesNothing, Rules::RepeatsRequests] {
        let (wrong, _) = search(rules, 1..=SCHEDULES);
        let (seed, wrong) = wrong.unwrap_or_else(|| panic!("{rules:?}: not caught"));
        println!("{rules:?}: caught by schedule {seed}: {wrong}");
    }
}
