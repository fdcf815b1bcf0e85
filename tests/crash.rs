//! `kill -9` at every step of every operation, then a restart: rule 3 of the product, on real
//! filesystems and with a real process.
//!
//! | in `tests/crash/` | |
//! |---|---|
//! | `driver` | the process under test, and the connection to it |
//! | `world` | the expected state, and the checks for exactly that |
//! | `acts` | for each named point, the operations that pass it |
//! | `load` | eight concurrent callers, and the answers they got |
//! | `starts` | points that no act passes: a first start, recovery, a full disk, a failing one |
//! | `days` | a reboot, open files, a killed first start, and states between two points |
//!
//! The points are those of `engine::failpoint`. The test fails if a point is not visited, or is
//! visited where it should not be.

#![expect(
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "the process under test is started; where a test was when it failed is said where the failure is said"
)]

mod common;

#[path = "crash/acts.rs"]
mod acts;
#[path = "crash/days.rs"]
mod days;
#[path = "crash/driver.rs"]
mod driver;
#[path = "crash/load.rs"]
mod load;
#[path = "crash/starts.rs"]
mod starts;
#[path = "crash/world.rs"]
mod world;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use acts::Act;
use baggageclaim::backend::{BackendKind, MountApi};
use baggageclaim::engine::failpoint::Point;
use common::random::Random;
use common::{Fs, require_lab};
use driver::{Call, Connection, Died, Driver, Place, Way};
use load::{Caller, Together};
use world::World;

/// How long a process that is going to die may take to get there.
const TO_THE_POINT: Duration = Duration::from_secs(20);

/// Not a test: the life of the process under test. In the test run it returns at once.
#[test]
fn the_process_under_test() {
    driver::serve_if_told_to();
}

/// The world before every act: two artifacts, and pods that have volumes and keep them.
fn settle_in(place: &Place, on: &mut Connection) -> World {
    let mut world = World::default();
    let base = [("type", "output"), ("name", "base")];
    world.start_pod(place, on, "base-maker", Some("artifact/base"), &base);
    world.end_pod(place, on, "base-maker");
    let cache = [("type", "task-cache"), ("key", "t")];
    world.start_pod(place, on, "cache-maker", Some("task-cache/t"), &cache);
    world.end_pod(place, on, "cache-maker");

    let fork = [("type", "input"), ("from", "artifact/base")];
    world.start_pod(place, on, "bystander-fork", None, &fork);
    let output = [("type", "output"), ("name", "later")];
    let becomes = Some("artifact/later");
    world.start_pod(place, on, "bystander-maker", becomes, &output);
    world.start_pod(place, on, "bystander-scratch", None, &[]);
    on.must(&Call::Reap);
    world
}

/// Makes calls until the process dies; how many were answered.
fn call_until_death(on: &mut Connection, calls: &[Call]) -> usize {
    for (answered, call) in calls.iter().enumerate() {
        match on.call(call) {
            Ok(answer) => drop(answer.unwrap_or_else(|error| panic!("{call:?}: {error}"))),
            Err(Died) => return answered,
        }
    }
    calls.len()
}

/// Repeats what was not answered, and the last that was: every call can be repeated.
fn repeat(on: &mut Connection, calls: &[Call], answered: usize) -> Result<(), Died> {
    for call in &calls[answered.saturating_sub(1)..] {
        match (on.call(call)?, call) {
            (Ok(_), _) => {}
            // It was done, but not acknowledged.
            (Err(error), Call::Destroy { .. }) if error.contains("NoSuchName") => {}
            (Err(error), _) => panic!("repeated: {call:?}: {error}"),
        }
    }
    Ok(())
}

