//! The current state of an engine in numbers ([`Metrics`]). `counters` has its work since it was
//! opened. Nothing here walks, waits for a volume, or names a tenant, a pod or a key.

use std::sync::Arc;

use super::error::{Context, Result};
use super::shared::Inner;
use super::types::VolumeState;
use crate::telemetry::metrics::{EncodeLabelSet, Family, Gauge, Registry};

/// The types that a volume can have.
const TYPES: [&str; 6] = [
    "scratch",
    "input",
    "output",
    "resource-cache",
    "task-cache",
    "import",
];

/// How far it can be, and the word for it.
const STATES: [(VolumeState, &str); 6] = [
    (VolumeState::Preparing, "preparing"),
    (VolumeState::Published, "published"),
    (VolumeState::Unpublished, "unpublished"),
    (VolumeState::AwaitingOutcome, "awaiting-outcome"),
    (VolumeState::InUse, "in-use"),
    (VolumeState::Sealing, "sealing"),
];

/// The kinds of artifacts in the order of [`NameKind`](crate::model::NameKind): what their name is,
/// or was when they were sealed.
const KINDS: [&str; 3] = ["output", "resource-cache", "task-cache"];

/// What an engine has, in numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metrics {
    /// By type and state, in the order of `TYPES` and `STATES`.
    volumes: [[u64; STATES.len()]; TYPES.len()],
    /// By kind, in the order of `KINDS`.
    artifacts: [u64; KINDS.len()],
    /// Resource caches, task caches.
    caches: [u64; 2],
    seals_pending: u64,
    damaged: u64,
    fence: u64,
    policies_known: u64,
    bytes: u64,
    bytes_available: u64,
    inodes: u64,
    inodes_free: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TypeAndState {
    r#type: &'static str,
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

/// The value of a gauge; a count beyond its range is shown as the largest one.
fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Metrics {
    /// Adds these metrics to a registry. Every series is present, also with the value 0: an alert
    /// cannot watch a series that vanishes.
    pub fn register(&self, registry: &mut Registry) {
        let volumes = Family::<TypeAndState, Gauge>::default();
        for (r#type, by_state) in TYPES.into_iter().zip(self.volumes) {
            for ((_, state), count) in STATES.into_iter().zip(by_state) {
                let labels = TypeAndState { r#type, state };
                volumes.get_or_create(&labels).set(gauge(count));
            }
        }
        registry.register("volumes", "Volumes, by type and state", volumes);
        let by_kind = |kinds: &[&'static str], counts: &[u64]| {
            let family = Family::<Kind, Gauge>::default();
            for (kind, count) in kinds.iter().zip(counts) {
                family.get_or_create(&Kind { kind }).set(gauge(*count));
            }
            family
        };
        let help = "Artifacts, by the kind of the name that they were sealed under, also those \
                    that lost it";
        registry.register("artifacts", help, by_kind(&KINDS, &self.artifacts));
        let help = "Caches that have content, by kind";
        registry.register("caches", help, by_kind(&["resource", "task"], &self.caches));
        for (name, help, value) in [
            (
                "seals_pending",
                "Volumes with a seal intent whose content is not durable yet",
                self.seals_pending,
            ),
            (
                "damaged_volumes",
                "Volumes with damaged records that may be in use, counted at the start",
                self.damaged,
            ),
            (
                "fence_applied",
                "The highest clear of the cluster that this node has applied; 0: none",
                self.fence,
            ),
            (
                "policies_known",
                "1: this node knows the cluster's cache policies, or there is no controller",
                self.policies_known,
            ),
            (
                "pool_capacity_bytes",
                "Bytes of the pool's filesystem",
                self.bytes,
            ),
            (
                "pool_free_bytes",
                "Bytes of the pool's filesystem that can still be written",
                self.bytes_available,
            ),
            (
                "pool_capacity_inodes",
                "Inodes of the pool's filesystem; 0 if it creates them on demand",
                self.inodes,
            ),
            (
                "pool_free_inodes",
                "Free inodes of the pool's filesystem",
                self.inodes_free,
            ),
        ] {
            let shown = Gauge::<i64>::default();
            shown.set(gauge(value));
            registry.register(name, help, shown);
        }
    }
}

/// What the engine has now: one statfs, and one pass over what is in memory.
pub(super) fn collect(inner: &Arc<Inner>) -> Result<Metrics> {
    let space = inner.dirs.root.space().context("ask for the pool's room")?;
    let mut metrics = Metrics {
        bytes: space.bytes,
        bytes_available: space.bytes_available,
        inodes: space.inodes,
        inodes_free: space.inodes_free,
        ..Metrics::default()
    };
    let state = inner.state.lock();
    for volume in state.volumes.all() {
        let kind = volume.record.spec.kind.type_name();
        let kind = TYPES.iter().position(|name| *name == kind);
        let state = volume.state();
        let state = STATES.iter().position(|(known, _)| *known == state);
        if let (Some(kind), Some(state)) = (kind, state) {
            metrics.volumes[kind][state] += 1;
        }
    }
    for sealed in state.catalog.artifacts().values() {
        metrics.artifacts[sealed.artifact.reference.kind() as usize] += 1;
    }
    for (name, _) in state.catalog.names() {
        if let Some((kind, _)) = name.reference.cache() {
            metrics.caches[kind as usize] += 1;
        }
    }
    metrics.fence = state.fences.newest();
    metrics.policies_known = u64::from(state.policies.are_known());
    let pending = state.volumes.seals();
    metrics.seals_pending = u64::try_from(pending.count()).unwrap_or(u64::MAX);
    metrics.damaged = u64::try_from(state.volumes.orphans()).unwrap_or(u64::MAX);
    Ok(metrics)
}
