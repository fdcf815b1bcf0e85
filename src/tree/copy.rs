//! Copies a tree with all of its content: bytes and holes, names, modes, owners, times, attributes,
//! ACLs, capabilities, hard links, symlinks, FIFOs, sockets and devices. It does not copy ctime,
//! inode numbers and `chattr` flags (the copy must stay removable).
//!
//! Memory is bounded: names are read in pieces ([`Names`]), and hard links are tracked in the copy
//! itself ([`Links`]). Reading does not change access times.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{OFlags, Stat, Timespec, Timestamps, UTIME_OMIT};

use crate::sys::{self, Dir, Entry, Errno, FileKind, PathFd, Xattrs};
use crate::tree::error::{Error, Result};

use super::delete;
use super::dir_stack::DirStack;
use super::marks::{Mark, is_whiteout};
use super::names::Names;
use super::usage::{data, usage};

/// How the bytes of files are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By sharing extents.
    Reflink,
    /// By copying bytes; holes stay.
    Bytes,
}

/// What happens to overlayfs's marks (character device 0:0, `trusted.overlay.*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marks {
    /// The tree is an overlay's upper directory: marks stay, except those of an origin.
    Keep,
    /// The tree is a plain directory, in which any user can create marks. They would take effect if
    /// the copy became a lower layer, so they are an error that names them.
    Refuse,
}

/// Copies all of `from`, with its own attributes, into the empty directory `to`.
///
/// With [`Method::Reflink`] the first file decides. Without reflinks, bytes are copied from then
/// on. Once a reflink has worked, a later failure is an error, unless that file causes it. A
/// process may be changing `from`: a vanished entry is skipped, a repeated one is copied once, and
/// nothing outside is read. Before bytes are copied, the free space is checked: [`Error::NoRoom`].
/// On an error `to` is incomplete.
///
/// Returns the method that was used, and logs it: a copy's duration grows with the tree, or with
/// its data. If there were no bytes to copy, it is `method`.
pub fn copy(from: &Dir, to: &Dir, method: Method, marks: Marks) -> Result<Method> {
    disinherit(to)?;
    let mut job = Copier {
        from: DirStack::new(from)?,
        to: DirStack::new(to)?,
        files: Files {
            unchecked: Some((from.try_clone()?, to.try_clone()?)),
            ..Files::new(method, marks)
        },
        links: Links::new(from, to)?,
        files_copied: 0,
        directories: 0,
    };
    let result = job.run();
    let links = job.links.finish();
    result?;
    links?;
    // Last, because removing the directory of links changed the root's times.
    copy_directory_attributes(from, to, &from.stat_self()?, marks).map_err(
        |error| match error {
            Error::Refused { why, .. } => Error::Refused {
                path: ".".to_owned(),
                why,
            },
            error => error,
        },
    )?;
    let (path, method) = (to.path().display(), job.files.method);
    let (files, directories) = (job.files_copied, job.directories);
    tracing::info!(%path, ?method, files, directories, "copied");
    Ok(method)
}

/// Fails if the bytes do not fit: a copy that fails halfway takes space from others meanwhile.
fn refuse_without_room(from: &Dir, to: &Dir) -> Result<()> {
    let space = to.space()?;
    // Some filesystems report no size (tmpfs without a limit); these pass.
    let fits = |bytes| bytes <= space.bytes_free || space.bytes == 0;
    if fits(usage(from, &|| false)?.bytes) {
        return Ok(());
    }
    let needs = data(from)?;
    if fits(needs) {
        return Ok(());
    }
    Err(Error::NoRoom {
        needs,
        free: space.bytes_free,
        total: space.bytes,
    })
}

/// Removes inherited ACLs from an empty directory. A default ACL would pass to all its content.
pub(super) fn disinherit(to: &Dir) -> Result<()> {
    for name in ["system.posix_acl_default", "system.posix_acl_access"] {
        to.remove_xattr(name)?;
    }
    Ok(())
}

