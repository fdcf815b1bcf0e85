//! Extended attributes (xattr(7)) of a pinned file or open directory, ACLs and capabilities too.
//!
//! Calls by descriptor refuse `O_PATH`, and calls by name race with a rename. So pinned files use
//! `/proc/thread-self/fd/N`, which is the open file itself, even for a symlink. (`getxattrat` with
//! AT_EMPTY_PATH needs Linux 6.13.) That costs ten times the call, so open files do not use it.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno as RawErrno;

use super::dir::Dir;
use super::error::{Error, Result};
use super::path_fd::{PathFd, proc_path};

/// The result of one system call.
pub(super) type RawResult<T> = std::result::Result<T, RawErrno>;

/// The kernel's limit for a value and for a list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const LONGEST: usize = 64 * 1024;
/// Fits nearly every value and list. The call is repeated if it does not.
const USUAL: usize = 512;

/// A file with extended attributes: a [`PathFd`] or a [`Dir`].
pub trait Xattrs: AsFd {
    /// The path for messages.
    fn subject(&self) -> &Path;

    /// Calls by the descriptor or, for `O_PATH`, by its path in `/proc`.
    fn ask<T>(
        &self,
        by_descriptor: impl Fn(BorrowedFd<'_>) -> RawResult<T>,
        by_path: impl Fn(&str) -> RawResult<T>,
    ) -> RawResult<T>;

    /// The names of all attributes; empty if the filesystem has no attributes.
    fn xattr_names(&self) -> Result<Vec<OsString>> {
        let listed = self.ask(
            |fd| grown(|buffer| rustix::fs::flistxattr(fd, buffer)),
            |path| grown(|buffer| rustix::fs::listxattr(path, buffer)),
        );
        let names = match listed {
            Ok(names) => names,
            Err(RawErrno::OPNOTSUPP) => Vec::new(),
            Err(errno) => return Err(Error::new("listxattr", self.subject(), errno)),
        };
        Ok(names
            .split(|&byte| byte == 0)
            .filter(|name| !name.is_empty())
            .map(|name| OsStr::from_bytes(name).to_owned())
            .collect())
    }

    /// The value of one attribute; `None` if it does not exist or the filesystem has no attributes.
    fn xattr(&self, name: impl AsRef<OsStr>) -> Result<Option<Vec<u8>>> {
        let name = name.as_ref();
        let read = self.ask(
            |fd| grown(|buffer| rustix::fs::fgetxattr(fd, name, buffer)),
            |path| grown(|buffer| rustix::fs::getxattr(path, name, buffer)),
        );
        match read {
            Ok(value) => Ok(Some(value)),
            Err(RawErrno::NODATA | RawErrno::OPNOTSUPP) => Ok(None),
            Err(errno) => Err(failed("getxattr", self.subject(), name, errno)),
        }
    }

    /// Sets an attribute and replaces an existing value.
    fn set_xattr(&self, name: impl AsRef<OsStr>, value: &[u8]) -> Result<()> {
        let (name, flags) = (name.as_ref(), XattrFlags::empty());
        let set = self.ask(
            |fd| rustix::fs::fsetxattr(fd, name, value, flags),
            |path| rustix::fs::setxattr(path, name, value, flags),
        );
        set.map_err(|errno| failed("setxattr", self.subject(), name, errno))
    }

    /// Removes an attribute; returns whether it existed.
    fn remove_xattr(&self, name: impl AsRef<OsStr>) -> Result<bool> {
        let name = name.as_ref();
        let removed = self.ask(
            |fd| rustix::fs::fremovexattr(fd, name),
            |path| rustix::fs::removexattr(path, name),
        );
        match removed {
            Ok(()) => Ok(true),
            Err(RawErrno::NODATA | RawErrno::OPNOTSUPP) => Ok(false),
            Err(errno) => Err(failed("removexattr", self.subject(), name, errno)),
        }
    }
}

impl Xattrs for Dir {
    fn subject(&self) -> &Path {
        self.path()
    }

    fn ask<T>(
        &self,
        by_descriptor: impl Fn(BorrowedFd<'_>) -> RawResult<T>,
        by_path: impl Fn(&str) -> RawResult<T>,
    ) -> RawResult<T> {
        match by_descriptor(self.as_fd()) {
            // Some directories are opened with `O_PATH`.
            Err(RawErrno::BADF) => by_path(&proc_path(self.as_fd())),
            answer => answer,
        }
    }
}

impl Xattrs for PathFd {
    fn subject(&self) -> &Path {
        self.path()
    }

    fn ask<T>(
        &self,
        _by_descriptor: impl Fn(BorrowedFd<'_>) -> RawResult<T>,
        by_path: impl Fn(&str) -> RawResult<T>,
    ) -> RawResult<T> {
        by_path(&proc_path(self.as_fd()))
    }
}

fn failed(call: &'static str, subject: &Path, name: &OsStr, errno: RawErrno) -> Error {
    Error::new(call, subject, errno).with_detail(name.to_string_lossy())
}

/// Calls with a small buffer, then with the kernel's largest size if that was too small.
fn grown(call: impl Fn(&mut [u8]) -> RawResult<usize>) -> RawResult<Vec<u8>> {
    let mut usual = [0; USUAL];
    match call(&mut usual) {
        Err(RawErrno::RANGE) => {
            let mut longest = vec![0; LONGEST];
            let length = call(&mut longest)?;
            longest.truncate(length);
            Ok(longest)
        }
        length => Ok(usual[..length?].to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};

    #[test]
    fn set_listed_read_and_removed_on_directory_file_and_symlink() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        dir.write_new("f", b"").expect("write");
        dir.symlink("f", "link").expect("symlink");
        let (file, link) = (dir.node("f").expect("f"), dir.node("link").expect("link"));
        file.set_xattr("user.a", &[7; 1000])
            .expect("longer than the usual buffer");
        file.set_xattr("user.b", b"").expect("empty");
        assert_eq!(file.xattr("user.a").expect("read"), Some(vec![7; 1000]));
        assert_eq!(file.xattr("user.b").expect("read"), Some(vec![]));
        assert_eq!(file.xattr_names().expect("list").len(), 2);
        dir.set_xattr("user.c", b"x").expect("on a directory");
        assert!(dir.remove_xattr("user.c").expect("remove"));
        assert!(!dir.remove_xattr("user.c").expect("again"));
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let pinned = rustix::fs::open(folder.path(), flags, Mode::empty()).expect("it opens");
        let pinned = Dir::from_fd(pinned, folder.path());
        pinned.set_xattr("user.c", b"y").expect("on a pinned one");
        assert_eq!(pinned.xattr("user.c").expect("read"), Some(b"y".to_vec()));
        assert_eq!(dir.xattr("user.c").expect("read"), Some(b"y".to_vec()));
        assert_eq!(pinned.xattr_names().expect("list").len(), 1);
        assert!(pinned.remove_xattr("user.c").expect("remove"));
        // A symlink has no user attributes, and a read must not reach its target's.
        assert_eq!(link.xattr("user.a").expect("read"), None);
        assert!(link.set_xattr("user.z", b"x").is_err());
        assert!(link.xattr_names().expect("list").is_empty());
    }
}
