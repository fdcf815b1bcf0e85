//! A table on disk: checked once from end to end, then read from any file on.
//!
//! Memory does not grow with the table. Every so many entries there is a mark, at most 16,384 of
//! them; the path at each mark is in a temporary file without a name.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use sha2::{Digest as _, Sha256};

use super::super::digest::Digest;
use super::super::error::{Error, Result};
use super::super::header::malformed;
use super::super::progress::Limits;
use super::super::read::limit;
use super::piece::{CHUNK, MOST_TABLE, Sha256Sum, ZEROS, pieces};
use super::row::{self, Kind, Row, Source};
use crate::sys::{self, Dir};
use crate::tree::Stop;

const MAGIC: &[u8; 8] = b"bc-table";
const VERSION: u16 = 1;
pub(super) const HEADER: usize = 64;
/// How many marks there are at most, and how many entries are between two of them at least.
const MOST_MARKS: u64 = 16_384;
const LEAST_BETWEEN: u64 = 1024;
const BUFFER: usize = 64 << 10;

/// The numbers in a table's header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) length: u64,
    pub(super) entries: u64,
    pub(super) files: u64,
    pub(super) pieces: u64,
    pub(super) bytes: u64,
}

impl Totals {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        header[8..10].copy_from_slice(&VERSION.to_le_bytes());
        let chunk = u32::try_from(CHUNK).expect("4 MiB");
        header[12..16].copy_from_slice(&chunk.to_le_bytes());
        let numbers = [
            self.length,
            self.entries,
            self.files,
            self.pieces,
            self.bytes,
        ];
        for (slot, number) in header[16..56].chunks_exact_mut(8).zip(numbers) {
            slot.copy_from_slice(&number.to_le_bytes());
        }
        header
    }

    fn parse(header: &[u8; HEADER]) -> Result<Self> {
        let number = |at: usize| {
            let bytes = header[at..at + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes)
        };
        let totals = Self {
            length: number(16),
            entries: number(24),
            files: number(32),
            pieces: number(40),
            bytes: number(48),
        };
        if header[..10] != totals.encode()[..10] {
            return Err(malformed(0, "it is not a table of version 1"));
        }
        if *header != totals.encode() {
            return Err(malformed(
                10,
                "its header has flags, another chunk or no zeros",
            ));
        }
        Ok(totals)
    }
}

/// A place from which a table can be read.
#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    offset: u64,
    entry: u64,
    file: u64,
    piece: u64,
    /// Where the path is in the temporary file.
    path: u64,
}

/// A table that was checked.
#[derive(Debug)]
pub struct Table {
    file: File,
    digest: Digest,
    totals: Totals,
    limits: Limits,
    marks: Vec<Mark>,
    paths: File,
}

impl Table {
    /// Checks that `file` holds a canonical table, and that its SHA-256 is `expected` if that is
    /// given. `temporary` may hold a temporary file. Reads all of it, twice.
    pub fn open(
        file: File,
        expected: Option<[u8; 32]>,
        temporary: &Dir,
        limits: Limits,
        stop: Stop<'_>,
    ) -> Result<Arc<Self>> {
        let digest = digest(&file, stop)?;
        if expected.is_some_and(|expected| expected != digest.sha256) {
            return Err(malformed(0, format!("it has another digest: {digest}")));
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let paths = rustix::fs::openat(temporary, ".", flags, Mode::from_raw_mode(0o600))
            .map_err(|errno| temporary.error("openat", ".", errno))?;
        let mut header = [0; HEADER];
        let short = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::Truncated { at: digest.bytes },
            _ => unreadable(error),
        };
        file.read_exact_at(&mut header, 0).map_err(short)?;
        let totals = Totals::parse(&header)?;
        if totals.length != digest.bytes - HEADER as u64 {
            return Err(malformed(16, "its length differs from its header"));
        }
        if totals.entries > limits.entries {
            return Err(limit("the number of its entries", limits.entries));
        }
        if totals.bytes > limits.bytes {
            return Err(limit("the content of its files", limits.bytes));
        }
        let mut table = Self {
            file,
            digest,
            totals,
            limits,
            marks: Vec::new(),
            paths: File::from(paths),
        };
        table.check(stop)?;
        Ok(Arc::new(table))
    }

