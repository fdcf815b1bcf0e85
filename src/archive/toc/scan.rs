//! Making the table of a layer: one walk that reads all content and writes an entry for each name.
//! The form of an entry is in `row`; how a tree is walked safely is in `walk`.
//!
//! No table is made that readers refuse, or that is large only because of holes.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use rustix::fs::Stat;
use sha2::{Digest as _, Sha256};

use super::super::digest::Digest;
use super::super::error::{Error, Result, shown};
use super::super::links::Links;
use super::super::progress::{Limits, Progress};
use super::super::walk::{Look, Visitor, attributes, guarded, walk};
use super::piece::{CHUNK, MOST_HOLES, MOST_TABLE, Sha256Sum, ZEROS, pieces};
use super::row::{Kind, Row};
use super::table::{HEADER, Totals, digest};
use crate::archive::pack::Counts;
use crate::sys::{self, Dir, FileKind, OpenFile, PathFd, Xattrs};
use crate::tree::Stop;

/// How much of a file is read at a time.
const BUFFER: usize = 256 << 10;
/// The limits of readers, which are those of archives.
const MOST: Limits = Limits::DEFAULT;

/// A table that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scanned {
    /// The table's length and SHA-256: the layer's name.
    pub digest: Digest,
    /// What is in the layer, and what is not in the table.
    pub counts: Counts,
}

/// Writes the table of the layer `root`, which must not change, into the empty file `into`.
/// `devices`: device nodes are in it. `temporary` may hold a temporary file.
///
/// Reads all content: a caller runs it in the background, at low priority. `stop` is asked before
/// each entry and each piece.
///
/// [`Error::Unpackable`]: the layer exceeds a limit of tables, and always will.
pub fn scan(
    root: &Dir,
    into: &File,
    devices: bool,
    temporary: &Dir,
    progress: &Progress,
    stop: Stop<'_>,
) -> Result<Scanned> {
    let root = guarded(root)?;
    let mut out = BufWriter::with_capacity(BUFFER, into);
    out.seek(SeekFrom::Start(HEADER as u64))
        .map_err(Error::Write)?;
    let mut scanner = Scanner {
        out,
        links: Links::new(temporary),
        devices,
        buffer: vec![0; BUFFER].into(),
        totals: Totals::default(),
        holes: 0,
        counts: Counts::default(),
        stop,
    };
    walk((&root, temporary), true, &mut scanner, progress, stop)?;
    scanner.out.flush().map_err(Error::Write)?;
    let (totals, counts) = (scanner.totals, scanner.counts);
    drop(scanner);
    into.write_all_at(&totals.encode(), 0)
        .map_err(Error::Write)?;
    let digest = digest(into, stop)?;
    Ok(Scanned { digest, counts })
}

struct Scanner<'a> {
    out: BufWriter<&'a File>,
    links: Links<'a>,
    devices: bool,
    buffer: Box<[u8]>,
    totals: Totals,
    /// Pieces of zeros in files of several pieces.
    holes: u64,
    counts: Counts,
    stop: Stop<'a>,
}

fn refused(path: &[u8], why: &'static str) -> Error {
    let path = shown(path);
    Error::Unpackable { path, why }
}

