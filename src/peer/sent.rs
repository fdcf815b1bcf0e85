//! What a stream sends: the layers of an artifact, or of a snapshot. It keeps them meanwhile.
//! `lease` keeps them between two streams of the same fetch.

use std::fmt;
use std::sync::Arc;

use super::serve::Inner;
use crate::engine::{OpenArtifact, OpenLayer, OpenSnapshot};

/// Content that is open.
#[derive(Debug)]
pub(super) enum Sent {
    /// Of an artifact.
    Artifact(Arc<OpenArtifact>),
    /// Of a snapshot of a persistent volume.
    Snapshot(Arc<OpenSnapshot>),
}

impl Sent {
    /// Its layers, newest first.
    pub(super) fn layers(&self) -> &[OpenLayer] {
        match self {
            Self::Artifact(open) => &open.layers,
            Self::Snapshot(open) => &open.layers,
        }
    }

    /// Its lease begins again.
    pub(super) fn renew(&self, inner: &Inner) {
        match self {
            Self::Artifact(open) => drop(inner.leases.get(&open.artifact.id)),
            Self::Snapshot(open) => drop(inner.snapshots.get(&open.snapshot.id)),
        }
    }
}

impl fmt::Display for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Artifact(open) => write!(f, "artifact {}", open.artifact.id),
            Self::Snapshot(open) => write!(f, "{}", open.snapshot.id),
        }
    }
}
