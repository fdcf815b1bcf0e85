//! Clears over the whole cluster: the `Fence` objects of the API server, made and read for the
//! catalog, and the orders to make one: a deleted `Cache`, and a namespace that is gone.
//!
//! A fence is made by create alone. Its name holds its predecessor, so two controllers build one
//! chain: the one that loses reads the other's fence and tries the next name. `fences` has the
//! rules for objects that cannot be read, and for those that are deleted.
//!
//! It needs `get`, `list`, `watch`, `create` and `delete` on `fences`; `get`, `list`, `watch` and
//! `patch` on `caches`; and `get`, `list` and `watch` on `namespaces`. `mirror` needs more.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams,
    Preconditions,
};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use super::births::{api_time, birth, births, is_older};
use super::client::has_code;
use super::fences::{Error, Listed, failed, may_go};
use super::mirror::{self, Mirror};
use super::watched::{self, Namespaces, Watched};
use crate::api::{self, CLEAR, Cache};
use crate::distribution::roster::{ClearOrder, Fencing};
use crate::model::{Clear, Coverage, Fence, Fences, Tenant};

/// How often the controller looks without a change, and at most, however many changes there are.
const LOOK: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_secs(1);
/// How many fences one can repeat (deploy/crds).
const MOST_REPEATS: usize = 1000;
/// How many Caches of a namespace are cleared at once, and how long another one then waits.
const AT_ONCE: u32 = 100;
const ONE_MORE: Duration = Duration::from_secs(60);
/// How many old fences are deleted at once.
const MOST_DELETED: usize = 100;
/// How many namespaces are cleared in one look because content is older than they.
const MOST_CLEARED: usize = 16;
/// How often a fence is tried whose place in the chain another controller takes.
const ATTEMPTS: usize = 20;

/// The nodes that must have applied a fence before it is deleted; `None`: not known yet.
pub type Pools = Box<dyn Fn() -> Option<BTreeSet<String>> + Send + Sync>;

/// Keeps the chain of fences, until it is dropped. `orders` are those of people who ask the
/// controller itself. It keeps the mirror of task caches, too: both read the same `Cache` objects.
pub async fn keep(
    client: Client,
    chain: Arc<dyn Fencing>,
    pools: Pools,
    orders: mpsc::Receiver<ClearOrder>,
    mirror: Mirror,
    namespaces: Namespaces,
) {
    let (change, fences_changed) = watch::channel(());
    let fences: Api<api::Fence> = Api::all(client.clone());
    // Without the content: one that cannot be read must not hide the others.
    let all: Api<PartialObjectMeta<api::Fence>> = Api::all(client.clone());
    let watch_fences = watched::events(all, "Fences").for_each(move |_| {
        change.send_replace(());
        std::future::ready(())
    });
    let (caches, watch_caches) = Watched::open(client.clone(), "Caches");
    let mirror = mirror::keep(client.clone(), caches.clone(), mirror);
    let kind = ApiResource::erase::<api::Fence>(&());
    let keeper = Keeper {
        orders,
        fences,
        unread: Api::all_with(client.clone(), &kind),
        malformed: BTreeSet::new(),
        client,
        chain,
        pools,
        caches,
        namespaces,
        cleared: HashSet::new(),
        clears: HashMap::new(),
        known: BTreeMap::new(),
        is_loaded: false,
        // By then the nodes have reported, and the cluster's time is known.
        next_look: Instant::now() + LOOK,
    };
    tokio::join!(
        watch_fences,
        watch_caches,
        mirror,
        keeper.run(fences_changed)
    );
}

struct Keeper {
    orders: mpsc::Receiver<ClearOrder>,
    fences: Api<api::Fence>,
    /// The Fence objects. Each is parsed alone: one that cannot be read does not hide the others.
    unread: Api<DynamicObject>,
    /// The names of those that cannot be read.
    malformed: BTreeSet<String>,
    client: Client,
    chain: Arc<dyn Fencing>,
    pools: Pools,
    caches: Watched<Cache>,
    namespaces: Namespaces,
    /// The uids of Caches that are cleared, and still have their finalizer; and of namespaces that
    /// are cleared, and still there.
    cleared: HashSet<String>,
    /// The namespaces that cleared Caches lately ([`Keeper::may_clear`]).
    clears: HashMap<String, Instant>,
    /// The namespaces that exist, with their uids, as far as this process has seen.
    known: BTreeMap<String, String>,
    is_loaded: bool,
    /// When content is compared with the namespaces next.
    next_look: Instant,
}

