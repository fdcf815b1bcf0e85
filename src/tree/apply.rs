//! Applying a layer to a full tree: the tree then is what overlayfs would show of the layer over
//! it. For backends whose layers are whole trees. Nothing is copied; names are moved.
//!
//! The layer is in overlayfs' form and is consumed. A directory that the tree does not have, or
//! that the layer hides it by, is moved as a whole; the marks in it are taken out afterwards.

use std::ffi::OsStr;
use std::path::Path;

use rustix::fs::Stat;

use super::copy::{Marks, copy_directory_attributes, times_of};
use super::delete;
use super::dir_stack::DirStack;
use super::error::{Error, Result, Stop};
use super::marks::{Mark, Opacity, is_whiteout_at};
use super::names::Names;
use crate::sys::{self, Dir, Entry, FileKind, Xattrs};

/// Applies the layer that is the directory `name` of `tree` to the rest of `tree`, and removes it.
///
/// Both are on one filesystem, on btrfs in one subvolume (else EXDEV). On an error `tree` is
/// neither the old nor the new one. Ends early with [`Error::Stopped`].
pub fn apply(tree: &Dir, name: &OsStr, stop: Stop<'_>) -> Result<()> {
    let layer = tree.open_beneath(name)?;
    if layer.has(name)? {
        return Err(Error::Refused {
            path: sys::printable(name.display()),
            why: "the layer itself has the name under which it lies".to_owned(),
        });
    }
    let mut job = Applier {
        layer: DirStack::new(&layer)?,
        tree: DirStack::new(tree)?,
        stop,
    };
    let mut levels = vec![job.merge()?];
    let root = levels[0].stat;
    while let Some(level) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        let next = if level.merged {
            job.merge_next(level)?
        } else {
            job.strip_next(level)?
        };
        match next {
            Step::Down(below) => levels.push(below),
            Step::Stay => {}
            Step::Up => {
                let level = levels.pop();
                job.leave(level.as_ref().expect("it is the last"))?;
            }
        }
    }
    tree.remove_dir(name)?;
    Ok(tree.set_times(&times_of(&root))?)
}

/// A directory on the way down.
struct Level {
    names: Names,
    /// Whether another pass over the directory is needed, since removing names while a directory is
    /// read may make a filesystem skip others.
    again: bool,
    /// Whether both the layer and the tree have the directory. Else it was moved, marks and all.
    merged: bool,
    xattr_whiteouts: bool,
    /// How it is to look in the end.
    stat: Stat,
}

enum Step {
    Down(Level),
    Stay,
    Up,
}

struct Applier<'a> {
    layer: DirStack,
    tree: DirStack,
    stop: Stop<'a>,
}

