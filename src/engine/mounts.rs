//! Mounts at targets: whether one is there, a second one of the same volume, how one is attached
//! and detached. Inline and persistent volumes have this in common; `publish` and `claims/mount`
//! decide when it is done.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use super::target::{Found, Target};
use crate::backend::Start;
use crate::model::{PersistentVolume, VolumeId, VolumeKind, VolumeRecord};
use crate::sys::{Dir, MountEntry, MountPoint};

/// Whether this mount is what is visible at the target.
pub(super) fn shows(target: &Target<'_>, mount: u64) -> bool {
    matches!(target.look(), Ok(Found::Mount(point)) if point.id == mount)
}

/// Whether this mount is visible at the path, or may be because the path cannot be examined.
pub(super) fn may_be_mounted(path: &Path, mount: u64) -> bool {
    match Target::open(path) {
        Ok(None) => false,
        Ok(Some(target)) => match target.look() {
            Ok(Found::Mount(point)) => point.id == mount,
            Ok(Found::Nothing | Found::Directory) => false,
            Err(_) => true,
        },
        Err(_) => true,
    }
}

/// The mount of the volume at a path where its record says that it is mounted; `None`: it is not.
pub(super) fn find(
    inner: &Inner,
    mounts: &[MountEntry],
    id: &VolumeId,
    label: &str,
    path: &Path,
) -> Result<Option<u64>> {
    // Kubelet's path may contain a symlink. The mount table has the path resolved.
    let resolved = path.parent().and_then(|parent| parent.canonicalize().ok());
    let resolved = resolved.zip(path.file_name());
    let resolved = resolved.map_or_else(|| path.to_owned(), |(parent, name)| parent.join(name));
    let mut topmost_first = mounts.iter().rev();
    let topmost = topmost_first.find(|mount| mount.mount_point == resolved);
    if !topmost.is_some_and(|mount| inner.backend.shows(mount, id, label)) {
        return Ok(None);
    }
    Ok(match Target::open(path)?.map(|target| target.look()) {
        Some(Ok(Found::Mount(point))) => Some(point.id),
        _ => None,
    })
}

/// The mounts of a persistent volume at the paths where its record says that it is mounted.
pub(super) fn find_all(
    inner: &Inner,
    mounts: &[MountEntry],
    id: &VolumeId,
    paths: &[&Path],
) -> Result<HashMap<PathBuf, u64>> {
    let mut found = HashMap::new();
    for path in paths {
        let mount = find(inner, mounts, id, id.as_str(), path)?;
        found.extend(mount.map(|mount| (path.to_path_buf(), mount)));
    }
    Ok(found)
}

/// What a recorded volume is created and mounted with. Only `scratch` is never sealed.
pub(super) fn start(record: &VolumeRecord) -> Start<'_> {
    Start {
        layers: &record.layers,
        root: record.spec.root,
        size_limit: record.size_limit(),
        sealable: record.spec.kind != VolumeKind::Scratch,
        owner: None,
        durable: false,
    }
}

/// What a claim is mounted with, and its next new upper directory created.
pub(super) fn start_of_claim(claim: &PersistentVolume) -> Start<'_> {
    Start {
        layers: &claim.layers,
        root: claim.root(),
        size_limit: claim.limit(),
        sealable: true,
        owner: Some(claim.owners_on_disk()),
        durable: true,
    }
}

/// A detached mount of a volume that is mounted nowhere, and that no process holds: two mounts of
/// one upper directory would corrupt each other.
pub(super) fn mount(
    inner: &Inner,
    dir: &Dir,
    label: &str,
    start: &Start<'_>,
    read_only: bool,
) -> Result<OwnedFd> {
    let mount = inner.backend.mount(dir, label, start, read_only);
    mount.context("mount the volume")
}

/// A detached second mount of what is mounted at a path: one upper directory has one superblock.
pub(super) fn bind(path: &Path, read_only: bool) -> Result<OwnedFd> {
    Target::open_for_mount(path)?.clone_mount(read_only)
}

/// Attaches a detached mount at the target. `record` writes the target down before that: after a
/// crash a recorded target without a mount is harmless, but an unrecorded mount is leaked.
pub(super) fn attach(
    inner: &Inner,
    id: &VolumeId,
    target: &Target<'_>,
    mount: &OwnedFd,
    record: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let made = target.make_beside(&inner.dirs.root)?;
    let attached = record().and_then(|()| target.attach(mount.as_fd()));
    if attached.is_err()
        && made
        && let Err(error) = target.remove()
    {
        tracing::error!(volume.id = %id, %error,
            "a mount failed, and its target could not be removed");
    }
    attached
}

/// Detaches all mounts at a path, of whatever volume, and removes the mount point. A staging path
/// is the caller's, and stays. Returns a descriptor of each mount, topmost first.
pub(super) fn detach(path: &Path, staging: bool) -> Result<Vec<(MountPoint, OwnedFd)>> {
    let Some(target) = Target::open(path)? else {
        return Ok(Vec::new());
    };
    let pins = target.detach()?;
    point(Point::TargetDetached);
    if !staging {
        target.remove()?;
    }
    point(Point::TargetRemoved);
    Ok(pins)
}
