//! Claims over three nodes, each with a kubelet of its own: where they are made, where pods follow
//! their clones, and what happens when a node is cut off, loses its power or its disk.
//!
//! `cluster.sh` has installed the controller plugin for all of these cases, on node 1.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::claims::{Controller, Snapshots};
use super::shared;
use crate::cluster::{Cluster, eventually};
use crate::env::{Env, condition, items};

pub(super) use full::full_node;
pub(super) use namespaces::deleted_namespaces;
pub(super) use peers::peers;
pub(super) use policies::policies;
pub(crate) use report::report;
pub(super) use tier::one_tier;
pub(super) use token::one_nodes_token;

const GROUP: &str = "baggageclaim.concourse-ci.org";
/// The class whose claims wait for their pod.
const LATE: &str = "baggageclaim";
/// The class whose claims do not wait.
const CLONES: &str = "baggageclaim-clone";

/// A claim: empty, or a clone of another.
fn claim(name: &str, class: &str, source: Option<&str>) -> String {
    let source = source.map(|source| format!("kind: PersistentVolumeClaim, name: {source}"));
    claim_of(name, class, source.as_deref())
}

/// A claim that is restored from a snapshot.
fn restored(name: &str, snapshot: &str) -> String {
    let source =
        format!("apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: {snapshot}");
    claim_of(name, CLONES, Some(&source))
}

fn claim_of(name: &str, class: &str, source: Option<&str>) -> String {
    let source = source.map_or_else(String::new, |source| {
        format!("  dataSource: {{{source}}}\n")
    });
    format!(
        "apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}, labels: {{group: {name}}}}}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: {class}
  resources: {{requests: {{storage: 1Gi}}}}
{source}---
"
    )
}

/// A pod that sees claims at `/claim-0` and so on, and runs a shell command.
fn pod(name: &str, more: &str, claims: &[&str], command: &str) -> String {
    let volumes = claims.iter().enumerate().map(|(number, claim)| {
        let source = format!("persistentVolumeClaim: {{claimName: {claim}}}");
        (format!("claim-{number}"), source)
    });
    pod_with(name, more, volumes, command)
}

/// A pod that sees each volume, a name and a source, at `/NAME`, and runs a shell command.
fn pod_with(
    name: &str,
    more: &str,
    all: impl IntoIterator<Item = (String, String)>,
    command: &str,
) -> String {
    let (mut mounts, mut volumes) = (String::new(), String::new());
    for (volume, source) in all {
        let _ = writeln!(mounts, "    - {{name: {volume}, mountPath: /{volume}}}");
        let _ = writeln!(volumes, "  - {{name: {volume}, {source}}}");
    }
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{group: {name}}}}}
spec:
  terminationGracePeriodSeconds: 0
  {more}
  containers:
  - name: step
    image: docker.io/library/busybox:1
    command: [sh, -ceu, {command:?}]
    volumeMounts:
{mounts}  volumes:
{volumes}---
"
    )
}

/// A pod that runs only there.
fn only_on(node: &Cluster) -> String {
    format!("nodeSelector: {{kubernetes.io/hostname: {}}}", node.name())
}

/// The longest until nothing is left of a deleted node that nothing bound needs: `--node-grace`,
/// which is 15 s here (`updown.sh`), and 30 s.
const GIVEN_UP: Duration = Duration::from_secs(15 + 30);

const ENDS: &str = "restartPolicy: Never";

/// The node of a pod.
fn node_of(pod: &Value) -> &str {
    pod["spec"]["nodeName"].as_str().unwrap_or_default()
}

/// The name of the PersistentVolume of a claim.
fn volume_of(env: &Env, claim: &str) -> String {
    let bound = env.until("persistentvolumeclaim", claim, "bound", |claim| {
        claim["status"]["phase"] == "Bound"
    });
    let name = bound["spec"]["volumeName"].as_str();
    name.expect("it is bound").to_owned()
}

/// The node where pods can use a PersistentVolume.
fn place_of(env: &Env, volume: &str) -> String {
    let volume = env.cluster.get(&["persistentvolume", volume]);
    let terms = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    let node = terms[0]["matchExpressions"][0]["values"][0].as_str();
    node.unwrap_or_else(|| panic!("{terms}")).to_owned()
}

/// The objects of a kind of ours.
fn objects(cluster: &Cluster, kind: &str) -> Vec<Value> {
    let list = cluster.get(&[&format!("{kind}.{GROUP}")]);
    items(&list).cloned().collect()
}

/// Makes a claim on a node, with its name in the file `text`. Nothing uses it then.
fn source(env: &Env, name: &str, node: &Cluster) {
    let more = format!("{ENDS}\n  {}", only_on(node));
    let write = format!("echo {name} > /claim-0/text");
    env.apply_text(&(claim(name, LATE, None) + &pod(name, &more, &[name], &write)));
    env.succeeded(name);
    env.delete(&format!("pod/{name}"));
    eventually("nothing is mounted", || {
        node.volume_mounts().is_empty().then_some(())
    });
}

