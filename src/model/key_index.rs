//! The keys of task caches in their order, each with a version: finds the newest key with a given
//! beginning, in bounded time however many keys begin so. A node has one for its own names, the
//! controller one for the names of the cluster.
//!
//! The keys of a tenant are in blocks of at most [`MOST`], and each block knows its newest entry. A
//! look-up reads all entries of at most two blocks, and one of each block between them. No two
//! neighbouring blocks are less than a quarter full, so `n` keys have at most `8 n / MOST + 1`
//! blocks: with 100,000 keys a look-up reads at most 2,600 entries.

use std::collections::BTreeMap;

use super::name::{CacheKey, Tenant};

/// The most entries of a block.
const MOST: usize = 512;
/// A block with fewer entries is joined to a neighbour, if one block can hold both.
const FEW: usize = MOST / 4;

/// The keys of all tenants. The highest `V` is the newest.
#[derive(Debug)]
pub struct KeyIndex<V>(BTreeMap<Tenant, Keys<V>>);

/// The keys of one tenant: blocks in the order of their keys.
#[derive(Debug)]
struct Keys<V>(Vec<Block<V>>);

/// Some keys, in their order. Never empty.
#[derive(Debug)]
struct Block<V> {
    entries: Vec<(CacheKey, V)>,
    /// The place of the newest entry: the first one of several.
    newest: usize,
}

impl<V> Default for KeyIndex<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V: Ord + Copy> KeyIndex<V> {
    /// Sets the version of a key.
    pub fn set(&mut self, tenant: &Tenant, key: &CacheKey, version: V) {
        if let Some(keys) = self.0.get_mut(tenant) {
            keys.set(key, version);
        } else {
            let block = Block {
                entries: vec![(key.clone(), version)],
                newest: 0,
            };
            self.0.insert(tenant.clone(), Keys(vec![block]));
        }
    }

    /// The version of a key.
    #[must_use]
    pub fn get(&self, tenant: &Tenant, key: &CacheKey) -> Option<V> {
        let keys = self.0.get(tenant)?;
        let block = &keys.0[keys.block_of(key)];
        let place = block.place(key).ok()?;
        Some(block.entries[place].1)
    }

    /// Removes a key.
    pub fn remove(&mut self, tenant: &Tenant, key: &CacheKey) {
        if let Some(keys) = self.0.get_mut(tenant) {
            keys.remove(key);
            if keys.0.is_empty() {
                self.0.remove(tenant);
            }
        }
    }

    /// The newest of the tenant's keys that begin so, and its version. Of several, the first key.
    #[must_use]
    pub fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<(&CacheKey, V)> {
        self.0.get(tenant)?.newest(prefix)
    }
}

impl<V: Ord + Copy> Keys<V> {
    /// The block where a key is, or belongs.
    fn block_of(&self, key: &CacheKey) -> usize {
        let after = self.0.partition_point(|block| block.entries[0].0 <= *key);
        after.saturating_sub(1)
    }

    fn set(&mut self, key: &CacheKey, version: V) {
        let at = self.block_of(key);
        let block = &mut self.0[at];
        match block.place(key) {
            Ok(place) => block.entries[place].1 = version,
            Err(place) => block.entries.insert(place, (key.clone(), version)),
        }
        let rest = (block.entries.len() > MOST).then(|| block.entries.split_off(MOST / 2));
        block.rank();
        if let Some(entries) = rest {
            self.0.insert(at + 1, Block::of(entries));
        }
    }

    fn remove(&mut self, key: &CacheKey) {
        let at = self.block_of(key);
        let Ok(place) = self.0[at].place(key) else {
            return;
        };
        self.0[at].entries.remove(place);
        let left = self.0[at].entries.len();
        let fits = |other: usize| {
            let other = self.0.get(other);
            other.is_some_and(|other| other.entries.len() + left <= MOST)
        };
        if left == 0 {
            self.0.remove(at);
        } else if left < FEW && at > 0 && fits(at - 1) {
            self.join(at - 1);
        } else if left < FEW && fits(at + 1) {
            self.join(at);
        } else {
            self.0[at].rank();
        }
    }

