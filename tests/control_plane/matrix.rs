//! What pods may do with the names of a namespace: each cell of the matrix of policies, kinds,
//! namespaces and uses, on one node and on three. Then the same with content on the node while the
//! controller, the API server, or both are away.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::{Kubelet, Pod, PublishOptions};
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Event, Pod as PodObject};
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use rustix::process::Signal;
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::common::{Fs, Lab, require_lab};
use crate::driver::{Process, kubelet, node_with};
use crate::eventually;
use crate::peers::{asked, hub, is_told, knows, nodes, told};
use crate::plane::{ControlPlane, free_port};

/// What an own key, a key without content, a restore key, and an input become.
type Uses = [&'static str; 4];

const MARKER: &str = ".baggageclaim-commit";
const USES: Uses = ["own", "new", "restore", "input"];
const KINDS: [&str; 3] = ["resource-cache", "task-cache", "artifact"];

/// There is no such volume: a resource cache and an output have no restore keys, and an output
/// begins empty, so it reads nowhere. The driver refuses it.
const NO_VOLUME: &str = "no volume";

/// A pod that may commit. A resource cache that has content is complete, so it is not committed
/// once more.
const MAY_COMMIT: [Uses; 3] = [
    ["reads", "empty, commits", NO_VOLUME, "reads"],
    [
        "reads, commits",
        "empty, commits",
        "reads, commits",
        "reads",
    ],
    ["empty, commits", "empty, commits", NO_VOLUME, "reads"],
];

/// A pod that rules let not commit. It runs all the same.
const MAY_NOT_COMMIT: [Uses; 3] = [
    ["reads", "empty, discards", NO_VOLUME, "reads"],
    [
        "reads, discards",
        "empty, discards",
        "reads, discards",
        "reads",
    ],
    ["empty, discards", "empty, discards", NO_VOLUME, "reads"],
];

/// A pod of another namespace that may read. It commits in its own.
const MAY_READ: [Uses; 3] = [
    ["reads", "empty, commits", NO_VOLUME, "reads"],
    [
        "reads, commits",
        "empty, commits",
        "reads, commits",
        "reads",
    ],
    [NO_VOLUME, NO_VOLUME, NO_VOLUME, "reads"],
];

/// A pod of another namespace that may not read: as if there were no content.
const MAY_NOT_READ: [Uses; 3] = [
    ["empty, commits", "empty, commits", NO_VOLUME, "fails"],
    [
        "empty, commits",
        "empty, commits",
        "empty, commits",
        "fails",
    ],
    [NO_VOLUME, NO_VOLUME, NO_VOLUME, "fails"],
];

/// The policy of the namespace that has the name, the namespace of the pod, and what becomes of its
/// volumes. The pod has the account `default`.
const MATRIX: [(&str, &str, [Uses; 3]); 8] = [
    ("none", "same", MAY_COMMIT),
    ("selected", "same", MAY_COMMIT),
    ("listed", "same", MAY_COMMIT),
    ("unlisted", "same", MAY_NOT_COMMIT),
    ("none", "other", MAY_NOT_READ),
    ("selected", "other", MAY_NOT_READ),
    ("listed", "other", MAY_READ),
    ("unlisted", "other", MAY_NOT_READ),
];

/// The rules of the namespaces, which are called like their rows.
const RULES: [(&str, &str); 3] = [
    ("selected", ""),
    (
        "listed",
        ", commit: {serviceAccounts: [default]}, read: {namespaces: [other]}",
    ),
    (
        "unlisted",
        ", commit: {serviceAccounts: [release]}, read: {namespaces: [another]}",
    ),
];

/// One cell of the matrix, on one node.
#[derive(Debug, Clone, Copy)]
struct Cell {
    policy: &'static str,
    reader: &'static str,
    kind: &'static str,
    used: &'static str,
    node: usize,
    expected: &'static str,
}

/// All cells, on so many nodes.
fn cells(count: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (policy, reader, kinds) in MATRIX {
        for (kind, uses) in KINDS.into_iter().zip(kinds) {
            for (used, expected) in USES.into_iter().zip(uses) {
                cells.extend((0..count).map(|node| Cell {
                    policy,
                    reader,
                    kind,
                    used,
                    node,
                    expected,
                }));
            }
        }
    }
    cells
}

impl Cell {
    /// The namespace of its pod.
    fn namespace(&self) -> &'static str {
        if self.reader == "same" {
            self.policy
        } else {
            "other"
        }
    }

    /// The key or name of its volume, if that is not an input. No other cell has it.
    fn own(&self) -> String {
        let Self { policy, reader, .. } = self;
        format!("{policy}-{reader}-{}-{}", self.used, self.node + 1)
    }

    /// The name that its content comes from.
    fn source(&self) -> String {
        match self.used {
            "own" => format!("{}/{}", self.kind, self.own()),
            _ => format!("{}/shared", self.kind),
        }
    }

    fn attributes(&self) -> BTreeMap<String, String> {
        let own = self.own();
        let source = self.source();
        let mut attributes = match (self.used, self.kind) {
            ("input", _) => vec![("type", "input"), ("from", source.as_str())],
            (_, "artifact") => vec![("type", "output"), ("name", own.as_str())],
            (_, cache) => vec![("type", cache), ("key", own.as_str())],
        };
        if self.used != "input" {
            attributes.push(("commit", "on-marker"));
        }
        if self.used == "restore" {
            attributes.push(("restoreKeys", "shared"));
        }
        if self.reader == "other" {
            attributes.push(("fromNamespace", self.policy));
        }
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        attributes.into_iter().map(owned).collect()
    }

    fn volume(&self) -> String {
        format!("{}-{}", self.kind, self.used)
    }

    fn pod(&self, round: &str) -> String {
        let Self { policy, reader, .. } = self;
        format!("{round}-{policy}-{reader}-{}", self.node + 1)
    }

    /// Its line, with what becomes of its volume.
    fn line(&self, found: &str) -> String {
        let Self { policy, reader, .. } = self;
        let (kind, used, node) = (self.kind, self.used, self.node + 1);
        format!("{policy}, from {reader}, {kind}, {used}, on node {node}: {found}")
    }
}

