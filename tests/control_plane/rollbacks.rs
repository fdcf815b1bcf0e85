//! `baggageclaim rollback` of a user with a kubeconfig: earlier content of a cache becomes the
//! newest on all nodes. The right to it is one of its own, what was cleared stays cleared, and each
//! refusal says why.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use baggageclaim::api::{Rollback, RollbackPhase};
use baggageclaim::kubelet_double::Kubelet;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde_json::Value;

use crate::clears::has;
use crate::common::{Fs, require_lab};
use crate::driver::Process;
use crate::eventually;
use crate::peers::{CACHE, Pair, READ, asked, commit, object, publish, told, unpublish};
use crate::plane::ControlPlane;

const GO: &str = "task-cache/go";
/// The sizes of the good and of the bad content.
const GOOD: usize = 1_000;
const BAD: usize = 2_000;

/// The kubeconfig of a service account of the namespace `ci` with one role of deploy/.
fn account(plane: &ControlPlane, name: &str, role: &str) -> PathBuf {
    plane.kubectl(&["create", "serviceaccount", name, "--namespace=ci"]);
    plane.kubectl(&[
        "create",
        "rolebinding",
        name,
        "--namespace=ci",
        &format!("--clusterrole={role}"),
        &format!("--serviceaccount=ci:{name}"),
    ]);
    let token = plane.kubectl(&["create", "token", name, "--namespace=ci"]);
    let admin = fs::read_to_string(&plane.kubeconfig).expect("a kubeconfig");
    let own = admin.replace("token: secret", &format!("token: {}", token.trim()));
    assert_ne!(own, admin);
    let path = plane.directory.path().join(name);
    fs::write(&path, own).expect("write");
    path
}