impl Applier<'_> {
    /// Begins with a directory that both have.
    fn merge(&self) -> Result<Level> {
        Self::level(self.layer.here(), true)
    }

    fn level(dir: &Dir, merged: bool) -> Result<Level> {
        Ok(Level {
            names: Names::new(),
            again: false,
            merged,
            xattr_whiteouts: Opacity::of(dir)? == Opacity::WithXattrWhiteouts,
            stat: dir.stat_self()?,
        })
    }

    fn next(level: &mut Level, dir: &Dir, depth: usize) -> Result<Option<Entry>> {
        loop {
            if let Some(entry) = level.names.next(dir, depth)? {
                return Ok(Some(entry));
            }
            if !std::mem::take(&mut level.again) {
                return Ok(None);
            }
            level.names = Names::new();
        }
    }

    fn merge_next(&mut self, level: &mut Level) -> Result<Step> {
        let (layer, tree) = (self.layer.here(), self.tree.here());
        let Some(Entry { name, kind, .. }) = Self::next(level, layer, self.layer.depth())? else {
            return Ok(Step::Up);
        };
        level.again = true;
        let may_be_whiteout = match kind {
            None | Some(FileKind::CharacterDevice) => true,
            Some(FileKind::File) => level.xattr_whiteouts,
            _ => false,
        };
        if may_be_whiteout && is_whiteout_at(layer, &name, level.xattr_whiteouts)? {
            delete(tree, Path::new(&name), self.stop)?;
            layer.remove_file(&name)?;
            return Ok(Step::Stay);
        }
        let is_directory = |kind| kind == FileKind::Directory;
        let stat = |dir: &Dir| dir.stat_if_there(&name);
        let kind_of = |stat: &Stat| FileKind::of_mode(stat.st_mode);
        let ours = match kind {
            Some(kind) => is_directory(kind),
            None => stat(layer)?.is_some_and(|stat| is_directory(kind_of(&stat))),
        };
        if !ours {
            let there = stat(tree)?;
            if there.is_some_and(|stat| is_directory(kind_of(&stat))) {
                delete(tree, Path::new(&name), self.stop)?;
            }
            layer.rename_over(&name, tree, &name)?;
            return Ok(Step::Stay);
        }
        let there = stat(tree)?.map(|stat| is_directory(kind_of(&stat)));
        let opaque = Opacity::of(&layer.open_beneath(&name)?)? == Opacity::Opaque;
        if there == Some(true) && !opaque {
            self.layer.descend(&name)?;
            self.tree.descend(&name)?;
            return self.merge().map(Step::Down);
        }
        if there.is_some() {
            delete(tree, Path::new(&name), self.stop)?;
        }
        layer.rename(&name, tree, &name)?;
        self.tree.descend(&name)?;
        Self::level(self.tree.here(), false).map(Step::Down)
    }

    /// Takes the next mark out of a directory that was moved.
    fn strip_next(&mut self, level: &mut Level) -> Result<Step> {
        let tree = self.tree.here();
        let Some(Entry { name, kind, .. }) = Self::next(level, tree, self.tree.depth())? else {
            return Ok(Step::Up);
        };
        match kind {
            Some(FileKind::Directory) => {}
            None | Some(FileKind::CharacterDevice | FileKind::File) => {
                if is_whiteout_at(tree, &name, level.xattr_whiteouts)? {
                    tree.remove_file(&name)?;
                    level.again = true;
                    return Ok(Step::Stay);
                }
                let stat = tree.stat(&name)?;
                if kind.is_some() || FileKind::of_mode(stat.st_mode) != FileKind::Directory {
                    return Ok(Step::Stay);
                }
            }
            _ => return Ok(Step::Stay),
        }
        self.tree.descend(&name)?;
        Self::level(self.tree.here(), false).map(Step::Down)
    }

    /// Finishes a directory: how it looks, its times last of all.
    fn leave(&mut self, level: &Level) -> Result<()> {
        let tree = self.tree.here();
        if level.merged {
            let layer = self.layer.here();
            copy_directory_attributes(layer, tree, &level.stat, Marks::Keep)?;
        }
        let names = tree.xattr_names()?;
        for name in names.iter().filter(|name| Mark::of(name) != Mark::Content) {
            tree.remove_xattr(name)?;
        }
        tree.set_times(&times_of(&level.stat))?;
        if level.merged
            && let Some((name, _)) = self.layer.ascend()?
        {
            self.layer.here().remove_dir(&name)?;
        }
        self.tree.ascend()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::OPAQUE;

    #[test]
    fn what_a_layer_has_hides_and_deletes_is_so_in_the_tree() {
        if !crate::sys::is_root_or_skip() {
            return;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tree = Dir::open(folder.path()).expect("open");
        let dir = |of: &Dir, name: &str| {
            of.create_dir(name, 0o700).expect("mkdir");
            of.open_beneath(name).expect("open")
        };
        let write = |of: &Dir, name: &str| of.write_new(name, name.as_bytes()).expect("write");
        let whiteout = |of: &Dir, name: &str| of.make_node(name, 0o020_000, 0).expect("mknod");
        for name in ["merged", "hidden", "gone", "becomes a file"] {
            write(&dir(&tree, name), "old");
        }
        write(&tree, "becomes a directory");
        let layer = dir(&tree, "layer");
        let merged = dir(&layer, "merged");
        write(&merged, "new");
        whiteout(&merged, "old");
        whiteout(&merged, "never was");
        let hidden = dir(&layer, "hidden");
        hidden.set_xattr(OPAQUE, b"y").expect("setxattr");
        write(&hidden, "new");
        whiteout(&layer, "gone");
        write(&layer, "becomes a file");
        let fresh = dir(&dir(&layer, "becomes a directory"), "below");
        whiteout(&fresh, "of nothing");
        write(&fresh, "f");
        apply(&tree, OsStr::new("layer"), &|| false).expect("apply");
        for (path, is_there) in [
            ("layer", false),
            ("merged/new", true),
            ("merged/old", false),
            ("merged/never was", false),
            ("hidden/new", true),
            ("hidden/old", false),
            ("gone", false),
            ("becomes a directory/below/f", true),
            ("becomes a directory/below/of nothing", false),
        ] {
            let there = folder.path().join(path).symlink_metadata().is_ok();
            assert_eq!(there, is_there, "{path}");
        }
        assert!(tree.has_file("becomes a file").expect("stat"));
        let hidden = tree.open_beneath("hidden").expect("open");
        assert_eq!(hidden.xattr(OPAQUE).expect("getxattr"), None);
    }
}
