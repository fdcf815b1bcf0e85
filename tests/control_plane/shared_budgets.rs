//! The limits of namespaces in the shared tier: a node writes a tier, the controller collects it,
//! and the status of each `CachePolicy` says what is there.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use baggageclaim::api::CachePolicy;
use baggageclaim::kubelet_double::Kubelet;
use baggageclaim::model::parse_bytes;
use kube::Api;
use serde_json::Value;

use crate::common::{Fs, require_lab};
use crate::driver::{controller_named, kubelet, node_with};
use crate::eventually;
use crate::peers::{hub_flag, is_told, nodes, object, publish, told, unpublish};
use crate::plane::{ControlPlane, free_port};

/// The namespaces, and the budget of each.
const BUDGETS: [(&str, &str); 3] = [
    ("counted", "{}"),
    ("recent", "{artifacts: 1}"),
    ("old", "{artifacts: 2, storage: 1Gi}"),
];
const KEYS: [&str; 3] = ["k0", "k1", "k2"];
const SIZE: usize = 100_000;

async fn policy(plane: &ControlPlane, namespace: &str) -> CachePolicy {
    let policies: Api<CachePolicy> = Api::namespaced(plane.client.clone(), namespace);
    policies.get("limits").await.expect("it is there")
}

/// A condition of a policy: its status and its message; `None`: it has no such condition.
async fn condition(plane: &ControlPlane, namespace: &str, of: &str) -> Option<(String, String)> {
    let status = policy(plane, namespace).await.status.unwrap_or_default();
    let found = status.conditions.into_iter().find(|one| one.of == of)?;
    Some((found.status, found.message))
}

/// What people see of a policy.
fn policy_text(plane: &ControlPlane, namespace: &str) -> String {
    let of = format!("--namespace={namespace}");
    plane.kubectl(&["get", "cachepolicy", "limits", &of, "--output=yaml"])
}

/// The names of a namespace in the tier, each with its state.
pub(crate) fn names(tier: &str, namespace: &str) -> Vec<(String, String)> {
    let listed = Command::new(env!("CARGO_BIN_EXE_baggageclaim"))
        .args(["shared", "ls", "--output=json", tier, "-n", namespace])
        .output()
        .expect("it runs");
    let listed: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    let text = |row: &Value, field: &str| row[field].as_str().expect(field).to_owned();
    let rows = listed.as_array().expect("a list").iter();
    let mut rows: Vec<_> = rows
        .map(|row| (text(row, "reference"), text(row, "state")))
        .collect();
    rows.sort();
    rows
}

/// Pods of each namespace commit caches, and the node uploads them.
async fn fill(plane: &ControlPlane, kubelet: &Kubelet, pool: &Path) {
    for (namespace, _) in BUDGETS {
        for key in KEYS {
            let volume = format!("{{type: task-cache, key: {key}, commit: always}}");
            let uid = object(plane, namespace, key, "node-1", &volume);
            let pod = kubelet.pod_with_uid(namespace, key, uid);
            let attributes = [("type", "task-cache"), ("key", key), ("commit", "always")];
            let target = publish(&pod, &attributes).await;
            fs::write(target.join("file"), vec![7; SIZE]).expect("write");
            unpublish(&pod).await;
        }
    }
    eventually("all is in the tier", async || {
        let listed = told(pool, "artifacts");
        let listed = listed.as_array().expect("a list");
        listed.len() == BUDGETS.len() * KEYS.len()
            && listed.iter().all(|one| one["shared"] == "yes")
    })
    .await;
}

/// Has the tier say that a namespace's names were written hours ago, the last key first. Pods have
/// used them in the other order.
fn age(tier: &Path, namespace: &str) {
    let names = tier.join(format!("v1/{namespace}/names/task-cache"));
    for (key, hours) in KEYS.into_iter().zip([2, 3, 4]) {
        let record = File::options().append(true).open(names.join(key));
        let then = SystemTime::now() - Duration::from_hours(hours);
        let aged = record.and_then(|record| record.set_modified(then));
        aged.expect("utimes");
    }
}

