//! What the root directory of a new volume looks like: owner, group and mode.
//! Values only; `backend` applies them.

use serde::{Deserialize, Serialize};

/// Where a volume's root differs from its parent's root or, for a volume without a parent, from root:root 0777.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootAttributes {
    /// Permission bits, set-id bits and sticky bit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Owner. On a fork this is a view: the sealed root's owner is swapped with it over the whole tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group. On a fork a view, as `uid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// The pod's fsGroup (CSI `VOLUME_MOUNT_GROUP`): the root directory alone gets this group, group write and setgid.
    /// Ignored when `gid` is set: what the volume says of itself wins over what the pod says of all its volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_group: Option<u32>,
}
