//! The attributes of a new volume's root directory.
//!
//! A merged directory has the attributes of its newest layer, so the root's come from `top/` alone.
//! They are part of the artifact, so each new `top/` copies them from the parent. Every publish
//! does this, so it calls the kernel only for a change.

use crate::backend::error::Result;
use crate::backend::root_attrs::RootAttrs;
use crate::model::RootAttributes;
use crate::model::layout::TOP;
use crate::sys::{Dir, Xattrs};
use crate::tree::{Mark, times_of};
use rustix::fs::Stat;

/// The bits that mkdir(2) takes; set-id bits need a chmod.
const MKDIR_BITS: u32 = 0o1777;

/// Makes `top` in `volume`.
pub(super) fn make(volume: &Dir, parent: Option<&Dir>, root: &RootAttributes) -> Result<()> {
    let sealed = parent.map(Dir::stat_self).transpose()?;
    let wanted = RootAttrs::of(root, sealed.as_ref());
    volume.create_dir(TOP, wanted.mode & MKDIR_BITS)?;
    let found = volume.stat(TOP)?;
    if parent.is_none() && wanted == RootAttrs::found(&found) {
        return Ok(());
    }
    let top = volume.open_beneath(TOP)?;
    apply_attrs(&top, parent.zip(sealed.as_ref()), wanted, &found)
}

fn apply_attrs(
    top: &Dir,
    parent: Option<(&Dir, &Stat)>,
    wanted: RootAttrs,
    found: &Stat,
) -> Result<()> {
    let RootAttrs { mode, uid, gid } = wanted;
    let differs = RootAttrs::mode_of(found) != mode;
    if (found.st_uid, found.st_gid) != (uid, gid) {
        top.set_owner(Some(uid), Some(gid))?;
    }
    let mut changed = false;
    if let Some((parent, _)) = parent {
        for name in parent.xattr_names()? {
            // Overlay's own attributes describe the parent layer only.
            if Mark::of(&name) != Mark::Content {
                continue;
            }
            if let Some(value) = parent.xattr(&name)? {
                top.set_xattr(&name, &value)?;
                changed = true;
            }
        }
    }
    // The ACL's mask is the mode's group bits, so the mode is set after it.
    if changed || differs {
        top.set_mode(mode)?;
    }
    if let Some((_, sealed)) = parent {
        top.set_times(&times_of(sealed))?;
    }
    Ok(())
}
