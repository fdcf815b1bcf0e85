//! A claim's life: what a user changes later, and what is deleted in another order than usual: the
//! class, the PersistentVolume, the claim of a volume that is kept.

use std::fs;

use serde_json::{Value, json};

use super::{
    AT_ONCE, Controller, DRIVER, Extra, LATE, bound, claim, claim_text, class, handle,
    persistent_volume, pod, run,
};
use crate::cluster::{eventually, feed, succeed};
use crate::env::{Env, items};

/// Claims made at once.
const MANY: usize = 50;
/// How many of them a pod has.
const OF_EACH_POD: usize = 5;
/// Classes of the case: one is deleted while its claims live, the other keeps volumes.
const SHORT: &str = "case-short";
const KEPT: &str = "case-kept";
/// Classes that are deleted while their claims are Pending.
const BRIEF: &str = "case-gone";
const BRIEF_LATE: &str = "case-gone-late";

pub(in super::super) fn life(env: &Env) {
    let controller = Controller::of(env);
    let classes = class(SHORT, &Value::Null) + &class(KEPT, &json!({"reclaimPolicy": "Retain"}));
    let classes = Extra::apply(env.cluster, classes);

    many(env);
    attributes(env, &controller);
    one_pod(env);
    volume_first(env);
    class_first(env);
    class_of_pending(env);
    kept(env, &controller);
    by_hand(env);

    drop(classes);
    controller.nothing_is_left();
}

/// Many claims at once: half of them before there are pods, half of them with their pods.
fn many(env: &Env) {
    let name = |number: usize| format!("many-{number}");
    let names: Vec<String> = (0..MANY).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (early, late) = names.split_at(MANY / 2);
    let of_class = |names: &[&str], class| -> Vec<String> {
        let texts = names
            .iter()
            .map(|name| claim_text(name, class, &Value::Null));
        texts.collect()
    };
    let write = "for claim in /claim/*; do echo here > $claim/text; done";
    let pods = late.chunks(OF_EACH_POD);
    let pods = pods.map(|claims| pod(&format!("with-{}", claims[0]), claims, write));
    let all = [
        of_class(early, AT_ONCE),
        of_class(late, LATE),
        pods.collect(),
    ]
    .concat();
    env.apply_text(&all.join("\n---\n"));
    for (kind, phase) in [("persistentvolumeclaims", "Bound"), ("pods", "Succeeded")] {
        let phase = format!("--for=jsonpath={{.status.phase}}={phase}");
        env.kubectl(&["wait", &phase, "--timeout=120s", kind, "--all"]);
    }
    // The scheduler follows those that were made first.
    let (first, last) = (names[0], names[MANY - 1]);
    let said = run(
        env,
        &[first, last],
        "echo here > /claim/0/text; ls /claim/1",
    );
    assert_eq!(said, "text\n");
    env.clear();
    let delete = ["delete", "persistentvolumeclaims", "--all", "--wait=false"];
    env.kubectl(&delete);
}

/// The class of a claim's attributes is changed, and changed back.
fn attributes(env: &Env, controller: &Controller) {
    let attributes = |name: &str, ttl: &str, limit: &str| {
        let class = json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "VolumeAttributesClass",
            "metadata": {"name": name},
            "driverName": DRIVER,
            "parameters": {"ttl": ttl, "sizeLimit": limit},
        });
        format!("{class}\n---\n")
    };
    let classes = attributes("case-long", "30d", "1Gi") + &attributes("case-brief", "7d", "64Mi");
    let _classes = Extra::apply(env.cluster, classes);
    claim(
        env,
        "changed",
        AT_ONCE,
        &json!({"volumeAttributesClassName": "case-long"}),
    );
    bound(env, "changed");
    let id = handle(&persistent_volume(env, "changed"));
    for (class, seconds) in [
        ("case-long", 30 * 86400),
        ("case-brief", 7 * 86400),
        ("case-long", 30 * 86400),
    ] {
        let patch = json!({"spec": {"volumeAttributesClassName": class}});
        let patch = format!("--patch={patch}");
        env.kubectl(&["patch", "persistentvolumeclaim/changed", &patch]);
        env.until("persistentvolumeclaim", "changed", class, |claim| {
            claim["status"]["currentVolumeAttributesClassName"] == class
        });
        let volumes = controller.objects("volumes").into_iter();
        let mut ours = volumes.filter(|volume| volume["metadata"]["name"] == id);
        let ours = ours.next().expect("its object");
        assert_eq!(ours["spec"]["mutable"]["ttlSeconds"], seconds, "{ours}");
    }
    env.delete("persistentvolumeclaim/changed");
}

