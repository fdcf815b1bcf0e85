//! Who may still write to a tree: a walk that asks of each file whether a process has it open for writing.
//!
//! Only files that have a name in the tree are asked about: what is written to one that has none is in no copy. A process that merely
//! works in a directory, or could reach the tree by a mount of its own, is not found.

use std::os::fd::{AsFd, OwnedFd};

use crate::backend::{Error, Freeze, Result};
use crate::sys::{self, Dir, Errno, FileKind, Node};

use super::copy::open_content;
use super::names::Names;
use super::{Spine, Stop, is_gone};

/// Looks for a file below `root` that somebody may still write to. [`Freeze::Frozen`]: there is none, or nobody can tell here.
///
/// Ends early with [`Error::Stopped`].
pub fn writers(root: &Dir, stop: Stop<'_>) -> Result<Freeze> {
    let mut spine = Spine::new(root)?;
    let mut levels = vec![Names::new()];
    while let Some(names) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        let Some(entry) = names.next(spine.here(), spine.depth())? else {
            levels.pop();
            if spine.ascend()?.is_none() {
                break;
            }
            continue;
        };
        let is_nothing = |kind| !matches!(kind, FileKind::File | FileKind::Directory);
        if entry.kind.is_some_and(is_nothing) {
            continue;
        }
        let node = match spine.here().node(&entry.name) {
            Ok(node) => node,
            Err(error) if is_gone(error.errno()) => continue,
            Err(error) => return Err(error.into()),
        };
        match FileKind::of_mode(node.stat()?.st_mode) {
            FileKind::Directory => match spine.descend(&entry.name) {
                Ok(()) => levels.push(Names::new()),
                Err(error) if is_gone(error.errno()) => {}
                Err(error) => return Err(error.into()),
            },
            FileKind::File => match look(&node)? {
                Look::Nobody => {}
                Look::Somebody(watch) => {
                    let path = sys::printable(spine.relative(&entry.name).display());
                    tracing::debug!(%path, "a process has it open for writing");
                    return Ok(Freeze::Busy(watch));
                }
                Look::Unknown => return Ok(Freeze::Frozen),
            },
            _ => {}
        }
    }
    Ok(Freeze::Frozen)
}

enum Look {
    Nobody,
    /// And what tells that it was closed.
    Somebody(Option<OwnedFd>),
    Unknown,
}

fn look(node: &Node) -> Result<Look> {
    let file = open_content(node)?;
    let is_written = || match sys::is_written(file.as_fd()) {
        Err(Errno::EINVAL | Errno::EACCES | Errno::EOPNOTSUPP | Errno::ENOLCK) => Ok(None),
        result => result
            .map(Some)
            .map_err(|errno| Error::from(node.error("fcntl", errno))),
    };
    match is_written()? {
        None => return Ok(Look::Unknown),
        Some(false) => return Ok(Look::Nobody),
        Some(true) => {}
    }
    let watch = match sys::watch_close(file.as_fd()) {
        Ok(watch) => Some(watch),
        // There is a limit on watches per user: without one the caller asks again.
        Err(error) if matches!(error.errno(), Errno::EMFILE | Errno::ENFILE | Errno::ENOSPC) => {
            None
        }
        Err(error) => return Err(error.into()),
    };
    // Closed before it was watched.
    Ok(match is_written()? {
        Some(true) => Look::Somebody(watch),
        _ => Look::Nobody,
    })
}
