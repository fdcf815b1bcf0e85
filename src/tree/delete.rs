//! Deletes a tree in place, by descriptors only.
//!
//! It follows no symlink and crosses no mount point, and a deep tree costs no stack.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::RawDir;

use crate::sys::{self, Dir, Errno, FileKind, Space};
use crate::tree::error::{Error, Result};

use super::dir_stack::DirStack;
use super::error::Stop;
use super::names::share;

/// How often a deletion starts over because a process creates or moves entries in an open
/// directory. Every round removes the entries that stay; only a process that never stops outlasts
/// them.
const ROUNDS: usize = 4;
/// How often one directory is read to its end before the deletion gives up on emptying it. A
/// filesystem may skip names while entries are unlinked (readdir(3) promises nothing).
const PASSES: usize = 3;
/// How deep a walk descends; below that it moves directories to the top of their tree. Otherwise
/// an attempt could end before it reaches the bottom, and the next one would begin at the top.
const DEEPEST: usize = 32;
/// So many steps are taken before `stop` is asked. Otherwise attempts that a busy machine delays
/// could all end before they remove or move anything: each level takes some five steps.
const STEPS: usize = 8 * DEEPEST;

/// Deletes `name` in `trash` with everything below it; Ok if there is no such name.
///
/// No symlink is followed. A mount point is an error that names it (EXDEV for a directory, EBUSY
/// for a file); its siblings may be gone already. Immutable and append-only flags are cleared if
/// they block a removal, and read-only btrfs subvolumes in the tree become writable. Names are read
/// in pieces: a million names take no more memory.
///
/// A process with a directory of the tree open may create entries as fast as they are deleted.
/// After some passes that is ENOTEMPTY, or [`Error::Stopped`] once `stop` says so: on some
/// filesystems (btrfs before Linux 6.5) one pass over it never ends. A retry continues. An attempt
/// always makes progress, also in a deep tree and if `stop` says so at once, unless the filesystem
/// refuses to move directories (a full btrfs, another project or subvolume).
pub fn delete(trash: &Dir, name: &Path, stop: Stop<'_>) -> Result<()> {
    let steps = Cell::new(0);
    let stop = || {
        steps.set(steps.get() + 1);
        steps.get() > STEPS && stop()
    };
    for round in 1.. {
        match delete_once(trash, name, &stop) {
            Err(Error::System(error)) if round < ROUNDS && moved(error.errno()) => {}
            result => return result,
        }
    }
    Ok(())
}

/// The errors that occur if names change between reading and removal.
fn moved(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ESTALE | Errno::ENOTEMPTY | Errno::ENOTDIR | Errno::EISDIR | Errno::ELOOP
    )
}

/// A directory on the path from the root.
#[derive(Default)]
struct Level {
    /// Its non-empty subdirectories; they are deleted first.
    full: Vec<OsString>,
    /// How often it was read to its end.
    passes: usize,
    /// Whether all entries that were read are gone, so that it should be empty.
    cleared: bool,
}

fn delete_once(trash: &Dir, name: &Path, stop: Stop<'_>) -> Result<()> {
    let Some(stat) = trash.stat_if_there(name)? else {
        return Ok(());
    };
    if FileKind::of_mode(stat.st_mode) != FileKind::Directory {
        return Ok(remove(trash, trash, name, false)?);
    }
    let mut stack = DirStack::new(trash)?;
    stack.descend(name)?;
    let mut buffer = vec![MaybeUninit::uninit(); 64 * 1024];
    let top = stack.here().try_clone()?;
    let mut levels = vec![Level::default()];
    // Until then a directory's first subdirectory is enough: to name them all removes nothing.
    let mut has_progress = false;
    while let Some(level) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        if let Some(name) = level.full.pop() {
            if stack.depth() > DEEPEST && lift(stack.here(), &name, &top) {
                // The top has an entry more to find.
                levels[0].passes = 0;
                levels[0].cleared = false;
                has_progress = true;
                continue;
            }
            match stack.descend(&name) {
                Ok(()) => levels.push(Level::default()),
                Err(error) if error.is(Errno::ENOENT) => {}
                Err(error) => return Err(error.into()),
            }
            continue;
        }
        if !level.cleared {
            // One read per non-empty subdirectory would be quadratic (ext4 keeps the emptied
            // blocks). Remembering all of them would take unbounded memory.
            let wanted = if has_progress {
                share(stack.depth())
            } else {
                1
            };
            let pass = clear((trash, stack.here()), wanted, &mut buffer, stop)?;
            has_progress |= pass.has_removed;
            level.passes += usize::from(pass.to_the_end);
            level.cleared = pass.to_the_end;
            level.full = pass.full;
            continue;
        }
        let Some((name, _)) = stack.ascend()? else {
            break;
        };
        let passes = levels.pop().map_or(PASSES, |level| level.passes);
        match remove(trash, stack.here(), Path::new(&name), true) {
            Err(error) if is_full(&error) && passes < PASSES => match stack.descend(&name) {
                Ok(()) => levels.push(Level {
                    passes,
                    ..Level::default()
                }),
                Err(error) if error.is(Errno::ENOENT) => {}
                Err(error) => return Err(error.into()),
            },
            result => result?,
        }
    }
    Ok(())
}

