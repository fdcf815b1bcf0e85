//! The other nodes as sources of content: what the distribution asks of them, and the choice
//! between their content and that of the shared tier. The choice is made without I/O and without a
//! clock; `search` asks.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;

use super::decide::There;
use super::roster::{AskedClone, Reader};
use crate::model::{
    ArtifactId, CacheKey, Name, NodeId, OwnerView, Reference, Sharing, Tenant, Timestamp,
};
use crate::shared::{Found, LayerRef, Source};

/// The other nodes. `peer` knows where they are and how they are asked.
#[async_trait]
pub trait Peers: fmt::Debug + Send + Sync {
    /// Asks the peers that may have it for what they have under a name, for a pod. The channel has
    /// an answer of each one that has content or makes it, as it comes, and closes when all have
    /// answered or the time is over.
    fn find(
        &self,
        name: &Name,
        reader: &Reader,
        within: Duration,
        patience: Patience,
    ) -> mpsc::Receiver<PeerAnswer>;

    /// The key of the newest commit on peers of all task caches whose key begins so. `None`: there
    /// is none, or it is not known.
    async fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<CacheKey>;

    /// What a node has of a snapshot, for a volume of this node that is made of it.
    async fn snapshot(&self, node: &NodeId, asked: &AskedClone) -> Result<Frozen, NoSnapshot>;

    /// Whether a question with [`Patience::Waits`] is answered as soon as there is content.
    fn is_told(&self) -> bool;

    /// The counters.
    fn figures(&self) -> PeerFigures;
}

/// What a question does if there is no content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// It ends.
    Now,
    /// It waits for content, as long as it may.
    Waits,
}

/// What is known of a name on another node.
#[derive(Debug)]
pub enum PeerAnswer {
    /// It has content.
    Holds(Box<Holding>),
    /// It has none, but a volume there may become it.
    Makes(NodeId),
}

/// Content that a peer has.
pub struct Holding {
    /// The peer's name.
    pub node: String,
    /// Its place among the peers that were asked: the lowest is preferred as a source.
    pub rank: usize,
    /// The content of its name there, in the form of the tier. Number 0: none is known.
    pub found: Found,
    /// The content's state in the tier, as the peer knows it.
    pub sharing: Sharing,
    /// The peer.
    pub source: Arc<dyn Source>,
}

impl fmt::Debug for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let artifact = self.found.manifest.artifact;
        write!(f, "{artifact} of {}", self.node)
    }
}

/// A snapshot of a persistent volume on another node.
pub struct Frozen {
    /// Its layers, newest first. Empty if the volume was empty.
    pub layers: Vec<LayerRef>,
    /// The capacity of the volume, in bytes; 0: no limit.
    pub size: u64,
    /// How the owners of the volume were seen.
    pub view: OwnerView,
    /// The node.
    pub source: Arc<dyn Source>,
}

impl fmt::Debug for Frozen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} layers of {}", self.layers.len(), self.source.name())
    }
}

/// Why a node does not give a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoSnapshot {
    /// It has none of that id.
    Gone,
    /// It cannot give it, whenever it is asked. In words.
    Never(String),
    /// It gives it to no node that asks so. In words. It may not have seen the order yet.
    Refused(String),
    /// Not now: the node does not answer, or prepares the snapshot. In words.
    NotYet(String),
}

/// Counters of content that moves between nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerFigures {
    /// Peers in the list.
    pub peers: u64,
    /// Names that peers were asked for, each peer counted.
    pub questions: u64,
    /// Questions that had no answer in time, or an error.
    pub questions_failed: u64,
    /// Bytes that came from peers, as they travelled.
    pub received_bytes: u64,
    /// Names whose place the controller told.
    pub located: u64,
    /// Whether the controller can be asked.
    pub connected: bool,
    /// Artifacts that peers were given an answer about.
    pub offered: u64,
    /// Streams of tables and content that were sent to peers.
    pub sent: u64,
    /// Their bytes, as they travelled.
    pub sent_bytes: u64,
    /// Streams that are being sent now.
    pub sending: u64,
    /// Streams that peers did not get because as many ran as may.
    pub busy: u64,
    /// Calls that were refused: an unknown key, or content that the peer may not have.
    pub refused: u64,
    /// Reports of damage, made or received.
    pub damaged: u64,
}

/// The facts that decide about a holding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) artifact: ArtifactId,
    pub(super) made: Timestamp,
    pub(super) sharing: Sharing,
}

impl Candidate {
    pub(super) fn of(holding: &Holding) -> Self {
        Self {
            artifact: holding.found.manifest.artifact,
            made: holding.found.manifest.made,
            sharing: holding.sharing,
        }
    }
}

