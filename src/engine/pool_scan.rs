//! Reading the directories of a pool, whether a driver has it open or not.
//! What follows from what is found belongs to `fsck`, `rebuild` and `recover`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::error::{Context, Result};
use crate::model::{LayerId, VolumeRecord, layout};
use crate::store::{self, Unreadable};
use crate::sys::{self, Dir};

pub(super) fn names(dir: &Dir) -> Result<BTreeSet<PathBuf>> {
    let entries = dir.entries().context("read a directory of the pool")?;
    Ok(entries.into_iter().map(|entry| entry.name.into()).collect())
}

/// The names in a directory that may be missing, each with the directory.
pub(super) fn entries(dir: Option<&Dir>) -> Result<Vec<(&Dir, PathBuf)>> {
    let mut entries = Vec::new();
    if let Some(dir) = dir {
        entries.extend(names(dir)?.into_iter().map(|name| (dir, name)));
    }
    Ok(entries)
}

/// The names in a directory that are keys of volumes or layers.
pub(super) fn keys(dir: &Dir) -> Result<Vec<LayerId>> {
    let entries = dir.entries().context("read a directory of the pool")?;
    let keys = entries
        .iter()
        .map(|entry| entry.name.to_str()?.parse().ok());
    Ok(keys.flatten().collect())
}

/// The kind of entry under one name in `volumes/`, `pending/` or `trash/`.
pub(super) enum Found {
    /// It went since the directory was listed.
    Gone,
    /// It is no directory.
    Stray,
    /// It cannot be opened or read, for a reason that is not this process's own.
    Unreadable(sys::Error),
    /// A directory without a record, or with a damaged one.
    Unrecorded(Dir, Unreadable),
    Volume(Dir, Box<VolumeRecord>),
}

pub(super) fn look(parent: &Dir, name: &Path) -> Result<Found> {
    let dir = match parent.open_beneath(name) {
        Ok(dir) => dir,
        Err(error) if error.is(sys::Errno::ENOENT) => return Ok(Found::Gone),
        Err(error) if error.is_no_directory() => return Ok(Found::Stray),
        Err(error) if !error.is_of_this_process() => return Ok(Found::Unreadable(error)),
        Err(error) => return Err(error).context("open a volume's directory"),
    };
    match store::read_volume(&dir) {
        Ok(Ok(record)) => Ok(Found::Volume(dir, Box::new(record))),
        Ok(Err(why)) => Ok(Found::Unrecorded(dir, why)),
        Err(error) if !error.is_of_this_process() => Ok(Found::Unreadable(error)),
        Err(error) => Err(error).context("read a volume's record"),
    }
}

/// Whether there is content that only an index can name. Under a new index, layers and the content
/// of persistent volumes would be garbage. `None`: the directory is missing.
pub(super) fn needs_index(layers: Option<&Dir>, volumes: Option<&Dir>) -> Result<bool> {
    if !entries(layers)?.is_empty() {
        return Ok(true);
    }
    for (volumes, name) in entries(volumes)? {
        match volumes.open_beneath(&name) {
            Err(error) if error.is_no_directory() => {}
            Err(error) => return Err(error).context("open a volume's directory"),
            Ok(volume) => {
                if volume
                    .has(layout::CLAIM_JSON)
                    .context("look for a claim's record")?
                {
                    return Ok(true);
                }
            }
        }
    }
    Ok(false)
}
