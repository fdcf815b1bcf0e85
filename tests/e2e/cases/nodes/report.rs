//! How long claims take, on three nodes: an empty claim, and a clone in the class for clones. A
//! report: people judge it, because they know the machine's load.
//!
//! All times are when a watch here receives a change.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use super::{CLONES, ENDS, LATE, claim, no_claim_is_left, pod, source};
use crate::cluster::{Cluster, PATIENCE};
use crate::env::{Env, phase};
use crate::speed::Spread;

/// How often each is measured. The kinds take turns.
const ROUNDS: usize = 3;
/// The same if the report is all that was asked for.
const MANY_ROUNDS: usize = 10;

/// Measures, and prints the table.
pub(crate) fn report(cluster: &Cluster, was_asked: bool) {
    let env = Env::new(cluster, "speed");
    source(&env, "source", &cluster.node(2));
    let rounds = if was_asked { MANY_ROUNDS } else { ROUNDS };
    let kinds = [("empty", LATE, None), ("clone", CLONES, Some("source"))];
    let mut times: HashMap<&str, Vec<Times>> = HashMap::new();
    for round in 0..rounds {
        for (kind, class, from) in kinds {
            let name = format!("{kind}-{round}");
            let taken = measure(&env, &name, class, from);
            times.entry(kind).or_default().push(taken);
        }
    }
    println!("\nclaims, median of {rounds} (least to most)");
    println!(
        "  {:<10} {:>24} {:>24}",
        "claim", "pod created to ended", "node selected to bound"
    );
    for (kind, ..) in kinds {
        let pods: Vec<Duration> = times[kind].iter().map(|times| times.pod).collect();
        let bound: Vec<Duration> = times[kind].iter().filter_map(|times| times.bound).collect();
        let bound = match &bound[..] {
            [] => "-".to_owned(),
            bound => Spread::of(bound).to_string(),
        };
        println!("  {kind:<10} {:>24} {bound:>24}", Spread::of(&pods));
    }
    let median = |kind: &str| {
        let pods: Vec<Duration> = times[kind].iter().map(|times| times.pod).collect();
        Spread::of(&pods).median
    };
    println!(
        "  a clone's pod takes {:.2}× as long as an empty claim's (<= 2×)",
        median("clone") / median("empty")
    );
    no_claim_is_left(&env);
    env.close();
}

struct Times {
    /// From the pod's creation to its end; its only step ends at once.
    pod: Duration,
    /// From the scheduler's choice of a node to the end of provisioning. A claim that does not wait
    /// for its pod has none.
    bound: Option<Duration>,
}

/// Makes a claim and its pod in one call, and waits for the pod's end.
fn measure(env: &Env, name: &str, class: &str, from: Option<&str>) -> Times {
    let selector = format!("--selector=group={name}");
    let pods = env.watch("pods", &[&selector]);
    let claims = env.watch("persistentvolumeclaims", &[&selector]);
    env.apply_text(&(claim(name, class, from) + &pod(name, ENDS, &[name], "true")));
    let deadline = Instant::now() + PATIENCE;
    let mut made: Option<SystemTime> = None;
    let pod = loop {
        let change = pods.next(deadline).expect("the pod ends");
        let made = *made.get_or_insert(change.seen);
        if phase(&change.object) == "Succeeded" {
            break since(made, change.seen);
        }
    };
    let mut selected: Option<SystemTime> = None;
    let bound = loop {
        let change = claims.next(deadline).expect("the claim is bound");
        let node = &change.object["metadata"]["annotations"]["volume.kubernetes.io/selected-node"];
        if node.is_string() {
            selected.get_or_insert(change.seen);
        }
        if phase(&change.object) == "Bound" {
            break selected.map(|selected| since(selected, change.seen));
        }
    };
    env.delete(&format!("pod/{name}"));
    Times { pod, bound }
}

fn since(from: SystemTime, to: SystemTime) -> Duration {
    to.duration_since(from).unwrap_or_default()
}