/// Dies at a point during an act, starts again, dies there once more if recovery or the repeated
/// call passes it, and checks everything. Returns a process that lives, and whether the second one
/// died.
fn visit(place: &Place, mut driver: Driver, point: Point, act: Act) -> (Driver, bool) {
    let mut on = driver.connect().expect("a process");
    let mut world = settle_in(place, &mut on);
    let prepared = act.prepare(place, &mut world, &mut on);
    on.must(&Call::Arm {
        point: point.name().to_owned(),
        visit: 1,
    });
    let answered = call_until_death(&mut on, &prepared.calls);
    assert!(driver.dies_within(TO_THE_POINT), "it was not visited");
    let maybe = prepared.done.begun(&mut world);
    world.check_live(place);

    let mut second = place.start(Some((point.name(), 1)));
    let again = (|| {
        let mut on = second.connect()?;
        repeat(&mut on, &prepared.calls, answered)?;
        for call in [Call::Settle, Call::Reap] {
            on.call(&call)?.expect("it succeeds");
        }
        Ok(())
    })();
    let died_again = again == Err(Died);
    if died_again {
        assert!(second.dies_within(TO_THE_POINT));
    } else {
        second.kill();
    }

    let mut third = place.start(None);
    let mut on = third.connect().expect("it starts");
    world.check_live(place);
    world.check_names_are_among(&mut on, &maybe);
    world.use_live(place);
    repeat(&mut on, &prepared.calls, answered).expect("it lives");
    prepared.done.answered(place, &mut world);
    world.check_live(place);
    on.must(&Call::Settle);
    on.must(&Call::Reap);
    world.check_sealed(place, &mut on);
    on.must(&Call::Settle);
    world::assert_no_findings(&mut on);
    world.end(place, &mut on);
    (third, died_again)
}

/// The points that a process passes that takes up what another left at the same point.
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
fn is_passed_again(point: Point, act: Act) -> bool {
    match point {
        // The repeated call does it all again.
        Point::PublishTargetMade
        | Point::PublishDirectoryMade
        | Point::PublishContentMade
        | Point::TargetDetached
        | Point::TargetRemoved
        | Point::PublishAgainRecorded
        // The promised seal goes on, or is given up once more.
        | Point::SealGivenUp
        | Point::SealFrozen
        | Point::SealLayerMade
        | Point::SealLayerRecorded
        | Point::SealContentMoved
        | Point::SealVisible
        | Point::CommitSynced
        // Unnamed content and content in `incoming/` is deleted, and merged again.
        | Point::FlattenMerged
        | Point::FlattenPlaced
        | Point::FlattenSynced
        // So is what lay in `incoming/` of an archive, and the repeated call does it all again.
        | Point::ExportOpened
        | Point::ImportMade
        | Point::ImportUnpacked
        | Point::ImportRecorded
        | Point::ImportPlaced
        // The same of a layer of another node.
        | Point::ReceiveMade
        | Point::ReceiveFilled
        | Point::ReceiveTabled
        | Point::ReceiveRecorded
        | Point::ReceivePlaced
        | Point::EntryShown
        | Point::EntrySynced
        // The repeated call notes it again.
        | Point::SharingIndexed
        | Point::SharingNoted => true,
        // A repeated import makes another artifact. One of another node is there already.
        Point::EntryIndexed | Point::EntryConfirmed => act == Act::Import,
        Point::PublishRecorded
        | Point::PublishMounted
        | Point::PublishAttached
        | Point::PublishAgainAttached
        | Point::UnpublishPromised
        | Point::DiscardDeleted
        | Point::OutcomeNoted
        | Point::CommitIndexed
        | Point::CommitConfirmed
        | Point::CommitPendingTrashed
        | Point::DestroyUnnamed
        | Point::FenceIndexed
        | Point::CollectUnindexed
        | Point::CollectTrashed
        | Point::FlattenIndexed
        | Point::FlattenConfirmed
        | Point::RebuildMade
        | Point::RebuildCleared
        | Point::RebuildPlaced
        // Those of starts, and of disks that fail, are visited elsewhere.
        | Point::OpenLocked
            | Point::OpenSwept
            | Point::OpenFounded
            | Point::OpenIndexed
            | Point::RecoverSwept
            | Point::RecoverThrownAway
            | Point::RecoverIndexed
            | Point::ReserveMade
            | Point::ReserveGivenBack
            | Point::WritebackFailureHeard
            | Point::WritebackFailureNoted
            | Point::WritebackFailureMarked
            | Point::WritebackFailureFinished
            // Passed where nothing is changed.
            | Point::TableWritten
            | Point::TablePlaced
            | Point::CheckListed
        // Nothing here passes those of claims.
        | Point::ClaimIndexed
        | Point::ClaimChanged
        | Point::ClaimLimited
        | Point::ClaimContentMade
        | Point::ClaimContentPlaced
        | Point::ClaimRecorded
        | Point::ClaimMounted
        | Point::ClaimAttached
        | Point::RecoverContentBack
        | Point::FreezeMarked
        | Point::FreezeLayerMade
        | Point::FreezeContentMoved
        | Point::FreezeSynced
        | Point::FreezeIndexed
        | Point::FreezeConfirmed
        | Point::FreezeCleared
        | Point::ClaimUnindexed
        | Point::ClaimTrashed
        | Point::SnapshotUnindexed
        | Point::SnapshotTrashed => false,
    }
}

