//! Measures each layer once, early, on the thread for walks, and confirms it in its record. `reap`
//! uses the sizes.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::Ordering;

use super::error::{Context, Error, Result};
use super::layers::{confirm, tell_sizes};
use super::shared::Inner;
use super::state::State;
use crate::backend;
use crate::model::{LayerId, Usage, layout};
use crate::store::Change;
use crate::sys::Errno;

/// Finds out what layers cost, and remembers it; how many were new. One at which that fails is left
/// alone for a while: it may have been walked to its last directory, and would be in every round.
pub(super) fn measure_layers(inner: &Inner) -> Result<usize> {
    let mut measured = Vec::new();
    let mut failure = confirm_layers(inner).err();
    let waiting = {
        let state = inner.state.lock();
        inner
            .collector
            .unmeasured
            .waiting(|layer| state.is_stacked(layer))
    };
    let is_due = |state: &State, layer: &LayerId| {
        let is_known =
            state.catalog.usage(layer).is_some() && !inner.collector.unmeasured.has(layer);
        !is_known && !waiting.contains(layer)
    };
    let due = durable_layers(inner, is_due);
    for layer in due {
        if inner.lifetime.is_stopping() {
            break;
        }
        match measure_layer(inner, layer) {
            Ok(Some(usage)) => {
                inner.collector.unmeasured.forget(&layer);
                let _one_at_a_time = inner.collector.lock();
                // A layer that was removed meanwhile was not measured completely.
                let is_there = inner.dirs.layers.has(layer.to_string());
                if is_there.context("look for a layer")? {
                    inner.state.lock().catalog.set_usage(layer, usage);
                    measured.push((layer, usage));
                }
            }
            Ok(None) if inner.lifetime.is_stopping() => break,
            Ok(None) => drop(inner.collector.unmeasured.put_off(&layer)),
            // The others have nothing to do with it.
            Err(error) => {
                leave_alone(inner, layer, &error);
                failure.get_or_insert(error);
            }
        }
    }
    if !measured.is_empty() {
        let _one_at_a_time = inner.collector.lock();
        {
            // The index does not get the sizes of layers that were removed since.
            let state = inner.state.lock();
            measured.retain(|(layer, _)| state.catalog.usage(layer).is_some());
        }
        let layers = measured.iter().copied();
        let layers = layers.map(|(layer, usage)| Change::PutLayer(layer, usage));
        let changes: Vec<Change> = layers.collect();
        // First: the sizes are in memory already, so a later round would not tell them.
        tell_sizes(inner, &measured.iter().map(|(layer, _)| *layer).collect());
        inner.transact_with_unwritten(changes)?;
    }
    failure.map_or(Ok(measured.len()), Err)
}

/// The layers of everything that is durable, if they `fit`.
pub(super) fn durable_layers(
    inner: &Inner,
    fit: impl Fn(&State, &LayerId) -> bool,
) -> HashSet<LayerId> {
    let mut layers = HashSet::new();
    inner.look_at_artifacts(|state, sealed| {
        if sealed.durable {
            let fitting = sealed.artifact.layers.iter();
            layers.extend(fitting.filter(|layer| fit(state, layer)));
        }
    });
    let state = inner.state.lock();
    let others = state.claims.stacks().flatten();
    layers.extend(others.filter(|layer| fit(&state, layer)));
    layers
}

/// Records in each layer that the index names it, where that record is missing. Runs once in the
/// life of this process: a power cut can undo a rename without an fsync, and keep the index that
/// was written after it.
fn confirm_layers(inner: &Inner) -> Result<()> {
    if inner.collector.confirmed.load(Ordering::SeqCst) {
        return Ok(());
    }
    let named = durable_layers(inner, |_, _| true);
    let say = |layer: LayerId| {
        let record = Path::new(&layer.to_string()).join(layout::SEALING_JSON);
        match inner.dirs.layers.has(&record) {
            Err(error) if error.is_no_directory() => Ok(()),
            Ok(false) => Ok(()),
            found => found.context("look at a layer").and_then(|_| {
                match confirm(inner, layer) {
                    // It went meanwhile.
                    Err(Error::System { source, .. }) if source.is(Errno::ENOENT) => Ok(()),
                    confirmed => confirmed,
                }
            }),
        }
    };
    let (mut failure, mut confirmed) = (None, true);
    for layer in named {
        if inner.lifetime.is_stopping() {
            return Ok(());
        }
        // It is tried again where it would be if it could not be measured.
        if let Err(error) = say(layer) {
            confirmed &= leave_alone(inner, layer, &error);
            failure.get_or_insert(error);
        }
    }
    inner.collector.confirmed.store(confirmed, Ordering::SeqCst);
    failure.map_or(Ok(()), Err)
}

/// A one-time operation on a layer failed: it is tried again with exponential back-off. If the disk
/// was full, space is being made, the next round tries again, and this returns `false`.
fn leave_alone(inner: &Inner, layer: LayerId, error: &Error) -> bool {
    if matches!(error, Error::Full(_)) {
        return false;
    }
    let pause = inner.collector.unmeasured.put_off(&layer);
    tracing::warn!(%layer, %error, ?pause,
        "a layer could not be confirmed or measured; retrying after the pause");
    true
}

/// The usage of a layer. `None`: the engine stops, or the layer or its content is missing or is not
/// a directory. `check` reports the latter, and the rest of the round goes on.
///
/// A measured layer is confirmed, too: the driver may have been killed, or the disk full, between
/// the index and the layer's record. Each layer comes here once, early, and is opened anyway.
fn measure_layer(inner: &Inner, layer: LayerId) -> Result<Option<Usage>> {
    let dir = match inner.dirs.layers.open_beneath(layer.to_string()) {
        Err(error) if error.is(Errno::ENOENT) || error.is_no_directory() => return Ok(None),
        dir => dir.context("open a layer")?,
    };
    match confirm(inner, layer) {
        Err(Error::System { source, .. }) if source.is(Errno::ENOENT) => {
            tracing::warn!(%layer, "a layer has no record: a rebuilt index would not include it");
        }
        confirmed => confirmed?,
    }
    let known = inner.state.lock().catalog.usage(&layer);
    if known.is_some() {
        return Ok(known);
    }
    if !dir.has(layout::FS).context("look at a layer")? {
        return Ok(None);
    }
    match inner.backend.usage(&dir, &|| inner.lifetime.is_stopping()) {
        Err(backend::Error::Stopped) => Ok(None),
        usage => usage.map(Some).context("measure a layer"),
    }
}
