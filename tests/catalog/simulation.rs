//! Random schedules: pods start and end, content is fetched, names are cleared and evicted, while
//! streams break, processes restart, clocks are up to ten minutes wrong, a second controller runs,
//! and an older etcd is put back. What is checked is in `World::check_answer` and in `node`.
//!
//! Each failure prints its seed. `BAGGAGECLAIM_TEST_CATALOG_SCHEDULES` sets how many run, and
//! `BAGGAGECLAIM_TEST_CATALOG_SEED` the first one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::world::{Done, Fault, World};

/// About 2 seconds of two processors, unoptimised. CI runs 100,000.
const SCHEDULES: u64 = 12_000;

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().expect("a number"))
}

fn run(seed: u64) -> Done {
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed, None);
        world.run();
        world.done
    }));
    ended.unwrap_or_else(|_| panic!("BAGGAGECLAIM_TEST_CATALOG_SEED={seed}"))
}

#[test]
fn every_schedule_keeps_what_is_promised() {
    let first = number("BAGGAGECLAIM_TEST_CATALOG_SEED").unwrap_or(1);
    let count = number("BAGGAGECLAIM_TEST_CATALOG_SCHEDULES").unwrap_or(SCHEDULES);
    println!("BAGGAGECLAIM_TEST_CATALOG_SEED={first} BAGGAGECLAIM_TEST_CATALOG_SCHEDULES={count}");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let done: Vec<Done> = std::thread::scope(|scope| {
        let seeds = |thread: usize| (first..first + count).skip(thread).step_by(threads);
        let jobs: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || seeds(thread).map(run).collect::<Vec<_>>()))
            .collect();
        let jobs = jobs.into_iter();
        jobs.flat_map(|job| job.join().expect("a schedule failed; its seed is above"))
            .collect()
    });
    let mut all = Done::default();
    for done in &done {
        all.add(done);
    }
    println!("{all:?}");
    if count < SCHEDULES {
        return;
    }
    // The schedules must reach what they are about.
    let Done {
        commits,
        settled,
        clears,
        owed,
        found,
        nothing,
        fetched,
        refused,
        superseded,
        evicted,
        woken,
    } = all;
    assert!(settled > commits / 2, "{settled} of {commits}");
    for reached in [
        clears, owed, found, nothing, fetched, refused, superseded, evicted, woken,
    ] {
        assert!(reached > count / 500, "{all:?}");
    }
}

#[test]
fn every_broken_rule_is_caught() {
    for fault in [
        Fault::MarksNoWriters,
        Fault::UsesWhatArrives,
        Fault::MendsNothing,
        Fault::LocalStamps,
        Fault::AdoptsNoTime,
        Fault::NothingTooEarly,
        Fault::LastHelloCounts,
        Fault::EvictsWhatIsUsed,
        Fault::SupersedesNothing,
    ] {
        let is_caught = |seed: &u64| {
            let ended = catch_unwind(|| World::new(*seed, Some(fault)).run());
            ended.is_err()
        };
        let caught = (1..=SCHEDULES).find(is_caught);
        let seed = caught.unwrap_or_else(|| panic!("{fault:?} is not caught"));
        println!("{fault:?}: caught by schedule {seed}");
    }
}
