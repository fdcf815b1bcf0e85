//! The records around frames: zstd skippable frames with a body of our own. The receiver interprets
//! the pieces in a frame.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use super::super::error::{Error, Result};
use super::piece::{CHUNK, Sha256Sum};

/// A skippable frame's magic number, little-endian.
const MAGIC: [u8; 4] = 0x184D_2A5B_u32.to_le_bytes();
const TABLE: u8 = 1;
const FRAME: u8 = 2;
const OFFER: u8 = 3;
const END: u8 = 5;
/// How many bytes of a record of another kind are passed over.
const MOST_SKIPPED: u32 = 16 << 20;
const FRAME_LENGTH: u32 = 57;
/// Bytes of a frame's record, its head included.
pub(super) const FRAME_RECORD: usize = 65;
const OFFER_LENGTH: u32 = 50;
const END_LENGTH: u32 = 9;

/// What a holder has of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// All of it.
    Whole,
    /// Some of its content.
    Filling,
}

/// What a holder tells before it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// SHA-256 of the table.
    pub table: [u8; 32],
    /// How much of the layer the holder has.
    pub state: State,
    /// Bytes of the table.
    pub table_bytes: u64,
    /// Bytes of content in the whole layer.
    pub bytes: u64,
}

/// What precedes a zstd frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) table: Sha256Sum,
    pub(super) file: u64,
    pub(super) offset: u64,
    pub(super) plain: u32,
    pub(super) packed: u32,
}

/// A record as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    Frame(Frame),
    Offer(Offer),
    /// How many frames there were.
    End(u64),
    /// One that this version passes over.
    Other,
}

fn head(out: &mut Vec<u8>, length: u32, kind: u8) {
    out.extend(MAGIC);
    out.extend(length.to_le_bytes());
    out.push(kind);
}

impl Frame {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(65);
        head(&mut out, FRAME_LENGTH, FRAME);
        out.extend(self.table);
        out.extend(self.file.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        out.extend(self.plain.to_le_bytes());
        out.extend(self.packed.to_le_bytes());
        out
    }
}

impl Offer {
    /// The record of it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(58);
        head(&mut out, OFFER_LENGTH, OFFER);
        out.extend(self.table);
        out.push(match self.state {
            State::Whole => 1,
            State::Filling => 2,
        });
        out.extend(self.table_bytes.to_le_bytes());
        out.extend(self.bytes.to_le_bytes());
        out
    }
}

pub(super) fn end(frames: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(17);
    head(&mut out, END_LENGTH, END);
    out.extend(frames.to_le_bytes());
    out
}

/// Begins a record that holds a table of so many bytes, which are to follow.
pub(super) fn table(bytes: u64, out: &mut impl Write) -> Result<()> {
    let length = u32::try_from(bytes + 1).map_err(|_| Error::Limit {
        what: "the length of its table",
        limit: u64::from(u32::MAX) - 1,
    })?;
    let mut record = Vec::new();
    head(&mut record, length, TABLE);
    out.write_all(&record).map_err(Error::Write)
}

/// The longest zstd frame of `plain` bytes (ZSTD_COMPRESSBOUND, rounded up).
pub(super) fn most_packed(plain: u64) -> u64 {
    plain + (plain >> 7) + 1024
}

/// How many bytes [`noted`] needs of a record that begins like this.
pub(super) fn head_length(begun: &[u8]) -> usize {
    match begun.get(8) {
        Some(&FRAME) => FRAME_RECORD,
        _ => 9,
    }
}

/// The frame that this record announces, and how many bytes follow that belong to either of them.
pub(super) fn noted(head: &[u8]) -> Result<(Option<Frame>, u64), &'static str> {
    let length = head[..8].strip_prefix(&MAGIC[..]);
    let length = length.map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes")));
    let length = length
        .filter(|length| *length > 0)
        .ok_or("it is not a record")?;
    if head[8] != FRAME {
        return Ok((None, u64::from(length) - 1));
    }
    let mut from = Paced::new(head, Duration::MAX);
    match read(&mut from) {
        Ok(Record::Frame(frame)) => Ok((Some(frame), u64::from(frame.packed))),
        _ => Err("it is not the record of a frame"),
    }
}

