//! A watch over all objects of one kind, for the parts of the controller that read them: the last
//! known objects, and a signal for each event. It is opened once. Its clones share the objects.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures_util::{FutureExt as _, Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::client::has_code;

/// All namespaces, without their content.
pub type Namespaces = Watched<PartialObjectMeta<Namespace>>;

/// The objects of one kind.
#[derive(Clone)]
pub struct Watched<K: Resource<DynamicType = ()> + Clone + 'static> {
    store: Store<K>,
    /// Each event is a change. The value: the API server has not found the kind.
    seen: watch::Receiver<bool>,
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
    /// The objects, and the task that fills them. `what` is their plural, for the log.
    pub fn open(
        client: Client,
        what: &'static str,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (store, writer) = reflector::store();
        let (event_seen, seen) = watch::channel(false);
        let events = events(Api::all(client), what);
        let fill = reflector::reflector(writer, events).for_each(move |event| {
            event_seen.send_replace(event.as_ref().err().is_some_and(is_not_found));
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
            if seen.changed().await.is_err() {
                // The watch has ended for good.
                return std::future::pending().await;
            }
        }
    }

    /// Whether the last event was that the API server does not find the kind. It may not be
    /// defined. A proxy may say the same of anything.
    pub(super) fn is_not_found(&self) -> bool {
        *self.seen.borrow()
    }

    /// All objects, as far as they are known.
    pub(super) fn all(&self) -> Vec<Arc<K>> {
        self.store.state()
    }

    /// A receiver for changes: each event is one.
    pub(super) fn changes(&self) -> watch::Receiver<bool> {
        self.seen.clone()
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
    let events = watcher(all, watcher::Config::default()).default_backoff();
    // Nothing reads who wrote which field, and that is half of an object.
    let events = events.modify(|object| object.meta_mut().managed_fields = None);
    events.inspect_err(move |error| {
        tracing::warn!(%error, "the watch over {what} failed; retrying");
    })
}

fn is_not_found(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(error) if has_code(error, 404))
}
