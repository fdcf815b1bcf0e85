//! A layer as one object: frames, then the table, then the index of the frames, then a footer.
//! `docs/shared-tier.md` is the layout, byte by byte. `source` reads the object, `upload` writes
//! it.

use std::io::{self, Read, Write};

use sha2::{Digest as _, Sha256 as Hasher};

use crate::archive::toc::{FrameAt, end_record, most_frames};
use crate::model::Sha256;

/// A zstd skippable frame, as in `docs/layer-format.md`.
const MAGIC: [u8; 4] = 0x184D_2A5B_u32.to_le_bytes();
/// The head of a record: magic number, length, kind.
pub(super) const HEAD: usize = 9;
pub(super) const TABLE: u8 = 6;
pub(super) const INDEX: u8 = 7;
pub(super) const FOOTER: u8 = 8;
const NAME: [u8; 8] = *b"bc-layer";
/// The version of the object's layout.
const VERSION: u16 = 1;
const COMPRESSED: u16 = 1;
/// Bytes of a frame in the index.
const ENTRY: usize = 24;
/// How many frames are read or written at once.
const AT_ONCE: usize = 1024;
/// Of so many frames, the first one's place is kept.
const STEP: usize = 64;
/// The most frames of an object: 1 TiB of content, the most that readers take, in the smallest
/// frames that are written where there are larger files. Readers have the index in memory, 96 MiB
/// of it.
pub(super) const MOST_FRAMES: u64 = 4 << 20;
/// Bytes of a piece in a table, at least. A frame has a piece.
const PIECE: u64 = 32;
/// A table of more than [`FREE`] bytes is compressed to no less than this part of it. Tables of
/// names and digests never are; one of nothing but zeros is.
const RATIO: u64 = 256;
const FREE: u64 = 64 << 20;
/// Bytes of the footer without its head.
const BODY: usize = 112;
/// Bytes of the footer.
pub(super) const FOOTER_BYTES: u64 = (HEAD + BODY) as u64;

/// The end of an object: where everything is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footer {
    /// Whether the table is compressed by zstd.
    pub compressed: bool,
    /// Where the frames and their end record end.
    pub tail: u64,
    /// Bytes of the table in the object.
    pub packed: u64,
    /// Bytes of the table.
    pub table: u64,
    /// How many frames there are.
    pub frames: u64,
    /// SHA-256 of the table: the layer's name.
    pub digest: Sha256,
    /// SHA-256 of the index.
    pub index: Sha256,
}

/// The frames of an object, in the order of the table. They follow each other from its beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    frames: Vec<FrameAt>,
    /// Where every [`STEP`]th of them begins, and where the last one ends.
    starts: Vec<u64>,
}

/// Begins a record; `None` if it would be too long.
pub(super) fn head(kind: u8, body: u64) -> Option<[u8; HEAD]> {
    let length = u32::try_from(body.checked_add(1)?).ok()?;
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&MAGIC);
    head[4..8].copy_from_slice(&length.to_le_bytes());
    head[8] = kind;
    Some(head)
}

/// The most bytes of the index of a layer with so many bytes of content and of table.
pub(super) fn most_index(content: u64, table: u64) -> u64 {
    // A frame has at least one byte.
    let frames = content.min(table / PIECE).min(most_frames(content));
    ENTRY as u64 * frames.min(MOST_FRAMES)
}

/// Whether a table, or the beginning of one, may be compressed to so few bytes.
pub(super) fn may_unpack(packed: u64, plain: u64) -> bool {
    plain <= FREE || plain / RATIO <= packed
}

/// The bytes that follow this head, which is of this kind.
pub(super) fn parse_head(head: [u8; HEAD], kind: u8) -> Result<u64, String> {
    let length: [u8; 4] = head[4..8].try_into().expect("four bytes");
    let length = u64::from(u32::from_le_bytes(length));
    if head[..4] != MAGIC || head[8] != kind || length == 0 {
        return Err(format!(
            "where its record {kind} should be is something else"
        ));
    }
    Ok(length - 1)
}