impl Keeper {
    async fn run(mut self, mut fences: watch::Receiver<()>) {
        let (mut caches, mut namespaces) = (self.caches.changes(), self.namespaces.changes());
        let mut owed = self.chain.changes();
        loop {
            fences.mark_unchanged();
            caches.mark_unchanged();
            namespaces.mark_unchanged();
            owed.mark_unchanged();
            let again = tokio::time::sleep(AGAIN);
            let done = self.step().await;
            self.obey_until(again).await;
            if let Err(error) = done {
                tracing::warn!(%error, "names could not be cleared in the cluster yet; retrying");
                continue;
            }
            let change = async {
                tokio::select! {
                    _ = fences.changed() => {}
                    _ = caches.changed() => {}
                    _ = namespaces.changed() => {}
                    _ = owed.changed() => {}
                    () = tokio::time::sleep(LOOK) => {}
                }
            };
            self.obey_until(change).await;
        }
    }

    /// Carries out orders as they come, until `end`.
    async fn obey_until(&mut self, end: impl Future<Output = ()>) {
        tokio::pin!(end);
        loop {
            tokio::select! {
                () = &mut end => return,
                Some(ClearOrder { covers, done }) = self.orders.recv() => {
                    let made = self.obey(covers).await;
                    // The person may have gone.
                    let _heard = done.send(made.map_err(|error| error.to_string()));
                }
            }
        }
    }

    async fn obey(&mut self, covers: Coverage) -> Result<(), Error> {
        self.read().await?;
        self.mend().await?;
        self.make(covers.into()).await
    }

    async fn step(&mut self) -> Result<(), Error> {
        // A namespace that goes while there is trouble is cleared later.
        self.learn_namespaces();
        let objects = self.read().await?;
        // One object that cannot be changed must not keep the others waiting.
        let mut failure = self.mend().await.err();
        let caches = self.caches.all();
        let mut uids: HashSet<String> = caches.iter().filter_map(|cache| cache.uid()).collect();
        uids.extend(self.namespaces.all().iter().filter_map(|it| it.uid()));
        self.cleared.retain(|uid| uids.contains(uid));
        for cache in caches {
            failure = self.look_at_cache(&cache).await.err().or(failure);
        }
        failure = self.look_at_namespaces().await.err().or(failure);
        failure = self.look_at_content().await.err().or(failure);
        failure = self.delete_oldest(objects).await.err().or(failure);
        failure.map_or(Ok(()), Err)
    }

    /// Tells the catalog which fences there are.
    async fn read(&mut self) -> Result<Vec<api::Fence>, Error> {
        let all = match self.unread.list(&ListParams::default()).await {
            Ok(list) => list.items,
            // Without the definition there is none.
            Err(error) if has_code(&error, 404) => Vec::new(),
            Err(error) => return Err(failed("list Fences")(error)),
        };
        let listed = Listed::new(all);
        self.say_malformed(&listed.malformed);
        listed.check()?;
        let oldest = listed.oldest();
        let Listed {
            objects, fences, ..
        } = listed;
        let known = self.chain.fences();
        let is_lost = |fence: &Fence| fence.number > oldest && !fences.contains(fence);
        if !self.is_loaded || known.all().any(is_lost) {
            if self.is_loaded {
                tracing::warn!("Fences are gone from the API server: asking all nodes for theirs");
            }
            let mut all = Fences::default();
            all.forget(oldest);
            for fence in fences {
                all.insert(fence);
            }
            self.chain.load(all);
            self.is_loaded = true;
        } else {
            self.chain.forget(oldest);
            for fence in fences {
                self.chain.learn(fence);
            }
        }
        Ok(objects)
    }

    fn say_malformed(&mut self, malformed: &BTreeMap<String, String>) {
        for (name, why) in malformed {
            if !self.malformed.contains(name) {
                tracing::error!(
                    name,
                    why,
                    "a Fence cannot be read: no name is cleared for it, and \
                    if its name begins with `after-`, none for later ones; delete it, and then \
                    clear once more what it should have cleared"
                );
            }
        }
        self.malformed = malformed.keys().cloned().collect();
        self.chain.malformed(malformed.len());
    }

