//! What is to be received, where its layers are made, what becomes of them, and why that fails: the
//! types that `receive` shares with `making` and with the callers of the engine.

use std::cell::Cell;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::archive::Limits;
use crate::engine::error::Error;
use crate::engine::types::ReceiveLayer;
use crate::model::{ArtifactId, Maker, Name, Sharing, Timestamp, VolumeId};
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
    /// What is known of it and the shared tier.
    pub sharing: Sharing,
    /// The highest fence that its maker's node had applied when the volume was published.
    pub fence: u64,
    /// Its layers, newest first; never empty.
    pub layers: Vec<ReceiveLayer>,
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
    /// Set if what is in `into` must not be used again: it was at fault.
    pub is_spoilt: &'a Cell<bool>,
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
    /// Bytes of the others that an earlier fetch brought. They are in the progress, too.
    pub kept: u64,
}

/// Why an artifact was not received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError<E> {
    /// The engine failed, ends, or has no space.
    #[error(transparent)]
    Engine(#[from] Error),
    /// Another artifact of this node has its id.
    #[error("artifact {0} is here under another name; the request is refused")]
    Taken(ArtifactId),
    /// A layer could not be made. The error is the caller's own.
    #[error("make layer {layer}: {source}")]
    Layer {
        /// The layer's place in the request.
        layer: usize,
        /// What failed.
        source: E,
    },
}

/// What received layers become.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) enum Owner<'a> {
    /// The artifact of a request.
    Artifact(&'a ReceiveRequest),
    /// This persistent volume.
    Claim(&'a VolumeId),
}
