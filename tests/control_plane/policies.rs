//! Cache policies: an object of the API server decides on all nodes which pods commit a name.

use std::fs;
use std::path::Path;
use std::process::Command;

use baggageclaim::api::CachePolicy;
use baggageclaim::kubelet_double::Kubelet;
use kube::Api;

use crate::common::{Fs, require_lab};
use crate::driver::{Process, kubelet};
use crate::eventually;
use crate::peers::{
    CACHE, MADE, hub, is_told, knows, nodes, object, peer, publish, told, unpublish,
};
use crate::plane::ControlPlane;

fn policy(name: &str, account: &str) -> String {
    format!(
        "{{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: CachePolicy, \
         metadata: {{name: main, namespace: ci}}, spec: {{rules: [{{names: ['{name}'], \
         commit: {{serviceAccounts: [{account}]}}}}]}}}}"
    )
}

/// Waits until the policies that a node keeps name this account.
async fn keeps(pool: &Path, account: &str) {
    eventually("the node has the policy", async || {
        let kept = fs::read_to_string(pool.join("policies.json"));
        kept.is_ok_and(|kept| kept.contains(account))
    })
    .await;
}

fn has_content(pool: &Path) -> bool {
    told(pool, "artifacts")
        .to_string()
        .contains("task-cache/go")
}

fn a_mistake_is_refused(plane: &ControlPlane) {
    let refused = plane.directory.path().join("refused.yaml");
    fs::write(&refused, policy("task-cache/a*b", "x")).expect("write");
    let refused = refused.to_str().expect("text");
    let (done, said) = plane.try_kubectl(&["apply", "-f", refused]);
    assert!(!done && said.contains("names"), "{said}");
}

/// An administrator may import under a name of the policy. The audit has a line of it.
fn imported_under_a_policy(node: &Process, pool: &Path) {
    let content = pool.with_extension("tar");
    fs::write(&content, [0; 1024]).expect("write");
    let done = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .arg("import")
        .arg(&content)
        .args(["--as", "task-cache/imported", "-n", "ci", "--pool"])
        .arg(pool)
        .status();
    assert!(done.expect("it starts").success());
    let log = node.log();
    let parts = ["imported under a cache policy", "task-cache/imported", "ci"];
    let is_it = |line: &str| parts.iter().all(|part| line.contains(part));
    assert!(log.lines().any(is_it), "{}", node.tail());
}

/// The pods have the account `default`. It may not commit, and its pods run.
async fn refused_pods_run(plane: &ControlPlane, kubelets: [&Kubelet; 2]) {
    for (kubelet, number) in kubelets.into_iter().zip(1..) {
        let (pod, node) = (format!("pr-{number}"), format!("node-{number}"));
        let uid = object(plane, "ci", &pod, &node, CACHE);
        let pod = kubelet.pod_with_uid("ci", &pod, uid);
        let target = publish(&pod, &MADE[0]).await;
        fs::write(target.join("text"), "bad").expect("write");
        unpublish(&pod).await;
    }
    for pod in ["pr-1", "pr-2"] {
        eventually("the pod has the event", async || {
            let selected = format!("--field-selector=involvedObject.name={pod}");
            let events = plane.kubectl(&["get", "events", "--namespace=ci", &selected]);
            events.contains("CommitNotAllowed") && events.contains("service account default")
        })
        .await;
    }
}

/// The audit's line of a pod's commit on node 2.
async fn audited(node: &Process, pod: &str) -> String {
    let find = || {
        let log = node.log();
        let parts = [
            "committed under a cache policy",
            "task-cache/go",
            "service_account=\"default\"",
            "node=\"node-2\"",
            &format!("pod=\"{pod}\""),
        ];
        let is_it = |line: &&str| parts.iter().all(|part| line.contains(part));
        log.lines().find(is_it).map(str::to_owned)
    };
    eventually("the audit has a line", async || find().is_some()).await;
    find().expect("it was there")
}

