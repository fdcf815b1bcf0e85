//! Writes a tree as an archive: the entries and the content of files. The walk is in `walk`.
//!
//! The same content gives the same bytes. So the archive must not depend on what differs between
//! filesystems: the order of names, allocated blocks, access times. Every byte is in
//! `docs/archives.md`.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::Stat;

use super::digest::{Codec, Digests, Hashing};
use super::encode::encode;
use super::error::{Error, Result, shown};
use super::header::{BLOCK, Draft, EntryType, MOST_12, padding, put_number, put_text};
use super::links::Links;
use super::marks::{self, LayerMarks};
use super::pipe::{Feeder, pipe};
use super::progress::Progress;
use super::sparse::{self, GRAIN, Run};
use super::walk::{Look, Visitor, attributes, guarded, walk};
use super::{acl, pax};
use crate::sys::{self, Dir, FileKind, OpenFile, PathFd, Xattrs};
use crate::tree::Stop;

/// The longest extended header: more would not be read again.
const MOST_RECORDS: usize = 1 << 20;
/// How much of a file's name is in the name of its header block, if it has holes.
const SPARSE_BASE: usize = 84;

/// How many zeros are written at most because a file has too many holes for a map.
const MOST_ZEROS: u64 = 1 << 40;

/// How a tree is packed.
#[derive(Debug, Clone, Copy)]
pub struct Pack<'a> {
    /// How the archive is compressed.
    pub codec: Codec,
    /// Whether device nodes are packed.
    pub devices: bool,
    /// Which digests are computed.
    pub hashing: Hashing,
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
    /// Names that a layer deletes.
    pub whiteouts: u64,
}

/// Writes all below `root`, and how itself looks, to `out`. On an error the archive is incomplete,
/// and its reader knows it.
///
/// `out` is written by another thread, which ends when `out` fails or takes no more. That thread
/// also reads the content of small files, which the walk has opened.
pub fn pack(
    root: &Dir,
    out: impl Write + Send,
    how: Pack<'_>,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Packed> {
    pack_as(root, None, out, how, progress, stop)
}

/// Writes one layer of a stack, in overlayfs' form: its entries, and its deletions in the layers
/// below. Otherwise as [`pack`].
///
/// Towards OCI ([`LayerMarks::Oci`]) a layer that has names of whiteouts itself is
/// [`Error::Unpackable`].
pub fn pack_layer(
    root: &Dir,
    marks: LayerMarks,
    out: impl Write + Send,
    how: Pack<'_>,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Packed> {
    pack_as(root, Some(marks), out, how, progress, stop)
}

