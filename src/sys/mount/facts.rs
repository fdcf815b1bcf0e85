//! Which mount a path or file is on, from `statx` (0.7 µs) and not from the mount table. Only
//! queries: no function here changes a mount.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use linux_raw_sys::general::STATX_MNT_ID_UNIQUE;
use nix::errno::Errno;
use rustix::fs::{AtFlags, Statx, StatxAttributes, StatxFlags};

use crate::sys::dir::{Dir, FileKind};
use crate::sys::error::{Error, Result};

/// The mount that a file is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountPoint {
    /// The mount's id.
    pub id: u64,
    /// Whether the kernel never reuses the id (Linux 6.8). Before, it is mountinfo's id.
    pub unique: bool,
    /// Whether the file is the root of its mount.
    pub is_root: bool,
    /// The file's type.
    pub kind: FileKind,
}

/// The mount that `name` in `parent` is on; `None` if the name does not exist. Follows no symlink
/// and triggers no automount.
pub fn mount_point_at(parent: &Dir, name: impl AsRef<Path>) -> Result<Option<MountPoint>> {
    let name = name.as_ref();
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    match read(parent.as_fd(), name, flags) {
        Ok(point) => Ok(Some(point)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(parent.error("statx", name, errno)),
    }
}

/// The mount of an open file. Its descriptor may be `O_PATH`, and the mount may be detached.
pub fn mount_point(file: BorrowedFd<'_>) -> Result<MountPoint> {
    read(file, Path::new(""), AtFlags::EMPTY_PATH)
        .map_err(|errno| Error::new("statx", "an open file", errno))
}

fn read(
    directory: BorrowedFd<'_>,
    name: &Path,
    flags: AtFlags,
) -> std::result::Result<MountPoint, Errno> {
    let unique_id = StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE);
    let mask = StatxFlags::TYPE | StatxFlags::MNT_ID | unique_id;
    // DONT_SYNC: the call must not wait for a network filesystem that may be mounted there.
    let flags = flags | AtFlags::STATX_DONT_SYNC;
    let facts = rustix::fs::statx(directory, name, flags, mask)
        .map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
    let unique = facts.stx_mask & STATX_MNT_ID_UNIQUE != 0;
    if !unique && facts.stx_mask & StatxFlags::MNT_ID.bits() == 0 || !knows_mount_roots(&facts) {
        // Linux before 5.8.
        return Err(Errno::ENOSYS);
    }
    Ok(MountPoint {
        id: facts.stx_mnt_id,
        unique,
        is_root: facts.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
        kind: FileKind::of_mode(facts.stx_mode.into()),
    })
}

fn knows_mount_roots(facts: &Statx) -> bool {
    facts
        .stx_attributes_mask
        .contains(StatxAttributes::MOUNT_ROOT)
}
