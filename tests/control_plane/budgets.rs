//! The limits of a namespace over two nodes, by a `CachePolicy`; and a namespace that is deleted
//! while no controller runs.

use std::fs;
use std::path::{Path, PathBuf};

use baggageclaim::api::CachePolicy;
use baggageclaim::kubelet_double::Kubelet;
use kube::Api;
use rustix::process::Signal;

use crate::clears::{fences, has, the_namespace_goes};
use crate::common::{Fs, require_lab};
use crate::driver::{Process, controller_with, kubelet};
use crate::eventually;
use crate::peers::{
    commit, hub_flag, is_told, knows, nodes, object, peer, publish, told, unpublish,
};
use crate::plane::ControlPlane;

const SIZE: usize = 256 << 10;
const MADE: usize = 12;

/// The caches that a node has.
fn caches(pool: &Path) -> Vec<String> {
    let listed = told(pool, "artifacts");
    let listed = listed.as_array().expect("a list").iter();
    let named = listed.filter_map(|one| one["reference"].as_str().map(str::to_owned));
    named.collect()
}

async fn policy(plane: &ControlPlane, name: &str) -> CachePolicy {
    let policies: Api<CachePolicy> = Api::namespaced(plane.client.clone(), "ci");
    policies.get(name).await.expect("it is there")
}

/// Waits for a condition of a policy.
async fn says(plane: &ControlPlane, name: &str, of: &str, status: &str) {
    eventually("the policy has the condition", async || {
        let conditions = policy(plane, name)
            .await
            .status
            .unwrap_or_default()
            .conditions;
        let mut conditions = conditions.iter();
        conditions.any(|one| one.of == of && one.status == status)
    })
    .await;
}

fn limit(plane: &ControlPlane, name: &str, spec: &str) {
    let text = format!(
        "{{apiVersion: baggageclaim.concourse-ci.org/v1alpha1, kind: CachePolicy, \
         metadata: {{name: {name}, namespace: ci}}, spec: {spec}}}"
    );
    plane.apply(name, &text);
}

#[tokio::test]
async fn a_namespace_stays_within_its_budget_and_goes_although_no_controller_runs() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    nodes(&plane, 2);
    let mut controller = controller_with(&plane, &[&hub_flag(&plane), "--usage-interval=1s"]);
    let pools = [lab.dir("one"), lab.dir("two")];
    let one = peer(&plane, "node-1", &pools[0]);
    let two = peer(&plane, "node-2", &pools[1]);
    let kubelets = [
        kubelet(&plane, "node-1", &one).await,
        kubelet(&plane, "node-2", &two).await,
    ];
    for pool in &pools {
        knows(pool, 1).await;
        is_told(pool, true).await;
    }
    for number in 0..MADE {
        let node = format!("node-{}", number % 2 + 1);
        let key = format!("k{number}");
        commit(&plane, &kubelets[number % 2], (&node, &key), (&key, SIZE)).await;
    }
    // The oldest cache of all is in use.
    let volume = "{type: input, from: task-cache/k0}";
    let uid = object(&plane, "ci", "user", "node-1", volume);
    let user = kubelets[0].pod_with_uid("ci", "user", uid);
    let read = [("type", "input"), ("from", "task-cache/k0")];
    let target = publish(&user, &read).await;

    // A policy without a limit tells what is used, and one with a wrong value does no harm.
    limit(
        &plane,
        "used",
        "{ttl: {caches: 1d, taskCaches: 2d, resourceCaches: 3d, outputs: 0s}}",
    );
    says(&plane, "used", "Valid", "False").await;
    let whole = (MADE * SIZE / 1024).to_string();
    eventually("all is counted", async || {
        let status = policy(&plane, "used").await.status;
        status.and_then(|it| it.used).is_some_and(|all| {
            let bytes = baggageclaim::model::parse_bytes(&all.storage);
            usize::try_from(all.artifacts) == Ok(MADE)
                && bytes >= Some((MADE * SIZE) as u64 * 9 / 10)
        })
    })
    .await;

    // The budget is exceeded by half: two thirds of it all are allowed.
    let budget = format!("{}Ki", MADE * SIZE / 1024 * 2 / 3);
    limit(
        &plane,
        "large",
        &format!("{{budget: {{storage: {whole}Mi}}}}"),
    );
    limit(
        &plane,
        "small",
        &format!("{{budget: {{storage: {budget}}}}}"),
    );
    let allowed = MADE * 2 / 3;
    eventually("it is within its budget", async || {
        pools.iter().map(|pool| caches(pool).len()).sum::<usize>() < allowed
    })
    .await;
    says(&plane, "small", "OverBudget", "False").await;
    let left: Vec<String> = pools.iter().flat_map(|pool| caches(pool)).collect();
    let is_there = |number: &usize| left.contains(&format!("task-cache/k{number}"));
    let gone: Vec<usize> = (0..MADE).filter(|number| !is_there(number)).collect();
    let expected: Vec<usize> = (1..=gone.len()).collect();
    assert_eq!(gone, expected, "the least recently used, and none in use");
    assert!(gone.len() <= MADE / 3 + 2, "{gone:?}");
    assert!(target.join("file").exists());

    // Content in use alone exceeds a budget.
    limit(&plane, "small", "{budget: {storage: 1Ki}}");
    says(&plane, "small", "OverBudget", "True").await;
    eventually("only what is in use is left", async || {
        caches(&pools[0]) == ["task-cache/k0"] && caches(&pools[1]).is_empty()
    })
    .await;
    unpublish(&user).await;
    says(&plane, "small", "OverBudget", "False").await;
    goes_on_unanswered(&plane, &one, &kubelets[0], &pools[0]).await;
    plane.kubectl(&["delete", "cachepolicies", "--all", "--namespace=ci"]);
    goes_unseen(&plane, &mut controller, &kubelets[1], &pools).await;
}

