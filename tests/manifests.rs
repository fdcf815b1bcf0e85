//! Every manifest of the repository, parsed like the API server does: deploy/, examples/, tests/e2e
//! and the documentation. This needs no cluster; `make e2e` asks the real API server.
//!
//! A field that Kubernetes does not know is lost when the parsed manifest is serialised again. The
//! driver's own parser reads the volume attributes, and checks that docs/attributes.md is complete.
//! The links of the documentation are checked too.

#![expect(
    clippy::disallowed_types,
    reason = "the driver's program is asked for its defaults"
)]

#[path = "manifests/controller.rs"]
mod controller;
#[path = "common/docs.rs"]
mod docs;
#[path = "manifests/kustomize.rs"]
mod kustomize;
#[path = "manifests/locality.rs"]
mod locality;
#[path = "manifests/monitoring.rs"]
mod monitoring;
#[path = "manifests/peers.rs"]
mod peers;
#[path = "manifests/platforms.rs"]
mod platforms;
#[path = "manifests/policy.rs"]
mod policy;
#[path = "manifests/shared.rs"]
mod shared;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use baggageclaim::api::{Cache, CachePolicy, Rollback, Volume};
use baggageclaim::csi::DRIVER_NAME;
use baggageclaim::model::VolumeSpec;
use baggageclaim::server::code_name;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{
    ConfigMap, Namespace, PersistentVolume, PersistentVolumeClaim, Pod, ResourceQuota, Secret,
    Service, ServiceAccount,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tonic::Code;

/// Where people read what they can write.
const ATTRIBUTES: &str = "docs/attributes.md";

/// A document, and where it stands.
struct Manifest {
    place: String,
    object: Value,
}

#[test]
fn every_field_of_every_manifest_is_known_to_kubernetes() {
    let manifests = manifests();
    assert!(manifests.len() > 20, "only {} were found", manifests.len());
    let wrong: Vec<String> = manifests
        .iter()
        .filter_map(|manifest| complaint(manifest).err())
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn an_unknown_field_is_found() {
    let read = |text: &str| {
        complaint(&Manifest {
            place: "here".to_owned(),
            object: serde_saphyr::from_str(text).expect("YAML"),
        })
    };
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c}]}}";
    read(pod).expect("all is well");
    let wrong = read(&pod.replace("name: c}", "name: c, volumeMount: []}")).expect_err("a typo");
    assert_eq!(
        wrong,
        "here: Pod: .spec.containers[0].volumeMount is unknown"
    );
    read(&pod.replace("[{name: c}]", "nginx")).expect_err("a wrong type");
    read(&pod.replace("kind: Pod", "kind: Pdo")).expect_err("a wrong kind");
}

#[test]
fn every_volume_asks_the_driver_for_what_it_knows() {
    let mut asked = 0;
    for Manifest { place, object } in manifests() {
        for volume in volumes(&object) {
            let mut attributes = attributes_of(volume);
            // Kubelet's, also where a pod has them forged.
            attributes.retain(|key, _| !key.starts_with("csi.storage.k8s.io/"));
            VolumeSpec::parse(&attributes)
                .unwrap_or_else(|error| panic!("{place}: volume {}: {error}", volume["name"]));
            asked += 1;
        }
    }
    assert!(asked > 15, "only {asked} were found");
}

#[test]
fn every_pod_that_people_copy_stands_by_itself() {
    let mut pods = 0;
    for manifest in manifests() {
        let Manifest { place, object } = &manifest;
        // Parts that are put together, and what a case completes.
        if place.starts_with("deploy") || place.starts_with("tests") {
            continue;
        }
        for pod in [&object["spec"], &object["spec"]["template"]["spec"]] {
            if pod.get("containers").is_none() {
                continue;
            }
            let name = &object["metadata"]["name"];
            if let Err(wrong) = missing(pod) {
                panic!("{place}: {name}: {wrong}");
            }
            pods += 1;
        }
    }
    assert!(pods > 15, "only {pods} were found");
}