    /// Makes again what an older etcd has lost.
    async fn mend(&mut self) -> Result<(), Error> {
        while let Some(clear) = self.chain.owed().into_iter().next() {
            self.make(clear).await?;
        }
        Ok(())
    }

    /// Makes a fence at the end of the chain. What it cannot repeat is still owed.
    async fn make(&mut self, mut clear: Clear) -> Result<(), Error> {
        clear.repeats.truncate(MOST_REPEATS);
        for _ in 0..ATTEMPTS {
            let fence = self.chain.next(clear.clone());
            let object = api::Fence::from(&fence);
            match self.fences.create(&PostParams::default(), &object).await {
                Ok(_) => {
                    tracing::info!(covers = ?fence.covers, number = fence.number,
                        "names are cleared in the cluster");
                    self.chain.learn(fence);
                    return Ok(());
                }
                // Another controller was faster, or an answer was lost.
                Err(error) if has_code(&error, 409) => {
                    self.read().await?;
                }
                Err(error) => return Err(failed("make a Fence")(error)),
            }
        }
        Err(Error::Crowded)
    }

    /// Whether another `Cache` of this namespace may be cleared now. Each one is an object that the
    /// API server keeps for a week, and work for every node.
    fn may_clear(&mut self, namespace: &str) -> bool {
        let now = Instant::now();
        self.clears.retain(|_, full_at| *full_at > now);
        // The time at which the namespace may clear as many as ever.
        let full_at = self.clears.get(namespace).copied().unwrap_or(now);
        let is_allowed = full_at + ONE_MORE <= now + ONE_MORE * AT_ONCE;
        if is_allowed {
            self.clears.insert(namespace.to_owned(), full_at + ONE_MORE);
        }
        is_allowed
    }

    /// Gives a `Cache` its finalizer. If it is deleted, clears its names and takes the finalizer
    /// away. A crash in between clears them twice.
    async fn look_at_cache(&mut self, seen: &Cache) -> Result<(), Error> {
        let is_deleted = |cache: &Cache| cache.metadata.deletion_timestamp.is_some();
        // The mirror makes its own with the finalizer, and takes it away to delete them.
        let is_of_mirror = seen.is_mirrored() && !is_deleted(seen);
        if seen.orders() != is_deleted(seen) || is_of_mirror {
            return Ok(());
        }
        let namespace = seen.namespace().unwrap_or_default();
        let caches: Api<Cache> = Api::namespaced(self.client.clone(), &namespace);
        let name = seen.name_any();
        let found = caches
            .get_opt(&name)
            .await
            .map_err(failed("read a Cache"))?;
        let Some(cache) = found.filter(|it| it.orders() == is_deleted(it)) else {
            return Ok(());
        };
        let mut finalizers = cache.finalizers().to_vec();
        if is_deleted(&cache) {
            let uid = cache.uid().unwrap_or_default();
            match cache.covers() {
                // Only the finalizer was left.
                Ok(_) if self.cleared.contains(&uid) => {}
                Ok(_) if self.is_cleared_with_namespace(&namespace).await? => {}
                Ok(_) if !self.may_clear(&namespace) => return Ok(()),
                Ok(covers) => {
                    self.make(covers.into()).await?;
                    self.cleared.insert(uid);
                }
                // Such an object must not stay for ever.
                Err(why) => tracing::warn!(
                    namespace,
                    name,
                    why,
                    "a Cache was deleted, and nothing is cleared: it names nothing"
                ),
            }
            finalizers.retain(|it| it != CLEAR);
        } else {
            finalizers.push(CLEAR.to_owned());
        }
        let patch = json!({"metadata": {
            "resourceVersion": cache.metadata.resource_version,
            "uid": cache.metadata.uid,
            "finalizers": finalizers,
        }});
        let params = PatchParams::default();
        match caches.patch(&name, &params, &Patch::Merge(patch)).await {
            // The next change shows it again.
            Err(error) if has_code(&error, 404) || has_code(&error, 409) => Ok(()),
            done => done.map(drop).map_err(failed("change a Cache")),
        }
    }

