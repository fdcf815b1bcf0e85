//! The limits of a namespace over all nodes, with real nodes and a controller's catalog; and a node
//! that is gone, for which nothing waits.

use std::fs;
use std::time::Duration;

use baggageclaim::hub::Used;
use baggageclaim::model::{Limits, Outcome};

use crate::catalog::{Hub, finish};
use crate::common::bench::eventually;
use crate::nodes::{Node, tenant};

const SIZE: usize = 128 << 10;
const MADE: usize = 16;

fn keep_within(hub: &Hub, limits: &Limits) -> Used {
    hub.handle().keep_within(&tenant("ci"), limits)
}

fn bytes(bytes: u64) -> Limits {
    Limits {
        bytes: Some(bytes),
        ..Limits::default()
    }
}

/// A cache on each node in turn. The first is used once more, and the second is in use.
async fn fill(nodes: &[Node]) {
    for number in 0..MADE {
        let key = format!("k{number}");
        let task = [("type", "task-cache"), ("key", key.as_str())];
        let write =
            |at: &std::path::Path| fs::write(at.join("file"), vec![7; SIZE]).expect("write");
        let node = &nodes[number % 2];
        node.commits(&format!("made-{number}"), &task, write).await;
        // Its size is known.
        node.bench.engine.reap().await.expect("measured");
    }
    let read = |key| [("type", "input"), ("from", key)];
    nodes[0].publish("again", &read("task-cache/k0")).await;
    nodes[0].end("again", Outcome::Failed).await;
    nodes[1].publish("using", &read("task-cache/k1")).await;
}

/// The caches that a node has not any more, in the order of their last use.
fn gone(nodes: &[Node]) -> Vec<usize> {
    let is_there = |number: &usize| {
        let name = format!("task-cache/k{number}");
        nodes[number % 2].bench.artifact(&name).is_some()
    };
    let by_use = (2..MADE).chain([0, 1]);
    by_use.filter(|number| !is_there(number)).collect()
}

#[tokio::test]
async fn the_least_recently_used_content_of_all_nodes_goes_and_what_is_in_use_stays() {
    let hub = Hub::with_usage(Duration::from_millis(50)).await;
    let Some(nodes) = hub.nodes(&["a", "b"]).await else {
        return;
    };
    fill(&nodes).await;
    let is_known = || {
        let used = keep_within(&hub, &Limits::default());
        used.artifacts == MADE as u64 && used.bytes >= (MADE * SIZE) as u64
    };
    eventually("the controller knows what is used", is_known).await;
    let used = keep_within(&hub, &Limits::default());

    // It exceeds its budget by half.
    let budget = bytes(used.bytes * 2 / 3);
    let is_within = || keep_within(&hub, &budget).bytes <= budget.bytes.unwrap_or_default();
    eventually("it is within its budget", is_within).await;
    let evicted = gone(&nodes);
    let expected: Vec<usize> = (2..2 + evicted.len()).collect();
    assert_eq!(evicted, expected, "the least recently used");
    // Little more than needed.
    let needed = used.bytes - budget.bytes.unwrap_or_default() * 95 / 100;
    let needed = needed.div_ceil(used.bytes / MADE as u64);
    assert_eq!(evicted.len() as u64, needed);
    hub.knows(MADE as u64 - needed).await;
    let counted = |node: &Node, reason: &str| -> u64 {
        node.counted(&format!("evicted_artifacts_total{{reason=\"{reason}\"}}"))
    };
    // The counter follows the index.
    let by_budget = || {
        nodes
            .iter()
            .map(|node| counted(node, "budget"))
            .sum::<u64>()
    };
    eventually("they are counted", || by_budget() >= needed).await;
    assert_eq!(by_budget(), needed);

    // What is in use exceeds another budget alone.
    let is_over = || {
        let used = keep_within(&hub, &bytes(1));
        used.over_budget && used.artifacts == 1
    };
    eventually("only what is in use is left", is_over).await;
    assert!(nodes[1].bench.artifact("task-cache/k1").is_some());
    assert!(nodes[1].bench.target("using").join("file").exists());
    nodes[1].end("using", Outcome::Failed).await;
    eventually("it goes with its volume", || {
        let used = keep_within(&hub, &bytes(1));
        !used.over_budget && used.artifacts == 0
    })
    .await;
    hub.knows(0).await;
    finish(hub, nodes).await;
}

#[tokio::test]
async fn content_that_is_older_than_the_time_to_live_goes() {
    let hub = Hub::with_usage(Duration::from_millis(50)).await;
    let Some(nodes) = hub.nodes(&["a", "b"]).await else {
        return;
    };
    let task = [("type", "task-cache"), ("key", "go")];
    let output = [("type", "output"), ("name", "built")];
    nodes[0].commit("cache", &task, "cache").await;
    nodes[1].commit("output", &output, "output").await;
    hub.knows(2).await;
    let ttl = |caches, outputs| Limits {
        task_caches_ttl: caches,
        outputs_ttl: outputs,
        ..Limits::default()
    };
    let hour = Some(3_600_000);
    eventually("the output goes", || {
        keep_within(&hub, &ttl(hour, Some(1)));
        (hub.figures)().names == 1
    })
    .await;
    assert!(nodes[0].bench.artifact("task-cache/go").is_some());
    eventually("the cache goes", || {
        keep_within(&hub, &ttl(Some(1), hour));
        (hub.figures)().names == 0
    })
    .await;
    // The counter follows the index.
    eventually("it is counted", || {
        nodes[0].counted::<u64>("evicted_artifacts_total{reason=\"ttl\"}") == 1
    })
    .await;
    finish(hub, nodes).await;
}

/// Its content would count for 2 minutes without a stream.
#[tokio::test]
async fn nothing_is_known_of_a_node_that_was_deleted() {
    let hub = Hub::with_usage(Duration::from_millis(50)).await;
    let Some(nodes) = hub.nodes(&["a", "b"]).await else {
        return;
    };
    for (node, key) in nodes.iter().zip(["k0", "k1"]) {
        let task = [("type", "task-cache"), ("key", key)];
        node.commit(key, &task, key).await;
    }
    hub.knows(2).await;
    eventually("both are counted", || {
        keep_within(&hub, &Limits::default()).artifacts == 2
    })
    .await;
    // Its objects are gone.
    hub.nodes.0.lock().retain(|(node, _)| node.as_str() == "a");
    hub.knows(1).await;
    assert_eq!(keep_within(&hub, &Limits::default()).artifacts, 1);
    assert_eq!((hub.figures)().nodes, 1);
    finish(hub, nodes).await;
}
