//! Files with several names, and the path under which each was packed.
//!
//! A pod may delete a file while its volume is packed, and the filesystem gives the inode to a new
//! one. So size and time belong to what identifies a file. A file that changes between its names is
//! packed once for each.
//!
//! In memory up to a bound, then in a temporary file. A file is forgotten when all its names were
//! seen.

use std::collections::HashMap;

use redb::TableDefinition;
use rustix::fs::Stat;

use super::error::{Error, Result, shown};
use super::spill::{self, Spill};
use crate::sys::Dir;

/// How many bytes are remembered in memory.
const MOST: usize = 4 << 20;
/// What a file costs beside its path.
const EACH: usize = 128;
/// A path of usual length. Longer ones have up to 64 KiB, so few files could fill the disk.
const USUAL: usize = 512;
/// How many bytes beyond that the paths in the temporary file may have together.
const MOST_SPILLED: usize = 1 << 30;

/// Device, inode, size, and the time of the last change of its content: seconds, nanoseconds.
type Identity = (u64, u64, u64, i64, u64);

const TABLE: TableDefinition<'_, Identity, &[u8]> = TableDefinition::new("links");

/// The table.
pub(super) struct Links<'a> {
    /// How many bytes may be in memory, and how many of long paths in the temporary file.
    most: usize,
    most_spilled: usize,
    memory: HashMap<Identity, (Vec<u8>, u64)>,
    held: usize,
    spilled: usize,
    file: Spill<'a>,
}

impl<'a> Links<'a> {
    /// A table that makes its temporary file in `temporary`, if it needs one.
    pub(super) fn new(temporary: &'a Dir) -> Self {
        Self::holding(MOST, MOST_SPILLED, temporary)
    }

    fn holding(most: usize, most_spilled: usize, temporary: &'a Dir) -> Self {
        Self {
            most,
            most_spilled,
            memory: HashMap::new(),
            held: 0,
            spilled: 0,
            file: Spill::new(temporary),
        }
    }

    /// By which path the file was packed before; `None`: not yet, and it is `path` from now on.
    #[allow(
        clippy::useless_conversion,
        reason = "st_nlink's type differs between architectures"
    )]
    pub(super) fn first_path(&mut self, path: &[u8], stat: &Stat) -> Result<Option<Vec<u8>>> {
        let names = u64::from(stat.st_nlink);
        if names < 2 {
            return Ok(None);
        }
        let file = identity(stat);
        let first = self.find(file)?;
        if first.is_none() {
            self.insert(file, path, names)?;
        }
        Ok(first)
    }

    fn find(&mut self, file: Identity) -> Result<Option<Vec<u8>>> {
        if let Some((path, names)) = self.memory.get_mut(&file) {
            *names = names.saturating_sub(1);
            if *names > 0 {
                return Ok(Some(path.clone()));
            }
            let last = self.memory.remove(&file).map(|(path, _)| path);
            self.held -= last.as_ref().map_or(0, |path| EACH + path.len());
            return Ok(last);
        }
        let Some(transaction) = self.file.read()? else {
            return Ok(None);
        };
        let table = transaction.open_table(TABLE).map_err(spill::failed)?;
        let found = table.get(file).map_err(spill::failed)?;
        Ok(found.map(|path| path.value().to_vec()))
    }

    /// Remembers by which path a file with so many names was packed.
    fn insert(&mut self, file: Identity, path: &[u8], names: u64) -> Result<()> {
        let cost = EACH + path.len();
        if self.held + cost > self.most {
            self.flush()?;
        }
        if self.spilled > self.most_spilled {
            let why = "the long paths of files with several names exceed 1 GiB";
            let path = shown(path);
            return Err(Error::Unpackable { path, why });
        }
        self.held += cost;
        self.memory.insert(file, (path.to_vec(), names - 1));
        Ok(())
    }

    /// Moves what is in memory into the file.
    fn flush(&mut self) -> Result<()> {
        let transaction = self.file.write()?;
        {
            let mut table = transaction.open_table(TABLE).map_err(spill::failed)?;
            for (file, (path, _)) in self.memory.drain() {
                self.spilled += path.len().saturating_sub(USUAL);
                let row = table.insert(file, path.as_slice());
                row.map_err(spill::failed)?;
            }
        }
        self.held = 0;
        transaction.commit().map_err(spill::failed)
    }
}