#[test]
fn a_pod_that_the_api_server_would_refuse_is_found() {
    let right = "{containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v}]}], volumes: [{name: v}]}";
    let read = |text: &str| missing(&serde_saphyr::from_str(text).expect("YAML"));
    read(right).expect("all is well");
    for (what, instead) in [
        ("containers: [{", "containers: [], others: [{"),
        (", image: i", ""),
        ("mountPath: /v", "mountPath: v"),
        ("volumes: [{name: v}]", "volumes: [{name: w}]"),
        ("volumes: [{name: v}]", "volumes: [{name: v}, {name: v}]"),
        ("volumes: [{name: v}]", "volumes: [{name: v}, {name: w}]"),
    ] {
        assert!(right.contains(what), "{what}");
        let wrong = right.replace(what, instead);
        assert!(read(&wrong).is_err(), "{wrong}");
    }
}

#[test]
fn every_attribute_that_the_parser_knows_is_documented_and_shown() {
    let page = fs::read_to_string(root().join(ATTRIBUTES)).expect(ATTRIBUTES);
    // The parser itself lists the known keys in its error.
    let known = named_by("known are ", &[("?", "")]);
    let types = named_by("allowed are ", &[("type", "?")]);
    assert!(known.len() > 10 && types.len() > 4, "{known:?} {types:?}");
    let row = |attribute: &str| {
        page.lines().any(|line| {
            line.strip_prefix("| ")
                .and_then(|row| row.split(" | ").next())
                .is_some_and(|cell| cell.contains(&format!("`{attribute}`")))
        })
    };
    let manifests = manifests();
    let pods = manifests.iter().filter(|each| each.place == ATTRIBUTES);
    let shown: Vec<BTreeMap<String, String>> = pods
        .flat_map(|pod| volumes(&pod.object))
        .map(attributes_of)
        .collect();
    for attribute in &known {
        assert!(row(attribute), "{ATTRIBUTES}: no table has `{attribute}`");
        // Attributes that only work with imports cannot be shown: imports are parsed, but not
        // implemented yet.
        let misplaced = problem(&[(attribute, "?")]);
        let is_shown = shown.iter().any(|asked| asked.contains_key(attribute));
        assert!(
            is_shown || misplaced.ends_with("it is valid for import"),
            "{ATTRIBUTES}: no pod has `{attribute}`"
        );
    }
    for kind in types.iter().filter(|kind| *kind != "import") {
        let is_shown = shown
            .iter()
            .any(|asked| asked.get("type").is_some_and(|its| its == kind));
        assert!(is_shown, "{ATTRIBUTES}: no pod has type {kind}");
    }
    let commits = named_by(
        "allowed here are ",
        &[("type", "output"), ("name", "a"), ("commit", "?")],
    );
    for commit in &commits {
        assert!(row(commit), "{ATTRIBUTES}: no table has `{commit}`");
    }
}

#[test]
fn every_mistake_in_the_documentation_is_answered_as_it_says() {
    let page = fs::read_to_string(root().join(ATTRIBUTES)).expect(ATTRIBUTES);
    let mut mistakes = 0;
    for line in page.lines().filter(|line| line.starts_with("| `{")) {
        let cells: Vec<&str> = line
            .trim_matches(['|', ' '])
            .split(" | ")
            .map(|cell| cell.trim_matches('`'))
            .collect();
        let [written, said] = cells[..] else {
            panic!("two cells: {line}");
        };
        let attributes: BTreeMap<String, String> =
            serde_saphyr::from_str(written).expect("attributes");
        let error = VolumeSpec::parse(&attributes).expect_err(written);
        let error = error.to_string();
        // A placeholder stands for several values in the message, too, in its order.
        let mut rest = error
            .strip_prefix("volume attribute ")
            .expect("as the page says");
        for (number, part) in said.split('…').enumerate() {
            let at = rest.find(part);
            let at = at.unwrap_or_else(|| panic!("{written}: {part:?} is not in {error:?}"));
            assert!(number > 0 || at == 0, "{written}: {error:?}");
            rest = &rest[at + part.len()..];
        }
        assert!(
            rest.is_empty() || said.ends_with('…'),
            "{written}: and {rest:?}"
        );
        mistakes += 1;
    }
    assert!(mistakes > 10, "only {mistakes} were found");
}