/// A controller and its nodes.
struct Cluster {
    plane: ControlPlane,
    controller: Process,
    nodes: Vec<Process>,
    pools: Vec<PathBuf>,
    kubelets: Vec<Kubelet>,
}

impl Cluster {
    async fn start(plane: ControlPlane, lab: &Lab, count: usize) -> Self {
        let names = ["none", "selected", "listed", "unlisted", "other"];
        let namespaces = names.map(|name| {
            format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {name}}}}}\n")
        });
        plane.apply("namespaces", &namespaces.join("---\n"));
        nodes(&plane, count);
        let controller = hub(&plane);
        let names = ["one", "two", "three"].into_iter().take(count);
        let pools: Vec<PathBuf> = names.map(|name| lab.dir(name)).collect();
        let nodes = (1..).zip(&pools).map(|(number, pool)| {
            let listen = format!("--peer-listen=127.0.0.1:{}", free_port());
            let flags = [listen.as_str(), "--ask=10s", "--input-wait=5s"];
            node_with(&plane, &format!("node-{number}"), pool, &flags)
        });
        let nodes: Vec<Process> = nodes.collect();
        let mut kubelets = Vec::new();
        for (number, node) in (1..).zip(&nodes) {
            kubelets.push(kubelet(&plane, &format!("node-{number}"), node).await);
        }
        for pool in &pools {
            knows(pool, count as u64 - 1).await;
            is_told(pool, true).await;
        }
        Self {
            plane,
            controller,
            nodes,
            pools,
            kubelets,
        }
    }

    /// Node 1 makes the content that pods then ask for, while there is no policy.
    async fn make(&self, cells: &[Cell]) {
        let own = cells.iter();
        let own = own.filter(|cell| cell.used == "own" && cell.expected != NO_VOLUME);
        let shared = cells
            .iter()
            .filter(|cell| (cell.used, cell.reader, cell.node) == ("input", "same", 0));
        let made: Vec<Cell> = own.chain(shared).copied().collect();
        let pod_of = |cell: &Cell| self.kubelets[0].pod_with_uid(cell.policy, "maker", cell.policy);
        let makes = made.iter().enumerate().map(|(number, cell)| async move {
            let (source, volume) = (cell.source(), format!("v{number}"));
            let (kind, name) = source.split_once('/').expect("a kind and a name");
            let attributes = match kind {
                "artifact" => [("type", "output"), ("name", name)],
                cache => [("type", cache), ("key", name)],
            };
            let attributes = [&attributes[..], &[("commit", "on-marker")]].concat();
            let pod = pod_of(cell);
            let published = pod.publish(&volume, attributes, PublishOptions::default());
            let target = published.await.expect("published").target;
            fs::write(target.join("text"), &source).expect("write");
            fs::write(target.join(MARKER), "").expect("write");
            pod.unpublish(&volume).await.expect("unpublished");
        });
        stream::iter(makes).buffer_unordered(16).count().await;
        self.settled().await;
        let caches = made.iter().filter(|cell| cell.kind != "artifact").count();
        eventually("the controller knows the caches", async || {
            let known = asked(&self.controller, &["caches", "--cluster"]);
            known.as_array().map(Vec::len) == Some(caches)
        })
        .await;
        for namespace in ["none", "selected", "listed", "unlisted"] {
            eventually("the controller knows the output", async || {
                let namespace = format!("--namespace={namespace}");
                let explained = asked(
                    &self.controller,
                    &["explain", "artifact/shared", &namespace],
                );
                explained["answer"] == "found"
            })
            .await;
        }
    }

    async fn apply_policies(&self) {
        let policies = RULES.map(|(namespace, rights)| {
            format!(
                "{{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: CachePolicy, \
                 metadata: {{name: main, namespace: {namespace}}}, spec: {{rules: [{{names: \
                 ['resource-cache/*', 'task-cache/*', 'artifact/*']{rights}}}]}}}}\n"
            )
        });
        self.plane.apply("policies", &policies.join("---\n"));
        eventually("all nodes have the policies", async || {
            let kept = |pool: &PathBuf| {
                let kept = fs::read_to_string(pool.join("policies.json")).unwrap_or_default();
                RULES
                    .iter()
                    .all(|(name, _)| kept.contains(&format!("\"{name}\"")))
            };
            self.pools.iter().all(kept)
        })
        .await;
    }

    /// The pods of these cells, one for each row and node. With objects, so that other nodes let
    /// them have content.
    async fn pods(&self, cells: &[Cell], round: &str, with_objects: bool) -> BTreeMap<String, Pod> {
        let mut wanted: BTreeMap<String, (Cell, Vec<Value>)> = BTreeMap::new();
        for cell in cells.iter().filter(|cell| cell.expected != NO_VOLUME) {
            let volume = json!({"name": cell.volume(), "csi": {
                "driver": "baggageclaim.csi.concourse-ci.org",
                "volumeAttributes": cell.attributes(),
            }});
            let entry = wanted.entry(cell.pod(round));
            entry.or_insert_with(|| (*cell, Vec::new())).1.push(volume);
        }
        let made = wanted.into_iter().map(async |(name, (cell, volumes))| {
            let (namespace, kubelet) = (cell.namespace(), &self.kubelets[cell.node]);
            if !with_objects {
                return (name.clone(), kubelet.pod(namespace, &name));
            }
            let object: PodObject = serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"nodeName": format!("node-{}", cell.node + 1), "volumes": volumes,
                         "containers": [{"name": "step", "image": "busybox"}]},
            }))
            .expect("a pod");
            let pods: Api<PodObject> = Api::namespaced(self.plane.client.clone(), namespace);
            let made = pods.create(&PostParams::default(), &object).await;
            let uid = made.expect("it is made").uid().expect("a uid");
            (name.clone(), kubelet.pod_with_uid(namespace, &name, uid))
        });
        join_all(made).await.into_iter().collect()
    }

    /// Waits until nothing is left of the volumes.
    async fn settled(&self) {
        for pool in &self.pools {
            eventually("all volumes have ended", async || {
                told(pool, "volumes").as_array().is_some_and(Vec::is_empty)
            })
            .await;
        }
    }

    /// The events that refuse a commit: the name of the pod, and the text.
    async fn refusals(&self) -> Vec<(String, String)> {
        let events: Api<Event> = Api::all(self.plane.client.clone());
        let events = events.list(&ListParams::default()).await.expect("a list");
        let events = events.items.into_iter();
        let refusals = events.filter(|it| it.reason.as_deref() == Some("CommitNotAllowed"));
        let texts = refusals.filter_map(|it| Some((it.involved_object.name?, it.message?)));
        texts.collect()
    }

    /// Waits until the volumes of these cells have ended, and notes what the nodes have then.
    async fn ended(&self, round: &'static str, cells: Vec<(Cell, String)>) -> Ran {
        self.settled().await;
        Ran {
            round,
            cells,
            artifacts: self
                .pools
                .iter()
                .map(|pool| told(pool, "artifacts"))
                .collect(),
        }
    }
}

