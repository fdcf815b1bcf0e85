//! A bounded pipe of bytes between two threads, with an end mark: a truncated stream is never taken
//! for a complete one. Buffers are reused, so a running pipe allocates nothing.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::error::{Error, Result};

/// The size of a buffer: so large that waking the other thread costs little compared with filling
/// it.
pub(super) const CHUNK: usize = 256 * 1024;
/// How many there are. More would only hold more memory: the slower side decides.
const BUFFERS: usize = 4;

struct Chunk {
    bytes: Box<[u8]>,
    used: usize,
}

/// What goes through: a chunk with bytes, or the end mark, which has none.
type Sent = Option<Chunk>;

/// The side that bytes go in by.
pub(super) struct Feeder {
    full: SyncSender<Sent>,
    empty: Receiver<Chunk>,
    chunk: Option<Chunk>,
    total: u64,
}

/// The side that bytes come out of.
pub(super) struct Drain {
    full: Receiver<Sent>,
    empty: SyncSender<Chunk>,
    chunk: Option<Chunk>,
    at: usize,
    ended: bool,
    total: u64,
}

pub(super) fn pipe() -> (Feeder, Drain) {
    let (full, drained) = sync_channel(BUFFERS);
    let (back, empty) = sync_channel(BUFFERS);
    for _ in 0..BUFFERS {
        let chunk = Chunk {
            bytes: vec![0; CHUNK].into(),
            used: 0,
        };
        back.try_send(chunk).expect("it has room for all of them");
    }
    let feeder = Feeder {
        full,
        empty,
        chunk: None,
        total: 0,
    };
    let drain = Drain {
        full: drained,
        empty: back,
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

    /// A place to put bytes, of one byte at least; then [`Feeder::advance`].
    pub(super) fn spare(&mut self) -> Result<&mut [u8]> {
        if self.chunk.as_ref().is_some_and(|chunk| chunk.used == CHUNK) {
            self.flush()?;
        }
        let chunk = match self.chunk.take() {
            Some(chunk) => chunk,
            None => self.empty.recv().map_err(|_| Error::Cut)?,
        };
        let chunk = self.chunk.insert(chunk);
        Ok(&mut chunk.bytes[chunk.used..])
    }

    /// So many bytes were put there.
    pub(super) fn advance(&mut self, bytes: usize) {
        if let Some(chunk) = &mut self.chunk {
            chunk.used += bytes;
            debug_assert!(chunk.used <= CHUNK, "more than there was room for");
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

    fn flush(&mut self) -> Result<()> {
        match self.chunk.take() {
            Some(chunk) if chunk.used > 0 => self.full.send(Some(chunk)).map_err(|_| Error::Cut),
            _ => Ok(()),
        }
    }

    /// Says that this was all. Without it the other side knows that it was not.
    pub(super) fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.full.send(None).map_err(|_| Error::Cut)
    }
}

impl Drain {
    /// How many bytes came out.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The next bytes, some at least; none: that was all. [`Error::Cut`] if the other side gave up.
    pub(super) fn fill(&mut self) -> Result<&[u8]> {
        let used = self.chunk.as_ref().map_or(0, |chunk| chunk.used);
        if self.at == used && !self.ended {
            if let Some(mut chunk) = self.chunk.take() {
                chunk.used = 0;
                // The other side may have ended, and needs none.
                let _ = self.empty.try_send(chunk);
            }
            self.at = 0;
            self.chunk = self.full.recv().map_err(|_| Error::Cut)?;
            self.ended = self.chunk.is_none();
        }
        let chunk = self.chunk.as_ref();
        Ok(chunk.map_or(&[], |chunk| &chunk.bytes[self.at..chunk.used]))
    }

    /// So many of them are done with.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.at += bytes;
        self.total += bytes as u64;
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
}
