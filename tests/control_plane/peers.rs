//! Nodes that are peers: content of one node for the pods of another, and for nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use baggageclaim::api::Pool;
use baggageclaim::catalog::MAX_INCOMPLETE;
use baggageclaim::kubelet_double::{Kubelet, Pod, PublishOptions};
use baggageclaim::link::{Key, connect};
use baggageclaim::proto::peer::v1 as wire;
use kube::Api;
use rustix::process::Signal;
use serde_json::Value;
use tonic::{Code, Status};
use wire::peer_client::PeerClient;

use crate::common::{Fs, Lab, require_lab};
use crate::driver::{Process, controller_with, kubelet, node_with};
use crate::eventually;
use crate::plane::{ControlPlane, free_port};

pub(crate) const CACHE: &str = "{type: task-cache, key: go}";
const OUTPUT: &str = "{type: output, name: built}";
const INPUT: &str = "{type: input, from: artifact/built}";
const SCRATCH: &str = "{type: scratch}";
/// What kubelet says of such a volume. The ones that a test reads through are never kept.
pub(crate) const MADE: [[(&str, &str); 3]; 2] = [
    [("type", "task-cache"), ("key", "go"), ("commit", "always")],
    [("type", "output"), ("name", "built"), ("commit", "always")],
];
pub(crate) const READ: [(&str, &str); 3] =
    [("type", "task-cache"), ("key", "go"), ("commit", "never")];
const RESOURCE: &str = "{type: resource-cache, key: git}";
const READ_RESOURCE: [(&str, &str); 2] = [("type", "resource-cache"), ("key", "git")];
const READ_INPUT: [(&str, &str); 2] = [("type", "input"), ("from", "artifact/built")];

/// Makes the objects of nodes, from `node-1` on.
pub(crate) fn nodes(plane: &ControlPlane, count: usize) {
    for number in 1..=count {
        let node = format!("{{apiVersion: v1, kind: Node, metadata: {{name: node-{number}}}}}");
        plane.apply(&format!("node-{number}"), &node);
    }
}

/// A node that is a peer, on its own port. No chance decides: every answer is waited for.
pub(crate) fn peer(plane: &ControlPlane, name: &str, pool: &Path) -> Process {
    peer_with(plane, name, pool, "--ask=60s")
}

/// The same, with another time that it waits for answers.
fn peer_with(plane: &ControlPlane, name: &str, pool: &Path, ask: &str) -> Process {
    let listen = format!("--peer-listen=127.0.0.1:{}", free_port());
    node_with(plane, name, pool, &[&listen, ask])
}

/// The node has had the policies before, else its commits would wait for a controller.
fn has_had_policies(pool: &Path) {
    let policies = r#"{"format":1,"namespaces":{}}"#;
    fs::write(pool.join("policies.json"), policies).expect("write");
}

/// What the driver of a pool answers to a verb of the command line.
pub(crate) fn told(pool: &Path, verb: &str) -> Value {
    let answer = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args([verb, "--output=json", "--pool"])
        .arg(pool)
        .output()
        .expect("it runs");
    serde_json::from_slice(&answer.stdout).expect("JSON")
}

/// What a verb of the command line says that asks the controller.
pub(crate) fn tells(controller: &Process, verb: &[&str]) -> String {
    let answer = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(verb)
        .arg("--socket")
        .arg(&controller.socket)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&answer.stderr);
    assert!(answer.status.success(), "{verb:?}: {said}");
    String::from_utf8(answer.stdout).expect("text")
}

/// The same as JSON.
pub(crate) fn asked(controller: &Process, verb: &[&str]) -> Value {
    let verb = [verb, &["--output=json"]].concat();
    serde_json::from_str(&tells(controller, &verb)).expect("JSON")
}

/// The counters of a node's peers.
fn figures(pool: &Path) -> Value {
    told(pool, "status")["peers"].clone()
}

/// Waits until a node knows so many others.
pub(crate) async fn knows(pool: &Path, others: u64) {
    eventually("the node knows the others", async || {
        figures(pool)["peers"] == others
    })
    .await;
}

