//! A holder: sends the wanted parts of a layer as frames. This module divides the frames.
//! `compress` has the threads that compress them, `record` the bytes around a frame, and the caller
//! the destination.

use std::io::Write;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::super::error::{Error, Result, shown};
use super::super::walk::{guarded, open_file};
use super::compress::{Buffers, Compressing};
use super::piece::{CHUNK, Sha256Sum, ZEROS, pieces};
use super::record::{self, Frame, Offer, State};
use super::row::Kind;
use super::stored::store;
use super::table::{Cursor, Table};
use crate::archive::unpack::{open_below, split};
use crate::sys::{self, Dir, OpenFile, Xattrs};
use crate::tree::Stop;

/// A frame of small files is closed once it has so much, and before it would have more than that.
pub(super) const LEAST_FRAME: usize = 256 << 10;
const MOST_FRAME: u64 = 1 << 20;

/// What a receiver asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Whole files: the index of the first and how many.
    Files {
        /// The index of the first.
        first: u64,
        /// How many.
        count: u64,
    },
    /// A part of one file.
    Part {
        /// The file's index.
        file: u64,
        /// Where the part begins: a multiple of 4 MiB.
        offset: u64,
        /// Bytes; beyond the file's end there are none.
        length: u64,
    },
}

/// How frames are made.
#[derive(Clone, Copy)]
pub struct Packing<'a> {
    /// The level of zstd.
    pub level: i32,
    /// Whether the destination waits for bytes at this moment. Then the next frame is not
    /// compressed: compressing it would take longer than sending it.
    pub is_awaited: &'a dyn Fn() -> bool,
    /// Whether each piece is compared with its digest before it is sent: [`Error::Damaged`]. Not
    /// needed where the destination verifies and reports damage.
    pub verifies: bool,
}

impl Packing<'_> {
    /// All frames are compressed at this level, and not verified.
    #[must_use]
    pub const fn at(level: i32) -> Self {
        let is_awaited = &|| false;
        Self {
            level,
            is_awaited,
            verifies: false,
        }
    }
}

/// A layer that this node holds, and its table.
#[derive(Debug)]
pub struct Holder {
    table: Arc<Table>,
    root: Dir,
}

impl Holder {
    /// The holder of the layer `root`, whose table this is.
    pub fn new(table: Arc<Table>, root: &Dir) -> Result<Self> {
        let root = guarded(root)?;
        Ok(Self { table, root })
    }

    /// What it tells before it sends.
    #[must_use]
    pub fn offer(&self) -> Offer {
        Offer {
            table: self.table.digest().sha256,
            state: State::Whole,
            table_bytes: self.table.digest().bytes,
            bytes: self.table.bytes(),
        }
    }

    /// Writes the table as a record, as it travels towards registries.
    pub fn send_table(&self, out: &mut impl Write) -> Result<()> {
        record::table(self.table.digest().bytes, out)?;
        self.table.write_to(out)
    }

    /// Sends what is wanted in frames of zstd, and the end record; returns how many frames. Pieces
    /// that `has` denies are passed over: a holder may still be filling.
    ///
    /// This thread reads and writes. Up to two others compress, each once a core is free
    /// (`cores`). Memory: three frames.
    pub fn send(
        &self,
        wants: &[Want],
        out: impl Write,
        packing: Packing<'_>,
        has: &mut dyn FnMut(u64) -> Result<bool>,
        stop: Stop<'_>,
    ) -> Result<u64> {
        std::thread::scope(|scope| {
            let mut job = Sender {
                cursor: Cursor::new(Arc::clone(&self.table)),
                table: &self.table,
                root: &self.root,
                parent: None,
                out,
                compressing: Compressing::new(scope, packing.level),
                is_awaited: packing.is_awaited,
                verifies: packing.verifies,
                frame: None,
                buffers: Buffers::default(),
                frames: 0,
                has,
                stop,
            };
            for want in wants {
                job.want(want)?;
            }
            job.finish()
        })
    }
}

struct Sender<'a, W> {
    cursor: Cursor<Arc<Table>>,
    table: &'a Table,
    root: &'a Dir,
    parent: Option<(Vec<u8>, Dir)>,
    out: W,
    compressing: Compressing,
    is_awaited: &'a dyn Fn() -> bool,
    verifies: bool,
    /// The frame that is being filled: its first file and offset, and the file that may be next.
    frame: Option<(u64, u64, u64)>,
    buffers: Buffers,
    frames: u64,
    has: &'a mut dyn FnMut(u64) -> Result<bool>,
    stop: Stop<'a>,
}

