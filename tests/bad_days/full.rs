//! ENOSPC in the middle of every operation. Failures are reported and leave nothing half-made,
//! promises hold, unpublish always works. With free space, all continues without a restart.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::CreateClaim;
use baggageclaim::engine::notice::{NotCommitted, What};
use baggageclaim::engine::{Config, Engine, Error, Notice, Notices, PublishRequest};
use baggageclaim::model::{LayerId, Outcome, Usage};
use baggageclaim::store::{Change, Index};
use baggageclaim::sys::{Dir, Space};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use rustix::fs::FallocateFlags;
use tokio::sync::mpsc;

use crate::common::bench::{Bench, NEVER, empty_claim, eventually, names, open_again, soon};
use crate::common::{Fs, Lab};

const MIB: u64 = 1 << 20;

const SMALL: [(BackendKind, Fs, u64); 5] = [
    (BackendKind::Overlay, Fs::Ext4, 48),
    (BackendKind::Overlay, Fs::Tmpfs, 48),
    (BackendKind::Overlay, Fs::XfsReflink, 320),
    (BackendKind::Btrfs, Fs::Btrfs, 160),
    (BackendKind::Copy, Fs::Ext4, 48),
];

async fn small(backend: BackendKind, fs: Fs, mib: u64) -> Result<Bench, String> {
    let lab = Lab::try_sized(fs, mib * MIB)?;
    Ok(Bench::with(lab, |config| {
        config.backend = Some(backend);
        config.reserve = 4 * MIB;
        // Nothing goes but because a call found no space.
        config.high_watermark = 100;
        config.low_watermark = 50;
    })
    .await)
}

