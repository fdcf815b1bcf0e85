//! A pod as the API tells it, and how its work ended: a pure decision, from one object.
//!
//! # The rules
//!
//! 1. The annotation `…/outcome: succeeded|failed` decides as soon as it is seen, for pods that are exec'ed into and then
//!    deleted. It is a word that somebody gave; the first one counts.
//! 2. Else, with the annotation `…/outcome-container: NAME`, that container (or init container) decides, as soon as it ended
//!    for good: it would not be restarted. The rest of the pod may still run. What could be restarted decides when the
//!    pod ends, by its last end; so does what has rules of its own for that (`restartPolicyRules`), or could be restarted by another's.
//! 3. Else the pod's phase decides, when it is terminal: `Succeeded`, or not.
//! 4. A pod that was told to end before it had ended did not succeed, whatever its processes then exit with: a compiler
//!    that handles SIGTERM exits with 0 and leaves half a cache. Neither did one that is gone without an end.
//!
//! An annotation with a mistake in it decides nothing while the pod runs, since it can be mended; at the end it is no
//! success.
//!
//! For 4 no clocks are compared where it matters: the watch shows a pod that is told to end before it shows its end, and
//! the first decision counts. Only where the driver sees a pod for the first time when both is past (it was restarted) the
//! container's end is compared with the time of the deletion, in whole seconds; the same second is no success.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::Object;
use serde::Deserialize;

use crate::model::Outcome;

/// The annotation that says how a pod ended.
pub const OUTCOME: &str = "baggageclaim.concourse-ci.org/outcome";
/// The annotation that names the container whose end is the pod's.
pub const OUTCOME_CONTAINER: &str = "baggageclaim.concourse-ci.org/outcome-container";

/// A pod, as much of it as anybody here asks for.
pub(super) type Pod = Object<Spec, Status>;

/// Of a pod's specification.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Spec {
    pub(super) node_name: Option<String>,
    restart_policy: Option<String>,
    containers: Vec<Container>,
    init_containers: Vec<Container>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    /// Always, for an init container: a sidecar. On others, and other values, since 1.35.
    restart_policy: Option<String>,
    /// What is done at some exit codes, whatever its policy says.
    restart_policy_rules: Vec<Rule>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Rule {
    action: String,
}

impl Rule {
    /// Whether it starts all containers of the pod again, those too that have ended for good.
    fn restarts_all(&self) -> bool {
        self.action == "RestartAllContainers"
    }
}

/// Of a pod's status.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    phase: Option<String>,
    reason: Option<String>,
    container_statuses: Vec<ContainerStatus>,
    init_container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerStatus {
    name: String,
    state: State,
    last_state: State,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct State {
    running: Option<serde::de::IgnoredAny>,
    terminated: Option<Terminated>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Terminated {
    exit_code: i32,
    signal: Option<i32>,
    reason: Option<String>,
    finished_at: Option<Time>,
}

/// How a pod's work ended, as far as one object tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    /// It does not tell yet.
    Undecided,
    /// It does, and why, in words that follow "because".
    Decided(Outcome, String),
}

/// What one object tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) decision: Decision,
    /// What is wrong with the pod's annotations, in words.
    pub(super) problem: Option<String>,
}

/// What an object tells about the pod's end; `gone`: there is no such pod any more, and this was its last state.
pub(super) fn decide(pod: &Pod, gone: bool) -> Told {
    let no_problem = |decision| Told {
        decision,
        problem: None,
    };
    let annotations = pod.metadata.annotations.as_ref();
    match annotation(annotations, OUTCOME) {
        Some("succeeded") => {
            let why = format!("the annotation {OUTCOME} says so");
            return no_problem(Decision::Decided(Outcome::Succeeded, why));
        }
        Some("failed") => {
            let why = format!("the annotation {OUTCOME} says so");
            return no_problem(Decision::Decided(Outcome::Failed, why));
        }
        Some(other) => {
            let problem = format!(
                "the annotation {OUTCOME} holds {:?}; it must be succeeded or failed",
                shown(other)
            );
            return mistaken(pod, gone, problem);
        }
        None => {}
    }
    let Some(name) = annotation(annotations, OUTCOME_CONTAINER) else {
        return no_problem(by_phase(pod, gone));
    };
    if let Some(policy) = Policy::of(&pod.spec, name) {
        return no_problem(by_container(pod, gone, name, policy));
    }
    let problem = format!(
        "the annotation {OUTCOME_CONTAINER} names {:?}, and the pod has no such container",
        shown(name)
    );
    mistaken(pod, gone, problem)
}

fn annotation<'a>(annotations: Option<&'a BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    annotations?.get(key).map(String::as_str)
}

/// As much of somebody's text as a message should hold.
fn shown(text: &str) -> &str {
    cut(text, 63)
}

/// The beginning of a text, at most so many bytes long.
pub(super) fn cut(text: &str, most: usize) -> &str {
    let ends = (0..=most.min(text.len())).rev();
    let mut ends = ends.filter(|end| text.is_char_boundary(*end));
    &text[..ends.next().unwrap_or_default()]
}

