//! Merges a stack of overlay layers into one layer by hard links, without copying data.
//!
//! The rules are overlayfs's lookup rules (Documentation/filesystems/overlayfs.rst, "Upper and
//! Lower", "whiteouts and opaque directories"). The newest layer with a name decides. A directory
//! is merged with the lower ones of its name, down to the first opaque one or to a non-directory.
//!
//! The layers are read one after the other, newest first, and a name that the result already has is
//! skipped. So memory does not grow with the layers, whose names are read in pieces ([`Names`]).
//! For that, the result holds each deletion too, until the end if it hides nothing.

use std::ffi::OsStr;

use crate::model::layout;
use crate::sys::{self, Dir, Entry, Errno, FileKind, Xattrs};
use crate::tree::error::{Error, Result};

use super::copy::{Files, Links, Marks, Method, copy_directory_attributes, disinherit};
use super::dir_stack::DirStack;
use super::error::Stop;
use super::marks::{OPAQUE, ORIGIN, Opacity, has_whiteout_xattr, is_whiteout};
use super::names::{Names, share};

/// Merges `layers` (their content, newest first, at least one) into a new directory `fs` of `into`.
///
/// `bottom`: the last layer is the lowest of its stack, so no marks are kept. Files are linked, or
/// copied if link(2) fails (EMLINK, EPERM for immutable ones, EXDEV): once for all names.
/// Directories are new, with the attributes of the newest directory of that name. The layers must
/// not change meanwhile.
///
/// Ends early with [`Error::Stopped`].
pub fn flatten(layers: &[Dir], into: &Dir, bottom: bool, stop: Stop<'_>) -> Result<()> {
    let fs = into.make_dir(layout::FS, 0o700)?;
    disinherit(&fs)?;
    let mut job = Flattener {
        layers: layers.iter().map(DirStack::new).collect::<Result<_, _>>()?,
        into: DirStack::new(&fs)?,
        files: Files::new(Method::Reflink, Marks::Keep),
        // Beside the result: no layer has its name.
        links: Links::new(into, into)?,
    };
    // All layers take part in the root despite its marks, as in the kernel.
    let all = (0..layers.len()).collect();
    let mut levels = vec![job.enter(all, false, !bottom)?];
    while let Some(level) = levels.last_mut() {
        if stop() {
            return Err(Error::Stopped);
        }
        if let Some(entry) = job.next(level)? {
            let below = job.name(level, &entry)?;
            levels.extend(below);
            continue;
        }
        if let Some(level) = levels.pop() {
            job.leave(&level)?;
        }
    }
    job.links.finish()
}

/// A directory that is being merged.
struct Level {
    /// The layers that have it, newest first.
    members: Vec<Member>,
    /// The index of the member that is being read.
    reading: usize,
    names: Names,
    /// Whether the result must hide the layers below the merged ones.
    opaque: bool,
    /// Whether the layers below the merged ones may have entries that marks here must hide.
    something_below: bool,
    /// Whether the result has deletions.
    has_whiteouts: bool,
}

/// A layer that has the directory.
struct Member {
    layer: usize,
    /// Whether its empty files may be whiteouts.
    xattr_whiteouts: bool,
}

/// The kind of a layer's name in a merge.
enum Sort {
    Whiteout,
    Directory,
    Other,
}

struct Flattener {
    layers: Vec<DirStack>,
    into: DirStack,
    files: Files,
    links: Links,
}

impl Flattener {
    /// Begins a directory; the members' walks and the result's walk are in it.
    fn enter(&mut self, members: Vec<usize>, opaque: bool, something_below: bool) -> Result<Level> {
        let member = |layer: usize| -> Result<Member> {
            let opacity = Opacity::of(self.layers[layer].here())?;
            Ok(Member {
                layer,
                xattr_whiteouts: opacity == Opacity::WithXattrWhiteouts,
            })
        };
        Ok(Level {
            members: members.into_iter().map(member).collect::<Result<_>>()?,
            reading: 0,
            names: Names::new(),
            opaque,
            something_below: something_below && !opaque,
            has_whiteouts: false,
        })
    }

    /// The next name, from the newest layer that has not been read to its end.
    fn next(&self, level: &mut Level) -> Result<Option<Entry>> {
        while let Some(member) = level.members.get(level.reading) {
            let dir = self.layers[member.layer].here();
            if let Some(entry) = level.names.next(dir, self.into.depth())? {
                return Ok(Some(entry));
            }
            level.reading += 1;
            level.names = Names::new();
        }
        Ok(None)
    }

    /// Finishes a directory: sets its attributes, and its times last.
    fn leave(&mut self, level: &Level) -> Result<()> {
        let keeps_whiteouts = level.has_whiteouts && level.something_below;
        if level.has_whiteouts && !keeps_whiteouts {
            self.forget_whiteouts()?;
        }
        if let Some(newest) = level.members.first() {
            let into = self.into.here();
            let from = self.layers[newest.layer].here();
            copy_directory_attributes(from, into, &from.stat_self()?, Marks::Keep)?;
            // The merge decides about marks. Attributes do not change the times.
            if level.opaque {
                into.set_xattr(OPAQUE, b"y")?;
            } else {
                into.remove_xattr(OPAQUE)?;
            }
            // In a directory that turns out to have nothing to merge with, readdir hides whiteouts
            // only if the directory claims to be copied up, from any origin (ovl_get_inode:
            // "non-merge dir that may have whiteouts").
            if keeps_whiteouts {
                into.set_xattr(ORIGIN, b"")?;
            }
        }
        for member in &level.members {
            self.layers[member.layer].ascend()?;
        }
        self.into.ascend()?;
        Ok(())
    }

