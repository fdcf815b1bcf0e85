//! Snappy's framing format and S2, which extends it: larger blocks, and copies that repeat the last
//! distance. One decoder reads both (google/snappy `framing_format.txt` and
//! `format_description.txt`; klauspost/compress `s2`, "Format Extensions").

use std::io::{self, BufRead, Read};

/// The most that a block holds: S2's limit, far above Snappy's.
const BLOCK: usize = 4 << 20;
/// A block that cannot be compressed is a little longer than its content.
const CHUNK: usize = BLOCK + BLOCK / 6 + 64;

/// A reader of the plain bytes.
pub(super) struct S2Decoder<R> {
    input: R,
    packed: Vec<u8>,
    plain: Vec<u8>,
    at: usize,
}

impl<R: BufRead> S2Decoder<R> {
    pub(super) fn new(input: R) -> Self {
        Self {
            input,
            packed: Vec::new(),
            plain: Vec::new(),
            at: 0,
        }
    }

    /// Reads chunks until there are plain bytes. Returns whether there are any.
    fn next(&mut self) -> io::Result<bool> {
        self.at = 0;
        self.plain.clear();
        while self.plain.is_empty() {
            if self.input.fill_buf()?.is_empty() {
                return Ok(false);
            }
            let mut head = [0; 4];
            self.input.read_exact(&mut head)?;
            let length =
                usize::from(head[1]) | usize::from(head[2]) << 8 | usize::from(head[3]) << 16;
            if head[0] >= 0x80 {
                self.skip(head[0], length)?;
                continue;
            }
            if head[0] > 1 {
                return Err(bad("a chunk of an unknown kind"));
            }
            if !(4..=CHUNK).contains(&length) {
                return Err(bad("a chunk that is too short or too long"));
            }
            self.packed.resize(length, 0);
            self.input.read_exact(&mut self.packed)?;
            let (checksum, body) = self.packed.split_at(4);
            if head[0] == 0 {
                block(body, &mut self.plain)?;
            } else if body.len() <= BLOCK {
                self.plain.extend_from_slice(body);
            } else {
                return Err(bad("a chunk that is too long"));
            }
            if checksum != masked(crc32c(&self.plain)).to_le_bytes() {
                return Err(bad("a block whose checksum is wrong"));
            }
        }
        Ok(true)
    }

    /// A stream's name, which may come again where streams were joined; or something that may be
    /// left out.
    fn skip(&mut self, kind: u8, length: usize) -> io::Result<()> {
        if kind == 0xff {
            let mut name = [0; 6];
            if length != name.len() {
                return Err(bad("a stream of an unknown name"));
            }
            self.input.read_exact(&mut name)?;
            if name != *b"sNaPpY" && name != *b"S2sTwO" {
                return Err(bad("a stream of an unknown name"));
            }
            return Ok(());
        }
        let skipped = io::copy(
            &mut self.input.by_ref().take(length as u64),
            &mut io::sink(),
        )?;
        if skipped < length as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

impl<R: BufRead> Read for S2Decoder<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == self.plain.len() && !self.next()? {
            return Ok(0);
        }
        let fits = (self.plain.len() - self.at).min(into.len());
        into[..fits].copy_from_slice(&self.plain[self.at..self.at + fits]);
        self.at += fits;
        Ok(fits)
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("Snappy: {what}"))
}

/// Takes bytes off the front; `None`: there are not so many.
fn little_endian(from: &mut &[u8], bytes: usize) -> Option<usize> {
    let (head, rest) = from.split_at_checked(bytes)?;
    *from = rest;
    Some(
        head.iter()
            .rev()
            .fold(0, |value, &byte| value << 8 | usize::from(byte)),
    )
}

/// Appends a block's plain content to `plain`, which is empty.
fn block(mut from: &[u8], plain: &mut Vec<u8>) -> io::Result<()> {
    const BAD: &str = "a block that is damaged";
    let length = uvarint(&mut from).filter(|&length| length <= BLOCK);
    let length = length.ok_or_else(|| bad("a block that is too large"))?;
    plain.reserve(length);
    let mut distance = 0;
    while !from.is_empty() {
        let (copied, from_where) = element(&mut from, &mut distance).ok_or_else(|| bad(BAD))?;
        if copied > length - plain.len() {
            return Err(bad(BAD));
        }
        if from_where == From::Input {
            let (literal, rest) = from.split_at_checked(copied).ok_or_else(|| bad(BAD))?;
            plain.extend_from_slice(literal);
            from = rest;
            continue;
        }
        if distance == 0 || distance > plain.len() {
            return Err(bad(BAD));
        }
        // What is copied may overlap what it makes.
        let mut left = copied;
        while left > 0 {
            let start = plain.len() - distance;
            let now = left.min(distance);
            plain.extend_from_within(start..start + now);
            left -= now;
        }
    }
    if plain.len() == length {
        Ok(())
    } else {
        Err(bad(BAD))
    }
}

#[derive(PartialEq)]
enum From {
    Input,
    Output,
}

