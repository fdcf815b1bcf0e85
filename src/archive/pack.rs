//! Writing a tree as an archive: the walk, what each entry says, the content of files.
//!
//! The same content gives the same bytes, so what differs between filesystems (the order of names, which blocks are
//! allocated, access times) must not be seen in it. Every byte is in `docs/archives.md`.

use std::ffi::OsStr;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use rustix::fs::{OFlags, Stat, StatVfsMountFlags};

use super::encode::encode;
use super::header::{
    BLOCK, Draft, GID, LINK, MAJOR, MINOR, MODE, MOST_12, MTIME, NAME, SIZE, UID, padding,
};
use super::links::Links;
use super::pipe::{Feeder, pipe};
use super::sorted::{Budget, Sorted};
use super::sparse::{self, GRAIN, Run};
use super::{Codec, Digests, Error, Limits, Progress, Result, acl, pax, shown};
use crate::sys::{self, Dir, Errno, FileKind, Node, OpenFile, Xattrs};
use crate::tree::{self, Spine, Stop};

/// The longest extended header: more would not be read again.
const MOST_RECORDS: usize = 1 << 20;
/// How much of a file's name is in the name of its header block, if it has holes.
const SPARSE_BASE: usize = 84;

/// How a tree is packed.
#[derive(Debug, Clone, Copy)]
pub struct Pack<'a> {
    /// How the archive is compressed.
    pub codec: Codec,
    /// Whether device nodes are packed.
    pub devices: bool,
    /// A directory that may hold a temporary file.
    pub temporary: &'a Dir,
}

/// What was packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// Of the archive.
    pub digests: Digests,
    /// What is in it, and what is not.
    pub counts: Counts,
}

/// Counts of what a tree had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Names that are no directories.
    pub files: u64,
    /// Directories.
    pub directories: u64,
    /// Bytes of files' content, holes and further names not counted.
    pub bytes: u64,
    /// Sockets, which no archive holds.
    pub sockets_left_out: u64,
    /// Device nodes that were not packed.
    pub devices_left_out: u64,
    /// Attributes that no archive holds.
    pub attributes_left_out: u64,
}

/// Writes all below `root`, and how itself looks, to `out`. On an error the archive is incomplete, and its reader knows it.
///
/// `out` is written by another thread, which ends when `out` fails or takes no more.
pub fn pack(
    root: &Dir,
    out: impl Write + Send,
    how: Pack<'_>,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Packed> {
    // A name that was a file may be a device when it is opened, whose driver must not be called.
    let vfs = rustix::fs::fstatvfs(root).map_err(|errno| root.error("fstatvfs", ".", errno))?;
    let bound;
    let root = if vfs.f_flag.contains(StatVfsMountFlags::NODEV) {
        root
    } else {
        bound = Dir::from_fd(sys::bind(root, true)?, root.path());
        &bound
    };
    let spine = Spine::new(root)?;
    let (feeder, drain) = pipe();
    let (counts, digests) = std::thread::scope(|scope| {
        let encoding = scope.spawn(|| encode(drain, out, how.codec, progress));
        let packer = Packer {
            feeder,
            spine,
            path: Vec::new(),
            links: Links::new(how.temporary),
            devices: how.devices,
            scratch: vec![0; usize::try_from(GRAIN).expect("it is small")],
            counts: Counts::default(),
        };
        let counts = packer.run(progress, stop);
        let digests = encoding.join().unwrap_or_else(|panic| {
            std::panic::resume_unwind(panic);
        });
        (counts, digests)
    });
    match (counts, digests) {
        (Ok(counts), digests) => Ok(Packed {
            digests: digests?,
            counts,
        }),
        // The writer's error is the reason.
        (Err(Error::Cut), Err(error)) | (Err(error), _) => Err(error),
    }
}

/// What an entry says.
struct Head<'a> {
    path: &'a [u8],
    kind: u8,
    stat: &'a Stat,
    /// Of what follows.
    size: u64,
    link: &'a [u8],
    /// Of a file with holes.
    real_size: Option<u64>,
    /// Keys and values of records.
    attributes: &'a [(Vec<u8>, Vec<u8>)],
}

