//! The thread before an unpacker: input, digests, decompression. The first bytes determine the
//! compression. The plain bytes are not interpreted here.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, BufRead, Read};
use std::sync::atomic::Ordering;

use flate2::bufread::GzDecoder;

use super::digest::{Digests, Hashing, Meter};
use super::error::{Error, Result};
use super::pipe::{CHUNK, Feeder};
use super::progress::Progress;
use super::s2::S2Decoder;

/// The largest window of zstd that is accepted, 128 MiB, as a power of two: what `zstd --ultra -22`
/// makes.
const WINDOW_LOG: u32 = 27;
/// Before so many plain bytes the ratio is not looked at: a small archive of zeros does no harm.
const RATIO_FROM: u64 = 64 << 20;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// A skippable frame: sixteen of them, by the low half of the first byte.
const ZSTD_SKIPPABLE: &[u8] = &[0x2a, 0x4d, 0x18];
const SNAPPY: &[u8] = b"\xff\x06\x00\x00sNaPpY";
const S2: &[u8] = b"\xff\x06\x00\x00S2sTwO";

/// Sends all of the plain bytes of `input` into `feeder`. On an error the other side sees that it
/// was cut off.
pub(super) fn decode(
    input: impl Read,
    mut feeder: Feeder,
    ratio: u64,
    hashing: Hashing,
    progress: &Progress,
) -> Result<Digests> {
    let mut input = Input::new(input, progress);
    let codec = input.codec().map_err(|error| damaged(&error))?;
    let is_plain = matches!(codec, Sort::Plain);
    let (mut plain, packed) = hashing.meters(is_plain);
    input.measure(packed);
    match codec {
        Sort::Plain => pump(&mut feeder, &mut plain, ratio, progress, &mut input)?,
        Sort::Gzip => loop {
            let mut member = GzDecoder::new(&mut input);
            pump(&mut feeder, &mut plain, ratio, progress, &mut member)?;
            drop(member);
            if !input.another(GZIP)? {
                break;
            }
        },
        Sort::Zstd => {
            let mut frames = zstd::Decoder::with_buffer(&mut input).map_err(Error::Read)?;
            frames.window_log_max(WINDOW_LOG).map_err(Error::Read)?;
            pump(&mut feeder, &mut plain, ratio, progress, &mut frames)?;
        }
        Sort::S2 => {
            let mut blocks = S2Decoder::new(&mut input);
            pump(&mut feeder, &mut plain, ratio, progress, &mut blocks)?;
        }
    }
    let packed = input.meter.finish();
    let plain = if is_plain { packed } else { plain.finish() };
    feeder.finish()?;
    Ok(Digests { plain, packed })
}

/// Moves all that `from` has into the pipe.
fn pump(
    feeder: &mut Feeder,
    plain: &mut Meter,
    ratio: u64,
    progress: &Progress,
    from: &mut impl Read,
) -> Result<()> {
    loop {
        let spare = feeder.spare()?;
        let read = match from.read(spare) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(damaged(&error)),
        };
        plain.update(&spare[..read]);
        feeder.advance(read);
        let total = feeder.total();
        progress.plain.store(total, Ordering::Relaxed);
        if total > RATIO_FROM && total / ratio > progress.packed() {
            return Err(Error::Limit {
                what: "its compression ratio",
                limit: ratio,
            });
        }
    }
}

/// The cause of a decoder's error: the source failed, or its bytes are bad.
fn damaged(error: &io::Error) -> Error {
    let source = error.get_ref().and_then(|inner| inner.downcast_ref());
    match source {
        Some(SourceFailed(error)) => Error::Read(io::Error::new(error.kind(), error.to_string())),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            Error::Codec("its compressed stream is incomplete".to_owned())
        }
        None => Error::Codec(error.to_string()),
    }
}

/// An error of the source itself, on its way through a decoder.
#[derive(Debug)]
struct SourceFailed(io::Error);

impl fmt::Display for SourceFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for SourceFailed {}

enum Sort {
    Plain,
    Gzip,
    Zstd,
    S2,
}

/// Input that is measured as it is taken.
struct Input<'a, R> {
    inner: R,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    ended: bool,
    meter: Meter,
    progress: &'a Progress,
}

impl<'a, R: Read> Input<'a, R> {
    fn new(inner: R, progress: &'a Progress) -> Self {
        Self {
            inner,
            buffer: vec![0; CHUNK].into(),
            at: 0,
            end: 0,
            ended: false,
            meter: Meter::new(false),
            progress,
        }
    }

    /// Measures with this meter. Until now only the first bytes were looked at, and none was taken.
    fn measure(&mut self, meter: Meter) {
        self.meter = meter;
        self.meter.update(&self.buffer[..self.end]);
    }

    /// Reads once, behind what is there.
    fn more(&mut self) -> io::Result<()> {
        loop {
            match self.inner.read(&mut self.buffer[self.end..]) {
                Ok(read) => {
                    self.meter.update(&self.buffer[self.end..self.end + read]);
                    self.end += read;
                    self.ended |= read == 0;
                    let bytes = self.meter.bytes;
                    self.progress.packed.store(bytes, Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(io::Error::other(SourceFailed(error))),
            }
        }
    }

    /// Looks at the first bytes.
    fn codec(&mut self) -> io::Result<Sort> {
        while self.end < SNAPPY.len() && !self.ended {
            self.more()?;
        }
        let head = &self.buffer[..self.end];
        let is_skippable = head.len() >= 4 && head[0] >> 4 == 5 && head[1..4] == *ZSTD_SKIPPABLE;
        Ok(if head.starts_with(GZIP) {
            Sort::Gzip
        } else if head.starts_with(ZSTD) || is_skippable {
            Sort::Zstd
        } else if head.starts_with(SNAPPY) || head.starts_with(S2) {
            Sort::S2
        } else {
            Sort::Plain
        })
    }

    /// Whether another part follows that begins like this. Zeros up to the end, as tapes have them,
    /// are not one.
    fn another(&mut self, magic: &[u8]) -> Result<bool> {
        let failed = |error: io::Error| damaged(&error);
        if self.end - self.at < magic.len() {
            self.buffer.copy_within(self.at..self.end, 0);
            (self.at, self.end) = (0, self.end - self.at);
            while self.end < magic.len() && !self.ended {
                self.more().map_err(failed)?;
            }
        }
        if self.buffer[self.at..self.end].starts_with(magic) {
            return Ok(true);
        }
        loop {
            let bytes = self.fill_buf().map_err(failed)?;
            if bytes.is_empty() {
                return Ok(false);
            }
            if bytes.iter().any(|&byte| byte != 0) {
                let what = "there is data after the end of its compressed stream";
                return Err(Error::Codec(what.to_owned()));
            }
            let length = bytes.len();
            self.consume(length);
        }
    }
}

impl<R: Read> BufRead for Input<'_, R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.at == self.end && !self.ended {
            (self.at, self.end) = (0, 0);
            self.more()?;
        }
        Ok(&self.buffer[self.at..self.end])
    }

    fn consume(&mut self, bytes: usize) {
        self.at += bytes;
    }
}

impl<R: Read> Read for Input<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let from = self.fill_buf()?;
        let fits = from.len().min(into.len());
        into[..fits].copy_from_slice(&from[..fits]);
        self.consume(fits);
        Ok(fits)
    }
}
