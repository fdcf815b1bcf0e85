//! A volume that is a directory of its own: what the backends share whose volumes are bind mounts of `fs`.
//!
//! How its root looks, how it is mounted (with owners exchanged where a fork asks for it), how its mounts are recognised.
//! Where the content comes from and what becomes of it is the backend's.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::backend::{Error, Result, Start};
use crate::model::layout::{FS, PENDING, VOLUMES};
use crate::model::{RootAttributes, VolumeId};
use crate::sys::{self, Dir, Errno, FileKind, IdSwap, MountAttributes, MountEntry};

/// Where a layer's content grows before it is whole, and has its name.
pub(super) const FS_NEW: &str = "fs.new";
/// What a pod's fsGroup adds to the root's mode: the group may write, and what is made there is the group's.
const GROUP_BITS: u32 = 0o2070;

/// Makes the root of a new volume look as it was asked for. On disk a fork's owner stays: it is a matter of the mount.
pub(super) fn apply_root(fs: &Dir, root: &RootAttributes, is_fork: bool) -> Result<()> {
    let group = root.mount_group.filter(|_| root.gid.is_none());
    if is_fork {
        if group.is_some() {
            fs.set_owner(None, group)?;
        }
    } else {
        let gid = root.gid.or(group).unwrap_or(0);
        fs.set_owner(Some(root.uid.unwrap_or(0)), Some(gid))?;
    }
    let before = fs.stat_self()?.st_mode & 0o7777;
    let mut mode = root.mode.unwrap_or(if is_fork { before } else { 0o777 }) & 0o7777;
    if group.is_some() {
        mode |= GROUP_BITS;
    }
    // chown may have taken set-id bits away, so the mode is compared with what is there now.
    if mode != before {
        fs.set_mode(mode)?;
    }
    Ok(())
}

/// A detached, private mount of `fs`; where the volume is a fork of `parent` and asks for other owners than `parent`'s root
/// has, the two are exchanged over the whole tree.
pub(super) fn mount(
    fs: &Dir,
    parent: Option<&Dir>,
    start: &Start<'_>,
    read_only: bool,
) -> Result<OwnedFd> {
    let mount = sys::bind(fs, read_only)?;
    let Some(parent) = parent else {
        return Ok(mount);
    };
    // By the parent's root, which never changes: the volume's own may have been given away by the pod.
    let (uid, gid) = match start.owner {
        Some(owner) => owner,
        None => parent.stat_self().map(|root| (root.st_uid, root.st_gid))?,
    };
    let uids = IdSwap::between(uid, start.root.uid.unwrap_or(uid));
    let gids = IdSwap::between(gid, start.root.gid.unwrap_or(gid));
    if (uids, gids) == (IdSwap::Identity, IdSwap::Identity) {
        return Ok(mount);
    }
    let namespace = sys::user_namespace(uids, gids)?;
    let attributes = MountAttributes {
        identity: Some(namespace.as_fd()),
        ..MountAttributes::default()
    };
    sys::set_mount_attributes(mount.as_fd(), &attributes).map_err(|error| {
        if error.is(Errno::EINVAL) || error.is(Errno::ENOSYS) {
            Error::Unsupported {
                what: "another owner for a fork",
                why: format!("this kernel cannot map the owners of this filesystem: {error}"),
            }
        } else {
            error.into()
        }
    })?;
    Ok(mount)
}

/// Where the pool is in the kernel's eyes, by which mounts of its directories are recognised.
#[derive(Debug)]
pub(super) struct Place {
    device: (u32, u32),
    root: PathBuf,
}

impl Place {
    /// Reads the mount table once.
    pub(super) fn of(pool: &Dir) -> Result<Self> {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/thread-self/fd/{}", pool.as_fd().as_raw_fd());
        let path =
            std::fs::read_link(&link).map_err(|error| sys::Error::new("readlink", &link, error))?;
        // The last of the longest: mounts stack.
        let found = sys::mount_table()?
            .into_iter()
            .filter(|mount| path.starts_with(&mount.mount_point))
            .max_by_key(|mount| mount.mount_point.components().count());
        let Some(mount) = found else {
            return Err(sys::Error::new("mountinfo", path, Errno::ENOENT).into());
        };
        let below = path.strip_prefix(&mount.mount_point).unwrap_or(&path);
        let root = if below.as_os_str().is_empty() {
            mount.root
        } else {
            mount.root.join(below)
        };
        Ok(Self {
            device: mount.device,
            root,
        })
    }

    /// Whether a mount is one of a volume's `fs`, before or after its seal was promised.
    pub(super) fn shows(&self, mount: &MountEntry, id: &VolumeId) -> bool {
        mount.device == self.device
            && [VOLUMES, PENDING].iter().any(|state| {
                let path: PathBuf = [
                    self.root.as_path(),
                    Path::new(state),
                    id.as_ref(),
                    Path::new(FS),
                ]
                .iter()
                .collect();
                mount.root == path
            })
    }
}

/// Whether a name is there and a regular file.
pub(super) fn has_file(dir: &Dir, name: &str) -> Result<bool> {
    let stat = dir.stat_if_there(name)?;
    Ok(stat.is_some_and(|stat| FileKind::of_mode(stat.st_mode) == FileKind::File))
}

/// Opens a directory, if there is one.
pub(super) fn open_if_there(dir: &Dir, name: &str) -> Result<Option<Dir>> {
    match dir.open_beneath(name) {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if error.is(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
