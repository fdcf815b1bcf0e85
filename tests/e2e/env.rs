//! The environment of one case: its namespace, and the verbs that cases use. Every wait is for an
//! event; a missing event ends the case.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

use serde_json::Value;

use crate::cluster::{Cluster, PATIENCE, Watch, eventually, feed, succeed};
use crate::leftovers::forget;

/// The label of all cases.
pub(crate) const LABEL: &str = "baggageclaim-e2e=case";

/// Makes a namespace in which pods can be made.
fn make_namespace(cluster: &Cluster, namespace: &str) {
    succeed(&mut cluster.kubectl(&["create", "namespace", namespace]));
    succeed(&mut cluster.kubectl(&["label", "namespace", namespace, LABEL]));
    // No pod is admitted without it. After an outage of the API server, its controller may notice
    // the namespace late.
    succeed(&mut cluster.kubectl(&[
        "wait",
        "--for=create",
        "serviceaccount/default",
        "--timeout=120s",
        &format!("--namespace={namespace}"),
    ]));
}

/// A namespace, and what is done in it.
pub(crate) struct Env<'a> {
    pub(crate) cluster: &'a Cluster,
    namespace: String,
    /// How many pods have read something for the case.
    readers: Cell<usize>,
    /// The uid of the pod that was last made under each name: it is known by that also when it is
    /// gone.
    made: RefCell<HashMap<String, String>>,
}

impl<'a> Env<'a> {
    /// Makes the namespace.
    pub(crate) fn new(cluster: &'a Cluster, namespace: &str) -> Self {
        make_namespace(cluster, namespace);
        Self {
            cluster,
            namespace: namespace.to_owned(),
            readers: Cell::new(0),
            made: RefCell::default(),
        }
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Another namespace, for cases about who sees what. When it is dropped it is cleared and
    /// looked at as this one is.
    pub(crate) fn neighbour(&self) -> Neighbour<'a> {
        Neighbour(Self::new(
            self.cluster,
            &format!("{}-neighbour", self.namespace),
        ))
    }

    pub(crate) fn within(&self) -> String {
        format!("--namespace={}", self.namespace)
    }

