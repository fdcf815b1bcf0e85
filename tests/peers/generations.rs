//! The generations of a name on all nodes, as the controller is told them by the nodes.

use baggageclaim::distribution::roster::{Generation, Generations};
use baggageclaim::model::{NodeId, Outcome};

use crate::catalog::{Hub, finish};
use crate::nodes::{OUTPUT, TASK, name};

async fn generations(hub: &Hub, reference: &str) -> Generations {
    let overview = hub.overview.clone().expect("it runs");
    overview.generations(&name(reference)).await
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
