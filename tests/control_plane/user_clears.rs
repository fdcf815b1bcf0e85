//! `baggageclaim clear` of a user with a kubeconfig: the rights of the user in one namespace, a
//! node and a controller that are away, and what each refusal says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use baggageclaim::api::Cache;
use baggageclaim::kubelet_double::PublishOptions;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::clears::{fences, has};
use crate::common::{Fs, require_lab};
use crate::driver::kubelet;
use crate::eventually;
use crate::peers::{Pair, asked, commit, is_told};
use crate::plane::ControlPlane;

/// A user who may clear the caches of the namespace `ci`, as deploy/ grants it, and nothing else.
/// Returns the user's kubeconfig.
fn user(plane: &ControlPlane) -> PathBuf {
    let roles = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/components/peers/clears.yaml");
    plane.kubectl(&["apply", "--filename", roles.to_str().expect("text")]);
    plane.kubectl(&["create", "serviceaccount", "builder", "--namespace=ci"]);
    plane.kubectl(&[
        "create",
        "rolebinding",
        "builder",
        "--namespace=ci",
        "--clusterrole=baggageclaim-clear",
        "--serviceaccount=ci:builder",
    ]);
    let token = plane.kubectl(&["create", "token", "builder", "--namespace=ci"]);
    let admin = fs::read_to_string(&plane.kubeconfig).expect("a kubeconfig");
    let own = admin.replace("token: secret", &format!("token: {}", token.trim()));
    assert_ne!(own, admin);
    let path = plane.directory.path().join("user");
    fs::write(&path, own).expect("write");
    path
}

