//! Unpublish: detach, remove the mount point, promise what becomes of the content, answer.
//!
//! Allocates nothing on disk (a rename and an rmdir), so that it works on a full one; and costs the same whatever was done
//! in the volume: what the kernel has to tidy up happens when the descriptor taken before the detach is closed, in
//! `teardown` or `seal`.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::guard::{self, Guard};
use super::shared::Inner;
use super::target::{Found, Target};
use super::teardown;
use super::types::VolumeState;
use super::volumes::{Goal, Pin, RetiringVolume, Teardown};
use crate::model::{LayerId, VolumeId};
use crate::sys::{Errno, MountPoint};

/// Unpublishes whatever is at `target`, and with it the volume if it is mounted nowhere else.
pub(super) async fn unpublish(inner: &Arc<Inner>, volume: &str, target: &Path) -> Result<()> {
    // Before it holds the volume: a repetition waits with it, and is not told that it is busy.
    let place = place(inner).await?;
    // What is no id of ours was never published here; its target goes all the same.
    let volume: Option<VolumeId> = volume.parse().ok();
    let guard = match &volume {
        Some(volume) => Some(Guard::take_to_leave(inner, volume, guard::deadline()).await?),
        None => None,
    };
    let engine = inner.clone();
    let target = target.to_owned();
    let job = move || {
        let left = unpublish_now(&engine, volume.as_ref(), &target, place);
        // Here and not by the caller, who may have gone away: what is promised is seen to.
        let answer = left.map(|left| {
            if let Some(left) = left {
                teardown::begin_soon(&engine, left);
            }
        });
        drop(guard);
        answer
    };
    inner.threads.calls.run(job).await?
}

/// A place for what is about to be unmounted, once there is one.
async fn place(inner: &Arc<Inner>) -> Result<OwnedSemaphorePermit> {
    let places = &inner.teardown.pins;
    if let Ok(place) = places.clone().try_acquire_owned() {
        return Ok(place);
    }
    teardown::begin_now(inner);
    let place = places.clone().acquire_owned().await;
    place.map_err(|_| Error::ShuttingDown)
}

fn unpublish_now(
    inner: &Inner,
    volume: Option<&VolumeId>,
    path: &Path,
    place: OwnedSemaphorePermit,
) -> Result<Option<Teardown>> {
    let mut pins = Vec::new();
    if let Some(target) = Target::open(path)? {
        pins = target.detach()?;
        point(Point::UnpublishDetached);
        target.remove()?;
        point(Point::UnpublishTargetRemoved);
    }
    let Some(volume) = volume else {
        return Ok(None);
    };
    let (mount_id, others) = {
        let mut state = inner.state.lock();
        let Some(live) = state.volumes.live.get_mut(volume) else {
            return Ok(None);
        };
        (live.mounts.remove(path), live.mounts.clone())
    };
    if is_mounted(&others) {
        return Ok(None);
    }
    let pin = mount_id.and_then(|id| pick(pins, id));
    let pin = pin.map(|descriptor| Pin { descriptor, place });
    match promise(inner, volume) {
        Ok(key) => Ok(Some(Teardown { key, pin })),
        // The disk is full, read-only or failing, and not even a name can be moved. The volume is mounted nowhere, and kubelet
        // need not wait for a disk: the reaper tries again, and so does the next start of this boot.
        Err(error) => {
            tracing::warn!(volume.id = %volume, %error, "unmounted; its end is put off until the pool takes changes");
            if let Some(live) = inner.state.lock().volumes.live.get_mut(volume) {
                live.done_with = true;
            }
            if let Error::Full(shortage) = error {
                inner.ask_for_room(shortage.needs);
            }
            Ok(None)
        }
    }
}

/// Unmounts all that is mounted at a path, of any volume, and removes the mount point unless that is a staging path: all that can be
/// done without a pool.
pub(super) fn unmount(path: &Path, staging: bool) -> Result<()> {
    let Some(target) = Target::open(path)? else {
        return Ok(());
    };
    drop(target.detach()?);
    if staging {
        return Ok(());
    }
    target.remove()
}

/// The descriptor of our own mount among those that were stacked at the target. Never of another's: what is to be sealed is made
/// read-only through it.
fn pick(pins: Vec<(MountPoint, OwnedFd)>, mount_id: u64) -> Option<OwnedFd> {
    let ours = pins.into_iter().find(|(point, _)| point.id == mount_id);
    ours.map(|(_, pin)| pin)
}