/// A mistake can be mended while the pod runs.
fn mistaken(pod: &Pod, gone: bool, problem: String) -> Told {
    let over = gone || phase(pod).is_terminal() || pod.metadata.deletion_timestamp.is_some();
    let decision = if over {
        Decision::Decided(Outcome::Failed, problem.clone())
    } else {
        Decision::Undecided
    };
    Told {
        decision,
        problem: Some(problem),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Succeeded,
    Failed,
}

impl Phase {
    fn is_terminal(self) -> bool {
        self != Self::Running
    }
}

fn phase(pod: &Pod) -> Phase {
    let status = pod.status.as_ref();
    match status.and_then(|status| status.phase.as_deref()) {
        Some("Succeeded") => Phase::Succeeded,
        Some("Failed") => Phase::Failed,
        _ => Phase::Running,
    }
}

fn failed(why: impl Into<String>) -> Decision {
    Decision::Decided(Outcome::Failed, why.into())
}

const DELETED: &str = "the pod was deleted before it had ended";

fn by_phase(pod: &Pod, gone: bool) -> Decision {
    match phase(pod) {
        Phase::Failed => failed(why_failed(pod)),
        Phase::Succeeded => {
            // Sidecars end when all is done, and are told to.
            let statuses = pod.status.as_ref().map(|status| &status.container_statuses);
            let ends = statuses
                .into_iter()
                .flatten()
                .map(|status| status.state.terminated.as_ref());
            if ended_before_deletion(&pod.metadata, ends) {
                Decision::Decided(Outcome::Succeeded, "the pod succeeded".to_owned())
            } else {
                failed(DELETED)
            }
        }
        Phase::Running if pod.metadata.deletion_timestamp.is_some() => failed(DELETED),
        Phase::Running if gone => {
            failed("the pod is gone, and had not ended when it was last seen")
        }
        Phase::Running => Decision::Undecided,
    }
}

/// Whether all these ends came before anybody wanted the pod gone.
fn ended_before_deletion<'a>(
    meta: &ObjectMeta,
    ends: impl Iterator<Item = Option<&'a Terminated>>,
) -> bool {
    let Some(deadline) = &meta.deletion_timestamp else {
        return true;
    };
    // The API says until when the pod may take, and how long it was given.
    let grace = meta.deletion_grace_period_seconds.unwrap_or_default();
    let asked = deadline.0.as_second().saturating_sub(grace);
    let mut ends = ends.peekable();
    ends.peek().is_some()
        && ends.all(|end| {
            let finished = end.and_then(|end| end.finished_at.as_ref());
            finished.is_some_and(|finished| finished.0.as_second() < asked)
        })
}

/// Of a failed pod, what people want to know first.
fn why_failed(pod: &Pod) -> String {
    let Some(status) = &pod.status else {
        return "the pod failed".to_owned();
    };
    if let Some(reason) = &status.reason {
        return format!("the pod failed: {}", shown(reason));
    }
    let all = status
        .init_container_statuses
        .iter()
        .chain(&status.container_statuses);
    let mut ends = all.filter_map(|container| {
        let end = container.state.terminated.as_ref();
        let end = end.filter(|end| end.exit_code != 0)?;
        Some((&container.name, end))
    });
    ends.next().map_or_else(
        || "the pod failed".to_owned(),
        |(name, end)| format!("container {} {}", shown(name), exited(end)),
    )
}

fn exited(end: &Terminated) -> String {
    let text = match end.signal {
        Some(signal) if signal != 0 => format!("was ended by signal {signal}"),
        _ => format!("exited with {}", end.exit_code),
    };
    match end.reason.as_deref() {
        None | Some("" | "Error" | "Completed") => text,
        Some(reason) => format!("{text} ({})", shown(reason)),
    }
}

/// When a container that ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Always,
    OnFailure,
    Never,
    /// There are rules, which differ from version to version: kubelet knows whether it has ended for good, and says it by the pod's end.
    /// (Since 1.34 the first rule that matches decides, also for exit code 0, else the policy: `ContainerShouldRestart` in
    /// pkg/api/v1/pod/util.go.)
    Rules,
}

impl Policy {
    /// That of a pod's container; `None` when there is none of that name.
    fn of(spec: &Spec, name: &str) -> Option<Self> {
        let named = |containers: &[Container]| {
            let mut found = containers.iter();
            found.find(|container| container.name == name).cloned()
        };
        let (container, is_init) = match named(&spec.containers) {
            Some(container) => (container, false),
            None => (named(&spec.init_containers)?, true),
        };
        let mut all = spec.containers.iter().chain(&spec.init_containers);
        if !container.restart_policy_rules.is_empty()
            || all.any(|other| other.restart_policy_rules.iter().any(Rule::restarts_all))
        {
            return Some(Self::Rules);
        }
        let own = container.restart_policy.as_deref();
        Some(match own.or(spec.restart_policy.as_deref()) {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            // An init container without a policy of its own is run until it succeeds.
            _ if is_init && own.is_none() => Self::OnFailure,
            _ => Self::Always,
        })
    }

