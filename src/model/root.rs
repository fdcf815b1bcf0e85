//! The owner, group and mode of a new volume's root directory.
//! Only values; `backend` applies them.

use serde::{Deserialize, Serialize};

/// How a volume's root differs from its parent's root or, without a parent, from root:root 0777.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootAttributes {
    /// Permission, set-id and sticky bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// The owner. In a fork this is a view: the whole tree shows it for the sealed root's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The group. In a fork a view, like `uid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// The pod's fsGroup (CSI `VOLUME_MOUNT_GROUP`): only the root directory gets it, with group
    /// write and setgid. Ignored if `gid` is set, because the volume's attribute has priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_group: Option<u32>,
}
