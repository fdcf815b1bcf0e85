//! `flock(2)`: one owner at a time, given up by the kernel when the owner dies, however it dies.
//! What a lock guards is known by who takes it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno as RawErrno;

use super::dir::Dir;
use super::error::Result;

/// A lock, held until it is dropped or the process ends.
///
/// The lock belongs to the open file, so a child that inherits the descriptor would keep it: it is close-on-exec.
#[derive(Debug)]
#[must_use = "the lock is given up when this is dropped"]
pub struct Lock {
    fd: OwnedFd,
}

impl Dir {
    /// Locks the file `name` (made when it is missing); `None` when somebody else has it locked.
    pub fn try_lock(&self, name: impl AsRef<Path>) -> Result<Option<Lock>> {
        let name = name.as_ref();
        let flags = OFlags::RDWR | OFlags::CREATE;
        self.flock(name, flags, FlockOperation::NonBlockingLockExclusive)
    }

    /// Keeps everybody from locking the file `name`, which must be there, but not from sharing it; `None` when somebody has
    /// it locked. Writes nothing.
    pub fn try_share_lock(&self, name: impl AsRef<Path>) -> Result<Option<Lock>> {
        let name = name.as_ref();
        self.flock(name, OFlags::RDONLY, FlockOperation::NonBlockingLockShared)
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

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_waits_for_nobody_and_gets_it_when_the_first_is_gone() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let first = dir.try_lock("lock").expect("flock");
        assert!(first.is_some());
        assert!(dir.try_lock("lock").expect("flock").is_none());
        drop(first);
        assert!(dir.try_lock("lock").expect("flock").is_some());
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
