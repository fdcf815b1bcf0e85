//! Who may still write to a tree: a walk that asks of each file whether a process has it open for writing.
//!
//! Only files that have a name in the tree are asked about: what is written to one that has none is in no copy. A process that merely
//! works in a directory, or could reach the tree by a mount of its own, is not found.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::OFlags;

use crate::backend::{Error, Freeze, Result};
use crate::sys::{self, Dir, Errno, FileKind};

use super::names::Names;
use super::{Spine, Stop, is_gone};

/// Looks for a file below `root` that somebody may still write to. [`Freeze::Frozen`]: there is none, or nobody can tell here.
///
/// Ends early with [`Error::Stopped`].
pub fn writers(root: &Dir, stop: Stop<'_>) -> Result<Freeze> {
    // Through a mount that is `nodev` a name can be opened at once: it may have become a device meanwhile, whose driver must not be called.
    let root = &Dir::from_fd(sys::bind(root, true)?, root.path());
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
        let kind = match entry.kind {
            Some(kind) => kind,
            None => match spine.here().stat_if_there(&entry.name)? {
                Some(stat) => FileKind::of_mode(stat.st_mode),
                None => continue,
            },
        };
        match kind {
            FileKind::Directory => match spine.descend(&entry.name) {
                Ok(()) => levels.push(Names::new()),
                Err(error) if is_gone(error.errno()) => {}
                Err(error) => return Err(error.into()),
            },
            FileKind::File => match look(spine.here(), entry.name.as_ref())? {
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

fn look(dir: &Dir, name: &Path) -> Result<Look> {
    let Some(file) = open(dir, name)? else {
        return Ok(Look::Nobody);
    };
    let is_written = || match sys::is_written(file.as_fd()) {
        Err(Errno::EINVAL | Errno::EACCES | Errno::EOPNOTSUPP | Errno::ENOLCK) => Ok(None),
        result => result
            .map(Some)
            .map_err(|errno| Error::from(dir.error("fcntl", name, errno))),
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

/// Opens what was a regular file when its directory was read; `None` if it is none any more.
fn open(dir: &Dir, name: &Path) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match dir.open_file_beneath(name, flags | OFlags::NOATIME, 0) {
        Err(error) if error.is(Errno::EPERM) => dir.open_file_beneath(name, flags, 0),
        file => file,
    };
    let file = match file {
        Ok(file) => file,
        // A device, a socket.
        Err(error)
            if is_gone(error.errno()) || error.is(Errno::EACCES) || error.is(Errno::ENXIO) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let stat = rustix::fs::fstat(&file).map_err(|errno| dir.error("fstat", name, errno))?;
    Ok((FileKind::of_mode(stat.st_mode) == FileKind::File).then_some(file))
}
