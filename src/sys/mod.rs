//! Thin safe wrappers over Linux system calls, one idea per file; the only `unsafe` of the project.
//!
//! Every function does what its system call does and returns [`Error`], which names the call, what it
//! was applied to, and the errno. Nothing here knows of volumes, pools or CSI; nothing here decides.
//! Relative paths are resolved from a directory's descriptor ([`Dir`]), never twice.

mod dir;
mod error;
mod inode_flags;
mod ioctl;
mod lock;
mod mountinfo;
mod node;
mod quota;
mod reflink;
mod statfs;
mod xattr;

pub use dir::{Dir, Entry, FileKind};
pub use error::{Error, Result};
pub use lock::Lock;
pub use mountinfo::{MountEntry, mount_table};
pub use nix::errno::Errno;
pub use node::Node;
pub use quota::{NoQuota, ProjectUsage};
pub use reflink::{clone_file, copy_sparse};
pub use statfs::Space;
pub use xattr::Xattrs;
