//! The blocks of 512 bytes of which tar streams are made: their fields, read and written. Paths,
//! records and the meaning of an entry as a whole are handled elsewhere.
//!
//! The crate `tar` says where the fields of each dialect lie and which types of entries there are.
//! Numbers are read here: version 0.4.46 of the crate takes base-256 numbers that overflow or are
//! negative for others. They are written here, since the crate allocates for each of them.

pub(super) use tar::{EntryType, GnuExtSparseHeader, GnuSparseHeader};
use tar::{GnuHeader, OldHeader, UstarHeader};

use super::error::{Error, Result};

/// Everything in a tar stream comes in blocks.
pub(super) const BLOCK: usize = 512;

/// One block.
pub(super) type Block = [u8; BLOCK];

/// The fields of POSIX: where its checksum lies, and the version of its dialect.
const CHECKSUM: std::ops::Range<usize> = 148..156;
const VERSION: std::ops::Range<usize> = 263..265;

/// The largest value of a field of 12 bytes, in octal.
pub(super) const MOST_12: u64 = 0o77_777_777_777;

/// A header block whose checksum is right.
pub(super) struct Header(tar::Header);

impl Header {
    /// `None`: the checksum is wrong, so this is no header.
    pub(super) fn parse(block: &Block) -> Option<Self> {
        let mut header = tar::Header::from_byte_slice(block).clone();
        let stored = octal(&header.as_old().cksum)?;
        // The checksum itself counts as spaces.
        let (mut unsigned, mut signed) = (8 * u64::from(b' '), 8 * i64::from(b' '));
        for part in [&block[..CHECKSUM.start], &block[CHECKSUM.end..]] {
            unsigned += part.iter().map(|&byte| u64::from(byte)).sum::<u64>();
            // Some old writers added signed bytes.
            signed += part
                .iter()
                .map(|&byte| i64::from(byte.cast_signed()))
                .sum::<i64>();
        }
        let right = stored == unsigned || i64::try_from(stored) == Ok(signed);
        // Readers look at POSIX' magic only; the crate looks at the version, too.
        if block[..VERSION.start].ends_with(b"ustar\0") {
            header.as_mut_bytes()[VERSION].copy_from_slice(b"00");
        }
        right.then_some(Self(header))
    }

    pub(super) fn kind(&self) -> EntryType {
        self.0.entry_type()
    }

    /// The fields that all dialects have.
    pub(super) fn fields(&self) -> &OldHeader {
        self.0.as_old()
    }

    /// The fields of GNU's dialect; `None`: it is another.
    pub(super) fn gnu(&self) -> Option<&GnuHeader> {
        self.0.as_gnu()
    }

    /// The path as the block has it.
    pub(super) fn path(&self) -> Vec<u8> {
        let name = text(&self.fields().name);
        let Some(posix) = self.0.as_ustar() else {
            return name.to_vec();
        };
        // star has times behind a shorter prefix.
        let is_star = posix.pad.ends_with(b"tar\0");
        match text(&posix.prefix[..if is_star { 131 } else { 155 }]) {
            b"" => name.to_vec(),
            prefix => [prefix, b"/", name].concat(),
        }
    }

    /// Where a link leads to.
    pub(super) fn link(&self) -> &[u8] {
        text(&self.fields().linkname)
    }

    /// The numbers of a device node, not interpreted. Before POSIX there were none.
    pub(super) fn device(&self) -> (&[u8], &[u8]) {
        let posix = self.0.as_ustar().map(|it| (&it.dev_major, &it.dev_minor));
        let gnu = || self.gnu().map(|it| (&it.dev_major, &it.dev_minor));
        let (major, minor) = posix.or_else(gnu).unwrap_or((&[0; 8], &[0; 8]));
        (major, minor)
    }
}

/// Whether a field says that more follows.
pub(super) fn flag(field: [u8; 1]) -> bool {
    !matches!(field[0], 0 | b'0')
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
pub(super) struct Draft(tar::Header);

impl Draft {
    pub(super) fn new(kind: EntryType) -> Self {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        Self(header)
    }

    pub(super) fn fields(&mut self) -> &mut OldHeader {
        self.0.as_old_mut()
    }

    pub(super) fn posix(&mut self) -> &mut UstarHeader {
        self.0.as_ustar_mut().expect("it was made as one")
    }

    /// Writes the path, in one field or two. Returns whether it fitted.
    pub(super) fn path(&mut self, path: &[u8]) -> bool {
        let posix = self.posix();
        let (most, most_prefix) = (posix.name.len(), posix.prefix.len());
        if path.len() <= most {
            return put_text(&mut posix.name, path);
        }
        // The first slash that leaves few enough bytes behind it, and some.
        let from = path.len() - most - 1;
        let slash = path[from..path.len() - 1].iter().position(|&b| b == b'/');
        match slash.map(|at| at + from) {
            Some(slash) if (1..=most_prefix).contains(&slash) => {
                put_text(&mut posix.prefix, &path[..slash])
                    && put_text(&mut posix.name, &path[slash + 1..])
            }
            _ => put_text(&mut posix.name, path),
        }
    }

    pub(super) fn finish(mut self) -> Block {
        self.fields().cksum = [b' '; 8];
        let sum: u64 = self.0.as_bytes().iter().map(|&byte| u64::from(byte)).sum();
        // Six digits, NUL and the space that is there.
        put_number(&mut self.fields().cksum[..7], sum);
        *self.0.as_bytes()
    }
}

/// Writes as much as fits. Returns whether all of it did.
pub(super) fn put_text(field: &mut [u8], text: &[u8]) -> bool {
    let fits = text.len().min(field.len());
    field[..fits].copy_from_slice(&text[..fits]);
    fits == text.len()
}

/// Writes octal with leading zeros and a NUL; 0 if it does not fit. Returns whether it did.
pub(super) fn put_number(field: &mut [u8], value: u64) -> bool {
    let (last, digits) = field.split_last_mut().expect("no field is empty");
    *last = 0;
    let fits = value < 1 << (3 * digits.len());
    let mut left = if fits { value } else { 0 };
    for slot in digits.iter_mut().rev() {
        *slot = b'0' + u8::try_from(left & 7).expect("three bits");
        left >>= 3;
    }
    fits
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
pub(super) fn unsigned(field: &[u8], what: &str, at: u64) -> Result<u64> {
    number(field)
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
            let mut draft = Draft::new(EntryType::Regular);
            let fits = draft.path(path.as_bytes());
            let prefix = text(&draft.posix().prefix).len();
            let header = Header::parse(&draft.finish()).expect("the checksum is right");
            fits.then(|| (prefix, header.path()))
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
