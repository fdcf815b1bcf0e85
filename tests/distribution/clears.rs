//! What leaves a node, and what comes back: cleared names, refused commits, `share: never`,
//! tenants.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::engine::Error;
use baggageclaim::engine::notice::What;
use baggageclaim::model::Outcome;
use baggageclaim::shared::NameState;

use crate::common::bench::eventually;
use crate::failing::{Fault, Op};
use crate::nodes::{
    INPUT, Node, OUTPUT, RESOURCE, Shared, TASK, reference, require, tenant, text, two_nodes, write,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_began_before_a_clear_brings_nothing_back() {
    let (tier, mut a, b) = two_nodes!();
    a.share("old", &TASK, "poisoned").await;
    assert_eq!(b.sees("look", &TASK).await, text("poisoned"));
    // One step runs on each node while the name is cleared; one began with an empty volume.
    a.publish("running-a", &TASK).await;
    b.publish("running-b", &TASK).await;
    a.publish("output", &OUTPUT).await;
    for name in ["task-cache/go", "artifact/built"] {
        let cleared = b.distribution.clear(&tenant("ci"), &reference(name)).await;
        assert!(cleared.expect("clear") > 0);
    }
    // This node learns it from the tier, before and after its step ends.
    assert_eq!(a.sees("after-clear", &TASK).await, None);
    for (node, volume) in [(&a, "running-a"), (&b, "running-b"), (&a, "output")] {
        write(&node.bench.target(volume), "poisoned");
        node.end(volume, Outcome::Succeeded).await;
        node.shared().await;
    }
    assert_eq!(
        tier.record("task-cache/go").expect("it stays").state,
        NameState::Cleared
    );
    assert_eq!(
        tier.record("artifact/built").expect("it stays").state,
        NameState::Cleared
    );
    for node in [&a, &b] {
        assert!(
            node.bench.artifact("task-cache/go").is_none(),
            "it is gone here, too"
        );
        assert!(node.bench.artifact("artifact/built").is_none());
    }
    assert_eq!(a.distribution.metrics().uploads_refused, 2);
    let told = a.heard();
    let refused = |what: &&What| matches!(what, What::NotShared { .. });
    assert_eq!(told.iter().filter(refused).count(), 2, "{told:?}");
    // An ordinary commit after it is not refused.
    a.share("new", &TASK, "clean").await;
    a.share("new-output", &OUTPUT, "built again").await;
    assert_eq!(b.sees("look-2", &TASK).await, text("clean"));
    assert_eq!(b.sees("look-3", &INPUT).await, text("built again"));
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_key_with_a_star_skips_what_was_cleared_and_gets_newer_commits_of_its_key() {
    let (_tier, a, b) = two_nodes!();
    let main = ["main-1", "main-2", "main-3"].map(|key| [("type", "task-cache"), ("key", key)]);
    for (number, attributes) in main.iter().enumerate() {
        a.share(&format!("made-{number}"), attributes, attributes[1].1)
            .await;
    }
    let new = [TASK[0], TASK[1], ("restoreKeys", "main-*")];
    // The tier is asked for whole keys: this node has none that begins so.
    assert_eq!(b.sees("none", &new).await, None);
    for (number, attributes) in main.iter().enumerate() {
        let seen = b.sees(&format!("copy-{number}"), attributes).await;
        assert_eq!(seen, text(attributes[1].1));
    }
    assert_eq!(b.sees("newest", &new).await, text("main-3"));
    // A newer commit of that very key is fetched, as for the key itself.
    a.share("again", &main[2], "newer").await;
    assert_eq!(b.sees("newer", &new).await, text("newer"));
    for name in ["task-cache/main-3", "task-cache/main-2"] {
        let cleared = a.distribution.clear(&tenant("ci"), &reference(name)).await;
        cleared.expect("clear");
    }
    assert_eq!(b.sees("cleared", &new).await, text("main-1"));
    assert!(b.bench.artifact("task-cache/main-2").is_none());
    let last = reference("task-cache/main-1");
    let cleared = a.distribution.clear(&tenant("ci"), &last).await;
    cleared.expect("clear");
    assert_eq!(b.sees("all-cleared", &new).await, None);
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_ends_between_the_answer_and_the_fork_brings_nothing_back() {
    let (tier, a, b) = two_nodes!();
    a.share("old", &TASK, "poisoned").await;
    a.publish("running", &TASK).await;
    let name = reference("task-cache/go");
    let cleared = b.distribution.clear(&tenant("ci"), &name).await;
    cleared.expect("clear");
    // The next step has its answer. Before it forks, the running one ends.
    let mut request = a.bench.request("pod-next", "next", &TASK);
    a.distribution.bring(&mut request).await.expect("bring");
    assert!(a.bench.artifact("task-cache/go").is_none());
    a.distribution.stop().await;
    a.end("running", Outcome::Succeeded).await;
    let published = a.bench.engine.publish(request).await.expect("publish");
    assert!(published.from.is_some(), "it is a fork of the old content");
    a.end("next", Outcome::Succeeded).await;
    let a = Node::start(a.stop().await, &tier.store, |_| {});
    a.shared().await;
    let record = tier.record("task-cache/go").expect("it stays");
    assert_eq!(record.state, NameState::Cleared);
    assert!(a.bench.artifact("task-cache/go").is_none());
    assert_eq!(b.sees("look", &TASK).await, None);
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn content_from_before_the_tier_was_known_is_uploaded_unless_its_name_was_cleared() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    // As an older version, or a node without a tier, commits it.
    for (volume, attributes) in [("t", TASK), ("o", OUTPUT), ("r", RESOURCE)] {
        a.bench
            .step(volume, &attributes, |root| write(root, "from before"))
            .await;
    }
    a.shared().await;
    assert!(
        tier.record("task-cache/go")
            .expect("it is there")
            .content()
            .is_some()
    );
    let b = require!(Node::new(&tier.store).await);
    b.distribution.stop().await;
    for (volume, attributes) in [("t", TASK), ("o", OUTPUT)] {
        b.bench
            .step(volume, &attributes, |root| write(root, "also"))
            .await;
    }
    for name in ["task-cache/go", "artifact/built"] {
        let cleared = a.distribution.clear(&tenant("ci"), &reference(name)).await;
        cleared.expect("clear");
    }
    let b = Node::start(b.stop().await, &tier.store, |_| {});
    b.shared().await;
    assert!(b.bench.artifact("task-cache/go").is_none());
    // A step of this node may wait for the output.
    assert!(b.bench.artifact("artifact/built").is_some());
    assert_eq!(
        tier.record("artifact/built").expect("it stays").state,
        NameState::Cleared
    );
    a.finish().await;
    b.finish().await;
}

/// `destroy` on a node while that node fetches the name.
#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_ends_after_a_clear_leaves_nothing() {
    let Some(tier) = Shared::s3() else { return };
    let a = require!(Node::new(&tier.store).await);
    a.share("r", &RESOURCE, "poisoned").await;
    let slow = tier.failing(|op, path| {
        if op == Op::Get && path.contains("/layers/") {
            // Less than the time limit of a request.
            return Fault::Slow(Duration::from_millis(2500));
        }
        Fault::None
    });
    let b = Node::with(&slow, |settings| {
        settings.fetch_wait = Duration::from_millis(100);
    });
    let b = require!(b.await);
    assert_eq!(b.sees("early", &RESOURCE).await, None, "it starts empty");
    let name = reference("resource-cache/git");
    let cleared = b.distribution.clear(&tenant("ci"), &name).await;
    cleared.expect("clear");
    assert_eq!(b.fetches(), 0, "it is still fetched");
    eventually("the fetch ends", || b.distribution.metrics().fetching == 0).await;
    assert!(b.bench.artifact("resource-cache/git").is_none());
    assert_eq!(b.sees("late", &RESOURCE).await, None);
    a.finish().await;
    b.finish().await;
}

/// A node that gets its first tier has an old cache, and the tier has a newer one.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_cache_that_follows_no_number_replaces_no_newer_one() {
    let tier = Shared::file();
    let old = require!(Node::new(&tier.store).await);
    old.distribution.stop().await;
    old.bench
        .step("old", &TASK, |root| write(root, "old"))
        .await;
    let a = require!(Node::new(&tier.store).await);
    a.share("new", &TASK, "new").await;
    let old = Node::start(old.stop().await, &tier.store, |_| {});
    old.shared().await;
    assert_eq!(old.distribution.metrics().uploads_refused, 1);
    assert_eq!(old.sees("look", &TASK).await, text("new"));
    assert_eq!(a.sees("look", &TASK).await, text("new"));
    a.finish().await;
    old.finish().await;
}

/// A commit is written, its answer is lost, and its node cut off. Another node replaces it.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_acknowledgement_was_lost_does_not_come_back_over_its_successor() {
    const WELL: u8 = 0;
    const LOSES: u8 = 1;
    const AWAY: u8 = 2;
    for restarts in [false, true] {
        let Some(tier) = Shared::s3() else { return };
        let mode = Arc::new(AtomicU8::new(WELL));
        let plan = Arc::clone(&mode);
        let store = tier.failing(move |op, path| match plan.load(Ordering::SeqCst) {
            LOSES if op == Op::Replace && path.contains("/names/") => {
                plan.store(AWAY, Ordering::SeqCst);
                Fault::LostAnswer
            }
            AWAY => Fault::Status(500),
            _ => Fault::None,
        });
        let a = require!(Node::new(&store).await);
        a.share("first", &TASK, "first").await;
        let number = || tier.record("task-cache/go").expect("it is there").number;
        let row = |node: &Node| node.bench.artifact("task-cache/go").expect("it is there");
        let (first, lost) = (row(&a).id, number() + 1);
        mode.store(LOSES, Ordering::SeqCst);
        a.bench
            .step("lost", &TASK, |root| write(root, "lost"))
            .await;
        eventually("it is written", || number() == lost).await;
        let b = require!(Node::new(&tier.store).await);
        assert_eq!(b.sees("look", &TASK).await, text("lost"));
        // The tier tells where content comes from.
        assert_eq!(row(&b).made_by.expect("it is known").parent, Some(first));
        b.share("successor", &TASK, "successor").await;
        assert_eq!(number(), lost + 1);
        let a = if restarts {
            let bench = a.stop().await.restart().await;
            mode.store(WELL, Ordering::SeqCst);
            Node::start(bench, &store, |_| {})
        } else {
            mode.store(WELL, Ordering::SeqCst);
            a
        };
        a.shared().await;
        assert_eq!(number(), lost + 1);
        assert_eq!(a.distribution.metrics().uploads_refused, 1);
        for node in [&a, &b] {
            assert_eq!(node.sees("look-again", &TASK).await, text("successor"));
        }
        // It goes on from there.
        a.share("next", &TASK, "next").await;
        assert_eq!(number(), lost + 2);
        assert_eq!(b.sees("look-last", &TASK).await, text("next"));
        a.finish().await;
        b.finish().await;
    }
}

