//! Finds files that a process has open for writing, by a walk over a tree.
//!
//! It checks only files that have a name in the tree: a copy has no others. It does not find
//! processes that merely work in a directory, or that could reach the tree by a mount of their own.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::OFlags;

use crate::sys::{self, Dir, Errno, FileKind};
use crate::tree::error::{Error, Result};

use super::dir_stack::DirStack;
use super::error::{Stop, is_gone};
use super::names::Names;

/// Whether a process may still write to a file below `root`. `false` if the filesystem cannot tell.
///
/// Ends early with [`Error::Stopped`].
pub fn writers(root: &Dir, stop: Stop<'_>) -> Result<bool> {
    match walk(root, stop) {
        // A directory was moved away, so a process is at work.
        Err(Error::System(error)) if error.is(Errno::ESTALE) => Ok(true),
        result => result,
    }
}

fn walk(root: &Dir, stop: Stop<'_>) -> Result<bool> {
    // Other filesystems (NFS, SMB) may refuse a lease for other reasons.
    if root.space()?.filesystem().is_none() {
        return Ok(false);
    }
    // A name may have just become a device. A `nodev` mount keeps open(2) from calling its driver.
    let root = &Dir::from_fd(sys::bind(root, true)?, root.path());
    let device = root.stat_self()?.st_dev;
    let mut stack = DirStack::new(root)?;
    let mut levels = vec![Names::new()];
    while let Some(names) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        let entry = match names.next(stack.here(), stack.depth()) {
            // A directory that was removed during the walk has no names.
            Err(error) if error.is(Errno::ENOENT) => None,
            entry => entry?,
        };
        let Some(entry) = entry else {
            levels.pop();
            if stack.ascend()?.is_none() {
                break;
            }
            continue;
        };
        let kind = match entry.kind {
            Some(kind) => kind,
            None => match stack.here().stat_if_there(&entry.name)? {
                Some(stat) => FileKind::of_mode(stat.st_mode),
                None => continue,
            },
        };
        match kind {
            FileKind::Directory => match stack.descend(&entry.name) {
                // A subvolume that was just created; it is no content.
                Ok(()) if stack.here().stat_self()?.st_dev != device => {
                    stack.ascend()?;
                }
                Ok(()) => levels.push(Names::new()),
                Err(error) if is_gone(error.errno()) => {}
                Err(error) => return Err(error.into()),
            },
            FileKind::File => match writer_of(stack.here(), entry.name.as_ref())? {
                Writer::Absent => {}
                Writer::Present => {
                    let path = sys::printable(stack.relative(&entry.name).display());
                    tracing::debug!(%path, "a process has it open for writing");
                    return Ok(true);
                }
                Writer::Unknown => return Ok(false),
            },
            _ => {}
        }
    }
    Ok(false)
}

enum Writer {
    Absent,
    Present,
    Unknown,
}

fn writer_of(dir: &Dir, name: &Path) -> Result<Writer> {
    let file = match open(dir, name) {
        Ok(Some(file)) => file,
        Ok(None) => return Ok(Writer::Absent),
        // A process holds a write lease on it. The kernel now asks for its return.
        Err(error) if error.is(Errno::EAGAIN) => return Ok(Writer::Present),
        Err(error) => return Err(error.into()),
    };
    match sys::is_written(file.as_fd()) {
        Ok(false) => Ok(Writer::Absent),
        Ok(true) => Ok(Writer::Present),
        Err(Errno::EINVAL | Errno::EACCES | Errno::EOPNOTSUPP | Errno::ENOLCK) => {
            Ok(Writer::Unknown)
        }
        Err(errno) => Err(dir.error("fcntl", name, errno).into()),
    }
}

/// Opens a file that was regular when its directory was read; `None` if it no longer is.
fn open(dir: &Dir, name: &Path) -> sys::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match dir.try_open_file_beneath(name, flags | OFlags::NOATIME, 0) {
        Err(error) if error.is(Errno::EPERM) => dir.try_open_file_beneath(name, flags, 0),
        file => file,
    };
    let file = match file {
        Ok(file) => file,
        // EACCES: a device, on this `nodev` mount. ENXIO: a socket.
        Err(error)
            if is_gone(error.errno()) || error.is(Errno::EACCES) || error.is(Errno::ENXIO) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let stat = rustix::fs::fstat(&file).map_err(|errno| dir.error("fstat", name, errno))?;
    Ok((FileKind::of_mode(stat.st_mode) == FileKind::File).then_some(file))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::{Duration, Instant};

    use nix::libc;

    use super::*;

    #[test]
    fn who_writes_is_found_wherever_it_is_and_what_is_no_file_is_never_opened() {
        if !sys::is_root_or_skip() {
            return;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("open");
        let below = folder.path().join("a/b");
        fs::create_dir_all(&below).expect("mkdir");
        fs::write(below.join("f"), "x").expect("write");
        // An open of the FIFO would wait for a writer; an open of the device would call its driver.
        root.make_node("fifo", libc::S_IFIFO | 0o600, 0)
            .expect("mkfifo");
        let device = rustix::fs::makedev(1, 3);
        root.make_node("null", libc::S_IFCHR | 0o600, device)
            .expect("mknod");
        let written = || writers(&root, &|| false).expect("it can be asked");
        // A child process of another test holds copies of all our descriptors until its exec.
        let until = |is_so: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !is_so() {
                assert!(begun.elapsed() < Duration::from_secs(60), "never came");
                std::thread::yield_now();
            }
        };
        until(&|| !written());
        let writer = fs::OpenOptions::new().append(true).open(below.join("f"));
        assert!(written());
        drop(writer);
        until(&|| !written());

        // A write lease, which keeps others from opening the file, counts too, and no call waits
        // for it.
        let leased = File::open(below.join("f")).expect("open");
        until(&|| sys::lease_to_write(leased.as_fd()).is_ok());
        assert!(written());
        drop(leased);
        until(&|| !written());

        let stopped = writers(&root, &|| true).expect_err("stopped");
        assert!(matches!(stopped, Error::Stopped), "{stopped}");
    }
}
