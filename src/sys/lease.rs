//! Whether anybody has a file open for writing: asked by trying to get a read lease on it (fcntl(2), `F_SETLEASE`), which the kernel
//! refuses while somebody has. The lease is given back at once. And waiting until somebody closes it.

#![expect(unsafe_code, reason = "no library wraps F_SETLEASE and F_SETSIG")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general::F_SETSIG;
use nix::errno::Errno;
use nix::libc::{self, c_int};
use rustix::fs::inotify::{CreateFlags, WatchFlags};

use super::error::{Error, Result};
use super::node::proc_path;

/// Whether a process has this regular file open for writing, or mapped so that its stores reach the file. `file` is open for reading.
///
/// EACCES without CAP_LEASE, EINVAL where there are no leases (a network's filesystem, or `fs.leases-enable` is 0).
pub fn is_written(file: BorrowedFd<'_>) -> std::result::Result<bool, Errno> {
    match take(file) {
        Ok(()) => give_back(file).map(|()| false),
        Err(Errno::EAGAIN) => Ok(true),
        Err(errno) => Err(errno),
    }
}

fn take(file: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    // Whoever opens the file for writing while we have the lease has the kernel send us SIGIO, which would end the process. This one
    // is ignored where nothing else was said.
    #[expect(
        clippy::cast_possible_wrap,
        reason = "the kernel's headers give small numbers without a sign"
    )]
    fcntl(file, F_SETSIG as c_int, libc::SIGURG)?;
    fcntl(file, libc::F_SETLEASE, c_int::from(libc::F_RDLCK))
}

fn give_back(file: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    fcntl(file, libc::F_SETLEASE, c_int::from(libc::F_UNLCK))
}

fn fcntl(file: BorrowedFd<'_>, command: c_int, argument: c_int) -> std::result::Result<(), Errno> {
    // SAFETY: both commands take an integer, and touch no memory of ours.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    Errno::result(result).map(drop)
}

/// A descriptor that becomes readable when somebody who had `file` open for writing, or the last who had it mapped so, closes it.
///
/// EMFILE when the user has too many inotify instances.
pub fn watch_close(file: BorrowedFd<'_>) -> Result<OwnedFd> {
    let inotify = rustix::fs::inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        .map_err(|errno| Error::new("inotify_init1", "", errno))?;
    let path = proc_path(file.as_fd());
    rustix::fs::inotify::add_watch(&inotify, &path, WatchFlags::CLOSE_WRITE)
        .map_err(|errno| Error::new("inotify_add_watch", path, errno))?;
    Ok(inotify)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};

    use rustix::fs::{Mode, OFlags};

    use super::*;

    #[tokio::test]
    async fn only_who_can_write_counts_and_his_close_is_told() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("f");
        fs::write(&path, "x").expect("write");
        let file = File::open(&path).expect("open");
        let reader = File::open(&path).expect("open");
        assert_eq!(is_written(file.as_fd()), Ok(false));
        let writer = OpenOptions::new().append(true).open(&path);
        let writer = writer.expect("open");
        assert_eq!(is_written(file.as_fd()), Ok(true));
        let watch = watch_close(file.as_fd()).expect("watch");
        drop(reader);
        drop(writer);
        super::super::readable(watch).await.expect("it is told");
        assert_eq!(is_written(file.as_fd()), Ok(false));
    }

    /// A lease that is broken is told of by a signal, which must not be one that ends the process.
    #[test]
    fn who_opens_for_writing_while_it_is_asked_does_no_harm() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("f");
        fs::write(&path, "x").expect("write");
        let file = File::open(&path).expect("open");
        take(file.as_fd()).expect("nobody writes");
        let flags = OFlags::WRONLY | OFlags::NONBLOCK;
        let refused = rustix::fs::open(&path, flags, Mode::empty());
        assert_eq!(refused.err(), Some(rustix::io::Errno::AGAIN));
        give_back(file.as_fd()).expect("it was ours");
        rustix::fs::open(&path, flags, Mode::empty()).expect("and is anybody's now");
    }
}
