//! Orders to clear: those of people who ask the controller itself, and deleted `Cache` objects. New
//! `Cache` objects get the finalizer that makes their deletion an order.
//!
//! Orders have a task of their own, and finalizers another one. So an order waits for no other work
//! of the controller, except for one list or one creation of a `Fence`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::mpsc;

use super::fencer::Fencer;
use super::fences::{Error, failed};
use super::pace::{AGAIN, pause_after};
use crate::api::{CLEAR, Cache};
use crate::hub::ClearOrder;
use crate::k8s::client::patch_as_read;
use crate::k8s::watched::{Namespaces, Watched};
use crate::link::Backoff;
use crate::model::Coverage;

/// The pause between two looks.
const MOMENT: Duration = Duration::from_millis(100);
/// How many Caches of a namespace are cleared at once, and how long another one then waits.
const AT_ONCE: u32 = 100;
const ONE_MORE: Duration = Duration::from_secs(60);
/// How many objects are read and changed at once.
const PARALLEL: usize = 16;

/// The deleted `Cache` objects.
pub(super) struct Deleted {
    client: Client,
    fencer: Arc<Fencer>,
    caches: Watched<Cache>,
    namespaces: Namespaces,
    done: Mutex<Done>,
    /// Held while a namespace is cleared: once for all its Caches.
    clearing: tokio::sync::Mutex<()>,
}

/// What a deleted object needs before it can go.
enum Need {
    /// Its names are cleared, and then its finalizer is taken away.
    Fence,
    /// Its names are cleared already, or it names nothing.
    Finalizer,
    /// Its namespace has cleared too many.
    Time,
}

#[derive(Default)]
struct Done {
    /// The uids of Caches that are cleared, and still have their finalizer; and of namespaces that
    /// are cleared, and still there.
    cleared: HashSet<String>,
    /// The namespaces that cleared Caches lately ([`Done::may_clear`]).
    clears: HashMap<String, Instant>,
}

/// Carries out the orders of people who ask the controller itself.
pub(super) async fn obey_all(mut asked: mpsc::Receiver<ClearOrder>, fencer: &Fencer) {
    while let Some(ClearOrder { covers, done }) = asked.recv().await {
        let made = obey(fencer, covers).await;
        // The person may have gone.
        let _heard = done.send(made.map_err(|error| error.to_string()));
    }
}

async fn obey(fencer: &Fencer, covers: Coverage) -> Result<(), Error> {
    fencer.read().await?;
    fencer.mend().await?;
    fencer.make(covers.into()).await
}

impl Deleted {
    pub(super) fn new(
        client: Client,
        fencer: Arc<Fencer>,
        caches: Watched<Cache>,
        namespaces: Namespaces,
    ) -> Self {
        Self {
            client,
            fencer,
            caches,
            namespaces,
            done: Mutex::default(),
            clearing: tokio::sync::Mutex::default(),
        }
    }

