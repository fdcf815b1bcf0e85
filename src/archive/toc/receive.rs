//! A receiver: a layer is made in a fresh directory, of frames in any order from any holder.
//!
//! The directory has `fs` (the layer, in overlayfs' form) and `done` (which pieces were verified).
//! First all directories are made. Then streams of frames come (`take`): a file appears once its
//! first piece was verified. Links, other nodes, deletions and the looks of directories come last,
//! in [`Receiver::finish`].

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::super::error::{Error, Result, shown};
use super::super::walk::{Attribute, Look};
use super::done::Done;
use super::piece::{CHUNK, ZEROS, pieces};
use super::place::Place;
use super::row::{Kind, Row};
use super::send::Want;
use super::table::{Cursor, Table};
use super::take::{Patience, Taken, Target};
use crate::archive::dress::{BLOCK, CHARACTER, FIFO, dress, dress_node};
use crate::archive::unpack::{open_below, split};
use crate::sys::{self, Dir, Errno, OpenFile, Xattrs};
use crate::tree::{self, Stop};

const FS: &str = "fs";
const DONE: &str = "done";

/// A layer that is being received.
#[derive(Debug)]
pub struct Receiver {
    table: Arc<Table>,
    place: Place,
    done: Done,
    devices: bool,
}

impl Receiver {
    /// Begins in the directory `into`, or goes on with what an earlier receiver of the same layer
    /// did there. `devices`: device nodes are made.
    pub fn open(into: &Dir, table: Arc<Table>, devices: bool, stop: Stop<'_>) -> Result<Self> {
        into.ensure_dir(FS, 0o700)?;
        let mut receiver = Self {
            place: Place::new(into.open_beneath(FS)?),
            done: Done::open(into, DONE, table.digest().sha256)?,
            table,
            devices,
        };
        receiver.directories(stop)?;
        Ok(receiver)
    }

    /// Makes all directories, open to root alone.
    fn directories(&mut self, stop: Stop<'_>) -> Result<()> {
        let mut cursor = Cursor::new(Arc::clone(&self.table));
        while let Some(row) = cursor.next()? {
            if stop() {
                return Err(Error::Stopped);
            }
            if matches!(row.kind, Kind::Directory { .. }) && !cursor.path().is_empty() {
                let (parent, name) = split(cursor.path());
                self.place.enter(parent)?;
                self.place.here().ensure_dir(name, 0o700)?;
            }
        }
        Ok(())
    }

    /// The missing parts, at most `most` wants. Any holder can be asked for them.
    pub fn missing(&mut self, most: usize) -> Result<Vec<Want>> {
        let mut cursor = Cursor::new(Arc::clone(&self.table));
        let mut wants: Vec<Want> = Vec::new();
        while let Some(row) = cursor.next()? {
            let Kind::File { size } = row.kind else {
                continue;
            };
            let file = cursor.file();
            for piece in 0..pieces(size) {
                if self.done.has(cursor.piece() + piece)? || cursor.digest(piece)? == ZEROS {
                    continue;
                }
                let offset = piece * CHUNK;
                if wants
                    .last_mut()
                    .is_some_and(|want| extend(want, file, size, offset))
                {
                    continue;
                }
                if wants.len() == most {
                    return Ok(wants);
                }
                let (first, count, length) = (file, 1, CHUNK);
                wants.push(if size <= CHUNK {
                    Want::Files { first, count }
                } else {
                    Want::Part {
                        file,
                        offset,
                        length,
                    }
                });
            }
        }
        Ok(wants)
    }

    /// Whether a piece was verified. An incomplete holder may send only such pieces.
    pub fn has(&mut self, piece: u64) -> Result<bool> {
        Ok(self.done.has(piece)?)
    }

    /// Takes a stream of frames. On an error what was verified stays, and the rest can be asked for
    /// again. `from` is read by another thread; it must not block for longer than the patience.
    /// Verified bytes that are new are added to `progress`, each before it takes space.
    pub fn take(
        &mut self,
        from: impl Read + Send,
        patience: Patience,
        progress: &AtomicU64,
        stop: Stop<'_>,
    ) -> Result<Taken> {
        let places = [self.place.again()?, self.place.again()?];
        let target = Target::new(Arc::clone(&self.table), &mut self.done, progress);
        target.take(places, from, patience, stop)
    }

