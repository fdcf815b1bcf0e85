//! Trees as tar streams: packing, reading, unpacking. `docs/archives.md` says what a stream holds,
//! byte by byte.
//!
//! ```text
//! pack:    tree ─▶ walk, headers ─▶ bounded pipe ─▶ digest, compress, digest ─▶ output
//! unpack:  input ─▶ digest, decompress, digest ─▶ bounded pipe ─▶ headers ─▶ tree
//! ```
//!
//! The caller says which of the digests it needs (`Hashing`).
//!
//! Each direction has two threads, the caller's and one for the codec. The slower of them slows the
//! other. Neither's memory grows with the tree: see `sorted` (names), `links` (files with several
//! names) and `unpack` (times of directories).
//!
//! An archive is hostile until it is unpacked, and so is a tree that is being packed: no path is
//! resolved twice, no symlink followed, no mount point crossed, nothing recurses. A tree may be one
//! layer of a stack, in overlayfs' form (`marks`, `onto`). Nothing here knows volumes or the pool.
//!
//! The blocks and records are read and written here, not by the crate `tar` (0.4.46). That crate
//! splits pax records at newlines, which attributes may hold. It also takes base-256 numbers that
//! overflow or are negative for others.

mod acl;
mod decode;
mod dress;
mod encode;
mod header;
mod links;
mod marks;
mod onto;
mod pack;
mod pax;
mod pipe;
mod read;
mod s2;
mod sorted;
mod sparse;
pub mod toc;
mod unpack;
mod walk;

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sha2::{Digest as _, Sha256};

pub use marks::LayerMarks;
pub use onto::unpack_onto;
pub use pack::{Pack, Packed, pack, pack_layer};
pub use unpack::{Limits, Unpack, Unpacked, unpack, unpack_layer};

use crate::{sys, tree};

/// Why a tree was not packed, or an archive not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the tree failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// Work on a tree failed for another reason than a system call.
    #[error(transparent)]
    Tree(tree::Error),
    /// A tree has what this form of archive cannot hold.
    #[error("{path} cannot be packed: {why}")]
    Unpackable {
        /// The name, relative to the tree's root, as it may be shown.
        path: String,
        /// The obstacle.
        why: &'static str,
    },
    /// The archive could not be fetched.
    #[error("the archive cannot be read: {0}")]
    Read(#[source] io::Error),
    /// The archive could not be delivered.
    #[error("the archive cannot be written: {0}")]
    Write(#[source] io::Error),
    /// The table of hard links outgrew memory, and its file failed.
    #[error("the temporary file for hard links failed: {0}")]
    Spill(String),
    /// It was told to stop.
    #[error("it was stopped before it was complete")]
    Stopped,
    /// A file became shorter after its header was written.
    #[error("{path} became shorter while it was packed")]
    Shrunk {
        /// The file, relative to the tree's root.
        path: String,
    },
    /// The archive ends too early.
    #[error("the archive is incomplete: it ends after {at} bytes, before its end mark")]
    Truncated {
        /// Bytes of the plain stream that there were.
        at: u64,
    },
    /// The compressed stream is damaged.
    #[error("the archive is damaged: {0}")]
    Codec(String),
    /// A header or a record is not what the format allows, or may be understood in two ways.
    #[error("the archive is malformed at byte {at}: {why}")]
    Malformed {
        /// Where, in the plain stream.
        at: u64,
        /// What is wrong.
        why: String,
    },
    /// An entry asks for what is never done.
    #[error("the archive is refused: {path}: {why}")]
    Refused {
        /// The entry, as it may be shown.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The archive is larger than it may be.
    #[error("the archive is refused: {what} exceeds the limit of {limit}")]
    Limit {
        /// The quantity that exceeds its limit.
        what: &'static str,
        /// How much there may be.
        limit: u64,
    },
    /// A holder sends nothing.
    #[error("the sender stopped: no data arrived in time after {at} bytes")]
    Stalled {
        /// Bytes of the stream that had come.
        at: u64,
    },
    /// Not all of a layer's content has come.
    #[error("the layer is incomplete: {what} is missing")]
    Incomplete {
        /// What is missing, or a part of it.
        what: String,
    },
    /// The other thread has ended; its own error says why.
    #[error("the other end of the pipe is closed")]
    Cut,
}

impl From<tree::Error> for Error {
    fn from(error: tree::Error) -> Self {
        match error {
            tree::Error::System(error) => Self::System(error),
            tree::Error::Stopped => Self::Stopped,
            error => Self::Tree(error),
        }
    }
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

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
        f.write_str("sha256:")?;
        self.sha256
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
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
    fn meters(self, is_plain: bool) -> (Meter, Meter) {
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
struct Meter {
    bytes: u64,
    hash: Option<Sha256>,
}

impl Meter {
    fn new(is_hashed: bool) -> Self {
        let hash = is_hashed.then(Sha256::new);
        Self { bytes: 0, hash }
    }

    fn update(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if let Some(hash) = &mut self.hash {
            hash.update(bytes);
        }
    }

    fn finish(self) -> Measured {
        Measured {
            bytes: self.bytes,
            sha256: self.hash.map(|hash| hash.finalize().into()),
        }
    }
}

/// How far it is, for another thread to read.
#[derive(Debug, Default)]
pub struct Progress {
    plain: AtomicU64,
    packed: AtomicU64,
    entries: AtomicU64,
    failed: AtomicBool,
}

impl Progress {
    /// Whether the archive is refused already: an input that waits for more bytes need not wait any
    /// longer.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Bytes of the tar stream so far.
    #[must_use]
    pub fn plain(&self) -> u64 {
        self.plain.load(Ordering::Relaxed)
    }

    /// Bytes of the compressed stream so far.
    #[must_use]
    pub fn packed(&self) -> u64 {
        self.packed.load(Ordering::Relaxed)
    }

    /// Entries so far.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }
}

/// The error for an entry that an archive must not have.
fn refused(path: &[u8], why: impl Into<String>) -> Error {
    Error::Refused {
        path: shown(path),
        why: why.into(),
    }
}

/// Bytes of a path as a message may show them.
fn shown(path: &[u8]) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    const MOST: usize = 200;
    if path.len() <= MOST {
        return sys::printable(std::ffi::OsStr::from_bytes(path).display());
    }
    let (head, tail) = (&path[..MOST / 2], &path[path.len() - MOST / 2..]);
    format!("{}…{}", shown(head), shown(tail))
}