    /// Removes deletions from the result.
    fn forget_whiteouts(&self) -> sys::Result<()> {
        let into = self.into.here();
        loop {
            let (mut any, mut next) = (false, Some(0));
            while let Some(from) = next {
                let (names, after) = into.entries_from(from, share(self.into.depth()))?;
                for Entry { name, kind, .. } in names {
                    let may_be = matches!(kind, None | Some(FileKind::CharacterDevice));
                    if may_be && is_whiteout(&into.stat(&name)?) {
                        into.remove_file(&name)?;
                        any = true;
                    }
                }
                next = after;
            }
            // A filesystem may skip names while entries are removed.
            if !any {
                return Ok(());
            }
        }
    }

    /// Merges one name unless a newer layer had it. Enters and returns a directory.
    fn name(&mut self, level: &mut Level, entry: &Entry) -> Result<Option<Level>> {
        let (member, older) = level.members[level.reading..]
            .split_first()
            .expect("the name was read from it");
        let name = &entry.name;
        match self.sort(name, member, entry.kind)? {
            Sort::Whiteout => {
                let hides = level.something_below || !older.is_empty();
                level.has_whiteouts |= hides && self.whiteout(member.layer, name)?;
                Ok(None)
            }
            Sort::Other => self.file(member.layer, name).map(|()| None),
            Sort::Directory => self.directory(name, member, older, level.something_below),
        }
    }

    fn directory(
        &mut self,
        name: &OsStr,
        newest: &Member,
        older: &[Member],
        something_below: bool,
    ) -> Result<Option<Level>> {
        if !self.into.here().ensure_dir(name, 0o700)? {
            return Ok(None);
        }
        self.into.descend(name)?;
        let (mut members, mut opaque) = (Vec::new(), false);
        for (index, member) in std::iter::once(newest).chain(older).enumerate() {
            if index > 0 {
                let Some(stat) = self.layers[member.layer].here().stat_if_there(name)? else {
                    continue;
                };
                let kind = FileKind::of_mode(stat.st_mode);
                if !matches!(self.sort(name, member, Some(kind))?, Sort::Directory) {
                    opaque = true;
                    break;
                }
            }
            let layer = &mut self.layers[member.layer];
            layer.descend(name)?;
            members.push(member.layer);
            if Opacity::of(layer.here())? == Opacity::Opaque {
                opaque = true;
                break;
            }
        }
        // No mark if nothing is below to hide.
        self.enter(members, opaque && something_below, something_below)
            .map(Some)
    }

    fn sort(&self, name: &OsStr, member: &Member, kind: Option<FileKind>) -> Result<Sort> {
        let dir = self.layers[member.layer].here();
        let kind = match kind {
            Some(FileKind::Directory) => return Ok(Sort::Directory),
            // Only these two kinds can be whiteouts; the others need no further call.
            Some(kind @ (FileKind::File | FileKind::CharacterDevice)) => kind,
            Some(_) => return Ok(Sort::Other),
            None => FileKind::of_mode(dir.stat(name)?.st_mode),
        };
        let whiteout = match kind {
            FileKind::Directory => return Ok(Sort::Directory),
            FileKind::CharacterDevice => is_whiteout(&dir.stat(name)?),
            FileKind::File if member.xattr_whiteouts => {
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

    /// Makes a deletion, always as a device: every kernel understands that, in any directory.
    /// `false` if the result has a newer entry.
    fn whiteout(&self, layer: usize, name: &OsStr) -> Result<bool> {
        const DEVICE: u32 = 0o020_000;
        let (dir, into) = (self.layers[layer].here(), self.into.here());
        if is_whiteout(&dir.stat(name)?) {
            match dir.link(name, into, name) {
                Ok(()) => return Ok(true),
                Err(error) if error.is(Errno::EEXIST) => return Ok(false),
                Err(_) => {}
            }
        }
        match into.make_node(name, DEVICE, 0) {
            Ok(()) => Ok(true),
            Err(error) if error.is(Errno::EEXIST) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn file(&mut self, layer: usize, name: &OsStr) -> Result<()> {
        let (dir, into) = (self.layers[layer].here(), self.into.here());
        match dir.link(name, into, name) {
            Ok(()) => Ok(()),
            // A newer layer had it. The kernel checks this before the errors below.
            Err(error) if error.is(Errno::EEXIST) => Ok(()),
            Err(error) if matches!(error.errno(), Errno::EMLINK | Errno::EPERM | Errno::EXDEV) => {
                let node = dir.node(name)?;
                let stat = node.stat()?;
                let has_names = stat.st_nlink > 1;
                if has_names && self.links.again(&stat, into, name)? {
                    return Ok(());
                }
                self.files.copy(&node, &stat, into, name)?;
                if has_names {
                    self.links.first(&stat, into, name)?;
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}
