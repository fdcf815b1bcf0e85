//! Names that are cleared on all nodes: by the deletion of a `Cache`, and with their namespace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use baggageclaim::api::{Cache, Fence};
use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt as _};

use crate::common::{Fs, require_lab};
use crate::driver::{Process, kubelet};
use crate::eventually;
use crate::peers::{
    CACHE, MADE, Pair, READ, is_told, make, object, publish, tells, told, unpublish,
};
use crate::plane::ControlPlane;

/// Waits until a pool has content of this name, or has none.
pub(crate) async fn has(pool: &Path, name: &str, expected: bool) {
    eventually("a node has a name, or has it no more", async || {
        told(pool, "artifacts").to_string().contains(name) == expected
    })
    .await;
}

pub(crate) async fn fences(plane: &ControlPlane) -> Vec<Fence> {
    let fences: Api<Fence> = Api::all(plane.client.clone());
    let list = fences.list(&ListParams::default()).await;
    list.expect("a list").items
}

/// Makes the handle of some caches, and waits until its deletion is an order.
pub(crate) async fn handle(plane: &ControlPlane, name: &str, spec: &str) {
    let text = format!(
        "{{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: Cache, \
         metadata: {{name: {name}, namespace: ci}}, spec: {spec}}}"
    );
    plane.apply(name, &text);
    let caches: Api<Cache> = Api::namespaced(plane.client.clone(), "ci");
    eventually("it has the finalizer", async || {
        let cache = caches.get(name).await.expect("it is there");
        !cache.finalizers().is_empty()
    })
    .await;
}

fn neither_is_changed(plane: &ControlPlane, fence: &Fence) {
    let name = fence.name_any();
    let other = r#"--patch={"spec": {"key": "other"}}"#;
    let (done, said) = plane.try_kubectl(&["patch", "fence", &name, "--type=merge", other]);
    assert!(!done && said.contains("immutable"), "{said}");
    let both = "{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: Cache, \
                metadata: {name: both, namespace: ci}, spec: {key: a, prefix: b}}";
    let file = plane.directory.path().join("both.yaml");
    fs::write(&file, both).expect("write");
    let (done, said) = plane.try_kubectl(&["apply", "-f", file.to_str().expect("text")]);
    assert!(!done && said.contains("a key or a prefix"), "{said}");
    // 129 characters, and 516 bytes.
    for field in ["key", "prefix"] {
        let long = both.replace(
            "key: a, prefix: b",
            &format!("{field}: {}", "\u{1f600}".repeat(129)),
        );
        fs::write(&file, long).expect("write");
        let (done, said) = plane.try_kubectl(&["apply", "-f", file.to_str().expect("text")]);
        assert!(!done && said.contains("has at most 256 bytes"), "{said}");
    }
}

/// There is no controller manager that finishes the deletion.
pub(crate) fn the_namespace_goes(plane: &ControlPlane, name: &str) {
    plane.kubectl(&["delete", "namespace", name, "--wait=false"]);
    let end = format!(
        "{{\"apiVersion\": \"v1\", \"kind\": \"Namespace\", \
         \"metadata\": {{\"name\": \"{name}\"}}, \"spec\": {{\"finalizers\": []}}}}"
    );
    let file = plane.directory.path().join("end.json");
    fs::write(&file, end).expect("write");
    let file = file.to_str().expect("text");
    let of_namespace = format!("/api/v1/namespaces/{name}/finalize");
    plane.kubectl(&["replace", "--raw", &of_namespace, "-f", file]);
}

/// A fence that cannot be read, as a person may write it.
fn malformed(plane: &ControlPlane, name: &str) {
    let text = format!(
        "{{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: Fence, \
         metadata: {{name: {name}}}, spec: {{number: 7, previous: 0, id: no-number-at-all, \
         namespace: ci}}}}"
    );
    plane.apply(name, &text);
}

/// One in the chain stops all clears, and says so. Another one stops none.
async fn a_malformed_fence_is_told(plane: &ControlPlane, controller: &Process) {
    let newest = fences(plane).await.pop().expect("there is one").spec.number;
    let in_chain = format!("after-{newest:020}");
    malformed(plane, &in_chain);
    let answer = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args([
            "clear",
            "task-cache/pr-",
            "--prefix",
            "--namespace=ci",
            "--socket",
        ])
        .arg(&controller.socket)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&answer.stderr);
    assert!(!answer.status.success(), "{said}");
    let expected = format!("Fence {in_chain} is malformed");
    assert!(said.contains(&expected), "{said}");
    assert!(controller.log().contains("a Fence cannot be read"));
    plane.kubectl(&["delete", "fence", &in_chain]);
    malformed(plane, "by-hand");
}