/// Gives `to` the owner, mode, attributes and times of `from`, and removes other attributes.
///
/// Call it after the directory's content is complete. A new entry changes the directory's times,
/// and inherits its default ACL, its group and the like, which the source may lack.
pub fn copy_directory_attributes(from: &Dir, to: &Dir, stat: &Stat, marks: Marks) -> Result<()> {
    let wanted = names_of(from)?;
    for name in to.xattr_names()? {
        if !wanted.contains(&name) && Mark::of(&name) == Mark::Content {
            to.remove_xattr(&name)?;
        }
    }
    to.set_owner(Some(stat.st_uid), Some(stat.st_gid))?;
    // An ACL changes the mode, so the mode is set after it. The times are last.
    copy_xattrs(from, to, marks)?;
    to.set_mode(stat.st_mode & 0o7777)?;
    to.set_times(&times_of(stat))?;
    Ok(())
}

/// Access and modification time, as `set_times` takes them.
#[allow(
    clippy::cast_possible_wrap,
    clippy::unnecessary_cast,
    reason = "nanoseconds are below 2^30; the fields' types differ between architectures"
)]
#[must_use]
pub fn times_of(stat: &Stat) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: stat.st_atime as i64,
            tv_nsec: stat.st_atime_nsec as i64,
        },
        last_modification: Timespec {
            tv_sec: stat.st_mtime as i64,
            tv_nsec: stat.st_mtime_nsec as i64,
        },
    }
}

/// The names of all attributes. It is final that the kernel cannot list those of a file.
fn names_of(from: &impl Xattrs) -> Result<Vec<OsString>> {
    match from.xattr_names() {
        Err(error) if error.is(Errno::E2BIG) => Err(Error::Refused {
            path: sys::printable(from.subject().display()),
            why: "it has more than 64 KiB of names of attributes".to_owned(),
        }),
        names => Ok(names?),
    }
}

/// Copies the attributes that belong into a copy.
fn copy_xattrs(from: &impl Xattrs, to: &impl Xattrs, marks: Marks) -> Result<()> {
    for name in names_of(from)? {
        match (Mark::of(&name), marks) {
            (Mark::Content, _) | (Mark::Lasting, Marks::Keep) => {}
            (Mark::Passing, Marks::Keep) => continue,
            (Mark::Lasting | Mark::Passing, Marks::Refuse) => {
                return Err(Error::Refused {
                    path: sys::printable(from.subject().display()),
                    why: format!(
                        "it has the attribute {}, which overlay takes for its own",
                        sys::printable(name.display())
                    ),
                });
            }
        }
        // It was removed after it was listed.
        if let Some(value) = from.xattr(&name)? {
            to.set_xattr(&name, &value)?;
        }
    }
    Ok(())
}

/// Copies one object that is no directory to `name` in `to`, by reflink where that works.
/// Overlayfs marks keep their meaning.
pub fn copy_node(node: &PathFd, stat: &Stat, to: &Dir, name: &OsStr) -> Result<()> {
    Files::new(Method::Reflink, Marks::Keep).copy(node, stat, to, name)
}

/// A directory of the walk: the names left to copy, and its attributes when it was entered.
struct Level {
    names: Names,
    stat: Stat,
}

struct Copier {
    from: DirStack,
    to: DirStack,
    files: Files,
    links: Links,
    /// Names of anything except directories.
    files_copied: u64,
    /// The root included.
    directories: u64,
}

impl Copier {
    fn run(&mut self) -> Result<()> {
        let mut levels = vec![self.enter()?];
        while let Some(level) = levels.last_mut() {
            let next = level.names.next(self.from.here(), self.from.depth())?;
            if let Some(entry) = next {
                match self.entry(&entry) {
                    Ok(false) => {}
                    Ok(true) => levels.push(self.enter()?),
                    // The name was removed and made again while its directory was read.
                    Err(Error::System(error))
                        if error.is(Errno::EEXIST) && entry.name != self.links.name => {}
                    Err(error) => return Err(error),
                }
                continue;
            }
            let stat = level.stat;
            levels.pop();
            self.leave(&stat)?;
        }
        Ok(())
    }

