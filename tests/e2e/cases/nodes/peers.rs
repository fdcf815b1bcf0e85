//! The nodes as peers: deploy/ with the component, as docs/peers.md shows it. What a step on one
//! node commits, a step on another node starts from. The controller says where it is.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{ENDS, objects, only_on, pod_with};
use crate::cluster::{Cluster, eventually, succeed};
use crate::env::Env;

const COMPONENT: &str = "deploy/components/peers";
/// Where the driver gets a flag more: a cache waits for every answer, however busy the machine is.
const ENV: &str = "/spec/template/spec/containers/0/env/-";

pub(in crate::cases) fn peers(env: &Env) {
    let cluster = env.cluster;
    let (one, two) = (cluster.node(1), cluster.node(2));
    let _installed = Installed::new(cluster);
    let counted = |node: &Cluster, what: &str| figures(node)[what].clone();

    env.apply_text(&step(
        "writes",
        &one,
        "[ ! -e /cache/text ]; echo of-1 > /cache/text",
    ));
    env.succeeded("writes");
    env.sealed("task-cache/go");
    env.apply_text(&step("reads", &two, "grep of-1 /cache/text"));
    env.succeeded("reads");
    env.event("reads", &["fetching task-cache/go from peer node-1"]);
    let hit = ["forked task-cache/go", "ago on node-1", "fetched from peer"];
    env.event("reads", &hit);
    assert_eq!(counted(&two, "fetches"), 1);
    // The controller said where it is: node 3 was not asked.
    assert_eq!(
        (counted(&two, "located"), counted(&two, "questions")),
        (1.into(), 1.into())
    );
    let offered = counted(&one, "offered");
    assert_ne!(offered, 0);

    // The same name of another namespace is another one.
    let neighbour = env.neighbour();
    neighbour.apply_text(&step("stranger", &two, "[ ! -e /cache/text ]"));
    neighbour.succeeded("stranger");
    assert_eq!(counted(&one, "offered"), offered);
    assert_eq!(counted(&one, "refused"), 0);

    newest_output(env, &one, &two);
}

/// Two nodes make one output, one after the other: a step on the first node starts from the last.
fn newest_output(env: &Env, one: &Cluster, two: &Cluster) {
    const OUTPUT: &str = "type: output, name: made-twice";
    let made = |node: &Cluster| {
        let listed = node.driver(&["artifacts", "--output=json"]);
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap_or_default();
        let rows = listed.as_array().cloned().unwrap_or_default();
        let of_name =
            |row: &&Value| row["reference"] == "artifact/made-twice" && row["durable"] == true;
        rows.iter().filter(of_name).count()
    };
    for (name, node) in [("makes", one), ("makes-again", two)] {
        let command = format!("echo {name} > /work/text");
        env.apply_text(&step_with(name, node, "work", OUTPUT, &command));
        env.succeeded(name);
        eventually("the output is durable", || (made(node) == 1).then_some(()));
    }
    eventually("the older output loses its name", || {
        (made(one) == 0).then_some(())
    });
    let input = "type: input, from: artifact/made-twice";
    let command = "grep makes-again /work/text";
    env.apply_text(&step_with("reads-output", one, "work", input, command));
    env.succeeded("reads-output");
}

/// A pod with a task cache at `/cache`, on a node.
fn step(name: &str, node: &Cluster, command: &str) -> String {
    step_with(name, node, "cache", "type: task-cache, key: go", command)
}

/// A pod with a volume of these attributes at `/VOLUME`, on a node.
fn step_with(name: &str, node: &Cluster, volume: &str, attributes: &str, command: &str) -> String {
    let source = format!(
        "csi: {{driver: baggageclaim.csi.concourse-ci.org, volumeAttributes: {{{attributes}}}}}"
    );
    let more = format!("{ENDS}\n  {}", only_on(node));
    pod_with(name, &more, [(volume.to_owned(), source)], command)
}

/// The drivers with the component. When this is dropped they are as they were: the next case needs
/// that.
struct Installed<'a> {
    cluster: &'a Cluster,
    before: PathBuf,
    ours: tempfile::TempDir,
}

impl<'a> Installed<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let before = cluster.installed_overlay();
        let beside = before.parent().expect("a directory");
        let ours = tempfile::TempDir::new_in(beside).expect("a directory beside it");
        let path = ours.path().display();
        let component = format!("realpath --relative-to '{path}' '{COMPONENT}'");
        let component = cluster.shell(&component, false);
        let base = before.file_name().expect("a name").display();
        let overlay = format!(
            "apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../{base}]
components: [{}]
patches:
- target: {{kind: DaemonSet, name: baggageclaim-node}}
  patch: |
    - {{op: add, path: {ENV}, value: {{name: BAGGAGECLAIM_ASK, value: 60s}}}}
",
            component.trim()
        );
        fs::write(ours.path().join("kustomization.yaml"), overlay).expect("write");
        let installed = Self {
            cluster,
            before,
            ours,
        };
        installed.apply(installed.ours.path());
        let nodes = cluster.nodes();
        for node in &nodes {
            eventually(
                "each node knows the others, and the controller hears it",
                || {
                    let figures = figures(node);
                    let is_ready =
                        figures["peers"] == nodes.len() - 1 && figures["catalog"] == true;
                    is_ready.then_some(())
                },
            );
        }
        installed
    }

    fn apply(&self, overlay: &Path) {
        let apply = &["apply", "--validate=strict", "--kustomize"];
        succeed(self.cluster.kubectl(apply).arg(overlay));
        for node in self.cluster.nodes() {
            node.driver_ready();
        }
    }
}

/// The counters of a node's peers; null while it has none.
fn figures(node: &Cluster) -> Value {
    let status = node.driver(&["status", "--output=json"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
    status["peers"].clone()
}

impl Drop for Installed<'_> {
    fn drop(&mut self) {
        self.apply(&self.before);
        for file in ["configmap.yaml", "rbac.yaml", "networkpolicy.yaml"] {
            let file = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(COMPONENT)
                .join(file);
            let delete = &["delete", "--ignore-not-found", "--wait", "--filename"];
            succeed(self.cluster.kubectl(delete).arg(file));
        }
        eventually("no node says that it is a peer", || {
            let pools = objects(self.cluster, "pools");
            let none = |pool: &Value| pool["status"]["peer"].is_null();
            pools.iter().all(none).then_some(())
        });
    }
}