#[test]
fn every_link_of_the_documentation_leads_somewhere() {
    let mut links = 0;
    for page in docs::pages() {
        let text = fs::read_to_string(&page).expect("it can be read");
        for link in text.split("](").skip(1) {
            let link = link.split(')').next().unwrap_or_default();
            if link.contains("://") {
                continue;
            }
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let to = match path {
                "" => page.clone(),
                path => page.parent().expect("a directory").join(path),
            };
            assert!(to.exists(), "{}: {link}", page.display());
            if !heading.is_empty() {
                let text = fs::read_to_string(&to).expect("a page");
                let mut headings = text.lines().filter(|line| line.starts_with('#'));
                let found = headings.any(|line| anchor(line) == heading);
                assert!(found, "{}: {link}", page.display());
            }
            links += 1;
        }
    }
    assert!(links > 30, "only {links} were found");
}

#[test]
fn every_code_that_the_engine_answers_with_is_explained() {
    let page = fs::read_to_string(root().join("docs/troubleshooting.md")).expect("a page");
    // The code of each engine error, from its own test: `Busy -> ABORTED: …`.
    let table = "src/server/snapshots/baggageclaim__server__codes__tests__\
                 every_error_has_its_code_and_a_message_that_says_things_once.snap";
    let table = fs::read_to_string(root().join(table)).expect("a snapshot");
    let answered: BTreeSet<&str> = table
        .lines()
        .filter_map(|line| line.split(" -> ").nth(1)?.split(':').next())
        .collect();
    assert!(answered.len() > 6, "{answered:?}");
    let codes: Vec<Code> = (0..=16).map(Code::from_i32).collect();
    for name in answered {
        let code = codes.iter().find(|code| code_name(**code) == name);
        // As kubelet writes it: `NotFound`.
        let written = format!("| `{:?}`", code.expect("a code"));
        assert!(page.contains(&written), "{name}: {written}");
    }
    // The words that a reader of the message searches for.
    let limit = "this node's limit fs.mount-max is reached";
    for (place, text) in [("the message", &table), ("the page", &page)] {
        assert!(text.contains(limit), "{place}: {limit}");
    }
}

#[test]
fn what_the_documentation_calls_by_name_is_called_so() {
    let help = ["", "node", "standalone", "controller", "shared ls"].map(help);
    let verbs: Vec<&str> = help[0]
        .lines()
        .skip_while(|line| !line.starts_with("Verbs:"))
        .skip(1)
        .map_while(|line| line.split_whitespace().next())
        .collect();
    assert!(verbs.contains(&"check") && verbs.len() > 8, "{verbs:?}");
    let metrics = fs::read_to_string(root().join("docs/metrics.md")).expect("a page");
    let mut named = 0;
    for page in docs::pages() {
        let text = fs::read_to_string(&page).expect("it can be read");
        let page = page.display();
        for name in words_after(&text, "BAGGAGECLAIM_") {
            // Tests have theirs, on the pages about them.
            let of_tests = ["TORTURE_", "GUESTS", "TEST_", "MUTATION_"];
            if of_tests.iter().any(|prefix| name.starts_with(prefix)) {
                continue;
            }
            let is_known = name.is_empty()
                || help
                    .iter()
                    .any(|help| help.contains(&format!("BAGGAGECLAIM_{name}]")));
            assert!(is_known, "{page}: BAGGAGECLAIM_{name}");
            named += 1;
        }
        for name in words_after(&text, "baggageclaim_") {
            let parts = ["_bucket", "_sum", "_count"];
            let whole = parts.iter().find_map(|part| name.strip_suffix(part));
            let whole = format!("`baggageclaim_{}", whole.unwrap_or(name));
            let ends = ["`", "{"].map(|end| format!("{whole}{end}"));
            let is_known = ends.iter().any(|name| metrics.contains(name));
            assert!(is_known, "{page}: {whole}");
            named += 1;
        }
        for verb in words_after(&text, "-- /baggageclaim ") {
            assert!(verbs.contains(&verb), "{page}: baggageclaim {verb}");
            named += 1;
        }
    }
    assert!(named > 50, "only {named} were found");
}

