//! A watch over all objects of one kind: the last known state, and a signal for each change.
//!
//! It wakes calls and serves lists. Decisions use live reads, since a watch can be late.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::figures::Counters;

/// The objects of one kind.
pub(super) struct Cache<K: Resource + Clone + 'static>
where
    K::DynamicType: Hash + Eq,
{
    store: Store<K>,
    changed: watch::Receiver<u64>,
}

impl<K: Resource + Clone + 'static> fmt::Debug for Cache<K>
where
    K::DynamicType: Hash + Eq,
{
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Cache").finish_non_exhaustive()
    }
}

impl<K> Cache<K>
where
    K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + Sync + 'static,
{
    /// A cache, and the task that fills it.
    pub(super) fn new(
        api: Api<K>,
        kind: &'static str,
        counters: Counters,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (store, writer) = reflector::store();
        let (change, changed) = watch::channel(0);
        let events = watcher(api, watcher::Config::default()).default_backoff();
        // Nothing reads who wrote which field, and that is half of an object.
        let events = events.modify(|object| object.meta_mut().managed_fields = None);
        let fill = reflector::reflector(writer, events).for_each(move |event| {
            match event {
                Ok(_) => change.send_modify(|count| *count += 1),
                Err(error) => counters.watch_failed(kind, &error),
            }
            std::future::ready(())
        });
        (Self { store, changed }, fill)
    }

    /// All objects.
    pub(super) fn all(&self) -> Vec<Arc<K>> {
        self.store.state()
    }

    /// One object.
    pub(super) fn get(&self, name: &str) -> Option<Arc<K>> {
        self.store.get(&ObjectRef::new(name))
    }

    /// Ready when the first list is complete.
    pub(super) async fn filled(&self) {
        let mut changed = self.changed.clone();
        // The store itself wakes only the last of several waiters. Each list is a change, too; the
        // channel is closed only at the end of the process.
        while self.store.wait_until_ready().now_or_never().is_none()
            && changed.changed().await.is_ok()
        {}
    }

    /// The number of changes so far. Read it before the objects.
    pub(super) fn version(&self) -> u64 {
        *self.changed.borrow()
    }

    /// A receiver for changes, which sees each change from now on.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        let mut changed = self.changed.clone();
        changed.mark_unchanged();
        changed
    }

    /// Waits until the node has answered the order in this object, the object has changed
    /// otherwise, or time is up.
    pub(super) async fn answered(
        &self,
        object: &K,
        deadline: Instant,
        is_answer: impl Fn(&K) -> bool,
    ) {
        let meta = object.meta();
        let key = ObjectRef::new(meta.name.as_deref().unwrap_or_default());
        let is_over = |seen: &K| {
            let generation = seen.meta().generation;
            generation > meta.generation || (generation == meta.generation && is_answer(seen))
        };
        let mut changed = self.changed.clone();
        let over = async {
            loop {
                changed.mark_unchanged();
                let seen = self.store.get(&key);
                // The channel is closed only at the end of the process.
                if seen.is_some_and(|seen| is_over(&seen)) || changed.changed().await.is_err() {
                    return;
                }
            }
        };
        // The caller looks again in both cases.
        let _ = timeout_at(deadline, over).await;
    }
}