    fn enter(&mut self) -> Result<Level> {
        self.directories += 1;
        Ok(Level {
            names: Names::new(),
            stat: self.from.here().stat_self()?,
        })
    }

    /// Finishes a directory below the root; its content is complete.
    fn leave(&mut self, stat: &Stat) -> Result<()> {
        if let Some((name, from)) = self.from.ascend()?
            && let Some((_, to)) = self.to.ascend()?
        {
            copy_directory_attributes(&from, &to, stat, self.files.marks)
                .map_err(|error| self.placed(error, &name))?;
        }
        Ok(())
    }

    /// Copies one name; `true` if it is a directory that the walk has entered.
    fn entry(&mut self, entry: &Entry) -> Result<bool> {
        let node = match self.from.here().node(&entry.name) {
            Ok(node) => node,
            Err(error) if error.is(Errno::ENOENT) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let stat = node.stat()?;
        if is_whiteout(&stat) && self.files.marks == Marks::Refuse {
            let why = "it is a character device 0:0, which overlay takes for a deletion";
            return Err(self.refuse(&entry.name, why.to_owned()));
        }
        if FileKind::of_mode(stat.st_mode) == FileKind::Directory {
            return self.directory(&entry.name);
        }
        self.files_copied += 1;
        let to = self.to.here();
        if stat.st_nlink > 1 && self.links.again(&stat, to, &entry.name)? {
            return Ok(false);
        }
        if let Err(error) = self.files.copy(&node, &stat, to, &entry.name) {
            return Err(self.placed(error, &entry.name));
        }
        if stat.st_nlink > 1 {
            self.links.first(&stat, self.to.here(), &entry.name)?;
        }
        Ok(false)
    }

    fn directory(&mut self, name: &OsStr) -> Result<bool> {
        self.to.here().create_dir(name, 0o700)?;
        match self.from.descend(name) {
            Ok(()) => {}
            // Another process has replaced the directory meanwhile.
            Err(error)
                if matches!(error.errno(), Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) =>
            {
                self.to.here().remove_dir(name)?;
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        }
        self.to.descend(name)?;
        Ok(true)
    }

    fn refuse(&self, name: &OsStr, why: String) -> Error {
        Error::Refused {
            path: sys::printable(self.from.relative(name).display()),
            why,
        }
    }

    /// The same refusal, with the path from the tree's root.
    fn placed(&self, error: Error, name: &OsStr) -> Error {
        match error {
            Error::Refused { why, .. } => self.refuse(name, why),
            error => error,
        }
    }
}

/// Copies single files (not directories), and remembers whether reflinks work here.
pub(super) struct Files {
    method: Method,
    confirmed: bool,
    marks: Marks,
    /// Source and target of a whole tree, until the free space has been checked.
    unchecked: Option<(Dir, Dir)>,
}

impl Files {
    pub(super) fn new(method: Method, marks: Marks) -> Self {
        Self {
            method,
            confirmed: false,
            marks,
            unchecked: None,
        }
    }

    /// Copies a pinned file, symlink, FIFO, socket or device to `name` in `to`.
    pub(super) fn copy(
        &mut self,
        node: &PathFd,
        stat: &Stat,
        to: &Dir,
        name: &OsStr,
    ) -> Result<()> {
        match FileKind::of_mode(stat.st_mode) {
            FileKind::File => self.content(node, stat, to, name)?,
            FileKind::Symlink => {
                to.symlink(node.read_link()?, name)?;
                restore_access_time(node, stat);
            }
            _ => to.make_node(name, stat.st_mode, stat.st_rdev)?,
        }
        let copy = to.node(name)?;
        copy_attributes(node, &copy, stat, self.marks)?;
        copy.set_times(&times_of(stat))?;
        Ok(())
    }

    fn content(&mut self, node: &PathFd, stat: &Stat, to: &Dir, name: &OsStr) -> Result<()> {
        let to = to.create_file(name)?;
        if stat.st_size == 0 {
            return Ok(());
        }
        let from = open_content(node)?;
        if self.method == Method::Reflink {
            match sys::clone_file(&from, &to) {
                Ok(()) => {
                    self.confirmed = true;
                    return Ok(());
                }
                Err(Errno::EINVAL | Errno::ETXTBSY) => {}
                Err(Errno::EOPNOTSUPP | Errno::ENOTTY | Errno::EXDEV | Errno::ENOSYS)
                    if !self.confirmed =>
                {
                    self.method = Method::Bytes;
                }
                Err(errno) => return Err(node.error("FICLONE", errno).into()),
            }
        }
        if self.method == Method::Bytes
            && let Some((from, to)) = self.unchecked.take()
        {
            refuse_without_room(&from, &to)?;
        }
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        sys::copy_sparse(&from, &to, length)
            .map_err(|errno| node.error("copy_file_range", errno))?;
        Ok(())
    }
}

/// Opens a regular file for reading without changing its access time, which is content.
pub(super) fn open_content(node: &PathFd) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    match node.open(flags | OFlags::NOATIME) {
        Err(error) if error.is(Errno::EPERM) => Ok(node.open(flags)?),
        file => Ok(file?),
    }
}

/// Restores a symlink's access time, which reading may have changed: readlink has no `O_NOATIME`.
fn restore_access_time(link: &PathFd, before: &Stat) {
    let moved = |after: Stat| {
        (after.st_atime, after.st_atime_nsec) != (before.st_atime, before.st_atime_nsec)
    };
    if link.stat().is_ok_and(moved) {
        let mut times = times_of(before);
        times.last_modification.tv_nsec = UTIME_OMIT;
        // Not worth failing the copy.
        let _ = link.set_times(&times);
    }
}

/// Sets owner, attributes and mode, in this order: a change of owner clears set-id bits and
/// capabilities, and an ACL changes the mode.
fn copy_attributes(from: &PathFd, to: &PathFd, stat: &Stat, marks: Marks) -> Result<()> {
    to.set_owner(Some(stat.st_uid), Some(stat.st_gid))?;
    copy_xattrs(from, to, marks)?;
    if FileKind::of_mode(stat.st_mode) != FileKind::Symlink {
        to.set_mode(stat.st_mode)?;
    }
    Ok(())
}

/// Files with several names. A directory in the copy's root holds each one under what identifies
/// it, until all its names were met. So any number of names can be linked, however far apart. (A
/// descriptor or a table entry per file would take unbounded memory.)
pub(super) struct Links {
    root: Dir,
    name: OsString,
    dir: Option<Dir>,
}

impl Links {
    pub(super) fn new(from: &Dir, to: &Dir) -> Result<Self> {
        let mut name = OsString::from(".links");
        // The tree has no such name. If it appears meanwhile, the copy fails with EEXIST.
        while from.has(&name)? || to.has(&name)? {
            name.push("~");
        }
        Ok(Self {
            root: to.try_clone()?,
            name,
            dir: None,
        })
    }

