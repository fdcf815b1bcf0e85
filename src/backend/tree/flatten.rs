//! Merging a stack of overlay layers into one, by hard links: no data is copied.
//!
//! The rules are those by which overlayfs itself looks names up (Documentation/filesystems/overlayfs.rst, "Upper and
//! Lower", "whiteouts and opaque directories"): the newest layer that has a name decides; a directory is merged with the
//! directories of that name below it, down to the first that is opaque or until something of that name is no directory.

use std::collections::BTreeMap;
use std::collections::btree_map::IntoIter;
use std::ffi::{OsStr, OsString};

use crate::backend::Result;
use crate::model::layout;
use crate::sys::{Dir, Entry, Errno, FileKind, Xattrs};

use super::copy::{Files, Marks, Method, copy_root_attributes};
use super::marks::{OPAQUE, ORIGIN, Opacity, has_whiteout_xattr, is_whiteout};
use super::spine::Spine;

/// Merges `layers` (their content, newest first, at least one) into a new directory `fs` of `into`.
///
/// `bottom`: the last one is the lowest of its stack, so nothing is below that marks could hide, and none are kept. Files
/// are linked; where that is not possible (EMLINK, EPERM for immutable ones, EXDEV) that one is copied. Directories are new,
/// and look as the topmost of those that they are merged from. The layers must not change meanwhile.
pub fn flatten(layers: &[Dir], into: &Dir, bottom: bool) -> Result<()> {
    into.create_dir(layout::FS, 0o700)?;
    let mut job = Flattener {
        layers: layers.iter().map(Spine::new).collect::<Result<_, _>>()?,
        into: Spine::new(&into.open_beneath(layout::FS)?)?,
        files: Files::new(Method::Reflink, Marks::Keep),
    };
    // All layers take part in the root, whatever marks it carries: so does the kernel.
    let all = (0..layers.len()).collect();
    let mut levels = vec![job.enter(all, false, !bottom)?];
    while let Some(level) = levels.last_mut() {
        if let Some((name, found)) = level.names.next() {
            let below = job.name(level, &name, &found)?;
            levels.extend(below);
            continue;
        }
        if let Some(level) = levels.pop() {
            job.leave(&level)?;
        }
    }
    Ok(())
}

/// A directory that is being merged.
struct Level {
    /// The layers that take part in it, newest first.
    members: Vec<usize>,
    /// Whether the result must hide what is below the merged layers.
    opaque: bool,
    /// Whether there may be something below the merged layers for marks in here to hide.
    something_below: bool,
    /// Whether a deletion was kept.
    has_whiteouts: bool,
    names: IntoIter<OsString, Vec<Found>>,
}

/// A name in one layer.
struct Found {
    layer: usize,
    kind: Option<FileKind>,
    /// Its directory says that empty files may be whiteouts.
    xattr_whiteouts: bool,
}

/// What a name in one layer is to a merge.
enum Sort {
    Whiteout,
    Directory,
    Other,
}

struct Flattener {
    layers: Vec<Spine>,
    into: Spine,
    files: Files,
}

impl Flattener {
    /// Reads the directory in which the members' walks (and the result's) are.
    fn enter(&mut self, members: Vec<usize>, opaque: bool, something_below: bool) -> Result<Level> {
        let mut names = BTreeMap::<OsString, Vec<Found>>::new();
        for &layer in &members {
            let dir = self.layers[layer].here();
            let xattr_whiteouts = Opacity::of(dir)? == Opacity::WithXattrWhiteouts;
            for Entry { name, kind, .. } in dir.entries()? {
                names.entry(name).or_default().push(Found {
                    layer,
                    kind,
                    xattr_whiteouts,
                });
            }
        }
        Ok(Level {
            members,
            opaque,
            something_below: something_below && !opaque,
            has_whiteouts: false,
            names: names.into_iter(),
        })
    }

