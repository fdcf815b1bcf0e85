//! What a tree costs on disk.
//!
//! A walk that reads names and inodes, never content; hard links are counted once. Its memory is bounded whatever the tree is
//! like: names are read in pieces ([`Names`]), and only so many inodes are remembered ([`LINKED`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::ffi::OsStr;

use rustix::fs::Stat;

use crate::model::Usage;
use crate::sys::{self, Dir, Errno, FileKind};
use crate::tree::{Error, Result};

use super::copy::open_content;
use super::names::Names;
use super::{Spine, Stop, is_gone};

/// How many inodes with several names are remembered at a time, 16 MB of them.
const LINKED: usize = 1 << 18;

/// Adds up what is allocated below `root`, itself included; what has several names counts once.
///
/// Blocks that are shared by reflinks or snapshots are counted wherever they are seen: no filesystem tells without
/// reading every extent. A tree that changes meanwhile is measured as well as can be: what has vanished is not counted,
/// and what is mounted in it is not entered. Of a tree in which [`LINKED`] inodes have come to wait for more of their names,
/// names of further ones count for their share (blocks ÷ names): exact when all names are in the tree, too little when some are not.
///
/// Ends early with [`Error::Stopped`].
pub fn usage(root: &Dir, stop: Stop<'_>) -> Result<Usage> {
    walk(root, stop, |_, _, stat| Ok(bytes(stat.st_blocks)))
}

/// At least how many bytes a copy of the tree takes that shares none with it: of what is allocated, what was also written to.
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
        // It may be another by now.
        let stat = node.stat()?;
        if FileKind::of_mode(stat.st_mode) != FileKind::File {
            return Ok(0);
        }
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        let data = sys::data_length(&open_content(&node)?, length);
        let data = data.map_err(|errno| node.error("lseek", errno))?;
        // Where the filesystem compresses, the copy is compressed too.
        Ok(data.min(allocated))
    };
    walk(root, &|| false, data).map(|usage| usage.bytes)
}

/// Adds up what names below `root` cost, itself included.
fn walk(
    root: &Dir,
    stop: Stop<'_>,
    cost: impl Fn(&Dir, &OsStr, &Stat) -> Result<u64>,
) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut links = Links::holding(LINKED);
    let mut spine = Spine::new(root)?;
    let mut levels = vec![Names::new()];
    usage.directories = 1;
    usage.bytes = cost(root, OsStr::new("."), &root.stat_self()?)?;
    while let Some(names) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        let Some(entry) = names.next(spine.here(), spine.depth())? else {
            levels.pop();
            if spine.ascend()?.is_none() {
                break;
            }
            continue;
        };
        let stat = match spine.here().stat(&entry.name) {
            Ok(stat) => stat,
            Err(error) if error.is(Errno::ENOENT) => continue,
            Err(error) => return Err(error.into()),
        };
        let cost = cost(spine.here(), &entry.name, &stat)?;
        if FileKind::of_mode(stat.st_mode) == FileKind::Directory {
            match spine.descend(&entry.name) {
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

/// Files with several names, of which some were met and some not yet.
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

    /// How many bytes a name adds to a file that costs so many.
    #[allow(
        clippy::useless_conversion,
        reason = "st_nlink's type differs between architectures"
    )]
    fn count(&mut self, stat: &Stat, bytes: u64) -> u64 {
        let names = u64::from(stat.st_nlink);
        if names < 2 {
            return bytes;
        }
        // For good: a file of which one name was counted by its share must not be counted as new at the next.
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

/// `st_blocks` are always 512 bytes (stat(2)).
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
