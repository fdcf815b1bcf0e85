//! Mounts as things that are cloned, attached and taken away: `open_tree`, `move_mount` (Linux 5.2), `umount2`.
//! Nothing here makes a filesystem; it only moves what is there.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::mount::{MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::attributes::{MountAttributes, set_mount_attributes};
use super::room::Room;
use crate::sys::dir::{Dir, NOW};
use crate::sys::error::{Error, Result};

/// A detached mount of a directory and what is below it, without the mounts that stand there (`OPEN_TREE_CLONE`).
///
/// It is in the peer group of the mount that the directory lies on; see [`bind`].
pub fn clone_tree(dir: &Dir) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(dir.as_fd(), "", flags)
        .map_err(|errno| Error::new("open_tree", dir.path(), errno))
}

/// A detached mount of a directory; see [`confined`].
pub fn bind(dir: &Dir, read_only: bool) -> Result<OwnedFd> {
    confined(clone_tree(dir)?, read_only)
}

/// A detached mount, private, `nosuid,nodev`, not `noexec`, and for reading only or not. What it was before does not matter.
///
/// A clone is `noexec` where the directory's own mount is, and programs in it could not be run.
/// EPERM where that may not be cleared: a process that is root only in its user namespace cannot
/// change how the filesystem was mounted outside.
///
/// Private, because a clone of a shared mount would show mounts made inside the volume in the pool as well.
/// Before `mount_setattr` (Linux 5.12) only an attached mount can be changed: a [`Room`] is made for that.
pub fn confined(mount: OwnedFd, read_only: bool) -> Result<OwnedFd> {
    let mut attributes = MountAttributes {
        set: MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV,
        clear: MountAttrFlags::MOUNT_ATTR_NOEXEC,
        private: true,
        ..MountAttributes::default()
    };
    if read_only {
        attributes.set |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    } else {
        attributes.clear |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    match set_mount_attributes(mount.as_fd(), &attributes) {
        Err(error) if error.is(Errno::ENOSYS) => Room::new()?.confined(mount, read_only),
        result => result.map(|()| mount),
    }
}

/// Sets the times of a mount's root to now, through the mount.
pub fn touch_mount(mount: BorrowedFd<'_>) -> Result<()> {
    // What opened it opened only its path.
    rustix::fs::utimensat(mount, "", &NOW, AtFlags::EMPTY_PATH)
        .map_err(|errno| Error::new("utimensat", "a new mount", errno))
}

/// fsync(2) of a mount's root directory.
pub fn sync_root(mount: BorrowedFd<'_>) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(mount, ".", flags, Mode::empty())
        .and_then(rustix::fs::fsync)
        .map_err(|errno| Error::new("fsync", "the root of a mount", errno))
}

/// Attaches a detached mount onto the directory `name` of `parent`: the one call that makes it visible.
///
/// A symlink in the place of `name` is not followed (EINVAL). If something is mounted there, it goes on top of it.
pub fn move_mount_onto(mount: BorrowedFd<'_>, parent: &Dir, name: impl AsRef<Path>) -> Result<()> {
    let name = name.as_ref();
    // Without MOVE_MOUNT_T_SYMLINKS the last component is not followed.
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", parent, name, flags)
        .map_err(|errno| parent.error("move_mount", name, errno))
}

/// Takes the topmost mount at `name` of `parent` out of the tree, whoever still uses it. One call: mounts stack, so the
/// caller repeats it until EINVAL says that `name` is no mount point. A symlink is not followed (EINVAL too).
pub fn detach(parent: &Dir, name: impl AsRef<Path>) -> Result<()> {
    let name = name.as_ref();
    // umount2 has no form that takes a descriptor; the magic link is resolved to exactly this directory.
    let mut path =
        std::path::PathBuf::from(format!("/proc/self/fd/{}", parent.as_fd().as_raw_fd()));
    path.push(name);
    rustix::mount::unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(|errno| parent.error("umount2", name, errno))
}
