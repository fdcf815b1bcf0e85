//! How long pods take to start with our volumes, compared with as many emptyDirs, in the same run
//! on the same node. A report: people judge it, because they know the machine's load.
//!
//! The API has times in whole seconds only. So the start is the time when a watch here receives the
//! change to `PodScheduled`. The end is the time that the container runtime wrote beside the
//! container's first line of output. Both come from the same clock, in nanoseconds.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use crate::cluster::{Cluster, eventually};
use crate::crowd::{Volumes, follow, make_inputs, pod};
use crate::env::Env;

/// How often each is measured. The kinds take turns, so that what else the machine does is spread
/// over them.
const ROUNDS: usize = 5;
/// How many pods come at once in the burst.
const BURST: usize = 100;
/// How many times as long as without our volumes it may take.
const GOAL: f64 = 1.1;

/// Measures, and prints the tables.
pub(crate) fn report(cluster: &Cluster) {
    let env = Env::new(cluster, "speed");
    starts(&env);
    for volumes in [1, 2] {
        burst(&env, volumes);
    }
    env.clear();
    env.assert_nothing_left();
    env.close();
}

fn starts(env: &Env) {
    make_inputs(env);
    // The first pod of a namespace pays for what the others find.
    measure(env, "warm-up", 1, |name| {
        short("warm-up", name, 5, Volumes::Ours)
    });
    let counts = [1, 5, 20];
    let mut taken: HashMap<(usize, Volumes), Vec<Duration>> = HashMap::new();
    for round in 0..ROUNDS {
        for count in counts {
            // The order changes, too.
            let mut kinds = [Volumes::EmptyDir, Volumes::Ours];
            kinds.rotate_left(round % 2);
            for kind in kinds {
                let group = format!("pod-{round}-{count}-{}", kind as usize);
                let times = measure(env, &group, 1, |name| short(&group, name, count, kind));
                taken.entry((count, kind)).or_default().push(times[0].start);
            }
        }
        env.clear();
    }
    println!("\nfrom scheduled to started, median of {ROUNDS} (least to most)");
    println!(
        "  {:<10} {:>24} {:>24} {:>7}  <= {GOAL}×",
        "volumes", "emptyDir", "ours", "ratio"
    );
    for count in counts {
        let of = |kind| Spread::of(&taken[&(count, kind)]);
        let (theirs, ours) = (of(Volumes::EmptyDir), of(Volumes::Ours));
        let ratio = ours.median / theirs.median;
        println!(
            "  {count:<10} {theirs:>24} {ours:>24} {ratio:>6.2}×  {}",
            met(ratio)
        );
    }
}

fn burst(env: &Env, volumes: usize) {
    println!("\n{BURST} short pods at once, volumes of each: {volumes}");
    println!(
        "  {:<10} {:>24} {:>24} {:>12}",
        "volumes", "scheduled to started", "created to ended", "last ended"
    );
    // Neither is always the first on a node that has less to remember.
    let turns = [
        Volumes::EmptyDir,
        Volumes::Memory,
        Volumes::Ours,
        Volumes::Ours,
        Volumes::Memory,
        Volumes::EmptyDir,
    ];
    let mut sums: HashMap<Volumes, [f64; 2]> = HashMap::new();
    for (turn, kind) in turns.into_iter().enumerate() {
        let what = match kind {
            Volumes::EmptyDir => "emptyDir",
            Volumes::Memory => "in memory",
            Volumes::Ours => "ours",
        };
        let group = format!("burst-{volumes}-{turn}");
        let times = measure(env, &group, BURST, |name| {
            short(&group, name, volumes, kind)
        });
        env.clear();
        let start = Spread::of(&times.iter().map(|times| times.start).collect::<Vec<_>>());
        let end = Spread::of(&times.iter().map(|times| times.end).collect::<Vec<_>>());
        println!("  {what:<10} {start:>24} {end:>24} {:>10.1} s", end.most);
        let sums = sums.entry(kind).or_default();
        for (sum, seconds) in sums.iter_mut().zip([start.median, end.most]) {
            *sum += seconds;
        }
    }
    for (kind, what) in [
        (Volumes::EmptyDir, "emptyDir"),
        (
            Volumes::Memory,
            "emptyDir in memory, which is mounted as ours is",
        ),
    ] {
        let ratio = |column: usize| sums[&Volumes::Ours][column] / sums[&kind][column];
        let (start, end) = (ratio(0), ratio(1));
        println!(
            "  against {what}: {start:.2}× from scheduled to started (<= {GOAL}×: {}), {end:.2}× until the last has ended",
            met(start)
        );
    }
}

fn met(ratio: f64) -> &'static str {
    if ratio <= GOAL { "yes" } else { "NO" }
}

/// A pod that says that it is there and ends.
fn short(group: &str, name: &str, volumes: usize, kind: Volumes) -> String {
    pod(group, name, volumes, kind, "[echo, started]")
}

/// How long one pod took.
struct Times {
    start: Duration,
    end: Duration,
}

/// Makes a group of pods, waits for their end, and records their times. The ended pods stay: they
/// have no process and no volume any more.
fn measure(env: &Env, group: &str, count: usize, pod: impl Fn(&str) -> String) -> Vec<Times> {
    let pods: Vec<String> = (0..count)
        .map(|number| pod(&format!("{group}-{number}")))
        .collect();
    let watch = env.watch("pods", &[&format!("--selector=group={group}")]);
    let begin = SystemTime::now();
    env.apply_text(&pods.join("---\n"));
    let seen = follow(&watch, count);
    let lines = first_lines(env, group, count);
    env.settled();
    let since = |from: SystemTime, to: SystemTime| to.duration_since(from).unwrap_or_default();
    seen.iter()
        .map(|(name, seen)| Times {
            start: since(seen.scheduled.expect("it was"), lines[name]),
            end: since(begin, seen.ended.expect("it has")),
        })
        .collect()
}

/// When the containers of a group's pods printed their first line: the runtime's own time stamps.
/// The lines may come a little after the end.
fn first_lines(env: &Env, group: &str, count: usize) -> HashMap<String, SystemTime> {
    eventually("the pods have printed a line each", || {
        let selector = format!("--selector=group={group}");
        // A line is `[pod/NAME/CONTAINER] TIME TEXT`.
        let lines = env.kubectl(&["logs", &selector, "--prefix", "--timestamps"]);
        let found: HashMap<String, SystemTime> = lines
            .lines()
            .map(|line| {
                let mut words = line.split(['/', ' ']);
                let (name, stamp) = (words.nth(1), words.nth(1));
                let stamp = stamp.and_then(|stamp| humantime::parse_rfc3339(stamp).ok());
                name.map(str::to_owned)
                    .zip(stamp)
                    .unwrap_or_else(|| panic!("{line}"))
            })
            .collect();
        (found.len() == count).then_some(found)
    })
}

/// The middle of many, and how far they lie apart.
pub(crate) struct Spread {
    pub(crate) least: f64,
    pub(crate) median: f64,
    pub(crate) most: f64,
}

impl Spread {
    pub(crate) fn of(times: &[Duration]) -> Self {
        let mut seconds: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
        seconds.sort_by(f64::total_cmp);
        Self {
            least: seconds[0],
            median: seconds[seconds.len() / 2],
            most: seconds[seconds.len() - 1],
        }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!(
            "{:.2} ({:.2} to {:.2}) s",
            self.median, self.least, self.most
        );
        f.pad(&text)
    }
}