    /// Reads all entries, adds them up and sets marks.
    fn check(&mut self, stop: Stop<'_>) -> Result<()> {
        let between = (self.totals.entries / MOST_MARKS + 1).max(LEAST_BETWEEN);
        let mut cursor = Cursor::new(&*self);
        let (mut marks, mut sum, mut end) = (Vec::new(), Totals::default(), 0);
        while let Some(row) = cursor.next()? {
            if stop() {
                return Err(Error::Stopped);
            }
            if let Kind::File { size } = row.kind {
                sum.files += 1;
                for index in 0..pieces(size) {
                    if cursor.digest(index)? != ZEROS {
                        sum.bytes += (size - index * CHUNK).min(CHUNK);
                    }
                }
                sum.pieces += pieces(size);
            }
            sum.entries += u64::from(row.kind != Kind::End);
            if sum.entries > self.totals.entries {
                return Err(malformed(24, "it has more entries than its header"));
            }
            if cursor.entry / between > marks.len() as u64 && !cursor.ended() {
                marks.push(cursor.mark(end));
                end += save(&self.paths, &cursor, end)?;
            }
        }
        sum.length = cursor.offset - HEADER as u64;
        if sum != self.totals {
            return Err(malformed(
                16,
                "the total of its entries differs from its header",
            ));
        }
        self.marks = marks;
        Ok(())
    }

    /// The table's length and SHA-256: the layer's name.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// How many bytes of content the layer has that are not zeros.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.totals.bytes
    }

    /// How many regular files it has.
    #[must_use]
    pub fn files(&self) -> u64 {
        self.totals.files
    }

    /// How many pieces its files have.
    pub(super) fn pieces(&self) -> u64 {
        self.totals.pieces
    }

    /// How many entries it has, the root included.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.totals.entries
    }

    /// Writes the table itself.
    pub fn write_to(&self, out: &mut impl Write) -> Result<()> {
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        while at < self.digest.bytes {
            let read = self.file.read_at(&mut buffer, at).map_err(unreadable)?;
            if read == 0 {
                return Err(Error::Truncated { at });
            }
            out.write_all(&buffer[..read]).map_err(Error::Write)?;
            at += read as u64;
        }
        Ok(())
    }

    /// Copies a table of at most `most` bytes from `input` to `into`.
    pub fn receive(input: impl Read, into: &File, most: u64, stop: Stop<'_>) -> Result<()> {
        let most = most.min(MOST_TABLE);
        let mut input = input.take(most + 1);
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        loop {
            if stop() {
                return Err(Error::Stopped);
            }
            match input.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => {
                    into.write_all_at(&buffer[..read], at)
                        .map_err(Error::Write)?;
                    at += read as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Read(error)),
            }
        }
        if at > most {
            return Err(limit("the length of its table", most));
        }
        into.set_len(at).map_err(Error::Write)
    }
}

/// Whether a file is as long as a table with its header is. Reads the header only.
#[must_use]
pub fn has_whole_length(file: &File) -> bool {
    let mut header = [0; HEADER];
    let length = file.metadata().map_or(0, |found| found.len());
    file.read_exact_at(&mut header, 0).is_ok()
        && Totals::parse(&header)
            .is_ok_and(|totals| totals.length.checked_add(HEADER as u64) == Some(length))
}

/// The table's file is on this node: the fault is its disk's, not the fault of the table's source.
fn unreadable(error: std::io::Error) -> Error {
    sys::Error::new("pread", "a table of contents", error).into()
}

/// Length and SHA-256 of a file.
pub(super) fn digest(file: &File, stop: Stop<'_>) -> Result<Digest> {
    let (mut hash, mut at) = (Sha256::new(), 0);
    let mut buffer = vec![0; BUFFER];
    loop {
        if stop() {
            return Err(Error::Stopped);
        }
        let read = file.read_at(&mut buffer, at).map_err(unreadable)?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        at += read as u64;
        if at > MOST_TABLE {
            return Err(limit("the length of its table", MOST_TABLE));
        }
    }
    let sha256 = hash.finalize().into();
    Ok(Digest { bytes: at, sha256 })
}