/// An output whose time is over would be deleted as soon as it is fetched.
#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_expired_is_not_fetched() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    let brief = [OUTPUT[0], OUTPUT[1], ("ttl", "1s")];
    a.share("o", &brief, "expired").await;
    let made = Instant::now();
    let b = Node::with(&tier.store, |settings| {
        settings.input_wait = Duration::from_millis(300);
    });
    let b = require!(b.await);
    tokio::time::sleep_until((made + Duration::from_millis(1100)).into()).await;
    let error = b.try_publish("i", &INPUT).await.expect_err("it expired");
    assert!(matches!(error, Error::Coming { .. }), "{error:?}");
    assert_eq!(b.fetches(), 0);
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_commit_one_cache_at_once() {
    let (tier, a, b) = two_nodes!();
    for node in [&a, &b] {
        node.publish("r", &RESOURCE).await;
        node.publish("t", &TASK).await;
    }
    for (node, made) in [(&a, "by a"), (&b, "by b")] {
        for volume in ["r", "t"] {
            write(&node.bench.target(volume), made);
            node.bench
                .outcome(&format!("pod-{volume}"), Outcome::Succeeded)
                .await;
        }
    }
    let end = async |node: &Node| {
        for volume in ["r", "t"] {
            node.bench.unpublish(volume).await;
        }
        node.bench.quiet().await;
        node.shared().await;
    };
    tokio::join!(end(&a), end(&b));
    let refused = [&a, &b].map(|node| node.distribution.metrics().uploads_refused);
    assert_eq!(
        refused[0] + refused[1],
        1,
        "the first writer of the resource cache wins"
    );
    let number = tier.record("task-cache/go").expect("it is there").number;
    let c = require!(Node::new(&tier.store).await);
    let winner = if refused[0] == 0 { "by a" } else { "by b" };
    assert_eq!(c.sees("r", &RESOURCE).await, text(winner));
    // Both writers of the task cache were first and last once; a third node has the last.
    let last = c.sees("t", &TASK).await.expect("it is there");
    for node in [&a, &b] {
        assert_eq!(node.sees("look", &TASK).await, Some(last.clone()));
        // Its own resource cache is complete, and the node goes on with it.
        assert!(node.sees("look-r", &RESOURCE).await.is_some());
    }
    assert_eq!(
        tier.record("task-cache/go").expect("it is there").number,
        number
    );
    for node in [a, b, c] {
        node.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_never_shared_stays_on_its_node_and_tenants_do_not_see_each_other() {
    let (tier, a, b) = two_nodes!();
    let never = [TASK[0], TASK[1], ("share", "never")];
    a.share("private", &never, "private").await;
    a.share("output", &OUTPUT, "of ci").await;
    assert!(tier.record("task-cache/go").is_none());
    assert_eq!(a.sees("here", &never).await, text("private"));
    assert_eq!(b.sees("there", &TASK).await, None);
    // The tier's newer commit replaces it, and a commit without the attribute is shared.
    b.share("public", &TASK, "public").await;
    assert_eq!(a.sees("newer", &TASK).await, text("public"));

    let mut request = b.bench.request("pod-x", "x", &INPUT);
    request.tenant = tenant("other");
    let error = tokio::time::timeout(
        Duration::from_millis(500),
        b.distribution.bring(&mut request),
    );
    assert!(
        error.await.is_err(),
        "it waits for the output of its own tenant"
    );
    let asks = || b.distribution.metrics().questions;
    let before = asks();
    assert!(before > 0 && b.fetches() == 0, "{before}");
    // Another tenant that names the artifact of this one does not get it.
    let files = tier.files.join("v1");
    let copy = |from: &str, to: &str| {
        let bytes = std::fs::read_to_string(files.join(from)).expect("read");
        let path = files.join(to);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        std::fs::write(
            path,
            bytes.replace("\"tenant\":\"ci\"", "\"tenant\":\"other\""),
        )
        .expect("write");
    };
    copy("ci/names/artifact/built", "other/names/artifact/built");
    let mut request = b.bench.request("pod-y", "y", &INPUT);
    request.tenant = tenant("other");
    let brought = tokio::time::timeout(
        Duration::from_millis(700),
        b.distribution.bring(&mut request),
    );
    assert!(
        brought.await.is_err(),
        "it is not in its own part of the tier"
    );
    assert_eq!(b.fetches(), 0);
    eventually("the questions end", || {
        b.distribution.status().fetching.is_empty()
    })
    .await;
    a.finish().await;
    b.finish().await;
}
