//! Artifacts that count as in use while they are read: neither eviction nor a merge takes them
//! away. Pins keep single layers.

use std::sync::Arc;

use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::model::ArtifactId;

/// An artifact that counts as in use.
#[derive(Debug)]
pub(in crate::engine) struct Use {
    inner: Arc<Inner>,
    artifact: ArtifactId,
}

impl Use {
    /// Under the lock under which it was found.
    pub(super) fn begin(inner: &Arc<Inner>, state: &mut State, artifact: ArtifactId) -> Self {
        state.catalog.begin_export(artifact);
        Self {
            inner: inner.clone(),
            artifact,
        }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.catalog.end_export(&self.artifact);
        drop(state);
        // It may have been the last that kept something.
        self.inner.wake_reaper();
    }
}
