//! Volumes that outlive pods: claims, the snapshots taken of them, and groups of snapshots.
//!
//! A claim is a volume that belongs to a PersistentVolumeClaim: made by name, durable, on one node. Its content is a stack
//! of immutable layers and a private top, like every volume's; a snapshot is the stack at one moment.

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

/// What a VolumeAttributesClass may change later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MutableParameters {
    /// The most bytes it may hold of its own, below its capacity; `None`: its capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<u64>,
    /// How long after its last use it may be deleted by garbage collection; `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
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
    /// When it was last published.
    pub last_used: Timestamp,
    /// What was promised, in bytes; 0: nothing.
    pub capacity: u64,
    /// What its class says.
    pub parameters: ClaimParameters,
    /// What may be changed.
    pub mutable: MutableParameters,
    /// What its first content came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ClaimSource>,
    /// The layers below its top, newest first; empty: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
    /// The nodes it was attached to by ControllerPublishVolume, and whether for reading only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attached: Vec<Attachment>,
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

/// The id of a snapshot, or of a group of them: `snap-` or `group-` and 32 hex digits, a function of its name.
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
