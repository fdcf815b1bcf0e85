//! The metrics of the controller, as docs/metrics.md names them: counters, and gauges that are
//! computed from the watches for each request.

use std::sync::Arc;

use kube::ResourceExt as _;
use kube::runtime::watcher;
use tokio::time::Instant;

use super::cluster::Cluster;
use super::order::Order;
use crate::api::{Phase, Wanted, bytes};
use crate::telemetry::metrics::{Counter, EncodeLabelSet, Family, Gauge, Registry, gauges};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

/// What the controller has done since it began. Clones share the counters.
#[derive(Debug, Clone)]
pub(super) struct Counters {
    /// Volumes that were deleted since their claim was given up.
    pub(super) leaks: Counter,
    /// Objects of orphans that were made again.
    pub(super) kept: Counter,
    /// Nodes that were given up.
    pub(super) given_up: Counter,
    watch_errors: Family<Kind, Counter>,
}

impl Counters {
    pub(super) fn new() -> Self {
        let watch_errors = Family::<Kind, Counter>::default();
        // Otherwise a series would begin with its first error, which `increase()` would miss.
        for kind in ["Volume", "Snapshot", "Pool", "Node", "PersistentVolume"] {
            drop(watch_errors.get_or_create(&Kind { kind }));
        }
        Self {
            leaks: Counter::default(),
            kept: Counter::default(),
            given_up: Counter::default(),
            watch_errors,
        }
    }

    /// Counts and logs the failure of a watch, which begins again.
    pub(super) fn watch_failed(&self, kind: &'static str, error: &watcher::Error) {
        self.watch_errors.get_or_create(&Kind { kind }).inc();
        tracing::warn!(%kind, %error, "the watch failed; restarting it");
    }

    fn register(&self, registry: &mut Registry) {
        let counters = [
            (
                "cluster_leaks_deleted",
                "Volumes whose claim was given up, and whose deletion was ordered",
                &self.leaks,
            ),
            (
                "cluster_objects_made_again",
                "Objects of orphans that the controller made again",
                &self.kept,
            ),
            (
                "cluster_nodes_given_up",
                "Nodes that were missing for longer than --node-grace",
                &self.given_up,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let help = "Failures of the watches over objects, by kind";
        registry.register("cluster_watch_errors", help, self.watch_errors.clone());
    }
}

const STATES: [&str; 7] = [
    "waiting",
    "fetching",
    "ready",
    "failed",
    "lost",
    "node_gone",
    "deleting",
];

/// The state of an object, as a label. The node's last answer says nothing of the data any more
/// when its node is gone.
fn state(wanted: Wanted, phase: Option<Phase>, is_node_gone: bool) -> &'static str {
    match (wanted, phase) {
        (Wanted::Absent, _) | (_, Some(Phase::Gone)) => "deleting",
        (_, Some(Phase::Ready | Phase::Lost)) if is_node_gone => "node_gone",
        (_, None) => "waiting",
        (_, Some(Phase::Fetching)) => "fetching",
        (_, Some(Phase::Ready)) => "ready",
        (_, Some(Phase::Failed)) => "failed",
        (_, Some(Phase::Lost)) => "lost",
    }
}

/// The uids and generations of orders that no node has answered.
fn unanswered<K: Order>(all: &[Arc<K>]) -> impl Iterator<Item = (String, i64)> {
    let all = all.iter().filter(|one| one.reply().is_none());
    all.map(|one| {
        let generation = one.meta().generation;
        (
            one.uid().unwrap_or_default(),
            generation.unwrap_or_default(),
        )
    })
}

impl Cluster {
    fn by_state<K: Order>(&self, all: &[Arc<K>]) -> Family<State, Gauge> {
        let family = Family::<State, Gauge>::default();
        for state in STATES {
            drop(family.get_or_create(&State { state }));
        }
        for one in all {
            let has_node = self.seen_nodes.get(one.node()).is_some();
            let is_gone = one.is_lost_with_node() || !has_node;
            let state = state(one.wanted(), one.state(), is_gone);
            family.get_or_create(&State { state }).inc();
        }
        family
    }

    /// Adds the metrics of the controller to the registry.
    pub fn register(&self, registry: &mut Registry) {
        self.counters.register(registry);
        let (volumes, snapshots) = (self.seen_volumes.all(), self.seen_snapshots.all());
        let help = "Volume objects, by state";
        registry.register("cluster_volumes", help, self.by_state(&volumes));
        let help = "Snapshot objects, by state";
        registry.register("cluster_snapshots", help, self.by_state(&snapshots));
        let (mut orders, now) = (self.orders.lock(), Instant::now());
        orders.look(unanswered(&volumes).chain(unanswered(&snapshots)), now);
        let (count, oldest) = orders.oldest(now);
        drop(orders);
        let help = "Orders that no node has answered yet";
        gauges(registry, &[("cluster_orders_waiting", help, count as u64)]);
        let help =
            "The age of the oldest unanswered order, counted from the first scrape that saw it";
        let seconds = oldest.as_secs();
        gauges(registry, &[("cluster_oldest_order_seconds", help, seconds)]);
        self.register_nodes(registry);
    }

    fn register_nodes(&self, registry: &mut Registry) {
        let pools = self.seen_pools.all();
        let nodes = Family::<State, Gauge>::default();
        for state in ["present", "missing"] {
            drop(nodes.get_or_create(&State { state }));
        }
        for pool in &pools {
            let is_there = self.seen_nodes.get(&pool.name_any()).is_some();
            let state = if is_there { "present" } else { "missing" };
            nodes.get_or_create(&State { state }).inc();
        }
        let help = "Nodes with a pool, by whether they have a Node object";
        registry.register("cluster_nodes", help, nodes);
        let orphans = pools.iter().filter_map(|pool| pool.status.as_ref());
        let orphans = orphans.map(|status| status.orphans.count).sum();
        let help = "Volumes and snapshots on the nodes that no object names";
        gauges(registry, &[("cluster_orphans", help, bytes(orphans))]);
    }
}
