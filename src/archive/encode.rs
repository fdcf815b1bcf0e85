//! The thread behind a packer: content of small files, digests, compression, output. The output
//! depends only on the plain bytes, the codec and its level, never on the number of threads.

use std::io::{self, Write};
use std::sync::atomic::Ordering;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::cores::{CORES, Cores, Workers};
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
    Zstd(zstd::Encoder<'static, W>, Workers<'static>),
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
                let workers = CORES.workers(Cores::all());
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