/// Deletes all pods and claims of the case. Then there is no volume: none in the API, none on any
/// node.
fn no_claim_is_left(env: &Env) {
    env.clear();
    env.kubectl(&["delete", "persistentvolumeclaims", "--all", "--wait"]);
    eventually("no PersistentVolume is left", || {
        let volumes = env.cluster.get(&["persistentvolumes"]);
        items(&volumes).next().is_none().then_some(())
    });
    eventually("no Volume is left", || {
        objects(env.cluster, "volumes").is_empty().then_some(())
    });
    for node in env.cluster.nodes() {
        eventually("no claim is left on a node", || {
            node.in_pool("volumes").is_empty().then_some(())
        });
    }
}

fn node_is_ready(env: &Env, node: &Cluster) {
    env.until("node", &node.name(), "ready", |node| {
        condition(node, "Ready")
    });
    node.driver_ready();
}

pub(super) fn stateful_set(env: &Env) {
    env.apply("stateful-set.yaml");
    let mut nodes = Vec::new();
    for number in 0..3 {
        let name = format!("step-{number}");
        env.ready(&name);
        let node = node_of(&env.get(&format!("pod/{name}"))).to_owned();
        let volume = volume_of(env, &format!("workspace-{name}"));
        assert_eq!(place_of(env, &volume), node, "{name}");
        nodes.push(node);
    }
    nodes.sort();
    assert_eq!(nodes, ["node-1", "node-2", "node-3"]);
    // Its claims end with it: their owner is deleted.
    env.delete("statefulset/step");
    eventually("the claims are gone", || {
        let claims = env.get("persistentvolumeclaims");
        items(&claims).next().is_none().then_some(())
    });
    no_claim_is_left(env);
}

/// Of each source there are clones, and claims that are restored from its snapshot.
pub(super) fn clones_follow(env: &Env) {
    const COPIES_OF_EACH: usize = 25;
    let snapshots = Snapshots::install(&Controller::of(env));
    let nodes = [2, 3].map(|number| env.cluster.node(number));
    let mut all = String::new();
    let mut expected = Vec::new();
    for node in &nodes {
        let of = format!("of-{}", node.name());
        source(env, &of, node);
        snapshots.take(env, &of, &of);
        for number in 0..COPIES_OF_EACH {
            let name = format!("{of}-{number}");
            let read = format!("grep {of} /claim-0/text");
            all += &if number % 2 == 0 {
                claim(&name, CLONES, Some(&of))
            } else {
                restored(&name, &of)
            };
            all += &pod(&name, ENDS, &[&name], &read);
            expected.push((name, node.name()));
        }
    }
    env.apply_text(&all);
    env.kubectl(&[
        "wait",
        "pods",
        "--all",
        "--for=jsonpath={.status.phase}=Succeeded",
        "--timeout=300s",
    ]);
    let pods = env.get("pods");
    let nodes_of_pods: HashMap<&str, &str> = items(&pods)
        .filter_map(|pod| Some((pod["metadata"]["name"].as_str()?, node_of(pod))))
        .collect();
    for (name, node) in &expected {
        assert_eq!(nodes_of_pods.get(&**name), Some(&&**node), "{name}");
    }
    assert_eq!(nodes_of_pods.len(), expected.len());
    snapshots.delete_all(env);
    no_claim_is_left(env);
}

pub(super) fn two_nodes_in_one_pod(env: &Env) {
    for number in [2, 3] {
        let (of, name) = (format!("of-{number}"), format!("copy-{number}"));
        source(env, &of, &env.cluster.node(number));
        env.apply_text(&claim(&name, CLONES, Some(&of)));
        let volume = volume_of(env, &name);
        assert_eq!(place_of(env, &volume), format!("node-{number}"));
    }
    env.apply_text(&pod("both", ENDS, &["copy-2", "copy-3"], "true"));
    let told = env.event("both", &["0/3 nodes are available"]);
    assert!(told.contains("PersistentVolume"), "{told}");
    no_claim_is_left(env);
}

/// Pods that no scheduler has placed, as those of one that does not know volumes. Kubelet refuses a
/// volume of another node, and a claim without a volume. Nothing is made for them.
pub(super) fn without_scheduler(env: &Env) {
    source(env, "away", &env.cluster.node(2));
    let node = env.cluster.node(3);
    let there = format!("{ENDS}\n  nodeName: {}", node.name());
    env.apply_text(&pod("misplaced", &there, &["away"], "true"));
    env.event("misplaced", &["NodeAffinity check failed"]);
    env.apply_text(&(claim("early", LATE, None) + &pod("unbound", &there, &["early"], "true")));
    env.event("unbound", &["PVC is not bound"]);
    assert!(node.in_pool("volumes").is_empty());
    assert_eq!(objects(env.cluster, "volumes").len(), 1);
    // A scheduler that knows volumes places a pod for the same claim.
    env.apply_text(&pod("placed", ENDS, &["away"], "grep away /claim-0/text"));
    env.succeeded("placed");
    no_claim_is_left(env);
}

