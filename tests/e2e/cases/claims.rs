//! Claims in a cluster: the controller plugin of deploy/ with the real sidecars. Here are the verbs
//! of all cases about claims, and the first case: claims are made, cloned, enlarged and deleted,
//! also while the controller and the driver are killed.
//!
//! | in `claims/` | |
//! |---|---|
//! | `copies` | clones, snapshots, groups of them, generic ephemeral volumes |
//! | `life` | what is done to a claim, its PersistentVolume and its class by hand |
//! | `removed` | objects, definitions and the installation are deleted; upgrades |
//! | `snapshots` | what a cluster needs for snapshots, for a case |

mod copies;
mod life;
mod removed;
mod snapshots;

use serde_json::{Value, json};

use crate::cluster::{Cluster, eventually, feed, succeed};
use crate::env::{Env, items};

pub(super) use copies::copies;
pub(super) use life::life;
pub(super) use removed::{removed, upgraded};
pub(super) use snapshots::Snapshots;

const GROUP: &str = "baggageclaim.concourse-ci.org";
const NODE: &str = "system:serviceaccount:baggageclaim:baggageclaim-node";
const DRIVER: &str = "baggageclaim.csi.concourse-ci.org";
/// The classes of deploy/: on the node of the first pod, and at once.
const LATE: &str = "baggageclaim";
const AT_ONCE: &str = "baggageclaim-clone";

pub(super) fn claims(env: &Env) {
    let controller = Controller::of(env);
    let node = items(&env.cluster.get(&["nodes"])).next().expect("a node")["metadata"]["name"]
        .as_str()
        .expect("a name")
        .to_owned();
    eventually("the node has published its pool", || {
        let pools = controller.objects("pools");
        let pool = pools.iter().find(|pool| pool["metadata"]["name"] == *node);
        pool.filter(|pool| pool["status"]["pool"].is_string())
            .map(|_| ())
    });

    // A claim is made on the node of its pod.
    env.apply_with("claim.yaml", &[("NAME", "workspace")]);
    env.ready("workspace");
    let volume = persistent_volume(env, "workspace");
    let terms = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    let keys = terms[0]["matchExpressions"].as_array().expect("a term");
    assert_eq!(keys.len(), 1, "the node alone: {terms}");
    assert_eq!(keys[0]["values"][0], *node, "{terms}");
    let made = controller.objects("volumes");
    assert_eq!(made.len(), 1, "{made:?}");
    assert_eq!(made[0]["status"]["phase"], "Ready");

    // It grows while its pod runs.
    env.kubectl(&[
        "patch",
        "persistentvolumeclaim/workspace",
        "--patch={\"spec\":{\"resources\":{\"requests\":{\"storage\":\"2Gi\"}}}}",
    ]);
    env.until("persistentvolumeclaim", "workspace", "2 GiB", |claim| {
        claim["status"]["capacity"]["storage"] == "2Gi"
    });

    // A clone has its content before a pod asks for it, and the pod follows. Overlay cannot freeze
    // a source that is mounted, and the class does not ask for a copy.
    env.delete("pod/workspace");
    claim(
        env,
        "copy",
        AT_ONCE,
        &json!({
            "dataSource": {"kind": "PersistentVolumeClaim", "name": "workspace"},
            "resources": {"requests": {"storage": "2Gi"}},
        }),
    );
    bound(env, "copy");
    for claim in ["copy", "workspace"] {
        let said = run(
            env,
            &[claim],
            "cat /claim/0/text; echo changed > /claim/0/text",
        );
        assert_eq!(said, "workspace\n", "{claim}");
    }

    only_its_own_node(env, &made[0]);
    churn(env, &controller);
    controller.nothing_is_left();
}

