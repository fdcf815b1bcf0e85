//! Makes a tree from an archive, beneath a descriptor.
//!
//! The parent of what is made is open; a change of parent is one `openat2` that follows no symlink
//! and leaves neither the tree nor its mount. An entry replaces what exists under its name, and
//! never follows it.
//!
//! What is made in a directory changes its times, and takes its default ACL over. So both are read,
//! and the ACL taken away, when a directory becomes the parent, and put back when it no longer is:
//! nothing has to be remembered of the others, however many there are and in whatever order they
//! come.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use rustix::fs::{Timestamps, UTIME_OMIT};

use super::cores::Cores;
use super::decode::decode;
use super::digest::{Digests, Hashing};
use super::dress::{BLOCK, CHARACTER, FIFO, dress, dress_node, times};
use super::error::{Error, Result, refused, shown};
use super::marks::{LayerMarks, Mark};
use super::pipe::pipe;
use super::progress::{Limits, Progress};
use super::read::{Entry, Kind, Reader, limit};
use crate::sys::{Dir, Errno, FileKind, OpenFile, Xattrs};
use crate::tree::{self, Stop};

mod finish;
mod layer;

use self::finish::{Close, Finisher};
use self::layer::Layer;

/// How long a path the kernel takes at once, with room to spare.
const PATH_MAX: usize = 4000;
const DEFAULT_ACL: &str = "system.posix_acl_default";
/// From this length on, content is written in parts that begin at multiples of their size. The
/// buffers that are filled already hold most of what is shorter.
const ALIGNED: u64 = 1 << 20;
/// The attributes of a directory without an entry of its own.
const UNNAMED_MODE: u32 = 0o755;

/// How an archive is unpacked.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unpack {
    /// How large it may be.
    pub limits: Limits,
    /// Whether device nodes are made.
    pub devices: bool,
    /// Which digests are computed.
    pub hashing: Hashing,
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unpacked {
    /// Of the archive.
    pub digests: Digests,
    /// What was made of it.
    pub made: Made,
}

/// Counts of what an archive had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Made {
    /// Names that are no directories.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Bytes of files' content.
    pub bytes: u64,
    /// Device nodes that were not made.
    pub devices_left_out: u64,
    /// Attributes that were not taken.
    pub attributes_left_out: u64,
    /// Names that a layer deletes.
    pub whiteouts: u64,
}

