//! Deleting a tree, in place and for good.
//!
//! By descriptors only: no symlink is followed, no mount point crossed, and the depth of the tree costs no stack.

use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{OFlags, RawDir};

use crate::backend::Result;
use crate::sys::{self, Dir, Errno, FileKind};

use super::Spine;

/// How often a tree is begun anew because somebody who still has a directory of it open moves things in it. Every
/// round removes what stands still, so only who never stops moving can outlast them.
const ROUNDS: usize = 64;
/// How many names of directories that are not empty are remembered at a time, shared by all levels: reading a directory
/// anew after each would be quadratic (ext4 keeps the emptied blocks), remembering all would cost memory without bound.
const FULL_NAMES: usize = 1 << 16;
/// And of one level.
const FULL_NAMES_PER_LEVEL: usize = 4096;

/// Deletes `name` in `trash` with everything below it; Ok when there is nothing of that name.
///
/// No symlink is followed. A mount point in the tree is an error that names it (EXDEV for a directory, EBUSY for a file),
/// and what stands beside it may be gone already. Immutable and append-only flags are cleared where they are in the way.
/// Names are read in pieces, so a directory with a million of them costs no memory; nothing recurses, so depth does not matter.
pub fn delete(trash: &Dir, name: &Path) -> Result<()> {
    for round in 1.. {
        match delete_once(trash, name) {
            Err(error) if round < ROUNDS && moved(error.errno()) => {}
            result => return Ok(result?),
        }
    }
    Ok(())
}

/// What is seen when names change between being read and being removed.
fn moved(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ESTALE | Errno::ENOTEMPTY | Errno::ENOTDIR | Errno::EISDIR | Errno::ELOOP
    )
}

fn delete_once(trash: &Dir, name: &Path) -> sys::Result<()> {
    let Some(stat) = trash.stat_if_there(name)? else {
        return Ok(());
    };
    if FileKind::of_mode(stat.st_mode) != FileKind::Directory {
        return remove(trash, name, false);
    }
    let mut spine = Spine::new(trash)?;
    spine.descend(name)?;
    let mut buffer = vec![MaybeUninit::uninit(); 64 * 1024];
    // For each level the directories found there that were not empty.
    let mut full: Vec<Vec<OsString>> = vec![Vec::new()];
    while let Some(below) = full.last_mut() {
        if let Some(name) = below.pop() {
            match spine.descend(&name) {
                Ok(()) => full.push(Vec::new()),
                Err(error) if error.is(Errno::ENOENT) => {}
                Err(error) => return Err(error),
            }
            continue;
        }
        let wanted = (FULL_NAMES / full.len()).clamp(1, FULL_NAMES_PER_LEVEL);
        let found = clear(spine.here(), wanted, &mut buffer)?;
        if let (Some(below), false) = (full.last_mut(), found.is_empty()) {
            *below = found;
            continue;
        }
        full.pop();
        if let Some((name, _)) = spine.ascend()? {
            remove(spine.here(), Path::new(&name), true)?;
        }
    }
    Ok(())
}

/// Removes what is no directory, and directories that are empty; returns up to `wanted` that are not. None: it is empty.
fn clear(dir: &Dir, wanted: usize, buffer: &mut [MaybeUninit<u8>]) -> sys::Result<Vec<OsString>> {
    // Unlinking while reading may make a filesystem skip names (readdir(3) promises nothing): read until a pass finds none.
    loop {
        let fd = dir.open_file_beneath(".", OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        let mut reader = RawDir::new(fd, buffer);
        let (mut any, mut full) = (false, Vec::new());
        while let Some(entry) = reader.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // The directory itself was removed while we read it.
                Err(rustix::io::Errno::NOENT) => break,
                Err(errno) => return Err(dir.error("getdents64", "", errno)),
            };
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            any = true;
            let is_directory = match entry.file_type() {
                rustix::fs::FileType::Directory => true,
                rustix::fs::FileType::Unknown => dir
                    .stat_if_there(name)?
                    .is_some_and(|stat| FileKind::of_mode(stat.st_mode) == FileKind::Directory),
                _ => false,
            };
            match remove(dir, Path::new(name), is_directory) {
                Ok(()) => {}
                // EEXIST is the other errno that rmdir(2) allows for a directory that is not empty.
                Err(error)
                    if is_directory && (error.is(Errno::ENOTEMPTY) || error.is(Errno::EEXIST)) =>
                {
                    full.push(name.to_owned());
                    if full.len() == wanted {
                        return Ok(full);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if !full.is_empty() || !any {
            return Ok(full);
        }
    }
}

/// Removes one name, clearing the flags that forbid it: its own, and those of the directory it is in.
fn remove(dir: &Dir, name: &Path, is_directory: bool) -> sys::Result<()> {
    let attempt = || match if is_directory {
        dir.remove_dir(name)
    } else {
        dir.remove_file(name)
    } {
        Err(error) if error.is(Errno::ENOENT) => Ok(()),
        result => result,
    };
    match attempt() {
        // rmdir tells EPERM before ENOTEMPTY: only then are the flags looked at, which costs two calls.
        Err(error) if error.is(Errno::EPERM) => {
            let of_parent = dir.clear_guard_flags()?;
            let of_itself = match dir.node(name) {
                Ok(node) => node.clear_guard_flags()?,
                Err(error) if error.is(Errno::ENOENT) => return Ok(()),
                Err(error) => return Err(error),
            };
            if of_parent || of_itself {
                attempt()
            } else {
                Err(error)
            }
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_deep_and_wide_tree_goes_and_what_a_link_points_at_stays() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("open");
        fs::write(folder.path().join("precious"), b"x").expect("write");
        fs::create_dir(folder.path().join("doomed")).expect("mkdir");
        let mut spine = Spine::new(&root.open_beneath("doomed").expect("open")).expect("spine");
        for _ in 0..200 {
            for name in ["a", "b"] {
                spine.here().create_dir(name, 0).expect("mkdir");
                spine
                    .here()
                    .write_new(format!("{name}-file"), b"")
                    .expect("write");
            }
            spine
                .here()
                .symlink(folder.path(), "link")
                .expect("symlink");
            spine.descend("b").expect("descend");
        }
        delete(&root, Path::new("doomed")).expect("delete");
        assert!(!root.has("doomed").expect("stat"));
        assert!(root.has("precious").expect("stat"));
        delete(&root, Path::new("doomed")).expect("twice is once");
        delete(&root, Path::new("precious")).expect("a file too");
        assert!(!root.has("precious").expect("stat"));
    }
}
