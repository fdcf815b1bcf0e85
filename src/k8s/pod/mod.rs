//! The pure decision on a pod's outcome, from one object; and the images of its containers.
//!
//! # The rules
//!
//! 1. The annotation `…/outcome: succeeded|failed` decides at once, for pods whose work runs by
//!    `exec` and that are then deleted. The first value wins.
//! 2. Else, with the annotation `…/outcome-container: NAME`, that container or init container
//!    decides once it has ended for good: it will not be restarted. The rest of the pod may still
//!    run. A container that may restart decides at the pod's end, by its last exit. So does one
//!    with `restartPolicyRules`, or one that another's rules may restart.
//! 3. Else the pod's terminal phase decides: `Succeeded`, or not.
//! 4. A pod that was told to end before it had ended did not succeed, whatever its processes exit
//!    with: a compiler that handles SIGTERM exits with 0 and leaves half a cache. Neither did a pod
//!    that disappeared before its end.
//!
//! A mistake in an annotation decides nothing while the pod runs, because it can be corrected. At
//! the pod's end it counts as failed.
//!
//! # Told to end
//!
//! Either by a deletion or by kubelet alone (eviction, node shutdown, `activeDeadlineSeconds`).
//! Kubelet reports it with the phase and exit codes, once all containers have ended. It uses
//! `status.reason`, which it drops if all exited with 0, the condition `DisruptionTarget`, which it
//! does not set for every eviction, or both. (1.37: `mergePodStatus` delays the phase,
//! `generateAPIPodStatus` keeps a reason only with its phase.) Otherwise the driver cannot know.
//!
//! A deletion needs no clocks: the watch shows it before the pod's end, and the first decision
//! wins. The exceptions are a restarted driver that sees both at once, and kubelet's reports. Then
//! the container's end is compared with the request's time, in whole seconds. An equal or unknown
//! time counts as failed.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerRestartRule, ContainerStateTerminated, ContainerStatus, Pod,
};

use crate::model::{Maker, Outcome};

/// The annotation with a pod's outcome.
pub const OUTCOME: &str = "baggageclaim.concourse-ci.org/outcome";
/// The annotation with the container that decides a pod's outcome.
pub const OUTCOME_CONTAINER: &str = "baggageclaim.concourse-ci.org/outcome-container";

/// A pod's outcome, as far as one object shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Decision {
    /// Not known yet.
    #[default]
    Undecided,
    /// The outcome, and the reason as it follows "because".
    Decided(Outcome, String),
}

/// The facts that one object shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) decision: Decision,
    /// A mistake in the pod's annotations.
    pub(super) problem: Option<String>,
}

/// The facts that an object shows about the pod's end. `gone`: it was the last state of a deleted
/// pod.
pub(super) fn decide(pod: &Pod, gone: bool) -> Verdict {
    let no_problem = |decision| Verdict {
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
    if let Some(policy) = Policy::of(pod, name) {
        return no_problem(by_container(pod, gone, name, policy));
    }
    let problem = format!(
        "the annotation {OUTCOME_CONTAINER} names {:?}, and the pod has no such container",
        shown(name)
    );
    mistaken(pod, gone, problem)
}

/// All containers of a pod, and after them its init containers.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let all = spec.containers.iter();
        all.chain(spec.init_containers.iter().flatten())
    })
}

/// What became of the containers of a pod.
fn statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let status = pod.status.iter();
    status.flat_map(|it| it.container_statuses.iter().flatten())
}

/// The same of its init containers.
fn init_statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let status = pod.status.iter();
    status.flat_map(|it| it.init_container_statuses.iter().flatten())
}

/// How a container ended, if it has.
fn terminated(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}

/// The images of a pod's containers, with their registry digests if known: `golang:1.25@sha256:…`.
pub(super) fn images(pod: &Pod) -> Vec<String> {
    let image = |container: &Container| {
        let named = container.image.clone().unwrap_or_default();
        let statuses = statuses(pod).chain(init_statuses(pod));
        let mut ran = statuses.filter(|status| status.name == container.name);
        // A digest, perhaps after a repository's name and `@`.
        let digest = ran.find_map(|ran| ran.image_id.rsplit_once('@'));
        match digest {
            Some((_, digest)) if !named.contains('@') => format!("{named}@{digest}"),
            _ => named,
        }
    };
    Maker::bounded(containers(pod).map(image))
}

