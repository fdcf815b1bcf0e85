//! The table of all entries, sorted by name and session, in few bytes. A `BTreeMap` does the same
//! with a third more memory: keys that come in random order leave its nodes a third empty.
//!
//! Rows are in chunks of neighbours. A chunk is one allocation, and nearly full.

use std::collections::BTreeMap;

use super::entry::SessionId;
use super::name::NameHash;
use super::packed::{Key, Packed};

/// A chunk with so many rows is split in two. An insertion moves a chunk's rows, 11 KB at most.
const MOST: usize = 256;

/// A full chunk grows by so many rows.
const STEP: usize = 16;

type Row = (Key, Packed);

#[derive(Debug)]
pub(super) struct Table {
    /// By the lowest key that a chunk may have. The first is there always.
    chunks: BTreeMap<Key, Vec<Row>>,
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            chunks: [(Key::LOWEST, Vec::new())].into(),
            len: 0,
        }
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, key: Key) -> Option<Packed> {
        let rows = &self.chunks[&self.chunk_of(key)];
        let at = rows.binary_search_by_key(&key, |row| row.0).ok()?;
        Some(rows[at].1)
    }

    /// The rows of a name, by session.
    pub(super) fn of(&self, name: NameHash) -> impl Iterator<Item = (SessionId, Packed)> {
        let first = Key::new(name, SessionId(0));
        let last = Key::new(name, SessionId(u32::MAX));
        let chunks = self.chunks.range(self.chunk_of(first)..=last);
        chunks
            .flat_map(move |(_, rows)| &rows[rows.partition_point(|row| row.0 < first)..])
            .take_while(move |row| row.0 <= last)
            .map(|row| (row.0.session(), row.1))
    }

    /// Returns what it replaces.
    pub(super) fn insert(&mut self, key: Key, packed: Packed) -> Option<Packed> {
        let rows = self.rows_mut(self.chunk_of(key));
        let at = match rows.binary_search_by_key(&key, |row| row.0) {
            Ok(at) => return Some(std::mem::replace(&mut rows[at].1, packed)),
            Err(at) => at,
        };
        if rows.len() == rows.capacity() {
            rows.reserve_exact(STEP);
        }
        rows.insert(at, (key, packed));
        if rows.len() == MOST {
            let upper = rows.split_off(MOST / 2);
            rows.shrink_to_fit();
            self.chunks.insert(upper[0].0, upper);
        }
        self.len += 1;
        None
    }

    /// Returns what was there.
    pub(super) fn remove(&mut self, key: Key) -> Option<Packed> {
        let chunk = self.chunk_of(key);
        let rows = self.rows_mut(chunk);
        let at = rows.binary_search_by_key(&key, |row| row.0).ok()?;
        let (_, packed) = rows.remove(at);
        shrink(rows);
        if rows.is_empty() && chunk != Key::LOWEST {
            self.chunks.remove(&chunk);
        }
        self.len -= 1;
        Some(packed)
    }

    /// Keeps the rows of some sessions only.
    pub(super) fn retain(&mut self, is_kept: impl Fn(SessionId) -> bool) {
        self.chunks.retain(|chunk, rows| {
            rows.retain(|row| is_kept(row.0.session()));
            shrink(rows);
            !rows.is_empty() || *chunk == Key::LOWEST
        });
        self.len = self.chunks.values().map(Vec::len).sum();
    }

    /// The chunk that has this key, or would have it.
    fn chunk_of(&self, key: Key) -> Key {
        let chunk = self.chunks.range(..=key).next_back();
        *chunk.expect("the first chunk is there").0
    }

    fn rows_mut(&mut self, chunk: Key) -> &mut Vec<Row> {
        self.chunks.get_mut(&chunk).expect("it was found")
    }
}

/// Gives memory back, unless the next rows need it.
fn shrink(rows: &mut Vec<Row>) {
    if rows.capacity() > rows.len() + 2 * STEP {
        rows.shrink_to(rows.len() + STEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::entry::{Entry, State, Version};
    use crate::model::{NameKind, Timestamp};

    fn packed(name: NameHash, bytes: u64) -> Packed {
        Packed::new(&Entry {
            name,
            kind: NameKind::TaskCache,
            state: State::Durable,
            version: Version {
                stamp: Timestamp(1),
                tie: 1,
            },
            bytes,
            layers: 1,
            fence: 0,
        })
    }

    #[test]
    fn it_has_what_a_sorted_map_has() {
        // Numbers that look random, and are the same each time.
        let mut last = 1_u64;
        let mut next = |below: u64| {
            last = last.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (last >> 33) % below
        };
        let mut table = Table::default();
        let mut expected = BTreeMap::<(NameHash, u32), u64>::new();
        let bytes_of = |name, packed: Packed| packed.entry(name).bytes;
        // It grows, shrinks, and grows again.
        for (turns, inserts) in [(20_000, 9), (20_000, 1), (20_000, 5)] {
            for turn in 0..turns {
                let mut hash = [0; 16];
                hash[..8].copy_from_slice(&(next(3_000) << 52).to_be_bytes());
                let name = NameHash(hash);
                let session = u32::try_from(next(8)).expect("small");
                let key = Key::new(name, SessionId(session));
                let (new, old) = if next(10) < inserts {
                    let old = table.insert(key, packed(name, turn));
                    (old, expected.insert((name, session), turn))
                } else {
                    (table.remove(key), expected.remove(&(name, session)))
                };
                assert_eq!(new.map(|packed| bytes_of(name, packed)), old);
                assert_eq!(table.len(), expected.len());
                let of = table.of(name).map(|(id, it)| (id.0, bytes_of(name, it)));
                let range = expected.range((name, 0)..=(name, u32::MAX));
                assert!(of.eq(range.map(|(key, bytes)| (key.1, *bytes))));
            }
            let rows: usize = table.chunks.values().map(Vec::capacity).sum();
            let slack = table.chunks.len() * 2 * STEP;
            assert!(rows <= table.len() + slack, "{rows} for {}", table.len());
        }
        table.retain(|id| id.0 == 3);
        expected.retain(|key, _| key.1 == 3);
        assert_eq!(table.len(), expected.len());
        for ((name, session), bytes) in &expected {
            let found = table.get(Key::new(*name, SessionId(*session)));
            assert_eq!(found.map(|packed| bytes_of(*name, packed)), Some(*bytes));
        }
        table.retain(|_| false);
        assert_eq!((table.len(), table.chunks.len()), (0, 1));
    }
}
