//! Clones on another node than their source's: a snapshot leaves one engine and becomes a claim in
//! another, from every backend to every backend. Frames go through memory.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use baggageclaim::archive;
use baggageclaim::engine::claims::{CreateClaim, ReceiveClaim};
use baggageclaim::engine::{
    Engine, Error, LayerPlace, OpenSnapshot, Opened, ReceiveError, ReceiveLayer,
};
use baggageclaim::model::{ClaimSource, PersistentVolume, Sha256, SnapshotId};

use super::bench::{BTRFS, Bench, COPY, Ground, OVERLAY, request, say};
use super::common::bench::NEVER;
use super::common::{Snapshot, assert_same, layers, tree};

/// Every backend once.
const BACKENDS: [Ground; 3] = [OVERLAY, BTRFS, COPY];

/// What becomes of a reception.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Succeeds,
    /// This layer cannot be made.
    Breaks(usize),
    /// All layers come, and the claim is not wanted any more.
    IsRefused,
    /// Another call makes the same claim while the first layer comes.
    IsMadeMeanwhile,
}

/// Opens a snapshot as soon as its tables of contents are made.
async fn opened(bench: &Bench, id: &SnapshotId) -> Arc<OpenSnapshot> {
    let deadline = Instant::now() + NEVER;
    loop {
        let (engine, id) = (bench.engine.clone(), id.clone());
        match layers::apart(move || engine.open_snapshot(&id)).await {
            Ok(Opened::Open(open)) => return Arc::from(open),
            Ok(Opened::Coming) if Instant::now() < deadline => tokio::task::yield_now().await,
            other => panic!("{other:?}"),
        }
    }
}

/// Receives a claim. The result, and how many layers were made for it.
async fn receive(
    to: &Bench,
    open: &Arc<OpenSnapshot>,
    name: &str,
    fate: Fate,
) -> (
    Result<PersistentVolume, ReceiveError<archive::Error>>,
    usize,
) {
    let wanted = open.layers.iter().map(|layer| ReceiveLayer {
        digest: Sha256(layer.table.digest().sha256),
        bytes: layer.table.bytes(),
    });
    let request = ReceiveClaim {
        claim: CreateClaim {
            source: Some(ClaimSource::Snapshot(open.snapshot.id.clone())),
            ..request(name)
        },
        layers: wanted.collect(),
        view: open.snapshot.view,
        size: open.snapshot.size,
    };
    let (engine, open) = (to.engine.clone(), Arc::clone(open));
    layers::apart(move || receive_now(&engine, &open, &request, fate)).await
}

fn receive_now(
    engine: &Engine,
    open: &OpenSnapshot,
    request: &ReceiveClaim,
    fate: Fate,
) -> (
    Result<PersistentVolume, ReceiveError<archive::Error>>,
    usize,
) {
    let mut count = 0;
    let make = |layer: usize, place: &LayerPlace<'_>| {
        if fate == Fate::Breaks(layer) {
            return Err(archive::Error::Cut);
        }
        if fate == Fate::IsMadeMeanwhile && count == 0 {
            let (made, _) = receive_now(engine, open, request, Fate::Succeeds);
            made.expect("it is made");
        }
        count += 1;
        let source = &open.layers[layer];
        layers::make(&source.table, &source.holder, place)
    };
    let may_enter = || match fate {
        Fate::IsRefused | Fate::IsMadeMeanwhile => Err(Error::Defect),
        Fate::Succeeds | Fate::Breaks(_) => Ok(()),
    };
    let received = engine.receive_claim(request.clone(), &AtomicU64::new(0), make, may_enter);
    (received, count)
}

async fn received(to: &Bench, open: &Arc<OpenSnapshot>, name: &str) -> (PersistentVolume, usize) {
    let (received, made) = receive(to, open, name, Fate::Succeeds).await;
    (received.expect(name), made)
}

async fn assert_nothing(bench: &Bench, after: &str) {
    bench.engine.reap().await.expect("reap");
    assert!(bench.engine.claims(None, 99).items.is_empty(), "{after}");
    for directory in ["volumes", "layers", "pending", "incoming", "trash"] {
        let left = bench.names_in(directory);
        assert!(left.is_empty(), "{after}: {directory} has {left:?}");
    }
    bench.assert_sound().await;
}

/// What a pod sees of a clone: its root belongs to the class, and an archive has no sockets.
fn seen(path: &Path) -> Snapshot {
    Snapshot::of(path).archived().without_root()
}

