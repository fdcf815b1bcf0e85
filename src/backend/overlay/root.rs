//! What the root directory of a new volume looks like.
//!
//! A merged directory shows the attributes of its newest layer, so the root's come from `top/` alone: they are part of the
//! artifact and must be given to each new top, or a fork would not see what was sealed. This is on the path of every
//! publish: a system call is made only where it changes something.

use crate::backend::Result;
use crate::backend::look::Look;
use crate::backend::tree::{Mark, times_of};
use crate::model::RootAttributes;
use crate::model::layout::TOP;
use crate::sys::{Dir, Xattrs};

/// The bits that mkdir(2) takes; set-id bits need a chmod.
const MKDIR_BITS: u32 = 0o1777;

/// Makes `top` in `volume`.
pub(super) fn make(volume: &Dir, parent: Option<&Dir>, root: &RootAttributes) -> Result<()> {
    let sealed = parent.map(Dir::stat_self).transpose()?;
    let Look { mode, uid, gid } = Look::of(root, sealed.as_ref());
    volume.create_dir(TOP, mode & MKDIR_BITS)?;
    let found = volume.stat(TOP)?;
    let differs = Look::mode_of(&found) != mode;
    let owner_differs = (found.st_uid, found.st_gid) != (uid, gid);
    if parent.is_none() && !owner_differs && !differs {
        return Ok(());
    }

    let top = volume.open_beneath(TOP)?;
    if owner_differs {
        top.set_owner(Some(uid), Some(gid))?;
    }
    let mut changed = false;
    if let Some(parent) = parent {
        for name in parent.xattr_names()? {
            // Overlay's own notes are about that layer.
            if Mark::of(&name) != Mark::Content {
                continue;
            }
            if let Some(value) = parent.xattr(&name)? {
                top.set_xattr(&name, &value)?;
                changed = true;
            }
        }
    }
    // After the ACL, whose mask is the mode's group bits: what the volume says of its mode wins.
    if changed || differs {
        top.set_mode(mode)?;
    }
    if let Some(sealed) = &sealed {
        top.set_times(&times_of(sealed))?;
    }
    Ok(())
}
