//! A pool's state on disk: its directories, the index of durable state, and the records of volumes.
//!
//! This module knows the on-disk formats (`docs/on-disk.md`) but makes no decisions and no mounts.
//! It keeps no state that is not on disk. All calls block.

mod error;
mod index;
mod index_file;
mod new_index;
mod policies;
mod pool;
mod records;
mod tables;

pub use error::{Error, Result};
pub use index::Index;
pub use new_index::{NewIndex, is_replaced_index, read_replaced_index};
pub use policies::{read_policies, write_policies};
pub use pool::{PoolDirs, PoolIdentity, PoolView};
pub use records::{
    Unreadable, Wait, WritebackFailure, confirm_layer, note_sharing, read_claim, read_due,
    read_layer, read_outcome, read_sealing, read_volume, read_writeback_failure,
    record_writeback_failure, waiting_since, write_claim, write_due, write_outcome, write_sealing,
    write_volume,
};
pub use tables::{Change, Contents};
