//! Where content comes from: a trait that the bucket implements here, and that other nodes can
//! implement, too. A source is not trusted: `fetch` verifies everything that it gives.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;

use hyper::body::Bytes;

use super::commit::{check_format, read_manifest, read_name};
use super::download::Download;
use super::error::{Error, Result};
use super::keys::Keys;
use super::object::{
    FOOTER, FOOTER_BYTES, Footer, HEAD, INDEX, Index, TABLE, may_unpack, most_index, parse_head,
};
use super::record::{LayerRef, Manifest, NameRecord};
use super::store::Store;
use crate::archive::toc::{Table, Want, end_record, frames_of};
use crate::model::{ArtifactId, Reference, Tenant};
use crate::tree::Stop;

/// The largest window of a compressed table, as a power of two: a reader keeps so much in memory.
/// Level 3, which an upload uses, has 2 MiB.
const WINDOW_LOG: u32 = 23;
/// An object of at most so many bytes is read at once.
const WHOLE: u64 = 16 << 20;
/// The longest range that is asked for at once.
const RANGE: u64 = 16 << 20;
/// A gap between wanted frames is read, too, if it has no more bytes: a request costs more.
const GAP: u64 = 64 << 10;
/// How many ranges travel at once, and how many bytes each may be ahead.
const PARALLEL: usize = 3;
const AHEAD: usize = 6 << 20;

/// What a name shows.
#[derive(Debug)]
pub struct Found {
    /// The name's record. Its number is the `base` of a fork.
    pub record: NameRecord,
    /// The manifest.
    pub manifest: Manifest,
}

/// The answer to a question about a name.
#[derive(Debug)]
pub enum Resolved {
    /// Content.
    Found(Box<Found>),
    /// The artifact that the caller has. Its manifest is not read.
    Same(Box<NameRecord>),
    /// Nothing.
    Nothing {
        /// The number of the record that says so: the `base` of a fork. 0: there is no record.
        number: u64,
        /// The number of the last clear; 0: none is known. Content that began before is not used.
        cleared: u64,
        /// The tenant exceeded its budget: the content was not lost.
        evicted: bool,
    },
}

/// A source of content.
pub trait Source: Send + Sync {
    /// The source as a message may show it.
    fn name(&self) -> String;

    /// What a name shows. `has`: the artifact that the caller has.
    fn resolve(
        &self,
        tenant: &Tenant,
        reference: &Reference,
        has: Option<ArtifactId>,
    ) -> Result<Resolved>;

    /// Opens a layer and writes its table into this empty file.
    fn open(
        &self,
        tenant: &Tenant,
        layer: &LayerRef,
        table: &File,
        stop: Stop<'_>,
    ) -> Result<Box<dyn Content>>;

    /// A layer that it gave was refused: it does not match its digest. Other readers should not
    /// meet the same damage, if that is simple to tell them.
    fn damaged(&self, _tenant: &Tenant, _layer: &LayerRef, _error: &Error) {}
}

/// A layer of a source.
pub trait Content {
    /// A stream of frames that hold what is wanted, in any division, with its end record. It ends
    /// early if the source fails.
    fn frames(&self, wants: &[Want]) -> Result<Frames>;
}

/// A stream of frames.
pub struct Frames {
    /// The stream.
    pub stream: Box<dyn Read + Send>,
    /// Its bytes, end record included.
    pub bytes: u64,
}

/// The tier as a source.
#[derive(Debug, Clone)]
pub struct Bucket {
    store: Store,
}

impl Bucket {
    /// The source that this store is.
    #[must_use]
    pub fn new(store: Store) -> Self {
        Self { store }
    }

    /// Whether this version can read a tenant's part.
    pub fn check_format(&self, tenant: &Tenant) -> Result<()> {
        check_format(&self.store, &Keys::new(tenant), false).map(|_| ())
    }
}

impl Source for Bucket {
    fn name(&self) -> String {
        self.store.to_string()
    }

