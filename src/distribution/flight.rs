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
#[derive(Debug, Clone)]
pub(super) struct Callers<K, V> {
    key: K,
    all: Arc<Mutex<Calls<K, V>>>,
    answer: Arc<watch::Sender<Option<V>>>,
}

impl<K: Eq + Hash, V> Callers<K, V> {
    /// Whether all callers gave up, for now: others may join.
    pub(super) fn are_gone(&self) -> bool {
        self.answer.is_closed()
    }

    /// Gives the call up if all its callers did. `true`: no caller joins it any more, and the next
    /// one starts a new call.
    pub(super) fn give_up(&self) -> bool {
        let mut running = self.all.lock();
        let are_gone = self.answer.is_closed();
        if are_gone {
            self.remove_from(&mut running);
        }
        are_gone
    }

    /// The key may be that of a newer call.
    fn remove_from(&self, running: &mut Calls<K, V>) {
        let own = running.get(&self.key);
        if own.is_some_and(|own| Arc::ptr_eq(own, &self.answer)) {
            running.remove(&self.key);
        }
    }
}

/// Removes the call from the running ones, also if it panics.
struct Running<K: Eq + Hash, V>(Callers<K, V>);

impl<K: Eq + Hash, V> Drop for Running<K, V> {
    fn drop(&mut self) {
        self.0.remove_from(&mut self.0.all.lock());
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
    pub(super) fn join<F>(&self, key: K, start: impl FnOnce(Callers<K, V>) -> F) -> Joined<V>
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
            let callers = Callers {
                key,
                all: Arc::clone(&self.running),
                answer: Arc::clone(&sender),
            };
            let guard = Running(callers.clone());
            let call = start(callers);
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
    async fn no_caller_joins_a_call_that_was_given_up() {
        let flights: Flights<u8, u8> = Flights::new(TaskTracker::new(), Handle::current());
        let (told, seen) = tokio::sync::oneshot::channel();
        let (first, second) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let go = Arc::clone(&first);
        let caller = flights.join(1, |callers| async move {
            let _told = told.send(callers.give_up());
            go.notified().await;
            1
        });
        drop(caller);
        assert!(seen.await.expect("it ran"));
        let go = Arc::clone(&second);
        let next = flights.join(1, |callers| async move {
            go.notified().await;
            if callers.give_up() { 0 } else { 2 }
        });
        first.notify_one();
        while flights.tasks.len() > 1 {
            tokio::task::yield_now().await;
        }
        // The first call has ended, and the second one can still be joined.
        let joined = flights.join(1, |_callers| async { 3 });
        second.notify_one();
        assert_eq!(next.answer().await, Some(2));
        assert_eq!(joined.answer().await, Some(2));
    }

    #[tokio::test]
    async fn a_call_knows_that_its_callers_are_gone_and_a_panic_is_no_answer() {
        let flights: Flights<u8, bool> = Flights::new(TaskTracker::new(), Handle::current());
        let (told, seen) = tokio::sync::oneshot::channel();
        let go = Arc::new(Notify::new());
        let wait = Arc::clone(&go);
        let caller = flights.join(1, |callers| async move {
            wait.notified().await;
            let _told = told.send(callers.give_up());
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
