//! The blocks of 512 bytes of which tar streams are made: their fields, read and written. Paths,
//! records and the meaning of an entry as a whole are handled elsewhere.
//!
//! The crate `tar` does not supply them. Its version 0.4.46 splits pax records at newlines, which
//! the values of attributes may hold, and takes base-256 numbers that overflow or are negative for
//! others. Since it is no dependency, clippy.toml needs no ban of its `unpack*` functions.

use super::error::{Error, Result};

/// Everything in a tar stream comes in blocks.
pub(super) const BLOCK: usize = 512;

/// One block.
pub(super) type Block = [u8; BLOCK];

/// A field of the header block.
pub(super) type Field = std::ops::Range<usize>;

pub(super) const NAME: Field = 0..100;
pub(super) const MODE: Field = 100..108;
pub(super) const UID: Field = 108..116;
pub(super) const GID: Field = 116..124;
pub(super) const SIZE: Field = 124..136;
pub(super) const MTIME: Field = 136..148;
const CHECKSUM: Field = 148..156;
const TYPE: usize = 156;
pub(super) const LINK: Field = 157..257;
const MAGIC: Field = 257..265;
pub(super) const MAJOR: Field = 329..337;
pub(super) const MINOR: Field = 337..345;
const PREFIX: Field = 345..500;
/// GNU's old sparse headers: four runs, whether more follow, the file's size.
pub(super) const OLD_SPARSE: Field = 386..482;
pub(super) const OLD_SPARSE_MORE: usize = 482;
pub(super) const OLD_SPARSE_SIZE: Field = 483..495;

/// The largest value of a field of 12 bytes, in octal.
pub(super) const MOST_12: u64 = 0o77_777_777_777;

/// Which dialect a header block is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Before 1988: no prefix, no devices.
    V7,
    /// POSIX.
    Ustar,
    /// GNU: no prefix, other things in its place.
    Gnu,
}

/// A header block whose checksum is right.
pub(super) struct Header(Block);

impl Header {
    /// `None`: the checksum is wrong, so this is no header.
    pub(super) fn parse(block: &Block) -> Option<Self> {
        let stored = octal(&block[CHECKSUM])?;
        let byte = |index: usize, byte: u8| {
            if CHECKSUM.contains(&index) {
                b' '
            } else {
                byte
            }
        };
        let bytes = || block.iter().enumerate().map(|(at, &b)| byte(at, b));
        let unsigned: u64 = bytes().map(u64::from).sum();
        // Some old writers added signed bytes.
        let signed: i64 = bytes().map(|b| i64::from(b.cast_signed())).sum();
        let right = stored == unsigned || i64::try_from(stored) == Ok(signed);
        right.then_some(Self(*block))
    }

    pub(super) fn kind(&self) -> u8 {
        self.0[TYPE]
    }

    pub(super) fn dialect(&self) -> Dialect {
        match &self.0[MAGIC] {
            b"ustar  \0" => Dialect::Gnu,
            magic if magic.starts_with(b"ustar\0") => Dialect::Ustar,
            _ => Dialect::V7,
        }
    }

    pub(super) fn bytes(&self, field: Field) -> &[u8] {
        &self.0[field]
    }

    pub(super) fn flag(&self, at: usize) -> bool {
        !matches!(self.0[at], 0 | b'0')
    }

    /// Text up to its first NUL.
    pub(super) fn text(&self, field: Field) -> &[u8] {
        text(&self.0[field])
    }

    /// The path as the block has it.
    pub(super) fn path(&self) -> Vec<u8> {
        // star has times behind a shorter prefix.
        let is_star = self.0[508..] == *b"tar\0";
        let prefix = if is_star { 345..476 } else { PREFIX };
        let (name, prefix) = (self.text(NAME), self.text(prefix));
        if self.dialect() == Dialect::Ustar && !prefix.is_empty() {
            [prefix, b"/", name].concat()
        } else {
            name.to_vec()
        }
    }

    /// A number that may be negative only in base 256; `None`: it is none.
    pub(super) fn number(&self, field: Field) -> Option<i64> {
        number(&self.0[field])
    }
}

/// Text up to its first NUL.
fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|&byte| byte == 0);
    &field[..end.unwrap_or(field.len())]
}

/// Octal digits, or GNU's base 256 (two's complement, big-endian, the first bit of the first byte
/// set as a mark).
pub(super) fn number(field: &[u8]) -> Option<i64> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 == 0 {
        return octal(field).and_then(|value| i64::try_from(value).ok());
    }
    // The second bit of the first byte is the sign.
    let head = if first & 0x40 == 0 {
        i64::from(first & 0x3f)
    } else {
        i64::from(first.cast_signed())
    };
    rest.iter().try_fold(head, |value, &byte| {
        value.checked_mul(256)?.checked_add(i64::from(byte))
    })
}

