//! Namespaces that are deleted while a node is off, with caches, outputs, claims and a snapshot on
//! it. docs/catalog.md says what waits for the node. When the node is back, all pools are empty of
//! them, and the next namespaces of these names see nothing.

use serde_json::Value;

use super::peers::{Installed, step_with};
use super::{
    Controller, GROUP, Snapshots, items, no_claim_is_left, node_is_ready, objects, source,
};
use crate::cluster::{Cluster, eventually, succeed};
use crate::env::Env;

pub(in crate::cases) fn deleted_namespaces(env: &Env) {
    let cluster = env.cluster;
    let (two, three) = (cluster.node(2), cluster.node(3));
    // The snapshot controller goes on while node 3 is off.
    succeed(&mut cluster.kubectl(&["cordon", &three.name()]));
    let snapshots = Snapshots::install(&Controller::of(env));
    succeed(&mut cluster.kubectl(&["uncordon", &three.name()]));
    let _installed = Installed::new(cluster);
    let neighbour = env.neighbour();
    let both = [env, &*neighbour];
    for of in both {
        fill(of, &two, &three);
    }
    snapshots.take(env, "shot", "claim");

    let off = three.off();
    let delete = ["delete", "namespace", env.namespace(), "--wait=false"];
    succeed(&mut cluster.kubectl(&delete));
    // Without a snapshot a namespace does not wait for the node.
    neighbour.begin_again();
    waits_for_its_snapshot_only(env);

    drop(off);
    node_is_ready(env, &three);
    // Its driver registers with kubelet after it has applied the clears.
    starts_empty(&neighbour, &three);
    starts_empty(&neighbour, &two);
    env.begin_again();
    for node in [&two, &three] {
        starts_empty(env, node);
    }
    for of in both {
        eventually("no node has content of it", || {
            of.list("artifacts").is_empty().then_some(())
        });
        assert_eq!(caches(of), 0, "{}", of.namespace());
    }
    nothing_of_claims_is_left(env);
}

/// Makes a cache and an output on each node, and a claim on node 3. All is durable, and the caches
/// have `Cache` objects, whose finalizers hold the namespace.
fn fill(env: &Env, two: &Cluster, three: &Cluster) {
    for node in [two, three] {
        let name = node.name();
        for (kind, attributes) in [
            ("caches", format!("type: task-cache, key: {name}")),
            ("makes", format!("type: output, name: {name}")),
        ] {
            let pod = format!("{kind}-{name}");
            let write = "echo old > /work/text";
            env.apply_text(&step_with(&pod, node, "work", &attributes, write));
            env.succeeded(&pod);
        }
    }
    source(env, "claim", three);
    env.clear();
    eventually("all is durable", || {
        let rows = env.list("artifacts");
        let durable = rows.iter().filter(|row| row["durable"] == true);
        (durable.count() == 4).then_some(())
    });
    eventually("both caches have objects", || {
        (caches(env) == 2).then_some(())
    });
}

/// The number of `Cache` objects of the namespace.
fn caches(env: &Env) -> usize {
    items(&env.get(&format!("caches.{GROUP}"))).count()
}

/// The namespace is held by the snapshot on the node that is off, and by nothing else.
fn waits_for_its_snapshot_only(env: &Env) {
    let only = "Some content in the namespace has finalizers remaining: \
                snapshot.storage.kubernetes.io/volumesnapshot-bound-protection \
                in 1 resource instances";
    let mut last = Value::Null;
    let mut look = || {
        last = env.get(&format!("namespace/{}", env.namespace()))["status"]["conditions"].take();
        let mut conditions = last.as_array()?.iter();
        let why = conditions.find(|it| it["type"] == "NamespaceFinalizersRemaining")?;
        (why["status"] == "True" && why["message"] == only).then_some(())
    };
    eventually("the namespace waits for its snapshot only", &mut look);
    assert_eq!(caches(env), 0, "{last}");
    let claims = env.get("persistentvolumeclaims");
    assert_eq!(items(&claims).count(), 0, "{last}");
}

/// A step that would start from any cache of the namespace finds none. It leaves none, either.
fn starts_empty(env: &Env, node: &Cluster) {
    let name = format!("looks-on-{}", node.name());
    let any = format!(
        "type: task-cache, key: {}, restoreKeys: node-*, commit: never",
        node.name()
    );
    let empty = "[ ! -e /work/text ]";
    env.apply_text(&step_with(&name, node, "work", &any, empty));
    env.succeeded(&name);
}

/// Neither in the API, nor on a node.
fn nothing_of_claims_is_left(env: &Env) {
    no_claim_is_left(env);
    assert!(objects(env.cluster, "snapshots").is_empty());
    let contents = env.cluster.get(&["volumesnapshotcontents"]);
    assert_eq!(items(&contents).count(), 0, "{contents}");
    eventually("no node reports an orphan", || {
        let none = |pool: &Value| {
            let orphans = &pool["status"]["orphans"]["count"];
            orphans.is_null() || *orphans == 0
        };
        objects(env.cluster, "pools").iter().all(none).then_some(())
    });
}
