//! Isolation: namespaces see nothing of each other, whatever names and identities they claim. The
//! driver trusts kubelet, but any user can write kubelet's own attributes into a pod's spec.

use crate::cluster::{Cluster, succeed};
use crate::env::Env;

pub(super) fn same_names(env: &Env) {
    let other = env.neighbour();
    let theirs = other.make("made");
    // The neighbour's content is invisible, and the refusal is the same as for content that does
    // not exist.
    let refusal = |name: &str| {
        let reference = format!("artifact/{name}");
        env.apply_with("reader.yaml", &[("NAME", "refused"), ("FROM", &reference)]);
        let why = env.event("refused", &["NotFound", &reference]);
        env.delete("pod/refused");
        why.replace(name, "NAME")
    };
    assert_eq!(refusal("made"), refusal("none"));

    // `make` fails unless what it finds is empty.
    let ours = env.make("made");
    assert_ne!(ours, theirs);
    holds_made(env, &ours);
    holds_made(&other, &theirs);
    // Content that is gone here still exists there.
    env.forget();
    assert!(env.artifacts().is_empty());
    holds_made(&other, &theirs);
    assert_eq!(refusal("made"), refusal("none"));
}

fn holds_made(env: &Env, text: &str) {
    env.hold(
        &["artifact/made", "task-cache/made", "resource-cache/made"]
            .map(|reference| (reference, "text", text)),
    );
}

/// As docs/security.md says of it: a tenant is a name, and what it kept is there for the next
/// namespace that has it.
pub(super) fn same_name_again(env: &Env) {
    let theirs = env.make("made");
    let uid = |env: &Env| {
        let namespace = env.get(&format!("namespace/{}", env.namespace()));
        namespace["metadata"]["uid"].clone()
    };
    let before = uid(env);
    env.begin_again();
    assert_ne!(uid(env), before);
    holds_made(env, &theirs);
}

pub(super) fn forged(env: &Env) {
    let other = env.neighbour();
    let theirs = other.make("made");
    let forge = || env.apply_with("forged.yaml", &[("NAME", other.namespace())]);

    // kubelet writes what is true over it, and here there is no such thing.
    forge();
    env.event("forged", &["NotFound", "artifact/made"]);
    env.delete("pod/forged");

    let ours = env.make("made");
    forge();
    env.succeeded("forged");
    assert_eq!(env.logs("forged"), ours.repeat(2));
    env.settled();
    env.hold(
        &["artifact/made", "task-cache/made"].map(|reference| (reference, "text", "forged\n")),
    );
    env.delete("pod/forged");

    // With a wrong CSIDriver object kubelet adds nothing, and forged keys arrive: they are not
    // trusted.
    let silent = Silent::kubelet(env.cluster);
    forge();
    env.event("forged", &["belongs to another pod"]);
    env.event("forged", &["not marked as an inline volume"]);
    drop(silent);
    env.succeeded("forged");
    assert_eq!(env.logs("forged"), "forged\n".repeat(2));

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
