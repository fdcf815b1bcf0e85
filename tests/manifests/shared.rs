//! deploy/components/shared-tier: the drivers and the collector use the same tier, the driver has
//! the time to upload what waits, and only the storage's name service is opened besides.

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::{help, root};

const COMPONENT: &str = "deploy/components/shared-tier";

/// The objects of a file of the component.
fn objects(file: &str) -> Vec<Value> {
    let path = root().join(COMPONENT).join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_saphyr::from_multiple(&text).expect(file)
}

fn object(file: &str) -> Value {
    let [object] = &objects(file)[..] else {
        panic!("{file}: one object");
    };
    object.clone()
}

fn base(file: &str) -> Value {
    let path = root().join("deploy/node").join(file);
    let text = fs::read_to_string(path).expect(file);
    serde_saphyr::from_str(&text).expect(file)
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
fn every_file_of_the_component_is_used() {
    let component = object("kustomization.yaml");
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
    let files = fs::read_dir(root().join(COMPONENT)).expect("the component");
    let files = files.map(|file| file.expect("an entry").file_name());
    let mut files: Vec<String> = files
        .map(|file| file.into_string().expect("text"))
        .collect();
    files.sort();
    assert_eq!(named, files);
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

/// The page says how an overlay adds the component. kubectl builds that overlay, where it is there.
#[test]
fn the_overlay_on_the_page_builds() {
    let page = fs::read_to_string(root().join("docs/share-content.md")).expect("the page");
    let block = |first: &str| {
        let mut blocks = page.split("```yaml\n").skip(1);
        let block = blocks.find(|block| block.starts_with(first));
        let block = block.unwrap_or_else(|| panic!("no block begins with {first}"));
        block.split("```").next().expect("it ends").to_owned()
    };
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
    if Command::new("kubectl").arg("help").output().is_err() {
        println!("skipped: there is no kubectl to build the overlay with");
        return;
    }
    let deploy = tempfile::tempdir().expect("a temporary directory");
    let copied = Command::new("cp")
        .arg("-r")
        .arg(root().join("deploy"))
        .arg(deploy.path())
        .status()
        .expect("cp");
    assert!(copied.success());
    let ours = deploy.path().join("deploy/overlays/ours");
    fs::create_dir(&ours).expect("it is new");
    fs::write(ours.join("kustomization.yaml"), overlay).expect("write");
    fs::write(ours.join("tier.yaml"), parameters).expect("write");
    let built = Command::new("kubectl").arg("kustomize").arg(&ours).output();
    let built = built.expect("kubectl starts");
    let complaint = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{complaint}");
    let built: Vec<Value> =
        serde_saphyr::from_multiple(&String::from_utf8_lossy(&built.stdout)).expect("YAML");
    let of_kind = |kind: &str| built.iter().find(|each| each["kind"] == kind).expect(kind);
    let driver = &of_kind("DaemonSet")["spec"]["template"]["spec"]["containers"][0];
    let jobs = &of_kind("CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"];
    assert_eq!(driver["image"], jobs["containers"][0]["image"]);
    assert_ne!(driver["image"], "baggageclaim-csi", "no image is named");
    assert!(driver["envFrom"].is_array(), "{driver}");
    let url = &of_kind("ConfigMap")["data"]["BAGGAGECLAIM_SHARED"];
    assert_eq!(*url, patch["data"]["BAGGAGECLAIM_SHARED"]);
}