/// Moves the directory `name` to the top of the tree. A process cannot guess the new name and take
/// it. The directory stays where it is if the filesystem refuses: for a mount point, or for another
/// project or subvolume.
fn lift(dir: &Dir, name: &OsStr, top: &Dir) -> bool {
    dir.rename(name, top, format!("lifted-{:032x}", sys::random()))
        .is_ok()
}

/// The result of reading a directory once.
struct Pass {
    to_the_end: bool,
    has_removed: bool,
    /// Subdirectories that are not empty.
    full: Vec<OsString>,
}

/// Removes files and empty subdirectories. Ends after `wanted` subdirectories that are not empty.
fn clear(
    (trash, dir): (&Dir, &Dir),
    wanted: usize,
    buffer: &mut [MaybeUninit<u8>],
    stop: Stop<'_>,
) -> Result<Pass> {
    let mut reader = RawDir::new(dir.reader()?, buffer);
    let mut pass = Pass {
        to_the_end: false,
        has_removed: false,
        full: Vec::new(),
    };
    while let Some(entry) = reader.next() {
        if stop() {
            return Err(Error::Stopped);
        }
        let entry = match entry {
            Ok(entry) => entry,
            // The directory itself was removed meanwhile.
            Err(rustix::io::Errno::NOENT) => break,
            Err(errno) => return Err(dir.error("getdents64", "", errno).into()),
        };
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let is_directory = match entry.file_type() {
            rustix::fs::FileType::Directory => true,
            rustix::fs::FileType::Unknown => dir
                .stat_if_there(name)?
                .is_some_and(|stat| FileKind::of_mode(stat.st_mode) == FileKind::Directory),
            _ => false,
        };
        match remove(trash, dir, Path::new(name), is_directory) {
            Ok(()) => pass.has_removed = true,
            Err(error) if is_directory && is_full(&error) => {
                pass.full.push(name.to_owned());
                if pass.full.len() == wanted {
                    return Ok(pass);
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    pass.to_the_end = true;
    Ok(pass)
}

/// Whether rmdir(2) failed because the directory is not empty; POSIX allows either errno.
fn is_full(error: &sys::Error) -> bool {
    error.is(Errno::ENOTEMPTY) || error.is(Errno::EEXIST)
}

/// Removes one name, and clears what forbids that.
fn remove(trash: &Dir, dir: &Dir, name: &Path, is_directory: bool) -> sys::Result<()> {
    let mut rounds = 1;
    loop {
        let removed = if is_directory {
            dir.remove_dir(name)
        } else {
            dir.remove_file(name)
        };
        match removed {
            Err(error) if error.is(Errno::ENOENT) => return Ok(()),
            // A process may forbid it again.
            Err(error) if rounds < ROUNDS && unguard(trash, dir, name, &error)? => rounds += 1,
            result => return result,
        }
    }
}

/// Clears the flags of an entry and of its directory, and makes read-only subvolumes writable, if
/// that is why the entry was not removed. `false`: there was nothing to clear.
fn unguard(trash: &Dir, dir: &Dir, name: &Path, why: &sys::Error) -> sys::Result<bool> {
    match why.errno() {
        // rmdir reports EPERM before ENOTEMPTY, so only EPERM costs the two calls for flags.
        Errno::EPERM => {
            let of_parent = dir.clear_guard_flags()?;
            let of_itself = match dir.node(name).and_then(|node| node.clear_guard_flags()) {
                Err(error) if error.is(Errno::ENOENT) => true,
                // The next round clears them.
                Err(error) if error.is(Errno::EROFS) => {
                    make_writable(trash, &dir.open_beneath(name)?)?
                }
                result => result?,
            };
            Ok(of_parent || of_itself)
        }
        Errno::EROFS => make_writable(trash, dir),
        _ => Ok(false),
    }
}

/// Makes the btrfs subvolume of `dir` writable; `false`: it is in none that a pod made. A pod needs
/// no privilege to make subvolumes, and to make them read-only. The subvolume of `trash` is the
/// pool's.
fn make_writable(trash: &Dir, dir: &Dir) -> sys::Result<bool> {
    if dir.space()?.magic != Space::BTRFS {
        return Ok(false);
    }
    let id = dir.subvolume_id()?;
    if id == trash.subvolume_id()? {
        return Ok(false);
    }
    dir.open_subvolume(id)?.set_subvolume_read_only(false)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// However little time each attempt has.
    fn is_deleted(make: impl FnOnce(&mut DirStack)) {
        const ATTEMPTS: usize = 3000;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("open");
        root.create_dir("doomed", 0o700).expect("mkdir");
        let doomed = root.open_beneath("doomed").expect("open");
        make(&mut DirStack::new(&doomed).expect("stack"));
        let ended = (0..ATTEMPTS).any(|_| match delete(&root, Path::new("doomed"), &|| true) {
            Ok(()) => true,
            Err(error) => {
                assert!(matches!(error, Error::Stopped), "{error}");
                false
            }
        });
        assert!(ended);
        assert!(!root.has("doomed").expect("stat"));
    }

    /// Directories that are not empty.
    fn fill(dir: &Dir, directories: usize) {
        for number in 0..directories {
            let name = number.to_string();
            dir.create_dir(&name, 0o700).expect("mkdir");
            let inner = dir.open_beneath(&name).expect("open");
            inner.write_new("f", b"").expect("write");
        }
    }

    #[test]
    fn attempts_without_any_time_delete_many_files() {
        is_deleted(|stack| {
            for number in 0..500 {
                let name = number.to_string();
                stack.here().write_new(name, b"").expect("write");
            }
        });
    }

    #[test]
    fn attempts_without_any_time_delete_a_deep_tree() {
        is_deleted(|stack| {
            for _ in 0..3000 {
                stack.here().create_dir("d", 0o700).expect("mkdir");
                stack.descend("d").expect("descend");
            }
        });
    }

    #[test]
    fn attempts_without_any_time_delete_many_directories_at_any_depth() {
        is_deleted(|stack| {
            for level in 0..40 {
                fill(stack.here(), if level % 13 == 0 { 300 } else { 3 });
                stack.here().create_dir("d", 0o700).expect("mkdir");
                stack.descend("d").expect("descend");
            }
        });
    }

    #[test]
    fn a_deep_and_wide_tree_goes_and_what_a_link_points_at_stays() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("open");
        fs::write(folder.path().join("precious"), b"x").expect("write");
        fs::create_dir(folder.path().join("doomed")).expect("mkdir");
        let mut stack = DirStack::new(&root.open_beneath("doomed").expect("open")).expect("stack");
        for _ in 0..200 {
            for name in ["a", "b"] {
                stack.here().create_dir(name, 0).expect("mkdir");
                stack
                    .here()
                    .write_new(format!("{name}-file"), b"")
                    .expect("write");
            }
            stack
                .here()
                .symlink(folder.path(), "link")
                .expect("symlink");
            stack.descend("b").expect("descend");
        }
        delete(&root, Path::new("doomed"), &|| false).expect("delete");
        assert!(!root.has("doomed").expect("stat"));
        assert!(root.has("precious").expect("stat"));
        delete(&root, Path::new("doomed"), &|| false).expect("twice is once");
        delete(&root, Path::new("precious"), &|| false).expect("a file too");
        assert!(!root.has("precious").expect("stat"));
    }
}
