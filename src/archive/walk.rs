//! The walk over a tree that is packed or listed: names in order, files opened safely, marks of a
//! layer recognised. The visitor decides what is written for each name.
//!
//! The tree may be hostile and may change meanwhile: no path is resolved twice, no symlink
//! followed, no mount point crossed, no device or FIFO opened, and nothing recurses.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use rustix::fs::{OFlags, Stat, StatVfsMountFlags};

use super::error::{Error, Result, shown};
use super::progress::{Limits, Progress};
use super::sorted::{Budget, Sorted};
use crate::sys::{self, Dir, Errno, FileKind, OpenFile, PathFd, Xattrs};
use crate::tree::{self, DirStack, Opacity, Stop};

/// Receives the entries of a tree during a walk. Paths are relative and have no slash at their end;
/// the root's is empty.
pub(super) trait Visitor {
    /// A directory is entered. `opaque`: it hides what the layers below have of it.
    fn directory(&mut self, path: &[u8], dir: &Dir, stat: &Stat, opaque: bool) -> Result<()>;
    /// A regular file.
    fn file(&mut self, path: &[u8], file: OpenFile, stat: &Stat) -> Result<()>;
    /// A symlink, a FIFO or a device.
    fn special(&mut self, path: &[u8], node: &PathFd, stat: &Stat, kind: FileKind) -> Result<()>;
    /// A name that the layer deletes.
    fn whiteout(&mut self, path: &[u8]) -> Result<()>;
    /// A socket, which no archive holds.
    fn socket(&mut self);
    /// All of a directory was told.
    fn leave(&mut self) -> Result<()>;
}

/// The attributes of a name that every form of archive keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// The lower 12 bits.
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Seconds and nanoseconds of the last modification.
    pub(super) mtime: (i64, u32),
}

impl Look {
    pub(super) fn of(stat: &Stat) -> Self {
        let time = tree::times_of(stat).last_modification;
        Self {
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: (time.tv_sec, u32::try_from(time.tv_nsec).unwrap_or(0)),
        }
    }
}

/// A tree as it may be walked: a mount on which a device that takes a file's place is not opened.
pub(super) fn guarded(root: &Dir) -> Result<Dir> {
    let vfs = rustix::fs::fstatvfs(root).map_err(|errno| root.error("fstatvfs", ".", errno))?;
    Ok(if vfs.f_flag.contains(StatVfsMountFlags::NODEV) {
        root.try_clone()?
    } else {
        Dir::from_fd(sys::bind(root, true)?, root.path())
    })
}