fn annotation<'a>(annotations: Option<&'a BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    annotations?.get(key).map(String::as_str)
}

/// Text from a user, truncated for a message.
fn shown(text: &str) -> &str {
    cut(text, 63)
}

/// The beginning of a text, at most `most` bytes.
pub(super) fn cut(text: &str, most: usize) -> &str {
    let ends = (0..=most.min(text.len())).rev();
    let mut ends = ends.filter(|end| text.is_char_boundary(*end));
    &text[..ends.next().unwrap_or_default()]
}

/// A mistake may be corrected while the pod runs.
fn mistaken(pod: &Pod, gone: bool, problem: String) -> Verdict {
    let over = gone || phase(pod).is_terminal() || pod.metadata.deletion_timestamp.is_some();
    let decision = if over {
        Decision::Decided(Outcome::Failed, problem.clone())
    } else {
        Decision::Undecided
    };
    Verdict {
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
            // Sidecars are told to end after all others have.
            let ends: Vec<_> = statuses(pod).map(terminated).collect();
            match cut_short(pod, &ends) {
                None => Decision::Decided(Outcome::Succeeded, "the pod succeeded".to_owned()),
                Some(why) => failed(why),
            }
        }
        Phase::Running if pod.metadata.deletion_timestamp.is_some() => failed(DELETED),
        Phase::Running if gone => {
            failed("the pod is gone, and had not ended when it was last seen")
        }
        Phase::Running => Decision::Undecided,
    }
}

/// The condition of a pod that is evicted or whose node goes away.
const DISRUPTION: &str = "DisruptionTarget";
/// That condition's reason if kubelet ended the pod.
const BY_KUBELET: &str = "TerminationByKubelet";
/// The reason of a pod that exceeded its `activeDeadlineSeconds`.
const DEADLINE: &str = "DeadlineExceeded";

/// A request to end the pod.
struct Word {
    /// The reason for a pod that had not ended by then.
    why: String,
    /// The time of the request; `None`: unknown, so no end is certain to be earlier.
    second: Option<i64>,
}

/// All requests to end the pod that an object shows.
fn words(pod: &Pod) -> Vec<Word> {
    let mut words = Vec::new();
    if let Some(deadline) = &pod.metadata.deletion_timestamp {
        // The API shows the deadline and the grace period.
        let grace = pod.metadata.deletion_grace_period_seconds;
        let asked = deadline.0.as_second();
        words.push(Word {
            why: DELETED.to_owned(),
            second: Some(asked.saturating_sub(grace.unwrap_or_default())),
        });
    }
    let Some(status) = &pod.status else {
        return words;
    };
    let told = |reason: &str| format!("the pod was told to end: {}", shown(reason));
    // A pod that ends by itself has no reason. On a running pod it is from an earlier loss of the
    // node.
    let reason = status.reason.as_deref().filter(|it| !it.is_empty());
    if let Some(reason) = reason.filter(|_| phase(pod).is_terminal()) {
        // Kubelet's check is never early, and it uses the clock of the containers' ends.
        let deadline = || {
            let started = status.start_time.as_ref()?.0.as_second();
            let limit = pod.spec.as_ref()?.active_deadline_seconds?;
            Some(started.saturating_add(limit))
        };
        words.push(Word {
            why: told(reason),
            second: (reason == DEADLINE).then(deadline).flatten(),
        });
    }
    let mut conditions = status.conditions.iter().flatten();
    if let Some(condition) = conditions.find(|it| it.type_ == DISRUPTION && it.status == "True") {
        let reason = condition.reason.as_deref().unwrap_or_default();
        // Others set it before they delete the pod, kubelet after the containers have ended.
        let set = condition.last_transition_time.as_ref();
        words.push(Word {
            why: told(if reason.is_empty() {
                DISRUPTION
            } else {
                reason
            }),
            second: set
                .filter(|_| reason != BY_KUBELET)
                .map(|set| set.0.as_second()),
        });
    }
    words
}

