//! What a tree costs on disk.
//!
//! A walk that reads names and inodes, never content; hard links are counted once.

use std::collections::HashSet;

use crate::backend::{Result, Usage};
use crate::sys::{Dir, Entry, Errno, FileKind};

use super::Spine;

/// Adds up what is allocated below `root`, itself included; what has several names counts once.
///
/// Blocks that are shared by reflinks or snapshots are counted wherever they are seen: no filesystem tells without
/// reading every extent. A tree that changes meanwhile is measured as well as can be: what has vanished is not counted,
/// and what is mounted in it is not entered.
pub fn usage(root: &Dir) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut seen = HashSet::new();
    let mut spine = Spine::new(root)?;
    let mut left: Vec<Vec<Entry>> = vec![spine.here().entries()?];
    usage.directories = 1;
    usage.bytes = bytes(spine.here().stat_self()?.st_blocks);
    while let Some(entries) = left.last_mut() {
        let Some(entry) = entries.pop() else {
            left.pop();
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
        if FileKind::of_mode(stat.st_mode) == FileKind::Directory {
            match spine.descend(&entry.name) {
                Ok(()) => {}
                Err(error) if is_gone(error.errno()) => continue,
                Err(error) => return Err(error.into()),
            }
            usage.directories += 1;
            usage.bytes += bytes(stat.st_blocks);
            left.push(spine.here().entries()?);
        } else {
            usage.files += 1;
            if stat.st_nlink < 2 || seen.insert((stat.st_dev, stat.st_ino)) {
                usage.bytes += bytes(stat.st_blocks);
            }
        }
    }
    Ok(usage)
}

/// A directory that is no longer there, no longer a directory, or the place of a mount.
fn is_gone(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV
    )
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
        let usage = usage(&Dir::open(path).expect("open")).expect("usage");
        assert_eq!((usage.files, usage.directories), (3, 3));
        assert!((40_000..80_000).contains(&usage.bytes), "{usage:?}");
    }
}
