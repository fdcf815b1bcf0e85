//! Trials like those for a database: random kills against a model, a full disk, a hostile tenant,
//! leaks. All run the real program, over its sockets, on real filesystems, for a given time.
//!
//! | in `tests/torture/` | |
//! |---|---|
//! | `driver` | the program under trial |
//! | `kills` | episodes of random operations and kills, and how a failing one is minimised |
//! | `caller`, `claims` | the operations of one caller, and its model |
//! | `content` | what pods write, and checks of what they see |
//! | `full` | full disks |
//! | `tenant` | a hostile tenant |
//! | `transfer` | content that leaves as an archive and comes back |
//! | `tier`, `tier_model` | two nodes that share content: by a tier with its collector, as peers |
//! | `leaks` | the same operations many times |
//! | `figures`, `random` | the counters, and the random numbers |
//!
//! `docs/torture.md` says how to run it and what the figures mean. It has its own main, because its
//! last line counts over all trials.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a driver is started and its pods are played; the seeds and the figures are said"
)]

mod common;

#[path = "torture/caller.rs"]
mod caller;
#[path = "torture/claims.rs"]
mod claims;
#[path = "torture/content.rs"]
mod content;
#[path = "torture/driver.rs"]
mod driver;
#[path = "torture/figures.rs"]
mod figures;
#[path = "torture/full.rs"]
mod full;
#[path = "torture/kills.rs"]
mod kills;
#[path = "torture/leaks.rs"]
mod leaks;
#[path = "torture/tenant.rs"]
mod tenant;
#[path = "torture/tier.rs"]
mod tier;
#[path = "torture/tier_model.rs"]
mod tier_model;
#[path = "torture/transfer.rs"]
mod transfer;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::random::Random;
use figures::Figures;
use kills::Program;
use tokio::runtime::Handle;

/// The default duration.
const SHORT: Duration = Duration::from_secs(130);

/// How long it still is.
fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// A line of what is going on.
fn say(line: &str) {
    println!("{line}");
}

/// The settings from the environment.
struct Settings {
    long: Option<Duration>,
    seed: Option<u64>,
    replay: Option<String>,
    only: Option<String>,
}

impl Settings {
    fn read() -> Self {
        let get = |name: &str| std::env::var(format!("BAGGAGECLAIM_TORTURE_{name}")).ok();
        let minutes = get("MINUTES").map(|text| text.parse::<f64>().expect("a number of minutes"));
        Self {
            long: minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0)),
            seed: get("SEED").map(|text| text.parse().expect("a seed is a number")),
            replay: get("REPLAY"),
            only: get("ONLY"),
        }
    }

    fn wants(&self, trial: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == trial)
    }
}

/// A trial: chance, when to end, where to run, what to count.
type Trial = fn(Random, Instant, &Handle, &Arc<Figures>);

fn main() -> ExitCode {
    if !common::is_root() {
        common::skip("needs root");
        return ExitCode::SUCCESS;
    }
    let settings = Settings::read();
    let figures = Arc::new(Figures::default());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let began = Instant::now();
    let length = settings.long.unwrap_or(SHORT);
    let until = began + length;
    let on = runtime.handle();
    if settings.seed.is_some() || settings.replay.is_some() {
        let program = match (&settings.replay, settings.seed) {
            (Some(path), _) => {
                let text = std::fs::read_to_string(path).expect("a program");
                serde_json::from_str(&text).expect("a program that this version knows")
            }
            (None, seed) => Program::of(seed.expect("it is set")),
        };
        kills::replay(&program, until, on, &figures);
    } else {
        let seed = getrandom::u64().expect("a booted Linux has random bytes");
        let mut seeds = Random::new(seed);
        std::thread::scope(|scope| {
            let figures = &figures;
            let mut own = seeds.fork();
            let settings = &settings;
            // One after the other, beside the kills.
            scope.spawn(move || {
                let trials: [(&str, u32, Trial); 5] = [
                    ("full", 1, full::trial),
                    ("tenant", 1, tenant::trial),
                    ("tier", 2, tier::trial),
                    ("peers", 2, tier::of_peers),
                    ("leaks", 2, leaks::trial),
                ];
                let wanted = trials.iter().filter(|(name, ..)| settings.wants(name));
                let mut rest: u32 = wanted.clone().map(|(_, parts, _)| parts).sum();
                for (_, parts, trial) in wanted {
                    // Also where one before took more than its own: a day on a full disk is played
                    // to its end.
                    let least = length * *parts / 12;
                    let share = (left(until) * *parts / rest).max(least);
                    trial(own.fork(), Instant::now() + share, on, figures);
                    rest -= parts;
                }
            });
            if settings.wants("kills") {
                kills::trial(seeds, until, on, figures);
            }
        });
    }
    for fault in figures.said() {
        say(&fault);
    }
    say(&format!("{figures}"));
    if figures.faults() == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
