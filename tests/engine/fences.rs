//! Names that are cleared in the whole cluster: what a fence takes away, who commits no more, and
//! what is left of it after a restart.

use std::fs;

use baggageclaim::engine::notice::{NotCommitted, Notice, What};
use baggageclaim::engine::{Engine, Error, Notices, VolumeState};
use baggageclaim::model::{CacheKind, Coverage, Fence, Name, Outcome, Timestamp};
use baggageclaim::store::{Change, Index};
use baggageclaim::sys::Dir;
use tokio::sync::mpsc::Receiver;

use crate::common::bench::{Bench, Ground, eventually, soon};
use crate::common::require_bench;

const TASK: &[(&str, &str)] = &[("type", "task-cache"), ("key", "k")];
const OTHER: &[(&str, &str)] = &[("type", "task-cache"), ("key", "other")];
const RESOURCE: &[(&str, &str)] = &[("type", "resource-cache"), ("key", "k")];
const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o")];
const INPUT: &[(&str, &str)] = &[("type", "input"), ("from", "artifact/o")];

fn name(reference: &str) -> Name {
    Name {
        tenant: "ci".parse().expect("a label"),
        reference: reference.parse().expect("a reference"),
    }
}

fn fence(number: u64, previous: u64, covers: Coverage) -> Fence {
    Fence {
        number,
        previous,
        id: number,
        covers,
        repeats: Vec::new(),
    }
}

fn of_name(number: u64, previous: u64, reference: &str) -> Fence {
    fence(number, previous, Coverage::Name(name(reference)))
}

async fn apply(bench: &Bench, fences: Vec<Fence>) -> bool {
    let applied = bench.engine.apply_fences(fences).await;
    applied.expect("they are applied")
}

/// A step that writes its own name into the volume, and succeeds.
async fn commit(bench: &Bench, volume: &str, attributes: &[(&str, &str)]) {
    let write = |at: &std::path::Path| fs::write(at.join("f"), volume).expect("write");
    bench.step(volume, attributes, write).await;
}

async fn seen(bench: &Bench, volume: &str, attributes: &[(&str, &str)]) -> Option<String> {
    bench.look(volume, attributes, "f").await
}

