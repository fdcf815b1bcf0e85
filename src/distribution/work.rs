//! Threads for calls of the tier, which block for as long as a network does. Each kind of work has
//! a bounded number of them, so a tier that hangs delays only work of the same kind.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::task::TaskTracker;

/// One kind of work.
#[derive(Debug)]
pub(super) struct Workers {
    name: &'static str,
    free: Arc<Semaphore>,
    /// Counts the threads that run.
    tasks: TaskTracker,
}

/// A thread that is free for one call. `None`: another call may run meanwhile.
#[derive(Debug, Clone)]
pub(super) struct Free(Arc<Mutex<Option<OwnedSemaphorePermit>>>);

impl Workers {
    /// At most `most` calls at once.
    pub(super) fn new(name: &'static str, most: usize, tasks: TaskTracker) -> Self {
        let free = Arc::new(Semaphore::new(most));
        Self { name, free, tasks }
    }

    /// Waits for a free thread, and runs the call there. `is_wanted` is asked when the thread is
    /// free. `None`: it is not wanted any more, or it panicked.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        is_wanted: impl FnOnce() -> bool,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let free = self.free().await?;
        if !is_wanted() {
            return None;
        }
        self.run_on(free, call).await
    }

    /// Waits on behalf of a call that runs on this thread. Another call may run meanwhile, and is
    /// waited for.
    pub(super) async fn give_way<T>(&self, free: &Free, pause: impl Future<Output = T>) -> T {
        drop(free.0.lock().take());
        let waited = pause.await;
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        *free.0.lock() = permit;
        waited
    }

    /// Waits for a free thread. `None`: there will be none.
    pub(super) async fn free(&self) -> Option<Free> {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok()?;
        Some(Free(Arc::new(Mutex::new(Some(permit)))))
    }

    /// Runs the call on a free thread. `None`: it panicked. A call that runs is not stopped if its
    /// caller goes away.
    pub(super) async fn run_on<T: Send + 'static>(
        &self,
        free: Free,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let token = self.tasks.token();
        let (answer, answered) = oneshot::channel();
        let started = std::thread::Builder::new()
            .name(self.name.to_owned())
            .spawn(move || {
                let _counted = (free, token);
                drop(answer.send(call()));
            });
        if let Err(error) = started {
            tracing::error!(%error, "no thread can be started for the shared tier");
            return None;
        }
        // A panic was printed where it happened.
        answered.await.ok()
    }
}