    fn resolve(
        &self,
        tenant: &Tenant,
        reference: &Reference,
        has: Option<ArtifactId>,
    ) -> Result<Resolved> {
        let keys = Keys::new(tenant);
        // A name that changes while its manifest is collected is read again.
        for _ in 0..3 {
            let Some((record, _)) = read_name(&self.store, &keys, tenant, reference)? else {
                return Ok(Resolved::Nothing {
                    number: 0,
                    cleared: 0,
                    evicted: false,
                });
            };
            let artifact = record.content().map(|(artifact, ..)| artifact);
            if artifact.is_some() && artifact == has {
                return Ok(Resolved::Same(Box::new(record)));
            }
            match read_manifest(&self.store, &keys, tenant, &record) {
                Ok(None) => {
                    return Ok(Resolved::Nothing {
                        number: record.number,
                        cleared: record.cleared,
                        evicted: record.evicted,
                    });
                }
                Ok(Some(manifest)) => {
                    return Ok(Resolved::Found(Box::new(Found { record, manifest })));
                }
                Err(Error::Missing { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let key = keys.name(reference);
        Err(Error::corrupt(key, "its manifest does not exist"))
    }

    fn open(
        &self,
        tenant: &Tenant,
        layer: &LayerRef,
        table: &File,
        stop: Stop<'_>,
    ) -> Result<Box<dyn Content>> {
        let key = Keys::new(tenant).layer(&layer.digest, layer.upload);
        let wrong = |cause: String| Error::corrupt(&key, cause);
        if layer.bytes <= WHOLE {
            let whole = self.store.range(&key, 0..layer.bytes)?;
            let tail = usize::try_from(layer.tail).map_err(|_| wrong("it has no tail".into()))?;
            let tail = whole
                .get(tail..)
                .ok_or_else(|| wrong("it has no tail".into()))?;
            let index = read_tail(tail, layer, table, stop).map_err(|error| error.of(&key))?;
            return Ok(Box::new(Object {
                store: self.store.clone(),
                key,
                index,
                whole: Some(whole),
            }));
        }
        let tail = self.store.stream(&key, layer.tail..layer.bytes, AHEAD);
        let index = read_tail(tail, layer, table, stop).map_err(|error| error.of(&key))?;
        Ok(Box::new(Object {
            store: self.store.clone(),
            key,
            index,
            whole: None,
        }))
    }
}

/// Why a tail was not read.
enum TailError {
    Wrong(String),
    Io(io::Error),
    Layer(crate::archive::Error),
}

impl TailError {
    fn of(self, key: &str) -> Error {
        match self {
            Self::Wrong(cause) => Error::corrupt(key, cause),
            Self::Io(error) => match super::upload::ours(crate::archive::Error::Read(error)) {
                Error::Layer(error) => Error::corrupt(key, error),
                error => error,
            },
            Self::Layer(error) => match super::upload::ours(error) {
                Error::Layer(error @ crate::archive::Error::Write(_)) => Error::Layer(error),
                Error::Layer(error) => Error::corrupt(key, error),
                error => error,
            },
        }
    }
}

impl From<String> for TailError {
    fn from(cause: String) -> Self {
        Self::Wrong(cause)
    }
}

impl From<io::Error> for TailError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads table, index and footer of an object. The table's digest is `Table::open`'s to check.
///
/// Nothing here is known to be true yet. What is written to disk is bounded by what came. What is
/// held in memory is bounded by the table that came, and by the content for which the pool has
/// space.
fn read_tail(
    mut tail: impl Read,
    layer: &LayerRef,
    table: &File,
    stop: Stop<'_>,
) -> Result<Index, TailError> {
    let mut head = [0; HEAD];
    tail.read_exact(&mut head)?;
    let packed = parse_head(head, TABLE)?;
    let mut input = tail.by_ref().take(packed);
    let compressed = packed < layer.table;
    let received = if compressed {
        let came = Cell::new(0);
        let mut plain = zstd::stream::read::Decoder::new(Metered(&mut input, &came))?;
        plain.window_log_max(WINDOW_LOG)?;
        let unpacked = Unpacked {
            plain,
            bytes: 0,
            came: &came,
        };
        Table::receive(unpacked, table, layer.table, stop)
    } else {
        Table::receive(&mut input, table, layer.table, stop)
    };
    received.map_err(TailError::Layer)?;
    if input.limit() > 0 {
        return Err("its table is followed by something else".to_owned().into());
    }
    tail.read_exact(&mut head)?;
    let length = parse_head(head, INDEX)?;
    if length > most_index(layer.content, layer.table) {
        return Err("its index has more frames than its table can have"
            .to_owned()
            .into());
    }
    let (index, digest) = Index::read(&mut tail, length)?;
    let mut end = Vec::new();
    tail.take(FOOTER_BYTES + 1).read_to_end(&mut end)?;
    if let Some(head) = end.first_chunk::<HEAD>() {
        parse_head(*head, FOOTER)?;
    }
    let footer = Footer::parse(&end, layer.bytes)?;
    let same = footer.digest == layer.digest && footer.tail == layer.tail;
    if !same || footer.packed != packed || footer.compressed != compressed {
        return Err("its footer is of another object".to_owned().into());
    }
    if footer.table != layer.table {
        return Err("its table has another length than the manifest says"
            .to_owned()
            .into());
    }
    index.check(length, digest, &footer)?;
    Ok(index)
}

/// Counts what comes.
struct Metered<'a, R>(R, &'a Cell<u64>);

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(into)?;
        self.1.set(self.1.get() + read as u64);
        Ok(read)
    }
}

/// A compressed table. Fails where it grows too much for what came.
struct Unpacked<'a, R> {
    plain: R,
    bytes: u64,
    came: &'a Cell<u64>,
}

