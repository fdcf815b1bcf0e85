//! Questions of the API server: which names they ask for, and what the pod is after the answer.
//! The patch is applied as RFC 6902 says it.

use std::sync::Arc;

use super::*;

fn volume(name: &str, driver: &str, attributes: &Value) -> Value {
    json!({"name": name, "csi": {"driver": driver, "volumeAttributes": attributes}})
}

fn pod(spec: Value) -> Value {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "step"}});
    pod["spec"] = spec;
    pod
}

/// A pod with one cache, and more fields.
fn with(more: &Value) -> Value {
    let cache = volume(
        "cache",
        DRIVER_NAME,
        &json!({"type": "task-cache", "key": "go", "restoreKeys": "main"}),
    );
    let mut spec = json!({"containers": [{"name": "c", "image": "i"}], "volumes": [cache]});
    for (field, value) in more.as_object().expect("fields") {
        spec[field] = value.clone();
    }
    pod(spec)
}

fn review(object: &Value) -> Value {
    json!({
        "apiVersion": VERSION,
        "kind": KIND,
        "request": {
            "uid": "0f8fad5b",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "namespace": "ci",
            "userInfo": {"username": "a"},
            "object": object,
            "oldObject": null,
        },
    })
}

fn question(review: &Value) -> Question {
    read(review.to_string().as_bytes()).expect("a question")
}

fn names(review: &Value) -> Vec<String> {
    let names = question(review).origins().into_iter();
    let join = |names: Vec<TenantOrigin>| {
        let names = names.iter().map(ToString::to_string);
        names.collect::<Vec<_>>().join(", ")
    };
    names.map(join).collect()
}

fn nodes(nodes: &[(&str, u8)]) -> Vec<Preferred> {
    let nodes = nodes.iter().map(|(node, weight)| Preferred {
        node: Arc::from(*node),
        weight: *weight,
    });
    nodes.collect()
}

/// The pod after the answer.
fn answered(object: &Value, preferred: &[Preferred]) -> Value {
    let answer = question(&review(object)).answer(preferred);
    let answer: Value = serde_json::from_slice(&answer).expect("JSON");
    assert_eq!(answer["apiVersion"], VERSION);
    assert_eq!(answer["kind"], KIND);
    let response = &answer["response"];
    assert_eq!(response["uid"], "0f8fad5b");
    assert_eq!(response["allowed"], true);
    let mut pod = object.clone();
    match response.get("patch") {
        None => assert_eq!(response.get("patchType"), None),
        Some(patch) => {
            assert_eq!(response["patchType"], "JSONPatch");
            let ByteString(patch) = serde_json::from_value(patch.clone()).expect("base64");
            let patch: Value = serde_json::from_slice(&patch).expect("JSON");
            apply(&mut pod, &patch);
        }
    }
    pod
}

/// Applies the operation `add` as RFC 6902 says it.
fn apply(object: &mut Value, operations: &Value) {
    for operation in operations.as_array().expect("operations") {
        assert_eq!(operation["op"], "add");
        let path = operation["path"].as_str().expect("a path");
        let (parent, field) = path.rsplit_once('/').expect("a path");
        let value = operation["value"].clone();
        match object.pointer_mut(parent).expect("the parent is there") {
            Value::Array(all) if field == "-" => all.push(value),
            Value::Object(fields) => drop(fields.insert(field.to_owned(), value)),
            other => panic!("{path}: {other}"),
        }
    }
}

fn term(node: &str, weight: u8) -> Value {
    json!({
        "weight": weight,
        "preference": {"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]},
        ]},
    })
}

#[test]
fn the_names_are_those_that_volumes_start_from() {
    let object = pod(json!({"volumes": [
        {"name": "other", "emptyDir": {}},
        volume("foreign", "other.example.org", &json!({"type": "task-cache", "key": "foreign"})),
        volume("task", DRIVER_NAME, &json!({"type": "task-cache", "key": "go", "restoreKeys": "main,old"})),
        volume("again", DRIVER_NAME, &json!({"type": "task-cache", "key": "go", "restoreKeys": "main,old"})),
        volume("prefix", DRIVER_NAME, &json!({"type": "task-cache", "key": "pr", "restoreKeys": "main-*"})),
        volume("resource", DRIVER_NAME, &json!({"type": "resource-cache", "key": "git"})),
        volume("input", DRIVER_NAME, &json!({"type": "input", "from": "artifact/built",
                                       "csi.storage.k8s.io/pod.namespace": "forged"})),
        volume("output", DRIVER_NAME, &json!({"type": "output", "name": "made"})),
        volume("scratch", DRIVER_NAME, &json!(null)),
        volume("typo", DRIVER_NAME, &json!({"type": "task-cache", "kye": "go"})),
    ]}));
    let expected = [
        "artifact/built of namespace ci",
        "resource-cache/git of namespace ci",
        "task-cache/go of namespace ci, task-cache/main of namespace ci, \
         task-cache/old of namespace ci",
        "task-cache/pr of namespace ci, task-cache/main-* of namespace ci",
    ];
    assert_eq!(names(&review(&object)), expected);
}

