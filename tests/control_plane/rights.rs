//! What a driver may write to the API server: the status of its own node's objects, and nothing
//! else. The roles and the ValidatingAdmissionPolicy of deploy/ in a real API server, which takes
//! the node's name from the user as it takes it from a token.

use std::path::Path;

use crate::eventually;
use crate::plane::ControlPlane;

const GROUP: &str = "baggageclaim.concourse-ci.org";
const NODE: &str = "--as=system:serviceaccount:baggageclaim:baggageclaim-node";
const STATUS: &str = "--subresource=status";

/// kubectl as the driver of a node.
fn driver(plane: &ControlPlane, node: &str, arguments: &[&str]) -> (bool, String) {
    let extra = format!("--as-user-extra=authentication.kubernetes.io/node-name={node}");
    plane.try_kubectl(&[arguments, &[NODE, &extra]].concat())
}

fn patch(plane: &ControlPlane, object: &str, patch: &str, more: &[&str]) -> (bool, String) {
    let patch = format!("--patch={patch}");
    let all = [&["patch", "--type=merge", object, &patch], more].concat();
    driver(plane, "node-1", &all)
}

/// An object of each kind on each of two nodes. No driver runs.
fn objects(plane: &ControlPlane) {
    for node in ["node-1", "node-2"] {
        for (kind, name, spec) in [
            ("Volume", format!("vol-{node}"), "name: v, wanted: Kept"),
            (
                "Snapshot",
                format!("snap-{node}"),
                "name: s, sources: [vol-1], wanted: Kept",
            ),
            ("Pool", node.to_owned(), ""),
        ] {
            let spec = if spec.is_empty() {
                String::new()
            } else {
                format!("nodeName: {node}, {spec}")
            };
            let text = format!(
                "{{apiVersion: {GROUP}/v1alpha1, kind: {kind}, metadata: {{name: {name}}}, \
                 spec: {{{spec}}}}}"
            );
            plane.apply(&name, &text);
        }
    }
}

/// A status that each kind takes.
fn status(object: &str) -> &'static str {
    if object.starts_with("pools") {
        r#"{"status":{"pool":"p"}}"#
    } else {
        r#"{"status":{"observedGeneration":1,"phase":"Ready","pool":"p"}}"#
    }
}

#[tokio::test]
async fn a_driver_writes_the_status_of_its_own_objects_and_nothing_else() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    for file in ["controller/rbac.yaml", "controller/admission.yaml"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("deploy")
            .join(file);
        plane.kubectl(&["apply", "--filename", file.to_str().expect("text")]);
    }
    objects(&plane);
    let all = |node: &str| {
        [
            format!("volumes.{GROUP}/vol-{node}"),
            format!("snapshots.{GROUP}/snap-{node}"),
            format!("pools.{GROUP}/{node}"),
        ]
    };
    let [own, others] = ["node-1", "node-2"].map(all);
    // The API server learns of a new policy a little later.
    eventually("the policy is in force", async || {
        !patch(&plane, &others[0], status(&others[0]), &[STATUS]).0
    })
    .await;
    for object in &own {
        let (done, said) = patch(&plane, object, status(object), &[STATUS]);
        assert!(done, "its own {object}: {said}");
    }
    let refused = |what: &str, (done, said): (bool, String)| {
        assert!(!done && said.contains("orbidden"), "{what}: {said}");
    };
    for object in &others {
        let told = patch(&plane, object, status(object), &[STATUS]);
        assert!(
            told.1
                .contains("'node-1' may not write an object of node 'node-2'"),
            "{told:?}"
        );
        refused(object, told);
    }
    let finalizer = r#"{"metadata":{"finalizers":["example.org/stay"]}}"#;
    let order = r#"{"spec":{"wanted":"Absent"}}"#;
    for object in own.iter().chain(&others) {
        refused("a finalizer", patch(&plane, object, finalizer, &[]));
        refused("an order", patch(&plane, object, order, &[]));
        refused("a deletion", driver(&plane, "node-1", &["delete", object]));
        // Through the status, metadata cannot be changed, whatever the answer is.
        let _ = patch(&plane, object, finalizer, &[STATUS]);
        let path = "-o=jsonpath={.metadata.finalizers}";
        assert_eq!(plane.kubectl(&["get", object, path]), "", "{object}");
    }
    // The controller says of objects that they are lost with their node. A Pool is its node's own.
    let controller = "--as=system:serviceaccount:baggageclaim:baggageclaim-controller";
    for (kind, may) in [("volumes", true), ("snapshots", true), ("pools", false)] {
        let kind = format!("{kind}.{GROUP}");
        let asked = plane.try_kubectl(&["auth", "can-i", "patch", &kind, STATUS, controller]);
        assert_eq!(asked.0, may, "{kind}: {}", asked.1);
    }
    // A Pool of another node, and one without a node in the token.
    plane.kubectl(&["delete", "pools", "--all"]);
    for (node, pool, may) in [
        ("node-1", "node-1", true),
        ("node-1", "node-2", false),
        ("", "node-2", false),
    ] {
        let file = plane.directory.path().join(format!("{pool}.yaml"));
        let file = file.to_str().expect("text");
        let made = driver(&plane, node, &["create", "--filename", file]);
        if may {
            assert!(made.0, "{made:?}");
        } else {
            refused(pool, made);
        }
    }
    let text = r#"{"spec":{"nodeName":"node-1"}}"#;
    refused("the node", patch(&plane, &others[0], text, &[]));
}
