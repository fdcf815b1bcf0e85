//! How far a thread is with an archive, and how large an archive may be: values that the caller
//! shares with the threads of `pack` and `unpack`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How far it is, for another thread to read.
#[derive(Debug, Default)]
pub struct Progress {
    pub(super) plain: AtomicU64,
    pub(super) packed: AtomicU64,
    pub(super) entries: AtomicU64,
    pub(super) failed: AtomicBool,
}

impl Progress {
    /// Whether the archive is refused already: an input that waits for more bytes need not wait any
    /// longer.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Bytes of the tar stream so far.
    #[must_use]
    pub fn plain(&self) -> u64 {
        self.plain.load(Ordering::Relaxed)
    }

    /// Bytes of the compressed stream so far.
    #[must_use]
    pub fn packed(&self) -> u64 {
        self.packed.load(Ordering::Relaxed)
    }

    /// Entries so far.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }
}

/// How large an archive may be.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of files' content.
    pub bytes: u64,
    /// Entries.
    pub entries: u64,
    /// Bytes of a path.
    pub path: usize,
    /// Plain bytes for one packed byte.
    pub ratio: u64,
}

impl Limits {
    /// Those that hold if a caller sets no others.
    pub const DEFAULT: Self = Self {
        bytes: 1 << 40,
        entries: 1 << 24,
        path: 64 << 10,
        ratio: 2000,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
