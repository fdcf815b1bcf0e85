//! The fields of a pod that matter, and its outcome: a pure decision from one object.
//!
//! # The rules
//!
//! 1. The annotation `…/outcome: succeeded|failed` decides as soon as it is seen, for pods that are exec'ed into and then
//!    deleted. The first value wins.
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
//! # Told to end
//!
//! By a deletion; or by kubelet alone (an eviction, a node that shuts down, `activeDeadlineSeconds`), which says so when all
//! containers have ended, together with the phase and the exit codes: in `status.reason`, which it forgets where all exited
//! with 0, in the condition `DisruptionTarget`, which it does not set for every eviction, or in both. (1.37: `mergePodStatus` holds
//! the phase back, `generateAPIPodStatus` keeps a reason only with its phase.) Where it says neither, nothing here can know.
//!
//! For a deletion no clocks are compared where it matters: the watch shows a pod that is told to end before it shows its end,
//! and the first decision counts. Only where both is past when the driver sees the pod for the first time (it was restarted), or the
//! word of kubelet comes with the end, the container's end is compared with the time at which it was told, in whole seconds; the
//! same second is no success, and neither is an unknown time.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::Object;
use serde::Deserialize;

use crate::model::{Maker, Outcome};

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
    active_deadline_seconds: Option<i64>,
    containers: Vec<Container>,
    init_containers: Vec<Container>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    image: String,
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
    conditions: Vec<Condition>,
    start_time: Option<Time>,
    container_statuses: Vec<ContainerStatus>,
    init_container_statuses: Vec<ContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: Option<String>,
    last_transition_time: Option<Time>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerStatus {
    name: String,
    /// What was really run: a digest, perhaps behind a repository's name and `@`.
    #[serde(rename = "imageID")]
    image_id: String,
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

/// What a pod's containers run, with the digest of each where a registry has one: `golang:1.25@sha256:…`.
pub(super) fn images(pod: &Pod) -> Vec<String> {
    let status = pod.status.as_ref();
    let image = |container: &Container| {
        let named = container.image.clone();
        let statuses = status.into_iter().flat_map(|status| {
            let all = status.container_statuses.iter();
            all.chain(&status.init_container_statuses)
        });
        let mut ran = statuses.filter(|status| status.name == container.name);
        let digest = ran.find_map(|ran| ran.image_id.rsplit_once('@'));
        match digest {
            Some((_, digest)) if !named.contains('@') => format!("{named}@{digest}"),
            _ => named,
        }
    };
    let all = pod.spec.containers.iter().chain(&pod.spec.init_containers);
    Maker::bounded(all.map(image))
}

fn annotation<'a>(annotations: Option<&'a BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    annotations?.get(key).map(String::as_str)
}

/// Cuts a text to a length that fits a message.
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
            let ends: Vec<_> = statuses
                .into_iter()
                .flatten()
                .map(|status| status.state.terminated.as_ref())
                .collect();
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

/// The condition of a pod that is evicted, or whose node is drained.
const DISRUPTION: &str = "DisruptionTarget";
/// The reason of that condition where it was kubelet that ended the pod.
const BY_KUBELET: &str = "TerminationByKubelet";
/// The reason of a pod that took longer than its `activeDeadlineSeconds`.
const DEADLINE: &str = "DeadlineExceeded";

/// A request to end the pod.
struct Word {
    /// What to say of a pod that had not ended by then.
    why: String,
    /// When it was made; `None` if unknown, so that nothing is certain to have come before it.
    second: Option<i64>,
}

/// All that an object tells of who told the pod to end.
fn words(pod: &Pod) -> Vec<Word> {
    let mut words = Vec::new();
    if let Some(deadline) = &pod.metadata.deletion_timestamp {
        // The API says until when the pod may take, and how long it was given.
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
    // Who ends by itself is given no reason. One of a pod that runs is an old one: its node was lost for a while.
    let reason = status.reason.as_deref().filter(|it| !it.is_empty());
    if let Some(reason) = reason.filter(|_| phase(pod).is_terminal()) {
        // Kubelet looks whether it is time, so it is never earlier; its clock is that of the containers' ends.
        let deadline = || {
            let started = status.start_time.as_ref()?.0.as_second();
            Some(started.saturating_add(pod.spec.active_deadline_seconds?))
        };
        words.push(Word {
            why: told(reason),
            second: (reason == DEADLINE).then(deadline).flatten(),
        });
    }
    let mut conditions = status.conditions.iter();
    if let Some(condition) = conditions.find(|it| it.kind == DISRUPTION && it.status == "True") {
        let reason = condition.reason.as_deref().unwrap_or_default();
        // Others set it before they delete the pod; kubelet when the containers have ended, and the time is that of the setting.
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

/// Why the pod did not come to its own end, unless all these ends came before anybody told it to end.
fn cut_short(pod: &Pod, ends: &[Option<&Terminated>]) -> Option<String> {
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
        _ if terminal => failed(format!("the pod ended, and container {name} never did")),
        _ if gone => failed(format!(
            "the pod is gone, and container {name} had not ended when it was last seen"
        )),
        _ => Decision::Undecided,
    }
}
