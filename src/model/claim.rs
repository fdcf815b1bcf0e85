//! Volumes that outlive pods: claims, the snapshots taken of them, and groups of snapshots.
//!
//! A claim is a volume that belongs to a PersistentVolumeClaim: made by name, durable, on one node. Its content is a stack
//! of immutable layers and a private top, like every volume's; a snapshot is the stack at one moment.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::id::{LayerId, VolumeId};
use super::root::RootAttributes;
use super::time::Timestamp;

/// What a clone or snapshot of a claim does whose pods are writing, where the backend cannot freeze it (overlay, copy).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LiveClone {
    /// It is refused: the caller stops the pods, or clones before they start.
    #[default]
    Refuse,
    /// The claim's own top is copied as it is found, by reflink where the filesystem can: not one moment of it.
    Copy,
}

/// What a StorageClass says, once and for all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimParameters {
    /// What the root directory looks like.
    #[serde(default)]
    pub root: RootAttributes,
    /// What happens when it is cloned while pods write to it.
    #[serde(default)]
    pub live_clone: LiveClone,
}

/// What of a claim a VolumeAttributesClass may change later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MutableParameters {
    /// The most bytes it may hold of its own; its capacity holds too, so more than that means nothing until it has grown.
    /// `None`: its capacity alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<u64>,
    /// How long after its last use it may be deleted by garbage collection; `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

/// What a VolumeAttributesClass names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MutableChange {
    /// The most bytes that the claim may hold of its own.
    pub size_limit: Option<u64>,
    /// How long after its last use it may be deleted.
    pub ttl: Option<Ttl>,
}

/// A `ttl` that is named. What is not named stays, so never has a name too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ttl {
    /// Garbage collection deletes it never.
    Never,
    /// So many seconds.
    Seconds(u64),
}

impl MutableChange {
    /// What a claim has after this change: what it does not name stays as it was before, in a new claim by default.
    #[must_use]
    pub fn over(self, before: MutableParameters) -> MutableParameters {
        MutableParameters {
            size_limit: self.size_limit.or(before.size_limit),
            ttl_seconds: match self.ttl {
                None => before.ttl_seconds,
                Some(Ttl::Never) => None,
                Some(Ttl::Seconds(seconds)) => Some(seconds),
            },
        }
    }
}

/// Where a claim's first content came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimSource {
    /// A snapshot's.
    Snapshot(SnapshotId),
    /// Another claim's, at the moment of the clone.
    Claim(VolumeId),
}

/// How owners are seen: one id on disk changes places with another. What is on disk is never changed.
///
/// The ids on disk are remembered with the claim: its root's owner, by which a fork of an artifact is swapped, is for the
/// pods of a claim to change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerView {
    /// On disk, and as it is seen; `None`: as on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<(u32, u32)>,
    /// The same for groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<(u32, u32)>,
}

impl OwnerView {
    fn is_identity(&self) -> bool {
        *self == Self::default()
    }
}

/// A claim, as the index holds it: durable, whatever the boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    /// Its id: `vol-` and 32 hex digits, a function of its name, so that a repeated request finds it.
    pub id: VolumeId,
    /// The name it was asked for by.
    pub name: String,
    /// When it was made.
    pub created: Timestamp,
    /// When it was last mounted, unmounted, cloned or snapshotted.
    pub last_used: Timestamp,
    /// What was promised, in bytes; 0: nothing.
    pub capacity: u64,
    /// What its class says.
    pub parameters: ClaimParameters,
    /// What may be changed.
    pub mutable: MutableParameters,
    /// What that was when it was made, which a repeated request brings; `None`: a version made it that did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_with: Option<MutableParameters>,
    /// What its first content came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ClaimSource>,
    /// The layers below its top, newest first; empty: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
    /// Whether a top of its own is among the layers: its root looks as that does, not as its class says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
    /// How its owners are seen.
    #[serde(default, skip_serializing_if = "OwnerView::is_identity")]
    pub view: OwnerView,
    /// The nodes it was attached to by ControllerPublishVolume, and whether for reading only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attached: Vec<Attachment>,
}

impl Claim {
    /// The most bytes it may hold of its own.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        let capacity = Some(self.capacity).filter(|bytes| *bytes > 0);
        [capacity, self.mutable.size_limit]
            .into_iter()
            .flatten()
            .min()
    }

    /// What the root of its next new top differs in from the newest layer's root.
    #[must_use]
    pub fn root(&self) -> RootAttributes {
        let class = self.parameters.root;
        if self.layers.is_empty() {
            return class;
        }
        RootAttributes {
            mode: class.mode.filter(|_| !self.made),
            uid: self.view.uid.map(|(_, seen)| seen),
            gid: self.view.gid.map(|(_, seen)| seen),
            mount_group: None,
        }
    }

    /// The owners on disk that the root's are swapped with.
    #[must_use]
    pub fn owners_on_disk(&self) -> (u32, u32) {
        let on_disk = |pair: Option<(u32, u32)>| pair.map_or(0, |(on_disk, _)| on_disk);
        (on_disk(self.view.uid), on_disk(self.view.gid))
    }

    /// When it may be deleted for want of use.
    #[must_use]
    pub fn expires(&self) -> Option<Timestamp> {
        let ttl = self.mutable.ttl_seconds?;
        Some(self.last_used.after(Duration::from_secs(ttl)))
    }
}

