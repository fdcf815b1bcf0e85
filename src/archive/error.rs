//! Why a tree was not packed, or an archive not unpacked. Only the errors of this module, and how
//! they show a path.

use std::io;

use crate::{sys, tree};

/// Why a tree was not packed, or an archive not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the tree failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// Work on a tree failed for another reason than a system call.
    #[error(transparent)]
    Tree(tree::Error),
    /// A tree has what this form of archive cannot hold.
    #[error("{path} cannot be packed: {why}")]
    Unpackable {
        /// The name, relative to the tree's root, as it may be shown.
        path: String,
        /// The obstacle.
        why: &'static str,
    },
    /// The archive could not be fetched.
    #[error("the archive cannot be read: {0}")]
    Read(#[source] io::Error),
    /// The archive could not be delivered.
    #[error("the archive cannot be written: {0}")]
    Write(#[source] io::Error),
    /// A table of names or hard links outgrew memory, and its file failed.
    #[error("the temporary file for names and hard links failed: {0}")]
    Spill(String),
    /// It was told to stop.
    #[error("it was stopped before it was complete")]
    Stopped,
    /// A file became shorter after its header was written.
    #[error("{path} became shorter while it was packed")]
    Shrunk {
        /// The file, relative to the tree's root.
        path: String,
    },
    /// A file of a sealed layer is not what the layer's table says.
    #[error("{path} is damaged: its content is not what the table of its layer says")]
    Damaged {
        /// The file, relative to the layer's root.
        path: String,
    },
    /// The archive ends too early.
    #[error("the archive is incomplete: it ends after {at} bytes, before its end mark")]
    Truncated {
        /// Bytes of the plain stream that there were.
        at: u64,
    },
    /// The compressed stream is damaged.
    #[error("the archive is damaged: {0}")]
    Codec(String),
    /// A header or a record is not what the format allows, or may be understood in two ways.
    #[error("the archive is malformed at byte {at}: {why}")]
    Malformed {
        /// Where, in the plain stream.
        at: u64,
        /// What is wrong.
        why: String,
    },
    /// An entry asks for what is never done.
    #[error("the archive is refused: {path}: {why}")]
    Refused {
        /// The entry, as it may be shown.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The archive is larger than it may be.
    #[error("the archive is refused: {what} exceeds the limit of {limit}")]
    Limit {
        /// The quantity that exceeds its limit.
        what: &'static str,
        /// How much there may be.
        limit: u64,
    },
    /// A holder sends nothing.
    #[error("the sender stopped: no data arrived in time after {at} bytes")]
    Stalled {
        /// Bytes of the stream that had come.
        at: u64,
    },
    /// Not all of a layer's content has come.
    #[error("the layer is incomplete: {what} is missing")]
    Incomplete {
        /// What is missing, or a part of it.
        what: String,
    },
    /// The other thread has ended; its own error says why.
    #[error("the other end of the pipe is closed")]
    Cut,
}

impl From<tree::Error> for Error {
    fn from(error: tree::Error) -> Self {
        match error {
            tree::Error::System(error) => Self::System(error),
            tree::Error::Stopped => Self::Stopped,
            error => Self::Tree(error),
        }
    }
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error for an entry that an archive must not have.
pub(super) fn refused(path: &[u8], why: impl Into<String>) -> Error {
    Error::Refused {
        path: shown(path),
        why: why.into(),
    }
}

/// Bytes of a path as a message may show them.
pub(super) fn shown(path: &[u8]) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    const MOST: usize = 200;
    if path.len() <= MOST {
        return sys::printable(std::ffi::OsStr::from_bytes(path).display());
    }
    let (head, tail) = (&path[..MOST / 2], &path[path.len() - MOST / 2..]);
    format!("{}…{}", shown(head), shown(tail))
}
