//! A bounded pipe of bytes between two threads, with an end mark: a truncated stream is never taken
//! for a complete one. Buffers are reused, so a running pipe allocates nothing large.
//!
//! Two things need no copy. What came out can be lent to a job, which either thread does when it
//! would wait for the other (`exchange`). Content of files can go in as open files, which the side
//! that takes the bytes out reads into their place.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::error::{Error, Result, shown};
use crate::sys::{self, OpenFile, Xattrs};

mod exchange;

pub(super) use self::exchange::Jobs;
use self::exchange::{Exchange, Feed};

/// The size of a buffer: so large that waking the other thread costs little compared with filling
/// it.
pub(super) const CHUNK: usize = 256 * 1024;
/// How many there are: some for each side, and those that are lent. More would only hold more
/// memory: the slowest side decides.
const BUFFERS: usize = 6;
/// How many files wait in one buffer to be read. It bounds the open files.
const PLACES: usize = 32;

type Buffer = Box<[u8]>;

/// A buffer on its way.
struct Filled {
    buffer: Buffer,
    used: usize,
    /// How much of it is used when it is full.
    size: usize,
    /// Parts of it that are still to be read.
    places: Vec<Place>,
}

/// Where a part of a file goes.
struct Place {
    range: Range<usize>,
    file: Arc<OpenFile>,
    /// Where the part begins in the file.
    at: u64,
    /// The file's path in the archive, for messages.
    path: Arc<[u8]>,
}

/// A buffer that came out. Its last user gives it back.
struct Chunk {
    buffer: Buffer,
    used: usize,
    exchange: Arc<Exchange>,
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.exchange.give_back(std::mem::take(&mut self.buffer));
    }
}

/// Bytes that came out, and stay for as long as this exists.
pub(super) struct Lent {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

impl Lent {
    /// Whether both hold the same buffer.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.chunk, &other.chunk)
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.chunk.buffer[self.range.clone()]
    }
}

/// The side that bytes go in by.
pub(super) struct Feeder {
    exchange: Arc<Exchange>,
    filling: Option<Filled>,
    total: u64,
}

/// The side that bytes come out of.
pub(super) struct Drain {
    exchange: Arc<Exchange>,
    chunk: Option<Arc<Chunk>>,
    at: usize,
    ended: bool,
    total: u64,
}

pub(super) fn pipe() -> (Feeder, Drain) {
    let buffers = (0..BUFFERS).map(|_| vec![0; CHUNK].into());
    let exchange = Arc::new(Exchange::new(buffers.collect()));
    let feeder = Feeder {
        exchange: Arc::clone(&exchange),
        filling: None,
        total: 0,
    };
    let drain = Drain {
        exchange,
        chunk: None,
        at: 0,
        ended: false,
        total: 0,
    };
    (feeder, drain)
}

impl Feeder {
    /// How many bytes went in.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// A buffer with room for one byte at least.
    fn room(&mut self) -> Result<&mut Filled> {
        if self.filling.as_ref().is_some_and(|it| it.used == it.size) {
            self.flush()?;
        }
        let filling = match self.filling.take() {
            Some(filling) => filling,
            None => self.next()?,
        };
        Ok(self.filling.insert(filling))
    }

    /// An empty buffer, shortened if it is to end elsewhere than the one before.
    fn next(&self) -> Result<Filled> {
        let (buffer, shift) = self.exchange.empty()?;
        let past = (self.total + CHUNK as u64 - shift) % CHUNK as u64;
        Ok(Filled {
            buffer,
            used: 0,
            size: CHUNK - usize::try_from(past).expect("less than a buffer"),
            places: Vec::new(),
        })
    }

    /// A place to put bytes, of one byte at least; then [`Feeder::advance`].
    pub(super) fn spare(&mut self) -> Result<&mut [u8]> {
        let filling = self.room()?;
        Ok(&mut filling.buffer[filling.used..filling.size])
    }

    /// So many bytes were put there.
    pub(super) fn advance(&mut self, bytes: usize) {
        if let Some(filling) = &mut self.filling {
            filling.used += bytes;
            debug_assert!(filling.used <= filling.size, "more than there was room for");
            self.total += bytes as u64;
        }
    }

