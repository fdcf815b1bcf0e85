//! The work directories of an overlay volume, beside its content: `work.N/`, and the entries that
//! the kernel makes in them.

use std::path::Path;

use crate::backend::error::Result;
use crate::model::layout::{TOP, VOLUME_JSON, WORK_PREFIX};
use crate::sys::{self, Dir, Errno};

/// The work directory of every volume's first overlay mount.
pub(super) const FIRST_WORK: &str = "work.1";

/// What a mount makes in its work directory.
const MADE_BY_KERNEL: &str = "work";

/// The directories of a volume in which nothing was written, innermost first.
const FRAME: [&str; 5] = [
    "work.1/work/incompat/volatile",
    "work.1/work/incompat",
    "work.1/work",
    FIRST_WORK,
    TOP,
];

/// The only file there; the kernel makes it for a `volatile` overlay.
const DIRTY: &str = "work.1/work/incompat/volatile/dirty";

/// Deletes a volume that holds only its frame and its record. Fails if there is more.
///
/// Walking these directories would take six times the calls. The paths are safe: only the kernel
/// writes below `work.1`, and no pod can reach it.
pub(super) fn delete_frame(trash: &Dir, name: &Path, volume: &Dir) -> sys::Result<()> {
    let unless_gone = |result: sys::Result<()>| match result {
        Err(error) if error.is(Errno::ENOENT) => Ok(()),
        result => result,
    };
    unless_gone(volume.remove_file(DIRTY))?;
    for dir in FRAME {
        unless_gone(volume.remove_dir(dir))?;
    }
    unless_gone(volume.remove_file(VOLUME_JSON))?;
    trash.remove_dir(name)
}

/// Whether this ever was an overlay: each mount makes a directory in its work directory, and the
/// first one is in the first work directory ([`next_work`]).
pub(super) fn was_mounted(volume: &Dir) -> Result<bool> {
    Ok(match volume.open_if_there(FIRST_WORK)? {
        Some(work) => work.has(MADE_BY_KERNEL)?,
        None => false,
    })
}

/// Makes the next `work.N` of a volume. A volatile mount leaves a marker even after a clean
/// unmount, and a second mount with it fails with EINVAL. A first mount costs only one mkdir.
///
/// A driver that was killed before its mount, or a mount that failed, leaves an empty one. It is
/// used: else the first work directory would stay empty for ever, and say that nothing was mounted.
pub(super) fn next_work(volume: &Dir) -> Result<String> {
    let mut number = 1_u32;
    loop {
        let name = format!("{WORK_PREFIX}{number}");
        let is_new = volume.ensure_dir(&name, 0o700)?;
        if is_new || !volume.open_beneath(&name)?.has(MADE_BY_KERNEL)? {
            return Ok(name);
        }
        number += 1;
    }
}