/// Runs a verb with a kubeconfig; returns whether it succeeded, and what it says.
fn run(kubeconfig: &Path, verb: &[&str]) -> (bool, String) {
    let answer = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(verb)
        .arg("--namespace=ci")
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .output()
        .expect("it runs");
    let said = [answer.stdout, answer.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (answer.status.success(), said)
}

fn roll_back(kubeconfig: &Path, name: &str, to: &str) -> (bool, String) {
    run(kubeconfig, &["rollback", name, "--to", to])
}

fn refused(kubeconfig: &Path, name: &str, to: &str, expected: &[&str]) {
    let (done, said) = roll_back(kubeconfig, name, to);
    assert!(!done, "{said}");
    for part in expected {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// The generations of a name on all nodes, the newest first.
fn generations(controller: &Process, name: &str) -> Vec<Value> {
    let log = ["log", "--cluster", name, "--namespace=ci"];
    let log = asked(controller, &log);
    log.as_array().expect("a list").clone()
}

fn id(generation: &Value) -> String {
    generation["id"].as_str().expect("text").to_owned()
}

/// How large the content is that a new pod on a node gets.
async fn size(plane: &ControlPlane, kubelet: &Kubelet, (node, pod): (&str, &str)) -> u64 {
    let volume = CACHE.replace('}', ", commit: never}");
    let uid = object(plane, "ci", pod, node, &volume);
    let pod = kubelet.pod_with_uid("ci", pod, uid);
    let target = publish(&pod, &READ).await;
    let file = fs::metadata(target.join("file")).expect("there is content");
    unpublish(&pod).await;
    file.len()
}

async fn orders(plane: &ControlPlane) -> Vec<Rollback> {
    let orders: Api<Rollback> = Api::namespaced(plane.client.clone(), "ci");
    orders
        .list(&ListParams::default())
        .await
        .expect("a list")
        .items
}

/// The roles and the admission policy of deploy/, and a cache policy that the audit needs.
async fn set_up(plane: &ControlPlane) {
    plane.kubectl(&["create", "namespace", "ci"]);
    for file in ["clears.yaml", "rollbacks.yaml"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("deploy/components/peers")
            .join(file);
        plane.kubectl(&["apply", "--filename", file.to_str().expect("text")]);
    }
    let policy = "{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: CachePolicy, \
                  metadata: {name: main, namespace: ci}, spec: {rules: [{names: [task-cache/*], \
                  commit: {serviceAccounts: [default]}}]}}";
    plane.apply("policy", policy);
    // The API server takes a while to follow a new admission policy.
    let forged = "{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: Rollback, \
                  metadata: {name: forged, namespace: ci}, \
                  spec: {key: go, to: aaaa, by: jane}}";
    let file = plane.directory.path().join("forged.yaml");
    fs::write(&file, forged).expect("write");
    let file = file.to_str().expect("text");
    eventually("no user gives an order in another's name", async || {
        let (done, said) = plane.try_kubectl(&["create", "--dry-run=server", "-f", file]);
        !done && said.contains("spec.by must be your name, 'admin'")
    })
    .await;
    // It could go before its week is over, or never.
    let owned = forged.replace("by: jane", "by: admin").replace(
        "namespace: ci}",
        "namespace: ci, ownerReferences: [{apiVersion: v1, kind: Pod, name: gone, uid: gone}]}",
    );
    let kept = forged.replace("by: jane", "by: admin").replace(
        "namespace: ci}",
        "namespace: ci, finalizers: [example.com/kept]}",
    );
    for text in [owned, kept] {
        fs::write(file, text).expect("write");
        let (done, said) = plane.try_kubectl(&["create", "--dry-run=server", "-f", file]);
        let expected = "a Rollback has no owners and no finalizers";
        assert!(!done && said.contains(expected), "{said}");
    }
}

#[tokio::test]
#[expect(
    clippy::too_many_lines,
    reason = "the generations of one name, in order"
)]
async fn a_user_puts_an_earlier_generation_back_on_all_nodes() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    set_up(&plane).await;
    let Pair {
        mut controller,
        pools,
        nodes: [one, mut two],
        kubelets,
    } = Pair::start(&plane, &lab).await;
    let releaser = account(&plane, "releaser", "baggageclaim-rollback");
    let builder = account(&plane, "builder", "baggageclaim-clear");

    // Node 1 has the good content, and node 2 commits the bad one.
    commit(&plane, &kubelets[0], ("node-1", "good"), ("go", GOOD)).await;
    has(&pools[0], GO, true).await;
    let good = id(&generations(&controller, GO)[0]);
    commit(&plane, &kubelets[1], ("node-2", "bad"), ("go", BAD)).await;
    has(&pools[1], GO, true).await;
    eventually("the bad one is the newest", async || {
        let newest = &generations(&controller, GO)[0];
        newest["node"] == "node-2" && newest["madeBy"]["pod"]["name"] == "bad"
    })
    .await;
    assert_eq!(
        size(&plane, &kubelets[1], ("node-2", "before")).await,
        BAD as u64
    );

    let no_right = [
        "you may not create rollbacks in namespace ci",
        "baggageclaim-rollback",
    ];
    refused(&builder, GO, &good, &no_right);
    let (done, said) = run(&releaser, &["clear", GO]);
    assert!(!done && said.contains("may not create caches"), "{said}");
    assert!(orders(&plane).await.is_empty());

    let (done, said) = roll_back(&releaser, GO, &good[..8]);
    let expected = format!("{GO} has the content of {good} again");
    assert!(
        done && said.contains(&expected),
        "{said}\n{}",
        controller.tail()
    );
    let newest = generations(&controller, GO)[0].clone();
    assert_eq!(
        (&newest["node"], &newest["current"]),
        (&"node-1".into(), &true.into())
    );
    assert_ne!(id(&newest), good);
    eventually("node 2 has dropped the bad content", async || {
        !told(&pools[1], "artifacts").to_string().contains(GO)
    })
    .await;
    for (node, kubelet) in ["node-1", "node-2"].into_iter().zip(&kubelets) {
        let pod = format!("after-{node}");
        assert_eq!(size(&plane, kubelet, (node, &pod)).await, GOOD as u64);
    }
    let parts = [
        "rolled back under a cache policy",
        "by=\"system:serviceaccount:ci:releaser\"",
        &format!("earlier.id={good}"),
    ];
    let is_it = |line: &str| parts.iter().all(|part| line.contains(part));
    assert!(one.log().lines().any(is_it), "{}", one.tail());

    // Once more: nothing changes.
    let (done, said) = roll_back(&releaser, GO, &good[..8]);
    assert!(done && said.contains("has this content already"), "{said}");
    assert_eq!(id(&generations(&controller, GO)[0]), id(&newest));

    refused(
        &releaser,
        GO,
        "ffffffff",
        &["no node has generation ffffffff", &id(&newest)],
    );
    refused(
        &releaser,
        "resource-cache/a",
        &good,
        &["keeps its first content"],
    );
    what_was_cleared_stays_cleared(&plane, &controller, &kubelets[0], (&releaser, &builder)).await;

    // Its only node is away. The order is carried out when it is back.
    commit(&plane, &kubelets[1], ("node-2", "lib"), ("lib", GOOD)).await;
    has(&pools[1], "task-cache/lib", true).await;
    let lib = id(&generations(&controller, "task-cache/lib")[0]);
    two.kill();
    eventually("the controller misses it", async || {
        generations_or_none(&controller, "task-cache/lib")
    })
    .await;
    let (done, said) = roll_back(&releaser, "task-cache/lib", &lib);
    assert!(
        done && said.contains("these do not answer: node-2"),
        "{said}"
    );
    // Also after a restart of the controller.
    controller.kill();
    controller.start();
    two.start();
    eventually("it is carried out", async || {
        let orders = orders(&plane).await;
        let order = orders.iter().find(|it| it.spec.key == "lib");
        order.expect("it is there").phase() == RollbackPhase::Done
    })
    .await;
    has(&pools[1], "task-cache/lib", true).await;
    for order in orders(&plane).await {
        assert_eq!(
            order.spec.by,
            "system:serviceaccount:ci:releaser",
            "{}",
            order.name_any()
        );
    }
}

/// Whether no connected node has a generation.
fn generations_or_none(controller: &Process, name: &str) -> bool {
    let answer = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(["log", "--cluster", name, "--namespace=ci", "--socket"])
        .arg(&controller.socket)
        .output()
        .expect("it runs");
    !answer.status.success()
}

/// A volume keeps a generation while its name is cleared: no rollback gives the name back.
async fn what_was_cleared_stays_cleared(
    plane: &ControlPlane,
    controller: &Process,
    kubelet: &Kubelet,
    (releaser, builder): (&Path, &Path),
) {
    let volume = CACHE.replace('}', ", commit: never}");
    let uid = object(plane, "ci", "long", "node-1", &volume);
    let long = kubelet.pod_with_uid("ci", "long", uid);
    publish(&long, &READ).await;
    let (done, said) = run(builder, &["clear", GO]);
    assert!(done, "{said}");
    eventually("the name is cleared", async || {
        let all = generations(controller, GO);
        all.iter().all(|it| it["current"] == false)
    })
    .await;
    let kept = generations(controller, GO);
    assert!(!kept.is_empty(), "the volume keeps it");
    refused(
        releaser,
        GO,
        &id(&kept[0]),
        &["node-1 did nothing", "was cleared"],
    );
    let after = generations(controller, GO);
    assert!(after.iter().all(|it| it["current"] == false), "{after:?}");
    unpublish(&long).await;
}