/// A driver may write the status of its own node's objects, and nothing else of them.
fn only_its_own_node(env: &Env, volume: &Value) {
    let name = volume["metadata"]["name"].as_str().expect("a name");
    let object = format!("volumes.{GROUP}/{name}");
    let own = volume["spec"]["nodeName"].as_str().expect("a node");
    let patch = |node: &str, status: bool, patch: &str| {
        let mut kubectl = env.cluster.kubectl(&["patch", "--type=merge", &object]);
        kubectl.args([&format!("--as={NODE}"), &format!("--patch={patch}")]);
        let extra = format!("authentication.kubernetes.io/node-name={node}");
        kubectl.arg(format!("--as-user-extra={extra}"));
        if status {
            kubectl.arg("--subresource=status");
        }
        let output = kubectl.output().expect("kubectl runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success().then_some(()).ok_or(said)
    };
    let status = r#"{"status":{"phase":"Ready"}}"#;
    patch(own, true, status).expect("its own node's status");
    let other = patch("another", true, status).expect_err("another node's status");
    assert!(other.contains("may not write an object of node"), "{other}");
    let spec = r#"{"spec":{"wanted":"Absent"}}"#;
    let spec = patch(own, false, spec).expect_err("an order");
    assert!(spec.contains("forbidden"), "{spec}");
}

/// Claims come while controller and driver are killed again and again: each is bound in the end.
fn churn(env: &Env, controller: &Controller<'_>) {
    const CLAIMS: usize = 8;
    let name = |number: usize| format!("burst-{number}");
    for number in 0..CLAIMS {
        env.apply_with("claim.yaml", &[("NAME", &name(number))]);
        match number {
            2 | 5 => controller.kill(),
            3 | 6 => env.cluster.replace_driver(),
            _ => {}
        }
    }
    for number in 0..CLAIMS {
        env.ready(&name(number));
        assert_eq!(
            env.exec(&name(number), "cat /claim/text"),
            format!("{}\n", name(number))
        );
    }
}

/// Makes a claim of 1 GiB. `more` replaces fields of its spec.
fn claim(env: &Env, name: &str, class: &str, more: &Value) {
    env.apply_text(&claim_text(name, class, more));
}

fn claim_text(name: &str, class: &str, more: &Value) -> String {
    let mut spec = json!({
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": class,
        "resources": {"requests": {"storage": "1Gi"}},
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        spec[field] = value.clone();
    }
    let claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": spec,
    });
    claim.to_string()
}

/// A pod with these claims at `/claim/0` and so on.
fn pod(name: &str, claims: &[&str], command: &str) -> String {
    let numbers = || claims.iter().enumerate();
    let mounts = numbers().map(|(number, _)| {
        json!({"name": format!("claim-{number}"), "mountPath": format!("/claim/{number}")})
    });
    let volumes = numbers().map(|(number, claim)| {
        json!({
            "name": format!("claim-{number}"),
            "persistentVolumeClaim": {"claimName": claim},
        })
    });
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "Never",
            "containers": [{
                "name": "step",
                "image": "docker.io/library/busybox:1",
                "command": ["sh", "-ceu", command],
                "volumeMounts": mounts.collect::<Vec<_>>(),
            }],
            "volumes": volumes.collect::<Vec<_>>(),
        },
    });
    pod.to_string()
}

/// Runs a command in a pod with these claims, and says what it printed. The pod is deleted, so that
/// no claim is mounted afterwards.
fn run(env: &Env, claims: &[&str], command: &str) -> String {
    let name = format!("runs-with-{}", claims[0]);
    env.apply_text(&pod(&name, claims, command));
    env.succeeded(&name);
    let said = env.logs(&name);
    env.delete(&format!("pod/{name}"));
    said
}

/// Waits until a claim has its volume.
fn bound(env: &Env, claim: &str) {
    env.until("persistentvolumeclaim", claim, "bound", |claim| {
        claim["status"]["phase"] == "Bound"
    });
}

/// The volume of a claim that is bound.
fn persistent_volume(env: &Env, claim: &str) -> Value {
    let claim = env.get(&format!("persistentvolumeclaim/{claim}"));
    let name = claim["spec"]["volumeName"].as_str().expect("it is bound");
    env.cluster.get(&["persistentvolume", name])
}

/// The id of a PersistentVolume's volume.
fn handle(volume: &Value) -> String {
    let handle = volume["spec"]["csi"]["volumeHandle"].as_str();
    handle.expect("a volume of a CSI driver").to_owned()
}

/// Objects that belong to no namespace, such as classes. They are deleted when this is dropped.
struct Extra<'a> {
    cluster: &'a Cluster,
    text: String,
}

impl<'a> Extra<'a> {
    fn apply(cluster: &'a Cluster, text: String) -> Self {
        let apply = ["apply", "--server-side", "--filename=-"];
        let applied = feed(&mut cluster.kubectl(&apply), &text);
        let complaint = String::from_utf8_lossy(&applied.stderr);
        assert!(applied.status.success(), "{complaint}\n{text}");
        Self { cluster, text }
    }
}

impl Drop for Extra<'_> {
    fn drop(&mut self) {
        let delete = [
            "delete",
            "--ignore-not-found",
            "--wait",
            "--timeout=60s",
            "--filename=-",
        ];
        let deleted = feed(&mut self.cluster.kubectl(&delete), &self.text);
        if !std::thread::panicking() {
            let complaint = String::from_utf8_lossy(&deleted.stderr);
            assert!(deleted.status.success(), "{complaint}");
        }
    }
}

