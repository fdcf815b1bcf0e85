//! What a cluster needs for snapshots, installed for a case, and snapshots of claims.

use serde_json::{Value, json};

use super::{Controller, DRIVER, Extra};
use crate::cluster::succeed;
use crate::env::Env;

pub(super) const SNAPSHOTS: &str = "snapshot.storage.k8s.io";
const GROUPS: &str = "groupsnapshot.storage.k8s.io";

/// What a cluster has for snapshots, and the driver's classes of them, until this is dropped.
pub(in crate::cases) struct Snapshots<'a> {
    /// The classes, the controller, the definitions: they go in this order.
    _all: [Extra<'a>; 3],
}

impl<'a> Snapshots<'a> {
    pub(in crate::cases) fn install(controller: &Controller<'a>) -> Self {
        let cluster = controller.env.cluster;
        let definitions = cluster.built("snapshot-crds.yaml");
        let definitions = Extra::apply(cluster, definitions);
        succeed(&mut cluster.kubectl(&[
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "crd",
            "--all",
        ]));
        let manifest = Env::manifest("snapshot-controller.yaml");
        let programs = Extra::apply(cluster, manifest);
        // csi-snapshotter looks for groups at its start only.
        let deployment = "deployment/baggageclaim-controller";
        controller.kubectl(&["rollout", "restart", deployment]);
        let wait = ["rollout", "status", "--namespace=kube-system"];
        let mut wait = cluster.kubectl(&wait);
        succeed(wait.args(["deployment/snapshot-controller", "--timeout=90s"]));
        controller.ready();
        let class = |group: &str, kind: &str| {
            json!({
                "apiVersion": format!("{group}/v1"),
                "kind": kind,
                "metadata": {"name": "case"},
                "driver": DRIVER,
                "deletionPolicy": "Delete",
            })
        };
        let classes = format!(
            "{}\n---\n{}\n",
            class(SNAPSHOTS, "VolumeSnapshotClass"),
            class(GROUPS, "VolumeGroupSnapshotClass")
        );
        let classes = Extra::apply(cluster, classes);
        Self {
            _all: [classes, programs, definitions],
        }
    }

    /// Takes a snapshot of a claim, and waits until it can be used.
    #[expect(clippy::unused_self, reason = "it needs what is installed")]
    pub(in crate::cases) fn take(&self, env: &Env, name: &str, claim: &str) {
        let source = json!({"persistentVolumeClaimName": claim});
        snapshot(env, "VolumeSnapshot", name, &source);
    }

    /// Deletes all snapshots of the case.
    #[expect(clippy::unused_self, reason = "it needs what is installed")]
    pub(in crate::cases) fn delete_all(&self, env: &Env) {
        for kind in ["volumegroupsnapshots", "volumesnapshots"] {
            env.kubectl(&["delete", kind, "--all", "--wait", "--timeout=60s"]);
        }
    }
}

/// Takes a snapshot, or a group of them, and waits until it can be used.
pub(super) fn snapshot(env: &Env, kind: &str, name: &str, source: &Value) {
    let (group, class) = match kind {
        "VolumeSnapshot" => (SNAPSHOTS, "volumeSnapshotClassName"),
        _ => (GROUPS, "volumeGroupSnapshotClassName"),
    };
    let object = json!({
        "apiVersion": format!("{group}/v1"),
        "kind": kind,
        "metadata": {"name": name},
        "spec": {class: "case", "source": source},
    });
    env.apply_text(&object.to_string());
    env.until(&format!("{kind}s.{group}"), name, "ready", |object| {
        object["status"]["readyToUse"] == true
    });
}