/// Makes the object of a pod on a node, with one volume; returns its uid.
pub(crate) fn object(
    plane: &ControlPlane,
    namespace: &str,
    name: &str,
    node: &str,
    volume: &str,
) -> String {
    let text = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: {namespace}}}, \
         spec: {{nodeName: {node}, containers: [{{name: step, image: busybox}}], \
         volumes: [{{name: work, csi: {{driver: baggageclaim.csi.concourse-ci.org, \
         volumeAttributes: {volume}}}}}]}}}}"
    );
    plane.apply(&format!("{namespace}-{name}"), &text);
    let namespace = format!("--namespace={namespace}");
    let uid = "-o=jsonpath={.metadata.uid}";
    plane.kubectl(&["get", "pod", name, &namespace, uid])
}

pub(crate) async fn publish(pod: &Pod, attributes: &[(&str, &str)]) -> PathBuf {
    let attributes = attributes.iter().copied();
    let published = pod.publish("work", attributes, PublishOptions::default());
    published.await.expect("published").target
}

pub(crate) async fn unpublish(pod: &Pod) {
    pod.unpublish("work").await.expect("unpublished");
    pod.remove().expect("removed");
}

/// A pod on a node commits a task cache of so many bytes.
pub(crate) async fn commit(
    plane: &ControlPlane,
    kubelet: &Kubelet,
    (node, pod): (&str, &str),
    (key, size): (&str, usize),
) {
    let volume = format!("{{type: task-cache, key: \"{key}\", commit: always}}");
    let uid = object(plane, "ci", pod, node, &volume);
    let pod = kubelet.pod_with_uid("ci", pod, uid);
    let attributes = [("type", "task-cache"), ("key", key), ("commit", "always")];
    let target = publish(&pod, &attributes).await;
    fs::write(target.join("file"), vec![7; size]).expect("write");
    unpublish(&pod).await;
}

/// Both pods of node 1 end, and what they made is durable.
pub(crate) async fn make(plane: &ControlPlane, kubelet: &Kubelet, pool: &Path) {
    for (name, volume, attributes) in [("cache", CACHE, MADE[0]), ("output", OUTPUT, MADE[1])] {
        makes(plane, kubelet, (name, volume), &attributes).await;
    }
    are_durable(pool, 2).await;
}

/// After [`make`], a pod of node 1 also makes a resource cache.
async fn make_resource(plane: &ControlPlane, kubelet: &Kubelet, pool: &Path) {
    let marked = [&READ_RESOURCE[..], &[("commit", "on-marker")]].concat();
    makes(plane, kubelet, ("resource", RESOURCE), &marked).await;
    are_durable(pool, 3).await;
}

/// A pod of node 1 leaves its name in its volume, and the marker if the volume needs it.
async fn makes(
    plane: &ControlPlane,
    kubelet: &Kubelet,
    (name, volume): (&str, &str),
    attributes: &[(&str, &str)],
) {
    let uid = object(plane, "ci", name, "node-1", volume);
    let pod = kubelet.pod_with_uid("ci", name, uid);
    let target = publish(&pod, attributes).await;
    fs::write(target.join("text"), name).expect("write");
    if attributes.contains(&("commit", "on-marker")) {
        fs::write(target.join(".baggageclaim-commit"), "").expect("write");
    }
    unpublish(&pod).await;
}

/// A node has so many artifacts, all of them durable.
async fn are_durable(pool: &Path, count: usize) {
    eventually("all are durable", async || {
        let listed = told(pool, "artifacts");
        let listed = listed.as_array().expect("a list");
        listed.len() == count && listed.iter().all(|one| one["durable"] == true)
    })
    .await;
}

/// Asks a node as a program that has this key.
async fn ask(to: &Pool, key: &Key, pod: &str, uid: &str) -> Result<(), Status> {
    let peer = to.status.as_ref().and_then(|status| status.peer.clone());
    let peer = peer.expect("it is published");
    let pinned = peer.key.parse().expect("a key");
    let channel = connect(key, pinned, peer.address).expect("TLS");
    let request = wire::GetArtifactRequest {
        ask: Some(wire::Ask {
            tenant: "ci".to_owned(),
            reference: "task-cache/go".to_owned(),
            pod: pod.to_owned(),
            pod_uid: uid.to_owned(),
            pod_namespace: String::new(),
            clone: None,
        }),
    };
    let answer = PeerClient::new(channel).get_artifact(request).await;
    answer.map(drop)
}

/// The flag of a controller with its catalog, at an address that it keeps.
pub(crate) fn hub_flag(plane: &ControlPlane) -> String {
    let map = "{apiVersion: v1, kind: ConfigMap, metadata: {name: baggageclaim-controller, \
               namespace: default}}";
    plane.apply("hub", map);
    format!("--hub-listen=127.0.0.1:{}", free_port())
}

