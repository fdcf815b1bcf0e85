//! The metrics of content that moves between this node, its peers and the shared tier, as
//! docs/metrics.md names them. All series of a part are present where the part is used, and none
//! elsewhere.

use crate::distribution::{Fetched, Metrics, PeerFigures};
use crate::telemetry::metrics::{Counter, EncodeLabelSet, Family, Registry, counters, gauges};

pub(super) fn register(metrics: &Metrics, registry: &mut Registry) {
    of_fetches(metrics, registry);
    if metrics.has_tier {
        of_tier(metrics, registry);
    }
    if let Some(figures) = &metrics.peers {
        of_peers(figures, registry);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindAndSource {
    kind: &'static str,
    source: &'static str,
}

fn of_fetches(metrics: &Metrics, registry: &mut Registry) {
    let help = "Fetches from peers and the shared tier that run";
    gauges(registry, &[("fetches_running", help, metrics.fetching)]);
    let counter = |value: fn(&Fetched) -> u64| {
        let family = Family::<KindAndSource, Counter>::default();
        for (kind, source, fetched) in metrics.fetches.all() {
            let source = source.as_str();
            let labels = KindAndSource { kind, source };
            family.get_or_create(&labels).inc_by(value(&fetched));
        }
        family
    };
    let help = "Artifacts that were fetched, by kind and where they were";
    registry.register("fetches", help, counter(|it| it.artifacts));
    let help = "Bytes of the files that were fetched, by kind and where they were";
    registry.register("fetched_bytes", help, counter(|it| it.bytes));
    let help = "Fetches that failed, by kind and where the content was";
    registry.register("fetch_failures", help, counter(|it| it.failures));
}

fn of_tier(metrics: &Metrics, registry: &mut Registry) {
    gauges(
        registry,
        &[
            (
                "shared_usable",
                "Whether the shared tier can be used: 0 until a person changes something",
                u64::from(!metrics.permanent_error),
            ),
            (
                "shared_uploads_waiting",
                "Artifacts that are not in the shared tier yet",
                metrics.uploads_waiting,
            ),
        ],
    );
    counters(
        registry,
        &[
            (
                "shared_uploads",
                "Artifacts that were uploaded, or found in the shared tier",
                metrics.uploads,
            ),
            (
                "shared_uploaded_bytes",
                "Packed bytes of layers that were sent to the shared tier",
                metrics.uploaded_bytes,
            ),
            (
                "shared_upload_failures",
                "Uploads that failed, and are tried again",
                metrics.upload_failures,
            ),
            (
                "shared_uploads_refused",
                "Artifacts that stay on this node because their name was cleared or has other content",
                metrics.uploads_refused,
            ),
            (
                "shared_questions",
                "Look-ups of names in the shared tier",
                metrics.questions,
            ),
            (
                "shared_questions_failed",
                "Look-ups that failed or timed out",
                metrics.questions_failed,
            ),
            (
                "shared_damage_reported",
                "Damaged objects of the shared tier that this node reported to the others",
                metrics.damage_reported,
            ),
        ],
    );
}

fn of_peers(figures: &PeerFigures, registry: &mut Registry) {
    gauges(
        registry,
        &[
            ("peer_nodes", "Peers that are known", figures.peers),
            (
                "peer_streams_running",
                "Streams that are being sent to peers",
                figures.sending,
            ),
        ],
    );
    counters(
        registry,
        &[
            (
                "peer_questions",
                "Names that peers were asked for, each peer counted",
                figures.questions,
            ),
            (
                "peer_questions_failed",
                "Questions that had no answer in time, or an error",
                figures.questions_failed,
            ),
            (
                "peer_located",
                "Names whose place the controller told",
                figures.located,
            ),
            (
                "peer_received_bytes",
                "Bytes that came from peers, as they travelled",
                figures.received_bytes,
            ),
            (
                "peer_offered",
                "Artifacts that peers were given an answer about",
                figures.offered,
            ),
            (
                "peer_streams",
                "Streams of tables and content that were sent to peers",
                figures.sent,
            ),
            (
                "peer_sent_bytes",
                "Bytes that were sent to peers, as they travelled",
                figures.sent_bytes,
            ),
            (
                "peer_refused",
                "Calls of an unknown key, or for content that the peer may not have",
                figures.refused,
            ),
            (
                "peer_busy",
                "Streams that peers did not get because as many ran as may",
                figures.busy,
            ),
            (
                "peer_damage_reported",
                "Reports of damaged content, made or received",
                figures.damaged,
            ),
        ],
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::{self, assert_documented, encode};

    #[test]
    fn a_node_has_the_metrics_of_the_parts_that_it_uses_and_no_others() {
        let tier = Metrics {
            has_tier: true,
            ..Metrics::default()
        };
        let peers = Metrics {
            peers: Some(PeerFigures::default()),
            ..Metrics::default()
        };
        for (used, prefix, other) in [(tier, "shared_", "peer_"), (peers, "peer_", "shared_")] {
            let mut registry = metrics::registry();
            register(&used, &mut registry);
            let text = encode(&registry);
            let has = |prefix| text.contains(&format!("# TYPE baggageclaim_{prefix}"));
            assert!(has("fetches") && has(prefix) && !has(other), "{text}");
            let failures = text.matches("\nbaggageclaim_fetch_failures_total{").count();
            assert_eq!(failures, 7, "{text}");
        }
    }

    #[test]
    fn the_page_of_metrics_names_each_series() {
        let mut registry = metrics::registry();
        of_fetches(&Metrics::default(), &mut registry);
        assert_documented(&registry, "fetch");
        let mut registry = metrics::registry();
        of_tier(&Metrics::default(), &mut registry);
        assert_documented(&registry, "shared_");
        let mut registry = metrics::registry();
        of_peers(&PeerFigures::default(), &mut registry);
        assert_documented(&registry, "peer_");
    }
}
