//! The thread behind a packer: digests, compression, output. The output depends only on the plain
//! bytes, the codec and its level, never on the number of threads.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU32, Ordering};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::digest::{Codec, Digests, Hashing, Meter};
use super::error::{Error, Result};
use super::pipe::Drain;
use super::progress::Progress;

/// Sends all that comes out of `drain` to `out`. If `drain` is cut off, the stream is left
/// unfinished.
pub(super) fn encode(
    mut drain: Drain,
    out: impl Write,
    codec: Codec,
    hashing: Hashing,
    progress: &Progress,
) -> Result<Digests> {
    let is_plain = codec == Codec::Plain;
    let (mut plain, meter) = hashing.meters(is_plain);
    let mut encoder = Encoder::new(
        codec,
        Out {
            inner: out,
            meter,
            progress,
        },
    )
    .map_err(Error::Write)?;
    loop {
        let bytes = drain.fill()?;
        if bytes.is_empty() {
            break;
        }
        plain.update(bytes);
        encoder.write(bytes).map_err(Error::Write)?;
        let length = bytes.len();
        drain.consume(length);
        progress.plain.store(drain.total(), Ordering::Relaxed);
    }
    let mut out = encoder.finish().map_err(Error::Write)?;
    out.flush().map_err(Error::Write)?;
    let packed = out.meter.finish();
    let plain = if is_plain { packed } else { plain.finish() };
    Ok(Digests { plain, packed })
}

/// Output that is measured on its way.
struct Out<'a, W> {
    inner: W,
    meter: Meter,
    progress: &'a Progress,
}

impl<W: Write> Write for Out<'_, W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.meter.update(&buffer[..written]);
        let bytes = self.meter.bytes;
        self.progress.packed.store(bytes, Ordering::Relaxed);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

enum Encoder<W: Write> {
    Plain(W),
    Gzip(GzEncoder<W>),
    Zstd(zstd::Encoder<'static, W>, Workers),
}

/// The workers of all encoders of this process.
static WORKERS: AtomicU32 = AtomicU32::new(0);

/// How many workers of zstd an encoder has: one for each core that has none, and at least one.
/// Given back when it is dropped.
struct Workers {
    of: &'static AtomicU32,
    count: u32,
}

impl Workers {
    fn take(of: &'static AtomicU32, cores: u32) -> Self {
        let mut count = 1;
        let take = |all: u32| {
            count = cores.saturating_sub(all).max(1);
            Some(all + count)
        };
        // It always has a value to set.
        let _previous = of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        Self { of, count }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.of.fetch_sub(self.count, Ordering::Relaxed);
    }
}

impl<W: Write> Encoder<W> {
    fn new(codec: Codec, out: W) -> io::Result<Self> {
        Ok(match codec {
            Codec::Plain => Self::Plain(out),
            Codec::Gzip(level) => Self::Gzip(GzEncoder::new(out, Compression::new(level))),
            Codec::Zstd(level) => {
                let mut encoder = zstd::Encoder::new(out, level)?;
                encoder.include_checksum(true)?;
                // One worker and many give the same bytes; none at all gives others.
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let workers = Workers::take(&WORKERS, u32::try_from(cores).unwrap_or(1));
                encoder.multithread(workers.count)?;
                Self::Zstd(encoder, workers)
            }
        })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.write_all(bytes),
            Self::Gzip(encoder) => encoder.write_all(bytes),
            Self::Zstd(encoder, _) => encoder.write_all(bytes),
        }
    }

    fn finish(self) -> io::Result<W> {
        match self {
            Self::Plain(out) => Ok(out),
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder, _workers) => encoder.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoders_at_once_share_the_cores() {
        static ALL: AtomicU32 = AtomicU32::new(0);
        let first = Workers::take(&ALL, 4);
        let second = Workers::take(&ALL, 4);
        assert_eq!((first.count, second.count), (4, 1));
        drop(first);
        let third = Workers::take(&ALL, 4);
        assert_eq!((third.count, ALL.load(Ordering::Relaxed)), (3, 4));
        drop((second, third));
        assert_eq!(ALL.load(Ordering::Relaxed), 0);
    }
}
