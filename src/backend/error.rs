//! Why a backend operation failed: the errors that the engine distinguishes.
//! Only types are here, no work.

use crate::{sys, tree};

/// Why a backend operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// This kernel or filesystem cannot do it at all; a retry does not help.
    #[error("{what} is not possible on this pool: {why}")]
    Unsupported {
        /// The requested operation, in the user's words.
        what: &'static str,
        /// The missing feature.
        why: String,
    },
    /// The pool has too little free space for the copy; no byte was copied.
    #[error("a copy takes {needs} bytes, and {free} of the pool's {total} are free")]
    NoRoom {
        /// The lower bound of the bytes that the copy takes.
        needs: u64,
        /// Free bytes.
        free: u64,
        /// The pool's size in bytes.
        total: u64,
    },
    /// `stop` ended the work. Completed work stays; a retry continues from there.
    #[error("stopped before it was complete; the next attempt continues")]
    Stopped,
    /// The content cannot become a layer.
    #[error("the content cannot be sealed: {path}: {why}")]
    Refused {
        /// The offending entry, relative to the volume's root, made printable ([`sys::printable`]).
        path: String,
        /// The reason.
        why: String,
    },
}

impl From<tree::Error> for Error {
    fn from(error: tree::Error) -> Self {
        match error {
            tree::Error::System(error) => Self::System(error),
            tree::Error::NoRoom { needs, free, total } => Self::NoRoom { needs, free, total },
            tree::Error::Stopped => Self::Stopped,
            tree::Error::Refused { path, why } => Self::Refused { path, why },
        }
    }
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;
