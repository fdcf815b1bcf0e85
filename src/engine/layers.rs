//! Layers in the pool. A layer that the index names is confirmed in its record; a layer that
//! nothing refers to is moved to the trash. The cluster is told of a layer's size when that is
//! known. How a backend makes and stacks layers is `backend`.

use std::collections::HashSet;

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use crate::model::{Artifact, LayerId};
use crate::store;
use crate::sys::Errno;

/// Says in a layer that the index names it and that it is durable.
pub(super) fn confirm(inner: &Inner, layer: LayerId) -> Result<()> {
    store::confirm_layer(&inner.layer_dir(layer)?).context("confirm the layer's record")
}

/// Records an artifact's state in the shared tier in its newest layer, for a rebuilt index. Without
/// it, an old commit would be uploaded again and replace newer content in the tier.
pub(super) fn note_sharing(inner: &Inner, artifact: &Artifact) {
    let Some(newest) = artifact.layers.first() else {
        return;
    };
    let layer = inner.dirs.layers.open_beneath(newest.to_string());
    let noted = layer.and_then(|layer| store::note_sharing(&layer, artifact));
    if let Err(error) = noted {
        // If the index is lost, the artifact is uploaded once more.
        tracing::warn!(artifact.id = %artifact.id, %error,
            "could not record in the layer that it is in the shared tier; after a rebuild of the \
             index it is uploaded again");
    }
}

/// Moves the layers that nothing refers to into the trash. Returns their last measured sizes. Moves
/// none while the engine is degraded: the index may name them.
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
        let throw_away = || inner.collector.trash.throw_away(&inner.dirs, &name, usage);
        match inner.with_reserve(throw_away) {
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

/// The cluster was told of these layers' content before its size was known: it is told again.
pub(super) fn tell_sizes(inner: &Inner, measured: &HashSet<LayerId>) {
    let mut names = Vec::new();
    inner.look_at_artifacts(|state, sealed| {
        let artifact = &sealed.artifact;
        let is_new = artifact.layers.iter().any(|layer| measured.contains(layer));
        if is_new && state.catalog.is_named(artifact) {
            names.push(artifact.name());
        }
    });
    let mut state = inner.state.lock();
    for name in &names {
        state.catalog.changes().note(name);
    }
}
