//! How an archive is compressed, and the lengths and digests of its streams: values, and
//! the meter that computes them.

use std::fmt;

use sha2::{Digest as _, Sha256};

use crate::model::hex;

/// How an archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// Not at all.
    Plain,
    /// gzip, of this level.
    Gzip(u32),
    /// zstd, of this level.
    Zstd(i32),
}

/// The length and the SHA-256 of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest {
    /// How many bytes.
    pub bytes: u64,
    /// Their SHA-256.
    pub sha256: [u8; 32],
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", hex(&self.sha256))
    }
}

/// Which digests of an archive are computed as it passes. Each one costs processor time for each
/// byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Hashing {
    /// None: the caller names the content in another way.
    None,
    /// That of the tar stream.
    Plain,
    /// Also that of what it was compressed to.
    #[default]
    Both,
}

impl Hashing {
    /// The digests of the tar stream and of its compressed form. Without compression (`is_plain`)
    /// the second one is valid for both.
    pub(super) fn meters(self, is_plain: bool) -> (Meter, Meter) {
        let (is_some, is_both) = (self != Self::None, self == Self::Both);
        let plain = Meter::new(is_some && !is_plain);
        (plain, Meter::new(is_both || (is_some && is_plain)))
    }
}

/// Both streams of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digests {
    /// The tar stream.
    pub plain: Measured,
    /// The size after compression; the plain size if there is none.
    pub packed: Measured,
}

/// A stream that passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// How many bytes.
    pub bytes: u64,
    /// Their SHA-256, if it was asked for ([`Hashing`]).
    pub sha256: Option<[u8; 32]>,
}

impl Measured {
    /// Length and digest, if the digest was asked for.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        let bytes = self.bytes;
        self.sha256.map(|sha256| Digest { bytes, sha256 })
    }
}

/// A stream on its way, which is hashed or not.
pub(super) struct Meter {
    pub(super) bytes: u64,
    hash: Option<Sha256>,
}

impl Meter {
    pub(super) fn new(is_hashed: bool) -> Self {
        let hash = is_hashed.then(Sha256::new);
        Self { bytes: 0, hash }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if let Some(hash) = &mut self.hash {
            hash.update(bytes);
        }
    }

    pub(super) fn finish(self) -> Measured {
        Measured {
            bytes: self.bytes,
            sha256: self.hash.map(|hash| hash.finalize().into()),
        }
    }
}
