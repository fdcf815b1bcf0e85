//! Errors of the store: why it could not write or read the pool's state. Only types. Each names the
//! operation and the file.

use std::path::PathBuf;

use crate::sys;

/// The result of this module's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the store could not write or read the pool's state.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// Another process holds the pool's lock.
    #[error(
        "{} is in use by another process{holder}; one process at a time may own a \
         pool", path.display())]
    Locked {
        /// The pool.
        path: PathBuf,
        /// That process, as ` (pid N)`, or empty if unknown.
        holder: String,
    },
    /// A file has a format that this version does not know.
    #[error(
        "{} has format {found}, this version knows {known}; use the version that wrote it, or a \
         newer one", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The format that this version knows.
        known: u64,
    },
    /// A file's content is not valid.
    #[error("{} cannot be read: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The error and the remedy.
        why: String,
    },
    /// The index was closed for good. Nothing was written.
    #[error("the index is closed")]
    Closed,
    /// The database failed. The change was not written.
    #[error("{operation}: {source}")]
    Database {
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// The database failed during the commit. The change is in doubt until the index is reopened.
    #[error(
        "{operation}: {source}; whether it was written is in doubt until the index is reopened"
    )]
    Unsure {
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: Box<redb::Error>,
        /// The transaction's random number.
        number: u64,
    },
}

impl Error {
    pub(super) fn database(operation: &'static str, error: impl Into<redb::Error>) -> Self {
        Self::Database {
            operation,
            source: Box::new(error.into()),
        }
    }

    pub(super) fn unsure(operation: &'static str, error: redb::Error, number: u64) -> Self {
        Self::Unsure {
            operation,
            source: Box::new(error),
            number,
        }
    }

    /// The same failure, when it is known that nothing was written.
    pub(super) fn nothing_written(self) -> Self {
        match self {
            Self::Unsure {
                operation, source, ..
            } => Self::Database { operation, source },
            error => error,
        }
    }

    /// Whether the change is in doubt: it may have been written.
    #[must_use]
    pub fn is_unsure(&self) -> bool {
        matches!(self, Self::Unsure { .. })
    }

    /// Whether the disk is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        const ENOSPC: i32 = nix::errno::Errno::ENOSPC as i32;
        const EDQUOT: i32 = nix::errno::Errno::EDQUOT as i32;
        match self {
            Self::System(error) => error.is_full(),
            Self::Database { source, .. } | Self::Unsure { source, .. } => match &**source {
                redb::Error::Io(error) => matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT)),
                _ => false,
            },
            Self::Locked { .. } | Self::Format { .. } | Self::Damaged { .. } | Self::Closed => {
                false
            }
        }
    }
}
