//! A disk that loses writes: the write-back fails, and the kernel reports it once. (`common::disk`
//! is such a disk.)

use std::fs;
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::bench::{Bench, NEVER, empty_claim, eventually, mount_request};
use crate::common::disk::{Broken, SmallDisk, fill, require_small_disk, sync};
use baggageclaim::engine::Error;
use baggageclaim::engine::claims::CreateClaim;
use baggageclaim::model::{ClaimSource, Outcome, PersistentVolume, VolumeRecord};
use baggageclaim::store::{Change, Index};
use baggageclaim::sys::Dir;

/// Overlayfs mounts no volatile overlay on a filesystem with an unreported write-back error.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreported_write_back_error_stops_no_publish_for_long() {
    let (disk, bench) = require_small_disk!();
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    let write = |at: &Path| fs::write(at.join("f"), "x").expect("write");
    bench.step("before", &output, write).await;
    let (scratch, _) = bench.publish("pod", "scratch", &[]).await;
    let mut file = fs::File::create_new(scratch.join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    rustix::fs::syncfs(fs::File::open(bench.pool()).expect("open")).expect("all is well yet");
    let broken = disk.breaks_at(&bench.pool().join("volumes/scratch/top/big"));
    file.rewind().expect("seek");
    file.write_all(&vec![2; 1 << 20])
        .expect("the page cache takes it");

    // The pages are written back later and lost. A volume that may be sealed could get the report
    // instead; an input cannot.
    let input = [("type", "input"), ("from", "artifact/o")];
    let deadline = Instant::now() + NEVER;
    let mut tries = 0;
    let error = loop {
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
        let volume = format!("before-{tries}");
        match bench.try_publish("pod", &volume, &input).await {
            Ok(_) => bench.unpublish(&volume).await,
            Err(error) => break error,
        }
        tries += 1;
        assert!(Instant::now() < deadline, "nothing was lost");
    };
    assert!(error.to_string().contains("EIO"), "{error}");
    drop(file);
    broken.works_again();
    let before = bench.artifact("artifact/o").expect("it is sealed").id;
    bench.step("after", &output, write).await;
    let after = bench.artifact("artifact/o").expect("it is sealed");
    assert!(after.durable && after.id != before);
    bench.unpublish("scratch").await;
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_older_than_a_failed_write_back_is_sealed() {
    let (disk, bench) = require_small_disk!();
    let task = [("type", "task-cache"), ("key", "k")];
    bench
        .step("base", &task, |at| {
            fs::write(at.join("f"), "base").expect("write");
        })
        .await;
    bench.engine.reap().await.expect("reap");

    let (victim, _) = bench.publish("victim", "victim", &task).await;
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    bench.publish("bystander", "bystander", &output).await;
    let mut file = fs::File::create_new(victim.join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    rustix::fs::syncfs(fs::File::open(bench.pool()).expect("open")).expect("all is well yet");
    let broken = disk.breaks_at(&bench.pool().join("volumes/victim/top/big"));
    file.rewind().expect("seek");
    file.write_all(&vec![2; 1 << 20])
        .expect("the page cache takes it");
    drop(file);

    bench.outcome("victim", Outcome::Succeeded).await;
    bench.unpublish("victim").await;
    eventually("the disk says that it failed", || {
        bench.pool().join("doomed").exists()
    })
    .await;
    eventually("the victim is gone", || bench.row("victim").is_none()).await;
    assert_eq!(
        bench.look("look", &task, "f").await.as_deref(),
        Some("base"),
        "what was sealed before has its name again"
    );
    let base = bench.artifact("task-cache/k").expect("there");
    assert!(base.durable);

    // Remembered over a restart, for all that existed.
    broken.works_again();
    let bench = bench.restart().await;
    bench.unpublish("bystander").await;
    bench.quiet().await;
    assert!(
        bench.artifact("artifact/o").is_none(),
        "it may have lost bytes"
    );
    assert_eq!(bench.artifact("task-cache/k").expect("there").id, base.id);

    // Content from now on is sound.
    bench
        .step("new", &task, |at| {
            fs::write(at.join("new"), "new").expect("write");
        })
        .await;
    assert_eq!(
        bench.look("look", &task, "new").await.as_deref(),
        Some("new")
    );
    let (at, _) = bench
        .publish("user", "in", &[("type", "input"), ("from", "task-cache/k")])
        .await;
    let mut text = String::new();
    fs::File::open(at.join("f"))
        .and_then(|mut f| f.read_to_string(&mut text))
        .expect("read");
    assert_eq!(text, "base");
    bench.unpublish("in").await;
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

/// The disk fails to write back what a pod wrote. `heard`: another process than the driver gets the
/// report.
async fn publish_after_a_failed_write_back(heard: bool) {
    let (disk, bench) = require_small_disk!();
    let output = [("type", "output"), ("name", "base"), ("commit", "always")];
    let write = |at: &Path| fs::write(at.join("f"), "base").expect("write");
    bench.step("base", &output, write).await;
    let input = [("type", "input"), ("from", "artifact/base")];
    let (scratch, _) = bench.publish("pod", "scratch", &[]).await;
    let mut file = fs::File::create_new(scratch.join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    let pool = fs::File::open(bench.pool()).expect("open");
    rustix::fs::syncfs(&pool).expect("all is well yet");
    let broken = disk.breaks_at(&bench.pool().join("volumes/scratch/top/big"));
    file.rewind().expect("seek");
    file.write_all(&vec![2; 1 << 20])
        .expect("the page cache takes it");
    let is_given_one_that_syncs = async |volume: &str| {
        bench.try_publish("p", volume, &input).await?;
        let file = fs::File::create(bench.target(volume).join("x")).expect("create");
        let synced = file.sync_all();
        bench.unpublish(volume).await;
        Ok::<bool, Error>(synced.is_ok())
    };
    if heard {
        rustix::fs::syncfs(&pool).expect_err("it is lost");
    } else {
        // Until the driver is the first to hear of it. The write-back may fail right between the
        // publish and the sync, once.
        let deadline = Instant::now() + NEVER;
        let (mut number, mut broken) = (0, 0);
        loop {
            // It is written back, and no call waits for it.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
            match is_given_one_that_syncs(&format!("before-{number}")).await {
                Ok(synced) => broken += usize::from(!synced),
                Err(error) => break assert!(error.to_string().contains("EIO"), "{error}"),
            }
            number += 1;
            assert!(Instant::now() < deadline, "nothing was lost");
        }
        assert!(broken <= 1, "{broken} were broken from the beginning");
    }
    drop(file);
    broken.works_again();
    for number in 0..12 {
        let synced = is_given_one_that_syncs(&format!("after-{number}")).await;
        assert!(
            synced.expect("published"),
            "it was broken from the beginning"
        );
    }
    bench.unpublish("scratch").await;
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_write_back_failed_no_pod_gets_an_overlay_of_before() {
    publish_after_a_failed_write_back(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_when_another_process_got_the_report() {
    publish_after_a_failed_write_back(true).await;
}

/// A claim outlives the boot, and so does the word that it may have lost bytes.
#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn nothing_is_made_of_a_claim_that_may_have_lost_bytes() {
    let (disk, bench) = require_small_disk!();
    let make = |name: &str, source| CreateClaim {
        source,
        ..empty_claim(name)
    };
    let mounted = async |bench: &Bench, claim: &PersistentVolume| {
        let target = bench.target(claim.name.as_str());
        let request = mount_request(claim, &target);
        bench.engine.mount_claim(request).await.expect("mounted");
        target
    };
    let unmounted = async |bench: &Bench, claim: &PersistentVolume| {
        let target = bench.target(claim.name.as_str());
        let unmounted = bench
            .engine
            .unmount_claim(claim.id.as_str(), &target, false);
        unmounted.await.expect("unmounted");
    };
    let claims = &bench.engine;
    let whole = claims
        .create_claim(make("whole", None))
        .await
        .expect("made");
    fs::write(mounted(&bench, &whole).await.join("f"), "whole").expect("write");
    unmounted(&bench, &whole).await;
    let before = claims
        .create_snapshot("before", whole.id.as_str())
        .await
        .expect("taken");

    // It has content of its own, all of which is on the disk before anything is lost.
    let idle = claims.create_claim(make("idle", None)).await.expect("made");
    fs::write(mounted(&bench, &idle).await.join("f"), "idle").expect("write");
    unmounted(&bench, &idle).await;
    // A volume that was writable during the sync may have lost bytes, too. The kernel closes it
    // after the answer, and the next call for it waits for that.
    let unchanged = claims.expand_claim(idle.id.as_str(), 0, None).await;
    unchanged.expect("it is as large as that");
    bench.engine.reap().await.expect("reap");
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    bench.step("syncs", &output, |_| {}).await;
    eventually("it is on the disk", || {
        bench
            .artifact("artifact/o")
            .is_some_and(|sealed| sealed.durable)
    })
    .await;

    let victim = claims
        .create_claim(make("victim", None))
        .await
        .expect("made");
    let at = mounted(&bench, &victim).await;
    let mut file = fs::File::create_new(at.join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    rustix::fs::syncfs(fs::File::open(bench.pool()).expect("open")).expect("all is well yet");
    let top = format!("volumes/{}/top/big", victim.id);
    let broken = disk.breaks_at(&bench.pool().join(top));
    file.rewind().expect("seek");
    file.write_all(&vec![2; 1 << 20])
        .expect("the page cache takes it");
    drop(file);
    unmounted(&bench, &victim).await;

    let heard = claims.create_snapshot("torn", victim.id.as_str()).await;
    assert!(heard.is_err(), "the disk lost what it was to hold");
    broken.works_again();
    let mut bench = bench;
    for restarted in [false, true] {
        if restarted {
            bench = bench.restart().await;
        }
        let claims = &bench.engine;
        let taken = claims.create_snapshot("torn", victim.id.as_str()).await;
        let error = taken.expect_err("the kernel says so once, and it is as true as then");
        assert!(matches!(error, Error::ClaimInUse { .. }), "{error}");
        assert!(error.to_string().contains("failed to write"), "{error}");
        let source = Some(ClaimSource::Claim(victim.id.clone()));
        let cloned = claims.create_claim(make("clone", source)).await;
        assert!(
            matches!(cloned, Err(Error::ClaimInUse { .. })),
            "{cloned:?}"
        );
        let found = claims.claim_use(victim.id.as_str()).await.expect("there");
        assert_eq!(found.problems.len(), 1, "{:?}", found.problems);
        // Pods may have it, and read what is left.
        let at = mounted(&bench, &victim).await;
        assert!(at.join("big").exists());
        unmounted(&bench, &victim).await;
    }
    // Earlier layers are whole, and so is content from now on.
    let claims = &bench.engine;
    let source = Some(ClaimSource::Snapshot(before.id.clone()));
    let restored = claims
        .create_claim(make("restored", source))
        .await
        .expect("made");
    let at = mounted(&bench, &restored).await;
    assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "whole");
    unmounted(&bench, &restored).await;
    let after = claims
        .create_snapshot("after", restored.id.as_str())
        .await
        .expect("taken");
    let of_idle = claims
        .create_snapshot("idle", idle.id.as_str())
        .await
        .expect("taken");
    for claim in [&victim, &whole, &restored, &idle] {
        claims
            .delete_claim(claim.id.as_str())
            .await
            .expect("deleted");
    }
    for snapshot in [&before, &after, &of_idle] {
        let deleted = claims.delete_snapshot(snapshot.id.as_str()).await;
        deleted.expect("deleted");
    }
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

/// Has a pod write something that the disk loses: a file of a volume that is published.
fn lose(disk: &SmallDisk, bench: &Bench, volume: &str) -> Broken {
    let mut file = fs::File::create_new(bench.target(volume).join("big")).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    sync(&bench.pool());
    let top = format!("volumes/{volume}/top/big");
    let broken = disk.breaks_at(&bench.pool().join(top));
    file.rewind().expect("seek");
    file.write_all(&vec![2; 1 << 20])
        .expect("the page cache takes it");
    broken
}

/// The kernel reports a lost write once, here to another process. An overlay remembers it as long
/// as it is mounted.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_write_that_another_process_was_told_of_is_found_when_the_volume_is_frozen() {
    let (disk, bench) = require_small_disk!();
    let output = [("type", "output"), ("name", "o")];
    bench.publish("victim", "victim", &output).await;
    let broken = lose(&disk, &bench, "victim");
    broken.is_heard();
    broken.works_again();
    // The pod's outcome stays unknown, so no seal waits for the disk.
    bench.unpublish("victim").await;
    eventually("it is noted", || bench.pool().join("doomed").exists()).await;
    bench.outcome("victim", Outcome::Succeeded).await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/o").is_none());
    // The kernel has not told this process of it yet; when it does, that is not another error.
    let later = [("type", "output"), ("name", "later"), ("commit", "always")];
    let (at, _) = bench.publish("later", "later", &later).await;
    fs::write(at.join("f"), "later").expect("write");
    bench.unpublish("later").await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/later").is_some());
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_write_that_was_told_while_no_driver_ran_is_found_by_the_next_start() {
    let (disk, bench) = require_small_disk!();
    let output = [("type", "output"), ("name", "o"), ("commit", "always")];
    bench.publish("victim", "victim", &output).await;
    let (_, plain) = bench.publish("bystander", "bystander", &[]).await;
    assert!(!plain.already);
    let broken = lose(&disk, &bench, "victim");
    let bench = bench
        .restart_after(|_| {
            broken.is_heard();
            broken.works_again();
        })
        .await;
    assert!(
        bench.pool().join("doomed").exists(),
        "no process has noted it"
    );
    let noted = fs::read(bench.pool().join("doomed")).expect("read");
    // Content from now on is sound, also after one more start that finds the same overlay.
    let later = [("type", "output"), ("name", "later"), ("commit", "always")];
    let (at, _) = bench.publish("later", "later", &later).await;
    fs::write(at.join("f"), "later").expect("write");
    let bench = bench.restart().await;
    assert_eq!(fs::read(bench.pool().join("doomed")).expect("read"), noted);
    for volume in ["victim", "bystander", "later"] {
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    assert!(bench.artifact("artifact/o").is_none());
    let input = [("type", "input"), ("from", "artifact/later")];
    let content = bench.look("look", &input, "f").await;
    assert_eq!(content.as_deref(), Some("later"));
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_write_is_noted_on_a_full_disk_too() {
    let (disk, lab) = match SmallDisk::make() {
        Ok(made) => made,
        Err(reason) => return crate::common::skip(&reason),
    };
    let bench = Bench::with(lab, |config| config.reserve = 4 << 20).await;
    let output = [("type", "output"), ("name", "o")];
    bench.publish("victim", "victim", &output).await;
    let broken = lose(&disk, &bench, "victim");
    let reserve = bench.pool().join("reserve");
    assert!(reserve.exists());
    let ballast = bench.lab.path().join("ballast");
    fill(&ballast);
    broken.is_heard();
    broken.works_again();
    // Blocks that were deleted before are free only now that the journal has committed that.
    let more = bench.lab.path().join("more");
    fill(&more);
    bench.unpublish("victim").await;
    eventually("it is noted", || bench.pool().join("doomed").exists()).await;
    assert!(!reserve.exists(), "there was room");
    fs::remove_file(ballast).expect("rm");
    fs::remove_file(more).expect("rm");
    bench.outcome("victim", Outcome::Succeeded).await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/o").is_none());
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

/// A process of a pod that was deleted by force writes to a claim after it was unmounted, and after
/// a write-back that went well.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_last_writer_came_late_may_have_lost_bytes() {
    let (disk, bench) = require_small_disk!();
    let request = empty_claim("claim");
    let claim = bench.engine.create_claim(request).await.expect("made");
    let target = bench.target("claim");
    let request = mount_request(&claim, &target);
    bench.engine.mount_claim(request).await.expect("mounted");
    let mut late = fs::File::create_new(target.join("big")).expect("create");
    late.write_all(&vec![1; 1 << 20]).expect("write");
    let unmounted = bench
        .engine
        .unmount_claim(claim.id.as_str(), &target, false);
    unmounted.await.expect("unmounted");
    // Its writer is still there while all that it wrote until now gets to the disk.
    let output = |name| [("type", "output"), ("name", name), ("commit", "always")];
    for name in ["before", "after"] {
        let (at, _) = bench.publish(name, name, &output(name)).await;
        fs::write(at.join("f"), name).expect("write");
    }
    let sealed = async |name: &str| {
        bench.unpublish(name).await;
        bench.quiet().await;
        bench.artifact(&format!("artifact/{name}")).is_some()
    };
    assert!(sealed("before").await);
    let top = format!("volumes/{}/top/big", claim.id);
    let broken = disk.breaks_at(&bench.pool().join(top));
    late.rewind().expect("seek");
    late.write_all(&vec![2; 1 << 20])
        .expect("the page cache takes it");
    drop(late);
    // A round notices that no process has it any more.
    bench.engine.reap().await.expect("reap");
    assert!(!sealed("after").await, "the disk lost something meanwhile");
    // The node is reset before anything else is written back.
    let cut = bench.lab.cut();
    let volume = cut.path().join("pool/volumes").join(claim.id.as_str());
    assert!(volume.join("damaged").exists(), "the reset lost the mark");
    assert!(cut.close().is_empty());
    broken.works_again();
    let found = bench.engine.claim_use(claim.id.as_str()).await;
    assert_eq!(found.expect("there").problems.len(), 1, "it is damaged");
    let taken = bench.engine.create_snapshot("torn", claim.id.as_str());
    let error = taken.await.expect_err("it may have lost bytes");
    assert!(matches!(error, Error::ClaimInUse { .. }), "{error}");
    let deleted = bench.engine.delete_claim(claim.id.as_str()).await;
    deleted.expect("deleted");
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}

/// Dates a volume and all claims two days ahead, as if the clock of the boot had been wrong.
fn date_ahead(pool: &Path, volume: &str) {
    const AHEAD: Duration = Duration::from_secs(2 * 24 * 60 * 60);
    let path = pool.join("volumes").join(volume).join("volume.json");
    let record = fs::read(&path).expect("read");
    let mut record: VolumeRecord = serde_json::from_slice(&record).expect("a record");
    record.created = record.created.after(AHEAD);
    fs::write(&path, serde_json::to_vec(&record).expect("json")).expect("write");
    let pool = Dir::open(pool).expect("open");
    let (index, contents) = Index::open(&pool).expect("open");
    let claims = contents.claims.into_iter().map(|mut claim| {
        claim.created = claim.created.after(AHEAD);
        Change::PutClaim(claim)
    });
    let changes: Vec<Change> = claims.collect();
    index.commit(&changes).expect("commit");
    index.close();
}

/// A node booted with a wrong clock, which NTP then corrected: the driver started again.
#[tokio::test(flavor = "multi_thread")]
async fn a_date_ahead_of_the_clock_hides_no_lost_write() {
    let (disk, bench) = require_small_disk!();
    let request = empty_claim("claim");
    let claim = bench.engine.create_claim(request).await.expect("made");
    let target = bench.target("claim");
    let request = mount_request(&claim, &target);
    bench.engine.mount_claim(request).await.expect("mounted");
    fs::write(target.join("f"), "claim").expect("write");
    let output = |name| [("type", "output"), ("name", name), ("commit", "always")];
    let (at, _) = bench.publish("early", "early", &output("early")).await;
    fs::write(at.join("f"), "early").expect("write");
    bench.publish("scratch", "scratch", &[]).await;
    let bench = bench.restart_after(|pool| date_ahead(pool, "early")).await;

    let broken = lose(&disk, &bench, "scratch");
    let (at, _) = bench.publish("other", "other", &output("other")).await;
    fs::write(at.join("f"), "other").expect("write");
    bench.unpublish("other").await;
    eventually("it is noted", || bench.pool().join("doomed").exists()).await;
    broken.works_again();
    eventually("the claim is marked", || {
        let volume = bench.pool().join("volumes").join(claim.id.as_str());
        volume.join("damaged").exists()
    })
    .await;
    // The records still have their dates.
    let bench = bench.restart().await;
    // Content from now on is sound.
    let (at, _) = bench.publish("later", "later", &output("later")).await;
    fs::write(at.join("f"), "later").expect("write");
    let bench = bench.restart().await;
    for volume in ["early", "scratch", "later"] {
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    assert!(
        bench.artifact("artifact/early").is_none(),
        "it may have lost bytes"
    );
    assert!(bench.artifact("artifact/later").is_some());
    let found = bench.engine.claim_use(claim.id.as_str()).await;
    assert_eq!(found.expect("there").problems.len(), 1, "it is damaged");
    let unmounted = bench
        .engine
        .unmount_claim(claim.id.as_str(), &target, false);
    unmounted.await.expect("unmounted");
    let deleted = bench.engine.delete_claim(claim.id.as_str()).await;
    deleted.expect("deleted");
    bench.finish().await;
    assert_eq!(disk.close(), Vec::<std::path::PathBuf>::new());
}
