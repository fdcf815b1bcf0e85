//! The names of a directory, sorted, however many there are.
//!
//! A directory of usual size is sorted in memory. A giant one, or one in which the levels above it
//! left no memory, goes through a temporary file. Either is read once: to read it again for each
//! piece would take hours, as a pod can arrange.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::ops::Bound;
use std::os::unix::ffi::OsStrExt;

use redb::TableDefinition;

use super::error::{Error, Result, shown};
use super::spill::{self, Spill};
use crate::sys::{Dir, FileKind};
use crate::tree::Stop;

/// How many bytes of names a walk holds, all levels together. A level takes at most half of what
/// the levels above it left.
const MOST: usize = 16 << 20;
/// What a name costs beside its bytes.
const EACH: usize = 64;
/// A level may hold this much in any case: the temporary file is not for small directories, of
/// which there may be millions.
const LEAST: usize = 512;
/// How many bytes of names the temporary file may have.
const MOST_SPILLED: usize = 1 << 30;
/// How many names are read at a time, and after how many `stop` is asked.
const PIECE: usize = 4096;
const ASK: usize = 64;

/// Names of directories, each behind the number of its directory.
const TABLE: TableDefinition<'_, (u64, &[u8]), u8> = TableDefinition::new("names");
/// What a name is, as the table has it: its place here, or a number that is none.
const KINDS: [FileKind; 7] = [
    FileKind::Directory,
    FileKind::File,
    FileKind::Symlink,
    FileKind::CharacterDevice,
    FileKind::BlockDevice,
    FileKind::Fifo,
    FileKind::Socket,
];

/// What all levels of a walk hold together.
pub(super) struct Budget<'a> {
    most: usize,
    held: usize,
    file: Spill<'a>,
    /// How many directories went through the file, and how many bytes of names.
    spilled: u64,
    bytes: usize,
}

impl<'a> Budget<'a> {
    pub(super) fn new(temporary: &'a Dir) -> Self {
        Self::of(MOST, temporary)
    }

    fn of(bytes: usize, temporary: &'a Dir) -> Self {
        Self {
            most: bytes,
            held: 0,
            file: Spill::new(temporary),
            spilled: 0,
            bytes: 0,
        }
    }

    /// How much the next level may take.
    fn share(&self) -> usize {
        (self.most.saturating_sub(self.held) / 2).max(LEAST)
    }

    /// Moves names into the file.
    fn spill(&mut self, directory: u64, names: &mut Vec<Name>) -> Result<()> {
        let transaction = self.file.write()?;
        {
            let mut table = transaction.open_table(TABLE).map_err(spill::failed)?;
            for (name, kind) in names.drain(..) {
                self.bytes += name.len();
                if self.bytes > MOST_SPILLED {
                    let path = shown(name.as_bytes());
                    let why = "the names of giant directories exceed 1 GiB";
                    return Err(Error::Unpackable { path, why });
                }
                let place = KINDS.iter().position(|it| Some(*it) == kind);
                let place = place.and_then(|place| u8::try_from(place).ok());
                let row = (directory, name.as_bytes());
                let inserted = table.insert(row, place.unwrap_or(u8::MAX));
                inserted.map_err(spill::failed)?;
            }
        }
        transaction.commit().map_err(spill::failed)
    }

    /// The next names of a directory in the file, at least one, and whether they are the last.
    fn load(&self, directory: u64, after: Option<&OsStr>) -> Result<(VecDeque<Name>, bool)> {
        let (mut names, mut held, most) = (VecDeque::new(), 0, self.share());
        let Some(transaction) = self.file.read()? else {
            return Ok((names, true));
        };
        let table = transaction.open_table(TABLE).map_err(spill::failed)?;
        let first = match after {
            None => Bound::Included((directory, &b""[..])),
            Some(name) => Bound::Excluded((directory, name.as_bytes())),
        };
        let rows = table.range((first, Bound::Excluded((directory + 1, &b""[..]))));
        for row in rows.map_err(spill::failed)? {
            let (key, kind) = row.map_err(spill::failed)?;
            let name = OsStr::from_bytes(key.value().1).to_owned();
            held += cost(&name);
            if held > most && !names.is_empty() {
                return Ok((names, false));
            }
            names.push_back((name, KINDS.get(usize::from(kind.value())).copied()));
        }
        Ok((names, true))
    }
}

/// A name, and what the directory says that it is. Ordered by the name's bytes.
pub(super) type Name = (OsString, Option<FileKind>);

/// A walk's place in one directory.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    piece: VecDeque<Name>,
    was_read: bool,
    /// The number of the directory in the temporary file, if more names are there, and the last one
    /// that was taken.
    rest: Option<(u64, Option<OsString>)>,
}