/// Tells `visitor` of everything in `root`. `layer`: overlayfs' marks are marks and no content.
/// `temporary` may hold a temporary file.
pub(super) fn walk(
    (root, temporary): (&Dir, &Dir),
    layer: bool,
    visitor: &mut impl Visitor,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<()> {
    let mut walk = Walk {
        spine: DirStack::new(root)?,
        path: Vec::new(),
        layer,
        visitor,
    };
    let mut budget = Budget::new(temporary);
    let mut levels = vec![walk.directory(true)?];
    while let Some(level) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        walk.path.truncate(level.length);
        let Some((name, kind)) = level.names.next(walk.spine.here(), &mut budget, stop)? else {
            levels.pop();
            walk.visitor.leave()?;
            if walk.spine.ascend()?.is_none() {
                break;
            }
            continue;
        };
        if !walk.path.is_empty() {
            walk.path.push(b'/');
        }
        walk.path.extend_from_slice(name.as_bytes());
        let most = Limits::default().path;
        if walk.path.len() >= most {
            return Err(Error::Unpackable {
                path: shown(&walk.path),
                why: "its path is too long",
            });
        }
        let xattr_whiteouts = level.xattr_whiteouts;
        if walk.is_whiteout(&name, kind, xattr_whiteouts)? {
            walk.visitor.whiteout(&walk.path)?;
        } else {
            levels.extend(walk.entry(&name, kind, stop)?);
        }
        progress.entries.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// A directory on the way down.
struct Level {
    names: Sorted,
    /// Of the path.
    length: usize,
    /// Whether empty files in it may be whiteouts.
    xattr_whiteouts: bool,
}

struct Walk<'a, V> {
    spine: DirStack,
    path: Vec<u8>,
    layer: bool,
    visitor: &'a mut V,
}

impl<V: Visitor> Walk<'_, V> {
    /// Reports the current directory.
    fn directory(&mut self, is_root: bool) -> Result<Level> {
        let here = self.spine.here();
        let stat = here.stat_self()?;
        let opacity = if self.layer {
            Opacity::of(here)?
        } else {
            Opacity::Merged
        };
        // Overlayfs merges the roots of all layers, whatever they say.
        let opaque = opacity == Opacity::Opaque && !is_root;
        self.visitor.directory(&self.path, here, &stat, opaque)?;
        Ok(Level {
            names: Sorted::default(),
            length: self.path.len(),
            xattr_whiteouts: opacity == Opacity::WithXattrWhiteouts,
        })
    }

    fn is_whiteout(
        &self,
        name: &OsStr,
        kind: Option<FileKind>,
        xattr_whiteouts: bool,
    ) -> Result<bool> {
        let may_be = match kind {
            _ if !self.layer => false,
            None | Some(FileKind::CharacterDevice) => true,
            Some(FileKind::File) => xattr_whiteouts,
            _ => false,
        };
        Ok(may_be && tree::is_whiteout_at(self.spine.here(), name, xattr_whiteouts)?)
    }

    /// Reports one name. Returns it if it is a directory, which is then entered.
    fn entry(
        &mut self,
        name: &OsStr,
        kind: Option<FileKind>,
        stop: Stop<'_>,
    ) -> Result<Option<Level>> {
        match kind {
            Some(FileKind::Directory) => return self.enter(name),
            Some(FileKind::File) => {
                if let Some((file, stat)) = self.open(name, stop)? {
                    self.visitor.file(&self.path, file, &stat)?;
                    return Ok(None);
                }
            }
            _ => {}
        }
        let node = match self.spine.here().node(name) {
            Ok(node) => node,
            // It is no longer there.
            Err(error) if error.is(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let stat = node.stat()?;
        match FileKind::of_mode(stat.st_mode) {
            FileKind::Directory => return self.enter(name),
            FileKind::File => {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
                let fd = match node.open(flags | OFlags::NOATIME) {
                    Err(error) if error.is(Errno::EPERM) => node.open(flags),
                    fd => fd,
                };
                let file = OpenFile::new(fd?, node.path());
                self.visitor.file(&self.path, file, &stat)?;
            }
            FileKind::Socket => self.visitor.socket(),
            kind => self.visitor.special(&self.path, &node, &stat, kind)?,
        }
        Ok(None)
    }

    fn enter(&mut self, name: &OsStr) -> Result<Option<Level>> {
        match self.spine.descend(name) {
            Ok(()) => self.directory(false).map(Some),
            // It is no longer there, or no directory.
            Err(error)
                if matches!(error.errno(), Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) =>
            {
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a regular file; `None`: it is none, or no longer there.
    fn open(&self, name: &OsStr, stop: Stop<'_>) -> Result<Option<(OpenFile, Stat)>> {
        open_file(self.spine.here(), name, stop)
    }
}

/// Opens a regular file for reading, without touching its access time; `None`: it is none, or not
/// there.
pub(super) fn open_file(
    here: &Dir,
    name: &OsStr,
    stop: Stop<'_>,
) -> Result<Option<(OpenFile, Stat)>> {
    let usual = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut flags = usual | OFlags::NOATIME;
    let fd: OwnedFd = loop {
        match here.try_open_file_beneath(name, flags, 0) {
            Ok(fd) => break fd,
            Err(error) => match error.errno() {
                Errno::EPERM if flags != usual => flags = usual,
                // A race with a rename, or a lease, whose holder is being asked for it.
                Errno::EAGAIN | Errno::EINTR if !stop() => std::thread::yield_now(),
                Errno::EAGAIN | Errno::EINTR => return Err(Error::Stopped),
                Errno::ENOENT | Errno::ELOOP | Errno::ENXIO | Errno::EACCES => return Ok(None),
                _ => return Err(error.into()),
            },
        }
    };
    let stat = rustix::fs::fstat(&fd).map_err(|errno| here.error("fstat", name, errno))?;
    let is_file = FileKind::of_mode(stat.st_mode) == FileKind::File;
    Ok(is_file.then(|| (OpenFile::new(fd, here.path().join(name)), stat)))
}

/// An attribute that is kept: its name and value, as the kernel has them.
pub(super) type Attribute = (Vec<u8>, Vec<u8>);

/// Names of the attributes that are POSIX ACLs.
pub(super) const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// How many attributes a name may have, and how many bytes of them. The readers of all forms of
/// archives refuse more.
pub(super) const MOST_ATTRIBUTES: usize = 1024;
pub(super) const MOST_ATTRIBUTE_BYTES: usize = 1 << 20;

/// The attributes of `path` that are kept, sorted by name, and how many are not.
/// [`Error::Unpackable`]: there are too many.
pub(super) fn attributes(
    path: &[u8],
    of: &impl Xattrs,
    layer: bool,
) -> Result<(Vec<Attribute>, u64)> {
    let too_many = || Error::Unpackable {
        path: shown(path),
        why: "it has more attributes than an archive or a table may hold",
    };
    let mut names = match of.xattr_names() {
        // The kernel lists at most 64 KiB of names.
        Err(error) if error.is(Errno::E2BIG) => return Err(too_many()),
        names => names?,
    };
    if names.is_empty() {
        return Ok((Vec::new(), 0));
    }
    names.sort();
    let (mut kept, mut left_out, mut sum) = (Vec::new(), 0, 0);
    for name in names {
        let bytes = name.as_bytes();
        match bytes {
            b"security.capability" => {}
            bytes if ACLS.contains(&bytes) || bytes.starts_with(b"user.") => {}
            // As xfs lists the two ACLs once more.
            b"trusted.SGI_ACL_FILE" | b"trusted.SGI_ACL_DEFAULT" => continue,
            // A layer's own marks are told as such, or mean nothing elsewhere.
            b"trusted.overlay.opaque" | b"trusted.overlay.whiteout" if layer => continue,
            _ if layer && tree::Mark::of(&name) == tree::Mark::Passing => continue,
            _ => {
                left_out += 1;
                continue;
            }
        }
        // Taken away since it was listed: then it is not there.
        if let Some(value) = of.xattr(&name)? {
            sum += bytes.len() + value.len();
            kept.push((bytes.to_vec(), value));
        }
        if kept.len() > MOST_ATTRIBUTES || sum > MOST_ATTRIBUTE_BYTES {
            return Err(too_many());
        }
    }
    Ok((kept, left_out))
}