/// Reads a record, and nothing of what follows it.
pub(super) fn read<R: Read>(from: &mut Paced<R>) -> Result<Record> {
    let head: [u8; 9] = from.array()?;
    let length = u32::from_le_bytes(head[4..8].try_into().expect("four bytes"));
    if head[..4] != MAGIC || length == 0 {
        return Err(from.wrong("it is not the record of a layer's content"));
    }
    match (head[8], length) {
        (FRAME, FRAME_LENGTH) => {
            let body: [u8; 56] = from.array()?;
            let number = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().expect("8"));
            let short = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().expect("4"));
            let frame = Frame {
                table: body[..32].try_into().expect("32 bytes"),
                file: number(32),
                offset: number(40),
                plain: short(48),
                packed: short(52),
            };
            let plain = u64::from(frame.plain);
            if plain == 0 || plain > CHUNK || u64::from(frame.packed) > most_packed(plain) {
                return Err(from.wrong("a frame is empty or too long"));
            }
            Ok(Record::Frame(frame))
        }
        (OFFER, OFFER_LENGTH) => {
            let body: [u8; 49] = from.array()?;
            let number = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().expect("8"));
            Ok(Record::Offer(Offer {
                table: body[..32].try_into().expect("32 bytes"),
                state: match body[32] {
                    1 => State::Whole,
                    2 => State::Filling,
                    _ => return Err(from.wrong("a holder's state is unknown")),
                },
                table_bytes: number(33),
                bytes: number(41),
            }))
        }
        (END, END_LENGTH) => Ok(Record::End(u64::from_le_bytes(from.array()?))),
        (FRAME | OFFER | END, _) => Err(from.wrong("a record has another length than its kind")),
        (kind, length) => {
            let most = if kind == TABLE {
                u32::MAX
            } else {
                MOST_SKIPPED
            };
            if length > most {
                return Err(from.wrong("a record is too long"));
            }
            from.skip(u64::from(length) - 1)?;
            Ok(Record::Other)
        }
    }
}

/// Input of which each record must arrive within a time. The source itself must not block for
/// longer: a socket has a read timeout.
pub(super) struct Paced<R> {
    inner: R,
    patience: Duration,
    since: Instant,
    at: u64,
}

impl<R: Read> Paced<R> {
    pub(super) fn new(inner: R, patience: Duration) -> Self {
        Self {
            inner,
            patience,
            since: Instant::now(),
            at: 0,
        }
    }

    /// A record begins: the time does, too.
    pub(super) fn begin(&mut self) {
        self.since = Instant::now();
    }

    pub(super) fn wrong(&self, why: &str) -> Error {
        super::super::header::malformed(self.at, why)
    }

    pub(super) fn exact(&mut self, into: &mut [u8]) -> Result<()> {
        use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        let mut done = 0;
        while done < into.len() {
            if self.since.elapsed() > self.patience {
                return Err(Error::Stalled { at: self.at });
            }
            match self.inner.read(&mut into[done..]) {
                Ok(0) => return Err(Error::Truncated { at: self.at }),
                Ok(read) => {
                    done += read;
                    self.at += read as u64;
                }
                Err(error) if error.kind() == Interrupted => {}
                // The source waits no longer at a time; whether the receiver does is asked above.
                Err(error) if matches!(error.kind(), TimedOut | WouldBlock) => {}
                Err(error) => return Err(Error::Read(error)),
            }
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.exact(&mut bytes)?;
        Ok(bytes)
    }

    fn skip(&mut self, mut bytes: u64) -> Result<()> {
        let mut sink = [0; 4096];
        while bytes > 0 {
            let most = usize::try_from(bytes).map_or(sink.len(), |left| left.min(sink.len()));
            self.exact(&mut sink[..most])?;
            bytes -= most as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_others_are_passed_over_or_refused() {
        let frame = Frame {
            table: [7; 32],
            file: 1 << 40,
            offset: CHUNK,
            plain: 5,
            packed: 9,
        };
        let offer = Offer {
            table: [8; 32],
            state: State::Filling,
            table_bytes: 1,
            bytes: u64::MAX,
        };
        let mut unknown = Vec::new();
        head(&mut unknown, 4, 4);
        unknown.extend(b"abc");
        let bytes = [frame.encode(), offer.encode(), unknown, end(3)].concat();
        let patience = Duration::from_secs(60);
        let mut from = Paced::new(&bytes[..], patience);
        let mut next = || read(&mut from);
        assert_eq!(next().expect("frame"), Record::Frame(frame));
        assert_eq!(next().expect("offer"), Record::Offer(offer));
        assert_eq!(next().expect("unknown"), Record::Other);
        assert_eq!(next().expect("end"), Record::End(3));
        assert!(matches!(next(), Err(Error::Truncated { .. })));
        for change in [
            |frame: &mut Frame| frame.plain = 0,
            |frame: &mut Frame| frame.plain = 5 << 20,
            |frame: &mut Frame| frame.packed = u32::MAX,
        ] {
            let mut wrong = frame;
            change(&mut wrong);
            read(&mut Paced::new(&wrong.encode()[..], patience)).expect_err("it lies");
        }
        // Patience is asked before the source is.
        let mut late = Paced::new(&bytes[..], Duration::ZERO);
        late.since = Instant::now()
            .checked_sub(Duration::from_secs(1))
            .expect("it was");
        assert!(matches!(read(&mut late), Err(Error::Stalled { at: 0 })));
    }
}
