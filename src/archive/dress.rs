//! Sets owner, attributes, mode and times of a new entry, by a descriptor. Equal values of an open
//! file are not set again, because each change is a transaction of the filesystem.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Gid, Mode, Timespec, Timestamps, UTIME_OMIT, Uid};

use super::error::{Error, Result};
use super::walk::{Attribute, Look};
use crate::sys::{Dir, FileKind, OpenFile, PathFd, Xattrs};

/// Kinds of nodes that are made, as in `st_mode`.
pub(super) const FIFO: u32 = 0o010_000;
pub(super) const CHARACTER: u32 = 0o020_000;
pub(super) const BLOCK: u32 = 0o060_000;

/// An entry whose attributes can be set by a descriptor.
pub(super) trait Owned: Xattrs {
    fn failed(&self, call: &'static str, errno: rustix::io::Errno) -> Error {
        crate::sys::Error::new(call, self.subject(), errno).into()
    }
}

impl Owned for Dir {}
impl Owned for OpenFile {}

/// Owner, attributes, mode, times: in this order, since a change of owner takes set-id bits and
/// capabilities away, and an ACL changes the mode.
pub(super) fn dress(of: &impl Owned, look: &Look, attributes: &[Attribute]) -> Result<()> {
    let stat = rustix::fs::fstat(of.as_fd()).map_err(|errno| of.failed("fstat", errno))?;
    let mut mode = stat.st_mode & 0o7777;
    if (stat.st_uid, stat.st_gid) != (look.uid, look.gid) {
        let (uid, gid) = (Uid::from_raw(look.uid), Gid::from_raw(look.gid));
        rustix::fs::fchown(of.as_fd(), Some(uid), Some(gid))
            .map_err(|errno| of.failed("fchown", errno))?;
        // What that took away; a directory keeps its set-id bits.
        if FileKind::of_mode(stat.st_mode) != FileKind::Directory {
            mode &= 0o777;
        }
    }
    for (name, value) in attributes {
        of.set_xattr(OsStr::from_bytes(name), value)?;
    }
    let acl = |(name, _): &Attribute| name.starts_with(b"system.");
    if mode != look.mode || attributes.iter().any(acl) {
        rustix::fs::fchmod(of.as_fd(), Mode::from_raw_mode(look.mode))
            .map_err(|errno| of.failed("fchmod", errno))?;
    }
    rustix::fs::futimens(of.as_fd(), &times(look.mtime))
        .map_err(|errno| of.failed("utimensat", errno))
}

/// The same for what is not opened: a symlink, which has no mode, a FIFO or a device.
pub(super) fn dress_node(node: &PathFd, look: &Look, attributes: &[Attribute]) -> Result<()> {
    node.set_owner(Some(look.uid), Some(look.gid))?;
    for (name, value) in attributes {
        node.set_xattr(OsStr::from_bytes(name), value)?;
    }
    if FileKind::of_mode(node.stat()?.st_mode) != FileKind::Symlink {
        node.set_mode(look.mode)?;
    }
    Ok(node.set_times(&times(look.mtime))?)
}

/// A modification time; the access time stays.
pub(super) fn times((seconds, nanoseconds): (i64, u32)) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: seconds,
            tv_nsec: i64::from(nanoseconds),
        },
    }
}
