//! The last thread of an unpacker: it writes the content of small files, gives files their
//! attributes and closes them, while the thread before it reads the archive and creates names.
//!
//! That is safe in any order: these steps use the file's descriptor, and no later entry depends on
//! a file's content or attributes. Files go in batches, since waking a thread costs as much as
//! finishing one.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::archive::dress::dress;
use crate::archive::error::{Error, Result};
use crate::archive::sparse::Run;
use crate::archive::walk::{Attribute, Look};
use crate::sys::{self, OpenFile};

/// The largest content that goes through a batch. The thread before this one writes that of a
/// larger file, as it reads it.
pub(super) const MOST: u64 = 128 << 10;
/// A batch is sent once its content and attributes have so many bytes, or it so many open files.
const BYTES: usize = 256 << 10;
const FILES: usize = 32;
/// How many batches there are, those in work included.
const BATCHES: usize = 3;

/// A file that was created.
pub(super) struct Created {
    pub(super) file: File,
    /// For messages.
    pub(super) path: PathBuf,
    pub(super) look: Look,
    pub(super) attributes: Vec<Attribute>,
    /// Where its bytes in the batch go.
    pub(super) runs: Vec<Run>,
    /// Its size, if that is not where its content ends.
    pub(super) size: Option<u64>,
}

#[derive(Default)]
struct Batch {
    files: Vec<Created>,
    /// Their content, in the same order.
    bytes: Vec<u8>,
    /// Bytes of their attributes: an archive may give each file many.
    attributes: usize,
}

/// The side of the thread that creates files.
pub(super) struct Finisher {
    batch: Batch,
    full: SyncSender<Batch>,
    empty: Receiver<Batch>,
}

/// The side of the thread that finishes them.
pub(super) struct Batches {
    full: Receiver<Batch>,
    empty: SyncSender<Batch>,
}

pub(super) fn batches() -> (Finisher, Batches) {
    let (full, filled) = sync_channel(BATCHES);
    let (back, empty) = sync_channel(BATCHES);
    for _ in 1..BATCHES {
        let sent = back.try_send(Batch::default());
        sent.expect("the channel takes all of them");
    }
    let finisher = Finisher {
        batch: Batch::default(),
        full,
        empty,
    };
    let batches = Batches {
        full: filled,
        empty: back,
    };
    (finisher, batches)
}

impl Finisher {
    /// Content of the file that is given next.
    pub(super) fn content(&mut self, bytes: &[u8]) {
        self.batch.bytes.extend_from_slice(bytes);
    }

    /// Gives a file away. [`Error::Cut`]: an earlier one could not be finished.
    pub(super) fn give(&mut self, file: Created) -> Result<()> {
        let sizes = file.attributes.iter();
        let sizes = sizes.map(|(name, value)| name.len() + value.len());
        self.batch.attributes += sizes.sum::<usize>();
        self.batch.files.push(file);
        let bytes = self.batch.bytes.len() + self.batch.attributes;
        if self.batch.files.len() < FILES && bytes < BYTES {
            return Ok(());
        }
        let next = self.empty.recv().map_err(|_| Error::Cut)?;
        self.send(next)
    }

    /// No more files come.
    pub(super) fn end(mut self) -> Result<()> {
        self.send(Batch::default())
    }

    fn send(&mut self, next: Batch) -> Result<()> {
        let batch = std::mem::replace(&mut self.batch, next);
        self.full.send(batch).map_err(|_| Error::Cut)
    }
}

impl Batches {
    /// Finishes all files that come.
    pub(super) fn finish(self) -> Result<()> {
        for mut batch in self.full {
            let mut bytes = &batch.bytes[..];
            for file in batch.files.drain(..) {
                let length = file.runs.iter().map(|run| run.length).sum::<u64>();
                let length = usize::try_from(length).expect("at most MOST");
                let (content, rest) = bytes.split_at(length);
                bytes = rest;
                file.finish(content)?;
            }
            batch.bytes.clear();
            batch.attributes = 0;
            // The other side may have ended, and needs none.
            let _ = self.empty.try_send(batch);
        }
        Ok(())
    }
}

impl Created {
    fn finish(self, mut content: &[u8]) -> Result<()> {
        let failed = |error| sys::Error::new("write", &self.path, error);
        for run in &self.runs {
            let length = usize::try_from(run.length).expect("at most MOST");
            let (bytes, rest) = content.split_at(length);
            content = rest;
            self.file.write_all_at(bytes, run.offset).map_err(failed)?;
        }
        if let Some(size) = self.size {
            self.file.set_len(size).map_err(failed)?;
        }
        let file = OpenFile::new(OwnedFd::from(self.file), self.path);
        dress(&file, &self.look, &self.attributes)
    }
}