fn pack_as(
    root: &Dir,
    marks: Option<LayerMarks>,
    out: impl Write + Send,
    how: Pack<'_>,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Packed> {
    let root = guarded(root)?;
    let (feeder, drain) = pipe();
    let (counts, digests) = std::thread::scope(|scope| {
        let encoding = scope.spawn(|| encode(drain, out, how.codec, how.hashing, progress));
        let packer = Packer {
            feeder,
            links: Links::new(how.temporary),
            devices: how.devices,
            marks,
            scratch: vec![0; usize::try_from(GRAIN).expect("it is small")],
            counts: Counts::default(),
            stop,
        };
        let counts = packer.run((&root, how.temporary), progress);
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
    kind: EntryType,
    look: Look,
    /// Of what follows.
    size: u64,
    link: &'a [u8],
    /// Of a device node.
    device: u64,
    /// Of a file with holes.
    real_size: Option<u64>,
    /// Keys and values of records.
    records: &'a [(Vec<u8>, Vec<u8>)],
}

impl<'a> Head<'a> {
    fn new(path: &'a [u8], kind: EntryType, look: Look) -> Self {
        Self {
            path,
            kind,
            look,
            size: 0,
            link: b"",
            device: 0,
            real_size: None,
            records: &[],
        }
    }
}

struct Packer<'a> {
    feeder: Feeder,
    links: Links<'a>,
    devices: bool,
    /// How a layer's marks are written; `None`: the tree is no layer.
    marks: Option<LayerMarks>,
    scratch: Vec<u8>,
    counts: Counts,
    stop: Stop<'a>,
}

impl Visitor for Packer<'_> {
    fn directory(&mut self, path: &[u8], dir: &Dir, stat: &Stat, opaque: bool) -> Result<()> {
        self.check(path)?;
        self.counts.directories += 1;
        let mut records = self.records(path, dir)?;
        if opaque && self.marks == Some(LayerMarks::Records) {
            records.push((marks::RECORD.to_vec(), marks::OPAQUE.to_vec()));
        }
        let name = if path.is_empty() { b"." } else { path };
        let name = [name, b"/"].concat();
        let head = Head {
            records: &records,
            ..Head::new(&name, EntryType::Directory, Look::of(stat))
        };
        put(&mut self.feeder, &head)?;
        if opaque && self.marks == Some(LayerMarks::Oci) {
            let path = [path, b"/", marks::OCI_OPAQUE].concat();
            put(
                &mut self.feeder,
                &Head::new(&path, EntryType::Regular, Look::default()),
            )?;
        }
        Ok(())
    }

    fn file(&mut self, path: &[u8], file: OpenFile, stat: &Stat) -> Result<()> {
        self.check(path)?;
        self.counts.files += 1;
        if self.again(path, stat)? {
            return Ok(());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let runs = if size < GRAIN {
            sparse::whole(size)
        } else {
            sparse::find(&file, size, &mut self.scratch)
                .map_err(|errno| sys::Error::new("pread", file.subject(), errno))?
        };
        let records = self.records(path, &file)?;
        let mut head = Head {
            size,
            records: &records,
            ..Head::new(path, EntryType::Regular, Look::of(stat))
        };
        let data: u64 = runs.iter().map(|run| run.length).sum();
        // What the map has no place for is written, and may be a hole of an exabyte.
        let allocated = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if data.saturating_sub(allocated) > MOST_ZEROS {
            let (path, why) = (shown(path), "it has too many holes, of more than 1 TiB");
            return Err(Error::Unpackable { path, why });
        }
        let mut map = Vec::new();
        if sparse::has_holes(&runs, size) {
            map = sparse::map(&runs, size);
            head.real_size = Some(size);
            head.size = map.len() as u64 + data;
        }
        put(&mut self.feeder, &head)?;
        let left = padding(head.size);
        self.counts.bytes += data;
        if size < GRAIN && self.feeder.takes_file() {
            let size = usize::try_from(size).expect("it is small");
            self.feeder.file(path, file, size)?;
        } else {
            self.feeder.write(&map)?;
            for run in &runs {
                self.content(path, &file, *run)?;
            }
            if !map.is_empty() {
                // What was a hole is not read again.
                let now = rustix::fs::fstat(&file);
                let now = now.map_err(|errno| sys::Error::new("fstat", file.subject(), errno))?;
                if now.st_size < stat.st_size {
                    return Err(shrunk(path));
                }
            }
        }
        self.feeder.write(&[0; BLOCK][..left])
    }

    fn special(&mut self, path: &[u8], node: &PathFd, stat: &Stat, kind: FileKind) -> Result<()> {
        if matches!(kind, FileKind::CharacterDevice | FileKind::BlockDevice) && !self.devices {
            self.counts.devices_left_out += 1;
            return Ok(());
        }
        self.check(path)?;
        self.counts.files += 1;
        if self.again(path, stat)? {
            return Ok(());
        }
        let target = match kind {
            FileKind::Symlink => node.read_link()?,
            _ => std::ffi::OsString::new(),
        };
        let records = self.records(path, node)?;
        let kind = match kind {
            FileKind::Symlink => EntryType::Symlink,
            FileKind::CharacterDevice => EntryType::Char,
            FileKind::BlockDevice => EntryType::Block,
            _ => EntryType::Fifo,
        };
        let head = Head {
            link: target.as_bytes(),
            device: stat.st_rdev,
            records: &records,
            ..Head::new(path, kind, Look::of(stat))
        };
        put(&mut self.feeder, &head)
    }

    fn whiteout(&mut self, path: &[u8]) -> Result<()> {
        self.check(path)?;
        self.counts.whiteouts += 1;
        let look = Look::default();
        if self.marks == Some(LayerMarks::Oci) {
            let path = marks::oci_whiteout(path)?;
            return put(
                &mut self.feeder,
                &Head::new(&path, EntryType::Regular, look),
            );
        }
        let records = [(marks::RECORD.to_vec(), marks::WHITEOUT.to_vec())];
        let head = Head {
            records: &records,
            ..Head::new(path, EntryType::Regular, look)
        };
        put(&mut self.feeder, &head)
    }

    fn socket(&mut self) {
        self.counts.sockets_left_out += 1;
    }

    fn leave(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Packer<'_> {
    /// Packs a tree. The second directory may hold temporary files.
    fn run(mut self, trees: (&Dir, &Dir), progress: &Progress) -> Result<Counts> {
        let stop = self.stop;
        walk(trees, self.marks.is_some(), &mut self, progress, stop)?;
        self.feeder.write(&[0; 2 * BLOCK])?;
        self.feeder.finish()?;
        Ok(self.counts)
    }

    /// Refuses a name that an OCI layer cannot hold.
    fn check(&self, path: &[u8]) -> Result<()> {
        match self.marks {
            Some(LayerMarks::Oci) => marks::check_name(path),
            _ => Ok(()),
        }
    }

    fn content(&mut self, path: &[u8], file: &OpenFile, run: Run) -> Result<()> {
        let (mut at, end) = (run.offset, run.offset + run.length);
        while at < end {
            if (self.stop)() {
                return Err(Error::Stopped);
            }
            let spare = self.feeder.spare()?;
            let most = usize::try_from(end - at).map_or(spare.len(), |left| left.min(spare.len()));
            match rustix::io::pread(file, &mut spare[..most], at) {
                Ok(0) => return Err(shrunk(path)),
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

    /// Writes a hard link if the file was packed under another name. Returns whether it was.
    fn again(&mut self, path: &[u8], stat: &Stat) -> Result<bool> {
        let Some(first) = self.links.first_path(path, stat)? else {
            return Ok(false);
        };
        let head = Head {
            link: &first,
            ..Head::new(path, EntryType::Link, Look::of(stat))
        };
        put(&mut self.feeder, &head)?;
        Ok(true)
    }

    /// The attributes that are kept, as records in their order: ACLs, then the others.
    fn records(&mut self, path: &[u8], of: &impl Xattrs) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let (attributes, left_out) = attributes(path, of, self.marks.is_some())?;
        self.counts.attributes_left_out += left_out;
        let (mut acls, mut others) = (Vec::new(), Vec::new());
        for (name, value) in attributes {
            let key = match &*name {
                b"system.posix_acl_access" => Some(&b"SCHILY.acl.access"[..]),
                b"system.posix_acl_default" => Some(&b"SCHILY.acl.default"[..]),
                _ => None,
            };
            if let Some((key, text)) = key.zip(key.and_then(|_| acl::to_text(&value))) {
                acls.push((key.to_vec(), text.into_bytes()));
            } else {
                others.push(([b"SCHILY.xattr.", &*pax::escape(&name)].concat(), value));
            }
        }
        acls.append(&mut others);
        Ok(acls)
    }
}

fn shrunk(path: &[u8]) -> Error {
    Error::Shrunk { path: shown(path) }
}

/// Writes the blocks of an entry: an extended header, if it needs one, and its own.
fn put(feeder: &mut Feeder, head: &Head<'_>) -> Result<()> {
    let mut draft = Draft::new(head.kind);
    // Nearly all records fit in one block.
    let mut records = Vec::with_capacity(BLOCK);
    let path_fits = if head.real_size.is_some() {
        let base = head.path.rsplit(|&byte| byte == b'/').next();
        let base = base.unwrap_or_default();
        let base = &base[..base.len().min(SPARSE_BASE)];
        put_text(
            &mut draft.fields().name,
            &[b"GNUSparseFile.0/", base].concat(),
        );
        true
    } else {
        draft.path(head.path)
    };
    if !path_fits {
        pax::push(&mut records, b"path", head.path);
    }
    if !put_text(&mut draft.fields().linkname, head.link) {
        pax::push(&mut records, b"linkpath", head.link);
    }
    let fields = draft.fields();
    put_number(&mut fields.mode, u64::from(head.look.mode));
    let numbers: [(&mut [u8], _, _); 3] = [
        (&mut fields.size, &b"size"[..], head.size),
        (&mut fields.uid, b"uid", u64::from(head.look.uid)),
        (&mut fields.gid, b"gid", u64::from(head.look.gid)),
    ];
    for (field, key, value) in numbers {
        if !put_number(field, value) {
            pax::push(&mut records, key, value.to_string().as_bytes());
        }
    }
    let mtime = head.look.mtime;
    let seconds = u64::try_from(mtime.0).ok();
    let seconds = seconds.filter(|&seconds| seconds <= MOST_12);
    put_number(&mut fields.mtime, seconds.unwrap_or(0));
    if seconds.is_none() || mtime.1 > 0 {
        let text = pax::time(mtime);
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
    for (key, value) in head.records {
        pax::push(&mut records, key, value);
    }
    if matches!(head.kind, EntryType::Char | EntryType::Block) {
        let (major, minor) = (
            rustix::fs::major(head.device),
            rustix::fs::minor(head.device),
        );
        put_number(&mut draft.posix().dev_major, u64::from(major));
        put_number(&mut draft.posix().dev_minor, u64::from(minor));
    }
    put_records(feeder, records)?;
    feeder.write(&draft.finish())
}

/// Writes an extended header, if there are records.
fn put_records(feeder: &mut Feeder, mut records: Vec<u8>) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    if records.len() > MOST_RECORDS {
        return Err(Error::Limit {
            what: "the size of the names and attributes of a file",
            limit: MOST_RECORDS as u64,
        });
    }
    let length = records.len() as u64;
    let mut draft = Draft::new(EntryType::XHeader);
    let fields = draft.fields();
    put_text(&mut fields.name, b"PaxHeaders/0");
    put_number(&mut fields.mode, 0o644);
    put_number(&mut fields.uid, 0);
    put_number(&mut fields.gid, 0);
    put_number(&mut fields.size, length);
    put_number(&mut fields.mtime, 0);
    records.resize(records.len() + padding(length), 0);
    feeder.write(&draft.finish())?;
    feeder.write(&records)
}
