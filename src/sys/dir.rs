//! An open directory, and the operations on the names in it.
//!
//! [`Dir`] opens what is below it by `openat2` with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS |
//! RESOLVE_NO_XDEV`: it follows no symlink and by default crosses no mount point. So a hostile pod
//! that renames files meanwhile cannot lead the driver out of the directory. A single name (`name`)
//! must not contain a slash.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, RawDir, RenameFlags, ResolveFlags, SeekFrom, Stat, Timespec,
    Timestamps, UTIME_NOW, Uid,
};

use super::error::{Error, Result};

/// As a timestamp: the current time.
const NOW: Timestamps = {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    Timestamps {
        last_access: now,
        last_modification: now,
    }
};

/// An open directory. Its path is only for messages and is never resolved again.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

/// The type of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum FileKind {
    Directory,
    File,
    Symlink,
    CharacterDevice,
    BlockDevice,
    Fifo,
    Socket,
}

impl FileKind {
    /// The type in a stat's `st_mode`.
    #[must_use]
    pub fn of_mode(mode: u32) -> Self {
        match rustix::fs::FileType::from_raw_mode(mode) {
            rustix::fs::FileType::Directory => Self::Directory,
            rustix::fs::FileType::Symlink => Self::Symlink,
            rustix::fs::FileType::CharacterDevice => Self::CharacterDevice,
            rustix::fs::FileType::BlockDevice => Self::BlockDevice,
            rustix::fs::FileType::Fifo => Self::Fifo,
            rustix::fs::FileType::Socket => Self::Socket,
            _ => Self::File,
        }
    }
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name, never `.` or `..`.
    pub name: OsString,
    /// The type from `getdents64`; `None` if the filesystem does not provide it.
    pub kind: Option<FileKind>,
}

/// The names of a directory on the way through it.
#[derive(Debug)]
pub struct Listing<'a> {
    dir: &'a Dir,
    reader: OwnedFd,
    next: Option<u64>,
}

impl Listing<'_> {
    /// About `most` names, as from [`Dir::entries_from`]; `None`: there are no more.
    pub fn next(&mut self, most: usize) -> Result<Option<Vec<Entry>>> {
        let Some(from) = self.next else {
            return Ok(None);
        };
        let (entries, next) = self.dir.read_from(&self.reader, from, most)?;
        self.next = next;
        Ok(Some(entries))
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW);
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

