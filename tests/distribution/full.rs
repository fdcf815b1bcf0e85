//! A pool that fills up: a fetch has unused content evicted for it, or fails with the reason and
//! leaves nothing. What is in use is uploaded, once there is space for its table.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use baggageclaim::distribution::Drained;
use baggageclaim::engine::notice::What;
use baggageclaim::engine::{Config, Error, Notices};
use baggageclaim::model::Outcome;

use crate::common::bench::{Bench, NEVER, eventually, names};
use crate::common::{Fs, Lab, skip};
use crate::nodes::{INPUT, Node, OUTPUT, Shared, TASK, require, text, write};

const LARGE: usize = 24 << 20;

/// A node with a small pool, which evicts nothing by itself.
async fn small(tier: &Shared) -> Option<Node> {
    small_with(tier, |config| config.high_watermark = 100).await
}

/// A node with a small pool and these settings.
async fn small_with(tier: &Shared, change: impl FnOnce(&mut Config)) -> Option<Node> {
    match Lab::try_sized(Fs::Ext4, 128 << 20) {
        Ok(lab) => {
            let bench = Bench::with(lab, change).await;
            Some(Node::start(bench, &tier.store, |settings| {
                settings.input_wait = Duration::from_millis(700);
            }))
        }
        Err(reason) => {
            skip(&reason);
            None
        }
    }
}

/// Leaves so many bytes of the pool's filesystem.
fn fill(node: &Node, leaves: u64) -> PathBuf {
    let pool = node.bench.pool();
    let space = rustix::fs::statvfs(&pool).expect("statvfs");
    let bytes = (space.f_bavail * space.f_frsize).saturating_sub(leaves);
    let filler = pool.with_file_name("filler");
    let content = vec![1; usize::try_from(bytes).expect("small")];
    fs::write(&filler, content).expect("fill");
    filler
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_without_space_fails_with_the_reason_and_works_once_there_is_some() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    let large = "x".repeat(LARGE);
    a.share("t", &TASK, &large).await;
    a.share("o", &OUTPUT, &large).await;
    let mut b = require!(small(&tier).await);
    let filler = fill(&b, 12 << 20);
    assert_eq!(b.sees("full", &TASK).await, None);
    let told = b.heard();
    let says = |what: &What| matches!(what, What::NotFetched { why, .. } if why.contains("free"));
    assert!(told.iter().any(says), "{told:?}");
    // Kubelet repeats the call, too, until a fetch has failed for this reason.
    let began = Instant::now();
    loop {
        let error = b.try_publish("input", &INPUT).await.expect_err("no space");
        assert!(matches!(error, Error::Coming { .. }), "{error:?}");
        if error.to_string().contains("free") {
            break;
        }
        assert!(began.elapsed() < NEVER, "{error}");
    }
    let incoming = b.bench.pool().join("incoming");
    assert_eq!(names(&incoming), [""; 0]);
    fs::remove_file(filler).expect("make room");
    assert_eq!(b.sees("again", &TASK).await, text(&large));
    assert_eq!(names(&incoming), [""; 0]);

    // The task cache is unused now: it goes when the output needs its space.
    let filler = fill(&b, 24 << 20);
    assert_eq!(b.sees_at_last("input-2", &INPUT).await, text(&large));
    assert!(b.bench.artifact("task-cache/go").is_none());
    fs::remove_file(filler).expect("make room");
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_holes_may_be_larger_than_the_pool() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    a.publish("t", &TASK).await;
    write(&a.bench.target("t"), "a small text");
    let image = fs::File::create(a.bench.target("t").join("disk.img")).expect("create");
    image.set_len(1 << 30).expect("truncate");
    drop(image);
    a.end("t", Outcome::Succeeded).await;
    a.shared().await;
    let b = require!(small(&tier).await);
    assert_eq!(b.sees("t", &TASK).await, text("a small text"));
    assert_eq!(b.distribution.metrics().damage_reported, 0);
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_fits_exactly_beside_the_margin_is_not_refused() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    let large = "x".repeat(LARGE);
    a.share("t", &TASK, &large).await;
    let b = require!(small(&tier).await);
    let space = rustix::fs::statvfs(b.bench.pool()).expect("statvfs");
    let margin = space.f_blocks * space.f_frsize / 32;
    // The driver's own small files, and the filesystem for the filler, take some more.
    let filler = fill(&b, LARGE as u64 + margin + (2 << 20));
    assert_eq!(b.sees("fits", &TASK).await, text(&large));
    fs::remove_file(filler).expect("make room");
    a.finish().await;
    b.finish().await;
}

/// A node with a small pool, which commits the output while the pool has so little space. The
/// output stays in use. Returns the filler, too.
async fn commits_in_use(tier: &Shared, leaves: u64) -> Option<(Node, PathBuf)> {
    let (notices, mut heard) = Notices::channel(100);
    let node = small_with(tier, |config| {
        config.high_watermark = 50;
        config.notices = Some(notices);
    });
    let node = node.await?;
    node.publish("o", &OUTPUT).await;
    write(&node.bench.target("o"), "made on a full node");
    let filler = fill(&node, leaves);
    // The input waits before the content is there, so the content cannot be evicted.
    let ends = async {
        let waits = |what: &What| matches!(what, What::WaitingForInput { .. });
        while !waits(&heard.recv().await.expect("the engine lives").what) {}
        node.end("o", Outcome::Succeeded).await;
    };
    let (published, ()) = tokio::join!(node.publish("in-use", &INPUT), ends);
    assert!(published.parent.is_some(), "{published:?}");
    eventually("it is durable", || {
        let row = node.bench.artifact("artifact/built");
        row.is_some_and(|row| row.durable)
    })
    .await;
    Some((node, filler))
}

/// Drains a node, long before the timeout ends.
async fn drain_early(node: &Node) -> Drained {
    let began = Instant::now();
    let drained = node.distribution.drain(NEVER).await;
    assert!(began.elapsed() < NEVER / 2, "{:?}", began.elapsed());
    drained
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_above_its_high_watermark_uploads_what_is_in_use() {
    let tier = Shared::file();
    let (node, filler) = require!(commits_in_use(&tier, 12 << 20).await);
    assert_eq!(drain_early(&node).await.left, 0);
    let other = require!(Node::new(&tier.store).await);
    assert_eq!(other.sees("i", &INPUT).await, text("made on a full node"));
    fs::remove_file(filler).expect("make room");
    node.end("in-use", Outcome::Failed).await;
    other.finish().await;
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_wait_for_tables_for_which_there_is_no_space() {
    let tier = Shared::file();
    let (node, filler) = require!(commits_in_use(&tier, 1 << 20).await);
    let drained = drain_early(&node).await;
    assert_eq!((drained.uploaded, drained.left), (0, 1));
    let status = node.distribution.status();
    assert_eq!(
        (status.uploads_waiting, status.uploads_without_space),
        (1, 1)
    );
    // Once there is space, nothing else is needed.
    fs::remove_file(filler).expect("make room");
    assert_eq!(node.distribution.status().uploads_without_space, 0);
    node.shared().await;
    assert_eq!(node.distribution.metrics().uploads, 1);
    node.end("in-use", Outcome::Failed).await;
    node.finish().await;
}