#[test]
fn what_is_deployed_is_this_driver() {
    let text = |file: &str| fs::read_to_string(root().join("deploy").join(file)).expect(file);
    let driver: CSIDriver =
        serde_saphyr::from_str(&text("node/csidriver.yaml")).expect("a CSIDriver");
    assert_eq!(driver.metadata.name.as_deref(), Some(DRIVER_NAME));
    for overlay in platforms::overlays() {
        let overlay: Value =
            serde_saphyr::from_str(&text(&format!("overlays/{overlay}/kustomization.yaml")))
                .expect("a kustomization");
        assert_eq!(overlay["images"][0]["newTag"], env!("CARGO_PKG_VERSION"));
    }
    // A call that runs is answered within `--grace`, unless kubelet kills the driver before.
    let daemons: DaemonSet =
        serde_saphyr::from_str(&text("node/daemonset.yaml")).expect("a DaemonSet");
    let pod = daemons.spec.expect("a spec").template.spec.expect("a pod");
    let help = help("node");
    let grace = &help[help.find("--grace").expect("the flag")..];
    let grace = grace
        .split("[default: ")
        .nth(1)
        .and_then(|rest| rest.split(']').next())
        .expect("its default");
    let grace = humantime::parse_duration(grace).expect("a duration");
    let kubelets = pod.termination_grace_period_seconds.expect("it is given");
    assert!(
        u64::try_from(kubelets).expect("not negative") > grace.as_secs(),
        "{kubelets} s, {grace:?}"
    );
}

#[test]
fn the_driver_is_neither_refused_nor_cut_off_where_others_would_be() {
    let read = |file: &str| -> Value {
        let text = fs::read_to_string(root().join("deploy/node").join(file)).expect(file);
        serde_saphyr::from_str(&text).expect(file)
    };
    let daemons = read("daemonset.yaml");
    let pod = &daemons["spec"]["template"]["spec"];
    let priority = pod["priorityClassName"].as_str().expect("a priority");
    // The API server takes such a priority elsewhere than in kube-system from who has a quota that
    // matches it.
    let quota = read("resourcequota.yaml");
    assert_eq!(
        quota["metadata"]["namespace"],
        daemons["metadata"]["namespace"]
    );
    let expected = serde_json::json!([
        {"scopeName": "PriorityClass", "operator": "In", "values": [priority]}
    ]);
    assert_eq!(quota["spec"]["scopeSelector"]["matchExpressions"], expected);
    let resources = read("kustomization.yaml")["resources"].clone();
    let resources = resources.as_array().expect("a list");
    assert!(
        resources.contains(&"resourcequota.yaml".into()),
        "{resources:?}"
    );

    // API servers listen where they like: at 16443 with MicroK8s, for one.
    let policy = read("networkpolicy.yaml");
    let egress = &policy["spec"]["egress"];
    assert_eq!(
        *egress,
        serde_json::json!([{"ports": [{"protocol": "TCP"}]}])
    );
    // The one port that is let in is the one at which the driver is asked for health and numbers,
    // by its name.
    let ports = &pod["containers"][0]["ports"];
    let [port] = &ports.as_array().expect("a list")[..] else {
        panic!("one port: {ports}");
    };
    let protocol = port["protocol"].as_str().unwrap_or("TCP");
    assert_eq!(
        policy["spec"]["ingress"],
        serde_json::json!([{"ports": [{"protocol": protocol, "port": port["name"]}]}])
    );
    for probe in ["livenessProbe", "readinessProbe"] {
        let probed = &pod["containers"][0][probe]["httpGet"]["port"];
        assert_eq!(*probed, port["name"], "{probe}");
    }
    let labels = policy["spec"]["podSelector"]["matchLabels"].as_object();
    let its = &daemons["spec"]["template"]["metadata"]["labels"];
    for (label, value) in labels.expect("labels") {
        assert_eq!(its[label], *value, "{label}");
    }
}

/// A rule as (apiGroups, resources, verbs).
type Rule = (
    &'static [&'static str],
    &'static [&'static str],
    &'static [&'static str],
);

/// A rule as an object has it.
fn as_written(rule: &Rule) -> Value {
    let (groups, resources, verbs) = rule;
    serde_json::json!({ "apiGroups": groups, "resources": resources, "verbs": verbs })
}

/// All that the driver may do in the API: the least that works, and what docs/events.md and
/// docs/security.md tell of it.
const RULES: &[Rule] = &[
    (&[""], &["pods"], &["get", "list", "watch"]),
    (&["events.k8s.io"], &["events"], &["create", "patch"]),
];

