//! The rules of the definitions: an order cannot be changed to mean other data, and the order to
//! delete is final. No driver runs.

use crate::plane::ControlPlane;

const GROUP: &str = "baggageclaim.concourse-ci.org";

/// What the API server says when fields of an object are changed, and such changes.
const REFUSED: &[(&str, &str, &[&str])] = &[
    (
        "volume/made",
        "name and nodeName are immutable",
        &["name: other", "nodeName: node-2"],
    ),
    (
        "volume/made",
        "parameters, madeWith and limit are immutable",
        &[
            "parameters: {uid: 2}",
            "madeWith: {sizeLimit: 2}",
            "limit: 2",
        ],
    ),
    (
        "volume/made",
        "source is immutable",
        &["source: {kind: Volume, name: other}"],
    ),
    (
        "volume/made",
        "fetch is immutable",
        &["fetch: {nodeName: node-2, snapshot: other}"],
    ),
    (
        "volume/clone",
        "source is immutable",
        &["source: {name: other}", "source: null"],
    ),
    (
        "volume/clone",
        "fetch is immutable",
        &[
            "fetch: {snapshot: other}",
            "fetch: {nodeName: node-3}",
            "fetch: null",
        ],
    ),
    (
        "snapshot/taken",
        "name and nodeName are immutable",
        &["name: other", "nodeName: node-2"],
    ),
    (
        "snapshot/taken",
        "sources and group are immutable",
        &["sources: [made, other]", "group: true"],
    ),
];

/// Patches the spec of an object. Returns whether it was done, and what was said.
fn patch(plane: &ControlPlane, object: &str, spec: &str) -> (bool, String) {
    let (kind, name) = object.split_once('/').expect("a kind and a name");
    let object = format!("{kind}s.{GROUP}/{name}");
    let patch = format!("--patch=spec: {{{spec}}}");
    plane.try_kubectl(&["patch", "--type=merge", &object, &patch])
}

#[tokio::test]
async fn an_order_keeps_its_meaning_and_its_deletion_is_final() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    for (kind, name, spec) in [
        (
            "Volume",
            "made",
            "parameters: {uid: 1}, madeWith: {sizeLimit: 1}, limit: 1",
        ),
        (
            "Volume",
            "clone",
            "source: {kind: Volume, name: made}, fetch: {nodeName: node-2, snapshot: taken}",
        ),
        ("Snapshot", "taken", "sources: [made]"),
    ] {
        let text = format!(
            "{{apiVersion: {GROUP}/v1alpha1, kind: {kind}, metadata: {{name: {name}}}, \
             spec: {{name: {name}, nodeName: node-1, wanted: Kept, {spec}}}}}"
        );
        plane.apply(name, &text);
    }
    for (object, told, changes) in REFUSED {
        for spec in *changes {
            let (done, said) = patch(&plane, object, spec);
            assert!(!done && said.contains(told), "{object} {spec}: {said}");
        }
    }
    let may = |object: &str, spec: &str| {
        let (done, said) = patch(&plane, object, spec);
        assert!(done, "{object} {spec}: {said}");
    };
    may("volume/made", "capacity: 2, mutable: {ttlSeconds: 2}");
    for object in ["volume/made", "volume/clone", "snapshot/taken"] {
        may(object, "wanted: Present");
        may(object, "wanted: Absent");
        for wanted in ["Present", "Kept"] {
            let (done, said) = patch(&plane, object, &format!("wanted: {wanted}"));
            assert!(
                !done && said.contains("Absent is final"),
                "{object}: {said}"
            );
        }
    }
}
