//! The metrics of the shared tier, as docs/metrics.md names them.
//! All series are present where a tier is used, and none elsewhere.

use crate::distribution::Metrics;
use crate::telemetry::metrics::{ConstCounter, Gauge, Registry};

pub(super) fn register(metrics: &Metrics, registry: &mut Registry) {
    let gauges = [
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
        (
            "shared_fetches_running",
            "Fetches from the shared tier that run",
            metrics.fetching,
        ),
    ];
    for (name, help, value) in gauges {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register(name, help, gauge);
    }
    for (name, help, value) in counters(metrics) {
        registry.register(name, help, ConstCounter::new(value));
    }
}

fn counters(metrics: &Metrics) -> [(&'static str, &'static str, u64); 11] {
    [
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
            "Artifacts that stay on this node because the name was taken or cleared",
            metrics.uploads_refused,
        ),
        (
            "shared_fetches",
            "Artifacts that were fetched from the shared tier",
            metrics.fetches,
        ),
        (
            "shared_fetched_bytes",
            "Plain bytes of content that came from the shared tier",
            metrics.fetched_bytes,
        ),
        (
            "shared_fetch_failures",
            "Fetches from the shared tier that failed",
            metrics.fetch_failures,
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
            "shared_misses",
            "Volumes that needed content of the shared tier and did not get it",
            metrics.misses,
        ),
        (
            "shared_damage_reported",
            "Damaged objects of the shared tier that this node reported to the others",
            metrics.damage_reported,
        ),
    ]
}
