//! Retired volumes: where their directories are, and how one is given up or forgotten.
//! What happens to each of them is `teardown`, `quiesce` and `seal`.

use std::sync::Arc;

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::lifecycle::{Action, Goal, Observation};
use super::notice::What;
use super::shared::Inner;
use super::types::VolumeState;
use crate::model::{LayerId, SealPlan, VolumeRecord};
use crate::store;
use crate::sys::{Dir, Errno};

/// Tells the pod's owners if a process still holds open, after a while, what is to be sealed.
pub(super) fn tell_if_held_for_long(inner: &Arc<Inner>, key: LayerId) {
    let engine = inner.clone();
    let task = async move {
        tokio::select! {
            () = tokio::time::sleep(engine.config.held_wait) => {}
            () = engine.lifetime.stopping() => return,
        }
        let held = {
            let state = engine.state.lock();
            let volume = state.volumes.retiring(key);
            let held = volume.filter(|volume| volume.state() == VolumeState::InUse);
            held.and_then(|volume| Some((volume.seal_intent()?.clone(), volume.record.clone())))
        };
        if let Some((plan, record)) = held {
            engine.say(&record, || What::HeldOpen {
                reference: plan.reference,
            });
        }
    };
    inner.lifetime.spawn(task);
}

/// Moves `pending/<key>` to the trash, where the collector deletes it. No process holds it.
pub(super) fn trash_pending(inner: &Inner, key: LayerId) -> Result<()> {
    withdraw_seal_intent(inner, key)?;
    inner.forget(key, Observation::GivenUp);
    inner.wake_reaper();
    Ok(())
}

/// A directory in `pending/` is an intent to seal; in the trash it is none.
pub(super) fn withdraw_seal_intent(inner: &Inner, key: LayerId) -> Result<()> {
    let name = key.to_string();
    let (pending, trash) = (&inner.dirs.pending, &inner.dirs.trash);
    // It keeps its name: a process that still reads the volume is looked for there.
    let throw_away = || match pending.rename(&name, trash, &name) {
        Err(error) if error.is(Errno::ENOENT) => Ok(()),
        Err(error) if matches!(error.errno(), Errno::EEXIST | Errno::ENOTEMPTY) => {
            inner.throw_away_if_there(pending, name.as_ref())
        }
        result => result,
    };
    // A directory may need a block for one more name.
    let thrown = inner.with_reserve(throw_away);
    thrown.context("move the volume to trash/")
}

/// The directory of a discarded volume is deleted.
pub(super) fn deleted(inner: &Inner, key: LayerId) {
    point(Point::DiscardDeleted);
    // Not after each: a round of the collector looks at every artifact.
    if inner.forget(key, Observation::Gone) || inner.space.is_short() {
        inner.wake_reaper();
    }
}

/// Retired volumes in memory and on disk.
impl Inner {
    /// What becomes of a retired volume; `None`: there is none of this key.
    pub(super) fn goal(&self, key: LayerId) -> Option<Goal> {
        let state = self.state.lock();
        state.volumes.retiring(key)?.lifecycle().goal()
    }

    /// The directory of a retired volume; `None`: it is gone.
    pub(super) fn retired_dir(&self, key: LayerId) -> Result<Option<Dir>> {
        let parent = match self.goal(key) {
            Some(Goal::Seal) => &self.dirs.pending,
            Some(Goal::Discard) => &self.dirs.trash,
            None => return Ok(None),
        };
        let dir = parent.open_if_there(key.to_string());
        dir.context("open the volume's directory")
    }

    /// Whether the layer of a pending seal has its record: the decision to seal was made.
    pub(super) fn is_recorded(&self, key: LayerId) -> Result<bool> {
        let Some(layer) = self.layer_dir_if_there(key)? else {
            return Ok(false);
        };
        let record = store::read_sealing(&layer).context("read the layer's record")?;
        Ok(record.is_ok())
    }

    /// The plan and record of a volume that is to be sealed.
    pub(super) fn seal_intent(&self, key: LayerId) -> Option<(SealPlan, VolumeRecord)> {
        let state = self.state.lock();
        let volume = state.volumes.retiring(key)?;
        Some((volume.seal_intent()?.clone(), volume.record.clone()))
    }

    /// What follows from an observation of a retired volume.
    pub(super) fn observe(&self, key: LayerId, observation: Observation) -> Action {
        self.state.lock().volumes.observe_retiring(key, observation)
    }

    /// The observation ends the volume's life. Returns whether the volume may have been the last
    /// that needed something.
    pub(super) fn forget(&self, key: LayerId, observation: Observation) -> bool {
        let now = self.time();
        let last = {
            let mut state = self.state.lock();
            let volume = state.volumes.retiring(key);
            let last = volume.is_none_or(|volume| state.may_be_last_of(&volume.record, now));
            state.volumes.observe_retiring(key, observation);
            last
        };
        self.state.notify();
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Config, Engine};

    /// Whether a process still reads it is asked there.
    #[tokio::test]
    async fn a_withdrawn_volume_keeps_its_name_in_the_trash() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let engine = Engine::open(Config::of_copies(folder.path())).await;
        let engine = engine.expect("it opens");
        let dirs = &engine.inner.dirs;
        let key = LayerId::from_bits(7);
        let name = key.to_string();
        // The collector empties the trash meanwhile.
        let collector = engine.inner.collector.lock();
        for _ in 0..2 {
            dirs.pending.create_dir(&name, 0o700).expect("mkdir");
            dirs.pending
                .open_beneath(&name)
                .expect("open")
                .write_new("file", b"")
                .expect("write");
            withdraw_seal_intent(&engine.inner, key).expect("withdrawn");
            assert!(dirs.trash.has(&name).expect("stat"));
            assert!(!dirs.pending.has(&name).expect("stat"));
        }
        withdraw_seal_intent(&engine.inner, key).expect("it is not there");
        drop(collector);
        engine.shutdown().await;
    }
}
