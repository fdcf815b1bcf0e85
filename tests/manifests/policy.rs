//! The write policy of deploy/components must know what the driver knows. An attribute, a type or
//! an annotation unknown to the policy would bypass it. `make e2e` tests what it refuses.

use std::fs;

use baggageclaim::k8s::{OUTCOME, OUTCOME_CONTAINER};
use serde_json::{Value, json};

use super::{Manifest, manifests, named_by, problem, root};

const COMPONENT: &str = "deploy/components/write-policy";

#[test]
fn the_policy_takes_for_written_what_the_driver_may_keep() {
    let types = named_by("allowed are ", &[("type", "?")]);
    let is_kept = |kind: &String| {
        let said = problem(&[("type", kind), ("commit", "?")]);
        !said.contains("\"commit\" is not valid for type")
    };
    let (kept, not): (Vec<String>, Vec<String>) = types.into_iter().partition(is_kept);
    assert_eq!(kept, ["output", "resource-cache", "task-cache"]);
    let written = variable("cache-writers", "written");
    let list: Vec<String> = not.iter().map(|kind| format!("'{kind}'")).collect();
    assert!(
        written.contains(&format!("in [{}]", list.join(", "))),
        "{written}"
    );
    // The rule for a pod without the label.
    for default in [
        "a[?'type'].orValue('scratch')",
        "a[?'commit'].orValue('on-success')",
    ] {
        assert!(written.contains(default), "{default}: {written}");
    }
    assert!(written.contains("!= 'never'"), "{written}");
    let attributes = variable("cache-writers", "attributes");
    let driver = format!("v.csi.driver == '{}'", baggageclaim::csi::DRIVER_NAME);
    assert!(attributes.contains(&driver), "{attributes}");
}

#[test]
fn the_policy_knows_each_annotation_by_which_an_outcome_is_told() {
    let page = fs::read_to_string(root().join("docs/events.md")).expect("a page");
    let changed = variable("outcome-writers", "changed");
    for annotation in [OUTCOME, OUTCOME_CONTAINER] {
        assert!(page.contains(&format!("`{annotation}`")), "{annotation}");
        assert!(changed.contains(&format!("'{annotation}'")), "{changed}");
    }
}

#[test]
fn both_policies_refuse_in_namespaces_with_the_label_and_when_they_cannot_tell() {
    let label = json!({"matchLabels": {"baggageclaim.concourse-ci.org/write-policy": "enforced"}});
    for name in ["cache-writers", "outcome-writers"] {
        let policy = of_kind(name, "ValidatingAdmissionPolicy");
        let binding = of_kind(name, "ValidatingAdmissionPolicyBinding");
        assert_eq!(policy["spec"]["failurePolicy"], "Fail", "{name}");
        assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
        assert_eq!(binding["spec"]["validationActions"], json!(["Deny"]));
        let selector = &binding["spec"]["matchResources"]["namespaceSelector"];
        assert_eq!(*selector, label, "{name}");
    }
    let parameters =
        &of_kind("cache-writers", "ValidatingAdmissionPolicyBinding")["spec"]["paramRef"];
    let object = &of_kind("parameters", "ConfigMap")["metadata"];
    for field in ["name", "namespace"] {
        assert_eq!(parameters[field], object[field], "{field}");
    }
    assert_eq!(parameters["parameterNotFoundAction"], "Deny");
    // The one right is that which the policy asks for, and gives nothing else in the API.
    let rules = &of_kind("outcome-writers", "ClusterRole")["rules"];
    let rule = json!([{
        "apiGroups": ["baggageclaim.concourse-ci.org"], "resources": ["outcomes"], "verbs": ["set"],
    }]);
    assert_eq!(*rules, rule);
}

#[test]
fn a_binding_that_refuses_without_its_parameters_goes_before_them() {
    let page = fs::read_to_string(root().join("docs/install.md")).expect("a page");
    let (_, section) = page.split_once("\n## Uninstall\n").expect("a section");
    // The parameters are in the driver's namespace, and go with it.
    let (before, _) = section.split_once("\n$ kubectl delete -k ").expect("it");
    let removed = before
        .split("\n$ ")
        .filter(|command| command.starts_with("kubectl delete "))
        .filter_map(|command| command.split_once(" validatingadmissionpolicybindings "))
        .filter_map(|(_, names)| names.split("```").next())
        .flat_map(str::split_whitespace);
    let removed: Vec<&str> = removed.collect();
    let mut bindings = 0;
    for Manifest { place, object } in manifests() {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        if place.starts_with("deploy/") && object["spec"].get("paramRef").is_some() {
            assert!(removed.contains(&name), "{place}: {name}: {removed:?}");
            bindings += 1;
        }
    }
    assert!(bindings > 0, "none was found");
}

