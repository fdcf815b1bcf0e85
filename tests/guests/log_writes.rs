//! Device mapper's `log-writes` log of a disk, and that disk recreated at any moment.
//!
//! The log (drivers/md/dm-log-writes.c): a header sector, then for each entry a sector that
//! describes it, and its data. Writes are entered in completion order, but only once a later flush
//! completes, right before it. FUA writes and marks are entered at once. So everything that was
//! durable at a mark is before it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::facts::Random;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
/// Sector sizes of the log are at least that.
const HEADER: usize = 32;

/// The kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Bytes at an offset of the disk; they are in the log at `data`.
    Write {
        at: u64,
        length: u64,
        data: u64,
        /// It was durable when it was done.
        through: bool,
        /// All before it was made durable first.
        flushed: bool,
    },
    /// Existing content there has no meaning any more.
    Discard { at: u64, length: u64 },
    /// Everything before it is durable.
    Flush,
    /// A mark.
    Mark(String),
}

/// A log, read.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
    pub(crate) entries: Vec<Entry>,
}

impl Log {
    pub(crate) fn read(file: File) -> io::Result<Self> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0)?;
        let number = |bytes: &[u8], at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
        };
        if number(&header, 0) != MAGIC || number(&header, 8) != 1 {
            return Err(wrong("it is no log of writes"));
        }
        let count = number(&header, 16);
        let sector = u64::from(u32::from_le_bytes(
            header[24..28].try_into().expect("four bytes"),
        ));
        let mut entries = Vec::new();
        let mut position = sector;
        for _ in 0..count {
            let mut bytes = vec![0; usize::try_from(sector).map_err(|_| wrong("sectors"))?];
            file.read_exact_at(&mut bytes, position)?;
            let (at, sectors) = (number(&bytes, 0), number(&bytes, 8));
            let (flags, length) = (number(&bytes, 16), number(&bytes, 24));
            position += sector;
            if flags & MARK != 0 {
                let length = usize::try_from(length).map_err(|_| wrong("a mark"))?;
                let text = bytes.get(HEADER..HEADER + length);
                let text = text.ok_or_else(|| wrong("a mark"))?;
                let text = String::from_utf8_lossy(text).into_owned();
                entries.push(Entry::Mark(text.trim_end_matches('\0').to_owned()));
                continue;
            }
            let (at, length) = (at * sector, sectors * sector);
            if flags & DISCARD != 0 {
                entries.push(Entry::Discard { at, length });
                continue;
            }
            if sectors == 0 {
                entries.push(Entry::Flush);
                continue;
            }
            entries.push(Entry::Write {
                at,
                length,
                data: position,
                through: flags & FUA != 0,
                flushed: flags & FLUSH != 0,
            });
            position += length;
        }
        Ok(Self { file, entries })
    }

    /// The first entry after a mark.
    pub(crate) fn after(&self, mark: &str) -> Option<usize> {
        let found = self
            .entries
            .iter()
            .position(|entry| matches!(entry, Entry::Mark(text) if text == mark));
        found.map(|at| at + 1)
    }

    /// The marks before an entry.
    pub(crate) fn marks(&self, before: usize) -> impl Iterator<Item = &str> {
        self.entries[..before]
            .iter()
            .filter_map(|entry| match entry {
                Entry::Mark(text) => Some(text.as_str()),
                _ => None,
            })
    }
}

/// Bytes in one block of a [`Disk`].
const BLOCK: u64 = 4096;
const BLOCK_LENGTH: usize = 4096;

/// A disk at one moment, block by block; what is not here is zero.
#[derive(Debug, Default, Clone)]
pub(crate) struct Disk(BTreeMap<u64, Box<[u8; BLOCK_LENGTH]>>);

impl Disk {
    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) {
        for (position, within, range) in pieces(at, bytes.len()) {
            let piece = &bytes[range];
            let is_whole = piece.len() as u64 == BLOCK;
            if is_whole && piece.iter().all(|byte| *byte == 0) {
                self.0.remove(&position);
                continue;
            }
            let block = self.0.entry(position);
            let block = block.or_insert_with(|| [0; BLOCK_LENGTH].into());
            block[within..within + piece.len()].copy_from_slice(piece);
        }
    }

    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) {
        for (position, within, range) in pieces(at, bytes.len()) {
            let piece = &mut bytes[range];
            match self.0.get(&position) {
                Some(block) => piece.copy_from_slice(&block[within..within + piece.len()]),
                None => piece.fill(0),
            }
        }
    }

    fn apply(&mut self, log: &Log, entry: &Entry) -> io::Result<()> {
        match entry {
            Entry::Write {
                at, length, data, ..
            } => {
                let mut bytes = vec![0; usize::try_from(*length).expect("it was in memory once")];
                log.file.read_exact_at(&mut bytes, *data)?;
                self.write(*at, &bytes);
            }
            Entry::Discard { at, length } => {
                // Zero is as good as anything.
                for block in at.div_ceil(BLOCK)..(at + length) / BLOCK {
                    self.0.remove(&block);
                }
            }
            Entry::Flush | Entry::Mark(_) => {}
        }
        Ok(())
    }

    /// Makes `file` be this disk.
    pub(crate) fn write_to(&self, file: &File, size: u64) -> io::Result<()> {
        file.set_len(0)?;
        file.set_len(size)?;
        for (block, bytes) in &self.0 {
            file.write_all_at(&bytes[..], block * BLOCK)?;
        }
        Ok(())
    }
}

/// The blocks that some bytes of a disk lie in: the block's number, where in it, and which of the
/// bytes.
fn pieces(at: u64, length: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == length {
            return None;
        }
        let position = at + done as u64;
        let within = usize::try_from(position % BLOCK).expect("it is below the block size");
        let end = length.min(done + BLOCK_LENGTH - within);
        let range = done..end;
        done = end;
        Some((position / BLOCK, within, range))
    })
}

/// The possible disks after a power cut right before an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Everything before it is there.
    Whole,
    /// Without any write that was not durable.
    Bare,
    /// With some of the writes that were not durable, chosen by this seed.
    Some(u64),
}

/// A disk that is made to be as it was, later and later.
#[derive(Debug)]
pub(crate) struct Replay<'a> {
    log: &'a Log,
    /// As it was at the last moment at which all was durable.
    durable: Disk,
    until: usize,
}

impl<'a> Replay<'a> {
    pub(crate) fn new(log: &'a Log) -> Self {
        Self {
            log,
            durable: Disk::default(),
            until: 0,
        }
    }

    /// The disk after a cut right before entry `end`, which is not before that of the last call.
    pub(crate) fn disk(&mut self, end: usize, cut: Cut) -> io::Result<Disk> {
        let entries = &self.log.entries;
        let flush = (self.until..end).rev().find(|at| {
            matches!(
                entries[*at],
                Entry::Flush | Entry::Write { flushed: true, .. }
            )
        });
        if let Some(flush) = flush {
            for entry in &entries[self.until..flush] {
                self.durable.apply(self.log, entry)?;
            }
            self.until = flush;
        }
        let mut disk = self.durable.clone();
        let mut random = Random::new(match cut {
            Cut::Some(seed) => seed,
            Cut::Whole | Cut::Bare => 0,
        });
        for entry in &entries[self.until..end] {
            let is_durable = matches!(entry, Entry::Write { through: true, .. });
            let stays = match cut {
                Cut::Whole => true,
                Cut::Bare => is_durable,
                Cut::Some(_) => is_durable || random.below(2) == 0,
            };
            if stays {
                disk.apply(self.log, entry)?;
            }
        }
        Ok(disk)
    }
}
