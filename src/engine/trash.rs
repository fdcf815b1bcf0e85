//! The trash: its trees are deleted a slice at a time, because a tenant decides how long a tree's deletion takes.
//!
//! What was tried least comes first, and of that what holds most for the names that it has: so a tree of millions of files holds up no large
//! file that was thrown away with it. What a round of the collector leaves, the next ones go on with.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Inner;
use super::error::{Doing, Error, Result};
use crate::backend;
use crate::model::{LayerId, Usage, layout};
use crate::store;
use crate::sys::{self, Dir};

/// The least time for which one thing is deleted.
const LEAST: Duration = Duration::from_millis(20);

/// After so many tries nothing is done at once for the sake of a thing that is not deleted yet: a process may be filling it as fast.
const MOST_TRIES: u32 = 2000;

/// So many slices of deletion, some seconds, the room of a measured layer is counted on.
const SOON: u32 = 8;

/// What is known of what lies there, by its name.
#[derive(Debug, Default)]
pub(super) struct Trash(Mutex<HashMap<LayerId, Thrown>>);

/// One thing.
#[derive(Debug, Clone, Copy, Default)]
struct Thrown {
    /// If it is a layer: its room comes free when it is deleted.
    layer: Option<Cost>,
    /// How often it was not deleted in the time that it had.
    tries: u32,
}

impl Thrown {
    /// Whether its room is counted on. A tree whose deletion takes long must not hold up eviction.
    fn comes_soon(&self) -> bool {
        match self.layer {
            Some(Some(_)) => self.tries < SOON,
            _ => self.tries == 0,
        }
    }
}

/// What a layer was found to cost; `None`: it is not measured yet.
type Cost = Option<Usage>;

/// What came of deleting for a while.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Emptied {
    /// How much is deleted.
    pub(super) deleted: usize,
    /// Whether room may have come free of what others needed no more.
    pub(super) freed: bool,
    /// Whether it is worth while to go on at once.
    pub(super) more: bool,
}

impl Trash {
    /// Moves a layer there, which cost so much when it was measured.
    pub(super) fn throw_away(&self, inner: &Inner, layer: &str, cost: Cost) -> sys::Result<()> {
        let name = LayerId::from_bits(inner.random());
        // Known before it is there: it may be deleted at once.
        self.expect(name, cost);
        let thrown = inner
            .dirs
            .layers
            .rename(layer, &inner.dirs.trash, name.to_string());
        thrown.inspect_err(|_| {
            self.forget(Some(name));
        })
    }

    fn expect(&self, name: LayerId, cost: Cost) {
        let layer = Some(cost);
        self.0.lock().insert(name, Thrown { layer, tries: 0 });
    }

    /// How many bytes and inodes come free soon without anything being evicted; a layer that is not measured may hold any number.
    pub(super) fn coming(&self) -> (u64, u64) {
        let known = self.0.lock();
        let soon = known.values().filter(|thrown| thrown.comes_soon());
        let layers = soon.filter_map(|thrown| thrown.layer);
        let costs = layers.map(|cost| cost.map_or((u64::MAX, u64::MAX), room));
        costs.fold((0, 0), |(bytes, inodes), cost| {
            (bytes.saturating_add(cost.0), inodes.saturating_add(cost.1))
        })
    }

    fn get(&self, name: Option<LayerId>) -> Thrown {
        let known = name.and_then(|name| self.0.lock().get(&name).copied());
        known.unwrap_or_default()
    }

    /// It is deleted, or cannot be. Whether it was a layer.
    fn forget(&self, name: Option<LayerId>) -> bool {
        let known = name.and_then(|name| self.0.lock().remove(&name));
        known.is_some_and(|thrown| thrown.layer.is_some())
    }

    /// It is not deleted yet; how often that was so.
    fn tried(&self, name: Option<LayerId>) -> u32 {
        let Some(name) = name else { return MOST_TRIES };
        let mut known = self.0.lock();
        let thrown = known.entry(name).or_default();
        thrown.tries += 1;
        thrown.tries
    }
}

fn room(usage: Usage) -> (u64, u64) {
    (usage.bytes, usage.files + usage.directories)
}

/// What is deleted first has the least of these: tries, and names for each byte.
fn order(thrown: &Thrown) -> (u32, u64) {
    let (bytes, names) = thrown.layer.flatten().map_or((0, 1), room);
    (thrown.tries, u64::MAX - bytes / names.max(1))
}