pub(super) fn clone_in_the_other_class(env: &Env) {
    source(env, "source", &env.cluster.node(2));
    // On the source's node it works.
    let there = format!("{ENDS}\n  {}", only_on(&env.cluster.node(2)));
    let read = "grep source /claim-0/text";
    env.apply_text(&(claim("here", LATE, Some("source")) + &pod("here", &there, &["here"], read)));
    env.succeeded("here");
    // On another, the claim tells what to do.
    let elsewhere = format!("{ENDS}\n  {}", only_on(&env.cluster.node(3)));
    env.apply_text(
        &(claim("there", LATE, Some("source")) + &pod("there", &elsewhere, &["there"], read)),
    );
    env.claim_event(
        "there",
        &["node of its source, node-2", "volumeBindingMode: Immediate"],
    );
    no_claim_is_left(env);
}

pub(super) fn cloned_workspace(env: &Env) {
    let node = env.cluster.node(3);
    source(env, "warm", &node);
    env.apply("cloned-workspace.yaml");
    env.succeeded("job");
    assert_eq!(env.logs("job"), "warm\n");
    assert_eq!(node_of(&env.get("pod/job")), node.name());
    env.delete("pod/job");
    eventually("the pod's own claim is gone", || {
        let claims = env.get("persistentvolumeclaims");
        (items(&claims).count() == 1).then_some(())
    });
    no_claim_is_left(env);
}

pub(super) fn cut_off(env: &Env) {
    let node = env.cluster.node(3);
    // Writes once more whenever it is told to.
    let write = "echo kept > /claim-0/text; while sleep 0.1; do [ ! -e /claim-0/more ] || \
                 { echo more >> /claim-0/text; rm /claim-0/more; }; done";
    env.apply_text(&(claim("kept", LATE, None) + &pod("kept", &only_on(&node), &["kept"], write)));
    env.ready("kept");
    let (uid, volume) = (env.uid("kept"), volume_of(env, "kept"));
    let data = node.on_node(&format!(
        "{}/pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount",
        node.kubelet()
    ));

    let cable = node.cut_off();
    // The scheduler does not know yet, and this pod would be there rather than elsewhere.
    let rather = format!(
        "affinity: {{nodeAffinity: {{preferredDuringSchedulingIgnoredDuringExecution: [{{weight: 100, preference: \
         {{matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: [{}]}}]}}}}]}}}}",
        node.name()
    );
    let new = "echo new > /claim-0/text; sleep 1000000";
    env.apply_text(&(claim("new", LATE, None) + &pod("new", &rather, &["new"], new)));
    env.ready("new");
    let silent = format!(
        "the driver on node {} did not make the volume in time",
        node.name()
    );
    env.claim_event("new", &["ResourceExhausted", &silent]);
    let elsewhere = node_of(&env.get("pod/new")).to_owned();
    assert_ne!(elsewhere, node.name());
    assert_eq!(place_of(env, &volume_of(env, "new")), elsewhere);
    fs::write(data.join("more"), "").expect("write");
    eventually("the pod goes on without the cable", || {
        let text = fs::read_to_string(data.join("text")).expect("read");
        (text == "kept\nmore\n").then_some(())
    });

    drop(cable);
    node_is_ready(env, &node);
    env.ready("kept");
    assert_eq!(env.uid("kept"), uid);
    assert_eq!(env.exec("kept", "cat /claim-0/text"), "kept\nmore\n");
    assert_eq!(env.exec("new", "cat /claim-0/text"), "new\n");
    // The attempt on the node that was silent is given up.
    eventually("there are two volumes, and no more", || {
        let volumes = objects(env.cluster, "volumes");
        let ready = |volume: &&Value| volume["status"]["phase"] == "Ready";
        (volumes.len() == 2 && volumes.iter().filter(ready).count() == 2).then_some(())
    });
    eventually("one of them is on the node", || {
        (node.in_pool("volumes").len() == 1).then_some(())
    });
    no_claim_is_left(env);
}

