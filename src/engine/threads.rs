//! Bounded pools of threads for work that blocks: system calls never run on the async runtime.
//!
//! Each pool has a name and a fixed number of threads. A mount takes the kernel's namespace lock,
//! and a filesystem commits one transaction at a time, so more than a few threads only wait for
//! each other (measured: no gain past two, and a longer tail).
//!
//! A queued job runs to its end, also when its caller goes away: a publish whose caller hung up is
//! never left half-made.

use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::error::{Context, Error, Result};
use crate::sys;

/// How many unmounted filesystems are released at a time: as fast as 16 callers unmount them on two
/// cores (64 were no faster).
const FREEZES: usize = 8;

/// How many unmounted persistent volumes are released at a time. Each waits for the disk, and all
/// of them for the write-back of one pool.
const CLOSES: usize = 8;

/// How many persistent volumes are copied at a time, for a clone or a snapshot.
const COPIES: usize = 2;

/// How many forks are made at a time where each is a copy.
const FORKS: usize = 2;

/// How many exports and imports run at a time; further ones wait for their turn.
const TRANSFERS: usize = 4;

/// A kind of slow work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pool {
    /// Serves RPCs.
    Calls,
    /// Ends volumes.
    Seals,
    /// Copies the content of persistent volumes.
    Copies,
    /// Makes the content of volumes where that is a copy.
    Forks,
    /// Lets the kernel release unmounted filesystems, and deletes volumes that nothing was written
    /// to.
    Freezes,
    /// The same for persistent volumes, whose unmount writes back all dirty data of the pool.
    Closes,
    /// Waits for the disk.
    Syncs,
    /// Frees space, in rounds of a bounded time.
    Room,
    /// Deletes discarded volumes.
    Deletes,
    /// Measures and compares.
    Walks,
    /// Merges layers.
    Merges,
    /// Asks which processes still write to a volume that is to be sealed.
    Looks,
    /// Reads and writes archives.
    Transfers,
}

/// The pools in their order, each with its name and its threads. The configuration sets those for
/// calls.
const POOLS: [(Pool, &str, usize); 13] = [
    (Pool::Calls, "calls", 0),
    (Pool::Seals, "seals", 2),
    (Pool::Copies, "copies", COPIES),
    (Pool::Forks, "forks", FORKS),
    (Pool::Freezes, "freezes", FREEZES),
    (Pool::Closes, "closes", CLOSES),
    (Pool::Syncs, "syncs", 1),
    (Pool::Room, "room", 1),
    (Pool::Deletes, "deletes", 1),
    (Pool::Walks, "walks", 1),
    (Pool::Merges, "merges", 1),
    (Pool::Looks, "looks", 1),
    (Pool::Transfers, "transfers", TRANSFERS),
];

// `ThreadPools::run` finds a pool by its place.
const _: () = {
    let mut place = 0;
    while place < POOLS.len() {
        assert!(
            POOLS[place].0 as usize == place,
            "a pool is not in its place"
        );
        place += 1;
    }
};

/// The threads of an engine: each slow kind of work delays only its like.
#[derive(Debug)]
pub(super) struct ThreadPools(Vec<Threads>);

impl ThreadPools {
    pub(super) fn start(calls: usize) -> Result<Self> {
        let threads = POOLS.into_iter().map(|(pool, name, count)| match pool {
            Pool::Calls => Threads::start(name, calls.max(1)),
            _ => Threads::start(name, count),
        });
        threads.collect::<Result<_>>().map(Self)
    }

