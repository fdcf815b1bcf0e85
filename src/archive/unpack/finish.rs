//! The end of a file that was unpacked: its content is written, it gets its attributes and is
//! closed.
//!
//! The thread that reads the archive and creates names puts small files aside. The threads that
//! would otherwise wait finish them. If there are enough of them, the first thread finishes a file
//! right after its creation: its content is then written in the same tick of the clock, which saves
//! the filesystem a transaction for its times.
//!
//! That is safe in any order: all steps use the file's descriptor, and no later entry depends on a
//! file's content or attributes. Files go in batches, since waking a thread costs as much as
//! finishing a file.

use crate::archive::dress::dress;
use crate::archive::error::Result;
use crate::archive::pipe::{CHUNK, Jobs, Lent};
use crate::archive::sparse::Run;
use crate::archive::walk::{Attribute, Look};
use crate::sys::{self, OpenFile, Xattrs};

/// A batch is complete once it has so many steps, or its attributes so many bytes. A usual file
/// takes three steps. Each file is open and takes at least two.
const STEPS: usize = 96;
const ATTRIBUTES: usize = 256 << 10;
/// A larger file is written at once: a batch would keep too many buffers of the pipe.
const LARGE: u64 = CHUNK as u64;

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

/// Files that are put aside, each with all its steps.
#[derive(Default)]
struct Batch {
    steps: Vec<Step>,
    /// Bytes of its attributes: an archive may give each file many.
    attributes: usize,
    /// Whether its content is in more than one buffer of the pipe.
    spans_buffers: bool,
}

/// Decides when a file is finished. All its steps fail with [`Error::Cut`] if an earlier file could
/// not be finished: [`Jobs::failure`] says why.
///
/// [`Error::Cut`]: crate::archive::Error::Cut
pub(super) struct Finisher {
    jobs: Jobs,
    /// The file of the next steps, if it is finished at once.
    open: Option<OpenFile>,
    batch: Batch,
}

impl Finisher {
    pub(super) fn new(jobs: Jobs) -> Self {
        Self {
            jobs,
            open: None,
            batch: Batch::default(),
        }
    }

    /// The file of the next steps, and where its content goes.
    pub(super) fn open(&mut self, file: OpenFile, runs: &[Run]) -> Result<()> {
        let length = runs.iter().map(|run| run.length).sum::<u64>();
        // Many runs are many steps, however short they are.
        let is_large = length > LARGE || runs.len() > 1;
        if is_large {
            // The files before it would keep their buffers for as long as this one takes.
            self.send()?;
        }
        if self.batch.steps.is_empty() && (is_large || !self.jobs.are_wanted()?) {
            self.open = Some(file);
        } else {
            self.batch.steps.push(Step::Open(file));
        }
        Ok(())
    }

    /// Writes content.
    pub(super) fn write(&mut self, content: Lent, at: u64) -> Result<()> {
        if let Some(file) = &self.open {
            return write(file, &content, at);
        }
        let steps = self.batch.steps.iter().rev();
        let mut written = steps.filter_map(|step| match step {
            Step::Write(last, _) => Some(last),
            _ => None,
        });
        let is_other = |last: &Lent| !last.is_beside(&content);
        self.batch.spans_buffers |= written.next().is_some_and(is_other);
        self.batch.steps.push(Step::Write(content, at));
        Ok(())
    }

    /// The file has all its content.
    pub(super) fn close(&mut self, how: Close) -> Result<()> {
        if let Some(file) = self.open.take() {
            return how.finish(&file);
        }
        let sizes = how.attributes.iter();
        let sizes = sizes.map(|(name, value)| name.len() + value.len());
        let batch = &mut self.batch;
        batch.attributes += sizes.sum::<usize>();
        batch.steps.push(Step::Close(how));
        // A batch that waits here keeps one buffer of the pipe at most. So the pipe never stops.
        let is_complete = batch.steps.len() >= STEPS || batch.attributes >= ATTRIBUTES;
        if is_complete || batch.spans_buffers {
            self.send()?;
        }
        Ok(())
    }

    /// No more files come. Other threads may still finish some.
    pub(super) fn end(mut self) -> Result<()> {
        self.send()?;
        self.jobs.finish()
    }

    fn send(&mut self) -> Result<()> {
        if self.batch.steps.is_empty() {
            return Ok(());
        }
        let steps = std::mem::take(&mut self.batch).steps;
        self.jobs.push(|| finish(steps))
    }
}

