//! Where one case plays: a namespace of its own, the verbs that cases are written in, and the look at what is left.
//! All waiting is for something that happens; what does not happen in time ends the case.

use std::process::Stdio;
use std::time::Instant;

use serde_json::Value;

use crate::cluster::{Cluster, PATIENCE, Watch, eventually, feed, succeed};

/// What all stages are known by.
const LABEL: &str = "baggageclaim-e2e=case";

/// Takes away what an earlier run has left on a node that stayed up, because it was ended in the middle.
pub(crate) fn sweep(cluster: &Cluster) {
    succeed(&mut cluster.kubectl(&[
        "delete",
        "namespaces",
        "--selector",
        LABEL,
        "--wait",
        "--timeout=120s",
    ]));
    forget(cluster, &["artifacts"]);
}

/// Forgets what was sealed, as far as a list of the driver's goes.
fn forget(cluster: &Cluster, list: &[&str]) {
    for artifact in cluster.driver_list(list) {
        if let (Some(reference), Some(tenant)) =
            (artifact["reference"].as_str(), artifact["tenant"].as_str())
        {
            let output = cluster.driver(&["destroy", reference, "--tenant", tenant]);
            assert!(
                output.status.success(),
                "{reference}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    eventually("all artifacts are gone", || {
        let _ = cluster.driver(&["reap"]);
        cluster.driver_list(list).is_empty().then_some(())
    });
}

/// A namespace, and what is done in it.
pub(crate) struct Stage<'a> {
    pub(crate) cluster: &'a Cluster,
    namespace: String,
}

impl<'a> Stage<'a> {
    /// Makes the namespace.
    pub(crate) fn new(cluster: &'a Cluster, namespace: &str) -> Self {
        succeed(&mut cluster.kubectl(&["create", "namespace", namespace]));
        succeed(&mut cluster.kubectl(&["label", "namespace", namespace, LABEL]));
        Self {
            cluster,
            namespace: namespace.to_owned(),
        }
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    fn within(&self) -> String {
        format!("--namespace={}", self.namespace)
    }

    /// kubectl in this namespace, which has to succeed.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        succeed(self.cluster.kubectl(&[&self.within()]).args(arguments))
    }

    /// Applies a file: of `tests/e2e/manifests/`, or any other of the repository by its path from there.
    pub(crate) fn apply(&self, file: &str) {
        let path = format!("{}/tests/e2e/manifests/{file}", env!("CARGO_MANIFEST_DIR"));
        self.kubectl(&["apply", "--filename", &path]);
    }

