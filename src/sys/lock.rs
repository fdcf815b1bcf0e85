//! `flock(2)` locks, and which processes hold one (from `/proc/locks`). The kernel releases a lock
//! when its owner dies. Callers know what a lock protects.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno as RawErrno;

use super::dir::Dir;
use super::error::{Error, Result};
use super::mountinfo::mount_of;

/// A lock, held until it is dropped or the process ends.
///
/// It belongs to the open file. The descriptor is close-on-exec, or a child would hold it too.
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct Lock {
    fd: OwnedFd,
}

impl Dir {
    /// Locks the file `name` and creates it if missing; `None` if another process holds the lock.
    pub fn try_lock(&self, name: impl AsRef<Path>) -> Result<Option<Lock>> {
        let name = name.as_ref();
        let flags = OFlags::RDWR | OFlags::CREATE;
        self.flock(name, flags, FlockOperation::NonBlockingLockExclusive)
    }

    /// Takes a shared lock on the existing file `name`, so that no process can lock it exclusively.
    /// `None` if one already has. Writes nothing.
    pub fn try_share_lock(&self, name: impl AsRef<Path>) -> Result<Option<Lock>> {
        let name = name.as_ref();
        self.flock(name, OFlags::RDONLY, FlockOperation::NonBlockingLockShared)
    }

    /// The processes that hold a lock on `name` now, exclusive or shared, from the kernel's list.
    /// It omits those outside this pid namespace, and may name one that left the lock to a child.
    pub fn lock_holders(&self, name: impl AsRef<Path>) -> Result<BTreeSet<u32>> {
        const LOCKS: &str = "/proc/locks";
        let name = name.as_ref();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(self, name, flags, Mode::empty())
            .map_err(|errno| self.error("openat", name, errno))?;
        let stat = rustix::fs::fstat(&fd).map_err(|errno| self.error("fstat", name, errno))?;
        // `/proc/locks` shows the device of the filesystem. On btrfs that is not `st_dev`.
        let Some(mount) = mount_of(fd.as_fd())? else {
            return Ok(BTreeSet::new());
        };
        let locks =
            std::fs::read_to_string(LOCKS).map_err(|error| Error::new("read", LOCKS, error))?;
        let holders = locks.lines().filter_map(holder);
        let here =
            holders.filter(|holder| holder.device == mount.device && holder.inode == stat.st_ino);
        Ok(here.map(|holder| holder.pid).collect())
    }

    fn flock(&self, name: &Path, flags: OFlags, how: FlockOperation) -> Result<Option<Lock>> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(self, name, flags, Mode::from_raw_mode(0o600))
            .map_err(|errno| self.error("openat", name, errno))?;
        match rustix::fs::flock(&fd, how) {
            Ok(()) => Ok(Some(Lock { fd })),
            Err(RawErrno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(self.error("flock", name, errno)),
        }
    }
}

/// A process that holds a lock.
#[derive(Debug, PartialEq, Eq)]
struct Holder {
    pid: u32,
    device: (u32, u32),
    inode: u64,
}

/// Parses a line of `/proc/locks` (proc(5)): `1: FLOCK  ADVISORY  WRITE 1234 fe:00:9981707 0 EOF`.
/// `None` for other kinds of lock, and for waiters (`1: -> FLOCK`).
fn holder(line: &str) -> Option<Holder> {
    let mut words = line.split_ascii_whitespace().skip(1);
    if words.next() != Some("FLOCK") {
        return None;
    }
    let mut words = words.skip(2);
    // Other kinds of lock have -1 if the kernel does not know the process.
    let pid = words.next()?.parse().ok()?;
    let mut file = words.next()?.split(':');
    let mut hex = || u32::from_str_radix(file.next()?, 16).ok();
    let device = (hex()?, hex()?);
    let inode = file.next()?.parse().ok()?;
    Some(Holder { pid, device, inode })
}

/// Frees the lock at once. Closing does not if a child process that was just forked still has a
/// copy of the descriptor: it keeps the copy until its exec (flock(2)).
impl Drop for Lock {
    fn drop(&mut self) {
        // Nothing to do about an error: the close that follows frees the lock, too.
        let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_does_not_wait_and_gets_it_when_the_first_is_gone() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let first = dir.try_lock("lock").expect("flock");
        assert!(first.is_some());
        assert!(dir.try_lock("lock").expect("flock").is_none());
        drop(first);
        assert!(dir.try_lock("lock").expect("flock").is_some());
    }

    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_the_lock() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let lock = dir.try_lock("lock").expect("flock").expect("free");
        // As a child process has it between fork and exec.
        let copy = lock.as_fd().try_clone_to_owned().expect("dup");
        drop(lock);
        assert!(dir.try_lock("lock").expect("flock").is_some());
        drop(copy);
    }

    #[test]
    fn the_kernel_says_who_has_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let us = BTreeSet::from([std::process::id()]);
        let holders = |name| dir.lock_holders(name).expect("asked");
        let alone = dir.try_lock("lock").expect("flock");
        let other = dir.try_lock("other").expect("flock");
        assert_eq!(holders("lock"), us);
        drop((alone, other));
        assert_eq!(holders("lock"), BTreeSet::new());
        let shared = dir.try_share_lock("lock").expect("flock");
        let again = dir.try_share_lock("lock").expect("flock");
        assert_eq!(holders("lock"), us);
        assert_eq!(holders("other"), BTreeSet::new());
        drop((shared, again));
    }

    #[test]
    fn only_who_holds_a_lock_of_this_kind_is_a_holder() {
        let line = "12: FLOCK  ADVISORY  WRITE 1234 fe:1a:9981707 0 EOF";
        let expected = Holder {
            pid: 1234,
            device: (0xfe, 0x1a),
            inode: 9_981_707,
        };
        assert_eq!(holder(line), Some(expected));
        for other in [
            "12: -> FLOCK  ADVISORY  WRITE 1234 fe:1a:9981707 0 EOF",
            "3: POSIX  ADVISORY  READ 1234 fe:1a:9981707 0 EOF",
            "4: OFDLCK ADVISORY  WRITE -1 fe:1a:9981707 0 EOF",
            "5: FLOCK  ADVISORY",
            "",
        ] {
            assert_eq!(holder(other), None, "{other}");
        }
    }

    #[test]
    fn those_who_share_it_are_many_and_the_one_who_has_it_is_alone() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let error = dir.try_share_lock("lock").expect_err("not there");
        assert!(error.is(crate::sys::Errno::ENOENT), "{error}");
        let alone = dir.try_lock("lock").expect("flock");
        assert!(dir.try_share_lock("lock").expect("flock").is_none());
        drop(alone);
        let first = dir.try_share_lock("lock").expect("flock");
        let second = dir.try_share_lock("lock").expect("flock");
        assert!(first.is_some() && second.is_some());
        drop(first);
        assert!(dir.try_lock("lock").expect("flock").is_none());
        drop(second);
        assert!(dir.try_lock("lock").expect("flock").is_some());
    }
}
