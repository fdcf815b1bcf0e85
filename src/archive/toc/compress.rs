//! Compresses frames on a few threads, and gives them back in the order in which they came. What is
//! in a frame, and where it goes, is decided elsewhere.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;

use super::super::cores::{CORES, Cores};
use super::super::error::{Error, Result};
use super::record::{Frame, most_packed};

/// How many threads a sender has at most. More would hold more frames in memory.
const THREADS: u32 = 2;

/// A frame's plain bytes, and what they were compressed to.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) plain: Vec<u8>,
    pub(super) packed: Vec<u8>,
}

impl Buffers {
    /// The plain bytes, and memory for all that they may be packed to.
    pub(super) fn packing(&mut self) -> (&[u8], &mut Vec<u8>) {
        let most = most_packed(self.plain.len() as u64);
        self.packed.clear();
        self.packed.reserve(usize::try_from(most).expect("5 MiB"));
        (&self.plain, &mut self.packed)
    }
}

/// One thread.
struct Thread {
    plain: SyncSender<Buffers>,
    packed: Receiver<io::Result<Buffers>>,
}

/// The threads, and the frames that they have.
pub(super) struct Compressing {
    /// In turns: the first of them is the next to get a frame.
    threads: VecDeque<Thread>,
    /// Frames of the last threads.
    frames: VecDeque<Frame>,
    /// Memory of earlier frames.
    free: Vec<Buffers>,
}

impl Compressing {
    pub(super) fn new<'scope>(scope: &'scope Scope<'scope, '_>, level: i32) -> Self {
        let thread = |_| {
            let (plain, frames) = sync_channel(1);
            let (done, packed) = sync_channel(1);
            scope.spawn(move || compress(level, &frames, &done));
            Thread { plain, packed }
        };
        Self {
            threads: (0..Cores::all().min(THREADS)).map(thread).collect(),
            frames: VecDeque::new(),
            free: Vec::new(),
        }
    }

    /// Memory for the next frame.
    pub(super) fn buffers(&mut self) -> Buffers {
        self.free.pop().unwrap_or_default()
    }

    /// Takes memory back.
    pub(super) fn give_back(&mut self, buffers: Buffers) {
        self.free.push(buffers);
    }

    /// Whether each thread has a frame: take one with [`Compressing::next`] before the next one is
    /// given.
    pub(super) fn is_full(&self) -> bool {
        self.frames.len() == self.threads.len()
    }

    /// Gives a frame to a thread that has none.
    pub(super) fn give(&mut self, frame: Frame, buffers: Buffers) {
        self.threads.rotate_left(1);
        let thread = self.threads.back().expect("there is one for each core");
        // It ends only after an error, which is what it gives back.
        let _ended = thread.plain.send(buffers);
        self.frames.push_back(frame);
    }

    /// Waits for the frame that was given first; `None`: no thread has one.
    pub(super) fn next(&mut self) -> Result<Option<(Frame, Buffers)>> {
        let place = self.threads.len() - self.frames.len();
        let Some(frame) = self.frames.pop_front() else {
            return Ok(None);
        };
        let packed = self.threads[place].packed.recv();
        let packed = packed.unwrap_or_else(|ended| Err(io::Error::other(ended)));
        Ok(Some((frame, packed.map_err(Error::Write)?)))
    }
}

/// Compresses frames until no more can come, or one fails.
fn compress(level: i32, frames: &Receiver<Buffers>, done: &SyncSender<io::Result<Buffers>>) {
    let mut codec = None;
    for mut buffers in frames {
        let compress = || {
            let codec = match &mut codec {
                Some(codec) => codec,
                none => none.insert(zstd::bulk::Compressor::new(level)?),
            };
            let (plain, packed) = buffers.packing();
            codec.compress_to_buffer(plain, packed)
        };
        let compressed = CORES.frame(Cores::all(), compress).map(|_length| buffers);
        let failed = compressed.is_err();
        if done.send(compressed).is_err() || failed {
            return;
        }
    }
}
