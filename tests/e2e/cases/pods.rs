//! Single pods, and what people are told of their mistakes.
//! And the manifests themselves, as the API server sees them.

use crate::cluster::{feed, succeed};
use crate::docs;
use crate::stage::Stage;

/// The API server finds nothing in them that it does not know, and nothing that it does not allow.
pub(super) fn dry_run(stage: &Stage) {
    let root = env!("CARGO_MANIFEST_DIR");
    for overlay in ["host", "loop"] {
        succeed(&mut stage.cluster.kubectl(&[
            "apply",
            "--dry-run=server",
            "--validate=strict",
            "--kustomize",
            &format!("{root}/deploy/overlays/{overlay}"),
        ]));
    }
    stage.kubectl(&[
        "apply",
        "--dry-run=server",
        "--validate=strict",
        "--recursive",
        "--filename",
        &format!("{root}/examples"),
    ]);
    let manifests = documented();
    assert!(manifests.len() > 10, "{manifests:#?}");
    let output = feed(
        &mut stage.cluster.kubectl(&[
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

/// Those in the documentation. Snapshot classes are a CRD, which this cluster has not; what has no kind is a kustomization's patch.
fn documented() -> Vec<String> {
    let blocks = docs::manifests();
    let parts = blocks.iter().flat_map(|(_, block)| block.split("---\n"));
    let known = parts.filter(|part| {
        part.lines().any(|line| line.starts_with("kind:"))
            && !part.contains("apiVersion: snapshot.storage.k8s.io/")
    });
    known.map(str::to_owned).collect()
}

pub(super) fn scratch(stage: &Stage) {
    stage.apply("scratch.yaml");
    stage.ready("scratch");
    assert_eq!(
        stage.exec(
            "scratch",
            "ls -A /tmp/work; touch /tmp/work/file && ls /tmp/work"
        ),
        "file\n"
    );
    let volumes = stage.list("volumes");
    assert_eq!(volumes.len(), 1, "{volumes:#?}");
    assert_eq!(volumes[0]["type"], "scratch");
    assert_eq!(volumes[0]["state"], "published");
    assert_eq!(stage.cluster.volume_mounts().len(), 1);
    stage.delete("pod/scratch");
}

pub(super) fn mistake(stage: &Stage) {
    let right = Stage::manifest("scratch.yaml");
    let wrong = right.replace("type: scratch", "type: scrtach");
    assert_ne!(right, wrong);
    stage.apply_text(&wrong);
    // The name of the attribute, what was written, and what could have been.
    stage.event("scratch", &["type", "scrtach", "task-cache"]);
    assert!(stage.list("volumes").is_empty());
    // A pod's volumes cannot be changed, so people delete it and come again.
    stage.delete("pod/scratch");
    stage.apply_text(&right);
    stage.ready("scratch");
}
