//! A pool that fills up: a fetch has unused content evicted for it, or fails with the reason and
//! leaves nothing.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use baggageclaim::engine::Error;
use baggageclaim::engine::notice::What;

use crate::common::bench::{Bench, names};
use crate::common::{Fs, Lab, skip};
use crate::nodes::{INPUT, Node, OUTPUT, Shared, TASK, require, text};

const LARGE: usize = 24 << 20;

/// A node with a small pool.
async fn small(tier: &Shared) -> Option<Node> {
    match Lab::try_sized(Fs::Ext4, 128 << 20) {
        Ok(lab) => {
            let bench = Bench::with(lab, |config| config.high_watermark = 100).await;
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
    let error = b.try_publish("input", &INPUT).await.expect_err("no space");
    assert!(matches!(error, Error::Coming { .. }), "{error:?}");
    assert!(error.to_string().contains("free"), "{error}");
    let incoming = b.bench.pool().join("incoming");
    assert_eq!(names(&incoming), [""; 0]);
    fs::remove_file(filler).expect("make room");
    assert_eq!(b.sees("again", &TASK).await, text(&large));
    assert_eq!(names(&incoming), [""; 0]);

    // The task cache is unused now: it goes when the output needs its space.
    let filler = fill(&b, 24 << 20);
    assert_eq!(b.sees("input-2", &INPUT).await, text(&large));
    assert!(b.bench.artifact("task-cache/go").is_none());
    fs::remove_file(filler).expect("make room");
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