    /// Queues a job for one kind of work ([`Threads::run`]).
    pub(super) fn run<T: Send + 'static>(
        &self,
        pool: Pool,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'static {
        self.0[pool as usize].run(job)
    }

    /// Ends all threads when they have run the queued jobs. Blocks.
    pub(super) fn finish(&self) {
        self.0.iter().for_each(Threads::finish);
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A fixed number of threads that run jobs in the order in which they were queued.
#[derive(Debug)]
struct Threads {
    queue: Arc<Queue>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

/// The queued jobs. An idle thread sleeps; it does not spin, as queues for short waits do, since
/// that takes the processor from the threads that have work.
#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// No more jobs are accepted.
    closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl Queue {
    /// Queues a job; `false` if the queue is closed.
    fn push(&self, job: Job) -> bool {
        let mut jobs = self.jobs.lock();
        if jobs.closed {
            return false;
        }
        jobs.waiting.push_back(job);
        drop(jobs);
        self.more.notify_one();
        true
    }

    /// Waits for the next job; `None` once the queue is closed and empty.
    fn pop(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                return Some(job);
            }
            if jobs.closed {
                return None;
            }
            self.more.wait(&mut jobs);
        }
    }

    fn close(&self) {
        self.jobs.lock().closed = true;
        self.more.notify_all();
    }
}

/// Runs jobs until the queue is closed. A job that panics must not end the thread: the jobs behind
/// it would wait for ever.
fn work(queue: &Queue) {
    while let Some(job) = queue.pop() {
        // The panic was printed where it happened. The job's caller gets an error: no answer came.
        let _already_reported = catch_unwind(AssertUnwindSafe(job));
    }
}

impl Threads {
    /// Starts `count` threads called `name`.
    fn start(name: &'static str, count: usize) -> Result<Self> {
        let started = Self::try_start(name, count);
        let started = started.map_err(|error| sys::Error::new("clone", name, error));
        started.context("start threads")
    }

    fn try_start(name: &str, count: usize) -> std::io::Result<Self> {
        let threads = Self {
            queue: Arc::default(),
            handles: Mutex::default(),
        };
        for _ in 0..count {
            let queue = threads.queue.clone();
            let thread = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || work(&queue))?;
            threads.handles.lock().push(thread);
        }
        Ok(threads)
    }

    /// Queues a job at once; it runs whether or not the returned future, its answer, is awaited.
    /// [`Error::Defect`] if the job panicked, [`Error::ShuttingDown`] after [`Threads::finish`].
    fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'static {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move || {
            drop(answer.send(job()));
        });
        let queued = self.queue.push(job);
        let unanswered = move |_| {
            if queued {
                Error::Defect
            } else {
                Error::ShuttingDown
            }
        };
        async move { answered.await.map_err(unanswered) }
    }

    /// Accepts no more jobs, runs those that are queued, and ends the threads. Blocks.
    fn finish(&self) {
        self.queue.close();
        for thread in self.handles.lock().drain(..) {
            // A panic was printed where it happened; the job's caller got an error.
            let _already_reported = thread.join();
        }
    }
}

impl Drop for Threads {
    /// The threads end by themselves, after the queued jobs.
    fn drop(&mut self) {
        self.queue.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_job_runs_though_its_answer_is_dropped() {
        let threads = Threads::start("test", 1).expect("threads");
        let count = Arc::new(AtomicUsize::new(0));
        for _ in 0..10 {
            let count = count.clone();
            drop(threads.run(move || count.fetch_add(1, Ordering::SeqCst)));
        }
        assert_eq!(threads.run(|| 7).await.expect("an answer"), 7);
        assert!(threads.run(|| panic!("on purpose")).await.is_err());
        assert_eq!(threads.run(|| 8).await.expect("the thread goes on"), 8);
        threads.finish();
        assert_eq!(count.load(Ordering::SeqCst), 10);
        assert!(matches!(threads.run(|| ()).await, Err(Error::ShuttingDown)));
    }

    #[test]
    fn dropped_threads_finish_the_queued_jobs_and_end() {
        let threads = Threads::start("test", 2).expect("threads");
        let count = Arc::new(AtomicUsize::new(0));
        for _ in 0..10 {
            let count = count.clone();
            drop(threads.run(move || count.fetch_add(1, Ordering::SeqCst)));
        }
        let handles = std::mem::take(&mut *threads.handles.lock());
        drop(threads);
        for thread in handles {
            thread.join().expect("it ends");
        }
        assert_eq!(count.load(Ordering::SeqCst), 10);
    }
}
