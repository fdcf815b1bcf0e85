//! Layers in the pool: a layer that the index names says so in its record; one that nothing refers
//! to goes to the trash. How a backend makes and stacks layers is `backend`.

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use crate::model::{Artifact, LayerId};
use crate::store;
use crate::sys::Errno;

/// Says in a layer that the index names it and that it is durable.
pub(super) fn confirm(inner: &Inner, layer: LayerId) -> Result<()> {
    let layer = inner
        .dirs
        .layers
        .open_beneath(layer.to_string())
        .context("open the layer's directory")?;
    store::confirm_layer(&layer).context("confirm the layer's record")
}

/// Notes what is known of an artifact in the shared tier in the record of its newest layer, for a
/// rebuilt index. An old commit that is uploaded again would replace newer content in the tier.
pub(super) fn note_sharing(inner: &Inner, artifact: &Artifact) {
    let Some(newest) = artifact.layers.first() else {
        return;
    };
    let layer = inner.dirs.layers.open_beneath(newest.to_string());
    let noted = layer.and_then(|layer| store::note_sharing(&layer, artifact));
    if let Err(error) = noted {
        // The tier gets it once more if the index is lost.
        tracing::warn!(artifact.id = %artifact.id, %error,
            "could not record in the layer that it is in the shared tier; after a rebuild of the \
             index it is uploaded again");
    }
}

/// Moves those of these layers that nothing refers to into the trash; what they were last found to
/// cost. None while the engine is degraded: the index may name them.
pub(super) fn trash_unreferenced(inner: &Inner, layers: &[LayerId]) -> u64 {
    let mut bytes = 0;
    let free = {
        let state = inner.state.lock();
        if state.health.is_degraded() {
            return 0;
        }
        state.unreferenced(layers.iter())
    };
    for layer in free {
        let name = layer.to_string();
        let usage = inner.state.lock().catalog.forget_usage(&layer);
        bytes += usage.map_or(0, |usage| usage.bytes);
        match inner.collector.trash.throw_away(&inner.dirs, &name, usage) {
            Err(error) if error.is(Errno::ENOENT) => {}
            Err(error) => {
                tracing::error!(%layer, %error,
                    "an unused layer could not be moved to trash/; it stays until the next start");
            }
            Ok(()) => {
                inner.collector.tables.let_go(&layer);
                point(Point::CollectTrashed);
            }
        }
    }
    bytes
}
