//! deploy/controller and what belongs to it: the rights for claims, the sidecars' versions, where
//! the pod may run and whom it may call. `make e2e` shows that nothing is missing.

use std::fs;

use serde_json::{Value, json};

use super::{DRIVER_NAME, Rule, as_written, help, root};

/// What the controller and its sidecars may do.
const CONTROLLER: &[Rule] = &[
    (
        &["baggageclaim.concourse-ci.org"],
        &["volumes", "snapshots"],
        &["get", "list", "watch", "create", "patch", "delete"],
    ),
    (
        &["baggageclaim.concourse-ci.org"],
        &["volumes/status", "snapshots/status"],
        &["patch"],
    ),
    (
        &["baggageclaim.concourse-ci.org"],
        &["pools"],
        &["get", "list", "watch", "delete"],
    ),
    (
        &[""],
        &["persistentvolumes"],
        &["get", "list", "watch", "create", "patch", "delete"],
    ),
    (
        &[""],
        &["persistentvolumeclaims"],
        &["get", "list", "watch", "update"],
    ),
    (&[""], &["persistentvolumeclaims/status"], &["patch"]),
    (
        &["snapshot.storage.k8s.io"],
        &["volumesnapshots"],
        &["get", "list", "watch", "update"],
    ),
    (
        &["snapshot.storage.k8s.io"],
        &["volumesnapshotclasses"],
        &["get", "list", "watch"],
    ),
    (
        &["snapshot.storage.k8s.io"],
        &["volumesnapshotcontents"],
        &["get", "list", "watch", "update", "patch"],
    ),
    (
        &["snapshot.storage.k8s.io"],
        &["volumesnapshotcontents/status"],
        &["update", "patch"],
    ),
    (
        &["groupsnapshot.storage.k8s.io"],
        &["volumegroupsnapshotclasses"],
        &["get", "list", "watch"],
    ),
    (
        &["groupsnapshot.storage.k8s.io"],
        &["volumegroupsnapshotcontents"],
        &["get", "list", "watch", "update", "patch"],
    ),
    (
        &["groupsnapshot.storage.k8s.io"],
        &["volumegroupsnapshotcontents/status"],
        &["update", "patch"],
    ),
    (
        &["storage.k8s.io"],
        &[
            "storageclasses",
            "csinodes",
            "volumeattributesclasses",
            "volumeattachments",
        ],
        &["get", "list", "watch"],
    ),
    (&[""], &["nodes"], &["get", "list", "watch"]),
    (
        &[""],
        &["events"],
        &["list", "watch", "create", "update", "patch"],
    ),
];

/// What a driver may do for claims.
const NODE: &[Rule] = &[
    (
        &["baggageclaim.concourse-ci.org"],
        &["volumes", "snapshots"],
        &["get", "list", "watch"],
    ),
    (
        &["baggageclaim.concourse-ci.org"],
        &["volumes/status", "snapshots/status", "pools/status"],
        &["get", "patch"],
    ),
    (&["baggageclaim.concourse-ci.org"], &["pools"], &["create"]),
];

/// The objects of a file below deploy/.
fn objects(file: &str) -> Vec<Value> {
    let path = root().join("deploy").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_saphyr::from_multiple(&text).expect(file)
}

fn object(file: &str) -> Value {
    let [object] = &objects(file)[..] else {
        panic!("{file}: one object");
    };
    object.clone()
}

fn names(list: &Value) -> Vec<String> {
    let all = list.as_array().expect("a list").iter();
    all.map(|name| name.as_str().expect("a name").to_owned())
        .collect()
}

#[test]
fn every_file_is_used() {
    let component = object("controller/kustomization.yaml");
    let mut named = names(&component["resources"]);
    let patches = component["patches"].as_array().expect("a list").iter();
    named.extend(patches.map(|patch| patch["path"].as_str().expect("a path").to_owned()));
    named.extend(["kustomization.yaml".to_owned()]);
    let crds = named.iter().position(|name| name == "../crds");
    named.remove(crds.expect("the definitions"));
    named.sort();
    let files = fs::read_dir(root().join("deploy/controller")).expect("a directory");
    let mut files: Vec<String> = files
        .map(|file| file.expect("an entry").file_name())
        .map(|file| file.into_string().expect("text"))
        .collect();
    files.sort();
    assert_eq!(named, files);
}

