//! A receiver: a layer is made in a fresh directory, of frames in any order from any holder.
//!
//! The directory has `fs` (the layer, in overlayfs' form) and `done` (which pieces were verified).
//! First all directories are made. A file appears once its first piece was verified. Links, other
//! nodes, deletions and the looks of directories come last, in [`Receiver::finish`].

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};

use super::super::error::{Error, Result, shown};
use super::super::sparse::GRAIN;
use super::super::walk::{Attribute, Look};
use super::divide::{Divider, Piece, wrong};
use super::done::Done;
use super::piece::{CHUNK, Sha256Sum, ZEROS, pieces};
use super::record::{self, Frame, Paced, Record};
use super::row::{Kind, Row};
use super::send::Want;
use super::table::{Cursor, Table};
use crate::archive::dress::{BLOCK, CHARACTER, FIFO, dress, dress_node};
use crate::archive::unpack::{open_below, split};
use crate::sys::{self, Dir, Errno, OpenFile, Xattrs};
use crate::tree::{self, Stop};

const FS: &str = "fs";
const DONE: &str = "done";
/// How many frames wait between the thread that verifies and the one that writes.
const WAITING: usize = 2;
/// How often a receiver that waits for a frame asks whether to stop.
const ASK: Duration = Duration::from_millis(500);
/// How many records that are no frames a stream may have, and how many more for each frame. Without
/// a limit a stream of these would have no end.
const OTHERS: u64 = 1024;
const OTHERS_OF_FRAME: u64 = 16;

/// How long a receiver waits for one record and its frame.
#[derive(Debug, Clone, Copy)]
pub struct Patience(pub Duration);

/// The result of one stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// Frames that were in it.
    pub frames: u64,
    /// Pieces that were new.
    pub pieces: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Pieces that had come before.
    pub repeated: u64,
}

/// A layer that is being received.
#[derive(Debug)]
pub struct Receiver {
    table: Arc<Table>,
    root: Dir,
    done: Done,
    devices: bool,
    parent: Option<(Vec<u8>, Dir)>,
}