impl<'a> Head<'a> {
    fn new(path: &'a [u8], kind: u8, stat: &'a Stat) -> Self {
        Self {
            path,
            kind,
            stat,
            size: 0,
            link: b"",
            real_size: None,
            attributes: &[],
        }
    }
}

struct Packer<'a> {
    feeder: Feeder,
    spine: Spine,
    path: Vec<u8>,
    links: Links<'a>,
    devices: bool,
    scratch: Vec<u8>,
    counts: Counts,
}

impl Packer<'_> {
    fn run(mut self, progress: &Progress, stop: Stop<'_>) -> Result<Counts> {
        let mut budget = Budget::new();
        let mut levels = vec![(Sorted::default(), 0)];
        self.directory(b"./")?;
        while let Some((names, length)) = levels.last_mut() {
            if stop() {
                return Err(Error::Stopped);
            }
            self.path.truncate(*length);
            let Some((name, kind)) = names.next(self.spine.here(), &mut budget)? else {
                levels.pop();
                if self.spine.ascend()?.is_none() {
                    break;
                }
                continue;
            };
            self.path.extend_from_slice(name.as_bytes());
            if self.path.len() >= Limits::default().path {
                return Err(Error::Limit {
                    what: "the length of a path",
                    limit: Limits::default().path as u64,
                });
            }
            if self.entry(&name, kind, stop)? {
                levels.push((Sorted::default(), self.path.len()));
            }
            progress.entries.fetch_add(1, Ordering::Relaxed);
        }
        self.feeder.write(&[0; 2 * BLOCK])?;
        self.feeder.finish()?;
        Ok(self.counts)
    }

    /// Packs one name; tells whether it is a directory that was now entered.
    fn entry(&mut self, name: &OsStr, kind: Option<FileKind>, stop: Stop<'_>) -> Result<bool> {
        match kind {
            Some(FileKind::Directory) => return self.enter(name),
            Some(FileKind::File) => {
                let file = self.open(name, stop)?;
                if let Some((file, stat)) = file {
                    return self.file(&file, &stat).map(|()| false);
                }
            }
            _ => {}
        }
        let node = match self.spine.here().node(name) {
            Ok(node) => node,
            // It is no longer there.
            Err(error) if error.is(Errno::ENOENT) => return Ok(false),
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
                self.file(&OpenFile::new(fd?, node.path()), &stat)?;
            }
            FileKind::Socket => self.counts.sockets_left_out += 1,
            FileKind::CharacterDevice | FileKind::BlockDevice if !self.devices => {
                self.counts.devices_left_out += 1;
            }
            kind => self.special(&node, &stat, kind)?,
        }
        Ok(false)
    }

    fn enter(&mut self, name: &OsStr) -> Result<bool> {
        match self.spine.descend(name) {
            Ok(()) => {}
            // It is no longer there, or no directory.
            Err(error)
                if matches!(error.errno(), Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) =>
            {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        }
        self.path.push(b'/');
        let path = std::mem::take(&mut self.path);
        let done = self.directory(&path);
        self.path = path;
        done.map(|()| true)
    }

    /// The entry of the directory where the walk is.
    fn directory(&mut self, path: &[u8]) -> Result<()> {
        self.counts.directories += 1;
        let here = self.spine.here();
        let stat = here.stat_self()?;
        let attributes = attributes(here, &mut self.counts)?;
        let head = Head {
            attributes: &attributes,
            ..Head::new(path, b'5', &stat)
        };
        put(&mut self.feeder, &head)
    }

    /// Opens a regular file; `None`: it is none, or no longer there.
    fn open(&self, name: &OsStr, stop: Stop<'_>) -> Result<Option<(OpenFile, Stat)>> {
        let usual = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut flags = usual | OFlags::NOATIME;
        let here = self.spine.here();
        let fd: OwnedFd = loop {
            match here.try_open_file_beneath(name, flags, 0) {
                Ok(fd) => break fd,
                Err(error) => match error.errno() {
                    Errno::EPERM if flags != usual => flags = usual,
                    // A race with a rename, or somebody's lease, which he is being asked for.
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

    fn file(&mut self, file: &OpenFile, stat: &Stat) -> Result<()> {
        self.counts.files += 1;
        if self.again(stat)? {
            return Ok(());
        }
        let failed = |call, errno| sys::Error::new(call, file.subject(), errno);
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let runs = if size < GRAIN {
            sparse::whole(size)
        } else {
            sparse::find(file, size, &mut self.scratch).map_err(|errno| failed("pread", errno))?
        };
        let attributes = attributes(file, &mut self.counts)?;
        let mut head = Head {
            size,
            attributes: &attributes,
            ..Head::new(&self.path, b'0', stat)
        };
        let data: u64 = runs.iter().map(|run| run.length).sum();
        let mut map = Vec::new();
        if sparse::has_holes(&runs, size) {
            map = sparse::map(&runs, size);
            head.real_size = Some(size);
            head.size = map.len() as u64 + data;
        }
        put(&mut self.feeder, &head)?;
        let left = padding(head.size);
        self.feeder.write(&map)?;
        for run in &runs {
            self.content(file, *run)?;
        }
        self.feeder.write(&[0; BLOCK][..left])?;
        self.counts.bytes += data;
        if !map.is_empty() {
            // What was a hole is not read again.
            let now = rustix::fs::fstat(file).map_err(|errno| failed("fstat", errno))?;
            if now.st_size < stat.st_size {
                return Err(self.shrunk());
            }
        }
        Ok(())
    }

    fn content(&mut self, file: &OpenFile, run: Run) -> Result<()> {
        let (mut at, end) = (run.offset, run.offset + run.length);
        while at < end {
            let spare = self.feeder.spare()?;
            let most = usize::try_from(end - at).map_or(spare.len(), |left| left.min(spare.len()));
            match rustix::io::pread(file, &mut spare[..most], at) {
                Ok(0) => return Err(self.shrunk()),
                Ok(read) => {
                    self.feeder.advance(read);
                    at += read as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(sys::Error::new("pread", file.subject(), errno).into()),
            }
        }
        Ok(())
    }

    fn shrunk(&self) -> Error {
        Error::Shrunk {
            path: shown(&self.path),
        }
    }

    /// A symlink, a FIFO, a device.
    fn special(&mut self, node: &Node, stat: &Stat, kind: FileKind) -> Result<()> {
        self.counts.files += 1;
        if self.again(stat)? {
            return Ok(());
        }
        let target = match kind {
            FileKind::Symlink => node.read_link()?,
            _ => std::ffi::OsString::new(),
        };
        let attributes = attributes(node, &mut self.counts)?;
        let head = Head {
            link: target.as_bytes(),
            attributes: &attributes,
            ..Head::new(
                &self.path,
                match kind {
                    FileKind::Symlink => b'2',
                    FileKind::CharacterDevice => b'3',
                    FileKind::BlockDevice => b'4',
                    _ => b'6',
                },
                stat,
            )
        };
        put(&mut self.feeder, &head)
    }

    /// Makes a hard link of a file that was packed under another name; tells whether it was.
    #[allow(
        clippy::useless_conversion,
        reason = "st_nlink's type differs between architectures"
    )]
    fn again(&mut self, stat: &Stat) -> Result<bool> {
        let names = u64::from(stat.st_nlink);
        if names < 2 {
            return Ok(false);
        }
        let identity = (stat.st_dev, stat.st_ino);
        let Some(first) = self.links.find(identity)? else {
            self.links.insert(identity, &self.path, names)?;
            return Ok(false);
        };
        let head = Head {
            link: &first,
            ..Head::new(&self.path, b'1', stat)
        };
        put(&mut self.feeder, &head)?;
        Ok(true)
    }
}

/// Writes the blocks of an entry: an extended header, if it needs one, and its own.
fn put(feeder: &mut Feeder, head: &Head<'_>) -> Result<()> {
    let mut draft = Draft::new(head.kind);
    let mut records = Vec::new();
    let path_fits = if head.real_size.is_some() {
        let base = head.path.rsplit(|&byte| byte == b'/').next();
        let base = base.unwrap_or_default();
        let base = &base[..base.len().min(SPARSE_BASE)];
        draft.text(NAME, &[b"GNUSparseFile.0/", base].concat());
        true
    } else {
        draft.path(head.path)
    };
    if !path_fits {
        pax::push(&mut records, b"path", head.path);
    }
    if !draft.text(LINK, head.link) {
        pax::push(&mut records, b"linkpath", head.link);
    }
    draft.number(MODE, u64::from(head.stat.st_mode & 0o7777));
    let numbers = [
        (SIZE, &b"size"[..], head.size),
        (UID, b"uid", u64::from(head.stat.st_uid)),
        (GID, b"gid", u64::from(head.stat.st_gid)),
    ];
    for (field, key, value) in numbers {
        if !draft.number(field, value) {
            pax::push(&mut records, key, value.to_string().as_bytes());
        }
    }
    let time = tree::times_of(head.stat).last_modification;
    let nanoseconds = u32::try_from(time.tv_nsec).unwrap_or(0);
    let seconds = u64::try_from(time.tv_sec).ok();
    let seconds = seconds.filter(|&seconds| seconds <= MOST_12);
    draft.number(MTIME, seconds.unwrap_or(0));
    if seconds.is_none() || nanoseconds > 0 {
        let text = pax::time((time.tv_sec, nanoseconds));
        pax::push(&mut records, b"mtime", text.as_bytes());
    }
    if let Some(size) = head.real_size {
        pax::push(&mut records, b"GNU.sparse.major", b"1");
        pax::push(&mut records, b"GNU.sparse.minor", b"0");
        pax::push(&mut records, b"GNU.sparse.name", head.path);
        pax::push(
            &mut records,
            b"GNU.sparse.realsize",
            size.to_string().as_bytes(),
        );
    }
    for (key, value) in head.attributes {
        pax::push(&mut records, key, value);
    }
    if matches!(head.kind, b'3' | b'4') {
        let device = head.stat.st_rdev;
        draft.number(MAJOR, u64::from(rustix::fs::major(device)));
        draft.number(MINOR, u64::from(rustix::fs::minor(device)));
    }
    if records.len() > MOST_RECORDS {
        return Err(Error::Limit {
            what: "the size of the names and attributes of a file",
            limit: MOST_RECORDS as u64,
        });
    }
    if !records.is_empty() {
        let mut extended = Draft::new(b'x');
        let length = records.len() as u64;
        extended.text(NAME, b"PaxHeaders/0");
        extended.number(MODE, 0o644);
        for (field, value) in [(UID, 0), (GID, 0), (SIZE, length), (MTIME, 0)] {
            extended.number(field, value);
        }
        records.resize(records.len() + padding(length), 0);
        feeder.write(&extended.finish())?;
        feeder.write(&records)?;
    }
    feeder.write(&draft.finish())
}

/// What is kept of the attributes, as records in their order.
fn attributes(of: &impl Xattrs, counts: &mut Counts) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = of.xattr_names()?;
    if names.is_empty() {
        return Ok(Vec::new());
    }
    names.sort();
    let (mut acls, mut others) = (Vec::new(), Vec::new());
    for name in names {
        let bytes = name.as_bytes();
        let acl = match bytes {
            b"system.posix_acl_access" => Some(&b"SCHILY.acl.access"[..]),
            b"system.posix_acl_default" => Some(&b"SCHILY.acl.default"[..]),
            b"security.capability" => None,
            name if name.starts_with(b"user.") => None,
            // As xfs lists the two ACLs once more.
            b"trusted.SGI_ACL_FILE" | b"trusted.SGI_ACL_DEFAULT" => continue,
            _ => {
                counts.attributes_left_out += 1;
                continue;
            }
        };
        // Taken away since it was listed: then it is not there.
        let Some(value) = of.xattr(&name)? else {
            continue;
        };
        if let Some((key, text)) = acl.zip(acl::to_text(&value)) {
            acls.push((key.to_vec(), text.into_bytes()));
        } else {
            let name = pax::escape(bytes);
            others.push(([b"SCHILY.xattr.", &*name].concat(), value));
        }
    }
    acls.append(&mut others);
    Ok(acls)
}
