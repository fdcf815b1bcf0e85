//! One of several operations fails; the others continue unaffected. Their order is random, so half
//! of them fail.

use std::sync::atomic::AtomicU64;

use baggageclaim::archive;
use baggageclaim::archive::toc::Table;
use baggageclaim::engine::claims::ReceiveClaim;
use baggageclaim::engine::{LayerPlace, Opened, ReceiveLayer};
use baggageclaim::model::Sha256;
use common::layers;

use super::held::Held;
use super::*;

const HALF: usize = 4;

/// Half of what is in a directory, which stays as it is until this is dropped.
fn half_of(directory: &Path) -> Vec<Fixed> {
    let all = names(directory).into_iter();
    all.take(HALF)
        .map(|name| Fixed::new(directory.join(name)))
        .collect()
}

/// The name that the driver no longer finds, and its replacement, wherever it fails.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_destroyed_has_its_name_no_more_though_it_cannot_be_deleted() {
    let _mine = my_turn().await;
    let (disk, bench) = require_small_disk!();
    let disk = Arc::new(disk);
    let write = |text: &'static str| move |at: &Path| fs::write(at.join("f"), text).expect("write");
    let tenant = "ci".parse().expect("a tenant");
    let kinds = ["resource-cache", "task-cache"];
    for kind in kinds {
        let cache = [("type", kind), ("key", "k")];
        bench
            .step(&format!("old-{kind}"), &cache, write("old"))
            .await;
        let name = format!("{kind}/k");
        let fork = [("type", "input"), ("from", name.as_str())];
        bench.publish("user", kind, &fork).await;
        let reference = name.parse().expect("a name");
        let destroyed = bench.engine.destroy(&tenant, &reference).await;
        destroyed.expect("a cache may be cleared at any time");
    }
    // One of both has newer content; older content wins there, because it was not destroyed.
    let resource = [("type", "resource-cache"), ("key", "k")];
    bench.step("new", &resource, write("new")).await;
    bench.engine.reap().await.expect("reap");
    let newer = bench.artifact("resource-cache/k").expect("sealed");
    assert!(newer.durable);

    let broken = disk.breaks_at(&bench.pool().join("index.redb"));
    for fork in kinds {
        bench.unpublish(fork).await;
    }
    let assert_named = |bench: &Bench| {
        let named = bench.artifact("resource-cache/k").map(|row| row.id);
        assert_eq!(named, Some(newer.id));
        assert!(bench.artifact("task-cache/k").is_none());
    };
    reaped_until_degraded(&bench).await;
    assert_named(&bench);
    let bench = bench.restart_after(|_| broken.heals()).await;
    tidied(&bench).await;
    assert_named(&bench);
    assert_eq!(bench.engine.artifacts(None).len(), 1);
    let seen = bench.look("looking", &resource, "f").await;
    assert_eq!(seen.as_deref(), Some("new"));
    bench.finish().await;
    closed(disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_that_cannot_be_told_the_outcome_keep_it_from_no_other_one() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let outputs: Vec<String> = (0..2 * HALF).map(|number| format!("o{number}")).collect();
    for name in &outputs {
        let output = [("type", "output"), ("name", name.as_str())];
        bench.publish("pod", name, &output).await;
        bench.unpublish(name).await;
    }
    let waits = |name: &String| {
        let row = bench.row(name);
        row.is_some_and(|row| row.state == baggageclaim::engine::VolumeState::AwaitingOutcome)
    };
    eventually("all wait", || outputs.iter().all(waits)).await;
    let fixed = half_of(&bench.pool().join("pending"));
    let pod = "pod".parse().expect("uid");
    let told = bench.engine.report_outcome(&pod, Outcome::Succeeded).await;
    told.expect_err("some cannot be told");
    let sealed = || bench.engine.artifacts(None).len();
    eventually("the others are sealed", || sealed() == HALF).await;
    drop(fixed);
    assert_eq!(bench.outcome("pod", Outcome::Succeeded).await, HALF);
    bench.quiet().await;
    assert_eq!(sealed(), 2 * HALF);
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_whose_end_cannot_begin_stop_no_other_ones() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let pod = bench.targets.join("pod");
    fs::create_dir(&pod).expect("pod");
    let targets: Vec<PathBuf> = (0..2 * HALF)
        .map(|number| pod.join(format!("v{number}")))
        .collect();
    for (number, target) in targets.iter().enumerate() {
        let name = format!("o{number}");
        let output = [
            ("type", "output"),
            ("name", name.as_str()),
            ("commit", "always"),
        ];
        let mut request = bench.request("pod", &name, &output);
        request.target.clone_from(target);
        bench.engine.publish(request).await.expect("publish");
    }
    let mut fixed = Vec::new();
    // The pod vanished while no driver ran, and kubelet will not ask.
    let bench = bench.restart_after(|pool| {
        for target in &targets {
            nix::mount::umount2(target, nix::mount::MntFlags::MNT_DETACH).expect("umount");
            fs::remove_dir(target).expect("rmdir");
        }
        fs::remove_dir(&pod).expect("rmdir");
        fixed = half_of(&pool.join("volumes"));
    });
    // In this order: they are let go before their disk is.
    let (bench, fixed) = (bench.await, fixed);
    let sealed = || bench.engine.artifacts(None).len();
    eventually("the others are sealed", || sealed() == HALF).await;
    let failed = bench.engine.reap().await;
    failed.expect_err("some cannot be moved");
    drop(fixed);
    bench.engine.reap().await.expect("reap");
    bench.quiet().await;
    assert_eq!(sealed(), 2 * HALF);
    bench.finish().await;
}

