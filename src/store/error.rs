//! Why something could not be remembered or recalled.
//! Types only: each says what was asked of the store, and of which file.

use std::path::PathBuf;

use crate::sys;

/// A result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something could not be remembered or recalled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// Another process owns the pool.
    #[error("{} is in use by another process{holder}; one process at a time may own a pool", path.display())]
    Locked {
        /// The pool.
        path: PathBuf,
        /// Who that is: ` (pid N)`, or nothing.
        holder: String,
    },
    /// A file is of a form that this version does not know.
    #[error("{} has format {found}, this version knows {known}; use the version that wrote it, or a newer one", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// Ours.
        known: u64,
    },
    /// A file does not hold what it must.
    #[error("{} cannot be read: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The index was closed, for good; nothing was written.
    #[error("the index is closed")]
    Closed,
    /// The database failed; what was to be written is not in it.
    #[error("{doing}: {source}")]
    Database {
        /// What was being done.
        doing: &'static str,
        /// What failed.
        source: Box<redb::Error>,
    },
    /// The database failed at the very end: nobody knows whether it has what was to be written. Whoever opens it next does.
    #[error("{doing}: {source}; nobody knows yet whether it was written")]
    Unsure {
        /// What was being done.
        doing: &'static str,
        /// What failed.
        source: Box<redb::Error>,
        /// Which transaction it is: what it made up for that.
        number: u64,
    },
}

impl Error {
    pub(super) fn database(doing: &'static str, error: impl Into<redb::Error>) -> Self {
        Self::Database {
            doing,
            source: Box::new(error.into()),
        }
    }

    pub(super) fn unsure(doing: &'static str, error: redb::Error, number: u64) -> Self {
        Self::Unsure {
            doing,
            source: Box::new(error),
            number,
        }
    }

    /// The same failure, now that it is known that nothing was written.
    pub(super) fn nothing_written(self) -> Self {
        match self {
            Self::Unsure { doing, source, .. } => Self::Database { doing, source },
            error => error,
        }
    }

    /// Whether what was to be written may be there all the same.
    #[must_use]
    pub fn is_unsure(&self) -> bool {
        matches!(self, Self::Unsure { .. })
    }

    /// Whether the disk is full, or the database refuses to go on because it was.
    #[must_use]
    pub fn is_full(&self) -> bool {
        const ENOSPC: i32 = nix::errno::Errno::ENOSPC as i32;
        const EDQUOT: i32 = nix::errno::Errno::EDQUOT as i32;
        match self {
            Self::System(error) => error.is_full(),
            Self::Database { source, .. } | Self::Unsure { source, .. } => match &**source {
                redb::Error::PreviousIo => true,
                redb::Error::Io(error) => matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT)),
                _ => false,
            },
            Self::Locked { .. } | Self::Format { .. } | Self::Damaged { .. } | Self::Closed => {
                false
            }
        }
    }
}