    /// The text of a file of `tests/e2e/manifests/`.
    pub(crate) fn manifest(file: &str) -> String {
        let path = format!("{}/tests/e2e/manifests/{file}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Applies a file of `tests/e2e/manifests/` that has `{{NAME}}`s in it, with what they stand for.
    pub(crate) fn apply_with(&self, file: &str, values: &[(&str, &str)]) {
        let mut text = Self::manifest(file);
        for (name, value) in values {
            let place = format!("{{{{{name}}}}}");
            assert!(text.contains(&place), "{file} has no {place}");
            text = text.replace(&place, value);
        }
        self.apply_text(&text);
    }

    /// Applies a text: a manifest that the case has changed.
    pub(crate) fn apply_text(&self, manifest: &str) {
        let output = feed(
            &mut self
                .cluster
                .kubectl(&[&self.within(), "apply", "--filename", "-"]),
            manifest,
        );
        assert!(
            output.status.success(),
            "{}\n{manifest}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// An object as it is now.
    pub(crate) fn get(&self, object: &str) -> Value {
        self.cluster.get(&[&self.within(), object])
    }

    /// Follows all objects of a kind here, or those that a selector names.
    pub(crate) fn watch(&self, kind: &str, selector: &[&str]) -> Watch {
        self.cluster
            .watch(&[&[&self.within(), kind][..], selector].concat())
    }

    /// Follows an object until it is as it should be.
    pub(crate) fn until(
        &self,
        kind: &str,
        name: &str,
        what: &str,
        is: impl Fn(&Value) -> bool,
    ) -> Value {
        let watch = self.watch(kind, &[&format!("--field-selector=metadata.name={name}")]);
        let deadline = Instant::now() + PATIENCE;
        while let Some(change) = watch.next(deadline) {
            if change.kind != "DELETED" && is(&change.object) {
                return change.object;
            }
        }
        panic!("{kind} {name} is not {what} after {PATIENCE:?}")
    }

    /// Waits until a pod has ended, and it has to have ended well.
    pub(crate) fn succeeded(&self, pod: &str) {
        assert_eq!(
            self.ended(pod),
            "Succeeded",
            "pod {pod}: {}",
            self.logs(pod)
        );
    }

    /// Waits until a pod has ended, and it has to have failed.
    pub(crate) fn failed(&self, pod: &str) {
        assert_eq!(self.ended(pod), "Failed", "pod {pod}: {}", self.logs(pod));
    }

    fn ended(&self, pod: &str) -> String {
        let done = self.until("pods", pod, "at its end", |pod| {
            matches!(phase(pod), "Succeeded" | "Failed")
        });
        phase(&done).to_owned()
    }

    /// Waits until a pod's containers are ready.
    pub(crate) fn ready(&self, pod: &str) {
        self.until("pods", pod, "ready", |pod| {
            assert!(
                !matches!(phase(pod), "Succeeded" | "Failed"),
                "it has ended: {pod}"
            );
            condition(pod, "Ready")
        });
    }

    /// What a pod's containers have printed.
    pub(crate) fn logs(&self, pod: &str) -> String {
        self.kubectl(&["logs", "--all-containers", pod])
    }

    /// Runs a shell command in a pod.
    pub(crate) fn exec(&self, pod: &str, command: &str) -> String {
        self.kubectl(&["exec", pod, "--", "sh", "-c", command])
    }

    /// Makes a file in a pod's volume from outside, on the node: for when there is no API server to exec through.
    pub(crate) fn touch_from_outside(&self, uid: &str, volume: &str, file: &str) {
        let path =
            format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount/{file}");
        succeed(self.cluster.enter("touch").arg(path));
    }

    /// Waits for an event on a pod whose message has all of these words in it, and says it.
    pub(crate) fn event(&self, pod: &str, words: &[&str]) -> String {
        let watch = self.watch(
            "events",
            &[&format!("--field-selector=involvedObject.name={pod}")],
        );
        let deadline = Instant::now() + PATIENCE;
        let mut heard = Vec::new();
        while let Some(change) = watch.next(deadline) {
            let message = change.object["message"].as_str().unwrap_or_default();
            if words.iter().all(|word| message.contains(word)) {
                return message.to_owned();
            }
            heard.push(message.to_owned());
        }
        panic!("no event on {pod} has {words:?} in it; there were {heard:#?}")
    }

    /// Deletes an object as anybody would, and waits until it is gone.
    pub(crate) fn delete(&self, object: &str) {
        self.kubectl(&["delete", object, "--wait", "--timeout=120s"]);
    }

    /// Deletes all pods of the case and whatever makes them, and waits until they are gone.
    pub(crate) fn clear(&self) {
        self.kubectl(&[
            "delete",
            "jobs,pods",
            "--all",
            "--wait",
            "--timeout=120s",
            "--grace-period=1",
            "--cascade=foreground",
        ]);
    }

    /// The driver's volumes, artifacts or caches of this namespace.
    pub(crate) fn list(&self, what: &str) -> Vec<Value> {
        self.cluster
            .driver_list(&[what, "--tenant", &self.namespace])
    }

    /// Waits until the driver has done what it does in the background: nothing is published, pending or being sealed.
    pub(crate) fn settled(&self) {
        let mut left = Vec::new();
        let mut look = || {
            left = self.list("volumes");
            left.is_empty().then_some(())
        };
        eventually("the driver settles", &mut look);
    }

    /// Waits until there is an artifact under a name.
    pub(crate) fn sealed(&self, reference: &str) -> Value {
        eventually(&format!("there is {reference}"), || {
            self.list("artifacts")
                .into_iter()
                .find(|artifact| artifact["reference"] == reference)
        })
    }

    /// That nothing is left of the case once its pods are gone: no mount, no directory, no record. What it has sealed is
    /// meant to stay, so that is looked at and then forgotten.
    pub(crate) fn assert_nothing_left(&self) {
        self.settled();
        let mounts = self.cluster.volume_mounts();
        assert!(mounts.is_empty(), "mounts are left: {mounts:#?}");
        for directory in ["volumes", "pending", "incoming"] {
            let left = self.cluster.in_pool(directory);
            assert!(left.is_empty(), "left in the pool's {directory}: {left:?}");
        }
        // kubelet removes them after it has let the API forget the pod.
        eventually("no directory is left of a pod", || {
            let pods = self.cluster.get(&["pods", "--all-namespaces"]);
            let alive: Vec<&str> = items(&pods)
                .filter_map(|pod| pod["metadata"]["uid"].as_str())
                .collect();
            let directories = self.cluster.pod_directories();
            directories
                .iter()
                .all(|uid| alive.contains(&uid.as_str()))
                .then_some(())
        });
        forget(self.cluster, &["artifacts", "--tenant", &self.namespace]);
        eventually("the trash is empty", || {
            self.cluster.in_pool("trash").is_empty().then_some(())
        });
        let check = self.cluster.driver(&["check", "--output=json"]);
        assert!(
            check.status.success(),
            "the pool is not sound: {}{}",
            String::from_utf8_lossy(&check.stdout),
            String::from_utf8_lossy(&check.stderr)
        );
    }

    /// Prints what somebody would look at first.
    pub(crate) fn explain(&self) {
        let within = self.within();
        for arguments in [
            &["get", "pods", "--output=wide", &within][..],
            &["get", "events", "--sort-by=.lastTimestamp", &within],
            &["get", "pods", "--namespace=baggageclaim", "--output=wide"],
            &[
                "logs",
                "--namespace=baggageclaim",
                "daemonset/baggageclaim-node",
                "--tail=40",
            ],
        ] {
            eprintln!("$ kubectl {}", arguments.join(" "));
            let _ = self
                .cluster
                .kubectl(arguments)
                .stdout(std::io::stderr())
                .status();
        }
        eprintln!("$ baggageclaim volumes --output=wide");
        let volumes = self.cluster.driver(&["volumes", "--output=wide"]);
        eprintln!("{}", String::from_utf8_lossy(&volumes.stdout));
    }

    /// Takes the namespace away with all that is in it, however the case went. The next one has another name, so it need
    /// not wait.
    pub(crate) fn close(self) {
        let _ = self
            .cluster
            .kubectl(&["delete", "namespace", &self.namespace, "--wait=false"])
            .stdout(Stdio::null())
            .status();
    }
}

/// The objects of a list.
pub(crate) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

/// A pod's phase.
pub(crate) fn phase(pod: &Value) -> &str {
    pod["status"]["phase"].as_str().unwrap_or_default()
}

/// Whether a condition holds.
pub(crate) fn condition(object: &Value, kind: &str) -> bool {
    object["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == kind && condition["status"] == "True")
}
