//! A cache policy on three nodes: the accounts that it lists commit, others run and do not, and the
//! namespaces that it lists read. The log of a name tells who made its content, and a rollback
//! brings earlier content back, on one node and on all.

use std::fs;

use serde_json::Value;

use super::peers::{Installed, step_with};
use crate::cluster::{Cluster, eventually};
use crate::env::Env;

const MAIN: &str = "type: task-cache, key: main-go";
const PRIVATE: &str = "type: task-cache, key: private";

pub(in crate::cases) fn policies(env: &Env) {
    let cluster = env.cluster;
    let [one, two, three] = [1, 2, 3].map(|number| cluster.node(number));
    let _installed = Installed::new(cluster);
    let neighbour = env.neighbour();
    env.kubectl(&["create", "serviceaccount", "release"]);
    env.apply_text(&format!(
        "apiVersion: baggageclaim.concourse-ci.org/v1alpha1
kind: CachePolicy
metadata: {{name: main}}
spec:
  rules:
  - names: [task-cache/main-*]
    commit: {{serviceAccounts: [release]}}
    read: {{namespaces: [{}]}}
  - names: [task-cache/private]
    commit: {{serviceAccounts: [release]}}
",
        neighbour.namespace()
    ));
    for node in cluster.nodes() {
        eventually("each node has the policy", || {
            let kept = node.on_node("/var/lib/baggageclaim/policies.json");
            let kept = fs::read_to_string(kept).unwrap_or_default();
            kept.contains(env.namespace()).then_some(())
        });
    }

    // The release commits.
    let write = "[ ! -e /cache/text ]; echo first > /cache/text";
    for (name, cache) in [("first", MAIN), ("private", PRIVATE)] {
        env.apply_text(&released(name, &one, cache, write));
        env.succeeded(name);
    }
    let first = durable(env, &one, "task-cache/main-go");
    durable(env, &one, "task-cache/private");

    // A pull request starts from that on another node, and is not committed.
    let taint = "grep first /cache/text; echo bad > /cache/text";
    env.apply_text(&step_with("pull-request", &two, "cache", MAIN, taint));
    env.succeeded("pull-request");
    let why = ["main-go is not committed", "service account default"];
    env.event("pull-request", &why);

    // Another namespace reads what a rule opens for it, and commits its own.
    let of = |key: &str, restore: &str| {
        let from = env.namespace();
        format!("type: task-cache, key: {key}, restoreKeys: {restore}, fromNamespace: {from}")
    };
    for (name, restore, command) in [
        ("reads", "main-*", "grep first /cache/text"),
        ("reads-not", "private", "[ ! -e /cache/text ]"),
    ] {
        let step = step_with(name, &three, "cache", &of(name, restore), command);
        neighbour.apply_text(&step);
        neighbour.succeeded(name);
    }
    durable(&neighbour, &three, "task-cache/reads");

    // The second release starts from the first one: the pull request has changed nothing. An
    // earlier artifact is there while a volume is a fork of it.
    let holds = format!("{MAIN}, commit: never");
    let hold = "grep first /cache/text; exec sleep 1000000";
    env.apply_text(&step_with("holds", &one, "cache", &holds, hold));
    env.ready("holds");
    let write = "grep first /cache/text; echo second > /cache/text";
    env.apply_text(&released("second", &one, MAIN, write));
    env.succeeded("second");
    eventually("the second is durable", || {
        (durable(env, &one, "task-cache/main-go") != first).then_some(())
    });
    told_and_taken_back(env, &one, &first);
    taken_back_on_all_nodes(env, &one, &two);
    for pod in ["first", "second"] {
        let line = ["committed under a cache policy", "release", pod];
        audited(&one, env.namespace(), &line);
    }
}

