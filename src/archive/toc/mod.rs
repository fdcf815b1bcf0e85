//! The format between nodes: a table of contents that names a layer by its digest, and content that
//! is asked for by file and range. `docs/layer-format.md` is the format, byte by byte.
//!
//! ```text
//! holder:    layer ─▶ scan ─▶ table        table, wants ─▶ read ─▶ compress ─▶ records
//! receiver:  table ─▶ directories          records ─▶ decompress, verify ─▶ files ─▶ finish
//! ```
//!
//! Nothing here knows of a network: a holder writes to any `Write`, a receiver reads from any
//! `Read`. A receiver makes a layer in overlayfs' form; `tree::apply` puts it onto a full tree.

mod compress;
mod divide;
mod done;
mod frames;
mod piece;
mod place;
mod receive;
mod record;
mod row;
mod scan;
mod send;
mod stored;
mod table;
mod take;

pub use frames::{FrameAt, Noted, end_record, frames_of, most_frames};
pub use receive::Receiver;
pub use record::{Offer, State};
pub use scan::{Scanned, scan};
pub use send::{Holder, Packing, Want};
pub use table::{Table, has_whole_length};
pub use take::{Patience, Taken};
