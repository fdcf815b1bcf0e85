//! A watch over all objects of one kind, for the parts of the controller that read them: the last
//! known objects, and a signal for each event. It is opened once. Its clones share the objects.
//!
//! It wakes calls and serves lists. A decision that deletes or makes anything reads live, since a
//! watch can be late.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures_util::{FutureExt as _, Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::client::{has_code, watch_config};

/// How many objects of a list are in memory as the API server has them. An object has up to
/// 1.5 MiB.
const PAGE: u32 = 100;

/// All namespaces, without their content.
pub type Namespaces = Watched<PartialObjectMeta<Namespace>>;

/// The objects of one kind.
#[derive(Clone)]
pub struct Watched<K: Resource<DynamicType = ()> + Clone + 'static> {
    store: Store<K>,
    /// Each event is a change.
    seen: watch::Receiver<Seen>,
}

/// The events of a watch so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    /// How many there were.
    count: u64,
    /// The last one: the API server has not found the kind.
    is_not_found: bool,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> fmt::Debug for Watched<K> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Watched").finish_non_exhaustive()
    }
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + Sync + 'static,
{
    /// The objects without their annotations and owners, and the task that fills them. `what` is
    /// their plural, for the log.
    pub fn open(
        client: Client,
        what: &'static str,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let events = events(Api::all(client), what);
        // Users may write up to 256 KiB of annotations into each object, and nothing reads them.
        Self::over(events.modify(|object: &mut K| {
            let meta = object.meta_mut();
            meta.annotations = None;
            meta.owner_references = None;
        }))
    }

    /// The objects of a watch, and the task that fills them.
    pub(super) fn over(
        events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (store, writer) = reflector::store();
        let (event_seen, seen) = watch::channel(Seen::default());
        let fill = reflector::reflector(writer, events).for_each(move |event| {
            event_seen.send_modify(|seen| {
                seen.count += 1;
                seen.is_not_found = event.as_ref().err().is_some_and(is_not_found);
            });
            std::future::ready(())
        });
        (Self { store, seen }, fill)
    }

    /// Whether all objects have been listed once.
    pub(super) fn is_listed(&self) -> bool {
        // The store itself wakes only the last of several waiters, so none waits for it.
        matches!(self.store.wait_until_ready().now_or_never(), Some(Ok(())))
    }

    /// Ready when all objects have been listed once.
    pub(super) async fn listed(&self) {
        let mut seen = self.seen.clone();
        while !self.is_listed() {
            next(&mut seen).await;
        }
    }

    /// Whether the last event was that the API server does not find the kind. It may not be
    /// defined. A proxy may say the same of anything.
    pub(super) fn is_not_found(&self) -> bool {
        self.seen.borrow().is_not_found
    }

    /// The number of events so far. Read it before the objects.
    pub(super) fn version(&self) -> u64 {
        self.seen.borrow().count
    }

    /// All objects, as far as they are known.
    pub(super) fn all(&self) -> Vec<Arc<K>> {
        self.store.state()
    }

    /// One object of a kind without namespaces.
    pub(super) fn get(&self, name: &str) -> Option<Arc<K>> {
        self.store.get(&ObjectRef::new(name))
    }

    /// A receiver for changes, which sees each event from now on.
    pub(super) fn changes(&self) -> watch::Receiver<Seen> {
        let mut seen = self.seen.clone();
        seen.mark_unchanged();
        seen
    }

    /// Waits until an object is so, or has been deleted, or time is up. One that the watch has not
    /// shown yet may come.
    pub(super) async fn becomes(&self, name: &str, deadline: Instant, is_so: impl Fn(&K) -> bool) {
        let mut changes = self.changes();
        let over = async {
            let mut was_there = false;
            loop {
                match self.get(name) {
                    Some(seen) if is_so(&seen) => return,
                    None if was_there => return,
                    Some(_) => was_there = true,
                    None => {}
                }
                next(&mut changes).await;
            }
        };
        // The caller looks again in each case.
        let _ = timeout_at(deadline, over).await;
    }
}

impl Namespaces {
    /// The uids of all namespaces, by their names.
    pub(super) fn uids(&self) -> BTreeMap<String, String> {
        let namespaces = self.all();
        let namespaces = namespaces.iter();
        namespaces
            .filter_map(|it| Some((it.name_any(), it.uid()?)))
            .collect()
    }
}

