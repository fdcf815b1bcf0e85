//! An artifact or a snapshot that is open layer by layer, each with its table of contents: to be
//! sent to another node or to the shared tier.

use std::fs::File;
use std::sync::Arc;

use rustix::fs::OFlags;

use crate::archive::toc::{Holder, Table};
use crate::archive::{self, Limits};
use crate::engine::error::{Context, Error, Result};
use crate::engine::pins::{Pins, Use};
use crate::engine::shared::Inner;
use crate::engine::table_digests::{Recorded, recorded};
use crate::model::{Artifact, ArtifactId, LayerId, Snapshot, SnapshotId, layout};
use crate::sys::Errno;

/// An artifact whose layers can be read. They stay until this is dropped.
#[derive(Debug)]
pub struct OpenArtifact {
    /// The artifact, as it was when it was opened.
    pub artifact: Artifact,
    /// Its layers, newest first.
    pub layers: Vec<OpenLayer>,
    _use: Use,
    _pins: Pins,
}

/// A snapshot whose layers can be read. They stay until this is dropped.
#[derive(Debug)]
pub struct OpenSnapshot {
    /// The snapshot, as it was when it was opened.
    pub snapshot: Snapshot,
    /// Its layers, newest first.
    pub layers: Vec<OpenLayer>,
    /// The last field: the layers are closed before they may go.
    _kept: RetainedLayers,
}

/// Keeps the layers of a snapshot. The snapshot and its volume may be deleted meanwhile: then the
/// collector looks at the end whether the layers are still needed.
#[derive(Debug)]
pub(in crate::engine) struct RetainedLayers {
    pins: Option<Pins>,
    inner: Arc<Inner>,
}

impl RetainedLayers {
    pub(in crate::engine) fn new(inner: &Arc<Inner>, pins: Pins) -> Self {
        Self {
            pins: Some(pins),
            inner: inner.clone(),
        }
    }
}

impl Drop for RetainedLayers {
    fn drop(&mut self) {
        drop(self.pins.take());
        self.inner.wake_reaper();
    }
}

/// The result of opening a snapshot.
#[derive(Debug)]
pub enum Opened {
    /// There is none of that id.
    Gone,
    /// A layer has no table yet. The background job makes it.
    Coming,
    /// It is open.
    Open(Box<OpenSnapshot>),
}

/// A layer that can be read.
#[derive(Debug)]
pub struct OpenLayer {
    /// Its table of contents.
    pub table: Arc<Table>,
    /// Its content.
    pub holder: Holder,
}

/// Opens the layers of an artifact. `None`: the artifact is gone, or a layer has no table yet.
pub(in crate::engine) fn open_layers(
    inner: &Arc<Inner>,
    id: ArtifactId,
) -> Result<Option<OpenArtifact>> {
    let mut pins = Pins::none(inner);
    let (artifact, held) = {
        let mut state = inner.state.lock();
        state.health.refuse_closing()?;
        let Some(sealed) = state.catalog.get(&id) else {
            return Ok(None);
        };
        let artifact = sealed.artifact.clone();
        pins.add(&mut state, &artifact.layers);
        (artifact, Use::begin(inner, &mut state, id))
    };
    let mut layers = Vec::with_capacity(artifact.layers.len());
    for layer in &artifact.layers {
        let Some(open) = open_layer(inner, *layer)? else {
            // A peer asks again every few milliseconds.
            if !inner.collector.tables.is_awaited(layer) {
                inner.collector.tables.wait_for(*layer);
            }
            return Ok(None);
        };
        layers.push(open);
    }
    Ok(Some(OpenArtifact {
        artifact,
        layers,
        _use: held,
        _pins: pins,
    }))
}

/// Opens the layers of a snapshot.
pub(in crate::engine) fn open_snapshot(inner: &Arc<Inner>, id: &SnapshotId) -> Result<Opened> {
    let mut pins = Pins::none(inner);
    let snapshot = {
        let mut state = inner.state.lock();
        state.health.refuse_closing()?;
        let Some(snapshot) = state.claims.snapshots().get(id).cloned() else {
            return Ok(Opened::Gone);
        };
        pins.add(&mut state, &snapshot.layers);
        snapshot
    };
    let kept = RetainedLayers::new(inner, pins);
    let mut open = Vec::with_capacity(snapshot.layers.len());
    for layer in &snapshot.layers {
        if let Some(layer) = open_layer(inner, *layer)? {
            open.push(layer);
            continue;
        }
        if inner.collector.tables.is_refused(layer) {
            return Err(Error::Unsupported {
                what: format!("a copy of snapshot {id} on another node"),
                why: format!("its layer {layer} exceeds a limit of tables of contents"),
            });
        }
        // If that fails, the log has the reason, and it is tried again.
        inner.collector.tables.wait_for(*layer);
        return Ok(Opened::Coming);
    }
    Ok(Opened::Open(Box::new(OpenSnapshot {
        snapshot,
        layers: open,
        _kept: kept,
    })))
}

/// Opens a layer and reads all of its table. `None`: it has none, or a damaged one, which the
/// background job makes again.
fn open_layer(inner: &Inner, layer: LayerId) -> Result<Option<OpenLayer>> {
    let dir = inner.layer_dir(layer)?;
    let make_again = || {
        inner.collector.tables.forget(&layer);
        inner.collector.tables.wake();
        Ok(None)
    };
    let Recorded::Whole(digest) = recorded(&dir).context("read a layer's table of contents")?
    else {
        return make_again();
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
    let file = dir.open_file_beneath(layout::TABLE, flags, 0);
    let file = File::from(file.context("open a layer's table of contents")?);
    let stop = || inner.lifetime.is_stopping();
    let temporary = &inner.dirs.incoming;
    let table = match Table::open(file, Some(digest.0), temporary, Limits::default(), &stop) {
        Err(error @ (archive::Error::Malformed { .. } | archive::Error::Truncated { .. })) => {
            tracing::warn!(%layer, %error,
                "the layer's table of contents is damaged; it is made again");
            match dir.remove_file(layout::TABLE) {
                Err(error) if error.is(Errno::ENOENT) => {}
                removed => removed.context("delete a damaged table of contents")?,
            }
            return make_again();
        }
        table => table.context("read a layer's table of contents")?,
    };
    let content = dir.open_beneath(layout::FS);
    let content = content.context("open a layer's content")?;
    let holder = Holder::new(Arc::clone(&table), &content).context("open a layer's content")?;
    // The job that placed the table may not have come to this yet.
    inner.collector.tables.insert(layer, digest);
    Ok(Some(OpenLayer { table, holder }))
}