#[test]
fn the_driver_may_do_the_least_that_works() {
    let deployed: Vec<Manifest> = manifests()
        .into_iter()
        .filter(|manifest| manifest.place.starts_with("deploy"))
        .collect();
    // Rights are given in one place, and not in a patch that is written inside of a kustomization.
    for patch in deployed
        .iter()
        .filter_map(|manifest| manifest.object["patches"].as_array())
        .flatten()
    {
        assert!(patch.get("patch").is_none(), "a file of its own: {patch}");
    }
    // OpenShift's own right is looked at in `platforms`, what the policy lets others bind in
    // `policy`, and the rights for claims in `controller`.
    let others = [
        "deploy/overlays/openshift/",
        "deploy/components/",
        "deploy/controller/",
    ];
    let rights: Vec<&Manifest> = deployed
        .iter()
        .filter(|manifest| !others.iter().any(|other| manifest.place.starts_with(other)))
        .filter(|manifest| {
            let group = manifest.object["apiVersion"].as_str().unwrap_or_default();
            group.starts_with("rbac.authorization.k8s.io/")
        })
        .collect();
    let [role, binding] = rights[..] else {
        let places: Vec<&str> = rights.iter().map(|right| right.place.as_str()).collect();
        panic!("a role and its binding: {places:?}");
    };
    assert_eq!(role.place, "deploy/node/rbac.yaml");
    let mut expected = role.object.clone();
    expected["kind"] = "ClusterRole".into();
    expected["rules"] = RULES.iter().map(as_written).collect();
    assert_eq!(role.object, expected);
    assert!(role.object.get("aggregationRule").is_none());

    let binding = serde_json::from_value::<ClusterRoleBinding>(binding.object.clone());
    let binding = binding.expect("a ClusterRoleBinding");
    assert_eq!(role.object["metadata"]["name"], binding.role_ref.name);
    let subjects = binding.subjects.unwrap_or_default();
    let [driver] = &subjects[..] else {
        panic!("the driver alone: {subjects:?}");
    };
    let daemons = deployed
        .iter()
        .find(|each| each.object["kind"] == "DaemonSet" && each.place.contains("deploy/node"));
    let daemons = &daemons.expect("a DaemonSet").object;
    assert_eq!(driver.kind, "ServiceAccount");
    assert_eq!(
        daemons["metadata"]["namespace"].as_str(),
        driver.namespace.as_deref()
    );
    assert_eq!(
        daemons["spec"]["template"]["spec"]["serviceAccountName"],
        driver.name
    );
}

#[test]
fn nothing_that_is_deployed_stands_for_everything() {
    for manifest in manifests() {
        if manifest.place.starts_with("deploy") {
            assert_eq!(wildcard(&manifest.object, ""), None, "{}", manifest.place);
        }
    }
    let role: Value =
        serde_saphyr::from_str("{rules: [{verbs: [get], resources: ['pods/*']}]}").expect("YAML");
    assert_eq!(
        wildcard(&role, "").as_deref(),
        Some(".rules[0].resources[0]")
    );
}

/// Where an object has a `*`.
fn wildcard(object: &Value, path: &str) -> Option<String> {
    match object {
        Value::String(text) => text.contains('*').then(|| path.to_owned()),
        Value::Array(all) => {
            let mut all = all.iter().enumerate();
            all.find_map(|(n, each)| wildcard(each, &format!("{path}[{n}]")))
        }
        // An expression or a path is code, and gives no right.
        Value::Object(fields) => fields
            .iter()
            .filter(|(name, _)| !matches!(name.as_str(), "expression" | "jsonPath"))
            .find_map(|(name, value)| wildcard(value, &format!("{path}.{name}"))),
        _ => None,
    }
}

