//! A volume that is a directory of its own: what the backends share whose volumes are bind mounts of `fs`.
//!
//! How its root looks, how it is mounted (with owners exchanged where a fork asks for it), how its mounts are recognised.
//! Where the content comes from and what becomes of it is the backend's.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::backend::look::Look;
use crate::backend::{Error, Result, Start};
use crate::model::layout::{FS, VOLUMES};
use crate::model::{RootAttributes, VolumeId};
use crate::sys::{self, Dir, Errno, IdSwap, MountAttributes, MountEntry};

/// Where a layer's content grows before it is whole, and has its name.
pub(super) const FS_NEW: &str = "fs.new";

/// Makes the root of a new volume look as it was asked for. On disk a fork's owner stays: it is a matter of the mount.
pub(super) fn apply_root(fs: &Dir, root: &RootAttributes, is_fork: bool) -> Result<()> {
    let mut found = fs.stat_self()?;
    let look = Look::of(root, is_fork.then_some(&found));
    if (found.st_uid, found.st_gid) != (look.uid, look.gid) {
        fs.set_owner(Some(look.uid), Some(look.gid))?;
        // That may have taken set-id bits away.
        found = fs.stat_self()?;
    }
    if look.mode != Look::mode_of(&found) {
        fs.set_mode(look.mode)?;
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
        // EPERM: RHEL 9 before 9.3 refuses all of them.
        if [Errno::EINVAL, Errno::ENOSYS, Errno::EPERM].contains(&error.errno()) {
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

    /// Whether a mount is one of a volume's `fs`. Once its seal is promised the directory has another name, and a mount of it
    /// in our namespace is no more: it was detached before.
    pub(super) fn shows(&self, mount: &MountEntry, id: &VolumeId) -> bool {
        let fs = [Path::new(VOLUMES), id.as_ref(), Path::new(FS)];
        let below = fs.iter().collect::<PathBuf>();
        mount.device == self.device && mount.root == self.root.join(below)
    }
}
