//! Target paths: the mount point that kubelet names, and the operations that are safe on it.
//!
//! The directory above is kubelet's and trusted, symlinks included (kubelet's root often is one).
//! The last component is never followed: a symlink there would let us unmount or delete files of
//! other programs. It is made with `mkdir` and removed with `rmdir`, never more.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use super::error::{Context, Error, Result};
use crate::sys::{self, Dir, Errno, FileKind, MountPoint};

/// A target path, its parent open.
#[derive(Debug)]
pub(super) struct Target<'a> {
    path: &'a Path,
    parent: Dir,
    name: OsString,
}

/// The result of a look at a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing.
    Nothing,
    /// A directory that is no mount point.
    Directory,
    /// The root of this mount.
    Mount(MountPoint),
}

/// The directory of kubelet that a target is in, if it is one of kubelet's. Kubelet makes both when
/// it starts: `pods`, with `<pod uid>/volumes/kubernetes.io~csi/<volume>/mount` for published
/// volumes; and `plugins`, with `kubernetes.io/csi/<driver>/<digest>/globalmount` for staged ones.
fn kubelet_tree(target: &Path) -> Option<&Path> {
    let tree = target.ancestors().nth(5);
    tree.filter(|tree| tree.ends_with("pods") || tree.ends_with("plugins"))
}

