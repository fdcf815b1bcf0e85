//! Unpublish: detach, remove the mount point, promise what becomes of the content, answer.
//!
//! Allocates nothing on disk (a rename and an rmdir), so that it works on a full one; and costs the same whatever was done
//! in the volume: what the kernel has to tidy up happens when the descriptor taken before the detach is closed, in
//! `seal::settle`.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use super::crash::{Point, point};
use super::error::{Doing, Result};
use super::seal;
use super::state::{Goal, Leaving, Left};
use super::target::Target;
use super::types::VolumeState;
use super::{Guard, Inner};
use crate::model::{LayerId, VolumeId};
use crate::sys::{Errno, MountPoint};

/// Unpublishes whatever is at `target`, and with it the volume if it is mounted nowhere else.
pub(super) async fn unpublish(inner: &Arc<Inner>, volume: &str, target: &Path) -> Result<()> {
    // What is no id of ours was never published here; its target goes all the same.
    let volume: Option<VolumeId> = volume.parse().ok();
    let guard = volume
        .as_ref()
        .map(|volume| Guard::take(inner, volume))
        .transpose()?;
    let engine = inner.clone();
    let target = target.to_owned();
    let job = move || {
        let left = unpublish_now(&engine, volume.as_ref(), &target);
        drop(guard);
        left
    };
    if let Some(left) = inner.calls.run(job).await?? {
        seal::spawn(inner, left);
    }
    Ok(())
}

fn unpublish_now(inner: &Inner, volume: Option<&VolumeId>, path: &Path) -> Result<Option<Left>> {
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
    let mount_id = {
        let mut state = inner.state.lock();
        let Some(live) = state.volumes.get_mut(volume) else {
            return Ok(None);
        };
        let mount_id = live.mounts.remove(path);
        if !live.mounts.is_empty() {
            return Ok(None);
        }
        mount_id
    };
    let pin = pick(pins, mount_id);
    promise(inner, volume).map(|key| Some(Left { key, pin }))
}

/// The descriptor of our own mount among those that were stacked at the target; the lowest when it is not known.
fn pick(mut pins: Vec<(MountPoint, OwnedFd)>, mount_id: Option<u64>) -> Option<OwnedFd> {
    let ours = pins
        .iter()
        .position(|(point, _)| Some(point.id) == mount_id);
    match ours {
        Some(at) => Some(pins.swap_remove(at).1),
        None => pins.pop().map(|(_, pin)| pin),
    }
}

/// Moves a volume that is mounted nowhere to where its end is waited for. From here on kubelet need not ask again.
fn promise(inner: &Inner, volume: &VolumeId) -> Result<LayerId> {
    let (key, goal) = {
        let state = inner.state.lock();
        let plan = state
            .volumes
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
    let rename = || inner.dirs.volumes.rename(volume, to, key.to_string());
    let renamed = match rename() {
        // A directory may need a block for one more name.
        Err(error) if error.is_full() => {
            inner.give_back_reserve();
            rename()
        }
        result => result,
    };
    match renamed {
        // Somebody removed it behind our back: there is nothing to seal, and kubelet must not be kept waiting for ever.
        Err(error) if error.is(Errno::ENOENT) => {
            tracing::error!(volume.id = %volume, %error, "the volume's directory is gone");
        }
        result => result.doing("promise the seal of the volume")?,
    }
    point(Point::UnpublishPromised);
    let mut state = inner.state.lock();
    if let Some(live) = state.volumes.remove(volume) {
        let leaving = Leaving {
            record: live.record,
            goal,
            state: VolumeState::Sealing,
            outcome: live.outcome,
            chosen: Vec::new(),
        };
        state.leaving.insert(key, leaving);
    }
    Ok(key)
}
