//! The last thread of an unpacker: it writes the content of files, gives them their attributes and
//! closes them, while the thread before it reads the archive and creates names.
//!
//! That is safe in any order: these steps use the file's descriptor, and no later entry depends on
//! a file's content or attributes. Steps go in batches, since waking a thread costs as much as
//! finishing a file.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::archive::dress::dress;
use crate::archive::error::{Error, Result};
use crate::archive::pipe::Lent;
use crate::archive::walk::{Attribute, Look};
use crate::sys::{self, OpenFile, Xattrs};

/// A batch is sent once it has so many steps, or its attributes so many bytes. A usual file takes
/// three steps. Each file is open and takes at least two.
const STEPS: usize = 96;
const ATTRIBUTES: usize = 256 << 10;
/// How many batches wait.
const BATCHES: usize = 2;

const OPENED: &str = "a file's steps come after it";

/// What is done next. Content and end are those of the last file before them.
enum Step {
    Open(OpenFile),
    /// Its bytes, and where they go.
    Write(Lent, u64),
    Close(Close),
}

/// What a file gets when it has its content.
pub(super) struct Close {
    pub(super) look: Look,
    pub(super) attributes: Vec<Attribute>,
    /// Its size, if that is not where its content ends.
    pub(super) size: Option<u64>,
}

/// The side of the thread that creates files.
pub(super) struct Finisher {
    batch: Vec<Step>,
    /// Bytes of its attributes: an archive may give each file many.
    attributes: usize,
    batches: SyncSender<Vec<Step>>,
}

/// The side of the thread that finishes them.
pub(super) struct Batches(Receiver<Vec<Step>>);

pub(super) fn batches() -> (Finisher, Batches) {
    let (batches, sent) = sync_channel(BATCHES);
    let finisher = Finisher {
        batch: Vec::new(),
        attributes: 0,
        batches,
    };
    (finisher, Batches(sent))
}

/// All steps fail with [`Error::Cut`] if an earlier one could not be finished.
impl Finisher {
    /// The file of the next steps.
    pub(super) fn open(&mut self, file: OpenFile) -> Result<()> {
        self.push(Step::Open(file))
    }

    /// Writes content.
    pub(super) fn write(&mut self, content: Lent, at: u64) -> Result<()> {
        let last = self.batch.iter().rev().find_map(|step| match step {
            Step::Write(last, _) => Some(last),
            _ => None,
        });
        // A batch that waits here keeps one buffer of the pipe at most. So the pipe never stops.
        if last.is_some_and(|last| !last.is_beside(&content)) {
            self.send()?;
        }
        self.push(Step::Write(content, at))
    }

    /// The file has all its content.
    pub(super) fn close(&mut self, file: Close) -> Result<()> {
        let sizes = file.attributes.iter();
        let sizes = sizes.map(|(name, value)| name.len() + value.len());
        self.attributes += sizes.sum::<usize>();
        self.push(Step::Close(file))
    }

    fn push(&mut self, step: Step) -> Result<()> {
        self.batch.push(step);
        if self.batch.len() < STEPS && self.attributes < ATTRIBUTES {
            return Ok(());
        }
        self.send()
    }

    /// No more files come.
    pub(super) fn end(mut self) -> Result<()> {
        self.send()
    }

    fn send(&mut self) -> Result<()> {
        self.attributes = 0;
        let batch = std::mem::take(&mut self.batch);
        self.batches.send(batch).map_err(|_| Error::Cut)
    }
}

impl Batches {
    /// Finishes all files that come.
    pub(super) fn finish(self) -> Result<()> {
        let mut open = None;
        for step in self.0.into_iter().flatten() {
            match step {
                Step::Open(file) => open = Some(file),
                Step::Write(bytes, at) => write(open.as_ref().expect(OPENED), &bytes, at)?,
                Step::Close(how) => how.finish(&open.take().expect(OPENED))?,
            }
        }
        Ok(())
    }
}

fn write(file: &OpenFile, mut bytes: &[u8], mut at: u64) -> Result<()> {
    let failed = |errno| sys::Error::new("write", file.subject(), errno).into();
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, at) {
            Ok(written @ 1..) => {
                bytes = &bytes[written..];
                at += written as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            // Else it would go on for ever.
            Ok(0) => return Err(failed(rustix::io::Errno::IO)),
            Err(errno) => return Err(failed(errno)),
        }
    }
    Ok(())
}

impl Close {
    fn finish(self, file: &OpenFile) -> Result<()> {
        if let Some(size) = self.size {
            rustix::fs::ftruncate(file, size)
                .map_err(|errno| sys::Error::new("ftruncate", file.subject(), errno))?;
        }
        dress(file, &self.look, &self.attributes)
    }
}