async fn not_committed(heard: &mut Receiver<Notice>, pod: &str) -> NotCommitted {
    loop {
        let notice = soon("a notice", heard.recv()).await.expect("it lives");
        if let What::NotCommitted { why, .. } = notice.what
            && notice.pod.name == pod
        {
            return why;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_takes_names_away_and_content_from_before_it_never_returns() {
    for ground in Ground::ALL {
        let (notices, mut heard) = Notices::channel(64);
        let bench = require_bench!(on ground, |config| config.notices = Some(notices));
        commit(&bench, "first", TASK).await;
        commit(&bench, "kept", OTHER).await;
        bench.publish("runs", "runs", TASK).await;
        bench.publish("ended", "ended", TASK).await;
        // Its outcome is not known yet.
        bench.unpublish("ended").await;
        eventually("its outcome is awaited", || {
            let row = bench.row("ended");
            row.is_some_and(|row| row.state == VolumeState::AwaitingOutcome)
        })
        .await;
        assert!(apply(&bench, vec![of_name(10, 0, "task-cache/k")]).await);
        assert!(bench.artifact("task-cache/k").is_none());
        assert!(bench.artifact("task-cache/other").is_some());
        assert_eq!(bench.engine.fences().newest(), 10);
        assert_eq!(seen(&bench, "empty", TASK).await, None);
        // Applied twice it is applied once.
        assert!(apply(&bench, vec![of_name(10, 0, "task-cache/k")]).await);

        // The pod still has its view, and ends after a restart.
        let text = fs::read_to_string(bench.target("runs").join("f"));
        assert_eq!(text.ok().as_deref(), Some("first"));
        let bench = bench.restart().await;
        assert_eq!(bench.engine.fences().newest(), 10);
        for volume in ["ended", "runs"] {
            bench.outcome(volume, Outcome::Succeeded).await;
            if volume == "runs" {
                bench.unpublish(volume).await;
            }
            let why = not_committed(&mut heard, volume).await;
            assert_eq!(why, NotCommitted::Cleared, "{}", ground.name());
        }
        bench.quiet().await;
        assert!(bench.artifact("task-cache/k").is_none());

        // What begins now is committed, and other names go on as before.
        commit(&bench, "second", TASK).await;
        assert_eq!(seen(&bench, "look", TASK).await.as_deref(), Some("second"));
        let seen = seen(&bench, "look-at-other", OTHER).await;
        assert_eq!(seen.as_deref(), Some("kept"));
        bench.engine.reap().await.expect("reap");
        assert_eq!(bench.engine.artifacts(None).len(), 2, "the old one is gone");
        bench.assert_whole().await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_covers_one_kind_and_a_namespace_covers_all_of_it() {
    let bench = require_bench!();
    for (volume, attributes) in [("a", TASK), ("b", RESOURCE), ("c", OUTPUT), ("d", OTHER)] {
        commit(&bench, volume, attributes).await;
    }
    let mut elsewhere = bench.request("elsewhere", "elsewhere", TASK);
    elsewhere.tenant = "other".parse().expect("a label");
    bench.engine.publish(elsewhere).await.expect("published");
    bench.outcome("elsewhere", Outcome::Succeeded).await;
    bench.unpublish("elsewhere").await;
    bench.quiet().await;
    let left = |bench: &Bench| bench.engine.artifacts(None).len();
    assert_eq!(left(&bench), 5);

    let prefix = Coverage::Prefix {
        tenant: "ci".parse().expect("a label"),
        kind: CacheKind::Task,
        prefix: "k".into(),
    };
    assert!(apply(&bench, vec![fence(5, 0, prefix)]).await);
    bench.engine.reap().await.expect("reap");
    assert!(bench.artifact("resource-cache/k").is_some());
    assert_eq!(left(&bench), 4);

    let all = Coverage::Namespace("ci".parse().expect("a label"));
    assert!(apply(&bench, vec![fence(9, 5, all)]).await);
    bench.engine.reap().await.expect("reap");
    assert_eq!(left(&bench), 1, "the other namespace keeps its own");
    let tenant = bench.engine.artifacts(None).remove(0).tenant;
    assert_eq!(tenant.as_str(), "other");
    bench.finish().await;
}

/// A pod that waits for an output does not wait for a writer whose content cannot come any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_cleared_output_is_neither_waited_for_nor_kept_by_its_readers() {
    let bench = require_bench!();
    commit(&bench, "made", OUTPUT).await;
    let (reader, _) = bench.publish("reader", "reader", INPUT).await;
    bench.publish("makes", "makes", OUTPUT).await;
    assert!(apply(&bench, vec![of_name(3, 0, "artifact/o")]).await);
    // The writer runs, and what it makes is not committed.
    let missed = bench.try_publish("late", "late", INPUT).await;
    assert!(matches!(missed, Err(Error::NoSuchContent(_))), "{missed:?}");
    let text = fs::read_to_string(reader.join("f")).ok();
    assert_eq!(text.as_deref(), Some("made"), "a reader keeps its view");
    // The next writer is waited for.
    bench.publish("again", "again", OUTPUT).await;
    let input = bench.try_publish("waiting", "waiting", INPUT);
    let made = async {
        fs::write(bench.target("again").join("f"), "again").expect("write");
        bench.outcome("again", Outcome::Succeeded).await;
        bench.unpublish("again").await;
    };
    let (published, ()) = tokio::join!(input, made);
    published.expect("it came");
    let text = fs::read_to_string(bench.target("waiting").join("f")).ok();
    assert_eq!(text.as_deref(), Some("again"));
    for volume in ["reader", "makes", "waiting"] {
        bench.outcome(volume, Outcome::Succeeded).await;
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    let seen = seen(&bench, "look", INPUT).await;
    assert_eq!(seen.as_deref(), Some("again"));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_missed_a_fence_drops_all_names_and_commits_no_volume() {
    let (notices, mut heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    assert!(apply(&bench, vec![of_name(5, 0, "task-cache/none")]).await);
    commit(&bench, "first", TASK).await;
    bench.publish("runs", "runs", OTHER).await;
    // The one before it is deleted, and this node has never seen it.
    assert!(apply(&bench, vec![of_name(20, 12, "task-cache/none")]).await);
    assert!(bench.artifact("task-cache/k").is_none());
    let bench = bench.restart().await;
    bench.outcome("runs", Outcome::Succeeded).await;
    bench.unpublish("runs").await;
    let why = not_committed(&mut heard, "runs").await;
    assert_eq!(why, NotCommitted::Cleared);
    commit(&bench, "second", OTHER).await;
    assert_eq!(seen(&bench, "look", OTHER).await.as_deref(), Some("second"));

    // A chain that was set back: the controller has to see what this node has applied.
    assert!(!apply(&bench, vec![of_name(15, 12, "task-cache/other")]).await);
    assert_eq!(
        seen(&bench, "again", OTHER).await.as_deref(),
        Some("second")
    );
    // Those before it count.
    let fences = vec![
        of_name(25, 20, "task-cache/other"),
        of_name(8, 5, "task-cache/k"),
    ];
    assert!(!apply(&bench, fences).await);
    assert_eq!(seen(&bench, "gone", OTHER).await, None);
    assert_eq!(bench.engine.fences().newest(), 25);
    bench.finish().await;
}

/// Its first pods may start before the controller has told it what was cleared.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_pool_has_missed_nothing() {
    let bench = require_bench!();
    bench.publish("first", "first", TASK).await;
    bench.publish("other", "other", OTHER).await;
    assert!(apply(&bench, vec![of_name(20, 12, "task-cache/other")]).await);
    for volume in ["first", "other"] {
        bench.outcome(volume, Outcome::Succeeded).await;
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    assert!(bench.artifact("task-cache/k").is_some());
    assert!(bench.artifact("task-cache/other").is_none());
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_fences_are_gone_but_not_their_numbers() {
    let bench = require_bench!();
    let fences = vec![
        of_name(5, 0, "task-cache/k"),
        of_name(9, 5, "task-cache/other"),
    ];
    assert!(apply(&bench, fences).await);
    bench.engine.forget_fences(5).await.expect("forgotten");
    // No node forgets what it has not applied.
    for bench in [bench.restart().await] {
        let fences = bench.engine.fences();
        assert_eq!((fences.forgotten(), fences.newest()), (5, 9));
        assert_eq!(fences.all().count(), 1);
        bench.engine.forget_fences(100).await.expect("forgotten");
        let bench = bench.restart().await;
        let fences = bench.engine.fences();
        assert_eq!((fences.forgotten(), fences.newest()), (9, 9));
        assert_eq!(bench.engine.covering(&name("task-cache/other")), 0);
        bench.finish().await;
    }
}

/// A pod that began before a clear may end after the clear is forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn a_fence_is_not_forgotten_while_it_covers_a_volume() {
    let bench = require_bench!();
    bench.publish("writer", "writer", TASK).await;
    let fences = vec![
        of_name(5, 0, "task-cache/k"),
        of_name(9, 5, "task-cache/other"),
    ];
    assert!(apply(&bench, fences).await);
    bench.engine.forget_fences(5).await.expect("not yet");
    let bench = bench.restart().await;
    assert_eq!(bench.engine.covering(&name("task-cache/k")), 5);
    bench.outcome("writer", Outcome::Succeeded).await;
    bench.unpublish("writer").await;
    bench.quiet().await;
    assert!(bench.artifact("task-cache/k").is_none());
    bench.engine.forget_fences(5).await.expect("forgotten");
    assert_eq!(bench.engine.covering(&name("task-cache/k")), 0);
    bench.finish().await;
}

/// An older version of the driver ran on the pool in between. It knows no fences.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_older_version_committed_after_a_clear_is_gone_at_the_next_start() {
    let bench = require_bench!();
    let (_, published) = bench.publish("reader", "reader", OUTPUT).await;
    assert!(!published.already);
    commit(&bench, "old", TASK).await;
    let old = bench.artifact("task-cache/k").expect("it is there").id;
    bench.publish("fork", "fork", TASK).await;
    assert!(apply(&bench, vec![of_name(7, 0, "task-cache/k")]).await);
    let bench = bench
        .restart_after(|pool| {
            let root = Dir::open(pool).expect("open");
            let (index, contents) = Index::open(&root).expect("open");
            assert_eq!(contents.fences.newest(), 7);
            let put = [Change::PutName(name("task-cache/k"), old)];
            index.commit(&put).expect("written");
            index.close();
        })
        .await;
    assert!(bench.artifact("task-cache/k").is_none());
    // Nor does a rebuilt index bring it back.
    let bench = bench
        .restart_after(|pool| drop(Engine::rebuild_index(pool).expect("rebuilt")))
        .await;
    assert!(bench.artifact("task-cache/k").is_none());
    assert_eq!(bench.engine.fences().newest(), 7);
    // Nor one that is rebuilt after a rebuild that was interrupted between its renames.
    let bench = bench
        .restart_after(|pool| {
            let (index, old) = (pool.join("index.redb"), pool.join("index.redb.old"));
            fs::rename(index, old).expect("renamed");
            Engine::rebuild_index(pool).expect("rebuilt");
        })
        .await;
    assert!(bench.artifact("task-cache/k").is_none());
    assert_eq!(bench.engine.fences().newest(), 7);
    for volume in ["reader", "fork"] {
        bench.outcome(volume, Outcome::Succeeded).await;
        bench.unpublish(volume).await;
    }
    bench.quiet().await;
    assert!(bench.artifact("task-cache/k").is_none());
    assert!(bench.engine.now() > Timestamp(0));
    bench.finish().await;
}
