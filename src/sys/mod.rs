//! Thin safe wrappers over Linux system calls, one idea per file; the only `unsafe` of the project.
//!
//! Every function does what its system call does and returns [`Error`], which names the call, what it
//! was applied to, and the errno. Nothing here knows of volumes, pools or CSI; nothing here decides.
//! Relative paths are resolved from a directory's descriptor ([`Dir`]), never twice.

mod dir;
mod error;
mod mountinfo;

pub use dir::{Dir, Entry, FileKind};
pub use error::{Error, Result};
pub use mountinfo::{MountEntry, mount_table};
pub use nix::errno::Errno;
