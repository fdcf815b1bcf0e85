//! The write policy of `deploy/components`, as `examples/pull-requests` installs it: what it
//! refuses and what it allows. The case uses the example's namespace.

use std::fs;
use std::process::Output;

use serde_json::Value;

use crate::cluster::{Cluster, eventually, feed, succeed};
use crate::env::Env;

const EXAMPLE: &str = "examples/pull-requests";
/// The namespace in the example.
const THEIRS: &str = "ci-builds";

/// The example's policy, in force for the case's namespace. Without the namespace's label it looks
/// at none, but it would stay.
struct Policy<'a> {
    cluster: &'a Cluster,
    objects: String,
}

impl<'a> Policy<'a> {
    fn of(env: &'a Env) -> Self {
        let cluster = env.cluster;
        let rendered = succeed(&mut cluster.kubectl(&["kustomize", &example("")]));
        let rendered = rendered.replace(THEIRS, env.namespace());
        let applied = feed(
            &mut cluster.kubectl(&["apply", "--validate=strict", "--filename=-"]),
            &rendered,
        );
        let complaint = String::from_utf8_lossy(&applied.stderr);
        assert!(applied.status.success(), "{complaint}\n{rendered}");
        // The namespace belongs to the case, and goes with it.
        let is_namespace = |object: &&str| object.contains("\nkind: Namespace\n");
        let objects: Vec<&str> = rendered
            .split("---\n")
            .filter(|object| !is_namespace(object))
            .collect();
        Self {
            cluster,
            objects: objects.join("---\n"),
        }
    }
}

impl Drop for Policy<'_> {
    fn drop(&mut self) {
        let delete = ["delete", "--ignore-not-found", "--wait", "--filename=-"];
        let deleted = feed(&mut self.cluster.kubectl(&delete), &self.objects);
        let complaint = String::from_utf8_lossy(&deleted.stderr);
        if !std::thread::panicking() {
            assert!(deleted.status.success(), "{complaint}");
        }
    }
}