/// As a power cut leaves them, which undoes a rename that no call waited for.
#[tokio::test(flavor = "multi_thread")]
async fn layers_that_cannot_be_confirmed_stop_no_other_ones_nor_a_round_for_ever() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    for number in 0..2 * HALF {
        let name = format!("o{number}");
        let output = [("type", "output"), ("name", name.as_str())];
        bench.step(&name, &output, a_directory).await;
    }
    bench.engine.reap().await.expect("reap");
    let mut fixed = Vec::new();
    let bench = bench.restart_after(|pool| {
        let layers = pool.join("layers");
        for layer in names(&layers) {
            let layer = layers.join(layer);
            fs::rename(layer.join("layer.json"), layer.join("sealing.json")).expect("rename");
        }
        fixed = half_of(&layers);
    });
    // In this order: they are let go before their disk is.
    let (bench, fixed) = (bench.await, fixed);
    drop(bench.engine.reap().await);
    assert_eq!(unconfirmed(&bench.pool()).len(), HALF);
    let deadline = Instant::now() + NEVER;
    while bench.engine.reap().await.is_err() {
        assert!(Instant::now() < deadline, "every round tries them again");
    }
    assert_eq!(unconfirmed(&bench.pool()).len(), HALF);
    drop(fixed);
    all_confirmed(&bench).await;
    bench.finish().await;
}