/// A StorageClass of the driver, with what distinguishes it.
fn class(name: &str, more: &Value) -> String {
    let mut class = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": DRIVER,
        "volumeBindingMode": "Immediate",
        "allowVolumeExpansion": true,
    });
    for (field, value) in more.as_object().into_iter().flatten() {
        class[field] = value.clone();
    }
    format!("{class}\n---\n")
}

/// The controller plugin, which is ready. A case that fails shows its logs.
pub(super) struct Controller<'a> {
    env: &'a Env<'a>,
}

impl<'a> Controller<'a> {
    pub(super) fn of(env: &'a Env) -> Self {
        let controller = Self { env };
        controller.ready();
        controller
    }

    fn ready(&self) {
        self.kubectl(&[
            "rollout",
            "status",
            "deployment/baggageclaim-controller",
            "--timeout=90s",
        ]);
    }

    fn kubectl(&self, arguments: &[&str]) -> String {
        let within = ["--namespace=baggageclaim"];
        succeed(self.env.cluster.kubectl(&within).args(arguments))
    }

    /// The objects of a kind of ours.
    fn objects(&self, kind: &str) -> Vec<Value> {
        let list = self.env.cluster.get(&[&format!("{kind}.{GROUP}")]);
        items(&list).cloned().collect()
    }

    /// Deletes the controller's pod at once.
    fn kill(&self) {
        let selector = "--selector=app.kubernetes.io/component=controller";
        self.kubectl(&["delete", "pods", selector, "--grace-period=0", "--force"]);
    }

    /// The ids of the PersistentVolumes of the driver, sorted.
    fn persistent(&self) -> Vec<String> {
        let volumes = self.env.cluster.get(&["persistentvolumes"]);
        let ours = items(&volumes).filter(|volume| volume["spec"]["csi"]["driver"] == DRIVER);
        let mut handles: Vec<String> = ours.map(handle).collect();
        handles.sort();
        handles
    }

    /// Waits until node, objects and PersistentVolumes agree about the volumes that there are.
    fn agrees(&self) {
        eventually("objects, node and PersistentVolumes agree", || {
            let objects = self.objects("volumes").into_iter();
            let ready = objects.filter(|volume| volume["status"]["phase"] == "Ready");
            let name = |volume: Value| volume["metadata"]["name"].as_str().map(str::to_owned);
            let mut ready: Vec<String> = ready.filter_map(name).collect();
            ready.sort();
            // Not the directories of the pool: a claim that no pod mounted since its last copy has
            // none.
            let pools = self.objects("pools").into_iter();
            let on_nodes = pools.filter_map(|pool| pool["status"]["volumes"].as_u64());
            let on_nodes: u64 = on_nodes.sum();
            (ready == self.persistent() && on_nodes == ready.len() as u64).then_some(())
        });
    }

    /// Deletes all claims, and waits until nothing of them is left anywhere.
    fn nothing_is_left(&self) {
        self.env.clear();
        let delete = ["delete", "persistentvolumeclaims", "--all", "--wait"];
        self.env.kubectl(&delete);
        eventually("no PersistentVolume is left", || {
            self.persistent().is_empty().then_some(())
        });
        for kind in ["volumes", "snapshots"] {
            eventually(&format!("no object is left: {kind}"), || {
                self.objects(kind).is_empty().then_some(())
            });
        }
        eventually("no claim is left on the node", || {
            self.env.cluster.in_pool("volumes").is_empty().then_some(())
        });
        eventually("no node reports an orphan", || {
            let none = |pool: &Value| {
                let orphans = &pool["status"]["orphans"]["count"];
                orphans.is_null() || *orphans == 0
            };
            self.objects("pools").iter().all(none).then_some(())
        });
    }
}

impl Drop for Controller<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for objects in ["persistentvolumes", "volumes", "snapshots"] {
            let suffix = if objects == "persistentvolumes" {
                ""
            } else {
                GROUP
            };
            let objects = format!("{objects}.{suffix}");
            let mut get = self
                .env
                .cluster
                .kubectl(&["get", objects.trim_end_matches('.')]);
            let _ = get.stdout(std::io::stderr()).status();
        }
        for container in [
            "controller",
            "csi-provisioner",
            "csi-resizer",
            "csi-snapshotter",
        ] {
            eprintln!("---- {container}:");
            let logs = ["logs", "deployment/baggageclaim-controller", "--tail=30"];
            let mut logs = self.env.cluster.kubectl(&logs);
            logs.args(["--namespace=baggageclaim", "--container", container]);
            let _ = logs.stdout(std::io::stderr()).status();
        }
        // The next case finds none of this one's.
        let within = format!("--namespace={}", self.env.namespace());
        let delete = ["delete", "persistentvolumeclaims", "--all", "--wait=false"];
        let _ = self.env.cluster.kubectl(&delete).arg(within).status();
    }
}
