//! How long claims take, on three nodes: a pod with an inline volume, with a claim that exists, and
//! with one that is made with it: empty, a clone, or restored from a snapshot. A report: people
//! judge it, because they know the machine's load.
//!
//! All times are when a watch here receives a change.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use super::{
    CLONES, Controller, ENDS, LATE, Snapshots, claim, no_claim_is_left, node_of, only_on, pod,
    pod_with, restored, source,
};
use crate::cluster::{Cluster, PATIENCE};
use crate::env::{Env, phase};
use crate::speed::Spread;

/// How often each is measured. The kinds take turns.
const ROUNDS: usize = 10;

/// Measures, and prints the table.
pub(crate) fn report(cluster: &Cluster) {
    let env = Env::new(cluster, "speed");
    let node = cluster.node(2);
    for name in ["source", "existing"] {
        source(&env, name, &node);
    }
    let snapshots = Snapshots::install(&Controller::of(&env));
    snapshots.take(&env, "shot", "source");
    let there = format!("{ENDS}\n  {}", only_on(&node));
    let scratch =
        "csi: {driver: baggageclaim.csi.concourse-ci.org, volumeAttributes: {type: scratch}}";
    let inline = || [("claim-0".to_owned(), scratch.to_owned())];
    let kinds = ["inline", "existing", "empty", "clone", "restore"];
    let mut times: HashMap<&str, Vec<Times>> = HashMap::new();
    for round in 0..ROUNDS {
        for kind in kinds {
            let name = format!("{kind}-{round}");
            let with = |claim: String| claim + &pod(&name, ENDS, &[&name], "true");
            let (manifest, has_claim) = match kind {
                "inline" => (pod_with(&name, &there, inline(), "true"), false),
                "existing" => (pod(&name, &there, &["existing"], "true"), false),
                "empty" => (with(claim(&name, LATE, None)), true),
                "clone" => (with(claim(&name, CLONES, Some("source"))), true),
                _ => (with(restored(&name, "shot")), true),
            };
            let taken = measure(&env, &name, &manifest, has_claim);
            if ["clone", "restore"].contains(&kind) {
                assert_eq!(taken.node, node.name(), "{name}");
            }
            times.entry(kind).or_default().push(taken);
        }
    }
    println!("\npods with one volume, median of {ROUNDS} (least to most)");
    println!(
        "  {:<10} {:>24} {:>24}",
        "volume", "pod created to ended", "node selected to bound"
    );
    for kind in kinds {
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
    for (kind, of, goal) in [
        ("existing", "inline", ""),
        ("empty", "inline", ""),
        ("clone", "empty", " (<= 2×)"),
        ("restore", "empty", " (<= 2×)"),
    ] {
        let ratio = median(kind) / median(of);
        println!("  {kind} takes {ratio:.2}× as long as {of}{goal}");
    }
    snapshots.delete_all(&env);
    no_claim_is_left(&env);
    drop(snapshots);
    env.close();
}

struct Times {
    /// Where the pod ran.
    node: String,
    /// From the pod's creation to its end; its only step ends at once.
    pod: Duration,
    /// From the scheduler's choice of a node to the end of provisioning. None without a claim that
    /// waits for its pod.
    bound: Option<Duration>,
}

/// Makes a pod and its claim, if it has one, in one call, and waits for the pod's end.
fn measure(env: &Env, name: &str, manifest: &str, has_claim: bool) -> Times {
    let selector = format!("--selector=group={name}");
    let pods = env.watch("pods", &[&selector]);
    let claims = has_claim.then(|| env.watch("persistentvolumeclaims", &[&selector]));
    env.apply_text(manifest);
    let deadline = Instant::now() + PATIENCE;
    let mut made: Option<SystemTime> = None;
    let (pod, node) = loop {
        let change = pods.next(deadline).expect("the pod ends");
        let made = *made.get_or_insert(change.seen);
        if phase(&change.object) == "Succeeded" {
            break (since(made, change.seen), node_of(&change.object).to_owned());
        }
    };
    let bound = claims.and_then(|claims| {
        let mut selected: Option<SystemTime> = None;
        loop {
            let change = claims.next(deadline).expect("the claim is bound");
            let metadata = &change.object["metadata"];
            if metadata["annotations"]["volume.kubernetes.io/selected-node"].is_string() {
                selected.get_or_insert(change.seen);
            }
            if phase(&change.object) == "Bound" {
                return selected.map(|selected| since(selected, change.seen));
            }
        }
    });
    env.delete(&format!("pod/{name}"));
    Times { node, pod, bound }
}

fn since(from: SystemTime, to: SystemTime) -> Duration {
    to.duration_since(from).unwrap_or_default()
}
