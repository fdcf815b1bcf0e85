//! Clears and deleted namespaces in the shared tier: what was cleared comes back through the tier
//! to no node, not from a writer that forked before, and not from a node that was away.

use std::fs;
use std::path::{Path, PathBuf};

use baggageclaim::kubelet_double::Kubelet;

use crate::clears::{fences, handle, has, the_namespace_goes};
use crate::common::{Fs, Lab, require_lab};
use crate::driver::{Process, controller_named, kubelet, node_with};
use crate::eventually;
use crate::peers::{CACHE, MADE, READ, hub_flag, is_told, nodes, object, publish, told, unpublish};
use crate::plane::{ControlPlane, free_port};
use crate::shared_budgets::names;

/// A control plane with a tier.
struct Cluster {
    plane: ControlPlane,
    tier: PathBuf,
    /// The flag of everything that uses the tier.
    url: String,
    /// The flag of the controllers.
    hub: String,
}

/// A node, and its kubelet.
struct Node {
    name: String,
    pool: PathBuf,
    process: Process,
    kubelet: Kubelet,
}

impl Cluster {
    fn new(plane: ControlPlane, lab: &Lab, count: usize) -> Self {
        nodes(&plane, count);
        let tier = lab.dir("tier");
        let url = format!("--shared=file://{}", tier.display());
        let hub = hub_flag(&plane);
        Self {
            plane,
            tier,
            url,
            hub,
        }
    }

    fn controller(&self) -> Process {
        let flags = [&*self.hub, &*self.url, "--usage-interval=1s"];
        controller_named(&self.plane, "controller", &flags)
    }

    /// A node that is told what the controller knows.
    async fn node(&self, lab: &Lab, number: usize) -> Node {
        let name = format!("node-{number}");
        let pool = lab.dir(&name);
        let listen = format!("--peer-listen=127.0.0.1:{}", free_port());
        let flags = [listen.as_str(), "--ask=10s", &self.url];
        let process = node_with(&self.plane, &name, &pool, &flags);
        let kubelet = kubelet(&self.plane, &name, &process).await;
        is_told(&pool, true).await;
        Node {
            name,
            pool,
            process,
            kubelet,
        }
    }

    /// A pod of a namespace commits the cache, and its node uploads it.
    async fn commits(&self, node: &Node, namespace: &str, pod: &str, text: &str) {
        let uid = object(&self.plane, namespace, pod, &node.name, CACHE);
        let pod = node.kubelet.pod_with_uid(namespace, pod, uid);
        let target = publish(&pod, &MADE[0]).await;
        fs::write(target.join("text"), text).expect("write");
        unpublish(&pod).await;
        eventually("it is in the tier", async || {
            self.state(namespace) == "content" && is_shared(&node.pool, namespace)
        })
        .await;
    }

    /// What a pod of a namespace finds in the cache.
    async fn reads(&self, node: &Node, namespace: &str, pod: &str) -> Option<String> {
        let uid = object(&self.plane, namespace, pod, &node.name, CACHE);
        let pod = node.kubelet.pod_with_uid(namespace, pod, uid);
        let target = publish(&pod, &READ).await;
        let text = fs::read_to_string(target.join("text")).ok();
        unpublish(&pod).await;
        text
    }

    /// The state of the cache's name in the tier.
    fn state(&self, namespace: &str) -> String {
        let names = names(&self.url, namespace);
        let mut of_cache = names
            .into_iter()
            .filter(|(name, _)| name == "task-cache/go");
        of_cache.next().map_or_else(String::new, |(_, state)| state)
    }

    fn uid(&self, namespace: &str) -> String {
        let uid = "-o=jsonpath={.metadata.uid}";
        self.plane.kubectl(&["get", "namespace", namespace, uid])
    }

    /// The record of this cluster in the tier.
    fn record(&self, namespace: &str) -> PathBuf {
        let cluster = self.uid("kube-system");
        self.tier.join(format!("v1/{namespace}/clusters/{cluster}"))
    }