fn example(file: &str) -> String {
    format!("{}/{EXAMPLE}/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn text(file: &str) -> String {
    let path = example(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A kubectl command, as one of the case's service accounts or, without one, as the
/// administrator; with something to read.
fn command(env: &Env, account: &str, arguments: &[&str], input: &str) -> Output {
    let within = format!("--namespace={}", env.namespace());
    let mut command = env.cluster.kubectl(&[&within]);
    if !account.is_empty() {
        let namespace = env.namespace();
        command.arg(format!("--as=system:serviceaccount:{namespace}:{account}"));
    }
    feed(command.args(arguments), input)
}

/// A pod that is not made, whatever would become of it: what the API server says to that, if it
/// refuses.
fn verdict(env: &Env, account: &str, pod: &str) -> Option<String> {
    let create = ["create", "--dry-run=server", "--filename=-"];
    let output = command(env, account, &create, pod);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(said)
}

/// That a command is refused by a policy, with these words.
fn refused(output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "it is allowed: {words:?}");
    assert!(
        said.contains("ValidatingAdmissionPolicy") && words.iter().all(|word| said.contains(word)),
        "{words:?}: {said}"
    );
}

pub(super) fn write_policy(env: &Env) {
    // It is not turned on here.
    let other = env.neighbour();
    let policy = Policy::of(env);
    // The API server takes a moment to hear of it.
    let [pull_request, main] = ["pods/pull-request.yaml", "pods/main.yaml"].map(text);
    let stolen = pull_request.replace("key: pr/1234/compile", "key: main/compile");
    eventually("the policy is in force", || {
        let said = verdict(env, "", &stolen)?;
        said.contains("task-cache/main/compile").then_some(())
    });
    // So that only the policy is in the way.
    for account in ["ci-system", "main", "pull-request", "default"] {
        let name = format!("edit-{account}");
        let account = format!("--serviceaccount={}:{account}", env.namespace());
        env.kubectl(&[
            "create",
            "rolebinding",
            &name,
            "--clusterrole=edit",
            &account,
        ]);
    }

    writers(env, &pull_request, &main);
    outcomes(env, &main);

    // A cluster that does not turn it on works as before.
    other.make("made");
    drop(policy);
}

/// Which account may write what.
fn writers(env: &Env, pull_request: &str, main: &str) {
    let account = format!("{}.pull-request", env.namespace());
    let changed = |from: &str, to: &str| {
        assert!(pull_request.contains(from), "{from}");
        pull_request.replace(from, to)
    };
    let cache = "key: pr/1234/compile";
    // A name that is not its own; a value of commit; the first writer's privilege; and what it does
    // not know.
    for (from, to, why) in [
        (
            cache,
            "key: main/compile",
            "task-cache/main/compile with commit on-success",
        ),
        (cache, "key: pr", "task-cache/pr with commit on-success"),
        (
            cache,
            "commit: always\n        key: pr/1",
            "task-cache/pr/1 with commit always",
        ),
        (
            "commit: never",
            "ttl: 1h",
            "resource-cache/https://git.example.org",
        ),
        (
            "name: pr-1234-binary",
            "name: release",
            "artifact/release with commit on-success",
        ),
        (
            "type: task-cache",
            "type: some-cache",
            "some-cache/pr/1234/compile",
        ),
    ] {
        let pod = changed(from, to);
        let said = verdict(env, "", &pod).unwrap_or_else(|| panic!("{to} is allowed"));
        assert!(
            said.contains(why) && said.contains(&account),
            "{to}: {said}"
        );
        assert!(said.contains("baggageclaim-cache-writers"), "{said}");
    }
    others(env, pull_request, main);
    what_is_allowed(env, pull_request, main);
}

/// The rights of accounts that are not the pod's, or that have no rule.
fn others(env: &Env, pull_request: &str, main: &str) {
    let account = format!("{}.pull-request", env.namespace());
    // An account of which nothing is said may write nothing, and read all.
    let other = pull_request.replace(
        "serviceAccountName: pull-request",
        "serviceAccountName: default",
    );
    let said = verdict(env, "", &other).expect("default is allowed");
    assert!(said.contains("artifact/pr-1234-binary"), "{said}");
    let reads = Env::filled(
        "reader.yaml",
        &[("NAME", "reads"), ("FROM", "task-cache/main/compile")],
    );
    assert_eq!(verdict(env, "", &reads), None);
    let read_only = main.replace(
        "      driver: baggageclaim.csi.concourse-ci.org\n",
        "      driver: baggageclaim.csi.concourse-ci.org\n      readOnly: true\n",
    );
    let read_only = read_only.replace("serviceAccountName: main", "serviceAccountName: default");
    assert_eq!(verdict(env, "", &read_only), None);
    // An account of the namespace cannot lend its pods another's rights; the one that may write all
    // can, and so can an administrator.
    let said = verdict(env, "pull-request", main).expect("it runs its pods as main");
    assert!(
        said.contains("task-cache/main/compile") && said.contains(&account),
        "{said}"
    );
    for trusted in ["ci-system", "main", ""] {
        assert_eq!(verdict(env, trusted, main), None, "{trusted}");
    }
}

/// Allowed actions work as without a policy.
fn what_is_allowed(env: &Env, pull_request: &str, main: &str) {
    env.apply_text(main);
    env.succeeded("main");
    env.sealed("task-cache/main/compile");
    let made = command(
        env,
        "pull-request",
        &["create", "--filename=-"],
        pull_request,
    );
    let complaint = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{complaint}");
    env.succeeded("pr-1234");
    assert_eq!(env.logs("pr-1234"), "main\n");
    env.settled();
    assert_eq!(
        env.artifacts(),
        [
            "artifact/pr-1234-binary",
            "task-cache/main/compile",
            "task-cache/pr/1234/compile"
        ]
    );
    let theirs = "main\npull request 1234\n";
    env.hold(&[
        ("task-cache/main/compile", "runs", "main\n"),
        ("task-cache/pr/1234/compile", "runs", theirs),
    ]);
}

/// Which account may tell an outcome, in each of the ways in which an annotation can come to a pod.
fn outcomes(env: &Env, main: &str) {
    let outcome = "baggageclaim.concourse-ci.org/outcome=succeeded";
    let why = [
        "may not set, change or remove the annotation",
        "baggageclaim.concourse-ci.org/outcome",
    ];
    // A worker of main's, in which steps are exec'ed.
    let worker = Env::filled("worker.yaml", &[("NAME", "worker")]);
    let worker = worker.replace(
        "spec:\n  restart",
        "spec:\n  serviceAccountName: main\n  restart",
    );
    env.apply_text(&worker);
    env.ready("worker");
    env.exec("worker", "echo kept > /out/file");

    let annotate = ["annotate", "--overwrite", "pod", "worker", outcome];
    refused(&command(env, "main", &annotate, ""), &why);
    let namespace = env.namespace();
    // With all rights to pods but that one: by way of the status, and of the binding.
    let role = r#"{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "pods"}, "rules":
        [{"apiGroups": [""], "resources": ["pods", "pods/status", "pods/binding", "bindings"], "verbs": ["*"]}]}"#;
    let made = command(env, "", &["create", "--filename=-"], role);
    assert!(made.status.success(), "{made:?}");
    let account = format!("--serviceaccount={namespace}:main");
    env.kubectl(&["create", "rolebinding", "pods", "--role=pods", &account]);
    let patch =
        r#"{"metadata": {"annotations": {"baggageclaim.concourse-ci.org/outcome": "succeeded"}}}"#;
    let patch = [
        "patch",
        "pod",
        "worker",
        "--subresource=status",
        "--type=merge",
        "--patch",
        patch,
    ];
    eventually("the role counts", || {
        let said = String::from_utf8_lossy(&command(env, "main", &patch, "").stderr).into_owned();
        (!said.contains("cannot patch resource")).then_some(())
    });
    refused(&command(env, "main", &patch, ""), &why);
    let waiting = main.replace(
        "name: main\nspec:",
        "name: waiting\nspec:\n  schedulerName: nobody",
    );
    env.apply_text(&waiting);
    let binding = |annotations: &str| {
        format!(
            r#"{{"apiVersion": "v1", "kind": "Binding", "metadata": {{"name": "waiting", "annotations": {annotations}}},
                "target": {{"apiVersion": "v1", "kind": "Node", "name": "nowhere"}}}}"#
        )
    };
    let told = r#"{"baggageclaim.concourse-ci.org/outcome-container": "step"}"#;
    for resource in ["pods/waiting/binding", "bindings"] {
        let place = format!("/api/v1/namespaces/{namespace}/{resource}");
        let bind = ["create", "--raw", &place, "--filename=-"];
        refused(&command(env, "main", &bind, &binding(told)), &why);
    }
    // And from the first moment.
    let born = main.replace(
        "name: main\nspec:",
        &format!("name: born\n  annotations: {told}\nspec:"),
    );
    assert!(born.contains(told), "{born}");
    let said = verdict(env, "main", &born).expect("it is allowed");
    assert!(why.iter().all(|why| said.contains(why)), "{said}");
    let annotations = &env.get("pod/worker")["metadata"]["annotations"];
    let told = annotations.as_object().into_iter().flatten();
    let told = told.filter(|(name, _)| name.starts_with("baggageclaim"));
    assert_eq!(told.collect::<Vec<(&String, &Value)>>(), []);
    // Anything else of the pod is its own affair.
    let label = command(env, "main", &["label", "pod", "worker", "a=b"], "");
    assert!(label.status.success(), "{label:?}");

    told_by_who_may(env, &annotate, &why);
}

/// An account with the right reports it, and it counts. An account without the right cannot take it
/// back.
fn told_by_who_may(env: &Env, annotate: &[&str], why: &[&str]) {
    let by_ci = command(env, "ci-system", annotate, "");
    assert!(by_ci.status.success(), "{by_ci:?}");
    let remove = [
        "annotate",
        "pod",
        "worker",
        "baggageclaim.concourse-ci.org/outcome-",
    ];
    refused(&command(env, "main", &remove, ""), why);
    env.delete("pod/worker");
    env.event("worker", &["artifact/worker is committed"]);
    env.settled();
    env.hold(&[("artifact/worker", "file", "kept\n")]);
}
