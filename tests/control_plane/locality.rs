//! Pods that prefer the nodes which have their content: the API server calls the controller's
//! webhook, and creates every pod, whatever becomes of the controller.

use std::path::Path;
use std::process::Command;

use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
use serde_json::{Value, json};

use crate::common::{Fs, require_lab};
use crate::driver::{Process, controller_with, kubelet};
use crate::eventually;
use crate::peers::{is_told, knows, nodes, peer, told};
use crate::plane::{ControlPlane, daemon, free_port};

const CACHE: &str = "{type: task-cache, key: go}";
/// Enough to matter.
const LARGE: usize = 4 << 20;

/// The Secret's file, and the configuration of the webhook. There is no network of services here:
/// the API server finds the controller at a port of this machine.
struct Objects {
    service: String,
    webhook: Value,
}

impl Objects {
    /// Makes the objects, and writes the file for the controller.
    fn make(port: u16, identity: &Path) -> Self {
        let printed = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
            .args(["locality", "--namespace=default"])
            .output()
            .expect("it runs");
        let list: Value = serde_json::from_slice(&printed.stdout).expect("JSON");
        let secret: k8s_openapi::api::core::v1::Secret =
            serde_json::from_value(list["items"][0].clone()).expect("a Secret");
        let file = secret.data.expect("data").remove("identity.pem");
        std::fs::write(identity, file.expect("the file").0).expect("write");
        let mut webhook = list["items"][1].clone();
        webhook["webhooks"][0]["clientConfig"]["service"]["port"] = json!(port);
        let service = format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: baggageclaim-controller, \
             namespace: default}}, spec: {{type: ExternalName, externalName: localhost, \
             ports: [{{port: {port}}}]}}}}"
        );
        Self { service, webhook }
    }

    fn apply(&self, plane: &ControlPlane) {
        plane.apply("service", &self.service);
        plane.apply("webhook", &self.webhook.to_string());
    }
}

/// Creates a pod without a node, or only asks what it would be; returns its preferred terms.
fn create(plane: &ControlPlane, name: &str, namespace: &str, spec: &str, dry: bool) -> Value {
    let text = format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: {namespace}}}, \
         spec: {{containers: [{{name: step, image: busybox}}], {spec}}}}}"
    );
    let path = plane.directory.path().join("pod.yaml");
    std::fs::write(&path, text).expect("write");
    let path = path.to_str().expect("text");
    let mut arguments = vec!["create", "--output=json", "--filename", path];
    if dry {
        arguments.push("--dry-run=server");
    }
    let pod: Value = serde_json::from_str(&plane.kubectl(&arguments)).expect("JSON");
    pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        .clone()
}

fn volume(attributes: &str) -> String {
    format!(
        "volumes: [{{name: work, csi: {{driver: baggageclaim.csi.concourse-ci.org, \
         volumeAttributes: {attributes}}}}}]"
    )
}

/// What a dry run says of a pod with the cache.
fn preferred(plane: &ControlPlane) -> Value {
    create(plane, "dry", "ci", &volume(CACHE), true)
}

fn term(node: &str) -> Value {
    json!({"weight": 100, "preference": {"matchFields": [
        {"key": "metadata.name", "operator": "In", "values": [node]},
    ]}})
}

