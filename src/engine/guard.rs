//! The guard of one operation on one volume, claim or snapshot: at most one runs at a time, and its end is told. What is reserved stands in
//! `state`.

use std::sync::Arc;

use super::Inner;
use super::error::Result;
use crate::model::VolumeId;

/// One operation's hold on one volume.
#[derive(Debug)]
pub(super) struct Guard {
    inner: Arc<Inner>,
    pub(super) volume: VolumeId,
}

impl Guard {
    /// Busy when another operation runs on it.
    pub(super) fn take(inner: &Arc<Inner>, volume: &VolumeId) -> Result<Self> {
        inner.state.lock().begin(volume)?;
        Ok(Self::begun(inner, volume))
    }

    /// Of what was just begun in the state.
    pub(super) fn begun(inner: &Arc<Inner>, volume: &VolumeId) -> Self {
        Self {
            inner: inner.clone(),
            volume: volume.clone(),
        }
    }

    /// The same for what the driver does of its own accord: no caller is told that somebody is busy because of it.
    pub(super) fn take_for_chore(inner: &Arc<Inner>, volume: &VolumeId) -> Result<Self> {
        let mut state = inner.state.lock();
        state.begin(volume)?;
        state.chores.insert(volume.clone());
        Ok(Self::begun(inner, volume))
    }

    /// From here on it is for a chore: the caller has his answer, and what is still done is waited for.
    pub(super) fn becomes_a_chore(&self) {
        let mut state = self.inner.state.lock();
        state.chores.insert(self.volume.clone());
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        {
            let mut state = self.inner.state.lock();
            state.busy.remove(&self.volume);
            state.chores.remove(&self.volume);
            state.wanted.remove(&self.volume);
        }
        self.inner.changed.notify_waiters();
    }
}
