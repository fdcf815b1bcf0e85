//! Threads for calls that block: few, named, and our own.
//!
//! A mount takes the kernel's namespace lock, and a filesystem commits one transaction at a time, so more than a few threads
//! only wait for each other (measured: no gain past two, and a longer tail). A job once given is run to its end, also
//! when nobody waits for its answer any more: a publish whose caller hung up is never left half-made.

use std::future::Future;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::error::{Error, Result};

type Job = Box<dyn FnOnce() + Send>;

/// A fixed number of threads that run jobs in the order in which they came.
#[derive(Debug)]
pub(super) struct Threads {
    jobs: Mutex<Option<Sender<Job>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Runs a job. A defect that ends one must not end the thread: the others would wait for ever.
fn run(job: Job) {
    // A panic was printed where it happened; the job's caller gets an error, since there is no answer.
    let _already_reported = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
}

impl Threads {
    /// Starts `count` threads called `name`.
    pub(super) fn start(name: &str, count: usize) -> std::io::Result<Self> {
        let (jobs, queue) = unbounded::<Job>();
        let threads = (0..count)
            .map(|_| {
                let queue = queue.clone();
                std::thread::Builder::new()
                    .name(name.to_owned())
                    .spawn(move || queue.iter().for_each(run))
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok(Self {
            jobs: Mutex::new(Some(jobs)),
            threads: Mutex::new(threads),
        })
    }

    /// Runs a job; the future is its answer. The job is queued at once, and runs whether or not the future is awaited.
    pub(super) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send + 'static {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move || drop(answer.send(job())));
        let queued = match &*self.jobs.lock() {
            // The receivers live as long as the sender: a send cannot fail.
            Some(jobs) => jobs.send(job).is_ok(),
            None => false,
        };
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

    /// Takes no more jobs, runs those that are queued, and ends the threads. Blocks.
    pub(super) fn finish(&self) {
        drop(self.jobs.lock().take());
        for thread in self.threads.lock().drain(..) {
            // A panic was printed where it happened; the job's caller got an error.
            let _already_reported = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
}
