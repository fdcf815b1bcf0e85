//! Operations that fail in the middle: an index commit in doubt, an unconfirmed layer, an outcome
//! that cannot be recorded, a directory that cannot be moved. Earlier results stay, nothing is done
//! twice.
//!
//! The disk really fails (`common::disk`). To fail one step, a test changes the environment at a
//! point of `engine::failpoint`. All engines of a process share the points, so these tests take
//! turns.
#![cfg(debug_assertions)]
#![expect(
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "chattr and mount, where a name is to stay where it is; what is shared says where a test was"
)]

mod common;

#[path = "claims/bench.rs"]
#[allow(dead_code, reason = "tests/claims.rs uses the rest")]
mod bench;

#[path = "failing/fences.rs"]
mod fences;

#[path = "failing/held.rs"]
mod held;

#[path = "failing/made.rs"]
mod made;

#[path = "failing/others.rs"]
mod others;

#[path = "failing/space.rs"]
mod space;

#[path = "failing/seals.rs"]
mod seals;

#[path = "failing/shown.rs"]
mod shown;

#[path = "failing/sources.rs"]
mod sources;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{CreateClaim, SnapshotFilter};
use baggageclaim::engine::failpoint::{self, Point};
use baggageclaim::engine::{Config, Engine, Error};
use baggageclaim::model::{
    ClaimSource, LayerRecord, MutableChange, MutableParameters, Outcome, PersistentVolume, Snapshot,
};
use baggageclaim::store::{self, Change, Index, WritebackFailure};
use baggageclaim::sys::Dir;
use bench::{Bench as Pods, OVERLAY, request};
use common::bench::{Bench, Ground, NEVER, eventually, names};
use common::disk::{Broken, SmallDisk, require_small_disk};
use common::lab::run;
use common::{Fs, Lab, require_bench, require_lab};
use tokio::sync::{Mutex, MutexGuard};

const TASK: [(&str, &str); 2] = [("type", "task-cache"), ("key", "k")];

async fn my_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}

/// The content that a disk wrote of the index although it reported a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrote {
    Nothing,
    All,
}

const EITHER: [Wrote; 2] = [Wrote::Nothing, Wrote::All];

/// A name that can be neither changed nor moved until this is dropped.
struct Fixed(PathBuf);

impl Fixed {
    fn new(path: PathBuf) -> Self {
        run(Command::new("chattr").arg("+i").arg(&path)).expect("chattr");
        Self(path)
    }
}

impl Drop for Fixed {
    fn drop(&mut self) {
        run(Command::new("chattr").arg("-i").arg(&self.0)).expect("chattr");
    }
}

/// The output of the first step of a chain.
fn a_directory(at: &Path) {
    fs::create_dir(at.join("directory")).expect("mkdir");
}

/// Another filesystem within a layer, which no merge goes into. A mount of the layer does not show
/// it.
struct InTheWay(PathBuf);

impl InTheWay {
    /// In the first layer of a cache, which is made.
    async fn of(bench: &Bench, task: &[(&str, &str)]) -> Self {
        let layers = bench.pool().join("layers");
        let before = names(&layers);
        bench
            .step(&format!("first-{}", task[1].1), task, a_directory)
            .await;
        let mut new = names(&layers);
        new.retain(|layer| !before.contains(layer));
        let there = layers.join(&new[0]).join("fs/directory");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "in-the-way"])
            .arg(&there))
        .expect("mount");
        Self(there)
    }
}

impl Drop for InTheWay {
    fn drop(&mut self) {
        run(Command::new("umount").arg(&self.0)).expect("umount");
    }
}

/// Has the index of a pool fail from a point on; where that disk is found when it does.
fn index_fails_at(point: Point, disk: &Arc<SmallDisk>, pool: &Path) -> mpsc::Receiver<Broken> {
    let (sender, broken) = mpsc::channel();
    let (disk, index) = (disk.clone(), pool.join("index.redb"));
    failpoint::at(point, 1, move || {
        sender
            .send(disk.breaks_at(&index))
            .expect("it is waited for");
    });
    broken
}

/// Writes into the index, which no engine can open, what one tried to: as a disk does that has
/// written more than it says.
fn has_written(pool: &Path, changes: &[Change]) {
    let root = Dir::open(pool).expect("the pool");
    let (index, _) = Index::open_existing(&root).expect("it is well again");
    index.commit(changes).expect("written");
}