    /// Finishes a directory: how it looks, its times last of all.
    fn leave(&mut self, level: &Level) -> Result<()> {
        if let Some(&newest) = level.members.first() {
            let into = self.into.here();
            copy_root_attributes(self.layers[newest].here(), into, Marks::Keep)?;
            // Marks are the merge's own word. Attributes do not change the times that were set.
            if level.opaque {
                into.set_xattr(OPAQUE, b"y")?;
            } else {
                into.remove_xattr(OPAQUE)?;
            }
            // Whiteouts in a directory that turns out to be merged with nothing below are hidden from readdir only where the
            // directory says that it was copied up, from wherever (ovl_get_inode: "non-merge dir that may have whiteouts").
            if level.has_whiteouts {
                into.set_xattr(ORIGIN, b"")?;
            }
        }
        for &member in &level.members {
            self.layers[member].ascend()?;
        }
        self.into.ascend()?;
        Ok(())
    }

    /// Merges one name; a directory is entered, and returned.
    fn name(&mut self, level: &mut Level, name: &OsStr, found: &[Found]) -> Result<Option<Level>> {
        let Some(first) = found.first() else {
            return Ok(None);
        };
        match self.sort(name, first)? {
            Sort::Whiteout => {
                if level.something_below {
                    self.whiteout(first.layer, name)?;
                    level.has_whiteouts = true;
                }
                Ok(None)
            }
            Sort::Other => self.file(first.layer, name).map(|()| None),
            Sort::Directory => self.directory(name, found, level.something_below).map(Some),
        }
    }

    fn directory(&mut self, name: &OsStr, found: &[Found], something_below: bool) -> Result<Level> {
        let (mut members, mut opaque) = (Vec::new(), false);
        for found in found {
            if !matches!(self.sort(name, found)?, Sort::Directory) {
                opaque = true;
                break;
            }
            let layer = &mut self.layers[found.layer];
            layer.descend(name)?;
            members.push(found.layer);
            if Opacity::of(layer.here())? == Opacity::Opaque {
                opaque = true;
                break;
            }
        }
        self.into.here().create_dir(name, 0o700)?;
        self.into.descend(name)?;
        // With nothing below there is nothing to hide, and the mark is left out.
        self.enter(members, opaque && something_below, something_below)
    }

    fn sort(&self, name: &OsStr, found: &Found) -> Result<Sort> {
        let dir = self.layers[found.layer].here();
        let kind = match found.kind {
            Some(FileKind::Directory) => return Ok(Sort::Directory),
            // Only these two may be whiteouts: the others need no further call.
            Some(kind @ (FileKind::File | FileKind::CharacterDevice)) => kind,
            Some(_) => return Ok(Sort::Other),
            None => FileKind::of_mode(dir.stat(name)?.st_mode),
        };
        let whiteout = match kind {
            FileKind::Directory => return Ok(Sort::Directory),
            FileKind::CharacterDevice => is_whiteout(&dir.stat(name)?),
            FileKind::File if found.xattr_whiteouts => {
                let node = dir.node(name)?;
                node.stat()?.st_size == 0 && has_whiteout_xattr(&node)?
            }
            _ => false,
        };
        Ok(if whiteout {
            Sort::Whiteout
        } else {
            Sort::Other
        })
    }

    /// Keeps a deletion, always as a device: the form that every kernel understands, in any directory.
    fn whiteout(&self, layer: usize, name: &OsStr) -> Result<()> {
        const DEVICE: u32 = 0o020_000;
        let (dir, into) = (self.layers[layer].here(), self.into.here());
        if is_whiteout(&dir.stat(name)?) && dir.link(name, into, name).is_ok() {
            return Ok(());
        }
        Ok(into.make_node(name, DEVICE, 0)?)
    }

    fn file(&mut self, layer: usize, name: &OsStr) -> Result<()> {
        let (dir, into) = (self.layers[layer].here(), self.into.here());
        match dir.link(name, into, name) {
            Ok(()) => Ok(()),
            Err(error) if matches!(error.errno(), Errno::EMLINK | Errno::EPERM | Errno::EXDEV) => {
                let node = dir.node(name)?;
                let stat = node.stat()?;
                self.files.copy(&node, &stat, into, name)
            }
            Err(error) => Err(error.into()),
        }
    }
}
