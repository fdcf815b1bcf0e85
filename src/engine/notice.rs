//! Notices: news about a pod's volumes for the pod's users, in addition to the answers to callers.
//!
//! The engine sends a notice and forgets it: the channel is bounded, and nothing here waits. The
//! caller of the engine chooses the receiver and the wording. Without a receiver no notice is made.
//! A failed call needs no notice: kubelet makes an event of its error.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::model::{Pod, Reference, Tenant, layout};

/// Something about a pod's volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Whose it is.
    pub tenant: Tenant,
    /// Which pod's.
    pub pod: Pod,
    /// What there is to say.
    pub what: What,
}

/// What there is to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A publish waits for content that is about to be sealed.
    WaitingForInput {
        /// For what.
        reference: Reference,
        /// How far that is.
        state: String,
        /// How long it waits at most.
        at_most: Duration,
    },
    /// A new volume started from content.
    Forked(Forked),
    /// The volume's pod is over, and its content cannot be sealed: a process could still change it.
    HeldOpen {
        /// As what it is to be sealed.
        reference: Reference,
    },
    /// The volume's content was sealed, durably.
    Committed {
        /// As what.
        reference: Reference,
    },
    /// The volume's content was discarded, although its `commit` allowed to keep it.
    NotCommitted {
        /// As what it would have been sealed.
        reference: Reference,
        /// Why not.
        why: NotCommitted,
    },
    /// A publish waits for content that is being fetched from another node or the shared tier.
    Fetching {
        /// The content.
        reference: Reference,
        /// From where.
        from: String,
        /// Its bytes, without layers that are on this node.
        bytes: u64,
    },
    /// A volume starts without content that another node or the shared tier has.
    NotFetched {
        /// The content.
        reference: Reference,
        /// Where it is.
        from: String,
        /// The cause.
        why: String,
    },
    /// The content is in the shared tier: other nodes can use it.
    Shared {
        /// The content.
        reference: Reference,
    },
    /// The shared tier refused the content; it stays on this node.
    NotShared {
        /// The content.
        reference: Reference,
        /// The cause.
        why: String,
    },
    /// The shared tier fails until a person changes something. Told once, to the first pod that
    /// could have used the tier.
    SharedTierUnusable {
        /// The error.
        why: String,
    },
    /// The shared tier has no space: content that is committed stays on its node for now. Told
    /// once, as [`What::SharedTierUnusable`].
    SharedTierFull {
        /// The error.
        why: String,
    },
    /// The volume has a size limit that does not hold.
    SizeLimitNotEnforced {
        /// Why not.
        why: String,
    },
}

/// The content that a new volume started from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forked {
    /// Its name.
    pub reference: Reference,
    /// The name that the volume asks for first, if that is another one: `reference` is one of its
    /// restore keys.
    pub instead_of: Option<Reference>,
    /// Its size; `None`: not measured yet.
    pub bytes: Option<u64>,
    /// How long ago it was committed.
    pub age: Duration,
    /// The node that committed it, as a message says it; `None`: not known.
    pub made_on: Option<String>,
    /// Where it was fetched from for this volume; `None`: it was on this node.
    pub fetched_from: Option<String>,
}

impl What {
    /// Whether it is dropped first. There may be one for each new volume, and the metrics count
    /// them, too. They must not take the place of news that a person has to know.
    #[must_use]
    pub fn gives_way(&self) -> bool {
        matches!(self, Self::Forked(_))
    }
}

/// Why a volume's content was not sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotCommitted {
    /// Its pod's outcome was told, and is not success.
    PodFailed,
    /// The outcome was not reported in time.
    OutcomeUnknown {
        /// How long it was waited for.
        waited: Duration,
    },
    /// Its `commit` is `never`.
    Never,
    /// Its `commit` is `on-marker`, and there was no marker.
    NoMarker,
    /// Another step's content has the name, and keeps it.
    NameTaken,
    /// The name was cleared in the cluster after the volume was published.
    Cleared,
    /// The policies of its namespace do not let its pod commit the name.
    NotAllowed {
        /// The pod's service account, if kubelet told it.
        account: Option<String>,
    },
    /// The policies of the cluster did not become known in time.
    PoliciesUnknown {
        /// How long they were waited for.
        waited: Duration,
    },
    /// The backend found something in it that cannot be sealed.
    Refused(String),
    /// The disk failed to write back data while it existed.
    Damaged,
    /// Its directory vanished from the pool.
    Lost,
    /// The node rebooted, or the pool's filesystem was unmounted, before the volume was sealed and
    /// on the disk.
    Rebooted,
    /// A seal is a copy here, and there was no room for it in time.
    NoRoom {
        /// How long it was tried.
        waited: Duration,
    },
    /// A seal is a copy here, and the pool can never hold it.
    TooLarge {
        /// How many bytes the copy takes at least.
        needs: u64,
        /// How many there are in all.
        pool: u64,
    },
}

