//! The newest task caches of the nodes as `Cache` objects: for people to see, and to clear them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use baggageclaim::api::{Cache, MIRRORED};
use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
use futures_util::{StreamExt as _, TryStreamExt as _};
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt as _};

use crate::clears::{fences, has};
use crate::common::{Fs, require_lab};
use crate::driver::{Process, controller_with, kubelet};
use crate::eventually;
use crate::peers::{commit, hub_flag, is_told, nodes, object, peer};
use crate::plane::ControlPlane;

async fn objects(plane: &ControlPlane) -> Vec<Cache> {
    let caches: Api<Cache> = Api::namespaced(plane.client.clone(), "ci");
    let list = caches.list(&ListParams::default()).await;
    list.expect("a list").items
}

/// The keys that have objects.
async fn keys(plane: &ControlPlane) -> BTreeSet<String> {
    let objects = objects(plane).await;
    let keys = objects.iter().filter_map(|it| it.task_key());
    keys.map(str::to_owned).collect()
}

/// The line of `kubectl get caches` that begins so, as its words.
fn line(plane: &ControlPlane, name: &str) -> Option<Vec<String>> {
    let table = plane.kubectl(&["get", "caches", "--namespace=ci"]);
    let line = table.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().map(str::to_owned).collect())
}

/// The namespace `ci`, a controller with these flags, and a node with a stream to it.
async fn one_node(
    plane: &ControlPlane,
    pool: &Path,
    flags: &[&str],
) -> (Process, Process, Kubelet) {
    plane.kubectl(&["create", "namespace", "ci"]);
    nodes(plane, 1);
    let hub = hub_flag(plane);
    let controller = controller_with(plane, &[&[hub.as_str()], flags].concat());
    let node = peer(plane, "node-1", pool);
    let kubelet = kubelet(plane, "node-1", &node).await;
    is_told(pool, true).await;
    (controller, node, kubelet)
}

#[tokio::test]
async fn task_caches_are_shown_as_objects_and_deleting_one_clears_it() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let pool = lab.dir("one");
    let (mut controller, _node, kubelet) = one_node(&plane, &pool, &["--mirror-caches=2"]).await;

    // The third one takes the place of the first.
    commit(&plane, &kubelet, ("node-1", "build-1"), ("first", 20_000)).await;
    has(&pool, "task-cache/first", true).await;
    eventually("it has an object", async || line(&plane, "first").is_some()).await;
    commit(&plane, &kubelet, ("node-1", "build-2"), ("go", 20_000)).await;
    commit(
        &plane,
        &kubelet,
        ("node-1", "build-3"),
        ("Go Tests/main", 20_000),
    )
    .await;
    eventually("the two newest ones have objects", async || {
        keys(&plane).await == BTreeSet::from(["Go Tests/main".to_owned(), "go".to_owned()])
    })
    .await;
    // Nothing is cleared thereby.
    assert_eq!(fences(&plane).await.len(), 0, "{}", controller.tail());
    has(&pool, "task-cache/first", true).await;

    // Key, size, nodes, last commit, author, last use, age.
    eventually("its size is known", async || {
        line(&plane, "go ").is_some_and(|words| words.len() == 9)
    })
    .await;
    let words = line(&plane, "go ").expect("it is there");
    let shown: Vec<&str> = words.iter().map(String::as_str).collect();
    let ["go", "go", _, "KiB", "1", _, "default/build-2", _, _] = shown[..] else {
        panic!("{shown:?}");
    };
    let odd = line(&plane, "go-tests-main-").expect("it is there");
    assert_eq!(odd[1..3], ["Go", "Tests/main"]);

    // Its deletion is an order, and it comes back with the next commit only.
    plane.kubectl(&["delete", "cache", "go", "--namespace=ci", "--timeout=60s"]);
    let made = fences(&plane).await;
    assert_eq!(made.len(), 1, "{}", controller.tail());
    assert_eq!(made[0].spec.key.as_deref(), Some("go"));
    has(&pool, "task-cache/go", false).await;
    eventually("the first one is shown again", async || {
        line(&plane, "first").is_some()
    })
    .await;
    assert_eq!(line(&plane, "go "), None);
    commit(&plane, &kubelet, ("node-1", "build-4"), ("go", 20_000)).await;
    eventually("it is shown again", async || {
        line(&plane, "go ").is_some_and(|words| words.contains(&"default/build-4".to_owned()))
    })
    .await;

    // Before the driver is uninstalled, its own objects go. A user's stays.
    let mine = "{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: Cache, \
                metadata: {name: mine, namespace: ci}, spec: {key: go}}";
    plane.apply("mine", mine);
    controller.kill();
    let controller = controller_with(&plane, &[&hub_flag(&plane), "--mirror-caches=0"]);
    let selector = format!("--selector={MIRRORED}");
    eventually("the mirror is empty", async || {
        let left = ["get", "caches", "-A", &selector, "--output=name"];
        plane.kubectl(&left).is_empty()
    })
    .await;
    let left = objects(&plane).await;
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].name_any(), "mine");
    assert_eq!(fences(&plane).await.len(), 1, "{}", controller.tail());
    for key in ["first", "go", "Go Tests/main"] {
        has(&pool, &format!("task-cache/{key}"), true).await;
    }
}

/// 40 caches are new to a controller that starts. Each costs two writes, at most 5 a second. The
/// nth write comes at least so many pauses after the start: a slow machine makes it later only.
#[tokio::test]
async fn many_new_caches_are_written_at_a_pace() {
    const CACHES: usize = 40;
    const PACE: Duration = Duration::from_millis(200);
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let pool = lab.dir("one");
    let (mut controller, _node, kubelet) = one_node(&plane, &pool, &[]).await;
    controller.kill();
    let uid = object(&plane, "ci", "builds", "node-1", "{type: scratch}");
    let pod = kubelet.pod_with_uid("ci", "builds", uid);
    for number in 0..CACHES {
        let (volume, key) = (format!("volume-{number}"), format!("build-{number}"));
        let attributes = [("type", "task-cache"), ("key", &*key), ("commit", "always")];
        let options = PublishOptions::default();
        let published = pod.publish(&volume, attributes, options).await;
        let target = published.expect("published").target;
        fs::write(target.join("text"), &key).expect("write");
        pod.unpublish(&volume).await.expect("unpublished");
        has(&pool, &format!("task-cache/{key}"), true).await;
    }

    let caches: Api<Cache> = Api::namespaced(plane.client.clone(), "ci");
    let seen = watcher(caches, watcher::Config::default()).applied_objects();
    let mut seen = seen.boxed();
    let began = Instant::now();
    controller.start();
    let (mut writes, mut shown) = (0, BTreeSet::new());
    while shown.len() < CACHES {
        let next = tokio::time::timeout(Duration::from_secs(60), seen.try_next()).await;
        let next = next.unwrap_or_else(|_| panic!("{shown:?}: {}", controller.tail()));
        let cache = next.expect("the watch goes on").expect("the watch goes on");
        let after = began.elapsed();
        let earliest = PACE * writes;
        assert!(after >= earliest, "{writes} writes before: {after:?}");
        writes += 1;
        if cache.status.is_some() {
            shown.insert(cache.name_any());
        }
    }
}
