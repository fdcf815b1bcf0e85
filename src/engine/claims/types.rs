//! Requests and answers for claims and snapshots.
//! Plain types without behaviour.

use std::path::PathBuf;

use crate::model::{
    ClaimParameters, ClaimSource, MutableParameters, Snapshot, SnapshotGroup, VolumeId,
};

/// What CreateVolume asks for, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateClaim {
    /// The name by which a repeated request is known.
    pub name: String,
    /// At least that many bytes.
    pub required_bytes: u64,
    /// At most that many; `None`: no bound.
    pub limit_bytes: Option<u64>,
    /// What its class says.
    pub parameters: ClaimParameters,
    /// What may be changed later.
    pub mutable: MutableParameters,
    /// What its first content comes from.
    pub source: Option<ClaimSource>,
}

#[cfg(test)]
impl CreateClaim {
    /// A request for an empty claim without limits.
    pub(crate) fn empty(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            required_bytes: 0,
            limit_bytes: None,
            parameters: ClaimParameters::default(),
            mutable: MutableParameters::default(),
            source: None,
        }
    }
}

/// Claims, or snapshots, in the order of their ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// What is on the page.
    pub items: Vec<T>,
    /// The id after which the next page begins; `None`: this is the last one.
    pub next: Option<VolumeId>,
}

/// A group, and its snapshots.
pub type Group = (SnapshotGroup, Vec<Snapshot>);

/// Which snapshots to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Only those of this claim.
    pub source: Option<String>,
    /// Only this one.
    pub id: Option<String>,
}

/// Where a claim is in use on its node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimUse {
    /// Where it is mounted, staging paths included.
    pub targets: Vec<PathBuf>,
    /// Why it is not healthy, in words; empty: it is.
    pub problems: Vec<String>,
}

/// A mount of a claim: NodeStageVolume and NodePublishVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountClaim {
    /// Which claim.
    pub claim: VolumeId,
    /// Where; the last component is made here if it is not there. A staging path exists already.
    pub target: PathBuf,
    /// Whether it is the staging path: that is made by the caller, and stays when it is unmounted.
    pub staging: bool,
    /// For a publish: the staging path of which it is a bind.
    pub staged_at: Option<PathBuf>,
    /// Whether the pod may only read.
    pub read_only: bool,
    /// Whether it may be published at several targets at once.
    pub multiple_targets: bool,
    /// The pod's fsGroup.
    pub mount_group: Option<u32>,
}

/// How much new claims may still take. Their sizes are limits and set nothing aside, so the two are
/// not compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes that can be written: those that are free, and those that eviction would free.
    pub available: u64,
    /// The size of the largest claim that can be made.
    pub largest: u64,
}

/// A pool where that much can be written takes an empty claim of any size up to the pool's.
const ENOUGH: u64 = 1 << 30;

impl Capacity {
    /// What a pool of `largest` bytes must have left for an empty claim of `wanted` bytes.
    pub(super) fn needed(largest: u64, wanted: u64) -> u64 {
        wanted.min(ENOUGH).min(largest / 16)
    }

    /// What it lacks to take empty claims of any size, in bytes; `None`: it takes them.
    #[must_use]
    pub fn lacks(&self) -> Option<u64> {
        let lacks = Self::needed(self.largest, self.largest).saturating_sub(self.available);
        (lacks > 0).then_some(lacks)
    }
}