/// A controller with its catalog.
pub(crate) fn hub(plane: &ControlPlane) -> Process {
    controller_with(plane, &[&hub_flag(plane)])
}

/// A controller with its catalog and two nodes with a stream to it, which know each other, with
/// their pools and kubelets. `object`s of pods in the namespace `ci` can be made.
pub(crate) struct Pair {
    pub(crate) controller: Process,
    pub(crate) pools: [PathBuf; 2],
    pub(crate) nodes: [Process; 2],
    pub(crate) kubelets: [Kubelet; 2],
}

impl Pair {
    pub(crate) async fn start(plane: &ControlPlane, lab: &Lab) -> Self {
        nodes(plane, 2);
        let controller = hub(plane);
        let pools = [lab.dir("one"), lab.dir("two")];
        let nodes = [
            peer(plane, "node-1", &pools[0]),
            peer(plane, "node-2", &pools[1]),
        ];
        let kubelets = [
            kubelet(plane, "node-1", &nodes[0]).await,
            kubelet(plane, "node-2", &nodes[1]).await,
        ];
        for pool in &pools {
            knows(pool, 1).await;
            is_told(pool, true).await;
        }
        Self {
            controller,
            pools,
            nodes,
            kubelets,
        }
    }
}

/// Waits until a node has a stream to the controller, or has none.
pub(crate) async fn is_told(pool: &Path, expected: bool) {
    eventually(
        "the node has a stream to the controller, or none",
        async || figures(pool)["catalog"] == expected,
    )
    .await;
}

#[tokio::test]
async fn the_controller_tells_which_node_has_the_content_and_may_be_away() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    nodes(&plane, 3);
    let mut controller = hub(&plane);
    let pools = [lab.dir("one"), lab.dir("two"), lab.dir("three")];
    let one = peer(&plane, "node-1", &pools[0]);
    let two = peer(&plane, "node-2", &pools[1]);
    let mut three = peer(&plane, "node-3", &pools[2]);
    let kubelet_one = kubelet(&plane, "node-1", &one).await;
    let kubelet_two = kubelet(&plane, "node-2", &two).await;
    for pool in &pools {
        knows(pool, 2).await;
        is_told(pool, true).await;
    }
    make(&plane, &kubelet_one, &pools[0]).await;

    // Node 2 asks node 1 alone.
    let uid = object(&plane, "ci", "cache-two", "node-2", CACHE);
    let reader = kubelet_two.pod_with_uid("ci", "cache-two", uid);
    let target = publish(&reader, &READ).await;
    let text = fs::read_to_string(target.join("text"));
    assert_eq!(text.expect("it came"), "cache", "{}", two.tail());
    unpublish(&reader).await;
    assert_eq!(figures(&pools[1])["questions"], 1, "{}", two.tail());
    assert_eq!(figures(&pools[1])["located"], 1);

    // People ask the controller the same.
    eventually("the controller has heard of the copy", async || {
        let explained = asked(&controller, &["explain", "task-cache/go", "--namespace=ci"]);
        assert_eq!(explained["answer"], "found", "{explained}");
        assert_eq!(explained["nodes"][0]["node"], "node-1", "{explained}");
        explained["nodes"][1]["state"] == "current"
    })
    .await;
    let caches = asked(&controller, &["caches", "--cluster"]);
    assert_eq!(caches[0]["reference"], "task-cache/go", "{caches}");
    assert_eq!(caches[0]["nodes"][1], "node-2", "{caches}");
    assert_eq!(caches.as_array().map(Vec::len), Some(1), "{caches}");

    // Without a controller it asks both.
    controller.kill();
    is_told(&pools[1], false).await;
    let uid = object(&plane, "ci", "input-two", "node-2", INPUT);
    let reader = kubelet_two.pod_with_uid("ci", "input-two", uid);
    let target = publish(&reader, &READ_INPUT).await;
    let text = fs::read_to_string(target.join("text"));
    assert_eq!(text.expect("it came"), "output", "{}", two.tail());
    unpublish(&reader).await;
    assert_eq!(figures(&pools[1])["questions"], 3, "{}", two.tail());

    // Its next process has another key, and gets all accounts.
    controller.start();
    for pool in &pools {
        is_told(pool, true).await;
    }
    assert!(controller.log().contains("a node's stream began"));
    finds_by_beginnings(&plane, &three, &one, &pools[0]).await;
    controller.kill();
    is_told(&pools[1], false).await;
    three.kill();
    is_named_as_away(&plane, &kubelet_two, "node-3").await;

    nothing_waits_for_deleted_nodes(&plane, &mut controller, (&two, &pools)).await;
}

