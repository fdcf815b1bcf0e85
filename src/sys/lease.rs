//! Detects whether a process has a file open for writing: the kernel then refuses a read lease
//! (fcntl(2), `F_SETLEASE`). The caller gives the lease back at once.
//!
//! No event reports the close reliably: inotify's `IN_CLOSE_WRITE` comes before the kernel has
//! flushed the file and dropped the writer.

#![expect(unsafe_code, reason = "no library wraps F_SETLEASE and F_SETSIG")]

use std::os::fd::{AsRawFd, BorrowedFd};

use linux_raw_sys::general::F_SETSIG;
use nix::errno::Errno;
use nix::libc::{self, c_int};

/// Whether a process has this regular file open for writing, or mapped shared and writable.
///
/// `file` is open for reading. EACCES without CAP_LEASE. EINVAL where leases do not exist (network
/// filesystems, `fs.leases-enable` = 0).
pub fn is_written(file: BorrowedFd<'_>) -> std::result::Result<bool, Errno> {
    match take(file) {
        Ok(()) => give_back(file).map(|()| false),
        Err(Errno::EAGAIN) => Ok(true),
        Err(errno) => Err(errno),
    }
}

fn take(file: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    // A process that opens the file for writing meanwhile makes the kernel send SIGIO, which would
    // kill the driver. SIGURG is ignored by default.
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
    // SAFETY: both commands take an integer and access no memory of this process.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    Errno::result(result).map(drop)
}

/// Takes a lease that blocks all other opens until the file is closed, as a hostile pod may do.
#[cfg(test)]
pub fn lease_to_write(file: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    #[expect(clippy::cast_possible_wrap, reason = "as above")]
    fcntl(file, F_SETSIG as c_int, libc::SIGURG)?;
    fcntl(file, libc::F_SETLEASE, c_int::from(libc::F_WRLCK))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::os::fd::AsFd as _;

    use rustix::fs::{Mode, OFlags};

    use super::*;

    #[test]
    fn only_who_can_write_counts() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("f");
        fs::write(&path, "x").expect("write");
        let file = File::open(&path).expect("open");
        let _reader = File::open(&path).expect("open");
        let is_written = || is_written(file.as_fd());
        assert_eq!(is_written(), Ok(false));
        let writer = OpenOptions::new().read(true).write(true).open(&path);
        let writer = writer.expect("open");
        assert_eq!(is_written(), Ok(true));
        // SAFETY: a new mapping that no code reads or writes.
        let map = |protection| unsafe {
            let fd = writer.as_raw_fd();
            libc::mmap(std::ptr::null_mut(), 1, protection, libc::MAP_SHARED, fd, 0)
        };
        let mapped = map(libc::PROT_READ | libc::PROT_WRITE);
        assert_ne!(mapped, libc::MAP_FAILED);
        drop(writer);
        assert_eq!(is_written(), Ok(true), "the mapping alone, too");
        // SAFETY: address and length are those of the mapping.
        assert_eq!(unsafe { libc::munmap(mapped, 1) }, 0);
        assert_eq!(is_written(), Ok(false));
    }

    /// The kernel reports a broken lease by a signal. That signal must not kill the process.
    #[test]
    fn who_opens_for_writing_while_it_is_asked_does_no_harm() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("f");
        fs::write(&path, "x").expect("write");
        let file = File::open(&path).expect("open");
        take(file.as_fd()).expect("no process writes");
        let flags = OFlags::WRONLY | OFlags::NONBLOCK;
        let refused = rustix::fs::open(&path, flags, Mode::empty());
        assert_eq!(refused.err(), Some(rustix::io::Errno::AGAIN));
        give_back(file.as_fd()).expect("it was ours");
        rustix::fs::open(&path, flags, Mode::empty()).expect("any process may now");
    }
}
