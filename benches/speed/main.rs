//! The benchmark: the time that the driver adds to the system calls that an operation needs.
//!
//! It prints a table and writes it to `target/bench.json`. It only measures: slowness is no
//! failure. `--quick` takes a minute and measures less. `--full` makes a pool of 100,000 artifacts
//! for the commits. `docs/performance.md` explains the results.

#![allow(
    unreachable_pub,
    missing_docs,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::future_not_send,
    clippy::semicolon_if_nothing_returned,
    reason = "a bench prints, starts the driver, and ends after an unexpected result"
)]

mod archives;
mod bare;
mod cases;
mod claims;
mod cluster;
mod commits;
#[path = "../../tests/common/mod.rs"]
mod common;
mod driver;
mod headline;
mod hub;
mod link;
mod nodes;
mod peers;
mod policies;
#[path = "../../tests/shared/server.rs"]
#[expect(dead_code, reason = "this bench uses a part of it")]
mod server;
mod table;
mod tier;
mod wire;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{Fs, Lab};

/// The amounts of everything.
#[derive(Debug)]
pub struct Plan {
    /// Turns of driver and baseline.
    pub rounds: usize,
    /// Operations per turn, if they take microseconds.
    pub turn: usize,
    /// Files of the largest parent.
    pub many: usize,
    /// Files that a pod walks, and dirty bytes that it leaves.
    pub walked: usize,
    pub dirty: u64,
    /// Bytes of a claim that is copied.
    pub claimed: u64,
    /// Files in a commit.
    pub committed: usize,
    /// Successive commits.
    pub commits: usize,
    /// Files of the cache that README shows.
    pub headline: usize,
    /// How long the nodes of a large cluster commit, and how many there are.
    pub cluster: (Duration, usize),
    /// Bytes of a file that is packed.
    pub large: u64,
    /// How long the many callers call.
    pub burst: Duration,
    /// Artifacts at start.
    pub sealed: usize,
    /// Artifacts in the pool with many committing callers.
    pub crowd: usize,
    /// Volumes in memory.
    pub volumes: usize,
    /// The families of rows to measure; empty for all.
    pub only: Vec<String>,
}

/// The family that needs no filesystem.
const HUB: &str = "hub";

/// Families of rows; arguments select from them.
const FAMILIES: [&str; 16] = [
    "fork",
    "scratch",
    "unpublish",
    "commit",
    "chain",
    "callers",
    "claims",
    "commits",
    "archives",
    "tier",
    "peers",
    "policies",
    "headline",
    HUB,
    "start",
    "memory",
];

const USUAL: Plan = Plan {
    rounds: 5,
    turn: 100,
    many: 100_000,
    walked: 20_000,
    dirty: 256 << 20,
    claimed: 4 << 30,
    committed: 50_000,
    commits: 100,
    headline: 80_000,
    cluster: (Duration::from_secs(60), 1_000),
    large: 2 << 30,
    burst: Duration::from_secs(2),
    sealed: 10_000,
    crowd: 10_000,
    volumes: 10_000,
    only: Vec::new(),
};

const QUICK: Plan = Plan {
    rounds: 3,
    turn: 50,
    many: 10_000,
    walked: 5_000,
    dirty: 64 << 20,
    claimed: 64 << 20,
    committed: 5_000,
    commits: 20,
    headline: 5_000,
    cluster: (Duration::from_secs(5), 100),
    large: 256 << 20,
    burst: Duration::from_millis(500),
    sealed: 1_000,
    crowd: 1_000,
    volumes: 500,
    only: Vec::new(),
};

/// Artifacts of that pool with `--full`; it takes minutes to make, on each filesystem.
const FULL_CROWD: usize = 100_000;

/// Bytes of a filesystem under measurement, for a claim and its copy.
const IMAGE: u64 = 14 << 30;

