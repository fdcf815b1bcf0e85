//! The format between nodes: a table of contents that names a layer by its digest, and content that
//! is asked for by file and range. `docs/layer-format.md` is the format, byte by byte.
//!
//! ```text
//! holder:    layer ─▶ scan ─▶ table        table, wants ─▶ read, compress ─▶ records
//! receiver:  table ─▶ directories          records ─▶ decompress, verify ─▶ files ─▶ finish
//! ```
//!
//! Nothing here knows of a network: a holder writes to any `Write`, a receiver reads from any
//! `Read`. A receiver makes a layer in overlayfs' form; `tree::apply` puts it onto a full tree.

mod divide;
mod done;
mod frames;
mod receive;
mod record;
mod row;
mod scan;
mod send;
mod stored;
mod table;

pub use frames::{FrameAt, Noted, end_record, frames_of};
pub use receive::{Patience, Receiver, Taken};
pub use record::{Offer, State};
pub use scan::{Scanned, scan};
pub use send::{Holder, Packing, Want};
pub use table::{Table, has_whole_length};

/// A chunk of a large file, the longest piece and the longest frame.
const CHUNK: u64 = 4 << 20;
/// The largest table.
const MOST_TABLE: u64 = 4 << 30;
/// The most pieces of zeros in files of several pieces that a table is made for: 512 GiB, in 4 MiB
/// of digests. A hole takes no space in its layer, and 32 bytes for each 4 MiB in the table.
const MOST_HOLES: u64 = 128 << 10;
/// A SHA-256. Of a piece that is all zeros it is all zeros.
type Sha256Sum = [u8; 32];
const ZEROS: Sha256Sum = [0; 32];

/// How many pieces a file of so many bytes has.
fn pieces(size: u64) -> u64 {
    size.div_ceil(CHUNK)
}
