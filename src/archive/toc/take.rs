//! Takes a stream of frames into a directory: reads, decompresses, verifies, writes. Which frames
//! to ask for, and what follows when all have come, is in `receive`.
//!
//! One thread reads the stream, the caller's takes the frames. Reading is the least of the work, so
//! the reader takes a frame itself where enough of them wait: both cores are busy.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use zstd::bulk::Decompressor;

use super::super::error::{Error, Result};
use super::super::sparse::GRAIN;
use super::divide::{Divider, Piece, wrong};
use super::done::Done;
use super::piece::{CHUNK, Sha256Sum};
use super::place::Place;
use super::record::{self, Frame, Paced, Record};
use super::table::Table;
use crate::archive::dress::dress;
use crate::archive::unpack::split;
use crate::sys::{self, OpenFile};
use crate::tree::Stop;

/// How many frames wait between the thread that reads and the one that takes them.
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

/// Where a stream goes.
pub(super) struct Target<'a> {
    table: Arc<Table>,
    pieces: Mutex<Pieces<'a>>,
    progress: &'a AtomicU64,
}

struct Pieces<'a> {
    done: &'a mut Done,
    /// Those that a thread is writing.
    busy: HashSet<u64>,
    taken: Taken,
}

impl<'a> Target<'a> {
    /// `progress`: verified bytes that are new are added to it, each before it takes space.
    pub(super) fn new(table: Arc<Table>, done: &'a mut Done, progress: &'a AtomicU64) -> Self {
        let pieces = Mutex::new(Pieces {
            done,
            busy: HashSet::new(),
            taken: Taken::default(),
        });
        Self {
            table,
            pieces,
            progress,
        }
    }

    /// Takes a stream. The places are below the root of the layer, one for each thread.
    pub(super) fn take(
        &self,
        [own, other]: [Place; 2],
        from: impl Read + Send,
        patience: Patience,
        stop: Stop<'_>,
    ) -> Result<Taken> {
        let mut own = Worker::new(self, own)?;
        let other = Worker::new(self, other)?;
        let (sender, frames) = sync_channel(WAITING);
        let ended = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reading = scope.spawn(move || read(from, other, patience, &sender, ended));
            let result = loop {
                let (frame, packed) = match frames.recv_timeout(ASK) {
                    Err(RecvTimeoutError::Disconnected) => break Ok(()),
                    _ if stop() => break Err(Error::Stopped),
                    Err(RecvTimeoutError::Timeout) => continue,
                    Ok(frame) => frame,
                };
                if let Err(error) = own.frame(&frame, &packed, stop) {
                    break Err(error);
                }
            };
            // The other thread must not go on with its frame, nor wait for one.
            ended.store(true, Ordering::Relaxed);
            drop(frames);
            let read = reading.join().unwrap_or_else(|panic| {
                std::panic::resume_unwind(panic);
            });
            result?;
            read
        })?;
        Ok(self.pieces.lock().taken)
    }
}

/// Reads records until the stream ends or the other thread has `ended`.
fn read(
    from: impl Read,
    mut worker: Worker<'_, '_>,
    patience: Patience,
    into: &SyncSender<(Frame, Vec<u8>)>,
    ended: &AtomicBool,
) -> Result<()> {
    let digest = worker.target.table.digest().sha256;
    let mut from = Paced::new(Until(from, ended), patience.0);
    let (mut frames, mut others) = (0, 0);
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
        let mut packed = vec![0; length(frame.packed)];
        from.exact(&mut packed)?;
        frames += 1;
        match into.try_send((frame, packed)) {
            Ok(()) => {}
            Err(TrySendError::Full((frame, packed))) => {
                worker.frame(&frame, &packed, &|| ended.load(Ordering::Relaxed))?;
            }
            // The receiver has its own reason.
            Err(TrySendError::Disconnected(_)) => return Ok(()),
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

fn length(number: u32) -> usize {
    usize::try_from(number).expect("it is at most 5 MiB")
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

/// A thread that takes frames.
struct Worker<'a, 'b> {
    target: &'a Target<'b>,
    place: Place,
    divider: Divider,
    codec: Decompressor<'static>,
    plain: Vec<u8>,
}

impl<'a, 'b> Worker<'a, 'b> {
    fn new(target: &'a Target<'b>, place: Place) -> Result<Self> {
        Ok(Self {
            target,
            place,
            divider: Divider::new(Arc::clone(&target.table)),
            codec: Decompressor::new().map_err(Error::Read)?,
            plain: Vec::new(),
        })
    }

    /// Takes a frame. It may have many thousand files: `stop` is asked before each piece.
    fn frame(&mut self, frame: &Frame, packed: &[u8], stop: Stop<'_>) -> Result<()> {
        self.plain.clear();
        self.plain.reserve(length(frame.plain));
        let unpacked = self.codec.decompress_to_buffer(packed, &mut self.plain);
        unpacked.map_err(|error| Error::Codec(error.to_string()))?;
        if self.plain.len() != length(frame.plain) {
            return Err(wrong(frame, "its length is not what its record says"));
        }
        let (target, place) = (self.target, &mut self.place);
        let written = self.divider.divide(frame, &self.plain, |piece| {
            if stop() {
                return Err(Error::Stopped);
            }
            if Sha256Sum::from(Sha256::digest(piece.bytes)) != piece.digest {
                return Err(wrong(frame, "its content is not what the table says"));
            }
            target.piece(place, piece)
        });
        let noted = {
            let mut pieces = target.pieces.lock();
            pieces.taken.frames += 1;
            pieces.done.write()
        };
        written?;
        noted?;
        target.refuse_repetition()
    }
}

impl Target<'_> {
    /// Writes a piece that was verified, if it is new.
    fn piece(&self, place: &mut Place, piece: &Piece<'_>) -> Result<()> {
        {
            let mut pieces = self.pieces.lock();
            if pieces.done.has(piece.number)? || !pieces.busy.insert(piece.number) {
                pieces.taken.repeated += 1;
                return Ok(());
            }
        }
        // First: bytes that already take space must not count as still to come.
        let bytes = piece.bytes.len() as u64;
        self.progress.fetch_add(bytes, Ordering::Relaxed);
        write_piece(place, piece).inspect_err(|_| {
            self.progress.fetch_sub(bytes, Ordering::Relaxed);
        })?;
        let mut pieces = self.pieces.lock();
        pieces.done.set(piece.number)?;
        pieces.busy.remove(&piece.number);
        pieces.taken.pieces += 1;
        pieces.taken.bytes += bytes;
        Ok(())
    }

    /// Refuses a stream that repeats more than the whole layer: it may have no end.
    fn refuse_repetition(&self) -> Result<()> {
        if self.pieces.lock().taken.repeated <= self.table.pieces() {
            return Ok(());
        }
        Err(Error::Refused {
            path: "a stream".to_owned(),
            why: "it repeats what it has sent".to_owned(),
        })
    }
}

/// Writes a piece into its file, which gets its attributes.
fn write_piece(place: &mut Place, piece: &Piece<'_>) -> Result<()> {
    let (parent, name) = split(piece.path);
    place.enter(parent)?;
    let (look, is_whole) = (&piece.row.look, piece.size <= CHUNK);
    let file = place.create(name, look.mode, is_whole)?;
    let full = place.here().path().join(name);
    let file = File::from(file);
    write(&file, piece.bytes, piece.place * CHUNK, piece.size)
        .map_err(|error| sys::Error::new("write", &full, error))?;
    let file = OpenFile::new(OwnedFd::from(file), full);
    dress(&file, look, &piece.row.attributes)
}

/// Writes the bytes of a piece; aligned zeros become holes.
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
