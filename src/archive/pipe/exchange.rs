//! What the threads of a pipe share: full buffers, empty buffers, and jobs.
//!
//! A job is work that any of them may do. A thread that would wait for a buffer does a job instead,
//! so two threads keep two cores busy however unequal their own work is. Only waiting belongs here:
//! this file knows neither what a buffer holds nor what a job does.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{Buffer, Filled};
use crate::archive::error::{Error, Result};

/// How many jobs wait. They hold buffers and open files.
const MOST_JOBS: usize = 2;

type Job = Box<dyn FnOnce() -> Result<()> + Send>;

/// What still comes out of the feeder.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Feed {
    More,
    /// No more: that was all.
    Complete,
    /// No more, though that was not all.
    CutOff,
}

pub(super) struct Exchange {
    state: Mutex<State>,
    /// The drain waits for it: a full buffer, or the end.
    filled: Condvar,
    /// The feeder and the helpers wait for it: an empty buffer, a job, or the end.
    freed: Condvar,
}

struct State {
    full: VecDeque<Filled>,
    feed: Feed,
    empty: Vec<Buffer>,
    /// Buffers end at this place of the stream, or a multiple of their size from it.
    shift: u64,
    has_drain: bool,
    jobs: VecDeque<Job>,
    /// The first error of a job. After it nothing is sent, taken or begun.
    failed: Option<Error>,
}

impl Exchange {
    pub(super) fn new(empty: Vec<Buffer>) -> Self {
        Self {
            state: Mutex::new(State {
                full: VecDeque::with_capacity(empty.len()),
                feed: Feed::More,
                empty,
                shift: 0,
                has_drain: true,
                jobs: VecDeque::with_capacity(MOST_JOBS),
                failed: None,
            }),
            filled: Condvar::new(),
            freed: Condvar::new(),
        }
    }

    /// Sends a full buffer to the drain.
    pub(super) fn send(&self, filled: Filled) -> Result<()> {
        let mut state = self.state.lock();
        state.check()?;
        state.full.push_back(filled);
        drop(state);
        self.filled.notify_all();
        Ok(())
    }

    /// The feeder sends no more. Only the first reason counts.
    pub(super) fn end(&self, feed: Feed) -> Result<()> {
        let mut state = self.state.lock();
        if state.feed == Feed::More {
            state.feed = feed;
        }
        let result = state.check();
        drop(state);
        self.filled.notify_all();
        result
    }

    /// The next full buffer; `None`: that was all.
    pub(super) fn full(&self) -> Result<Option<Filled>> {
        self.wait(&self.filled, |state| match state.full.pop_front() {
            Some(filled) => Some(Ok(Some(filled))),
            None => match state.feed {
                Feed::More => None,
                Feed::Complete => Some(Ok(None)),
                Feed::CutOff => Some(Err(Error::Cut)),
            },
        })
    }

    /// An empty buffer, and at which place of the stream it or another is to end.
    pub(super) fn empty(&self) -> Result<(Buffer, u64)> {
        self.wait(&self.freed, |state| match state.check() {
            Err(error) => Some(Err(error)),
            Ok(()) => state.empty.pop().map(|buffer| Ok((buffer, state.shift))),
        })
    }

    pub(super) fn shift(&self, to: u64) {
        self.state.lock().shift = to;
    }

    pub(super) fn give_back(&self, buffer: Buffer) {
        self.state.lock().empty.push(buffer);
        self.freed.notify_all();
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.state.lock().empty.len()
    }

    /// The drain takes no more. Jobs that wait are not done.
    pub(super) fn leave(&self) {
        let mut state = self.state.lock();
        state.has_drain = false;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        self.freed.notify_all();
        // Not under the lock: they give buffers back.
        drop(jobs);
    }

    /// Waits until `ready` has a result, and does jobs meanwhile.
    fn wait<T>(
        &self,
        wake: &Condvar,
        mut ready: impl FnMut(&mut State) -> Option<Result<T>>,
    ) -> Result<T> {
        let mut state = self.state.lock();
        loop {
            if state.failed.is_some() {
                return Err(Error::Cut);
            }
            if let Some(result) = ready(&mut state) {
                return result;
            }
            match state.jobs.pop_front() {
                Some(job) => MutexGuard::unlocked(&mut state, || self.run(job)),
                None => wake.wait(&mut state),
            }
        }
    }

    fn run(&self, job: Job) {
        if let Err(error) = job() {
            self.state.lock().failed.get_or_insert(error);
            self.filled.notify_all();
            self.freed.notify_all();
        }
    }
}

impl State {
    fn check(&self) -> Result<()> {
        let is_open = self.has_drain && self.failed.is_none();
        is_open.then_some(()).ok_or(Error::Cut)
    }
}

/// The jobs of a pipe. All but [`Jobs::help`] and [`Jobs::failure`] are for the drain's thread.
#[derive(Clone)]
pub(in crate::archive) struct Jobs(pub(super) Arc<Exchange>);

