//! Counters of an engine's work since it was opened, as metrics. Each part of the engine counts its
//! own work. `metrics` has the current state.

use std::hash::Hash;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::types::ContentSource;
use crate::model::Limit;
use crate::telemetry::metrics::{
    Counter, Durations, EncodeLabelSet, Family, Gauge, Histogram, Registry, Unit, durations,
    durations_by,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumeType {
    r#type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TypeAndSource {
    r#type: &'static str,
    source: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Evicted {
    reason: &'static str,
}

/// What an engine has done. Clones share it.
#[derive(Debug, Clone)]
pub struct Counters {
    publishes: Durations<VolumeType>,
    hits: Family<TypeAndSource, Counter>,
    saved_bytes: Family<TypeAndSource, Counter>,
    misses: Family<VolumeType, Counter>,
    waited: Family<VolumeType, Seconds>,
    seals: Histogram,
    commits: Histogram,
    ended: Family<Ended, Counter>,
    evicted_artifacts: Family<Evicted, Counter>,
    evicted_bytes: Family<Evicted, Counter>,
    freed_bytes: Counter,
    findings: Gauge,
}

const SEALED: Ended = Ended { result: "sealed" };

const GIVEN_UP: Ended = Ended { result: "given-up" };

/// Why content is evicted.
const REASONS: [&str; 3] = ["space", "ttl", "budget"];

type Seconds = Counter<f64, AtomicU64>;

/// The types of volumes that start from content.
const STARTING: [&str; 3] = ["input", "resource-cache", "task-cache"];

const SOURCES: [ContentSource; 3] = [
    ContentSource::Local,
    ContentSource::Peer,
    ContentSource::Shared,
];

/// A counter for each of these labels, at zero: a reader of the increase does not see the first
/// event of a new series.
fn at_zero<L, C>(labels: impl IntoIterator<Item = L>) -> Family<L, C>
where
    L: Clone + Hash + Eq,
    C: Default,
{
    let family = Family::default();
    for label in labels {
        let _: &C = &family.get_or_create(&label);
    }
    family
}

/// A wait for content. The time until it is dropped is counted.
#[derive(Debug)]
#[must_use]
pub struct Wait {
    seconds: Option<Seconds>,
    since: Instant,
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(seconds) = &self.seconds {
            seconds.inc_by(self.since.elapsed().as_secs_f64());
        }
    }
}

impl Default for Counters {
    fn default() -> Self {
        let types = STARTING.map(|r#type| VolumeType { r#type });
        let with_sources = |r#type| {
            SOURCES.map(|source| TypeAndSource {
                r#type,
                source: source.as_str(),
            })
        };
        let types_and_sources = STARTING.map(with_sources).concat();
        let reasons = REASONS.map(|reason| Evicted { reason });
        Self {
            publishes: durations_by(),
            hits: at_zero(types_and_sources.clone()),
            saved_bytes: at_zero(types_and_sources),
            misses: at_zero(types.clone()),
            waited: at_zero(types),
            seals: durations(),
            commits: durations(),
            ended: at_zero([SEALED, GIVEN_UP]),
            evicted_artifacts: at_zero(reasons.clone()),
            evicted_bytes: at_zero(reasons),
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

    /// A new volume started from content. `bytes`: its size, if known.
    pub(super) fn hit(&self, r#type: &'static str, source: ContentSource, bytes: Option<u64>) {
        let source = source.as_str();
        let labels = TypeAndSource { r#type, source };
        self.hits.get_or_create(&labels).inc();
        let saved = self.saved_bytes.get_or_create(&labels);
        saved.inc_by(bytes.unwrap_or_default());
    }

    /// A new cache started empty, or an input was refused for lack of content. Other types always
    /// start empty.
    pub fn missed(&self, r#type: &'static str) {
        if STARTING.contains(&r#type) {
            self.misses.get_or_create(&VolumeType { r#type }).inc();
        }
    }

    /// A volume begins to wait for its content. Nothing is counted for types that start empty.
    pub fn wait(&self, r#type: &'static str) -> Wait {
        let counter = || self.waited.get_or_create(&VolumeType { r#type }).clone();
        Wait {
            seconds: STARTING.contains(&r#type).then(counter),
            since: Instant::now(),
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

    /// Artifacts went to make room, or because of a limit of their namespace.
    pub(super) fn evicted(&self, limit: Option<Limit>, artifacts: usize, bytes: u64) {
        let reason = match limit {
            None => "space",
            Some(Limit::Ttl) => "ttl",
            Some(Limit::Budget) => "budget",
        };
        let artifacts = u64::try_from(artifacts).unwrap_or(u64::MAX);
        let label = Evicted { reason };
        self.evicted_artifacts
            .get_or_create(&label)
            .inc_by(artifacts);
        self.evicted_bytes.get_or_create(&label).inc_by(bytes);
    }

    pub(super) fn freed(&self, bytes: u64) {
        self.freed_bytes.inc_by(bytes);
    }

    /// The last look found so much that index and directories disagree about.
    pub(super) fn found(&self, findings: usize) {
        self.findings
            .set(i64::try_from(findings).unwrap_or(i64::MAX));
    }

    /// Registers it, so that `/metrics` shows it.
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
        let help = "New volumes that started from content, by type and where the content was";
        registry.register("hits", help, self.hits.clone());
        let help = "Bytes of the content that new volumes started from, as far as it was measured";
        registry.register("saved_bytes", help, self.saved_bytes.clone());
        let help = "New caches that started empty, and inputs that were refused for lack of \
                    content, by type";
        registry.register("misses", help, self.misses.clone());
        let help = "Time that publishes waited for content, or for an answer where it is, by type";
        registry.register_with_unit("content_wait", help, Unit::Seconds, self.waited.clone());
        let help = "Volumes that were to be sealed, by result";
        registry.register("seals", help, self.ended.clone());
        let help = "Unused artifacts deleted to make room, or for a limit of their namespace, by \
                    reason";
        registry.register("evicted_artifacts", help, self.evicted_artifacts.clone());
        let help = "Bytes of the layers that went with these artifacts, as far as they were \
                    measured, by reason";
        registry.register("evicted_bytes", help, self.evicted_bytes.clone());
        let help = "Bytes of layers that were deleted because nothing referred to them";
        registry.register("freed_bytes", help, self.freed_bytes.clone());
        let help = "Disagreements between the index and the directories, as of the last check";
        registry.register("check_findings", help, self.findings.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics;

    #[test]
    fn a_wait_is_counted_when_it_ends_and_only_for_types_that_start_from_content() {
        let counters = Counters::default();
        for r#type in ["input", "scratch"] {
            let mut wait = counters.wait(r#type);
            wait.since = wait
                .since
                .checked_sub(Duration::from_secs(2))
                .expect("it is past");
        }
        let running = counters.wait("task-cache");
        let mut registry = metrics::registry();
        counters.register(&mut registry);
        let text = metrics::encode(&registry);
        let series = "baggageclaim_content_wait_seconds_total{type=";
        let lines = text.lines().filter_map(|line| line.strip_prefix(series));
        let mut waits: Vec<(&str, f64)> = lines
            .filter_map(|line| line.split_once(' '))
            .map(|(label, value)| (label, value.parse().expect("a number")))
            .collect();
        waits.sort_by_key(|(label, _)| *label);
        let [(_, input), resources, tasks] = waits[..] else {
            panic!("three types: {text}");
        };
        assert!((2.0..60.0).contains(&input), "{text}");
        assert_eq!(
            [resources, tasks],
            [("\"resource-cache\"}", 0.0), ("\"task-cache\"}", 0.0)]
        );
        drop(running);
    }
}