/// Whether one of these mounts is there, or may be. A mount that another process unmounted is not.
fn is_mounted(mounts: &HashMap<PathBuf, u64>) -> bool {
    mounts.iter().any(|(path, id)| match Target::open(path) {
        Ok(None) => false,
        Ok(Some(target)) => match target.look() {
            Ok(Found::Mount(point)) => point.id == *id,
            Ok(Found::Nothing | Found::Directory) => false,
            Err(_) => true,
        },
        Err(_) => true,
    })
}

/// Takes up the volumes that nobody will unpublish any more: those whose end was put off, and those whose pod's directory
/// is gone, with all mounts, by another hand than the driver's (kubelet then never calls). One whose end cannot begin is in no other
/// one's way; the first failure is the answer.
pub(super) fn promise_abandoned(inner: &Arc<Inner>) -> Result<usize> {
    let candidates: Vec<(VolumeId, bool, Vec<PathBuf>)> = {
        let state = inner.state.lock();
        // Kubelet is done with one target at least: a volume that has all of its targets is its pod's.
        let left = state.volumes.live.values().filter(|live| {
            let left = live.mounts.len() < live.record.targets.len();
            live.made && left
        });
        left.map(|live| {
            let targets = live.record.targets.clone();
            (live.record.id.clone(), live.done_with, targets)
        })
        .collect()
    };
    let (mut promised, mut failure) = (0, None);
    for (volume, done_with, targets) in candidates {
        // Looked at before it is held: a caller who comes for a volume that is not abandoned need not wait.
        let gone = |target: &PathBuf| matches!(Target::open(target), Ok(None));
        if !done_with && !targets.iter().all(gone) {
            continue;
        }
        // Somebody works on it: it is not abandoned.
        let Ok(_guard) = Guard::take_for_chore(inner, &volume) else {
            continue;
        };
        let mounts = {
            let state = inner.state.lock();
            state
                .volumes
                .live
                .get(&volume)
                .map(|live| live.mounts.clone())
        };
        if mounts.is_some_and(|mounts| !is_mounted(&mounts)) {
            match promise(inner, &volume) {
                Ok(key) => {
                    tracing::info!(volume.id = %volume, "nobody will unpublish it any more: its end begins");
                    teardown::begin_soon(inner, Teardown { key, pin: None });
                    promised += 1;
                }
                Err(error) => {
                    tracing::warn!(volume.id = %volume, %error, "nobody will unpublish it any more, and its end cannot begin");
                    failure.get_or_insert(error);
                }
            }
        }
    }
    failure.map_or(Ok(promised), Err)
}

/// Moves a volume that is mounted nowhere to where its end is waited for. From here on kubelet need not ask again.
fn promise(inner: &Inner, volume: &VolumeId) -> Result<LayerId> {
    let (key, goal) = {
        let state = inner.state.lock();
        let plan = state
            .volumes
            .live
            .get(volume)
            .and_then(|live| live.record.seal.clone());
        match plan {
            Some(plan) => (plan.layer, Goal::Seal(plan)),
            None => (LayerId::from_bits(inner.random()), Goal::Discard),
        }
    };
    let to = match goal {
        Goal::Seal(_) => &inner.dirs.pending,
        Goal::Discard => &inner.dirs.trash,
    };
    // A directory may need a block for one more name.
    let renamed = inner.with_reserve(|| inner.dirs.volumes.rename(volume, to, key.to_string()));
    match renamed {
        // Somebody removed it behind our back: there is nothing to seal, and kubelet must not be kept waiting for ever.
        Err(error) if error.is(Errno::ENOENT) => {
            tracing::error!(volume.id = %volume, %error, "the volume's directory is gone");
        }
        result => result.context("promise the seal of the volume")?,
    }
    point(Point::UnpublishPromised);
    let mut state = inner.state.lock();
    if let Some(live) = state.volumes.live.remove(volume) {
        let leaving = RetiringVolume {
            record: live.record,
            goal,
            state: VolumeState::Sealing,
            outcome: live.outcome,
            usage: live.measured.usage,
            chosen: Vec::new(),
        };
        state.volumes.retiring.insert(key, leaving);
    }
    Ok(key)
}
