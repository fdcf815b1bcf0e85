//! Volumes that show their directory `fs` by a bind mount: code shared by btrfs and copy.
//!
//! It sets the root's attributes, mounts volumes and layers, with owners swapped if a fork asks for
//! that, and recognises the mounts. The backend itself creates, seals and deletes content.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::backend::error::{Error, Result};
use crate::backend::root_attrs::RootAttrs;
use crate::backend::types::Start;
use crate::model::layout::{COMMIT_MARKER, FS, LAYERS, VOLUMES};
use crate::model::{LayerId, RootAttributes, VolumeId};
use crate::sys::{self, Dir, Errno, IdSwap, MountAttributes, MountEntry};
use crate::tree;

/// The temporary name of a layer's `fs` until it is complete.
pub(super) const FS_NEW: &str = "fs.new";

/// Sets the requested attributes on a new root. A fork's owner on disk stays; the mount swaps it.
pub(super) fn apply_root(fs: &Dir, root: &RootAttributes, is_fork: bool) -> Result<()> {
    let mut found = fs.stat_self()?;
    let attrs = RootAttrs::of(root, is_fork.then_some(&found));
    if (found.st_uid, found.st_gid) != (attrs.uid, attrs.gid) {
        fs.set_owner(Some(attrs.uid), Some(attrs.gid))?;
        // chown(2) may have cleared set-id bits.
        found = fs.stat_self()?;
    }
    if attrs.mode != RootAttrs::mode_of(&found) {
        fs.set_mode(attrs.mode)?;
    }
    Ok(())
}

/// Removes the commit marker that a fork has from its parent: only one that its own pod makes
/// counts. A seal removes its marker, but content may come from an archive.
pub(super) fn forget_marker(fs: &Dir) -> Result<()> {
    if fs.has_file(COMMIT_MARKER)? {
        let times = tree::times_of(&fs.stat_self()?);
        fs.node(COMMIT_MARKER)?.clear_guard_flags()?;
        fs.remove_file(COMMIT_MARKER)?;
        fs.set_times(&times)?;
    }
    Ok(())
}

/// The content of volumes and layers that is a directory `fs` each.
#[derive(Debug)]
pub(super) struct BindVolumes {
    layers: Dir,
    pool_root: PoolRoot,
}

impl BindVolumes {
    /// Those of a pool, which has the directory `layers`.
    pub(super) fn of(pool: &Dir) -> Result<Self> {
        Ok(Self {
            layers: pool.open_beneath(LAYERS)?,
            pool_root: PoolRoot::of(pool)?,
        })
    }

    /// The content of the newest of these layers.
    pub(super) fn parent(&self, layers: &[LayerId]) -> Result<Option<Dir>> {
        let open = |id: &LayerId| {
            let content = Path::new(&id.to_string()).join(FS);
            self.layers.open_beneath(content)
        };
        Ok(layers.first().map(open).transpose()?)
    }

    /// A detached, private mount of a volume. Swaps the owners if a fork wants another than its
    /// parent's root.
    pub(super) fn mount(
        &self,
        volume: &Dir,
        start: &Start<'_>,
        read_only: bool,
    ) -> Result<OwnedFd> {
        let mount = sys::bind(&volume.open_beneath(FS)?, read_only)?;
        match self.parent(start.layers)? {
            Some(parent) => swap_owners(mount, &parent, start),
            None => Ok(mount),
        }
    }

    /// A detached, read-only mount of the newest of these layers.
    pub(super) fn content(&self, layers: &[LayerId]) -> Result<OwnedFd> {
        let content = self.parent(layers)?;
        let content = content.ok_or_else(|| self.layers.error("openat2", FS, Errno::ENOENT))?;
        Ok(sys::bind(&content, true)?)
    }

    /// Whether a mount shows this volume.
    pub(super) fn shows(&self, mount: &MountEntry, id: &VolumeId) -> bool {
        self.pool_root.shows(mount, id)
    }
}

/// Gives the root of a fork's mount the owners that it wants.
fn swap_owners(mount: OwnedFd, parent: &Dir, start: &Start<'_>) -> Result<OwnedFd> {
    // The parent's root never changes, whereas the pod may have chowned the volume's own root.
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
        // EPERM: RHEL 9 before 9.3 refuses all idmapped mounts.
        if [Errno::EINVAL, Errno::ENOSYS, Errno::EPERM].contains(&error.errno()) {
            Error::Unsupported {
                what: "another owner for a fork",
                why: format!("this kernel cannot idmap a mount of this filesystem: {error}"),
            }
        } else {
            error.into()
        }
    })?;
    Ok(mount)
}

/// The pool's device and root as the kernel's mount table names them.
#[derive(Debug)]
struct PoolRoot {
    device: (u32, u32),
    root: PathBuf,
}

impl PoolRoot {
    /// Reads the mount table once.
    fn of(pool: &Dir) -> Result<Self> {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/thread-self/fd/{}", pool.as_fd().as_raw_fd());
        let path =
            std::fs::read_link(&link).map_err(|error| sys::Error::new("readlink", &link, error))?;
        let Some(mount) = sys::mount_of(pool.as_fd())? else {
            return Err(sys::Error::new("mountinfo", path, Errno::ENOENT).into());
        };
        let below = path.strip_prefix(&mount.mount_point).unwrap_or(&path);
        Ok(Self {
            device: mount.device,
            root: mount.root.join(below),
        })
    }

    /// Whether a mount shows a volume's `fs`. Once the seal's intent is recorded, the directory has
    /// another name, and its mount in our namespace is detached already.
    fn shows(&self, mount: &MountEntry, id: &VolumeId) -> bool {
        let fs = [Path::new(VOLUMES), id.as_ref(), Path::new(FS)];
        let below = fs.iter().collect::<PathBuf>();
        mount.device == self.device && mount.root == self.root.join(below)
    }
}