/// The source of the content that a volume starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// The tier's answer counts.
    Tier,
    /// This artifact, which peers have.
    Peers(ArtifactId),
}

/// Chooses among what peers have and what the tier says.
///
/// Among peers it is the artifact that would have the name if all were on one node: the first
/// resource cache, else the last commit. Content that the tier cleared does not count. If the tier
/// shows other content, then peers win only with a commit that is not in the tier yet.
pub(super) fn choose(reference: &Reference, holdings: &[Candidate], tier: There) -> Choice {
    let cleared = match tier {
        There::Unknown => 0,
        There::Nothing { cleared, .. } | There::Content { cleared, .. } => cleared,
    };
    let order = |it: &&Candidate| (it.made, it.artifact);
    let valid = holdings
        .iter()
        .filter(|it| !it.sharing.is_older_than_clear(cleared));
    let best = if reference.first_writer_wins() {
        valid.min_by_key(order)
    } else {
        valid.max_by_key(order)
    };
    let Some(best) = best else {
        return Choice::Tier;
    };
    let There::Content {
        number, artifact, ..
    } = tier
    else {
        return Choice::Peers(best.artifact);
    };
    let has_shown = holdings.iter().any(|it| it.artifact == artifact);
    let is_newer = if reference.first_writer_wins() {
        false
    } else {
        best.sharing.is_wanted() || best.sharing.number.is_some_and(|it| it > number)
    };
    if is_newer {
        Choice::Peers(best.artifact)
    } else if has_shown {
        Choice::Peers(artifact)
    } else {
        Choice::Tier
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(artifact: u128, made: u64, sharing: Sharing) -> Candidate {
        Candidate {
            artifact: ArtifactId::from_bits(artifact),
            made: Timestamp(made),
            sharing,
        }
    }

    fn number(number: u64) -> Sharing {
        Sharing {
            number: Some(number),
            ..Sharing::default()
        }
    }

    fn shown(number: u64, cleared: u64, artifact: u128) -> There {
        There::Content {
            number,
            cleared,
            artifact: ArtifactId::from_bits(artifact),
        }
    }

    #[test]
    fn the_last_commit_or_the_first_resource_cache_is_chosen() {
        let waiting = Sharing::default();
        let copy = Sharing {
            copied: true,
            ..waiting
        };
        let peers = |artifact| Choice::Peers(ArtifactId::from_bits(artifact));
        let cleared = There::Nothing {
            number: 6,
            cleared: 6,
            evicted: false,
        };
        let lost = There::Nothing {
            number: 6,
            cleared: 0,
            evicted: false,
        };
        let two = [held(1, 10, waiting), held(2, 20, waiting)];
        for (kind, holdings, tier, choice) in [
            ("task-cache/x", &[][..], There::Unknown, Choice::Tier),
            ("task-cache/x", &two, There::Unknown, peers(2)),
            ("artifact/x", &two, There::Unknown, peers(2)),
            ("resource-cache/x", &two, There::Unknown, peers(1)),
            // The tier is empty, or lost the content.
            ("task-cache/x", &two, lost, peers(2)),
            (
                "task-cache/x",
                &[held(1, 10, number(5))],
                cleared,
                Choice::Tier,
            ),
            ("task-cache/x", &[held(1, 10, number(6))], cleared, peers(1)),
            // A commit that waits for its upload is the newest.
            ("task-cache/x", &two, shown(5, 0, 9), peers(2)),
            ("resource-cache/x", &two, shown(5, 0, 9), Choice::Tier),
            // A copy; only the node that made it knows whether it was uploaded.
            (
                "task-cache/x",
                &[held(1, 10, copy)],
                shown(5, 0, 9),
                Choice::Tier,
            ),
            (
                "task-cache/x",
                &[held(1, 10, copy)],
                shown(5, 0, 1),
                peers(1),
            ),
            (
                "task-cache/x",
                &[held(1, 10, number(4))],
                shown(5, 0, 9),
                Choice::Tier,
            ),
            (
                "task-cache/x",
                &[held(1, 10, number(6))],
                shown(5, 0, 9),
                peers(1),
            ),
            (
                "resource-cache/x",
                &[held(2, 20, number(5))],
                shown(5, 0, 2),
                peers(2),
            ),
        ] {
            let reference = kind.parse().expect("a reference");
            let chosen = choose(&reference, holdings, tier);
            assert_eq!(chosen, choice, "{kind} {holdings:?} {tier:?}");
        }
    }
}
