//! The record of one name without storage: writers and collectors take the product's own decisions
//! in random schedules, with requests that take effect late or never, lost acknowledgements, clocks
//! that are wrong, and stalls of hours and days. No deletion may meet what it was not decided for.
//! Variants that break one rule must be caught.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use baggageclaim::model::{ArtifactId, Sha256, Timestamp};
use baggageclaim::shared::decide::{self, Age, DELETE_WITHIN, NameVerdict};
use baggageclaim::shared::{FORMAT, NameRecord, NameState, ObjectId};

use crate::common::random::Random;

const SCHEDULES: u64 = 100_000;
/// How late a request may take effect, and how wrong a writer's clock may be, in minutes.
const LATE: u64 = 60;
const WRONG: u64 = 600;
const DAYS: u64 = 8;

/// The rules, and variants that break one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    Right,
    NoMark,
    WritersWriteOverAMark,
    DeletionsMayTakeAnyTime,
    AnotherCollectorMarksAgainAtOnce,
}

/// What the record may say. Each is a record of the product, for its decisions.
struct Records {
    content: NameRecord,
    expired: NameRecord,
    deleting: NameRecord,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    Content,
    Expired,
    Deleting,
}

impl Records {
    fn new() -> Self {
        let content = NameRecord {
            format: FORMAT,
            tenant: "ci".parse().expect("a label"),
            reference: "task-cache/x".parse().expect("a reference"),
            number: 1,
            cleared: 0,
            evicted: false,
            deleting: false,
            write: ObjectId::from_bits(1),
            committed: Timestamp(0),
            state: NameState::Content {
                artifact: ArtifactId::from_bits(1),
                publication: ObjectId::from_bits(1),
                manifest: Sha256([0; 32]),
                ttl_seconds: None,
            },
        };
        let expired = NameRecord {
            state: NameState::Expired,
            ..content.clone()
        };
        let deleting = NameRecord {
            deleting: true,
            ..expired.clone()
        };
        Self {
            content,
            expired,
            deleting,
        }
    }

    fn of(&self, says: Says) -> &NameRecord {
        match says {
            Says::Content => &self.content,
            Says::Expired => &self.expired,
            Says::Deleting => &self.deleting,
        }
    }
}

/// The record as it is in the storage.
#[derive(Debug, Clone, Copy)]
struct Stored {
    version: u64,
    written: u64,
    says: Says,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A writer reads the record.
    Look,
    /// It decides by what it read.
    Write(Option<Stored>),
    /// Its write takes effect, if this is still the version.
    Written(Option<u64>),
    /// The time to live is over.
    Expire,
    /// A collector begins; by its clock it judges later.
    Begin,
    Judge(u64),
    /// It marks the version that it has read.
    Mark(u64),
    /// The mark takes effect, if this is still the version. It was begun at this time.
    Marked(u64, u64),
    Delete(u64),
    Deleted,
}

struct World<'a> {
    now: u64,
    random: Random,
    rules: Rules,
    records: &'a Records,
    stored: Option<Stored>,
    versions: u64,
    queue: BinaryHeap<Reverse<(u64, usize)>>,
    steps: Vec<Option<Step>>,
    counts: Counts,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    deletions: u64,
    waits: u64,
    taken_over: u64,
    marked_again: u64,
}

fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(60 * minutes)
}

impl<'a> World<'a> {
    fn new(seed: u64, rules: Rules, records: &'a Records) -> Self {
        let mut world = Self {
            now: 0,
            random: Random::new(seed),
            rules,
            records,
            stored: None,
            versions: 0,
            queue: BinaryHeap::new(),
            steps: Vec::new(),
            counts: Counts::default(),
        };
        for step in [
            Step::Look,
            Step::Look,
            Step::Begin,
            Step::Begin,
            Step::Expire,
        ] {
            world.later(step);
        }
        world
    }

    fn after(&mut self, pause: u64, step: Step) {
        let place = self.steps.len();
        self.queue.push(Reverse((self.now + pause, place)));
        self.steps.push(Some(step));
    }

    /// After a pause: near the limits that matter.
    fn later(&mut self, step: Step) {
        const PAUSES: [u64; 12] = [0, 0, 1, 5, 30, 59, 61, 119, 181, 600, 1441, 2900];
        let pause = PAUSES[self.random.index(PAUSES.len())];
        self.after(pause, step);
    }

    /// When a request takes effect.
    fn sent(&mut self, step: Step) {
        let delay = if self.random.below(2) == 0 {
            self.random.below(LATE)
        } else {
            0
        };
        self.after(delay, step);
    }

    fn run(&mut self) -> Result<(), String> {
        while let Some(Reverse((at, step))) = self.queue.pop() {
            if at > DAYS * 24 * 60 {
                break;
            }
            self.now = at;
            let step = self.steps[step].take().expect("a step is taken once");
            self.step(step)?;
        }
        Ok(())
    }

    fn store(&mut self, says: Says) {
        self.versions += 1;
        self.stored = Some(Stored {
            version: self.versions,
            written: self.now,
            says,
        });
    }

