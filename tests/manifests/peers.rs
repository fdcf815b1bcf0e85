//! deploy/components/peers: the flags of driver and controller, the least rights that work, and
//! ports for the drivers alone. `make e2e NODES=3` shows that nothing is missing.

use std::fs;

use serde_json::{Value, json};

use super::{Rule, as_written, help, root};

const PAGE: &str = "docs/peers.md";

pub(super) fn objects(file: &str) -> Vec<Value> {
    let path = root().join("deploy").join(file);
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_saphyr::from_multiple(&text).expect(file)
}

pub(super) fn object(file: &str) -> Value {
    let [object] = &objects(file)[..] else {
        panic!("{file}: one object");
    };
    object.clone()
}

/// Checks the patch that gives a pod its flags and a port; returns the name of that port.
pub(super) fn check_patch(patch: &str, patched: &str, verb: &str, page: &str) -> Value {
    let (patch, whole) = (object(patch), object(patched));
    for field in ["name", "namespace"] {
        assert_eq!(patch["metadata"][field], whole["metadata"][field]);
    }
    let pod = &whole["spec"]["template"]["spec"];
    // Else the address of the pod would be another one than that of its port.
    assert!(pod.get("hostNetwork").is_none());
    let ours = &patch["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(ours["name"], pod["containers"][0]["name"]);
    let help = help(verb);
    let variables = ours["env"].as_array().expect("variables");
    for variable in variables {
        let name = variable["name"].as_str().expect("a name");
        assert!(help.contains(&format!("[env: {name}]")), "{name}");
    }
    let listen = variables[0]["value"].as_str().expect("an address");
    let port = &ours["ports"][0];
    assert!(listen.ends_with(&format!(":{}", port["containerPort"])));
    let text = fs::read_to_string(root().join(page)).expect(page);
    assert!(text.contains(&format!("| {} |", port["containerPort"])));
    port["name"].clone()
}

#[test]
fn driver_and_controller_get_their_flags_and_only_drivers_reach_the_ports() {
    let policies = objects("components/peers/networkpolicy.yaml");
    assert_eq!(policies.len(), 2);
    let drivers = object("node/networkpolicy.yaml")["spec"]["podSelector"].clone();
    let controller = object("controller/networkpolicy.yaml")["spec"]["podSelector"].clone();
    for (policy, pod, [patch, patched, verb]) in [
        (
            &policies[0],
            &drivers,
            ["driver.yaml", "node/daemonset.yaml", "node"],
        ),
        (
            &policies[1],
            &controller,
            [
                "controller.yaml",
                "controller/deployment.yaml",
                "controller",
            ],
        ),
    ] {
        let patch = format!("components/peers/{patch}");
        let port = check_patch(&patch, patched, verb, PAGE);
        assert_eq!(policy["spec"]["podSelector"], *pod);
        let ingress = json!([{
            "from": [{"podSelector": drivers}],
            "ports": [{"protocol": "TCP", "port": port}],
        }]);
        assert_eq!(policy["spec"]["ingress"], ingress);
        assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]));
    }
}

#[test]
fn the_page_tells_how_to_delete_all_objects_of_the_component() {
    let page = fs::read_to_string(root().join(PAGE)).expect(PAGE);
    let commands = page
        .lines()
        .skip_while(|line| !line.starts_with("To remove it"));
    let commands = commands.take_while(|line| !line.starts_with('#'));
    let commands: Vec<&str> = commands.flat_map(str::split_whitespace).collect();
    let whole = object("components/peers/kustomization.yaml");
    for file in whole["resources"].as_array().expect("a list") {
        let file = file.as_str().expect("a file");
        for it in objects(&format!("components/peers/{file}")) {
            let name = it["metadata"]["name"].as_str().expect("a name");
            assert!(commands.contains(&name), "{file}: {name}");
        }
    }
}

#[test]
fn driver_and_controller_have_the_least_rights_that_work() {
    let all = objects("components/peers/rbac.yaml");
    let map = object("components/peers/configmap.yaml");
    assert_eq!(
        map.get("data"),
        None,
        "applying it again must change nothing"
    );
    let subjects = |file: &str| {
        let own = objects(file);
        let own = own.iter().find(|it| it["kind"] == "ClusterRoleBinding");
        own.expect("a binding")["subjects"].clone()
    };
    let pools: Rule = (
        &["baggageclaim.concourse-ci.org"],
        &["pools"],
        &["get", "list", "watch"],
    );
    let of_map = |verbs: &[&str]| {
        json!({
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [map["metadata"]["name"]],
            "verbs": verbs,
        })
    };
    let (driver, controller) = (subjects("node/rbac.yaml"), subjects("controller/rbac.yaml"));
    let expected = [
        (as_written(&pools), &driver),
        (of_map(&["get", "list", "watch"]), &driver),
        (of_map(&["get", "patch"]), &controller),
    ];
    assert_eq!(all.len(), 2 * expected.len(), "each role has its binding");
    for (pair, (rule, subjects)) in all.chunks(2).zip(expected) {
        let [role, binding] = pair else {
            panic!("a role and its binding");
        };
        assert_eq!(role["rules"], json!([rule]));
        assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
        assert_eq!(binding["roleRef"]["kind"], role["kind"]);
        assert_eq!(binding["subjects"], *subjects);
        for object in pair.iter().filter(|it| it["kind"] != "ClusterRole") {
            let namespace = &object["metadata"]["namespace"];
            let is_bound = object["kind"] == "ClusterRoleBinding";
            assert!(is_bound || *namespace == map["metadata"]["namespace"]);
        }
    }
}