/// Runs `baggageclaim clear` with a kubeconfig; returns whether it succeeded, and what it says.
fn clear(kubeconfig: &Path, arguments: &[&str]) -> (bool, String) {
    let answer = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .arg("clear")
        .args(arguments)
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .output()
        .expect("it runs");
    let said = [answer.stdout, answer.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (answer.status.success(), said)
}

/// Runs it as the user, who may.
#[expect(clippy::print_stdout, reason = "a figure for the docs")]
fn cleared(kubeconfig: &Path, arguments: &[&str]) {
    let began = Instant::now();
    let (done, said) = clear(kubeconfig, arguments);
    println!("clear {arguments:?}: {:?}", began.elapsed());
    assert!(done && said.contains("is cleared.\nNodes"), "{said}");
}

fn refused(kubeconfig: &Path, arguments: &[&str], expected: &[&str]) {
    let (done, said) = clear(kubeconfig, arguments);
    assert!(!done, "{said}");
    for part in expected {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// The objects of orders that are not carried out yet.
async fn orders(plane: &ControlPlane) -> Vec<Cache> {
    let caches: Api<Cache> = Api::namespaced(plane.client.clone(), "ci");
    let list = caches.list(&ListParams::default()).await;
    let mut items = list.expect("a list").items;
    items.retain(|it| it.name_any().starts_with("clear-"));
    items
}

#[tokio::test]
async fn a_user_clears_caches_of_the_own_namespace_while_a_node_is_down() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    for namespace in ["ci", "other"] {
        plane.kubectl(&["create", "namespace", namespace]);
    }
    let Pair {
        mut controller,
        pools,
        nodes: [_one, mut two],
        kubelets,
    } = Pair::start(&plane, &lab).await;
    let user = user(&plane);
    for key in ["go", "pr-1", "pr-2", "stays"] {
        commit(&plane, &kubelets[0], ("node-1", key), (key, 1_000)).await;
        has(&pools[0], &format!("task-cache/{key}"), true).await;
    }
    // Before, people see what there is, and who made it.
    let log = ["log", "--cluster", "task-cache/go", "--namespace=ci"];
    let log = asked(&controller, &log);
    let [generation] = &log.as_array().expect("a list")[..] else {
        panic!("{log}");
    };
    assert_eq!(
        (&generation["node"], &generation["current"]),
        (&json!("node-1"), &json!(true))
    );
    assert_eq!(generation["madeBy"]["pod"]["name"], "go", "{log}");

    // A writer runs on a node that is down when its cache is cleared.
    let writer = kubelets[1].pod("ci", "writer");
    let always = [("type", "task-cache"), ("key", "go"), ("commit", "always")];
    let published = writer.publish("work", always, PublishOptions::default());
    let target = published.await.expect("published").target;
    fs::write(target.join("text"), "old").expect("write");
    two.kill();

    cleared(&user, &["task-cache/go", "-n=ci"]);
    has(&pools[0], "task-cache/go", false).await;
    cleared(&user, &["--prefix", "task-cache/pr-", "-n=ci"]);
    has(&pools[0], "task-cache/pr-", false).await;
    has(&pools[0], "task-cache/stays", true).await;
    // Once more, and of a kind without content.
    cleared(&user, &["--prefix", "task-cache/pr-", "-n=ci"]);
    cleared(&user, &["resource-cache/none", "-n=ci"]);
    assert_eq!(fences(&plane).await.len(), 4, "{}", controller.tail());
    assert!(orders(&plane).await.is_empty());

    two.start();
    let again = kubelet(&plane, "node-2", &two).await;
    let writer = again.pod_with_uid("ci", "writer", writer.uid());
    writer.unpublish("work").await.expect("unpublished");
    is_told(&pools[1], true).await;
    for pool in &pools {
        has(pool, "task-cache/go", false).await;
    }

    // Without a controller the order is given, and carried out by the next one.
    controller.kill();
    let (done, said) = clear(&user, &["task-cache/stays", "-n=ci"]);
    let waiting = orders(&plane).await;
    assert_eq!(waiting.len(), 1);
    let command = format!("kubectl get cache {} -n ci", waiting[0].name_any());
    assert!(done && said.contains("is given"), "{said}");
    assert!(said.contains(&command), "{said}");
    controller.start();
    has(&pools[0], "task-cache/stays", false).await;
    eventually("the order is gone", async || {
        orders(&plane).await.is_empty()
    })
    .await;

    each_refusal_says_what_is_missing(&plane, &user).await;
}

async fn each_refusal_says_what_is_missing(plane: &ControlPlane, user: &Path) {
    let before = fences(plane).await.len();
    let no_right = [
        "you may not create caches in namespace other",
        "system:serviceaccount:ci:builder",
        "baggageclaim-clear",
    ];
    refused(user, &["task-cache/go", "-n=other"], &no_right);
    refused(user, &["artifact/built", "-n=ci"], &["is an output"]);
    let none = ["there is no namespace none"];
    refused(&plane.kubeconfig, &["task-cache/go", "-n=none"], &none);
    let missing = plane.directory.path().join("missing");
    refused(&missing, &["task-cache/go", "-n=ci"], &["missing"]);
    // Half of the right: the order is not given, and the object that is left is named.
    plane.kubectl(&["create", "serviceaccount", "half", "--namespace=ci"]);
    plane.kubectl(&[
        "create",
        "role",
        "half",
        "--namespace=ci",
        "--verb=create",
        "--resource=caches.baggageclaim.concourse-ci.org",
    ]);
    let half = [
        "half",
        "--namespace=ci",
        "--role=half",
        "--serviceaccount=ci:half",
    ];
    plane.kubectl(&[&["create", "rolebinding"][..], &half].concat());
    let token = plane.kubectl(&["create", "token", "half", "--namespace=ci"]);
    let admin = fs::read_to_string(&plane.kubeconfig).expect("a kubeconfig");
    let path = plane.directory.path().join("half");
    let own = admin.replace("token: secret", &format!("token: {}", token.trim()));
    fs::write(&path, own).expect("write");
    let may_not = [
        "may not delete caches",
        "may be left in namespace ci",
        "clear-",
    ];
    refused(&path, &["task-cache/go", "-n=ci"], &may_not);
    let left = orders(plane).await;
    assert_eq!(left.len(), 1);
    plane.kubectl(&["delete", "cache", &left[0].name_any(), "--namespace=ci"]);

    assert_eq!(fences(plane).await.len(), before + 1);
    plane.kubectl(&["delete", "crd", "caches.baggageclaim.concourse-ci.org"]);
    let undefined = ["install deploy/crds"];
    refused(user, &["task-cache/go", "-n=ci"], &undefined);
}