impl Sorted {
    /// The next name of `dir`.
    pub(super) fn next(
        &mut self,
        dir: &Dir,
        budget: &mut Budget<'_>,
        stop: Stop<'_>,
    ) -> Result<Option<Name>> {
        if !self.was_read {
            self.was_read = true;
            self.read(dir, budget, stop)?;
        }
        if self.piece.is_empty()
            && let Some((directory, last)) = self.rest.take()
        {
            let (piece, is_last) = budget.load(directory, last.as_deref())?;
            budget.held += piece.iter().map(|(name, _)| cost(name)).sum::<usize>();
            if !is_last {
                self.rest = Some((directory, piece.back().map(|(name, _)| name.clone())));
            }
            self.piece = piece;
        }
        let next = self.piece.pop_front();
        if let Some((name, _)) = &next {
            budget.held -= cost(name);
        }
        Ok(next)
    }

    /// Reads the whole directory.
    fn read(&mut self, dir: &Dir, budget: &mut Budget<'_>, stop: Stop<'_>) -> Result<()> {
        let most = budget.share();
        let (mut names, mut held) = (Vec::new(), 0);
        let mut listing = dir.listing()?;
        while let Some(entries) = listing.next(PIECE)? {
            for (index, entry) in entries.into_iter().enumerate() {
                if index % ASK == 0 && stop() {
                    return Err(Error::Stopped);
                }
                held += cost(&entry.name);
                names.push((entry.name, entry.kind));
            }
            if held <= most {
                continue;
            }
            let (directory, _) = *self.rest.get_or_insert_with(|| {
                budget.spilled += 1;
                (budget.spilled, None)
            });
            budget.spill(directory, &mut names)?;
        }
        if let Some((directory, _)) = self.rest {
            return budget.spill(directory, &mut names);
        }
        names.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        // A process may rename entries while the directory is read: a name may come twice.
        names.dedup_by(|later, earlier| {
            let is_same = later.0 == earlier.0;
            if is_same {
                held -= cost(&later.0);
            }
            is_same
        });
        budget.held += held;
        self.piece = names.into();
        Ok(())
    }
}

fn cost(name: &OsString) -> usize {
    name.len() + EACH
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;

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
        let temporary = tempfile::tempdir().expect("a temporary folder");
        let temporary = Dir::open(temporary.path()).expect("it opens");
        for bytes in [0, 2_000, 40_000, 64_000, 200_000, MOST] {
            let mut budget = Budget::of(bytes, &temporary);
            let mut sorted = Sorted::default();
            let mut names = Vec::new();
            let mut next = || sorted.next(&dir, &mut budget, &|| false).expect("next");
            while let Some((name, kind)) = next() {
                assert_eq!(kind, Some(FileKind::File));
                names.push(name);
            }
            assert_eq!(names, expected, "with {bytes}");
            assert_eq!(budget.held, 0, "it is all given back");
            assert_eq!(budget.spilled > 0, bytes < 200_000);
        }
        let stopped = Sorted::default().next(&dir, &mut Budget::new(&temporary), &|| true);
        assert!(matches!(stopped, Err(Error::Stopped)));
        assert!(temporary.entries().expect("entries").is_empty());
    }

    /// Levels that hold names leave no memory for those below them.
    #[test]
    fn a_giant_directory_far_down_is_read_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let temporary = Dir::open(folder.path()).expect("it opens");
        let (above, below) = (folder.path().join("above"), folder.path().join("below"));
        for (path, count) in [(&above, 300), (&below, 5000)] {
            fs::create_dir(path).expect("mkdir");
            for number in 0..count {
                fs::write(path.join(format!("{number:0200}")), b"").expect("write");
            }
        }
        let (above, below) = (
            Dir::open(&above).expect("open"),
            Dir::open(&below).expect("open"),
        );
        let mut budget = Budget::of(64 << 10, &temporary);
        let mut levels: Vec<Sorted> = (0..8).map(|_| Sorted::default()).collect();
        for level in &mut levels {
            level.next(&above, &mut budget, &|| false).expect("next");
        }
        // Each read asks for every 64 names.
        let asked = Cell::new(0);
        let ask = || {
            asked.set(asked.get() + 1);
            false
        };
        let mut left = |level: &mut Sorted, dir: &Dir| {
            let next = || level.next(dir, &mut budget, &ask).expect("next");
            std::iter::from_fn(next).count()
        };
        assert_eq!(left(&mut Sorted::default(), &below), 5000);
        assert_eq!(asked.get(), 79);
        for level in &mut levels {
            assert_eq!(left(level, &above), 299);
        }
        assert_eq!(budget.held, 0);
    }

    /// Each would be a transaction of its own, and there may be millions.
    #[test]
    fn small_directories_stay_in_memory_where_little_is_left() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        dir.write_new("name", b"").expect("write");
        let mut budget = Budget::of(0, &dir);
        let next = Sorted::default().next(&dir, &mut budget, &|| false);
        assert!(next.expect("next").is_some());
        assert_eq!(budget.spilled, 0);
    }

    #[test]
    fn a_full_disk_is_the_error_of_a_spill() {
        let error = spill::failed(redb::Error::Io(std::io::Error::from_raw_os_error(28)));
        assert!(matches!(error, Error::System(error) if error.is_full()));
    }
}
