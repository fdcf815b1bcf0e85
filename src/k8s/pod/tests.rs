//! Tests of the decision on a pod's outcome, with pods as the API shows them over time.
//! They use no API server and no clock.

use serde_json::{Value, json};

use super::*;

/// A pod with a container `main`, a sidecar `proxy` and an init container `fetch`.
fn pod(policy: &str, change: impl FnOnce(&mut Value)) -> Pod {
    let mut pod = json!({
        "metadata": {"name": "p", "annotations": {"somebody.else/outcome": "succeeded"}},
        "spec": {
            "restartPolicy": policy,
            "containers": [{"name": "main"}, {"name": "other"}],
            "initContainers": [{"name": "fetch"}, {"name": "proxy", "restartPolicy": "Always"}],
        },
        "status": {"phase": "Running"},
    });
    change(&mut pod);
    serde_json::from_value(pod).expect("a pod")
}

fn ended(name: &str, code: i32, second: u32) -> Value {
    json!({"name": name, "state": {"terminated": {"exitCode": code, "reason": if code == 0 { "Completed" } else { "Error" },
        "finishedAt": format!("2026-01-01T00:00:{second:02}Z")}}})
}

fn crashed(name: &str, code: i32) -> Value {
    let last = ended(name, code, 1)["state"].take();
    json!({"name": name, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last})
}

fn annotate(pod: &mut Value, key: &str, value: &str) {
    pod["metadata"]["annotations"][key] = json!(value);
}

/// The pod is told at this second to end within half a minute.
fn delete(pod: &mut Value, second: u32) {
    pod["metadata"]["deletionTimestamp"] = json!(format!("2026-01-01T00:00:{:02}Z", second + 30));
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(30);
}

fn say(pod: &Pod, gone: bool) -> String {
    let told = decide(pod, gone);
    assert!(told.problem.is_none(), "{told:?}");
    match told.decision {
        Decision::Undecided => "undecided".to_owned(),
        Decision::Decided(outcome, why) => format!("{outcome}: {why}"),
    }
}

const DELETED: &str = "failed: the pod was deleted before it had ended";
const OVER: &str = "failed: the pod is gone, and had not ended when it was last seen";

#[test]
fn the_phase_decides_when_it_is_terminal() {
    type Change = fn(&mut Value);
    let table: [(Change, bool, &str); 14] = [
        (|_| {}, false, "undecided"),
        (|p| p["status"] = Value::Null, false, "undecided"),
        (
            |p| p["status"]["phase"] = json!("Unknown"),
            false,
            "undecided",
        ),
        (
            |p| p["status"]["containerStatuses"] = json!([ended("main", 0, 1)]),
            false,
            "undecided",
        ),
        (
            |p| p["status"]["phase"] = json!("Succeeded"),
            false,
            "succeeded: the pod succeeded",
        ),
        (
            |p| p["status"]["phase"] = json!("Succeeded"),
            true,
            "succeeded: the pod succeeded",
        ),
        (
            |p| p["status"]["phase"] = json!("Failed"),
            false,
            "failed: the pod failed",
        ),
        (
            |p| p["status"] = json!({"phase": "Failed", "containerStatuses": [ended("other", 0, 1), ended("main", 3, 1)]}),
            false,
            "failed: container main exited with 3",
        ),
        (
            |p| {
                p["status"] =
                    json!({"phase": "Failed", "initContainerStatuses": [ended("fetch", 1, 1)]});
            },
            false,
            "failed: container fetch exited with 1",
        ),
        (
            |p| p["status"] = json!({"phase": "Failed", "reason": "Evicted"}),
            false,
            "failed: the pod failed: Evicted",
        ),
        // The pod is gone: its last state decides.
        (|_| {}, true, OVER),
        (
            |p| p["status"]["containerStatuses"] = json!([ended("main", 0, 1)]),
            true,
            OVER,
        ),
        // It was told to end while it ran.
        (|p| delete(p, 5), false, DELETED),
        (|p| delete(p, 5), true, DELETED),
    ];
    for (at, (change, gone, expected)) in table.into_iter().enumerate() {
        for policy in ["Never", "OnFailure", "Always"] {
            assert_eq!(say(&pod(policy, change), gone), expected, "{at} {policy}");
        }
    }
}

