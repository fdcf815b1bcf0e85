//! Threads for calls that block: few, named, and our own.
//!
//! A thread that serves nothing but calls counts them ([`CallHere`]), and runs a short one itself while it has no other: handing it to
//! another thread and the answer back costs two wake-ups, which is more than most of the system calls in it.
//!
//! A mount takes the kernel's namespace lock, and a filesystem commits one transaction at a time, so more than a few threads
//! only wait for each other (measured: no gain past two, and a longer tail). A job once given is run to its end, also
//! when nobody waits for its answer any more: a publish whose caller hung up is never left half-made.

use std::cell::{Cell, OnceCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::Poll;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, RwLock};
use tokio::sync::oneshot;

use super::error::{Error, Result};

type Job = Box<dyn FnOnce() + Send>;

/// A fixed number of threads that run jobs in the order in which they came.
#[derive(Debug)]
pub(super) struct Threads {
    queue: Arc<Queue>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    /// How many jobs run on threads that serve calls.
    here: AtomicUsize,
    /// Read-locked by each of these, so that the end waits for them too.
    running: RwLock<()>,
}

/// Jobs in the order in which they came. Whoever finds none sleeps at once: to look for some again and again, as queues for short waits do,
/// takes the processor from those who make them.
#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// No more are taken.
    closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl Queue {
    /// Whether it is taken.
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

    /// The next; waits for it. `None`: there will be none any more.
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

    fn is_closed(&self) -> bool {
        self.jobs.lock().closed
    }

    fn close(&self) {
        self.jobs.lock().closed = true;
        self.more.notify_all();
    }
}

/// How many threads may serve calls ([`CallHere`]). At each moment one of them runs no job, and so can answer whoever asks how
/// things are, also when the disk hangs; which one, [`say_at_work`] tells.
pub const DESKS: usize = 4;

/// A job that runs on a thread that serves calls.
struct Here<'a>(&'a AtomicUsize);

impl Drop for Here<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

thread_local! {
    static CALLS_HERE: Cell<usize> = const { Cell::new(0) };
    static AT_WORK: OnceCell<AtWork> = const { OnceCell::new() };
}

/// What a thread is at, the lower the sooner it hears of something else: nothing, what seldom blocks, a job.
pub type AtWork = Arc<AtomicU8>;

const IDLE: u8 = 0;
const WRITES: u8 = 1;
/// Until it is done the thread hears of nothing else. Never on all threads at a time.
const JOB: u8 = 2;

/// From now on this says what this thread is at.
pub fn say_at_work(at_work: AtWork) {
    AT_WORK
        .with(|said| said.set(at_work))
        .expect("a thread is told once where to say it");
}

/// Writes something on this thread to whoever may be slow to read it.
pub fn at_writing<T>(write: impl FnOnce() -> T) -> T {
    let _busy = Busy::with(WRITES);
    write()
}

/// Something is done on this thread.
struct Busy;

impl Busy {
    fn with(what: u8) -> Self {
        Self::say(what);
        Self
    }

    fn say(what: u8) {
        AT_WORK.with(|said| {
            if let Some(said) = said.get() {
                said.store(what, Ordering::Relaxed);
            }
        });
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        Self::say(IDLE);
    }
}

/// A call that is served on this thread, from its beginning to its end, wherever it waits meanwhile: the thread serves nothing
/// else, and what it blocks waits for nothing but calls. Must be dropped on the thread that made it.
#[derive(Debug)]
pub struct CallHere(());

impl CallHere {
    /// One more.
    #[must_use]
    pub fn begin() -> Self {
        CALLS_HERE.set(CALLS_HERE.get() + 1);
        Self(())
    }
}

impl Drop for CallHere {
    fn drop(&mut self) {
        CALLS_HERE.set(CALLS_HERE.get() - 1);
    }
}

/// Lets whatever else is ready on this thread run first. `tokio::task::yield_now` would also look for events, and wake its own thread
/// for that: three system calls.
pub async fn others_first() {
    let mut yielded = false;
    poll_fn(|context| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Lets the answer of the call be written, which is done by who is ready next on this thread, and then whoever was woken by it run: he
/// may be waiting for this very processor.
pub async fn after_the_answer() {
    others_first().await;
    std::thread::yield_now();
}

/// Runs what may block for as long as a disk likes, on a thread of its own: whoever does not wait for it any longer leaves nothing behind
/// that others need.
pub async fn apart<T: Send + 'static>(
    name: &str,
    job: impl Future<Output = T> + Send + 'static,
) -> std::io::Result<T> {
    let runtime = tokio::runtime::Handle::current();
    let (answer, answered) = oneshot::channel();
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || drop(answer.send(runtime.block_on(job))))?;
    // A panic was printed where it happened.
    answered.await.map_err(std::io::Error::other)
}

