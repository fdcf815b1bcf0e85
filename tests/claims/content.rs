//! The content of clones, snapshots, chains and groups.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use baggageclaim::engine::Error;
use baggageclaim::engine::claims::CreateClaim;
use baggageclaim::model::{ClaimParameters, ClaimSource, LiveClone, PersistentVolume};

use super::bench::{ALL, BTRFS, Bench, COPY, OVERLAY, again, request, say};
use super::common::bench::eventually;
use super::common::{Snapshot, assert_same, tree};

#[tokio::test(flavor = "multi_thread")]
async fn clones_and_snapshots_show_one_moment_and_nothing_later() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let source = bench.create("source").await;
        let first = bench
            .inside(&source, |path| {
                tree::fill(path, 60, 10, 300);
                if ground.0 != COPY.0 {
                    tree::odd(&path.join("d0000"));
                }
                Snapshot::of(path)
            })
            .await;
        let snapshot = bench.snapshot("first", &source).await;
        assert_eq!(
            snapshot,
            bench.snapshot("first", &source).await,
            "asked again"
        );
        let second = bench
            .inside(&source, |path| {
                assert_same(&first, &Snapshot::of(path));
                for entry in fs::read_dir(path.join("d0001")).expect("read") {
                    fs::remove_file(entry.expect("an entry").path()).expect("removed");
                }
                fs::remove_dir(path.join("d0001")).expect("removed");
                fs::write(path.join("new"), "new").expect("written");
                Snapshot::of(path)
            })
            .await;
        let clone = bench.clone_of("clone", &source).await;
        let restored = bench.restore("restored", &snapshot).await;
        bench.write(&clone, "mine", "clone").await;
        bench.write(&restored, "mine", "restored").await;
        bench
            .inside(&source, |path| assert_same(&second, &Snapshot::of(path)))
            .await;
        bench
            .inside(&clone, |path| {
                fs::remove_file(path.join("mine")).expect("there");
                assert_same(
                    &second.clone().without_root(),
                    &Snapshot::of(path).without_root(),
                );
            })
            .await;

        // Copies of it stay whole when it is deleted, and through a restart.
        bench
            .engine
            .delete_claim(source.id.as_str())
            .await
            .expect("deleted");
        let bench = bench.restart().await;
        bench.engine.reap().await.expect("reap");
        let again = bench.restore("again", &snapshot).await;
        bench
            .inside(&again, |path| assert_same(&first, &Snapshot::of(path)))
            .await;
        bench
            .engine
            .delete_snapshot(snapshot.id.as_str())
            .await
            .expect("deleted");
        bench.engine.reap().await.expect("reap");
        bench
            .inside(&again, |path| assert_same(&first, &Snapshot::of(path)))
            .await;
        assert_eq!(
            bench.read(&restored, "mine").await.expect("mine"),
            "restored"
        );
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_touched_since_is_snapshotted_without_anything_on_disk() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let claim = bench.create("claim").await;
    let empty = bench.snapshot("empty", &claim).await;
    assert!(empty.layers.is_empty() && bench.names_in("volumes").is_empty());
    bench.write(&claim, "file", "text").await;
    let one = bench.snapshot("one", &claim).await;
    assert_eq!(one.layers.len(), 1);
    // The rest of its directory is deleted after the answer, and the next call for the claim waits
    // for that.
    let two = bench.snapshot("two", &claim).await;
    assert!(
        bench.names_in("volumes").is_empty(),
        "its top is a layer now"
    );
    assert_eq!(two.layers, one.layers);
    let clone = bench.clone_of("clone", &claim).await;
    assert_eq!(clone.layers, one.layers);
    assert_eq!(bench.names_in("layers").len(), 1);
    let restored = bench.restore("restored", &empty).await;
    assert!(bench.read(&restored, "file").await.is_err());
    assert_eq!(bench.read(&clone, "file").await.expect("file"), "text");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_chain_of_clones_is_flattened_and_keeps_what_was_deleted_deleted() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let mut claim = bench.create("link 0").await;
        for link in 1..=40 {
            bench
                .inside(&claim, |path| {
                    fs::write(path.join(format!("{link}")), "here").expect("written");
                    if link > 5 {
                        fs::remove_file(path.join(format!("{}", link - 5))).expect("removed");
                    }
                })
                .await;
            let next = bench.clone_of(&format!("link {link}"), &claim).await;
            bench
                .engine
                .delete_claim(claim.id.as_str())
                .await
                .expect("deleted");
            claim = next;
            if link % 9 == 0 {
                bench.engine.reap().await.expect("reap");
            }
        }
        bench.engine.reap().await.expect("reap");
        let now = bench.engine.claim(claim.id.as_str()).expect("there");
        assert!(now.layers.len() <= 16, "{} layers", now.layers.len());
        let bench = bench.restart().await;
        let names = |path: &Path| {
            let entries = fs::read_dir(path).expect("read");
            let mut names: Vec<u32> = entries
                .map(|entry| {
                    entry
                        .expect("entry")
                        .file_name()
                        .to_str()
                        .expect("text")
                        .parse()
                        .expect("number")
                })
                .collect();
            names.sort_unstable();
            names
        };
        assert_eq!(bench.inside(&claim, names).await, [36, 37, 38, 39, 40]);
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_claim_is_cloned_exactly_or_on_demand_or_not_at_all() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let strict = bench.create("strict").await;
        let parameters = ClaimParameters {
            live_clone: LiveClone::Copy,
            ..ClaimParameters::default()
        };
        let asked = CreateClaim {
            parameters,
            ..request("willing")
        };
        let willing = bench.engine.create_claim(asked).await.expect("made");
        for claim in [&strict, &willing] {
            bench.write(claim, "below", "below").await;
            bench.snapshot(&format!("under {}", claim.id), claim).await;
            let target = bench.mount(claim).await;
            fs::remove_file(target.join("below")).expect("removed");
            fs::write(target.join("above"), "above").expect("written");
        }
        let taken = bench
            .engine
            .create_snapshot("strict, live", strict.id.as_str())
            .await;
        let live = if ground == BTRFS {
            vec![
                taken.expect("exact"),
                bench.snapshot("willing, live", &willing).await,
            ]
        } else {
            let error = taken.expect_err("refused");
            assert!(
                matches!(error, Error::Unsupported { .. })
                    && error.to_string().contains("liveClone: copy"),
                "{error}"
            );
            vec![bench.snapshot("willing, live", &willing).await]
        };
        for claim in [&strict, &willing] {
            fs::write(bench.at(claim.id.as_str()).join("above"), "later").expect("written");
        }
        for snapshot in &live {
            let restored = bench
                .restore(&format!("of {}", snapshot.id), snapshot)
                .await;
            assert_eq!(
                bench.read(&restored, "above").await.expect("above"),
                "above"
            );
            assert!(
                bench.read(&restored, "below").await.is_err(),
                "it was deleted"
            );
        }
        for claim in [&strict, &willing] {
            bench.unmount(claim).await;
            assert_eq!(bench.read(claim, "above").await.expect("above"), "later");
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn a_group_is_one_instant_or_nothing() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let mut claims = Vec::new();
        for name in ["a", "b", "c"] {
            let claim = bench.create(name).await;
            bench.write(&claim, "name", name).await;
            claims.push(claim);
        }
        let mut sources: Vec<String> = claims.iter().map(|claim| claim.id.to_string()).collect();
        let (group, snapshots) = bench
            .engine
            .create_group("g", &sources)
            .await
            .expect("taken");
        assert_eq!(group.snapshots.len(), 3);
        sources.rotate_left(1);
        let with_one_twice = [&sources[..], &sources[..1]].concat();
        for sources in [&sources, &with_one_twice] {
            let again = bench.engine.create_group("g", sources).await;
            let again = again.expect("the same");
            assert_eq!(again, (group.clone(), snapshots.clone()));
        }
        let fewer = bench.engine.create_group("g", &sources[1..]).await;
        assert!(matches!(fewer, Err(Error::Exists { .. })), "{fewer:?}");
        let alone = bench.engine.delete_snapshot(snapshots[0].id.as_str()).await;
        assert!(matches!(alone, Err(Error::OfGroup { .. })), "{alone:?}");

        // The last one fails: the first two are as they were.
        for claim in &claims {
            bench.write(claim, "more", "more").await;
        }
        let layers = bench.names_in("layers");
        let mut with_a_stranger = sources.clone();
        with_a_stranger.push("vol-nobody".to_owned());
        let failed = bench.engine.create_group("h", &with_a_stranger).await;
        assert!(matches!(failed, Err(Error::NoSuchClaim(_))), "{failed:?}");
        if ground != BTRFS {
            let last = claims
                .iter()
                .find(|claim| claim.id.as_str() == sources[2])
                .expect("it");
            bench.mount(last).await;
            let failed = bench.engine.create_group("h", &sources).await;
            assert!(
                matches!(failed, Err(Error::Unsupported { .. })),
                "{failed:?}"
            );
            bench.unmount(last).await;
        }
        assert_eq!(bench.names_in("layers"), layers, "taken back");
        bench.assert_sound().await;
        for claim in &claims {
            assert_eq!(bench.read(claim, "more").await.expect("more"), "more");
        }

        let bench = bench.restart().await;
        assert_eq!(
            bench.engine.group(group.id.as_str()).expect("there"),
            (group.clone(), snapshots.clone())
        );
        for (snapshot, claim) in snapshots.iter().zip(&claims) {
            let restored = bench.restore(&format!("of {}", claim.name), snapshot).await;
            assert_eq!(
                bench.read(&restored, "name").await.expect("name"),
                claim.name
            );
            assert!(bench.read(&restored, "more").await.is_err());
        }
        bench
            .engine
            .delete_group(group.id.as_str())
            .await
            .expect("deleted");
        bench
            .engine
            .delete_group(group.id.as_str())
            .await
            .expect("deleted already");
        assert!(matches!(
            bench.engine.group(group.id.as_str()),
            Err(Error::NoSuchSnapshot(_))
        ));
        bench.finish().await;
    }
}