    /// Links the name to the copy that was made under another name; `false` if there is none.
    #[allow(
        clippy::useless_conversion,
        reason = "st_nlink's type differs between architectures"
    )]
    pub(super) fn again(&mut self, stat: &Stat, to: &Dir, name: &OsStr) -> Result<bool> {
        let Some(dir) = &self.dir else {
            return Ok(false);
        };
        let kept = kept(stat);
        match dir.link(&kept, to, name) {
            Ok(()) => {}
            Err(error) if error.is(Errno::ENOENT) => return Ok(false),
            // The filesystem allows no more names (65,000 on ext4, with ours): start a second copy.
            Err(error) if error.is(Errno::EMLINK) => {
                dir.remove_file(&kept)?;
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        }
        // The link count is the source's plus ours, so all names were met.
        if u64::from(dir.stat(&kept)?.st_nlink) > u64::from(stat.st_nlink) {
            dir.remove_file(&kept)?;
        }
        Ok(true)
    }

    /// Keeps the first copy of a file with several names.
    pub(super) fn first(&mut self, stat: &Stat, to: &Dir, name: &OsStr) -> Result<()> {
        let dir = if let Some(dir) = self.dir.take() {
            dir
        } else {
            self.root.create_dir(&self.name, 0o700)?;
            self.root.open_beneath(&self.name)?
        };
        let dir = self.dir.insert(dir);
        Ok(to.link(name, dir, kept(stat))?)
    }

    /// Deletes the directory of links, with the files of which some names are outside the tree.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.dir.take().is_some() {
            delete(&self.root, Path::new(&self.name), &|| false)?;
        }
        Ok(())
    }
}