    fn is(&self, version: Option<u64>) -> bool {
        self.stored.map(|it| it.version) == version
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Look => {
                let seen = self.stored;
                let soon = self.random.below(3) > 0;
                self.after(if soon { 1 } else { 90 }, Step::Write(seen));
            }
            Step::Write(seen) => self.write(seen),
            Step::Written(version) => {
                if self.is(version) {
                    self.store(Says::Content);
                }
            }
            Step::Expire => {
                // Conditional, as the write of a commit.
                if self.stored.is_some_and(|it| it.says == Says::Content) {
                    self.store(Says::Expired);
                }
                self.later(Step::Expire);
            }
            Step::Begin => {
                let clock = self.now;
                self.later(Step::Judge(clock));
            }
            Step::Judge(clock) => self.judge(clock),
            Step::Mark(version) => {
                if self.rules != Rules::NoMark {
                    let begun = self.now;
                    self.sent(Step::Marked(version, begun));
                } else if self.is(Some(version)) {
                    // As if the read were enough.
                    let begun = self.now;
                    self.later(Step::Delete(begun));
                } else {
                    self.later(Step::Begin);
                }
            }
            Step::Marked(version, begun) => {
                let is_done = self.is(Some(version));
                if is_done {
                    self.store(Says::Deleting);
                }
                // It may be killed then, or the acknowledgement is lost.
                if is_done && self.random.below(4) > 0 {
                    self.later(Step::Delete(begun));
                } else {
                    self.later(Step::Begin);
                }
            }
            Step::Delete(begun) => {
                let took = minutes(self.now - begun);
                if self.rules == Rules::DeletionsMayTakeAnyTime
                    || decide::in_time(took, DELETE_WITHIN)
                {
                    self.sent(Step::Deleted);
                }
                self.later(Step::Begin);
            }
            Step::Deleted => return self.delete(),
        }
        Ok(())
    }

    fn write(&mut self, seen: Option<Stored>) {
        if let Some(seen) = seen.filter(|_| self.rules != Rules::WritersWriteOverAMark) {
            let age = if self.random.below(2) == 0 {
                Age::ByStorage(minutes(self.now - seen.written))
            } else {
                let wrong = self.random.below(2 * WRONG);
                let age = (self.now + wrong).saturating_sub(seen.written + WRONG);
                Age::ByWriter(minutes(age))
            };
            if seen.says == Says::Deleting && !decide::may_write_over_mark(age) {
                self.counts.waits += 1;
                return self.after(20, Step::Look);
            }
            self.counts.taken_over += u64::from(seen.says == Says::Deleting);
        }
        if self.random.below(8) > 0 {
            self.sent(Step::Written(seen.map(|it| it.version)));
        }
        self.later(Step::Look);
    }

    fn judge(&mut self, clock: u64) {
        let judged = self.stored.filter(|seen| {
            let is_marked = seen.says == Says::Deleting;
            let age = minutes(clock.saturating_sub(seen.written));
            let verdict = decide::judge_name(self.records.of(seen.says), age);
            verdict == NameVerdict::Delete
                || (is_marked && self.rules == Rules::AnotherCollectorMarksAgainAtOnce)
        });
        match judged {
            Some(seen) => {
                self.counts.marked_again += u64::from(seen.says == Says::Deleting);
                self.later(Step::Mark(seen.version));
            }
            None => self.later(Step::Begin),
        }
    }

    fn delete(&mut self) -> Result<(), String> {
        match self.stored {
            Some(stored) if stored.says == Says::Expired && self.rules != Rules::NoMark => {
                return Err(format!("at {}: {stored:?} is deleted", self.now));
            }
            Some(stored) if stored.says == Says::Content => {
                return Err(format!("at {}: {stored:?} is deleted", self.now));
            }
            _ => {}
        }
        self.counts.deletions += u64::from(self.stored.take().is_some());
        Ok(())
    }
}

fn search(rules: Rules, seeds: impl Iterator<Item = u64>) -> (Option<(u64, String)>, Counts) {
    let (records, mut counts) = (Records::new(), Counts::default());
    for seed in seeds {
        let mut world = World::new(seed, rules, &records);
        let ended = world.run();
        counts.deletions += world.counts.deletions;
        counts.waits += world.counts.waits;
        counts.taken_over += world.counts.taken_over;
        counts.marked_again += world.counts.marked_again;
        if let Err(lost) = ended {
            return (Some((seed, lost)), counts);
        }
    }
    (None, counts)
}

#[test]
fn no_deletion_of_a_record_meets_a_newer_one() {
    let (wrong, counts) = search(Rules::Right, 1..=SCHEDULES);
    assert_eq!(wrong, None);
    // The schedules must reach what they are about.
    let some = SCHEDULES / 100;
    assert!(
        counts.deletions > SCHEDULES / 20
            && counts.waits > some
            && counts.taken_over > some
            && counts.marked_again > some,
        "{counts:?}"
    );
}

#[test]
fn broken_deletions_are_caught() {
    for rules in [
        Rules::NoMark,
        Rules::WritersWriteOverAMark,
        Rules::DeletionsMayTakeAnyTime,
        Rules::AnotherCollectorMarksAgainAtOnce,
    ] {
        let (wrong, _) = search(rules, 1..=SCHEDULES);
        let (seed, lost) = wrong.unwrap_or_else(|| panic!("{rules:?}: not caught"));
        println!("{rules:?}: caught by schedule {seed}: {lost}");
    }
}