/// Cells whose pods have run, with what their volumes began with.
struct Ran {
    round: &'static str,
    cells: Vec<(Cell, String)>,
    /// Of each node, after that.
    artifacts: Vec<Value>,
}

impl Ran {
    /// What became of the cells, as lines.
    fn lines(&self, refusals: &[(String, String)]) -> Vec<String> {
        let lines = self.cells.iter().map(|(cell, began)| {
            let pod = cell.pod(self.round);
            let reference = format!("{}/{}", cell.kind, cell.own());
            let mut found = began.clone();
            let mut rows = self.artifacts[cell.node].as_array().expect("a list").iter();
            if rows.any(|row| {
                row["madeBy"]["pod"]["name"] == *pod
                    && row["reference"] == *reference
                    && row["tenant"] == cell.namespace()
            }) {
                found.push_str(", commits");
            }
            let expected = format!("{reference} is not committed: the cache policies");
            let mut refusals = refusals.iter();
            if refusals.any(|(of, text)| *of == pod && text.contains(&expected)) {
                found.push_str(", discards");
            }
            cell.line(&found)
        });
        lines.collect()
    }

    /// Compares what became of the cells with the matrix.
    async fn is_as_expected(&self, cluster: &Cluster) {
        let lines = self.cells.iter().map(|(it, _)| it.line(it.expected));
        let expected: Vec<String> = lines.collect();
        let began = Instant::now();
        loop {
            // Events come a moment later.
            let found = self.lines(&cluster.refusals().await);
            let both = found.iter().zip(&expected);
            let differ: Vec<_> = both.filter(|(found, expected)| found != expected).collect();
            if differ.is_empty() {
                break;
            }
            let is_late = began.elapsed() > Duration::from_secs(60);
            assert!(!is_late, "{}: found, expected: {differ:#?}", self.round);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        // The pods have changed no other name.
        let prefix = format!("{}-", self.round);
        let of_round = |row: &&Value| {
            let pod = row["madeBy"]["pod"]["name"].as_str();
            pod.is_some_and(|pod| pod.starts_with(&prefix))
        };
        let rows = self.artifacts.iter().filter_map(Value::as_array).flatten();
        let commits = self
            .cells
            .iter()
            .filter(|(it, _)| it.expected.ends_with("commits"));
        let commits = commits.count();
        assert_eq!(rows.filter(of_round).count(), commits, "{}", self.round);
    }
}

/// Runs a step with the volume of a cell: what the volume began with.
async fn runs(cell: &Cell, pod: &Pod) -> Result<String, Status> {
    let volume = cell.volume();
    let published = pod.publish(&volume, cell.attributes(), PublishOptions::default());
    let target = published.await?.target;
    let text = fs::read_to_string(target.join("text"));
    let began = match text {
        Ok(text) if text == cell.source() => "reads".to_owned(),
        Ok(text) => format!("reads {text}"),
        Err(_) => "empty".to_owned(),
    };
    fs::write(target.join("changed"), &volume).expect("write");
    if cell.used != "input" {
        fs::write(target.join(MARKER), "").expect("write");
    }
    pod.unpublish(&volume).await.expect("unpublished");
    Ok(began)
}

/// Runs these cells, a few at a time.
async fn run_all(cells: &[Cell], pods: &BTreeMap<String, Pod>, round: &str) -> Vec<(Cell, String)> {
    let runs = cells.iter().map(async |cell| {
        let began = runs(cell, &pods[&cell.pod(round)]).await;
        let began = began.unwrap_or_else(|error| error.to_string());
        (*cell, began)
    });
    let all = stream::iter(runs).buffered(16).collect::<Vec<_>>();
    let all = tokio::time::timeout(Duration::from_secs(60), all).await;
    all.unwrap_or_else(|_| panic!("the pods do not start and end: {round}"))
}

/// The driver refuses volumes that do not exist.
async fn are_refused(cluster: &Cluster, cells: &[Cell]) {
    for cell in cells {
        let pod = cluster.kubelets[cell.node].pod(cell.namespace(), "refused");
        let refused = runs(cell, &pod).await.expect_err(&cell.line("published"));
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
}

/// Inputs that may not be read fail like those that do not exist.
async fn are_missing(cells: &[Cell], pods: &BTreeMap<String, Pod>) {
    let tried = cells.iter().map(async |cell| {
        let unreadable = runs(cell, &pods[&cell.pod("matrix")]);
        // It may read this name, and there is none.
        let mut attributes = cell.attributes();
        attributes.insert("from".to_owned(), format!("{}/absent", cell.kind));
        attributes.insert("fromNamespace".to_owned(), "listed".to_owned());
        let pod = &pods[&cell.pod("matrix")];
        let volume = format!("{}-absent", cell.kind);
        let missing = pod.publish(&volume, attributes, PublishOptions::default());
        let (unreadable, missing) = tokio::join!(unreadable, missing);
        let unreadable = unreadable.expect_err(&cell.line("published"));
        let missing = missing.expect_err("there is none");
        assert_eq!(unreadable.code(), missing.code(), "{}", cell.line("fails"));
        let text = |status: &Status| status.message().split("; waited").next().map(str::to_owned);
        let expected = text(&missing).map(|it| it.replace("/absent", "/shared"));
        assert_eq!(text(&unreadable), expected, "{}", cell.line("fails"));
    });
    join_all(tried).await;
}

/// Pods whose content is on their node start and end, and the last policies decide.
async fn run_here(cluster: &Cluster, cells: &[Cell], round: &'static str) -> Ran {
    let pods = cluster.pods(cells, round, false).await;
    let ran = run_all(cells, &pods, round).await;
    cluster.ended(round, ran).await
}

/// The cells that this is expected of.
fn with(cells: &[Cell], wanted: fn(&str) -> bool) -> Vec<Cell> {
    let cells = cells.iter().copied();
    cells.filter(|cell| wanted(cell.expected)).collect()
}

/// Runs each cell once.
async fn every_cell_holds(cluster: &Cluster, cells: &[Cell]) {
    cluster.make(cells).await;
    cluster.apply_policies().await;
    are_refused(cluster, &with(cells, |it| it == NO_VOLUME)).await;
    let pods = cluster.pods(cells, "matrix", true).await;
    let start = with(cells, |it| it != NO_VOLUME && it != "fails");
    let ran = run_all(&start, &pods, "matrix").await;
    are_missing(&with(cells, |it| it == "fails"), &pods).await;
    let ran = cluster.ended("matrix", ran).await;
    ran.is_as_expected(cluster).await;
}

#[tokio::test]
async fn every_cell_of_the_matrix_holds_on_one_node() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let cluster = Cluster::start(plane, &lab, 1).await;
    every_cell_holds(&cluster, &cells(1)).await;
}

#[tokio::test]
async fn every_cell_of_the_matrix_holds_on_three_nodes_and_without_a_control_plane() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let mut cluster = Cluster::start(plane, &lab, 3).await;
    let cells = cells(3);
    every_cell_holds(&cluster, &cells).await;

