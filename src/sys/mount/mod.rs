//! Mounts: created detached, configured by descriptor, attached last, and detached by name.
//!
//! Where possible they use descriptors ([`FsContext`], [`clone_tree`], [`move_mount_onto`]; Linux
//! 5.2), else mount(2) in a [`PrivateMountNs`], a mount namespace of one thread. All descriptors
//! are close-on-exec. No function follows a symlink in a target's last component.

mod attributes;
mod context;
mod facts;
mod fd_cwd;
mod private_ns;
mod tree;

pub use attributes::{MountAttributes, set_mount_attributes};
pub use context::FsContext;
pub use facts::{MountPoint, mount_point, mount_point_at};
pub use fd_cwd::with_fd_cwd;
pub use private_ns::{ClassicMount, PrivateMountNs};
pub use rustix::mount::MountAttrFlags;
pub use tree::{bind, clone_tree, confined, detach, move_mount_onto, sync_root};

#[cfg(test)]
mod tests;
