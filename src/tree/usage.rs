//! The disk usage of a tree.
//!
//! The walk reads names and inodes, never content, and counts hard links once. Its memory is
//! bounded: names are read in pieces ([`Names`]), and inodes are remembered as bits ([`Links`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::ffi::OsStr;

use rustix::fs::Stat;

use crate::model::Usage;
use crate::sys::{self, Dir, Errno, FileKind};
use crate::tree::error::{Error, Result};

use super::copy::open_content;
use super::dir_stack::DirStack;
use super::error::{Stop, is_gone};
use super::names::Names;

/// The maximum of groups of 64 inodes to remember: 16 MB.
const GROUPS: usize = 1 << 18;

/// Adds up the allocated blocks of `root` and all below it. A file with several names counts once.
///
/// Blocks shared by reflinks or snapshots count each time: only reading every extent would tell. If
/// the tree changes, the result is approximate: vanished entries do not count. Mounts are not
/// entered. Once files of [`GROUPS`] groups of inodes have several names, each name of a file in a
/// further group counts blocks ÷ names: exact if all names are in the tree, else too little.
///
/// Ends early with [`Error::Stopped`].
pub fn usage(root: &Dir, stop: Stop<'_>) -> Result<Usage> {
    walk(root, stop, |_, _, stat| Ok(bytes(stat.st_blocks)))
}

/// A lower bound of the bytes of an unshared copy: allocated blocks that were also written to.
pub(super) fn data(root: &Dir) -> Result<u64> {
    let data = |dir: &Dir, name: &OsStr, stat: &Stat| {
        let allocated = bytes(stat.st_blocks);
        if allocated == 0 || FileKind::of_mode(stat.st_mode) != FileKind::File {
            return Ok(0);
        }
        let node = match dir.node(name) {
            Err(error) if error.is(Errno::ENOENT) => return Ok(0),
            node => node?,
        };
        // Another file may have this name by now.
        let stat = node.stat()?;
        if FileKind::of_mode(stat.st_mode) != FileKind::File {
            return Ok(0);
        }
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        let data = sys::data_length(&open_content(&node)?, length);
        let data = data.map_err(|errno| node.error("lseek", errno))?;
        // A filesystem that compresses the original compresses the copy too.
        Ok(data.min(allocated))
    };
    walk(root, &|| false, data).map(|usage| usage.bytes)
}

/// Adds up the cost of `root` and of every name below it.
fn walk(
    root: &Dir,
    stop: Stop<'_>,
    cost: impl Fn(&Dir, &OsStr, &Stat) -> Result<u64>,
) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut links = Links::holding(GROUPS);
    let mut stack = DirStack::new(root)?;
    let mut levels = vec![Names::new()];
    usage.directories = 1;
    usage.bytes = cost(root, OsStr::new("."), &root.stat_self()?)?;
    while let Some(names) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        let Some(entry) = names.next(stack.here(), stack.depth())? else {
            levels.pop();
            if stack.ascend()?.is_none() {
                break;
            }
            continue;
        };
        let stat = match stack.here().stat(&entry.name) {
            Ok(stat) => stat,
            Err(error) if error.is(Errno::ENOENT) => continue,
            Err(error) => return Err(error.into()),
        };
        let cost = cost(stack.here(), &entry.name, &stat)?;
        if FileKind::of_mode(stat.st_mode) == FileKind::Directory {
            match stack.descend(&entry.name) {
                Ok(()) => {}
                Err(error) if is_gone(error.errno()) => continue,
                Err(error) => return Err(error.into()),
            }
            usage.directories += 1;
            usage.bytes += cost;
            levels.push(Names::new());
        } else {
            usage.files += 1;
            usage.bytes += links.count(&stat, cost);
        }
    }
    Ok(usage)
}

/// The files with several names that the walk has counted.
///
/// A merged layer is all hard links: each of its files has another name in a layer that is merged.
/// So the number of names in the tree is unknown, and a file cannot be forgotten after its last
/// one. But filesystems give files that are made together inodes that are near each other: a group
/// of 64 is one entry with a bit for each.
struct Links {
    most: usize,
    counted: HashMap<(u64, u64), u64>,
}

impl Links {
    fn holding(most: usize) -> Self {
        Self {
            most,
            counted: HashMap::new(),
        }
    }

    /// The bytes that one name adds, of a file that costs `bytes`.
    #[allow(
        clippy::useless_conversion,
        reason = "st_nlink's type differs between architectures"
    )]
    fn count(&mut self, stat: &Stat, bytes: u64) -> u64 {
        let names = u64::from(stat.st_nlink);
        if names < 2 {
            return bytes;
        }
        let is_full = self.counted.len() >= self.most;
        let group = match self.counted.entry((stat.st_dev, stat.st_ino / 64)) {
            // So it is at each further name: no group is forgotten.
            Slot::Vacant(_) if is_full => return bytes / names,
            slot => slot.or_default(),
        };
        let bit = 1 << (stat.st_ino % 64);
        if *group & bit != 0 {
            return 0;
        }
        *group |= bit;
        bytes
    }
}

/// The unit of `st_blocks` is always 512 bytes (stat(2)).
fn bytes(blocks: i64) -> u64 {
    u64::try_from(blocks).unwrap_or(0) * 512
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn names_are_counted_and_blocks_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path();
        fs::create_dir_all(path.join("a/b")).expect("mkdir");
        fs::write(path.join("a/one"), vec![1; 40_000]).expect("write");
        fs::hard_link(path.join("a/one"), path.join("a/b/two")).expect("link");
        std::os::unix::fs::symlink("/", path.join("root")).expect("symlink");
        let dir = Dir::open(path).expect("open");
        let usage = usage(&dir, &|| false).expect("usage");
        assert_eq!((usage.files, usage.directories), (3, 3));
        assert!((40_000..80_000).contains(&usage.bytes), "{usage:?}");
        let stopped = super::usage(&dir, &|| true).expect_err("stopped");
        assert!(matches!(stopped, Error::Stopped), "{stopped}");
    }

    /// Files with two names each, whose inodes are `step` apart.
    fn linked(files: u64, step: u64) -> Vec<Stat> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = |name| folder.path().join(name);
        fs::write(path("one"), vec![1; 8192]).expect("write");
        fs::hard_link(path("one"), path("other")).expect("link");
        let mut stat = rustix::fs::lstat(path("one")).expect("stat");
        let numbered = |number| {
            stat.st_ino = number * step;
            stat
        };
        (0..files).map(numbered).collect()
    }

    #[test]
    fn links_are_counted_once_and_no_more_of_them_are_remembered_than_fit() {
        const FILES: usize = 20;
        let stats = linked(FILES as u64, 64);
        let all: u64 = stats.iter().map(|stat| bytes(stat.st_blocks)).sum();
        for most in [0, 1, FILES / 2, FILES] {
            let mut links = Links::holding(most);
            let mut sum = 0;
            for stat in stats.iter().chain(&stats) {
                sum += links.count(stat, bytes(stat.st_blocks));
                assert!(links.counted.len() <= most);
            }
            assert_eq!(sum, all, "at most {most}");
        }
    }

    /// As in a merged layer, whose files have a name in an older layer each.
    #[test]
    fn files_with_a_name_elsewhere_count_in_full() {
        const MOST: usize = 4;
        let stats = linked(64 * MOST as u64, 1);
        let mut links = Links::holding(MOST);
        for stat in &stats {
            let blocks = bytes(stat.st_blocks);
            assert_eq!(links.count(stat, blocks), blocks, "inode {}", stat.st_ino);
        }
    }
}
