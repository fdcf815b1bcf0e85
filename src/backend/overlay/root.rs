//! What the root directory of a new volume looks like.
//!
//! A merged directory shows the attributes of its newest layer, so the root's come from `top/` alone: they are part of the
//! artifact and must be given to each new top, or a fork would not see what was sealed. This is on the path of every
//! publish: a system call is made only where it changes something.

use rustix::fs::{Timespec, Timestamps};

use crate::backend::Result;
use crate::model::RootAttributes;
use crate::model::layout::TOP;
use crate::sys::{Dir, Xattrs};

/// The bits that mkdir(2) takes; set-id bits need a chmod.
const MKDIR_BITS: u32 = 0o1777;
const PERMISSION_BITS: u32 = 0o7777;
/// What a pod's fsGroup adds: the group may write, and what is made in there belongs to it.
const GROUP_BITS: u32 = 0o2070;

/// Makes `top` in `volume`.
pub(super) fn make(volume: &Dir, parent: Option<&Dir>, root: &RootAttributes) -> Result<()> {
    let sealed = parent.map(Dir::stat_self).transpose()?;
    let (mut mode, uid, mut gid) = match &sealed {
        // Owners of a fork are a matter of its mount: on disk they stay.
        Some(sealed) => (
            sealed.st_mode & PERMISSION_BITS,
            sealed.st_uid,
            sealed.st_gid,
        ),
        None => (0o777, root.uid.unwrap_or(0), root.gid.unwrap_or(0)),
    };
    mode = root.mode.map_or(mode, |mode| mode & PERMISSION_BITS);
    if let (None, Some(group)) = (root.gid, root.mount_group) {
        gid = group;
        mode |= GROUP_BITS;
    }
    volume.create_dir(TOP, mode & MKDIR_BITS)?;
    let found = volume.stat(TOP)?;
    let differs = |found: &rustix::fs::Stat| found.st_mode & PERMISSION_BITS != mode;
    let owner_differs = (found.st_uid, found.st_gid) != (uid, gid);
    if parent.is_none() && !owner_differs && !differs(&found) {
        return Ok(());
    }

    let top = volume.open_beneath(TOP)?;
    if owner_differs {
        top.set_owner(Some(uid), Some(gid))?;
    }
    let mut changed = false;
    if let Some(parent) = parent {
        for name in parent.xattr_names()? {
            let bytes = name.as_encoded_bytes();
            // Overlay's own notes are about that layer. A pod's attributes of that name are stored as
            // trusted.overlay.overlay.*, and are content.
            if bytes.starts_with(b"trusted.overlay.")
                && !bytes.starts_with(b"trusted.overlay.overlay.")
            {
                continue;
            }
            if let Some(value) = parent.xattr(&name)? {
                top.set_xattr(&name, &value)?;
                changed = true;
            }
        }
    }
    // After the ACL, whose mask is the mode's group bits: what the volume says of its mode wins.
    if changed || differs(&found) {
        top.set_mode(mode)?;
    }
    if let Some(sealed) = &sealed {
        let time = |seconds, nanoseconds| Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds,
        };
        top.set_times(&Timestamps {
            last_access: time(sealed.st_atime, sealed.st_atime_nsec.cast_signed()),
            last_modification: time(sealed.st_mtime, sealed.st_mtime_nsec.cast_signed()),
        })?;
    }
    Ok(())
}
