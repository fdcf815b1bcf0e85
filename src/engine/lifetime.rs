//! The life of an engine: its background tasks, and the signals that end them. Each task decides
//! itself how it ends.

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// The tasks of an engine and their end.
#[derive(Debug)]
pub(super) struct Lifetime {
    stop: CancellationToken,
    restart: CancellationToken,
    tasks: TaskTracker,
    /// Where tasks run that a blocking job starts.
    runtime: Handle,
}

impl Lifetime {
    /// Must be called in a tokio runtime.
    pub(super) fn begin() -> Self {
        Self {
            stop: CancellationToken::new(),
            restart: CancellationToken::new(),
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
        }
    }

    /// Background work ends at its next safe point.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Waits until background work is to end.
    pub(super) fn stopping(&self) -> WaitForCancellationFuture<'_> {
        self.stop.cancelled()
    }

    /// The engine was degraded, and the next start would not be.
    pub(super) fn ask_for_restart(&self) {
        self.restart.cancel();
    }

    /// Waits until the process is to end for that reason.
    pub(super) fn restart_asked(&self) -> WaitForCancellationFuture<'_> {
        self.restart.cancelled()
    }

    /// Starts a task that the shutdown waits for; also from a thread that is not the runtime's.
    pub(super) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.tasks.spawn_on(task, &self.runtime)
    }

    /// Delays the end until it is dropped.
    pub(super) fn token(&self) -> TaskTrackerToken {
        self.tasks.token()
    }

    /// Waits on a thread that may block.
    pub(super) fn block_on<T>(&self, wait: impl Future<Output = T>) -> T {
        self.runtime.block_on(wait)
    }

    /// Waits until all tasks have ended.
    pub(super) async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn the_end_waits_for_tasks_and_for_tokens() {
        let lifetime = Lifetime::begin();
        let (go_on, told) = oneshot::channel::<()>();
        // A blocking job starts tasks, too.
        let task = std::thread::scope(|scope| scope.spawn(|| lifetime.spawn(told)).join());
        let task = task.expect("no panic");
        let mut ended = Box::pin(lifetime.ended());
        assert!(poll!(&mut ended).is_pending(), "the task runs");
        let token = lifetime.token();
        go_on.send(()).expect("it waits");
        task.await.expect("no panic").expect("it was told");
        assert!(poll!(&mut ended).is_pending(), "the token is held");
        drop(token);
        ended.await;
    }
}