/// The log has both, with their makers. The first becomes the newest again.
fn told_and_taken_back(env: &Env, node: &Cluster, first: &str) {
    let generations = || {
        let of = ["log", "task-cache/main-go", "-n", env.namespace()];
        let listed = node.driver_list(&of);
        for one in &listed {
            let maker = &one["madeBy"];
            assert_eq!(maker["serviceAccount"], "release", "{one}");
            assert_eq!(maker["node"], node.name(), "{one}");
        }
        let pods = listed.iter().map(|one| {
            let pod = one["madeBy"]["pod"]["name"].as_str().expect("a pod");
            (pod.to_owned(), one["current"] == true)
        });
        pods.collect::<Vec<_>>()
    };
    let row = |pod: &str, is_current: bool| (pod.to_owned(), is_current);
    assert_eq!(generations(), [row("second", true), row("first", false)]);
    let back = [
        "rollback",
        "task-cache/main-go",
        "--to",
        first,
        "-n",
        env.namespace(),
    ];
    let done = node.driver(&back);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{said}");
    let line = [
        "rolled back under a cache policy",
        "task-cache/main-go",
        first,
    ];
    audited(node, env.namespace(), &line);
    let newest = generations();
    assert_eq!(newest[0], row("first", true), "{newest:?}");
    let read = "grep first /cache/text";
    env.apply_text(&released("third", node, MAIN, read));
    env.succeeded("third");
}

/// A release on another node commits bad content. A `Rollback` makes the content of the first node
/// the newest again, also for that node.
fn taken_back_on_all_nodes(env: &Env, one: &Cluster, two: &Cluster) {
    eventually("the last release has ended", || {
        let volumes = one.driver_list(&["volumes", "-n", env.namespace()]);
        let mut pods = volumes.iter().map(|row| &row["pod"]["name"]);
        (!pods.any(|pod| pod == "third")).then_some(())
    });
    let good = durable(env, one, "task-cache/main-go");
    let of_pod = |node: &Cluster| {
        let rows = node.driver_list(&["artifacts", "-n", env.namespace()]);
        let mut rows = rows.into_iter();
        let row = rows.find(|row| row["reference"] == "task-cache/main-go");
        row.map(|row| row["madeBy"]["pod"]["name"].clone())
    };
    env.apply_text(&released("spoils", two, MAIN, "echo spoiled > /cache/text"));
    env.succeeded("spoils");
    eventually("it is committed", || {
        (of_pod(two) == Some("spoils".into())).then_some(())
    });
    let whoami = ["auth", "whoami", "-o=jsonpath={.status.userInfo.username}"];
    let user = env.kubectl(&whoami);
    env.apply_text(&format!(
        "apiVersion: baggageclaim.concourse-ci.org/v1alpha1
kind: Rollback
metadata: {{name: back}}
spec: {{key: main-go, to: {good}, by: {user}}}
"
    ));
    eventually("it is rolled back", || {
        let status = env.get("rollback/back")["status"].clone();
        assert_ne!(status["phase"], "Failed", "{status}");
        (status["phase"] == "Done").then_some(())
    });
    eventually("the other node has dropped the bad content", || {
        (of_pod(two) != Some("spoils".into())).then_some(())
    });
    let line = ["rolled back under a cache policy", &good, &user];
    audited(one, env.namespace(), &line);
    env.apply_text(&released("fourth", two, MAIN, "grep first /cache/text"));
    env.succeeded("fourth");
}

/// A line in the log of the node's driver has all this and the namespace.
fn audited(node: &Cluster, namespace: &str, parts: &[&str]) {
    let selector = format!("--field-selector=spec.nodeName={}", node.name());
    let driver = "--selector=app.kubernetes.io/component=node";
    let within = "--namespace=baggageclaim";
    let found = node.get(&["pods", within, driver, &selector]);
    let pod = found["items"][0]["metadata"]["name"].as_str();
    let log = node
        .kubectl(&["logs", within, pod.expect("a driver")])
        .output();
    let log = log.expect("kubectl starts");
    let log = String::from_utf8_lossy(&log.stdout).into_owned();
    let has_all =
        |line: &str| line.contains(namespace) && parts.iter().all(|part| line.contains(part));
    assert!(log.lines().any(has_all), "{parts:?}: {log}");
}

/// A pod of the release with a cache at `/cache`, on a node.
fn released(name: &str, node: &Cluster, cache: &str, command: &str) -> String {
    let step = step_with(name, node, "cache", cache, command);
    let with_account = step.replace("spec:\n", "spec:\n  serviceAccountName: release\n");
    assert_ne!(step, with_account);
    with_account
}

/// Waits until a name of the namespace shows content on a node that is durable; its id.
fn durable(env: &Env, node: &Cluster, reference: &str) -> String {
    eventually(&format!("{reference} is durable"), || {
        let rows = node.driver_list(&["artifacts", "-n", env.namespace()]);
        let is_it = |row: &&Value| row["reference"] == reference && row["durable"] == true;
        let found = rows.iter().find(is_it)?;
        Some(found["id"].as_str().expect("an id").to_owned())
    })
}