/// Node 3 is killed. A controller that starts waits for its account, until its Node object is
/// deleted. Node 2 hangs with an open stream, which ends with its Pool.
async fn nothing_waits_for_deleted_nodes(
    plane: &ControlPlane,
    controller: &mut Process,
    (two, pools): (&Process, &[PathBuf; 3]),
) {
    let began = Instant::now();
    controller.start();
    for pool in &pools[..2] {
        is_told(pool, true).await;
    }
    let explained = |name: &str| asked(controller, &["explain", name, "--namespace=ci"]);
    let missing = || explained("task-cache/missing")["answer"].clone();
    assert_eq!(missing(), "incomplete", "{}", controller.tail());
    plane.kubectl(&["delete", "node", "node-3"]);
    eventually("the catalog is complete", async || missing() == "nothing").await;
    // After this time it would be complete in any case.
    let took = began.elapsed();
    assert!(took < MAX_INCOMPLETE, "{took:?}: {}", controller.tail());

    let holders = || {
        let explained = explained("task-cache/go");
        let nodes = explained["nodes"].as_array().expect("a list");
        let names = nodes.iter().map(|it| it["node"].clone());
        names.collect::<Vec<_>>()
    };
    assert_eq!(holders(), ["node-1", "node-2"], "{}", controller.tail());
    two.signal(Signal::STOP);
    for object in ["node", "pool"] {
        plane.kubectl(&["delete", object, "node-2"]);
    }
    eventually("the catalog has no node 2", async || {
        holders() == ["node-1"]
    })
    .await;
    // It was not a ping without an answer that ended the stream.
    let log = controller.log();
    let why = ["stream ended", "node-2", "the stream was closed"];
    let is_it = |line: &str| why.iter().all(|part| line.contains(part));
    assert!(log.lines().any(is_it), "{}", controller.tail());
}

/// The Pool of node 2 names this node, which did not answer it, and no other.
async fn is_named_as_away(plane: &ControlPlane, kubelet_two: &Kubelet, node: &str) {
    let uid = object(
        plane,
        "ci",
        "asks",
        "node-2",
        "{type: task-cache, key: none}",
    );
    let reader = kubelet_two.pod_with_uid("ci", "asks", uid);
    let attributes = [("type", "task-cache"), ("key", "none"), ("commit", "never")];
    publish(&reader, &attributes).await;
    unpublish(&reader).await;
    let pools: Api<Pool> = Api::all(plane.client.clone());
    eventually("the Pool names it", async || {
        let pool = pools.get("node-2").await.expect("its Pool");
        let peer = pool.status.and_then(|status| status.peer);
        peer.expect("it is published").away == [node]
    })
    .await;
}

/// A beginning of keys finds the key of another node, and the pod's object gives the right to it.
async fn finds_by_beginnings(plane: &ControlPlane, three: &Process, one: &Process, pool: &Path) {
    let kubelet_three = kubelet(plane, "node-3", three).await;
    let begins = "{type: task-cache, key: new, restoreKeys: \"none-*, g*\"}";
    for (pod, volume, expected) in [
        (
            "forged",
            "{type: task-cache, key: new, restoreKeys: \"none-*\"}",
            None,
        ),
        (
            "whole",
            "{type: task-cache, key: new, restoreKeys: g}",
            None,
        ),
        ("begins", begins, Some("cache")),
    ] {
        let refused = figures(pool)["refused"].as_u64();
        let uid = object(plane, "ci", pod, "node-3", volume);
        let reader = kubelet_three.pod_with_uid("ci", pod, uid);
        let attributes = [
            ("type", "task-cache"),
            ("key", "new"),
            ("restoreKeys", "none-*, g*"),
            ("commit", "never"),
        ];
        let target = publish(&reader, &attributes).await;
        let text = fs::read_to_string(target.join("text")).ok();
        assert_eq!(text.as_deref(), expected, "{pod}: {}", three.tail());
        unpublish(&reader).await;
        let now = figures(pool)["refused"].as_u64();
        assert_eq!(now > refused, expected.is_none(), "{pod}: {}", one.tail());
    }
}