    /// Puts in all of it.
    pub(super) fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let spare = self.spare()?;
            let fits = spare.len().min(bytes.len());
            spare[..fits].copy_from_slice(&bytes[..fits]);
            self.advance(fits);
            bytes = &bytes[fits..];
        }
        Ok(())
    }

    /// Whether a file can be put in as such.
    pub(super) fn takes_file(&self) -> bool {
        let places = self.filling.as_ref().map_or(0, |it| it.places.len());
        places < PLACES
    }

    /// Puts in the first `size` bytes of a file, which the other side reads. There
    /// [`Error::Shrunk`] tells that the file had less.
    pub(super) fn file(&mut self, path: &[u8], file: OpenFile, size: usize) -> Result<()> {
        let (file, path) = (Arc::new(file), Arc::from(path));
        let mut done = 0;
        while done < size {
            let filling = self.room()?;
            let fits = (size - done).min(filling.size - filling.used);
            filling.places.push(Place {
                range: filling.used..filling.used + fits,
                file: Arc::clone(&file),
                at: done as u64,
                path: Arc::clone(&path),
            });
            self.advance(fits);
            done += fits;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        match self.filling.take() {
            Some(it) if it.used > 0 => self.exchange.send(it),
            _ => Ok(()),
        }
    }

    /// Says that this was all. Without it the other side knows that it was not.
    pub(super) fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.exchange.end(Feed::Complete)
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        // Unless it said before that this was all.
        let _ = self.exchange.end(Feed::CutOff);
    }
}

impl Drain {
    /// Work for threads that would wait.
    pub(super) fn jobs(&self) -> Jobs {
        Jobs(Arc::clone(&self.exchange))
    }

    /// How many bytes came out.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The next bytes, some at least; none: that was all. [`Error::Cut`] if the other side gave up.
    pub(super) fn fill(&mut self) -> Result<&[u8]> {
        let used = self.chunk.as_ref().map_or(0, |chunk| chunk.used);
        if self.at == used && !self.ended {
            self.at = 0;
            // Given back first: the other side may wait for it.
            self.chunk = None;
            let filled = self.exchange.full()?;
            self.ended = filled.is_none();
            self.chunk = filled.map(|it| self.chunk_of(it)).transpose()?;
        }
        let chunk = self.chunk.as_ref();
        Ok(chunk.map_or(&[], |chunk| &chunk.buffer[self.at..chunk.used]))
    }

    fn chunk_of(&self, mut filled: Filled) -> Result<Arc<Chunk>> {
        for place in &filled.places {
            place.read(&mut filled.buffer[place.range.clone()])?;
        }
        Ok(Arc::new(Chunk {
            buffer: filled.buffer,
            used: filled.used,
            exchange: Arc::clone(&self.exchange),
        }))
    }

    /// So many of them are done with.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.at += bytes;
        self.total += bytes as u64;
    }

    /// The next byte goes to `at` of a file, and many that follow go behind it. Buffers that are
    /// not yet filled will end at multiples of [`CHUNK`] of that file: the filesystem then takes
    /// each in few large folios.
    pub(super) fn align(&self, at: u64) {
        let chunk = CHUNK as u64;
        self.exchange
            .shift((self.total + chunk - at % chunk) % chunk);
    }

    /// So many of the bytes that [`Drain::fill`] returned. The other side misses their buffer for
    /// as long as they are kept.
    pub(super) fn lend(&mut self, bytes: usize) -> Lent {
        let range = self.at..self.at + bytes;
        self.consume(bytes);
        let chunk = self.chunk.as_ref().expect("bytes are in one");
        debug_assert!(range.end <= chunk.used, "more than there was");
        Lent {
            chunk: Arc::clone(chunk),
            range,
        }
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        self.exchange.leave();
    }
}

impl Place {
    fn read(&self, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&*self.file, &mut into[done..], self.at + done as u64) {
                Ok(0) => {
                    let path = shown(&self.path);
                    return Err(Error::Shrunk { path });
                }
                Ok(read) => done += read,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    return Err(sys::Error::new("pread", self.file.subject(), errno).into());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(mut drain: Drain) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        loop {
            let bytes = drain.fill()?;
            if bytes.is_empty() {
                return Ok(all);
            }
            // Not as much as there is.
            let take = bytes.len().min(100_000);
            all.extend_from_slice(&bytes[..take]);
            drain.consume(take);
        }
    }

    #[test]
    fn all_comes_out_in_order_and_what_is_cut_off_says_so() {
        let content: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        for finish in [true, false] {
            let (mut feeder, drain) = pipe();
            let collected = std::thread::scope(|scope| {
                let reader = scope.spawn(|| collect(drain));
                feeder.write(&content).expect("written");
                if finish {
                    feeder.finish().expect("finished");
                } else {
                    drop(feeder);
                }
                reader.join().expect("no panic")
            });
            match collected {
                Ok(bytes) => assert!(finish && bytes == content),
                Err(error) => assert!(!finish && matches!(error, Error::Cut), "{error}"),
            }
        }
        let (mut feeder, drain) = pipe();
        drop(drain);
        let written = feeder.write(&content);
        assert!(matches!(written, Err(Error::Cut)));
    }

