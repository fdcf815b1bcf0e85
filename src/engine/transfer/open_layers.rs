//! An artifact that is open layer by layer, each with its table of contents: to be sent to another
//! node or to the shared tier.

use std::fs::File;
use std::sync::Arc;

use rustix::fs::OFlags;

use super::in_use::Use;
use crate::archive::toc::{Holder, Table};
use crate::archive::{self, Limits};
use crate::engine::error::{Context, Result};
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::table_digests::{Recorded, recorded};
use crate::model::{Artifact, ArtifactId, LayerId, layout};
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
        let Some(layer) = open_layer(inner, *layer)? else {
            return Ok(None);
        };
        layers.push(layer);
    }
    Ok(Some(OpenArtifact {
        artifact,
        layers,
        _use: held,
        _pins: pins,
    }))
}

/// Opens a layer and reads all of its table. `None`: it has none, or a damaged one, which the
/// background job makes again.
fn open_layer(inner: &Inner, layer: LayerId) -> Result<Option<OpenLayer>> {
    let dir = inner.dirs.layers.open_beneath(layer.to_string());
    let dir = dir.context("open a layer")?;
    let Recorded::Whole(digest) = recorded(&dir).context("read a layer's table of contents")?
    else {
        return Ok(None);
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
            inner.collector.tables.forget(&layer);
            inner.collector.tables.wake();
            return Ok(None);
        }
        table => table.context("read a layer's table of contents")?,
    };
    let content = dir.open_beneath(layout::FS);
    let content = content.context("open a layer's content")?;
    let holder = Holder::new(Arc::clone(&table), &content).context("open a layer's content")?;
    Ok(Some(OpenLayer { table, holder }))
}
