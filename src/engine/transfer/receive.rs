//! Receive: an artifact of another node appears here, layer by layer, whole and durable, or not at
//! all.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::archive::Limits;
use crate::archive::toc::Table;
use crate::engine::error::Error;
use crate::engine::shared::Inner;
use crate::model::{ArtifactId, Maker, Name, Sha256, Timestamp};
use crate::sys::Dir;
use crate::tree::Stop;

/// An artifact that is to be received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Its tenant and reference.
    pub name: Name,
    /// Its id, which is the same on all nodes.
    pub artifact: ArtifactId,
    /// When another node sealed it.
    pub created: Timestamp,
    /// Its origin.
    pub made_by: Option<Box<Maker>>,
    /// How long it is kept, as of an output or cache.
    pub ttl: Option<Duration>,
    /// The number with which its name shows it.
    pub number: u64,
    /// Its layers, newest first; never empty.
    pub layers: Vec<ReceiveLayer>,
}

/// A layer of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveLayer {
    /// The digest of its table of contents.
    pub digest: Sha256,
    /// How many bytes its files have.
    pub bytes: u64,
}

/// Where one layer is made.
#[derive(Clone, Copy)]
pub struct LayerPlace<'a> {
    /// The directory in which `fs` is made.
    pub into: &'a Dir,
    /// May hold temporary files.
    pub temporary: &'a Dir,
    /// The limits for the layer.
    pub limits: Limits,
    /// Whether to stop: the engine ends, or there is no space. To be asked often.
    pub stop: Stop<'a>,
    /// Verified bytes are added to this. `stop` looks at the space as it grows.
    pub progress: &'a AtomicU64,
}

/// An artifact that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// The artifact.
    pub artifact: ArtifactId,
    /// Whether its name points at it here. If not, other content keeps the name.
    pub named: bool,
    /// How many layers were here already.
    pub reused: usize,
}

/// Why an artifact was not received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError<E> {
    /// The engine failed, ends, or has no space.
    #[error(transparent)]
    Engine(#[from] Error),
    /// A layer could not be made. The error is the caller's own.
    #[error("make layer {layer}: {source}")]
    Layer {
        /// The layer's place in the request.
        layer: usize,
        /// What failed.
        source: E,
    },
}

/// Receives an artifact. `make` makes one layer at the place that it is given, and returns its
/// table. It is called for each layer that this node lacks, oldest first, with the layer's place in
/// the request.
pub(in crate::engine) fn receive<E>(
    inner: &Arc<Inner>,
    request: &ReceiveRequest,
    progress: &AtomicU64,
    make: impl FnMut(usize, &LayerPlace<'_>) -> Result<Arc<Table>, E>,
) -> Result<Received, ReceiveError<E>> {
    let _ = (inner, request, progress, make);
    Err(Error::ShuttingDown.into())
}
