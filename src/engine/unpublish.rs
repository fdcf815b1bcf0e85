//! Unpublish: detach, remove the mount point, move the volume's directory to `pending/` or
//! `trash/`, answer. Also the same for volumes that kubelet will not ask for.
//!
//! It works on a full disk: it needs no space there (a rename and an rmdir; the time at which the
//! commit became due is written if there is room). Its cost does not
//! depend on the content: the kernel frees the filesystem when the descriptor that was opened
//! before the detach is closed, in `teardown` or `seal`.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::guard::{self, Guard};
use super::lifecycle::{Action, Goal, Lifecycle, Observation};
use super::mounts;
use super::shared::Inner;
use super::target::Target;
use super::teardown;
use super::teardowns::{Pin, Teardown};
use super::threads::Pool;
use super::volumes::Volume;
use crate::model::{LayerId, VolumeId};
use crate::store;
use crate::sys::{self, Errno, MountPoint};

/// Unpublishes whatever is at `target`, and retires the volume unless it is mounted elsewhere.
pub(super) async fn unpublish(inner: &Arc<Inner>, volume: &str, target: &Path) -> Result<()> {
    // Before the guard: a repeated call then waits for a permit too, and is not told `Busy`.
    let permit = inner.teardown.pins.clone().acquire_owned().await;
    let permit = permit.map_err(|_| Error::ShuttingDown)?;
    // The target of an id that is not ours is unmounted all the same.
    let volume: Option<VolumeId> = volume.parse().ok();
    let guard = match &volume {
        Some(volume) => Some(Guard::take_to_leave(inner, volume, guard::deadline()).await?),
        None => None,
    };
    let target = target.to_owned();
    let job = move |inner: &Arc<Inner>| {
        let left = unpublish_now(inner, volume.as_ref(), &target, permit);
        // Here, because the caller may have gone away.
        let answer = left.map(|left| {
            if let Some(left) = left {
                teardown::begin_soon(inner, left);
            }
        });
        drop(guard);
        answer
    };
    inner.run(Pool::Calls, job).await
}

fn unpublish_now(
    inner: &Inner,
    volume: Option<&VolumeId>,
    path: &Path,
    permit: OwnedSemaphorePermit,
) -> Result<Option<Teardown>> {
    let pins = mounts::detach(path, false)?;
    let Some(volume) = volume else {
        return Ok(None);
    };
    let (mount, targets) = {
        let state = inner.state.lock();
        let Some(volume) = state.volumes.live(volume) else {
            return Ok(None);
        };
        (volume.mount(), volume.record.targets.clone())
    };
    let others = || targets.iter().filter(|at| *at != path);
    let is_mounted = |mount| others().any(|at| mounts::may_be_mounted(at, mount));
    if mount.is_some_and(is_mounted) {
        return Ok(None);
    }
    let descriptor = mount.and_then(|mount| pick(pins, mount));
    let pin = descriptor.map(|descriptor| Pin { descriptor, permit });
    match retire(inner, volume) {
        Ok(key) => Ok(key.map(|key| Teardown { key, pin })),
        // The disk is full, read-only or failing, and cannot move even a name. The volume is
        // mounted nowhere, so kubelet need not wait for a disk. The collector tries again, and so
        // does the next start in this boot.
        Err(error) => {
            tracing::warn!(volume.id = %volume, %error,
                "unmounted; its teardown is deferred until the pool takes changes");
            if let Error::Full(shortage) = error {
                inner.ask_for_room(shortage.needs);
            }
            Ok(None)
        }
    }
}

/// The descriptor of our own mount among those that were stacked at the target. A seal makes the
/// content read-only through it, so it must not be of another mount.
fn pick(pins: Vec<(MountPoint, OwnedFd)>, mount: u64) -> Option<OwnedFd> {
    let ours = pins.into_iter().find(|(point, _)| point.id == mount);
    ours.map(|(_, pin)| pin)
}

