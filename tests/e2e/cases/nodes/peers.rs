//! The nodes as peers: deploy/ with the components, as docs/peers.md and docs/locality.md show
//! them. What a step on one node commits, a step on another node starts from. The controller says
//! where it is, new pods prefer the node that has it, and a deleted `Cache` is cleared on all
//! nodes. Disturbed fetches have a file of their own, and so has each type of volume, wherever its
//! content is.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{ENDS, GROUP, node_of, objects, only_on, pod_with};
use crate::cluster::{Cluster, eventually, feed, succeed};
use crate::env::Env;

const COMPONENTS: [&str; 2] = ["deploy/components/peers", "deploy/components/locality"];
/// Where the driver gets more flags. One of them is that a cache waits for every answer, however
/// busy the machine is.
const ENV: &str = "/spec/template/spec/containers/0/env/-";
/// The `--peer-bandwidth` of the drivers: a large fetch takes seconds, so that it can be disturbed.
const BANDWIDTH: &str = "8Mi";

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
    super::fetches::disturbed(env, &one, &two, &cluster.node(3));
    super::everywhere::everywhere(env, &one, &two, &cluster.node(3));
    preferred_and_cleared(env, &two);
}

/// A pod that may run anywhere runs where its cache is. After a clear there is none.
fn preferred_and_cleared(env: &Env, two: &Cluster) {
    const CACHE: &str = "type: task-cache, key: large";
    turn_locality_on(env.cluster);
    let write = "head -c 4194304 /dev/urandom > /cache/data";
    env.apply_text(&step_with("fills", two, "cache", CACHE, write));
    env.succeeded("fills");
    env.sealed("task-cache/large");
    let source = format!(
        "csi: {{driver: baggageclaim.csi.concourse-ci.org, volumeAttributes: {{{CACHE}}}}}"
    );
    let command = "[ -e /cache/data ]";
    let finds = pod_with("finds", ENDS, [("cache".to_owned(), source)], command);
    eventually("a new pod prefers the node", || {
        let create = &[
            "create",
            "--dry-run=server",
            "--output=json",
            "--filename=-",
        ];
        let mut kubectl = env.cluster.kubectl(&[&env.within()]);
        let made = feed(kubectl.args(create), &finds);
        let made: Value = serde_json::from_slice(&made.stdout).unwrap_or_default();
        let terms = &made["spec"]["affinity"]["nodeAffinity"];
        let terms = &terms["preferredDuringSchedulingIgnoredDuringExecution"];
        let field = &terms[0]["preference"]["matchFields"][0];
        (field["values"][0] == *two.name()).then_some(())
    });
    env.apply_text(&finds);
    env.succeeded("finds");
    assert_eq!(node_of(&env.get("pod/finds")), two.name());

    let handle = "apiVersion: baggageclaim.concourse-ci.org/v1alpha1
kind: Cache
metadata: {name: large, finalizers: [baggageclaim.concourse-ci.org/clear]}
spec: {key: large}
";
    env.apply_text(handle);
    env.kubectl(&["delete", "cache", "large", "--wait", "--timeout=60s"]);
    eventually("the node has cleared it", || {
        let rows = two.driver_list(&["artifacts"]);
        let mut rows = rows.iter();
        let is_there = rows.any(|row| row["reference"] == "task-cache/large");
        (!is_there).then_some(())
    });
    let empty = "[ ! -e /cache/data ]";
    env.apply_text(&step_with("empty", two, "cache", CACHE, empty));
    env.succeeded("empty");
}

/// Gives the controller its key, and has the API server call it.
fn turn_locality_on(cluster: &Cluster) {
    let controller = "deploy/baggageclaim-controller";
    let namespace = "--namespace=baggageclaim";
    let exec = ["exec", controller, "--container=controller", namespace];
    let prints = ["--", "/baggageclaim", "locality"];
    let objects = succeed(cluster.kubectl(&exec).args(prints));
    let applied = feed(&mut cluster.kubectl(&["apply", "--filename=-"]), &objects);
    assert!(
        applied.status.success(),
        "{}",
        String::from_utf8_lossy(&applied.stderr)
    );
    // A change of the pod makes kubelet look at its Secrets now, and not in a minute.
    let component = "--selector=app.kubernetes.io/component=controller";
    let annotate = &["annotate", "pods", component, namespace, "e2e=locality"];
    succeed(&mut cluster.kubectl(annotate));
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
pub(super) fn step_with(
    name: &str,
    node: &Cluster,
    volume: &str,
    attributes: &str,
    command: &str,
) -> String {
    let source = format!(
        "csi: {{driver: baggageclaim.csi.concourse-ci.org, volumeAttributes: {{{attributes}}}}}"
    );
    let more = format!("{ENDS}\n  {}", only_on(node));
    pod_with(name, &more, [(volume.to_owned(), source)], command)
}

/// The drivers with the component. When this is dropped they are as they were: the next case needs
/// that.
pub(super) struct Installed<'a> {
    cluster: &'a Cluster,
    before: PathBuf,
    ours: tempfile::TempDir,
}

impl<'a> Installed<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Self {
        let before = cluster.installed_overlay();
        let beside = before.parent().expect("a directory");
        let ours = tempfile::TempDir::new_in(beside).expect("a directory beside it");
        let path = ours.path().display();
        let components = COMPONENTS.map(|component| {
            let relative = format!("realpath --relative-to '{path}' '{component}'");
            cluster.shell(&relative, false).trim().to_owned()
        });
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
    - {{op: add, path: {ENV}, value: {{name: BAGGAGECLAIM_PEER_BANDWIDTH, value: {BANDWIDTH}}}}}
",
            components.join(", ")
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
pub(super) fn figures(node: &Cluster) -> Value {
    let status = node.driver(&["status", "--output=json"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
    status["peers"].clone()
}

/// The files of a component whose objects are its own.
fn resources(component: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(component);
    let text = fs::read_to_string(root.join("kustomization.yaml")).expect("read");
    let its: Value = serde_saphyr::from_str(&text).expect("YAML");
    let files = its["resources"].as_array().expect("a list").iter();
    let files = files.map(|file| root.join(file.as_str().expect("a file")));
    files.collect()
}

impl Drop for Installed<'_> {
    fn drop(&mut self) {
        // Without the component their finalizer would keep them, and the namespaces of the cases.
        let caches = ["delete", &format!("caches.{GROUP}"), "--all"];
        let all = ["--all-namespaces", "--timeout=60s"];
        succeed(self.cluster.kubectl(&caches).args(all));
        let hook = "mutatingwebhookconfiguration/baggageclaim-locality";
        let secret = "secret/baggageclaim-locality";
        let gone = ["--ignore-not-found", "--namespace=baggageclaim"];
        succeed(self.cluster.kubectl(&["delete", hook, secret]).args(gone));
        self.apply(&self.before);
        for file in COMPONENTS.iter().flat_map(|component| resources(component)) {
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
