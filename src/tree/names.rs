//! Reads the names of a directory in pieces.
//!
//! The author of a tree must not decide how much memory a walk takes; these are its limits.

use std::vec::IntoIter;

use crate::sys::{self, Dir, Entry};

/// How many names a walk holds, all levels together …
const NAMES: usize = 1 << 16;
/// … and one level, at least and at most. Names of 255 bytes take 20 MB, and 5 KB for each level
/// beyond the 4,096th.
const NAMES_PER_LEVEL: (usize, usize) = (16, 4096);

/// How many names a directory at this depth may hold in memory.
pub(super) fn share(depth: usize) -> usize {
    let (least, most) = NAMES_PER_LEVEL;
    (NAMES / (depth + 1)).clamp(least, most)
}

/// A position in one directory. The caller passes the directory, which may have been reopened.
#[derive(Debug)]
pub(super) struct Names {
    piece: IntoIter<Entry>,
    next: Option<u64>,
}

impl Names {
    pub(super) fn new() -> Self {
        Self {
            piece: Vec::new().into_iter(),
            next: Some(0),
        }
    }

    /// The next name of `dir`, which is `depth` levels below the walk's root.
    pub(super) fn next(&mut self, dir: &Dir, depth: usize) -> sys::Result<Option<Entry>> {
        loop {
            if let Some(entry) = self.piece.next() {
                return Ok(Some(entry));
            }
            let Some(from) = self.next else {
                return Ok(None);
            };
            let (piece, next) = dir.entries_from(from, share(depth))?;
            (self.piece, self.next) = (piece.into_iter(), next);
        }
    }
}