/// The line of a fork names the pod's images, and the artifact that it is a fork of. The commit
/// waits for the pod's success, so the node has read the pod's object.
async fn forked_and_committed(
    plane: &ControlPlane,
    kubelet: &Kubelet,
    node: &Process,
    pool: &Path,
) {
    let listed = told(pool, "artifacts");
    let rows = listed.as_array().expect("a list");
    let row = rows.iter().find(|row| row["reference"] == "task-cache/go");
    let parent = row.expect("it is committed")["id"].clone();
    let uid = object(plane, "ci", "fork", "node-2", CACHE);
    let fork = kubelet.pod_with_uid("ci", "fork", uid);
    publish(&fork, &[("type", "task-cache"), ("key", "go")]).await;
    let status = r#"--patch={"status": {"phase": "Succeeded"}}"#;
    let to = ["--namespace=ci", "--subresource=status", "--type=merge"];
    plane.kubectl(&[&["patch", "pod", "fork", status], &to[..]].concat());
    unpublish(&fork).await;
    let line = audited(node, "fork").await;
    let parent = format!(" parent={} ", parent.as_str().expect("an id"));
    for part in [&*parent, " images=\"busybox\" "] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[tokio::test]
async fn a_policy_decides_on_all_nodes_and_without_a_controller() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    a_mistake_is_refused(&plane);
    plane.apply("policy", &policy("task-cache/*", "release"));
    nodes(&plane, 2);
    let mut controller = hub(&plane);
    let pools = [lab.dir("one"), lab.dir("two")];
    let mut one = peer(&plane, "node-1", &pools[0]);
    let two = peer(&plane, "node-2", &pools[1]);
    let kubelet_one = kubelet(&plane, "node-1", &one).await;
    let kubelet_two = kubelet(&plane, "node-2", &two).await;
    for pool in &pools {
        knows(pool, 1).await;
        is_told(pool, true).await;
        keeps(pool, "release").await;
    }
    let policies: Api<CachePolicy> = Api::namespaced(plane.client.clone(), "ci");
    eventually("its condition says that it is valid", async || {
        let status = policies.get("main").await.expect("it is there").status;
        let conditions = status.unwrap_or_default().conditions;
        conditions
            .iter()
            .any(|it| it.of == "RulesValid" && it.status == "True")
    })
    .await;

    refused_pods_run(&plane, [&kubelet_one, &kubelet_two]).await;
    assert!(
        !pools.iter().any(|pool| has_content(pool)),
        "{}",
        one.tail()
    );

    // The policy changes while a writer runs: the newer one decides.
    let uid = object(&plane, "ci", "writer", "node-2", CACHE);
    let writer = kubelet_two.pod_with_uid("ci", "writer", uid);
    let target = publish(&writer, &MADE[0]).await;
    fs::write(target.join("text"), "good").expect("write");
    plane.apply("policy", &policy("task-cache/*", "default"));
    for pool in &pools {
        keeps(pool, "default").await;
    }
    unpublish(&writer).await;
    eventually("it is committed", async || has_content(&pools[1])).await;
    // A name is listed before it is durable, and a commit is durable.
    let line = audited(&two, "writer").await;
    assert!(!line.contains(" parent="), "{line}");
    forked_and_committed(&plane, &kubelet_two, &two, &pools[1]).await;

    imported_under_a_policy(&two, &pools[1]);

    // Yesterday's policy decides on a node that starts without a controller.
    controller.kill();
    one.kill();
    one.start();
    let kubelet_one = kubelet(&plane, "node-1", &one).await;
    let uid = object(&plane, "ci", "later", "node-1", CACHE);
    let later = kubelet_one.pod_with_uid("ci", "later", uid);
    let target = publish(&later, &MADE[0]).await;
    fs::write(target.join("text"), "later").expect("write");
    unpublish(&later).await;
    eventually("it is committed", async || has_content(&pools[0])).await;
}