/// Retires the volumes that kubelet will not unpublish: those whose teardown was deferred, and
/// those whose pod directory is gone with all mounts, removed by another program. A volume that
/// cannot be retired does not block the others. Returns the first failure.
pub(super) fn retire_abandoned(inner: &Arc<Inner>) -> Result<usize> {
    let place = |volume: &Volume| (volume.lifecycle(), volume.record.targets.clone());
    let candidates: Vec<(VolumeId, (Lifecycle, Vec<PathBuf>))> = {
        let state = inner.state.lock();
        let made = state.volumes.all_live().filter(|volume| volume.is_made());
        made.map(|volume| (volume.record.id.clone(), place(volume)))
            .collect()
    };
    let (mut retired, mut failure) = (0, None);
    for (volume, at) in candidates {
        // Examined without the guard: a caller that comes for a volume which is not abandoned need
        // not wait.
        if !is_abandoned(&at) {
            continue;
        }
        // A volume that an operation works on is not abandoned.
        let Ok(_guard) = Guard::take_for_chore(inner, &volume) else {
            continue;
        };
        // An operation may have worked on it before that.
        let at = inner.state.lock().volumes.live(&volume).map(place);
        if !at.is_some_and(|at| is_abandoned(&at)) {
            continue;
        }
        match retire(inner, &volume) {
            Ok(Some(key)) => {
                tracing::info!(volume.id = %volume,
                    "kubelet will no longer unpublish this volume: its teardown begins");
                teardown::begin_soon(inner, Teardown { key, pin: None });
                retired += 1;
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(volume.id = %volume, %error,
                    "kubelet will no longer unpublish this volume, and its teardown could not \
                     begin");
                failure.get_or_insert(error);
            }
        }
    }
    failure.map_or(Ok(retired), Err)
}

/// Whether kubelet will not come for a volume of this state and these targets. Where the directory
/// above a target is gone, no mount is left.
fn is_abandoned((lifecycle, targets): &(Lifecycle, Vec<PathBuf>)) -> bool {
    let gone = |target: &PathBuf| matches!(Target::open(target), Ok(None));
    *lifecycle == Lifecycle::TeardownDeferred || targets.iter().all(gone)
}

/// Moves a volume that is mounted nowhere out of `volumes/`. Kubelet need not ask for it again. In
/// `pending/` the directory is the seal intent that the next start would find.
fn retire(inner: &Inner, id: &VolumeId) -> Result<Option<LayerId>> {
    let layer: Option<LayerId> = {
        let mut state = inner.state.lock();
        if state.volumes.observe(id, Observation::Unmounted) != Action::Retire {
            return Ok(None);
        }
        state.volumes.live(id).and_then(Volume::layer)
    };
    let (goal, to) = match layer {
        Some(_) => (Goal::Seal, &inner.dirs.pending),
        None => (Goal::Discard, &inner.dirs.trash),
    };
    let key = layer.unwrap_or_else(|| LayerId::from_bits(sys::random()));
    let volumes = &inner.dirs.volumes;
    let due = inner.now();
    if goal == Goal::Seal {
        let written = volumes
            .open_beneath(id)
            .and_then(|dir| store::write_due(&dir, due));
        // A full disk stops no unpublish.
        if let Err(error) = written {
            tracing::debug!(volume.id = %id, %error,
                "could not record when the commit became due; a restart of the driver forgets it");
        }
    }
    // A directory may need a block for one more name.
    let rename = || volumes.rename(id, to, key.to_string());
    match inner.with_reserve(rename) {
        Ok(()) => {}
        // Another program removed it: there is nothing to seal, and kubelet must not wait for ever.
        Err(error) if error.is(Errno::ENOENT) => {
            tracing::error!(volume.id = %id, %error, "the volume's directory is gone");
        }
        Err(error) => {
            let mut state = inner.state.lock();
            state.volumes.observe(id, Observation::RetireFailed);
            return Err(error).context("move the volume out of volumes/");
        }
    }
    point(Point::UnpublishPromised);
    let mut state = inner.state.lock();
    state.volumes.retired(id, key, goal, due);
    Ok(Some(key))
}