    /// Completes the layer, which is then `fs` in the receiver's directory. [`Error::Incomplete`]:
    /// something is missing. Can be repeated until it succeeds.
    pub fn finish(mut self, stop: Stop<'_>) -> Result<Dir> {
        if let Some(want) = self.missing(1)?.first() {
            return Err(Error::Incomplete {
                what: format!("{want:?}"),
            });
        }
        let mut cursor = Cursor::new(Arc::clone(&self.table));
        let mut open: Vec<Open> = Vec::new();
        while let Some(row) = cursor.next()? {
            if stop() {
                return Err(Error::Stopped);
            }
            let (parent, name) = split(cursor.path());
            match &row.kind {
                Kind::Directory { opaque } => {
                    open.push(Open {
                        look: row.look,
                        opaque: *opaque,
                        whiteouts: false,
                        attributes: (!row.attributes.is_empty()).then(|| cursor.at_entry()),
                    });
                    continue;
                }
                Kind::End => {
                    let dir = open.pop().expect("the table was checked");
                    self.place.enter(cursor.path())?;
                    let attributes = match dir.attributes {
                        Some(at) => cursor.again(at)?.attributes,
                        None => Vec::new(),
                    };
                    dir.finish(self.place.here(), &attributes, open.is_empty())?;
                    continue;
                }
                Kind::File { size } => {
                    let size = *size;
                    let mut zeros = true;
                    for piece in 0..pieces(size) {
                        zeros = zeros && cursor.digest(piece)? == ZEROS;
                    }
                    if zeros {
                        let (parent, name) = split(cursor.path());
                        self.place.enter(parent)?;
                        self.zeros(name, &row, size)?;
                    }
                    continue;
                }
                Kind::Whiteout => {
                    open.last_mut().expect("the table was checked").whiteouts = true;
                }
                _ => {}
            }
            self.place.enter(parent)?;
            self.other(name, &row)?;
        }
        Ok(self.place.into_root())
    }

    /// A file without content that could be transferred.
    fn zeros(&self, name: &OsStr, row: &Row, size: u64) -> Result<()> {
        let full = self.place.here().path().join(name);
        let file = File::from(self.place.create(name, row.look.mode, true)?);
        file.set_len(size)
            .map_err(|error| sys::Error::new("ftruncate", &full, error))?;
        dress(
            &OpenFile::new(OwnedFd::from(file), full),
            &row.look,
            &row.attributes,
        )
    }

    /// Makes what is neither a file nor a directory.
    fn other(&self, name: &OsStr, row: &Row) -> Result<()> {
        let here = self.place.here();
        let make = || -> Result<()> {
            match &row.kind {
                Kind::Symlink(target) => here.symlink(OsStr::from_bytes(target), name)?,
                Kind::HardLink(target) => {
                    let (parent, target_name) = split(target);
                    let dir = open_below(self.place.root(), None, parent)?;
                    let stat = dir.stat(target_name)?;
                    if tree::is_whiteout(&stat) {
                        return Err(Error::Refused {
                            path: shown(target),
                            why: "it is a deletion, and has a hard link".to_owned(),
                        });
                    }
                    dir.link(target_name, here, name)?;
                }
                Kind::Fifo => here.make_node(name, FIFO | 0o600, 0)?,
                Kind::Whiteout => here.make_node(name, CHARACTER, 0)?,
                Kind::Character(major, minor) => {
                    here.make_node(name, CHARACTER | 0o600, rustix::fs::makedev(*major, *minor))?;
                }
                Kind::Block(major, minor) => {
                    here.make_node(name, BLOCK | 0o600, rustix::fs::makedev(*major, *minor))?;
                }
                Kind::File { .. } | Kind::Directory { .. } | Kind::End => {}
            }
            Ok(())
        };
        if matches!(row.kind, Kind::Character(..) | Kind::Block(..)) && !self.devices {
            return Ok(());
        }
        match make() {
            // An earlier attempt was interrupted.
            Err(Error::System(error)) if error.is(Errno::EEXIST) => {
                here.remove_file(name)?;
                make()?;
            }
            result => result?,
        }
        if matches!(row.kind, Kind::HardLink(_) | Kind::Whiteout) {
            return Ok(());
        }
        dress_node(&here.node(name)?, &row.look, &row.attributes)
    }
}

/// Lets a want cover the piece at this offset of a file, too, if it directly follows.
fn extend(want: &mut Want, file: u64, size: u64, offset: u64) -> bool {
    match want {
        Want::Files { first, count } if size <= CHUNK && *first + *count == file => *count += 1,
        Want::Part {
            file: there,
            offset: from,
            length,
        } if *there == file && *from + *length == offset => *length += CHUNK,
        _ => return false,
    }
    true
}

/// A directory in which something is still to be made.
struct Open {
    look: Look,
    opaque: bool,
    /// Whether it has deletions.
    whiteouts: bool,
    /// Where its entry is, if that has attributes. They are read again: held for each level of a
    /// hostile table they would be too many.
    attributes: Option<u64>,
}

impl Open {
    /// Gives the directory its looks. All in it has been made.
    fn finish(&self, dir: &Dir, attributes: &[Attribute], is_root: bool) -> Result<()> {
        if self.opaque {
            dir.set_xattr(tree::OPAQUE, b"y")?;
        }
        if self.whiteouts && !is_root {
            dir.set_xattr(tree::ORIGIN, b"")?;
        }
        dress(dir, &self.look, attributes)
    }
}