/// A second pod waits until the first has ended.
fn one_pod(env: &Env) {
    let mode = json!({"accessModes": ["ReadWriteOncePod"]});
    claim(env, "single", LATE, &mode);
    env.apply_text(&pod(
        "first",
        &["single"],
        "echo first > /claim/0/text; sleep 1000000",
    ));
    env.ready("first");
    env.apply_text(&pod("second", &["single"], "cat /claim/0/text"));
    env.event("second", &["ReadWriteOncePod"]);
    env.delete("pod/first");
    env.succeeded("second");
    assert_eq!(env.logs("second"), "first\n");
    env.delete("pod/second");
}

/// The PersistentVolume is deleted while its claim is in use. It waits for the claim.
fn volume_first(env: &Env) {
    claim(env, "backwards", LATE, &Value::Null);
    env.apply_text(&pod(
        "writer",
        &["backwards"],
        "echo here > /claim/0/text; sleep 1000000",
    ));
    env.ready("writer");
    let volume = persistent_volume(env, "backwards");
    let name = volume["metadata"]["name"].as_str().expect("a name");
    let delete = ["delete", "persistentvolume", name, "--wait=false"];
    succeed(&mut env.cluster.kubectl(&delete));
    assert_eq!(env.exec("writer", "cat /claim/0/text"), "here\n");
    env.delete("pod/writer");
    env.delete("persistentvolumeclaim/backwards");
    gone(env, name);
}

/// The class is deleted while a claim of it lives.
fn class_first(env: &Env) {
    claim(env, "orphaned", SHORT, &Value::Null);
    bound(env, "orphaned");
    succeed(&mut env.cluster.kubectl(&["delete", "storageclass", SHORT]));
    run(env, &["orphaned"], "echo here > /claim/0/text");
    let volume = persistent_volume(env, "orphaned");
    env.delete("persistentvolumeclaim/orphaned");
    gone(env, volume["metadata"]["name"].as_str().expect("a name"));
}

/// The classes are deleted while their claims are Pending: the driver refuses one of them, and the
/// other waits for a pod. Both claims can be deleted. The end of the case looks for what is left.
fn class_of_pending(env: &Env) {
    let late = json!({"volumeBindingMode": "WaitForFirstConsumer"});
    let classes = class(BRIEF, &Value::Null) + &class(BRIEF_LATE, &late);
    let classes = Extra::apply(env.cluster, classes);
    let larger_than_any = json!({"resources": {"requests": {"storage": "100Ti"}}});
    claim(env, "refused", BRIEF, &larger_than_any);
    claim(env, "waiting", BRIEF_LATE, &Value::Null);
    env.claim_event(
        "refused",
        &[
            "ResourceExhausted",
            "bytes were requested, and the pool has",
        ],
    );
    env.claim_event("waiting", &["waiting for first consumer"]);
    drop(classes);
    for name in ["refused", "waiting"] {
        let phase = &env.get(&format!("persistentvolumeclaim/{name}"))["status"]["phase"];
        assert_eq!(phase, "Pending", "{name}");
        env.delete(&format!("persistentvolumeclaim/{name}"));
    }
}

fn gone(env: &Env, volume: &str) {
    eventually("the PersistentVolume is gone", || {
        let volumes = env.cluster.get(&["persistentvolumes"]);
        let mut names = items(&volumes).map(|volume| &volume["metadata"]["name"]);
        names.all(|name| name != volume).then_some(())
    });
}

