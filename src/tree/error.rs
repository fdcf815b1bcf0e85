//! Why work on a tree failed, and how it is stopped: what all of this module's work shares.
//! Only types and small questions are here.

use crate::sys::{self, Errno};

/// Why work on a tree failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// The filesystem has too little free space for the copy; no byte was copied.
    #[error("a copy takes {needs} bytes, and {free} of the filesystem's {total} are free")]
    NoRoom {
        /// The lower bound of the bytes that the copy takes.
        needs: u64,
        /// Free bytes.
        free: u64,
        /// The filesystem's size in bytes.
        total: u64,
    },
    /// `stop` ended the work. Completed work stays; a retry continues from there.
    #[error("stopped before it was complete; the next attempt continues")]
    Stopped,
    /// The tree has an entry that must not be copied.
    #[error("{path}: {why}")]
    Refused {
        /// The offending entry, relative to the tree's root, made printable ([`sys::printable`]).
        path: String,
        /// The reason.
        why: String,
    },
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Long work calls this repeatedly, and ends with [`Error::Stopped`] once it returns true. The
/// author of the tree decides how long the work takes, so a busy caller sets a time limit.
pub type Stop<'a> = &'a dyn Fn() -> bool;

/// Whether an entry has vanished, is no longer a directory, or is a mount point.
pub(super) fn is_gone(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV
    )
}
