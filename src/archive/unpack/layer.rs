//! Makes a layer from an archive: overlayfs' marks, and entries that are copied up from the layers
//! below.
//!
//! The layer is made in overlayfs' own form on every backend, so that an archive means the same
//! everywhere. If an archive has a path twice, the later entry counts, as if all entries were
//! applied in order to a full tree. A directory that replaces another entry is opaque.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::{Unpacker, split};
use crate::archive::dress::CHARACTER;
use crate::archive::error::{Error, Result, refused};
use crate::archive::marks::{LayerMarks, Mark, oci_mark};
use crate::archive::read::{Entry, Kind};
use crate::sys::{Dir, Errno, FileKind, Xattrs};
use crate::tree::{self, Found, Marks};

/// The state of an unpacker that makes a layer.
pub(super) struct Layer<'a> {
    pub(super) marks: LayerMarks,
    /// The layers below, newest first.
    pub(super) below: &'a [Dir],
}

impl Layer<'_> {
    /// Lets the root of the new layer look as that of the layers below, as a copied-up one does.
    pub(super) fn begin(&self, root: &Dir) -> Result<()> {
        if let Some(below) = self.below.first() {
            look_as(below, root)?;
        }
        Ok(())
    }
}

/// Gives a directory all attributes of one of a layer below, but for marks.
fn look_as(below: &Dir, dir: &Dir) -> Result<()> {
    let stat = below.stat_self()?;
    tree::copy_directory_attributes(below, dir, &stat, Marks::Keep)?;
    dir.remove_xattr(tree::OPAQUE)?;
    Ok(dir.set_times(&tree::times_of(&stat))?)
}

impl Unpacker<'_> {
    /// Applies an entry that is a mark. Returns whether it was a mark and nothing else.
    pub(super) fn mark(&mut self, entry: &Entry) -> Result<bool> {
        let Some(layer) = &self.layer else {
            if entry.mark.is_some() {
                let why = "it has a mark of a layer, and the archive is a whole tree";
                return Err(refused(&entry.path, why));
            }
            return Ok(false);
        };
        match layer.marks {
            LayerMarks::Records => match entry.mark {
                Some(Mark::Whiteout) => self.whiteout(&entry.path, entry).map(|()| true),
                // A directory with attributes of its own.
                Some(Mark::Opaque) | None => Ok(false),
            },
            LayerMarks::Oci => {
                if entry.mark.is_some() {
                    return Err(refused(&entry.path, "an OCI layer has no such marks"));
                }
                if let Kind::HardLink(target) = &entry.kind
                    && oci_mark(target)?.is_some()
                {
                    return Err(refused(&entry.path, "it is a hard link to a whiteout"));
                }
                let Some((mark, path)) = oci_mark(&entry.path)? else {
                    return Ok(false);
                };
                if entry.kind != Kind::File || entry.size > 0 {
                    return Err(refused(&entry.path, "a whiteout is an empty file"));
                }
                match mark {
                    Mark::Whiteout => self.whiteout(&path, entry)?,
                    Mark::Opaque => self.opaque(&path, entry)?,
                }
                Ok(true)
            }
        }
    }

    fn whiteout(&mut self, path: &[u8], entry: &Entry) -> Result<()> {
        let (parent, name) = split(path);
        self.enter(parent, entry)?;
        match self.here().make_node(name, CHARACTER, 0) {
            Err(error) if error.is(Errno::EEXIST) => {
                let there = self.here().stat_if_there(name)?;
                if !there.is_some_and(|stat| tree::is_whiteout(&stat)) {
                    let why = "it deletes a file that the same layer adds";
                    return Err(refused(&entry.path, why));
                }
                return Ok(());
            }
            result => result?,
        }
        self.made.whiteouts += 1;
        if !parent.is_empty() {
            // Else overlayfs shows whiteouts where the layers below turn out to have no such
            // directory (see `tree::flatten`).
            self.here().set_xattr(tree::ORIGIN, b"")?;
        }
        Ok(())
    }

    fn opaque(&mut self, path: &[u8], entry: &Entry) -> Result<()> {
        if path.is_empty() {
            let why = "overlayfs cannot hide all that is below";
            return Err(refused(&entry.path, why));
        }
        self.enter(path, entry)?;
        Ok(self.here().set_xattr(tree::OPAQUE, b"y")?)
    }

    /// The name as the layers below have it, unless this layer hides it.
    pub(super) fn below(&self, path: &[u8]) -> Result<Option<Found>> {
        let Some(layer) = &self.layer else {
            return Ok(None);
        };
        let layers: Vec<&Dir> = std::iter::once(self.root).chain(layer.below).collect();
        Ok(tree::find(&layers, OsStr::from_bytes(path))?)
    }

    /// Gives a directory without an entry the attributes that it has in the layers below. Returns
    /// whether they have it.
    pub(super) fn look_as_below(found: Option<&Found>, dir: &Dir) -> Result<bool> {
        let Some(found) = found else {
            return Ok(false);
        };
        if FileKind::of_mode(found.stat.st_mode) != FileKind::Directory {
            return Ok(false);
        }
        look_as(&found.dir.open_beneath(&found.name)?, dir)?;
        Ok(true)
    }

    /// Makes sure that the target of a hard link is a file of this layer: copies it up if the
    /// layers below have it. `false`: there is no such file.
    pub(super) fn bring_up(&mut self, target: &[u8], entry: &Entry) -> Result<bool> {
        let Some(found) = self.below(target)? else {
            return Ok(false);
        };
        if found.layer == 0 {
            return Ok(true);
        }
        if FileKind::of_mode(found.stat.st_mode) == FileKind::Directory {
            return Ok(false);
        }
        let (parent, name) = split(target);
        self.enter(parent, entry)?;
        let node = found.dir.node(&found.name)?;
        tree::copy_node(&node, &found.stat, self.here(), name)?;
        self.made.bytes += u64::try_from(found.stat.st_size).unwrap_or(0);
        if self.made.bytes > self.how.limits.bytes {
            return Err(Error::Limit {
                what: "the content of its files",
                limit: self.how.limits.bytes,
            });
        }
        self.enter(split(&entry.path).0, entry)?;
        Ok(true)
    }
}
