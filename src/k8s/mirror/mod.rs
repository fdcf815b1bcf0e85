//! The mirror: the newest task caches of the catalog as `Cache` objects, for people. It is never
//! the catalog's truth: nothing reads it but people.
//!
//! What keeps it small: a cap per namespace, a cap in all, and a pace of writes. Keys that change
//! with every build cost no more than the pace. A key need not be among the newest for a while
//! before it is shown: with the pace, that would only make the mirror late. `decide` says what is
//! to be written; this module reads and writes.
//!
//! It deletes its own objects only, and takes their finalizer away right before. So its cleaning
//! clears no cache. If it ends in between, `clears` gives the finalizer back. Otherwise a user's
//! deletion would clear nothing. The mirror needs `create`, `patch` and `delete` on `caches`, and
//! `patch` on `caches/status`.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Interval, MissedTickBehavior};

use super::client::{deletion_as_read, has_code, patch_as_read};
use super::watched::Watched;
use crate::api::{CLEAR, Cache, CacheStatus};
use crate::catalog::Listed;
use crate::hub::{self, ClearOrder};
use decide::{Limits, Write};

mod decide;

/// The most objects in all.
const MOST: usize = 5_000;
/// The time between two writes: 5 a second. Without a mirror the objects go faster.
const PACE: Duration = Duration::from_millis(200);
const PACE_TO_NONE: Duration = Duration::from_millis(20);
/// How often the catalog is read, and for how long one plan is followed.
const LOOK: Duration = Duration::from_secs(10);
/// The pause after an error.
const PAUSE: Duration = Duration::from_secs(60);

/// What is mirrored, and how much of it.
#[derive(Debug)]
pub struct Mirror {
    /// The catalog.
    pub catalog: hub::Handle,
    /// How many task caches of a namespace are shown; 0: none.
    pub most: usize,
    /// Where orders to clear names go.
    pub clears: mpsc::Sender<ClearOrder>,
}

/// Keeps the mirror, until it is dropped. `caches` are the objects of all namespaces.
pub(super) async fn keep(client: Client, caches: Watched<Cache>, mirror: Mirror) {
    let pace = if mirror.most == 0 { PACE_TO_NONE } else { PACE };
    let mut pace = tokio::time::interval(pace);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut keeper = Keeper {
        client,
        caches,
        mirror,
        pace,
        last: String::new(),
    };
    loop {
        keeper.caches.listed().await;
        let began = Instant::now();
        let pause = match keeper.look().await {
            Ok(()) => LOOK.saturating_sub(began.elapsed()),
            Err(error) => {
                tracing::warn!(%error, "the Cache objects do not show what the nodes have; \
                    retrying in a minute. The controller may create, patch and delete caches, and \
                    patch caches/status (deploy/components/peers), and the definitions are those \
                    of this version (deploy/crds)");
                PAUSE
            }
        };
        tokio::time::sleep(pause).await;
    }
}

struct Keeper {
    client: Client,
    caches: Watched<Cache>,
    mirror: Mirror,
    pace: Interval,
    /// The namespace of the last write: the next look begins with the one after.
    last: String,
}