/// The next element: how many bytes it makes, and from where. `None`: it is cut off.
fn element(from: &mut &[u8], distance: &mut usize) -> Option<(usize, From)> {
    let tag = little_endian(from, 1)?;
    let high = tag >> 2;
    Some(match tag & 3 {
        0 => {
            let length = match high {
                0..60 => high,
                _ => little_endian(from, high - 59)?,
            };
            (length + 1, From::Input)
        }
        1 => {
            let near = (tag & 0xe0) << 3 | little_endian(from, 1)?;
            let length = high & 7;
            if near > 0 {
                *distance = near;
                return Some((length + 4, From::Output));
            }
            // S2: the distance of the copy before it, and a length of up to three more bytes.
            let length = match length {
                5 => little_endian(from, 1)? + 4,
                6 => little_endian(from, 2)? + (1 << 8),
                7 => little_endian(from, 3)? + (1 << 16),
                length => length,
            };
            (length + 4, From::Output)
        }
        kind => {
            *distance = little_endian(from, if kind == 2 { 2 } else { 4 })?;
            (high + 1, From::Output)
        }
    })
}

fn uvarint(from: &mut &[u8]) -> Option<usize> {
    let mut value = 0;
    for shift in (0..35).step_by(7) {
        let byte = little_endian(from, 1)?;
        value |= (byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Castagnoli's polynomial, reflected; eight bytes at a time by eight tables.
fn crc32c(bytes: &[u8]) -> u32 {
    static TABLES: [[u32; 256]; 8] = tables();
    let (words, rest) = bytes.as_chunks::<8>();
    let mut crc = !0_u32;
    for word in words {
        let word = u64::from_le_bytes(*word) ^ u64::from(crc);
        crc = word
            .to_le_bytes()
            .iter()
            .zip(TABLES.iter().rev())
            .fold(0, |crc, (&byte, table)| crc ^ table[usize::from(byte)]);
    }
    for &byte in rest {
        crc = crc >> 8 ^ TABLES[0][usize::from(crc.to_le_bytes()[0] ^ byte)];
    }
    !crc
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "an index below 256, where no other conversion is const"
)]
const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut index = 0;
    while index < 256 {
        let mut crc = index as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        tables[0][index] = crc;
        index += 1;
    }
    let mut table = 1;
    while table < 8 {
        index = 0;
        while index < 256 {
            let crc = tables[table - 1][index];
            tables[table][index] = crc >> 8 ^ tables[0][(crc & 0xff) as usize];
            index += 1;
        }
        table += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len()).expect("small").to_le_bytes();
        [&[kind][..], &length[..3], body].concat()
    }

    fn data(kind: u8, plain: &[u8], body: &[u8]) -> Vec<u8> {
        let checksum = masked(crc32c(plain)).to_le_bytes();
        frame(kind, &[&checksum[..], body].concat())
    }

    fn read(stream: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        S2Decoder::new(stream).read_to_end(&mut all)?;
        Ok(all)
    }

    #[test]
    fn the_checksum_is_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn snappy_and_s2_blocks_are_read() {
        let name = frame(0xff, b"S2sTwO");
        // "abcd" as a literal; a copy of 6 from 4 back; a repeat of 4; a repeat of 3 + 8, in one
        // more byte.
        let block = [
            25, 0b1100, b'a', b'b', b'c', b'd', 0b1001, 4, 1, 0, 0b10101, 0, 3,
        ];
        let plain = b"abcdabcdabcdabcdabcdabcda";
        let stream = [
            name.clone(),
            data(1, b"plain", b"plain"),
            frame(0xfe, b"padding"),
            data(0, plain, &block),
            name,
            data(1, b"", b""),
        ]
        .concat();
        assert_eq!(
            read(&stream).expect("read"),
            [&b"plain"[..], plain].concat()
        );
        // Between its chunks a stream may end; the tar stream in it has an end mark of its own.
        let ends = [0, 10, 10 + 13, 10 + 13 + 11, 10 + 13 + 11 + 21];
        for cut in 0..stream.len() - 18 {
            let result = read(&stream[..cut]);
            assert_eq!(result.is_ok(), ends.contains(&cut), "cut at {cut}");
        }
        for at in 0..stream.len() {
            let mut damaged = stream.clone();
            damaged[at] ^= 0x40;
            // It may be said of something that can be left out; it never panics.
            let _ = read(&damaged);
        }
    }

    #[test]
    fn lies_about_lengths_are_errors() {
        for block in [
            &[0xff, 0xff, 0xff, 0xff, 0x0f][..],
            &[5, 0b1100, b'a'],
            &[4, 0b0001, 1],
            &[8, 0, b'a', 0b0001, 2, 0],
            &[1, 0, b'a', 0, b'b'],
            &[0x80, 0x80, 0x80, 0x80, 0x80, 0x80],
            &[9, 0, b'a', 0b0001, 0],
        ] {
            let stream = data(0, b"", block);
            let error = read(&stream).expect_err("it lies").to_string();
            assert!(!error.contains("checksum"), "{error}");
        }
    }
}