#[allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::unnecessary_cast,
    reason = "the fields' types differ between architectures; each is only compared"
)]
fn identity(stat: &Stat) -> Identity {
    (
        stat.st_dev,
        stat.st_ino,
        stat.st_size as u64,
        stat.st_mtime as i64,
        stat.st_mtime_nsec as u64,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(device: u64, inode: u64) -> Identity {
        (device, inode, 0, 0, 0)
    }

    #[test]
    fn a_new_file_with_the_inode_of_a_deleted_one_is_not_a_name_of_that() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        std::fs::write(folder.path().join("file"), "content").expect("write");
        std::fs::hard_link(folder.path().join("file"), folder.path().join("name")).expect("link");
        let old = dir.stat("file").expect("stat");
        for most in [1, 1000] {
            let mut links = Links::holding(most, MOST_SPILLED, &dir);
            let mut first = |path: &[u8], stat: &Stat| links.first_path(path, stat).expect("found");
            assert_eq!(first(b"old", &old), None);
            let [mut longer, mut later] = [old; 2];
            longer.st_size += 1;
            later.st_mtime_nsec ^= 1;
            for (new, path) in [(&longer, &b"longer"[..]), (&later, b"later")] {
                assert_eq!(first(path, new), None);
                assert_eq!(first(b"again", new).as_deref(), Some(path));
            }
            assert_eq!(first(b"name", &old).as_deref(), Some(&b"old"[..]));
        }
    }

    #[test]
    fn a_file_is_found_by_its_first_path_whether_it_is_in_memory_or_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        for most in [1, 1000, 100_000] {
            let mut links = Links::holding(most, MOST_SPILLED, &dir);
            for inode in 0..200_u64 {
                assert_eq!(links.find(number(1, inode)).expect("find"), None);
                let path = format!("path/of/{inode}");
                links
                    .insert(number(1, inode), path.as_bytes(), 3)
                    .expect("insert");
                let memory = links.memory.values().map(|(path, _)| EACH + path.len());
                assert_eq!(memory.sum::<usize>(), links.held);
                assert!(links.held <= most.max(200));
            }
            for _ in 0..2 {
                for inode in 0..200_u64 {
                    let path = format!("path/of/{inode}").into_bytes();
                    assert_eq!(links.find(number(1, inode)).expect("find"), Some(path));
                }
            }
            assert_eq!(links.find(number(2, 0)).expect("find"), None);
            let was_written = links.file.read().expect("begun").is_some();
            assert_eq!(was_written, most < 100_000);
        }
        assert!(dir.entries().expect("entries").is_empty(), "it has no name");
    }

    /// A pod makes few inodes for that.
    #[test]
    fn long_paths_fill_neither_memory_nor_the_disk() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let mut links = Links::holding(1 << 20, 8 << 20, &dir);
        let path = vec![b'd'; 60_000];
        let mut inserted = (0..1000).map(|inode| {
            let inserted = links.insert(number(1, inode), &path, 2);
            assert!(links.held <= 1 << 20);
            inserted
        });
        let refused = inserted.find_map(Result::err);
        assert!(
            matches!(refused, Some(Error::Unpackable { .. })),
            "{refused:?}"
        );
        assert!(links.spilled <= 9 << 20);
        // Where all paths are of usual length, the number of entries is the limit.
        let mut links = Links::holding(1 << 20, 8 << 20, &dir);
        for inode in 0..100_000 {
            let inserted = links.insert(number(2, inode), &path[..100], 2);
            inserted.expect("they are short");
        }
    }
}
