//! Names that are cleared in the whole cluster, and policies that change, in the middle of
//! something that brings content.

use std::fs;
use std::time::Duration;

use baggageclaim::engine::failpoint::Point;
use baggageclaim::engine::notice::{NotCommitted, Notice, What};
use baggageclaim::engine::{Error, Notices};
use baggageclaim::model::{Coverage, Fence, NamespacePolicy, Outcome, Policies, Rule};
use tokio::sync::mpsc::Receiver;

use super::common::bench::{Bench, eventually, soon};
use super::common::require_bench;
use super::held::{Held, archive_of, import, name};
use super::{TASK, my_turn};

async fn clear(bench: &Bench) {
    let fence = Fence {
        number: 7,
        previous: 0,
        id: 7,
        covers: Coverage::Name(name()),
        repeats: Vec::new(),
    };
    let applied = bench.engine.apply_fences(vec![fence]).await;
    assert!(applied.expect("it is applied"));
}

/// Why the writer's volume was not committed; `None`: it was.
async fn why_not(heard: &mut Receiver<Notice>) -> Option<NotCommitted> {
    loop {
        let notice = soon("a notice", heard.recv()).await.expect("it lives");
        match notice.what {
            _ if notice.pod.name != "writer" => {}
            What::NotCommitted { why, .. } => return Some(why),
            What::Committed { .. } => return None,
            _ => {}
        }
    }
}

/// Nothing has the name, now and after a restart, and the next commit gets it.
async fn is_clear(bench: Bench) {
    bench.quiet().await;
    let is_free = |bench: &Bench| bench.artifact("task-cache/k").is_none();
    assert!(is_free(&bench));
    bench.engine.reap().await.expect("reap");
    assert_eq!(bench.engine.artifacts(None).len(), 0);
    let bench = bench.restart().await;
    assert!(is_free(&bench));
    bench.assert_whole().await;
    bench.step("next", &TASK, |_| ()).await;
    assert!(!is_free(&bench));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seal_that_has_begun_is_given_up() {
    let _alone = my_turn().await;
    for point in [Point::SealLayerMade, Point::SealContentMoved] {
        let bench = require_bench!();
        bench.publish("writer", "writer", &TASK).await;
        bench.outcome("writer", Outcome::Succeeded).await;
        let held = Held::at(point);
        bench.unpublish("writer").await;
        held.comes().await;
        clear(&bench).await;
        held.goes_on();
        is_clear(bench).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seal_that_has_begun_follows_the_newer_policy() {
    let _alone = my_turn().await;
    for point in [Point::SealLayerMade, Point::SealContentMoved] {
        let (notices, mut heard) = Notices::channel(64);
        let bench = require_bench!(|config| config.notices = Some(notices));
        bench.publish("writer", "writer", &TASK).await;
        bench.outcome("writer", Outcome::Succeeded).await;
        let held = Held::at(point);
        bench.unpublish("writer").await;
        held.comes().await;
        let rule = Rule {
            names: vec!["task-cache/*".parse().expect("a pattern")],
            commit: Some(["another".to_owned()].into()),
            read: <_>::default(),
        };
        let policy = NamespacePolicy {
            rules: vec![rule],
            ..NamespacePolicy::default()
        };
        let policies = Policies::known([(name().tenant, policy)]);
        let change = |it: &mut Policies| *it = policies;
        bench.engine.change_policies(change).await;
        held.goes_on();
        let why = why_not(&mut heard).await;
        let expected = NotCommitted::NotAllowed { account: None };
        assert_eq!(why, Some(expected), "{point:?}");
        bench.quiet().await;
        assert!(bench.artifact("task-cache/k").is_none());
        bench.engine.reap().await.expect("reap");
        bench.finish().await;
    }
}

/// It can be forked, and the index does not have it yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_sealed_volume_that_is_not_durable_yet_loses_its_name_for_good() {
    let _alone = my_turn().await;
    for with_older in [false, true] {
        let (notices, mut heard) = Notices::channel(64);
        let bench = require_bench!(|config| config.notices = Some(notices));
        if with_older {
            bench.step("older", &TASK, |_| ()).await;
        }
        bench.publish("writer", "writer", &TASK).await;
        bench.outcome("writer", Outcome::Succeeded).await;
        let held = Held::at(Point::CommitSynced);
        bench.unpublish("writer").await;
        held.comes().await;
        let row = bench.artifact("task-cache/k").expect("it is visible");
        assert!(!row.durable);
        clear(&bench).await;
        assert!(bench.artifact("task-cache/k").is_none());
        held.goes_on();
        eventually("it is durable or gone", || {
            let rows = bench.engine.artifacts(None);
            rows.iter().all(|row| row.durable)
        })
        .await;
        assert_eq!(why_not(&mut heard).await, Some(NotCommitted::Cleared));
        is_clear(bench).await;
    }
}

/// The index has the fence, and memory does not yet: the content can still be forked.
#[tokio::test(flavor = "multi_thread")]
async fn a_fork_that_is_made_while_a_fence_is_applied_is_not_committed() {
    let _alone = my_turn().await;
    let bench = require_bench!();
    bench
        .step("first", &TASK, |at| {
            fs::write(at.join("f"), "first").expect("write");
        })
        .await;
    let held = Held::at(Point::FenceIndexed);
    let (applied, ()) = tokio::join!(clear(&bench), async {
        held.comes().await;
        bench.publish("fork", "fork", &TASK).await;
        held.goes_on();
    });
    let () = applied;
    assert!(bench.target("fork").join("f").exists());
    bench.outcome("fork", Outcome::Succeeded).await;
    bench.unpublish("fork").await;
    is_clear(bench).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_that_began_before_is_refused() {
    let _alone = my_turn().await;
    let bench = require_bench!();
    bench.step("first", &TASK, |_| ()).await;
    let archive = archive_of(&bench).await;
    let held = Held::at(Point::ImportPlaced);
    let (imported, ()) = tokio::join!(import(&bench, &archive), async {
        held.comes().await;
        clear(&bench).await;
        held.goes_on();
    });
    assert!(matches!(imported, Err(Error::Cleared(_))), "{imported:?}");
    assert!(bench.artifact("task-cache/k").is_none());
    let again = import(&bench, &archive)
        .await
        .expect("it is newer than the clear");
    assert!(again.named);
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destroy_waits_for_content_that_is_not_durable_yet() {
    let _alone = my_turn().await;
    let bench = require_bench!();
    bench.step("first", &TASK, |_| ()).await;
    let archive = archive_of(&bench).await;
    let name = name();
    let destroy = || bench.engine.destroy(&name.tenant, &name.reference);
    destroy().await.expect("nothing has the name now");
    let held = Held::at(Point::EntryShown);
    let (imported, destroyed) = tokio::join!(import(&bench, &archive), async {
        held.comes().await;
        let destroy = destroy();
        tokio::pin!(destroy);
        // Nothing tells that it waits. Without that it would be back at once.
        let early = tokio::time::timeout(Duration::from_millis(300), &mut destroy).await;
        assert!(early.is_err(), "{early:?}");
        held.goes_on();
        destroy.await
    });
    assert!(imported.expect("imported").named);
    destroyed.expect("destroyed");
    assert!(bench.artifact("task-cache/k").is_none());
    bench.finish().await;
}