    /// Whether a container that exited with this stays ended.
    fn is_final(self, exit: i32) -> bool {
        match self {
            Self::Always | Self::Rules => false,
            Self::OnFailure => exit == 0,
            Self::Never => true,
        }
    }
}

fn by_container(pod: &Pod, gone: bool, name: &str, policy: Policy) -> Decision {
    let terminal = phase(pod).is_terminal();
    let status = pod.status.as_ref().and_then(|status| {
        let all = status.container_statuses.iter();
        let mut all = all.chain(&status.init_container_statuses);
        all.find(|status| status.name == name)
    });
    let name = shown(name);
    let end = status.and_then(|status| match &status.state {
        State {
            terminated: Some(end),
            ..
        } => Some(end),
        // What waits to be started again and never will be: its last end was its end.
        State { running: None, .. } if terminal => status.last_state.terminated.as_ref(),
        _ => None,
    });
    match end {
        Some(end) if terminal || policy.is_final(end.exit_code) => {
            if !ended_before_deletion(&pod.metadata, [Some(end)].into_iter()) {
                failed(DELETED)
            } else if end.exit_code == 0 {
                let why = format!("container {name} succeeded");
                Decision::Decided(Outcome::Succeeded, why)
            } else {
                failed(format!("container {name} {}", exited(end)))
            }
        }
        _ if pod.metadata.deletion_timestamp.is_some() => failed(DELETED),
        _ if terminal => failed(format!("the pod ended, and container {name} never did")),
        _ if gone => failed(format!(
            "the pod is gone, and container {name} had not ended when it was last seen"
        )),
        _ => Decision::Undecided,
    }
}

#[cfg(test)]
mod tests {
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

    /// Told at this second to end within half a minute.
    fn delete(pod: &mut Value, second: u32) {
        pod["metadata"]["deletionTimestamp"] =
            json!(format!("2026-01-01T00:00:{:02}Z", second + 30));
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
            // Gone, and what it was doing then is all that is known.
            (|_| {}, true, OVER),
            (
                |p| p["status"]["containerStatuses"] = json!([ended("main", 0, 1)]),
                true,
                OVER,
            ),
            // Told to end while it ran.
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
                p["status"] = json!({"phase": "Succeeded", "containerStatuses": statuses.collect::<Vec<_>>()});
                // Sidecars end last, and are told to.
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
    fn a_container_decides_when_it_ended_for_good() {
        let statuses = |list: &[Value]| json!(list);
        let seen = |policy: &str, name: &str, gone: bool, status: Value| {
            let pod = pod(policy, |p| {
                annotate(p, OUTCOME_CONTAINER, name);
                p["status"] = status;
            });
            say(&pod, gone)
        };
        let running =
            |list: &[Value]| json!({"phase": "Running", "containerStatuses": statuses(list)});
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
        // What could have been started again when the pod vanished had not ended.
        assert_eq!(seen("Always", "main", true, main_ok.clone()), cut_short);
        assert_eq!(seen("OnFailure", "main", true, main_bad.clone()), cut_short);
        assert_eq!(seen("Never", "main", true, main_bad.clone()), exited);
        // At the pod's end the last end counts.
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
        let never = "failed: the pod ended, and container main never did";
        assert_eq!(
            seen("Never", "main", false, json!({"phase": "Failed"})),
            never
        );
        assert_eq!(
            seen("Never", "main", false, json!({"phase": "Succeeded"})),
            never
        );
        // Init containers run until they succeed, sidecars as long as the pod.
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
        // Nothing of what a rule says is decided here: not even that exit code 0 is an end for good.
        for operator in ["In", "NotIn"] {
            let rules = with_rule("Restart", operator);
            for code in [0, 1, 42] {
                assert_eq!(seen(&rules, &json!({}), code, "Running"), "undecided");
            }
            let succeeded = "succeeded: container main succeeded";
            assert_eq!(seen(&rules, &json!({}), 0, "Failed"), succeeded);
            assert_eq!(seen(&rules, &json!({}), 1, "Failed"), exited);
        }
        // Another's rule counts where it is about all of them.
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
                    p["status"] =
                        json!({"phase": phase, "containerStatuses": [ended("main", 0, 1)]});
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
        // What nobody here asks for may be anything, and what is not there is not there.
        let pod: Pod = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "uid": "u", "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:x": {}}}]},
            "spec": {"nodeName": "n", "volumes": [{"name": "v", "csi": {"driver": "d"}}], "containers": [{"name": "main", "image": "i"}]},
            "status": {"phase": "Running", "somethingNew": 1, "containerStatuses": [
                {"name": "main", "ready": true, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "lastState": {}}]},
        }))
        .expect("a pod");
        assert_eq!(say(&pod, false), "undecided");
        assert_eq!(pod.spec.node_name.as_deref(), Some("n"));
    }
}
