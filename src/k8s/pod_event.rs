//! What an event on a pod says: the engine's notices in words, and mistakes in a pod's annotations.
//! `events` sends them.

use k8s_openapi::api::core::v1::ObjectReference;

use super::outcomes::{PodOutcomes, UNSEEN};
use crate::engine::Awaited;
use crate::engine::notice::{Forked, NotCommitted, Notice, What};
use crate::model::{Pod, Tenant, readable_age, readable_bytes};

/// An event for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodEvent {
    pub(super) tenant: Tenant,
    pub(super) pod: Pod,
    pub(super) warns: bool,
    pub(super) reason: &'static str,
    pub(super) action: &'static str,
    pub(super) note: String,
    /// Whether it is dropped first.
    pub(super) gives_way: bool,
}

impl PodEvent {
    /// A mistake in an annotation of a pod that still runs.
    pub(super) fn bad_annotation(awaited: &Awaited, problem: String) -> Self {
        Self {
            tenant: awaited.tenant.clone(),
            pod: awaited.pod.clone(),
            warns: true,
            reason: "BadAnnotation",
            action: "Commit",
            note: problem,
            gives_way: false,
        }
    }

    /// The event for a notice. `known` has the reason why a pod failed.
    pub(super) fn of(notice: Notice, known: &PodOutcomes) -> Self {
        let gives_way = notice.what.gives_way();
        let (warns, reason, action, note) = match notice.what {
            What::WaitingForInput {
                reference,
                state,
                at_most,
            } => {
                let at_most = humantime::format_duration(at_most);
                let note = format!("waiting up to {at_most} for {reference}: {state}");
                (false, "WaitingForInput", "Publish", note)
            }
            What::Forked(hit) => (false, "Forked", "Publish", describe(&hit)),
            What::HeldOpen { reference } => {
                let note = format!(
                    "{reference} is not committed yet: end the process that has its files open"
                );
                (true, "HeldOpen", "Commit", note)
            }
            What::Committed { reference } => {
                let note = format!("{reference} is committed");
                (false, "Committed", "Commit", note)
            }
            What::NotCommitted { reference, why } => {
                let is_refused = matches!(why, NotCommitted::NotAllowed { .. });
                let (warns, why) = why_not_committed(&why, &notice.pod, known);
                let note = format!("{reference} is not committed: {why}");
                let reason = if is_refused {
                    "CommitNotAllowed"
                } else {
                    "NotCommitted"
                };
                (warns, reason, "Commit", note)
            }
            What::Fetching {
                reference,
                from,
                bytes,
            } => {
                let bytes = readable_bytes(bytes);
                let note = format!("fetching {reference} from {from}, up to {bytes}");
                (false, "Fetching", "Publish", note)
            }
            What::NotFetched {
                reference,
                from,
                why,
            } => {
                let note = format!("starting without {reference} of {from}: {why}");
                (true, "NotFetched", "Publish", note)
            }
            What::Shared { reference } => {
                let note = format!("{reference} is in the shared tier");
                (false, "Shared", "Share", note)
            }
            What::NotShared { reference, why } => {
                let note = format!("{reference} stays on this node: {why}");
                (false, "NotShared", "Share", note)
            }
            What::SharedTierUnusable { why } => {
                let note = format!("content is neither fetched nor shared: {why}");
                (true, "SharedTierUnusable", "Share", note)
            }
            What::SharedTierFull { why } => {
                let note = format!("content is not shared for now: {why}");
                (true, "SharedTierFull", "Share", note)
            }
            What::SizeLimitNotEnforced { why } => {
                let note = format!("sizeLimit is not enforced: {why}");
                (true, "SizeLimitNotEnforced", "Publish", note)
            }
        };
        Self {
            tenant: notice.tenant,
            pod: notice.pod,
            warns,
            reason,
            action,
            note,
            gives_way,
        }
    }

    pub(super) fn is_one_event_with(&self, other: &Self) -> bool {
        self.pod.uid == other.pod.uid && self.reason == other.reason && self.warns == other.warns
    }

    pub(super) fn regarding(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(self.tenant.to_string()),
            name: Some(self.pod.name.clone()),
            uid: Some(self.pod.uid.to_string()),
            ..ObjectReference::default()
        }
    }
}

/// The content that a volume started from, as far as it is known.
fn describe(hit: &Forked) -> String {
    let mut text = format!("forked {}", hit.reference);
    let mut add = |more: String| text.push_str(&more);
    if let Some(asked) = &hit.instead_of {
        add(format!(" instead of {asked}"));
    }
    if let Some(bytes) = hit.bytes {
        add(format!(", {}", readable_bytes(bytes)));
    }
    add(format!(", committed {} ago", readable_age(hit.age)));
    if let Some(node) = &hit.made_on {
        add(format!(" on {node}"));
    }
    if let Some(from) = &hit.fetched_from {
        add(format!(", fetched from {from}"));
    }
    text
}

/// Why content was not committed, and whether that is a warning. A result that the pod's users
/// caused or could expect is none.
fn why_not_committed(why: &NotCommitted, pod: &Pod, known: &PodOutcomes) -> (bool, String) {
    let more = match why {
        NotCommitted::PodFailed => known.why_failed(&pod.uid),
        _ => None,
    };
    let warns = match why {
        NotCommitted::PodFailed
        | NotCommitted::Never
        | NotCommitted::NoMarker
        | NotCommitted::NameTaken
        | NotCommitted::NotAllowed { .. }
        | NotCommitted::Cleared => more.as_deref() == Some(UNSEEN),
        NotCommitted::OutcomeUnknown { .. }
        | NotCommitted::PoliciesUnknown { .. }
        | NotCommitted::Refused(_)
        | NotCommitted::Damaged
        | NotCommitted::Lost
        | NotCommitted::Rebooted
        | NotCommitted::NoRoom { .. }
        | NotCommitted::TooLarge { .. } => true,
    };
    (warns, more.unwrap_or_else(|| why.to_string()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_hit_is_described_by_what_is_known_of_it() {
        let text = |what| {
            let notice = Notice {
                tenant: "ci".parse().expect("a label"),
                pod: Pod {
                    uid: "p".parse().expect("a uid"),
                    name: "p".to_owned(),
                    service_account: None,
                },
                what,
            };
            let event = PodEvent::of(notice, &PodOutcomes::default());
            assert_eq!((event.warns, event.reason), (false, "Forked"));
            assert!(event.gives_way);
            event.note
        };
        let reference = |text: &str| text.parse().expect("a reference");
        let known = What::Forked(Forked {
            reference: reference("task-cache/main"),
            instead_of: Some(reference("task-cache/pr-7")),
            bytes: Some(6 << 28),
            age: Duration::from_secs(4 * 3600),
            made_on: Some("node-2".to_owned()),
            fetched_from: Some("peer node-2".to_owned()),
        });
        assert_eq!(
            text(known),
            "forked task-cache/main instead of task-cache/pr-7, 1.5 GiB, committed 4h ago on \
             node-2, fetched from peer node-2"
        );
        let unknown = What::Forked(Forked {
            reference: reference("artifact/o"),
            instead_of: None,
            bytes: None,
            age: Duration::from_secs(2),
            made_on: None,
            fetched_from: None,
        });
        assert_eq!(text(unknown), "forked artifact/o, committed 2s ago");
    }
}