/// A pod that replaces `a` and then `b` by rising numbers, until it is dropped.
struct Writer {
    /// The former content of both.
    both: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(at: PathBuf) -> Self {
        let (both, stop) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (done, told) = (both.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for number in 1.. {
                if told.load(Ordering::SeqCst) {
                    return;
                }
                for file in ["a", "b"] {
                    let new = at.join("new");
                    fs::write(&new, number.to_string()).expect("written");
                    fs::rename(new, at.join(file)).expect("replaced");
                }
                done.store(number, Ordering::SeqCst);
            }
        });
        Self {
            both,
            stop,
            thread: Some(thread),
        }
    }

    /// Waits until it has written more.
    async fn goes_on(&self) {
        let now = self.both.load(Ordering::SeqCst);
        let further = || self.both.load(Ordering::SeqCst) > now + 1;
        eventually("the pod writes", further).await;
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // A panic was printed where it happened.
            let _ended = thread.join();
        }
    }
}

/// Which moment of a [`Writer`] a claim shows: both files of one number, or the first of the next
/// one.
async fn moment_in(bench: &Bench, claim: &PersistentVolume) -> u64 {
    let number = |path: &Path, file: &str| -> u64 {
        let text = fs::read_to_string(path.join(file)).expect(file);
        text.parse().expect("a number")
    };
    let seen = bench.inside(claim, |path| (number(path, "a"), number(path, "b")));
    let (a, b) = seen.await;
    assert!(a == b || a == b + 1, "{}: torn: {a} and {b}", claim.name);
    a
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_of_a_btrfs_in_which_a_pod_writes_is_one_moment_of_it() {
    let Some(bench) = Bench::new(BTRFS).await else {
        return;
    };
    let claim = bench.create("claim").await;
    let writer = Writer::start(bench.mount(&claim).await);
    let mut made = Vec::new();
    for number in 0..10 {
        writer.goes_on().await;
        let snapshot = bench.snapshot(&format!("s{number}"), &claim).await;
        made.push(bench.restore(&format!("of s{number}"), &snapshot).await);
        writer.goes_on().await;
        made.push(bench.clone_of(&format!("c{number}"), &claim).await);
    }
    drop(writer);
    let mut last = 0;
    for claim in &made {
        let moment = moment_in(&bench, claim).await;
        assert!(moment > last, "{}: of {moment} after {last}", claim.name);
        last = moment;
    }
    bench.unmount(&claim).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_on_btrfs_has_one_moment_of_one_claim_that_is_mounted_and_none_of_two() {
    let Some(bench) = Bench::new(BTRFS).await else {
        return;
    };
    let busy = bench.create("busy").await;
    let calm = bench.create("calm").await;
    bench.write(&calm, "name", "calm").await;
    let sources = [busy.id.to_string(), calm.id.to_string()];
    let writer = Writer::start(bench.mount(&busy).await);
    for number in 0..5 {
        writer.goes_on().await;
        let name = format!("g{number}");
        let taken = again(|| bench.engine.create_group(&name, &sources)).await;
        let (_, snapshots) = taken.expect("one is mounted");
        for snapshot in snapshots {
            let name = format!("{number} of {}", snapshot.source);
            let restored = bench.restore(&name, &snapshot).await;
            if snapshot.source == busy.id {
                moment_in(&bench, &restored).await;
            } else {
                let text = bench.read(&restored, "name").await;
                assert_eq!(text.expect("name"), "calm");
            }
        }
    }
    let layers = bench.names_in("layers");
    bench.mount(&calm).await;
    let refused = again(|| bench.engine.create_group("two", &sources)).await;
    assert!(
        matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("one moment")),
        "{refused:?}"
    );
    assert_eq!(bench.names_in("layers"), layers, "nothing was begun");
    drop(writer);
    for claim in [&busy, &calm] {
        bench.unmount(claim).await;
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_that_are_not_there_are_said_to_be_missing() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let nobody = "vol-nobody".parse().expect("id");
    let mut asked = request("clone");
    asked.source = Some(ClaimSource::Claim(nobody));
    let made = bench.engine.create_claim(asked.clone()).await;
    assert!(matches!(made, Err(Error::NoSuchClaim(_))), "{made:?}");
    asked.source = Some(ClaimSource::Snapshot("snap-nobody".parse().expect("id")));
    let made = bench.engine.create_claim(asked).await;
    assert!(matches!(made, Err(Error::NoSuchSnapshot(_))), "{made:?}");
    for id in ["vol-nobody", "", "/", "snap-\u{fc}"] {
        let taken = bench.engine.create_snapshot("s", id).await;
        assert!(matches!(taken, Err(Error::NoSuchClaim(_))), "{taken:?}");
        bench
            .engine
            .delete_claim(id)
            .await
            .expect("deleted already");
        bench
            .engine
            .delete_snapshot(id)
            .await
            .expect("deleted already");
        bench
            .engine
            .delete_group(id)
            .await
            .expect("deleted already");
        bench
            .engine
            .detach_claim(id, None)
            .await
            .expect("detached already");
    }
    bench.finish().await;
}