impl Receiver {
    /// Begins in the directory `into`, or goes on with what an earlier receiver of the same layer
    /// did there. `devices`: device nodes are made.
    pub fn open(into: &Dir, table: Arc<Table>, devices: bool, stop: Stop<'_>) -> Result<Self> {
        into.ensure_dir(FS, 0o700)?;
        let mut receiver = Self {
            root: into.open_beneath(FS)?,
            done: Done::open(into, DONE, table.digest().sha256)?,
            table,
            devices,
            parent: None,
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
                self.enter(parent)?;
                self.here().ensure_dir(name, 0o700)?;
            }
        }
        Ok(())
    }

    fn here(&self) -> &Dir {
        let parent = self.parent.as_ref();
        &parent.expect("a parent is entered before it is used").1
    }

    fn enter(&mut self, path: &[u8]) -> Result<()> {
        if self.parent.as_ref().is_some_and(|(there, _)| there == path) {
            return Ok(());
        }
        let there = self.parent.as_ref().map(|(path, dir)| (&**path, dir));
        let dir = open_below(&self.root, there, path)?;
        self.parent = Some((path.to_vec(), dir));
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
    /// Verified bytes that are new are added to `progress` as they come.
    pub fn take(
        &mut self,
        from: impl Read + Send,
        patience: Patience,
        progress: &AtomicU64,
        stop: Stop<'_>,
    ) -> Result<Taken> {
        let table = Arc::clone(&self.table);
        let mut divider = Divider::new(Arc::clone(&self.table));
        let (sender, frames) = sync_channel(WAITING);
        let ended = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let decoding = scope.spawn(move || decode(from, table, patience, &sender, ended));
            let mut taken = Taken::default();
            let result = loop {
                let (frame, plain) = match frames.recv_timeout(ASK) {
                    Err(RecvTimeoutError::Disconnected) => break Ok(()),
                    _ if stop() => break Err(Error::Stopped),
                    Err(RecvTimeoutError::Timeout) => continue,
                    Ok(frame) => frame,
                };
                let before = taken.bytes;
                taken.frames += 1;
                // A frame may have many thousand files.
                let written = divider.divide(&frame, &plain, |piece| {
                    if stop() {
                        return Err(Error::Stopped);
                    }
                    self.piece(piece, &mut taken)
                });
                let noted = self.done.write();
                progress.fetch_add(taken.bytes - before, Ordering::Relaxed);
                let written = written.and_then(|()| noted.map_err(Error::from));
                if let Err(error) = written.and_then(|()| self.refuse_repetition(&taken)) {
                    break Err(error);
                }
            };
            // The other thread must not wait for room that never comes, nor for a frame.
            ended.store(true, Ordering::Relaxed);
            drop(frames);
            let decoded = decoding.join().unwrap_or_else(|panic| {
                std::panic::resume_unwind(panic);
            });
            result?;
            decoded?;
            Ok(taken)
        })
    }

    /// Refuses a stream that repeats more than the whole layer: it may have no end.
    fn refuse_repetition(&self, taken: &Taken) -> Result<()> {
        if taken.repeated <= self.table.pieces() {
            return Ok(());
        }
        Err(Error::Refused {
            path: "a stream".to_owned(),
            why: "it repeats what it has sent".to_owned(),
        })
    }

    /// Writes a piece that was verified, if it is new.
    fn piece(&mut self, piece: &Piece<'_>, taken: &mut Taken) -> Result<()> {
        if self.done.has(piece.number)? {
            taken.repeated += 1;
            return Ok(());
        }
        let (parent, name) = split(piece.path);
        self.enter(parent)?;
        let (look, is_whole) = (&piece.row.look, piece.size <= CHUNK);
        let file = self.create(name, look.mode, is_whole)?;
        let full = self.here().path().join(name);
        let file = File::from(file);
        write(&file, piece.bytes, piece.place * CHUNK, piece.size)
            .map_err(|error| sys::Error::new("write", &full, error))?;
        let file = OpenFile::new(OwnedFd::from(file), full);
        dress(&file, look, &piece.row.attributes)?;
        self.done.set(piece.number)?;
        taken.pieces += 1;
        taken.bytes += piece.bytes.len() as u64;
        Ok(())
    }

    /// Opens a file for writing. One that is to hold a single piece is created again: what may be
    /// there was left by a process that was killed.
    fn create(&self, name: &OsStr, mode: u32, whole: bool) -> Result<OwnedFd> {
        loop {
            match self.here().create_file_with(name, mode & 0o777) {
                Err(error) if error.is(Errno::EEXIST) && whole => self.here().remove_file(name)?,
                Err(error) if error.is(Errno::EEXIST) => {
                    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
                    return Ok(self.here().open_file_beneath(name, flags, 0)?);
                }
                file => return Ok(file?),
            }
        }
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
                    self.enter(cursor.path())?;
                    let attributes = match dir.attributes {
                        Some(at) => cursor.again(at)?.attributes,
                        None => Vec::new(),
                    };
                    dir.finish(self.here(), &attributes, open.is_empty())?;
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
                        self.enter(parent)?;
                        self.zeros(name, &row, size)?;
                    }
                    continue;
                }
                Kind::Whiteout => {
                    open.last_mut().expect("the table was checked").whiteouts = true;
                }
                _ => {}
            }
            self.enter(parent)?;
            self.other(name, &row)?;
        }
        Ok(self.root)
    }

    /// A file without content that could be transferred.
    fn zeros(&self, name: &OsStr, row: &Row, size: u64) -> Result<()> {
        let full = self.here().path().join(name);
        let file = File::from(self.create(name, row.look.mode, true)?);
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
        let here = self.here();
        let make = || -> Result<()> {
            match &row.kind {
                Kind::Symlink(target) => here.symlink(OsStr::from_bytes(target), name)?,
                Kind::HardLink(target) => {
                    let (parent, target_name) = split(target);
                    let dir = open_below(&self.root, None, parent)?;
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

/// Writes a piece; aligned zeros become holes.
fn write(file: &File, bytes: &[u8], offset: u64, size: u64) -> std::io::Result<()> {
    let grain = usize::try_from(GRAIN).expect("64 KiB");
    let is_hole = |part: &[u8]| part.len() == grain && part.iter().all(|&byte| byte == 0);
    let mut begin = 0;
    let mut holes = size > CHUNK;
    for (index, part) in bytes.chunks(grain).enumerate() {
        if is_hole(part) {
            let at = index * grain;
            file.write_all_at(&bytes[begin..at], offset + begin as u64)?;
            begin = at + grain;
            holes = true;
        }
    }
    file.write_all_at(&bytes[begin..], offset + begin as u64)?;
    if holes {
        file.set_len(size)?;
    }
    Ok(())
}

/// A stream that ends when the other thread has ended. A frame can take minutes over a slow link.
struct Until<'a, R>(R, &'a AtomicBool);

impl<R: Read> Read for Until<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.1.load(Ordering::Relaxed) {
            return Ok(0);
        }
        self.0.read(into)
    }
}

/// Reads records, decompresses frames and verifies all their pieces, until the stream ends or the
/// other thread has `ended`.
fn decode(
    from: impl Read,
    table: Arc<Table>,
    patience: Patience,
    into: &SyncSender<(Frame, Vec<u8>)>,
    ended: &AtomicBool,
) -> Result<()> {
    let digest = table.digest().sha256;
    let mut divider = Divider::new(table);
    let mut from = Paced::new(Until(from, ended), patience.0);
    let mut codec = zstd::bulk::Decompressor::new().map_err(Error::Read)?;
    let (mut packed, mut frames, mut others) = (Vec::new(), 0, 0);
    while !ended.load(Ordering::Relaxed) {
        from.begin();
        let frame = match record::read(&mut from)? {
            Record::Frame(frame) => frame,
            Record::Offer(offer) if offer.table != digest => return Err(of_another()),
            Record::Offer(_) | Record::Other if others > OTHERS + OTHERS_OF_FRAME * frames => {
                return Err(from.wrong("it has too many records that are no frames"));
            }
            Record::Offer(_) | Record::Other => {
                others += 1;
                continue;
            }
            Record::End(count) if count == frames => return Ok(()),
            Record::End(_) => return Err(from.wrong("frames are missing before its end")),
        };
        if frame.table != digest {
            return Err(of_another());
        }
        let length = |number: u32| usize::try_from(number).expect("it is at most 5 MiB");
        packed.resize(length(frame.packed), 0);
        from.exact(&mut packed)?;
        let mut plain = Vec::with_capacity(length(frame.plain));
        codec
            .decompress_to_buffer(&packed, &mut plain)
            .map_err(|error| Error::Codec(error.to_string()))?;
        if plain.len() != length(frame.plain) {
            return Err(from.wrong("a frame does not match its record"));
        }
        divider.divide(&frame, &plain, |piece| {
            if Sha256Sum::from(Sha256::digest(piece.bytes)) == piece.digest {
                return Ok(());
            }
            Err(wrong(&frame, "its content is not what the table says"))
        })?;
        frames += 1;
        if into.send((frame, plain)).is_err() {
            // The receiver has its own reason.
            return Ok(());
        }
    }
    Ok(())
}

fn of_another() -> Error {
    Error::Refused {
        path: "a frame".to_owned(),
        why: "it belongs to another layer".to_owned(),
    }
}