impl Footer {
    /// The footer with its head.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + BODY);
        out.extend(head(FOOTER, BODY as u64).expect("112 bytes"));
        out.extend(NAME);
        out.extend(VERSION.to_le_bytes());
        out.extend(u16::from(self.compressed).to_le_bytes());
        out.extend([0; 4]);
        for number in [self.tail, self.packed, self.table, self.frames] {
            out.extend(number.to_le_bytes());
        }
        out.extend(self.digest.0);
        out.extend(self.index.0);
        out
    }

    /// The bytes of an object with this footer; `None` for numbers that no object has.
    #[must_use]
    pub fn object(&self) -> Option<u64> {
        let index = self.frames.checked_mul(ENTRY as u64)?;
        let heads = 2 * HEAD as u64 + FOOTER_BYTES;
        let sum = self.tail.checked_add(self.packed)?.checked_add(index)?;
        sum.checked_add(heads)
    }

    /// Parses the last bytes of an object of so many bytes.
    pub fn parse(bytes: &[u8], object: u64) -> Result<Self, String> {
        let (start, body) = bytes
            .split_first_chunk::<HEAD>()
            .filter(|(_, body)| body.len() == BODY)
            .ok_or("it has no footer")?;
        if parse_head(*start, FOOTER)? != BODY as u64 || body[..8] != NAME {
            return Err("its end is not the footer of a layer".to_owned());
        }
        let number = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().expect("eight"));
        let short = |at: usize| u16::from_le_bytes(body[at..at + 2].try_into().expect("two"));
        if short(8) != VERSION {
            return Err(format!(
                "its layout has version {}, known is {VERSION}",
                short(8)
            ));
        }
        let flags = short(10);
        if flags & !COMPRESSED != 0 || body[12..16] != [0; 4] {
            return Err("its footer has unknown flags".to_owned());
        }
        let digest = |at: usize| Sha256(body[at..at + 32].try_into().expect("32 bytes"));
        let footer = Self {
            compressed: flags & COMPRESSED != 0,
            tail: number(16),
            packed: number(24),
            table: number(32),
            frames: number(40),
            digest: digest(48),
            index: digest(80),
        };
        if footer.object() != Some(object) {
            return Err("its parts do not add up to its length".to_owned());
        }
        if !footer.compressed && footer.packed != footer.table {
            return Err("its table has two lengths".to_owned());
        }
        Ok(footer)
    }
}

impl Index {
    /// The index of these frames, which follow each other from the beginning of an object.
    #[must_use]
    pub fn new(frames: Vec<FrameAt>) -> Self {
        let mut starts = Vec::with_capacity(frames.len().div_ceil(STEP) + 1);
        let mut at: u64 = 0;
        starts.push(at);
        for frames in frames.chunks(STEP) {
            at = at.saturating_add(length(frames));
            starts.push(at);
        }
        Self { frames, starts }
    }

    /// The frames.
    #[must_use]
    pub fn frames(&self) -> &[FrameAt] {
        &self.frames
    }

    /// Where the frames from `first` to before `end` are in the object.
    #[must_use]
    pub fn bytes_of(&self, first: usize, end: usize) -> std::ops::Range<u64> {
        self.begin_of(first)..self.begin_of(end)
    }

    fn begin_of(&self, frame: usize) -> u64 {
        let step = frame / STEP;
        let before = length(&self.frames[step * STEP..frame]);
        self.starts[step].saturating_add(before)
    }