impl<'a> Target<'a> {
    /// Opens the directory above; `None` when that does not exist. An error if the driver does not
    /// see kubelet's tree at all: then the volume may well be mounted, and its pod may run.
    pub(super) fn open(path: &'a Path) -> Result<Option<Self>> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::Target {
                path: path.to_owned(),
                problem: "cannot be the path of a directory".to_owned(),
            });
        };
        match Dir::open(above) {
            Ok(parent) => Ok(Some(Self {
                path,
                parent,
                name: name.to_owned(),
            })),
            Err(error)
                if [Errno::ENOENT, Errno::ENOTDIR, Errno::ENAMETOOLONG]
                    .contains(&error.errno()) =>
            {
                match kubelet_tree(path).filter(|tree| Dir::open(tree).is_err()) {
                    Some(tree) => Err(Error::Target {
                        path: path.to_owned(),
                        problem: format!(
                            "the driver sees no directory {}; mount kubelet's directory into the \
                             driver's container at the same path",
                            tree.display()
                        ),
                    }),
                    // Where there is no directory there is nothing of ours.
                    None => Ok(None),
                }
            }
            Err(error) => Err(error).context("open the directory above the target"),
        }
    }

    /// Opens the directory above, which must exist: kubelet makes it before it calls.
    pub(super) fn open_for_mount(path: &'a Path) -> Result<Self> {
        let problem = "the directory above it does not exist; make it first, as kubelet does";
        Self::open(path)?.ok_or_else(|| Error::Target {
            path: path.to_owned(),
            problem: problem.to_owned(),
        })
    }

    fn problem(&self, problem: impl Into<String>) -> Error {
        Error::Target {
            path: self.path.to_owned(),
            problem: problem.into(),
        }
    }

    /// Looks at the target. Anything but a directory is an error, and stays untouched.
    pub(super) fn look(&self) -> Result<Found> {
        let point = sys::mount_point_at(&self.parent, &self.name).context("look at the target")?;
        let Some(point) = point else {
            return Ok(Found::Nothing);
        };
        if point.kind != FileKind::Directory {
            return Err(
                self.problem("is not a directory, and was not made by this driver; remove it")
            );
        }
        Ok(if point.is_root {
            Found::Mount(point)
        } else {
            Found::Directory
        })
    }

    /// Makes the mount point, or accepts an empty directory. Returns whether it was made.
    fn make(&self) -> Result<bool> {
        match self.parent.create_dir(&self.name, 0o750) {
            Ok(()) => return Ok(true),
            Err(error) if error.is(Errno::EEXIST) => {}
            Err(error) => return Err(error).context("make the target"),
        }
        match self.look()? {
            Found::Mount(_) => {
                Err(self.problem("is a mount point of something else; unmount that first"))
            }
            Found::Nothing => Err(self.problem("vanished while it was looked at; try again")),
            Found::Directory => {
                let dir = self
                    .parent
                    .open_beneath(&self.name)
                    .context("open the target")?;
                if dir.entries().context("read the target")?.is_empty() {
                    Ok(false)
                } else {
                    Err(self.problem(
                        "is a directory that is not empty; a mount would hide its content; move \
                         that away",
                    ))
                }
            }
        }
    }

    /// The same. The error for a full disk says whether it is the pool's disk: on another disk,
    /// eviction would free nothing.
    pub(super) fn make_beside(&self, pool: &Dir) -> Result<bool> {
        match self.make() {
            Err(Error::Full(why)) if !self.parent.shares_room_with(pool).unwrap_or(true) => {
                Err(Error::TargetFull(why.what))
            }
            result => result,
        }
    }

    /// Attaches a detached mount. Nothing is visible before, all of it after.
    pub(super) fn attach(&self, mount: BorrowedFd<'_>) -> Result<()> {
        sys::move_mount_onto(mount, &self.parent, &self.name)
            .context("attach the volume at the target")
    }

    /// A descriptor of what is visible at the target.
    pub(super) fn pin(&self) -> Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.parent.as_fd(), &self.name, flags, Mode::empty())
            .map_err(|errno| self.parent.error("openat", &self.name, errno))
            .context("open the target")
    }

    /// Detaches everything that is mounted there, however many mounts are stacked. Returns a
    /// descriptor of each that can be looked at, topmost first. They keep the filesystems alive, so
    /// that the cost of the detach does not depend on the content.
    pub(super) fn detach(&self) -> Result<Vec<(MountPoint, OwnedFd)>> {
        let (mut pins, mut refused) = (Vec::new(), None);
        loop {
            let point = match self.look() {
                Ok(Found::Mount(point)) => point,
                Ok(Found::Nothing | Found::Directory) => break,
                // xfs that has shut down, or a damaged filesystem, answers no statx(2). Its mount
                // goes all the same.
                Err(Error::System { source, .. })
                    if !source.is_of_this_process()
                        && sys::detach(&self.parent, &self.name).is_ok() =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let pin = self.pin()?;
            match sys::detach(&self.parent, &self.name) {
                Ok(()) => pins.push((point, pin)),
                // Another program detached it in between. If it is still there, the kernel has
                // locked it: it is of another user namespace.
                Err(error) if error.is(Errno::EINVAL) && refused != Some(point) => {
                    refused = Some(point);
                }
                Err(error) => return Err(error).context("detach the volume from the target"),
            }
        }
        Ok(pins)
    }

    /// Removes the mount point if it is there. If it is not empty, its content is not ours: that is
    /// an error, and it stays.
    pub(super) fn remove(&self) -> Result<()> {
        match self.parent.remove_dir(&self.name) {
            Ok(()) => Ok(()),
            Err(error) if error.is(Errno::ENOENT) => Ok(()),
            Err(error) if error.is(Errno::ENOTEMPTY) || error.is(Errno::EEXIST) => Err(self.problem(
                "is not a mount point and is not empty; this driver did not create what is in it; \
                 move it away",
            )),
            Err(error) if error.is(Errno::ENOTDIR) => {
                Err(self.problem("is not a directory, and was not made by this driver; remove it"))
            }
            Err(error) => Err(error).context("remove the target"),
        }
    }

    /// A second, detached mount of what is visible at the target.
    pub(super) fn clone_mount(&self, read_only: bool) -> Result<OwnedFd> {
        let root = Dir::from_fd(self.pin()?, self.path);
        sys::bind(&root, read_only).context("mount the volume a second time")
    }
}
