//! One file of any type, pinned by an `O_PATH` descriptor.
//!
//! A hostile process can make a name refer to another file between two calls; a descriptor cannot
//! change. So code pins each name of a tenant's tree once ([`Dir::node`]), checks the result, and
//! does all else through it. Pinning neither blocks on a FIFO nor calls a device's driver.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Stat, Timestamps, Uid};

use super::dir::Dir;
use super::error::{Error, Result};

/// A pinned file. Its path is only for messages and is never resolved again.
#[derive(Debug)]
pub struct PathFd {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    /// Pins the file that a name in this directory refers to now. Pins a symlink itself. EXDEV if
    /// the name is a mount point.
    pub fn node(&self, name: impl AsRef<Path>) -> Result<PathFd> {
        let name = name.as_ref();
        let fd = self.open_file_beneath(name, OFlags::PATH | OFlags::NOFOLLOW, 0)?;
        Ok(PathFd {
            fd,
            path: self.path().join(name),
        })
    }

    /// Hard-links `name` as `new_name` in `to`. Follows no symlink. EEXIST if the new name exists.
    pub fn link(
        &self,
        name: impl AsRef<Path>,
        to: &Self,
        new_name: impl AsRef<Path>,
    ) -> Result<()> {
        let (name, new_name) = (name.as_ref(), new_name.as_ref());
        rustix::fs::linkat(self, name, to, new_name, AtFlags::empty())
            .map_err(|errno| self.error("linkat", name, errno))
    }

    /// Creates a symlink to `target`.
    pub fn symlink(&self, target: impl AsRef<Path>, name: impl AsRef<Path>) -> Result<()> {
        let name = name.as_ref();
        rustix::fs::symlinkat(target.as_ref(), self, name)
            .map_err(|errno| self.error("symlinkat", name, errno))
    }

    /// Creates a FIFO, socket or device node from an `st_mode` and an `st_rdev`.
    pub fn make_node(&self, name: impl AsRef<Path>, mode: u32, device: u64) -> Result<()> {
        let name = name.as_ref();
        let kind = rustix::fs::FileType::from_raw_mode(mode);
        rustix::fs::mknodat(self, name, kind, Mode::from_raw_mode(mode), device)
            .map_err(|errno| self.error("mknodat", name, errno))
    }

    /// Creates a regular file with mode 0600, open for writing. EEXIST if the name exists.
    pub fn create_file(&self, name: impl AsRef<Path>) -> Result<OwnedFd> {
        self.create_file_with(name, 0o600)
    }

    /// The same with another mode, from which the umask clears bits.
    pub fn create_file_with(&self, name: impl AsRef<Path>, mode: u32) -> Result<OwnedFd> {
        let name = name.as_ref();
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self, name, flags, Mode::from_raw_mode(mode))
            .map_err(|errno| self.error("openat", name, errno))
    }
}

impl PathFd {
    /// `fstat` of the pinned file.
    pub fn stat(&self) -> Result<Stat> {
        rustix::fs::fstat(&self.fd).map_err(|errno| self.error("fstat", errno))
    }

    /// The path for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the pinned file. Only for regular files and directories (see [`PathFd::stat`]):
    /// opening a device calls its driver, and opening a FIFO blocks.
    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        // /proc/…/fd/N of an O_PATH descriptor is the pinned inode, even if renamed (proc(5)).
        let flags = flags | OFlags::CLOEXEC;
        rustix::fs::open(proc_path(self.fd.as_fd()), flags, Mode::empty())
            .map_err(|errno| self.error("open", errno))
    }

    /// The target of a symlink.
    pub fn read_link(&self) -> Result<OsString> {
        rustix::fs::readlinkat(&self.fd, "", Vec::new())
            .map(|target| OsString::from_vec(target.into_bytes()))
            .map_err(|errno| self.error("readlinkat", errno))
    }

    /// Sets owner and group.
    pub fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        rustix::fs::chownat(&self.fd, "", uid, gid, AtFlags::EMPTY_PATH)
            .map_err(|errno| self.error("fchownat", errno))
    }

    /// Sets permission, set-id and sticky bits. EOPNOTSUPP for a symlink, which has none.
    pub fn set_mode(&self, mode: u32) -> Result<()> {
        rustix::fs::chmod(
            proc_path(self.fd.as_fd()),
            Mode::from_raw_mode(mode & 0o7777),
        )
        .map_err(|errno| self.error("chmod", errno))
    }

    /// Sets access and modification time.
    pub fn set_times(&self, times: &Timestamps) -> Result<()> {
        // AT_EMPTY_PATH for utimensat needs Linux 5.8.
        rustix::fs::utimensat(&self.fd, "", times, AtFlags::EMPTY_PATH)
            .map_err(|errno| self.error("utimensat", errno))
    }

    /// An error of `call` on this file.
    pub fn error(&self, call: &'static str, errno: impl super::error::IntoErrno) -> Error {
        Error::new(call, &self.path, errno)
    }
}

impl AsFd for PathFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A path that resolves to the descriptor's open file. It uses `thread-self`: a thread with its own
/// descriptor table (`unshare(CLONE_FILES)`) would find other files under `/proc/self`.
pub(super) fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/thread-self/fd/{}", fd.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;

    #[test]
    fn a_pin_stays_on_its_file_when_the_name_means_another() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        dir.write_new("f", b"first").expect("write");
        let node = dir.node("f").expect("pinned");
        dir.remove_file("f").expect("remove");
        dir.symlink("/etc/passwd", "f").expect("symlink");
        let file = std::fs::File::from(node.open(OFlags::RDONLY).expect("open"));
        assert_eq!(std::io::read_to_string(file).expect("read"), "first");
        let link = dir.node("f").expect("a symlink is pinned itself");
        assert_eq!(link.read_link().expect("target"), "/etc/passwd");
        let error = link.open(OFlags::RDONLY).expect_err("never followed");
        assert!(error.is(Errno::ELOOP), "{error}");
    }
}