/// Saves a cursor's path; returns how many bytes that took.
fn save<T: std::ops::Deref<Target = Table>>(
    file: &File,
    cursor: &Cursor<T>,
    at: u64,
) -> Result<u64> {
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let mut bytes = Vec::with_capacity(cursor.path.len() + 4 * cursor.levels.len() + 9);
    bytes.extend(number(cursor.path.len()));
    bytes.extend(number(cursor.levels.len()));
    bytes.push(u8::from(cursor.fresh));
    bytes.extend(&cursor.path);
    for &level in &cursor.levels {
        bytes.extend(number(level));
    }
    file.write_all_at(&bytes, at)
        .map_err(|error| Error::Spill(error.to_string()))?;
    Ok(bytes.len() as u64)
}

/// A place in a table, which moves on entry by entry.
#[derive(Debug)]
pub(super) struct Cursor<T> {
    table: T,
    buffer: Box<[u8]>,
    /// The part of the table that is in the buffer.
    from: u64,
    filled: usize,
    /// The next byte, and the first of the last entry.
    offset: u64,
    entry_at: u64,
    /// The path of the last entry.
    path: Vec<u8>,
    /// The lengths of the paths of the open directories.
    levels: Vec<usize>,
    /// Whether the innermost of them has had no entry yet.
    fresh: bool,
    begun: bool,
    /// How many entries, files and pieces were passed, the last one included.
    entry: u64,
    file: u64,
    piece: u64,
    /// Of the last entry, if it is a file: where its digests are, and how many.
    digests: (u64, u64),
}

impl<T: std::ops::Deref<Target = Table>> Cursor<T> {
    pub(super) fn new(table: T) -> Self {
        Self {
            table,
            buffer: vec![0; BUFFER].into(),
            from: 0,
            filled: 0,
            offset: HEADER as u64,
            entry_at: HEADER as u64,
            path: Vec::new(),
            levels: Vec::new(),
            fresh: false,
            begun: false,
            entry: 0,
            file: 0,
            piece: 0,
            digests: (0, 0),
        }
    }

    /// Where the last entry begins.
    pub(super) fn at_entry(&self) -> u64 {
        self.entry_at
    }

    /// Reads a directory's entry again, without moving on.
    pub(super) fn again(&mut self, at: u64) -> Result<Row> {
        let back = std::mem::replace(&mut self.offset, at);
        let limits = self.table.limits;
        let row = row::read(self, at == HEADER as u64, limits);
        self.offset = back;
        row
    }

    /// The path of the last entry; of an end mark that of its directory.
    pub(super) fn path(&self) -> &[u8] {
        &self.path
    }

    /// The index of the last entry, which is a file.
    pub(super) fn file(&self) -> u64 {
        self.file - 1
    }

    /// The first piece of the last entry, which is a file.
    pub(super) fn piece(&self) -> u64 {
        self.piece - self.digests.1
    }

    fn ended(&self) -> bool {
        self.begun && self.levels.is_empty()
    }

    /// The digest of a piece of the last entry, which is a file.
    pub(super) fn digest(&mut self, index: u64) -> Result<Sha256Sum> {
        let mut digest = ZEROS;
        self.read_at(&mut digest, self.digests.0 + 32 * index)?;
        Ok(digest)
    }

    /// Goes to the file of this index; its entry.
    pub(super) fn seek(&mut self, file: u64) -> Result<Row> {
        let index = self.table.marks.partition_point(|mark| mark.file <= file);
        let mark = index.checked_sub(1).map(|index| self.table.marks[index]);
        let mark_entry = mark.map_or(0, |mark| mark.entry);
        if self.file > file || self.entry < mark_entry || self.ended() {
            self.go(mark)?;
        }
        while let Some(row) = self.next()? {
            if matches!(row.kind, Kind::File { .. }) && self.file() == file {
                return Ok(row);
            }
        }
        Err(Error::Refused {
            path: format!("file {file}"),
            why: "there is no file of this index".to_owned(),
        })
    }

