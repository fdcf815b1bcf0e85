//! Faults that the engine finds in its pool by itself: if another process removes something, that
//! is reported once and counted. `tests/bad_days` defines what counts as a finding.

use std::fs;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::telemetry::metrics::{encode, registry};
use parking_lot::Mutex;

use crate::common::bench::{Bench, eventually, names};
use crate::common::require_bench;

/// The log of what runs on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn count(&self, kind: &str) -> usize {
        let log = String::from_utf8(self.0.lock().clone()).expect("log lines are text");
        let kind = format!("kind=\"{kind}\"");
        log.lines().filter(|line| line.contains(&kind)).count()
    }
}

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
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let _this_thread = tracing::subscriber::set_default(subscriber);
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
        (log.count("empty-layer"), log.count("unknown-name")),
        (1, 1)
    );

    fs::remove_file(strange).expect("it is there");
    fs::rename(&aside, layer.join("fs")).expect("it is there");
    until(&bench, 0).await;
    fs::rename(layer.join("fs"), &aside).expect("it is there");
    until(&bench, 1).await;
    fs::rename(&aside, layer.join("fs")).expect("it is there");
    until(&bench, 0).await;
    assert_eq!(log.count("empty-layer"), 2, "it went and came back");
    bench.finish().await;
}
