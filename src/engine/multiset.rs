//! Counts the holders of each key: artifacts of a layer, operations on a layer, exports of an
//! artifact. The caller's lock guards it, and the caller gives the count its meaning.

use std::collections::HashMap;
use std::hash::Hash;

/// Keys with the number of their holders; a key without holders is gone.
#[derive(Debug)]
pub(super) struct Multiset<K>(HashMap<K, usize>);

impl<K> Default for Multiset<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Copy + Eq + Hash> Multiset<K> {
    /// One more holds the key.
    pub(super) fn add(&mut self, key: K) {
        *self.0.entry(key).or_default() += 1;
    }

    /// One less holds the key.
    pub(super) fn remove(&mut self, key: &K) {
        if let Some(count) = self.0.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(key);
            }
        }
    }

    pub(super) fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// The keys that are held, each once.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }
}
