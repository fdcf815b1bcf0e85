//! Claims in a cluster: deploy/ with the component for the controller plugin, the real
//! csi-provisioner and csi-resizer. Claims are made, cloned, enlarged and deleted, also while the
//! controller and the driver are killed.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{Cluster, eventually, succeed};
use crate::env::{Env, items};

const GROUP: &str = "baggageclaim.concourse-ci.org";
const DRIVER: &str = "system:serviceaccount:baggageclaim:baggageclaim-node";

pub(super) fn claims(env: &Env) {
    let cluster = env.cluster;
    let controller = Controller::install(cluster);
    let node = items(&cluster.get(&["nodes"])).next().expect("a node")["metadata"]["name"]
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
    let claim = env.get("persistentvolumeclaim/workspace");
    let volume = claim["spec"]["volumeName"].as_str().expect("it is bound");
    let volume = cluster.get(&["persistentvolume", volume]);
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
    env.apply_with("clone.yaml", &[("NAME", "copy"), ("OF", "workspace")]);
    bound(env, "copy");
    for claim in ["copy", "workspace"] {
        env.apply_with("claim-reader.yaml", &[("NAME", claim)]);
        env.succeeded(claim);
        assert_eq!(env.logs(claim), "workspace\n", "{claim}");
    }

    only_its_own_node(env, &made[0]);
    churn(env, &controller);

    // All are deleted, and nothing is left on the node.
    env.clear();
    env.kubectl(&["delete", "persistentvolumeclaims", "--all", "--wait"]);
    eventually("no persistent volume is left", || {
        let volumes = cluster.get(&["persistentvolumes"]);
        items(&volumes).next().is_none().then_some(())
    });
    eventually("no volume is left", || {
        controller.objects("volumes").is_empty().then_some(())
    });
    eventually("no claim is left on the node", || {
        cluster.in_pool("volumes").is_empty().then_some(())
    });
}

/// A driver may write the status of its own node's objects, and nothing else of them.
fn only_its_own_node(env: &Env, volume: &Value) {
    let name = volume["metadata"]["name"].as_str().expect("a name");
    let object = format!("volumes.{GROUP}/{name}");
    let own = volume["spec"]["nodeName"].as_str().expect("a node");
    let patch = |node: &str, status: bool, patch: &str| {
        let mut kubectl = env.cluster.kubectl(&["patch", "--type=merge", &object]);
        kubectl.args([&format!("--as={DRIVER}"), &format!("--patch={patch}")]);
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

fn bound(env: &Env, claim: &str) {
    env.until("persistentvolumeclaim", claim, "bound", |claim| {
        claim["status"]["phase"] == "Bound"
    });
}

/// The installation with the component. When this is dropped it is as it was.
struct Controller<'a> {
    cluster: &'a Cluster,
    deploy: TempDir,
}

impl<'a> Controller<'a> {
    fn install(cluster: &'a Cluster) -> Self {
        let deploy = TempDir::new().expect("a temporary directory");
        let copy = format!("cp -r deploy '{}'", deploy.path().display());
        cluster.shell(&copy, false);
        let installed = Self { cluster, deploy };
        let ours = installed.overlay();
        fs::create_dir(&ours).expect("it is new");
        let overlay = format!(
            "resources: [../{}]\ncomponents: [../../components/controller]\n\
             images: [{{name: baggageclaim-csi, newTag: {}}}]\n",
            cluster.overlay(),
            env!("CARGO_PKG_VERSION")
        );
        fs::write(ours.join("kustomization.yaml"), overlay).expect("write");
        // The objects of a definition can be made a moment after it.
        eventually("it is applied", || {
            let apply = &["apply", "--validate=strict", "--kustomize"];
            let output = cluster.kubectl(apply).arg(&ours).output();
            output.expect("kubectl runs").status.success().then_some(())
        });
        cluster.driver_ready();
        installed.kubectl(&[
            "rollout",
            "status",
            "deployment/baggageclaim-controller",
            "--timeout=60s",
        ]);
        installed
    }

    fn overlay(&self) -> std::path::PathBuf {
        self.deploy.path().join("deploy/overlays/ours")
    }

    fn kubectl(&self, arguments: &[&str]) -> String {
        let within = ["--namespace=baggageclaim"];
        succeed(self.cluster.kubectl(&within).args(arguments))
    }

    /// The objects of a kind of ours.
    fn objects(&self, kind: &str) -> Vec<Value> {
        let list = self.cluster.get(&[&format!("{kind}.{GROUP}")]);
        items(&list).cloned().collect()
    }

    /// Deletes the controller's pod at once.
    fn kill(&self) {
        let selector = "--selector=app.kubernetes.io/component=controller";
        self.kubectl(&["delete", "pods", selector, "--grace-period=0", "--force"]);
    }
}

impl Drop for Controller<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for container in ["controller", "csi-provisioner", "csi-resizer"] {
                let logs = ["logs", "deployment/baggageclaim-controller", "--tail=30"];
                let mut logs = self.cluster.kubectl(&logs);
                logs.args(["--namespace=baggageclaim", "--container", container]);
                let _ = logs.stdout(std::io::stderr()).status();
            }
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
        let before = root.join("overlays").join(self.cluster.overlay());
        succeed(self.cluster.kubectl(&["apply", "--kustomize"]).arg(before));
        self.kubectl(&["delete", "deployment", "baggageclaim-controller", "--wait"]);
        for file in [
            "admission.yaml",
            "rbac.yaml",
            "serviceaccount.yaml",
            "storageclasses.yaml",
        ] {
            let file = root.join("components/controller").join(file);
            let delete = &["delete", "--ignore-not-found", "--wait", "--filename"];
            succeed(self.cluster.kubectl(delete).arg(file));
        }
        let delete = &["delete", "--ignore-not-found", "--wait", "--kustomize"];
        succeed(self.cluster.kubectl(delete).arg(root.join("crds")));
        self.cluster.driver_ready();
    }
}