impl Jobs {
    /// Has a job done by a thread that is free, or by this one if many jobs wait already.
    /// [`Error::Cut`] if a job has failed.
    pub(in crate::archive) fn push(
        &self,
        job: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let mut state = self.0.state.lock();
        state.check()?;
        if state.jobs.len() >= MOST_JOBS {
            drop(state);
            self.0.run(Box::new(job));
            return Ok(());
        }
        state.jobs.push_back(Box::new(job));
        drop(state);
        self.0.freed.notify_all();
        Ok(())
    }

    /// Whether another job is of use: few wait for other threads, and the drain's thread has a full
    /// buffer to go on with. [`Error::Cut`] if a job has failed.
    pub(in crate::archive) fn are_wanted(&self) -> Result<bool> {
        let state = self.0.state.lock();
        state.check()?;
        Ok(state.jobs.len() < MOST_JOBS && !state.full.is_empty())
    }

    /// Does all jobs that wait. Others may still be doing theirs.
    pub(in crate::archive) fn finish(&self) -> Result<()> {
        self.0.wait(&self.0.filled, |state| {
            state.jobs.is_empty().then_some(Ok(()))
        })
    }

    /// Does jobs until the drain is gone.
    pub(in crate::archive) fn help(&self) {
        let is_over = |state: &mut State| (!state.has_drain).then_some(Ok(()));
        // What failed is kept for `failure`.
        let _ = self.0.wait(&self.0.freed, is_over);
    }

    /// Why a job failed, the first that did. To be asked when no thread is left that does jobs.
    pub(in crate::archive) fn failure(&self) -> Option<Error> {
        self.0.state.lock().failed.take()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::{self, ThreadId};

    use super::super::{BUFFERS, CHUNK, Feeder, pipe};
    use super::*;

    /// A job that tells which thread did it.
    fn tell(jobs: &Jobs) -> Receiver<ThreadId> {
        let (tell, told) = channel();
        let job = move || {
            tell.send(thread::current().id()).expect("it is awaited");
            Ok(())
        };
        jobs.push(job).expect("no job failed");
        told
    }

    fn fill(feeder: &mut Feeder) {
        feeder.write(&vec![0; BUFFERS * CHUNK]).expect("written");
    }

    #[test]
    fn a_thread_that_waits_does_jobs() {
        let (mut feeder, mut drain) = pipe();
        let jobs = drain.jobs();
        fill(&mut feeder);
        thread::scope(|scope| {
            let feeding = scope.spawn(|| feeder.write(&[1]).expect("written"));
            assert_eq!(tell(&jobs).recv(), Ok(feeding.thread().id()));
            drain.fill().expect("bytes");
            drain.consume(CHUNK);
            drain.fill().expect("bytes");
            feeding.join().expect("no panic");
        });
        for _ in 1..BUFFERS {
            drain.fill().expect("bytes");
            drain.consume(CHUNK);
        }
        let told = tell(&jobs);
        thread::scope(|scope| {
            let feeding = scope.spawn(move || {
                let by = told.recv();
                feeder.finish().expect("finished");
                by
            });
            assert_eq!(drain.fill().expect("the last byte"), [1]);
            let by = feeding.join().expect("no panic");
            assert_eq!(by, Ok(thread::current().id()));
        });
        thread::scope(|scope| {
            let helping = scope.spawn(|| jobs.help());
            assert_eq!(tell(&jobs).recv(), Ok(helping.thread().id()));
            drop(drain);
        });
    }

    #[test]
    fn jobs_that_wait_are_bounded_and_end_with_the_drain() {
        let (_feeder, drain) = pipe();
        let jobs = drain.jobs();
        let waiting: Vec<_> = (0..MOST_JOBS).map(|_| tell(&jobs)).collect();
        assert_eq!(tell(&jobs).try_recv(), Ok(thread::current().id()));
        drop(drain);
        // Dropped, and not done.
        assert!(waiting.iter().all(|told| told.recv().is_err()));
        assert!(matches!(jobs.push(|| Ok(())), Err(Error::Cut)));
        jobs.help();
    }

    #[test]
    fn after_a_job_that_failed_nothing_is_done() {
        let (mut feeder, mut drain) = pipe();
        let jobs = drain.jobs();
        fill(&mut feeder);
        jobs.push(|| Err(Error::Stopped)).expect("no job failed");
        let told = tell(&jobs);
        // Ends with the failure. Another thread could take the second job before it.
        jobs.help();
        assert!(matches!(feeder.write(&[1]), Err(Error::Cut)));
        assert!(matches!(drain.fill(), Err(Error::Cut)));
        assert!(matches!(jobs.finish(), Err(Error::Cut)));
        assert!(matches!(jobs.push(|| Ok(())), Err(Error::Cut)));
        drop(drain);
        assert!(told.recv().is_err(), "another job was done");
        assert!(matches!(jobs.failure(), Some(Error::Stopped)));
    }
}
