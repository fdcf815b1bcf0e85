//! Many pods, or pods with many volumes, made without manifests and followed to their end. For the
//! report of start times, and for the case that each pod of a crowd gets its own volumes.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::{Instant, SystemTime};

use crate::cluster::{PATIENCE, Watch};
use crate::env::{Env, condition, phase};

/// The volumes of a pod.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Volumes {
    /// A directory of the pod's own, which is mounted nowhere but in its containers.
    EmptyDir,
    /// The same in memory: kubelet's own volume that the node has to mount, and so the least that a
    /// mount takes.
    Memory,
    Ours,
}

/// The parents of the forks: an output and a cache, as a pipeline leaves them.
pub(crate) fn make_inputs(env: &Env) {
    env.apply("speed-inputs.yaml");
    env.succeeded("inputs");
    env.sealed("artifact/sources");
    env.sealed("task-cache/objects");
    env.clear();
}

/// A pod that runs a command (in YAML) and ends. Our volumes, at `/v0` and so on, are what a build
/// step has: views of what others made, a cache, an output that is thrown away, and a place to
/// work. Its group is a label.
pub(crate) fn pod(group: &str, name: &str, volumes: usize, kind: Volumes, command: &str) -> String {
    let driver = "driver: baggageclaim.csi.concourse-ci.org";
    let mut mounts = String::new();
    let mut list = String::new();
    for n in 0..volumes {
        let _ = writeln!(mounts, "    - {{name: v{n}, mountPath: /v{n}}}");
        let source = match (kind, n % 5) {
            (Volumes::EmptyDir, _) => "emptyDir: {}".to_owned(),
            (Volumes::Memory, _) => "emptyDir: {medium: Memory}".to_owned(),
            (Volumes::Ours, 0 | 4) => format!(
                "csi: {{{driver}, volumeAttributes: {{type: input, from: artifact/sources}}}}"
            ),
            (Volumes::Ours, 1) => format!(
                "csi: {{{driver}, volumeAttributes: {{type: task-cache, key: objects, commit: never}}}}"
            ),
            (Volumes::Ours, 2) => format!(
                "csi: {{{driver}, volumeAttributes: {{type: output, name: {name}-{n}, commit: never}}}}"
            ),
            (Volumes::Ours, _) => format!("csi: {{{driver}, volumeAttributes: {{type: scratch}}}}"),
        };
        let _ = writeln!(list, "  - {{name: v{n}, {source}}}");
    }
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{group: {group}}}}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 0
  containers:
  - name: step
    image: docker.io/library/busybox:1
    command: {command}
    volumeMounts:
{mounts}  volumes:
{list}"
    )
}

/// When things were seen to be so.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) scheduled: Option<SystemTime>,
    pub(crate) ended: Option<SystemTime>,
}

/// Follows pods until as many as there should be have succeeded.
pub(crate) fn follow(watch: &Watch, pods: usize) -> HashMap<String, Seen> {
    let mut seen: HashMap<String, Seen> = HashMap::new();
    let deadline = Instant::now() + PATIENCE * 3;
    while seen.values().filter(|seen| seen.ended.is_some()).count() < pods {
        let change = watch.next(deadline).expect("the pods end in time");
        let name = change.object["metadata"]["name"]
            .as_str()
            .unwrap_or_default();
        if change.kind == "DELETED" || !change.object["metadata"]["deletionTimestamp"].is_null() {
            continue;
        }
        assert_ne!(phase(&change.object), "Failed", "{name}");
        let this = seen.entry(name.to_owned()).or_default();
        if condition(&change.object, "PodScheduled") {
            this.scheduled.get_or_insert(change.seen);
        }
        if phase(&change.object) == "Succeeded" {
            this.ended.get_or_insert(change.seen);
        }
    }
    seen
}