impl<R: Read> Read for Unpacked<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.plain.read(into)?;
        self.bytes += read as u64;
        if may_unpack(self.came.get(), self.bytes) {
            return Ok(read);
        }
        let why = "its table is compressed more than a table can be";
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    }
}

/// An object whose index is known.
struct Object {
    store: Store,
    key: String,
    index: Index,
    whole: Option<Bytes>,
}

impl Content for Object {
    fn frames(&self, wants: &[Want]) -> Result<Frames> {
        let frames = frames_of(self.index.frames(), wants);
        let (ranges, count) = ranges(&self.index, &frames);
        let end = end_record(count);
        let sum: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let bytes = sum + end.len() as u64;
        let stream: Box<dyn Read + Send> = match &self.whole {
            Some(whole) => {
                let mut parts = VecDeque::new();
                for range in ranges {
                    let place = |at| usize::try_from(at).unwrap_or(usize::MAX);
                    let range = place(range.start)..place(range.end);
                    if whole.get(range.clone()).is_none() {
                        return Err(Error::corrupt(&self.key, "a frame is beyond its end"));
                    }
                    parts.push_back(whole.slice(range));
                }
                parts.push_back(Bytes::from(end));
                Box::new(Slices(parts))
            }
            None => Box::new(Ahead {
                store: self.store.clone(),
                key: self.key.clone(),
                waiting: ranges.into(),
                running: VecDeque::new(),
                end: io::Cursor::new(end),
            }),
        };
        Ok(Frames { stream, bytes })
    }
}

/// The ranges of these frames, and how many frames are in them.
fn ranges(index: &Index, frames: &[usize]) -> (Vec<Range<u64>>, u64) {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for &frame in frames {
        let Some((first, end)) = found.last_mut() else {
            found.push((frame, frame + 1));
            continue;
        };
        let gap = index.bytes_of(*end, frame);
        let all = index.bytes_of(*first, frame + 1);
        if gap.end - gap.start <= GAP && all.end - all.start <= RANGE {
            *end = frame + 1;
        } else {
            found.push((frame, frame + 1));
        }
    }
    let count = found.iter().map(|(first, end)| (end - first) as u64).sum();
    let ranges = found.iter().map(|&(first, end)| index.bytes_of(first, end));
    (ranges.collect(), count)
}

struct Slices(VecDeque<Bytes>);

impl Read for Slices {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while let Some(part) = self.0.front_mut() {
            if part.is_empty() {
                self.0.pop_front();
                continue;
            }
            let length = part.len().min(into.len());
            into[..length].copy_from_slice(&part.split_to(length));
            return Ok(length);
        }
        Ok(0)
    }
}

/// Reads ranges in order, and requests the next ones in advance.
struct Ahead {
    store: Store,
    key: String,
    waiting: VecDeque<Range<u64>>,
    running: VecDeque<Download>,
    end: io::Cursor<Vec<u8>>,
}

impl Read for Ahead {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            while self.running.len() < PARALLEL {
                let Some(range) = self.waiting.pop_front() else {
                    break;
                };
                self.running
                    .push_back(self.store.stream(&self.key, range, AHEAD));
            }
            let Some(first) = self.running.front_mut() else {
                return self.end.read(into);
            };
            match first.read(into)? {
                0 => drop(self.running.pop_front()),
                read => return Ok(read),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::toc::FrameAt;

    #[test]
    fn ranges_join_what_is_near_and_are_bounded() {
        let frame = |file: u64, packed: u32| FrameAt {
            file,
            offset: 0,
            plain: 1,
            packed,
        };
        let mib = 1 << 20;
        let sizes = [mib, 10_000, mib, 100_000, mib];
        let frames: Vec<FrameAt> = (0..)
            .zip(sizes)
            .map(|(file, size)| frame(file, size))
            .collect();
        let index = Index::new(frames);
        let (found, count) = ranges(&index, &[0, 2]);
        assert_eq!((found, count), (vec![index.bytes_of(0, 3)], 3));
        let (found, count) = ranges(&index, &[2, 4]);
        assert_eq!((found.len(), count), (2, 2));
        let index = Index::new((0..64).map(|file| frame(file, mib)).collect());
        let all: Vec<usize> = (0..64).collect();
        let (found, count) = ranges(&index, &all);
        assert_eq!(count, 64);
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(found.iter().all(|range| range.end - range.start <= RANGE));
        assert_eq!(
            (found[0].start, found[4].end),
            (0, index.bytes_of(0, 64).end)
        );
    }
}
