//! Each type of volume, and where its content is: on its node, on one other node, on two, being
//! made elsewhere, nowhere, or on a node that is away; and without the controller. A fetch whose
//! content is evicted, whose pod is deleted, and whose driver is killed. Many pods of one artifact.

use std::fmt::Write as _;

use super::fetches::{LARGE, kept, received};
use super::peers::{figures, step_with};
use super::{ENDS, only_on, pod_with};
use crate::cluster::{Cluster, eventually, succeed};
use crate::env::Env;

const CONTROLLER: &str = "deployment/baggageclaim-controller";
/// What a step makes under a name. The input is the output of the same name.
const MADE: [(&str, &str); 3] = [
    ("output", "type: output, name"),
    ("task-cache", "type: task-cache, key"),
    ("resource-cache", "type: resource-cache, key"),
];

/// `one` is the node of the controller.
pub(super) fn everywhere(env: &Env, one: &Cluster, two: &Cluster, three: &Cluster) {
    makes(env, "first", two);
    let asked = |node: &Cluster| figures(node)["questions"].clone();
    let before = asked(two);
    reads(env, "first", two);
    assert_eq!(asked(two), before, "content on the node asks no other");
    // Of one other node, and then of two.
    for node in [three, one] {
        let before = fetches(node);
        reads(env, "first", node);
        assert_eq!(fetches(node), before + 3, "{}", node.name());
    }
    nowhere_and_coming(env, two, three);
    away(env, two, three);
    without_controller(env, two, three);
    disturbed(env, two, three);
    crowd(env, two, [one, two, three]);
}

/// The number of fetches from peers since the node's driver started.
fn fetches(node: &Cluster) -> u64 {
    figures(node)["fetches"].as_u64().unwrap_or_default()
}

/// A pod with a volume of each type, whose content is its own name or that of `name`.
fn of_each_type(pod: &str, name: &str, node: &Cluster, reads: bool, command: &str) -> String {
    let volumes = MADE.map(|(volume, attributes)| {
        let attributes = match volume {
            "output" if reads => format!("type: input, from: artifact/{name}"),
            _ => format!("{attributes}: {name}"),
        };
        let driver = "driver: baggageclaim.csi.concourse-ci.org";
        let source = format!("csi: {{{driver}, volumeAttributes: {{{attributes}}}}}");
        (volume.to_owned(), source)
    });
    let more = format!("{ENDS}\n  {}", only_on(node));
    pod_with(pod, &more, volumes, command)
}

/// A command for the volume of each type, `/$it`.
fn for_each_type(command: &str) -> String {
    let volumes = MADE.map(|(volume, _)| volume).join(" ");
    format!("for it in {volumes}; do {command}; done")
}

/// Has a pod make an output, a task cache and a resource cache of one name.
fn makes(env: &Env, name: &str, node: &Cluster) {
    let write = for_each_type(&format!("echo {name} > /$it/text"));
    env.apply_text(&of_each_type(name, name, node, false, &write));
    env.succeeded(name);
    for kind in ["artifact", "task-cache", "resource-cache"] {
        kept(node, &format!("{kind}/{name}"));
    }
}

/// A pod gets all three.
fn reads(env: &Env, name: &str, node: &Cluster) {
    let pod = format!("{name}-on-{}", node.name());
    let read = for_each_type(&format!("grep -x {name} /$it/text"));
    env.apply_text(&of_each_type(&pod, name, node, true, &read));
    env.succeeded(&pod);
}

/// The caches of a name start empty.
fn caches_are_empty(env: &Env, name: &str, node: &Cluster) {
    for kind in ["task-cache", "resource-cache"] {
        let attributes = format!("type: {kind}, key: {name}, commit: never");
        let pod = format!("{kind}-{name}");
        let empty = "[ -z \"$(ls -A /work)\" ]";
        env.apply_text(&step_with(&pod, node, "work", &attributes, empty));
        env.succeeded(&pod);
    }
}

/// A pod begins to wait for the input of a name. Its own name is what this returns.
fn waits(env: &Env, name: &str, node: &Cluster) -> String {
    let pod = format!("waits-for-{name}");
    let (input, read) = (
        format!("type: input, from: artifact/{name}"),
        format!("grep -x {name} /work/text"),
    );
    env.apply_text(&step_with(&pod, node, "work", &input, &read));
    env.event(&pod, &[&format!("artifact/{name}")]);
    pod
}

