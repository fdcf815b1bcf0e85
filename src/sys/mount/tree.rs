//! Clones, attaches and detaches mounts: `open_tree`, `move_mount` (Linux 5.2), `umount2`. No
//! function here creates a filesystem.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::attributes::{MountAttributes, set_mount_attributes};
use super::private_ns::PrivateMountNs;
use crate::sys::dir::Dir;
use crate::sys::error::{Error, Result};

/// A detached mount of a directory tree, without the mounts inside it (`OPEN_TREE_CLONE`).
///
/// It belongs to the peer group of the directory's mount; see [`bind`].
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

/// Makes a detached mount private, `nosuid,nodev`, not `noexec`, and read-only or writable.
///
/// A clone inherits `noexec` from the directory's mount, and then no program in it can run. EPERM
/// if it may not be cleared: root in a user namespace cannot change flags that were set outside it.
///
/// Private, because a clone of a shared mount would also show mounts made inside the volume in the
/// pool. Before `mount_setattr` (Linux 5.12) only attached mounts can change: see
/// [`PrivateMountNs`].
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
        Err(error) if error.is(Errno::ENOSYS) => PrivateMountNs::new()?.confined(mount, read_only),
        result => result.map(|()| mount),
    }
}

/// fsync(2) of a mount's root directory.
pub fn sync_root(mount: BorrowedFd<'_>) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(mount, ".", flags, Mode::empty())
        .and_then(rustix::fs::fsync)
        .map_err(|errno| Error::new("fsync", "the root of a mount", errno))
}

/// Attaches a detached mount onto the directory `name` of `parent`. This makes it visible.
///
/// Does not follow a symlink at `name` (EINVAL). Stacks on top of an existing mount.
pub fn move_mount_onto(mount: BorrowedFd<'_>, parent: &Dir, name: impl AsRef<Path>) -> Result<()> {
    let name = name.as_ref();
    // Without MOVE_MOUNT_T_SYMLINKS the kernel does not follow the last component.
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", parent, name, flags)
        .map_err(|errno| parent.error("move_mount", name, errno))
}

/// Detaches the topmost mount at `name` of `parent`, even if busy (`MNT_DETACH`). Does not follow a
/// symlink (EINVAL). Mounts stack: repeat until EINVAL says that `name` is no mount point.
pub fn detach(parent: &Dir, name: impl AsRef<Path>) -> Result<()> {
    let name = name.as_ref();
    // umount2 takes no descriptor; this magic link resolves to exactly this directory.
    let mut path =
        std::path::PathBuf::from(format!("/proc/self/fd/{}", parent.as_fd().as_raw_fd()));
    path.push(name);
    rustix::mount::unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(|errno| parent.error("umount2", name, errno))
}