    /// kubectl in this namespace, which has to succeed.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        succeed(self.cluster.kubectl(&[&self.within()]).args(arguments))
    }

    /// Applies a file: of `tests/e2e/manifests/`, or any other of the repository by its path from
    /// there.
    pub(crate) fn apply(&self, file: &str) {
        self.apply_text(&Self::manifest(file));
    }

    /// The text of such a file.
    pub(crate) fn manifest(file: &str) -> String {
        let path = format!("{}/tests/e2e/manifests/{file}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Applies a file of `tests/e2e/manifests/` that has `{{NAME}}`s in it, with what they stand
    /// for.
    pub(crate) fn apply_with(&self, file: &str, values: &[(&str, &str)]) {
        self.apply_text(&Self::filled(file, values));
    }

    /// The text of such a file, with what they stand for.
    pub(crate) fn filled(file: &str, values: &[(&str, &str)]) -> String {
        let mut text = Self::manifest(file);
        for (name, value) in values {
            let place = format!("{{{{{name}}}}}");
            assert!(text.contains(&place), "{file} has no {place}");
            text = text.replace(&place, value);
        }
        text
    }

    /// Applies a text: a manifest that the case has changed.
    pub(crate) fn apply_text(&self, manifest: &str) {
        let output = feed(
            &mut self
                .cluster
                .kubectl(&[&self.within(), "apply", "--output=json", "--filename=-"]),
            manifest,
        );
        assert!(
            output.status.success(),
            "{}\n{manifest}",
            String::from_utf8_lossy(&output.stderr)
        );
        let applied: Value = serde_json::from_slice(&output.stdout).expect("kubectl prints JSON");
        // One object is printed as it is, and several as a list.
        let mut made = self.made.borrow_mut();
        for pod in items(&applied).chain([&applied]) {
            let metadata = &pod["metadata"];
            if let ("Pod", Some(name), Some(uid)) = (
                pod["kind"].as_str().unwrap_or_default(),
                metadata["name"].as_str(),
                metadata["uid"].as_str(),
            ) {
                made.insert(name.to_owned(), uid.to_owned());
            }
        }
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

    /// Has a pod make an output, a task cache and a resource cache of one name, and waits until
    /// they can be used. In each is a file `text`, with the text that is returned.
    pub(crate) fn make(&self, name: &str) -> String {
        self.apply_with("maker.yaml", &[("NAME", name), ("THEN", "exit 0")]);
        self.succeeded(name);
        for kind in ["artifact", "task-cache", "resource-cache"] {
            self.sealed(&format!("{kind}/{name}"));
        }
        format!("{name} of {}\n", self.namespace)
    }

    /// All files of an artifact or a cache, as a pod sees them: below each name, what is in it.
    pub(crate) fn read(&self, reference: &str) -> String {
        let reader = self.reader();
        self.apply_with("reader.yaml", &[("NAME", &reader), ("FROM", reference)]);
        self.succeeded(&reader);
        self.logs(&reader)
    }

    /// Artifacts and caches that hold these files and nothing else: of what, a name, and what is in
    /// it. Several files of one stand beside each other, in order.
    pub(crate) fn hold(&self, expected: &[(&str, &str, &str)]) {
        let mut references: Vec<&str> = expected.iter().map(|(reference, ..)| *reference).collect();
        references.dedup();
        let reader = self.reader();
        let manifest = Self::filled("reader.yaml", &[("NAME", &reader)]);
        let (pod, volume) = manifest
            .split_once("  - name: in\n")
            .expect("it has one volume");
        let (mut mounts, mut volumes) = (String::new(), String::new());
        for (number, reference) in references.iter().enumerate() {
            let _ = writeln!(
                mounts,
                "    - {{name: in-{number}, mountPath: /in/{number}}}"
            );
            let volume = volume.replace("{{FROM}}", reference);
            let _ = write!(volumes, "  - name: in-{number}\n{volume}");
        }
        let pod = pod.replace("    - {name: in, mountPath: /in}\n", &mounts);
        self.apply_text(&(pod + &volumes));
        self.succeeded(&reader);
        let shown: Vec<String> = expected
            .iter()
            .map(|(reference, file, content)| {
                let number = references.iter().position(|each| each == reference);
                let number = number.expect("it is one of them");
                format!("==> ./{number}/{file} <==\n{content}")
            })
            .collect();
        assert_eq!(self.logs(&reader), shown.join("\n"), "{expected:#?}");
    }

    /// A name for one more pod that reads something.
    fn reader(&self) -> String {
        self.readers.set(self.readers.get() + 1);
        format!("reader-{}", self.readers.get())
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

    /// The output of a pod's containers.
    pub(crate) fn logs(&self, pod: &str) -> String {
        self.kubectl(&["logs", "--all-containers", pod])
    }

    /// Runs a shell command in a pod, in its first container.
    pub(crate) fn exec(&self, pod: &str, command: &str) -> String {
        self.kubectl(&["exec", "--quiet", pod, "--", "sh", "-c", command])
    }

    /// The same in one that is named.
    pub(crate) fn exec_in(&self, pod: &str, container: &str, command: &str) -> String {
        let container = format!("--container={container}");
        self.kubectl(&["exec", &container, pod, "--", "sh", "-c", command])
    }

    /// Runs a shell command in a pod that has to fail, and says what it said.
    pub(crate) fn fails(&self, pod: &str, command: &str) -> String {
        let exec = [
            &self.within(),
            "exec",
            "--quiet",
            pod,
            "--",
            "sh",
            "-c",
            command,
        ];
        let output = self.cluster.kubectl(&exec).output().expect("it starts");
        assert!(!output.status.success(), "{pod}: {command} succeeds");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Makes a file in a pod's volume from outside, on the node: for when there is no API server to
    /// exec through.
    pub(crate) fn touch_from_outside(&self, uid: &str, volume: &str, file: &str) {
        let path = self.volume_from_outside(uid, volume).join(file);
        std::fs::write(&path, "").unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// Where a pod's volume is seen by the processes of the host.
    pub(crate) fn volume_from_outside(&self, uid: &str, volume: &str) -> PathBuf {
        let kubelet = self.cluster.kubelet();
        self.cluster.on_node(&format!(
            "{kubelet}/pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount"
        ))
    }

    /// Which of a pod's volumes are mounted on the node, by name: each as often as it is.
    pub(crate) fn mounted(&self, uid: &str) -> Vec<String> {
        let place = format!("/pods/{uid}/volumes/kubernetes.io~csi/");
        let mounts = self.cluster.volume_mounts();
        let mut names: Vec<String> = mounts
            .iter()
            .filter_map(|line| {
                let (_, volume) = line.split_once(&place)?;
                Some(volume.split_once("/mount ")?.0.to_owned())
            })
            .collect();
        names.sort();
        names
    }

    /// A pod's uid.
    pub(crate) fn uid(&self, pod: &str) -> String {
        let pod = self.get(&format!("pod/{pod}"));
        pod["metadata"]["uid"].as_str().expect("a uid").to_owned()
    }

    /// Selects the events on this pod, and not on an earlier one of its name.
    fn events_on(&self, pod: &str) -> String {
        let made = self.made.borrow().get(pod).cloned();
        // A controller gives its pods generated names.
        let uid = made.unwrap_or_else(|| self.uid(pod));
        format!("--field-selector=involvedObject.uid={uid}")
    }

    /// Waits for an event on a pod whose message has all of these words in it, and says it. The pod
    /// may be gone already.
    pub(crate) fn event(&self, pod: &str, words: &[&str]) -> String {
        self.event_among(&self.events_on(pod), words)
    }

    /// The same of a claim.
    pub(crate) fn claim_event(&self, claim: &str, words: &[&str]) -> String {
        let of = "involvedObject.kind=PersistentVolumeClaim,involvedObject.name";
        self.event_among(&format!("--field-selector={of}={claim}"), words)
    }

    fn event_among(&self, selector: &str, words: &[&str]) -> String {
        let watch = self.watch("events", &[selector]);
        let deadline = Instant::now() + PATIENCE;
        let mut heard = Vec::new();
        while let Some(change) = watch.next(deadline) {
            let message = change.object["message"].as_str().unwrap_or_default();
            if words.iter().all(|word| message.contains(word)) {
                return message.to_owned();
            }
            heard.push(message.to_owned());
        }
        panic!("no event ({selector}) has {words:?} in it; there were {heard:#?}")
    }

    /// The warnings on a pod, in the text of its events.
    pub(crate) fn warnings(&self, pod: &str) -> Vec<String> {
        let warnings = format!("{},type=Warning", self.events_on(pod));
        let events = self.cluster.get(&[&self.within(), "events", &warnings]);
        let messages = items(&events).filter_map(|event| event["message"].as_str());
        messages.map(str::to_owned).collect()
    }

    /// The name of the one pod that a selector finds, once there is one.
    pub(crate) fn only_pod(&self, selector: &str) -> String {
        let wanted = format!("--selector={selector}");
        eventually("a pod is made", || {
            let pods = self.cluster.get(&[&self.within(), "pods", &wanted]);
            let mut names = items(&pods).filter_map(|pod| pod["metadata"]["name"].as_str());
            let name = names.next()?.to_owned();
            assert_eq!(names.next(), None, "{selector}");
            Some(name)
        })
    }

    /// Waits until there is no pod of a name.
    pub(crate) fn gone(&self, pod: &str) {
        let pod = format!("pod/{pod}");
        self.kubectl(&["wait", "--for=delete", &pod, "--timeout=120s"]);
    }

    /// Says of a pod how its work ended, in the annotation of docs/events.md.
    pub(crate) fn tell_outcome(&self, pod: &str, outcome: &str) {
        let annotation = format!("baggageclaim.concourse-ci.org/outcome={outcome}");
        self.kubectl(&["annotate", "--overwrite", "pod", pod, &annotation]);
    }

    /// Deletes an object as a user would, and waits until it is gone.
    pub(crate) fn delete(&self, object: &str) {
        self.kubectl(&["delete", object, "--wait", "--timeout=120s"]);
    }

    /// Deletes all pods of the case and whatever makes them, and waits until they are gone.
    pub(crate) fn clear(&self) {
        self.kubectl(&[
            "delete",
            "deployments,jobs,statefulsets",
            "--all",
            "--wait",
            "--timeout=120s",
            "--cascade=foreground",
        ]);
        // In one call: kubectl asks for each of a hundred, and takes its time.
        let pods = format!(
            "/api/v1/namespaces/{}/pods?gracePeriodSeconds=1",
            self.namespace
        );
        self.kubectl(&["delete", "--raw", &pods]);
        eventually("no pod is left", || {
            let left = self.cluster.get(&[&self.within(), "pods"]);
            items(&left).next().is_none().then_some(())
        });
    }

    /// The driver's volumes, artifacts or caches of this namespace.
    pub(crate) fn list(&self, what: &str) -> Vec<Value> {
        let nodes = self.cluster.nodes().into_iter();
        let list = |node: Cluster| node.driver_list(&[what, "--tenant", &self.namespace]);
        nodes.flat_map(list).collect()
    }

    /// Waits until the driver has done what it does in the background: nothing is published,
    /// pending or being sealed.
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

    /// The sealed references, sorted.
    pub(crate) fn artifacts(&self) -> Vec<String> {
        let artifacts = self.list("artifacts");
        let mut references: Vec<String> = artifacts
            .iter()
            .filter_map(|artifact| artifact["reference"].as_str())
            .map(str::to_owned)
            .collect();
        references.sort();
        references
    }

    /// Forgets all that is sealed here.
    pub(crate) fn forget(&self) {
        let list = ["artifacts", "--tenant", &self.namespace];
        self.cluster
            .nodes()
            .iter()
            .for_each(|node| forget(node, &list));
    }

    /// Deletes the namespace, if it is not gone already, and makes another one of its name.
    pub(crate) fn begin_again(&self) {
        let delete = [
            "delete",
            "namespace",
            &self.namespace,
            "--ignore-not-found",
            "--wait",
            "--timeout=120s",
        ];
        succeed(&mut self.cluster.kubectl(&delete));
        make_namespace(self.cluster, &self.namespace);
    }

    /// Takes the namespace away with all that is in it, however the case went. The next one has
    /// another name, so it need not wait.
    pub(crate) fn close(self) {
        self.delete_namespace();
    }

    fn delete_namespace(&self) {
        let _ = self
            .cluster
            .kubectl(&["delete", "namespace", &self.namespace, "--wait=false"])
            .stdout(Stdio::null())
            .status();
    }
}

/// Another namespace than the case's own.
pub(crate) struct Neighbour<'a>(Env<'a>);

impl<'a> Deref for Neighbour<'a> {
    type Target = Env<'a>;

    fn deref(&self) -> &Env<'a> {
        &self.0
    }
}

impl Drop for Neighbour<'_> {
    fn drop(&mut self) {
        let end = || {
            self.0.clear();
            self.0.settled();
            self.0.forget();
        };
        if std::thread::panicking() {
            // The case has failed already; this only keeps it from troubling the next.
            let _ = catch_unwind(AssertUnwindSafe(end));
        } else {
            end();
        }
        self.0.delete_namespace();
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
