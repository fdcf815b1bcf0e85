//! Metrics: the kinds of measure, and the RPC counters that all gRPC servers share. Each module
//! defines its own metrics; `http` serves them.
//!
//! Two rules keep this cheap. Counting takes nanoseconds: an atomic or a short lock that is not
//! held across other work. Labels are bounded: only the program's own strings (`&'static str`),
//! never a tenant, pod or key, so that no request can create a new series. One exception:
//! `k8s::budgets` names up to 100 namespaces, those with a policy.

use std::time::Duration;

pub use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text;
pub use prometheus_client::metrics::counter::{ConstCounter, Counter};
pub use prometheus_client::metrics::family::Family;
pub use prometheus_client::metrics::gauge::Gauge;
pub use prometheus_client::metrics::histogram::Histogram;
pub use prometheus_client::registry::{Registry, Unit};

/// The prefix of each name.
pub const PREFIX: &str = "baggageclaim";

/// Upper bounds for durations in seconds: from a publish of a few system calls to one that waits
/// for its input as long as allowed.
const BOUNDS: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 90.0,
];

/// An empty histogram of durations, in seconds.
#[must_use]
pub fn durations() -> Histogram {
    Histogram::new(BOUNDS)
}

/// Histograms of durations, one per set of labels.
pub type Durations<Labels> = Family<Labels, Histogram, fn() -> Histogram>;

/// Creates [`Durations`].
#[must_use]
pub fn durations_by<Labels>() -> Durations<Labels>
where
    Labels: Clone + std::hash::Hash + Eq,
{
    Family::new_with_constructor(durations as fn() -> Histogram)
}

/// A registry with the driver's prefix.
#[must_use]
pub fn registry() -> Registry {
    Registry::with_prefix(PREFIX)
}

/// All registered metrics as text.
#[must_use]
pub fn encode(registry: &Registry) -> String {
    let mut text = String::new();
    text::encode(&mut text, registry).expect("a String takes all");
    text
}

/// A metric of this moment: its name, its help, and the value.
pub type Line<'a> = (&'a str, &'a str, u64);

/// Registers gauges with their values.
pub fn gauges(registry: &mut Registry, lines: &[Line<'_>]) {
    for (name, help, value) in lines {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(*value).unwrap_or(i64::MAX));
        registry.register(*name, *help, gauge);
    }
}

/// Registers counters with their values.
pub fn counters(registry: &mut Registry, lines: &[Line<'_>]) {
    for (name, help, value) in lines {
        registry.register(*name, *help, ConstCounter::new(*value));
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    method: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Method {
    method: &'static str,
}

/// The number of answered RPCs by result, and their durations. Clones share the counters.
#[derive(Debug, Clone)]
pub struct Rpcs {
    answered: Family<Answered, Counter>,
    took: Durations<Method>,
}

impl Default for Rpcs {
    fn default() -> Self {
        Self {
            answered: Family::default(),
            took: durations_by(),
        }
    }
}

impl Rpcs {
    /// Creates the series of these methods and codes at zero. Otherwise a series would start with
    /// its first event, and `increase()` would miss that one.
    pub fn begin(&self, methods: &[&'static str], codes: &[&'static str]) {
        for method in methods {
            for code in codes {
                drop(self.answered.get_or_create(&Answered { method, code }));
            }
        }
    }

    /// Counts one RPC.
    pub fn count(&self, method: &'static str, code: &'static str, took: Duration) {
        self.answered
            .get_or_create(&Answered { method, code })
            .inc();
        let seconds = took.as_secs_f64();
        self.took.get_or_create(&Method { method }).observe(seconds);
    }

    /// Adds the counters to the registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "CSI calls that were answered, by method and gRPC code";
        registry.register("csi_rpcs", help, self.answered.clone());
        let help = "How long CSI calls took, by method, failures included";
        registry.register_with_unit("csi_rpc_duration", help, Unit::Seconds, self.took.clone());
    }
}

/// Asserts that docs/metrics.md names the series of a registry, and no others with this beginning.
#[cfg(test)]
pub(crate) fn assert_documented(registry: &Registry, beginning: &str) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
    let page = std::fs::read_to_string(page).expect("docs/metrics.md");
    let row = format!("| `baggageclaim_{beginning}");
    let documented = page.matches(&row);
    let text = encode(registry);
    let series = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let series: Vec<&str> = series.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(series.len(), documented.count());
    for name in series {
        assert!(page.contains(&format!("| `{name}")), "{name}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_told() {
        let rpcs = Rpcs::default();
        rpcs.begin(&["Probe", "Other"], &["OK", "INTERNAL"]);
        rpcs.count("Probe", "OK", Duration::from_micros(200));
        rpcs.count("Probe", "OK", Duration::from_millis(3));
        rpcs.clone()
            .count("Probe", "ABORTED", Duration::from_secs(100));
        let mut registry = registry();
        rpcs.register(&mut registry);
        let text = encode(&registry);
        for line in [
            "baggageclaim_csi_rpcs_total{method=\"Probe\",code=\"OK\"} 2",
            "baggageclaim_csi_rpcs_total{method=\"Probe\",code=\"ABORTED\"} 1",
            "baggageclaim_csi_rpcs_total{method=\"Probe\",code=\"INTERNAL\"} 0",
            "baggageclaim_csi_rpcs_total{method=\"Other\",code=\"OK\"} 0",
            "baggageclaim_csi_rpc_duration_seconds_count{method=\"Probe\"} 3",
            "baggageclaim_csi_rpc_duration_seconds_bucket{le=\"0.0001\",method=\"Probe\"} 0",
            "baggageclaim_csi_rpc_duration_seconds_bucket{le=\"0.00025\",method=\"Probe\"} 1",
            "baggageclaim_csi_rpc_duration_seconds_bucket{le=\"90.0\",method=\"Probe\"} 2",
            "baggageclaim_csi_rpc_duration_seconds_bucket{le=\"+Inf\",method=\"Probe\"} 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