/// What node 2 asks for pods that give it no right is refused, and logged. Each starts empty.
/// Returns the uids of `right`, which has the right, and of `stranger` of another namespace.
async fn pods_without_right_get_nothing(
    plane: &ControlPlane,
    holder: (&Process, &Path),
    asking: &Kubelet,
) -> (String, String) {
    let (one, pool_one) = holder;
    let elsewhere = object(plane, "ci", "elsewhere", "node-1", CACHE);
    let stranger = object(plane, "other", "stranger", "node-2", CACHE);
    let without = object(plane, "ci", "without", "node-2", SCRATCH);
    let right = object(plane, "ci", "right", "node-2", CACHE);
    let ended = object(plane, "ci", "ended", "node-2", CACHE);
    let status = r#"--patch={"status": {"phase": "Succeeded"}}"#;
    let to = ["--namespace=ci", "--subresource=status", "--type=merge"];
    plane.kubectl(&[&["patch", "pod", "ended", status], &to[..]].concat());
    for (pod, uid, why) in [
        ("elsewhere", &elsewhere, "does not run on that node"),
        ("stranger", &stranger, "of namespace ci does not exist"),
        ("without", &without, "has no volume that starts from"),
        ("right", &stranger, "has another uid"),
        ("ended", &ended, "has ended"),
    ] {
        let refused = figures(pool_one)["refused"].as_u64().expect("a number");
        let forged = asking.pod_with_uid("ci", pod, uid);
        let target = publish(&forged, &READ).await;
        assert!(!target.join("text").exists(), "{pod} got content");
        unpublish(&forged).await;
        let now = figures(pool_one)["refused"].as_u64();
        assert_eq!(now, Some(refused + 1), "{pod}:\n{}", one.tail());
        eventually("the refusal is logged", async || {
            let log = one.log();
            let mut lines = log.lines();
            lines.any(|line| line.contains("refused:") && line.contains(why))
        })
        .await;
    }
    (right, stranger)
}

#[tokio::test]
async fn a_pod_gets_the_content_of_another_node_and_no_other_request_does() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let (pool_one, pool_two) = (lab.dir("one"), lab.dir("two"));
    for pool in [&pool_one, &pool_two] {
        has_had_policies(pool);
    }
    let one = peer(&plane, "node-1", &pool_one);
    let mut two = peer(&plane, "node-2", &pool_two);
    let kubelet_one = kubelet(&plane, "node-1", &one).await;
    let kubelet_two = kubelet(&plane, "node-2", &two).await;
    for namespace in ["ci", "other"] {
        plane.kubectl(&["create", "namespace", namespace]);
    }
    knows(&pool_one, 1).await;
    knows(&pool_two, 1).await;
    make(&plane, &kubelet_one, &pool_one).await;

    let holder = (&one, &*pool_one);
    let (right, stranger) = pods_without_right_get_nothing(&plane, holder, &kubelet_two).await;
    // An honest pod of another namespace has the same name there, which is another one.
    let honest = kubelet_two.pod_with_uid("other", "stranger", &stranger);
    let target = publish(&honest, &READ).await;
    assert!(
        !target.join("text").exists(),
        "content of another namespace"
    );
    unpublish(&honest).await;
    // A program without a node's key, that knows a pod which has the right.
    let pools: Api<Pool> = Api::all(plane.client.clone());
    let pool = pools.get("node-1").await.expect("its Pool");
    let key = Key::generate().expect("a key");
    let refused = ask(&pool, &key, "right", &right).await;
    let refused = refused.expect_err("no node has this key");
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    assert_eq!(figures(&pool_one)["offered"], 0, "{}", one.tail());

    let reader = kubelet_two.pod_with_uid("ci", "right", &right);
    let target = publish(&reader, &READ).await;
    let text = fs::read_to_string(target.join("text"));
    assert_eq!(text.expect("it came"), "cache", "{}", two.tail());
    unpublish(&reader).await;

    // A new key takes effect, here and there.
    let before = pools.get("node-2").await.expect("its Pool").status;
    two.kill();
    two.start();
    let kubelet_two = kubelet(&plane, "node-2", &two).await;
    let uid = object(&plane, "ci", "input", "node-2", INPUT);
    let reader = kubelet_two.pod_with_uid("ci", "input", uid);
    let target = publish(&reader, &READ_INPUT).await;
    let text = fs::read_to_string(target.join("text"));
    assert_eq!(text.expect("it came"), "output", "{}", two.tail());
    unpublish(&reader).await;
    let after = pools.get("node-2").await.expect("its Pool").status;
    let key = |status: Option<baggageclaim::api::PoolStatus>| {
        status
            .and_then(|status| status.peer)
            .expect("it is published")
            .key
    };
    assert_ne!(key(before), key(after));
}

