//! The generations of a name on all nodes, as the controller is told them by the nodes; and an
//! earlier one that it orders a node to commit once more.

use std::fs;
use std::time::Duration;

use baggageclaim::hub::{Generation, Generations, RollbackOrder};
use baggageclaim::model::{ArtifactId, NodeId, Outcome, Timestamp};
use tokio::sync::watch;

use crate::catalog::{Hub, finish};
use crate::common::bench::eventually;
use crate::nodes::{Node, OUTPUT, TASK, introduce, name, text};
use crate::sources::store;

const GO: &str = "task-cache/go";

async fn generations(hub: &Hub, reference: &str) -> Generations {
    hub.handle().generations(&name(reference)).await
}

fn on<'a>(all: &'a Generations, node: &str) -> Vec<&'a Generation> {
    let found = all.found.iter().filter(|(of, _)| of.as_str() == node);
    found.map(|(_, generation)| generation).collect()
}

#[tokio::test]
async fn each_node_tells_the_generations_of_a_name_that_it_still_has() {
    let hub = Hub::start().await;
    let Some(nodes) = hub.nodes(&["a", "b", "c"]).await else {
        return;
    };
    nodes[0].commit("one", &TASK, "one").await;
    let reads = [&TASK[..], &[("commit", "never")]].concat();
    nodes[0].publish("holds", &reads).await;
    nodes[0].commit("two", &TASK, "two").await;
    nodes[0].commit("built", &OUTPUT, "other").await;
    // It has content of node a first.
    hub.knows(2).await;
    nodes[1].commit("three", &TASK, "three").await;

    let all = generations(&hub, "task-cache/go").await;
    assert!(all.silent.is_empty(), "{all:?}");
    assert!(
        all.found
            .is_sorted_by_key(|(_, it)| std::cmp::Reverse(it.created))
    );
    let [two, one] = &on(&all, "a")[..] else {
        panic!("{all:?}");
    };
    assert!(two.is_current && !one.is_current, "{all:?}");
    assert_eq!((two.in_use_by, one.in_use_by), (0, 1));
    let pod = |of: &Generation| of.made_by.clone().expect("it is recorded").pod.name;
    assert_eq!((pod(two), pod(one)), ("pod-two".into(), "pod-one".into()));
    let parent = |of: &Generation| of.made_by.clone().expect("it is recorded").parent;
    assert_eq!((parent(two), parent(one)), (Some(one.id), None));
    let newest = on(&all, "b")[0];
    assert_eq!(all.found[0].1, *newest);
    assert!(newest.is_current && parent(newest).is_some(), "{all:?}");
    assert_eq!(pod(newest), "pod-three");
    assert!(on(&all, "c").is_empty());

    // A node without a stream is named, and the others are shown.
    let away = NodeId::new("away").expect("a name");
    hub.nodes.0.lock().push((away, nodes[0].key.name()));
    let all = generations(&hub, "task-cache/go").await;
    assert_eq!(Vec::from_iter(all.silent), ["away"]);
    assert!(!all.found.is_empty());
    let all = generations(&hub, "resource-cache/none").await;
    assert!(all.found.is_empty());
    nodes[0].end("holds", Outcome::Failed).await;
    finish(hub, nodes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_that_is_rolled_back_is_the_newest_also_on_a_node_that_was_away() {
    let hub = Hub::start().await;
    let Some(mut nodes) = hub.nodes(&["a", "b"]).await else {
        return;
    };
    // This node finds the controller by itself.
    let place = watch::Sender::new(hub.place.borrow().clone());
    let own = place.subscribe();
    let Some(third) = Node::with("c", |start| start.controller = Some(own)).await else {
        return;
    };
    let known = (third.id.clone(), third.key.name());
    hub.nodes.0.lock().push(known);
    nodes.push(third);
    introduce(&nodes);
    hub.has_all(&nodes).await;
    let reads = [&TASK[..], &[("commit", "never")]].concat();

    nodes[0].commit("one", &TASK, "one").await;
    hub.knows(1).await;
    nodes[1].commit("two", &TASK, "two").await;
    hub.knows(2).await;
    eventually("the newer one is found", || hub.finds(GO)).await;
    assert_eq!(nodes[2].sees("copy", &reads).await, text("two"));
    hub.knows(3).await;
    place.send_replace(None);
    eventually("the stream ends", || (hub.figures)().nodes == 2).await;

    let handle = hub.handle();
    let all = generations(&hub, GO).await;
    let good = on(&all, "a").into_iter().find(|it| it.is_current);
    let order = RollbackOrder {
        name: name(GO),
        to: good.expect("node a uses its own").id,
        id: ArtifactId::from_bits(7 << 100),
        stamp: handle.commit_time(&name(GO), all.found[0].1.created),
        by: "jane".to_owned(),
    };
    // The newest is on node b.
    assert!(all.found[0].1.created < order.stamp);
    for _ in 0..2 {
        let done = handle.roll_back(&nodes[0].id, &order).await;
        assert_eq!(done, Some(Ok(())), "repeated, it changes nothing");
    }
    let away = handle.roll_back(&nodes[2].id, &order).await;
    assert_eq!(away, None);
    let unknown = RollbackOrder {
        to: ArtifactId::from_bits(1),
        id: ArtifactId::from_bits(8 << 100),
        ..order.clone()
    };
    let refused = handle.roll_back(&nodes[1].id, &unknown).await;
    let refused = refused
        .expect("it answers")
        .expect_err("it has no such one");
    assert!(
        refused.is_gone && refused.why.contains("no longer has"),
        "{refused:?}"
    );

    let withdraw = || handle.withdraw_older(&order.name, order.stamp, order.id);
    let has = |node: usize| nodes[node].bench.artifact(GO).is_some();
    eventually("node b drops what it has", || {
        withdraw();
        !has(1)
    })
    .await;
    assert!(has(0) && has(2));
    assert_eq!(nodes[1].sees("after", &reads).await, text("one"));
    place.send_replace(hub.place.borrow().clone());
    hub.has_all(&nodes).await;
    eventually("node c drops what it has", || {
        withdraw();
        !has(2)
    })
    .await;
    assert_eq!(nodes[2].sees("after", &reads).await, text("one"));
    assert_eq!(generations(&hub, GO).await.found[0].1.id, order.id);

    // What is committed later stays.
    nodes[1].commit("three", &TASK, "three").await;
    let newest = nodes[1].bench.artifact(GO).expect("it is there").id;
    withdraw();
    let all = generations(&hub, GO).await;
    assert_eq!(all.found[0].1.id, newest, "{all:?}");
    assert_eq!(nodes[1].sees("later", &reads).await, text("three"));
    finish(hub, nodes).await;
}

/// A node that says that it has content of a far future moves no commit there. An order for such a
/// time, as of an older controller, is dated by the catalog, and takes the name from older content.
#[tokio::test(flavor = "multi_thread")]
async fn a_time_far_ahead_counts_as_in_the_catalog() {
    let hub = Hub::start().await;
    let Some(nodes) = hub.nodes(&["a", "b"]).await else {
        return;
    };
    nodes[0].commit("one", &TASK, "one").await;
    hub.knows(1).await;
    nodes[1].commit("two", &TASK, "two").await;
    hub.knows(2).await;
    let handle = hub.handle();
    let all = generations(&hub, GO).await;
    let newest = all.found[0].1.created;
    let stamp = handle.commit_time(&name(GO), Timestamp(u64::MAX));
    let now = nodes[0].bench.engine.now();
    assert!(
        stamp > newest && stamp <= now.after(Duration::from_secs(60)),
        "{stamp:?}"
    );
    // A little ahead is within what clocks differ.
    let ahead = now.after(Duration::from_secs(10));
    assert_eq!(handle.commit_time(&name(GO), ahead), Timestamp(ahead.0 + 1));

    let order = RollbackOrder {
        name: name(GO),
        to: on(&all, "a")[0].id,
        id: ArtifactId::from_bits(7 << 100),
        stamp: now.after(Duration::from_hours(1)),
        by: "jane".to_owned(),
    };
    let done = handle.roll_back(&nodes[0].id, &order).await;
    assert_eq!(done, Some(Ok(())));
    assert!(
        nodes[0].bench.engine.now() < order.stamp,
        "the clock has moved"
    );
    eventually("node b drops what it has", || {
        handle.withdraw_older(&order.name, order.stamp, order.id);
        nodes[1].bench.artifact(GO).is_none()
    })
    .await;
    let reads = [&TASK[..], &[("commit", "never")]].concat();
    assert_eq!(nodes[1].sees("after", &reads).await, text("one"));
    finish(hub, nodes).await;
}

/// The tier refuses a commit without the number of its name, if the name was ever cleared.
#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_not_carried_out_before_the_tier_tells_the_number_of_the_name() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let tier = dir.path().join("comes-later");
    let hub = Hub::start().await;
    let made = Node::with("a", |start| {
        start.controller = Some(hub.place.subscribe());
        start.store = Some(store(&tier));
    });
    let Some(node) = made.await else { return };
    let known = (node.id.clone(), node.key.name());
    hub.nodes.0.lock().push(known);
    let nodes = vec![node];
    hub.has_all(&nodes).await;
    let node = &nodes[0];
    node.commit("one", &TASK, "one").await;
    hub.knows(1).await;
    let handle = hub.handle();
    let to = node.bench.artifact(GO).expect("it is there");
    let order = RollbackOrder {
        name: name(GO),
        to: to.id,
        id: ArtifactId::from_bits(7 << 100),
        stamp: handle.commit_time(&name(GO), to.created),
        by: "jane".to_owned(),
    };
    let failed = || node.distribution.metrics().questions_failed;
    let before = failed();
    tokio::select! {
        done = handle.roll_back(&node.id, &order) => panic!("{done:?}"),
        () = eventually("the tier is asked", || failed() > before) => {}
    }
    fs::create_dir(&tier).expect("mkdir");
    let done = handle.roll_back(&node.id, &order).await;
    assert_eq!(done, Some(Ok(())));
    let made = node.bench.artifact(GO).expect("it has the name");
    assert_eq!((made.id, made.sharing.base), (order.id, Some(0)));
    finish(hub, nodes).await;
}