/// Writes until not one byte more fits, nor a directory; returns how many bytes it was.
fn fill_up(at: &Path) -> u64 {
    let mut written = 0;
    let mut file = fs::File::create(at.join("big")).expect("create");
    let mut size = 1 << 20;
    let block: Vec<u8> = (0..size)
        .map(|n| u8::try_from(n % 251).expect("small"))
        .collect();
    while size > 0 {
        match file.write(&block[..size]) {
            Ok(count) => written += count as u64,
            Err(error) if error.kind() == ErrorKind::StorageFull => size /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    for number in 0..4096 {
        let made = fs::create_dir(at.join(format!("d{number}")))
            .and_then(|()| fs::write(at.join(format!("d{number}/f")), "one block"));
        if made.is_err() {
            break;
        }
    }
    written
}

/// Writes a file until only so many bytes can be written.
fn fill_up_to(file: &Path, pool: &Path, left: u64) {
    let pool = Dir::open(pool).expect("the pool");
    let mut file = fs::File::create(file).expect("create");
    let block = vec![7; 1 << 16];
    while pool.space().expect("statfs").bytes_available > left {
        file.write_all(&block).expect("write");
        file.sync_data().expect("sync");
    }
}

fn assert_full(result: Result<impl std::fmt::Debug, Error>, what: &str) -> bool {
    match result {
        Ok(_) => false,
        Err(error @ Error::Full(_)) => {
            assert!(error.to_string().contains("no room left"), "{error}");
            true
        }
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Publishes until there is no space for one more; returns how many there was space for.
async fn publish_until_full(bench: &Bench, what: &str, attributes: &[(&str, &str)]) -> usize {
    for number in 0..20_000 {
        let volume = format!("more-{number}");
        if assert_full(bench.try_publish("more", &volume, attributes).await, what) {
            assert!(!bench.target(&volume).exists(), "{what}: half-made");
            assert!(bench.row(&volume).is_none(), "{what}");
            assert!(!bench.pool().join("volumes").join(&volume).exists());
            return number;
        }
    }
    panic!("{what}: never full");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_refuses_empty_claims_and_one_with_some_room_takes_any_size() {
    let (backend, fs, mib) = SMALL[0];
    let mut bench = match small(backend, fs, mib).await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    let create = async |bench: &Bench, name: &str, mib: u64| {
        let request = CreateClaim {
            required_bytes: mib * MIB,
            ..empty_claim(name)
        };
        bench.engine.create_claim(request).await
    };
    let cached = [("type", "task-cache"), ("key", "cached")];
    bench
        .step("cached", &cached, |at| {
            fs::write(at.join("f"), vec![7; 16 << 20]).expect("write");
        })
        .await;
    bench.engine.reap().await.expect("reap");
    let filler = bench.lab.path().join("filler");
    fill_up_to(&filler, &bench.pool(), MIB);

    // It is nearly full, but of content that eviction can delete.
    create(&bench, "evictable", 40).await.expect("made");
    let input = [("type", "input"), ("from", "task-cache/cached")];
    bench.publish("reader", "in-use", &input).await;
    let refused = create(&bench, "full", 40).await;
    assert!(assert_full(refused, "all is in use"));
    assert_eq!(bench.engine.claims(None, 9).items.len(), 1);
    // A small claim fits into what is free.
    create(&bench, "tiny", 0)
        .await
        .expect("no size was asked for");

    fs::remove_file(&filler).expect("space again");
    fill_up_to(&filler, &bench.pool(), 5 * MIB);
    create(&bench, "full", 40)
        .await
        .expect("its size reserves nothing");
    bench.unpublish("in-use").await;
    bench = bench.restart().await;
    bench.assert_whole().await;
}

#[tokio::test(flavor = "multi_thread")]
#[expect(
    clippy::too_many_lines,
    reason = "one day, told from morning to evening"
)]
async fn promises_hold_and_freed_space_is_used() {
    for (backend, fs, mib) in SMALL {
        for restarted in [false, true] {
            if restarted && fs != Fs::Ext4 {
                continue;
            }
            let what = format!("{backend} on {}, restarted {restarted}", fs.name());
            let mut bench = match small(backend, fs, mib).await {
                Ok(bench) => bench,
                Err(reason) => return crate::common::skip(&reason),
            };
            let kept = [("type", "task-cache"), ("key", "kept")];
            bench
                .step("kept", &kept, |at| {
                    fs::write(at.join("f"), "kept").expect("write");
                })
                .await;
            bench.engine.reap().await.expect("reap");
            assert!(bench.pool().join("reserve").exists(), "{what}");
            // In use all the time: it may not be evicted.
            let (pinned, _) = bench
                .publish(
                    "pin",
                    "pin",
                    &[("type", "input"), ("from", "task-cache/kept")],
                )
                .await;

            let output = [("type", "output"), ("name", "o")];
            let (out, _) = bench.publish("maker", "out", &output).await;
            fs::write(out.join("f"), vec![7; 3 << 20]).expect("write");
            let (scratch, _) = bench.publish("filler", "scratch", &[]).await;
            fill_up(&scratch);

            let made = publish_until_full(&bench, &what, &output).await;
            assert!(bench.engine.status().await.is_ok());
            let told = bench
                .engine
                .report_outcome(&"maker".parse().expect("uid"), Outcome::Succeeded)
                .await;
            let told = !assert_full(told, &what);
            bench.unpublish("out").await;
            for number in 0..made {
                bench.unpublish(&format!("more-{number}")).await;
            }
            let reaped = bench.engine.reap().await;
            assert_full(reaped, &what);
            bench.assert_whole().await;
            if restarted {
                bench = bench.restart().await;
                assert!(scratch.join("big").exists(), "{what}");
                bench.assert_whole().await;
            }
            assert_eq!(
                fs::read_to_string(pinned.join("f")).expect("read"),
                "kept",
                "{what}"
            );

            // Room comes back: by one pod that goes.
            bench.unpublish("scratch").await;
            if !told {
                let deadline = Instant::now() + NEVER;
                while !names(&bench.pool().join("trash")).is_empty() {
                    // If another test's program holds it for a moment, the next sweep takes it.
                    assert_full(bench.engine.reap().await, &what);
                    assert!(Instant::now() < deadline, "{what}: the trash stays");
                }
                assert_eq!(
                    bench.outcome("maker", Outcome::Succeeded).await,
                    1,
                    "{what}"
                );
            }
            bench.outcome("more", Outcome::Failed).await;
            eventually(&format!("{what}: the promised seal"), || {
                bench
                    .artifact("artifact/o")
                    .is_some_and(|artifact| artifact.durable)
            })
            .await;
            let input = [("type", "input"), ("from", "artifact/o")];
            // The space that comes back may still be coming.
            let deadline = Instant::now() + NEVER;
            while assert_full(bench.try_publish("user", "in", &input).await, &what) {
                assert!(Instant::now() < deadline, "{what}: no room came back");
            }
            let at = bench.target("in");
            assert_eq!(
                fs::read(at.join("f")).expect("read"),
                vec![7; 3 << 20],
                "{what}"
            );
            bench.unpublish("in").await;
            bench.quiet().await;
            // btrfs gives space back when its cleaner wakes, up to half a minute later.
            let deadline = Instant::now() + NEVER;
            while fs != Fs::Btrfs && !bench.pool().join("reserve").exists() {
                bench.engine.reap().await.expect("reap");
                assert!(Instant::now() < deadline, "{what}: no reserve again");
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            bench
                .step("again", &output, |at| {
                    fs::write(at.join("f"), "again").expect("write");
                })
                .await;
            bench.unpublish("pin").await;
            bench.outcome("more", Outcome::Failed).await;
            bench.finish().await;
        }
    }
}

/// The size of the unused cache.
const UNUSED: u64 = 8 * MIB;

/// A bench where seals and forks are copies that share nothing. It has one cache, which is evicted
/// when that frees space for a caller.
///
/// A caller that waits soon learns that there was no space. Otherwise the test waits, however busy
/// the machine is.
async fn of_copies(notices: Option<Notices>, low_watermark: u8) -> Result<Bench, String> {
    let lab = Lab::try_sized(Fs::Ext4, 48 * MIB)?;
    let bench = Bench::with(lab, |config| {
        config.backend = Some(BackendKind::Copy);
        config.room_wait = match notices {
            Some(_) => Duration::from_secs(2),
            None => NEVER,
        };
        config.notices = notices;
        config.high_watermark = 100;
        config.low_watermark = low_watermark;
    })
    .await;
    let unused = [("type", "task-cache"), ("key", "unused")];
    let write = |at: &Path| fs::write(at.join("f"), vec![1; size(UNUSED)]).expect("write");
    bench.step("maker", &unused, write).await;
    bench.engine.reap().await.expect("reap");
    Ok(bench)
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("small")
}

fn space(bench: &Bench) -> Space {
    let pool = Dir::open(&bench.pool()).and_then(|pool| pool.space());
    pool.expect("statfs")
}

/// Makes a volume of a pod that commits whatever becomes of it, of so many bytes.
async fn make(bench: &Bench, name: &str, bytes: u64) {
    let cache = [("type", "task-cache"), ("key", name), ("commit", "always")];
    let (at, _) = bench.publish(name, name, &cache).await;
    fs::write(at.join("f"), vec![7; size(bytes)]).expect("space for one");
}

/// The error for a fork of `other` while another volume, `filler`, leaves no space for a copy of
/// it.
async fn no_space_for_a_fork(bench: &Bench) -> String {
    let (filler, _) = bench.publish("pod", "filler", &[]).await;
    let most = space(bench).bytes_available - MIB;
    fs::write(filler.join("f"), vec![1; size(most)]).expect("write");
    let fork = [("type", "input"), ("from", "task-cache/other")];
    let forked = bench.try_publish("fork", "fork", &fork).await;
    forked.expect_err("no space").to_string()
}

async fn why_not_committed(heard: &mut mpsc::Receiver<Notice>) -> NotCommitted {
    loop {
        let notice = soon("a notice", heard.recv()).await;
        if let What::NotCommitted { why, .. } = notice.expect("the engine lives").what {
            break why;
        }
    }
}

/// A seal that is a copy may need more space than there will ever be, or than is there while others
/// have theirs.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_evicted_for_a_copy_that_would_not_fit() {
    let (notices, mut heard) = Notices::channel(64);
    let bench = match of_copies(Some(notices), 1).await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    let assert_spared = async |what: &str| {
        bench.engine.reap().await.expect("reap");
        let spared = bench.artifact("task-cache/unused").is_some();
        assert!(spared, "{what}: evicted in vain");
    };
    let total = space(&bench).bytes;
    // More than half of the pool cannot be there twice.
    make(&bench, "large", total / 2 + MIB).await;
    bench.unpublish("large").await;
    bench.quiet().await;
    let why = why_not_committed(&mut heard).await;
    let needs = total / 2 + MIB;
    assert_eq!(why, NotCommitted::TooLarge { needs, pool: total });
    assert_spared("too large").await;
    for place in ["pending", "trash"] {
        assert_eq!(names(&bench.pool().join(place)), [""; 0], "{place}");
    }

    // A third of the pool, of which another pod has another third and more.
    make(&bench, "other", total * 3 / 8).await;
    make(&bench, "third", total / 3).await;
    let began = Instant::now();
    bench.unpublish("third").await;
    bench.quiet().await;
    let waited = Duration::from_secs(2);
    assert!(began.elapsed() >= waited, "it was not tried for long");
    let why = why_not_committed(&mut heard).await;
    assert_eq!(why, NotCommitted::NoRoom { waited });
    assert!(why.to_string().contains("no room within 2s"), "{why}");
    assert_spared("no room").await;

    // The same of a fork.
    bench.unpublish("other").await;
    bench.quiet().await;
    bench.engine.reap().await.expect("reap");
    let error = no_space_for_a_fork(&bench).await;
    let needs = format!("a copy takes {} bytes", total * 3 / 8);
    assert!(error.contains(&needs), "{error}");
    assert_spared("a fork").await;
    bench.unpublish("filler").await;
    bench.finish().await;
}

/// A layer that is lost before it is measured has an unknown size, and losing it frees nothing.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_goes_for_a_copy_because_of_content_that_is_lost() {
    let bench = match of_copies(None, 1).await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    let known = names(&bench.pool().join("layers"));
    let output = [("type", "output"), ("name", "lost")];
    bench.step("lost", &output, |_| ()).await;
    bench.engine.reap().await.expect("reap");
    let mut layers = names(&bench.pool().join("layers"));
    layers.retain(|layer| !known.contains(layer));
    let layer = layers.remove(0);
    let content = bench.pool().join("layers").join(&layer).join("fs");
    let aside = bench.lab.path().join("aside");
    let lost = |pool: &Path| {
        let root = Dir::open(pool).expect("the pool");
        let (index, _) = Index::open_existing(&root).expect("the index");
        let unmeasured = Change::RemoveLayer(layer.parse().expect("an id"));
        index.commit(&[unmeasured]).expect("written");
        fs::rename(&content, &aside).expect("rename");
    };
    let bench = bench.restart_after(lost).await;
    let needs = space(&bench).bytes * 3 / 8;
    make(&bench, "other", needs).await;
    bench.unpublish("other").await;
    bench.quiet().await;
    bench.engine.reap().await.expect("reap");

    let error = no_space_for_a_fork(&bench).await;
    assert!(error.contains(&format!("takes {needs} bytes")), "{error}");
    bench.engine.reap().await.expect("reap");
    for name in ["task-cache/unused", "artifact/lost"] {
        assert!(bench.artifact(name).is_some(), "{name} is evicted in vain");
    }
    bench.unpublish("filler").await;
    fs::rename(&aside, &content).expect("it comes back");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_unused_goes_for_a_copy_also_below_the_watermark() {
    let bench = match of_copies(None, 99).await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    // It is less than half of the space that would be free without the cache, and more than half of
    // the free space.
    make(
        &bench,
        "v",
        u64::midpoint(space(&bench).bytes_free, UNUSED / 2),
    )
    .await;
    bench.unpublish("v").await;
    bench.quiet().await;
    assert!(bench.artifact("task-cache/v").is_some(), "it is not sealed");
    assert!(bench.artifact("task-cache/unused").is_none(), "it stayed");
    bench.finish().await;
}

/// Copies that are too large only for a time.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_gets_space_in_time_is_sealed() {
    // No more goes than must: the one that is sealed first may go for the other where there is to
    // be more space than that.
    let bench = match of_copies(None, 99).await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    // Two that fit one after the other, and not beside each other, are both sealed.
    let share = space(&bench).bytes_available * 2 / 7;
    for name in ["one", "two"] {
        let output = [("type", "output"), ("name", name), ("commit", "always")];
        let (at, _) = bench.publish(name, name, &output).await;
        fs::write(at.join("f"), vec![9; size(share)]).expect("write");
    }
    bench.unpublish("one").await;
    bench.unpublish("two").await;
    bench.quiet().await;
    for name in ["artifact/one", "artifact/two"] {
        assert!(bench.artifact(name).is_some(), "{name} is not sealed");
        let (tenant, reference) = ("ci".parse(), name.parse());
        let (tenant, reference) = (tenant.expect("a label"), reference.expect("a name"));
        let destroyed = bench.engine.destroy(&tenant, &reference).await;
        destroyed.expect("destroyed");
    }
    bench.engine.reap().await.expect("reap");

    // One that fits as soon as another is gone is sealed.
    let (at, _) = bench.publish("filler", "filler", &[]).await;
    fs::write(at.join("f"), vec![7; 20 << 20]).expect("write");
    let cache = [
        ("type", "task-cache"),
        ("key", "small"),
        ("commit", "always"),
    ];
    let (at, _) = bench.publish("pod", "small", &cache).await;
    fs::write(at.join("f"), vec![8; 10 << 20]).expect("write");
    fill_up(&bench.target("filler"));
    bench.unpublish("small").await;
    bench.unpublish("filler").await;
    eventually("what found room is sealed", || {
        bench.artifact("task-cache/small").is_some()
    })
    .await;
    bench.quiet().await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_filled_the_disk_with_its_cache_does_not_leave_it_full() {
    for (backend, fs, mib) in SMALL {
        let what = format!("{backend} on {}", fs.name());
        let bench = match small(backend, fs, mib).await {
            Ok(bench) => bench,
            Err(reason) => return crate::common::skip(&reason),
        };
        let cache = [("type", "task-cache"), ("key", "k")];
        let (at, _) = bench.publish("pod", "v", &cache).await;
        fill_up(&at);
        // The outcome finds space too. Otherwise no outcome could be reported, because the volume
        // that fills the disk goes only after its seal.
        assert_eq!(bench.outcome("pod", Outcome::Succeeded).await, 1, "{what}");
        bench.unpublish("v").await;
        if backend == BackendKind::Copy && fs == Fs::Ext4 {
            // Its seal is a copy, for which there is no space while the original is there: all that
            // can be asked is an answer that says so.
            assert_full(bench.try_publish("next", "w", &[]).await, &what);
            bench.assert_whole().await;
            bench.engine.shutdown().await;
            continue;
        }
        let deadline = std::time::Instant::now() + crate::common::bench::NEVER;
        loop {
            let result = bench.try_publish("next", "w", &cache).await;
            if !assert_full(result, &what) {
                break;
            }
            assert!(
                std::time::Instant::now() < deadline,
                "{what}: full for ever"
            );
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        fs::write(bench.target("w").join("f"), "next").expect("write");
        bench.unpublish("w").await;
        bench.outcome("next", Outcome::Failed).await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_without_space_waits_for_the_eviction_of_unused_content() {
    for (backend, fs, mib) in SMALL {
        // btrfs gives space back when its cleaner wakes, up to half a minute later.
        if fs == Fs::Btrfs {
            continue;
        }
        let what = format!("{backend} on {}", fs.name());
        let bench = match small(backend, fs, mib).await {
            Ok(bench) => bench,
            Err(reason) => return crate::common::skip(&reason),
        };
        for number in 0..12 {
            let key = format!("unused-{number}");
            let cache = [("type", "task-cache"), ("key", key.as_str())];
            bench
                .step(&key, &cache, |at| {
                    fs::write(at.join("f"), vec![1; 1 << 20]).expect("write");
                })
                .await;
        }
        bench.engine.reap().await.expect("reap");
        let (scratch, _) = bench.publish("filler", "scratch", &[]).await;
        fill_up(&scratch);

        let output = [("type", "output"), ("name", "o")];
        let input = [("type", "input"), ("from", "task-cache/unused-3")];
        let publish = async |number| {
            let volume = format!("next-{number}");
            // Few, because some backends copy. It is the first of all, because the engine asks no
            // caller in advance.
            let attributes = if number % 10 == 0 { input } else { output };
            bench.try_publish("next", &volume, &attributes).await
        };
        // More than are kept ready; and all at once, as pods come.
        for result in futures_util::future::join_all((0..40).map(publish)).await {
            result.unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        assert!(bench.artifact("task-cache/unused-0").is_none(), "{what}");
        // Content that was about to be forked was not evicted for its own fork.
        assert!(bench.artifact("task-cache/unused-3").is_some(), "{what}");
        for number in 0..40 {
            bench.unpublish(&format!("next-{number}")).await;
        }
        bench.unpublish("scratch").await;
        bench.outcome("next", Outcome::Failed).await;
        bench.finish().await;
    }
}

/// btrfs gives space back when its cleaner wakes, up to half a minute later: who waited there for
/// space to come would see round after round evict, and find none after the last cache either.
#[tokio::test(flavor = "multi_thread")]
async fn where_space_is_freed_late_one_publish_does_not_evict_everything() {
    const CACHES: usize = 12;
    let lab = match Lab::try_sized(Fs::Btrfs, 160 * MIB) {
        Ok(lab) => lab,
        Err(reason) => return crate::common::skip(&reason),
    };
    let bench = Bench::with(lab, |config| {
        config.backend = Some(BackendKind::Btrfs);
        config.reserve = MIB;
        // Nothing goes but because a call found no space; and then one of the caches is enough for
        // a round.
        config.high_watermark = 100;
        config.low_watermark = 99;
    })
    .await;
    let key = |number| format!("unused-{number}");
    for number in 0..CACHES {
        let key = key(number);
        let cache = [("type", "task-cache"), ("key", key.as_str())];
        let write = |at: &Path| fs::write(at.join("f"), vec![1; 2 << 20]).expect("write");
        bench.step(&key, &cache, write).await;
    }
    bench.engine.reap().await.expect("reap");
    let (scratch, _) = bench.publish("filler", "scratch", &[]).await;
    fill_up(&scratch);
    // Small files lie among the names, where a new volume needs space.
    let mut small = 0..;
    while small.next().is_some_and(|number: u32| {
        fs::write(scratch.join(format!("small-{number}")), [1; 1500]).is_ok()
    }) {}
    let mut published = 0;
    let refused = loop {
        let volume = format!("next-{published}");
        match bench.try_publish("next", &volume, &[]).await {
            Ok(_) => published += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::Full(_)), "{refused:?}");
    // It asks once more when it gives up; that round may still run.
    bench.engine.reap().await.expect("reap");
    let is_there = |number: &usize| bench.artifact(&format!("task-cache/{}", key(*number)));
    let left = (0..CACHES).filter_map(|number| is_there(&number)).count();
    assert!(left >= CACHES / 2, "only {left} of {CACHES} are left");
    assert!(left < CACHES, "the pool was not full for anybody");
    // It is full to the last name: all that would take minutes to come back to order.
    bench.engine.shutdown().await;
}

/// A bench in which one cache lies that goes as soon as a call finds the pool full.
async fn with_an_unused_cache() -> Result<Bench, String> {
    let bench = Bench::with(Lab::try_sized(Fs::Ext4, 48 * MIB)?, |config| {
        // Without it the index finds space for what is deleted by chance only.
        config.reserve = MIB;
        config.high_watermark = 100;
        config.low_watermark = 1;
    })
    .await;
    let cache = [("type", "task-cache"), ("key", "unused")];
    let write = |at: &Path| fs::write(at.join("f"), vec![1; 4 << 20]).expect("write");
    bench.step("maker", &cache, write).await;
    bench.engine.reap().await.expect("reap");
    Ok(bench)
}

#[tokio::test(flavor = "multi_thread")]
async fn kubelets_full_disk_is_not_the_pools() {
    let made = (
        with_an_unused_cache().await,
        Lab::try_sized(Fs::Ext4, 8 * MIB),
    );
    let (bench, other) = match made {
        (Ok(bench), Ok(other)) => (bench, other),
        (Err(reason), _) | (_, Err(reason)) => return crate::common::skip(&reason),
    };
    let pods = other.dir("pods");
    fill_up(&pods);
    let request = bench.request("pod", "v", &[]);
    let elsewhere = PublishRequest {
        target: pods.join("v"),
        ..request.clone()
    };
    let assert_refused = async || {
        let refused = bench.engine.publish(elsewhere.clone()).await;
        let refused = refused.expect_err("no room for the target");
        assert!(matches!(refused, Error::TargetFull(_)), "{refused:?}");
        assert!(!pods.join("v").exists());
        bench.engine.reap().await.expect("reap");
        assert!(bench.artifact("task-cache/unused").is_some(), "evicted");
    };
    assert_refused().await;
    assert!(bench.row("v").is_none());
    // Nor is it of a volume that is there already, and mounted nowhere.
    let target = request.target.clone();
    bench.engine.publish(request).await.expect("publish");
    let flags = rustix::mount::UnmountFlags::NOFOLLOW;
    rustix::mount::unmount(&target, flags).expect("umount");
    assert_refused().await;

    fs::remove_file(pods.join("big")).expect("space");
    let published = bench.engine.publish(elsewhere.clone()).await;
    published.expect("there is room for the target");
    bench.unpublish("v").await;
    let unpublished = bench.engine.unpublish("v", &elsewhere.target).await;
    unpublished.expect("unpublish");
    bench.finish().await;
    assert_eq!(other.close(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kubelets_full_disk_is_the_pools_where_they_are_one() {
    let bench = match with_an_unused_cache().await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    let pods = bench.lab.dir("pods");
    fill_up(&pods);
    fs::create_dir(pods.join("v")).expect_err("no room for the target");
    let mut request = bench.request("pod", "v", &[]);
    request.target = pods.join("v");
    let published = bench.engine.publish(request).await;
    published.expect("the cache made room for the target");
    assert!(bench.artifact("task-cache/unused").is_none(), "it stayed");
    let unpublished = bench.engine.unpublish("v", &pods.join("v")).await;
    unpublished.expect("unpublish");
    bench.finish().await;
}

/// The copy backend writes nothing before it is chosen, so a new pool would be its for good.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_pool_on_a_full_disk_is_made_when_there_is_space_and_as_on_an_empty_one() {
    let lab = match Lab::try_sized(Fs::Ext4, 48 * MIB) {
        Ok(lab) => lab,
        Err(reason) => return crate::common::skip(&reason),
    };
    let config = Config::new(lab.path().join("pool"));
    let full = lab.dir("full");
    let one_block = |number| full.join(format!("{number}"));
    for number in 0..64 {
        fs::write(one_block(number), "one block").expect("space");
    }
    fill_up(&full);
    // Block by block: at first there is no space for the pool's directories, then for one call
    // after the other of the trial.
    let mut trials = 0;
    for number in 0..64 {
        let opened = Engine::open(config.clone()).await;
        if config.pool.join("pool.json").exists() {
            if let Ok(engine) = opened {
                engine.shutdown().await;
            }
            break;
        }
        let error = opened.expect_err("full").to_string();
        assert!(error.contains("its disk is full, make room"), "{error}");
        trials += usize::from(error.contains("overlay-trial"));
        fs::remove_file(one_block(number)).expect("a file");
    }
    fs::remove_file(full.join("big")).expect("a file");
    let engine = open_again(&config).await;
    assert_eq!(engine.backend(), BackendKind::Overlay);
    assert!(trials > 1, "they did not begin");
    engine.shutdown().await;
    drop(engine);
    assert!(lab.close().is_empty());
}

/// Makes files until there is no inode for one more. On btrfs they take space for metadata, and
/// their names most of it: the kernel needs half a minute to delete a hundred thousand of them.
fn take_all_inodes(at: &Path, disk: Fs) {
    let length = if disk == Fs::Btrfs { 250 } else { 1 };
    let mut made = (0..).map(|number| fs::File::create(at.join(format!("{number:0>length$}"))));
    let error = made.find_map(Result::err).expect("it ends");
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
}

/// Has btrfs free the space of deleted subvolumes now, and not within half a minute.
#[expect(
    clippy::disallowed_types,
    reason = "it has no system call for this but an ioctl"
)]
fn btrfs_sync(at: &Path) {
    let sync = ["filesystem", "sync"];
    let synced = std::process::Command::new("btrfs")
        .args(sync)
        .arg(at)
        .output();
    assert!(synced.expect("btrfs runs").status.success());
}

/// A pod can take all blocks or all inodes. It can end only when a driver runs, so a driver must
/// start there, and also after a reboot, when only a driver deletes what the pod has left.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_starts_on_the_disk_that_a_pod_has_filled() {
    use BackendKind::{Btrfs, Overlay};
    let disks = [
        (Overlay, Fs::XfsReflink, 320, false),
        (Overlay, Fs::XfsFewInodes, 320, true),
        (Overlay, Fs::Ext4FewInodes, 48, true),
        (Overlay, Fs::Btrfs, 160, true),
        (Btrfs, Fs::Btrfs, 160, false),
    ];
    for (backend, disk, mib, by_files) in disks {
        let what = format!("{backend} on {}, by files: {by_files}", disk.name());
        let bench = match small(backend, disk, mib).await {
            Ok(bench) => bench,
            Err(reason) => return crate::common::skip(&reason),
        };
        let (scratch, _) = bench.publish("filler", "scratch", &[]).await;
        let fill = || {
            if by_files {
                take_all_inodes(&scratch, disk);
            } else {
                fill_up(&scratch);
            }
        };
        fill();
        let bench = bench.restart_after(|_| fill()).await;
        assert!(!names(&scratch).is_empty(), "{what}");
        bench.unpublish("scratch").await;
        eventually(&format!("{what}: it is deleted"), || {
            bench.engine.volumes(None).is_empty()
        })
        .await;
        // btrfs has the space of what is deleted later. Kubelet asks again, too.
        let deadline = Instant::now() + NEVER;
        while assert_full(bench.try_publish("next", "next", &[]).await, &what) {
            assert!(Instant::now() < deadline, "{what}");
            if disk == Fs::Btrfs {
                btrfs_sync(&bench.pool());
            }
        }
        let next = bench.target("next").join("f");
        fs::write(next, "there is space").expect("write");
        bench.unpublish("next").await;
        let reason = bench.engine.status().await.expect("status").reason;
        let is_tested = !reason.contains("untested because the disk was full");
        assert_eq!(is_tested, !by_files, "{what}: {reason}");
        bench.finish().await;
    }
}

/// A start removes entries of layers that are gone from the index, which may take space.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_starts_on_a_full_disk_though_the_index_has_entries_of_what_is_gone() {
    for count in [600, 950, 1500] {
        let lab = match Lab::try_sized(Fs::Ext4, 48 * MIB) {
            Ok(lab) => lab,
            Err(reason) => return crate::common::skip(&reason),
        };
        let bench = Bench::with(lab, |config| {
            config.backend = Some(BackendKind::Overlay);
            config.reserve = 0;
        })
        .await;
        let (scratch, _) = bench.publish("filler", "scratch", &[]).await;
        let fill = |pool: &Path| {
            let root = Dir::open(pool).expect("the pool");
            fill_up_to(&scratch.join("most"), pool, 2 * MIB);
            let (index, _) = Index::open(&root).expect("the index");
            let gone = (0..count).map(LayerId::from_bits);
            let put: Vec<Change> = gone
                .map(|it| Change::PutLayer(it, Usage::default()))
                .collect();
            index.commit(&put).expect("committed");
            drop(index);
            fill_up(&scratch);
        };
        let bench = bench.restart_after(fill).await;
        bench.unpublish("scratch").await;
        let is_gone = || bench.engine.volumes(None).is_empty();
        eventually(&format!("{count}: the filler is deleted"), is_gone).await;
        let bench = bench.restart().await;
        let root = Dir::open(&bench.pool()).expect("the pool");
        let layers = Index::read_only(&root).expect("read").layers;
        assert_eq!(layers, [], "{count}");
        bench.finish().await;
    }
}

/// Without a reserve, what lies in the trash is all that is the driver's to free.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_a_reserve_starts_on_a_full_disk_and_frees_rubbish_first() {
    let lab = match Lab::try_sized(Fs::Ext4, 48 * MIB) {
        Ok(lab) => lab,
        Err(reason) => return crate::common::skip(&reason),
    };
    let bench = Bench::with(lab, |config| {
        config.backend = Some(BackendKind::Overlay);
        config.low_watermark = 50;
    })
    .await;
    let kept = [("type", "task-cache"), ("key", "kept")];
    let write = |at: &Path| fs::write(at.join("f"), "kept").expect("write");
    bench.step("maker", &kept, write).await;
    let full = bench.lab.dir("full");
    let (config, pool) = (bench.config.clone(), bench.pool());
    bench.engine.shutdown().await;
    let Bench { lab, engine, .. } = bench;
    drop(engine);
    fill_up(&full);
    let engine = open_again(&config).await;
    let reason = engine.status().await.expect("status").reason;
    let untested = "untested because the disk was full";
    assert!(reason.contains(untested), "{reason}");
    engine.shutdown().await;
    drop(engine);

    // As a layer lies there that was not deleted yet.
    fs::remove_file(full.join("big")).expect("a file");
    let rubbish = pool.join("trash/00000000000000000000000000000001/fs");
    fs::create_dir_all(&rubbish).expect("mkdir");
    fs::write(rubbish.join("f"), vec![1; 1 << 20]).expect("write");
    fill_up(&full);
    let engine = open_again(&config).await;
    let reason = engine.status().await.expect("status").reason;
    assert!(!reason.contains(untested), "{reason}");
    let destroyed = engine
        .destroy(
            &"ci".parse().expect("tenant"),
            &"task-cache/kept".parse().expect("a name"),
        )
        .await;
    // If it was not evicted meanwhile, which needs space to delete, too.
    let gone = matches!(&destroyed, Ok(()) | Err(Error::NoSuchName(_)));
    assert!(gone, "there is room to delete: {destroyed:?}");
    engine.shutdown().await;
    drop(engine);
    assert!(lab.close().is_empty());
}

/// A reserve that a kill left half-made is as large as a whole one, and would be what its next
/// making lacks.
#[tokio::test(flavor = "multi_thread")]
async fn a_reserve_grows_under_one_name_which_the_next_start_frees() {
    let bench = match small(BackendKind::Overlay, Fs::Ext4, 48).await {
        Ok(bench) => bench,
        Err(reason) => return crate::common::skip(&reason),
    };
    let half_made = bench.pool().join(".reserve.new");
    let size = |reserve: &Path| fs::metadata(reserve).expect("a reserve").len();
    let whole = size(&bench.pool().join("reserve"));
    let mut made = None;
    let bench = bench.restart_after(|pool| {
        let space = || Dir::open(pool).and_then(|dir| dir.space()).expect("statfs");
        fs::remove_file(pool.join("reserve")).expect("it was made");
        let plant = fs::File::create(&half_made).expect("create");
        // With it there is less space than a reserve is made in.
        let bytes = space().bytes_available - whole;
        rustix::fs::fallocate(&plant, FallocateFlags::empty(), 0, bytes).expect("space");
        assert!(space().bytes_available < 2 * whole, "{:?}", space());
        let watch = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).expect("init");
        watch
            .add_watch(pool, AddWatchFlags::IN_CREATE)
            .expect("watch");
        made = Some(watch);
    });
    let bench = bench.await;
    assert!(!half_made.exists());
    assert_eq!(size(&bench.pool().join("reserve")), whole);
    let mut names = Vec::new();
    while let Ok(events) = made.as_ref().expect("a watch").read_events() {
        names.extend(events.into_iter().filter_map(|event| event.name));
    }
    names.retain(|name| {
        name.as_encoded_bytes()
            .windows(7)
            .any(|part| part == b"reserve")
    });
    assert_eq!(names, [".reserve.new"]);
    bench.finish().await;
}

#[test]
fn subvolumes_share_their_space_and_filesystems_do_not() {
    let labs: Result<Vec<Lab>, String> = [Fs::Btrfs, Fs::Ext4, Fs::Ext4]
        .map(|fs| Lab::try_sized(fs, 160 * MIB))
        .into_iter()
        .collect();
    let labs = match labs {
        Ok(labs) => labs,
        Err(reason) => return crate::common::skip(&reason),
    };
    let open = |path: &Path| Dir::open(path).expect("open");
    let [btrfs, ext4, twin] = [0, 1, 2].map(|index: usize| open(&labs[index].path()));
    btrfs.create_subvolume("sub").expect("subvolume");
    let sub = open(&labs[0].path().join("sub"));
    let below = open(&labs[1].dir("below"));
    for (one, other, expected) in [
        (&btrfs, &sub, true),
        (&ext4, &below, true),
        (&ext4, &twin, false),
        (&ext4, &btrfs, false),
    ] {
        let shared = one.shares_room_with(other).expect("stat");
        assert_eq!(shared, expected, "{one:?} {other:?}");
    }
    drop((btrfs, ext4, twin, sub, below));
    for lab in labs {
        assert!(lab.close().is_empty());
    }
}