/// Why the pod did not end by itself; `None` if all these ends were before any request to end it.
fn cut_short(pod: &Pod, ends: &[Option<&ContainerStateTerminated>]) -> Option<String> {
    let came_before = |second: i64| {
        !ends.is_empty()
            && ends.iter().all(|end| {
                let finished = end.and_then(|end| end.finished_at.as_ref());
                finished.is_some_and(|finished| finished.0.as_second() < second)
            })
    };
    let mut words = words(pod).into_iter();
    let word = words.find(|word| !word.second.is_some_and(came_before))?;
    Some(word.why)
}

/// The most useful reason of a failed pod.
fn why_failed(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    if let Some(reason) = status.and_then(|status| status.reason.as_deref()) {
        return format!("the pod failed: {}", shown(reason));
    }
    let mut ends = init_statuses(pod)
        .chain(statuses(pod))
        .filter_map(|status| {
            let end = terminated(status).filter(|end| end.exit_code != 0)?;
            Some((&status.name, end))
        });
    ends.next().map_or_else(
        || "the pod failed".to_owned(),
        |(name, end)| format!("container {} {}", shown(name), exited(end)),
    )
}

fn exited(end: &ContainerStateTerminated) -> String {
    let text = match end.signal {
        Some(signal) if signal != 0 => format!("was ended by signal {signal}"),
        _ => format!("exited with {}", end.exit_code),
    };
    match end.reason.as_deref() {
        None | Some("" | "Error" | "Completed") => text,
        Some(reason) => format!("{text} ({})", shown(reason)),
    }
}

/// Actions for some exit codes of a container. They override its policy.
fn rules(container: &Container) -> &[ContainerRestartRule] {
    container
        .restart_policy_rules
        .as_deref()
        .unwrap_or_default()
}

/// Whether a rule restarts all containers, including those that ended for good.
fn restarts_all(rule: &ContainerRestartRule) -> bool {
    rule.action == "RestartAllContainers"
}

/// When an ended container is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Always,
    OnFailure,
    Never,
    /// It has rules, which depend on the version. Kubelet decides, and the pod's end shows the
    /// result. (Since 1.34 the first matching rule decides, even for exit code 0, else the policy:
    /// `ContainerShouldRestart` in pkg/api/v1/pod/util.go.)
    Rules,
}

impl Policy {
    /// The policy of a container; `None` if the pod has none of that name.
    fn of(pod: &Pod, name: &str) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let is_named = |container: &&Container| container.name == name;
        let (container, is_init) = match spec.containers.iter().find(is_named) {
            Some(container) => (container, false),
            None => (spec.init_containers.iter().flatten().find(is_named)?, true),
        };
        if !rules(container).is_empty()
            || containers(pod).any(|other| rules(other).iter().any(restarts_all))
        {
            return Some(Self::Rules);
        }
        let own = container.restart_policy.as_deref();
        Some(match own.or(spec.restart_policy.as_deref()) {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            // An init container without its own policy runs until it succeeds.
            _ if is_init && own.is_none() => Self::OnFailure,
            _ => Self::Always,
        })
    }

    /// Whether a container that exited with this code stays ended.
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
    let mut all = statuses(pod).chain(init_statuses(pod));
    let status = all.find(|status| status.name == name);
    let name = shown(name);
    let end = status.and_then(|status| {
        let is_running = status.state.as_ref().is_some_and(|it| it.running.is_some());
        // It waited for a restart that never came: its last exit counts.
        let last = || status.last_state.as_ref()?.terminated.as_ref();
        let last = (terminal && !is_running).then(last).flatten();
        terminated(status).or(last)
    });
    match end {
        Some(end) if terminal || policy.is_final(end.exit_code) => {
            if let Some(why) = cut_short(pod, &[Some(end)]) {
                failed(why)
            } else if end.exit_code == 0 {
                let why = format!("container {name} succeeded");
                Decision::Decided(Outcome::Succeeded, why)
            } else {
                failed(format!("container {name} {}", exited(end)))
            }
        }
        _ if pod.metadata.deletion_timestamp.is_some() => failed(DELETED),
        _ if terminal => failed(format!("the pod ended, but container {name} did not")),
        _ if gone => failed(format!(
            "the pod is gone, and container {name} had not ended when it was last seen"
        )),
        _ => Decision::Undecided,
    }
}