/// The own record of an unconfirmed layer.
fn record_of(pool: &Path, layer: &str) -> LayerRecord {
    let layer = Dir::open(&pool.join("layers").join(layer)).expect("open");
    store::read_sealing(&layer)
        .expect("read")
        .expect("a record")
}

fn closed(disk: Arc<SmallDisk>) {
    let disk = Arc::into_inner(disk).expect("the last reference");
    assert_eq!(disk.close(), Vec::<PathBuf>::new());
}

/// One more commit of a cache, and the garbage of it collected.
async fn commit(bench: &Bench, task: &[(&str, &str)], model: &mut BTreeMap<String, String>) {
    let number = model.len().to_string();
    let write = |at: &Path| fs::write(at.join(&number), &number).expect("write");
    let volume = format!("{}-{number}", task[1].1);
    bench.step(&volume, task, write).await;
    model.insert(number.clone(), number.clone());
}

async fn assert_has(bench: &Bench, task: &[(&str, &str)], model: &BTreeMap<String, String>) {
    let (at, _) = bench.publish("looking", "looking", task).await;
    let files = names(&at).into_iter().filter(|name| name != "directory");
    let seen = files.map(|name| {
        let text = fs::read_to_string(at.join(&name)).expect("read");
        (name, text)
    });
    assert_eq!(seen.collect::<BTreeMap<_, _>>(), *model);
    bench.outcome("looking", Outcome::Failed).await;
    bench.unpublish("looking").await;
    bench.quiet().await;
}

/// Collects garbage until an index that fails has degraded the engine: what the collector wrote may
/// be in it.
async fn reaped_until_degraded(bench: &Bench) {
    let deadline = Instant::now() + NEVER;
    while !matches!(bench.engine.reap().await, Err(Error::Degraded(_))) {
        assert!(Instant::now() < deadline, "the index never fails");
        tokio::task::yield_now().await;
    }
}

/// Collects garbage until none is left. The parent of a checked volume stays until the volume is
/// gone.
async fn tidied(bench: &Bench) {
    let deadline = Instant::now() + NEVER;
    while bench.engine.reap().await.expect("reap").held > 0 {
        assert!(Instant::now() < deadline, "the trash is never empty");
        tokio::task::yield_now().await;
    }
    bench.engine.reap().await.expect("reap");
    bench.assert_whole().await;
}

fn layers_of(bench: &Bench, name: &str) -> usize {
    bench.artifact(name).expect("it is there").layers
}

/// The layers that do not say that the index names them.
fn unconfirmed(pool: &Path) -> Vec<String> {
    let layers = pool.join("layers");
    let mut all = names(&layers);
    all.retain(|layer| layers.join(layer).join("sealing.json").exists());
    all
}

