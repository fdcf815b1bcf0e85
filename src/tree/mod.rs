//! Work on whole trees of files: measuring, deleting, copying, merging. All by descriptors.
//!
//! A tree here was written by somebody who may be hostile, and who may still be changing it. So: no path is resolved
//! twice, no symlink followed, no mount point crossed (`openat2` with BENEATH, NO_SYMLINKS, NO_XDEV); what has a name
//! is pinned before it is looked at; no device and no FIFO is ever opened. Trees may be thousands of levels deep, so
//! nothing recurses, and only a bounded number of directories is open at a time ([`Spine`]).
//!
//! Nothing here knows of volumes or layers; overlay's marks are understood ([`marks`]), since a layer is made of them.

mod apply;
mod copy;
mod delete;
mod flatten;
mod marks;
mod names;
mod spine;
mod stack;
mod usage;
mod writers;

pub use apply::apply;
pub use copy::{Copied, Marks, Method, copy, copy_directory_attributes, copy_node, times_of};
pub use delete::delete;
pub use flatten::flatten;
pub use marks::{Mark, OPAQUE, ORIGIN, Opacity, is_whiteout, is_whiteout_at};
pub use spine::Spine;
pub use stack::{Found, find};
pub use usage::usage;
pub use writers::writers;

use crate::sys::{self, Errno};

/// Why work on a tree came to no end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// There is no room for the bytes of a copy; none was copied.
    #[error("a copy takes {needs} bytes, and {free} of the filesystem's {total} are free")]
    NoRoom {
        /// How many bytes it takes at least.
        needs: u64,
        /// How many are free.
        free: u64,
        /// How many there are in all.
        total: u64,
    },
    /// It was told to stop. What is done by then is done, and a repetition goes on from there.
    #[error("it was stopped before it was done")]
    Stopped,
    /// The tree holds something that must not be copied.
    #[error("{path}: {why}")]
    Refused {
        /// The offending entry, relative to the tree's root, as it may be shown ([`sys::printable`]).
        path: String,
        /// What is wrong with it.
        why: String,
    },
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Asked again and again by work that may take long; once it says yes, the work ends with
/// [`Error::Stopped`]. Whoever filled the tree decides how much work it is, and may go on filling it: a
/// caller that has other things to do gives the work its time and no more.
pub type Stop<'a> = &'a dyn Fn() -> bool;

/// What is no longer there, no longer a directory, or the place of a mount.
fn is_gone(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV
    )
}
