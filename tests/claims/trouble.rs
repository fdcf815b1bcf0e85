//! Bad days: races, interrupted operations, open files, full disks.

use std::fs;
use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{CreateClaim, claim_id};
use baggageclaim::engine::{Engine, Error};
use baggageclaim::model::{
    ClaimParameters, ClaimSource, LiveClone, MutableChange, PersistentVolume, Timestamp, Ttl,
};
use baggageclaim::server::{code_of, message_of};
use baggageclaim::store::Index;
use baggageclaim::sys::Dir;
use tonic::Code;

use super::bench::{ALL, BTRFS, Bench, COPY, OVERLAY, again, request, say};
use super::common::Fs;
use super::common::bench::request as volume_request;
use super::common::disk::sync;

#[tokio::test(flavor = "multi_thread")]
async fn what_a_process_still_holds_is_neither_frozen_nor_deleted() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    bench.write(&claim, "file", "old").await;
    bench.snapshot("before", &claim).await;
    let target = bench.mount(&claim).await;
    let mut held = File::create(target.join("file")).expect("open");
    bench.unmount(&claim).await;
    let id = claim.id.as_str();
    for restarted in [false, true] {
        let taken = bench.engine.create_snapshot("torn", id).await;
        let taken = taken.expect_err("held open");
        let request = CreateClaim {
            source: Some(ClaimSource::Claim(claim.id.clone())),
            ..request("clone")
        };
        let cloned = bench.engine.create_claim(request).await;
        for error in [taken, cloned.expect_err("held open")] {
            let said = message_of(&error);
            // Nothing runs, and nothing happens until the call is repeated.
            assert_eq!(code_of(&error), Code::FailedPrecondition, "{said}");
            assert!(
                said.contains("no longer mounted, but a process still holds files of it open"),
                "{restarted} {said}"
            );
        }
        let deleted = bench.engine.delete_claim(id).await;
        assert!(
            matches!(deleted, Err(Error::ClaimInUse { .. })),
            "{deleted:?}"
        );
        let staged = bench.stage(&claim).await;
        assert!(matches!(staged, Err(Error::HeldOpen(_))), "{staged:?}");
        bench.engine.reap().await.expect("reap");
    }
    held.write_all(b"late").expect("it is open");
    drop(held);
    let snapshot = bench.snapshot("whole", &claim).await;
    let restored = bench.restore("restored", &snapshot).await;
    assert_eq!(bench.read(&restored, "file").await.expect("file"), "late");
    bench.finish().await;
}

/// As docs/volumes.md says of it.
#[tokio::test(flavor = "multi_thread")]
async fn the_copy_backend_does_not_know_who_still_holds_a_claim() {
    let Some(bench) = Bench::new(COPY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    let target = bench.mount(&claim).await;
    let mut held = File::create(target.join("file")).expect("open");
    held.write_all(b"half").expect("it is open");
    bench.unmount(&claim).await;
    let snapshot = bench.snapshot("torn", &claim).await;
    held.write_all(b" and half").expect("it is still open");
    drop(held);
    let restored = bench.restore("restored", &snapshot).await;
    assert_eq!(bench.read(&restored, "file").await.expect("file"), "half");
    let whole = bench.read(&claim, "file").await.expect("file");
    assert_eq!(whole, "half and half");
    bench.finish().await;
}

/// A group promises one moment, which a copy that is made while pods write does not have.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_one_claim_is_not_copied_while_pods_write() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let copied = CreateClaim {
            parameters: ClaimParameters {
                live_clone: LiveClone::Copy,
                ..ClaimParameters::default()
            },
            ..request("claim")
        };
        let claim = bench.engine.create_claim(copied).await.expect("made");
        let target = bench.mount(&claim).await;
        fs::write(target.join("file"), "text").expect("written");
        let layers = bench.names_in("layers");
        let sources = [claim.id.to_string()];
        let taken = bench.engine.create_group("g", &sources).await;
        if ground == BTRFS {
            taken.expect("one moment");
        } else {
            let refused = matches!(&taken, Err(Error::Unsupported { .. }));
            assert!(refused, "{taken:?}");
            assert_eq!(bench.names_in("layers"), layers);
            bench.snapshot("alone", &claim).await;
        }
        bench.unmount(&claim).await;
        bench.finish().await;
    }
}

