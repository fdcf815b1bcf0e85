//! Pins: layers that an operation needs to stay where they are, though nothing that is known may
//! refer to them.
//!
//! Taken under the lock under which the layers were found; given back in `Drop`.

use std::sync::Arc;

use super::shared::Inner;
use super::state::State;
use crate::model::LayerId;

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