#[test]
fn an_installation_is_both_plugins_or_the_node_plugin_alone() {
    let base = object("base/kustomization.yaml");
    assert_eq!(base["resources"], json!(["../node"]));
    assert_eq!(base["components"], json!(["../controller"]));
    let alone = object("overlays/node/kustomization.yaml");
    assert_eq!(alone["resources"], json!(["../../node"]));
    assert_eq!(alone.get("components"), None);
    // Before the first StorageClass: the scheduler would reject every node.
    let driver = object("node/csidriver.yaml");
    assert_eq!(driver["spec"]["storageCapacity"], false);
    let classes = objects("controller/storageclasses.yaml");
    let mut modes: Vec<&Value> = Vec::new();
    for class in &classes {
        assert_eq!(class["provisioner"], DRIVER_NAME);
        modes.push(&class["volumeBindingMode"]);
    }
    assert_eq!(modes, ["WaitForFirstConsumer", "Immediate"]);
}

#[test]
fn controller_and_drivers_may_do_the_least_that_works() {
    let account = object("controller/serviceaccount.yaml");
    let all = objects("controller/rbac.yaml");
    for (name, rules, subject) in [
        (
            "baggageclaim-controller",
            CONTROLLER,
            &account["metadata"]["name"],
        ),
        (
            "baggageclaim-node-claims",
            NODE,
            &json!("baggageclaim-node"),
        ),
    ] {
        let of_kind = |kind: &str| {
            let mut found = all
                .iter()
                .filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
            found.next().unwrap_or_else(|| panic!("{kind} {name}"))
        };
        let rules: Vec<Value> = rules.iter().map(as_written).collect();
        assert_eq!(
            of_kind("ClusterRole")["rules"],
            Value::from(rules),
            "{name}"
        );
        let binding = of_kind("ClusterRoleBinding");
        assert_eq!(binding["roleRef"]["name"], name);
        let subjects = json!([{
            "kind": "ServiceAccount", "name": subject, "namespace": "baggageclaim",
        }]);
        assert_eq!(binding["subjects"], subjects);
    }
    assert_eq!(all.len(), 4, "two roles and their bindings");
}

#[test]
fn every_right_is_on_the_page_about_security() {
    let page = fs::read_to_string(root().join("docs/security.md")).expect("a page");
    for (who, rules) in [("controller", CONTROLLER), ("node", NODE)] {
        for (_, resources, verbs) in rules {
            for resource in *resources {
                let row = page.lines().find(|line| {
                    line.starts_with(&format!("| {who} |"))
                        && line.contains(&format!("`{resource}`"))
                });
                let row = row.unwrap_or_else(|| panic!("no row: {who}, {resource}"));
                for verb in *verbs {
                    assert!(row.contains(verb), "{verb}: {row}");
                }
            }
        }
    }
}

#[test]
fn the_sidecars_are_those_that_are_tested() {
    let component = object("controller/kustomization.yaml");
    let images = component["images"].as_array().expect("a list");
    let deployment = object("controller/deployment.yaml");
    let containers = &deployment["spec"]["template"]["spec"]["containers"];
    let containers = containers.as_array().expect("a list");
    assert_eq!(containers.len(), images.len() + 1, "and the controller");
    for image in images {
        let name = image["name"].as_str().expect("a name");
        assert!(
            containers.iter().any(|each| each["image"] == name),
            "{name}"
        );
        let module = name.strip_prefix("csi-").expect("a sidecar");
        let module = root().join(format!("tests/e2e/cluster/sidecars/{module}/go.mod"));
        let module = fs::read_to_string(module).expect(name);
        let tested = module
            .lines()
            .find_map(|line| line.strip_prefix("require "));
        let tested = tested.and_then(|line| line.split(' ').nth(1));
        assert_eq!(image["newTag"].as_str(), tested, "{name}");
    }
    // Two controllers do no harm, but one is enough.
    assert_eq!(deployment["spec"]["replicas"], 1);
    assert_eq!(deployment["spec"]["strategy"]["type"], "Recreate");
    let context = &deployment["spec"]["template"]["spec"]["securityContext"];
    assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
    for container in containers {
        let context = &container["securityContext"];
        assert_eq!(context["allowPrivilegeEscalation"], false, "{container}");
        assert_eq!(context["readOnlyRootFilesystem"], true, "{container}");
        assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
        // A call is answered before its caller gives up.
        let arguments = container["args"].to_string();
        let is_sidecar = container["name"] != "controller";
        assert_eq!(arguments.contains("--timeout=30s"), is_sidecar);
        // Calls that wait for one node leave workers for the others. csi-provisioner has 100.
        let workers = match container["name"].as_str() {
            Some("csi-resizer") => "\"--workers=100\"",
            Some("csi-snapshotter") => "\"--worker-threads=100\"",
            _ => continue,
        };
        assert!(arguments.contains(workers), "{arguments}");
    }
}