/// A pod, the attributes of its volume, and the text that it starts with.
type Reader<'a> = (Pod, &'a [(&'a str, &'a str)], &'a str);

/// Each pod starts from content of its own node, which asks no peer for it.
async fn is_used_here((node, pool): (&Process, &Path), pods: &[Reader<'_>]) {
    let asked = figures(pool)["questions"].clone();
    for (pod, attributes, content) in pods {
        let target = publish(pod, attributes).await;
        let text = fs::read_to_string(target.join("text"));
        assert_eq!(text.expect("it is here"), *content, "{}", node.tail());
        let now = figures(pool)["questions"].clone();
        assert_eq!(now, asked, "a peer was asked");
        unpublish(pod).await;
    }
}

/// The API server hangs. A node that cannot check a pod gives it nothing, and says why. That is no
/// refusal for good: a cache starts empty, and an input waits until there is an answer again.
#[tokio::test]
async fn while_the_api_server_is_away_nodes_give_each_other_nothing_and_an_input_waits() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    let pools = [lab.dir("one"), lab.dir("two"), lab.dir("three")];
    for pool in &pools {
        has_had_policies(pool);
    }
    let one = peer(&plane, "node-1", &pools[0]);
    let two = peer(&plane, "node-2", &pools[1]);
    // It waits less than node 1 waits for the API server (5 s for a connection).
    let three = peer_with(&plane, "node-3", &pools[2], "--ask=1s");
    let kubelet_one = kubelet(&plane, "node-1", &one).await;
    let kubelet_two = kubelet(&plane, "node-2", &two).await;
    let kubelet_three = kubelet(&plane, "node-3", &three).await;
    for pool in &pools {
        knows(pool, 2).await;
    }
    make(&plane, &kubelet_one, &pools[0]).await;
    let pod = |kubelet: &Kubelet, node: &str, name: &str, volume: &str| {
        let uid = object(&plane, "ci", name, node, volume);
        kubelet.pod_with_uid("ci", name, uid)
    };
    make_resource(&plane, &kubelet_one, &pools[0]).await;
    let never = [&READ_RESOURCE[..], &[("commit", "never")]].concat();
    let here = [
        ("input-one", INPUT, &READ_INPUT[..], "output"),
        ("cache-one", CACHE, &READ[..], "cache"),
        ("resource-one", RESOURCE, &never[..], "resource"),
    ]
    .map(|(name, volume, reads, content)| {
        (pod(&kubelet_one, "node-1", name, volume), reads, content)
    });
    let caches = [
        ("cache-two", CACHE, &READ[..]),
        ("resource-two", RESOURCE, &never[..]),
    ]
    .map(|(name, volume, reads)| (pod(&kubelet_two, "node-2", name, volume), reads));
    let input = pod(&kubelet_two, "node-2", "input-two", INPUT);
    let hurried = pod(&kubelet_three, "node-3", "hurried", CACHE);

    plane.signal_server(Signal::STOP);
    let all = async {
        is_used_here((&one, &pools[0]), &here).await;
        let began = Instant::now();
        let target = publish(&hurried, &READ).await;
        let took = began.elapsed();
        assert!(!target.join("text").exists(), "it was not checked");
        assert!(took < Duration::from_secs(4), "{took:?}: {}", three.tail());
        unpublish(&hurried).await;
        for (cache, attributes) in &caches {
            let target = publish(cache, attributes).await;
            assert!(!target.join("text").exists(), "it was not checked");
            unpublish(cache).await;
        }
    };
    let mut waits = Box::pin(publish(&input, &READ_INPUT));
    tokio::select! {
        target = &mut waits => panic!("{target:?} was not checked: {}", two.tail()),
        () = all => {}
    }
    let why = "cannot be looked up";
    for (node, said) in [(&one, why), (&two, why), (&two, "UNAVAILABLE")] {
        assert!(node.log().contains(said), "{said}: {}", node.tail());
    }
    assert_eq!(figures(&pools[0])["offered"], 0, "{}", one.tail());

    plane.signal_server(Signal::CONT);
    let target = waits.await;
    let text = fs::read_to_string(target.join("text"));
    assert_eq!(text.expect("it came"), "output", "{}", two.tail());
    unpublish(&input).await;
}
