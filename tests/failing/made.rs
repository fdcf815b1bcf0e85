//! Clones, snapshots and groups of claims whose index commit is in doubt. The engine changes
//! nothing more, and the next start finds them whole or not at all.

use std::io::{Seek as _, Write as _};

use baggageclaim::engine::Result;
use baggageclaim::engine::claims::Page;
use baggageclaim::model::SnapshotId;
use baggageclaim::server::{code_of, may_go_on};

use super::held::Held;
use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Clone,
    Snapshot,
    Group,
}

const EACH: [What; 3] = [What::Clone, What::Snapshot, What::Group];

/// Asks for it; tells what the index has then, and last what is deleted to delete all of it.
async fn ask(pods: &Pods, what: What, source: &PersistentVolume) -> Result<Vec<Change>> {
    // As for `delete`.
    bench::again(|| ask_once(pods, what, source)).await
}

async fn ask_once(pods: &Pods, what: What, source: &PersistentVolume) -> Result<Vec<Change>> {
    let id = source.id.as_str();
    Ok(match what {
        What::Clone => {
            let clone = CreateClaim {
                source: Some(ClaimSource::Claim(source.id.clone())),
                ..request("made")
            };
            vec![Change::PutClaim(pods.engine.create_claim(clone).await?)]
        }
        What::Snapshot => {
            let snapshot = pods.engine.create_snapshot("made", id).await?;
            vec![Change::PutSnapshot(snapshot)]
        }
        What::Group => group(pods, &[source]).await?,
    })
}

async fn group(pods: &Pods, sources: &[&PersistentVolume]) -> Result<Vec<Change>> {
    let ids: Vec<String> = sources.iter().map(|claim| claim.id.to_string()).collect();
    let (group, snapshots) = pods.engine.create_group("made", &ids).await?;
    let snapshots = snapshots.into_iter().map(Change::PutSnapshot);
    Ok(snapshots.chain([Change::PutGroup(group)]).collect())
}

/// Deletes it. A process that another test has just started may hold a volume open for a moment.
async fn delete(pods: &Pods, made: &[Change]) -> Result<()> {
    bench::again(|| delete_once(pods, made)).await
}

async fn delete_once(pods: &Pods, made: &[Change]) -> Result<()> {
    match made.last() {
        Some(Change::PutClaim(claim)) => pods.engine.delete_claim(claim.id.as_str()).await,
        Some(Change::PutSnapshot(one)) => pods.engine.delete_snapshot(one.id.as_str()).await,
        Some(Change::PutGroup(group)) => pods.engine.delete_group(group.id.as_str()).await,
        other => panic!("{other:?} is not made"),
    }
}

fn removed(made: &[Change]) -> Vec<Change> {
    let removed = made.iter().map(|change| match change {
        Change::PutClaim(claim) => Change::RemoveClaim(claim.id.clone()),
        Change::PutSnapshot(snapshot) => Change::RemoveSnapshot(snapshot.id.clone()),
        Change::PutGroup(group) => Change::RemoveGroup(group.id.clone()),
        other => panic!("{other:?} is not made"),
    });
    removed.collect()
}

fn snapshots(pods: &Pods, id: Option<&SnapshotId>) -> Result<Page<Snapshot>> {
    let filter = SnapshotFilter {
        id: id.map(ToString::to_string),
        source: None,
    };
    pods.engine.snapshots(&filter, None, 9)
}

async fn restore(pods: &Pods, snapshot: &Snapshot) -> Result<PersistentVolume> {
    let restore = CreateClaim {
        source: Some(ClaimSource::Snapshot(snapshot.id.clone())),
        ..request("restored")
    };
    pods.engine.create_claim(restore).await
}

/// It changes nothing, and says why; what is mounted stays so, and is unmounted; and it is to be
/// restarted when its index can be opened again.
async fn assert_degraded(pods: &Pods, made: &[Change], mounted: &PersistentVolume) {
    let engine = &pods.engine;
    let second = pods.publish_request(mounted, "second");
    let refused = [
        engine.create_claim(request("other")).await.map(drop),
        engine.takes_writes().await,
        engine.reap().await.map(drop),
        engine.check().await.map(drop),
        delete(pods, made).await,
        engine.mount_claim(second).await,
    ];
    for refused in refused {
        assert!(matches!(&refused, Err(Error::Degraded(_))), "{refused:?}");
    }
    // As kubelet asks for it again after a restart of its own.
    pods.stage(mounted).await.expect("it is staged");
    let again = pods.publish_request(mounted, mounted.id.as_str());
    engine.mount_claim(again).await.expect("it is published");
    pods.unmount(mounted).await;
    let restart = engine.needs_restart();
    tokio::pin!(restart);
    assert!(futures_util::poll!(restart.as_mut()).is_pending());
}

/// The part of a transaction that a failed disk has, after the engine requested a restart and got
/// it.
async fn restarted(pods: Pods, broken: Broken, wrote: Wrote, changes: &[Change]) -> Pods {
    broken.heals();
    let restart = tokio::time::timeout(NEVER, pods.engine.needs_restart()).await;
    restart.expect("the index can be opened again");
    let pool = pods.config.pool.clone();
    let between = || {
        if wrote == Wrote::All {
            has_written(&pool, changes);
        }
    };
    pods.restart_after(between).await
}

