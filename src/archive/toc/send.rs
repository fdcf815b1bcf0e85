//! A holder: sends the wanted parts of a layer as frames. This module divides the frames. `record`
//! has the bytes around a frame, and the caller has the destination.

use std::io::Write;
use std::sync::Arc;

use super::super::error::{Error, Result, shown};
use super::super::walk::{guarded, open_file};
use super::piece::{CHUNK, ZEROS, pieces};
use super::record::{self, Frame, Offer, State, most_packed};
use super::row::Kind;
use super::stored::store;
use super::table::{Cursor, Table};
use crate::archive::unpack::{open_below, split};
use crate::sys::{self, Dir, OpenFile, Xattrs};
use crate::tree::Stop;

/// A frame of small files is closed once it has so much, and before it would have more than that.
const LEAST_FRAME: usize = 256 << 10;
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

/// How frames are compressed.
#[derive(Clone, Copy)]
pub struct Packing<'a> {
    /// The level of zstd.
    pub level: i32,
    /// Whether the destination waits for bytes at this moment. Then the next frame is not
    /// compressed: compressing it would take longer than sending it.
    pub is_awaited: &'a dyn Fn() -> bool,
}

impl Packing<'_> {
    /// All frames are compressed at this level.
    #[must_use]
    pub const fn at(level: i32) -> Self {
        let is_awaited = &|| false;
        Self { level, is_awaited }
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
    /// Memory: two frames.
    pub fn send(
        &self,
        wants: &[Want],
        out: impl Write,
        packing: Packing<'_>,
        has: &mut dyn FnMut(u64) -> Result<bool>,
        stop: Stop<'_>,
    ) -> Result<u64> {
        let codec = zstd::bulk::Compressor::new(packing.level).map_err(Error::Write)?;
        let mut job = Sender {
            cursor: Cursor::new(Arc::clone(&self.table)),
            table: &self.table,
            root: &self.root,
            parent: None,
            out,
            codec,
            is_awaited: packing.is_awaited,
            frame: None,
            plain: Vec::new(),
            packed: Vec::new(),
            frames: 0,
            has,
            stop,
        };
        for want in wants {
            match *want {
                Want::Files { first, count } => {
                    for file in first..first.saturating_add(count) {
                        job.file(file, 0, u64::MAX)?;
                    }
                }
                Want::Part { offset, .. } if offset % CHUNK != 0 => {
                    return Err(Error::Refused {
                        path: format!("{want:?}"),
                        why: "a part begins at a multiple of 4 MiB".to_owned(),
                    });
                }
                Want::Part {
                    file,
                    offset,
                    length,
                } => job.file(file, offset, offset.saturating_add(length))?,
            }
        }
        job.close()?;
        job.out
            .write_all(&record::end(job.frames))
            .map_err(Error::Write)?;
        job.out.flush().map_err(Error::Write)?;
        Ok(job.frames)
    }
}

struct Sender<'a, W> {
    cursor: Cursor<Arc<Table>>,
    table: &'a Table,
    root: &'a Dir,
    parent: Option<(Vec<u8>, Dir)>,
    out: W,
    codec: zstd::bulk::Compressor<'static>,
    is_awaited: &'a dyn Fn() -> bool,
    /// The frame that is being filled: its first file and offset, and the file that may be next.
    frame: Option<(u64, u64, u64)>,
    plain: Vec<u8>,
    packed: Vec<u8>,
    frames: u64,
    has: &'a mut dyn FnMut(u64) -> Result<bool>,
    stop: Stop<'a>,
}

impl<W: Write> Sender<'_, W> {
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
            let zeros = self.cursor.digest(piece)? == ZEROS;
            if zeros {
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
            if !small || !joins || self.plain.len() as u64 + length > MOST_FRAME {
                self.close()?;
            }
            if self.frame.is_none() {
                self.frame = Some((index, offset, index));
            }
            self.read(file.as_ref().expect("it was opened"), offset, length)?;
            if !small || self.plain.len() >= LEAST_FRAME {
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

    fn read(&mut self, file: &OpenFile, offset: u64, length: u64) -> Result<()> {
        let begin = self.plain.len();
        let length = usize::try_from(length).expect("at most 4 MiB");
        self.plain.resize(begin + length, 0);
        let mut done = 0;
        while done < length {
            let into = &mut self.plain[begin + done..];
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
        Ok(())
    }

    /// Sends the frame that is being filled.
    fn close(&mut self) -> Result<()> {
        let Some((file, offset, _)) = self.frame.take() else {
            return Ok(());
        };
        let most = usize::try_from(most_packed(self.plain.len() as u64)).expect("5 MiB");
        self.packed.clear();
        self.packed.reserve(most);
        if (self.is_awaited)() {
            store(&self.plain, &mut self.packed);
        } else {
            self.codec
                .compress_to_buffer(&self.plain, &mut self.packed)
                .map_err(Error::Write)?;
        }
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("at most 5 MiB");
        let frame = Frame {
            table: self.table.digest().sha256,
            file,
            offset,
            plain: length(&self.plain),
            packed: length(&self.packed),
        };
        self.out.write_all(&frame.encode()).map_err(Error::Write)?;
        self.out.write_all(&self.packed).map_err(Error::Write)?;
        self.plain.clear();
        self.frames += 1;
        Ok(())
    }
}
