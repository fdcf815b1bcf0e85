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
mod error;
mod flatten;
mod marks;
mod names;
mod stack;
mod usage;
mod writers;

pub use apply::apply;
pub use copy::{Marks, Method, copy, copy_directory_attributes, copy_node, times_of};
pub use delete::delete;
pub use dir_stack::DirStack;
pub use error::{Error, Result, Stop};
pub use flatten::flatten;
pub use marks::{Mark, OPAQUE, ORIGIN, Opacity, is_whiteout, is_whiteout_at};
pub use stack::{Found, find};
pub use usage::usage;
pub use writers::writers;
