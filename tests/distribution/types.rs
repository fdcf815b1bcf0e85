//! Each type of volume, and its content on this node, in the tier, in both, nowhere, or being made
//! on another node. Each backend is that of the node that makes the content, and of the other one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::engine::Error;
use baggageclaim::model::Outcome;

use crate::common::bench::{Ground, NEVER, eventually};
use crate::nodes::{INPUT, Node, OUTPUT, RESOURCE, Shared, TASK, require, text, two_nodes, write};

/// The backends of two nodes: each is the first one's once, and the second one's once.
fn pairs() -> [[Ground; 2]; 3] {
    let [one, two, three] = Ground::ALL;
    [[one, two], [two, three], [three, one]]
}

#[tokio::test(flavor = "multi_thread")]
async fn content_of_one_node_reaches_another() {
    for grounds in pairs() {
        content_reaches_another(Shared::file(), grounds).await;
    }
    content_reaches_another(require!(Shared::s3()), [Ground::ALL[0]; 2]).await;
}

async fn content_reaches_another(tier: Shared, grounds: [Ground; 2]) {
    let a = require!(Node::on(grounds[0], &tier.store).await);
    let b = require!(Node::on(grounds[1], &tier.store).await);
    a.share("output", &OUTPUT, "made on a").await;
    a.share("resource", &RESOURCE, "fetched on a").await;
    a.share("task", &TASK, "cached on a").await;
    for (volume, attributes, expected) in [
        ("i", INPUT, "made on a"),
        ("r", RESOURCE, "fetched on a"),
        ("t", TASK, "cached on a"),
    ] {
        assert_eq!(b.sees(volume, &attributes).await, text(expected));
    }
    eventually("all fetches end", || b.fetches() == 3).await;
    // The artifact is the same one on both nodes, and neither uploads it again.
    for name in ["artifact/built", "resource-cache/git", "task-cache/go"] {
        let ids = [&a, &b].map(|node| node.bench.artifact(name).expect("it is there").id);
        assert_eq!(ids[0], ids[1]);
        assert_eq!(
            tier.record(name).and_then(|it| it.content()).map(|it| it.0),
            Some(ids[0])
        );
    }
    assert_eq!(b.distribution.status().uploads_waiting, 0);
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn content_on_this_node_is_used_without_a_question_except_a_task_cache() {
    for grounds in pairs() {
        content_on_this_node(grounds).await;
    }
}

async fn content_on_this_node(grounds: [Ground; 2]) {
    let (_tier, a, b) = two_nodes!(on grounds);
    a.share("output", &OUTPUT, "made on a").await;
    a.share("resource", &RESOURCE, "fetched on a").await;
    a.share("task", &TASK, "cached on a").await;
    let before = a.questions();
    assert_eq!(a.sees("i", &INPUT).await, text("made on a"));
    assert_eq!(a.sees("r", &RESOURCE).await, text("fetched on a"));
    let local = [TASK[0], TASK[1], ("freshness", "local")];
    assert_eq!(a.sees("l", &local).await, text("cached on a"));
    assert_eq!(a.questions(), before);
    assert_eq!(a.sees("t", &TASK).await, text("cached on a"));
    assert_eq!(a.questions(), before + 1);
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_task_cache_is_replaced_by_a_newer_one_of_the_tier() {
    for grounds in pairs() {
        only_a_task_cache_is_replaced(grounds).await;
    }
}

async fn only_a_task_cache_is_replaced(grounds: [Ground; 2]) {
    let (_tier, a, b) = two_nodes!(on grounds);
    for (volume, attributes) in [("o", OUTPUT), ("t", TASK)] {
        a.share(&format!("{volume}-1"), &attributes, "first").await;
    }
    assert_eq!(b.sees("i-1", &INPUT).await, text("first"));
    assert_eq!(b.sees("t-1", &TASK).await, text("first"));
    for (volume, attributes) in [("o", OUTPUT), ("t", TASK)] {
        a.share(&format!("{volume}-2"), &attributes, "second").await;
    }
    let local = [TASK[0], TASK[1], ("freshness", "local")];
    assert_eq!(b.sees("l", &local).await, text("first"));
    assert_eq!(b.sees("t-2", &TASK).await, text("second"));
    assert_eq!(b.sees("i-2", &INPUT).await, text("first"));
    // What a node committed itself is the last commit, for this node.
    b.share("t-3", &TASK, "third").await;
    assert_eq!(b.sees("t-4", &TASK).await, text("third"));
    assert_eq!(a.sees("t-5", &TASK).await, text("third"));
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_key_is_used_wherever_it_is_and_the_own_key_first() {
    let (_tier, a, b) = two_nodes!();
    a.share("main", &TASK, "of main").await;
    let branch = [
        ("type", "task-cache"),
        ("key", "branch"),
        ("restoreKeys", "none,go"),
    ];
    assert_eq!(b.sees("restored", &branch).await, text("of main"));
    a.share("own", &branch, "of the branch").await;
    assert_eq!(b.sees("again", &branch).await, text("of the branch"));
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_is_nowhere_fails_an_input_only() {
    for ground in Ground::ALL {
        let tier = Shared::file();
        let node = Node::on_with(ground, &tier.store, |settings| {
            settings.input_wait = Duration::from_secs(2);
        });
        let node = require!(node.await);
        assert_eq!(node.sees("r", &RESOURCE).await, None);
        assert_eq!(node.sees("t", &TASK).await, None);
        assert_eq!(node.sees("o", &OUTPUT).await, None);
        let began = Instant::now();
        let error = node.try_publish("i", &INPUT).await.expect_err("nowhere");
        assert!(matches!(error, Error::Coming { .. }), "{error:?}");
        assert!(error.to_string().contains("no node has put it"), "{error}");
        assert!(began.elapsed() >= Duration::from_secs(2));
        node.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_waits_for_what_another_node_makes() {
    for grounds in pairs() {
        an_input_waits(grounds).await;
    }
}

async fn an_input_waits(grounds: [Ground; 2]) {
    let (_tier, a, b) = two_nodes!(on grounds);
    a.publish("output", &OUTPUT).await;
    write(&a.bench.target("output"), "made on a");
    let waits = async {
        let seen = b.sees("input", &INPUT).await;
        assert_eq!(seen, text("made on a"));
    };
    let makes = async {
        eventually("the input asked", || b.questions() > 0).await;
        a.end("output", Outcome::Succeeded).await;
    };
    tokio::join!(waits, makes);
    // What this node makes itself the engine waits for; the tier's older content is not used.
    let again = [("type", "output"), ("name", "other")];
    let input = [("type", "input"), ("from", "artifact/other")];
    a.share("other-1", &again, "first").await;
    b.publish("other-2", &again).await;
    write(&b.bench.target("other-2"), "second");
    let before = (b.questions(), b.fetches());
    let waits = async { assert_eq!(b.sees("input-2", &input).await, text("second")) };
    let makes = async {
        b.bench.outcome("pod-other-2", Outcome::Succeeded).await;
        b.bench.unpublish("other-2").await;
    };
    tokio::join!(waits, makes);
    let after = (b.questions(), b.fetches());
    assert_eq!(after, before, "the tier was not asked");
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_input_waits_for_another_node_and_an_output_always_begins_empty() {
    for grounds in pairs() {
        only_an_input_waits(grounds).await;
    }
}

async fn only_an_input_waits(grounds: [Ground; 2]) {
    let (tier, a, b) = two_nodes!(on grounds);
    let kinds = [("o", OUTPUT), ("r", RESOURCE), ("t", TASK)];
    for (volume, attributes) in kinds {
        a.publish(volume, &attributes).await;
        write(&a.bench.target(volume), "made on a");
    }
    // Another node makes it.
    for (volume, attributes) in kinds {
        let early = format!("early-{volume}");
        assert_eq!(b.sees(&early, &attributes).await, None, "{volume}");
    }
    for (volume, _) in kinds {
        a.end(volume, Outcome::Succeeded).await;
    }
    a.shared().await;
    // In the tier only.
    for (volume, attributes) in kinds {
        let expected = (volume != "o").then(|| "made on a".to_owned());
        let late = format!("late-{volume}");
        assert_eq!(b.sees(&late, &attributes).await, expected, "{volume}");
    }
    // On both, the older one here; and here only. An output never begins with any of it.
    assert_eq!(b.sees("input", &INPUT).await, text("made on a"));
    a.share("newer", &OUTPUT, "newer").await;
    assert_eq!(b.sees("empty", &OUTPUT).await, None);
    assert_eq!(a.sees("empty", &OUTPUT).await, None);
    // A resource cache of this node stays, also if the tier lost that name and has another one.
    std::fs::remove_dir_all(tier.files.join("v1/ci/names/resource-cache")).expect("lose it");
    let c = require!(Node::on(grounds[0], &tier.store).await);
    c.share("other", &RESOURCE, "made on c").await;
    let before = b.questions();
    assert_eq!(b.sees("stays", &RESOURCE).await, text("made on a"));
    assert_eq!(b.questions(), before, "the tier was not asked");
    // Scratch has no name to ask about.
    assert_eq!(b.sees("scratch", &[("type", "scratch")]).await, None);
    assert_eq!(b.questions(), before);
    for node in [a, b, c] {
        node.finish().await;
    }
}

/// Kubelet gives a call two minutes, so the waits for other nodes and for this one are one wait.
#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_waited_for_other_nodes_waits_the_shorter_for_its_maker_here() {
    let tier = Shared::file();
    let node = require!(Node::new(&tier.store).await);
    let mut request = node.bench.request("pod-in", "in", &INPUT);
    let distribution = Arc::clone(&node.distribution);
    let (brought, ()) = tokio::join!(distribution.bring(&mut request), async {
        eventually("it waits", || node.questions() > 0).await;
        node.publish("maker", &OUTPUT).await;
    });
    brought.expect("its maker runs");
    assert!(request.waited > Duration::ZERO);
    request.waited = node.bench.config.input_wait;
    let published = tokio::time::timeout(NEVER, node.bench.engine.publish(request)).await;
    let error = published.expect("in time").expect_err("its maker runs");
    assert!(matches!(error, Error::Coming { .. }), "{error:?}");
    node.end("maker", Outcome::Failed).await;
    node.finish().await;
}
