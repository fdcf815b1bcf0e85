//! A pin keeps layers in place for an operation, even if nothing else refers to them. A use marks
//! an artifact as in use while it is read, so that neither eviction nor a merge takes it away.
//!
//! Taken under the lock under which they were found; given back in `Drop`.

use std::sync::Arc;

use super::shared::Inner;
use super::state::State;
use crate::model::{ArtifactId, LayerId};

/// Layers that stay where they are until this is dropped.
#[derive(Debug)]
pub(super) struct Pins {
    inner: Arc<Inner>,
    layers: Vec<LayerId>,
}

impl Pins {
    /// None yet.
    pub(super) fn none(inner: &Arc<Inner>) -> Self {
        Self {
            inner: inner.clone(),
            layers: Vec::new(),
        }
    }

    /// Pins more; under the lock under which they were found.
    pub(super) fn add(&mut self, state: &mut State, layers: &[LayerId]) {
        for layer in layers {
            state.pinned.add(*layer);
        }
        self.layers.extend_from_slice(layers);
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        for layer in &self.layers {
            state.pinned.remove(layer);
        }
    }
}

/// An artifact that counts as in use.
#[derive(Debug)]
pub(super) struct Use {
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
