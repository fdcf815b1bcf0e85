//! Thin safe wrappers over Linux system calls, one topic per file; no other module has `unsafe`.
//!
//! Every function does what its system call does. It returns [`Error`] with the call, its object,
//! and the errno. This module knows nothing of volumes, pools or CSI, and decides nothing. It
//! resolves relative paths once, from a directory's descriptor ([`Dir`]).

mod apart;
mod btrfs;
mod dir;
mod error;
mod file;
mod inode_flags;
mod inotify;
mod ioctl;
mod lease;
mod lock;
mod mount;
mod mountinfo;
mod path_fd;
mod priority;
mod quota;
mod random;
mod reflink;
#[cfg(test)]
mod skip;
mod statfs;
mod superblock;
mod user_namespace;
mod xattr;
mod xfs;

pub use apart::{apart, on_thread};
pub use btrfs::{NestedSubvolume, QuotaGroup, Quotas};
pub use dir::{Dir, Entry, FileKind, Listing};
pub use error::{Error, Result, printable, printable_lines};
pub use file::OpenFile;
pub use inotify::{DirWatch, UnmountWatch, UnmountWatches, readable};
pub use lease::is_written;
#[cfg(test)]
pub use lease::lease_to_write;
pub use lock::Lock;
pub use mount::{
    ClassicMount, FsContext, MountAttrFlags, MountAttributes, MountPoint, PrivateMountNs, bind,
    clone_tree, confined, detach, mount_point, mount_point_at, move_mount_onto,
    set_mount_attributes, sync_root, with_fd_cwd,
};
pub use mountinfo::{MountEntry, mount_of, mount_table};
pub use nix::errno::Errno;
pub use path_fd::PathFd;
pub use priority::lower_thread_priority;
pub use quota::{NoQuota, ProjectUsage};
pub use random::{random, random_bytes};
pub use reflink::{clone_file, copy_sparse, data_length};
#[cfg(test)]
pub use skip::{is_root_or_skip, skip};
pub use statfs::Space;
pub use superblock::superblock;
pub use user_namespace::{IdSwap, user_namespace};
pub use xattr::Xattrs;
