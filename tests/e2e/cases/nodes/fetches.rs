//! Fetches between nodes with kubelets that are disturbed: the holder's cable is pulled, its driver
//! is killed, its copy is damaged, the receiver is full, and a clone is made on another node.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use serde_json::Value;

use super::full::Filled;
use super::peers::{figures, step_with};
use super::{ENDS, claim_of, node_of, only_on, place_of, pod, source, volume_of};
use crate::cluster::{Cluster, POOL, eventually};
use crate::env::Env;

pub(super) const LARGE: u64 = 64 << 20;

/// `one` is the node of the controller. The limit of `Installed` makes each fetch take seconds.
pub(super) fn disturbed(env: &Env, one: &Cluster, holder: &Cluster, receiver: &Cluster) {
    pulled_and_killed(env, holder, receiver);
    damaged(env, holder, receiver);
    full(env, one, holder);
    clone_elsewhere(env, holder, receiver);
}

/// What the node has received from peers since its driver started.
pub(super) fn received(node: &Cluster) -> u64 {
    figures(node)["receivedBytes"].as_u64().unwrap_or_default()
}

/// Makes content on a node, in the volume `/work`.
fn makes(env: &Env, name: &str, node: &Cluster, attributes: &str, command: &str) {
    env.apply_text(&step_with(name, node, "work", attributes, command));
    env.succeeded(name);
}

/// Waits until the content is durable.
pub(super) fn kept(node: &Cluster, reference: &str) {
    eventually("the content is durable", || {
        let rows = node.driver_list(&["artifacts"]);
        let mut rows = rows.iter();
        let row = rows.find(|row| row["reference"] == *reference)?;
        (row["durable"] == true).then_some(())
    });
}

/// The reader of an output gets all of it, and nothing that arrived is sent again.
fn pulled_and_killed(env: &Env, holder: &Cluster, receiver: &Cluster) {
    let write =
        format!("head -c {LARGE} /dev/urandom > /work/data; sha256sum /work/data > /work/sum");
    makes(
        env,
        "makes-large",
        holder,
        "type: output, name: large",
        &write,
    );
    kept(holder, "artifact/large");
    let before = received(receiver);
    let more_than = |what: &str, bytes: u64| {
        eventually(what, || {
            (received(receiver) >= before + bytes).then_some(())
        });
    };
    let input = "type: input, from: artifact/large";
    let check = "sha256sum -c /work/sum";
    env.apply_text(&step_with("reads-large", receiver, "work", input, check));
    more_than("the fetch has begun", LARGE / 8);
    {
        let _cable = holder.cut_off();
        let mut last = None;
        eventually("nothing comes any more", || {
            let now = received(receiver);
            (last.replace(now) == Some(now)).then_some(())
        });
    }
    more_than("the fetch goes on", LARGE / 2);
    holder.replace_driver();
    env.succeeded("reads-large");
    let sent = received(receiver) - before;
    assert!(sent < LARGE * 3 / 2, "{sent} bytes for {LARGE}");
}

/// Damaged content reaches no pod, and the holder marks its copy.
fn damaged(env: &Env, holder: &Cluster, receiver: &Cluster) {
    const CACHE: &str = "type: task-cache, key: damaged";
    let write = "head -c 1048576 /dev/urandom > /work/to-damage";
    makes(env, "makes-damaged", holder, CACHE, write);
    kept(holder, "task-cache/damaged");
    let layers = holder.on_node(POOL).join("layers");
    let file = eventually("its table of contents is there", || {
        let mut all = holder.in_pool("layers").into_iter();
        all.find_map(|layer| {
            let layer = layers.join(layer);
            let file = layer.join("fs/to-damage");
            (file.exists() && layer.join("table").exists()).then_some(file)
        })
    });
    // As a disk does it: the times stay.
    let opened = File::options().write(true).open(file).expect("open");
    let time = opened.metadata().and_then(|it| it.modified());
    opened.write_all_at(b"damage", 1000).expect("write");
    opened.set_modified(time.expect("a time")).expect("utimens");
    let empty = "[ ! -e /work/to-damage ]";
    env.apply_text(&step_with("reads-damaged", receiver, "work", CACHE, empty));
    env.succeeded("reads-damaged");
    env.event("reads-damaged", &["damaged"]);
    eventually("the holder marks its copy", || {
        let rows = holder.driver_list(&["artifacts"]);
        let mut rows = rows.iter();
        let is_marked =
            |row: &Value| row["reference"] == "task-cache/damaged" && row["shared"] == "damaged";
        rows.any(is_marked).then_some(())
    });
}

/// A cache starts empty on a node whose pool has no space for it, and nothing of it stays there.
fn full(env: &Env, receiver: &Cluster, holder: &Cluster) {
    const CACHE: &str = "type: task-cache, key: too-large";
    let write = format!("head -c {LARGE} /dev/urandom > /work/data");
    makes(env, "makes-too-large", holder, CACHE, &write);
    kept(holder, "task-cache/too-large");
    let _filled = Filled::new(receiver);
    let empty = "[ ! -e /work/data ]";
    env.apply_text(&step_with(
        "reads-too-large",
        receiver,
        "work",
        CACHE,
        empty,
    ));
    env.succeeded("reads-too-large");
    env.event("reads-too-large", &["the pool has no room left"]);
}

/// A clone of a class with `cloneElsewhere` is made where its pod is.
fn clone_elsewhere(env: &Env, from: &Cluster, to: &Cluster) {
    let class = "apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: clone-anywhere}
provisioner: baggageclaim.csi.concourse-ci.org
volumeBindingMode: WaitForFirstConsumer
parameters: {cloneElsewhere: \"true\"}
";
    env.apply_text(class);
    source(env, "original", from);
    let of = "kind: PersistentVolumeClaim, name: original";
    let reads = format!("{ENDS}\n  {}", only_on(to));
    let read = "grep original /claim-0/text";
    let clone = claim_of("elsewhere", "clone-anywhere", Some(of));
    env.apply_text(&(clone + &pod("reads-clone", &reads, &["elsewhere"], read)));
    env.succeeded("reads-clone");
    assert_eq!(node_of(&env.get("pod/reads-clone")), to.name());
    assert_eq!(place_of(env, &volume_of(env, "elsewhere")), to.name());
    super::no_claim_is_left(env);
    env.delete("storageclass/clone-anywhere");
}
