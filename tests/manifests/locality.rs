//! deploy/components/locality, and what `baggageclaim locality` prints: they fit each other,
//! the webhook can refuse and delay no pod, and the controller gets no right.

use std::fs;
use std::process::Command;

use baggageclaim::csi::DRIVER_NAME;
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::peers::{check_patch, object};
use super::{Manifest, complaint, manifests, root};

const DIRECTORY: &str = "components/locality";

/// The Secret and the configuration, as the program prints them.
fn printed(arguments: &[&str]) -> [Value; 2] {
    let printed = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .arg("locality")
        .args(arguments)
        .output()
        .expect("it runs");
    assert!(printed.status.success());
    let list: Value = serde_json::from_slice(&printed.stdout).expect("JSON");
    assert_eq!(
        (&list["apiVersion"], &list["kind"]),
        (&json!("v1"), &json!("List"))
    );
    let items = list["items"].as_array().expect("a list").clone();
    for object in &items {
        let place = "locality".to_owned();
        let object = object.clone();
        complaint(&Manifest { place, object }).expect("Kubernetes knows each field");
    }
    items.try_into().expect("two objects")
}

fn text(bytes: &Value) -> String {
    let ByteString(bytes) = serde_json::from_value(bytes.clone()).expect("base64");
    String::from_utf8(bytes).expect("text")
}

#[test]
fn the_component_and_the_objects_fit_each_other() {
    let patch = format!("{DIRECTORY}/controller.yaml");
    let port = check_patch(
        &patch,
        "controller/deployment.yaml",
        "controller",
        "docs/locality.md",
    );
    let pod = object(&patch)["spec"]["template"]["spec"].clone();
    let service = object(&format!("{DIRECTORY}/service.yaml"));
    let controller = object("controller/networkpolicy.yaml")["spec"]["podSelector"].clone();
    assert_eq!(service["spec"]["selector"], controller["matchLabels"]);
    assert_eq!(service["spec"]["ports"][0]["targetPort"], port);
    // The API server's default.
    assert_eq!(service["spec"]["ports"][0]["port"], 443);
    let policy = object(&format!("{DIRECTORY}/networkpolicy.yaml"));
    assert_eq!(policy["spec"]["podSelector"], controller);
    let ingress = json!([{"ports": [{"protocol": "TCP", "port": port}]}]);
    assert_eq!(policy["spec"]["ingress"], ingress);

    let [secret, webhook] = printed(&[]);
    let called = &webhook["webhooks"][0]["clientConfig"]["service"];
    for field in ["name", "namespace"] {
        assert_eq!(called[field], service["metadata"][field]);
    }
    assert_eq!(
        secret["metadata"]["namespace"],
        service["metadata"]["namespace"]
    );
    assert_eq!(
        pod["volumes"][0]["secret"]["secretName"],
        secret["metadata"]["name"]
    );
    assert_eq!(pod["volumes"][0]["secret"]["optional"], true);
    let mounted = &pod["containers"][0]["volumeMounts"][0];
    assert_eq!(mounted["name"], pod["volumes"][0]["name"]);
    let (file, _) = secret["data"]
        .as_object()
        .expect("data")
        .iter()
        .next()
        .expect("a file");
    let file = format!("{}/{file}", mounted["mountPath"].as_str().expect("a path"));
    assert!(
        super::help("controller").contains(&format!("[default: {file}]")),
        "{file}"
    );
    // What the page deletes is what there is.
    let page = fs::read_to_string(root().join("docs/locality.md")).expect("a page");
    for object in [&secret, &webhook, &service, &policy] {
        let name = object["metadata"]["name"].as_str().expect("a name");
        let kind = object["kind"].as_str().expect("a kind").to_lowercase();
        let is_deleted = |line: &str| {
            line.starts_with("$ kubectl")
                && line.contains("delete ")
                && line.contains(name)
                && line.contains(&kind)
        };
        assert!(page.lines().any(is_deleted), "{kind} {name}");
    }
}

#[test]
fn the_webhook_can_refuse_and_delay_no_pod() {
    let [_, webhook] = printed(&[]);
    let [webhook] = &webhook["webhooks"].as_array().expect("a list")[..] else {
        panic!("one webhook");
    };
    for (field, expected) in [
        ("failurePolicy", json!("Ignore")),
        ("timeoutSeconds", json!(1)),
        ("sideEffects", json!("None")),
        ("reinvocationPolicy", json!("Never")),
    ] {
        assert_eq!(webhook[field], expected, "{field}");
    }
    let rules = json!([{
        "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
        "resources": ["pods"], "scope": "Namespaced",
    }]);
    assert_eq!(webhook["rules"], rules);
    let conditions = webhook["matchConditions"].to_string();
    assert!(
        conditions.contains(&format!("'{DRIVER_NAME}'")),
        "{conditions}"
    );
}

#[test]
fn each_run_makes_a_key_of_its_own_for_a_namespace() {
    let [secret, webhook] = printed(&["--namespace", "storage"]);
    let [again, other] = printed(&[]);
    let of_client = |webhook: &Value| webhook["webhooks"][0]["clientConfig"].clone();
    let client = of_client(&webhook);
    let file = |secret: &Value| text(&secret["data"]["identity.pem"]);
    assert_ne!(file(&secret), file(&again));
    assert_ne!(client["caBundle"], of_client(&other)["caBundle"]);
    assert_ne!(
        client["service"]["path"],
        of_client(&other)["service"]["path"]
    );
    // The API server gets the certificate, and not the key.
    let certificate = text(&client["caBundle"]);
    assert!(file(&secret).ends_with(&certificate));
    assert!(file(&secret).contains("PRIVATE KEY") && !certificate.contains("PRIVATE KEY"));
    assert_eq!(secret["metadata"]["namespace"], "storage");
    assert_eq!(client["service"]["namespace"], "storage");
    let selector = &webhook["webhooks"][0]["namespaceSelector"]["matchExpressions"][0];
    assert_eq!(selector["values"], json!(["kube-system", "storage"]));
}

#[test]
fn the_controller_gets_no_right_by_it() {
    let ours = manifests().into_iter();
    let ours = ours.filter(|it| it.place.starts_with(&format!("deploy/{DIRECTORY}")));
    let mut kinds: Vec<String> = ours.map(|it| it.object["kind"].to_string()).collect();
    kinds.sort();
    let expected = ["Component", "Deployment", "NetworkPolicy", "Service"];
    assert_eq!(kinds, expected.map(|kind| format!("{kind:?}")));
    // Nor by anything else: such a right is one over all objects.
    for Manifest { place, object } in manifests() {
        if place.starts_with("deploy") && object["rules"].is_array() {
            let rules = object["rules"].to_string();
            assert!(!rules.contains("webhookconfigurations"), "{place}");
        }
    }
}
