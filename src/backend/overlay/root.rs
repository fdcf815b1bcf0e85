//! What the root directory of a new volume looks like.
//!
//! A merged directory shows the attributes of its newest layer, so the root's come from `top/` alone: they are part of the
//! artifact and must be given to each new top, or a fork would not see what was sealed. This is on the path of every
//! publish: a system call is made only where it changes something.

use crate::backend::Result;
use crate::backend::look::Look;
use crate::model::RootAttributes;
use crate::model::layout::TOP;
use crate::sys::{Dir, Xattrs};
use crate::tree::{Mark, times_of};
use rustix::fs::Stat;

/// The bits that mkdir(2) takes; set-id bits need a chmod.
const MKDIR_BITS: u32 = 0o1777;

/// Makes a `top` that most volumes need not change any more, and opens it.
pub(super) fn prepare(volume: &Dir) -> Result<Dir> {
    let Look { mode, .. } = Look::of(&RootAttributes::default(), None);
    volume.create_dir(TOP, mode & MKDIR_BITS)?;
    Ok(volume.open_beneath(TOP)?)
}

/// Makes of a prepared `top` what [`make`] would have made.
pub(super) fn dress(top: &Dir, parent: Option<&Dir>, root: &RootAttributes) -> Result<()> {
    let sealed = parent.map(Dir::stat_self).transpose()?;
    let wanted = Look::of(root, sealed.as_ref());
    let found = top.stat_self()?;
    if parent.is_none() {
        // It is as old as its preparation.
        top.touch()?;
    }
    dress_as(top, parent.zip(sealed.as_ref()), wanted, &found)
}

/// Makes `top` in `volume`.
pub(super) fn make(volume: &Dir, parent: Option<&Dir>, root: &RootAttributes) -> Result<()> {
    let sealed = parent.map(Dir::stat_self).transpose()?;
    let wanted = Look::of(root, sealed.as_ref());
    volume.create_dir(TOP, wanted.mode & MKDIR_BITS)?;
    let found = volume.stat(TOP)?;
    if parent.is_none() && wanted == Look::found(&found) {
        return Ok(());
    }
    let top = volume.open_beneath(TOP)?;
    dress_as(&top, parent.zip(sealed.as_ref()), wanted, &found)
}

fn dress_as(top: &Dir, parent: Option<(&Dir, &Stat)>, wanted: Look, found: &Stat) -> Result<()> {
    let Look { mode, uid, gid } = wanted;
    let differs = Look::mode_of(found) != mode;
    if (found.st_uid, found.st_gid) != (uid, gid) {
        top.set_owner(Some(uid), Some(gid))?;
    }
    let mut changed = false;
    if let Some((parent, _)) = parent {
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
    if let Some((_, sealed)) = parent {
        top.set_times(&times_of(sealed))?;
    }
    Ok(())
}