/// Commits until a merge is held at a point, once what it makes is made: who may let it go on.
async fn held_merge(bench: &Bench, model: &mut BTreeMap<String, String>) -> mpsc::Sender<()> {
    let (reached, mut at_the_point) = tokio::sync::oneshot::channel();
    let (go_on, held) = mpsc::channel::<()>();
    failpoint::at(Point::FlattenMerged, 1, move || {
        reached.send(()).expect("it is waited for");
        // Also when the test is over.
        let _ = held.recv();
    });
    // After each there is a round, soon.
    while at_the_point.try_recv().is_err() {
        commit(bench, &TASK, model).await;
        assert!(model.len() < 64, "nothing is merged");
    }
    go_on
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_ends_waits_for_no_merge() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let mut model = BTreeMap::new();
    let before = failpoint::visits(Point::FlattenPlaced);
    let go_on = held_merge(&bench, &mut model).await;
    let engine = bench.engine.clone();
    let ending = tokio::spawn(async move { engine.shutdown().await });
    let nothing = [("type", "input"), ("from", "artifact/none")];
    let late = async || bench.try_publish("late", "late", &nothing).await;
    while !matches!(late().await, Err(Error::ShuttingDown)) {
        tokio::task::yield_now().await;
    }
    // Earlier operations have ended, so this is all that is left.
    tokio::time::sleep(Duration::from_millis(500)).await;
    go_on.send(()).expect("it is held");
    ending.await.expect("no panic");
    assert_eq!(
        failpoint::visits(Point::FlattenPlaced),
        before,
        "it was finished"
    );
    assert_eq!(names(&bench.pool().join("incoming")), [""; 0]);
    let bench = bench.restart().await;
    tidied(&bench).await;
    let layers = layers_of(&bench, "task-cache/k");
    assert!(layers < model.len(), "{layers} layers");
    assert_has(&bench, &TASK, &model).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_that_takes_long_keeps_no_other_walk_waiting() {
    let _mine = my_turn().await;
    let bench = require_bench!();
    let mut model = BTreeMap::new();
    let placed = || failpoint::visits(Point::FlattenPlaced);
    let before = placed();
    let go_on = held_merge(&bench, &mut model).await;
    bench.engine.check().await.expect("it has its turn");
    bench
        .step("v", &[("type", "output"), ("name", "o")], |at| {
            fs::write(at.join("f"), "f").expect("write");
        })
        .await;
    let is_measured = || {
        let rows = bench.engine.artifacts(None);
        rows.iter().all(|row| row.usage.is_some())
    };
    eventually("all is measured", is_measured).await;
    assert_eq!(placed(), before, "it is held");
    go_on.send(()).expect("it is held");
    eventually("it is merged", || placed() > before).await;
    tidied(&bench).await;
    assert_has(&bench, &TASK, &model).await;
    bench.finish().await;
}

/// Otherwise a start would take the volume for mounted there, with the mount's access mode.
#[tokio::test(flavor = "multi_thread")]
async fn a_mount_of_a_claim_that_fails_is_not_recorded() {
    let _mine = my_turn().await;
    let lab = require_lab!(OVERLAY.1);
    let pods = pods_on(lab).await;
    let claim = pods.create("claim").await;
    pods.stage(&claim).await.expect("staged");
    let request = pods.publish_request(&claim, "pod");
    let target = request.target.clone();
    failpoint::at(Point::ClaimRecorded, 1, move || {
        fs::remove_dir(&target).expect("the engine has made it");
    });
    let failed = pods.engine.mount_claim(request).await;
    failed.expect_err("its target is gone");
    let volume = pods.config.pool.join("volumes").join(claim.id.as_str());
    let volume = Dir::open(&volume).expect("open");
    let record = store::read_claim(&volume).expect("read").expect("a record");
    let recorded = record.targets.iter().map(|target| &target.path);
    assert_eq!(recorded.collect::<Vec<_>>(), [&pods.staging(&claim)]);
    drop(volume);
    let staged = pods.staging(&claim);
    let unstaged = pods.engine.unmount_claim(claim.id.as_str(), &staged, true);
    unstaged.await.expect("unstaged");
    pods.finish().await;
}

/// The table is on the disk, and the job that placed it has not noted that yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_uses_the_layers_of_a_snapshot_as_soon_as_that_can_be_opened() {
    let _mine = my_turn().await;
    let lab = require_lab!(OVERLAY.1);
    let pods = pods_on(lab).await;
    let claim = pods.create("claim").await;
    pods.write(&claim, "file", "content").await;
    let held = Held::at(Point::TablePlaced);
    let snapshot = pods.snapshot("snapshot", &claim).await;
    let (engine, id) = (pods.engine.clone(), snapshot.id.clone());
    // It has no table before another node asks for it.
    drop(engine.open_snapshot(&id).expect("asked"));
    held.comes().await;
    let received = layers::apart(move || {
        let Ok(Opened::Open(open)) = engine.open_snapshot(&id) else {
            panic!("it has its table");
        };
        let [layer] = &open.layers[..] else {
            panic!("it has one layer");
        };
        let layer = ReceiveLayer {
            digest: Sha256(layer.table.digest().sha256),
            bytes: layer.table.bytes(),
        };
        let request = ReceiveClaim {
            claim: CreateClaim {
                source: Some(ClaimSource::Snapshot(id)),
                ..request("clone")
            },
            layers: vec![layer],
            view: open.snapshot.view,
            size: open.snapshot.size,
        };
        let make = |_: usize, _: &LayerPlace<'_>| -> archive::Result<Arc<Table>> {
            panic!("the layer is here");
        };
        engine.receive_claim(request, &AtomicU64::new(0), make, || Ok(()))
    });
    let clone = received.await.expect("received");
    assert_eq!(clone.layers, snapshot.layers);
    held.goes_on();
    pods.finish().await;
}