fn finish(steps: Vec<Step>) -> Result<()> {
    let mut open = None;
    for step in steps {
        match step {
            Step::Open(file) => open = Some(file),
            Step::Write(bytes, at) => write(open.as_ref().expect(OPENED), &bytes, at)?,
            Step::Close(how) => how.finish(&open.take().expect(OPENED))?,
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::error::Error;
    use crate::archive::pipe::{Drain, Feeder, pipe};
    use crate::sys::{Dir, Errno};

    /// A file on which every write fails with ENOSPC.
    fn full() -> OpenFile {
        let dev = Dir::open("/dev".as_ref()).expect("it opens");
        let file = dev.open_file_beneath("full", rustix::fs::OFlags::WRONLY, 0);
        OpenFile::new(file.expect("it opens"), "/dev/full")
    }

    fn close() -> Close {
        Close {
            look: Look::default(),
            attributes: Vec::new(),
            size: None,
        }
    }

    fn run(length: u64) -> Run {
        Run { offset: 0, length }
    }

    /// A file of one byte that cannot be finished.
    fn put_aside(finisher: &mut Finisher, feeder: &mut Feeder, drain: &mut Drain) -> Result<()> {
        // A full buffer waits, so this thread has other work.
        feeder.write(&vec![1; 2 * CHUNK + 1]).expect("written");
        drain.fill().expect("bytes");
        finisher.open(full(), &[run(1)]).expect("put aside");
        finisher.write(drain.lend(1), 0).expect("put aside");
        finisher.close(close())
    }

    fn assert_is_full(error: Option<Error>) {
        let error = error.expect("there is one");
        let is_enospc = matches!(&error, Error::System(error) if error.is(Errno::ENOSPC));
        assert!(
            is_enospc && error.to_string().contains("/dev/full"),
            "{error}"
        );
    }

    #[test]
    fn what_this_thread_cannot_write_is_an_error() {
        let (mut feeder, mut drain) = pipe();
        let mut finisher = Finisher::new(drain.jobs());
        // The last one: nothing is left to do it, so this thread does.
        put_aside(&mut finisher, &mut feeder, &mut drain).expect("put aside");
        assert!(matches!(finisher.end(), Err(Error::Cut)));
        assert_is_full(drain.jobs().failure());

        // At once: it is large, no full buffer waits, or enough jobs do.
        for (size, buffers, jobs) in [(LARGE + 1, 2, 0), (1, 1, 0), (1, 2, 2)] {
            let (mut feeder, mut drain) = pipe();
            let mut finisher = Finisher::new(drain.jobs());
            feeder
                .write(&vec![1; buffers * CHUNK + 1])
                .expect("written");
            drain.fill().expect("bytes");
            for _ in 0..jobs {
                drain.jobs().push(|| Ok(())).expect("no job failed");
            }
            finisher.open(full(), &[run(size)]).expect("opened");
            assert_is_full(finisher.write(drain.lend(1), 0).err());
            assert!(drain.jobs().failure().is_none());
        }
    }

    #[test]
    fn what_another_thread_cannot_write_is_an_error() {
        // The feeder, when there is no empty buffer; and a helper.
        for is_feeder in [true, false] {
            let (mut feeder, mut drain) = pipe();
            let mut finisher = Finisher::new(drain.jobs());
            put_aside(&mut finisher, &mut feeder, &mut drain).expect("put aside");
            finisher.send().expect("sent");
            let content = vec![0; CHUNK];
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    if is_feeder {
                        while feeder.write(&content).is_ok() {}
                    } else {
                        drain.jobs().help();
                    }
                });
                other.join().expect("no panic");
            });
            // Nothing follows.
            let opened = finisher.open(full(), &[run(0)]);
            assert!(matches!(opened, Err(Error::Cut)));
            assert!(matches!(feeder.write(&content), Err(Error::Cut)));
            assert_is_full(drain.jobs().failure());
        }
    }

    #[test]
    fn a_batch_has_whole_files_and_few_buffers() {
        let (mut feeder, mut drain) = pipe();
        let mut finisher = Finisher::new(drain.jobs());
        feeder.write(&vec![1; 3 * CHUNK + 1]).expect("written");
        let file = || {
            let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::empty());
            OpenFile::new(fd.expect("a file"), "file")
        };
        for size in [CHUNK - 10, 20] {
            finisher.open(file(), &[run(size as u64)]).expect("opened");
            let mut left = size;
            while left > 0 {
                let there = drain.fill().expect("bytes").len().min(left);
                let content = drain.lend(there);
                finisher
                    .write(content, (size - left) as u64)
                    .expect("put aside");
                left -= there;
            }
            let steps = finisher.batch.steps.len();
            assert!(steps > 1, "a batch was sent in the middle of a file");
            finisher.close(close()).expect("put aside");
        }
        // The second file has content in two buffers.
        assert!(finisher.batch.steps.is_empty());
        finisher.end().expect("finished");
    }
}