    // All that was read is on the nodes now.
    let here = with(&cells, |it| it.starts_with("reads"));
    cluster.controller.kill();
    for pool in &cluster.pools {
        is_told(pool, false).await;
    }
    let ran = run_here(&cluster, &here, "no-controller").await;
    ran.is_as_expected(&cluster).await;

    // Neither of them answers, and a driver starts.
    cluster.plane.signal_server(Signal::STOP);
    cluster.nodes[0].kill();
    cluster.nodes[0].start();
    cluster.kubelets[0] = kubelet(&cluster.plane, "node-1", &cluster.nodes[0]).await;
    // Without these: a cache whose own key has no content waits up to `--ask` for an answer first.
    let asks = |cell: &&Cell| match (cell.policy, cell.used) {
        ("unlisted", "restore") => true,
        (_, "own") => cell.reader == "other" && cell.kind == "resource-cache",
        _ => false,
    };
    let ask_nothing: Vec<Cell> = here.iter().filter(|it| !asks(it)).copied().collect();
    let ran = run_here(&cluster, &ask_nothing, "alone").await;
    cluster.plane.signal_server(Signal::CONT);
    ran.is_as_expected(&cluster).await;

    cluster.controller.start();
    for pool in &cluster.pools {
        is_told(pool, true).await;
    }
    eventually("the controller knows what there is", async || {
        let absent = ["explain", "task-cache/absent", "--namespace=none"];
        asked(&cluster.controller, &absent)["answer"] == "nothing"
    })
    .await;
    cluster.plane.signal_server(Signal::STOP);
    let ran = run_here(&cluster, &here, "no-server").await;
    cluster.plane.signal_server(Signal::CONT);
    ran.is_as_expected(&cluster).await;
}