/// Says what Kubernetes would not understand of a manifest.
fn complaint(manifest: &Manifest) -> Result<(), String> {
    let Manifest { place, object } = manifest;
    let word = |field: &str| object[field].as_str().unwrap_or_default();
    let check = match (word("apiVersion"), word("kind")) {
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy") => {
            reread::<ValidatingAdmissionPolicy>
        }
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding") => {
            reread::<ValidatingAdmissionPolicyBinding>
        }
        ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration") => {
            reread::<MutatingWebhookConfiguration>
        }
        ("v1", "ConfigMap") => reread::<ConfigMap>,
        ("v1", "Namespace") => reread::<Namespace>,
        ("v1", "PersistentVolume") => reread::<PersistentVolume>,
        ("v1", "PersistentVolumeClaim") => reread::<PersistentVolumeClaim>,
        ("v1", "Pod") => reread::<Pod>,
        ("v1", "ResourceQuota") => reread::<ResourceQuota>,
        ("v1", "Secret") => reread::<Secret>,
        ("v1", "Service") => reread::<Service>,
        ("v1", "ServiceAccount") => reread::<ServiceAccount>,
        ("apiextensions.k8s.io/v1", "CustomResourceDefinition") => {
            reread::<CustomResourceDefinition>
        }
        ("apps/v1", "DaemonSet") => reread::<DaemonSet>,
        ("apps/v1", "Deployment") => reread::<Deployment>,
        ("apps/v1", "StatefulSet") => reread::<StatefulSet>,
        ("batch/v1", "Job") => reread::<Job>,
        ("batch/v1", "CronJob") => reread::<CronJob>,
        ("networking.k8s.io/v1", "NetworkPolicy") => reread::<NetworkPolicy>,
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => reread::<ClusterRole>,
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => reread::<ClusterRoleBinding>,
        ("rbac.authorization.k8s.io/v1", "Role") => reread::<Role>,
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => reread::<RoleBinding>,
        ("storage.k8s.io/v1", "CSIDriver") => reread::<CSIDriver>,
        ("storage.k8s.io/v1", "StorageClass") => reread::<StorageClass>,
        ("baggageclaim.concourse-ci.org/v1alpha1", "Cache") => reread::<Cache>,
        ("baggageclaim.concourse-ci.org/v1alpha1", "CachePolicy") => reread::<CachePolicy>,
        ("baggageclaim.concourse-ci.org/v1alpha1", "Rollback") => reread::<Rollback>,
        ("baggageclaim.concourse-ci.org/v1alpha1", "Volume") => reread::<Volume>,
        // Newer than the types that this test knows, a component's own, and kustomize's, which only
        // kubectl reads.
        ("storage.k8s.io/v1", "VolumeAttributesClass")
        | ("snapshot.storage.k8s.io/v1" | "groupsnapshot.storage.k8s.io/v1", _)
        | ("monitoring.coreos.com/v1", "PodMonitor" | "PrometheusRule")
        | ("kustomize.config.k8s.io/v1beta1", "Kustomization")
        | ("kustomize.config.k8s.io/v1alpha1", "Component") => return Ok(()),
        (version, kind) => {
            return Err(format!(
                "{place}: {kind} of {version} is not known to this test"
            ));
        }
    };
    check(&without_directives(object))
        .map_err(|error| format!("{place}: {}: {error}", word("kind")))
}

/// The request of a patch: an object, or the first of a list, may have the way in which kustomize
/// merges it with the other one.
fn without_directives(object: &Value) -> Value {
    match object {
        Value::Array(all) => {
            let all = all.iter().filter(|each| each.get("$patch").is_none());
            all.map(without_directives).collect()
        }
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(name, _)| *name != "$patch");
            let fields = fields.map(|(name, value)| (name.clone(), without_directives(value)));
            Value::Object(fields.collect())
        }
        other => other.clone(),
    }
}

/// Reads an object as what it says it is, and writes it again: nothing may have been lost.
fn reread<T: DeserializeOwned + Serialize>(object: &Value) -> Result<(), String> {
    let typed: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    lost(
        object,
        &serde_json::to_value(typed).expect("what was read can be written"),
        "",
    )
}

fn lost(before: &Value, after: &Value, path: &str) -> Result<(), String> {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            before.iter().try_for_each(|(name, value)| {
                let path = format!("{path}.{name}");
                match after.get(name) {
                    Some(after) => lost(value, after, &path),
                    None => Err(format!("{path} is unknown")),
                }
            })
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            let mut pairs = before.iter().zip(after).enumerate();
            pairs.try_for_each(|(n, (before, after))| lost(before, after, &format!("{path}[{n}]")))
        }
        (before, after) if before == after => Ok(()),
        _ => Err(format!("{path} is {before} and was read as {after}")),
    }
}