#[test]
fn administrators_write_policies_and_the_controller_their_status() {
    let all = objects("components/peers/policies.yaml");
    let [role, binding, writers, readers] = &all[..] else {
        panic!("a role, its binding, and two roles of users");
    };
    let group = &["baggageclaim.concourse-ci.org"][..];
    let own: [Rule; 2] = [
        (group, &["cachepolicies"], &["get", "list", "watch"]),
        (group, &["cachepolicies/status"], &["patch"]),
    ];
    let own: Vec<Value> = own.iter().map(as_written).collect();
    assert_eq!(role["rules"], json!(own));
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    assert_eq!(binding["subjects"][0]["name"], "baggageclaim-controller");
    let aggregated = |role: &Value, to: &str| {
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{to}");
        role["metadata"]["labels"][label] == "true"
    };
    // An account that may edit the namespace must not change who may commit.
    let to = ["admin", "edit", "view"];
    assert_eq!(to.map(|to| aggregated(writers, to)), [true, false, false]);
    assert_eq!(to.map(|to| aggregated(readers, to)), [false, true, true]);
    let read: Rule = (group, &["cachepolicies"], &["get", "list", "watch"]);
    assert_eq!(readers["rules"], json!([as_written(&read)]));
    let resources = &writers["rules"][0]["resources"];
    assert_eq!(*resources, json!(["cachepolicies"]), "not their status");
}

#[test]
fn only_the_controller_makes_fences_and_users_only_make_and_delete_caches() {
    let all = objects("components/peers/clears.yaml");
    let [role, binding, users, viewers] = &all[..] else {
        panic!("a role, its binding, a role of users, and one of viewers");
    };
    let rules = |role: &Value| role["rules"].clone();
    let group = &["baggageclaim.concourse-ci.org"][..];
    let own: [Rule; 4] = [
        (
            group,
            &["fences"],
            &["get", "list", "watch", "create", "delete"],
        ),
        (
            group,
            &["caches"],
            &["get", "list", "watch", "create", "patch", "delete"],
        ),
        (group, &["caches/status"], &["patch"]),
        (&[""], &["namespaces"], &["get", "list", "watch"]),
    ];
    let own: Vec<Value> = own.iter().map(as_written).collect();
    assert_eq!(rules(role), json!(own));
    let controller = objects("controller/rbac.yaml");
    let controller = controller
        .iter()
        .find(|it| it["kind"] == "ClusterRoleBinding");
    assert_eq!(
        binding["subjects"],
        controller.expect("a binding")["subjects"]
    );
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    // A client that may change a handle could take its finalizer away.
    let of_users: Rule = (
        group,
        &["caches"],
        &["get", "list", "watch", "create", "delete"],
    );
    assert_eq!(rules(users), json!([as_written(&of_users)]));
    let of_viewers: Rule = (group, &["caches"], &["get", "list", "watch"]);
    assert_eq!(rules(viewers), json!([as_written(&of_viewers)]));
    let aggregated = |role: &Value, to: &str| {
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{to}");
        role["metadata"]["labels"][label] == "true"
    };
    let to = ["admin", "edit", "view"];
    assert_eq!(to.map(|to| aggregated(users, to)), [true, true, false]);
    assert_eq!(to.map(|to| aggregated(viewers, to)), [false, false, true]);
}

#[test]
fn a_rollback_is_a_right_of_its_own_and_names_its_author() {
    let all = objects("components/peers/rollbacks.yaml");
    let [role, binding, users, viewers, policy, bound] = &all[..] else {
        panic!("a role, its binding, two roles of users, an admission policy, and its binding");
    };
    let group = &["baggageclaim.concourse-ci.org"][..];
    let rules = |role: &Value, rules: &[Rule]| {
        let expected: Vec<Value> = rules.iter().map(as_written).collect();
        assert_eq!(role["rules"], json!(expected));
    };
    rules(
        role,
        &[
            (group, &["rollbacks"], &["get", "list", "watch", "delete"]),
            (group, &["rollbacks/status"], &["patch"]),
        ],
    );
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    // No right to clear, and none to change or hide what was done.
    rules(
        users,
        &[(group, &["rollbacks"], &["get", "list", "watch", "create"])],
    );
    rules(
        viewers,
        &[(group, &["rollbacks"], &["get", "list", "watch"])],
    );
    let aggregated = |role: &Value, to: &str| {
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{to}");
        role["metadata"]["labels"][label] == "true"
    };
    let to = ["admin", "edit", "view"];
    assert_eq!(to.map(|to| aggregated(users, to)), [true, false, false]);
    assert_eq!(to.map(|to| aggregated(viewers, to)), [false, true, true]);
    assert_eq!(policy["spec"]["failurePolicy"], "Fail");
    let validations = policy["spec"]["validations"].as_array().expect("a list");
    let [author, record] = &validations[..] else {
        panic!("{validations:?}");
    };
    assert_eq!(
        author["expression"],
        "object.spec.by == request.userInfo.username"
    );
    // The garbage collector deletes an object whose owner is missing.
    let expression = record["expression"].as_str().expect("text");
    for field in ["ownerReferences", "finalizers"] {
        assert!(expression.contains(&format!("!has(object.metadata.{field})")));
    }
    assert_eq!(bound["spec"]["policyName"], policy["metadata"]["name"]);
    assert_eq!(bound["spec"]["validationActions"], json!(["Deny"]));
}
