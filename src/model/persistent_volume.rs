//! Persistent volumes ("claims"), their snapshots, and groups of snapshots.
//!
//! A claim is the volume of a PersistentVolumeClaim: created by name, durable, on one node. It has
//! a stack of immutable layers and a private top. A snapshot is its stack at one moment.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::id::{LayerId, VolumeId};
use super::root::RootAttributes;
use super::time::Timestamp;

/// Whether to clone or snapshot a claim that pods write to and the backend cannot freeze.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LiveClone {
    /// Refuse. The caller stops the pods, or clones before they start.
    #[default]
    Refuse,
    /// Copy the top while pods write, by reflink if possible: not a copy of one moment.
    Copy,
}

/// A StorageClass's immutable parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimParameters {
    /// The owner and mode of its root directory.
    #[serde(default)]
    pub root: RootAttributes,
    /// Whether to clone it while pods write to it.
    #[serde(default)]
    pub live_clone: LiveClone,
    /// Whether a clone may be made on another node than its source's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub clone_elsewhere: bool,
}

/// The parameters that a VolumeAttributesClass may change later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MutableParameters {
    /// The limit for its private content, in bytes. The capacity limits it, too. `None`: only that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<u64>,
    /// How long after its last use garbage collection may delete it; `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

/// The parameters in a VolumeAttributesClass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MutableChange {
    /// The limit for the claim's private content, in bytes.
    pub size_limit: Option<u64>,
    /// How long after its last use garbage collection may delete it.
    pub ttl: Option<Ttl>,
}

/// An explicit `ttl`. An absent one changes nothing, so "never" needs a value too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ttl {
    /// Garbage collection never deletes it.
    Never,
    /// The seconds after the last use.
    Seconds(u64),
}

impl MutableChange {
    /// A claim's parameters after this change. Absent ones keep their value or default.
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

/// The source of a claim's first content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimSource {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// Another claim, at the moment of the clone.
    Claim(VolumeId),
}

/// How owners are seen: an id on disk is exchanged with another. The owners on disk never change.
///
/// The ids on disk are stored with the claim, because its pods may change the root's owner. (A fork
/// of an artifact takes them from its root.)
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerView {
    /// The user id on disk and as seen; `None`: no exchange.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<(u32, u32)>,
    /// The group id on disk and as seen; `None`: no exchange.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<(u32, u32)>,
}

impl OwnerView {
    fn is_identity(&self) -> bool {
        *self == Self::default()
    }
}

/// A claim in the index. It is durable across boots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolume {
    /// Its id: `vol-` and 32 hex digits, derived from the name so that a repeated request finds it.
    pub id: VolumeId,
    /// The name in the CreateVolume request.
    pub name: String,
    /// When it was created.
    pub created: Timestamp,
    /// When it was last mounted, unmounted, cloned or snapshotted.
    pub last_used: Timestamp,
    /// Its capacity in bytes; 0: none.
    pub capacity: u64,
    /// Its StorageClass's parameters.
    pub parameters: ClaimParameters,
    /// The parameters that may change.
    pub mutable: MutableParameters,
    /// The mutable parameters at creation, which a repeated request has; `None` in older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_with: Option<MutableParameters>,
    /// The source of its first content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ClaimSource>,
    /// The layers below its top, newest first. May be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
    /// Whether one of the layers was its own top. Then the root's owner and mode come from there
    /// and not from the class.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made: bool,
    /// How owners appear in it.
    #[serde(default, skip_serializing_if = "OwnerView::is_identity")]
    pub view: OwnerView,
    /// The nodes that ControllerPublishVolume attached it to, and whether read-only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attached: Vec<Attachment>,
}

impl PersistentVolume {
    /// The effective limit for its private content, in bytes.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        let capacity = Some(self.capacity).filter(|bytes| *bytes > 0);
        [capacity, self.mutable.size_limit]
            .into_iter()
            .flatten()
            .min()
    }

    /// How the root of its next top differs from the newest layer's root.
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

    /// The owners on disk that are exchanged with the root's.
    #[must_use]
    pub fn owners_on_disk(&self) -> (u32, u32) {
        let on_disk = |pair: Option<(u32, u32)>| pair.map_or(0, |(on_disk, _)| on_disk);
        (on_disk(self.view.uid), on_disk(self.view.gid))
    }

    /// When garbage collection may delete it for lack of use.
    #[must_use]
    pub fn expires(&self) -> Option<Timestamp> {
        let ttl = self.mutable.ttl_seconds?;
        Some(self.last_used.after(Duration::from_secs(ttl)))
    }
}

/// `claim.json` in a claim's directory: its state of one boot. `check --rebuild` restores the claim
/// from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRecord {
    /// The version of this record's format: [`ClaimRecord::FORMAT`].
    pub format: u32,
    /// The boot in which the targets are mounted.
    pub boot: String,
    /// The claim when this was written.
    pub claim: PersistentVolume,
    /// The mounts of the claim.
    pub targets: Vec<ClaimTarget>,
    /// Why its size limit is not enforced, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_unenforced: Option<String>,
}

impl ClaimRecord {
    /// The format that this version reads and writes.
    pub const FORMAT: u32 = 1;
}

/// One mount of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimTarget {
    /// The target path.
    pub path: PathBuf,
    /// Whether it is a staging path, which the caller created.
    pub staging: bool,
    /// Whether the mount is read-only.
    pub read_only: bool,
    /// The other parameters of the request; `None` in older records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<MountCapability>,
}

/// The parameters of a mount request. A repeated request for a path must have the same ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MountCapability {
    /// Whether the access mode allows several targets.
    pub multiple_targets: bool,
    /// The pod's fsGroup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_group: Option<u32>,
}

/// One `ControllerPublishVolume`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The node's id.
    pub node: String,
    /// Whether read-only.
    pub read_only: bool,
    /// The access mode's CSI number. A repeated call must have the same one.
    pub access_mode: i32,
}

/// The id of a snapshot or group: `snap-`, `member-` (in a group) or `group-` and 32 hex digits.
pub type SnapshotId = VolumeId;

/// A snapshot: a claim's stack at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// The name in the request.
    pub name: String,
    /// The source claim. It may be deleted.
    pub source: VolumeId,
    /// When it was taken.
    pub created: Timestamp,
    /// The source's capacity at that time. A claim restored from it is not smaller.
    pub size: u64,
    /// Its layers, newest first. Empty if the claim was empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
    /// How the claim's owners were seen.
    #[serde(default, skip_serializing_if = "OwnerView::is_identity")]
    pub view: OwnerView,
    /// Its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<SnapshotId>,
}

/// A group of snapshots: several claims of one node at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotGroup {
    /// Its id.
    pub id: SnapshotId,
    /// The name in the request.
    pub name: String,
    /// When it was taken.
    pub created: Timestamp,
    /// Its snapshots, in the order of the sources in the request.
    pub snapshots: Vec<SnapshotId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_of_capacity_and_size_limit_is_the_limit() {
        let claim = |capacity, size_limit| PersistentVolume {
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
        let mut claim = PersistentVolume {
            id: "vol-1".parse().expect("id"),
            name: "n".to_owned(),
            created: Timestamp(1),
            last_used: Timestamp(1),
            capacity: 0,
            parameters: ClaimParameters {
                root: class,
                live_clone: LiveClone::Refuse,
                clone_elsewhere: false,
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
