//! The names of a directory, read a piece at a time.
//!
//! A walk's memory must not grow with what somebody else has made. How much a walk may hold is said here; what is done with
//! the names is the walk's.

use std::vec::IntoIter;

use crate::sys::{self, Dir, Entry};

/// How many names a walk holds, all levels together …
const NAMES: usize = 1 << 16;
/// … and one of them, at least and at most. With names of 255 bytes that is 20 MB, and 5 KB for each level beyond the 4,096th.
const NAMES_PER_LEVEL: (usize, usize) = (16, 4096);

/// How many names of a directory may be held at a level so deep.
pub(super) fn share(depth: usize) -> usize {
    let (least, most) = NAMES_PER_LEVEL;
    (NAMES / (depth + 1)).clamp(least, most)
}

/// A reader's place in one directory. The directory is handed in each time, since it may have been closed meanwhile.
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
