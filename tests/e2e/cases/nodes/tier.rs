//! Two kubelets over one tier, without peers: what a step on one node commits, a step on another
//! node starts from, also when the first node is off. `../shared.rs` plays the tier on one node.

use super::peers::step_with;
use super::{node_is_ready, shared};
use crate::cluster::{Cluster, succeed};
use crate::env::Env;

const CACHE: &str = "type: task-cache, key: go";
const OUTPUT: &str = "type: output, name: made";

pub(in crate::cases) fn one_tier(env: &Env) {
    let (two, three) = (env.cluster.node(2), env.cluster.node(3));
    let storage = shared::Storage::start(env.cluster);
    let drivers = Drivers::with(env.cluster, &storage.url);
    let step = |name: &str, node: &Cluster, attributes: &str, command: &str| {
        env.apply_text(&step_with(name, node, "work", attributes, command));
        env.succeeded(name);
    };
    step("caches", &two, CACHE, "echo of-2 > /work/text");
    step("makes", &two, OUTPUT, "echo of-2 > /work/text");
    env.event("caches", &["task-cache/go is in the shared tier"]);
    env.event("makes", &["artifact/made is in the shared tier"]);

    let off = two.off();
    let change = "grep of-2 /work/text; echo of-3 > /work/text";
    step("goes-on", &three, CACHE, change);
    let hit = ["forked task-cache/go", "fetched from the shared tier"];
    env.event("goes-on", &hit);
    let input = "type: input, from: artifact/made";
    step("reads", &three, input, "grep of-2 /work/text");
    env.event("goes-on", &["task-cache/go is in the shared tier"]);
    drop(off);
    node_is_ready(env, &two);
    drop(drivers);
}

/// The drivers of all nodes with the tier. When this is dropped they are as they were: the next
/// case needs that.
struct Drivers<'a>(&'a Cluster);

impl<'a> Drivers<'a> {
    fn with(cluster: &'a Cluster, url: &str) -> Self {
        let drivers = Self(cluster);
        drivers.set(&[
            &format!("BAGGAGECLAIM_SHARED={url}"),
            &format!("AWS_ACCESS_KEY_ID={}", shared::KEY[0]),
            &format!("AWS_SECRET_ACCESS_KEY={}", shared::KEY[1]),
            // Each answer is waited for, however busy the machine is.
            "BAGGAGECLAIM_ASK=60s",
        ]);
        drivers
    }

    fn set(&self, variables: &[&str]) {
        let driver = ["daemonset/baggageclaim-node", "--namespace=baggageclaim"];
        let set = ["set", "env"];
        succeed(self.0.kubectl(&set).args(driver).args(variables));
        for node in self.0.nodes() {
            node.driver_ready();
        }
    }
}

impl Drop for Drivers<'_> {
    fn drop(&mut self) {
        self.set(&[
            "BAGGAGECLAIM_SHARED-",
            "AWS_ACCESS_KEY_ID-",
            "AWS_SECRET_ACCESS_KEY-",
            "BAGGAGECLAIM_ASK-",
        ]);
    }
}