/// The name of a kept file. A btrfs subvolume has a device number of its own. A new file may get
/// the inode of one that a pod deletes meanwhile, so size and time tell them apart.
fn kept(stat: &Stat) -> String {
    let (device, inode, size) = (stat.st_dev, stat.st_ino, stat.st_size);
    let (seconds, nanoseconds) = (stat.st_mtime, stat.st_mtime_nsec);
    format!("{device}-{inode}-{size}-{seconds}-{nanoseconds}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    fn two() -> (tempfile::TempDir, Dir, Dir) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for name in ["from", "to"] {
            fs::create_dir(folder.path().join(name)).expect("mkdir");
        }
        let open = |name: &str| Dir::open(&folder.path().join(name)).expect("open");
        let (from, to) = (open("from"), open("to"));
        (folder, from, to)
    }

    #[test]
    fn names_of_one_file_stay_names_of_one_file_and_nothing_is_left_over() {
        let (folder, from, to) = two();
        let path = folder.path();
        fs::create_dir(path.join("from/sub")).expect("mkdir");
        fs::create_dir(path.join("from/.links")).expect("a name of the tree's own");
        fs::write(path.join("from/a"), b"content").expect("write");
        fs::hard_link(path.join("from/a"), path.join("from/sub/b")).expect("link");
        fs::hard_link(path.join("from/a"), path.join("outside")).expect("link");
        copy(&from, &to, Method::Reflink, Marks::Refuse).expect("copy");
        let (a, b) = (path.join("to/a"), path.join("to/sub/b"));
        let inode = |path| fs::metadata(path).expect("stat").ino();
        assert_eq!(inode(&a), inode(&b));
        assert_eq!(fs::metadata(&a).expect("stat").nlink(), 2);
        assert_eq!(to.entries().expect("entries").len(), 3);
        let mtime = |name: &str| {
            fs::metadata(path.join(name))
                .expect("stat")
                .modified()
                .expect("mtime")
        };
        assert_eq!(mtime("from"), mtime("to"));
    }

    #[test]
    fn a_new_file_with_the_inode_of_a_deleted_one_is_not_a_name_of_that() {
        let (folder, from, to) = two();
        let path = folder.path();
        fs::write(path.join("from/a"), b"content").expect("write");
        fs::hard_link(path.join("from/a"), path.join("outside")).expect("link");
        let old = from.stat("a").expect("stat");
        fs::write(path.join("to/a"), b"content").expect("write");
        let mut links = Links::new(&from, &to).expect("links");
        let entries = from.entries().expect("entries");
        let name = entries[0].name.as_os_str();
        links.first(&old, &to, name).expect("kept");
        let [mut longer, mut later] = [old; 2];
        longer.st_size += 1;
        later.st_mtime_nsec ^= 1;
        fs::remove_file(path.join("to/a")).expect("removed");
        for other in [&longer, &later] {
            assert!(!links.again(other, &to, name).expect("looked"));
        }
        assert!(links.again(&old, &to, name).expect("linked"));
        links.finish().expect("finished");
        assert_eq!(fs::read(path.join("to/a")).expect("read"), b"content");
    }

    #[test]
    fn what_would_act_as_a_whiteout_is_refused_by_its_path() {
        let (_folder, from, to) = two();
        from.create_dir("d", 0o700).expect("mkdir");
        let d = from.open_beneath("d").expect("open");
        match d.make_node("w", 0o020_000, 0) {
            Err(error) if error.is(Errno::EPERM) => return, // not root
            result => result.expect("mknod"),
        }
        let error = copy(&from, &to, Method::Bytes, Marks::Refuse).expect_err("refused");
        assert!(error.to_string().contains("d/w"), "{error}");
    }
}
