//! Makes each layer's table of contents in the background, so that the first transfer of the layer
//! does not wait for it.
//!
//! One thread makes them, at the lowest priority. It reads all content of a layer, once in the
//! layer's life. It begins while the layer is being made durable: both take as long.
//!
//! Tables that another node or an upload waits for come first, those of small layers before others.
//! While a large layer is read, the thread makes awaited tables of much smaller ones in between. So
//! content of one tenant does not wait for an hour until that of another one is read.
//!
//! | step | on disk | after `kill -9` or a power cut here |
//! |---|---|---|
//! | written to `layers/<id>/.table.new`, with its digest | incomplete | overwritten later |
//! | fsync | whole | the same |
//! | rename to `layers/<id>/table` | **the table** | found by the next start |
//!
//! Nothing refers to a table but its place, so it goes with its layer. A layer may be evicted while
//! it is read: then the job lets go of it. It also stops while the pool runs out of space.

use std::cell::{Cell, OnceCell};
use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use super::space::is_nearly_full;
use super::table_digests::{DIGEST, Recorded, recorded};
use super::transfer;
use crate::archive::{self, Progress, toc};
use crate::model::{LayerId, Sha256, layout};
use crate::sys::{self, Dir, Errno, Xattrs};
use crate::tree::Stop;

/// The pool's space is looked at each time that the job was so often asked whether to stop: it asks
/// for each entry, each piece, and each 256 KiB that it reads.
const LOOK: u32 = 1024;

/// The awaited tables of layers that are so many times smaller do not wait for that of a larger
/// one.
const MUCH_SMALLER: u64 = 16;

/// 16 EiB: larger than any layer.
const UNMEASURED: u64 = u64::MAX - 1;

/// Makes missing tables whenever there may be a new layer.
pub(super) async fn table_loop(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = inner.collector.tables.wanted.notified() => {}
            () = inner.lifetime.stopping() => return,
        }
        let engine = inner.clone();
        // A thread that has the lowest priority cannot get another one back: it ends.
        let made = sys::apart("tables", async move { make_missing(&engine) }).await;
        if let Err(error) = made {
            tracing::error!(%error, "tables of contents could not be made; the next round retries");
        }
    }
}

fn make_missing(inner: &Inner) {
    if let Err(error) = sys::lower_thread_priority() {
        tracing::debug!(%error, "tables of contents are made at normal priority");
    }
    let tables = &inner.collector.tables;
    let layers = layers(inner);
    tables.retain(&layers);
    let waiting = tables.failed.waiting(|layer| layers.contains(layer));
    for layer in layers {
        if tables.may_be_made(&layer) && !waiting.contains(&layer) {
            make_awaited(inner, u64::MAX);
            make_one(inner, layer);
        }
    }
}

/// Makes the tables that another node or an upload waits for, of layers of fewer bytes. The
/// smallest come first. Those that lacked space are left to the rounds.
fn make_awaited(inner: &Inner, below: u64) {
    let tables = &inner.collector.tables;
    let mut tried = HashSet::new();
    loop {
        let mut awaited = tables.awaited();
        awaited.retain(|layer| !tried.contains(layer) && !tables.failed.is_waiting(layer));
        let sized = awaited.iter().map(|layer| (bytes(inner, *layer), *layer));
        let Some((_, next)) = sized.filter(|(bytes, _)| *bytes < below).min() else {
            return;
        };
        tried.insert(next);
        make_one(inner, next);
    }
}

/// The bytes of a layer. One that is not measured yet counts as large.
fn bytes(inner: &Inner, layer: LayerId) -> u64 {
    let usage = inner.state.lock().catalog.usage(&layer);
    usage.map_or(UNMEASURED, |usage| usage.bytes)
}

fn make_one(inner: &Inner, layer: LayerId) {
    let tables = &inner.collector.tables;
    if inner.lifetime.is_stopping()
        || inner.refuse_degraded().is_err()
        || !tables.may_be_made(&layer)
    {
        return;
    }
    match find_or_make(inner, layer) {
        Ok(Some(digest)) => {
            tables.failed.forget(&layer);
            tables.insert(layer, digest);
            tables.tell();
        }
        Ok(None) => {}
        Err(Error::Archive {
            source: source @ archive::Error::Unpackable { .. },
            ..
        }) => {
            tables.refuse(layer);
            tables.tell();
            tracing::warn!(%layer, cause = %source,
                "content of this layer stays on this node: it exceeds a limit of tables of \
                 contents");
        }
        Err(error) => {
            if matches!(error, Error::Full(_)) {
                tables.lacks_space(layer);
            }
            let pause = tables.failed.put_off(&layer);
            tables.tell();
            tracing::warn!(%layer, %error, ?pause,
                "a layer's table of contents cannot be made");
        }
    }
}

