//! The attributes of a new volume's root directory on disk: one rule for all backends.
//!
//! Only values. Each backend sets them itself, in as few system calls as it can.

use rustix::fs::Stat;

use crate::model::RootAttributes;

const PERMISSION_BITS: u32 = 0o7777;
/// The fsGroup of a pod adds group write permission and setgid: new files get the group.
const GROUP_BITS: u32 = 0o2070;

/// Mode and owner of a root directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RootAttrs {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl RootAttrs {
    /// The requested attributes, on top of those of the parent's sealed root. On disk a fork keeps
    /// its owner, because its mount swaps owners; only the pod's fsGroup is set.
    pub(super) fn of(root: &RootAttributes, sealed: Option<&Stat>) -> Self {
        let mut attrs = match sealed {
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
            attrs.mode = mode & PERMISSION_BITS;
        }
        if let (None, Some(group)) = (root.gid, root.mount_group) {
            attrs.gid = group;
            attrs.mode |= GROUP_BITS;
        }
        attrs
    }

    /// The directory's present attributes.
    pub(super) fn found(stat: &Stat) -> Self {
        Self {
            mode: Self::mode_of(stat),
            uid: stat.st_uid,
            gid: stat.st_gid,
        }
    }

    /// The permission bits of a mode.
    pub(super) fn mode_of(stat: &Stat) -> u32 {
        stat.st_mode & PERMISSION_BITS
    }
}