/// A directory with space for an image of this size, in memory if possible. Too little would fail
/// halfway, like a broken disk.
fn room(bytes: u64) -> Result<PathBuf, String> {
    let places = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let found = places.into_iter().find(|place| {
        let free = |space: rustix::fs::StatVfs| space.f_bavail * space.f_frsize;
        rustix::fs::statvfs(place).is_ok_and(|space| free(space) >= bytes)
    });
    found.ok_or_else(|| {
        format!(
            "neither /dev/shm nor the directory for temporary files has {} GiB free",
            bytes >> 30
        )
    })
}

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn main() -> ExitCode {
    match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [serve, members] if serve == hub::SERVE => {
            hub::serve(members).await;
            return ExitCode::SUCCESS;
        }
        [memory, end, place] if memory == archives::MEMORY_OF => {
            archives::memory_of(end, Path::new(place));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let mut plan = USUAL;
    let (mut kinds, mut only) = (Vec::new(), Vec::new());
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--quick" => plan = QUICK,
            "--full" => plan.crowd = FULL_CROWD,
            // Cargo passes this to every bench.
            "--bench" => {}
            "ext4" => kinds.push(Fs::Ext4),
            "xfs" => kinds.push(Fs::XfsReflink),
            family if FAMILIES.contains(&family) => only.push(argument),
            other => {
                let known = FAMILIES.join(", ");
                eprintln!(
                    "bench: what is {other:?}? It knows --quick, --full, ext4, xfs, and {known}."
                );
                return ExitCode::from(2);
            }
        }
    }
    plan.only = only;
    let is_of_disks = plan.only.is_empty() || plan.only.iter().any(|only| only != HUB);
    if kinds.is_empty() && is_of_disks {
        kinds = vec![Fs::Ext4, Fs::XfsReflink];
    }
    if !common::is_root() {
        eprintln!("bench: needs root, to mount filesystems of its own");
        return ExitCode::FAILURE;
    }
    let began = Instant::now();
    let (mut rows, mut probes) = (Vec::new(), Vec::new());
    let mut complete = true;
    if plan.only.is_empty() || plan.only.iter().any(|only| only == HUB) {
        eprintln!("measuring the catalog of a large cluster …");
        let (time, nodes) = plan.cluster;
        rows.append(&mut hub::measure(nodes, time).await);
    }
    for fs in kinds {
        // A mount namespace for the driver's process and these calls only.
        let lab = match room(IMAGE).and_then(|images| Lab::try_inside(&images, fs, IMAGE)) {
            Ok(lab) => lab,
            Err(reason) => {
                eprintln!("bench: nothing measured on {}: {reason}", fs.name());
                complete = false;
                continue;
            }
        };
        eprintln!("measuring on {} …", fs.name());
        let mut bench = cases::Bench {
            lab: &lab,
            plan: &plan,
            rows: Vec::new(),
            empty: Vec::new(),
        };
        bench.run().await;
        rows.append(&mut bench.rows);
        probes.push(format!(
            "{} us on {}",
            table::median(bench.empty).round(),
            fs.name()
        ));
        let left = lab.close();
        assert!(left.is_empty(), "mounts left behind: {left:?}");
    }
    println!("\n{}", table::render(&rows));
    if !probes.is_empty() {
        println!(
            "An empty call through the socket takes {}. Baselines of single calls include it.",
            probes.join(", ")
        );
    }
    if let Ok(load) = std::fs::read_to_string("/proc/loadavg") {
        let load = load.split(' ').next().unwrap_or_default();
        println!(
            "Load {load}: with more to run than there are cores, a call waits longer for its wake-ups."
        );
    }
    let missed = rows.iter().filter(|row| !row.met()).count();
    println!(
        "{} rows, {missed} goals missed, {:.0} s",
        rows.len(),
        began.elapsed().as_secs_f64()
    );
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench.json");
    if !complete {
        eprintln!(
            "bench: not all was measured, and {} is left as it is",
            path.display()
        );
        return ExitCode::FAILURE;
    }
    let json = serde_json::to_vec_pretty(&rows).expect("plain data serialises");
    if let Err(error) = std::fs::write(&path, json) {
        eprintln!("bench: {}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    println!("{}", path.display());
    ExitCode::SUCCESS
}
