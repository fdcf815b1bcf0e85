//! Copy-on-write on one pool: the [`Backend`] trait, three implementations, and their probe.
//!
//! A backend creates, mounts, freezes, seals, flattens, measures and deletes the content of volumes
//! and layers. It knows no tenants, names, records, outcomes or CSI. The engine decides *whether*
//! and *when*; a backend knows *how*. All methods block: call them on the engine's threads.
//!
//! | | volume | layer | mount | seal |
//! |---|---|---|---|---|
//! | overlay | `top/`, `work.N/` | `fs/` (a plain diff) | its own overlay | freeze, rename `top` |
//! | btrfs | `fs` (subvolume) | `fs` (read-only snapshot) | bind | `snapshot -r`, once unwritten |
//! | copy | `fs/` | `fs/` | bind | copy (reflink if possible), once unwritten |

mod bind_volume;
mod btrfs;
mod copy;
mod error;
mod method;
mod overlay;
mod probe;
mod root_attrs;
mod types;

pub use self::btrfs::Btrfs;
pub use self::copy::Copy;
pub use self::error::{Error, Result};
pub use self::method::Backend;
pub use self::overlay::{MountApi, Overlay};
pub use self::probe::{Chosen, Wanted, choose};
pub use self::types::{BackendKind, Freeze, Limit, Start};
pub use crate::model::{RootAttributes, Usage};
pub use crate::tree::Stop;
