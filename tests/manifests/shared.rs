//! deploy/components/shared-tier: the drivers and the collector use the same tier, the driver has
//! the time to upload what waits, and only the storage's name service is opened besides. With
//! deploy/components/shared-tier-controller the controller is the collector.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use super::{help, kustomize, root};

const COMPONENT: &str = "deploy/components/shared-tier";
const CONTROLLER: &str = "deploy/components/shared-tier-controller";

/// The objects of a file.
fn objects_of(directory: &str, file: &str) -> Vec<Value> {
    let path = root().join(directory).join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_saphyr::from_multiple(&text).expect(file)
}

fn object_of(directory: &str, file: &str) -> Value {
    let [object] = &objects_of(directory, file)[..] else {
        panic!("{file}: one object");
    };
    object.clone()
}

/// The objects of a file of the component.
fn objects(file: &str) -> Vec<Value> {
    objects_of(COMPONENT, file)
}

fn object(file: &str) -> Value {
    object_of(COMPONENT, file)
}

fn base(file: &str) -> Value {
    object_of("deploy/node", file)
}

/// The default of a flag of `node`, as its help tells it.
fn default_of(flag: &str) -> Duration {
    let help = help("node");
    let at = help.find(&format!("{flag} <")).expect(flag);
    let default = help[at..].split("[default: ").nth(1);
    let default = default.and_then(|rest| rest.split(']').next());
    humantime::parse_duration(default.expect(flag)).expect("a duration")
}

#[test]
fn every_file_of_the_components_is_used() {
    for directory in [COMPONENT, CONTROLLER] {
        let component = object_of(directory, "kustomization.yaml");
        let resources = component["resources"].as_array().expect("a list").clone();
        let patches = component["patches"].as_array().expect("a list").clone();
        let patches = patches.iter().map(|patch| patch["path"].clone());
        let mut named: Vec<String> = resources
            .into_iter()
            .chain(patches)
            .map(|name| name.as_str().expect("a name").to_owned())
            .chain(["kustomization.yaml".to_owned()])
            .collect();
        named.sort();
        let files = fs::read_dir(root().join(directory)).expect("the component");
        let files = files.map(|file| file.expect("an entry").file_name());
        let mut files: Vec<String> = files
            .map(|file| file.into_string().expect("text"))
            .collect();
        files.sort();
        assert_eq!(named, files, "{directory}");
    }
}

#[test]
fn the_controller_collects_in_the_place_of_the_job() {
    let patch = object_of(CONTROLLER, "controller.yaml");
    let whole = object_of("deploy/controller", "deployment.yaml");
    for field in ["name", "namespace"] {
        assert_eq!(patch["metadata"][field], whole["metadata"][field]);
    }
    let container = |object: &Value| object["spec"]["template"]["spec"]["containers"][0].clone();
    let (patched, controller) = (container(&patch), container(&whole));
    assert_eq!(patched["name"], controller["name"]);
    assert_eq!(
        patched["envFrom"],
        container(&object("driver.yaml"))["envFrom"]
    );
    assert!(help("controller").contains("[env: BAGGAGECLAIM_SHARED]"));

    let [jobs, account] = &objects("gc.yaml")[..] else {
        panic!("the job and its account");
    };
    for (file, gone) in [("cronjob.yaml", jobs), ("serviceaccount.yaml", account)] {
        let expected = json!({
            "$patch": "delete",
            "apiVersion": gone["apiVersion"],
            "kind": gone["kind"],
            "metadata": {
                "name": gone["metadata"]["name"],
                "namespace": gone["metadata"]["namespace"],
            },
        });
        assert_eq!(object_of(CONTROLLER, file), expected);
    }
    let pod = &jobs["spec"]["jobTemplate"]["spec"]["template"]["spec"];
    let memory = [&pod["containers"][0], &controller, &patched];
    let memory = memory.map(|of| of["resources"]["limits"]["memory"].clone());
    assert_eq!(memory, ["512Mi", "512Mi", "1Gi"], "both together");

    let policy = object_of(CONTROLLER, "networkpolicy.yaml");
    let own = object_of("deploy/controller", "networkpolicy.yaml");
    let drivers = object("networkpolicy.yaml");
    assert_eq!(policy["spec"]["podSelector"], own["spec"]["podSelector"]);
    for field in ["policyTypes", "egress"] {
        assert_eq!(policy["spec"][field], drivers["spec"][field]);
    }
    // Its own policy opens every TCP port.
    assert_eq!(
        own["spec"]["egress"],
        json!([{"ports": [{"protocol": "TCP"}]}])
    );
}