    /// Runs until it is dropped.
    pub(super) async fn run(&self) {
        let (mut caches, mut namespaces) = (self.caches.changes(), self.namespaces.changes());
        let mut backoff = Backoff::default();
        loop {
            caches.mark_unchanged();
            namespaces.mark_unchanged();
            let done = self.look().await;
            if let Err(error) = &done {
                tracing::warn!(%error, "names could not be cleared in the cluster yet; retrying");
            }
            let pause = pause_after(&done, &mut backoff);
            // Each change of any Cache ends the wait below.
            tokio::time::sleep(if done.is_ok() { MOMENT } else { AGAIN }).await;
            tokio::select! {
                _ = caches.changed() => {}
                _ = namespaces.changed() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Looks at all deleted objects. One that cannot be changed does not keep the others waiting.
    async fn look(&self) -> Result<(), Error> {
        let caches = self.caches.all();
        let mut uids: HashSet<String> = caches.iter().filter_map(|cache| cache.uid()).collect();
        uids.extend(self.namespaces.all().iter().filter_map(|it| it.uid()));
        self.done.lock().cleared.retain(|uid| uids.contains(uid));
        let (mut fenced, mut others) = (Vec::new(), Vec::new());
        let deleted = caches.into_iter();
        for cache in deleted.filter(|it| it.orders() && is_deleted(it)) {
            match self.needs(&cache) {
                Need::Fence => fenced.push(cache),
                Need::Finalizer => others.push(cache),
                Need::Time => {}
            }
        }
        let others = self.look_at_all(others).await;
        if !fenced.is_empty() {
            // A fence after those that an older etcd has lost would have no predecessor there.
            self.fencer.read().await?;
            self.fencer.mend().await?;
            self.look_at_all(fenced).await?;
        }
        others
    }

    async fn look_at_all(&self, caches: Vec<Arc<Cache>>) -> Result<(), Error> {
        let looks = caches.into_iter();
        do_all(looks.map(|cache| async move { self.look_at(&cache).await })).await
    }

    fn needs(&self, cache: &Cache) -> Need {
        let namespace = cache.namespace().unwrap_or_default();
        let ending = self.ending(&namespace);
        let done = self.done.lock();
        let is_cleared = |uid: &String| done.cleared.contains(uid);
        if cache.covers().is_err()
            || cache.uid().as_ref().is_some_and(is_cleared)
            || ending.as_ref().is_some_and(is_cleared)
        {
            Need::Finalizer
        } else if ending.is_some() || done.may_clear(&namespace) {
            Need::Fence
        } else {
            Need::Time
        }
    }

    /// Clears the names of a deleted `Cache`, and takes its finalizer away. A crash in between
    /// clears them twice.
    async fn look_at(&self, seen: &Cache) -> Result<(), Error> {
        let namespace = seen.namespace().unwrap_or_default();
        let caches: Api<Cache> = Api::namespaced(self.client.clone(), &namespace);
        let name = seen.name_any();
        let Some(cache) = read(&caches, &name)
            .await?
            .filter(|it| it.orders() && is_deleted(it))
        else {
            return Ok(());
        };
        let uid = cache.uid().unwrap_or_default();
        match cache.covers() {
            // Only the finalizer was left.
            Ok(_) if self.done.lock().cleared.contains(&uid) => {}
            Ok(_) if self.is_cleared_with_namespace(&namespace).await? => {}
            Ok(_) if !self.done.lock().clear(&namespace) => return Ok(()),
            Ok(covers) => {
                if let Err(error) = self.fencer.make(covers.into()).await {
                    self.done.lock().give_back(&namespace);
                    return Err(error);
                }
                self.done.lock().cleared.insert(uid);
            }
            // Such an object must not stay for ever.
            Err(why) => tracing::warn!(
                namespace,
                name,
                why,
                "a Cache was deleted, and nothing is cleared: it names nothing"
            ),
        }
        let mut finalizers = cache.finalizers().to_vec();
        finalizers.retain(|it| it != CLEAR);
        set_finalizers(&caches, &cache, &finalizers).await
    }

    /// Clears all names of a namespace that is being deleted, once for all its Caches. They do not
    /// hold it up. Returns whether it is being deleted.
    async fn is_cleared_with_namespace(&self, name: &str) -> Result<bool, Error> {
        let (Some(uid), Ok(tenant)) = (self.ending(name), name.parse()) else {
            return Ok(false);
        };
        let _one_at_a_time = self.clearing.lock().await;
        if !self.done.lock().cleared.contains(&uid) {
            self.fencer.make(Coverage::Namespace(tenant).into()).await?;
            self.done.lock().cleared.insert(uid);
        }
        Ok(true)
    }

    /// The uid of a namespace that is being deleted.
    fn ending(&self, name: &str) -> Option<String> {
        let namespace = self.namespaces.get(name);
        let ending = namespace.filter(|it| it.metadata.deletion_timestamp.is_some());
        ending.and_then(|it| it.uid())
    }
}

impl Done {
    /// Whether another `Cache` of this namespace may be cleared now. Each one is an object that the
    /// API server keeps for a week, and work for every node.
    fn may_clear(&self, namespace: &str) -> bool {
        let now = Instant::now();
        self.full_at(namespace, now) + ONE_MORE <= now + ONE_MORE * AT_ONCE
    }

    /// Counts one that is cleared now. `false`: it may not.
    fn clear(&mut self, namespace: &str) -> bool {
        let now = Instant::now();
        self.clears.retain(|_, full_at| *full_at > now);
        let is_allowed = self.may_clear(namespace);
        if is_allowed {
            let full_at = self.full_at(namespace, now) + ONE_MORE;
            self.clears.insert(namespace.to_owned(), full_at);
        }
        is_allowed
    }

    /// One that was counted could not be cleared.
    fn give_back(&mut self, namespace: &str) {
        if let Some(full_at) = self.clears.get_mut(namespace) {
            *full_at -= ONE_MORE;
        }
    }

    /// The time at which the namespace may clear as many as ever.
    fn full_at(&self, namespace: &str, now: Instant) -> Instant {
        let full_at = self.clears.get(namespace).copied();
        full_at.unwrap_or(now).max(now)
    }
}

/// Gives each `Cache` its finalizer, until it is dropped. A user can make thousands of them at
/// once, so no clear waits for this.
pub(super) async fn enlist_all(client: Client, caches: Watched<Cache>) {
    let (mut changes, mut backoff) = (caches.changes(), Backoff::default());
    loop {
        changes.mark_unchanged();
        let new = caches
            .all()
            .into_iter()
            .filter(|cache| needs_finalizer(cache));
        let client = &client;
        let enlisted = new.map(|cache| async move { enlist(client, &cache).await });
        let done = do_all(enlisted).await;
        if let Err(error) = &done {
            tracing::warn!(%error, "the deletion of a Cache would clear nothing yet; retrying");
        }
        let pause = pause_after(&done, &mut backoff);
        tokio::time::sleep(if done.is_ok() { MOMENT } else { AGAIN }).await;
        tokio::select! {
            _ = changes.changed() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Whether the deletion of a `Cache` would be no order yet. The mirror takes the finalizer of its
/// own objects away right before it deletes them. One that it then cannot delete gets the finalizer
/// back, also from the next controller.
fn needs_finalizer(cache: &Cache) -> bool {
    !cache.orders() && !is_deleted(cache)
}

async fn enlist(client: &Client, seen: &Cache) -> Result<(), Error> {
    let namespace = seen.namespace().unwrap_or_default();
    let caches: Api<Cache> = Api::namespaced(client.clone(), &namespace);
    let found = read(&caches, &seen.name_any()).await?;
    let Some(cache) = found.filter(needs_finalizer) else {
        return Ok(());
    };
    let mut finalizers = cache.finalizers().to_vec();
    finalizers.push(CLEAR.to_owned());
    set_finalizers(&caches, &cache, &finalizers).await
}

/// Does several things at once. One that fails does not keep the others waiting.
pub(in crate::k8s) async fn do_all(
    all: impl Iterator<Item = impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    let done = futures_util::stream::iter(all).buffer_unordered(PARALLEL);
    let failures = done.filter_map(|done| std::future::ready(done.err()));
    let failures: Vec<Error> = failures.collect().await;
    failures.into_iter().next().map_or(Ok(()), Err)
}

fn is_deleted(cache: &Cache) -> bool {
    cache.metadata.deletion_timestamp.is_some()
}

async fn read(caches: &Api<Cache>, name: &str) -> Result<Option<Cache>, Error> {
    let found = caches.get_opt(name).await;
    found.map_err(failed("read a Cache"))
}

async fn set_finalizers(
    caches: &Api<Cache>,
    cache: &Cache,
    finalizers: &[String],
) -> Result<(), Error> {
    let patch = json!({"metadata": {"finalizers": finalizers}});
    // The next change shows it again.
    let written = patch_as_read(caches, cache, patch).await;
    written.map(drop).map_err(failed("change a Cache"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::MIRRORED;
    use crate::k8s::client::{client_of, is_watch, list_of};

    #[tokio::test]
    async fn an_object_of_the_mirror_without_the_finalizer_gets_it_back() {
        let cache = json!({
            "metadata": {"name": "go", "namespace": "ci", "uid": "1", "resourceVersion": "1",
                         "labels": {MIRRORED: "true"}},
            "spec": {"key": "go"},
        });
        let (patched, mut paths) = mpsc::unbounded_channel();
        let client = client_of(move |request| {
            if is_watch(request) {
                return None;
            }
            if request.method() == "PATCH" {
                let path = request.uri().path().to_owned();
                patched.send(path).expect("the test runs");
            }
            let is_list = request.uri().path().ends_with("/caches");
            let answer = if is_list {
                list_of(&json!([cache]))
            } else {
                cache.clone()
            };
            Some((200, answer))
        });
        let (caches, fill) = Watched::open(client.clone(), "Caches");
        tokio::spawn(fill);
        tokio::spawn(enlist_all(client, caches));
        let path = tokio::time::timeout(Duration::from_secs(30), paths.recv());
        let path = path.await.expect("it is changed").expect("a path");
        assert!(path.ends_with("/namespaces/ci/caches/go"), "{path}");
    }
}
