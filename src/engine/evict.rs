//! Eviction: unused artifacts go when the pool is nearly full, or when a call found no space.
//! [`evict()`] of `model/artifact.rs` chooses the artifacts; `reap` decides when eviction runs.

use std::sync::Arc;

use super::error::{Context, Result};
use super::remove::remove;
use super::shared::Inner;
use super::space::{above, evictable, excess};
use super::transfer;
use crate::model::{ArtifactId, LayerId, evict};
use crate::sys::Space;

/// What went to make room.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Gone {
    pub(super) artifacts: usize,
    /// Partial layers of failed fetches.
    pub(super) parts: usize,
}

/// Evicts until the pool is below its low watermark, if it is above the high one or a call found no
/// space; and on, until there is what the call needs. Nothing goes for a call that needs more than
/// there would be if all unused artifacts went.
pub(super) fn make_room(inner: &Arc<Inner>) -> Result<Gone> {
    let space = inner.dirs.root.space().context("ask for the pool's room")?;
    let space = with_what_comes(inner, space);
    let most = largest_request(inner, &space);
    let high = if most.is_some() {
        inner.config.low_watermark
    } else {
        inner.config.high_watermark
    };
    let missing = most.unwrap_or(0).saturating_sub(space.bytes_free);
    if missing == 0 && !above(&space, high) {
        return Ok(Gone::default());
    }
    // Partial layers go before any artifact. The next round sees the freed space.
    let parts = transfer::delete_parts(inner);
    if parts > 0 {
        if let Some(bytes) = most {
            inner.space.ask(bytes);
        }
        inner.wake_reaper();
        return Ok(Gone {
            parts,
            ..Gone::default()
        });
    }
    let gone = choose(inner, &space, missing);
    if gone.is_empty() {
        tracing::warn!(
            available_bytes = space.bytes_available,
            available_inodes = space.inodes_free,
            "the pool is nearly full, and nothing in it can be evicted: volumes use it, or other \
             programs fill the filesystem"
        );
    }
    let removed = remove(inner, &gone)?;
    inner
        .counters()
        .evicted(None, removed.artifacts, removed.bytes);
    Ok(Gone {
        artifacts: removed.artifacts,
        ..Gone::default()
    })
}

/// The most bytes that a waiting call needs which can be helped; `None`: no call waits.
fn largest_request(inner: &Inner, space: &Space) -> Option<u64> {
    let asked = inner.space.take();
    // Looks at all artifacts, so only where it decides something. An unmeasured layer may be of any
    // size.
    let decides = asked.iter().any(|bytes| *bytes > 0);
    let evictable = if decides {
        evictable(inner, u64::MAX)
    } else {
        0
    };
    let possible = space.bytes_free.saturating_add(evictable);
    // A call for which there is space by now needs no eviction.
    let waits = |bytes: &u64| *bytes == 0 || *bytes > space.bytes_free;
    let asked = asked.into_iter().filter(waits);
    let (helped, others): (Vec<u64>, Vec<u64>) = asked.partition(|bytes| *bytes <= possible);
    if let Some(needs) = others.into_iter().min() {
        tracing::info!(
            needs,
            possible,
            "nothing is evicted for a copy: it would not fit even if all unused content were \
             evicted"
        );
    }
    helped.into_iter().max()
}

/// The artifacts to evict: least recently used first.
fn choose(inner: &Inner, space: &Space, missing: u64) -> Vec<ArtifactId> {
    let low = inner.config.low_watermark;
    let bytes = excess(space.bytes, space.bytes_available, low).max(missing);
    // Where bytes suffice, inodes are short.
    let short_of_inodes = bytes == 0;
    let inodes = excess(space.inodes, space.inodes_free, low);
    let state = inner.state.lock();
    let in_use = state.artifacts_in_use();
    let sealed = state.catalog.artifacts().values();
    let durable = sealed.filter(|sealed| sealed.durable);
    let cost = |layer: LayerId| {
        match state.catalog.usage(&layer) {
            Some(usage) if short_of_inodes => usage.files + usage.directories,
            Some(usage) => usage.bytes,
            // It cannot be measured.
            None if inner.collector.unmeasured.has(&layer) => 0,
            // It is not measured yet. It may be enough: the next round knows.
            None => u64::MAX,
        }
    };
    let goal = if short_of_inodes { inodes } else { bytes };
    evict(durable.map(|sealed| &sealed.artifact), &in_use, cost, goal)
}

/// The pool's room, and that of layers which wait to be deleted: nothing need go for what comes
/// free anyway.
fn with_what_comes(inner: &Inner, space: Space) -> Space {
    let (bytes, inodes) = inner.collector.trash.coming();
    let used = space.bytes.saturating_sub(space.bytes_free);
    let bytes = bytes.min(used);
    let used = space.inodes.saturating_sub(space.inodes_free);
    Space {
        bytes_free: space.bytes_free + bytes,
        bytes_available: space.bytes_available + bytes,
        inodes_free: space.inodes_free + inodes.min(used),
        ..space
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::artifacts::tests::made;
    use crate::engine::pool_scan::keys;
    use crate::engine::{Config, Engine};

    /// An engine whose collector does nothing by itself, and an artifact that is not durable yet.
    async fn with_an_artifact(folder: &std::path::Path, watermark: u8) -> (Engine, ArtifactId) {
        let mut config = Config::of_copies(folder);
        (config.high_watermark, config.low_watermark) = (watermark, watermark);
        let engine = Engine::open(config).await.expect("it opens");
        let inner = &engine.inner;
        inner.lifetime.stop();
        inner.lifetime.ended().await;
        inner.space.take();
        let artifact = made(1, &[1]);
        let id = artifact.id;
        inner.state.lock().catalog.add_artifact(artifact);
        (engine, id)
    }

    #[tokio::test]
    async fn nothing_is_evicted_before_it_is_durable() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (engine, id) = with_an_artifact(folder.path(), 0).await;
        let inner = &engine.inner;
        let expect = |bytes, artifacts| {
            assert_eq!(evictable(inner, 5), bytes);
            assert_eq!(make_room(inner).expect("a round").artifacts, artifacts);
        };
        expect(0, 0);
        inner.state.lock().catalog.set_durable(&id, true);
        expect(5, 1);
    }

    #[tokio::test]
    async fn nothing_is_evicted_while_enough_waits_for_its_deletion() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (engine, id) = with_an_artifact(folder.path(), 100).await;
        let inner = &engine.inner;
        inner.state.lock().catalog.set_durable(&id, true);
        let evicted = || {
            let space = inner.dirs.root.space().expect("statfs");
            inner.space.ask(space.bytes);
            make_room(inner).expect("a round").artifacts
        };
        // It is not measured: it may hold all that is used.
        let (dirs, trash) = (&inner.dirs, &inner.collector.trash);
        dirs.layers.create_dir("layer", 0o700).expect("mkdir");
        trash.throw_away(dirs, "layer", None).expect("renamed");
        assert_eq!(evicted(), 0);
        let thrown = keys(&dirs.trash).expect("read");
        assert!(trash.forget(thrown.first().copied()), "it was known");
        assert_eq!(evicted(), 1);
    }
}
