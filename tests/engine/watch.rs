//! Faults that the engine finds in its pool by itself: if another process removes something, that
//! is reported once and counted. `tests/bad_days` defines what counts as a finding.

use std::fs;
use std::time::Duration;

use baggageclaim::telemetry::metrics::{encode, registry};

use crate::common::bench::{Bench, eventually, names};
use crate::common::log::Log;
use crate::common::require_bench;

fn findings(bench: &Bench) -> u64 {
    let mut registry = registry();
    bench.engine.counters().register(&mut registry);
    let text = encode(&registry);
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("baggageclaim_check_findings "));
    line.expect("it is there").parse().expect("a number")
}

async fn until(bench: &Bench, count: u64) {
    eventually("so many findings", || findings(bench) == count).await;
}

/// On one thread, whose log is this test's alone.
#[tokio::test]
async fn what_somebody_takes_away_is_told_once_and_counted() {
    let (log, _this_thread) = Log::begin();
    let bench = require_bench!(|config| {
        config.first_check = Duration::from_millis(1);
        config.check_interval = Duration::from_millis(1);
    });
    let output = [("type", "output"), ("name", "o")];
    bench
        .step("v", &output, |at| {
            fs::write(at.join("f"), "f").expect("write");
        })
        .await;
    until(&bench, 0).await;

    let layers = bench.pool().join("layers");
    let layer = layers.join(&names(&layers)[0]);
    let aside = bench.lab.path().join("aside");
    fs::rename(layer.join("fs"), &aside).expect("it is there");
    until(&bench, 1).await;
    // Both are found by the same look, after others that found the one.
    let strange = bench.pool().join("not-ours");
    fs::write(&strange, "").expect("write");
    until(&bench, 2).await;
    assert_eq!(
        (
            log.count("kind=\"empty-layer\""),
            log.count("kind=\"unknown-name\"")
        ),
        (1, 1)
    );

    fs::remove_file(strange).expect("it is there");
    fs::rename(&aside, layer.join("fs")).expect("it is there");
    until(&bench, 0).await;
    fs::rename(layer.join("fs"), &aside).expect("it is there");
    until(&bench, 1).await;
    fs::rename(&aside, layer.join("fs")).expect("it is there");
    until(&bench, 0).await;
    assert_eq!(
        log.count("kind=\"empty-layer\""),
        2,
        "it went and came back"
    );
    bench.finish().await;
}