    fn go(&mut self, mark: Option<Mark>) -> Result<()> {
        let mark = mark.unwrap_or(Mark {
            offset: HEADER as u64,
            ..Mark::default()
        });
        (self.offset, self.entry) = (mark.offset, mark.entry);
        (self.file, self.piece, self.digests) = (mark.file, mark.piece, (0, 0));
        self.begun = mark.entry > 0;
        self.path.clear();
        self.levels.clear();
        if !self.begun {
            return Ok(());
        }
        let spill = |error: std::io::Error| Error::Spill(error.to_string());
        let mut head = [0; 9];
        let paths = &self.table.paths;
        paths.read_exact_at(&mut head, mark.path).map_err(spill)?;
        let number = |bytes: &[u8]| {
            let bytes = bytes.try_into().expect("four bytes");
            usize::try_from(u32::from_le_bytes(bytes)).expect("it was one")
        };
        let (path, levels) = (number(&head[..4]), number(&head[4..8]));
        self.fresh = head[8] == 1;
        let mut rest = vec![0; path + 4 * levels];
        paths
            .read_exact_at(&mut rest, mark.path + 9)
            .map_err(spill)?;
        self.path.extend(&rest[..path]);
        self.levels.extend(rest[path..].chunks_exact(4).map(number));
        Ok(())
    }

    fn mark(&self, path: u64) -> Mark {
        Mark {
            offset: self.offset,
            entry: self.entry,
            file: self.file,
            piece: self.piece,
            path,
        }
    }

    /// The next entry; `None` behind the root's end mark.
    pub(super) fn next(&mut self) -> Result<Option<Row>> {
        if self.ended() {
            return Ok(None);
        }
        let at = self.offset;
        self.entry_at = at;
        let limits = self.table.limits;
        let is_root = !self.begun;
        let row = row::read(self, is_root, limits)?;
        self.begun = true;
        self.digests = (0, 0);
        if row.kind == Kind::End {
            let level = self.levels.pop().expect("it has not ended");
            self.path.truncate(level);
            self.fresh = false;
            return Ok(Some(row));
        }
        if let Some(&level) = self.levels.last() {
            let begin = level + usize::from(level > 0);
            if !self.fresh && self.path[begin..] >= *row.name {
                return Err(malformed(at, "its entries are not in order"));
            }
            self.path.truncate(level);
            if level > 0 {
                self.path.push(b'/');
            }
            self.path.extend(&row.name);
            if self.path.len() >= limits.path {
                return Err(limit("the length of a path", limits.path as u64));
            }
        }
        self.fresh = matches!(row.kind, Kind::Directory { .. });
        if self.fresh {
            self.levels.push(self.path.len());
        }
        self.entry += 1;
        if let Kind::File { size } = row.kind {
            self.digests = (self.offset, pieces(size));
            self.file += 1;
            self.piece += self.digests.1;
            self.offset += 32 * self.digests.1;
            if self.offset > self.table.digest.bytes {
                return Err(Error::Truncated {
                    at: self.table.digest.bytes,
                });
            }
        }
        Ok(Some(row))
    }

    fn read_at(&mut self, into: &mut [u8], at: u64) -> Result<()> {
        let (mut at, mut into) = (at, into);
        while !into.is_empty() {
            let there = at
                .checked_sub(self.from)
                .and_then(|skip| usize::try_from(skip).ok());
            if let Some(skip) = there.filter(|&skip| skip < self.filled) {
                let bytes = &self.buffer[skip..self.filled];
                let fits = bytes.len().min(into.len());
                into[..fits].copy_from_slice(&bytes[..fits]);
                into = &mut into[fits..];
                at += fits as u64;
            } else {
                let read = self.table.file.read_at(&mut self.buffer, at);
                (self.from, self.filled) = (at, read.map_err(unreadable)?);
                if self.filled == 0 {
                    return Err(Error::Truncated { at });
                }
            }
        }
        Ok(())
    }
}

impl<T: std::ops::Deref<Target = Table>> Source for Cursor<T> {
    fn exact(&mut self, into: &mut [u8]) -> Result<()> {
        self.read_at(into, self.offset)?;
        self.offset += into.len() as u64;
        Ok(())
    }

    fn at(&self) -> u64 {
        self.offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_cannot_be_read_is_a_fault_of_this_node() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = File::create(directory.path().join("table")).expect("create");
        let temporary = Dir::open(directory.path()).expect("open");
        let opened = Table::open(file, None, &temporary, Limits::DEFAULT, &|| false);
        let error = opened.expect_err("it is open for writing only");
        assert!(matches!(error, Error::System(_)), "{error:?}");
    }
}
