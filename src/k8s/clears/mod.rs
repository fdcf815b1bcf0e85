//! Clears over the whole cluster: namespaces that are gone or were made again, the finalizers of
//! `Cache` objects, and `Fence` objects that may be deleted.
//!
//! | file | holds |
//! |---|---|
//! | `orders` | carries out orders to clear, and gives `Cache` objects their finalizer |
//! | `fences` | the chain of `Fence` objects: which can be read, which may be deleted |
//! | `fencer` | reads and makes the `Fence` objects |
//! | `ended` | clears namespaces that have ended, each once |
//! | `births` | whether content is from before its namespace was made |
//! | `pace` | the pauses between two looks |
//! | `tenants` | finds content of deleted namespaces in the shared tier |
//!
//! It needs `get`, `list`, `watch`, `create` and `delete` on `fences`; `get`, `list`, `watch` and
//! `patch` on `caches`; and `get`, `list` and `watch` on `namespaces`. `mirror` needs more.

mod births;
mod ended;
mod fencer;
mod fences;
mod orders;
mod pace;
mod tenants;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::OptionFuture;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::{mpsc, watch};

use super::client::{deletion_of, has_code};
use super::mirror::{self, Mirror};
use super::watched::{self, Namespaces, Watched};
use crate::api;
use crate::hub::{self, ClearOrder};
use crate::link::Backoff;
use crate::model::Tenant;
use crate::shared::{self, Store};
use births::{birth, births, is_older};
use ended::Ended;
use fencer::Fencer;
use fences::{is_cleared_since, may_go};
use orders::{Deleted, enlist_all, obey_all};
use pace::{AGAIN, LOOK, pause_after};
use tenants::Tenants;

pub(in crate::k8s) use births::{ApiTime, api_time};
pub(in crate::k8s) use fences::{Error, failed};
pub(in crate::k8s) use orders::do_all;

/// How many old fences are deleted at once.
const MOST_DELETED: usize = 100;
/// How many namespaces are cleared in one look because content is older than they.
const MOST_CLEARED: usize = 16;

/// The nodes that get fences, and so must have applied a fence before it is deleted. `None`: not
/// known yet.
pub type Pools = Box<dyn Fn() -> Option<BTreeSet<String>> + Send + Sync>;

/// Keeps the chain of fences, until it is dropped. `orders` are those of people who ask the
/// controller itself. `tier` is the shared tier that this controller collects, if there is one.
///
/// It keeps the mirror of task caches, too: both read the same `Cache` objects.
pub async fn keep(
    client: Client,
    catalog: hub::Handle,
    pools: Pools,
    orders: mpsc::Receiver<ClearOrder>,
    mirror: Mirror,
    namespaces: Namespaces,
    tier: Option<Store>,
) {
    let (change, fences_changed) = watch::channel(());
    // Without the content: one that cannot be read must not hide the others.
    let all: Api<PartialObjectMeta<api::Fence>> = Api::all(client.clone());
    let watch_fences = watched::events(all, "Fences").for_each(move |_| {
        change.send_replace(());
        std::future::ready(())
    });
    let (caches, watch_caches) = Watched::open(client.clone(), "Caches");
    let mirror = mirror::keep(client.clone(), caches.clone(), mirror);
    let fencer = Arc::new(Fencer::new(client.clone(), catalog));
    let deleted = Deleted::new(
        client.clone(),
        Arc::clone(&fencer),
        caches.clone(),
        namespaces.clone(),
    );
    let ended = Arc::new(Ended::new(client.clone(), Arc::clone(&fencer)));
    let tenants = tier.map(|store| {
        let (fencer, ended) = (Arc::clone(&fencer), Arc::clone(&ended));
        Tenants::new(store, fencer, ended, namespaces.clone())
    });
    let tenants = OptionFuture::from(tenants.map(Tenants::run));
    let enlisted = enlist_all(client.clone(), caches);
    let keeper = Keeper {
        client,
        fencer: Arc::clone(&fencer),
        ended,
        pools,
        namespaces,
        known: BTreeMap::new(),
        // By then the nodes have reported, and the cluster's time is known.
        next_look: Instant::now() + LOOK,
    };
    tokio::join!(
        watch_fences,
        watch_caches,
        mirror,
        obey_all(orders, &fencer),
        deleted.run(),
        enlisted,
        tenants,
        keeper.run(fences_changed)
    );
}

