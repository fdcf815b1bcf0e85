//! Earlier generations of a name: they are there while volumes are forks of them, and one can be
//! committed once more.

use std::fs;
use std::time::Duration;

use baggageclaim::engine::{ArtifactRow, Error, RollbackOrder};
use baggageclaim::model::{
    ArtifactId, Clear, Coverage, Name, Outcome, Reference, Tenant, Timestamp,
};

use crate::common::bench::{Bench, Ground};
use crate::common::require_bench;

const TASK: &[(&str, &str)] = &[("type", "task-cache"), ("key", "k")];
const FORK: &[(&str, &str)] = &[("type", "task-cache"), ("key", "k"), ("commit", "never")];

/// A pod commits what it writes.
async fn commit(bench: &Bench, text: &str) -> ArtifactId {
    let (target, _) = bench.publish(text, text, TASK).await;
    fs::write(target.join("file"), text).expect("write");
    bench.outcome(text, Outcome::Succeeded).await;
    bench.unpublish(text).await;
    bench.quiet().await;
    bench.artifact("task-cache/k").expect("it is there").id
}

fn generations(bench: &Bench) -> Vec<ArtifactRow> {
    bench.engine.artifacts(None)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_earlier_generation_that_is_still_there_is_committed_once_more() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let name: Reference = "task-cache/k".parse().expect("a reference");
        let tenant = bench.request("v", "v", TASK).tenant;
        let named = |reference: &Reference| Name {
            tenant: tenant.clone(),
            reference: reference.clone(),
        };
        let first = commit(&bench, "one").await;
        // A long step keeps it.
        bench.publish("long", "long", FORK).await;
        let second = commit(&bench, "two").await;
        bench.engine.reap().await.expect("reap");
        let rows = generations(&bench);
        assert_eq!(rows.len(), 2, "{}", ground.name());
        assert!(rows.iter().all(|row| row.reference == name));
        let earlier = rows.iter().find(|row| row.id == first).expect("in use");
        assert_eq!(earlier.name, None);

        let made = bench.engine.rollback(named(&name), first, None, None).await;
        let made = made.expect("rolled back");
        let row = bench.artifact("task-cache/k").expect("there");
        assert!(row.id == made && made != first && row.durable);
        assert_eq!(row.made_by, earlier.made_by);
        assert!(row.created > earlier.created);
        let read = bench.look("v1", FORK, "file").await;
        assert_eq!(read.as_deref(), Some("one"), "{}", ground.name());

        // Nothing depends on the generation that was there before.
        bench.outcome("long", Outcome::Succeeded).await;
        bench.unpublish("long").await;
        bench.quiet().await;
        bench.engine.reap().await.expect("reap");
        let left: Vec<ArtifactId> = generations(&bench).iter().map(|row| row.id).collect();
        assert_eq!(left, [made], "{}", ground.name());
        let bench = bench.restart().await;
        let read = bench.look("v2", FORK, "file").await;
        assert_eq!(read.as_deref(), Some("one"), "{}", ground.name());

        // What is gone, and what is another name's, is refused.
        let other: Reference = "task-cache/other".parse().expect("a reference");
        for (name, id) in [(&name, first), (&name, second), (&other, made)] {
            let refused = bench.engine.rollback(named(name), id, None, None).await;
            assert!(matches!(refused, Err(Error::NoSuchName(_))), "{refused:?}");
        }
        // A later commit is newer.
        commit(&bench, "three").await;
        let read = bench.look("v3", FORK, "file").await;
        assert_eq!(read.as_deref(), Some("three"));
        bench.finish().await;
    }
}

fn name_of(bench: &Bench) -> Name {
    let tenant: Tenant = bench.request("v", "v", TASK).tenant;
    let reference = "task-cache/k".parse().expect("a reference");
    Name { tenant, reference }
}

