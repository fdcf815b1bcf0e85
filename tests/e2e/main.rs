//! The driver in a real Kubernetes: deploy/ as operators install it, pods as users write them.
//! `make e2e` runs it; by hand: `make e2e-up`, then `cargo test --test e2e -- [CASE...]`.
//!
//! | | |
//! |---|---|
//! | `cluster` | the node: kubectl, its daemons, its mount table, the driver's own verbs |
//! | `env` | the environment of one case: a namespace, and waits |
//! | `leftovers` | the check after each case: nothing is left on any node |
//! | `cases` | the cases; a new one is a function there, a line in its list, and a manifest |
//! | `step` | a pod that keeps running while its environment changes |
//! | `crowd` | many pods, or pods with many volumes |
//! | `speed` | the report: how long pods take to start, compared with pods without our volumes |

#![expect(
    clippy::disallowed_types,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "kubectl is a program, and how it went is said to who started this"
)]

mod cases;
mod cluster;
mod crowd;
#[path = "../common/docs.rs"]
mod docs;
mod env;
mod leftovers;
mod speed;
mod step;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cluster::Cluster;
use env::Env;

/// A case: its name says what is so when it passes.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) play: fn(&Env),
}

/// A report, which runs only if it is requested, as a case is.
const SPEED: &str = "speed";

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        // Arguments that `cargo test` itself passes.
        .filter(|word| !word.starts_with("--"))
        .collect();
    let cluster = match Cluster::find() {
        Ok(cluster) => cluster,
        Err(reason) => {
            eprintln!("e2e: {reason}");
            return ExitCode::FAILURE;
        }
    };
    let is_alone = cluster.nodes().len() == 1;
    let all = if is_alone {
        cases::all()
    } else {
        cases::of_several_nodes()
    };
    let chosen: Vec<&Case> = all
        .iter()
        .filter(|case| wanted.is_empty() || wanted.iter().any(|word| case.name.contains(word)))
        .collect();
    let asked = wanted.iter().any(|word| word == SPEED);
    // Each word: one that is misspelled beside one that is not would leave out what was asked for,
    // and pass.
    let unknown: Vec<&String> = wanted
        .iter()
        .filter(|word| *word != SPEED && !all.iter().any(|case| case.name.contains(*word)))
        .collect();
    if !unknown.is_empty() {
        eprintln!("no case's name has {unknown:?} in it; there are:");
        for case in &all {
            eprintln!("  {}", case.name);
        }
        eprintln!("  {SPEED}");
        return ExitCode::from(2);
    }
    leftovers::sweep(&cluster);

    let start = Instant::now();
    let mut failed = Vec::new();
    println!("\n{} cases", chosen.len());
    for (number, case) in chosen.iter().enumerate() {
        let (passed, took) = play(&cluster, number, case);
        let (word, seconds) = (if passed { "ok" } else { "FAILED" }, took.as_secs_f64());
        println!("  {:<72} {word:>6} {seconds:>6.1} s", case.name);
        if !passed {
            failed.push(case.name);
        }
    }
    println!(
        "{} passed, {} failed, {:.0} s",
        chosen.len() - failed.len(),
        failed.len(),
        start.elapsed().as_secs_f64()
    );
    if asked && failed.is_empty() && catch_unwind(|| report(&cluster)).is_err() {
        failed.push(SPEED);
    }
    for name in &failed {
        println!("FAILED: {name}");
    }
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn report(cluster: &Cluster) {
    if cluster.nodes().len() == 1 {
        speed::report(cluster);
    } else {
        cases::report_of_several_nodes(cluster);
    }
}

/// Runs a case in its own environment and checks for leftovers.
fn play(cluster: &Cluster, number: usize, case: &Case) -> (bool, Duration) {
    let start = Instant::now();
    let env = Env::new(cluster, &format!("case-{number}"));
    let passed = catch_unwind(AssertUnwindSafe(|| {
        (case.play)(&env);
        env.clear();
        env.assert_nothing_left();
    }))
    .is_ok();
    if !passed {
        // For a reader of the log when the machine is gone.
        eprintln!("---- {}, in {}:", case.name, env.namespace());
        env.explain();
        // The next one is not to find what this one has left. That it can be cleared up at all was
        // not promised any more.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            env.clear();
            env.settled();
            env.forget();
        }));
    }
    env.close();
    (passed, start.elapsed())
}