#[tokio::test]
async fn the_controller_with_a_tier_keeps_namespaces_within_their_shared_budgets() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    nodes(&plane, 1);
    for (namespace, budget) in BUDGETS {
        plane.kubectl(&["create", "namespace", namespace]);
        let text = format!(
            "{{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: CachePolicy, \
             metadata: {{name: limits, namespace: {namespace}}}, \
             spec: {{sharedBudget: {budget}}}}}"
        );
        plane.apply(&format!("limits-of-{namespace}"), &text);
    }
    let (tier, pool) = (lab.dir("tier"), lab.dir("pool"));
    let url = format!("--shared=file://{}", tier.display());
    let listen = format!("--peer-listen=127.0.0.1:{}", free_port());
    let node = node_with(&plane, "node-1", &pool, &[&url, &listen]);
    let double = kubelet(&plane, "node-1", &node).await;
    // Without the tier the budgets have no effect, and each policy says so.
    let hub = hub_flag(&plane);
    let flags = [&*hub, "--usage-interval=1s"];
    let without = controller_named(&plane, "without", &flags);
    is_told(&pool, true).await;
    fill(&plane, &double, &pool).await;
    age(&tier, "old");
    for (namespace, _) in BUDGETS {
        eventually("the policy is not valid", async || {
            let valid = condition(&plane, namespace, "Valid").await;
            valid.is_some_and(|(status, why)| status == "False" && why.contains("--shared"))
        })
        .await;
        let status = policy(&plane, namespace).await.status;
        assert_eq!(status.and_then(|it| it.shared_used), None);
    }
    drop(without);

    let with = controller_named(&plane, "with", &[&flags[..], &[&*url]].concat());
    for (namespace, left, over_budget) in [
        ("counted", 3, None),
        ("recent", 3, Some("True")),
        ("old", 2, Some("False")),
    ] {
        let says = async {
            let used = async || policy(&plane, namespace).await.status?.shared_used;
            while used().await.is_none_or(|used| used.artifacts != left) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let says = tokio::time::timeout(Duration::from_secs(60), says).await;
        let why = || policy_text(&plane, namespace) + &with.tail();
        assert!(says.is_ok(), "{namespace}: {}", why());
        let valid = condition(&plane, namespace, "Valid").await;
        assert_eq!(valid.expect("it is judged").0, "True", "{namespace}");
        let told = condition(&plane, namespace, "SharedOverBudget").await;
        let told = told.as_ref().map(|(status, _)| status.as_str());
        assert_eq!(told, over_budget, "{namespace}: {}", with.tail());
    }
    // The name that was used first went, although it was written last, and nothing of another
    // namespace.
    for (namespace, _) in BUDGETS {
        let expected = KEYS.map(|key| {
            let is_gone = namespace == "old" && key == "k0";
            let state = if is_gone { "evicted" } else { "content" };
            (format!("task-cache/{key}"), state.to_owned())
        });
        assert_eq!(names(&url, namespace), expected, "{namespace}");
    }
    // Nodes keep theirs.
    let artifacts = told(&pool, "artifacts");
    let artifacts = artifacts.as_array().expect("a list");
    assert_eq!(artifacts.len(), BUDGETS.len() * KEYS.len());
    shows(&plane).await;
}

/// People see it in a column.
async fn shows(plane: &ControlPlane) {
    let table = plane.kubectl(&["get", "cachepolicies", "--all-namespaces"]);
    let mut lines = table.lines();
    let header = lines.next().expect("a header");
    let at = header.find("SHARED").expect(header);
    for line in lines {
        let namespace = line.split_whitespace().next().expect("a namespace");
        let used = policy(plane, namespace).await.status.unwrap_or_default();
        let used = used.shared_used.expect("it is known");
        let shown = line[at..].split_whitespace().next();
        assert_eq!(shown, Some(&*used.storage), "{table}");
        let bytes = parse_bytes(&used.storage).expect("a quantity");
        assert!(bytes > 0, "{table}");
    }
}