impl Keeper {
    /// Compares the catalog with the objects once, and writes for a while.
    async fn look(&mut self) -> Result<(), kube::Error> {
        let began = Instant::now();
        let Some(listed) = self.listed().await else {
            return Ok(());
        };
        let limits = Limits {
            each: self.mirror.most,
            all: MOST,
        };
        let writes = decide::plan(&listed, &self.caches.all(), limits, &self.last);
        let (mut failure, mut failed) = (None, HashSet::new());
        for write in writes {
            if began.elapsed() > LOOK {
                break;
            }
            let namespace = write.namespace().to_owned();
            if failed.contains(&namespace) {
                continue;
            }
            self.last.clone_from(&namespace);
            match self.write(write).await {
                Ok(()) => {}
                Err(error) => {
                    // A namespace that goes is no failure.
                    if !is_going(&error) {
                        failure.get_or_insert(error);
                    }
                    failed.insert(namespace);
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The task caches with content. `None`: not all of them are known now.
    async fn listed(&self) -> Option<Vec<Listed>> {
        if self.mirror.most == 0 {
            return Some(Vec::new());
        }
        let catalog = &self.mirror.catalog;
        let (mut listed, mut after) = (Vec::new(), None);
        if !catalog.knows_all() {
            return None;
        }
        loop {
            let part = catalog.caches(None, after);
            let shown = part.caches.into_iter().filter(decide::is_shown);
            listed.extend(shown);
            after = part.next;
            if after.is_none() {
                break;
            }
            tokio::task::yield_now().await;
        }
        catalog.knows_all().then_some(listed)
    }

    async fn write(&mut self, write: Write) -> Result<(), kube::Error> {
        let api: Api<Cache> = Api::namespaced(self.client.clone(), write.namespace());
        match write {
            Write::Create(cache) => {
                self.pace.tick().await;
                let name = cache.name_any();
                match api.create(&PostParams::default(), &cache).await {
                    Ok(made) => self.tell(&api, &made, cache.status.as_ref()).await,
                    // Someone else has made one of this name.
                    Err(error) if has_code(&error, 409) => {
                        tracing::debug!(name, "a Cache of this name is there");
                        Ok(())
                    }
                    Err(error) => Err(error),
                }
            }
            Write::Tell { cache, status } => self.tell(&api, &cache, status.as_ref()).await,
            Write::Remove(cache) => self.remove(&api, &cache).await,
        }
    }

    /// Writes the status of an object, if it is still there.
    async fn tell(
        &mut self,
        api: &Api<Cache>,
        cache: &Cache,
        status: Option<&CacheStatus>,
    ) -> Result<(), kube::Error> {
        self.pace.tick().await;
        let patch = json!({"metadata": {"uid": cache.metadata.uid}, "status": status});
        let (name, params) = (cache.name_any(), PatchParams::default());
        match api.patch_status(&name, &params, &Patch::Merge(patch)).await {
            // It was made again. The next look shows it.
            Err(error) if has_code(&error, 409) => Ok(()),
            done => done.map(drop),
        }
    }

    /// Deletes an object of the mirror, without clearing the cache.
    async fn remove(&mut self, api: &Api<Cache>, cache: &Cache) -> Result<(), kube::Error> {
        let name = cache.name_any();
        // No pause between the two writes: `clears` gives an object its finalizer back.
        self.pace.tick().await;
        self.pace.tick().await;
        let finalizers = cache.finalizers().iter().filter(|it| *it != CLEAR);
        // Not if someone has deleted it meanwhile: that is an order.
        let patch = json!({"metadata": {"finalizers": finalizers.collect::<Vec<_>>()}});
        let Some(bare) = patch_as_read(api, cache, patch).await? else {
            return Ok(());
        };
        match api.delete(&name, &deletion_as_read(&bare)).await {
            Err(error) if has_code(&error, 404) => self.obey_late(cache).await,
            // It was changed, such as by `clears`; or deleted, and made again.
            Err(error) if has_code(&error, 409) => {
                let there = api.get_opt(&name).await?;
                if there.and_then(|it| it.uid()) != cache.uid() {
                    self.obey_late(cache).await;
                }
            }
            done => drop(done?),
        }
        Ok(())
    }

    /// Someone has deleted an object in the moment when it had no finalizer: that is an order, too.
    /// Of two controllers at once, the other one's deletion looks the same. Then a cache is cleared
    /// that was only no longer shown.
    async fn obey_late(&self, cache: &Cache) {
        let Ok(covers) = cache.covers() else {
            return;
        };
        let (done, made) = oneshot::channel();
        let order = ClearOrder { covers, done };
        let is_sent = self.mirror.clears.send(order).await.is_ok();
        let made = if is_sent { made.await.ok() } else { None };
        if !matches!(made, Some(Ok(()))) {
            tracing::error!(
                namespace = cache.namespace(),
                name = cache.name_any(),
                key = cache.task_key(),
                "a Cache was deleted, and its cache could not be cleared: \
                clear it once more (docs/catalog.md)"
            );
        }
    }
}

/// Whether the namespace or the object is gone, or the namespace is being deleted.
fn is_going(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    let Some(details) = &status.details else {
        return false;
    };
    // Without a name it is the definition that is not there, or has no status.
    let is_gone = status.code == 404 && !details.name.is_empty();
    let mut reasons = details.causes.iter().map(|cause| &*cause.reason);
    is_gone || reasons.any(|reason| reason == "NamespaceTerminating")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kube::client::Body;
    use serde_json::Value;

    use super::*;
    use crate::api::MIRRORED;
    use crate::distribution::roster::NoNode;

    /// Removes an object with uid 1 while the API server answers so to the deletion, and to a read
    /// with an object of this uid. Returns what the deletion asks for, and whether names are
    /// cleared.
    async fn removed(deletion: u16, uid: &'static str) -> (Value, bool) {
        let object = |uid: &str, version: &str, finalizers: &[&str]| {
            json!({
                "metadata": {"name": "go", "namespace": "ci", "uid": uid,
                             "resourceVersion": version, "finalizers": finalizers,
                             "labels": {MIRRORED: "true"}},
                "spec": {"key": "go"},
            })
        };
        let (asked, mut deletions) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: hyper::Request<Body>| {
            let asked = asked.clone();
            async move {
                let (status, answer) = match request.method().as_str() {
                    "PATCH" => (200, object("1", "2", &[])),
                    "GET" => (200, object(uid, "3", &[CLEAR])),
                    _ => {
                        let body = request.into_body().collect_bytes().await.expect("a body");
                        let body: Value = serde_json::from_slice(&body).expect("JSON");
                        asked.send(body).expect("the test runs");
                        let answer = json!({"kind": "Status", "code": deletion});
                        (deletion, answer)
                    }
                };
                let body = Body::from(answer.to_string().into_bytes());
                hyper::Response::builder().status(status).body(body)
            }
        });
        let client = Client::new(service, "default");
        let address = "127.0.0.1:0".parse().expect("an address");
        let hub = hub::Hub::open(address, Arc::new(NoNode), Duration::from_mins(1)).await;
        let (clears, mut orders) = mpsc::channel(1);
        let mirror = Mirror {
            catalog: hub.expect("it opens").handle(),
            most: 0,
            clears,
        };
        let mut keeper = Keeper {
            caches: Watched::open(client.clone(), "Caches").0,
            client,
            mirror,
            pace: tokio::time::interval(PACE_TO_NONE),
            last: String::new(),
        };
        let cache = serde_json::from_value(object("1", "1", &[CLEAR])).expect("a Cache");
        let write = keeper.write(Write::Remove(Arc::new(cache)));
        let cleared = async {
            let order = orders.recv().await.expect("the mirror lives");
            order.done.send(Ok(())).expect("it waits");
        };
        let mut is_cleared = false;
        tokio::pin!(write, cleared);
        loop {
            tokio::select! {
                done = &mut write => break done.expect("no failure"),
                () = &mut cleared, if !is_cleared => is_cleared = true,
            }
        }
        (deletions.recv().await.expect("a deletion"), is_cleared)
    }

    #[tokio::test]
    async fn an_object_is_deleted_only_without_its_finalizer_and_a_users_deletion_is_an_order() {
        let (asked, is_cleared) = removed(200, "1").await;
        let expected = json!({"uid": "1", "resourceVersion": "2"});
        assert_eq!((&asked["preconditions"], is_cleared), (&expected, false));
        let by_users = [removed(404, "").await.1, removed(409, "2").await.1];
        assert_eq!(by_users, [true; 2]);
        // It has its finalizer again. The next look takes it away once more.
        assert!(!removed(409, "1").await.1);
    }
}