#[test]
fn a_namespace_that_kustomize_does_not_change_has_a_patch_on_the_page() {
    let page = fs::read_to_string(root().join("docs/install.md")).expect("a page");
    let (_, section) = page.split_once("\n### Another namespace\n").expect("it");
    let block = section.split("```yaml\n").nth(1).expect("a block");
    let block = block.split("```").next().unwrap_or_default();
    let overlay: Value = serde_saphyr::from_str(block).expect("YAML");
    let namespace = overlay["namespace"].as_str().expect("a namespace");
    let patches = overlay["patches"].as_array().expect("patches").iter();
    let patches = patches.map(|patch| {
        let target = &patch["target"];
        let changes: Value =
            serde_saphyr::from_str(patch["patch"].as_str().expect("text")).expect("YAML");
        let [change] = &changes.as_array().expect("a list")[..] else {
            panic!("one change: {changes}");
        };
        assert_eq!(change["op"], "replace");
        json!([
            target["kind"],
            target["name"],
            change["path"],
            change["value"]
        ])
    });
    let patches: Vec<Value> = patches.collect();
    let mut expected = Vec::new();
    for Manifest { place, object } in manifests() {
        let policies = [
            "ValidatingAdmissionPolicy",
            "ValidatingAdmissionPolicyBinding",
        ];
        let is_policy = policies.iter().any(|kind| object["kind"] == *kind);
        if !is_policy || !place.starts_with("deploy/") {
            continue;
        }
        for (path, text) in texts(&object["spec"], "/spec") {
            let moved = if text == "baggageclaim" {
                namespace.to_owned()
            } else {
                text.replace(":baggageclaim:", &format!(":{namespace}:"))
            };
            if moved != text {
                let name = &object["metadata"]["name"];
                expected.push(json!([object["kind"], name, path, moved]));
            }
        }
    }
    for list in [&patches, &expected] {
        assert_eq!(list.len(), 2, "{list:?}");
    }
    assert!(
        expected.iter().all(|change| patches.contains(change)),
        "{expected:#?}\n{patches:#?}"
    );
}

/// The texts of an object, each with its JSON pointer.
fn texts(object: &Value, path: &str) -> Vec<(String, String)> {
    match object {
        Value::String(text) => vec![(path.to_owned(), text.clone())],
        Value::Array(all) => {
            let all = all.iter().enumerate();
            all.flat_map(|(n, each)| texts(each, &format!("{path}/{n}")))
                .collect()
        }
        Value::Object(fields) => {
            let fields = fields.iter();
            fields
                .flat_map(|(name, value)| texts(value, &format!("{path}/{name}")))
                .collect()
        }
        _ => Vec::new(),
    }
}

#[test]
fn the_example_grants_what_there_is() {
    let all = manifests();
    let is_example = |manifest: &&Manifest| manifest.place.starts_with("examples/pull-requests/");
    let of = |kind: &str| -> Vec<&Value> {
        let objects = all
            .iter()
            .filter(is_example)
            .map(|manifest| &manifest.object);
        objects.filter(|object| object["kind"] == kind).collect()
    };
    let namespace = of("Namespace")[0]["metadata"]["name"]
        .as_str()
        .expect("a name");
    let commits = named_by(
        "allowed here are ",
        &[("type", "output"), ("name", "a"), ("commit", "?")],
    );
    let maps = of("ConfigMap");
    let [map] = &maps[..] else {
        panic!("one object: {maps:?}");
    };
    let data = map["data"].as_object().expect("data");
    for (account, lines) in data {
        let (its, name) = account.split_once('.').expect("NAMESPACE.SERVICEACCOUNT");
        assert_eq!(its, namespace);
        let accounts = of("ServiceAccount");
        let mut accounts = accounts.iter().map(|account| &account["metadata"]);
        assert!(accounts.any(|each| each["name"] == name && each["namespace"] == its));
        for line in lines.as_str().expect("lines").lines() {
            let (allowed, reference) = line.split_once(' ').expect("COMMITS REFERENCE");
            for commit in allowed.split(',') {
                assert!(
                    commit == "any" || commits.iter().any(|known| known == commit),
                    "{line}"
                );
            }
            let kinds = ["*", "artifact/", "resource-cache/", "task-cache/"];
            assert!(
                kinds.iter().any(|kind| reference.starts_with(kind)),
                "{line}"
            );
        }
    }
}

/// An object of a file of the component.
fn of_kind(file: &str, kind: &str) -> Value {
    let path = format!("{COMPONENT}/{file}.yaml");
    let text = fs::read_to_string(root().join(&path)).expect(&path);
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).expect(&path);
    let mut found = objects.into_iter().filter(|object| object["kind"] == kind);
    found.next().unwrap_or_else(|| panic!("{path}: no {kind}"))
}

/// The value of a policy's variable.
fn variable(file: &str, name: &str) -> String {
    let policy = of_kind(file, "ValidatingAdmissionPolicy");
    let variables = policy["spec"]["variables"].as_array().expect("a list");
    let mut found = variables.iter().filter(|each| each["name"] == name);
    let found = found.next().expect(name);
    found["expression"]
        .as_str()
        .expect("an expression")
        .to_owned()
}
