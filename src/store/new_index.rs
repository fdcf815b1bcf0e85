//! A rebuilt index, and the ones that were replaced, which are kept. `index` knows how an index is
//! read and written.

use std::ffi::OsStr;
use std::path::PathBuf;

use super::error::{Error, Result};
use super::index::{Index, create, lost, random_number};
use super::tables::{self, Change, Contents, write};
use crate::model::layout;
use crate::sys::Dir;

/// A rebuilt index beside the one that it replaces, which is kept as `index.redb.old`, or with a
/// number after it: no rebuild replaces what an earlier one kept. After a crash at any moment there
/// is the old index, none, or the complete new one.
#[derive(Debug)]
pub struct NewIndex<'a> {
    root: &'a Dir,
    name: String,
}

impl<'a> NewIndex<'a> {
    /// Writes it as `index.redb.new`.
    pub fn make(root: &'a Dir, changes: &[Change]) -> Result<Self> {
        let name = format!("{}.new", layout::INDEX);
        let database = create(root, &name)?;
        tables::make(&database).map_err(|error| Error::database("make the index", error))?;
        write(&database, changes, random_number())?;
        Ok(Self { root, name })
    }

    /// Renames the old index, if it exists. Returns its new path.
    pub fn clear_place(&self) -> Result<Option<PathBuf>> {
        if !Index::exists(self.root)? {
            return Ok(None);
        }
        let newest = replaced(self.root)?.last().copied();
        let name = replaced_name(newest.map_or(0, |newest| newest.saturating_add(1)));
        self.root.rename(layout::INDEX, self.root, &name)?;
        Ok(Some(self.root.path().join(name)))
    }

    /// Renames the new index into place.
    pub fn take_place(self) -> Result<()> {
        self.root.rename(&self.name, self.root, layout::INDEX)?;
        Ok(self.root.sync()?)
    }
}

/// The name of an index that a rebuilt one replaced: `index.redb.old`, then `index.redb.old.1`, …
fn replaced_name(number: u32) -> String {
    match number {
        0 => format!("{}.old", layout::INDEX),
        _ => format!("{}.old.{number}", layout::INDEX),
    }
}

/// The number in such a name.
fn replaced_number(name: &OsStr) -> Option<u32> {
    let rest = name.to_str()?.strip_prefix(&replaced_name(0))?;
    let number = match rest.strip_prefix('.') {
        Some(digits) => digits.parse().ok()?,
        None => 0,
    };
    (name == replaced_name(number).as_str()).then_some(number)
}

/// The numbers of all replaced indexes, the oldest first.
fn replaced(root: &Dir) -> Result<Vec<u32>> {
    let entries = root.entries()?.into_iter();
    let mut numbers: Vec<u32> = entries
        .filter_map(|entry| replaced_number(&entry.name))
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Reads the newest replaced index that can be read. A rebuild may have ended before the new index
/// was in place.
pub fn read_replaced_index(root: &Dir) -> Result<Contents> {
    let mut read = Err(lost(root, "no earlier index is there"));
    for number in replaced(root)?.into_iter().rev() {
        read = Index::read_file(root, &replaced_name(number));
        if read.is_ok() {
            break;
        }
    }
    read
}

/// Whether a file in the pool is an index that a rebuilt one replaced.
#[must_use]
pub fn is_replaced_index(name: &OsStr) -> bool {
    replaced_number(name).is_some()
}

#[cfg(test)]
mod tests {
    use super::super::index::tests::{artifact, put};
    use super::*;

    #[test]
    fn no_rebuild_replaces_what_an_earlier_one_kept() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        let rebuild = |id| {
            let new = NewIndex::make(&root, &put(id)).expect("made");
            let kept = new.clear_place().expect("cleared");
            new.take_place().expect("placed");
            kept.map(|kept| kept.strip_prefix(folder.path()).expect("here").to_owned())
        };
        assert_eq!(rebuild(1), None);
        assert_eq!(rebuild(2), Some("index.redb.old".into()));
        assert_eq!(rebuild(3), Some("index.redb.old.1".into()));
        // One that was deleted leaves a gap, which stays: the highest number is the newest.
        std::fs::remove_file(folder.path().join("index.redb.old")).expect("removed");
        assert_eq!(rebuild(4), Some("index.redb.old.2".into()));
        let artifacts = |name| Index::read_file(&root, name).expect("read").artifacts;
        assert_eq!(artifacts("index.redb.old.1"), [artifact(2)]);
        assert_eq!(artifacts("index.redb.old.2"), [artifact(3)]);
        // The newest that can be read.
        let replaced = || read_replaced_index(&root).expect("read").artifacts;
        assert_eq!(replaced(), [artifact(3)]);
        std::fs::write(folder.path().join("index.redb.old.2"), "torn").expect("written");
        assert_eq!(replaced(), [artifact(2)]);
        for (name, is_replaced) in [
            ("index.redb.old", true),
            ("index.redb.old.10", true),
            ("index.redb.old.0", false),
            ("index.redb.old.01", false),
            ("index.redb.old.+1", false),
            ("index.redb.old.", false),
            ("index.redb.older", false),
            ("index.redb", false),
        ] {
            assert_eq!(is_replaced_index(OsStr::new(name)), is_replaced, "{name}");
        }
    }
}
