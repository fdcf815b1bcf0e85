//! The state of the trash in memory: how often the deletion of each entry was tried, and how much
//! space it frees.
//!
//! Entries with the fewest attempts come first, then those with the most bytes per name. So a tree
//! of millions of files does not delay the deletion of a large file. `purge` deletes.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::model::{LayerId, Usage};
use crate::store::PoolDirs;
use crate::sys;

/// After so many tries nothing is done at once for the sake of a thing that is not deleted yet: a
/// process may be filling it as fast.
pub(super) const MOST_TRIES: u32 = 2000;

/// So many slices of deletion, some seconds, the room of a measured layer is counted on.
const SOON: u32 = 8;

/// The state of each entry, by its name.
#[derive(Debug, Default)]
pub(super) struct Trash(Mutex<HashMap<LayerId, Thrown>>);

/// One thing.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Thrown {
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

/// The measured size of a layer; `None`: it is not measured yet.
type Cost = Option<Usage>;

impl Trash {
    /// Moves a layer there, which cost so much when it was measured.
    pub(super) fn throw_away(&self, dirs: &PoolDirs, layer: &str, cost: Cost) -> sys::Result<()> {
        let name = LayerId::from_bits(sys::random());
        // Known before it is there: it may be deleted at once.
        self.expect(name, cost);
        let thrown = dirs.layers.rename(layer, &dirs.trash, name.to_string());
        thrown.inspect_err(|_| {
            self.forget(Some(name));
        })
    }

    fn expect(&self, name: LayerId, cost: Cost) {
        let layer = Some(cost);
        self.0.lock().insert(name, Thrown { layer, tries: 0 });
    }

    /// How many bytes and inodes come free soon without anything being evicted; a layer that is not
    /// measured may hold any number.
    pub(super) fn coming(&self) -> (u64, u64) {
        let known = self.0.lock();
        let soon = known.values().filter(|thrown| thrown.comes_soon());
        let layers = soon.filter_map(|thrown| thrown.layer);
        let costs = layers.map(|cost| cost.map_or((u64::MAX, u64::MAX), room));
        costs.fold((0, 0), |(bytes, inodes), cost| {
            (bytes.saturating_add(cost.0), inodes.saturating_add(cost.1))
        })
    }

    pub(super) fn get(&self, name: Option<LayerId>) -> Thrown {
        let known = name.and_then(|name| self.0.lock().get(&name).copied());
        known.unwrap_or_default()
    }

    /// It is deleted, or cannot be. Whether it was a layer.
    pub(super) fn forget(&self, name: Option<LayerId>) -> bool {
        let known = name.and_then(|name| self.0.lock().remove(&name));
        known.is_some_and(|thrown| thrown.layer.is_some())
    }

    /// It is not deleted yet; how often that was so.
    pub(super) fn tried(&self, name: Option<LayerId>) -> u32 {
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

/// The sort key, smallest first: attempts, then names per byte.
pub(super) fn order(thrown: &Thrown) -> (u32, u64) {
    let (bytes, names) = thrown.layer.flatten().map_or((0, 1), room);
    (thrown.tries, u64::MAX - bytes / names.max(1))
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