#[test]
fn the_controller_is_admitted_reached_and_told_to_end_in_time() {
    let deployment = object("controller/deployment.yaml");
    let template = &deployment["spec"]["template"];
    let pod = &template["spec"];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    let quota = object("controller/resourcequota.yaml");
    let scope = json!([{
        "scopeName": "PriorityClass", "operator": "In", "values": [pod["priorityClassName"]],
    }]);
    assert_eq!(quota["spec"]["scopeSelector"]["matchExpressions"], scope);
    let policy = object("controller/networkpolicy.yaml");
    let labels = policy["spec"]["podSelector"]["matchLabels"].as_object();
    for (label, value) in labels.expect("labels") {
        assert_eq!(template["metadata"]["labels"][label], *value, "{label}");
    }
    let port = &pod["containers"][0]["ports"][0]["name"];
    let ingress = json!([{"ports": [{"protocol": "TCP", "port": port}]}]);
    assert_eq!(policy["spec"]["ingress"], ingress);
    assert_eq!(
        policy["spec"]["egress"],
        json!([{"ports": [{"protocol": "TCP"}]}])
    );
    for object in [&quota, &policy, &deployment] {
        assert_eq!(object["metadata"]["namespace"], "baggageclaim");
    }
    // Longer than the driver's own grace.
    let help = help("controller");
    let grace = help[help.find("--grace").expect("the flag")..].split("[default: ");
    let grace = grace
        .into_iter()
        .nth(1)
        .and_then(|rest| rest.split(']').next());
    let grace = humantime::parse_duration(grace.expect("its default")).expect("a duration");
    let kubelets = pod["terminationGracePeriodSeconds"]
        .as_u64()
        .expect("given");
    assert!(kubelets > grace.as_secs(), "{kubelets} s, {grace:?}");
}

#[test]
fn a_driver_writes_of_its_own_node_only_in_whichever_namespace_it_runs() {
    let [policy, binding] = &objects("controller/admission.yaml")[..] else {
        panic!("a policy and its binding");
    };
    assert_eq!(policy["spec"]["failurePolicy"], "Fail");
    assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
    assert_eq!(binding["spec"]["validationActions"], json!(["Deny"]));
    // kustomize changes the namespace of the account, and no expression.
    let driver = object("node/daemonset.yaml");
    let account = driver["spec"]["template"]["spec"]["serviceAccountName"].as_str();
    let conditions = json!([{
        "name": "by-a-driver",
        "expression": format!(
            "request.userInfo.username.startsWith(\"system:serviceaccount:\") && \
             request.userInfo.username.endsWith(\":{}\")",
            account.expect("a name")
        ),
    }]);
    assert_eq!(policy["spec"]["matchConditions"], conditions);
}

#[test]
fn only_the_controllers_account_may_make_persistent_volumes_where_the_component_says_so() {
    let [policy, binding] = &objects("components/provisioned-only/persistent-volumes.yaml")[..]
    else {
        panic!("a policy and its binding");
    };
    assert_eq!(policy["spec"]["failurePolicy"], "Fail");
    assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
    assert_eq!(binding["spec"]["validationActions"], json!(["Deny"]));
    assert_eq!(
        binding["spec"].get("matchResources"),
        None,
        "in the whole cluster"
    );
    let condition = &policy["spec"]["matchConditions"][0]["expression"];
    let ours = format!("object.spec.csi.driver == '{DRIVER_NAME}'");
    assert!(condition.to_string().contains(&ours), "{condition}");
    let account = object("controller/serviceaccount.yaml");
    let name = |field: &str| {
        account["metadata"][field]
            .as_str()
            .expect("text")
            .to_owned()
    };
    let allowed = format!(
        "request.userInfo.username == 'system:serviceaccount:{}:{}'",
        name("namespace"),
        name("name")
    );
    assert_eq!(policy["spec"]["validations"][0]["expression"], allowed);
}