/// The events of a watch. It logs its failures, and goes on after each.
pub(super) fn events<K>(
    all: Api<K>,
    what: &'static str,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static
where
    K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
{
    quiet_events(all).inspect_err(move |error| {
        tracing::warn!(%error, "the watch over {what} failed; retrying");
    })
}

/// The events of a watch that goes on after a failure. Its caller logs that.
pub(super) fn quiet_events<K>(
    all: Api<K>,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static
where
    K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
{
    let events = watcher(all, watch_config().page_size(PAGE)).default_backoff();
    // Nothing reads who wrote which field, and that is half of an object.
    events.modify(|object| object.meta_mut().managed_fields = None)
}

/// Waits for the next event. A watch that has ended has none.
async fn next(seen: &mut watch::Receiver<Seen>) {
    if seen.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn is_not_found(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(error) if has_code(error, 404))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use tokio::sync::mpsc;
    use tokio_stream::wrappers::UnboundedReceiverStream;

    use super::watcher::Event;
    use super::*;
    use crate::api::{Cache, Pool, PoolSpec};
    use crate::k8s::client::{client_of, is_watch, list_of};

    #[tokio::test]
    async fn objects_are_listed_in_small_pages_and_what_nothing_reads_is_not_kept() {
        let client = client_of(|request| {
            if is_watch(request) {
                return None;
            }
            let query = request.uri().query().unwrap_or_default();
            assert!(query.contains("limit=100"), "{query}");
            let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "2"});
            let cache = json!({
                "metadata": {
                    "name": "go", "namespace": "ci", "uid": "1",
                    "annotations": {"example.org/long": "x".repeat(200_000)},
                    "finalizers": [crate::api::CLEAR],
                    "labels": {crate::api::MIRRORED: "true"},
                    "managedFields": [{"manager": "kubectl"}],
                    "ownerReferences": [owner],
                },
                "spec": {"key": "go"},
            });
            Some((200, list_of(&json!([cache]))))
        });
        let (caches, fill) = Watched::<Cache>::open(client, "Caches");
        tokio::spawn(fill);
        let listed = tokio::time::timeout(Duration::from_secs(30), caches.listed());
        listed.await.expect("a list");
        let [cache] = &caches.all()[..] else {
            panic!("not one Cache");
        };
        assert!(cache.orders() && cache.is_mirrored());
        assert_eq!(cache.uid().as_deref(), Some("1"));
        let meta = &cache.metadata;
        assert_eq!(meta.annotations, None);
        assert_eq!(meta.owner_references, None);
        assert_eq!(meta.managed_fields, None);
    }

    #[tokio::test]
    async fn a_watch_is_short_so_that_a_silent_one_is_noticed() {
        let (send, mut watches) = mpsc::unbounded_channel();
        let client = client_of(move |request| {
            if !is_watch(request) {
                return Some((200, list_of(&json!([]))));
            }
            // The test may have ended.
            let _gone = send.send(request.uri().to_string());
            None
        });
        let (_caches, fill) = Watched::<Cache>::open(client, "Caches");
        tokio::spawn(fill);
        let watch = tokio::time::timeout(Duration::from_secs(30), watches.recv());
        let watch = watch.await.expect("it begins").expect("a watch");
        assert!(watch.contains("timeoutSeconds=60"), "{watch}");
    }

    #[tokio::test]
    async fn an_answer_that_no_watch_can_bring_is_waited_for_until_the_deadline() {
        let (caches, fill) = Watched::<Cache>::open(client_of(|_| None), "Caches");
        drop(fill);
        let deadline = Instant::now() + Duration::from_secs(1);
        caches.becomes("go", deadline, |_| true).await;
        assert!(Instant::now() >= deadline, "the caller asks in a loop");
    }

    #[tokio::test]
    async fn an_object_that_is_deleted_is_not_waited_for() {
        let (send, events) = mpsc::unbounded_channel();
        let events = UnboundedReceiverStream::new(events).map(Ok);
        let (pools, fill) = Watched::<Pool>::over(events);
        tokio::spawn(fill);
        let pool = Pool::new("node-1", PoolSpec {});
        for event in [Event::Init, Event::InitApply(pool.clone()), Event::InitDone] {
            send.send(event).expect("a receiver");
        }
        pools.listed().await;
        let deadline = Instant::now() + Duration::from_secs(60);
        let seen = pools.clone();
        let waits = tokio::spawn(async move { seen.becomes("node-1", deadline, |_| false).await });
        tokio::task::yield_now().await;
        send.send(Event::Delete(pool)).expect("a receiver");
        let waited = tokio::time::timeout(Duration::from_secs(10), waits).await;
        waited.expect("its end is seen").expect("no panic");
    }
}