/// Visits every point that this backend passes.
fn visit_all(place: &Place) {
    let started = Instant::now();
    let stacks = place.way.backend == BackendKind::Overlay;
    let mut driver = place.start(None);
    let mut points = BTreeSet::new();
    let mut deaths = 0;
    for &point in Point::ALL {
        for &act in Act::passing(point) {
            if act.needs_stacks() && !stacks {
                continue;
            }
            eprintln!("{}: {} during {act:?}", place.name(), point.name());
            let died_again;
            (driver, died_again) = visit(place, driver, point, act);
            assert_eq!(died_again, is_passed_again(point, act), "passed again");
            points.insert(point.name());
            deaths += 1 + usize::from(died_again);
        }
    }
    driver.shut_down();
    eprintln!(
        "{}: {} points, {deaths} deaths in {:?}",
        place.name(),
        points.len(),
        started.elapsed()
    );
}

const OVERLAY: Way = Way {
    backend: BackendKind::Overlay,
    api: None,
};

const BTRFS: Way = Way {
    backend: BackendKind::Btrfs,
    api: None,
};

const COPY: Way = Way {
    backend: BackendKind::Copy,
    api: None,
};

#[test]
fn every_point_of_overlay_on_ext4() {
    visit_all(&Place::new(require_lab!(Fs::Ext4), OVERLAY));
}

#[test]
fn every_point_of_overlay_on_xfs_by_the_old_mount_api() {
    let way = Way {
        api: Some(MountApi::Classic),
        ..OVERLAY
    };
    visit_all(&Place::new(require_lab!(Fs::XfsReflink), way));
}

#[test]
fn every_point_of_overlay_on_btrfs() {
    visit_all(&Place::new(require_lab!(Fs::Btrfs), OVERLAY));
}

#[test]
fn every_point_of_btrfs() {
    visit_all(&Place::new(require_lab!(Fs::Btrfs), BTRFS));
}

#[test]
fn every_point_of_copy_on_xfs() {
    visit_all(&Place::new(require_lab!(Fs::XfsReflink), COPY));
}

/// Eight callers, and the process dies under them again and again: where it is told to, or when it
/// pleases chance.
struct Storm<'a> {
    place: &'a Place,
    random: Random,
    callers: Vec<Caller>,
    together: Together,
    deaths: usize,
}

impl<'a> Storm<'a> {
    fn new(place: &'a Place) -> Self {
        let seed = match std::env::var_os("BAGGAGECLAIM_CRASH_SEED") {
            Some(seed) => seed.to_str().and_then(|seed| seed.parse().ok()),
            None => getrandom::u64().ok(),
        };
        let seed = seed.expect("a number");
        eprintln!("{}: BAGGAGECLAIM_CRASH_SEED={seed}", place.name());
        Self {
            place,
            random: Random::new(seed),
            callers: (0..8).map(|index| Caller::new(index, seed)).collect(),
            together: Together::default(),
            deaths: 0,
        }
    }