pub(super) fn power_cut(env: &Env) {
    let node = env.cluster.node(2);
    source(env, "at-rest", &node);
    let write = "echo started >> /claim-0/text; sleep 1000000";
    env.apply_text(&(claim("used", LATE, None) + &pod("used", &only_on(&node), &["used"], write)));
    env.ready("used");
    node.script(&["reboot"]);
    node_is_ready(env, &node);
    env.until("pods", "used", "started again", |pod| {
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        restarts.as_u64().unwrap_or_default() > 0 && condition(pod, "Ready")
    });
    assert_eq!(env.exec("used", "cat /claim-0/text"), "started\n".repeat(2));
    env.apply_text(&claim("copy", CLONES, Some("at-rest")));
    let read = "grep at-rest /claim-0/text /claim-1/text";
    env.apply_text(&pod("reader", ENDS, &["at-rest", "copy"], read));
    env.succeeded("reader");
    no_claim_is_left(env);
}

pub(super) fn another_disk(env: &Env) {
    let node = env.cluster.node(3);
    source(env, "lost", &node);
    let phase = |phase: &str| {
        eventually(&format!("the volume is {phase}"), || {
            let volumes = objects(env.cluster, "volumes");
            (volumes.len() == 1 && volumes[0]["status"]["phase"] == phase).then_some(())
        });
    };
    phase("Ready");
    let removed = node.removed();
    node.script(&["disk"]);
    drop(removed);
    node_is_ready(env, &node);
    phase("Lost");
    // Its pod does not get an empty volume.
    env.apply_text(&pod("reader", ENDS, &["lost"], "ls /claim-0"));
    env.event("reader", &["MountVolume", "there is no volume"]);
    assert!(node.in_pool("volumes").is_empty());
    // New claims can be made there.
    source(env, "new", &node);
    no_claim_is_left(env);
}

pub(super) fn deleted(env: &Env) {
    let node = env.cluster.node(3);
    for name in ["kept", "released"] {
        source(env, name, &node);
    }
    let released = volume_of(env, "released");
    let of_released = env.cluster.get(&["persistentvolume", &released]);
    let orphan = of_released["spec"]["csi"]["volumeHandle"].as_str();
    let orphan = orphan.expect("it is ours");

    let off = node.off();
    env.delete("persistentvolumeclaim/released");
    env.until("persistentvolume", &released, "released", |volume| {
        volume["status"]["phase"] == "Released"
    });
    env.apply_text(&claim("pending", CLONES, Some("kept")));
    eventually("the clone is ordered", || {
        (objects(env.cluster, "volumes").len() == 3).then_some(())
    });
    node.script(&["remove"]);
    let begin = Instant::now();
    let is_lost = |volumes: Vec<Value>| {
        let said = volumes.iter().map(|volume| &volume["status"]);
        let said: Vec<_> = said
            .map(|it| (&it["phase"], &it["error"]["code"]))
            .collect();
        matches!(said[..], [(phase, code)] if phase == "Lost" && code == "NodeGone")
    };
    eventually("only what is bound is left, and it is lost", || {
        let (volumes, kept) = (
            env.cluster.get(&["persistentvolumes"]),
            volume_of(env, "kept"),
        );
        let mut names = items(&volumes).map(|volume| volume["metadata"]["name"].as_str());
        let of_node = |pool: &Value| pool["metadata"]["name"] == *node.name();
        (names.next() == Some(Some(&kept))
            && names.next().is_none()
            && is_lost(objects(env.cluster, "volumes"))
            && !objects(env.cluster, "pools").iter().any(of_node))
        .then_some(())
    });
    let took = begin.elapsed();
    println!(
        "  a deleted node is given up after {:.0} s (<= {:.0} s)",
        took.as_secs_f64(),
        GIVEN_UP.as_secs_f64()
    );
    assert!(took <= GIVEN_UP, "{took:?}");
    for (claim, told) in [
        (
            "kept",
            "was deleted from the cluster. The claim works again",
        ),
        (
            "pending",
            "was deleted from the cluster; it can be copied again",
        ),
    ] {
        env.claim_event(claim, &[&node.name(), told]);
    }

    drop(off);
    node_is_ready(env, &node);
    // The clone is made now.
    let read = "grep kept /claim-0/text /claim-1/text";
    env.apply_text(&pod("reader", ENDS, &["kept", "pending"], read));
    env.succeeded("reader");
    // No data goes without an order.
    eventually("the released volume is an orphan", || {
        let mut pools = objects(env.cluster, "pools").into_iter();
        pools
            .find(|pool| pool["status"]["orphans"]["volumes"][0]["id"] == *orphan)
            .map(|pool| assert_eq!(pool["metadata"]["name"], *node.name()))
    });
    env.apply_text(&format!(
        "apiVersion: {GROUP}/v1alpha1
kind: Volume
metadata: {{name: {orphan}}}
spec: {{name: {released}, nodeName: {}, wanted: Absent}}
",
        node.name()
    ));
    no_claim_is_left(env);
}

mod everywhere;
mod fetches;
mod full;
mod namespaces;
mod peers;
mod policies;
mod report;
mod tier;
mod token;
