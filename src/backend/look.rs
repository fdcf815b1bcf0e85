//! What the root directory of a new volume is to look like on disk: one rule for all backends.
//!
//! Values only. How a directory is made to look so, and in how few calls, is each backend's.

use rustix::fs::Stat;

use crate::model::RootAttributes;

const PERMISSION_BITS: u32 = 0o7777;
/// What a pod's fsGroup adds: the group may write, and what is made in there belongs to it.
const GROUP_BITS: u32 = 0o2070;

/// Mode and owner of a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Look {
    /// What was asked for, over what the sealed root of a fork's parent has. Owners of a fork are a matter of its mount: on disk
    /// they stay, but for the pod's own group.
    pub(super) fn of(root: &RootAttributes, sealed: Option<&Stat>) -> Self {
        let mut look = match sealed {
            Some(sealed) => Self {
                mode: Self::mode_of(sealed),
                uid: sealed.st_uid,
                gid: sealed.st_gid,
            },
            None => Self {
                mode: 0o777,
                uid: root.uid.unwrap_or(0),
                gid: root.gid.unwrap_or(0),
            },
        };
        if let Some(mode) = root.mode {
            look.mode = mode & PERMISSION_BITS;
        }
        if let (None, Some(group)) = (root.gid, root.mount_group) {
            look.gid = group;
            look.mode |= GROUP_BITS;
        }
        look
    }

    /// What a directory has now.
    pub(super) fn found(stat: &Stat) -> Self {
        Self {
            mode: Self::mode_of(stat),
            uid: stat.st_uid,
            gid: stat.st_gid,
        }
    }

    /// The bits of a mode that a look is about.
    pub(super) fn mode_of(stat: &Stat) -> u32 {
        stat.st_mode & PERMISSION_BITS
    }
}
