//! Isolation: namespaces see nothing of each other, whatever names and identities they claim. The
//! driver trusts kubelet, but any user can write kubelet's own attributes into a pod's spec.

use crate::cluster::{Cluster, succeed};
use crate::stage::Stage;

pub(super) fn same_names(stage: &Stage) {
    let other = stage.neighbour();
    let theirs = other.make("made");
    // The neighbour's content is invisible, and the refusal is the same as for content that does
    // not exist.
    let refusal = |name: &str| {
        let reference = format!("artifact/{name}");
        stage.apply_with("reader.yaml", &[("NAME", "refused"), ("FROM", &reference)]);
        let why = stage.event("refused", &["NotFound", &reference]);
        stage.delete("pod/refused");
        why.replace(name, "NAME")
    };
    assert_eq!(refusal("made"), refusal("none"));

    // `make` fails unless what it finds is empty.
    let ours = stage.make("made");
    assert_ne!(ours, theirs);
    holds_made(stage, &ours);
    holds_made(&other, &theirs);
    // Content that is gone here still exists there.
    stage.forget();
    assert!(stage.artifacts().is_empty());
    holds_made(&other, &theirs);
    assert_eq!(refusal("made"), refusal("none"));
}

fn holds_made(stage: &Stage, text: &str) {
    stage.hold(
        &["artifact/made", "task-cache/made", "resource-cache/made"]
            .map(|reference| (reference, "text", text)),
    );
}

/// As docs/security.md says of it: a tenant is a name, and what it kept is there for the next
/// namespace that has it.
pub(super) fn same_name_again(stage: &Stage) {
    let theirs = stage.make("made");
    let uid = |stage: &Stage| {
        let namespace = stage.get(&format!("namespace/{}", stage.namespace()));
        namespace["metadata"]["uid"].clone()
    };
    let before = uid(stage);
    stage.begin_again();
    assert_ne!(uid(stage), before);
    holds_made(stage, &theirs);
}

pub(super) fn forged(stage: &Stage) {
    let other = stage.neighbour();
    let theirs = other.make("made");
    let forge = || stage.apply_with("forged.yaml", &[("NAME", other.namespace())]);

    // kubelet writes what is true over it, and here there is no such thing.
    forge();
    stage.event("forged", &["NotFound", "artifact/made"]);
    stage.delete("pod/forged");

    let ours = stage.make("made");
    forge();
    stage.succeeded("forged");
    assert_eq!(stage.logs("forged"), ours.repeat(2));
    stage.settled();
    stage.hold(
        &["artifact/made", "task-cache/made"].map(|reference| (reference, "text", "forged\n")),
    );
    stage.delete("pod/forged");

    // With a wrong CSIDriver object kubelet adds nothing, and forged keys arrive: they are not
    // trusted.
    let silent = Silent::kubelet(stage.cluster);
    forge();
    stage.event("forged", &["belongs to another pod"]);
    stage.event("forged", &["not marked as an inline volume"]);
    drop(silent);
    stage.succeeded("forged");
    assert_eq!(stage.logs("forged"), "forged\n".repeat(2));

    assert_eq!(other.artifacts().len(), 3);
    holds_made(&other, &theirs);
}

/// As long as this lives kubelet does not tell whose pod it is.
struct Silent<'a>(&'a Cluster);

impl<'a> Silent<'a> {
    fn kubelet(cluster: &'a Cluster) -> Self {
        let silent = Self(cluster);
        silent.tells(false);
        silent
    }

    fn tells(&self, it: bool) {
        let patch = format!("{{\"spec\": {{\"podInfoOnMount\": {it}}}}}");
        succeed(&mut self.0.kubectl(&[
            "patch",
            "csidriver",
            "baggageclaim.csi.concourse-ci.org",
            "--type=merge",
            "--patch",
            &patch,
        ]));
    }
}

impl Drop for Silent<'_> {
    fn drop(&mut self) {
        self.tells(true);
    }
}