impl Dir {
    /// Opens a directory by a trusted path (configuration, kubelet). Follows symlinks.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| Error::new("open", path, errno))?;
        Ok(Self {
            fd,
            path: path.to_owned(),
        })
    }

    /// A directory from an open descriptor; `path` is for messages.
    #[must_use]
    pub fn from_fd(fd: OwnedFd, path: impl Into<PathBuf>) -> Self {
        Self {
            fd,
            path: path.into(),
        }
    }

    /// Opens a directory beneath this one. Follows no symlink (ELOOP), crosses no mount (EXDEV).
    pub fn open_beneath(&self, relative: impl AsRef<Path>) -> Result<Self> {
        let relative = relative.as_ref();
        let fd = self.open_file_beneath(relative, DIRECTORY, 0)?;
        Ok(Self {
            fd,
            path: self.path.join(relative),
        })
    }

    /// Like [`Dir::open_beneath`], but returns `None` if the name does not exist.
    pub fn open_if_there(&self, relative: impl AsRef<Path>) -> Result<Option<Self>> {
        match self.open_beneath(relative) {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.is(Errno::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// `openat2` beneath this directory with the caller's flags (`O_CLOEXEC` is added).
    pub fn open_file_beneath(
        &self,
        relative: impl AsRef<Path>,
        flags: OFlags,
        mode: u32,
    ) -> Result<OwnedFd> {
        // EAGAIN: a rename or mount raced with the lookup. The kernel asks the caller to retry.
        loop {
            match self.try_open_file_beneath(relative.as_ref(), flags, mode) {
                Err(error) if error.is(Errno::EAGAIN) || error.is(Errno::EINTR) => {}
                result => return result,
            }
        }
    }

    /// Like [`Dir::open_file_beneath`], without a retry. With `O_NONBLOCK`, EAGAIN may also mean
    /// that a lease forbids the open.
    pub fn try_open_file_beneath(
        &self,
        relative: impl AsRef<Path>,
        flags: OFlags,
        mode: u32,
    ) -> Result<OwnedFd> {
        let relative = relative.as_ref();
        let mode = Mode::from_raw_mode(mode);
        rustix::fs::openat2(&self.fd, relative, flags | OFlags::CLOEXEC, mode, BENEATH)
            .map_err(|errno| self.error("openat2", relative, errno))
    }

    /// The path for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A second descriptor of this directory.
    pub fn try_clone(&self) -> Result<Self> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0)
            .map_err(|errno| Error::new("fcntl", &self.path, errno))?;
        Ok(Self {
            fd,
            path: self.path.clone(),
        })
    }

    /// Creates a directory with exactly this mode, whatever the umask is.
    pub fn create_dir(&self, name: impl AsRef<Path>, mode: u32) -> Result<()> {
        let name = name.as_ref();
        rustix::fs::mkdirat(&self.fd, name, Mode::from_raw_mode(mode))
            .map_err(|errno| self.error("mkdirat", name, errno))
    }

    /// Creates a directory and opens it.
    pub fn make_dir(&self, name: impl AsRef<Path>, mode: u32) -> Result<Self> {
        self.create_dir(&name, mode)?;
        self.open_beneath(name)
    }

    /// Creates a directory unless it exists; returns whether it created it.
    pub fn ensure_dir(&self, name: impl AsRef<Path>, mode: u32) -> Result<bool> {
        match self.create_dir(name, mode) {
            Ok(()) => Ok(true),
            Err(error) if error.is(Errno::EEXIST) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// `renameat2(RENAME_NOREPLACE)`: never replaces a file.
    pub fn rename(
        &self,
        name: impl AsRef<Path>,
        to: &Self,
        new_name: impl AsRef<Path>,
    ) -> Result<()> {
        let (name, new_name) = (name.as_ref(), new_name.as_ref());
        rustix::fs::renameat_with(&self.fd, name, &to.fd, new_name, RenameFlags::NOREPLACE)
            .map_err(|errno| self.error("renameat2", name, errno))
    }

    /// `renameat`: replaces an existing file.
    pub fn rename_over(
        &self,
        name: impl AsRef<Path>,
        to: &Self,
        new_name: impl AsRef<Path>,
    ) -> Result<()> {
        let (name, new_name) = (name.as_ref(), new_name.as_ref());
        rustix::fs::renameat(&self.fd, name, &to.fd, new_name)
            .map_err(|errno| self.error("renameat", name, errno))
    }

    /// Removes an empty directory.
    pub fn remove_dir(&self, name: impl AsRef<Path>) -> Result<()> {
        let name = name.as_ref();
        rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR)
            .map_err(|errno| self.error("rmdir", name, errno))
    }

    /// Removes a file that is not a directory.
    pub fn remove_file(&self, name: impl AsRef<Path>) -> Result<()> {
        let name = name.as_ref();
        rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())
            .map_err(|errno| self.error("unlinkat", name, errno))
    }

    /// Writes a new file without fsync, completely or not at all. EEXIST if the name exists.
    pub fn write_new(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
        let name = name.as_ref();
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::from_raw_mode(0o600))
            .map_err(|errno| self.error("openat", name, errno))?;
        std::fs::File::from(fd).write_all(bytes).map_err(|error| {
            // Return the first error. A torn file would pass for a complete one and block a later
            // write.
            let _ = self.remove_file(name);
            self.error("write", name, error)
        })
    }

    /// Replaces a file by writing a temporary file and renaming it, without fsync.
    pub fn replace(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
        let name = name.as_ref();
        let temporary = self.free_temporary(name)?;
        self.write_new(&temporary, bytes)?;
        self.rename_over(&temporary, self, name).inspect_err(|_| {
            // Return the first error.
            let _ = self.remove_file(&temporary);
        })
    }

    /// The same, so that a power cut leaves the earlier file or this one.
    pub fn replace_durably(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
        let name = name.as_ref();
        let temporary = self.free_temporary(name)?;
        self.write_new(&temporary, bytes)?;
        let opened = self.open_file_beneath(&temporary, OFlags::RDONLY, 0);
        let synced = opened.and_then(|file| {
            rustix::fs::fsync(&file).map_err(|errno| self.error("fsync", &temporary, errno))
        });
        let renamed = synced.and_then(|()| self.rename_over(&temporary, self, name));
        renamed.inspect_err(|_| {
            // Return the first error.
            let _ = self.remove_file(&temporary);
        })?;
        self.sync()
    }

    /// The temporary name of `name` while it is written; removes a killed process's leftover.
    pub fn free_temporary(&self, name: &Path) -> Result<OsString> {
        let mut temporary = OsString::from(".");
        temporary.push(name.as_os_str());
        temporary.push(".new");
        match self.remove_file(&temporary) {
            Err(error) if !error.is(Errno::ENOENT) => Err(error),
            _ => Ok(temporary),
        }
    }

    /// Reads a whole file of at most `limit` bytes; EFBIG if it is longer.
    pub fn read(&self, name: impl AsRef<Path>, limit: usize) -> Result<Vec<u8>> {
        let name = name.as_ref();
        let fd = rustix::fs::openat(
            &self.fd,
            name,
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| self.error("openat", name, errno))?;
        let mut bytes = Vec::new();
        std::fs::File::from(fd)
            .take(limit as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| self.error("read", name, error))?;
        if bytes.len() > limit {
            return Err(self.error("read", name, Errno::EFBIG));
        }
        Ok(bytes)
    }

    /// All names in it, in the filesystem's order.
    ///
    /// Only for directories that the driver fills. Others may have more names than fit in memory:
    /// use [`Dir::entries_from`].
    pub fn entries(&self) -> Result<Vec<Entry>> {
        self.entries_from(0, usize::MAX).map(|(entries, _)| entries)
    }

    /// A descriptor to list the directory, with its own position. Reading does not change the
    /// access time (`O_NOATIME`), except where the caller is neither root nor the owner.
    pub fn reader(&self) -> Result<OwnedFd> {
        let open = |flags| rustix::fs::openat(&self.fd, ".", flags, Mode::empty());
        match open(DIRECTORY | OFlags::NOATIME) {
            Err(rustix::io::Errno::PERM) => open(DIRECTORY),
            result => result,
        }
        .map_err(|errno| Error::new("openat", &self.path, errno))
    }

    /// About `most` names, starting where an earlier call ended (0: the first). Also returns the
    /// position of the next name, or `None` at the end.
    ///
    /// The position is the kernel's (`d_off`). A name that is created or removed meanwhile may
    /// appear twice or not at all. All others appear once.
    pub fn entries_from(&self, from: u64, most: usize) -> Result<(Vec<Entry>, Option<u64>)> {
        self.read_from(&self.reader()?, from, most)
    }

    /// The names, in pieces, with one descriptor for all of them. overlayfs merges the names of a
    /// directory again for each new descriptor.
    pub fn listing(&self) -> Result<Listing<'_>> {
        Ok(Listing {
            dir: self,
            reader: self.reader()?,
            next: Some(0),
        })
    }

    fn read_from(&self, fd: &OwnedFd, from: u64, most: usize) -> Result<(Vec<Entry>, Option<u64>)> {
        if from != 0 {
            rustix::fs::seek(fd, SeekFrom::Start(from))
                .map_err(|errno| Error::new("lseek", &self.path, errno))?;
        }
        let mut buffer = vec![MaybeUninit::uninit(); 32 * 1024];
        let mut reader = RawDir::new(fd, &mut buffer);
        let (mut entries, mut here) = (Vec::new(), from);
        while let Some(entry) = reader.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // The directory was removed meanwhile, so it is empty.
                Err(rustix::io::Errno::NOENT) => break,
                Err(errno) => return Err(Error::new("getdents64", &self.path, errno)),
            };
            let (at, next) = (here, entry.next_entry_cookie());
            here = next;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                rustix::fs::FileType::Unknown => None,
                kind => Some(FileKind::of_mode(kind.as_raw_mode())),
            };
            entries.push(Entry {
                name: name.to_owned(),
                kind,
            });
            // On ext4, names with equal hashes share a position, so a call cannot end between them.
            if entries.len() >= most && next != at {
                return Ok((entries, Some(next)));
            }
        }
        Ok((entries, None))
    }

    /// `lstat` of a name in it.
    pub fn stat(&self, name: impl AsRef<Path>) -> Result<Stat> {
        let name = name.as_ref();
        rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| self.error("newfstatat", name, errno))
    }

    /// `lstat` of a name in it; `None` if it does not exist.
    pub fn stat_if_there(&self, name: impl AsRef<Path>) -> Result<Option<Stat>> {
        match self.stat(name) {
            Ok(stat) => Ok(Some(stat)),
            Err(error) if error.is(Errno::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether it contains a regular file of that name.
    pub fn has_file(&self, name: impl AsRef<Path>) -> Result<bool> {
        let stat = self.stat_if_there(name)?;
        Ok(stat.is_some_and(|stat| FileKind::of_mode(stat.st_mode) == FileKind::File))
    }

    /// Whether the name exists in it.
    pub fn has(&self, name: impl AsRef<Path>) -> Result<bool> {
        Ok(self.stat_if_there(name)?.is_some())
    }

    /// `fstat` of the directory itself.
    pub fn stat_self(&self) -> Result<Stat> {
        rustix::fs::fstat(&self.fd).map_err(|errno| Error::new("fstat", &self.path, errno))
    }

    /// Sets the directory's own mode (permission, set-id and sticky bits).
    pub fn set_mode(&self, mode: u32) -> Result<()> {
        rustix::fs::fchmod(&self.fd, Mode::from_raw_mode(mode))
            .map_err(|errno| Error::new("fchmod", &self.path, errno))
    }

    /// Sets the directory's own owner; `None` leaves that id unchanged.
    pub fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        rustix::fs::fchown(&self.fd, uid.map(Uid::from_raw), gid.map(Gid::from_raw))
            .map_err(|errno| Error::new("fchown", &self.path, errno))
    }

    /// Sets the directory's own access and modification times.
    pub fn set_times(&self, times: &Timestamps) -> Result<()> {
        rustix::fs::futimens(&self.fd, times)
            .map_err(|errno| Error::new("utimensat", &self.path, errno))
    }

    /// Sets the directory's own times to now. It tests whether writes work and needs no space:
    /// statfs(2) does not show that ext4 (EROFS, Linux 6.14) or xfs (EIO) stopped after a disk
    /// error.
    pub fn touch(&self) -> Result<()> {
        self.set_times(&NOW)
    }

    /// `syncfs`: writes back all dirty data of the filesystem that contains this directory.
    ///
    /// The kernel reports a write-back error once, to descriptors that were open when it happened.
    pub fn sync_filesystem(&self) -> Result<()> {
        rustix::fs::syncfs(&self.fd).map_err(|errno| Error::new("syncfs", &self.path, errno))
    }

    /// Makes the directory's entries durable (fsync).
    pub fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.fd).map_err(|errno| Error::new("fsync", &self.path, errno))
    }

    /// An error of `call` on a name in this directory.
    pub fn error(
        &self,
        call: &'static str,
        name: impl AsRef<Path>,
        errno: impl super::error::IntoErrno,
    ) -> Error {
        Error::new(call, self.path.join(name), errno)
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> (tempfile::TempDir, Dir) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        (folder, dir)
    }

    #[test]
    fn nothing_beneath_follows_a_symlink() {
        let (folder, dir) = scratch();
        std::os::unix::fs::symlink("/", folder.path().join("out")).expect("symlink");
        let error = dir.open_beneath("out/etc").expect_err("must not follow");
        assert!(error.is(Errno::ELOOP), "{error}");
        let error = dir.open_beneath("../").expect_err("must not leave");
        assert!(error.is(Errno::EXDEV), "{error}");
    }

    #[test]
    fn rename_never_replaces_and_names_the_source() {
        let (_folder, dir) = scratch();
        dir.create_dir("a", 0o700).expect("a");
        dir.create_dir("b", 0o700).expect("b");
        let error = dir.rename("a", &dir, "b").expect_err("b is there");
        assert!(
            error.is(Errno::EEXIST) && error.to_string().contains("/a:"),
            "{error}"
        );
    }

    #[test]
    fn a_file_is_written_replaced_and_read_within_its_limit() {
        let (_folder, dir) = scratch();
        dir.write_new("f", b"one").expect("write");
        assert!(
            dir.write_new("f", b"two")
                .expect_err("exists")
                .is(Errno::EEXIST)
        );
        dir.replace("f", b"three").expect("replace");
        assert_eq!(dir.read("f", 5).expect("read"), b"three");
        assert!(dir.read("f", 4).expect_err("too long").is(Errno::EFBIG));
        assert_eq!(dir.entries().expect("entries").len(), 1);
        dir.create_dir("d", 0o700).expect("mkdir");
        dir.replace("d", b"").expect_err("a directory is there");
        assert_eq!(dir.entries().expect("entries").len(), 2);
    }

    #[test]
    fn in_pieces_every_name_comes_once() {
        let (_folder, dir) = scratch();
        for number in 0..1000 {
            dir.write_new(format!("a rather long name {number}"), b"")
                .expect("write");
        }
        for most in [1, 7, 999, 1000, 1001] {
            let (mut names, mut next) = (Vec::new(), Some(0));
            while let Some(from) = next {
                let (piece, after) = dir.entries_from(from, most).expect("entries");
                assert!(piece.len() <= most + 10, "{}", piece.len());
                names.extend(piece.into_iter().map(|entry| entry.name));
                next = after;
            }
            assert_eq!(names.len(), 1000);
            names.sort();
            names.dedup();
            assert_eq!(names.len(), 1000);
        }
    }
}