/// Deletes what is in the trash and no longer in use, until then.
pub(super) fn empty(inner: &Inner, until: Instant) -> Result<Emptied> {
    let mut entries = Vec::new();
    for entry in inner.dirs.trash.entries().doing("read trash/")? {
        let name: Option<LayerId> = entry.name.to_str().and_then(|name| name.parse().ok());
        let leaves = |name| inner.state.lock().leaving.contains_key(&name);
        if !name.is_some_and(leaves) {
            entries.push((order(&inner.trash.get(name)), name, entry.name));
        }
    }
    entries.sort_unstable();
    let mut emptied = Emptied::default();
    let mut left = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    for (_, name, path) in entries {
        let now = Instant::now();
        if inner.stop.is_cancelled() {
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
                emptied.freed |= inner.trash.forget(name);
            }
            Ok(false) => {}
            Err(Error::Backend {
                source: backend::Error::Stopped,
                ..
            }) => {
                emptied.freed = true;
                emptied.more |= inner.trash.tried(name) < MOST_TRIES;
            }
            Err(error) => {
                inner.trash.forget(name);
                let path = inner.dirs.trash.path().join(&path);
                tracing::error!(path = %path.display(), %error, "could not be deleted");
            }
        }
    }
    Ok(emptied)
}

/// Deletes one thing in the trash, unless a process holds it open.
fn delete(inner: &Inner, name: &Path, share: Duration) -> Result<bool> {
    let trash = &inner.dirs.trash;
    let in_use = match trash.open_beneath(name) {
        // Only a volume's top can be mounted; a layer comes here when nothing that may be mounted refers to it.
        Ok(dir) if dir.has(layout::VOLUME_JSON).doing("look into the trash")? => {
            let in_use = inner.backend.in_use(&dir);
            in_use.doing("ask whether what is in the trash is in use")? || is_read(inner, &dir)?
        }
        // A layer, or a stray file.
        _ => false,
    };
    if in_use {
        return Ok(false);
    }
    inner
        .backend
        .delete(trash, name, &inner.patience_of(share))
        .doing("delete what is in the trash")?;
    Ok(true)
}

/// Whether a directory in the trash is of a sealed volume that a process still reads (`seal::keep_while_held`).
fn is_read(inner: &Inner, volume: &Dir) -> Result<bool> {
    if inner.state.lock().held.is_empty() {
        return Ok(false);
    }
    let record = store::read_volume(volume).doing("read a volume's record")?;
    let plan = record.ok().and_then(|record| record.seal);
    Ok(plan.is_some_and(|plan| inner.state.lock().held.contains_key(&plan.layer)))
}

/// How much of it could not be deleted.
pub(super) fn held(inner: &Inner) -> Result<usize> {
    Ok(inner.dirs.trash.entries().doing("read trash/")?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_least_comes_first_and_then_what_holds_most_for_its_names() {
        let layer = |bytes, files| {
            Some(Some(Usage {
                bytes,
                files,
                directories: 0,
            }))
        };
        let thrown = |layer, tries| Thrown { layer, tries };
        let in_order = [
            thrown(layer(1 << 30, 1), 0),
            thrown(layer(1 << 30, 1000), 0),
            thrown(None, 0),
            thrown(layer(1 << 30, 1), 1),
            thrown(Some(None), 2),
        ];
        assert!(in_order.is_sorted_by_key(order), "{in_order:?}");
    }

    #[test]
    fn what_comes_free_is_that_of_layers_and_may_be_all_where_one_is_not_measured() {
        let trash = Trash::default();
        let (small, unknown) = (LayerId::from_bits(1), LayerId::from_bits(2));
        let cost = Usage {
            bytes: 10,
            files: 2,
            directories: 1,
        };
        trash.expect(small, Some(cost));
        assert_eq!(trash.tried(Some(LayerId::from_bits(3))), 1);
        assert_eq!(trash.coming(), (10, 3));
        trash.expect(unknown, None);
        assert_eq!(trash.coming(), (u64::MAX, u64::MAX));
        // A deletion that takes long does not hold up eviction.
        trash.tried(Some(unknown));
        assert_eq!(trash.coming(), (10, 3));
        for _ in 0..SOON {
            assert_eq!(trash.coming(), (10, 3));
            trash.tried(Some(small));
        }
        assert_eq!(trash.coming(), (0, 0));
        assert!(trash.forget(Some(unknown)) && !trash.forget(Some(unknown)));
    }
}
