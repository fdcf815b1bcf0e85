//! Publish, once more: a volume that exists is asked for again.
//!
//! Kubelet repeats calls whose answer it did not get, and after a restart of its own those of live volumes. A repeated call
//! finds its mount and does nothing; a mount that vanished is brought back; a further target is a bind of the first.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use super::target::{Found, Target};
use super::types::{PublishRequest, Published};
use crate::backend::Start;
use crate::model::VolumeRecord;
use crate::store;
use crate::sys::{self, Dir};

/// Publishes a volume that exists. A failure here never touches a mount that is alive.
pub(super) fn publish_again(inner: &Inner, request: &PublishRequest) -> Result<Published> {
    let (mut record, mounts) = {
        let state = inner.state.lock();
        let live = state.volumes.live.get(&request.volume);
        // Its maker gave up between our look and our turn: the caller asks again.
        let live = live.ok_or_else(|| Error::Busy(request.volume.clone()))?;
        (live.record.clone(), live.mounts.clone())
    };
    if let Some(what) = difference(&record, request) {
        return Err(Error::Different {
            volume: request.volume.clone(),
            what,
        });
    }
    let target = Target::open_for_mount(&request.target)?;
    let mut published = Published {
        from: None,
        parent: record.parent,
        layers: record.layers.len(),
        already: true,
        waited: Duration::ZERO,
        limit_unenforced: record.limit_unenforced.clone(),
    };
    let mounted_there = mounts.get(&request.target);
    if mounted_there.is_some_and(|id| shows(&target, *id)) {
        let same_mode = |known| known == request.multiple_targets;
        if !record.multiple_targets.is_none_or(same_mode) {
            return Err(Error::Different {
                volume: request.volume.clone(),
                what: "access mode",
            });
        }
        return Ok(published);
    }
    let elsewhere = still_mounted(&mounts, &request.target);
    if let Some(elsewhere) = &elsewhere
        && !request.multiple_targets
    {
        let volume = request.volume.clone();
        return Err(Error::PublishedElsewhere {
            volume,
            target: elsewhere.clone(),
        });
    }
    published.already = false;
    let dir = inner.volume_dir(&record.id)?;
    let mount = match &elsewhere {
        Some(elsewhere) => second_mount(elsewhere, record.read_only)?,
        None => mount_anew(inner, &dir, &mut record)?,
    };
    let targets = match &elsewhere {
        Some(_) => mounts
            .keys()
            .filter(|path| **path != request.target)
            .cloned()
            .collect(),
        // What is recorded as mounted and is not any more was unmounted behind our back.
        None => Vec::new(),
    };
    let wanted = Some(request.multiple_targets);
    record.multiple_targets =
        wanted.filter(|_| targets.is_empty() || record.multiple_targets == wanted);
    attach(inner, request, &target, &dir, record, targets, &mount)?;
    Ok(published)
}

/// Whether this mount is what is visible at the target.
fn shows(target: &Target<'_>, mount: u64) -> bool {
    matches!(target.look(), Ok(Found::Mount(point)) if point.id == mount)
}

/// A target other than `target` where the volume really is mounted.
fn still_mounted(mounts: &HashMap<PathBuf, u64>, target: &Path) -> Option<PathBuf> {
    let others = mounts.iter().filter(|(path, _)| *path != target);
    let mut alive = others.filter(|(path, id)| {
        let other = Target::open(path).ok().flatten();
        other.is_some_and(|other| shows(&other, **id))
    });
    alive.next().map(|(path, _)| path.clone())
}

/// One top, one superblock: a second target is a bind of the first.
fn second_mount(first: &Path, read_only: bool) -> Result<OwnedFd> {
    let first = Target::open_for_mount(first)?;
    first.clone_mount(read_only)
}

/// A new mount of a volume that is mounted nowhere.
fn mount_anew(inner: &Inner, dir: &Dir, record: &mut VolumeRecord) -> Result<OwnedFd> {
    if inner
        .backend
        .in_use(dir)
        .context("ask whether the volume is in use")?
    {
        // A process of the pod, or a copy in another namespace, holds what was detached. Two mounts of one top would
        // corrupt each other.
        return Err(Error::HeldOpen(record.id.clone()));
    }
    record.mounted_as = None;
    let record = &*record;
    let mount = inner
        .backend
        .mount(dir, record.label(), &Start::of(record), record.read_only);
    mount.context("mount the volume")
}

/// Attaches the mount and records it; takes it back if that fails.
fn attach(
    inner: &Inner,
    request: &PublishRequest,
    target: &Target<'_>,
    dir: &Dir,
    mut record: VolumeRecord,
    mut targets: Vec<PathBuf>,
    mount: &OwnedFd,
) -> Result<()> {
    targets.push(request.target.clone());
    record.targets = targets;
    let mount_id = sys::mount_point(mount.as_fd())
        .context("look at the new mount")?
        .id;
    let made = target.make_beside(&inner.dirs.root)?;
    // Recorded first: after a crash a target that is recorded and not mounted does no harm, the opposite leaks a mount.
    let attached = store::write_volume(dir, &record, true)
        .context("write the volume's record")
        .and_then(|()| {
            point(Point::PublishAgainRecorded);
            target.attach(mount.as_fd())
        });
    if let Err(error) = attached {
        if made && let Err(error) = target.remove() {
            tracing::error!(volume.id = %record.id, %error, "a failed publish left its target behind");
        }
        return Err(error);
    }
    point(Point::PublishAgainAttached);
    let mut state = inner.state.lock();
    if let Some(live) = state.volumes.live.get_mut(&request.volume) {
        live.mounts.retain(|path, _| record.targets.contains(path));
        live.mounts.insert(request.target.clone(), mount_id);
        live.record = record;
        // Its pod is back.
        live.done_with = false;
    }
    Ok(())
}

/// What of a repeated request differs from the first, in the words of an error message.
fn difference(record: &VolumeRecord, request: &PublishRequest) -> Option<&'static str> {
    if record.tenant != request.tenant || record.pod.uid != request.pod.uid {
        Some("pod")
    } else if record.spec.kind != request.spec.kind {
        Some("type or content")
    } else if record.spec.root != request.spec.root {
        Some("owner, group or mode")
    } else if record.spec.size_limit != request.spec.size_limit {
        Some("sizeLimit")
    } else if record.read_only != request.read_only {
        Some("readOnly")
    } else {
        None
    }
}