    #[test]
    fn content_of_files_comes_out_in_its_place_or_the_pipe_fails() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = crate::sys::Dir::open(folder.path()).expect("it opens");
        let content: Vec<u8> = (0..100_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        dir.write_new("f", &content).expect("write");
        let open = || {
            let fd = dir.open_file_beneath("f", rustix::fs::OFlags::RDONLY, 0);
            OpenFile::new(fd.expect("open"), folder.path().join("f"))
        };
        let size = content.len();
        // The third does not fit in the first buffer.
        for (last, result) in [(size, true), (size + 1, false)] {
            let (mut feeder, drain) = pipe();
            let collected = std::thread::scope(|scope| {
                let reader = scope.spawn(|| collect(drain));
                for size in [size, 0, size, last] {
                    feeder.write(b"head").expect("written");
                    feeder.file(b"f", open(), size).expect("put in");
                }
                // The other side may have failed.
                let _ = feeder.finish();
                reader.join().expect("no panic")
            });
            let each = [b"head", &*content].concat();
            let whole = [&*each, b"head", &each, &each].concat();
            match collected {
                Ok(bytes) => assert!(result && bytes == whole),
                Err(error) => assert!(
                    !result && matches!(&error, Error::Shrunk { path } if path == "f"),
                    "{error}"
                ),
            }
        }
    }

    #[test]
    fn files_that_wait_are_bounded() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = crate::sys::Dir::open(folder.path()).expect("it opens");
        dir.write_new("f", b"x").expect("write");
        let (mut feeder, drain) = pipe();
        let mut count = 0;
        while feeder.takes_file() {
            let fd = dir.open_file_beneath("f", rustix::fs::OFlags::RDONLY, 0);
            let file = OpenFile::new(fd.expect("open"), folder.path().join("f"));
            feeder.file(b"f", file, 1).expect("put in");
            count += 1;
        }
        assert_eq!(count, PLACES);
        feeder.finish().expect("finished");
        assert_eq!(collect(drain).expect("collected"), vec![b'x'; PLACES]);
    }

    #[test]
    fn buffers_end_where_a_file_needs_it() {
        let content: Vec<u8> = (0..30 * CHUNK)
            .map(|n| (n % 251).to_le_bytes()[0])
            .collect();
        // Where files begin in the stream, and where the rest of them begins in the file.
        let files = [
            (0, 0),
            (512, 0),
            (9 * CHUNK + 1024, 64 << 10),
            (20 * CHUNK, 3),
        ];
        let (mut feeder, mut drain) = pipe();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                feeder.write(&content).expect("written");
                feeder.finish().expect("finished");
            });
            for (number, &(start, at)) in files.iter().enumerate() {
                let end = files.get(number + 1).map_or(content.len(), |next| next.0);
                let mut total = usize::try_from(drain.total()).expect("small");
                assert_eq!(total, start);
                drain.align(at as u64);
                while total < end {
                    let bytes = drain.fill().expect("bytes");
                    let length = bytes.len().min(end - total);
                    assert!(bytes[..length] == content[total..total + length]);
                    drain.consume(length);
                    // Those before were filled when it was not yet known; one of them is short.
                    if total > start + (BUFFERS + 1) * CHUNK {
                        assert_eq!((total - start + at) % CHUNK, 0, "{number}");
                    }
                    total += length;
                }
            }
            assert!(drain.fill().expect("the end").is_empty());
        });
    }

    #[test]
    fn what_is_lent_stays_and_its_buffer_comes_back() {
        let (mut feeder, mut drain) = pipe();
        let fill = |feeder: &mut Feeder, byte| feeder.write(&vec![byte; CHUNK]).expect("written");
        for byte in 0..2 {
            fill(&mut feeder, byte);
        }
        assert_eq!(drain.fill().expect("bytes").len(), CHUNK);
        let (first, rest) = (drain.lend(10), drain.lend(CHUNK - 10));
        assert!(first.is_beside(&rest));
        feeder.flush().expect("sent");
        drain.fill().expect("bytes");
        let next = drain.lend(CHUNK);
        assert!(!first.is_beside(&next) && next.iter().all(|&byte| byte == 1));
        // All buffers but the two that are lent.
        for byte in 2..BUFFERS {
            fill(&mut feeder, u8::try_from(byte).expect("small"));
        }
        assert_eq!(feeder.exchange.free(), 0);
        assert!(first.iter().chain(&*rest).all(|&byte| byte == 0));
        drop(first);
        assert_eq!(feeder.exchange.free(), 0);
        drop(rest);
        assert_eq!(feeder.exchange.free(), 1);
    }
}
