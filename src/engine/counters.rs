//! Counters of an engine's work since it was opened, as metrics. Each part of the engine counts its
//! own work. `metrics` has the current state.

use std::time::Duration;

use crate::telemetry::metrics::{
    Counter, Durations, EncodeLabelSet, Family, Gauge, Histogram, Registry, Unit, durations,
    durations_by,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumeType {
    r#type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    result: &'static str,
}

/// What an engine has done. Clones share it.
#[derive(Debug, Clone)]
pub struct Counters {
    publishes: Durations<VolumeType>,
    hits: Family<VolumeType, Counter>,
    misses: Family<VolumeType, Counter>,
    seals: Histogram,
    commits: Histogram,
    ended: Family<Ended, Counter>,
    evicted_artifacts: Counter,
    evicted_bytes: Counter,
    freed_bytes: Counter,
    findings: Gauge,
}

const SEALED: Ended = Ended { result: "sealed" };

const GIVEN_UP: Ended = Ended { result: "given-up" };

/// The types of volumes that start from content. A publish of an input without content fails, so
/// only caches have misses.
const CACHES: [&str; 2] = ["resource-cache", "task-cache"];
const STARTING: [&str; 3] = ["input", CACHES[0], CACHES[1]];

/// A counter for each of these types, at zero.
fn by_type(types: &[&'static str]) -> Family<VolumeType, Counter> {
    let family = Family::default();
    for r#type in types {
        let _: &Counter = &family.get_or_create(&VolumeType { r#type });
    }
    family
}

impl Default for Counters {
    fn default() -> Self {
        let ended = Family::default();
        for result in [SEALED, GIVEN_UP] {
            // A reader of the increase does not see the first event of a new series.
            let _: &Counter = &ended.get_or_create(&result);
        }
        Self {
            publishes: durations_by(),
            hits: by_type(&STARTING),
            misses: by_type(&CACHES),
            seals: durations(),
            commits: durations(),
            ended,
            evicted_artifacts: Counter::default(),
            evicted_bytes: Counter::default(),
            freed_bytes: Counter::default(),
            findings: Gauge::default(),
        }
    }
}

impl Counters {
    pub(super) fn published(&self, r#type: &'static str, took: Duration) {
        let seconds = took.as_secs_f64();
        self.publishes
            .get_or_create(&VolumeType { r#type })
            .observe(seconds);
    }

    /// A new volume started from content (`is_hit`) or empty. Other types always start empty.
    pub(super) fn started(&self, r#type: &'static str, is_hit: bool) {
        if STARTING.contains(&r#type) {
            let counters = if is_hit { &self.hits } else { &self.misses };
            counters.get_or_create(&VolumeType { r#type }).inc();
        }
    }

    /// A volume became an artifact that can be forked.
    pub(super) fn sealed(&self, took: Duration) {
        self.seals.observe(took.as_secs_f64());
        self.ended.get_or_create(&SEALED).inc();
    }

    /// A volume with a seal intent was discarded.
    pub(super) fn given_up(&self) {
        self.ended.get_or_create(&GIVEN_UP).inc();
    }

    /// A batch of seals became durable.
    pub(super) fn committed(&self, took: Duration) {
        self.commits.observe(took.as_secs_f64());
    }

    pub(super) fn evicted(&self, artifacts: usize, bytes: u64) {
        let artifacts = u64::try_from(artifacts).unwrap_or(u64::MAX);
        self.evicted_artifacts.inc_by(artifacts);
        self.evicted_bytes.inc_by(bytes);
    }

    pub(super) fn freed(&self, bytes: u64) {
        self.freed_bytes.inc_by(bytes);
    }

    /// The last look found so much that index and directories disagree about.
    pub(super) fn found(&self, findings: usize) {
        self.findings
            .set(i64::try_from(findings).unwrap_or(i64::MAX));
    }

    /// Makes it part of what is asked for.
    pub fn register(&self, registry: &mut Registry) {
        let mut durations = |name, help, histogram: &Histogram| {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        };
        let help = "How long it took to seal a volume, from the decision until it can be forked";
        durations("seal_duration", help, &self.seals);
        let help =
            "How long it took to make a batch of seals durable: one syncfs, one index transaction";
        durations("commit_duration", help, &self.commits);
        let help = "How long it took to publish a new volume, by its type, the wait for its input \
             included";
        registry.register_with_unit(
            "publish_duration",
            help,
            Unit::Seconds,
            self.publishes.clone(),
        );
        let help = "New volumes that started from content, by type";
        registry.register("hits", help, self.hits.clone());
        let help = "New caches that started empty, by type";
        registry.register("misses", help, self.misses.clone());
        let help = "Volumes that were to be sealed, by result";
        registry.register("seals", help, self.ended.clone());
        let help = "Artifacts deleted to make room";
        registry.register("evicted_artifacts", help, self.evicted_artifacts.clone());
        let help = "Bytes of the layers that went with artifacts deleted to make room";
        registry.register("evicted_bytes", help, self.evicted_bytes.clone());
        let help = "Bytes of layers that were deleted because nothing referred to them";
        registry.register("freed_bytes", help, self.freed_bytes.clone());
        let help = "Disagreements between the index and the directories, as of the last check";
        registry.register("check_findings", help, self.findings.clone());
    }
}