/// Spaces, octal digits, then spaces and NULs. A blank field is 0.
fn octal(field: &[u8]) -> Option<u64> {
    let start = field.iter().position(|&byte| byte != b' ');
    let field = &field[start.unwrap_or(field.len())..];
    let digits = field.iter().take_while(|byte| (b'0'..=b'7').contains(byte));
    let digits = digits.count();
    let (digits, rest) = field.split_at(digits);
    if rest.iter().any(|&byte| byte != b' ' && byte != 0) {
        return None;
    }
    digits.iter().try_fold(0_u64, |value, &digit| {
        value.checked_mul(8)?.checked_add(u64::from(digit - b'0'))
    })
}

/// A header block that is being made.
pub(super) struct Draft(Block);

impl Draft {
    pub(super) fn new(kind: u8) -> Self {
        let mut block = [0; BLOCK];
        block[TYPE] = kind;
        block[MAGIC].copy_from_slice(b"ustar\x0000");
        Self(block)
    }

    /// Writes as much as fits. Returns whether all of it did.
    pub(super) fn text(&mut self, field: Field, text: &[u8]) -> bool {
        let fits = text.len().min(field.len());
        self.0[field.start..field.start + fits].copy_from_slice(&text[..fits]);
        fits == text.len()
    }

    /// Writes the path, in one field or two. Returns whether it fitted.
    pub(super) fn path(&mut self, path: &[u8]) -> bool {
        if path.len() <= NAME.len() {
            return self.text(NAME, path);
        }
        // The first slash that leaves few enough bytes behind it, and some.
        let from = path.len() - NAME.len() - 1;
        let slash = path[from..path.len() - 1].iter().position(|&b| b == b'/');
        match slash.map(|at| at + from) {
            Some(slash) if (1..=PREFIX.len()).contains(&slash) => {
                self.text(PREFIX, &path[..slash]) && self.text(NAME, &path[slash + 1..])
            }
            _ => self.text(NAME, path),
        }
    }

    /// Octal with leading zeros and a NUL; 0 if it does not fit, which it tells.
    pub(super) fn number(&mut self, field: Field, value: u64) -> bool {
        let digits = field.len() - 1;
        let fits = value < 1 << (3 * digits);
        let mut left = if fits { value } else { 0 };
        for slot in self.0[field.start..field.start + digits].iter_mut().rev() {
            *slot = b'0' + u8::try_from(left & 7).expect("three bits");
            left >>= 3;
        }
        fits
    }

    pub(super) fn finish(mut self) -> Block {
        self.0[CHECKSUM].fill(b' ');
        let sum: u64 = self.0.iter().map(|&byte| u64::from(byte)).sum();
        let last = CHECKSUM.end - 1;
        self.number(CHECKSUM.start..last, sum);
        self.0[last - 1] = 0;
        self.0
    }
}

/// How many bytes fill the last block.
pub(super) fn padding(length: u64) -> usize {
    let over = usize::try_from(length % BLOCK as u64).expect("below 512");
    (BLOCK - over) % BLOCK
}

/// What is wrong at a place in the stream.
pub(super) fn malformed(at: u64, why: impl Into<String>) -> Error {
    Error::Malformed {
        at,
        why: why.into(),
    }
}

/// A number of the header that must not be negative.
pub(super) fn unsigned(header: &Header, field: Field, what: &str, at: u64) -> Result<u64> {
    let value = header.number(field);
    value
        .and_then(|value| u64::try_from(value).ok())
        .ok_or_else(|| {
            malformed(
                at,
                format!("its {what} is not a number, or negative or too large"),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_base_256_and_nothing_else() {
        for (field, value) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"    644 ", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"777777777777", Some(0o777_777_777_777)),
            (b"\x80\0\0\0\0\0\0\0\0\0\x01\0", Some(256)),
            (
                b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe",
                Some(-2),
            ),
            (
                b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff",
                Some(i64::MAX),
            ),
            (b"\x80\0\0\0\x80\0\0\0\0\0\0\0", None),
            (b"\x80\x01\0\0\0\0\0\0\0\0\0\0", None),
            (b"12a\0\0\0\0\0", None),
            (b"12\x0012\0\0\0", None),
            (b"8\0\0\0\0\0\0\0", None),
            (b"-1\0\0\0\0\0\0", None),
        ] {
            assert_eq!(number(field), value, "{}", field.escape_ascii());
        }
    }

    #[test]
    fn a_long_path_is_split_where_the_document_says() {
        let split = |path: &str| {
            let mut draft = Draft::new(b'0');
            let fits = draft.path(path.as_bytes());
            let header = Header::parse(&draft.finish()).expect("the checksum is right");
            fits.then(|| (header.text(PREFIX).len(), header.path()))
        };
        let part = "x".repeat(50);
        let three = [&*part, &part, &part].join("/");
        assert_eq!(split(&three), Some((101, three.clone().into_bytes())));
        let dir = format!("{three}/");
        assert_eq!(split(&dir), Some((101, dir.clone().into_bytes())));
        assert_eq!(split(&"y".repeat(100)).expect("fits").0, 0);
        assert_eq!(split(&"y".repeat(101)), None);
        assert_eq!(split(&format!("{}/", "y".repeat(100))), None);
        let long = format!("{}/z", "y".repeat(155));
        assert_eq!(split(&long).expect("fits").0, 155);
        assert_eq!(split(&format!("{}/z", "y".repeat(156))), None);
    }
}
