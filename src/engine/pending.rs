//! Volumes that their pods are done with: where their directories are, how far they are, and how one is forgotten.
//! What happens to each of them is `seal` and `teardown`.

use std::sync::Arc;

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::notice::{What, say};
use super::shared::Inner;
use super::types::VolumeState;
use super::volumes::Goal;
use crate::model::{LayerId, VolumeRecord};
use crate::store;
use crate::sys::Dir;

/// Says, if a process still holds open after a while what is to be sealed: else nobody knows why it is not.
pub(super) fn tell_if_held_for_long(inner: &Arc<Inner>, key: LayerId) {
    let engine = inner.clone();
    let task = async move {
        tokio::select! {
            () = tokio::time::sleep(engine.config.held_wait) => {}
            () = engine.lifetime.stopping() => return,
        }
        let held = {
            let state = engine.state.lock();
            let leaving = state.volumes.retiring.get(&key);
            let leaving = leaving.filter(|leaving| leaving.state == VolumeState::InUse);
            leaving.map(|leaving| (leaving.goal.clone(), leaving.record.clone()))
        };
        if let Some((Goal::Seal(plan), record)) = held {
            say(engine.config.notices.as_ref(), &record, || What::HeldOpen {
                reference: plan.reference,
            });
        }
    };
    inner.lifetime.spawn(task);
}

/// `pending/<key>` → trash, where the reaper deletes it. Nobody holds it any more.
pub(super) fn trash_pending(inner: &Inner, key: LayerId) -> Result<()> {
    unpromise(inner, key)?;
    inner.forget_leaving(key);
    inner.wake_reaper();
    Ok(())
}

/// What lies in `pending/` is promised; what lies in the trash is not.
pub(super) fn unpromise(inner: &Inner, key: LayerId) -> Result<()> {
    // A directory may need a block for one more name.
    let name = key.to_string();
    let throw_away = || inner.throw_away_if_there(&inner.dirs.pending, name.as_ref());
    let thrown = inner.with_reserve(throw_away);
    thrown.context("throw the volume away")
}

/// A volume that was thrown away is deleted.
pub(super) fn discarded(inner: &Inner, key: LayerId) {
    point(Point::DiscardDeleted);
    // Not after each: a round looks at everything that is sealed.
    if inner.forget_leaving(key) || inner.space.is_short() {
        inner.wake_reaper();
    }
}

/// How the directory of a leaving volume is found.
impl Inner {
    /// What has the directory of a leaving volume; `None` when it is no more one.
    pub(super) fn place_of(&self, key: LayerId) -> Option<&Dir> {
        let state = self.state.lock();
        Some(match state.volumes.retiring.get(&key)?.goal {
            Goal::Seal(_) => &self.dirs.pending,
            Goal::Discard => &self.dirs.trash,
        })
    }

    /// The directory of a leaving volume; `None` when it is gone.
    pub(super) fn leaving_dir(&self, key: LayerId) -> Result<Option<Dir>> {
        let Some(place) = self.place_of(key) else {
            return Ok(None);
        };
        let dir = place.open_if_there(key.to_string());
        dir.context("open the volume's directory")
    }

    /// Whether the layer of a pending seal has its record: the decision to seal was made.
    pub(super) fn is_recorded(&self, key: LayerId) -> Result<bool> {
        let layer = self.dirs.layers.open_if_there(key.to_string());
        let Some(layer) = layer.context("open the layer's directory")? else {
            return Ok(false);
        };
        let record = store::read_sealing(&layer).context("read the layer's record")?;
        Ok(record.is_ok())
    }

    pub(super) fn leaving(&self, key: LayerId) -> Option<(Goal, VolumeRecord)> {
        let state = self.state.lock();
        state
            .volumes
            .retiring
            .get(&key)
            .map(|leaving| (leaving.goal.clone(), leaving.record.clone()))
    }

    /// Notes how far a leaving volume is; tells whether that is news.
    pub(super) fn set_leaving_state(&self, key: LayerId, now: VolumeState) -> bool {
        let mut state = self.state.lock();
        let Some(leaving) = state.volumes.retiring.get_mut(&key) else {
            return false;
        };
        std::mem::replace(&mut leaving.state, now) != now
    }

    /// Whether it may have been the last that needed something.
    pub(super) fn forget_leaving(&self, key: LayerId) -> bool {
        let now = self.now();
        let last = {
            let mut state = self.state.lock();
            let left = state.volumes.retiring.remove(&key);
            left.is_none_or(|left| state.may_be_last_of(&left.record, now))
        };
        self.state.notify();
        last
    }

    /// Whether a leaving volume is thrown away, whatever its pod did.
    pub(super) fn is_thrown_away(&self, key: LayerId) -> bool {
        let state = self.state.lock();
        let leaving = state.volumes.retiring.get(&key);
        leaving.is_some_and(|leaving| leaving.goal == Goal::Discard)
    }
}