/// After a power cut a file may have its name and not its content; the content of a claim is not in
/// its record.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_without_content_is_remade() {
    for ground in ALL {
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let claim = bench.create("unrecorded").await;
        bench.write(&claim, "file", "text").await;
        let record = bench.config.pool.join("volumes").join(claim.id.as_str());
        // The record may be written after the answer of an unmount, and before the end of the
        // engine.
        let truncate = || {
            let mut file = File::options();
            let file = file.write(true).truncate(true);
            let record = file.open(record.join("claim.json"));
            drop(record.expect("it has a record"));
        };
        let bench = bench.restart_after(truncate).await;
        bench.assert_sound().await;
        assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");
        bench.finish().await;
    }
}

/// The index is written in place and synced, which commits no journal. Then a power cut undoes a
/// rename that nothing has made durable.
#[tokio::test(flavor = "multi_thread")]
async fn a_power_cut_brings_no_content_back_for_the_next_claim_of_that_name() {
    for fs in [Fs::Ext4, Fs::XfsReflink] {
        let Some(bench) = Bench::sized((BackendKind::Overlay, fs), 320 << 20).await else {
            return;
        };
        let assert_empty = |bench: &Bench, claim: &PersistentVolume, what: &str| {
            let cut = bench.lab.cut();
            let pool = cut.path().join("pool");
            let index = Index::read_only(&Dir::open(&pool).expect("open")).expect("read");
            let mut ids = index.claims.iter().map(|claim| &claim.id);
            assert!(ids.any(|id| *id == claim.id), "{what}: not durable");
            let left = pool.join("volumes").join(claim.id.as_str());
            assert!(!left.exists(), "{what} on {}", fs.name());
            assert!(cut.close().is_empty());
        };
        let claim = bench.create("claim").await;
        bench.write(&claim, "file", "secret").await;
        sync(&bench.config.pool);
        bench.delete(claim.id.as_str()).await;
        let again = bench.create("claim").await;
        assert_eq!(again.id, claim.id);
        assert_empty(&bench, &claim, "deleted");

        // As the rename of a deletion leaves it that failed.
        bench.delete(claim.id.as_str()).await;
        let content = bench.config.pool.join("volumes").join(claim.id.as_str());
        let bench = bench
            .restart_after(|| {
                fs::create_dir_all(content.join("top")).expect("its content");
                sync(&content);
            })
            .await;
        bench.create("claim").await;
        assert_empty(&bench, &claim, "found at a start");
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_that_was_cut_short_is_taken_back_and_one_that_was_indexed_is_finished() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    bench.write(&claim, "file", "text").await;
    let id = claim.id.as_str().to_owned();
    let volume = bench.config.pool.join("volumes").join(&id);
    let layer = bench
        .config
        .pool
        .join("layers")
        .join("0123456789abcdef0123456789abcdef");
    let marker = volume.join("freezing.0123456789abcdef0123456789abcdef");
    let mut bench = bench;
    for step in 0..4 {
        bench.engine.shutdown().await;
        fs::create_dir(&layer).expect("the layer");
        if step >= 1 {
            fs::create_dir(&marker).expect("the marker");
        }
        if step >= 2 {
            fs::rename(volume.join("top"), layer.join("fs")).expect("moved");
        }
        if step == 3 {
            // And so was taking it back.
            fs::rename(layer.join("fs"), volume.join("top")).expect("moved back");
        }
        bench = bench.restart().await;
        bench.assert_sound().await;
        assert!(!layer.exists() && !marker.exists(), "step {step}");
        assert_eq!(
            bench.read(&claim, "file").await.expect("file"),
            "text",
            "step {step}"
        );
    }
    let snapshot = bench.snapshot("s", &claim).await;
    bench.engine.shutdown().await;
    fs::create_dir(&volume).expect("as before it was cleared");
    fs::create_dir(volume.join("work.1")).expect("work");
    fs::create_dir(volume.join(format!("freezing.{}", snapshot.layers[0]))).expect("marker");
    let bench = bench.restart().await;
    assert!(!volume.exists());
    assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");

    // A merge has given another volume other layers since, and the snapshot still has this one.
    let other = bench.create("other").await;
    bench.engine.shutdown().await;
    let left = bench.config.pool.join("volumes").join(other.id.as_str());
    fs::create_dir(&left).expect("as before it was cleared");
    fs::create_dir(left.join(format!("freezing.{}", snapshot.layers[0]))).expect("marker");
    let bench = bench.restart().await;
    assert!(!left.exists());
    assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");

    // A claim that the index has no more, and one that was being made.
    bench.engine.shutdown().await;
    fs::create_dir_all(bench.config.pool.join("volumes/vol-gone/top")).expect("gone");
    fs::create_dir_all(bench.config.pool.join("incoming/half/top")).expect("half");
    let bench = bench.restart().await;
    bench.engine.reap().await.expect("reap");
    assert_eq!(bench.names_in("volumes"), [id]);
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_index_is_rebuilt_with_the_claims_that_have_directories() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let base = bench.create("base").await;
    bench.write(&base, "file", "text").await;
    let claim = bench.clone_of("claim", &base).await;
    bench.write(&claim, "mine", "mine").await;
    let pool = bench.config.pool.clone();
    let bench = bench
        .restart_after(|| {
            fs::write(pool.join("volumes/stray"), "").expect("a file that is none of ours");
            let rebuilt = Engine::rebuild_index(&pool).expect("made again");
            // The clone's directory tells of it. `base` was not mounted since: it shares its layer.
            assert_eq!((rebuilt.claims, rebuilt.nameless.as_slice()), (1, &[][..]));
            fs::remove_file(pool.join("index.redb.old")).expect("the old one");
        })
        .await;
    assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");
    assert_eq!(bench.read(&claim, "mine").await.expect("mine"), "mine");
    bench.finish().await;
}

/// Without layers, too, there is content that only the index names.
#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_is_lost_makes_no_rubbish_of_claims() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    bench.write(&claim, "file", "text").await;
    let pool = bench.config.pool.clone();
    let bench = bench
        .restart_after(|| {
            fs::remove_file(pool.join("index.redb")).expect("it is lost");
            let findings = Engine::check_offline(&pool).expect("check");
            assert_eq!(findings[0].kind, "missing-index");
            let torn = pool.join("volumes/torn");
            fs::create_dir(&torn).expect("mkdir");
            fs::write(torn.join("claim.json"), "{").expect("write");
            let preview = Engine::preview_index(&pool).expect("looked at");
            let rebuilt = Engine::rebuild_index(&pool).expect("made again");
            assert_eq!(preview, rebuilt);
            assert_eq!((rebuilt.claims, rebuilt.nameless.len()), (1, 0));
            assert_eq!(rebuilt.unreadable, [std::path::Path::new("torn")]);
        })
        .await;
    assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");

    let snapshot = bench.snapshot("snapshot", &claim).await;
    let bench = bench
        .restart_after(|| {
            fs::remove_file(pool.join("index.redb")).expect("it is lost");
            let preview = Engine::preview_index(&pool).expect("looked at");
            let rebuilt = Engine::rebuild_index(&pool).expect("made again");
            assert_eq!(preview, rebuilt);
            // Nothing else records the owner of the layer.
            assert_eq!((rebuilt.claims, rebuilt.nameless), (0, snapshot.layers));
        })
        .await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_does_not_open_what_it_would_make_rubbish_of() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    bench.write(&claim, "file", "text").await;
    let (config, kept) = (bench.config.clone(), bench.lab.path().join("kept.redb"));
    let index = config.pool.join("index.redb");
    bench.engine.shutdown().await;
    let lab = bench.lab;
    drop(bench.engine);
    fs::rename(&index, &kept).expect("it is lost");
    let refused = loop {
        match Engine::open(config.clone()).await {
            Err(error) if error.to_string().contains("in use by another process") => {}
            Err(error) => break error.to_string(),
            Ok(_) => panic!("it would make rubbish of the claim"),
        }
        tokio::task::yield_now().await;
    };
    assert!(refused.contains("check --rebuild"), "{refused}");
    fs::rename(&kept, &index).expect("it is found");
    let engine = crate::common::bench::open_again(&config).await;
    let bench = Bench {
        lab,
        engine,
        config,
    };
    assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_misses_a_layer_can_be_deleted_and_nothing_is_made_of_it() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let base = bench.create("base").await;
    bench.write(&base, "file", "text").await;
    let snapshot = bench.snapshot("snapshot", &base).await;
    let claim = bench.restore("claim", &snapshot).await;
    let layer = bench
        .config
        .pool
        .join(format!("layers/{}", snapshot.layers[0]));
    let away = bench.lab.path().join("away");
    let made_of = async |bench: &Bench, source| {
        let request = CreateClaim {
            source: Some(source),
            ..request("made of it")
        };
        bench.engine.create_claim(request).await.map(drop)
    };
    fs::rename(&layer, &away).expect("it is lost");
    for claim in [&claim, &base] {
        let id = claim.id.as_str();
        let refused = [
            made_of(&bench, ClaimSource::Claim(claim.id.clone())).await,
            made_of(&bench, ClaimSource::Snapshot(snapshot.id.clone())).await,
            bench.engine.create_snapshot("s", id).await.map(drop),
            bench
                .engine
                .create_group("g", &[id.to_owned()])
                .await
                .map(drop),
        ];
        for refused in refused {
            let lost =
                matches!(&refused, Err(Error::Lost { layer, .. }) if *layer == snapshot.layers[0]);
            assert!(lost, "{refused:?}");
        }
    }
    let bench = bench.restart().await;
    let refused = [
        bench.stage(&claim).await,
        made_of(&bench, ClaimSource::Claim(base.id.clone())).await,
    ];
    for refused in refused {
        let broken = matches!(&refused, Err(Error::ClaimInUse { .. }));
        assert!(broken, "{refused:?}");
    }
    let restored = made_of(&bench, ClaimSource::Snapshot(snapshot.id.clone())).await;
    assert!(matches!(restored, Err(Error::Lost { .. })), "{restored:?}");
    let short = MutableChange {
        size_limit: None,
        ttl: Some(Ttl::Seconds(1)),
    };
    let modified = bench.engine.modify_claim(claim.id.as_str(), short).await;
    let modified = modified.expect("its record is as good as ever");
    // It does not expire: the layer may come back.
    let expired = Timestamp(modified.last_used.0 + 10_000);
    bench.engine.set_time(expired);
    bench.engine.reap().await.expect("reap");
    for claim in [&claim, &base] {
        bench.engine.claim(claim.id.as_str()).expect("it stays");
        let deleted = bench.engine.delete_claim(claim.id.as_str()).await;
        deleted.expect("what cannot be used can be deleted");
    }
    let deleted = bench.engine.delete_snapshot(snapshot.id.as_str()).await;
    deleted.expect("the same");
    bench.finish().await;
}