/// A snapshot with two layers, where there are stacks, and what it shows.
#[expect(
    clippy::disallowed_methods,
    reason = "a pod deletes what it likes in its volume"
)]
async fn source(bench: &Bench, ground: Ground) -> (SnapshotId, Snapshot) {
    let source = bench.create("source").await;
    let first = |path: &Path| {
        tree::fill(path, 60, 10, 300);
        fs::hard_link(path.join("d0000/f000001"), path.join("link")).expect("link");
        if ground != COPY {
            tree::odd(&path.join("d0002"));
        }
    };
    bench.inside(&source, first).await;
    bench.snapshot("older", &source).await;
    let second = |path: &Path| {
        fs::remove_dir_all(path.join("d0001")).expect("removed");
        fs::remove_dir_all(path.join("d0003")).expect("removed");
        fs::create_dir(path.join("d0003")).expect("made");
        fs::write(path.join("d0003/new"), "new").expect("written");
        fs::write(path.join("d0000/f000002"), "changed").expect("written");
        seen(path)
    };
    let expected = bench.inside(&source, second).await;
    let snapshot = bench.snapshot("newer", &source).await;
    // The source has changed, and goes.
    bench.write(&source, "later", "later").await;
    bench.delete(source.id.as_str()).await;
    (snapshot.id, expected)
}

/// What a claim shows is what is expected.
async fn assert_shows(bench: &Bench, claim: &PersistentVolume, expected: &Snapshot) {
    let now = bench.inside(claim, seen).await;
    assert_same(expected, &now);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_arrives_from_every_backend_on_every_backend() {
    for from in BACKENDS {
        let Some(sender) = Bench::new(from).await else {
            return;
        };
        let (snapshot, expected) = source(&sender, from).await;
        let open = opened(&sender, &snapshot).await;
        assert_eq!(open.layers.len(), if from == OVERLAY { 2 } else { 1 });
        for to in BACKENDS {
            say(from);
            say(to);
            let Some(bench) = Bench::new(to).await else {
                return;
            };
            let (clone, made) = received(&bench, &open, "clone").await;
            assert_eq!(made, open.layers.len());
            assert_shows(&bench, &clone, &expected).await;
            bench.write(&clone, "mine", "clone").await;

            let (again, made) = received(&bench, &open, "again").await;
            if to == OVERLAY {
                assert_eq!(made, 0, "its layers are here");
            }
            let bench = bench.restart().await;
            bench.delete(clone.id.as_str()).await;
            bench.engine.reap().await.expect("reap");
            assert_shows(&bench, &again, &expected).await;
            let (same, made) = received(&bench, &open, "again").await;
            assert_eq!((same.id, made), (again.id, 0), "it was made before");
            bench.finish().await;
        }
        drop(open);
        sender.finish().await;
    }
}

/// Has a node of each backend receive the same snapshot.
async fn on_each_backend(receive: impl AsyncFn(&Bench, &Arc<OpenSnapshot>, &Snapshot)) {
    let Some(sender) = Bench::new(OVERLAY).await else {
        return;
    };
    let (snapshot, expected) = source(&sender, OVERLAY).await;
    let open = opened(&sender, &snapshot).await;
    for to in BACKENDS {
        say(to);
        let Some(bench) = Bench::new(to).await else {
            return;
        };
        receive(&bench, &open, &expected).await;
        bench.finish().await;
    }
    drop(open);
    sender.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_does_not_arrive_or_is_not_wanted_any_more_leaves_nothing() {
    on_each_backend(async |bench, open, expected| {
        for broken in [1, 0] {
            let (failed, made) = receive(bench, open, "clone", Fate::Breaks(broken)).await;
            let is_ours = |error: &ReceiveError<archive::Error>| matches!(error, ReceiveError::Layer { layer, .. } if *layer == broken);
            assert!(failed.as_ref().is_err_and(is_ours), "{failed:?}");
            assert_eq!(made, 1 - broken, "the oldest layer comes first");
            assert_nothing(bench, "a layer that cannot be made").await;
        }
        let (refused, made) = receive(bench, open, "clone", Fate::IsRefused).await;
        let is_ours = matches!(refused, Err(ReceiveError::Engine(Error::Defect)));
        assert!(is_ours && made == 2, "{refused:?}");
        assert_nothing(bench, "a claim that is not wanted").await;
        let (clone, made) = received(bench, open, "clone").await;
        assert_eq!(made, 2, "nothing was kept");
        assert_shows(bench, &clone, expected).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_another_call_makes_meanwhile_is_not_made_over_it() {
    on_each_backend(async |bench, open, expected| {
        let (clone, made) = receive(bench, open, "clone", Fate::IsMadeMeanwhile).await;
        assert_eq!(made, 2);
        assert_shows(bench, &clone.expect("the other's"), expected).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_made_of_layers_that_are_known_here_and_lost() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let (snapshot, expected) = source(&bench, OVERLAY).await;
    let open = opened(&bench, &snapshot).await;
    let (clone, _) = received(&bench, &open, "clone").await;
    let layer = bench
        .config
        .pool
        .join(format!("layers/{}", clone.layers[0]));
    let away = bench.lab.path().join("away");
    fs::rename(&layer, &away).expect("it is lost");
    let (refused, made) = receive(&bench, &open, "again", Fate::Succeeds).await;
    let Err(ReceiveError::Engine(Error::Lost { layer: lost, .. })) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!((lost, made), (&clone.layers[0], 0));
    fs::rename(&away, &layer).expect("it comes back");
    let (again, _) = received(&bench, &open, "again").await;
    assert_shows(&bench, &again, &expected).await;
    drop(open);
    bench.finish().await;
}
