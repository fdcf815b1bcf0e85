//! The pool as the lowest modules of the engine know it: which one it is, its trash, and new ids.
//! Nothing that knows of volumes or artifacts belongs here.

use std::path::Path;

use super::error::{Context, Result};
use crate::model::LayerId;
use crate::store::{PoolDirs, PoolIdentity};
use crate::sys::{self, Dir};

/// The identity of a pool, and the boot in which it is open.
#[derive(Debug)]
pub(super) struct Origin {
    /// The kernel's boot id: ephemeral content is of one boot.
    pub(super) boot: String,
    /// And of one mount of the pool's filesystem, where the kernel tells which.
    pub(super) superblock: Option<u64>,
    pub(super) identity: PoolIdentity,
    /// Why this backend.
    pub(super) reason: String,
}

/// Moves a directory into the trash, under a name of its own.
pub(super) fn throw_away(dirs: &PoolDirs, from: &Dir, name: &Path) -> sys::Result<LayerId> {
    let key = LayerId::from_bits(sys::random());
    from.rename(name, &dirs.trash, key.to_string())?;
    Ok(key)
}

/// The kernel's id of this boot.
pub(super) fn boot_id() -> Result<String> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let id = std::fs::read_to_string(PATH).map_err(|error| sys::Error::new("read", PATH, error));
    id.map(|id| id.trim().to_owned())
        .context("read the kernel's boot id")
}