/// The layers that do not change any more.
fn layers(inner: &Inner) -> HashSet<LayerId> {
    let mut layers = HashSet::new();
    inner.look_at_artifacts(|_, sealed| layers.extend(&sealed.artifact.layers));
    layers.extend(inner.state.lock().claims.stacks().flatten());
    layers
}

/// The digest of a layer's table; `None`: the engine stops, the layer is gone, or the pool has too
/// little space: above its high watermark it spends some only on tables that another node or an
/// upload waits for, and keeps the margin of transfers.
fn find_or_make(inner: &Inner, layer: LayerId) -> Result<Option<Sha256>> {
    let reading = inner.collector.tables.read(layer);
    let dir = match inner.dirs.layers.open_beneath(layer.to_string()) {
        Err(error) if error.is(Errno::ENOENT) => return Ok(None),
        dir => dir.context("open a layer")?,
    };
    let found = recorded(&dir).context("read a layer's table of contents")?;
    if let Recorded::Whole(digest) = found {
        return Ok(Some(digest));
    }
    if found == Recorded::Damaged {
        tracing::warn!(%layer, "the layer's table of contents is damaged; it is made again");
    }
    let is_awaited = inner.collector.tables.is_awaited(&layer);
    let shortage = || {
        if is_awaited {
            return transfer::shortage(inner);
        }
        let what = "the pool is above its high watermark";
        is_nearly_full(inner).then(|| Error::Full(what.to_owned().into()))
    };
    if let Some(error) = shortage() {
        if is_awaited && inner.collector.tables.lacks_space(layer) {
            tracing::warn!(%layer, %error, "a table of contents waits for space");
            inner.collector.tables.tell();
        }
        return Ok(None);
    }
    let (asked, short) = (Cell::new(0_u32), OnceCell::new());
    let is_short = || {
        asked.set(asked.get().wrapping_add(1));
        if asked.get() % LOOK == 0 {
            if let Some(error) = shortage() {
                short.get_or_init(|| error);
            }
            make_awaited(inner, bytes(inner, layer) / MUCH_SMALLER);
        }
        short.get().is_some()
    };
    let made = make(&dir, &|| {
        reading.is_gone() || inner.lifetime.is_stopping() || is_short()
    });
    match (made, short.into_inner()) {
        // It may have been read while it was being deleted.
        _ if reading.is_gone() => Ok(None),
        (Err(Error::ShuttingDown), Some(error)) => Err(error),
        (Err(Error::ShuttingDown), None) => Ok(None),
        (made, _) => made.map(Some),
    }
}

/// Makes the table of the layer in this directory.
fn make(layer: &Dir, stop: Stop<'_>) -> Result<Sha256> {
    let began = Instant::now();
    let content = layer.open_beneath(layout::FS);
    let content = content.context("open a layer's content")?;
    let temporary = layer.free_temporary(layout::TABLE.as_ref());
    let temporary = temporary.context("delete an incomplete table of contents")?;
    let made = write(layer, Path::new(&temporary), &content, stop);
    let digest = made.inspect_err(|_| {
        // The first error is the one to tell.
        let _ = layer.remove_file(&temporary);
    })?;
    point(Point::TableWritten);
    layer
        .rename_over(&temporary, layer, layout::TABLE)
        .context("place a layer's table of contents")?;
    point(Point::TablePlaced);
    tracing::debug!(layer = %layer.path().display(), %digest, took = ?began.elapsed(),
        "made a table of contents");
    Ok(digest)
}

/// Writes the table and its digest, durably.
fn write(layer: &Dir, name: &Path, content: &Dir, stop: Stop<'_>) -> Result<Sha256> {
    let file = layer
        .create_file(name)
        .context("create a table of contents")?;
    let file = File::from(file);
    let scanned = toc::scan(content, &file, false, layer, &Progress::default(), stop);
    let scanned = scanned.context("read a layer for its table of contents")?;
    let digest = Sha256(scanned.digest.sha256);
    let node = layer.node(name).context("open a table of contents")?;
    node.set_xattr(DIGEST, digest.to_string().as_bytes())
        .and_then(|()| {
            let synced = file.sync_all();
            synced.map_err(|error| layer.error("fsync", name, error))
        })
        .context("write a table of contents")?;
    Ok(digest)
}
