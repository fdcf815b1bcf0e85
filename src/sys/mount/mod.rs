//! Mounts: created detached, configured by descriptor, attached last, and detached by name.
//!
//! Where possible they use descriptors ([`FsContext`], [`clone_tree`], [`move_mount_onto`]; Linux
//! 5.2), else mount(2) in a [`Room`], a mount namespace of one thread. All descriptors
//! are close-on-exec. No function follows a symlink in a target's last component.

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