    /// Joins a block and the next one.
    fn join(&mut self, at: usize) {
        let next = self.0.remove(at + 1);
        self.0[at].entries.extend(next.entries);
        self.0[at].rank();
    }

    fn newest(&self, prefix: &CacheKey) -> Option<(&CacheKey, V)> {
        let begins = |key: &CacheKey| key.as_str().starts_with(prefix.as_str());
        let blocks = &self.0[self.block_of(prefix)..];
        let is_in =
            |block: &&Block<V>| block.entries[0].0 <= *prefix || begins(&block.entries[0].0);
        let newest_of = |block: &'_ Block<V>| -> Option<usize> {
            let last = block.entries.len() - 1;
            if begins(&block.entries[0].0) && begins(&block.entries[last].0) {
                return Some(block.newest);
            }
            let from = block.entries.partition_point(|(key, _)| key < prefix);
            let rest = block.entries[from..]
                .iter()
                .take_while(|(key, _)| begins(key));
            newest(rest).map(|place| from + place)
        };
        let mut best: Option<(&CacheKey, V)> = None;
        for block in blocks.iter().take_while(is_in) {
            if let Some(place) = newest_of(block) {
                let (key, version) = &block.entries[place];
                if best.is_none_or(|(_, best)| *version > best) {
                    best = Some((key, *version));
                }
            }
        }
        best
    }
}

impl<V: Ord + Copy> Block<V> {
    fn of(entries: Vec<(CacheKey, V)>) -> Self {
        let mut block = Self { entries, newest: 0 };
        block.rank();
        block
    }

    fn place(&self, key: &CacheKey) -> Result<usize, usize> {
        self.entries.binary_search_by(|(other, _)| other.cmp(key))
    }

    /// Finds the newest entry, after a change.
    fn rank(&mut self) {
        self.newest = newest(self.entries.iter()).unwrap_or_default();
    }
}