struct Keeper {
    client: Client,
    fencer: Arc<Fencer>,
    ended: Arc<Ended>,
    pools: Pools,
    namespaces: Namespaces,
    /// The namespaces that exist, with their uids, as far as this process has seen.
    known: BTreeMap<String, String>,
    /// When content is compared with the namespaces next.
    next_look: Instant,
}

impl Keeper {
    async fn run(mut self, mut fences: watch::Receiver<()>) {
        let mut namespaces = self.namespaces.changes();
        let mut owed = self.fencer.catalog.owed_changes();
        let mut backoff = Backoff::default();
        loop {
            fences.mark_unchanged();
            namespaces.mark_unchanged();
            owed.mark_unchanged();
            let again = tokio::time::sleep(AGAIN);
            let done = self.step().await;
            again.await;
            if let Err(error) = &done {
                tracing::warn!(%error, "names could not be cleared in the cluster yet; retrying");
            }
            let pause = pause_after(&done, &mut backoff);
            tokio::select! {
                _ = fences.changed() => {}
                _ = namespaces.changed() => {}
                _ = owed.changed() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn step(&mut self) -> Result<(), Error> {
        // A namespace that goes while there is trouble is cleared later.
        self.learn_namespaces();
        self.ended.forget_restored(&self.namespaces.uids()).await;
        let objects = self.fencer.read().await?;
        // One object that cannot be changed must not keep the others waiting.
        let mut failure = self.fencer.mend().await.err();
        failure = self.look_at_namespaces(&objects).await.err().or(failure);
        failure = self.look_at_content().await.err().or(failure);
        failure = self.delete_oldest(objects).await.err().or(failure);
        failure.map_or(Ok(()), Err)
    }

    /// Remembers namespaces that are new.
    fn learn_namespaces(&mut self) {
        for (name, uid) in self.namespaces.uids() {
            self.known.entry(name).or_insert(uid);
        }
    }

    /// Clears the names of namespaces that are gone, or were made again, unless one of these fences
    /// has done it: another controller made it while this one was cut off.
    async fn look_at_namespaces(&mut self, fences: &[api::Fence]) -> Result<(), Error> {
        let there = self.namespaces.uids();
        let is_gone = |(name, uid): &(&String, &String)| there.get(*name) != Some(*uid);
        let gone = self.known.iter().filter(is_gone);
        let gone: Vec<(String, String)> = gone.map(|(a, b)| (a.clone(), b.clone())).collect();
        for (name, uid) in gone {
            let found = self.ended.live(&name).await?;
            let there = found.as_ref().and_then(kube::ResourceExt::uid);
            if there.as_ref() == Some(&uid) {
                continue;
            }
            let born = found.as_ref().and_then(birth);
            if let Ok(tenant) = name.parse::<Tenant>()
                && !born.is_some_and(|born| is_cleared_since(fences, &tenant, born))
            {
                self.ended.clear(tenant, Some(uid), there).await?;
            }
            self.known.remove(&name);
        }
        self.learn_namespaces();
        Ok(())
    }

    /// Clears the content of namespaces that went, or were made again, while no controller ran.
    async fn look_at_content(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        if now < self.next_look {
            return Ok(());
        }
        self.next_look = now + LOOK;
        let Some(seen) = births(&self.namespaces.all()) else {
            return Ok(());
        };
        let ages = self.fencer.catalog.ages();
        if ages.is_empty() {
            return Ok(());
        }
        let time = api_time(&self.client).await?;
        let is_suspect = |(tenant, age): &(Tenant, Duration)| {
            let born = seen.get(&tenant.to_string());
            is_older(*age, born.copied(), time)
        };
        let suspects = ages.into_iter().filter(is_suspect).take(MOST_CLEARED);
        for (tenant, age) in suspects.collect::<Vec<_>>() {
            let found = self.ended.live(&tenant.to_string()).await?;
            let born = found.as_ref().and_then(birth);
            let is_there = found.is_some();
            if (is_there && born.is_none()) || !is_older(age, born, time) {
                continue;
            }
            tracing::warn!(%tenant, ?age, is_there,
                "nodes have content of a namespace that was deleted, or was made again, while no \
                 controller ran: it is cleared");
            let there = found.and_then(|it| it.uid());
            self.ended.clear(tenant, None, there).await?;
        }
        Ok(())
    }

    /// Deletes the oldest fences that may go. The next look forgets them.
    async fn delete_oldest(&self, mut objects: Vec<api::Fence>) -> Result<(), Error> {
        let Some(pools) = (self.pools)() else {
            return Ok(());
        };
        let now = i64::try_from(shared::now().0 / 1000).unwrap_or(i64::MAX);
        let applied = self.fencer.catalog.applied_fences();
        for _ in 0..MOST_DELETED {
            let Some(oldest) = may_go(&objects, &applied, &pools, now) else {
                break;
            };
            let (name, uid) = (oldest.name_any(), oldest.metadata.uid.clone());
            let params = deletion_of(uid.clone());
            match self.fencer.fences.delete(&name, &params).await {
                Err(error) if has_code(&error, 404) || has_code(&error, 409) => break,
                done => done.map(drop).map_err(failed("delete a Fence"))?,
            }
            objects.retain(|object| object.metadata.uid != uid);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use k8s_openapi::api::core::v1::Namespace;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;
    use crate::distribution::roster::NoNode;
    use crate::k8s::client::client_of;

    #[tokio::test]
    async fn a_namespace_is_cleared_while_the_api_server_is_slow_with_caches_of_another_one() {
        let (wanted, mut to_be_enlisted) = mpsc::unbounded_channel();
        let (ordered, mut cleared) = mpsc::unbounded_channel();
        let listed = |kind: &str, items: serde_json::Value| {
            let metadata = json!({"resourceVersion": "1"});
            let group = "baggageclaim.concourse-ci.org/v1alpha1";
            json!({"apiVersion": group, "kind": kind, "metadata": metadata, "items": items})
        };
        let client = client_of(move |request| {
            let (path, query) = (
                request.uri().path(),
                request.uri().query().unwrap_or_default(),
            );
            if request.method() == "POST" && path.ends_with("/fences") {
                ordered.send(()).expect("the test runs");
            } else if path.ends_with("/caches/slow") {
                wanted.send(()).expect("the test runs");
            } else if path.ends_with("/namespaces/gone") {
                return Some((
                    404,
                    json!({"kind": "Status", "code": 404, "reason": "NotFound"}),
                ));
            } else if path.ends_with("/fences") && !query.contains("watch") {
                return Some((200, listed("FenceList", json!([]))));
            } else if path.ends_with("/caches") && !query.contains("watch") {
                let metadata = json!({"name": "slow", "namespace": "ci"});
                let cache = json!({"metadata": metadata, "spec": {"key": "go"}});
                return Some((200, listed("CacheList", json!([cache]))));
            }
            None
        });
        let namespace: PartialObjectMeta<Namespace> = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gone", "uid": "1"},
        }))
        .expect("a namespace");
        let begin = [
            Event::Init,
            Event::InitApply(namespace.clone()),
            Event::InitDone,
        ];
        let end = async move {
            to_be_enlisted.recv().await;
            Ok(Event::Delete(namespace))
        };
        let events = stream::iter(begin.map(Ok)).chain(stream::once(end));
        let (namespaces, fill) = Watched::over(events.chain(stream::pending()));
        tokio::spawn(fill);
        namespaces.listed().await;

        let address = "127.0.0.1:0".parse().expect("an address");
        let hub = hub::Hub::open(address, Arc::new(NoNode), LOOK).await;
        let catalog = hub.expect("it opens").handle();
        let (clears, orders) = mpsc::channel(1);
        let mirror = Mirror {
            catalog: catalog.clone(),
            most: 0,
            clears,
        };
        let pools: Pools = Box::new(|| None);
        let keeping = keep(client, catalog, pools, orders, mirror, namespaces, None);
        let done = async {
            tokio::select! {
                () = keeping => None,
                done = cleared.recv() => done,
            }
        };
        let done = tokio::time::timeout(Duration::from_secs(30), Box::pin(done)).await;
        assert_eq!(done, Ok(Some(())), "no fence is made");
    }
}