/// By asking the controller itself.
async fn an_administrator_clears(plane: &ControlPlane, controller: &Process) {
    a_malformed_fence_is_told(plane, controller).await;
    let order = ["clear", "--prefix", "task-cache/pr-", "--namespace=ci"];
    let said = tells(controller, &order);
    assert!(said.contains("is cleared.\nNodes"), "{said}");
    plane.kubectl(&["delete", "fence", "by-hand"]);
    let made = fences(plane).await;
    let of_order = &made.last().expect("there is one").spec;
    assert_eq!((made.len(), &*of_order.namespace), (2, "ci"));
    assert_eq!(of_order.prefix.as_deref(), Some("pr-"));
}

/// So many objects are deleted one after the other, each with one request to clear.
const TIMED: usize = 50;
/// So often an administrator clears.
const ORDERED: usize = 10;

/// Clears while the driver of node 2 is stopped, and prints how long that takes. No clear waits for
/// the node, which the cluster still has: the node cannot answer before the end of this.
fn clears_are_timed(plane: &ControlPlane, controller: &Process) {
    let made = "-o=jsonpath={.items[*].metadata.name}";
    for kind in ["nodes", "pools"] {
        let there = plane.kubectl(&["get", kind, made]);
        assert_eq!(there, "node-1 node-2", "{kind}");
    }
    let text = (0..TIMED).map(|number| {
        format!(
            "---\n{{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: Cache, \
             metadata: {{name: timed-{number}, namespace: ci, \
             finalizers: [baggageclaim.concourse-ci.org/clear]}}, spec: {{key: timed-{number}}}}}\n"
        )
    });
    plane.apply("timed", &text.collect::<String>());
    let took = (0..TIMED).map(|number| {
        let name = format!("timed-{number}");
        let began = Instant::now();
        let delete = ["delete", "cache", &name, "--namespace=ci", "--timeout=60s"];
        plane.kubectl(&delete);
        began.elapsed()
    });
    says_times("deletions of a Cache", took.collect());
    let took = (0..ORDERED).map(|number| {
        let name = format!("task-cache/ordered-{number}");
        let began = Instant::now();
        tells(controller, &["clear", &name, "--namespace=ci"]);
        began.elapsed()
    });
    says_times("orders to the controller", took.collect());
}

#[expect(clippy::print_stdout, reason = "a figure for the docs")]
fn says_times(of: &str, mut took: Vec<Duration>) {
    took.sort();
    let (median, most) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{} {of}: median {median:?}, at most {most:?}", took.len());
}

/// Steps run on node 2 while its driver is stopped and their caches are cleared. They end as soon
/// as it runs again, and most of them before it has heard of that.
async fn a_stopped_driver_brings_nothing_back(
    plane: &ControlPlane,
    kubelets: [&Kubelet; 2],
    pools: &[PathBuf; 2],
    (controller, driver): (&Process, &mut Process),
) {
    const STEPS: usize = 10;
    let key = |number: usize| format!("stopped-{number}");
    let maker = kubelets[0].pod("ci", "maker");
    let writer = kubelets[1].pod("ci", "runs");
    for number in 0..STEPS {
        let (volume, key) = (format!("v{number}"), key(number));
        let always = ["type", "task-cache", "key", &key, "commit", "always"];
        let attributes = || always.chunks(2).map(|pair| (pair[0], pair[1]));
        for (pod, text) in [(&maker, "made"), (&writer, "old")] {
            let published = pod.publish(&volume, attributes(), PublishOptions::default());
            let target = published.await.expect("published").target;
            fs::write(target.join("text"), text).expect("write");
            if text == "made" {
                pod.unpublish(&volume).await.expect("unpublished");
            }
        }
    }
    has(&pools[0], "task-cache/stopped-", true).await;
    handle(plane, "stopped", "{prefix: stopped-}").await;
    driver.kill();
    let delete = [
        "delete",
        "cache",
        "stopped",
        "--namespace=ci",
        "--timeout=60s",
    ];
    plane.kubectl(&delete);
    has(&pools[0], "task-cache/stopped-", false).await;
    clears_are_timed(plane, controller);
    driver.start();
    let again = kubelet(plane, "node-2", driver).await;
    let writer = again.pod_with_uid("ci", "runs", writer.uid());
    for number in 0..STEPS {
        let ended = writer.unpublish(&format!("v{number}")).await;
        ended.expect("unpublished");
    }
    is_told(&pools[1], true).await;
    for pool in pools {
        eventually("all volumes have ended", async || {
            told(pool, "volumes").as_array().is_some_and(Vec::is_empty)
        })
        .await;
        has(pool, "task-cache/stopped-", false).await;
    }
}

