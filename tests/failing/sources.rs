//! Sources that vanish between check and use: a claim is made from a snapshot or claim that is
//! being deleted. The new claim is complete or refused, and nothing unowned stays.

use std::sync::mpsc::Receiver;

use baggageclaim::engine::Result;
use bench::{BTRFS, COPY, again};
use tokio::runtime::Handle;

use super::*;

const GROUNDS: [bench::Ground; 3] = [OVERLAY, BTRFS, COPY];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Snapshot,
    Claim,
}

/// Something to make a claim of, that alone holds a file with this text.
async fn source(pods: &Pods, kind: Kind, text: &str) -> ClaimSource {
    let claim = pods.create(&format!("source {text}")).await;
    pods.write(&claim, "file", text).await;
    if kind == Kind::Claim {
        return ClaimSource::Claim(claim.id);
    }
    let snapshot = pods.snapshot(&format!("snapshot {text}"), &claim).await;
    let deleted = again(|| pods.engine.delete_claim(claim.id.as_str()));
    deleted.await.expect("deleted");
    ClaimSource::Snapshot(snapshot.id)
}

async fn delete(engine: Engine, source: ClaimSource) -> Result<()> {
    match source {
        ClaimSource::Claim(id) => engine.delete_claim(id.as_str()).await,
        ClaimSource::Snapshot(id) => engine.delete_snapshot(id.as_str()).await,
    }
}

async fn make(engine: Engine, source: ClaimSource, name: String) -> Result<PersistentVolume> {
    let wanted = CreateClaim {
        source: Some(source),
        ..request(&name)
    };
    engine.create_claim(wanted).await
}

/// Has something happen at the next visit of a point, and waited for there; where its result is.
fn meanwhile<T: Send + 'static>(
    point: Point,
    act: impl Future<Output = T> + Send + 'static,
) -> Receiver<T> {
    let (sender, result) = mpsc::channel();
    let runtime = Handle::current();
    failpoint::at(point, 1, move || {
        sender
            .send(runtime.block_on(act))
            .expect("it is waited for");
    });
    result
}

fn is_absent<T>(made: &Result<T>) -> bool {
    matches!(made, Err(Error::NoSuchSnapshot(_) | Error::NoSuchClaim(_)))
}

/// That a claim holds what its source did, now, after garbage collection, and for the next driver.
async fn assert_whole(pods: Pods, claim: &PersistentVolume, text: &str) -> Pods {
    pods.engine.reap().await.expect("reap");
    assert_eq!(pods.read(claim, "file").await.expect("file"), text);
    let pods = pods.restart().await;
    assert_eq!(pods.read(claim, "file").await.expect("file"), text);
    pods
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_deleted_while_a_claim_is_made_of_it_is_there_for_that() {
    let _mine = my_turn().await;
    for ground in GROUNDS {
        bench::say(ground);
        let Some(mut pods) = Pods::new(ground).await else {
            return;
        };
        for (kind, point) in [
            (Kind::Snapshot, Point::ClaimIndexed),
            (Kind::Claim, Point::FreezeLayerMade),
            (Kind::Claim, Point::FreezeContentMoved),
            (Kind::Claim, Point::FreezeSynced),
            (Kind::Claim, Point::FreezeIndexed),
        ] {
            let text = point.name();
            let from = source(&pods, kind, text).await;
            let gone = {
                let (engine, from) = (pods.engine.clone(), from.clone());
                meanwhile(point, async move {
                    let deleted = delete(engine.clone(), from).await;
                    (deleted, engine.reap().await.map(drop))
                })
            };
            let made = again(|| make(pods.engine.clone(), from.clone(), text.to_owned()));
            let made = made.await.expect(text);
            let (deleted, reaped) = gone.recv().expect("it came there");
            reaped.expect("reap");
            match kind {
                Kind::Snapshot => deleted.expect("it is deleted at once"),
                // It is being read.
                Kind::Claim => assert!(matches!(deleted, Err(Error::Busy(_))), "{deleted:?}"),
            }
            again(|| delete(pods.engine.clone(), from.clone()))
                .await
                .expect("deleted");
            pods = assert_whole(pods, &made, text).await;
        }
        pods.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_made_of_a_source_whose_deletion_has_begun() {
    let _mine = my_turn().await;
    for ground in GROUNDS {
        bench::say(ground);
        let Some(pods) = Pods::new(ground).await else {
            return;
        };
        for (kind, point) in [
            (Kind::Snapshot, Point::SnapshotUnindexed),
            (Kind::Snapshot, Point::SnapshotTrashed),
            (Kind::Claim, Point::ClaimUnindexed),
            (Kind::Claim, Point::ClaimTrashed),
        ] {
            let text = point.name();
            let from = source(&pods, kind, text).await;
            let (engine, source) = (pods.engine.clone(), from.clone());
            let making = async move {
                let make = || make(engine.clone(), source.clone(), text.to_owned());
                again(make).await
            };
            let made = meanwhile(point, making);
            again(|| delete(pods.engine.clone(), from.clone()))
                .await
                .expect("deleted");
            let made = made.recv().expect("it came there");
            assert!(is_absent(&made), "{text}: {made:?}");
            assert!(!pods.engine.has_claim_named(text), "{text}");
        }
        pods.finish().await;
    }
}

/// Lets others run so often.
async fn yields(count: usize) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

/// Wherever they meet, where there is no point too.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_claim_that_races_the_deletion_of_its_source_is_whole_or_not_made() {
    const ROUNDS: usize = 20;

    let _mine = my_turn().await;
    for ground in GROUNDS {
        bench::say(ground);
        let Some(pods) = Pods::new(ground).await else {
            return;
        };
        for kind in [Kind::Snapshot, Kind::Claim] {
            let (mut whole, mut absent) = (0, 0);
            for round in 0..ROUNDS {
                let text = format!("{kind:?} {round}");
                let from = source(&pods, kind, &text).await;
                let (engine, at) = (pods.engine.clone(), from.clone());
                // One of them later, and more so from round to round: before all of the other, and
                // after.
                let later = round * round;
                let [first, second] = if round % 2 == 0 {
                    [later, 0]
                } else {
                    [0, later]
                };
                let deleting = tokio::spawn(async move {
                    yields(first).await;
                    again(|| delete(engine.clone(), at.clone())).await
                });
                yields(second).await;
                let made = again(|| make(pods.engine.clone(), from.clone(), text.clone())).await;
                deleting.await.expect("no panic").expect("deleted");
                match made {
                    Ok(claim) => {
                        pods.engine.reap().await.expect("reap");
                        assert_eq!(pods.read(&claim, "file").await.expect("file"), text);
                        whole += 1;
                    }
                    made => {
                        assert!(is_absent(&made), "{text}: {made:?}");
                        assert!(!pods.engine.has_claim_named(&text), "{text}");
                        absent += 1;
                    }
                }
            }
            eprintln!("{kind:?}: {whole} whole, {absent} not made");
        }
        pods.finish().await;
    }
}