/// A volume with Retain outlives its claim and its PersistentVolume. One that is written by hand
/// brings it back, and orders its deletion, as docs/volumes.md tells.
fn kept(env: &Env, controller: &Controller) {
    claim(env, "retained", KEPT, &Value::Null);
    run(env, &["retained"], "echo kept > /claim/0/text");
    let volume = persistent_volume(env, "retained");
    let (name, id) = (volume["metadata"]["name"].clone(), handle(&volume));
    let name = name.as_str().expect("a name");
    env.delete("persistentvolumeclaim/retained");
    succeed(&mut env.cluster.kubectl(&["delete", "persistentvolume", name]));
    let is_there = || {
        let mut objects = controller.objects("volumes").into_iter();
        let object = objects.any(|volume| volume["metadata"]["name"] == *id);
        object && env.cluster.in_pool("volumes").contains(&id)
    };
    assert!(is_there(), "{id}");

    // The same name and the same volume, with the claim that may have it.
    let mut again = volume.clone();
    let node = volume["spec"]["nodeAffinity"].clone();
    again["metadata"] = json!({"name": name, "annotations": {
        "pv.kubernetes.io/provisioned-by": DRIVER,
    }});
    again["spec"] = json!({
        "accessModes": ["ReadWriteOnce"],
        "capacity": volume["spec"]["capacity"],
        "claimRef": {"namespace": env.namespace(), "name": "returned"},
        "csi": {"driver": DRIVER, "volumeHandle": id},
        "nodeAffinity": node,
        "persistentVolumeReclaimPolicy": "Delete",
        "storageClassName": KEPT,
    });
    again.as_object_mut().expect("an object").remove("status");
    env.apply_text(&again.to_string());
    claim(env, "returned", KEPT, &json!({"volumeName": name}));
    bound(env, "returned");
    assert_eq!(run(env, &["returned"], "cat /claim/0/text"), "kept\n");
    assert!(is_there(), "{id}");
    env.delete("persistentvolumeclaim/returned");
    eventually("the data is deleted by order", || {
        (!is_there()).then_some(())
    });
}

/// A PersistentVolume that names no volume of the driver gives a pod a reason. With the component
/// only the controller makes one.
fn by_hand(env: &Env) {
    let volume = |name: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"},
                "claimRef": {"namespace": env.namespace(), "name": name},
                "csi": {"driver": DRIVER, "volumeHandle": format!("vol-{:032x}", 7)},
                "storageClassName": "",
            },
        })
        .to_string()
    };
    let made_up = Extra::apply(env.cluster, volume("made-up"));
    claim(env, "made-up", "", &json!({"volumeName": "made-up"}));
    bound(env, "made-up");
    env.apply_text(&pod("waits", &["made-up"], "true"));
    env.event("waits", &["there is no volume"]);
    env.delete("pod/waits");
    env.delete("persistentvolumeclaim/made-up");
    drop(made_up);

    let file = "deploy/components/provisioned-only/persistent-volumes.yaml";
    let policy = format!("{}/{file}", env!("CARGO_MANIFEST_DIR"));
    let policy = fs::read_to_string(policy).expect(file);
    let _policy = Extra::apply(env.cluster, policy);
    // An administrator may do everything else.
    let refusal = |text: &str| {
        let create = ["create", "--dry-run=server", "--filename=-"];
        let output = feed(&mut env.cluster.kubectl(&create), text);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (!output.status.success()).then_some(said)
    };
    eventually("the policy is in force", || {
        let said = refusal(&volume("another"))?;
        said.contains("only the controller of").then_some(())
    });
    let others = volume("another").replace(DRIVER, "csi.example.org");
    assert_eq!(refusal(&others), None);
    // The controller makes one.
    claim(env, "allowed", AT_ONCE, &Value::Null);
    bound(env, "allowed");
    env.delete("persistentvolumeclaim/allowed");
}
