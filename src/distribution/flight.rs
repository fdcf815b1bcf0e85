//! Single flight: equal calls are one call. It runs as a task of its own, so a caller that gives up
//! leaves it running, and the next caller joins it.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

/// Running calls, and where their answers go.
type Calls<K, V> = HashMap<K, Arc<watch::Sender<Option<V>>>>;

/// The calls that run.
#[derive(Debug)]
pub(super) struct Flights<K, V> {
    running: Arc<Mutex<Calls<K, V>>>,
    tasks: TaskTracker,
    runtime: Handle,
}

/// The callers of a running call.
#[derive(Debug)]
pub(super) struct Callers<V>(Arc<watch::Sender<Option<V>>>);

impl<V> Callers<V> {
    /// Whether all callers gave up.
    pub(super) fn are_gone(&self) -> bool {
        self.0.is_closed()
    }
}

/// Removes the call from the running ones, also if it panics.
struct Running<K: Eq + Hash, V> {
    key: K,
    all: Arc<Mutex<Calls<K, V>>>,
}

impl<K: Eq + Hash, V> Drop for Running<K, V> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.key);
    }
}

impl<K, V> Flights<K, V>
where
    K: Eq + Hash + Clone + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    pub(super) fn new(tasks: TaskTracker, runtime: Handle) -> Self {
        Self {
            running: Arc::default(),
            tasks,
            runtime,
        }
    }

    /// Joins the running call with this key, or else starts one.
    pub(super) fn join<F>(&self, key: K, start: impl FnOnce(Callers<V>) -> F) -> Joined<V>
    where
        F: Future<Output = V> + Send + 'static,
    {
        let mut running = self.running.lock();
        let receiver = if let Some(sender) = running.get(&key) {
            sender.subscribe()
        } else {
            let (sender, receiver) = watch::channel(None);
            let sender = Arc::new(sender);
            running.insert(key.clone(), Arc::clone(&sender));
            let all = Arc::clone(&self.running);
            let guard = Running { key, all };
            let call = start(Callers(Arc::clone(&sender)));
            let task = async move {
                let value = call.await;
                // Later callers start a new call: this answer is not theirs.
                drop(guard);
                sender.send_replace(Some(value));
            };
            self.tasks.spawn_on(task, &self.runtime);
            receiver
        };
        Joined(receiver)
    }
}

/// A caller of a running call.
#[derive(Debug)]
pub(super) struct Joined<V>(watch::Receiver<Option<V>>);

impl<V: Clone> Joined<V> {
    /// Waits for the answer. `None`: the call panicked.
    pub(super) async fn answer(mut self) -> Option<V> {
        let value = self.0.wait_for(Option::is_some).await.ok()?;
        value.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn equal_calls_are_one_and_go_on_without_their_callers() {
        let flights = Flights::new(TaskTracker::new(), Handle::current());
        let (calls, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
        let join = |key: u8| {
            let (calls, go) = (Arc::clone(&calls), Arc::clone(&go));
            flights.join(key, |_callers| async move {
                go.notified().await;
                calls.fetch_add(1, Ordering::SeqCst)
            })
        };
        let first = join(1);
        let gives_up = tokio::time::timeout(Duration::from_millis(5), join(1).answer()).await;
        assert!(gives_up.is_err());
        drop(first);
        let second = join(1);
        go.notify_one();
        assert_eq!(second.answer().await, Some(0));
        // It is over, so the next call is a new one.
        let third = join(1);
        go.notify_one();
        assert_eq!(third.answer().await, Some(1));
    }

    #[tokio::test]
    async fn a_call_knows_that_its_callers_are_gone_and_a_panic_is_no_answer() {
        let flights: Flights<u8, bool> = Flights::new(TaskTracker::new(), Handle::current());
        let (told, seen) = tokio::sync::oneshot::channel();
        let go = Arc::new(Notify::new());
        let wait = Arc::clone(&go);
        let caller = flights.join(1, |callers| async move {
            wait.notified().await;
            let _told = told.send(callers.are_gone());
            true
        });
        drop(caller);
        go.notify_one();
        assert!(seen.await.expect("it ran"));
        let panics = flights.join(2, |_callers| async { panic!("on purpose") });
        assert_eq!(panics.answer().await, None);
        let again = flights.join(2, |_callers| async { true });
        assert_eq!(again.answer().await, Some(true));
    }
}