/// Collects garbage until all layers are in that state. A failed layer is not tried again in every
/// round.
async fn all_confirmed(bench: &Bench) {
    let deadline = Instant::now() + NEVER;
    while !unconfirmed(&bench.pool()).is_empty() {
        assert!(Instant::now() < deadline, "it is never tried again");
        bench.engine.reap().await.expect("reap");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_that_the_index_may_have_stays_until_a_restart() {
    let _mine = my_turn().await;
    for wrote in EITHER {
        let (disk, bench) = require_small_disk!();
        let disk = Arc::new(disk);
        let fails = index_fails_at(Point::FlattenSynced, &disk, &bench.pool());
        let mut model = BTreeMap::new();
        let broken = loop {
            commit(&bench, &TASK, &mut model).await;
            let round = bench.engine.reap().await;
            if let Ok(broken) = fails.try_recv() {
                drop(round);
                break broken;
            }
            round.expect("reap");
            assert!(model.len() < 64, "nothing is merged");
        };
        broken.is_heard();
        reaped_until_degraded(&bench).await;
        let layers = names(&bench.pool().join("layers"));
        let before = layers_of(&bench, "task-cache/k");
        assert_eq!(layers.len(), before + 1, "the merged one is there");
        let merged = unconfirmed(&bench.pool());
        assert_eq!(merged.len(), 1, "{merged:?}");
        for _ in 0..3 {
            reaped_until_degraded(&bench).await;
            assert_eq!(names(&bench.pool().join("layers")), layers);
        }
        let really = |pool: &Path| {
            broken.heals();
            if wrote == Wrote::All {
                let as_it_will_be = record_of(pool, &merged[0]).artifact;
                let artifact = as_it_will_be.expect("of the only cache");
                has_written(pool, &[Change::PutArtifact(artifact)]);
            }
        };
        let bench = bench.restart_after(really).await;
        tidied(&bench).await;
        let after = layers_of(&bench, "task-cache/k");
        assert!(after < before, "{after} layers of {before}");
        let layers = names(&bench.pool().join("layers"));
        assert_eq!(layers.len(), after);
        assert_eq!(layers.contains(&merged[0]), wrote == Wrote::All);
        assert_eq!(unconfirmed(&bench.pool()), [""; 0]);
        assert_has(&bench, &TASK, &model).await;
        bench.finish().await;
        closed(disk);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_fails_gets_no_more_merged_layers() {
    let _mine = my_turn().await;
    let (disk, bench) = require_small_disk!();
    let disk = Arc::new(disk);
    let mut models = [BTreeMap::new(), BTreeMap::new()];
    let caches = ["a", "b"].map(|key| [("type", "task-cache"), ("key", key)]);
    let mut in_the_way = Vec::new();
    for cache in &caches {
        in_the_way.push(InTheWay::of(&bench, cache).await);
    }
    // In turns: a stack that has not changed since merges of it failed is left alone ever longer.
    for _ in 0..18 {
        for (cache, model) in caches.iter().zip(&mut models) {
            commit(&bench, cache, model).await;
        }
    }
    let kept = names(&bench.pool().join("layers")).len();
    let fails = index_fails_at(Point::FlattenSynced, &disk, &bench.pool());
    drop(in_the_way);
    reaped_until_degraded(&bench).await;
    let before = failpoint::visits(Point::FlattenPlaced);
    for _ in 0..3 {
        reaped_until_degraded(&bench).await;
    }
    let layers = names(&bench.pool().join("layers")).len();
    assert_eq!(layers, kept + 1, "the one that the index may have");
    assert_eq!(
        failpoint::visits(Point::FlattenPlaced),
        before,
        "no other one"
    );
    assert_eq!(names(&bench.pool().join("incoming")), [""; 0]);
    let broken = fails.try_recv().expect("there it failed");
    let bench = bench.restart_after(|_| broken.heals()).await;
    bench.engine.reap().await.expect("reap");
    for (cache, model) in caches.iter().zip(&models) {
        assert_has(&bench, cache, model).await;
    }
    bench.finish().await;
    closed(disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merged_layer_that_could_not_be_confirmed_is_kept_and_confirmed_later() {
    let _mine = my_turn().await;
    let bench = require_bench!(on Ground::ALL[0]);
    let (sender, fixed) = mpsc::channel();
    let pool = bench.pool();
    failpoint::at(Point::FlattenIndexed, 1, move || {
        let merged = unconfirmed(&pool).remove(0);
        let fixed = Fixed::new(pool.join("layers").join(merged));
        sender.send(fixed).expect("it is waited for");
    });
    let mut model = BTreeMap::new();
    let fixed = loop {
        commit(&bench, &TASK, &mut model).await;
        drop(bench.engine.reap().await);
        if let Ok(fixed) = fixed.try_recv() {
            break fixed;
        }
        assert!(model.len() < 64, "nothing is merged");
    };
    let merged = unconfirmed(&bench.pool());
    assert_eq!(merged.len(), 1, "{merged:?}");
    let findings = bench.engine.check().await.expect("check");
    let kinds: Vec<&str> = findings.iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, ["unconfirmed-layer"]);
    for _ in 0..2 {
        // It is tried now and then.
        drop(bench.engine.reap().await);
        assert_eq!(unconfirmed(&bench.pool()), merged);
        assert_has(&bench, &TASK, &model).await;
    }
    drop(fixed);
    all_confirmed(&bench).await;
    bench.assert_whole().await;
    let rebuild = |pool: &Path| {
        let rebuilt = Engine::rebuild_index(pool).expect("made again");
        assert!(rebuilt.nameless.is_empty(), "{rebuilt:?}");
        fs::remove_file(pool.join("index.redb.old")).expect("the old one");
    };
    let bench = bench.restart_after(rebuild).await;
    assert_has(&bench, &TASK, &model).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stack_that_cannot_be_merged_stops_no_other_one_and_is_tried_again() {
    let _mine = my_turn().await;
    let bench = require_bench!(on Ground::ALL[0]);
    let bad = [("type", "task-cache"), ("key", "bad")];
    let good = [("type", "task-cache"), ("key", "good")];
    let mut models = [BTreeMap::new(), BTreeMap::new()];
    let in_the_way = InTheWay::of(&bench, &bad).await;
    bench.step("first", &good, a_directory).await;
    // It is the longer one, and so the first to be tried.
    for _ in 0..2 {
        commit(&bench, &bad, &mut models[0]).await;
    }
    let before = failpoint::visits(Point::FlattenConfirmed);
    while failpoint::visits(Point::FlattenConfirmed) == before {
        for (cache, model) in [&bad, &good].into_iter().zip(&mut models) {
            commit(&bench, cache, model).await;
        }
        drop(bench.engine.reap().await);
        assert!(models[1].len() < 64, "the good one is never merged");
    }
    let merged = layers_of(&bench, "task-cache/good");
    assert!(merged < models[1].len(), "{merged} layers");
    let unmerged = layers_of(&bench, "task-cache/bad");
    assert_eq!(unmerged, models[0].len() + 1);
    // It is merged when its time has come.
    drop(in_the_way);
    let deadline = Instant::now() + NEVER;
    while layers_of(&bench, "task-cache/bad") == unmerged {
        assert!(Instant::now() < deadline, "it is never tried again");
        bench.engine.reap().await.expect("reap");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bench.finish().await;
}

/// An engine on a small disk, and pods that mount claims.
async fn pods() -> Result<(Arc<SmallDisk>, Pods), String> {
    let (disk, lab) = SmallDisk::make()?;
    Ok((Arc::new(disk), pods_on(lab).await))
}

async fn pods_on(lab: Lab) -> Pods {
    let mut config = Config::new(lab.path().join("pool"));
    config.backend = Some(OVERLAY.0);
    config.reserve = 0;
    config.reap_interval = Duration::from_secs(3600);
    let engine = Engine::open(config.clone()).await.expect("it opens");
    engine.reap().await.expect("reap");
    Pods {
        lab,
        engine,
        config,
    }
}

/// A claim that goes when it is unused for a while.
async fn short_lived(pods: &Pods, name: &str) -> PersistentVolume {
    let request = CreateClaim {
        mutable: MutableParameters {
            size_limit: None,
            ttl_seconds: Some(3),
        },
        ..request(name)
    };
    pods.engine.create_claim(request).await.expect(name)
}

fn has(pods: &Pods, claim: &PersistentVolume) -> bool {
    pods.engine.claim(claim.id.as_str()).is_ok()
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn a_snapshot_that_the_index_may_have_is_whole_or_taken_back_after_a_restart() {
    let _mine = my_turn().await;
    for wrote in EITHER {
        let (disk, pods) = match pods().await {
            Ok(made) => made,
            Err(reason) => return common::skip(&reason),
        };
        let claim = pods.create("claim").await;
        let short = short_lived(&pods, "short").await;
        let pool = pods.config.pool.clone();
        let both = [claim.id.to_string(), short.id.to_string()];
        let (group, members) = pods.engine.create_group("g", &both).await.expect("empty");
        let emptied = pods.engine.delete_group(group.id.as_str()).await;
        emptied.expect("deleted");
        for claim in [&claim, &short] {
            pods.write(claim, "file", "text").await;
        }
        let id = claim.id.as_str();
        let fails = index_fails_at(Point::FreezeSynced, &disk, &pods.config.pool);
        let taken = bench::again(|| pods.engine.create_group("g", &both)).await;
        let error = taken.expect_err("the index fails");
        assert!(matches!(error, Error::Index(_)), "{error}");
        let broken = fails.try_recv().expect("there it failed");
        let mut changes = Vec::new();
        if wrote == Wrote::All {
            let pool = &pods.config.pool;
            changes.push(Change::PutGroup(group));
            for layer in unconfirmed(pool) {
                let of = record_of(pool, &layer).claim.expect("of a claim");
                let layers = vec![layer.parse().expect("an id")];
                let claim = [&claim, &short].into_iter().find(|claim| claim.id == of);
                let member = members.iter().find(|member| member.source == of);
                changes.push(Change::PutClaim(PersistentVolume {
                    layers: layers.clone(),
                    made: true,
                    ..claim.expect("one of both").clone()
                }));
                changes.push(Change::PutSnapshot(Snapshot {
                    layers,
                    ..member.expect("of it").clone()
                }));
            }
            assert_eq!(changes.len(), 5);
        }

        let engine = &pods.engine;
        let mutable = MutableChange {
            size_limit: Some(1 << 20),
            ttl: None,
        };
        let refused = [
            engine.modify_claim(id, mutable).await.map(drop),
            engine.expand_claim(id, 1 << 20, None).await.map(drop),
            engine.create_snapshot("s", id).await.map(drop),
            engine.delete_claim(id).await,
            pods.stage(&claim).await,
        ];
        for refused in refused {
            let degraded = matches!(&refused, Err(Error::Degraded(_)));
            assert!(degraded, "{refused:?}");
        }
        assert!(has(&pods, &short) && has(&pods, &claim));

        let pods = pods
            .restart_after(|| {
                broken.heals();
                if !changes.is_empty() {
                    has_written(&pool, &changes);
                }
            })
            .await;
        let snapshots = pods.engine.snapshots(&SnapshotFilter::default(), None, 9);
        let mut snapshots = snapshots.expect("a page").items;
        match wrote {
            Wrote::All => assert_eq!(snapshots.len(), 2),
            Wrote::Nothing => {
                assert_eq!(snapshots, []);
                snapshots.push(pods.snapshot("s", &claim).await);
            }
        }
        for snapshot in &snapshots {
            let restored = pods.restore(snapshot.id.as_str(), snapshot).await;
            assert_eq!(pods.read(&restored, "file").await.expect("file"), "text");
        }
        assert_eq!(pods.read(&claim, "file").await.expect("file"), "text");
        pods.finish().await;
        closed(disk);
    }
}

/// DeleteVolume of what CreateVolume has not answered yet: it would be there after both answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_being_made_is_not_said_to_be_deleted() {
    let _mine = my_turn().await;
    let (disk, pods) = match pods().await {
        Ok(made) => made,
        Err(reason) => return common::skip(&reason),
    };
    let known = pods.create("claim").await;
    let id = known.id.as_str();
    pods.engine.delete_claim(id).await.expect("deleted");
    let (reached, at_the_point) = tokio::sync::oneshot::channel();
    let (go_on, held) = mpsc::channel::<()>();
    failpoint::at(Point::ClaimIndexed, 1, move || {
        reached.send(()).expect("it is waited for");
        // Also when the test is over.
        let _ = held.recv();
    });
    let engine = pods.engine.clone();
    let making = tokio::spawn(async move { engine.create_claim(request("claim")).await });
    at_the_point.await.expect("it comes there");
    let deleted = pods.engine.delete_claim(id).await;
    assert!(matches!(deleted, Err(Error::Busy(_))), "{deleted:?}");
    go_on.send(()).expect("it is held");
    assert_eq!(making.await.expect("no panic").expect("made").id, known.id);
    pods.engine.delete_claim(id).await.expect("deleted");
    assert!(!has(&pods, &known));
    pods.finish().await;
    closed(disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_deletion_the_index_may_have_is_whole_or_gone_after_a_restart() {
    let _mine = my_turn().await;
    for wrote in EITHER {
        let (disk, pods) = match pods().await {
            Ok(made) => made,
            Err(reason) => return common::skip(&reason),
        };
        let claim = pods.create("claim").await;
        pods.write(&claim, "file", "text").await;
        let id = claim.id.as_str();
        let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
        let deleted = bench::again(|| pods.engine.delete_claim(id)).await;
        let error = deleted.expect_err("the index fails");
        assert!(matches!(error, Error::Index(_)), "{error}");
        let staged = pods.stage(&claim).await;
        let refused = matches!(&staged, Err(Error::Degraded(_)));
        assert!(
            refused,
            "what a pod wrote there might be thrown away: {staged:?}"
        );
        let again = pods.engine.delete_claim(id).await;
        assert!(matches!(&again, Err(Error::Degraded(_))), "{again:?}");
        let pool = pods.config.pool.clone();
        let pods = pods
            .restart_after(|| {
                broken.heals();
                if wrote == Wrote::All {
                    has_written(&pool, &[Change::RemoveClaim(claim.id.clone())]);
                }
            })
            .await;
        assert_eq!(has(&pods, &claim), wrote == Wrote::Nothing);
        if wrote == Wrote::Nothing {
            assert_eq!(pods.read(&claim, "file").await.expect("file"), "text");
        }
        let deleted = bench::again(|| pods.engine.delete_claim(claim.id.as_str())).await;
        deleted.expect("deleted");
        assert!(!has(&pods, &claim));
        let again = pods.create("claim").await;
        assert!(pods.read(&again, "file").await.is_err());
        pods.finish().await;
        closed(disk);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_the_index_may_have_keeps_what_it_is_made_of() {
    let _mine = my_turn().await;
    for wrote in EITHER {
        let (disk, pods) = match pods().await {
            Ok(made) => made,
            Err(reason) => return common::skip(&reason),
        };
        let base = pods.create("base").await;
        pods.write(&base, "file", "text").await;
        let snapshot = pods.snapshot("s", &base).await;
        let source = ClaimSource::Snapshot(snapshot.id.clone());
        let restore = CreateClaim {
            source: Some(source),
            ..request("restored")
        };
        let asked = || pods.engine.create_claim(restore.clone());
        let as_it_will_be = asked().await.expect("made");
        let deleted = pods.engine.delete_claim(as_it_will_be.id.as_str()).await;
        deleted.expect("deleted");
        let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
        let error = asked().await.expect_err("the index fails");
        assert!(matches!(error, Error::Index(_)), "{error}");
        let again = asked().await;
        assert!(matches!(&again, Err(Error::Degraded(_))), "{again:?}");
        let pool = pods.config.pool.clone();
        let pods = pods
            .restart_after(|| {
                broken.heals();
                if wrote == Wrote::All {
                    has_written(&pool, &[Change::PutClaim(as_it_will_be)]);
                }
            })
            .await;
        // Its sources stay, though nothing else refers to them.
        let deleted = pods.engine.delete_snapshot(snapshot.id.as_str()).await;
        deleted.expect("deleted");
        let deleted = pods.engine.delete_claim(base.id.as_str()).await;
        deleted.expect("deleted");
        pods.engine.reap().await.expect("reap");
        let known = pods.engine.claims(None, 9).items;
        assert_eq!(known.len(), usize::from(wrote == Wrote::All));
        for claim in &known {
            assert_eq!(pods.read(claim, "file").await.expect("file"), "text");
        }
        pods.finish().await;
        closed(disk);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_the_index_may_have_can_be_made_again_or_deleted_after_a_restart() {
    let _mine = my_turn().await;
    for wrote in EITHER {
        for again in [true, false] {
            let (disk, pods) = match pods().await {
                Ok(made) => made,
                Err(reason) => return common::skip(&reason),
            };
            let asked = || pods.engine.create_claim(request("claim"));
            let as_it_will_be = asked().await.expect("made");
            let id = as_it_will_be.id.clone();
            let deleted = pods.engine.delete_claim(id.as_str()).await;
            deleted.expect("deleted");
            let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
            asked().await.expect_err("the index fails");
            let staged = pods.stage(&as_it_will_be).await;
            assert!(matches!(&staged, Err(Error::Degraded(_))), "{staged:?}");
            let pool = pods.config.pool.clone();
            let pods = pods
                .restart_after(|| {
                    broken.heals();
                    if wrote == Wrote::All {
                        has_written(&pool, &[Change::PutClaim(as_it_will_be.clone())]);
                    }
                })
                .await;
            if again {
                let made = pods.engine.create_claim(request("claim")).await;
                made.expect("made");
            } else {
                let deleted = pods.engine.delete_claim(id.as_str()).await;
                deleted.expect("deleted");
            }
            assert_eq!(has(&pods, &as_it_will_be), again);
            let pods = pods.restart().await;
            assert_eq!(has(&pods, &as_it_will_be), again);
            pods.finish().await;
            closed(disk);
        }
    }
}

/// After a restart of its own, kubelet asks again for each volume that is mounted.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_publish_finds_its_mount_while_the_index_is_in_doubt() {
    let _mine = my_turn().await;
    let (disk, bench) = require_small_disk!();
    bench.step("made", &TASK, a_directory).await;
    bench.publish("pod", "mounted", &[]).await;
    let broken = disk.breaks_at(&bench.pool().join("index.redb"));
    let cache = held::name();
    let destroyed = bench.engine.destroy(&cache.tenant, &cache.reference).await;
    let error = destroyed.expect_err("the index fails");
    assert!(matches!(error, Error::Index(_)), "{error}");

    let again = bench.try_publish("pod", "mounted", &[]).await;
    assert!(again.expect("it is mounted").already);
    let other = bench.try_publish("pod", "other", &[]).await;
    assert!(matches!(&other, Err(Error::Degraded(_))), "{other:?}");
    // To mount it again, its record would have to be written.
    run(Command::new("umount").arg(bench.target("mounted"))).expect("umount");
    let again = bench.try_publish("pod", "mounted", &[]).await;
    assert!(matches!(&again, Err(Error::Degraded(_))), "{again:?}");
    bench.unpublish("mounted").await;

    let bench = bench.restart_after(|_| broken.heals()).await;
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<PathBuf>::new());
}

/// Overlayfs mounts nothing on a filesystem with an unreported lost write; the driver tries a mount
/// when it starts.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreported_lost_write_stops_no_start_and_is_remembered() {
    let _mine = my_turn().await;
    let (disk, pods) = match pods().await {
        Ok(made) => made,
        Err(reason) => return common::skip(&reason),
    };
    let base = pods.create("base").await;
    pods.write(&base, "file", "text").await;
    let snapshot = pods.snapshot("s", &base).await;
    pods.write(&base, "file", "more").await;
    let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
    let made = pods.engine.create_claim(request("claim")).await;
    made.expect_err("the index fails");
    let pods = pods.restart_after(|| broken.heals_unheard()).await;
    assert!(pods.config.pool.join("doomed").exists());
    // Its own part may have lost bytes; its layers were on the disk.
    let taken = bench::again(|| pods.engine.create_snapshot("t", base.id.as_str())).await;
    assert!(matches!(taken, Err(Error::ClaimInUse { .. })), "{taken:?}");
    assert_eq!(pods.read(&base, "file").await.expect("file"), "more");
    let restored = pods.restore("restored", &snapshot).await;
    assert_eq!(pods.read(&restored, "file").await.expect("file"), "text");
    pods.finish().await;
    closed(disk);
}

/// The process that heard of it was killed before it had marked the claims.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_write_is_acted_upon_by_the_next_start_if_not_by_this_one() {
    let _mine = my_turn().await;
    let (disk, pods) = match pods().await {
        Ok(made) => made,
        Err(reason) => return common::skip(&reason),
    };
    let base = pods.create("base").await;
    pods.write(&base, "file", "text").await;
    // Made after the error that a start could not act upon, too.
    let later = pods.create("later").await;
    pods.write(&later, "file", "text").await;
    assert!(later.created > base.created);
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot");
    let failure = WritebackFailure {
        boot: boot.trim().to_owned(),
        until: base.created,
        unfinished: true,
    };
    let root = Dir::open(&pods.config.pool).expect("the pool");
    store::record_writeback_failure(&root, &failure).expect("written");
    let pods = pods.restart().await;
    let taken = bench::again(|| pods.engine.create_snapshot("t", base.id.as_str())).await;
    assert!(matches!(taken, Err(Error::ClaimInUse { .. })), "{taken:?}");
    pods.snapshot("of-later", &later).await;
    let done = store::read_writeback_failure(&root, &failure.boot).expect("read");
    assert!(done.is_some_and(|failure| !failure.unfinished));
    drop(root);
    pods.finish().await;
    closed(disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_deleted_claim_has_left_is_never_shown_to_the_next_of_its_name() {
    let _mine = my_turn().await;
    let lab = require_lab!(OVERLAY.1);
    let pods = pods_on(lab).await;
    let claim = pods.create("claim").await;
    pods.write(&claim, "file", "secret").await;
    let left = pods.config.pool.join("volumes").join(claim.id.as_str());
    let fixed = Fixed::new(left.clone());
    let deleted = bench::again(|| pods.engine.delete_claim(claim.id.as_str())).await;
    deleted.expect("the index has it no more");
    assert!(left.exists(), "it cannot be moved");
    let made = pods.engine.create_claim(request("claim")).await;
    let error = made.expect_err("its place is taken").to_string();
    assert!(error.contains("a deleted volume of that name"), "{error}");
    assert!(error.contains(claim.id.as_str()), "{error}");
    drop(fixed);
    let again = pods.create("claim").await;
    assert!(!left.exists());
    assert!(pods.read(&again, "file").await.is_err());
    pods.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_is_told_wakes_who_waits_though_the_next_volume_could_not_be_told() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let outputs = ["one", "two"];
    for name in outputs {
        let output = [("type", "output"), ("name", name)];
        bench.publish("pod", name, &output).await;
        bench.unpublish(name).await;
    }
    let waits = |state: &baggageclaim::engine::VolumeState| {
        *state == baggageclaim::engine::VolumeState::AwaitingOutcome
    };
    eventually("both wait", || {
        outputs
            .iter()
            .all(|name| bench.row(name).is_some_and(|row| waits(&row.state)))
    })
    .await;
    let pending = bench.pool().join("pending");
    let untold = {
        let pending = pending.clone();
        move || {
            let mut all = names(&pending);
            all.retain(|layer| !pending.join(layer).join("outcome").exists());
            all
        }
    };
    let (sender, fixed) = mpsc::channel();
    failpoint::at(Point::OutcomeNoted, 1, move || {
        let others = untold()
            .into_iter()
            .map(|layer| Fixed::new(pending.join(layer)));
        sender
            .send(others.collect::<Vec<_>>())
            .expect("it is waited for");
    });
    let pod = "pod".parse().expect("uid");
    let told = bench.engine.report_outcome(&pod, Outcome::Succeeded).await;
    told.expect_err("one of them cannot be told");
    let fixed = fixed.try_recv().expect("one was told");
    assert_eq!(fixed.len(), 1);
    let sealed = || {
        let known = |name: &&&str| bench.artifact(&format!("artifact/{name}")).is_some();
        outputs.iter().filter(known).count()
    };
    eventually("who was told is sealed", || sealed() == 1).await;
    drop(fixed);
    assert_eq!(bench.outcome("pod", Outcome::Succeeded).await, 1);
    bench.quiet().await;
    assert_eq!(sealed(), 2);
    bench.finish().await;
}

/// Between the move of a volume's directory and the note of it in memory, the outcome finds the
/// volume in neither place. It waits for the end of the move, however slow that is.
#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_that_is_told_while_the_volume_moves_is_not_lost() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let output = [("type", "output"), ("name", "made")];
    bench.publish("pod", "volume", &output).await;
    let (at_point, moved) = tokio::sync::oneshot::channel();
    let (release, released) = mpsc::channel();
    failpoint::at(Point::UnpublishPromised, 1, move || {
        at_point.send(()).expect("the test listens");
        released
            .recv_timeout(NEVER)
            .expect("the test lets it go on");
    });
    let engine = bench.engine.clone();
    let target = bench.target("volume");
    let unpublished = tokio::spawn(async move { engine.unpublish("volume", &target).await });
    moved.await.expect("the directory was moved");
    let engine = bench.engine.clone();
    let pod = "pod".parse().expect("uid");
    let told = tokio::spawn(async move { engine.report_outcome(&pod, Outcome::Succeeded).await });
    let told = tokio::time::timeout(NEVER, told).await;
    let told = told.expect("it does not wait for the unpublish");
    assert_eq!(told.expect("join").expect("told").news, 1);
    release.send(()).expect("it waits");
    unpublished.await.expect("join").expect("unpublished");
    bench.quiet().await;
    assert!(bench.artifact("artifact/made").is_some(), "it is sealed");
    bench.finish().await;
}

/// Two seals that are copies may each have space alone and none beside the other.
#[tokio::test(flavor = "multi_thread")]
async fn copies_are_made_one_at_a_time() {
    let _turn = my_turn().await;
    let lab = require_lab!(Fs::Ext4, 48 << 20);
    let bench = Bench::with(lab, |config| config.backend = Some(BackendKind::Copy)).await;
    for name in ["one", "two"] {
        let output = [("type", "output"), ("name", name), ("commit", "always")];
        let (at, _) = bench.publish(name, name, &output).await;
        fs::write(at.join("f"), vec![7; 1 << 20]).expect("write");
    }
    let since = |point| {
        let begun = failpoint::visits(point);
        move || failpoint::visits(point) - begun
    };
    let (begun, copied) = (
        since(Point::SealLayerRecorded),
        since(Point::SealContentMoved),
    );
    let (go_on, held) = mpsc::channel::<()>();
    failpoint::at(Point::SealContentMoved, 1, move || {
        // Also when the test is over.
        let _ = held.recv();
    });
    bench.unpublish("one").await;
    eventually("it is copied", || copied() == 1).await;
    bench.unpublish("two").await;
    eventually("the other begins", || begun() == 2).await;
    // Nothing tells that something waits. A copy takes milliseconds.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(copied(), 1, "the other did not wait");

    go_on.send(()).expect("it is held");
    bench.quiet().await;
    for name in ["artifact/one", "artifact/two"] {
        assert!(bench.artifact(name).is_some(), "{name} is not sealed");
    }
    bench.finish().await;
}
