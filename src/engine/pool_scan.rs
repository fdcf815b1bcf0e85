//! Reading the directories of a pool, whether a driver has it open or not.
//! What is made of what was found belongs to `check`, `rebuild` and `recover`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::error::{Context, Result};
use crate::model::{VolumeRecord, layout};
use crate::store;
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

/// What a name stands for, where each is the directory of a volume.
pub(super) enum Read {
    Stray,
    Record(Box<Result<VolumeRecord, store::Unreadable>>),
}

pub(super) fn read(dir: &Dir, name: &Path) -> Result<Option<Read>> {
    let dir = match dir.open_beneath(name) {
        Ok(dir) => dir,
        // Gone since it was listed.
        Err(error) if error.is(sys::Errno::ENOENT) => return Ok(None),
        Err(error) if error.is_no_directory() => return Ok(Some(Read::Stray)),
        Err(error) => return Err(error).context("open a volume's directory"),
    };
    let record = store::read_volume(&dir).context("read a volume's record")?;
    Ok(Some(Read::Record(Box::new(record))))
}

/// Whether there is content that only an index can name: with a new one the layers, and the content of claims, would be rubbish.
/// `None`: the directory is missing.
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