impl<W: Write> Sender<'_, W> {
    fn want(&mut self, want: &Want) -> Result<()> {
        match *want {
            Want::Files { first, count } => {
                for file in first..first.saturating_add(count) {
                    self.file(file, 0, u64::MAX)?;
                }
                Ok(())
            }
            Want::Part { offset, .. } if offset % CHUNK != 0 => Err(Error::Refused {
                path: format!("{want:?}"),
                why: "a part begins at a multiple of 4 MiB".to_owned(),
            }),
            Want::Part {
                file,
                offset,
                length,
            } => self.file(file, offset, offset.saturating_add(length)),
        }
    }

    fn file(&mut self, index: u64, from: u64, to: u64) -> Result<()> {
        if (self.stop)() {
            return Err(Error::Stopped);
        }
        let row = self.cursor.seek(index)?;
        let Kind::File { size } = row.kind else {
            return Ok(());
        };
        let first_piece = self.cursor.piece();
        let mut file = None;
        for piece in from / CHUNK..pieces(size).min(to.div_ceil(CHUNK)) {
            let digest = self.cursor.digest(piece)?;
            if digest == ZEROS {
                continue;
            }
            if !(self.has)(first_piece + piece)? {
                self.close()?;
                continue;
            }
            if file.is_none() {
                file = Some(self.open(size)?);
            }
            let offset = piece * CHUNK;
            let length = (size - offset).min(CHUNK);
            let small = size <= MOST_FRAME;
            let joins = self.frame.is_some_and(|(.., next)| next == index);
            if !small || !joins || self.buffers.plain.len() as u64 + length > MOST_FRAME {
                self.close()?;
            }
            if self.frame.is_none() {
                self.frame = Some((index, offset, index));
            }
            let file = file.as_ref().expect("it was opened");
            self.read(file, offset, length, &digest)?;
            if !small || self.buffers.plain.len() >= LEAST_FRAME {
                self.close()?;
            }
        }
        if let Some((.., next)) = &mut self.frame
            && *next == index
        {
            // Files without content may stand between two of a frame.
            *next = index + 1;
        }
        Ok(())
    }

    fn open(&mut self, size: u64) -> Result<OpenFile> {
        let path = self.cursor.path();
        let (parent, name) = split(path);
        if self
            .parent
            .as_ref()
            .is_none_or(|(there, _)| there != parent)
        {
            let there = self.parent.as_ref().map(|(path, dir)| (&**path, dir));
            let dir = open_below(self.root, there, parent)?;
            self.parent = Some((parent.to_vec(), dir));
        }
        let (_, dir) = self.parent.as_ref().expect("it was opened");
        let file = open_file(dir, name, self.stop)?;
        // A sealed layer does not change.
        let same = |stat: &rustix::fs::Stat| u64::try_from(stat.st_size) == Ok(size);
        match file {
            Some((file, stat)) if same(&stat) => Ok(file),
            _ => Err(Error::Shrunk { path: shown(path) }),
        }
    }

    /// Reads a piece into the frame that is being filled.
    fn read(
        &mut self,
        file: &OpenFile,
        offset: u64,
        length: u64,
        digest: &Sha256Sum,
    ) -> Result<()> {
        // A file may have any number of pieces.
        if (self.stop)() {
            return Err(Error::Stopped);
        }
        let begin = self.buffers.plain.len();
        let length = usize::try_from(length).expect("at most 4 MiB");
        self.buffers.plain.resize(begin + length, 0);
        let mut done = 0;
        while done < length {
            let into = &mut self.buffers.plain[begin + done..];
            match rustix::io::pread(file, into, offset + done as u64) {
                Ok(0) => {
                    let path = shown(self.cursor.path());
                    return Err(Error::Shrunk { path });
                }
                Ok(read) => done += read,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(sys::Error::new("pread", file.subject(), errno).into()),
            }
        }
        let piece = &self.buffers.plain[begin..];
        if self.verifies && Sha256Sum::from(Sha256::digest(piece)) != *digest {
            let path = shown(self.cursor.path());
            return Err(Error::Damaged { path });
        }
        Ok(())
    }

    /// Has the frame that is being filled compressed and sent. If its bytes are awaited, it is sent
    /// now and as it is.
    fn close(&mut self) -> Result<()> {
        let Some((file, offset, _)) = self.frame.take() else {
            return Ok(());
        };
        let mut frame = Frame {
            table: self.table.digest().sha256,
            file,
            offset,
            plain: length(&self.buffers.plain),
            packed: 0,
        };
        self.frames += 1;
        let next = self.compressing.buffers();
        let mut buffers = std::mem::replace(&mut self.buffers, next);
        if (self.is_awaited)() {
            while self.send_next()? {}
            let (plain, packed) = buffers.packing();
            store(plain, packed);
            frame.packed = length(&buffers.packed);
            return self.send(&frame, buffers);
        }
        self.compressing.give(frame, buffers);
        // So the next one can be given, and what the destination has taken is known by then.
        if self.compressing.is_full() {
            self.send_next()?;
        }
        Ok(())
    }

    /// Sends the first frame that is being compressed. Returns whether there was one.
    fn send_next(&mut self) -> Result<bool> {
        let Some((mut frame, buffers)) = self.compressing.next()? else {
            return Ok(false);
        };
        frame.packed = length(&buffers.packed);
        self.send(&frame, buffers)?;
        Ok(true)
    }

    fn send(&mut self, frame: &Frame, mut buffers: Buffers) -> Result<()> {
        self.out.write_all(&frame.encode()).map_err(Error::Write)?;
        self.out.write_all(&buffers.packed).map_err(Error::Write)?;
        buffers.plain.clear();
        self.compressing.give_back(buffers);
        Ok(())
    }

    fn finish(mut self) -> Result<u64> {
        self.close()?;
        while self.send_next()? {}
        self.out
            .write_all(&record::end(self.frames))
            .map_err(Error::Write)?;
        self.out.flush().map_err(Error::Write)?;
        Ok(self.frames)
    }
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("at most 5 MiB")
}
