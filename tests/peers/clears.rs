//! Names that are cleared while steps write to volumes of them: on the node of the content, on
//! another one, and on one that the controller does not reach. No cleared content returns.

use std::fs;
use std::ops::Range;

use baggageclaim::distribution::roster::Controller;
use baggageclaim::model::{Coverage, Fence, Outcome};
use tokio::sync::watch;

use crate::catalog::{Hub, finish};
use crate::common::bench::eventually;
use crate::nodes::{Node, introduce, name, text, write};

/// How many names are cleared with a writer on each of these nodes.
const EACH: usize = 100;

fn key(number: usize) -> String {
    format!("k{number}")
}

fn task(key: &str) -> [(&str, &str); 2] {
    [("type", "task-cache"), ("key", key)]
}

fn reference(number: usize) -> String {
    format!("task-cache/k{number}")
}

fn writer(number: usize) -> String {
    format!("writer-{number}")
}

fn clear(hub: &mut Hub, number: usize) -> Fence {
    hub.clear(Coverage::Name(name(&reference(number))))
}

/// The first node makes content of these names, and a step of its node begins with each.
async fn begin(hub: &Hub, nodes: &[Node], numbers: Range<usize>, on: impl Fn(usize) -> usize) {
    for number in numbers.clone() {
        let key = key(number);
        nodes[0]
            .commit(&format!("made-{number}"), &task(&key), "old")
            .await;
    }
    for number in numbers {
        eventually("the content is found", || hub.finds(&reference(number))).await;
        let node = &nodes[on(number)];
        node.publish(&writer(number), &task(&key(number))).await;
        let target = node.bench.target(&writer(number));
        let began = fs::read_to_string(target.join("text"));
        assert_eq!(began.ok(), text("old"), "{number}");
        write(&target, "written");
    }
}

/// The step has succeeded and ends. Its volume is being committed.
async fn leave(node: &Node, number: usize) {
    let pod = format!("pod-{}", writer(number));
    node.bench.outcome(&pod, Outcome::Succeeded).await;
    node.bench.unpublish(&writer(number)).await;
}

/// No node has content of this name, and a step on any of them begins empty.
async fn is_gone(nodes: &[Node], number: usize) {
    for node in nodes {
        node.bench.quiet().await;
        let left = node.bench.artifact(&reference(number));
        assert!(left.is_none(), "{number} on {:?}", node.id);
        let volume = format!("after-{number}");
        let seen = node.sees(&volume, &task(&key(number))).await;
        assert_eq!(seen, None, "{number} on {:?}", node.id);
    }
}

/// Steps on the node of the content and on another one. Each third ends after all nodes have
/// applied the clear, at the same time, and just before it.
async fn here_and_elsewhere(hub: &mut Hub, nodes: &[Node]) {
    let on = |number: usize| usize::from(number >= EACH);
    let all = 0..2 * EACH;
    begin(hub, nodes, all.clone(), on).await;
    for number in all.clone() {
        let node = &nodes[on(number)];
        let fence = match number % 3 {
            0 => {
                let fence = clear(hub, number);
                hub.is_applied(&fence, nodes.len()).await;
                leave(node, number).await;
                fence
            }
            1 => {
                let fence = clear(hub, number);
                leave(node, number).await;
                fence
            }
            _ => {
                leave(node, number).await;
                clear(hub, number)
            }
        };
        hub.is_applied(&fence, nodes.len()).await;
        is_gone(nodes, number).await;
    }
    for number in all {
        for node in nodes {
            let left = node.bench.artifact(&reference(number));
            assert!(left.is_none(), "{number} on {:?}", node.id);
        }
    }
}

/// Steps on the third node, while the controller does not reach it. Each third ends meanwhile, when
/// the node is back, and after it has applied the clear.
async fn away(
    hub: &mut Hub,
    place: &watch::Sender<Option<Controller>>,
    nodes: &[Node],
    numbers: Range<usize>,
) {
    let node = &nodes[2];
    begin(hub, nodes, numbers.clone(), |_| 2).await;
    place.send_replace(None);
    eventually("the stream ends", || (hub.figures)().nodes == 2).await;
    let fences: Vec<Fence> = numbers.clone().map(|number| clear(hub, number)).collect();
    let last = fences.last().expect("there are some");
    hub.is_applied(last, 2).await;
    let each_third = |rest: usize| numbers.clone().filter(move |number| number % 3 == rest);
    for number in each_third(0) {
        leave(node, number).await;
    }
    node.bench.quiet().await;
    for number in each_third(0) {
        // It has not heard of the clear. Its commit counts on no other node.
        assert!(
            node.bench.artifact(&reference(number)).is_some(),
            "{number}"
        );
        let seen = nodes[1]
            .sees(&format!("while-{number}"), &task(&key(number)))
            .await;
        assert_eq!(seen, None, "{number}");
    }
    place.send_replace(hub.place.borrow().clone());
    for number in each_third(1) {
        leave(node, number).await;
    }
    hub.has_all(nodes).await;
    hub.is_applied(last, 3).await;
    for number in each_third(2) {
        leave(node, number).await;
    }
    for number in numbers {
        is_gone(nodes, number).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cleared_content_returns_in_100_of_100_clears_with_a_writer_on_each_node() {
    let mut hub = Hub::start().await;
    let Some(mut nodes) = hub.nodes(&["a", "b"]).await else {
        return;
    };
    // This node finds the controller by itself.
    let place = watch::Sender::new(hub.place.borrow().clone());
    let own = place.subscribe();
    let Some(third) = Node::with("c", |start| start.controller = Some(own)).await else {
        return;
    };
    hub.nodes
        .0
        .lock()
        .push((third.id.clone(), third.key.name()));
    nodes.push(third);
    introduce(&nodes);
    hub.has_all(&nodes).await;

    here_and_elsewhere(&mut hub, &nodes).await;
    for turn in 0..4 {
        let from = 2 * EACH + turn * EACH / 4;
        away(&mut hub, &place, &nodes, from..from + EACH / 4).await;
    }
    // The names are as good as new.
    for (number, node) in nodes.iter().enumerate() {
        let key = key(number);
        node.commit(&format!("new-{number}"), &task(&key), "new")
            .await;
        eventually("the content is found", || hub.finds(&reference(number))).await;
        let other = &nodes[(number + 1) % nodes.len()];
        assert_eq!(
            other.sees(&format!("new-{number}"), &task(&key)).await,
            text("new")
        );
    }
    finish(hub, nodes).await;
}