impl Scanner<'_> {
    fn put(&mut self, kind: Kind, path: &[u8], look: Look, of: Option<&impl Xattrs>) -> Result<()> {
        let (attributes, left_out) = match of {
            Some(of) => attributes(path, of, true)?,
            None => (Vec::new(), 0),
        };
        self.counts.attributes_left_out += left_out;
        self.totals.entries += u64::from(kind != Kind::End);
        if self.totals.entries > MOST.entries {
            return Err(refused(path, "the layer has too many entries for a table"));
        }
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        let row = Row {
            kind,
            name: name.to_vec(),
            look,
            attributes,
        };
        self.write(path, &row.encode())
    }

    fn write(&mut self, path: &[u8], bytes: &[u8]) -> Result<()> {
        if (self.stop)() {
            return Err(Error::Stopped);
        }
        self.totals.length += bytes.len() as u64;
        if self.totals.length > MOST_TABLE - HEADER as u64 {
            return Err(refused(path, "the layer's table would exceed 4 GiB"));
        }
        self.out.write_all(bytes).map_err(Error::Write)
    }

    /// A further name of a file, or of what is none.
    fn again(&mut self, path: &[u8], stat: &Stat) -> Result<bool> {
        let Some(first) = self.links.first_path(path, stat)? else {
            return Ok(false);
        };
        self.put(Kind::HardLink(first), path, Look::default(), None::<&Dir>)?;
        Ok(true)
    }

    /// The digest of a piece: zeros if all of it are.
    fn piece(&mut self, path: &[u8], file: &OpenFile, from: u64, to: u64) -> Result<Sha256Sum> {
        let failed = |errno| sys::Error::new("pread", file.subject(), errno);
        // A hole that the filesystem knows of is not read.
        match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(from)) {
            Ok(data) if data < to => {}
            Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(ZEROS),
            Err(rustix::io::Errno::INVAL) => {}
            Err(errno) => return Err(failed(errno).into()),
        }
        let (mut at, mut is_zero, mut hash) = (from, true, Sha256::new());
        while at < to {
            if (self.stop)() {
                return Err(Error::Stopped);
            }
            let most = usize::try_from(to - at).map_or(BUFFER, |left| left.min(BUFFER));
            let read = match rustix::io::pread(file, &mut self.buffer[..most], at) {
                Ok(0) => return Err(Error::Shrunk { path: shown(path) }),
                Ok(read) => read,
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno).into()),
            };
            let bytes = &self.buffer[..read];
            is_zero = is_zero && bytes.iter().all(|&byte| byte == 0);
            hash.update(bytes);
            at += read as u64;
        }
        Ok(if is_zero {
            ZEROS
        } else {
            hash.finalize().into()
        })
    }
}

impl Visitor for Scanner<'_> {
    fn directory(&mut self, path: &[u8], dir: &Dir, stat: &Stat, opaque: bool) -> Result<()> {
        self.counts.directories += 1;
        self.put(Kind::Directory { opaque }, path, Look::of(stat), Some(dir))
    }

    fn file(&mut self, path: &[u8], file: OpenFile, stat: &Stat) -> Result<()> {
        self.counts.files += 1;
        if self.again(path, stat)? {
            return Ok(());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size > MOST.bytes {
            return Err(refused(path, "it is larger than 1 TiB, holes included"));
        }
        self.put(Kind::File { size }, path, Look::of(stat), Some(&file))?;
        self.totals.files += 1;
        self.totals.pieces += pieces(size);
        for index in 0..pieces(size) {
            let (from, to) = (index * CHUNK, ((index + 1) * CHUNK).min(size));
            let digest = self.piece(path, &file, from, to)?;
            if digest != ZEROS {
                self.totals.bytes += to - from;
                self.counts.bytes += to - from;
            } else if size > CHUNK {
                self.holes += 1;
            }
            if self.totals.bytes > MOST.bytes {
                return Err(refused(path, "the layer has more than 1 TiB of content"));
            }
            if self.holes > MOST_HOLES {
                return Err(refused(path, "the layer has more than 512 GiB of holes"));
            }
            self.write(path, &digest)?;
        }
        let now = rustix::fs::fstat(&file)
            .map_err(|errno| sys::Error::new("fstat", file.subject(), errno))?;
        if now.st_size != stat.st_size {
            return Err(Error::Shrunk { path: shown(path) });
        }
        Ok(())
    }

    fn special(&mut self, path: &[u8], node: &PathFd, stat: &Stat, kind: FileKind) -> Result<()> {
        let device = || {
            let device = stat.st_rdev;
            (rustix::fs::major(device), rustix::fs::minor(device))
        };
        let kind = match kind {
            FileKind::CharacterDevice | FileKind::BlockDevice if !self.devices => {
                self.counts.devices_left_out += 1;
                return Ok(());
            }
            FileKind::CharacterDevice => Kind::Character(device().0, device().1),
            FileKind::BlockDevice => Kind::Block(device().0, device().1),
            FileKind::Symlink => Kind::Symlink(node.read_link()?.as_bytes().to_vec()),
            _ => Kind::Fifo,
        };
        self.counts.files += 1;
        if self.again(path, stat)? {
            return Ok(());
        }
        self.put(kind, path, Look::of(stat), Some(node))
    }

    fn whiteout(&mut self, path: &[u8]) -> Result<()> {
        self.counts.whiteouts += 1;
        self.put(Kind::Whiteout, path, Look::default(), None::<&Dir>)
    }

    fn socket(&mut self) {
        self.counts.sockets_left_out += 1;
    }

    fn leave(&mut self) -> Result<()> {
        self.put(Kind::End, b"", Look::default(), None::<&Dir>)
    }
}