/// The place of the newest entry; of several, the first.
fn newest<'a, V: Ord + Copy + 'a>(
    entries: impl Iterator<Item = &'a (CacheKey, V)>,
) -> Option<usize> {
    let mut best: Option<(usize, V)> = None;
    for (place, (_, version)) in entries.enumerate() {
        if best.is_none_or(|(_, best)| *version > best) {
            best = Some((place, *version));
        }
    }
    best.map(|(place, _)| place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> CacheKey {
        text.parse().expect("a key")
    }

    fn tenant(text: &str) -> Tenant {
        text.parse().expect("a tenant")
    }

    /// What the index must find, by a walk over all keys.
    fn expected(all: &BTreeMap<CacheKey, u32>, prefix: &CacheKey) -> Option<(CacheKey, u32)> {
        let fits = all.iter();
        let fits = fits.filter(|(key, _)| key.as_str().starts_with(prefix.as_str()));
        let newest = fits.clone().map(|(_, version)| *version).max()?;
        let mut first = fits.filter(|(_, version)| **version == newest);
        first.next().map(|(key, version)| (key.clone(), *version))
    }

    /// The invariants of the blocks, on which the bound rests.
    fn check(index: &KeyIndex<u32>, tenant: &Tenant, count: usize) {
        let Some(Keys(blocks)) = index.0.get(tenant) else {
            assert_eq!(count, 0);
            return;
        };
        let entries: Vec<_> = blocks.iter().flat_map(|block| &block.entries).collect();
        assert_eq!(entries.len(), count);
        assert!(entries.is_sorted_by(|(one, _), (next, _)| one < next));
        assert!(blocks.len() <= 8 * count / MOST + 1);
        for block in blocks {
            assert!((1..=MOST).contains(&block.entries.len()));
            assert_eq!(Some(block.newest), newest(block.entries.iter()));
        }
        for pair in blocks.windows(2) {
            assert!(pair.iter().any(|block| block.entries.len() >= FEW));
        }
    }

    /// Numbers that are the same each time.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            usize::try_from(self.0 >> 33).expect("it is small") % limit
        }

        fn text(&mut self, longest: usize) -> String {
            // Few letters, so that keys are beginnings of each other.
            let letters = ['a', 'b', '*', '\u{e4}', '/', '\u{10ffff}'];
            let length = 1 + self.below(longest);
            (0..length)
                .map(|_| letters[self.below(letters.len())])
                .collect()
        }
    }

    fn finds_what_a_walk_finds(
        index: &KeyIndex<u32>,
        tenant: &Tenant,
        all: &BTreeMap<CacheKey, u32>,
        prefix: &CacheKey,
    ) {
        let found = index.newest(tenant, prefix);
        let found = found.map(|(key, version)| (key.clone(), version));
        assert_eq!(found, expected(all, prefix), "{prefix}");
    }

    #[test]
    fn it_finds_what_a_walk_finds() {
        let (ours, others) = (tenant("ci"), tenant("ci2"));
        for seed in 0..100 {
            let mut random = Random(seed);
            let (mut index, mut all) = (KeyIndex::default(), BTreeMap::new());
            for _ in 0..200 {
                let key = key(&random.text(4));
                index.set(&others, &key, 100);
                if random.below(3) > 0 {
                    let version = u32::try_from(random.below(9)).expect("it is small");
                    index.set(&ours, &key, version);
                    all.insert(key.clone(), version);
                } else {
                    index.remove(&ours, &key);
                    all.remove(&key);
                }
                assert_eq!(index.get(&ours, &key), all.get(&key).copied());
                let prefix = random.text(3).parse().expect("a key");
                finds_what_a_walk_finds(&index, &ours, &all, &prefix);
            }
            check(&index, &ours, all.len());
        }
    }

    #[test]
    fn blocks_split_and_join_as_keys_come_and_go_in_runs() {
        let ours = tenant("ci");
        for seed in 0..20 {
            let mut random = Random(seed);
            let (mut index, mut all) = (KeyIndex::default(), BTreeMap::new());
            for _ in 0..12 {
                let (from, count) = (random.below(6_000), 1 + random.below(3_000));
                let (adds, backwards) = (random.below(2) == 0, random.below(2) == 0);
                for step in 0..count {
                    let number = from + if backwards { count - step } else { step };
                    let key = key(&format!("k{number:04}"));
                    let version = u32::try_from(random.below(5_000)).expect("it is small");
                    if adds {
                        index.set(&ours, &key, version);
                        all.insert(key, version);
                    } else {
                        index.remove(&ours, &key);
                        all.remove(&key);
                    }
                }
                check(&index, &ours, all.len());
                for prefix in ["k", "k1", "k29", "k300", "k8999", "x"].map(key) {
                    finds_what_a_walk_finds(&index, &ours, &all, &prefix);
                }
            }
        }
    }

    #[test]
    fn a_tenant_without_keys_leaves_nothing() {
        let mut index = KeyIndex::default();
        assert_eq!(index.newest(&tenant("ci"), &key("a")), None);
        index.set(&tenant("ci"), &key("a"), 1);
        index.remove(&tenant("ci"), &key("b"));
        assert_eq!(index.newest(&tenant("ci"), &key("a")), Some((&key("a"), 1)));
        index.remove(&tenant("ci"), &key("a"));
        assert!(index.0.is_empty());
    }

    /// What a look-up, a new key and a removed key cost with 100,000 keys of one beginning:
    /// `cargo test --release --lib key_index -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn a_look_up_among_100_000_keys() {
        const KEYS: u32 = 100_000;
        let ours = tenant("ci");
        let keys: Vec<CacheKey> = (0..KEYS)
            .map(|number| key(&format!("main-{:08x}", number.wrapping_mul(2_654_435_761))))
            .collect();
        let mut index = KeyIndex::default();
        let time = |what: &str, count: u32, began: std::time::Instant| {
            println!("{what}: {:?}", began.elapsed() / count);
        };
        let began = std::time::Instant::now();
        for (number, key) in (0..KEYS).zip(&keys) {
            index.set(&ours, key, number);
        }
        time("set", KEYS, began);
        for prefix in ["main-", "main-8", "main-8000", "x"].map(key) {
            let began = std::time::Instant::now();
            for _ in 0..1_000 {
                std::hint::black_box(index.newest(&ours, &prefix));
            }
            time(&format!("newest {prefix}*"), 1_000, began);
        }
        let began = std::time::Instant::now();
        for key in &keys {
            index.remove(&ours, key);
        }
        time("remove", KEYS, began);
    }
}
