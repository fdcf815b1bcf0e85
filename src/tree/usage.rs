//! The disk usage of a tree.
//!
//! The walk reads names and inodes, never content, and counts hard links once. Its memory is
//! bounded: names are read in pieces ([`Names`]), and at most [`LINKED`] inodes are remembered.

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

/// The maximum of inodes with several names to remember: 16 MB.
const LINKED: usize = 1 << 18;

/// Adds up the allocated blocks of `root` and all below it. A file with several names counts once.
///
/// Blocks shared by reflinks or snapshots count each time: only reading every extent would tell. If
/// the tree changes, the result is approximate: vanished entries do not count. Mounts are not
/// entered. Once [`LINKED`] inodes wait for more of their names, each name of a further inode
/// counts blocks ÷ names: exact if all names are in the tree, else too little.
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
    let mut links = Links::holding(LINKED);
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

/// Files with several names, some of which the walk has not seen yet.
struct Links {
    most: usize,
    overflowed: bool,
    missing: HashMap<(u64, u64), u64>,
}

impl Links {
    fn holding(most: usize) -> Self {
        Self {
            most,
            overflowed: false,
            missing: HashMap::new(),
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
        // Permanent: a file counted by its share once must not count in full at its next name.
        self.overflowed |= self.missing.len() >= self.most;
        match self.missing.entry((stat.st_dev, stat.st_ino)) {
            Slot::Occupied(mut slot) => {
                *slot.get_mut() -= 1;
                if *slot.get() == 0 {
                    slot.remove();
                }
                0
            }
            Slot::Vacant(_) if self.overflowed => bytes / names,
            Slot::Vacant(slot) => {
                slot.insert(names - 1);
                bytes
            }
        }
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

    #[test]
    fn links_are_counted_once_and_no_more_of_them_are_remembered_than_fit() {
        const FILES: usize = 20;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = |kind: &str, number| folder.path().join(format!("{kind}-{number}"));
        let mut stats = Vec::new();
        for number in 0..FILES {
            fs::write(path("one", number), vec![1; 8192]).expect("write");
            fs::hard_link(path("one", number), path("other", number)).expect("link");
            stats.push(rustix::fs::lstat(path("one", number)).expect("stat"));
        }
        let all: u64 = stats.iter().map(|stat| bytes(stat.st_blocks)).sum();
        for most in [0, 1, FILES / 2, FILES] {
            let mut links = Links::holding(most);
            let mut sum = 0;
            for stat in stats.iter().chain(&stats) {
                sum += links.count(stat, bytes(stat.st_blocks));
                assert!(links.missing.len() <= most);
            }
            assert_eq!((sum, links.missing.len()), (all, 0), "at most {most}");
        }
    }
}