    /// Waits until the tier says that its content is of this namespace.
    async fn is_recorded(&self, namespace: &str) {
        let (record, uid) = (self.record(namespace), self.uid(namespace));
        eventually("the namespace is recorded in the tier", async || {
            fs::read_to_string(&record).is_ok_and(|text| text.contains(&uid))
        })
        .await;
    }

    /// Has the controller collect the tier now: a namespace that gets a budget is collected at
    /// once.
    async fn collects(&self) {
        let policy = "{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: CachePolicy, \
                      metadata: {name: limits, namespace: ci}, spec: {sharedBudget: {}}}";
        self.plane.apply("limits", policy);
        eventually("the tier has cleared the name", async || {
            self.state("ci") == "cleared"
        })
        .await;
        let policy = ["delete", "cachepolicy", "limits", "--namespace=ci"];
        self.plane.kubectl(&policy);
    }
}

fn is_shared(pool: &Path, namespace: &str) -> bool {
    let listed = told(pool, "artifacts");
    let mut listed = listed.as_array().expect("a list").iter();
    listed.any(|one| one["tenant"] == namespace && one["shared"] == "yes")
}

/// Only the tier has the content: the node that made it is gone. Other namespaces, of this cluster
/// before it was set up again and of another cluster, keep theirs.
#[tokio::test]
async fn what_only_the_tier_has_is_cleared_when_its_namespace_went_without_a_controller() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let cluster = Cluster::new(plane, &lab, 3);
    let plane = &cluster.plane;
    for namespace in ["ci", "kept", "foreign"] {
        plane.kubectl(&["create", "namespace", namespace]);
    }
    let mut controller = cluster.controller();
    let mut one = cluster.node(&lab, 1).await;
    for namespace in ["ci", "kept", "foreign"] {
        cluster.commits(&one, namespace, "maker", "old").await;
    }
    // The first look of a controller.
    controller.kill();
    controller.start();
    for namespace in ["ci", "kept", "foreign"] {
        cluster.is_recorded(namespace).await;
    }

    controller.kill();
    one.process.kill();
    plane.kubectl(&["delete", "node", "node-1"]);
    plane.kubectl(&["delete", "pool", "node-1"]);
    fs::remove_file(cluster.record("kept")).expect("unlink");
    fs::remove_file(cluster.record("foreign")).expect("unlink");
    for namespace in ["ci", "foreign"] {
        the_namespace_goes(plane, namespace);
    }
    plane.kubectl(&["create", "namespace", "ci"]);

    controller.start();
    cluster.is_recorded("ci").await;
    cluster.is_recorded("kept").await;
    let made = fences(plane).await;
    let of: Vec<&str> = made.iter().map(|it| &*it.spec.namespace).collect();
    assert_eq!((of, made[0].spec.kind), (vec!["ci"], None));

    let two = cluster.node(&lab, 2).await;
    assert_eq!(cluster.reads(&two, "ci", "reads",).await, None);
    let kept = cluster.reads(&two, "kept", "reads").await;
    assert_eq!(kept.as_deref(), Some("old"), "{}", two.process.tail());
    cluster.commits(&two, "ci", "makes", "new").await;
    assert!(!cluster.record("foreign").exists());
    assert_eq!(cluster.state("foreign"), "content");

    // The next controller clears nothing more, and another node finds what the new one has made.
    controller.kill();
    controller.start();
    let three = cluster.node(&lab, 3).await;
    let new = cluster.reads(&three, "ci", "reads-three").await;
    assert_eq!(new.as_deref(), Some("new"), "{}", three.process.tail());
    assert_eq!(fences(plane).await.len(), 1, "{}", controller.tail());
}

/// Publishes a fork of the cache, which is committed when its pod ends.
async fn forks(
    cluster: &Cluster,
    node: &Node,
    pod: &str,
) -> (baggageclaim::kubelet_double::Pod, PathBuf) {
    let uid = object(&cluster.plane, "ci", pod, &node.name, CACHE);
    let writer = node.kubelet.pod_with_uid("ci", pod, uid);
    let target = publish(&writer, &MADE[0]).await;
    (writer, target)
}