/// Caches that no node has start empty. An input waits until another node has made it.
fn nowhere_and_coming(env: &Env, two: &Cluster, three: &Cluster) {
    caches_are_empty(env, "nowhere", three);
    let pod = waits(env, "coming", three);
    makes(env, "coming", two);
    env.succeeded(&pod);
}

/// Of a node whose cable is pulled a cache is not to be had, and an input waits for it.
fn away(env: &Env, two: &Cluster, three: &Cluster) {
    makes(env, "away", two);
    let cable = two.cut_off();
    caches_are_empty(env, "away", three);
    let pod = waits(env, "away", three);
    drop(cable);
    env.succeeded(&pod);
    super::node_is_ready(env, two);
}

/// Without a controller, all peers are asked.
fn without_controller(env: &Env, two: &Cluster, three: &Cluster) {
    let scale = |replicas: &str| {
        let replicas = format!("--replicas={replicas}");
        let scale = ["scale", CONTROLLER, "--namespace=baggageclaim", &replicas];
        succeed(&mut env.cluster.kubectl(&scale));
    };
    scale("0");
    eventually("no node hears the controller", || {
        [two, three]
            .iter()
            .all(|node| figures(node)["catalog"] == false)
            .then_some(())
    });
    makes(env, "alone", two);
    reads(env, "alone", three);
    scale("1");
    eventually("the nodes hear the controller", || {
        let nodes = env.cluster.nodes();
        let hear = |node: &Cluster| figures(node)["catalog"] == true;
        nodes.iter().all(hear).then_some(())
    });
}

/// A pod that waits for a fetch is deleted, and the next pod joins the fetch. The driver is killed,
/// and fetches again. The content is deleted where it comes from, and all of it arrives.
fn disturbed(env: &Env, two: &Cluster, three: &Cluster) {
    let output = "type: output, name: endless";
    let write =
        format!("head -c {LARGE} /dev/urandom > /work/data; sha256sum /work/data > /work/sum");
    env.apply_text(&step_with("makes-endless", two, "work", output, &write));
    env.succeeded("makes-endless");
    kept(two, "artifact/endless");
    let input = "type: input, from: artifact/endless";
    let reads = |pod: &str| {
        env.apply_text(&step_with(
            pod,
            three,
            "work",
            input,
            "sha256sum -c /work/sum",
        ));
    };
    let comes = |bytes: u64| {
        eventually("the content comes", || {
            (received(three) >= bytes).then_some(())
        });
    };
    let before = received(three);
    reads("is-deleted");
    comes(before + LARGE / 8);
    env.kubectl(&["delete", "pod", "is-deleted", "--force", "--grace-period=0"]);
    reads("reads-endless");
    comes(before + LARGE / 4);
    three.replace_driver();
    three.driver_ready();
    comes(LARGE / 8);
    let tenant = env.namespace();
    let destroyed = two.driver(&["destroy", "artifact/endless", "--tenant", tenant]);
    assert!(destroyed.status.success(), "{destroyed:?}");
    env.succeeded("reads-endless");
    assert!(received(three) < LARGE * 3 / 2, "it came once");
}

/// A hundred pods on three nodes: each of the other two nodes fetches once, and gets each byte
/// once.
fn crowd(env: &Env, holder: &Cluster, nodes: [&Cluster; 3]) {
    const PODS: usize = 100;
    const SIZE: u64 = 1 << 20;
    let output = "type: output, name: shared-by-all";
    let write =
        format!("head -c {SIZE} /dev/urandom > /work/data; echo shared-by-all > /work/text");
    env.apply_text(&step_with("makes-shared", holder, "work", output, &write));
    env.succeeded("makes-shared");
    kept(holder, "artifact/shared-by-all");
    let before = nodes.map(|node| (fetches(node), received(node)));
    let input = "type: input, from: artifact/shared-by-all";
    let read = "grep -x shared-by-all /work/text";
    let mut all = String::new();
    for (number, node) in (0..PODS).zip(nodes.iter().cycle()) {
        let _ = write!(
            all,
            "{}",
            step_with(&format!("crowd-{number}"), node, "work", input, read)
        );
    }
    env.apply_text(&all);
    for number in 0..PODS {
        env.succeeded(&format!("crowd-{number}"));
    }
    for (node, (fetched, came)) in nodes.into_iter().zip(before) {
        let times = u64::from(node.name() != holder.name());
        assert_eq!(fetches(node), fetched + times, "{}", node.name());
        let came = received(node) - came;
        let expected = times * SIZE..=times * SIZE * 3 / 2;
        assert!(expected.contains(&came), "{}: {came}", node.name());
    }
}
