//! Empties the trash in slices of time: a tenant decides how long the deletion of a tree takes.
//!
//! The next round of the collector continues where one ended. `trash` keeps the state of each
//! entry.

use std::path::Path;
use std::time::{Duration, Instant};

use super::error::{Context, Result};
use super::shared::Inner;
use super::trash::{MOST_TRIES, order};
use crate::model::{LayerId, layout};
use crate::store;
use crate::sys::Dir;

/// The least time for which one thing is deleted.
const LEAST: Duration = Duration::from_millis(20);

/// The result of one slice.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Emptied {
    /// How much is deleted.
    pub(super) deleted: usize,
    /// Whether the deletions may have freed space.
    pub(super) freed: bool,
    /// Whether it is worth while to go on at once.
    pub(super) more: bool,
}

/// Deletes what is in the trash and no longer in use, until then.
pub(super) fn empty(inner: &Inner, until: Instant) -> Result<Emptied> {
    let mut entries = Vec::new();
    for entry in inner.dirs.trash.entries().context("read trash/")? {
        let name: Option<LayerId> = entry.name.to_str().and_then(|name| name.parse().ok());
        let leaves = |name| inner.state.lock().volumes.retiring(name).is_some();
        if !name.is_some_and(leaves) {
            entries.push((order(&inner.collector.trash.get(name)), name, entry.name));
        }
    }
    entries.sort_unstable();
    let mut emptied = Emptied::default();
    let mut left = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    for (_, name, path) in entries {
        let now = Instant::now();
        if inner.lifetime.is_stopping() {
            break;
        }
        if now >= until {
            emptied.more = true;
            break;
        }
        let share = (until - now) / left;
        left -= 1;
        match delete(inner, Path::new(&path), share.max(LEAST)) {
            Ok(true) => {
                emptied.deleted += 1;
                emptied.freed |= inner.collector.trash.forget(name);
            }
            Ok(false) => {}
            Err(error) if error.is_stopped() => {
                emptied.freed = true;
                emptied.more |= inner.collector.trash.tried(name) < MOST_TRIES;
            }
            Err(error) => {
                inner.collector.trash.forget(name);
                let path = inner.dirs.trash.path().join(&path);
                tracing::error!(path = %path.display(), %error, "could not be deleted");
            }
        }
    }
    if emptied.freed
        && let Err(error) = inner.dirs.root.wait_for_freed_space()
    {
        tracing::debug!(%error, "the pool's free space may be counted too low");
    }
    Ok(emptied)
}

/// Deletes one thing in the trash, unless a process holds it open.
fn delete(inner: &Inner, name: &Path, share: Duration) -> Result<bool> {
    let trash = &inner.dirs.trash;
    let dir = match trash.open_if_there(name) {
        // A stray file.
        Err(error) if error.is_no_directory() => None,
        dir => dir.context("look into the trash")?,
    };
    // Only a volume's top can be mounted; a layer comes here when nothing that may be mounted
    // refers to it.
    if let Some(dir) = dir
        && dir
            .has(layout::VOLUME_JSON)
            .context("look into the trash")?
    {
        let in_use = inner.backend.in_use(&dir);
        if in_use.context("ask whether an entry of the trash is in use")? || is_read(inner, &dir)? {
            return Ok(false);
        }
    }
    inner
        .backend
        .delete(trash, name, &inner.patience_of(share))
        .context("empty the trash")?;
    Ok(true)
}

/// Whether a directory in the trash is of a sealed volume that a process still reads
/// (`quiesce::keep_while_held`).
fn is_read(inner: &Inner, volume: &Dir) -> Result<bool> {
    if !inner.state.lock().volumes.retains_any() {
        return Ok(false);
    }
    let record = store::read_volume(volume).context("read a volume's record")?;
    let plan = record.ok().and_then(|record| record.seal);
    Ok(plan.is_some_and(|plan| inner.state.lock().volumes.retains(plan.layer)))
}

/// How much of it could not be deleted.
pub(super) fn held(inner: &Inner) -> Result<usize> {
    Ok(inner.dirs.trash.entries().context("read trash/")?.len())
}
