//! deploy/components/peers: the driver's flags, the least right that works, and one port for the
//! drivers alone. `make e2e NODES=3` shows that nothing is missing.

use std::fs;

use serde_json::{Value, json};

use super::{Rule, as_written, help, root};

const PAGE: &str = "docs/peers.md";

fn objects(file: &str) -> Vec<Value> {
    let path = root().join("deploy").join(file);
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_saphyr::from_multiple(&text).expect(file)
}

fn object(file: &str) -> Value {
    let [object] = &objects(file)[..] else {
        panic!("{file}: one object");
    };
    object.clone()
}

#[test]
fn the_driver_gets_its_flags_and_says_its_port() {
    let patch = object("components/peers/driver.yaml");
    let daemons = object("node/daemonset.yaml");
    for field in ["name", "namespace"] {
        assert_eq!(patch["metadata"][field], daemons["metadata"][field]);
    }
    let pod = &daemons["spec"]["template"]["spec"];
    // Else the address of the pod would be another one than that of its port.
    assert!(pod.get("hostNetwork").is_none());
    let patched = &patch["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(patched["name"], pod["containers"][0]["name"]);
    let help = help("node");
    let variables = patched["env"].as_array().expect("variables");
    for variable in variables {
        let name = variable["name"].as_str().expect("a name");
        assert!(help.contains(&format!("[env: {name}]")), "{name}");
    }
    let listen = variables[0]["value"].as_str().expect("an address");
    let port = &patched["ports"][0];
    assert!(listen.ends_with(&format!(":{}", port["containerPort"])));
    let page = fs::read_to_string(root().join(PAGE)).expect(PAGE);
    assert!(page.contains(&format!("| {} |", port["containerPort"])));
}

#[test]
fn the_driver_reads_pools_and_only_drivers_reach_the_port() {
    let reads: Rule = (
        &["baggageclaim.concourse-ci.org"],
        &["pools"],
        &["get", "list", "watch"],
    );
    let [role, binding] = &objects("components/peers/rbac.yaml")[..] else {
        panic!("a role and its binding");
    };
    assert_eq!(role["rules"], json!([as_written(&reads)]));
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    let own = objects("node/rbac.yaml");
    let own = own.iter().find(|it| it["kind"] == "ClusterRoleBinding");
    assert_eq!(binding["subjects"], own.expect("a binding")["subjects"]);

    let policy = object("components/peers/networkpolicy.yaml");
    let drivers = object("node/networkpolicy.yaml")["spec"]["podSelector"].clone();
    assert_eq!(policy["spec"]["podSelector"], drivers);
    let port = object("components/peers/driver.yaml");
    let port = &port["spec"]["template"]["spec"]["containers"][0]["ports"][0]["name"];
    let ingress = json!([{
        "from": [{"podSelector": drivers}],
        "ports": [{"protocol": "TCP", "port": port}],
    }]);
    assert_eq!(policy["spec"]["ingress"], ingress);
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]));
}
