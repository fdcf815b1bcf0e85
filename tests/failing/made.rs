//! Clones, snapshots and groups of claims whose index commit is in doubt. They are not listed, and
//! can be requested again or deleted, whatever the index turns out to have.

use baggageclaim::engine::Result;
use baggageclaim::engine::claims::Page;
use baggageclaim::model::SnapshotId;

use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Clone,
    Snapshot,
    Group,
}

const EACH: [What; 3] = [What::Clone, What::Snapshot, What::Group];

/// Asks for it; tells what the index has then, and last what is deleted to delete all of it.
async fn ask(pods: &Pods, what: What, source: &Claim) -> Result<Vec<Change>> {
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

async fn group(pods: &Pods, sources: &[&Claim]) -> Result<Vec<Change>> {
    let ids: Vec<String> = sources.iter().map(|claim| claim.id.to_string()).collect();
    let (group, snapshots) = pods.engine.create_group("made", &ids).await?;
    let snapshots = snapshots.into_iter().map(Change::PutSnapshot);
    Ok(snapshots.chain([Change::PutGroup(group)]).collect())
}

async fn delete(pods: &Pods, made: &[Change]) -> Result<()> {
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

async fn restore(pods: &Pods, snapshot: &Snapshot) -> Result<Claim> {
    let restore = CreateClaim {
        source: Some(ClaimSource::Snapshot(snapshot.id.clone())),
        ..request("restored")
    };
    pods.engine.create_claim(restore).await
}

/// Nobody sees it, nobody uses it, and it is not said to be gone.
async fn assert_unsure(pods: &Pods, made: &[Change]) {
    for change in made {
        match change {
            Change::PutClaim(claim) => {
                let staged = pods.stage(claim).await;
                let refused = matches!(&staged, Err(Error::ClaimInUse { .. }));
                assert!(refused, "{staged:?}");
                let id = claim.id.as_str();
                let listed = pods.engine.claims(None, 9).items;
                assert!(listed.iter().all(|other| other.id != claim.id));
                let seen = [
                    pods.engine.claim(id).map(drop),
                    pods.engine.claim_use(id).await.map(drop),
                    // A change that changes nothing.
                    pods.engine.expand_claim(id, 0, None).await.map(drop),
                ];
                for seen in seen {
                    assert!(matches!(&seen, Err(Error::Unsure(_))), "{seen:?}");
                }
            }
            Change::PutSnapshot(snapshot) => {
                let listed = snapshots(pods, None).expect("a page").items;
                assert!(listed.iter().all(|other| other.id != snapshot.id));
                let got = snapshots(pods, Some(&snapshot.id));
                assert!(matches!(&got, Err(Error::Unsure(_))), "{got:?}");
                let restored = restore(pods, snapshot).await;
                assert!(matches!(&restored, Err(Error::Unsure(_))), "{restored:?}");
                if snapshot.group.is_some() {
                    let alone = pods.engine.delete_snapshot(snapshot.id.as_str()).await;
                    assert!(matches!(&alone, Err(Error::OfGroup { .. })), "{alone:?}");
                }
            }
            Change::PutGroup(group) => {
                let got = pods.engine.group(group.id.as_str());
                assert!(matches!(&got, Err(Error::Unsure(_))), "{got:?}");
            }
            other => panic!("{other:?} is not made"),
        }
    }
    delete(pods, made).await.expect_err("the index fails");
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
                    let deleted = pods.engine.delete_claim(restored.id.as_str()).await;
                    deleted.expect("deleted");
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

/// A claim that is its stack of layers: nothing of it moves when something is made of it. And no chore is left for which the index
/// would be written meanwhile.
async fn frozen(pods: &Pods, name: &str) -> Claim {
    let claim = pods.create(name).await;
    pods.write(&claim, "file", "text").await;
    pods.snapshot(&format!("of {name}"), &claim).await;
    pods.engine.reap().await.expect("reap");
    claim
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_of_a_claim_and_nobody_knows_of_can_be_made_again_or_deleted() {
    let _mine = my_turn().await;
    for (wrote, what) in EITHER
        .into_iter()
        .flat_map(|wrote| EACH.map(|what| (wrote, what)))
    {
        for again in [true, false] {
            let (disk, pods) = match pods().await {
                Ok(made) => made,
                Err(reason) => return common::skip(&reason),
            };
            let source = frozen(&pods, "source").await;
            let made = ask(&pods, what, &source).await.expect("made");
            delete(&pods, &made).await.expect("deleted");
            let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
            let error = ask(&pods, what, &source)
                .await
                .expect_err("the index fails");
            assert!(matches!(error, Error::Index(_)), "{error}");
            assert_unsure(&pods, &made).await;
            broken.heals();
            if wrote == Wrote::All {
                has_written(&pods.config.pool, &made);
            }
            if again {
                ask(&pods, what, &source).await.expect("made");
            } else {
                delete(&pods, &made).await.expect("deleted");
            }
            assert_there(&pods, &made, again).await;
            let pods = pods.restart().await;
            assert_there(&pods, &made, again).await;
            pods.finish().await;
            closed(disk);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_of_what_has_moved_waits_for_the_next_start_or_is_deleted() {
    let _mine = my_turn().await;
    for what in EACH {
        let (disk, pods) = match pods().await {
            Ok(made) => made,
            Err(reason) => return common::skip(&reason),
        };
        let source = frozen(&pods, "source").await;
        let made = ask(&pods, what, &source).await.expect("made");
        delete(&pods, &made).await.expect("deleted");
        pods.write(&source, "file", "more").await;
        let fails = index_fails_at(Point::FreezeSynced, &disk, &pods.config.pool);
        // What a process of another test holds open is asked for again.
        let error = bench::again(|| ask(&pods, what, &source)).await;
        let error = error.expect_err("the index fails");
        assert!(matches!(error, Error::Index(_)), "{error}");
        assert_unsure(&pods, &made).await;
        fails.try_recv().expect("there it failed").heals();
        pods.engine.reap().await.expect("reap");
        let layers = unconfirmed(&pods.config.pool);
        assert_eq!(layers.len(), 1, "it does not say what nobody knows");
        let again = ask(&pods, what, &source).await;
        assert!(matches!(&again, Err(Error::ClaimInUse { .. })), "{again:?}");
        delete(&pods, &made).await.expect("deleted");
        assert_there(&pods, &made, false).await;
        let pods = pods.restart().await;
        assert_there(&pods, &made, false).await;
        assert_eq!(pods.read(&source, "file").await.expect("file"), "more");
        pods.finish().await;
        closed(disk);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_may_be_there_is_replaced_by_one_of_other_sources() {
    let _mine = my_turn().await;
    let (disk, pods) = match pods().await {
        Ok(made) => made,
        Err(reason) => return common::skip(&reason),
    };
    let one = frozen(&pods, "one").await;
    let other = frozen(&pods, "other").await;
    let both = group(&pods, &[&one, &other]).await.expect("taken");
    delete(&pods, &both).await.expect("deleted");
    for sources in [&[&one, &other][..], &[&one]] {
        let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
        let taken = group(&pods, sources).await;
        taken.expect_err("the index fails");
        broken.heals();
        // It has the first, and not the one that was to take its place.
        if sources.len() > 1 {
            has_written(&pods.config.pool, &both);
        }
        pods.create(&format!("after {}", sources.len())).await;
    }
    let made = group(&pods, &[&one]).await.expect("taken");
    let pods = pods.restart().await;
    assert_there(&pods, &made, true).await;
    let members = snapshots(&pods, None).expect("a page").items;
    let members = members.iter().filter(|snapshot| snapshot.group.is_some());
    assert_eq!(members.count(), 1, "no other one stays that no group has");
    pods.finish().await;
    closed(disk);
}

/// What is done after a deletion of which nobody knows the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Restart,
    TakeAgain,
    DeleteAgain,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_whose_deletion_nobody_knows_the_end_of_is_shown_to_nobody() {
    let _mine = my_turn().await;
    let thens = [Then::Restart, Then::TakeAgain, Then::DeleteAgain];
    for (wrote, then) in EITHER
        .into_iter()
        .flat_map(|wrote| thens.map(|then| (wrote, then)))
    {
        for what in [What::Snapshot, What::Group] {
            let (disk, pods) = match pods().await {
                Ok(made) => made,
                Err(reason) => return common::skip(&reason),
            };
            let source = frozen(&pods, "source").await;
            let made = ask(&pods, what, &source).await.expect("made");
            // It alone has these layers.
            for snapshot in snapshots(&pods, None).expect("a page").items {
                if snapshot.name == "of source" {
                    let id = snapshot.id.as_str();
                    pods.engine.delete_snapshot(id).await.expect("deleted");
                }
            }
            if then != Then::TakeAgain {
                let id = source.id.as_str();
                pods.engine.delete_claim(id).await.expect("deleted");
            }
            let broken = disk.breaks_at(&pods.config.pool.join("index.redb"));
            let error = delete(&pods, &made).await.expect_err("the index fails");
            assert!(matches!(error, Error::Index(_)), "{error}");
            assert_unsure(&pods, &made).await;
            drop(pods.engine.reap().await);
            broken.heals();
            if wrote == Wrote::All {
                has_written(&pods.config.pool, &removed(&made));
            }
            let there = match then {
                Then::Restart => wrote == Wrote::Nothing,
                Then::TakeAgain => true,
                Then::DeleteAgain => false,
            };
            match then {
                Then::Restart => {}
                Then::TakeAgain => drop(ask(&pods, what, &source).await.expect("taken")),
                Then::DeleteAgain => delete(&pods, &made).await.expect("deleted"),
            }
            let pods = pods.restart().await;
            assert_there(&pods, &made, there).await;
            pods.finish().await;
            closed(disk);
        }
    }
}
