//! Clears over the whole cluster: the `Fence` objects of the API server, made and read for the
//! catalog, and the orders to make one: a deleted `Cache`, and a namespace that is gone.
//!
//! A fence is made by create alone. Its name holds its predecessor, so two controllers build one
//! chain: the one that loses reads the other's fence and tries the next name. The oldest fence is
//! deleted after a week, when all nodes with a `Pool` have applied it; the newest one stays.
//!
//! A Fence that cannot be read in its place of the chain stops the chain: no later fence can be
//! made, and nodes that miss one clear all they have. One outside of the chain was made by no
//! controller, and is left out. Both are told in the log and in a metric.
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

use super::client::has_code;
use super::mirror::{self, Mirror};
use super::watched::{self, Namespaces, Watched};
use crate::api::{self, CLEAR, Cache};
use crate::distribution::roster::{ClearOrder, Fencing};
use crate::model::{Clear, Coverage, Fence, Fences, Tenant};

use super::births::{api_time, birth, births, is_older};

/// How long a fence stays at least.
const KEEP: Duration = Duration::from_hours(7 * 24);
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

/// Why the fences could not be read or made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{what}: {source}")]
    Api {
        what: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("Fence {name} is malformed: {why}; delete it, and clear once more")]
    Malformed { name: String, why: String },
    #[error("another controller makes fences all the time")]
    Crowded,
    #[error("the API server's clock is not known: {0}")]
    Time(String),
}

pub(super) fn failed(what: &'static str) -> impl FnOnce(kube::Error) -> Error {
    move |source| Error::Api {
        what,
        source: Box::new(source),
    }
}

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

/// The fences of the API server.
#[derive(Debug, Default)]
struct Listed {
    /// Those that can be read, as objects.
    objects: Vec<api::Fence>,
    /// The same, in their order.
    fences: Vec<Fence>,
    /// The others: their names, and why.
    malformed: BTreeMap<String, String>,
}

impl Listed {
    fn new(all: Vec<DynamicObject>) -> Self {
        let mut listed = Self::default();
        for object in all {
            let name = object.name_any();
            let object = object.try_parse::<api::Fence>();
            let read = object.map_err(|error| error.to_string());
            let read = read.and_then(|object| Ok((object.fence()?, object)));
            match read {
                Ok((fence, object)) => {
                    listed.fences.push(fence);
                    listed.objects.push(object);
                }
                Err(why) => drop(listed.malformed.insert(name, why)),
            }
        }
        listed.fences.sort_by_key(|fence| fence.number);
        listed
    }

    /// The number up to which the fences are deleted.
    fn oldest(&self) -> u64 {
        let previous = self.fences.iter().map(|fence| fence.previous);
        previous.min().unwrap_or(0)
    }

    /// The error if one cannot be read that has a place in the chain.
    fn gap(&self) -> Option<Error> {
        let mut malformed = self.malformed.iter();
        let gap = malformed.find(|(name, _)| name.starts_with(api::fence::OF_CHAIN))?;
        Some(Error::Malformed {
            name: gap.0.clone(),
            why: gap.1.clone(),
        })
    }
}

/// The oldest fence, if it may go: there is a later one, it is old enough, and all these nodes have
/// applied it.
fn may_go<'a>(
    objects: &'a [api::Fence],
    applied: &BTreeMap<String, u64>,
    pools: &BTreeSet<String>,
    now: i64,
) -> Option<&'a api::Fence> {
    let oldest = objects.iter().min_by_key(|object| object.spec.number)?;
    let made = oldest.metadata.creation_timestamp.as_ref()?;
    let age = now.saturating_sub(made.0.as_second());
    let number = api::bytes(oldest.spec.number);
    let has_applied = |node: &String| applied.get(node).is_some_and(|it| *it >= number);
    let is_done = pools.iter().all(has_applied);
    let is_old = u64::try_from(age).is_ok_and(|age| age >= KEEP.as_secs());
    (objects.len() > 1 && is_old && is_done).then_some(oldest)
}

struct Keeper {
    orders: mpsc::Receiver<ClearOrder>,
    fences: Api<api::Fence>,
    /// The same, of which each is read for itself.
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
        if let Some(error) = listed.gap() {
            return Err(error);
        }
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

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    const MADE: i64 = 1_795_400_000;
    const WEEK: i64 = 7 * 24 * 3600;

    fn object(number: u64, previous: u64) -> api::Fence {
        let fence = Fence {
            number,
            previous,
            id: number,
            covers: Coverage::Namespace("ci".parse().expect("a label")),
            repeats: Vec::new(),
        };
        let mut object = api::Fence::from(&fence);
        let made = k8s_openapi::jiff::Timestamp::from_second(MADE).expect("a time");
        object.metadata.creation_timestamp = Some(Time(made));
        object
    }

    #[test]
    fn the_oldest_fence_goes_when_it_is_old_and_all_nodes_have_applied_it() {
        let two = [object(9, 5), object(5, 2)];
        let applied = |one, two| {
            let nodes = [("one", one), ("two", two)];
            BTreeMap::from(nodes.map(|(node, number)| (node.to_owned(), number)))
        };
        let pools = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let both: BTreeSet<String> = pools(&["one", "two"]);
        let goes = |objects: &[api::Fence], applied: &BTreeMap<_, _>, pools: &_, age| {
            let oldest = may_go(objects, applied, pools, MADE + age);
            oldest.map(|object| object.spec.number)
        };
        assert_eq!(goes(&two, &applied(5, 9), &both, WEEK), Some(5));
        assert_eq!(goes(&two, &applied(5, 9), &both, WEEK - 1), None);
        assert_eq!(goes(&two, &applied(4, 9), &both, WEEK), None);
        let away = pools(&["one", "two", "away"]);
        assert_eq!(goes(&two, &applied(9, 9), &away, WEEK), None);
        // The newest one stays: without it, no node could know that it missed something.
        assert_eq!(goes(&two[..1], &applied(9, 9), &both, 9 * WEEK), None);
        assert_eq!(goes(&[], &applied(9, 9), &both, WEEK), None);
    }

    #[test]
    fn the_chain_is_read_in_its_order_and_ends_where_an_object_of_it_is_wrong() {
        let read = |objects: &[api::Fence]| {
            let dynamic = |object: &api::Fence| {
                let object = serde_json::to_value(object).expect("JSON");
                serde_json::from_value(object).expect("an object")
            };
            Listed::new(objects.iter().map(dynamic).collect())
        };
        let listed = read(&[object(9, 5), object(5, 2)]);
        let numbers: Vec<u64> = listed.fences.iter().map(|fence| fence.number).collect();
        assert_eq!((listed.oldest(), &numbers[..]), (2, &[5, 9][..]));
        assert_eq!(read(&[]).oldest(), 0);
        let mut wrong = object(9, 5);
        wrong.spec.id = "x".to_owned();
        let gap = read(&[object(5, 2), wrong.clone()]);
        assert!(matches!(gap.gap(), Some(Error::Malformed { .. })));
        assert_eq!(gap.malformed.len(), 1);
        // By hand: no controller gives such a name, and no fence follows it.
        wrong.metadata.name = Some("clear-all".to_owned());
        let by_hand = read(&[object(5, 2), wrong]);
        assert!(by_hand.gap().is_none());
        assert_eq!((by_hand.fences.len(), by_hand.malformed.len()), (1, 1));
        // Of a later version.
        let mut later = serde_json::to_value(object(9, 5)).expect("JSON");
        later["spec"]["kind"] = "Later".into();
        let later = serde_json::from_value(later).expect("an object");
        assert!(Listed::new(vec![later]).gap().is_some());
    }
}
