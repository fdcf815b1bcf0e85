//! A node whose pool is full: the driver refuses a new claim there, and its pod is scheduled again.

use super::{ENDS, LATE, claim, no_claim_is_left, node_of, place_of, pod, volume_of};
use crate::cluster::{Cluster, POOL, succeed};
use crate::env::Env;

/// What fills a pool.
const FILLER: &str = "/var/lib/baggageclaim/filler";

/// A node whose pool is full, until this is dropped.
pub(super) struct Filled<'a>(&'a Cluster);

impl<'a> Filled<'a> {
    pub(super) fn new(node: &'a Cluster) -> Self {
        let fill = format!(
            "free=$(df --output=avail --block-size=1 {POOL} | tail -1); \
             fallocate -l $((free - 33554432)) {FILLER}"
        );
        node.shell(&fill, true);
        Self(node)
    }
}

impl Drop for Filled<'_> {
    fn drop(&mut self) {
        self.0.shell(&format!("rm {FILLER}"), true);
    }
}

/// A node that takes no new pods, until this is dropped.
struct Cordoned<'a>(&'a Cluster);

impl<'a> Cordoned<'a> {
    fn new(node: &'a Cluster) -> Self {
        succeed(&mut node.kubectl(&["cordon", &node.name()]));
        Self(node)
    }
}

impl Drop for Cordoned<'_> {
    fn drop(&mut self) {
        succeed(&mut self.0.kubectl(&["uncordon", &self.0.name()]));
    }
}

/// The scheduler can only take the full node at first. When there is another one, the same pod runs
/// there: csi-provisioner has removed the node that was selected for the claim.
pub(in crate::cases) fn full_node(env: &Env) {
    let [one, full, other] = [1, 2, 3].map(|number| env.cluster.node(number));
    let _filled = Filled::new(&full);
    let first = Cordoned::new(&one);
    let better = Cordoned::new(&other);
    let rather = format!(
        "{ENDS}\n  affinity: {{nodeAffinity: {{preferredDuringSchedulingIgnoredDuringExecution: \
         [{{weight: 100, preference: {{matchExpressions: [{{key: kubernetes.io/hostname, \
         operator: In, values: [{}]}}]}}}}]}}}}",
        other.name()
    );
    let write = "echo moved > /claim-0/text";
    env.apply_text(&(claim("moves", LATE, None) + &pod("moves", &rather, &["moves"], write)));
    let why = format!("node {}: the pool has no room left", full.name());
    env.claim_event("moves", &["ResourceExhausted", &why]);
    let claim = env.get("persistentvolumeclaim/moves");
    assert_eq!(claim["status"]["phase"], "Pending");

    drop(better);
    env.succeeded("moves");
    assert_eq!(node_of(&env.get("pod/moves")), other.name());
    assert_eq!(place_of(env, &volume_of(env, "moves")), other.name());
    assert!(full.in_pool("volumes").is_empty());
    drop(first);
    no_claim_is_left(env);
}