/// A cache is deleted, and then its namespace, while node 2 is away with steps that forked before.
#[tokio::test]
async fn neither_a_clear_nor_a_deleted_namespace_is_undone_through_the_tier() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let cluster = Cluster::new(plane, &lab, 3);
    let plane = &cluster.plane;
    plane.kubectl(&["create", "namespace", "ci"]);
    let controller = cluster.controller();
    let one = cluster.node(&lab, 1).await;
    let mut two = cluster.node(&lab, 2).await;
    cluster.commits(&one, "ci", "maker", "old").await;

    // Both forked before. One of them ends late, on a node that is away meanwhile.
    let (here, target) = forks(&cluster, &one, "here").await;
    assert_eq!(
        fs::read_to_string(target.join("text")).expect("read"),
        "old"
    );
    fs::write(target.join("text"), "old, changed").expect("write");
    let (away, target) = forks(&cluster, &two, "away").await;
    assert_eq!(
        fs::read_to_string(target.join("text")).expect("read"),
        "old"
    );
    fs::write(target.join("text"), "old, changed").expect("write");
    handle(plane, "go", "{key: go}").await;
    two.process.kill();
    plane.kubectl(&["delete", "cache", "go", "--namespace=ci", "--timeout=60s"]);
    has(&one.pool, "task-cache/go", false).await;
    unpublish(&here).await;
    cluster.collects().await;

    two.process.start();
    two.kubelet = kubelet(plane, "node-2", &two.process).await;
    let away = two.kubelet.pod_with_uid("ci", "away", away.uid());
    unpublish(&away).await;
    is_told(&two.pool, true).await;
    settled(&[&one, &two]).await;
    for node in [&one, &two] {
        has(&node.pool, "task-cache/go", false).await;
    }
    assert_eq!(cluster.state("ci"), "cleared");
    assert_eq!(cluster.reads(&two, "ci", "after").await, None);

    // The next commit is found everywhere.
    cluster.commits(&one, "ci", "makes", "new").await;
    let new = cluster.reads(&two, "ci", "reads").await;
    assert_eq!(new.as_deref(), Some("new"), "{}", two.process.tail());

    a_namespace_goes(&lab, &cluster, &controller, (&one, &mut two)).await;
}

/// Node 2 is away while the namespace is deleted and made again.
async fn a_namespace_goes(
    lab: &Lab,
    cluster: &Cluster,
    controller: &Process,
    (one, two): (&Node, &mut Node),
) {
    let plane = &cluster.plane;
    cluster.is_recorded("ci").await;
    let (away, target) = forks(cluster, two, "away-again").await;
    fs::write(target.join("text"), "new, changed").expect("write");
    let before = fences(plane).await.len();
    two.process.kill();
    the_namespace_goes(plane, "ci");
    has(&one.pool, "task-cache/go", false).await;
    plane.kubectl(&["create", "namespace", "ci"]);
    assert_eq!(cluster.reads(one, "ci", "again-one").await, None);

    two.process.start();
    two.kubelet = kubelet(plane, "node-2", &two.process).await;
    let away = two.kubelet.pod_with_uid("ci", "away-again", away.uid());
    unpublish(&away).await;
    is_told(&two.pool, true).await;
    settled(&[one, two]).await;
    has(&two.pool, "task-cache/go", false).await;
    assert_eq!(cluster.reads(two, "ci", "again-two").await, None);
    let three = cluster.node(lab, 3).await;
    assert_eq!(cluster.reads(&three, "ci", "again-three").await, None);
    cluster.collects().await;
    // Nodes and tier were cleared by one fence.
    cluster.is_recorded("ci").await;
    let made = fences(plane).await.len();
    assert_eq!(made, before + 1, "{}", controller.tail());

    cluster.commits(two, "ci", "makes-again", "newest").await;
    let newest = cluster.reads(&three, "ci", "reads-again").await;
    assert_eq!(
        newest.as_deref(),
        Some("newest"),
        "{}",
        three.process.tail()
    );
}

/// Waits until nothing is left of the volumes.
async fn settled(nodes: &[&Node]) {
    for node in nodes {
        eventually("all volumes have ended", async || {
            told(&node.pool, "volumes")
                .as_array()
                .is_some_and(Vec::is_empty)
        })
        .await;
    }
}
