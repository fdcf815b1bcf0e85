//! Transfer: content leaves the pool as an archive (`export`) and enters it as one (`import`).
//!
//! Both run on threads of their own, at most four at a time: what they read and write is as large
//! as a tenant likes, and the other end may be slow. What an archive is, `archive` knows; who is at
//! the other end, the caller.

mod export;
mod import;
mod space;

use std::io::{Read, Write};
use std::sync::Arc;

use super::Engine;
use super::error::Result;
use crate::archive::{Codec, Progress};

pub use export::{Export, Exported, Source, View};
pub use import::{ImportRequest, Imported};

/// How many exports and imports run at a time; further ones wait for their turn.
pub(super) const AT_A_TIME: usize = 4;

impl Engine {
    /// Opens the content of an artifact, or of a volume that is mounted, for reading. What it reads
    /// stays where it is until the export is dropped.
    pub async fn export(&self, source: Source) -> Result<Export> {
        export::open(&self.inner, source).await
    }

    /// Writes it as an archive to `out`, on a thread of the engine. `out` is left incomplete on an
    /// error.
    pub async fn pack(
        &self,
        export: Export,
        codec: Codec,
        out: impl Write + Send + 'static,
        progress: Arc<Progress>,
    ) -> Result<Exported> {
        export::pack(&self.inner, export, codec, out, progress).await
    }

    /// Makes an artifact of the archive that `input` brings, on a thread of the engine: whole and
    /// durable, or nothing.
    ///
    /// An input whose other end is gone must say so by an error. It must not wait any longer once
    /// `progress` says that the archive is refused ([`Progress::has_failed`]).
    pub async fn import(
        &self,
        request: ImportRequest,
        input: impl Read + Send + 'static,
        progress: Arc<Progress>,
    ) -> Result<Imported> {
        import::import(&self.inner, request, input, progress).await
    }
}
