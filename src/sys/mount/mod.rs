//! Mounts: made detached, changed through their descriptor, attached last, and taken away by name.
//!
//! The mount API by descriptors ([`FsContext`], [`clone_tree`], [`move_mount_onto`]; Linux 5.2) is used wherever it
//! can say what is wanted; mount(2) only where it cannot, and only inside a [`Room`], a mount namespace of one thread.
//! All descriptors are close-on-exec. Nothing here follows a symlink in the last component of a target.

mod among;
mod attributes;
mod context;
mod facts;
mod room;
mod tree;

pub use among::among_descriptors;
pub use attributes::{MountAttributes, set_mount_attributes};
pub use context::FsContext;
pub use facts::{MountPoint, mount_point, mount_point_at};
pub use room::{ClassicMount, Room};
pub use rustix::mount::MountAttrFlags;
pub use tree::{bind, clone_tree, confined, detach, move_mount_onto, sync_root, touch_mount};

#[cfg(test)]
mod tests;