/// `claim.json` in a claim's directory. The index says what the claim is; this says what of it is of one boot, and lets
/// `check --rebuild` find the claim again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRecord {
    /// The version of this record's form: [`ClaimRecord::FORMAT`].
    pub format: u32,
    /// The boot in which it is mounted at these targets.
    pub boot: String,
    /// The claim, as it was when this was written.
    pub claim: Claim,
    /// Where it is mounted.
    pub targets: Vec<ClaimTarget>,
    /// Why its size limit does not hold, when it has one and it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_unenforced: Option<String>,
}

impl ClaimRecord {
    /// The form that this version writes and reads.
    pub const FORMAT: u32 = 1;
}

/// One place where a claim is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimTarget {
    /// Where.
    pub path: PathBuf,
    /// Whether it is a staging path, made by the caller.
    pub staging: bool,
    /// Whether it shows the claim for reading only.
    pub read_only: bool,
    /// What else was asked for there; `None`: a version wrote this that did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<MountCapability>,
}

/// What a mount of a claim was asked for with. A repeated call for the same place must bring the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MountCapability {
    /// Whether its access mode allows several targets at once.
    pub multiple_targets: bool,
    /// The pod's fsGroup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_group: Option<u32>,
}

/// One `ControllerPublishVolume`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The node.
    pub node: String,
    /// Whether for reading only.
    pub read_only: bool,
    /// The access mode, as CSI numbers it: a repeated call must bring the same.
    pub access_mode: i32,
}

/// The id of a snapshot, or of a group of them: `snap-`, `member-` (of a group) or `group-` and 32 hex digits, a function of its name.
pub type SnapshotId = VolumeId;

/// A snapshot: the stack of a claim at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// The name it was asked for by.
    pub name: String,
    /// The claim it was taken of; that may be gone.
    pub source: VolumeId,
    /// When.
    pub created: Timestamp,
    /// The source's capacity then: a claim restored from it is no smaller.
    pub size: u64,
    /// Its layers, newest first; empty: the claim was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
    /// How the claim's owners were seen.
    #[serde(default, skip_serializing_if = "OwnerView::is_identity")]
    pub view: OwnerView,
    /// The group it is one of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<SnapshotId>,
}

/// A group of snapshots: one instant over several claims of one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotGroup {
    /// Its id.
    pub id: SnapshotId,
    /// The name it was asked for by.
    pub name: String,
    /// When.
    pub created: Timestamp,
    /// Its snapshots, in the order in which their sources were named.
    pub snapshots: Vec<SnapshotId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_of_capacity_and_size_limit_is_the_limit() {
        let claim = |capacity, size_limit| Claim {
            id: "vol-1".parse().expect("id"),
            name: "n".to_owned(),
            created: Timestamp(1),
            last_used: Timestamp(1_000),
            capacity,
            parameters: ClaimParameters::default(),
            mutable: MutableParameters {
                size_limit,
                ttl_seconds: Some(2),
            },
            made_with: None,
            source: None,
            layers: Vec::new(),
            made: false,
            view: OwnerView::default(),
            attached: Vec::new(),
        };
        assert_eq!(claim(0, None).limit(), None);
        assert_eq!(claim(5, None).limit(), Some(5));
        assert_eq!(claim(5, Some(3)).limit(), Some(3));
        assert_eq!(claim(5, Some(9)).limit(), Some(5));
        assert_eq!(claim(0, Some(9)).limit(), Some(9));
        assert_eq!(claim(0, None).expires(), Some(Timestamp(3_000)));
    }

    #[test]
    fn the_class_shapes_the_first_root_only() {
        let class = RootAttributes {
            mode: Some(0o700),
            uid: Some(7),
            ..RootAttributes::default()
        };
        let mut claim = Claim {
            id: "vol-1".parse().expect("id"),
            name: "n".to_owned(),
            created: Timestamp(1),
            last_used: Timestamp(1),
            capacity: 0,
            parameters: ClaimParameters {
                root: class,
                live_clone: LiveClone::Refuse,
            },
            mutable: MutableParameters::default(),
            made_with: None,
            source: None,
            layers: Vec::new(),
            made: false,
            view: OwnerView::default(),
            attached: Vec::new(),
        };
        assert_eq!(claim.root(), class);
        claim.layers = vec![LayerId::from_bits(1)];
        claim.made = true;
        assert_eq!(
            claim.root(),
            RootAttributes::default(),
            "it was given away by whom it belongs to"
        );
        claim.made = false;
        claim.view.uid = Some((0, 7));
        assert_eq!(claim.root(), class, "a clone");
    }
}
