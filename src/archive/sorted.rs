//! The names of a directory, sorted, however many there are.
//!
//! A directory is read from its beginning as often as it takes: each pass picks the smallest of the
//! names that are still to come, as many as may be held. So a directory of usual size costs one
//! pass, and a giant one time instead of memory, and no temporary file.

use std::collections::{BinaryHeap, VecDeque};
use std::ffi::OsString;

use crate::sys::{self, Dir, FileKind};

/// How many bytes of names a walk holds, all levels together. A level takes at most half of what
/// the levels above it left.
const MOST: usize = 16 << 20;
/// What a name costs beside its bytes.
const EACH: usize = 64;
/// How many names a level may hold at least, however little is left.
const LEAST: usize = 16;
/// How many names are read at a time.
const PIECE: usize = 4096;

/// What all levels of a walk hold together.
#[derive(Debug)]
pub(super) struct Budget {
    left: usize,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self::of(MOST)
    }

    pub(super) fn of(bytes: usize) -> Self {
        Self { left: bytes }
    }
}

/// A name, and what the directory says that it is. Ordered by the name's bytes.
pub(super) type Name = (OsString, Option<FileKind>);

/// A walk's place in one directory.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    piece: VecDeque<Name>,
    /// The last name that was picked; the next pass begins behind it.
    last: Option<OsString>,
    done: bool,
}

impl Sorted {
    /// The next name of `dir`.
    pub(super) fn next(&mut self, dir: &Dir, budget: &mut Budget) -> sys::Result<Option<Name>> {
        if self.piece.is_empty() && !self.done {
            self.pick(dir, budget)?;
        }
        let next = self.piece.pop_front();
        if let Some((name, _)) = &next {
            budget.left += cost(name);
        }
        Ok(next)
    }

    /// Reads the whole directory, and keeps the smallest names behind the last.
    fn pick(&mut self, dir: &Dir, budget: &mut Budget) -> sys::Result<()> {
        let most = budget.left / 2;
        let mut picked: BinaryHeap<Picked> = BinaryHeap::new();
        let (mut held, mut next, mut all) = (0, Some(0), true);
        while let Some(from) = next {
            let (entries, after) = dir.entries_from(from, PIECE)?;
            next = after;
            for entry in entries {
                if self.last.as_ref().is_some_and(|last| entry.name <= *last) {
                    continue;
                }
                let full = picked.len() >= LEAST && held + cost(&entry.name) > most;
                if full && picked.peek().is_some_and(|top| entry.name >= top.0) {
                    all = false;
                    continue;
                }
                held += cost(&entry.name);
                picked.push(Picked(entry.name, entry.kind));
                while held > most && picked.len() > LEAST {
                    let largest = picked.pop().expect("it has more than the least");
                    held -= cost(&largest.0);
                    all = false;
                }
            }
        }
        self.done = all;
        self.last = picked.peek().map(|top| top.0.clone());
        budget.left = budget.left.saturating_sub(held);
        let sorted = picked.into_sorted_vec().into_iter();
        // A process may rename entries while the directory is read: a name may come twice.
        let mut names: Vec<Name> = sorted.map(|Picked(name, kind)| (name, kind)).collect();
        names.dedup_by(|later, earlier| {
            let same = later.0 == earlier.0;
            if same {
                budget.left += cost(&later.0);
            }
            same
        });
        self.piece = names.into();
        Ok(())
    }
}

fn cost(name: &OsString) -> usize {
    name.len() + EACH
}

/// A name in the heap: by its bytes alone.
#[derive(Debug)]
struct Picked(OsString, Option<FileKind>);

impl PartialEq for Picked {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Picked {}

impl PartialOrd for Picked {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Picked {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_sorted_and_once_however_few_may_be_held() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let mut expected = Vec::new();
        for number in 0..1000 {
            // Of many lengths, and not in the order in which they are made.
            let name = format!("{:x}", (number * 7919) % 1009 * 0x1f_3d5b);
            dir.write_new(&name, b"").expect("write");
            expected.push(OsString::from(name));
        }
        expected.sort();
        for bytes in [0, 2_000, 40_000, 64_000, 200_000, MOST] {
            let mut budget = Budget::of(bytes);
            let mut sorted = Sorted::default();
            let mut names = Vec::new();
            while let Some((name, kind)) = sorted.next(&dir, &mut budget).expect("next") {
                assert!(matches!(kind, None | Some(FileKind::File)));
                assert!(sorted.piece.len() <= LEAST.max(bytes / 2 / EACH));
                names.push(name);
            }
            assert_eq!(names, expected, "with {bytes}");
            assert!(budget.left >= bytes, "it is all given back");
        }
    }
}
