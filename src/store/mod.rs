//! What a pool remembers: its directories, the index of what is sealed, and the records of what is ephemeral.
//!
//! It knows the form of everything on disk (`docs/on-disk.md`) and nothing of what it is good for: it decides nothing,
//! mounts nothing, and holds no state that is not on disk. Everything blocks.

mod error;
mod index;
mod index_file;
mod pool;
mod records;

pub use error::{Error, Result};
pub use index::{Change, Contents, Index, NewIndex};
pub use pool::{PoolDirs, PoolIdentity, PoolView};
pub use records::{
    BlankRecord, Doom, Unreadable, Wait, blank_volume, confirm_layer, read_claim, read_doom,
    read_layer, read_outcome, read_sealing, read_volume, waiting_since, waits_no_more, write_claim,
    write_doom, write_outcome, write_sealing, write_volume,
};