/// The caller of a pod's volume chooses its id.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_does_not_take_the_place_of_a_pods_volume() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let (id, target) = (claim_id("claim"), bench.at("pod"));
    let publish = volume_request(&target, "ci", "pod", id.as_str(), &[]);
    bench.engine.publish(publish).await.expect("published");
    let made = bench.engine.create_claim(request("claim")).await;
    assert!(matches!(made, Err(Error::Exists { .. })), "{made:?}");
    let place = bench.config.pool.join("volumes").join(id.as_str());
    assert!(place.exists());
    let unpublished = bench.engine.unpublish(id.as_str(), &target).await;
    unpublished.expect("unpublished");
    bench.engine.settled().await;
    bench.create("claim").await;
    bench.finish().await;
}

/// Whether an answer is one that a race may bring.
fn may_be<T: std::fmt::Debug>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(
            Error::Busy(_)
            | Error::HeldOpen(_)
            | Error::NoSuchClaim(_)
            | Error::ClaimNotHere(_)
            | Error::NoSuchSnapshot(_)
            | Error::ClaimInUse { .. }
            | Error::Unsupported { .. }
            | Error::Target { .. },
        ) => None,
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn snapshots_race_writes_mounts_and_deletes() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let bench = std::sync::Arc::new(bench);
        for round in 0..12 {
            let claim = bench.create(&format!("claim {round}")).await;
            bench.write(&claim, "a", "same").await;
            bench.write(&claim, "b", "same").await;
            let snapshots = {
                let (bench, claim) = (bench.clone(), claim.clone());
                tokio::spawn(async move {
                    let mut taken = Vec::new();
                    for number in 0..12 {
                        let name = format!("{} {number}", claim.name);
                        taken.extend(may_be(
                            bench.engine.create_snapshot(&name, claim.id.as_str()).await,
                        ));
                    }
                    taken
                })
            };
            let pods = {
                let (bench, claim) = (bench.clone(), claim.clone());
                tokio::spawn(async move {
                    for _ in 0..6 {
                        if may_be(bench.stage(&claim).await).is_some() {
                            let path = bench.staging(&claim);
                            for file in ["a", "b"] {
                                fs::write(path.join(file), "also").expect("written");
                            }
                            while may_be(
                                bench
                                    .engine
                                    .unmount_claim(claim.id.as_str(), &path, true)
                                    .await,
                            )
                            .is_none()
                            {
                                tokio::time::sleep(Duration::from_millis(1)).await;
                            }
                        }
                    }
                })
            };
            let deletes = {
                let (bench, claim) = (bench.clone(), claim.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(u64::from(round * 3 % 20_u32))).await;
                    may_be(bench.engine.delete_claim(claim.id.as_str()).await);
                })
            };
            let taken = snapshots.await.expect("no panic");
            pods.await.expect("no panic");
            deletes.await.expect("no panic");
            for snapshot in taken.iter().take(3) {
                let restored = bench
                    .restore(&format!("of {}", snapshot.name), snapshot)
                    .await;
                assert!(
                    ["same", "also"]
                        .contains(&bench.read(&restored, "a").await.expect("a").as_str())
                );
                again(|| bench.engine.delete_claim(restored.id.as_str()))
                    .await
                    .expect("deleted");
            }
            for snapshot in taken {
                bench
                    .engine
                    .delete_snapshot(snapshot.id.as_str())
                    .await
                    .expect("deleted");
            }
        }
        let bench = std::sync::Arc::into_inner(bench).expect("the last reference");
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_said_so_and_what_is_there_stays_and_can_be_deleted() {
    let Some(bench) = Bench::sized(OVERLAY, 64 << 20).await else {
        return;
    };
    let claim = bench.create("claim").await;
    bench.write(&claim, "file", "text").await;
    let filler = bench.lab.path().join("filler");
    let mut file = File::create(&filler).expect("open");
    let block = vec![7_u8; 1 << 16];
    while file.write_all(&block).is_ok() {}
    let small = vec![7_u8; 512];
    while file.write_all(&small).is_ok() {}
    drop(file);
    let mut refused_at = 0;
    for number in 0..4000 {
        match bench
            .engine
            .create_claim(request(&format!("{number} {}", "x".repeat(2000))))
            .await
        {
            Ok(_) => {}
            Err(Error::Full(_)) => {
                refused_at = number;
                break;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let taken = bench.engine.create_snapshot("s", claim.id.as_str()).await;
    assert!(matches!(taken, Ok(_) | Err(Error::Full(_))), "{taken:?}");
    assert!(
        refused_at > 0,
        "a pool of 64 MiB has no room for that many names"
    );
    // Deleting needs no space that there is not.
    let some = bench.engine.claims(None, 5).items;
    for claim in some.iter().filter(|other| other.id != claim.id) {
        let deleted = bench.engine.delete_claim(claim.id.as_str()).await;
        assert!(
            matches!(deleted, Ok(()) | Err(Error::Full(_))),
            "{deleted:?}"
        );
    }
    fs::remove_file(&filler).expect("space again");
    let bench = bench.restart().await;
    bench.assert_sound().await;
    assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");
    let snapshot = bench.snapshot("s", &claim).await;
    assert_eq!(snapshot.layers.len(), 1);
    bench.finish().await;
}