/// This driver's volumes in a pod, or in what makes pods.
fn volumes(object: &Value) -> Vec<&Value> {
    [&object["spec"], &object["spec"]["template"]["spec"]]
        .into_iter()
        .filter_map(|pod| pod["volumes"].as_array())
        .flatten()
        .filter(|volume| volume["csi"]["driver"] == DRIVER_NAME)
        .collect()
}

/// The attributes of a volume of this driver.
fn attributes_of(volume: &Value) -> BTreeMap<String, String> {
    volume["csi"]
        .get("volumeAttributes")
        .map(|attributes| serde_json::from_value(attributes.clone()).expect("texts"))
        .unwrap_or_default()
}

/// The parser's error for attributes with a mistake.
fn problem(attributes: &[(&str, &str)]) -> String {
    let owned = attributes
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let error = VolumeSpec::parse(&owned.collect()).expect_err("a mistake");
    error.to_string()
}

/// The list that a message ends with.
fn named_by(before: &str, attributes: &[(&str, &str)]) -> Vec<String> {
    let message = problem(attributes);
    let list = message.split(before).nth(1).expect(&message);
    list.split(", ").map(str::to_owned).collect()
}

/// Says what the API server would miss in a pod's specification; reading it does not ask for it.
fn missing(pod: &Value) -> Result<(), String> {
    let list = |object: &Value, field: &str| object[field].as_array().cloned().unwrap_or_default();
    let text = |object: &Value, field: &str| object[field].as_str().unwrap_or_default().to_owned();
    let volumes = list(pod, "volumes");
    let names: BTreeSet<String> = volumes.iter().map(|volume| text(volume, "name")).collect();
    if names.len() != volumes.len() {
        return Err("two volumes have one name".to_owned());
    }
    let containers = list(pod, "containers");
    if containers.is_empty() {
        return Err("it has no containers".to_owned());
    }
    let mut unused = names.clone();
    for container in containers.iter().chain(&list(pod, "initContainers")) {
        let name = text(container, "name");
        if name.is_empty() || text(container, "image").is_empty() {
            return Err(format!("container {name:?} has no name or no image"));
        }
        for mount in list(container, "volumeMounts") {
            let (volume, path) = (text(&mount, "name"), text(&mount, "mountPath"));
            if !names.contains(&volume) || !path.starts_with('/') {
                return Err(format!("{name} mounts {volume:?} at {path:?}"));
            }
            unused.remove(&volume);
        }
    }
    match unused.first() {
        Some(volume) => Err(format!("no container mounts {volume}")),
        None => Ok(()),
    }
}

/// All manifests of the repository.
fn manifests() -> Vec<Manifest> {
    let mut found = Vec::new();
    for directory in ["deploy", "examples", "tests/e2e/manifests"] {
        for file in files(&root().join(directory), "yaml") {
            let text = fs::read_to_string(&file).expect("it can be read");
            // A value for a placeholder.
            let text = text
                .replace("{{FROM}}", "artifact/name")
                .replace("{{NAME}}", "name")
                .replace("{{THEN}}", "true")
                .replace("{{UID}}", "1000");
            add(&file, &text, &mut found);
        }
    }
    for (page, block) in docs::manifests() {
        add(&page, &block, &mut found);
    }
    found
}

/// The program's help, or a verb's.
fn help(verb: &str) -> String {
    let help = std::process::Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(verb.split_whitespace())
        .arg("--help")
        .output()
        .expect("it starts");
    String::from_utf8(help.stdout).expect("text")
}

/// The name after each `before`.
fn words_after<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(before)
        .skip(1)
        .map(move |rest| &rest[..rest.find(|c| !in_name(c)).unwrap_or(rest.len())])
}

/// The anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    heading
        .chars()
        .filter(kept)
        .collect::<String>()
        .replace(' ', "-")
}

fn add(file: &Path, text: &str, found: &mut Vec<Manifest>) {
    let place = file
        .strip_prefix(root())
        .unwrap_or(file)
        .display()
        .to_string();
    let objects: Vec<Value> =
        serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{place}: {error}"));
    found.extend(objects.into_iter().map(|object| Manifest {
        place: place.clone(),
        object,
    }));
}

fn files(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![directory.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory)
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|its| its == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
