//! One entry of a table: written, and read by rules that leave nothing to choose. The order of
//! entries is the table's business.

use super::super::error::Result;
use super::super::header::malformed;
use super::super::progress::Limits;
use super::super::walk::{ACLS, Attribute, Look, MOST_ATTRIBUTE_BYTES, MOST_ATTRIBUTES};

/// The longest name, and the longest target of a symlink: what Linux has.
const MOST_NAME: usize = 255;
const MOST_TARGET: usize = 4095;
/// The longest value of an attribute.
const MOST_VALUE: usize = 64 << 10;
/// To chown(2) this means "leave it".
const NO_ID: u32 = u32::MAX;

const OPAQUE: u8 = 1;

/// What an entry is, and what only its kind has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    End,
    Directory {
        opaque: bool,
    },
    /// The digests of its pieces follow the entry.
    File {
        size: u64,
    },
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Fifo,
    Character(u32, u32),
    Block(u32, u32),
    Whiteout,
}

impl Kind {
    fn tag(&self) -> u8 {
        match self {
            Self::End => 0,
            Self::Directory { .. } => 1,
            Self::File { .. } => 2,
            Self::Symlink(_) => 3,
            Self::HardLink(_) => 4,
            Self::Fifo => 5,
            Self::Character(..) => 6,
            Self::Block(..) => 7,
            Self::Whiteout => 8,
        }
    }

    /// Whether it has attributes of its own.
    fn has_look(&self) -> bool {
        !matches!(self, Self::End | Self::HardLink(_) | Self::Whiteout)
    }
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) kind: Kind,
    pub(super) name: Vec<u8>,
    pub(super) look: Look,
    pub(super) attributes: Vec<Attribute>,
}

impl Row {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.kind.tag()];
        if self.kind == Kind::End {
            return out;
        }
        let opaque = self.kind == Kind::Directory { opaque: true };
        out.push(if opaque { OPAQUE } else { 0 });
        out.extend(length16(&self.name));
        out.extend(&self.name);
        if self.kind.has_look() {
            out.extend(
                u16::try_from(self.look.mode & 0o7777)
                    .unwrap_or(0)
                    .to_le_bytes(),
            );
            out.extend(self.look.uid.to_le_bytes());
            out.extend(self.look.gid.to_le_bytes());
            out.extend(self.look.mtime.0.to_le_bytes());
            out.extend(self.look.mtime.1.to_le_bytes());
            out.extend(
                u16::try_from(self.attributes.len())
                    .unwrap_or(u16::MAX)
                    .to_le_bytes(),
            );
            for (name, value) in &self.attributes {
                out.extend(length16(name));
                out.extend(length32(value));
                out.extend(name);
                out.extend(value);
            }
        }
        match &self.kind {
            Kind::File { size } => out.extend(size.to_le_bytes()),
            Kind::Symlink(target) => {
                out.extend(length16(target));
                out.extend(target);
            }
            Kind::HardLink(target) => {
                out.extend(length32(target));
                out.extend(target);
            }
            Kind::Character(major, minor) | Kind::Block(major, minor) => {
                out.extend(major.to_le_bytes());
                out.extend(minor.to_le_bytes());
            }
            _ => {}
        }
        out
    }
}

fn length16(bytes: &[u8]) -> [u8; 2] {
    u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_le_bytes()
}

fn length32(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes()
}

/// Where a table's bytes come from.
pub(super) trait Source {
    /// Fills all of it; [`super::super::Error::Truncated`] at the end.
    fn exact(&mut self, into: &mut [u8]) -> Result<()>;
    /// How far it is.
    fn at(&self) -> u64;
}

fn array<const N: usize>(from: &mut impl Source) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    from.exact(&mut bytes)?;
    Ok(bytes)
}

fn u16_of(from: &mut impl Source) -> Result<u16> {
    Ok(u16::from_le_bytes(array(from)?))
}

fn u32_of(from: &mut impl Source) -> Result<u32> {
    Ok(u32::from_le_bytes(array(from)?))
}

