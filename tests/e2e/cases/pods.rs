//! Single pods, and the messages about users' mistakes. And the manifests themselves, as the API
//! server sees them.

use crate::cluster::{eventually, feed, succeed};
use crate::docs;
use crate::env::{Env, items};

/// The API server finds nothing in them that it does not know, and nothing that it does not allow.
pub(super) fn dry_run(env: &Env) {
    let root = env!("CARGO_MANIFEST_DIR");
    let overlays = std::fs::read_dir(format!("{root}/deploy/overlays")).expect("overlays");
    let mut names = Vec::new();
    for overlay in overlays {
        let overlay = overlay.expect("an entry").path();
        let overlay = overlay.to_str().expect("a plain path");
        succeed(&mut env.cluster.kubectl(&[
            "apply",
            "--dry-run=server",
            "--validate=strict",
            "--kustomize",
            overlay,
        ]));
        names.push(overlay.rsplit('/').next().expect("a name").to_owned());
        // Where kubelet is elsewhere, nothing that is put together may still be where it mostly is.
        let rendered = succeed(&mut env.cluster.kubectl(&["kustomize", overlay]));
        let is_elsewhere = matches!(&**names.last().expect("one"), "k0s" | "microk8s");
        assert_eq!(
            rendered.contains(" /var/lib/kubelet"),
            !is_elsewhere,
            "{overlay}"
        );
        let is_alone = overlay.ends_with("/node");
        assert_eq!(rendered.contains("kind: StorageClass"), !is_alone);
        assert_eq!(
            rendered.matches("mountPropagation: Bidirectional").count(),
            if overlay.ends_with("/loop") { 3 } else { 2 }
        );
    }
    for overlay in ["host", "loop", "k0s", "microk8s", "openshift", "node"] {
        assert!(names.iter().any(|name| name == overlay), "{names:?}");
    }
    // The other example is played by its own case: it has accounts and a namespace.
    for example in ["pipeline", "warm-workspace"] {
        env.kubectl(&[
            "apply",
            "--dry-run=server",
            "--validate=strict",
            "--recursive",
            "--filename",
            &format!("{root}/examples/{example}"),
        ]);
    }
    let manifests = documented();
    assert!(manifests.len() > 10, "{manifests:#?}");
    let output = feed(
        &mut env.cluster.kubectl(&[
            "apply",
            "--dry-run=server",
            "--validate=strict",
            "--filename",
            "-",
        ]),
        &manifests.join("\n---\n"),
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Those in the documentation. Snapshot classes are a CRD, which this cluster has not. A part
/// without a kind is a kustomization's patch, and a kustomization is for kubectl alone.
fn documented() -> Vec<String> {
    let blocks = docs::manifests();
    let parts = blocks.iter().flat_map(|(_, block)| block.split("---\n"));
    let known = parts.filter(|part| {
        part.lines().any(|line| line.starts_with("kind:"))
            && !part.contains("snapshot.storage.k8s.io/v1")
            && !part.contains("apiVersion: kustomize.config.k8s.io/")
    });
    known.map(str::to_owned).collect()
}

pub(super) fn scratch(env: &Env) {
    env.apply("scratch.yaml");
    env.ready("scratch");
    assert_eq!(
        env.exec(
            "scratch",
            "ls -A /tmp/work; touch /tmp/work/file && ls /tmp/work"
        ),
        "file\n"
    );
    let volumes = env.list("volumes");
    assert_eq!(volumes.len(), 1, "{volumes:#?}");
    assert_eq!(volumes[0]["type"], "scratch");
    assert_eq!(volumes[0]["state"], "published");
    assert_eq!(env.cluster.volume_mounts().len(), 1);
    env.delete("pod/scratch");
}

pub(super) fn mistake(env: &Env) {
    let right = Env::manifest("scratch.yaml");
    let wrong = right.replace("type: scratch", "type: scrtach");
    assert_ne!(right, wrong);
    env.apply_text(&wrong);
    // The name of the attribute, what was written, and what could have been.
    env.event("scratch", &["type", "scrtach", "task-cache"]);
    assert!(env.list("volumes").is_empty());
    // A pod's volumes cannot be changed, so people delete it and come again.
    env.delete("pod/scratch");
    env.apply_text(&right);
    env.ready("scratch");
}

/// Kubelet itself refuses a static pod with a volume of a CSI driver, and says why in its log. The
/// driver has nothing of it. Kubelet does read the directory: a pod beside them runs.
pub(super) fn static_pods(env: &Env) {
    let cluster = env.cluster;
    let inline =
        "csi: {driver: baggageclaim.csi.concourse-ci.org, volumeAttributes: {type: scratch}}";
    let claim = "persistentVolumeClaim: {claimName: workspace}";
    let pods = [
        ("inline", inline, "csidrivers (via CSI volumes)"),
        ("claim", claim, "persistentvolumeclaims"),
        ("plain", "emptyDir: {}", ""),
    ];
    let pods = pods.map(|(name, source, refusal)| {
        let values = [("NAME", name), ("NAMESPACE", env.namespace())];
        let manifest = Env::filled("static-pod.yaml", &values);
        let manifest = manifest.replace("emptyDir: {}", source);
        // A name that is in the log once.
        let file = format!("{}-{name}", env.namespace());
        (cluster.static_pod(&file, &manifest), file, refusal)
    });
    let plain = format!("plain-{}", cluster.name());
    eventually("the API server has the mirror of the plain pod", || {
        let pods = env.get("pods");
        let mut names = items(&pods).map(|pod| &pod["metadata"]["name"]);
        names.any(|name| *name == *plain).then_some(())
    });
    env.ready(&plain);
    for (_, file, refusal) in &pods[..2] {
        let why = format!("static pods may not reference {refusal}");
        eventually("kubelet has logged why", || {
            let log = cluster.kubelet_log();
            let mut lines = log.lines();
            let its = |line: &str| line.contains(&format!("{file}.yaml")) && line.contains(&why);
            lines.any(its).then_some(())
        });
    }
    assert_eq!(items(&env.get("pods")).count(), 1);
    assert!(env.list("volumes").is_empty());
    drop(pods);
    env.gone(&plain);
}

/// The part of kubelet's directory that the driver's container can see. Kubelet's client key lies
/// beside it.
pub(super) fn kubelets_directory(env: &Env) {
    let cluster = env.cluster;
    let kubelet = cluster.kubelet();
    let seen = format!("/proc/{}/root{kubelet}", cluster.driver_process());
    let names = |path: &str| -> Vec<String> {
        let entries = std::fs::read_dir(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = names
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(&seen), ["plugins", "plugins_registry", "pods"]);
    let all = cluster.on_node(kubelet);
    assert!(names(all.to_str().expect("a plain path")).len() > 3);
}