    /// The bytes of the index.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.frames.len() * ENTRY) as u64
    }

    /// Writes the bytes of the index; returns their SHA-256.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<Sha256> {
        let mut hasher = Hasher::new();
        let mut bytes = Vec::with_capacity(AT_ONCE * ENTRY);
        for frames in self.frames.chunks(AT_ONCE) {
            bytes.clear();
            for frame in frames {
                bytes.extend(frame.file.to_le_bytes());
                bytes.extend(frame.offset.to_le_bytes());
                bytes.extend(frame.plain.to_le_bytes());
                bytes.extend(frame.packed.to_le_bytes());
            }
            hasher.update(&bytes);
            out.write_all(&bytes)?;
        }
        Ok(Sha256(hasher.finalize().into()))
    }

    /// Reads an index of so many bytes; returns their SHA-256, too. The footer, which comes behind
    /// it, is for [`Index::check`].
    pub fn read(mut from: impl Read, length: u64) -> io::Result<(Self, Sha256)> {
        let entries = usize::try_from(length / ENTRY as u64).map_err(io::Error::other)?;
        let (mut frames, mut hasher) = (Vec::with_capacity(entries), Hasher::new());
        let mut bytes = vec![0; AT_ONCE * ENTRY];
        let mut left = length;
        while left > 0 {
            let part = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let part = &mut bytes[..part];
            from.read_exact(part)?;
            hasher.update(&*part);
            frames.extend(part.chunks_exact(ENTRY).map(frame));
            left -= part.len() as u64;
        }
        Ok((Self::new(frames), Sha256(hasher.finalize().into())))
    }

    /// Checks that it is the index of an object with this footer: how many bytes it was read from,
    /// and their SHA-256.
    pub fn check(&self, length: u64, digest: Sha256, footer: &Footer) -> Result<(), String> {
        if digest != footer.index {
            return Err("the SHA-256 of its index is not the one in its footer".to_owned());
        }
        if footer.frames.checked_mul(ENTRY as u64) != Some(length) {
            return Err("its index has another number of frames than its footer says".to_owned());
        }
        let place = |frame: &FrameAt| (frame.file, frame.offset);
        let ordered = self
            .frames
            .windows(2)
            .all(|pair| place(&pair[0]) < place(&pair[1]));
        if !ordered || !self.frames.iter().all(FrameAt::is_possible) {
            return Err("its index is not in order".to_owned());
        }
        let end = end_record(footer.frames).len() as u64;
        if self.begin_of(self.frames.len()).checked_add(end) != Some(footer.tail) {
            return Err("its frames do not add up to its index".to_owned());
        }
        Ok(())
    }
}

/// How many bytes of an object these frames take.
fn length(frames: &[FrameAt]) -> u64 {
    frames
        .iter()
        .map(FrameAt::length)
        .fold(0, u64::saturating_add)
}

