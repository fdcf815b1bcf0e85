//! A volume as its record describes it, and the pod that it belongs to.
//! Where the record is kept, and what is done with the volume, is for the rooms above.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::attributes::{Keep, VolumeSpec};
use super::id::{ArtifactId, LayerId, VolumeId};
use super::name::{Reference, Tenant};
use super::time::Timestamp;

/// A pod's uid: what tells one pod from another of the same name.
///
/// 1 to 128 bytes of `A-Z a-z 0-9 - _ .`, not beginning with `.`: it is a component of kubelet's paths. (Static pods
/// have uids that are not UUIDs.)
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PodUid(VolumeId);

impl PodUid {
    /// The uid as text.
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

/// Which pod a volume belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// Its uid.
    pub uid: PodUid,
    /// Its name, for people.
    pub name: String,
    /// The service account that it runs as, for people. Records from before this field lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account: Option<String>,
}

/// How the pod's work ended, as far as a volume of it is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It did what it was meant to.
    Succeeded,
    /// It did not succeed, or its outcome will never be known.
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

/// What a volume becomes when its pod is done with it. The ids are chosen when the volume is made, so that a seal which
/// is begun, cut short by a crash and begun again ends as one artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SealPlan {
    /// The artifact's id.
    pub artifact: ArtifactId,
    /// The id of the layer that its private content becomes.
    pub layer: LayerId,
    /// What it will be called.
    pub reference: Reference,
    /// When, and for how long.
    #[serde(flatten)]
    pub keep: Keep,
}

/// A volume's record: `volume.json` in its directory, the only memory of an ephemeral volume that outlives the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeRecord {
    /// The version of this record's form: [`VolumeRecord::FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: VolumeId,
    /// The boot in which it was made. In another boot it is rubbish.
    pub boot: String,
    /// The number of the mount of the pool's filesystem in which it was made; `None`: not known. Under another mount of the same
    /// boot it is rubbish, too: what of its content was in memory only went with the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superblock: Option<u64>,
    /// When it was made.
    pub created: Timestamp,
    /// Whose it is.
    pub tenant: Tenant,
    /// Which pod's.
    pub pod: Pod,
    /// What was asked for.
    pub spec: VolumeSpec,
    /// Whether the pod may only read it.
    pub read_only: bool,
    /// The artifact it is a fork of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ArtifactId>,
    /// The layers it is mounted over, newest first. They may differ from the parent's after a flattening.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerId>,
    /// What it becomes; `None` when it is thrown away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<SealPlan>,
    /// Why its size limit does not hold, when one was asked for and it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_unenforced: Option<String>,
    /// What its overlay is called in the kernel's mount table, if not by the volume's id: it was mounted before anybody asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounted_as: Option<String>,
    /// Whether its access mode allows several targets at once; `None`: a version wrote this that did not say so, or its
    /// targets were asked for with different ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiple_targets: Option<bool>,
    /// Where it is published.
    pub targets: Vec<PathBuf>,
}

impl VolumeRecord {
    /// The form that this version writes and reads.
    pub const FORMAT: u32 = 1;

    /// Whether all that was written in it is there still, on the disk or in memory: it is of this boot and of this mount of the pool's
    /// filesystem.
    #[must_use]
    pub fn is_of(&self, boot: &str, superblock: Option<u64>) -> bool {
        let same = |ours| self.superblock.is_none_or(|its| its == ours);
        self.boot == boot && superblock.is_none_or(same)
    }

    /// What its mount is called in the kernel's mount table.
    #[must_use]
    pub fn label(&self) -> &str {
        self.mounted_as.as_deref().unwrap_or(self.id.as_str())
    }
}