/// All of it is there, and as it must be; or nothing of it is.
async fn assert_there(pods: &Pods, made: &[Change], there: bool) {
    for change in made {
        match change {
            Change::PutClaim(claim) => {
                assert_eq!(has(pods, claim), there);
                if there {
                    assert_eq!(pods.read(claim, "file").await.expect("file"), "text");
                }
            }
            Change::PutSnapshot(snapshot) => {
                let found = snapshots(pods, Some(&snapshot.id)).expect("a page");
                assert_eq!(found.items.len(), usize::from(there));
                if there {
                    let restored = restore(pods, snapshot).await.expect("restored");
                    assert_eq!(pods.read(&restored, "file").await.expect("file"), "text");
                    pods.delete(restored.id.as_str()).await;
                }
            }
            Change::PutGroup(group) => {
                let found = pods.engine.group(group.id.as_str());
                assert_eq!(found.is_ok(), there, "{found:?}");
            }
            other => panic!("{other:?} is not made"),
        }
    }
}

/// A claim that is its stack of layers: nothing of it moves when something is made of it. And no
/// chore is left for which the index would be written meanwhile.
async fn frozen(pods: &Pods, name: &str) -> PersistentVolume {
    let claim = pods.create(name).await;
    pods.write(&claim, "file", "text").await;
    pods.snapshot(&format!("of {name}"), &claim).await;
    pods.engine.reap().await.expect("reap");
    claim
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_index_may_have_is_there_or_not_after_a_restart_and_made_or_deleted_again() {
    let _mine = my_turn().await;
    for (wrote, what) in EITHER
        .into_iter()
        .flat_map(|wrote| EACH.map(|what| (wrote, what)))
    {
        for deletes in [false, true] {
            let (disk, pods) = match pods().await {
                Ok(made) => made,
                Err(reason) => return common::skip(&reason),
            };
            let source = frozen(&pods, "source").await;
            let mounted = pods.create("mounted").await;
            pods.mount(&mounted).await;
            let made = ask(&pods, what, &source).await.expect("made");
            if !deletes {
                delete(&pods, &made).await.expect("deleted");
            }
            let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
            let (failed, changes) = if deletes {
                (delete(&pods, &made).await, removed(&made))
            } else {
                (ask(&pods, what, &source).await.map(drop), made.clone())
            };
            let error = failed.expect_err("the index fails");
            assert!(matches!(error, Error::Index(_)), "{error}");
            // A final error would make the caller forget what may be there after the restart.
            assert!(may_go_on(code_of(&error)), "{error}");
            assert_degraded(&pods, &made, &mounted).await;

            let pods = restarted(pods, broken, wrote, &changes).await;
            let there = deletes == (wrote == Wrote::Nothing);
            assert_there(&pods, &made, there).await;
            if there {
                delete(&pods, &made).await.expect("deleted");
            } else {
                ask(&pods, what, &source).await.expect("made");
            }
            assert_there(&pods, &made, !there).await;
            pods.finish().await;
            closed(disk);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_moved_for_something_that_the_index_has_not_is_back_after_a_restart() {
    let _mine = my_turn().await;
    for what in EACH {
        let (disk, pods) = match pods().await {
            Ok(made) => made,
            Err(reason) => return common::skip(&reason),
        };
        let source = frozen(&pods, "source").await;
        let mounted = pods.create("mounted").await;
        pods.mount(&mounted).await;
        let made = ask(&pods, what, &source).await.expect("made");
        delete(&pods, &made).await.expect("deleted");
        pods.write(&source, "file", "more").await;
        let fails = index_fails_at(Point::FreezeSynced, &disk, &pods.config.pool);
        let error = ask(&pods, what, &source).await;
        let error = error.expect_err("the index fails");
        assert!(matches!(error, Error::Index(_)), "{error}");
        assert_degraded(&pods, &made, &mounted).await;
        let layers = unconfirmed(&pods.config.pool);
        assert_eq!(layers.len(), 1, "it does not say what is not known");
        let broken = fails.try_recv().expect("there it failed");
        let pods = restarted(pods, broken, Wrote::Nothing, &[]).await;
        assert_there(&pods, &made, false).await;
        assert_eq!(pods.read(&source, "file").await.expect("file"), "more");
        pods.finish().await;
        closed(disk);
    }
}

/// The snapshot of another volume hears of it, after the content of this one has moved.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_during_which_the_disk_loses_a_write_is_taken_back() {
    let _mine = my_turn().await;
    let (disk, pods) = match pods().await {
        Ok(made) => made,
        Err(reason) => return common::skip(&reason),
    };
    let (first, second) = (pods.create("first").await, pods.create("second").await);
    for claim in [&first, &second] {
        pods.write(claim, "file", "text").await;
    }
    let path = pods.lab.path().join("big");
    let mut file = fs::File::create_new(&path).expect("create");
    file.write_all(&vec![1; 1 << 20]).expect("write");
    rustix::fs::syncfs(&file).expect("all is well yet");
    let held = Held::at(Point::FreezeContentMoved);
    let (engine, id) = (pods.engine.clone(), first.id.to_string());
    let taken =
        tokio::spawn(async move { bench::again(|| engine.create_snapshot("s", &id)).await });
    held.comes().await;
    let broken = disk.breaks_at(&path);
    file.rewind().expect("seek");
    let written = file.write_all(&vec![2; 1 << 20]);
    written.expect("the page cache takes it");
    let other = bench::again(|| pods.engine.create_snapshot("t", second.id.as_str())).await;
    other.expect_err("the disk fails");
    broken.works_again();
    held.goes_on();
    let taken = taken.await.expect("no panic");
    taken.expect_err("its content may have lost bytes");
    assert_eq!(pods.read(&first, "file").await.expect("file"), "text");
    drop(file);
    pods.finish().await;
    closed(disk);
}