#[test]
fn who_ended_only_when_told_to_did_not_succeed() {
    let seen = |finished: &[Option<u32>], asked: u32| {
        let pod = pod("Never", |p| {
            let statuses = finished
                .iter()
                .map(|at| at.map_or(json!({"name": "x", "state": {}}), |at| ended("x", 0, at)));
            p["status"] =
                json!({"phase": "Succeeded", "containerStatuses": statuses.collect::<Vec<_>>()});
            // Sidecars end last, when they are told to.
            p["status"]["initContainerStatuses"] =
                json!([ended("fetch", 0, 1), ended("proxy", 143, 29)]);
            delete(p, asked);
        });
        say(&pod, false)
    };
    assert_eq!(
        seen(&[Some(4), Some(9)], 10),
        "succeeded: the pod succeeded"
    );
    assert_eq!(
        seen(&[Some(4), Some(10)], 10),
        DELETED,
        "in the same second"
    );
    assert_eq!(seen(&[Some(4), Some(11)], 10), DELETED);
    assert_eq!(seen(&[Some(4), None], 10), DELETED);
    assert_eq!(seen(&[], 10), DELETED);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
fn a_container_decides_when_it_ended_for_good() {
    let statuses = |list: &[Value]| json!(list);
    let seen = |policy: &str, name: &str, gone: bool, status: Value| {
        let pod = pod(policy, |p| {
            annotate(p, OUTCOME_CONTAINER, name);
            p["status"] = status;
        });
        say(&pod, gone)
    };
    let running = |list: &[Value]| json!({"phase": "Running", "containerStatuses": statuses(list)});
    let main_ok = running(&[
        json!({"name": "other", "state": {"running": {}}}),
        ended("main", 0, 1),
    ]);
    let main_bad = running(&[ended("other", 0, 1), ended("main", 2, 1)]);
    let succeeded = "succeeded: container main succeeded";
    let exited = "failed: container main exited with 2";
    let cut_short =
        "failed: the pod is gone, and container main had not ended when it was last seen";
    for (policy, ok, bad) in [
        ("Never", succeeded, exited),
        ("OnFailure", succeeded, "undecided"),
        ("Always", "undecided", "undecided"),
    ] {
        assert_eq!(seen(policy, "main", false, main_ok.clone()), ok, "{policy}");
        assert_eq!(
            seen(policy, "main", false, main_bad.clone()),
            bad,
            "{policy}"
        );
        assert_eq!(
            seen(policy, "other", false, json!({"phase": "Pending"})),
            "undecided"
        );
    }
    // A container that might have restarted had not ended when the pod disappeared.
    assert_eq!(seen("Always", "main", true, main_ok.clone()), cut_short);
    assert_eq!(seen("OnFailure", "main", true, main_bad.clone()), cut_short);
    assert_eq!(seen("Never", "main", true, main_bad.clone()), exited);
    // At the pod's end its last exit counts.
    let over = |mut status: Value, phase: &str| {
        status["phase"] = json!(phase);
        status
    };
    assert_eq!(
        seen("Always", "main", false, over(main_ok.clone(), "Failed")),
        succeeded
    );
    let looping = running(&[crashed("main", 2)]);
    assert_eq!(
        seen("OnFailure", "main", false, looping.clone()),
        "undecided"
    );
    assert_eq!(
        seen("OnFailure", "main", false, over(looping, "Failed")),
        exited
    );
    let never = "failed: the pod ended, but container main did not";
    assert_eq!(
        seen("Never", "main", false, json!({"phase": "Failed"})),
        never
    );
    assert_eq!(
        seen("Never", "main", false, json!({"phase": "Succeeded"})),
        never
    );
    // Init containers run until they succeed, sidecars until the pod ends.
    let init = |name: &str, code: i32| json!({"phase": "Running", "initContainerStatuses": [ended(name, code, 1)]});
    assert_eq!(
        seen("Always", "fetch", false, init("fetch", 0)),
        "succeeded: container fetch succeeded"
    );
    assert_eq!(
        seen("Always", "fetch", false, init("fetch", 1)),
        "undecided"
    );
    assert_eq!(
        seen("Never", "fetch", false, init("fetch", 1)),
        "failed: container fetch exited with 1"
    );
    assert_eq!(seen("Never", "proxy", false, init("proxy", 0)), "undecided");
    assert_eq!(
        seen("Never", "proxy", false, over(init("proxy", 0), "Succeeded")),
        "succeeded: container proxy succeeded"
    );
}

#[test]
fn a_containers_own_policy_and_rules_say_whether_it_ended_for_good() {
    let seen = |own: &Value, other: &Value, code: i32, phase: &str| {
        let pod = pod("Always", |p| {
            annotate(p, OUTCOME_CONTAINER, "main");
            p["spec"]["containers"] = json!([own, other]);
            p["status"]["phase"] = json!(phase);
            p["status"]["containerStatuses"] = json!([ended("main", code, 1)]);
        });
        say(&pod, false)
    };
    let never = json!({"name": "main", "restartPolicy": "Never"});
    let exited = "failed: container main exited with 1";
    assert_eq!(seen(&never, &json!({}), 1, "Running"), exited);
    let with_rule = |action: &str, operator: &str| {
        let mut with_rule = never.clone();
        with_rule["restartPolicyRules"] =
            json!([{"action": action, "exitCodes": {"operator": operator, "values": [42]}}]);
        with_rule
    };
    // The driver evaluates no rule: not even exit code 0 is final.
    for operator in ["In", "NotIn"] {
        let rules = with_rule("Restart", operator);
        for code in [0, 1, 42] {
            assert_eq!(seen(&rules, &json!({}), code, "Running"), "undecided");
        }
        let succeeded = "succeeded: container main succeeded";
        assert_eq!(seen(&rules, &json!({}), 0, "Failed"), succeeded);
        assert_eq!(seen(&rules, &json!({}), 1, "Failed"), exited);
    }
    // Another container's rule counts if it restarts all containers.
    let other = with_rule("Restart", "In");
    assert_eq!(seen(&never, &other, 1, "Running"), exited);
    let all = with_rule("RestartAllContainers", "In");
    assert_eq!(seen(&never, &all, 1, "Running"), "undecided");
}

#[test]
fn a_container_that_ended_before_the_deletion_decides_and_one_after_it_did_not_succeed() {
    let seen = |status: Value| {
        let pod = pod("Never", |p| {
            annotate(p, OUTCOME_CONTAINER, "main");
            p["status"] = json!({"phase": "Running", "containerStatuses": [status]});
            delete(p, 10);
        });
        say(&pod, false)
    };
    assert_eq!(
        seen(ended("main", 0, 9)),
        "succeeded: container main succeeded"
    );
    assert_eq!(seen(ended("main", 0, 10)), DELETED);
    assert_eq!(
        seen(json!({"name": "main", "state": {"running": {}}})),
        DELETED
    );
}

/// A condition set at this second says that the pod is disrupted.
fn disrupt(pod: &mut Value, reason: &str, second: u32) {
    pod["status"]["conditions"] = json!([
        {"type": "Ready", "status": "True"},
        {"type": "DisruptionTarget", "status": "True", "reason": reason,
            "lastTransitionTime": format!("2026-01-01T00:00:{second:02}Z")},
    ]);
}

const POD_OK: &str = "succeeded: the pod succeeded";
const MAIN_OK: &str = "succeeded: container main succeeded";

/// The decisions by the phase, and by `main`, which exited with 0 in second 10.
fn at_the_end(phase: &str, change: fn(&mut Value)) -> [String; 2] {
    [false, true].map(|named| {
        let pod = pod("Never", |p| {
            if named {
                annotate(p, OUTCOME_CONTAINER, "main");
            }
            p["status"] = json!({"phase": phase, "containerStatuses": [ended("main", 0, 10)]});
            change(p);
        });
        say(&pod, false)
    })
}

#[test]
fn a_pod_that_kubelet_ended_did_not_succeed_though_it_exits_with_0_and_is_not_deleted() {
    let evicted = "failed: the pod was told to end: Evicted";
    let late = "failed: the pod was told to end: DeadlineExceeded";
    // If all exited with 0, kubelet drops the reason. It sets its condition after the last end.
    let disrupted = at_the_end("Succeeded", |p| disrupt(p, "TerminationByKubelet", 20));
    assert_eq!(
        disrupted,
        ["failed: the pod was told to end: TerminationByKubelet"; 2]
    );
    let reason = |p: &mut Value| p["status"]["reason"] = json!("Evicted");
    assert_eq!(at_the_end("Succeeded", reason), [evicted; 2]);
    // A helper exited with another code.
    let failed = "failed: the pod failed: Evicted";
    assert_eq!(at_the_end("Failed", reason), [failed, evicted]);
    let both = |p: &mut Value| {
        p["status"]["reason"] = json!("Evicted");
        disrupt(p, "TerminationByKubelet", 20);
    };
    assert_eq!(at_the_end("Failed", both), [failed, evicted]);
    let failed = "failed: the pod failed: DeadlineExceeded";
    let unknown = |p: &mut Value| p["status"]["reason"] = json!("DeadlineExceeded");
    assert_eq!(at_the_end("Failed", unknown), [failed, late]);
    let at_ten = at_the_end("Failed", |p| deadline(p, 10));
    assert_eq!(at_ten, [failed, late], "in the same second");
    // `main` ended before the deadline; a helper did not.
    let at_eleven = at_the_end("Failed", |p| deadline(p, 11));
    assert_eq!(at_eleven, [failed, MAIN_OK]);
    // These ended by themselves.
    assert_eq!(at_the_end("Succeeded", |_| {}), [POD_OK, MAIN_OK]);
    let empty = at_the_end("Succeeded", |p| p["status"]["reason"] = json!(""));
    assert_eq!(empty, [POD_OK, MAIN_OK]);
    let ended = at_the_end("Failed", |_| {});
    assert_eq!(ended, ["failed: the pod failed", MAIN_OK]);
}

#[test]
fn a_pod_that_ended_before_its_eviction_succeeded() {
    // Others set the condition before they delete the pod.
    let before = at_the_end("Succeeded", |p| disrupt(p, "EvictionByEvictionAPI", 11));
    assert_eq!(before, [POD_OK, MAIN_OK]);
    let and_deleted = at_the_end("Succeeded", |p| {
        disrupt(p, "EvictionByEvictionAPI", 11);
        delete(p, 12);
    });
    assert_eq!(and_deleted, [POD_OK, MAIN_OK]);
    let told = "failed: the pod was told to end: EvictionByEvictionAPI";
    let after = at_the_end("Succeeded", |p| disrupt(p, "EvictionByEvictionAPI", 10));
    assert_eq!(after, [told; 2], "in the same second");
    let some_time = at_the_end("Succeeded", |p| {
        disrupt(p, "EvictionByEvictionAPI", 11);
        p["status"]["conditions"][1]["lastTransitionTime"] = Value::Null;
    });
    assert_eq!(some_time, [told; 2]);
    // It was to be deleted, but was not.
    let left_alone = at_the_end("Succeeded", |p| {
        disrupt(p, "EvictionByEvictionAPI", 5);
        p["status"]["conditions"][1]["status"] = json!("False");
    });
    assert_eq!(left_alone, [POD_OK, MAIN_OK]);
}

/// The pod exceeded this many seconds, as kubelet reports.
fn deadline(pod: &mut Value, seconds: u32) {
    pod["spec"]["activeDeadlineSeconds"] = json!(seconds);
    pod["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    pod["status"]["reason"] = json!("DeadlineExceeded");
}

#[test]
fn what_is_said_of_a_pod_that_runs_decides_nothing() {
    let seen = |container: Option<&str>, change: fn(&mut Value)| {
        let pod = pod("Never", |p| {
            if let Some(name) = container {
                annotate(p, OUTCOME_CONTAINER, name);
            }
            change(p);
        });
        say(&pod, false)
    };
    for container in [None, Some("main")] {
        // It may still survive; if not, it is deleted.
        let about_to_be = |p: &mut Value| disrupt(p, "PreemptionByScheduler", 5);
        assert_eq!(seen(container, about_to_be), "undecided");
    }
    // Its node was lost for a while.
    let lost = |p: &mut Value| {
        p["status"]["reason"] = json!("NodeLost");
        p["status"]["containerStatuses"] = json!([ended("main", 0, 10)]);
    };
    assert_eq!(seen(None, lost), "undecided");
    assert_eq!(
        seen(Some("main"), lost),
        "succeeded: container main succeeded"
    );
}

#[test]
fn the_annotation_is_believed_before_everything_else() {
    for (value, phase, expected) in [
        (
            "succeeded",
            "Failed",
            "succeeded: the annotation baggageclaim.concourse-ci.org/outcome says so",
        ),
        (
            "failed",
            "Succeeded",
            "failed: the annotation baggageclaim.concourse-ci.org/outcome says so",
        ),
        (
            "succeeded",
            "Running",
            "succeeded: the annotation baggageclaim.concourse-ci.org/outcome says so",
        ),
    ] {
        for deleted in [false, true] {
            let pod = pod("Always", |p| {
                annotate(p, OUTCOME, value);
                annotate(p, OUTCOME_CONTAINER, "nobody");
                p["status"]["phase"] = json!(phase);
                if deleted {
                    delete(p, 5);
                }
            });
            assert_eq!(say(&pod, deleted), expected);
        }
    }
}

#[test]
fn a_mistake_is_told_at_once_decides_at_the_end_and_is_never_success() {
    let long = "x".repeat(1000);
    let values = [
        "",
        "true",
        "Succeeded",
        " succeeded",
        "succeeded\n",
        "ä",
        long.as_str(),
    ];
    let wrong = values.map(|value| (OUTCOME, value));
    let names = ["mian", "", "Main"].map(|name| (OUTCOME_CONTAINER, name));
    for (key, value) in wrong.into_iter().chain(names) {
        let seen = |phase: &str, deleted: bool, gone: bool| {
            let pod = pod("Never", |p| {
                annotate(p, key, value);
                p["status"] = json!({"phase": phase, "containerStatuses": [ended("main", 0, 1)]});
                if deleted {
                    delete(p, 20);
                }
            });
            let told = decide(&pod, gone);
            let problem = told.problem.expect("it is told");
            assert!(problem.contains(key) && problem.len() < 300, "{problem}");
            match told.decision {
                Decision::Undecided => None,
                Decision::Decided(Outcome::Failed, why) => Some(why == problem),
                Decision::Decided(Outcome::Succeeded, _) => panic!("{value:?} is success"),
            }
        };
        assert_eq!(seen("Running", false, false), None);
        assert_eq!(seen("Succeeded", false, false), Some(true));
        assert_eq!(seen("Failed", false, false), Some(true));
        assert_eq!(seen("Running", true, false), Some(true));
        assert_eq!(seen("Running", false, true), Some(true));
    }
}

#[test]
fn a_pod_as_the_api_writes_it_is_read() {
    // Fields that are not known do not matter, and any field may be missing.
    let pod: Pod = serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "p", "uid": "u", "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:x": {}}}]},
        "spec": {"nodeName": "n", "volumes": [{"name": "v", "csi": {"driver": "d"}}], "containers": [{"name": "main", "image": "i"}]},
        "status": {"phase": "Running", "somethingNew": 1, "containerStatuses": [
            {"name": "main", "ready": true, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "lastState": {}}]},
    }))
    .expect("a pod");
    assert_eq!(say(&pod, false), "undecided");
    let spec = pod.spec.expect("a specification");
    assert_eq!(spec.node_name.as_deref(), Some("n"));
}
