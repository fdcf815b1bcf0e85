//! How long a publish takes that may not read what it names, and one that names what no node has.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baggageclaim::model::{NamespacePolicy, Outcome, Rule, Tenant};

use crate::catalog::{Hub, finish, have_policies};
use crate::common::bench::eventually;
use crate::nodes::{Node, introduce, tenant};

const TIMES: usize = 1_000;
/// How much longer the slowest median may be than the fastest one, in per cent.
const MOST: f64 = 2.0;

/// Publishes a volume of a pod in the namespace `other` that reads in `ci`, and ends it: how long
/// the publish took, and its error.
async fn publish(
    node: &Node,
    volume: &str,
    attributes: &[(&str, &str)],
) -> (Duration, Option<String>) {
    let attributes = [attributes, &[("fromNamespace", "ci")]].concat();
    let mut request = node.bench.request(volume, volume, &attributes);
    request.tenant = tenant("other");
    let began = Instant::now();
    let published = async {
        node.distribution.bring(&mut request).await?;
        node.bench.engine.publish(request).await
    };
    let published = published.await;
    let took = began.elapsed();
    if published.is_ok() {
        node.bench.outcome(volume, Outcome::Failed).await;
        node.bench.unpublish(volume).await;
        node.bench.quiet().await;
    }
    (took, published.err().map(|error| error.to_string()))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// The names are on node `a`, on both, and nowhere. The pod is on node `b`, and reads none of them.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement, on an idle machine: cargo test --release --test peers unreadable -- --ignored --nocapture"]
async fn unreadable_content_takes_as_long_as_missing_content() {
    let hub = Hub::start().await;
    let Some(mut nodes) = hub.nodes(&["a"]).await else {
        return;
    };
    let place = hub.place.subscribe();
    let second = Node::with("b", |start| {
        start.controller = Some(place);
        start.settings.input_wait = Duration::ZERO;
    });
    let Some(second) = second.await else { return };
    hub.nodes
        .0
        .lock()
        .push((second.id.clone(), second.key.name()));
    nodes.push(second);
    introduce(&nodes);
    hub.has_all(&nodes).await;
    let names = ["there", "here", "none"];
    for (name, on) in [("there", &nodes[..1]), ("here", &nodes[..])] {
        for node in on {
            let task = [("type", "task-cache"), ("key", name)];
            node.commit(&format!("{name}-cache"), &task, "text").await;
            let output = [("type", "output"), ("name", name)];
            node.commit(&format!("{name}-output"), &output, "text")
                .await;
            let resource = [("type", "resource-cache"), ("key", name)];
            node.commit(&format!("{name}-resource"), &resource, "text")
                .await;
        }
        for kind in ["task-cache", "artifact", "resource-cache"] {
            let name = format!("{kind}/{name}");
            eventually("the content is found", || hub.finds(&name)).await;
        }
    }
    let rule = Rule {
        names: ["task-cache/*", "artifact/*", "resource-cache/*"]
            .map(|it| it.parse().expect("a pattern"))
            .to_vec(),
        commit: None,
        read: [tenant("another")].into(),
    };
    let policy = NamespacePolicy {
        rules: vec![rule],
        ..NamespacePolicy::default()
    };
    let policies: BTreeMap<Tenant, NamespacePolicy> = [(tenant("ci"), policy)].into();
    hub.set_policies(&policies);
    have_policies(&nodes, &policies).await;

    for kind in ["task-cache", "input", "resource-cache"] {
        let mut times = BTreeMap::<&str, Vec<Duration>>::new();
        for number in 0..TIMES {
            for turn in 0..names.len() {
                let name = names[(number + turn) % names.len()];
                let from = format!("artifact/{name}");
                let cache = [("type", kind), ("key", name), ("commit", "never")];
                let attributes = match kind {
                    "input" => &[("type", kind), ("from", from.as_str())][..],
                    _ => &cache,
                };
                let volume = format!("{kind}-{name}-{number}");
                let (took, error) = publish(&nodes[1], &volume, attributes).await;
                let expected = (kind == "input").then_some("not sealed yet");
                let is_expected = error.as_deref().map(|it| it.contains("not sealed yet"));
                assert_eq!(is_expected, expected.map(|_| true), "{error:?}");
                times.entry(name).or_default().push(took);
            }
        }
        let mut medians = Vec::new();
        for (name, times) in times {
            let median = median(times);
            println!("{kind} of {name}: median {median:?}");
            medians.push(median);
        }
        medians.sort_unstable();
        let more = (medians[names.len() - 1].div_duration_f64(medians[0]) - 1.0) * 100.0;
        assert!(more < MOST, "{kind}: the medians differ by {more:.1} %");
    }
    finish(hub, nodes).await;
}
