//! What one node's token may write: the status of that node's objects. `tests/control_plane` tries
//! every kind; here the token is a real one, as kubelet gives it to the driver's pod.

use std::fs;

use baggageclaim::engine::claims::snapshot_id;
use serde_json::Value;
use tempfile::NamedTempFile;

use super::{GROUP, no_claim_is_left, objects, source};
use crate::cluster::{Cluster, eventually, succeed};
use crate::env::{Env, items};

pub(in crate::cases) fn one_nodes_token(env: &Env) {
    let nodes = [2, 3].map(|number| env.cluster.node(number));
    for node in &nodes {
        source(env, &format!("on-{}", node.name()), node);
    }
    let volumes = objects(env.cluster, "volumes");
    let of = |node: &Cluster| {
        let mut volumes = volumes.iter();
        let found = volumes.find(|volume| volume["spec"]["nodeName"] == *node.name());
        let found = found.expect("each node has one");
        format!(
            "volumes.{GROUP}/{}",
            found["metadata"]["name"].as_str().expect("a name")
        )
    };
    let (own, other) = (of(&nodes[0]), of(&nodes[1]));
    let shot = |node: &Cluster| format!("snapshots.{GROUP}/{}", snapshot_id(&node.name()));
    for (node, volume) in nodes.iter().zip([&own, &other]) {
        env.apply_text(&order(node, volume));
    }
    eventually("the snapshots are taken", || {
        let snapshots = objects(env.cluster, "snapshots");
        let is_ready = |one: &&Value| one["status"]["phase"] == "Ready";
        (snapshots.iter().filter(is_ready).count() == 2).then_some(())
    });
    let pool = |node: &Cluster| format!("pools.{GROUP}/{}", node.name());
    let driver = Driver::of(env, &nodes[0]);
    let nothing = r#"{"status":{}}"#;
    let status = "--subresource=status";
    let patch = |object: &str, patch: &str, more: &[&str]| {
        let patch = format!("--patch={patch}");
        driver.kubectl(&[&["patch", "--type=merge", object, &patch], more].concat())
    };
    for object in [&own, &shot(&nodes[0]), &pool(&nodes[0])] {
        patch(object, nothing, &[status]).expect("its own node's");
    }
    let finalizer = r#"{"metadata":{"finalizers":["example.org/stay"]}}"#;
    let pool_of_another = format!(
        r#"{{"apiVersion":"{GROUP}/v1alpha1","kind":"Pool","metadata":{{"name":"node-9"}},"spec":{{}}}}"#
    );
    let pool_file = NamedTempFile::new().expect("a temporary file");
    fs::write(pool_file.path(), pool_of_another).expect("write");
    let file = format!("--filename={}", pool_file.path().display());
    for (what, refused) in [
        ("another's status", patch(&other, nothing, &[status])),
        (
            "another's snapshot",
            patch(&shot(&nodes[1]), nothing, &[status]),
        ),
        (
            "another's pool",
            patch(&pool(&nodes[1]), nothing, &[status]),
        ),
        ("a pool of no node", driver.kubectl(&["create", &file])),
        (
            "an order",
            patch(&own, r#"{"spec":{"wanted":"Absent"}}"#, &[]),
        ),
        (
            "an order about a snapshot",
            patch(&shot(&nodes[0]), r#"{"spec":{"wanted":"Absent"}}"#, &[]),
        ),
        ("a finalizer", patch(&own, finalizer, &[])),
        (
            "a finalizer of a snapshot",
            patch(&shot(&nodes[0]), finalizer, &[]),
        ),
        ("a deletion", driver.kubectl(&["delete", &own])),
        ("a secret", driver.kubectl(&["get", "secrets"])),
    ] {
        let told = refused.expect_err(what);
        assert!(told.contains("orbidden"), "{what}: {told}");
    }
    // Through the status, metadata cannot be changed.
    let _ = patch(&own, finalizer, &[status]);
    let finalizers = env.get(&own)["metadata"]["finalizers"].clone();
    assert_eq!(finalizers, Value::Null);
    delete_snapshots(env, &nodes.map(|node| shot(&node)));
    no_claim_is_left(env);
}

/// Orders their deletion. The controller deletes the objects.
fn delete_snapshots(env: &Env, snapshots: &[String]) {
    for snapshot in snapshots {
        let absent = r#"--patch={"spec":{"wanted":"Absent"}}"#;
        env.kubectl(&["patch", "--type=merge", snapshot, absent]);
    }
    eventually("no Snapshot is left", || {
        objects(env.cluster, "snapshots").is_empty().then_some(())
    });
}

/// The order for a snapshot of a volume, as the controller writes it. Its name is the node's.
fn order(node: &Cluster, volume: &str) -> String {
    let (name, volume) = (node.name(), volume.rsplit('/').next().expect("a name"));
    let id = snapshot_id(&name);
    format!(
        "apiVersion: {GROUP}/v1alpha1
kind: Snapshot
metadata: {{name: {id}}}
spec: {{name: {name}, nodeName: {name}, sources: [{volume}], wanted: Present}}
"
    )
}

/// kubectl with the token of a driver, as kubelet gives it to the driver's pod.
struct Driver<'a> {
    cluster: &'a Cluster,
    config: NamedTempFile,
}

impl<'a> Driver<'a> {
    fn of(env: &Env<'a>, node: &Cluster) -> Self {
        let cluster = env.cluster;
        let namespace = "--namespace=baggageclaim";
        let pods = cluster.get(&[
            namespace,
            "pods",
            "--selector=app.kubernetes.io/component=node",
            &format!("--field-selector=spec.nodeName={}", node.name()),
        ]);
        let pod = items(&pods).next().expect("a driver")["metadata"]["name"].clone();
        let token = succeed(&mut cluster.kubectl(&[
            namespace,
            "create",
            "token",
            "baggageclaim-node",
            "--bound-object-kind=Pod",
            &format!("--bound-object-name={}", pod.as_str().expect("a name")),
        ]));
        let config = &["config", "view", "--raw", "--minify", "--output=json"];
        let config = succeed(&mut cluster.kubectl(config));
        let mut config: Value = serde_json::from_str(&config).expect("kubectl prints JSON");
        // Not the administrator's certificate.
        config["users"][0]["user"] = serde_json::json!({ "token": token.trim() });
        let file = NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), config.to_string()).expect("write");
        Self {
            cluster,
            config: file,
        }
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<(), String> {
        let mut kubectl = self.cluster.kubectl(arguments);
        kubectl.env("KUBECONFIG", self.config.path());
        let output = kubectl.output().expect("kubectl runs");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success().then_some(()).ok_or(told)
    }
}
