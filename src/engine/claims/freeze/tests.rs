//! Freezes that are refused, taken back, or wait for copies.
//! Tests of `freeze` only.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::engine::claims::entries::ClaimMount;
use crate::engine::claims::types::CreateClaim;
use crate::engine::threads::Pool;
use crate::engine::{Config, Engine, guard};

impl Engine {
    /// Keeps all threads for copies busy until the sender is dropped.
    pub(crate) fn hold_copies(&self) -> mpsc::Sender<()> {
        self.hold(Pool::Copies)
    }

    /// The same of any pool.
    pub(in crate::engine) fn hold(&self, pool: Pool) -> mpsc::Sender<()> {
        let (hold, receiver) = mpsc::channel::<()>();
        let receiver = Arc::new(parking_lot::Mutex::new(receiver));
        for _ in 0..16 {
            let receiver = receiver.clone();
            drop(self.inner.threads.run(pool, move || receiver.lock().recv()));
        }
        hold
    }
}

/// An engine that copies, with one thread for calls, and a claim with content.
async fn engine_with_a_claim(folder: &Path) -> (Engine, PersistentVolume) {
    let mut config = Config::of_copies(folder);
    config.threads = 1;
    let engine = Engine::open(config).await.expect("it opens");
    let request = CreateClaim::empty("claim");
    let claim = engine.create_claim(request).await.expect("made");
    data_dir::make(&engine.inner, &claim).expect("its content");
    (engine, claim)
}

#[tokio::test]
async fn a_copy_does_not_take_the_threads_of_seals() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (engine, claim) = engine_with_a_claim(folder.path()).await;
    let inner = &engine.inner;
    let (go_on, told) = mpsc::channel::<()>();
    let told = Arc::new(parking_lot::Mutex::new(told));
    let busy: Vec<_> = (0..16)
        .map(|_| told.clone())
        .map(|told| inner.threads.run(Pool::Seals, move || told.lock().recv()))
        .collect();
    let guard = Guard::take(inner, &claim.id, guard::deadline()).await;
    let guards = vec![guard.expect("it is free")];
    let freezing = freeze(inner, guards, vec![claim.id.clone()], Moment::AsItCan);
    let freezing = tokio::time::timeout(Duration::from_secs(30), freezing).await;
    let freezing = freezing.expect("it waits for a seal").expect("frozen");
    assert_eq!(freezing.layers().count(), 1, "a copy");
    drop(freezing);
    drop(go_on);
    for busy in busy {
        busy.await.expect("it ran").expect_err("nothing was told");
    }
    engine.shutdown().await;
}

#[tokio::test]
async fn a_mounted_claim_that_may_not_be_copied_is_refused_though_all_copies_wait() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (engine, claim) = engine_with_a_claim(folder.path()).await;
    let inner = &engine.inner;
    let mount = ClaimMount {
        id: 1,
        staging: false,
        read_only: false,
        asked: None,
    };
    let target = folder.path().join("target");
    let mounted = |mount: Option<ClaimMount>| {
        let mut state = inner.state.lock();
        let held = state.claims.get_mut(&claim.id).expect("held");
        held.mounts = mount
            .map(|mount| (target.clone(), mount))
            .into_iter()
            .collect();
    };
    mounted(Some(mount));
    let hold = engine.hold_copies();
    let guard = Guard::take(inner, &claim.id, guard::deadline()).await;
    let guards = vec![guard.expect("it is free")];
    let freezing = freeze(inner, guards, vec![claim.id.clone()], Moment::AsItCan);
    let freezing = tokio::time::timeout(Duration::from_secs(30), freezing).await;
    let refused = freezing.expect("it waits for copies").map(drop);
    let refused = refused.expect_err("liveClone: refuse");
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    mounted(None);
    drop(hold);
    engine.shutdown().await;
}

#[tokio::test]
async fn a_freeze_without_a_commit_is_taken_back_on_no_thread_of_the_runtime() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (engine, claim) = engine_with_a_claim(folder.path()).await;
    let inner = &engine.inner;
    let take = || Guard::take(inner, &claim.id, guard::deadline());
    let guards = vec![take().await.expect("it is free")];
    let ids = vec![claim.id.clone()];
    let freezing = freeze(inner, guards, ids, Moment::AsItCan).await;
    let freezing = freezing.expect("frozen");
    let layer = freezing.layers().next().expect("a copy").to_string();
    let is_there = || inner.dirs.layers.has(&layer).expect("stat");

    let (go_on, told) = mpsc::channel();
    let busy = inner.threads.run(Pool::Calls, move || told.recv());
    drop(freezing);
    assert!(is_there(), "it was taken back on this thread");
    go_on.send(()).expect("it waits");
    busy.await.expect("it ran").expect("told");
    // A caller who comes meanwhile waits for it.
    drop(take().await.expect("it is taken back"));
    assert!(!is_there());
    engine.shutdown().await;
}
