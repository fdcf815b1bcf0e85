//! Objects, definitions and the installation are deleted while claims live: no byte of them is
//! lost. And the way from an installation of the node plugin alone to one with the controller.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{AT_ONCE, Controller, GROUP, LATE, claim, pod, run};
use crate::cluster::{Cluster, feed, succeed};
use crate::env::Env;
use crate::step::Step;

pub(in super::super) fn removed(env: &Env) {
    let cluster = env.cluster;
    let controller = Controller::of(env);
    claim(env, "idle", AT_ONCE, &Value::Null);
    run(env, &["idle"], "echo idle > /claim/0/text");
    claim(env, "used", LATE, &Value::Null);
    env.apply_text(&pod(
        "user",
        &["used"],
        "echo used > /claim/0/text; sleep 1000000",
    ));
    env.ready("user");
    let before = (controller.persistent(), claims_on_node(cluster));
    assert_eq!(before.0, before.1);
    let nothing_is_lost = || {
        assert_eq!(env.exec("user", "cat /claim/0/text"), "used\n");
        assert_eq!(run(env, &["idle"], "cat /claim/0/text"), "idle\n");
        assert_eq!(controller.persistent(), before.0);
        assert_eq!(claims_on_node(cluster), before.1);
    };

    let all = format!("volumes.{GROUP}");
    succeed(&mut cluster.kubectl(&["delete", &all, "--all", "--wait"]));
    nothing_is_lost();

    let crds = deploy("crds");
    let delete = ["delete", "--wait", "--timeout=180s", "--kustomize"];
    succeed(cluster.kubectl(&delete).arg(&crds));
    nothing_is_lost();
    apply(cluster, &crds);
    // The controller makes the objects again.
    controller.agrees();
    nothing_is_lost();

    let overlay = deploy("overlays").join(cluster.overlay());
    succeed(cluster.kubectl(&delete).arg(&overlay));
    assert_eq!(env.exec("user", "cat /claim/0/text"), "used\n");
    apply(cluster, &overlay);
    cluster.driver_ready();
    controller.ready();
    nothing_is_lost();

    // Only the order deletes data: here without an object that says where it is.
    succeed(&mut cluster.kubectl(&["delete", &all, "--all", "--wait"]));
    controller.nothing_is_left();
}

/// The installation before there was a controller plugin, as it was applied; with it, a pod whose
/// inline volumes live on. Its program is that of this version. `BAGGAGECLAIM_TEST_OLDER` takes an
/// older one instead, on an empty pool: `build.sh` makes an image of it.
pub(in super::super) fn upgraded(env: &Env) {
    let cluster = env.cluster;
    let overlay = deploy("overlays").join(cluster.overlay());
    let delete = ["delete", "--wait", "--timeout=180s", "--kustomize"];
    succeed(cluster.kubectl(&delete).arg(&overlay));
    let image = "baggageclaim-csi:";
    let before = Env::manifest("before-controller.yaml");
    let tag = if std::env::var_os("BAGGAGECLAIM_TEST_OLDER").is_some() {
        cluster.shell("rm -rf /var/lib/baggageclaim/*", true);
        format!("{image}older")
    } else {
        format!("{image}{}", env!("CARGO_PKG_VERSION"))
    };
    let before = before.replace(&format!("{image}0.1.0"), &tag);
    let apply_it = ["apply", "--filename=-"];
    let applied = feed(&mut cluster.kubectl(&apply_it), &before);
    let complaint = String::from_utf8_lossy(&applied.stderr);
    assert!(applied.status.success(), "{complaint}");
    cluster.driver_ready();
    let mut step = Step::runs(env, "before");
    let old = cluster.driver_process();

    apply(cluster, &overlay);
    cluster.driver_ready();
    let controller = Controller::of(env);
    assert_ne!(cluster.driver_process(), old);
    step.works();
    // Claims work, and inline volumes go on: the scheduler no longer asks for capacity objects.
    claim(env, "first", LATE, &Value::Null);
    let said = run(
        env,
        &["first"],
        "echo here > /claim/0/text; cat /claim/0/text",
    );
    assert_eq!(said, "here\n");
    step.works();
    step.ends();
    controller.nothing_is_left();
}

fn deploy(directory: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("deploy").join(directory)
}

fn apply(cluster: &Cluster, kustomization: &Path) {
    let apply = ["apply", "--validate=strict", "--kustomize"];
    succeed(cluster.kubectl(&apply).arg(kustomization));
}

/// The claims on the node.
fn claims_on_node(cluster: &Cluster) -> Vec<String> {
    let names = cluster.in_pool("volumes").into_iter();
    names.filter(|name| name.starts_with("vol-")).collect()
}