impl NotCommitted {
    /// The backend found something wrong with what lies at a path within the volume.
    pub(super) fn refused(path: &str, why: &str) -> Self {
        Self::Refused(format!("{path}: {why}"))
    }
}

impl fmt::Display for NotCommitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PodFailed => f.write_str("its pod failed"),
            Self::OutcomeUnknown { waited } => {
                let waited = humantime::format_duration(*waited);
                write!(f, "the outcome of its pod was not reported within {waited}")
            }
            Self::Never => f.write_str("its commit is `never`"),
            Self::NoMarker => write!(f, "its step left no {}", layout::COMMIT_MARKER),
            Self::NameTaken => f.write_str(
                "another step's content has this name already: a resource cache keeps the first \
                 commit, any other name the newest",
            ),
            Self::Cleared => f.write_str("its name was cleared in the cluster after the pod began"),
            Self::NotAllowed {
                account: Some(account),
            } => write!(
                f,
                "the cache policies of its namespace do not let service account {account} commit \
                 this name"
            ),
            Self::NotAllowed { account: None } => f.write_str(
                "the cache policies of its namespace let only some service accounts commit this \
                 name, and that of the pod is not known",
            ),
            Self::PoliciesUnknown { waited } => {
                let waited = humantime::format_duration(*waited);
                write!(
                    f,
                    "this node did not get the cluster's cache policies from the controller within \
                     {waited}"
                )
            }
            Self::Refused(why) => write!(f, "its content cannot be sealed: {why}"),
            Self::Damaged => {
                f.write_str("the disk failed to write back data while the volume existed")
            }
            Self::Lost => f.write_str("its directory is gone from the pool"),
            Self::Rebooted => f.write_str(
                "the node was rebooted, or the pool's filesystem unmounted, before it was sealed",
            ),
            Self::NoRoom { waited } => {
                let waited = humantime::format_duration(*waited);
                write!(
                    f,
                    "the pool had no room within {waited} for the copy that a seal needs on this \
                     backend"
                )
            }
            Self::TooLarge { needs, pool } => write!(
                f,
                "the pool has {pool} bytes and cannot hold the volume and the copy of {needs} \
                 bytes that a seal needs on this backend"
            ),
        }
    }
}

/// Where the engine says its notices. Cheap to clone: clones share it.
#[derive(Debug, Clone)]
pub struct Notices {
    sender: mpsc::Sender<Notice>,
    lost: Arc<AtomicU64>,
}

impl Notices {
    /// A channel for at most `most` notices that are not received yet.
    #[must_use]
    pub fn channel(most: usize) -> (Self, mpsc::Receiver<Notice>) {
        let (sender, receiver) = mpsc::channel(most);
        let lost = Arc::default();
        (Self { sender, lost }, receiver)
    }

    /// How many notices were dropped, because the channel was full.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Sends a notice, or counts it as lost. One that gives way is sent only while more than half
    /// of the channel is free, and is not counted.
    pub fn say(&self, notice: Notice) {
        let is_half_full = self.sender.capacity() <= self.sender.max_capacity() / 2;
        if is_half_full && notice.what.gives_way() {
            return;
        }
        // Dropped rather than waited for: notices are for people, and nothing depends on them.
        if self.sender.try_send(notice).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(name: &str) -> Notice {
        Notice {
            tenant: "ci".parse().expect("a label"),
            pod: Pod {
                uid: "u".parse().expect("a uid"),
                name: name.to_owned(),
                service_account: None,
            },
            what: What::SizeLimitNotEnforced { why: String::new() },
        }
    }

    #[test]
    fn hits_leave_half_of_the_channel_to_other_notices() {
        let hit = || Notice {
            what: What::Forked(Forked {
                reference: "artifact/o".parse().expect("a reference"),
                instead_of: None,
                bytes: None,
                age: Duration::ZERO,
                made_on: None,
                fetched_from: None,
            }),
            ..notice("hit")
        };
        let (notices, mut heard) = Notices::channel(4);
        for _ in 0..3 {
            notices.say(hit());
        }
        notices.say(notice("a"));
        notices.say(notice("b"));
        notices.say(notice("c"));
        assert_eq!(notices.lost(), 1, "the last one");
        let mut pods = Vec::new();
        while let Ok(notice) = heard.try_recv() {
            pods.push(notice.pod.name);
        }
        assert_eq!(pods, ["hit", "hit", "a", "b"]);
    }

    #[test]
    fn no_call_waits_for_a_listener_and_lost_notices_are_counted() {
        let (notices, mut heard) = Notices::channel(2);
        for name in ["a", "b", "c"] {
            notices.say(notice(name));
        }
        assert_eq!(notices.lost(), 1);
        assert_eq!(heard.try_recv().expect("kept").pod.name, "a");
        notices.say(notice("d"));
        drop(heard);
        notices.say(notice("e"));
        assert_eq!(notices.lost(), 2);
    }
}