    /// Clears all names of a namespace that is being deleted, once for all its Caches. They do not
    /// hold it up. Returns whether it is being deleted.
    async fn is_cleared_with_namespace(&mut self, name: &str) -> Result<bool, Error> {
        let namespaces = self.namespaces.all();
        let mut ending = namespaces
            .iter()
            .filter(|it| it.name_any() == name && it.metadata.deletion_timestamp.is_some());
        let ending = ending.next().and_then(|it| it.uid());
        let (Some(uid), Ok(tenant)) = (ending, name.parse()) else {
            return Ok(false);
        };
        if !self.cleared.contains(&uid) {
            self.make(Coverage::Namespace(tenant).into()).await?;
            self.cleared.insert(uid);
        }
        Ok(true)
    }

    /// The namespaces that the watch shows, with their uids.
    fn namespaces_now(&self) -> BTreeMap<String, String> {
        let namespaces = self.namespaces.all();
        let namespaces = namespaces.iter();
        namespaces
            .map(|it| (it.name_any(), it.uid().unwrap_or_default()))
            .collect()
    }

    /// Remembers namespaces that are new.
    fn learn_namespaces(&mut self) {
        for (name, uid) in self.namespaces_now() {
            self.known.entry(name).or_insert(uid);
        }
    }

    /// Clears the names of namespaces that are gone, or were made again.
    async fn look_at_namespaces(&mut self) -> Result<(), Error> {
        let there = self.namespaces_now();
        let is_gone = |(name, uid): &(&String, &String)| there.get(*name) != Some(*uid);
        let gone = self.known.iter().filter(is_gone);
        let gone: Vec<(String, String)> = gone.map(|(a, b)| (a.clone(), b.clone())).collect();
        let live: Api<PartialObjectMeta<Namespace>> = Api::all(self.client.clone());
        for (name, uid) in gone {
            let found = live.get_opt(&name).await;
            let found = found.map_err(failed("read a namespace"))?;
            let is_it = found.is_some_and(|it| it.uid().as_ref() == Some(&uid));
            if !is_it && let Ok(tenant) = name.parse() {
                self.make(Coverage::Namespace(tenant).into()).await?;
            }
            if !is_it {
                self.known.remove(&name);
            }
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
        let ages = self.chain.ages();
        if ages.is_empty() {
            return Ok(());
        }
        let time = api_time(&self.client).await?;
        let is_suspect = |(tenant, age): &(Tenant, Duration)| {
            let born = seen.get(&tenant.to_string());
            is_older(*age, born.copied(), time)
        };
        let suspects = ages.into_iter().filter(is_suspect).take(MOST_CLEARED);
        let live: Api<PartialObjectMeta<Namespace>> = Api::all(self.client.clone());
        for (tenant, age) in suspects.collect::<Vec<_>>() {
            let found = live.get_opt(&tenant.to_string()).await;
            let found = found.map_err(failed("read a namespace"))?;
            let born = found.as_ref().and_then(birth);
            let is_there = found.is_some();
            if (is_there && born.is_none()) || !is_older(age, born, time) {
                continue;
            }
            tracing::warn!(%tenant, ?age, is_there,
                "nodes have content of a namespace that was deleted, or was made again, while no \
                 controller ran: it is cleared");
            self.make(Coverage::Namespace(tenant).into()).await?;
        }
        Ok(())
    }

    /// Deletes the oldest fences that may go. The next look forgets them.
    async fn delete_oldest(&self, mut objects: Vec<api::Fence>) -> Result<(), Error> {
        let Some(pools) = (self.pools)() else {
            return Ok(());
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = i64::try_from(now.unwrap_or_default().as_secs()).unwrap_or(i64::MAX);
        let applied = self.chain.applied();
        for _ in 0..MOST_DELETED {
            let Some(oldest) = may_go(&objects, &applied, &pools, now) else {
                break;
            };
            let (name, uid) = (oldest.name_any(), oldest.metadata.uid.clone());
            let params = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: uid.clone(),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            match self.fences.delete(&name, &params).await {
                Err(error) if has_code(&error, 404) || has_code(&error, 409) => break,
                done => done.map(drop).map_err(failed("delete a Fence"))?,
            }
            objects.retain(|object| object.metadata.uid != uid);
        }
        Ok(())
    }
}