    /// One process and its death.
    fn one_life(&mut self, armed: Option<(&str, usize)>) {
        self.deaths += 1;
        let mut driver = self.place.start(armed);
        if armed.is_none() && self.random.below(4) == 0 {
            std::thread::sleep(Duration::from_millis(self.random.below(50)));
            return driver.kill();
        }
        let begun = driver.connect().and_then(|mut on| {
            load::check_answered(self.place, &mut on, &self.callers, &self.together)?;
            self.callers.iter().map(|_| driver.connect()).collect()
        });
        let Ok(connections) = begun else {
            // It was told to die where recovery passes.
            assert!(armed.is_some() && driver.dies_within(TO_THE_POINT));
            return;
        };
        let connections: Vec<Connection> = connections;
        let (place, together, random) = (self.place, &self.together, &mut self.random);
        std::thread::scope(|scope| {
            let pairs = self.callers.iter_mut().zip(connections);
            let callers: Vec<_> = pairs
                .map(|(caller, mut on)| scope.spawn(move || caller.run(place, &mut on, together)))
                .collect();
            if armed.is_some() {
                assert!(driver.dies_within(TO_THE_POINT), "{armed:?} is not visited");
            } else {
                std::thread::sleep(Duration::from_millis(random.below(400)));
                driver.kill();
            }
            for caller in callers {
                assert_eq!(caller.join().expect("no caller fails"), Err(Died));
            }
        });
    }

    /// The callers finish what they began, and everything is as it was answered.
    fn end(mut self) {
        let mut driver = self.place.start(None);
        let mut on = driver.connect().expect("it starts");
        load::check_answered(self.place, &mut on, &self.callers, &self.together).expect("it lives");
        self.together.finish = true.into();
        for caller in &mut self.callers {
            caller
                .run(self.place, &mut on, &self.together)
                .expect("it lives");
        }
        let rounds: usize = self.callers.iter().map(Caller::rounds).sum();
        load::check_all(self.place, &mut on, self.callers, &self.together);
        driver.shut_down();
        eprintln!(
            "{}: {} deaths in {rounds} rounds",
            self.place.name(),
            self.deaths
        );
    }
}

/// Dies at every point, but not at the first visit, while eight callers are at work.
fn later_visits(place: &Place) {
    let mut storm = Storm::new(place);
    let stacks = place.way.backend == BackendKind::Overlay;
    let passed = |point: &&Point| {
        // Callers of one node clear nothing in the cluster.
        let mut acts = Act::passing(**point)
            .iter()
            .filter(|act| !matches!(act, Act::Clear));
        acts.any(|act| stacks || !act.needs_stacks())
    };
    for point in Point::ALL.iter().filter(passed) {
        let visit = 2 + usize::try_from(storm.random.below(3)).expect("small");
        eprintln!("{} at visit {visit}", point.name());
        storm.one_life(Some((point.name(), visit)));
    }
    storm.end();
}

#[test]
fn later_visits_under_load_on_overlay() {
    later_visits(&Place::new(require_lab!(Fs::Ext4), OVERLAY));
}

#[test]
fn later_visits_under_load_on_btrfs() {
    later_visits(&Place::new(require_lab!(Fs::Btrfs), BTRFS));
}

#[test]
fn later_visits_under_load_on_copy() {
    later_visits(&Place::new(require_lab!(Fs::XfsReflink), COPY));
}

#[test]
fn killed_at_random_under_load_from_eight_callers() {
    let place = Place::new(require_lab!(Fs::Ext4), OVERLAY);
    let mut storm = Storm::new(&place);
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(12) {
        storm.one_life(None);
    }
    storm.end();
}