/// Waits until new pods prefer this node.
async fn is_preferred(plane: &ControlPlane, controller: &Process, node: &str) {
    let expected = json!([term(node)]);
    let holds = async {
        while preferred(plane) != expected {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let done = tokio::time::timeout(std::time::Duration::from_secs(60), holds).await;
    let server = plane.directory.path().join("kube-apiserver.log");
    let server = std::fs::read_to_string(server).unwrap_or_default();
    let lines: Vec<&str> = server.lines().filter(|it| it.contains("webhook")).collect();
    assert!(done.is_ok(), "{}\n{}", controller.tail(), lines.join("\n"));
}

/// A pod of a node commits the cache, and it is durable.
async fn make(kubelet: &Kubelet, pool: &Path) {
    let pod = kubelet.pod_with_uid("ci", "maker", "0f8fad5b-d9cb-469f-a165-70867728950e");
    let attributes = [("type", "task-cache"), ("key", "go"), ("commit", "always")];
    let published = pod.publish("work", attributes, PublishOptions::default());
    let target = published.await.expect("published").target;
    std::fs::write(target.join("large"), vec![7; LARGE]).expect("write");
    pod.unpublish("work").await.expect("unpublished");
    pod.remove().expect("removed");
    eventually("it is durable", async || {
        let listed = told(pool, "artifacts");
        listed
            .as_array()
            .expect("a list")
            .iter()
            .any(|one| one["durable"] == true)
    })
    .await;
}

/// Pods that the webhook must leave alone. Each is created.
fn others_are_created_as_they_are(plane: &ControlPlane) {
    let none = volume("{type: task-cache, key: none}");
    assert_eq!(create(plane, "none", "ci", &none, false), Value::Null);
    let wrong = volume("{type: task-cache, kye: go}");
    assert_eq!(create(plane, "wrong", "ci", &wrong, false), Value::Null);
    // The same name of another namespace is another one.
    let stranger = create(plane, "stranger", "other", &volume(CACHE), false);
    assert_eq!(stranger, Value::Null);
    let bound = format!("nodeName: node-9, {}", volume(CACHE));
    assert_eq!(create(plane, "bound", "ci", &bound, false), Value::Null);
}

/// Makes a Node that the scheduler may use, of this size.
fn schedulable(plane: &ControlPlane, name: &str, cpu: u32, memory: &str) {
    let patch = |arguments: &[&str], patch: Value| {
        let patch = format!("--patch={patch}");
        plane.kubectl(&[&["patch", "node", name, "--type=merge", &patch], arguments].concat());
    };
    let size = json!({"cpu": cpu.to_string(), "memory": memory, "pods": "110"});
    let status = json!({"status": {"allocatable": size, "capacity": size}});
    patch(&["--subresource=status"], status);
    // The API server gives a new Node a taint, which the controller manager would remove.
    patch(&[], json!({"spec": {"taints": null}}));
}

/// A real scheduler chooses the nodes of pods that were created before. Without a preference, it
/// would choose the larger one.
async fn the_scheduler_follows(plane: &ControlPlane) {
    schedulable(plane, "node-1", 2, "4Gi");
    schedulable(plane, "node-2", 64, "256Gi");
    let flags = [
        format!("--kubeconfig={}", plane.kubeconfig.display()),
        "--leader-elect=false".to_owned(),
        "--secure-port=0".to_owned(),
    ];
    let _scheduler = daemon(plane.directory.path(), "kube-scheduler", &flags);
    for (namespace, pod, node) in [
        ("ci", "first", "node-1"),
        ("ci", "own", "node-1"),
        ("ci", "alone", "node-2"),
        ("other", "stranger", "node-2"),
    ] {
        let namespace = format!("--namespace={namespace}");
        let get = [
            "get",
            "pod",
            pod,
            &namespace,
            "-o=jsonpath={.spec.nodeName}",
        ];
        let is_scheduled = async || !plane.kubectl(&get).is_empty();
        eventually("the pod is scheduled", is_scheduled).await;
        assert_eq!(plane.kubectl(&get), node, "{pod}");
    }
}

#[tokio::test]
async fn a_pod_prefers_the_node_that_has_its_content_and_is_always_created() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    for namespace in ["ci", "other"] {
        plane.kubectl(&["create", "namespace", namespace]);
    }
    nodes(&plane, 2);
    let map = "{apiVersion: v1, kind: ConfigMap, metadata: {name: baggageclaim-controller, \
               namespace: default}}";
    plane.apply("hub", map);
    let (port, identity) = (free_port(), plane.directory.path().join("identity.pem"));
    let flags = [
        format!("--hub-listen=127.0.0.1:{}", free_port()),
        format!("--webhook-listen=127.0.0.1:{port}"),
        format!("--webhook-identity={}", identity.display()),
    ];
    let mut controller = controller_with(&plane, &flags.each_ref().map(String::as_str));
    let pools = [lab.dir("one"), lab.dir("two")];
    let one = peer(&plane, "node-1", &pools[0]);
    let _two = peer(&plane, "node-2", &pools[1]);
    let kubelet_one = kubelet(&plane, "node-1", &one).await;
    for pool in &pools {
        knows(pool, 1).await;
        is_told(pool, true).await;
    }
    make(&kubelet_one, &pools[0]).await;
    assert_eq!(preferred(&plane), Value::Null, "nothing is applied");

    // The controller runs already when its key comes.
    let objects = Objects::make(port, &identity);
    objects.apply(&plane);
    is_preferred(&plane, &controller, "node-1").await;
    let pod = create(&plane, "first", "ci", &volume(CACHE), false);
    assert_eq!(pod, json!([term("node-1")]));
    let own = json!({"weight": 7, "preference": {"matchExpressions": [
        {"key": "disk", "operator": "In", "values": ["fast"]},
    ]}});
    let with_own = format!(
        "affinity: {{nodeAffinity: {{preferredDuringSchedulingIgnoredDuringExecution: [{own}]}}}}, {}",
        volume(CACHE)
    );
    let pod = create(&plane, "own", "ci", &with_own, false);
    assert_eq!(pod, json!([own, term("node-1")]));
    others_are_created_as_they_are(&plane);

    // A namespace that wants none.
    let label = "baggageclaim.concourse-ci.org/locality";
    plane.kubectl(&["label", "namespace", "ci", &format!("{label}=off")]);
    let is_off = async || preferred(&plane) == Value::Null;
    eventually("the namespace has none", is_off).await;
    plane.kubectl(&["label", "namespace", "ci", &format!("{label}-")]);
    is_preferred(&plane, &controller, "node-1").await;

    // Away, and back with the same key: nothing is applied again.
    controller.kill();
    let pod = create(&plane, "alone", "ci", &volume(CACHE), false);
    assert_eq!(pod, Value::Null);
    controller.start();
    is_preferred(&plane, &controller, "node-1").await;

    the_scheduler_follows(&plane).await;

    // Deleted, and applied again.
    plane.kubectl(&[
        "delete",
        "mutatingwebhookconfiguration",
        "baggageclaim-locality",
    ]);
    eventually("no webhook is called", async || {
        preferred(&plane) == Value::Null
    })
    .await;
    objects.apply(&plane);
    is_preferred(&plane, &controller, "node-1").await;

    // Another key, while it runs.
    let objects = Objects::make(port, &identity);
    objects.apply(&plane);
    is_preferred(&plane, &controller, "node-1").await;
    let log = controller.log();
    assert_eq!(
        log.matches("serving the locality webhook").count(),
        3,
        "{log}"
    );
}
