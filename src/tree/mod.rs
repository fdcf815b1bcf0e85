//! Measures, deletes, copies and merges whole trees of files, by descriptors only.
//!
//! The author of a tree may be hostile, and may still be changing it. So no path is resolved twice,
//! no symlink followed and no mount point crossed (`openat2` with BENEATH, NO_SYMLINKS, NO_XDEV).
//! Each entry is pinned before it is examined. No device or FIFO is ever opened. A tree may have
//! thousands of levels: nothing recurses, and few directories are open at a time ([`DirStack`]).
//!
//! This module knows no volumes or layers, only overlay's marks ([`marks`]), which layers contain.

mod apply;
mod copy;
mod delete;
mod dir_stack;
mod flatten;
mod marks;
mod names;
mod stack;
mod usage;
mod writers;

pub use apply::apply;
pub use copy::{Copied, Marks, Method, copy, copy_directory_attributes, copy_node, times_of};
pub use delete::delete;
pub use dir_stack::DirStack;
pub use flatten::flatten;
pub use marks::{Mark, OPAQUE, ORIGIN, Opacity, is_whiteout, is_whiteout_at};
pub use stack::{Found, find};
pub use usage::usage;
pub use writers::writers;

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
fn is_gone(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV
    )
}