#[test]
fn a_pod_cannot_ask_for_any_number_of_names() {
    let volumes = |count: usize| {
        let volumes = (0..count).map(|number| {
            let key = format!("key-{number}");
            volume(
                "v",
                DRIVER_NAME,
                &json!({"type": "resource-cache", "key": key}),
            )
        });
        pod(json!({"volumes": volumes.collect::<Vec<_>>()}))
    };
    for (count, expected) in [(MOST_VOLUMES, MOST_VOLUMES), (5000, MOST_VOLUMES)] {
        assert_eq!(names(&review(&volumes(count))).len(), expected);
    }
}

#[test]
fn any_other_question_asks_for_nothing_and_is_allowed() {
    for (pointer, value) in [
        ("/request/kind/kind", json!("Deployment")),
        ("/request/kind/group", json!("apps")),
        ("/request/operation", json!("UPDATE")),
        ("/request/namespace", json!(null)),
        ("/request/namespace", json!("not a namespace")),
        ("/request/object", json!(null)),
        ("/request/object/spec", json!(null)),
        ("/request/object/spec/volumes", json!(null)),
        ("/request/object/spec/nodeName", json!("n1")),
    ] {
        let mut review = review(&with(&json!({})));
        assert_eq!(names(&review).len(), 1);
        let (parent, field) = pointer.rsplit_once('/').expect("a pointer");
        review.pointer_mut(parent).expect("it is there")[field] = value;
        assert_eq!(names(&review), [""; 0], "{pointer}");
        let answer = question(&review).answer(&[]);
        let answer: Value = serde_json::from_slice(&answer).expect("JSON");
        assert_eq!(
            answer["response"],
            json!({"uid": "0f8fad5b", "allowed": true})
        );
    }
}

#[test]
fn what_is_no_review_is_malformed() {
    let whole = review(&with(&json!({})));
    let without = |field: &str| {
        let mut review = whole.clone();
        review.as_object_mut().expect("an object").remove(field);
        review.to_string()
    };
    let other = |field: &str, value: &str| {
        let mut review = whole.clone();
        review[field] = value.into();
        review.to_string()
    };
    for body in [
        String::new(),
        "{".to_owned(),
        "[]".to_owned(),
        without("kind"),
        without("request"),
        other("kind", "Pod"),
        other("apiVersion", "admission.k8s.io/v1beta1"),
        whole
            .to_string()
            .replace("\"volumes\":[", "\"volumes\":[1,"),
    ] {
        read(body.as_bytes()).expect_err(&body);
    }
}

#[test]
fn terms_are_added_behind_those_of_the_pod_and_nothing_else_changes() {
    let preferred = nodes(&[("n2", 90), ("n1", 30)]);
    let ours = [term("n2", 90), term("n1", 30)];
    let own = json!({"weight": 50, "preference": {"matchExpressions": [
        {"key": "disk", "operator": "In", "values": ["fast"]},
    ]}});
    let required = json!({"nodeSelectorTerms": [{"matchExpressions": [
        {"key": "arch", "operator": "Exists"},
    ]}]});
    let spread = json!({"preferredDuringSchedulingIgnoredDuringExecution": []});
    for (affinity, expected) in [
        (json!(null), json!({"nodeAffinity": {PREFERRED: ours}})),
        (json!({}), json!({"nodeAffinity": {PREFERRED: ours}})),
        (
            json!({"podAntiAffinity": spread}),
            json!({"podAntiAffinity": spread, "nodeAffinity": {PREFERRED: ours}}),
        ),
        (
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}),
            json!({"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": required,
                PREFERRED: ours,
            }}),
        ),
        (
            json!({"nodeAffinity": {PREFERRED: null}}),
            json!({"nodeAffinity": {PREFERRED: ours}}),
        ),
        (
            json!({"nodeAffinity": {PREFERRED: [own]}}),
            json!({"nodeAffinity": {PREFERRED: [own, ours[0], ours[1]]}}),
        ),
    ] {
        let before = with(&json!({"affinity": affinity}));
        let after = answered(&before, &preferred);
        assert_eq!(after, with(&json!({"affinity": expected})), "{affinity}");
        // The second review of the same pod.
        assert_eq!(names(&review(&after)), [""; 0]);
        assert_eq!(answered(&after, &preferred), after);
        assert_eq!(answered(&before, &[]), before);
    }
    // Without the field.
    let after = answered(&with(&json!({})), &preferred);
    let affinity = json!({"nodeAffinity": {PREFERRED: ours}});
    assert_eq!(after, with(&json!({"affinity": affinity})));
}

#[test]
fn a_pod_that_was_placed_is_left_alone() {
    let by_name = json!({"matchFields": [
        {"key": "metadata.name", "operator": "In", "values": ["n9"]},
    ]});
    // As the controller of a DaemonSet does it.
    let required = json!({"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [by_name]},
    }});
    let preferred = json!({"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": by_name}]}});
    for placed in [
        json!({"nodeName": "n9"}),
        json!({"affinity": required}),
        json!({"affinity": preferred}),
    ] {
        let object = with(&placed);
        assert_eq!(names(&review(&object)), [""; 0], "{object}");
        assert_eq!(answered(&object, &nodes(&[("n1", 100)])), object);
    }
    // Null and empty are none. The pod is not valid yet.
    for free in [
        json!({"nodeName": ""}),
        json!({"affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": null},
        }}}),
        json!({"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": null}]}}}),
    ] {
        assert_eq!(names(&review(&with(&free))).len(), 1);
    }
}