/// How long a namespace may be above its budget, with the intervals of deploy/.
const TO_SHRINK: std::time::Duration = std::time::Duration::from_mins(2);

#[tokio::test]
async fn a_namespace_is_back_within_its_budget_in_two_minutes_with_the_usual_intervals() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    nodes(&plane, 2);
    let _controller = controller_with(&plane, &[&hub_flag(&plane)]);
    let pools = [lab.dir("one"), lab.dir("two")];
    let processes = [
        peer(&plane, "node-1", &pools[0]),
        peer(&plane, "node-2", &pools[1]),
    ];
    let kubelets = [
        kubelet(&plane, "node-1", &processes[0]).await,
        kubelet(&plane, "node-2", &processes[1]).await,
    ];
    for pool in &pools {
        knows(pool, 1).await;
        is_told(pool, true).await;
    }
    let budget = format!("{}Ki", MADE * SIZE / 1024 * 2 / 3);
    limit(
        &plane,
        "limits",
        &format!("{{budget: {{storage: {budget}}}}}"),
    );
    // From here on the budget is exceeded, by half in the end. No node has told its use yet.
    let began = std::time::Instant::now();
    for (number, (kubelet, pool)) in (1..).zip(kubelets.iter().zip(&pools)) {
        let name = format!("node-{number}");
        for place in 0..MADE / 2 {
            let key = format!("k{number}-{place}");
            commit(&plane, kubelet, (&name, &key), (&key, SIZE)).await;
        }
        has(
            pool,
            &format!("task-cache/k{number}-{}", MADE / 2 - 1),
            true,
        )
        .await;
    }
    let all = || pools.iter().map(|pool| caches(pool).len()).sum::<usize>();
    let within = async {
        while all() > MADE * 2 / 3 {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let left = TO_SHRINK.saturating_sub(began.elapsed());
    let within = tokio::time::timeout(left, within).await;
    assert!(within.is_ok(), "{} of {MADE} are left", all());
    assert!(all() >= MADE / 2, "not much more than needed");
}

/// The budget holds while the API server answers nothing: no write of a status is waited for long.
/// The budget is almost nothing.
async fn goes_on_unanswered(plane: &ControlPlane, node: &Process, kubelet: &Kubelet, pool: &Path) {
    // The log of the node then tells each commit, however soon the content is evicted.
    limit(plane, "audited", "{rules: [{names: [task-cache/x]}]}");
    eventually("the node has the policy", async || {
        let kept = fs::read_to_string(pool.join("policies.json"));
        kept.is_ok_and(|kept| kept.contains("task-cache/x"))
    })
    .await;
    let attributes = [("type", "task-cache"), ("key", "x"), ("commit", "always")];
    let volume = "{type: task-cache, key: x, commit: always}";
    let names = ["unanswered-1", "unanswered-2", "unanswered-3"];
    let uids = names.map(|name| object(plane, "ci", name, "node-1", volume));
    plane.signal_server(Signal::STOP);
    for (number, (name, uid)) in names.into_iter().zip(uids).enumerate() {
        let pod = kubelet.pod_with_uid("ci", name, uid);
        let target = publish(&pod, &attributes).await;
        fs::write(target.join("file"), vec![7; SIZE]).expect("write");
        unpublish(&pod).await;
        eventually("it is committed", async || {
            let log = node.log();
            log.matches("committed under a cache policy").count() == number + 1
        })
        .await;
        has(pool, "task-cache/x", false).await;
    }
    plane.signal_server(Signal::CONT);
}

/// The namespace goes while no controller sees it.
async fn goes_unseen(
    plane: &ControlPlane,
    controller: &mut Process,
    kubelet: &Kubelet,
    pools: &[PathBuf; 2],
) {
    commit(plane, kubelet, ("node-2", "last"), ("last", SIZE)).await;
    has(&pools[1], "task-cache/last", true).await;
    controller.kill();
    the_namespace_goes(plane, "ci");
    controller.start();
    for pool in pools {
        is_told(pool, true).await;
    }
    let cleared = async {
        while !caches(&pools[1]).is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    // The controller looks a minute after its start.
    let cleared = tokio::time::timeout(std::time::Duration::from_secs(150), cleared).await;
    assert!(cleared.is_ok(), "{}", controller.tail());
    let made = fences(plane).await;
    assert_eq!((made.len(), &*made[0].spec.namespace), (1, "ci"));
}