fn bytes(from: &mut impl Source, length: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    from.exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads an entry up to a file's digests. `is_root`: it is the first of the table.
pub(super) fn read(from: &mut impl Source, is_root: bool, limits: Limits) -> Result<Row> {
    let at = from.at();
    let [tag] = array(from)?;
    let mut row = Row {
        kind: Kind::End,
        name: Vec::new(),
        look: Look::default(),
        attributes: Vec::new(),
    };
    if tag == 0 && is_root {
        return Err(malformed(at, "it has no root"));
    }
    if tag == 0 {
        return Ok(row);
    }
    let [flags] = array(from)?;
    let opaque = flags == OPAQUE && tag == 1 && !is_root;
    if flags != 0 && !opaque {
        return Err(malformed(at, "it has unknown flags"));
    }
    let length = usize::from(u16_of(from)?);
    if is_root != (length == 0) || length > MOST_NAME {
        return Err(malformed(at, "a name is empty or too long"));
    }
    row.name = bytes(from, length)?;
    if !is_root && !is_name(&row.name) {
        return Err(malformed(
            at,
            "a name is `.` or `..`, or has a slash or a NUL",
        ));
    }
    if matches!(tag, 1 | 2 | 3 | 5 | 6 | 7) {
        row.look = look(from, at)?;
        row.attributes = attributes(from, at)?;
    }
    row.kind = kind(from, at, tag, opaque, limits)?;
    let is_directory = matches!(row.kind, Kind::Directory { .. });
    if is_root && !is_directory {
        return Err(malformed(at, "the root is not a directory"));
    }
    Ok(row)
}

/// Reads what of an entry only its kind has.
fn kind(from: &mut impl Source, at: u64, tag: u8, opaque: bool, limits: Limits) -> Result<Kind> {
    Ok(match tag {
        1 => Kind::Directory { opaque },
        2 => {
            let size = u64::from_le_bytes(array(from)?);
            if size > limits.bytes.min(i64::MAX.cast_unsigned()) {
                return Err(super::super::read::limit("a file's size", limits.bytes));
            }
            Kind::File { size }
        }
        3 => {
            let length = usize::from(u16_of(from)?);
            if length == 0 || length > MOST_TARGET {
                return Err(malformed(at, "a symlink's target is empty or too long"));
            }
            let target = bytes(from, length)?;
            if target.contains(&0) {
                return Err(malformed(at, "a symlink's target has a NUL"));
            }
            Kind::Symlink(target)
        }
        4 => {
            let length = usize::try_from(u32_of(from)?).unwrap_or(usize::MAX);
            if length == 0 || length > limits.path {
                return Err(malformed(at, "a hard link's target is empty or too long"));
            }
            let target = bytes(from, length)?;
            if !target.split(|&byte| byte == b'/').all(is_name) {
                return Err(malformed(
                    at,
                    "a hard link's target is not a canonical path",
                ));
            }
            Kind::HardLink(target)
        }
        5 => Kind::Fifo,
        6 | 7 => {
            let (major, minor) = (u32_of(from)?, u32_of(from)?);
            match (tag, major, minor) {
                (6, 0, 0) => {
                    return Err(malformed(
                        at,
                        "a character device is 0:0, a whiteout's number",
                    ));
                }
                (6, ..) => Kind::Character(major, minor),
                _ => Kind::Block(major, minor),
            }
        }
        8 => Kind::Whiteout,
        _ => return Err(malformed(at, format!("an entry is of the kind {tag}"))),
    })
}

fn is_name(name: &[u8]) -> bool {
    let dots = name == b"." || name == b"..";
    let length = (1..=MOST_NAME).contains(&name.len());
    length && !dots && !name.iter().any(|&byte| byte == 0 || byte == b'/')
}

fn look(from: &mut impl Source, at: u64) -> Result<Look> {
    let look = Look {
        mode: u32::from(u16_of(from)?),
        uid: u32_of(from)?,
        gid: u32_of(from)?,
        mtime: (i64::from_le_bytes(array(from)?), u32_of(from)?),
    };
    if look.mode > 0o7777 || look.uid == NO_ID || look.gid == NO_ID {
        return Err(malformed(at, "a mode or an owner is too large"));
    }
    if look.mtime.1 >= 1_000_000_000 {
        return Err(malformed(at, "a time has too many nanoseconds"));
    }
    Ok(look)
}

fn attributes(from: &mut impl Source, at: u64) -> Result<Vec<Attribute>> {
    let count = usize::from(u16_of(from)?);
    if count > MOST_ATTRIBUTES {
        return Err(malformed(at, "an entry has too many attributes"));
    }
    let mut attributes: Vec<Attribute> = Vec::new();
    let mut sum = 0;
    for _ in 0..count {
        let name = usize::from(u16_of(from)?);
        let value = usize::try_from(u32_of(from)?).unwrap_or(usize::MAX);
        if name > MOST_NAME || value > MOST_VALUE {
            return Err(malformed(at, "an attribute is too long"));
        }
        sum += name + value;
        if sum > MOST_ATTRIBUTE_BYTES {
            return Err(malformed(at, "an entry's attributes are too long"));
        }
        let (name, value) = (bytes(from, name)?, bytes(from, value)?);
        if !is_taken(&name) {
            return Err(malformed(at, "it has an attribute that is never accepted"));
        }
        if attributes.last().is_some_and(|(last, _)| *last >= name) {
            return Err(malformed(at, "attributes are not in order"));
        }
        attributes.push((name, value));
    }
    Ok(attributes)
}

fn is_taken(name: &[u8]) -> bool {
    let user = name.len() > 5 && name.starts_with(b"user.");
    (user || name == b"security.capability" || ACLS.contains(&name)) && !name.contains(&0)
}