/// The frame of an entry of the index.
fn frame(entry: &[u8]) -> FrameAt {
    let long = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("8"));
    let short = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("4"));
    FrameAt {
        file: long(0),
        offset: long(8),
        plain: short(16),
        packed: short(20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Vec<FrameAt> {
        let at = |file, offset, plain, packed| FrameAt {
            file,
            offset,
            plain,
            packed,
        };
        vec![
            at(0, 0, 10, 20),
            at(4, 0, 4 << 20, 100),
            at(4, 4 << 20, 5, 14),
        ]
    }

    fn encode(index: &Index) -> (Vec<u8>, Sha256) {
        let mut bytes = Vec::new();
        let digest = index.write_to(&mut bytes).expect("it is memory");
        assert_eq!(bytes.len() as u64, index.bytes());
        (bytes, digest)
    }

    fn parse(bytes: &[u8], footer: &Footer) -> Result<Index, String> {
        let length = bytes.len() as u64;
        let (index, digest) = Index::read(bytes, length).expect("all of it is there");
        index.check(length, digest, footer).map(|()| index)
    }

    fn footer(index: &Index) -> Footer {
        Footer {
            compressed: true,
            tail: 3 * 65 + 134 + 17,
            packed: 300,
            table: 419,
            frames: 3,
            digest: Sha256([7; 32]),
            index: encode(index).1,
        }
    }

    #[test]
    fn index_and_footer_come_back_and_no_byte_of_them_can_change() {
        let index = Index::new(frames());
        let footer = footer(&index);
        let object = footer.object().expect("small");
        let (bytes, list) = (footer.encode(), encode(&index).0);
        assert_eq!(bytes.len() as u64, FOOTER_BYTES);
        assert_eq!(Footer::parse(&bytes, object), Ok(footer));
        assert_eq!(parse(&list, &footer), Ok(index.clone()));
        assert_eq!(index.bytes_of(1, 3), 85..85 + 165 + 79);
        for at in 0..bytes.len() {
            for bit in [1, 0x80] {
                let mut bad = bytes.clone();
                bad[at] ^= bit;
                // Another digest is a footer, of another layer or index.
                match Footer::parse(&bad, object) {
                    Ok(other) => {
                        let differs = other.digest != footer.digest || other.index != footer.index;
                        assert!(differs || other.table != footer.table, "byte {at}");
                    }
                    Err(_) => assert!(at < HEAD + 48, "byte {at}"),
                }
            }
        }
        for at in 0..list.len() {
            let mut bad = list.clone();
            bad[at] ^= 1;
            parse(&bad, &footer).expect_err("its digest differs");
        }
        Footer::parse(&bytes, object + 1).expect_err("another length");
        Footer::parse(&bytes[1..], object).expect_err("cut");
        // An entry that is cut, and a footer that says nothing of it.
        let cut = &list[..list.len() - 1];
        let whole = Index::new(frames()[..2].to_vec());
        let lying = Footer {
            tail: whole.bytes_of(0, 2).end + end_record(2).len() as u64,
            frames: 2,
            index: Sha256(Hasher::digest(cut).into()),
            ..footer
        };
        let error = parse(cut, &lying).expect_err("it has more than two frames");
        assert!(error.contains("number of frames"), "{error}");
        Index::read(&*list, list.len() as u64 + 1).expect_err("it ends too early");
    }

    #[test]
    fn frames_of_a_long_index_are_where_they_were() {
        for count in [0, 1, 63, 64, 65, 1023, 1024, 1025, 3000] {
            let frame = |file: u32| FrameAt {
                file: file.into(),
                offset: 0,
                plain: 1000,
                packed: file % 900,
            };
            let index = Index::new((0..count).map(frame).collect());
            let (bytes, digest) = encode(&index);
            let (read, found) = Index::read(&*bytes, bytes.len() as u64).expect("read");
            assert_eq!((&read, found), (&index, digest));
            let mut at = 0;
            for (place, frame) in read.frames().iter().enumerate() {
                assert_eq!(read.bytes_of(place, place + 1), at..at + frame.length());
                at += frame.length();
            }
            assert_eq!(read.bytes_of(0, read.frames().len()), 0..at);
        }
    }

    #[test]
    fn an_index_and_a_table_are_bounded_by_what_they_are_of() {
        assert_eq!(most_index(0, 1 << 30), 0);
        assert_eq!(most_index(1, 1 << 30), 24);
        assert_eq!(most_index(u64::MAX, 320), 240);
        assert_eq!(most_index(u64::MAX, u64::MAX), 96 << 20);
        // 10 GiB of content in frames of 256 KiB, and two frames for each hole of 4 MiB.
        let frames = (40 << 10) + (256 << 10) + 1;
        assert_eq!(most_index(10 << 30, 1 << 30), 24 * frames);
        assert!(may_unpack(0, 64 << 20));
        assert!(!may_unpack(1 << 10, 65 << 20));
        assert!(may_unpack(1 << 20, 256 << 20));
        assert!(!may_unpack(1 << 20, 257 << 20));
    }

    #[test]
    fn an_index_whose_digest_is_right_may_still_lie() {
        let lies: [fn(&mut Vec<FrameAt>); 5] = [
            |frames| frames.swap(0, 1),
            |frames| frames[1].offset = 5,
            |frames| frames[0].plain = 0,
            |frames| frames[0].packed = u32::MAX,
            |frames| frames[2].packed += 1,
        ];
        for lie in lies {
            let mut frames = frames();
            lie(&mut frames);
            let index = Index::new(frames);
            parse(&encode(&index).0, &footer(&index)).expect_err("it lies");
        }
    }
}