/// Makes a tree from an archive in `into`, a directory that is empty or gets more entries. After an
/// error, a part of the tree exists.
///
/// `input` is read to its end by another thread, and from there `progress` is set. That thread ends
/// when `input` does: a caller whose `stop` returns true must also end `input`.
pub fn unpack(
    input: impl Read + Send,
    into: &Dir,
    how: Unpack,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Unpacked> {
    unpack_as(input, into, None, how, progress, stop)
}

/// Unpacks one layer into the empty directory `into`, in overlayfs' form: deletions are character
/// devices 0:0, opaque directories have the attribute `trusted.overlay.opaque`.
///
/// `below` are the layers below it, newest first. They are only read: a hard link to a file of
/// theirs, and a directory that the archive implies, are copied up as overlayfs does it.
/// On an error a part of the layer is there.
pub fn unpack_layer(
    input: impl Read + Send,
    into: &Dir,
    below: &[Dir],
    marks: LayerMarks,
    how: Unpack,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Unpacked> {
    let layer = Layer { marks, below };
    layer.begin(into)?;
    unpack_as(input, into, Some(layer), how, progress, stop)
}

fn unpack_as(
    input: impl Read + Send,
    into: &Dir,
    layer: Option<Layer<'_>>,
    how: Unpack,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Unpacked> {
    let (feeder, drain) = pipe();
    let (jobs, ratio) = (drain.jobs(), how.limits.ratio);
    let (made, digests) = std::thread::scope(|scope| {
        let decoding = scope.spawn(|| {
            let digests = decode(input, feeder, ratio, how.hashing, progress);
            jobs.help();
            digests
        });
        // Two threads keep two cores busy.
        if Cores::all() > 2 {
            scope.spawn(|| jobs.help());
        }
        let unpacker = Unpacker {
            reader: Reader::new(drain, how.limits),
            root: into,
            parent: None,
            finisher: Finisher::new(jobs.clone()),
            how,
            layer,
            made: Made::default(),
        };
        let made = unpacker.run(progress, stop);
        progress.failed.store(made.is_err(), Ordering::Relaxed);
        let digests = decoding.join().unwrap_or_else(|panic| {
            std::panic::resume_unwind(panic);
        });
        (made, digests)
    });
    let made = match (made, jobs.failure()) {
        // What could not be finished is the reason.
        (Ok(_) | Err(Error::Cut), Some(error)) => Err(error),
        (made, _) => made,
    };
    match (made, digests) {
        (Ok(made), digests) => Ok(Unpacked {
            digests: digests?,
            made,
        }),
        // The decoder's error is the reason.
        (Err(Error::Cut), Err(error)) | (Err(error), _) => Err(error),
    }
}

/// The directory in which things are made now.
struct Parent {
    path: Vec<u8>,
    dir: Dir,
    times: Timestamps,
    default_acl: Option<Vec<u8>>,
}

struct Unpacker<'a> {
    reader: Reader,
    root: &'a Dir,
    parent: Option<Parent>,
    finisher: Finisher,
    how: Unpack,
    /// `None`: a whole tree is made.
    layer: Option<Layer<'a>>,
    made: Made,
}

impl Unpacker<'_> {
    fn run(mut self, progress: &Progress, stop: Stop<'_>) -> Result<Made> {
        while let Some(entry) = self.reader.next()? {
            if stop() {
                return Err(Error::Stopped);
            }
            self.entry(&entry, stop)?;
            progress.entries.fetch_add(1, Ordering::Relaxed);
        }
        self.leave()?;
        self.finisher.end()?;
        Ok(self.made)
    }

    fn entry(&mut self, entry: &Entry, stop: Stop<'_>) -> Result<()> {
        self.made.attributes_left_out += entry.left_out;
        if self.mark(entry)? {
            return Ok(());
        }
        if entry.path.is_empty() {
            if entry.kind != Kind::Directory {
                return Err(refused(b".", "the root is a directory"));
            }
            self.leave()?;
            self.made.directories += 1;
            return dress(self.root, &entry.look, &entry.xattrs);
        }
        let (parent, name) = split(&entry.path);
        if matches!(entry.kind, Kind::Character(..) | Kind::Block(..)) && !self.how.devices {
            self.made.devices_left_out += 1;
            return Ok(());
        }
        self.enter(parent, entry)?;
        match &entry.kind {
            Kind::Directory => {
                self.made.directories += 1;
                self.directory(name, entry)
            }
            kind => {
                self.made.files += 1;
                match kind {
                    Kind::File => self.file(name, entry, stop),
                    Kind::HardLink(target) => self.hard_link(name, target, entry),
                    Kind::Symlink(target) => self.node(name, entry, |dir| {
                        dir.symlink(OsStr::from_bytes(target), name)
                    }),
                    _ => self.special(name, entry),
                }
            }
        }
    }

    fn here(&self) -> &Dir {
        let parent = self.parent.as_ref();
        &parent.expect("an entry's parent is entered before it").dir
    }

    /// Makes `path` the parent, with all directories on the way to it.
    fn enter(&mut self, path: &[u8], entry: &Entry) -> Result<()> {
        if self.parent.as_ref().is_some_and(|there| there.path == path) {
            return Ok(());
        }
        match self.open(path) {
            Ok(dir) => self.become_parent(path, dir),
            Err(Error::System(error)) if error.is(Errno::ENOENT) => self.make_way(path, entry),
            Err(error) => Err(blocked(error, entry)),
        }
    }

    /// Makes the directories that have had no entry yet, from the first one on.
    fn make_way(&mut self, path: &[u8], entry: &Entry) -> Result<()> {
        self.leave()?;
        let mut dir = self.root.try_clone()?;
        let mut start = 0;
        for name in path.split(|&byte| byte == b'/') {
            let (above, end) = (&path[..start], start + name.len());
            let name = OsStr::from_bytes(name);
            let next = match dir.open_beneath(name) {
                Err(error) if error.is(Errno::ENOENT) => {
                    self.become_parent(above.strip_suffix(b"/").unwrap_or(above), dir)?;
                    let below = self.below(&path[..end])?;
                    self.here().create_dir(name, UNNAMED_MODE)?;
                    let made = self.here().open_beneath(name)?;
                    if !Self::look_as_below(below.as_ref(), &made)? {
                        made.set_owner(Some(0), Some(0))?;
                        made.set_mode(UNNAMED_MODE)?;
                        made.set_times(&times((0, 0)))?;
                    }
                    made
                }
                next => next.map_err(|error| blocked(error.into(), entry))?,
            };
            (dir, start) = (next, end + 1);
        }
        self.become_parent(path, dir)
    }

    /// Opens a directory of the tree.
    fn open(&self, path: &[u8]) -> Result<Dir> {
        let there = self.parent.as_ref();
        let there = there.map(|there| (&*there.path, &there.dir));
        open_below(self.root, there, path)
    }

    fn become_parent(&mut self, path: &[u8], dir: Dir) -> Result<()> {
        self.leave()?;
        let stat = dir.stat_self()?;
        let mut times = crate::tree::times_of(&stat);
        times.last_access.tv_nsec = UTIME_OMIT;
        let default_acl = dir.xattr(DEFAULT_ACL)?;
        if default_acl.is_some() {
            dir.remove_xattr(DEFAULT_ACL)?;
        }
        self.parent = Some(Parent {
            path: path.to_vec(),
            dir,
            times,
            default_acl,
        });
        Ok(())
    }

    /// Gives the parent back what it looked like.
    fn leave(&mut self) -> Result<()> {
        if let Some(parent) = self.parent.take() {
            if let Some(acl) = &parent.default_acl {
                parent.dir.set_xattr(DEFAULT_ACL, acl)?;
            }
            parent.dir.set_times(&parent.times)?;
        }
        Ok(())
    }

    fn directory(&mut self, name: &OsStr, entry: &Entry) -> Result<()> {
        let mut opaque = entry.mark == Some(Mark::Opaque);
        loop {
            match self.here().create_dir(name, 0o700) {
                Ok(()) => break,
                Err(error) if error.is(Errno::EEXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let there = self.here().stat_if_there(name)?;
            match there.map(|stat| FileKind::of_mode(stat.st_mode)) {
                Some(FileKind::Directory) => break,
                Some(_) => {
                    // In a layer that hid what is below, and so does the directory.
                    opaque = self.layer.is_some();
                    remove(self.here(), name)?;
                }
                None => {}
            }
        }
        let dir = self.here().open_beneath(name)?;
        if opaque {
            dir.set_xattr(tree::OPAQUE, b"y")?;
        }
        dress(&dir, &entry.look, &entry.xattrs)
    }

    fn file(&mut self, name: &OsStr, entry: &Entry, stop: Stop<'_>) -> Result<()> {
        let file = self.make(name, entry, |dir| {
            dir.create_file_with(name, entry.look.mode & 0o777)
        })?;
        let length = entry.runs.iter().map(|run| run.length).sum::<u64>();
        self.made.bytes += length;
        if self.made.bytes > self.how.limits.bytes {
            let most = self.how.limits.bytes;
            return Err(limit("the content of its files", most));
        }
        let path = self.here().path().join(name);
        self.finisher.open(OpenFile::new(file, path), &entry.runs)?;
        let mut end = 0;
        for run in &entry.runs {
            let mut at = run.offset;
            end = run.offset + run.length;
            if run.length >= ALIGNED {
                self.reader.align(at);
            }
            while at < end {
                if stop() {
                    return Err(Error::Stopped);
                }
                let Some(bytes) = self.reader.content(end - at)? else {
                    return Err(refused(&entry.path, "its content is missing"));
                };
                let from = at;
                at += bytes.len() as u64;
                self.finisher.write(bytes, from)?;
            }
        }
        self.finisher.close(Close {
            look: entry.look,
            attributes: entry.xattrs.clone(),
            size: (end < entry.size).then_some(entry.size),
        })
    }

    fn hard_link(&mut self, name: &OsStr, target: &[u8], entry: &Entry) -> Result<()> {
        let why = || {
            let target = shown(target);
            refused(
                &entry.path,
                format!("it is a hard link to {target}, which is not a file of the archive"),
            )
        };
        if target == entry.path {
            return Err(refused(&entry.path, "it is a hard link to itself"));
        }
        if self.layer.is_some() && !self.bring_up(target, entry)? {
            return Err(why());
        }
        let (parent, target) = split(target);
        let dir = self.open(parent).map_err(|_| why())?;
        loop {
            match dir.link(target, self.here(), name) {
                Ok(()) => return Ok(()),
                Err(error) if error.is(Errno::EEXIST) => {}
                // Of a directory, or of nothing.
                Err(error) if error.is(Errno::EPERM) || error.is(Errno::ENOENT) => {
                    return Err(why());
                }
                Err(error) => return Err(error.into()),
            }
            let (Some(to), Some(there)) =
                (dir.stat_if_there(target)?, self.here().stat_if_there(name)?)
            else {
                return Err(why());
            };
            if (to.st_dev, to.st_ino) == (there.st_dev, there.st_ino) {
                return Ok(());
            }
            self.vacate(name, entry)?;
        }
    }

    fn special(&mut self, name: &OsStr, entry: &Entry) -> Result<()> {
        let (kind, device) = match entry.kind {
            Kind::Character(0, 0) => {
                let why = "it is a character device 0:0, which overlay takes for a deletion";
                return Err(refused(&entry.path, why));
            }
            Kind::Character(major, minor) => (CHARACTER, rustix::fs::makedev(major, minor)),
            Kind::Block(major, minor) => (BLOCK, rustix::fs::makedev(major, minor)),
            _ => (FIFO, 0),
        };
        self.node(name, entry, |dir| dir.make_node(name, kind | 0o600, device))
    }

    /// Makes something that is not opened, and gives it its attributes by a pin.
    fn node(
        &mut self,
        name: &OsStr,
        entry: &Entry,
        make: impl Fn(&Dir) -> crate::sys::Result<()>,
    ) -> Result<()> {
        self.make(name, entry, make)?;
        dress_node(&self.here().node(name)?, &entry.look, &entry.xattrs)
    }

    /// Makes something under a name, which is free afterwards if it was not.
    fn make<T>(
        &self,
        name: &OsStr,
        entry: &Entry,
        make: impl Fn(&Dir) -> crate::sys::Result<T>,
    ) -> Result<T> {
        loop {
            match make(self.here()) {
                Err(error) if error.is(Errno::EEXIST) => self.vacate(name, entry)?,
                result => return Ok(result?),
            }
        }
    }

    /// Takes away what is under a name, unless it is a directory.
    fn vacate(&self, name: &OsStr, entry: &Entry) -> Result<()> {
        match self.here().stat_if_there(name)? {
            Some(stat) if FileKind::of_mode(stat.st_mode) == FileKind::Directory => {
                let why = "it would replace a directory";
                Err(refused(&entry.path, why))
            }
            Some(_) => remove(self.here(), name),
            None => Ok(()),
        }
    }
}

/// Removes what is no directory; gone already is as well.
fn remove(dir: &Dir, name: &OsStr) -> Result<()> {
    match dir.remove_file(name) {
        Err(error) if !error.is(Errno::ENOENT) => Err(error.into()),
        _ => Ok(()),
    }
}

/// An entry below something that is no directory is the archive's fault.
fn blocked(error: Error, entry: &Entry) -> Error {
    match error {
        Error::System(error)
            if matches!(error.errno(), Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV) =>
        {
            refused(&entry.path, "the path above it is not a directory")
        }
        error => error,
    }
}

/// Opens a directory of the tree `root`: from `there` (a path and its directory) if it is below
/// that, else from the root, in as few steps as can be.
pub(super) fn open_below(root: &Dir, there: Option<(&[u8], &Dir)>, path: &[u8]) -> Result<Dir> {
    if path.is_empty() {
        return Ok(root.try_clone()?);
    }
    let (from, mut rest) = match there {
        Some((b"", dir)) => (dir, path),
        Some((there, dir)) => match path.strip_prefix(there) {
            Some([]) => return Ok(dir.try_clone()?),
            Some([b'/', rest @ ..]) => (dir, rest),
            _ => (root, path),
        },
        None => (root, path),
    };
    let mut dir: Option<Dir> = None;
    while !rest.is_empty() {
        let mut end = rest.len();
        if end > PATH_MAX {
            let slash = rest[..PATH_MAX].iter().rposition(|&byte| byte == b'/');
            end = slash.expect("no name is longer than 255 bytes");
        }
        let from = dir.as_ref().unwrap_or(from);
        dir = Some(from.open_beneath(OsStr::from_bytes(&rest[..end]))?);
        rest = rest.get(end + 1..).unwrap_or_default();
    }
    Ok(dir.expect("the path is not empty"))
}

/// The parent's path and the name in it.
pub(super) fn split(path: &[u8]) -> (&[u8], &OsStr) {
    let slash = path.iter().rposition(|&byte| byte == b'/');
    let (parent, name) = match slash {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&path[..0], path),
    };
    (parent, OsStr::from_bytes(name))
}