/// Runs a job. A defect that ends one must not end the thread: the others would wait for ever.
fn run(job: Job) {
    // A panic was printed where it happened; the job's caller gets an error, since there is no answer.
    let _already_reported = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
}

impl Threads {
    /// Starts `count` threads called `name`.
    pub(super) fn start(name: &str, count: usize) -> std::io::Result<Self> {
        let threads = Self {
            queue: Arc::default(),
            handles: Mutex::default(),
            here: AtomicUsize::new(0),
            running: RwLock::new(()),
        };
        for _ in 0..count {
            let queue = threads.queue.clone();
            let thread = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || {
                    while let Some(job) = queue.pop() {
                        run(job);
                    }
                })?;
            threads.handles.lock().push(thread);
        }
        Ok(threads)
    }

    /// Runs a job; the future is its answer. The job is queued at once, and runs whether or not the future is awaited.
    pub(super) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'static {
        self.run_on(move || (job(), || ()))
    }

    /// The same for a job that goes on after its answer.
    pub(super) fn run_on<T: Send + 'static, R: FnOnce() + 'static>(
        &self,
        job: impl FnOnce() -> (T, R) + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'static {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move || {
            let (result, rest) = job();
            drop(answer.send(result));
            rest();
        });
        let queued = self.queue.push(job);
        // What was queued is run to its end; if there is no answer, it panicked.
        let unanswered = move |_| {
            if queued {
                Error::Defect
            } else {
                Error::ShuttingDown
            }
        };
        async move { answered.await.map_err(unanswered) }
    }

    /// Whether a job may run on this thread: it serves one call, and another such thread stays free.
    fn may_run_here(&self) -> Option<Here<'_>> {
        if CALLS_HERE.get() != 1 {
            return None;
        }
        let here = Here(&self.here);
        (here.0.fetch_add(1, Ordering::SeqCst) < DESKS - 1).then_some(here)
    }

    /// Runs a short job: at once and here on a thread that serves this call and no other, else as [`Threads::run`] does.
    pub(super) async fn run_short<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let Some(_here) = self.may_run_here() else {
            return self.run(job).await;
        };
        // Only the end locks it for itself; whoever comes while that waits for others must not wait with it.
        let running = self.running.try_read();
        if running.is_none() || self.queue.is_closed() {
            return Err(Error::ShuttingDown);
        }
        let _busy = Busy::with(JOB);
        // A panic was printed where it happened.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).map_err(|_| Error::Defect)
    }

    /// Runs a job that may be short: then as [`Threads::run_short`] does.
    pub(super) async fn run_if_short<T: Send + 'static>(
        &self,
        is_short: bool,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        if is_short {
            self.run_short(job).await
        } else {
            self.run(job).await
        }
    }

    /// Takes no more jobs, runs those that are queued, and ends the threads. Blocks.
    pub(super) fn finish(&self) {
        self.queue.close();
        drop(self.running.write());
        for thread in self.handles.lock().drain(..) {
            // A panic was printed where it happened; the job's caller got an error.
            let _already_reported = thread.join();
        }
    }
}

impl Drop for Threads {
    /// They end by themselves, once they have done what they were given.
    fn drop(&mut self) {
        self.queue.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_job_runs_though_nobody_waits_for_it() {
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
    fn threads_that_nobody_has_any_more_do_what_they_were_given_and_end() {
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

    #[tokio::test]
    async fn a_short_job_runs_where_it_is_only_on_a_thread_that_serves_one_call() {
        let threads = Threads::start("test", 1).expect("threads");
        let here = std::thread::current().id();
        let where_it_ran = || std::thread::current().id();
        assert_ne!(threads.run_short(where_it_ran).await.expect("run"), here);
        let call = CallHere::begin();
        let at_work = AtWork::default();
        say_at_work(at_work.clone());
        let says = at_work.clone();
        let said = threads.run_short(move || says.load(Ordering::Relaxed));
        assert_eq!(said.await.expect("run"), JOB);
        assert_eq!(at_work.load(Ordering::Relaxed), IDLE);
        assert_eq!(threads.run_short(where_it_ran).await.expect("run"), here);
        let second = CallHere::begin();
        assert_ne!(threads.run_short(where_it_ran).await.expect("run"), here);
        drop(second);
        let defect = threads.run_short(|| panic!("on purpose")).await;
        assert!(matches!(defect, Err(Error::Defect)));
        threads.finish();
        let late = threads.run_short(where_it_ran).await;
        assert!(matches!(late, Err(Error::ShuttingDown)));
        drop(call);
    }
}