#[tokio::test]
async fn a_deleted_cache_and_a_namespace_that_is_gone_are_cleared_on_all_nodes() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    let Pair {
        mut controller,
        pools,
        nodes: [one, mut two],
        kubelets: [kubelet_one, kubelet_two],
    } = Pair::start(&plane, &lab).await;
    make(&plane, &kubelet_one, &pools[0]).await;
    let uid = object(&plane, "ci", "writer", "node-2", CACHE);
    let writer = kubelet_two.pod_with_uid("ci", "writer", uid);
    let target = publish(&writer, &MADE[0]).await;
    assert!(target.join("text").exists(), "{}", two.tail());
    has(&pools[1], "task-cache/go", true).await;

    // Deleting the handle returns when the order is given.
    handle(&plane, "go", "{key: go}").await;
    plane.kubectl(&["delete", "cache", "go", "--namespace=ci", "--timeout=60s"]);
    let made = fences(&plane).await;
    assert_eq!(made.len(), 1, "{}", controller.tail());
    assert_eq!(made[0].name_any(), "after-00000000000000000000");
    has(&pools[0], "task-cache/go", false).await;
    fs::write(target.join("text"), "old").expect("write");
    unpublish(&writer).await;
    has(&pools[1], "task-cache/go", false).await;
    has(&pools[0], "artifact/built", true).await;
    let uid = object(&plane, "ci", "after", "node-1", CACHE);
    let reader = kubelet_one.pod_with_uid("ci", "after", uid);
    let target = publish(&reader, &READ).await;
    assert!(!target.join("text").exists(), "{}", one.tail());
    unpublish(&reader).await;

    neither_is_changed(&plane, &made[0]);

    an_administrator_clears(&plane, &controller).await;

    // Another controller goes on with the chain. An order that was given meanwhile is carried out.
    handle(&plane, "all", "{prefix: g, kind: ResourceCache}").await;
    controller.kill();
    plane.kubectl(&["delete", "cache", "all", "--namespace=ci", "--wait=false"]);
    controller.start();
    eventually("there is another fence", async || {
        fences(&plane).await.len() == 3
    })
    .await;
    let chain = fences(&plane).await;
    assert_eq!(chain[2].spec.previous, chain[1].spec.number);
    eventually("the handle is gone", async || {
        let caches: Api<Cache> = Api::namespaced(plane.client.clone(), "ci");
        caches.get_opt("all").await.expect("an answer").is_none()
    })
    .await;
    for pool in &pools {
        is_told(pool, true).await;
    }
    has(&pools[0], "artifact/built", true).await;

    let kubelets = [&kubelet_one, &kubelet_two];
    let drivers = (&controller, &mut two);
    a_stopped_driver_brings_nothing_back(&plane, kubelets, &pools, drivers).await;

    the_namespace_goes(&plane, "ci");
    has(&pools[0], "artifact/built", false).await;
    let chain = fences(&plane).await;
    let last = &chain.last().expect("there are some").spec;
    assert_eq!(chain.len(), 5 + TIMED + ORDERED, "{}", controller.tail());
    assert_eq!((&*last.namespace, last.kind), ("ci", None));

    // All objects are lost at once, as with an older etcd. The nodes still know. kubectl would
    // delete one after the other, and each loss ends the streams of the nodes.
    let all: Api<Fence> = Api::all(plane.client.clone());
    let (how, which) = (DeleteParams::default(), ListParams::default());
    let deleted = all.delete_collection(&how, &which).await;
    deleted.expect("they are deleted");
    eventually("they are made again", async || {
        let fences = fences(&plane).await;
        let repeats: usize = fences.iter().map(|fence| fence.spec.repeats.len()).sum();
        repeats == 5 + TIMED + ORDERED
    })
    .await;
    for pool in &pools {
        is_told(pool, true).await;
    }
}