/// An order of the controller, as it comes some time after all that is here.
fn order(bench: &Bench, id: u128) -> RollbackOrder {
    RollbackOrder {
        id: ArtifactId::from_bits(id),
        created: Timestamp(bench.engine.now().0 + 1),
        by: "jane".to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_of_the_controller_has_one_effect_and_brings_back_nothing_that_was_cleared() {
    let bench = require_bench!();
    let name = name_of(&bench);
    let roll_back = async |to, order: &RollbackOrder| {
        let order = Some(order.clone());
        bench.engine.rollback(name.clone(), to, None, order).await
    };
    let first = commit(&bench, "one").await;
    bench.publish("long", "long", FORK).await;
    commit(&bench, "two").await;
    let ordered = order(&bench, 1);
    let made = roll_back(first, &ordered).await.expect("rolled back");
    assert_eq!(made, ordered.id);
    let row = bench.artifact("task-cache/k").expect("there");
    assert_eq!((row.id, row.created), (ordered.id, ordered.created));
    // Repeated, it changes nothing.
    assert_eq!(roll_back(first, &ordered).await.expect("repeated"), made);
    let count = generations(&bench).len();
    assert_eq!(bench.look("v1", FORK, "file").await.as_deref(), Some("one"));

    // Content that was committed after the order stays.
    let late = order(&bench, 2);
    let newer = commit(&bench, "three").await;
    let refused = roll_back(first, &late).await;
    assert!(matches!(refused, Err(Error::NameTaken(_))), "{refused:?}");
    let row = bench.artifact("task-cache/k").expect("there");
    assert_eq!(row.id, newer);
    bench.engine.reap().await.expect("reap");
    assert!(
        generations(&bench).len() <= count,
        "a refused order leaves nothing"
    );

    // What a clear has taken the name of stays without one, for the controller.
    let clear = Clear {
        covers: Coverage::Name(name.clone()),
        repeats: Vec::new(),
    };
    let fence = bench.engine.fences().next(clear, bench.engine.now(), 0, 7);
    let applied = bench.engine.apply_fences(vec![fence]).await;
    assert!(applied.expect("applied"));
    assert!(bench.artifact("task-cache/k").is_none());
    let refused = roll_back(first, &order(&bench, 3)).await;
    assert!(matches!(refused, Err(Error::Cleared(_))), "{refused:?}");
    assert!(bench.artifact("task-cache/k").is_none());
    // What was committed since is no longer cleared.
    let fourth = commit(&bench, "four").await;
    let made = roll_back(fourth, &order(&bench, 4)).await;
    made.expect("rolled back");
    assert_eq!(
        bench.look("v2", FORK, "file").await.as_deref(),
        Some("four")
    );
    bench.outcome("long", Outcome::Failed).await;
    bench.unpublish("long").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_comes_twice_at_once_is_done_for_both() {
    let bench = require_bench!();
    let name = name_of(&bench);
    let first = commit(&bench, "one").await;
    bench.publish("long", "long", FORK).await;
    commit(&bench, "two").await;
    for id in 1..=20 {
        let ordered = order(&bench, id);
        let roll_back = || {
            let order = Some(ordered.clone());
            bench.engine.rollback(name.clone(), first, None, order)
        };
        let (one, other) = tokio::join!(roll_back(), roll_back());
        assert_eq!(one.expect("rolled back"), ordered.id);
        assert_eq!(other.expect("repeated"), ordered.id);
        let row = bench.artifact("task-cache/k").expect("there");
        assert_eq!((row.id, row.created), (ordered.id, ordered.created));
    }
    bench.outcome("long", Outcome::Failed).await;
    bench.unpublish("long").await;
    bench.finish().await;
}

#[tokio::test]
async fn an_order_for_a_time_far_ahead_does_not_move_the_clock() {
    let bench = require_bench!();
    let first = commit(&bench, "one").await;
    let mut ordered = order(&bench, 1);
    ordered.created = ordered.created.after(Duration::from_hours(1));
    let made = bench
        .engine
        .rollback(name_of(&bench), first, None, Some(ordered.clone()))
        .await;
    assert_eq!(made.expect("rolled back"), ordered.id);
    assert!(bench.engine.now() < ordered.created);
    bench.finish().await;
}
