//! Earlier generations of a name: they are there while volumes are forks of them, and one can be
//! committed once more.

use std::fs;

use baggageclaim::engine::{ArtifactRow, Error};
use baggageclaim::model::{ArtifactId, Outcome, Reference};

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

        let made = bench.engine.rollback(&tenant, &name, first, None).await;
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
            let refused = bench.engine.rollback(&tenant, name, id, None).await;
            assert!(matches!(refused, Err(Error::NoSuchName(_))), "{refused:?}");
        }
        // A later commit is newer.
        commit(&bench, "three").await;
        let read = bench.look("v3", FORK, "file").await;
        assert_eq!(read.as_deref(), Some("three"));
        bench.finish().await;
    }
}