#[test]
fn kubelet_waits_until_the_driver_has_uploaded_and_ended() {
    let patch = object("driver.yaml");
    let daemons = base("daemonset.yaml");
    for field in ["kind", "apiVersion"] {
        assert_eq!(patch[field], daemons[field]);
    }
    for field in ["name", "namespace"] {
        assert_eq!(patch["metadata"][field], daemons["metadata"][field]);
    }
    let waits = &patch["spec"]["template"]["spec"]["terminationGracePeriodSeconds"];
    let needs = default_of("--shared-drain") + default_of("--grace");
    let waits = waits.as_u64().expect("it is given");
    assert!(waits > needs.as_secs(), "{waits} s for {needs:?}");
}

#[test]
fn drivers_and_collector_take_one_url_and_the_same_credentials() {
    let parameters = object("parameters.yaml");
    let name = &parameters["metadata"]["name"];
    let expected = json!([
        {"configMapRef": {"name": name}},
        {"secretRef": {"name": name, "optional": true}},
    ]);
    let daemons = base("daemonset.yaml");
    let driver = &daemons["spec"]["template"]["spec"]["containers"][0];
    let patched = object("driver.yaml");
    let patched = &patched["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(patched["name"], driver["name"]);
    assert_eq!(patched["envFrom"], expected);
    let [jobs, account] = &objects("gc.yaml")[..] else {
        panic!("the job and its account");
    };
    let pod = &jobs["spec"]["jobTemplate"]["spec"]["template"]["spec"];
    let collector = &pod["containers"][0];
    assert_eq!(collector["image"], driver["image"]);
    assert_eq!(collector["envFrom"], expected);
    assert_eq!(pod["serviceAccountName"], account["metadata"]["name"]);
    // It deletes content of all namespaces in the tier, and has no right in the API.
    assert_eq!(pod["automountServiceAccountToken"], false);
    assert_eq!(collector["securityContext"]["runAsNonRoot"], true);
    for object in [&parameters, jobs, account] {
        let namespace = &object["metadata"]["namespace"];
        assert_eq!(*namespace, daemons["metadata"]["namespace"]);
    }
    // No tier by default, and no place that invites people to write a key.
    assert_eq!(parameters.get("data"), None);
    // The verb exists, and takes the URL from this variable.
    let words = collector["args"].as_array().expect("arguments");
    let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
    for verb in [words.join(" "), "node".to_owned()] {
        assert!(help(&verb).contains("[env: BAGGAGECLAIM_SHARED]"), "{verb}");
    }
}

#[test]
fn the_driver_may_look_up_the_name_of_the_storage() {
    let policy = object("networkpolicy.yaml");
    let own = base("networkpolicy.yaml");
    assert_eq!(policy["spec"]["podSelector"], own["spec"]["podSelector"]);
    // The driver's own policy opens every TCP port.
    assert_eq!(
        own["spec"]["egress"],
        json!([{"ports": [{"protocol": "TCP"}]}])
    );
    assert_eq!(policy["spec"]["policyTypes"], json!(["Egress"]));
    let ports = policy["spec"]["egress"][0]["ports"].clone();
    for port in ports.as_array().expect("ports") {
        assert_eq!(port["protocol"], "UDP", "{port}");
    }
}

/// A block of the page that says how an overlay adds the components.
fn block(first: &str) -> String {
    let page = fs::read_to_string(root().join("docs/share-content.md")).expect("the page");
    let mut blocks = page.split("```yaml\n").skip(1);
    let block = blocks.find(|block| block.starts_with(first));
    let block = block.unwrap_or_else(|| panic!("no block begins with {first}"));
    block.split("```").next().expect("it ends").to_owned()
}

/// Has kubectl build an overlay of ours. `None`: there is no kubectl.
fn built(overlay: &str, parameters: &str) -> Option<Vec<Value>> {
    let files = [("kustomization.yaml", overlay), ("tier.yaml", parameters)];
    kustomize::built("ours", &files)
}

#[test]
fn the_overlay_on_the_page_builds() {
    let overlay = block("# kustomization.yaml");
    let parameters = block("# tier.yaml");
    let patch: Value = serde_saphyr::from_str(&parameters).expect("YAML");
    let object = object("parameters.yaml");
    for field in ["name", "namespace"] {
        assert_eq!(patch["metadata"][field], object["metadata"][field]);
    }
    let flags = help("node");
    for flag in patch["data"].as_object().expect("data").keys() {
        assert!(flags.contains(&format!("[env: {flag}]")), "{flag}");
    }
    let Some(built) = built(&overlay, &parameters) else {
        println!("skipped: there is no kubectl to build the overlay with");
        return;
    };
    let of_kind = |kind: &str| built.iter().find(|each| each["kind"] == kind).expect(kind);
    let driver = &of_kind("DaemonSet")["spec"]["template"]["spec"]["containers"][0];
    let jobs = &of_kind("CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"];
    assert_eq!(driver["image"], jobs["containers"][0]["image"]);
    assert_ne!(driver["image"], "baggageclaim-csi", "no image is named");
    assert!(driver["envFrom"].is_array(), "{driver}");
    let url = &of_kind("ConfigMap")["data"]["BAGGAGECLAIM_SHARED"];
    assert_eq!(*url, patch["data"]["BAGGAGECLAIM_SHARED"]);
}

#[test]
fn the_components_build_with_the_controller_and_without_it() {
    let (overlay, parameters) = (block("# kustomization.yaml"), block("# tier.yaml"));
    let changed = |old: &str, new: &str| {
        assert_eq!(overlay.matches(old).count(), 1, "{old}");
        overlay.replace(old, new)
    };
    let with = changed(
        "components:\n- ../../components/shared-tier\n",
        &block("components:\n"),
    );
    let (Some(with), Some(without)) = (
        built(&with, &parameters),
        built(&changed("../../base", "../../node"), &parameters),
    ) else {
        println!("skipped: there is no kubectl to build the overlays with");
        return;
    };
    let has = |built: &[Value], kind: &str, name: &str| {
        let mut built = built.iter();
        built.any(|it| it["kind"] == kind && it["metadata"]["name"] == name)
    };
    for (kind, name, expected) in [
        ("DaemonSet", "baggageclaim-node", [true, true]),
        ("Deployment", "baggageclaim-controller", [true, false]),
        ("CronJob", "baggageclaim-shared-gc", [false, true]),
        ("ServiceAccount", "baggageclaim-shared-gc", [false, true]),
        ("NetworkPolicy", "baggageclaim-node-shared", [true, true]),
        (
            "NetworkPolicy",
            "baggageclaim-controller-shared",
            [true, false],
        ),
    ] {
        let found = [&with, &without].map(|built| has(built, kind, name));
        assert_eq!(found, expected, "{kind} {name}");
    }
    let controller = with.iter().find(|it| it["kind"] == "Deployment");
    let containers = &controller.expect("the controller")["spec"]["template"]["spec"]["containers"];
    let containers = containers.as_array().expect("containers");
    for container in containers {
        let is_controller = container["name"] == "controller";
        assert_eq!(
            container["envFrom"].is_array(),
            is_controller,
            "{container}"
        );
        if is_controller {
            let variables = container["env"].to_string();
            assert!(variables.contains("BAGGAGECLAIM_HUB_LISTEN"), "{variables}");
            assert_eq!(container["resources"]["limits"]["memory"], "1Gi");
        }
    }
}
