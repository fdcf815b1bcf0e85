//! A volume's record and its pod.
//! Other modules store the record and manage the volume.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::artifact::{is_false, is_zero};
use super::attributes::{Keep, VolumeSpec};
use super::id::{ArtifactId, LayerId, VolumeId};
use super::name::{Name, Reference, Tenant};
use super::time::Timestamp;

/// A pod's uid, which distinguishes pods of one name.
///
/// 1 to 128 bytes of `A-Z a-z 0-9 - _ .`, not beginning with `.`: it is part of kubelet's paths.
/// (Static pods have uids that are not UUIDs.)
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PodUid(VolumeId);

impl PodUid {
    /// The uid as a string.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl FromStr for PodUid {
    type Err = super::id::IdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The pod of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// Its uid.
    pub uid: PodUid,
    /// Its name, for display.
    pub name: String,
    /// Its service account, as kubelet tells it. The policies of its namespace decide by it what it
    /// may commit. Older records lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account: Option<String>,
}

/// How the pod's work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The work succeeded.
    Succeeded,
    /// It failed, or its outcome will never be known.
    Failed,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        })
    }
}

/// The artifact that a volume becomes after its pod ended. The ids are chosen with the volume, so
/// that a seal that a crash interrupts and the driver repeats gives one artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SealPlan {
    /// The artifact's id.
    pub artifact: ArtifactId,
    /// The id of the layer for its private content.
    pub layer: LayerId,
    /// The artifact's name.
    pub reference: Reference,
    /// The condition for the seal, and the time to live.
    #[serde(flatten)]
    pub keep: Keep,
    /// The artifact's [`Sharing::base`](super::Sharing::base).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Whether the artifact never leaves this node.
    #[serde(default, skip_serializing_if = "is_false")]
    pub never_shared: bool,
    /// The artifact's [`fence`](super::Artifact::fence).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fence: u64,
}

impl SealPlan {
    /// The artifact's name in the namespace of its volume.
    #[must_use]
    pub fn name(&self, tenant: &Tenant) -> Name {
        Name {
            tenant: tenant.clone(),
            reference: self.reference.clone(),
        }
    }
}

/// A volume's record, `volume.json`: all of an ephemeral volume's state that survives the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeRecord {
    /// The version of this record's format: [`VolumeRecord::FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: VolumeId,
    /// The boot in which it was made. In another boot it is garbage.
    pub boot: String,
    /// The number of the mount of the pool's filesystem in which it was made; `None`: unknown.
    /// Under another mount it is garbage too: unwritten content was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superblock: Option<u64>,
    /// When it was made.
    pub created: Timestamp,
    /// Its tenant.
    pub tenant: Tenant,
    /// Its pod.
    pub pod: Pod,
    /// Its attributes.
    pub spec: VolumeSpec,
    /// Whether it is read-only for the pod.
    pub read_only: bool,
    /// The artifact that it forks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ArtifactId>,
    /// The layers below its top, newest first. A flattening may make them differ from the parent's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
    /// The artifact to seal it as; `None` if it is discarded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<SealPlan>,
    /// Its size limit in bytes by the policies of its namespace, because `spec` gives none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_limit: Option<u64>,
    /// Why its size limit is not enforced, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_unenforced: Option<String>,
    /// The source of its overlay in the mount table, if it was mounted before the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounted_as: Option<String>,
    /// Whether its access mode allows several targets; it has one all the same. `None`: an older
    /// record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiple_targets: Option<bool>,
    /// The target paths.
    pub targets: Vec<PathBuf>,
}

impl VolumeRecord {
    /// The format that this version reads and writes.
    pub const FORMAT: u32 = 1;

    /// Whether its content is complete, on disk or in memory: it is of this boot and of this mount
    /// of the pool's filesystem.
    #[must_use]
    pub fn is_of(&self, boot: &str, superblock: Option<u64>) -> bool {
        let same = |ours| self.superblock.is_none_or(|its| its == ours);
        self.boot == boot && superblock.is_none_or(same)
    }

    /// The limit for its private content, in bytes.
    #[must_use]
    pub fn size_limit(&self) -> Option<u64> {
        self.spec.size_limit.or(self.policy_limit)
    }

    /// The source of its mount in the kernel's mount table.
    #[must_use]
    pub fn label(&self) -> &str {
        self.mounted_as.as_deref().unwrap_or(self.id.as_str())
    }
}
