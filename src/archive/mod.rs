//! Trees as tar streams: packing, reading, unpacking. `docs/archives.md` says what a stream holds,
//! byte by byte.
//!
//! ```text
//! pack:    tree ─▶ walk, headers ─▶ bounded pipe ─▶ digest, compress, digest ─▶ output
//! unpack:  input ─▶ digest, decompress, digest ─▶ bounded pipe ─▶ headers, names ─▶
//!          bounded batches of files ─▶ content, attributes
//! ```
//!
//! The caller says which of the digests it needs (`Hashing`).
//!
//! Each direction has two threads, the caller's and one for the codec. The slower one slows the
//! other. In unpacking, either finishes files while it waits (`pipe`). On a machine with more than
//! two cores, a third thread does so, too. No thread's memory grows with the tree: see `sorted`
//! (names), `links` (files with several names) and `unpack` (times of directories). All streams
//! together compress on one thread per core (`cores`).
//!
//! An archive is hostile until it is unpacked, and so is a tree that is being packed: no path is
//! resolved twice, no symlink followed, no mount point crossed, nothing recurses. A tree may be one
//! layer of a stack, in overlayfs' form (`marks`, `onto`). Nothing here knows volumes or the pool.
//!
//! The crate `tar` supplies the header blocks. Its readers and writers of whole archives are not
//! used: version 0.4.46 splits pax records at newlines, which attributes may hold.

mod acl;
mod cores;
mod decode;
mod digest;
mod dress;
mod encode;
mod error;
mod header;
mod links;
mod marks;
mod onto;
mod pack;
mod pax;
mod pipe;
mod progress;
mod read;
mod s2;
mod sorted;
mod sparse;
mod spill;
pub mod toc;
mod unpack;
mod walk;

pub use digest::{Codec, Digest, Digests, Hashing, Measured};
pub use error::{Error, Result};
pub use marks::LayerMarks;
pub use onto::unpack_onto;
pub use pack::{Pack, Packed, pack, pack_layer};
pub use progress::{Limits, Progress};
pub use unpack::{Unpack, Unpacked, unpack, unpack_layer};
