//! The collector of all tenants, for a process that runs all the time. When a tenant was collected
//! last is known from its lease, so a restart, a second process and `baggageclaim shared gc` save
//! each other's work. A collection that was killed, or met what does not pass by itself, does not
//! give its lease back: it is repeated when the time of the lease is over. One collection is in
//! `collect`.
//!
//! A tenant with a budget is also collected for that: only this process knows the budget, so it
//! remembers in memory when it last kept the tenant within it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::budget::{Budget, TierUse};
use super::clock::now;
use super::collect::{Collected, Collector, Uses};
use super::error::{Error, Result};
use super::keys::Keys;
use super::lease;
use super::record::fresh_id;
use super::store::Store;
use crate::model::{Fences, Tenant, Timestamp};
use crate::telemetry::metrics::{ConstCounter, Gauge, Registry};

/// Each tenant is collected once in this time.
const EVERY: Duration = Duration::from_hours(24);
/// One with a budget also once in this time. It costs a request for each name and manifest.
const EVERY_WITH_BUDGET: Duration = Duration::from_hours(6);
/// How often the leases are looked at. Also the pause before a budget that failed is tried again,
/// and before a budget counts that changes often.
const LOOK: Duration = Duration::from_mins(10);

/// How often the thread checks [`Catalog::is_known`], until it is true.
const SOON: Duration = Duration::from_secs(1);

/// How often something is done.
#[derive(Debug, Clone, Copy)]
struct Intervals {
    every: Duration,
    with_budget: Duration,
    look: Duration,
}

const INTERVALS: Intervals = Intervals {
    every: EVERY,
    with_budget: EVERY_WITH_BUDGET,
    look: LOOK,
};

/// Finds when the names of a tenant were used last.
type FindUses = Box<dyn Fn(&Tenant) -> Option<Uses> + Send>;

/// What a cluster knows of its names, at the moment of each question. By default nothing.
pub struct Catalog {
    /// Whether it knows them, so far as it can. Nothing is collected before that is so once.
    pub is_known: Box<dyn Fn() -> bool + Send>,
    /// What was cleared.
    pub fences: Box<dyn Fn() -> Fences + Send>,
    /// When the names of a tenant were used last. `None`: not known now, and no budget is kept.
    pub uses: FindUses,
}

impl Default for Catalog {
    fn default() -> Self {
        Self {
            is_known: Box::new(|| true),
            fences: Box::new(Fences::default),
            uses: Box::new(|_| Some(Uses::default())),
        }
    }
}

/// Collects until it is dropped. A request that hangs then is left to the end of the process.
#[derive(Debug)]
pub struct Periodic {
    store: Store,
    figures: Arc<Figures>,
    budgets: Budgets,
    /// When the thread was started, in seconds since 1970.
    started: u64,
}

/// The budgets of the tenants. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Budgets(Arc<Shared>);

/// What the thread shares with others.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    budgets: BTreeMap<Tenant, Budget>,
    /// They changed since the last look.
    is_news: bool,
    is_stopped: bool,
    tried: BTreeMap<Tenant, Tried>,
}

/// The last try to keep a tenant within its budget.
#[derive(Debug)]
struct Tried {
    at: Instant,
    /// The budget; `None`: it failed.
    within: Option<Budget>,
    /// What the last one that worked has left.
    kept: Option<TierUse>,
}

impl Budgets {
    /// Sets the budgets of all tenants that have one.
    pub fn set(&self, budgets: BTreeMap<Tenant, Budget>) {
        let mut state = self.0.state.lock();
        if state.budgets != budgets {
            state.tried.retain(|tenant, _| budgets.contains_key(tenant));
            state.budgets = budgets;
            state.is_news = true;
            self.0.changed.notify_all();
        }
    }

    /// What was last left of a tenant with a budget; `None`: not known yet.
    #[must_use]
    pub fn kept(&self, tenant: &Tenant) -> Option<TierUse> {
        self.0.state.lock().tried.get(tenant)?.kept
    }

    fn get(&self, tenant: &Tenant) -> Option<Budget> {
        self.0.state.lock().budgets.get(tenant).copied()
    }

    /// Whether a tenant is to be collected because of its budget.
    fn is_due(&self, tenant: &Tenant, intervals: &Intervals) -> bool {
        let state = self.0.state.lock();
        state.budgets.get(tenant).is_some_and(|budget| {
            state.tried.get(tenant).is_none_or(|tried| {
                let pause = if tried.within == Some(*budget) {
                    intervals.with_budget
                } else {
                    intervals.look
                };
                tried.at.elapsed() >= pause
            })
        })
    }

    /// Notes a try. `kept`: what it left, if it worked.
    fn tried(&self, tenant: &Tenant, budget: Budget, kept: Option<TierUse>) {
        let mut state = self.0.state.lock();
        if state.budgets.contains_key(tenant) {
            let before = state.tried.get(tenant).and_then(|tried| tried.kept);
            let tried = Tried {
                at: Instant::now(),
                within: kept.is_some().then_some(budget),
                kept: kept.or(before),
            };
            state.tried.insert(tenant.clone(), tried);
        }
    }

    /// The tenants with a budget.
    fn tenants(&self) -> Vec<Tenant> {
        self.0.state.lock().budgets.keys().cloned().collect()
    }

    fn is_stopped(&self) -> bool {
        self.0.state.lock().is_stopped
    }

    /// Waits for so long, or until a budget changes. `false`: the end.
    fn wait(&self, look: Duration) -> bool {
        let mut state = self.0.state.lock();
        let until = Instant::now() + look;
        while !state.is_stopped && !state.is_news {
            if self.0.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.is_news = false;
        !state.is_stopped
    }
}

impl Drop for Periodic {
    fn drop(&mut self) {
        let shared = &self.budgets.0;
        shared.state.lock().is_stopped = true;
        shared.changed.notify_all();
    }
}

/// Counts since the start.
#[derive(Debug, Default)]
struct Figures {
    collections: AtomicU64,
    failures: AtomicU64,
    evicted: AtomicU64,
    deleted: AtomicU64,
    deleted_bytes: AtomicU64,
    /// Seconds since 1970; 0: none yet.
    succeeded: AtomicU64,
}

impl Periodic {
    /// Starts the thread that collects. Names expire whose content a fence has cleared.
    pub fn start(store: Store, catalog: Catalog) -> io::Result<Self> {
        Self::every(store, INTERVALS, catalog)
    }

    fn every(store: Store, intervals: Intervals, catalog: Catalog) -> io::Result<Self> {
        let (figures, budgets) = (Arc::<Figures>::default(), Budgets::default());
        let started = now().0 / 1000;
        let job = Job {
            store: store.clone(),
            intervals,
            catalog,
            budgets: budgets.clone(),
            figures: Arc::clone(&figures),
        };
        let thread = std::thread::Builder::new().name("shared-collect".to_owned());
        thread.spawn(move || job.run())?;
        Ok(Self {
            store,
            figures,
            budgets,
            started,
        })
    }

    /// The tier that is collected.
    #[must_use]
    pub fn store(&self) -> Store {
        self.store.clone()
    }

    /// The budgets of the tenants. Until they are set there are none.
    #[must_use]
    pub fn budgets(&self) -> Budgets {
        self.budgets.clone()
    }

    /// Adds its metrics.
    pub fn register(&self, registry: &mut Registry) {
        let value = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let figures = &self.figures;
        for (name, help, figure) in [
            (
                "collector_collections",
                "Namespaces of the shared tier whose garbage was collected",
                &figures.collections,
            ),
            (
                "collector_failures",
                "Rounds over all namespaces of the shared tier that failed, and are tried again",
                &figures.failures,
            ),
            (
                "collector_evicted",
                "Names of the shared tier that a budget evicted",
                &figures.evicted,
            ),
            (
                "collector_deleted",
                "Manifests and layers that were deleted from the shared tier",
                &figures.deleted,
            ),
            (
                "collector_deleted_bytes",
                "Their bytes",
                &figures.deleted_bytes,
            ),
        ] {
            registry.register(name, help, ConstCounter::new(value(figure)));
        }
        let succeeded = Gauge::<i64>::default();
        let last = value(&figures.succeeded).max(self.started);
        succeeded.set(i64::try_from(last).unwrap_or(i64::MAX));
        let help = "When the garbage of all namespaces was last found collected, or this process \
                    started, Unix time";
        registry.register("collector_last_success_seconds", help, succeeded);
    }
}

struct Job {
    store: Store,
    intervals: Intervals,
    catalog: Catalog,
    budgets: Budgets,
    figures: Arc<Figures>,
}

impl Job {
    fn run(&self) {
        // A collection without fences and uses would not be repeated for hours.
        let (began, mut is_said) = (Instant::now(), false);
        while !(self.catalog.is_known)() {
            if !self.budgets.wait(SOON) {
                return;
            }
            if !is_said && began.elapsed() >= LOOK {
                is_said = true;
                tracing::warn!(tier = %self.store,
                    "no garbage of the shared tier is collected, and no budget of it kept, before \
                     the Fence objects are read and the nodes have reported: see earlier errors");
            }
        }
        loop {
            match self.round() {
                Ok(true) => {
                    let seconds = now().0 / 1000;
                    self.figures.succeeded.store(seconds, Ordering::Relaxed);
                }
                Ok(false) => {}
                Err(Error::Stopped) => return,
                Err(error) => {
                    add(&self.figures.failures, 1);
                    tracing::warn!(tier = %self.store, %error,
                        "the garbage of the shared tier could not be collected; retrying");
                }
            }
            if !self.budgets.wait(self.intervals.look) {
                return;
            }
        }
    }

    /// Collects each tenant that is due. A tenant that fails does not keep the others from it. The
    /// error is the last one. Returns whether no collection is left to do.
    fn round(&self) -> Result<bool> {
        let mut result = Ok(true);
        let tenants = self.store.tenants()?;
        for tenant in self.budgets.tenants() {
            if let (Err(_), Some(budget)) =
                (tenants.binary_search(&tenant), self.budgets.get(&tenant))
            {
                let nothing = budget.kept([]);
                self.budgets.tried(&tenant, budget, Some(nothing));
            }
        }
        for tenant in tenants {
            if self.budgets.is_stopped() {
                return Err(Error::Stopped);
            }
            match self.collect(&tenant) {
                Ok(Some(done)) => {
                    add(&self.figures.collections, 1);
                    tracing::info!(
                        %tenant, names = done.names, layers = done.layers, bytes = done.bytes,
                        expired = done.expired, evicted = done.evicted, marked = done.condemned,
                        deleted = done.deleted, "collected the garbage of the shared tier"
                    );
                }
                Ok(None) => {}
                // Another collector works on it, or one has failed.
                Err(error @ Error::Leased { .. }) => {
                    tracing::info!(%tenant, %error, "the garbage cannot be collected yet");
                    result = result.map(|_| false);
                }
                Err(error @ Error::Stopped) => return Err(error),
                Err(error) => result = Err(error),
            }
        }
        result
    }

    /// `None`: it is not due.
    fn collect(&self, tenant: &Tenant) -> Result<Option<Collected>> {
        let now = now();
        let is_due = self.budgets.is_due(tenant, &self.intervals);
        if !is_due && self.was_collected(tenant, now)? {
            return Ok(None);
        }
        // Names in use would look unused without the uses. Then only garbage goes, if that is due.
        let uses_of = |budget| Some((budget, (self.catalog.uses)(tenant)?));
        let (budget, uses) = self.budgets.get(tenant).and_then(uses_of).unzip();
        if is_due && budget.is_none() && self.was_collected(tenant, now)? {
            return Ok(None);
        }
        let id = fresh_id();
        let stop = || self.budgets.is_stopped();
        let collector = Collector {
            budget,
            fences: (self.catalog.fences)(),
            uses: uses.unwrap_or_default(),
            ..Collector::new(&self.store, tenant, id)
        };
        let done = collector.run(now, &stop);
        if let Some(budget) = budget {
            let kept = done.as_ref().ok().and_then(|done| done.kept);
            self.budgets.tried(tenant, budget, kept);
        }
        let done = done?;
        add(&self.figures.evicted, done.evicted);
        add(&self.figures.deleted, done.deleted);
        add(&self.figures.deleted_bytes, done.deleted_bytes);
        Ok(Some(done))
    }

    /// Whether a collection of the tenant was completed lately, by any process.
    fn was_collected(&self, tenant: &Tenant, now: Timestamp) -> Result<bool> {
        let complete = lease::complete_since(&self.store, &Keys::new(tenant), now)?;
        Ok(complete.is_some_and(|since| since < self.intervals.every))
    }
}

fn add(figure: &AtomicU64, more: u64) {
    figure.fetch_add(more, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::sync::atomic::AtomicBool;
    use std::time::SystemTime;

    use tempfile::TempDir;
    use tokio::runtime::Runtime;

    use super::*;
    use crate::model::{ArtifactId, Coverage, Fence, Sha256};
    use crate::shared::{
        Commit, LayerRef, NameState, ObjectId, Publication, Times, Url, list, look,
    };
    use crate::telemetry::metrics;

    const TICKS: Intervals = Intervals {
        look: Duration::from_millis(10),
        ..INTERVALS
    };

    fn value(figure: &AtomicU64) -> u64 {
        figure.load(Ordering::Relaxed)
    }

    /// Waits until `is_true`, since the thread sends no event.
    fn eventually(what: &str, is_true: impl Fn() -> bool) {
        let began = std::time::Instant::now();
        while !is_true() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The directory must live as long as the store, and the runtime runs its requests.
    fn empty_tier() -> (TempDir, Runtime, Store) {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let runtime = Runtime::new().expect("a runtime");
        let url = format!("file://{}", directory.path().display());
        let url: Url = url.parse().expect("a URL");
        let store = url.open(runtime.handle().clone(), Times::default());
        (directory, runtime, store.expect("the directory is there"))
    }

    /// Commits names that each show 100 bytes of their own, two hours ago.
    fn commit(store: &Store, directory: &Path, tenant: &Tenant, names: &[&str]) {
        for name in names {
            let id = fresh_id();
            let layer = LayerRef {
                digest: Sha256([1; 32]),
                upload: id,
                bytes: 100,
                tail: 1,
                content: 100,
                table: 1,
            };
            let commit = Commit {
                reference: name.parse().expect("a reference"),
                artifact: ArtifactId::from_bits(1),
                layers: vec![layer],
                made: now(),
                made_by: None,
                writer: crate::shared::decide::Writer::default(),
                ttl_seconds: None,
                fence: 0,
            };
            let publication = Publication::begin(store, tenant, id).expect("begin");
            publication.commit(commit, now()).expect("commit");
        }
        let names = directory.join(format!("v1/{tenant}/names/task-cache"));
        for entry in std::fs::read_dir(names).expect("list") {
            set_age(&entry.expect("entry").path(), Duration::from_hours(2));
        }
    }

    /// Sets when a file was written.
    fn set_age(path: &Path, age: Duration) {
        let file = File::options().append(true).open(path);
        let set = file.and_then(|file| file.set_modified(SystemTime::now() - age));
        set.expect("utimes");
    }

    #[test]
    fn a_tenant_with_a_budget_is_kept_within_it_soon_after_each_change() {
        let (directory, _runtime, store) = empty_tier();
        let tenants = ["ci", "other", "none"].map(|it| it.parse::<Tenant>().expect("a label"));
        for tenant in &tenants[..2] {
            let names = ["task-cache/a", "task-cache/b", "task-cache/c"];
            commit(&store, directory.path(), tenant, &names);
        }
        let collector =
            Periodic::every(store.clone(), TICKS, Catalog::default()).expect("a thread");
        let figures = &collector.figures;
        eventually("both", || value(&figures.collections) == 2);
        assert_eq!(value(&figures.evicted), 0, "there is no budget yet");
        let budgets = collector.budgets();
        let set = |bytes| {
            let budget = Budget {
                bytes: Some(bytes),
                artifacts: None,
            };
            let of = [&tenants[0], &tenants[2]];
            budgets.set(of.map(|tenant| (tenant.clone(), budget)).into());
        };
        let has = |tenant: &Tenant, left| budgets.kept(tenant).map(|kept| kept.bytes) == Some(left);
        set(250);
        eventually("one went", || has(&tenants[0], 200));
        eventually("nothing is there", || has(&tenants[2], 0));
        assert_eq!(budgets.kept(&tenants[1]), None);
        assert_eq!(value(&figures.evicted), 1);
        // It counts for hours. A change counts at once.
        let collections = value(&figures.collections);
        set(150);
        eventually("two went", || has(&tenants[0], 100));
        assert_eq!(value(&figures.evicted), 2);
        assert_eq!(value(&figures.collections), collections + 1);
        let shown = |tenant: &Tenant| {
            let (names, _) = list(&store, tenant).expect("list");
            let shown = names.iter().filter(|name| name.record.content().is_some());
            shown.count()
        };
        assert_eq!((shown(&tenants[0]), shown(&tenants[1])), (1, 3));
        // A collection that fails leaves what was known, and is tried again.
        let format = directory.path().join("v1/ci/format");
        std::fs::write(&format, "{\"format\":2}").expect("write");
        set(50);
        let failures = value(&figures.failures);
        eventually("it fails", || value(&figures.failures) > failures + 1);
        assert!(has(&tenants[0], 100));
        std::fs::write(&format, "{\"format\":1}").expect("write");
        eventually("all went", || has(&tenants[0], 0));
        budgets.set(BTreeMap::new());
        assert_eq!(budgets.kept(&tenants[0]), None);
    }

    #[test]
    fn no_budget_is_kept_while_the_uses_are_not_known() {
        let (directory, _runtime, store) = empty_tier();
        let ci: Tenant = "ci".parse().expect("a label");
        commit(
            &store,
            directory.path(),
            &ci,
            &["task-cache/a", "task-cache/b"],
        );
        let known = Arc::new(AtomicBool::new(false));
        let is_known = Arc::clone(&known);
        let (asked, asks) = std::sync::mpsc::channel();
        let catalog = Catalog {
            uses: Box::new(move |_| {
                // The test may have ended.
                let _gone = asked.send(());
                is_known.load(Ordering::Relaxed).then(Uses::default)
            }),
            ..Catalog::default()
        };
        let collector = Periodic::every(store, TICKS, catalog).expect("a thread");
        let (figures, budgets) = (&collector.figures, collector.budgets());
        eventually("garbage goes", || value(&figures.collections) == 1);
        let budget = Budget {
            bytes: None,
            artifacts: Some(1),
        };
        budgets.set([(ci.clone(), budget)].into());
        for _ in 0..3 {
            let asked = asks.recv_timeout(Duration::from_secs(60));
            asked.expect("it asks");
        }
        let counts = || (value(&figures.collections), value(&figures.evicted));
        assert_eq!((counts(), budgets.kept(&ci)), ((1, 0), None));
        known.store(true, Ordering::Relaxed);
        eventually("it is kept", || counts() == (2, 1));
        assert_eq!(budgets.kept(&ci).map(|kept| kept.artifacts), Some(1));
    }

    #[test]
    fn nothing_is_collected_before_the_names_are_known() {
        let (directory, _runtime, store) = empty_tier();
        let ci: Tenant = "ci".parse().expect("a label");
        commit(&store, directory.path(), &ci, &["task-cache/a"]);
        let mut fences = Fences::default();
        fences.insert(Fence {
            number: 5,
            previous: 0,
            id: 1,
            covers: Coverage::Namespace(ci.clone()),
            repeats: Vec::new(),
        });
        let known = Arc::new(AtomicBool::new(false));
        let is_known = Arc::clone(&known);
        let (asked, asks) = std::sync::mpsc::channel();
        let catalog = Catalog {
            is_known: Box::new(move || {
                // The test may have ended.
                let _gone = asked.send(());
                is_known.load(Ordering::Relaxed)
            }),
            fences: Box::new(move || fences.clone()),
            ..Catalog::default()
        };
        let collector = Periodic::every(store.clone(), TICKS, catalog).expect("a thread");
        asks.recv().expect("it asks");
        asks.recv().expect("it asks again");
        assert_eq!(value(&collector.figures.collections), 0);
        known.store(true, Ordering::Relaxed);
        let collections = || value(&collector.figures.collections);
        eventually("it is collected", || collections() == 1);
        let name = "task-cache/a".parse().expect("a reference");
        let record = look(&store, &ci, &name).expect("look").expect("a record");
        assert_eq!(record.state, NameState::Cleared);
    }

    #[test]
    fn a_collection_that_failed_is_repeated_when_its_lease_is_over() {
        let (directory, _runtime, store) = empty_tier();
        let ci: Tenant = "ci".parse().expect("a label");
        commit(&store, directory.path(), &ci, &["task-cache/a"]);
        let part = directory.path().join("v1/ci");
        let newer = part.join("names/task-cache/newer");
        std::fs::write(&newer, "{\"format\":2}").expect("write");
        let collector = Periodic::every(store, TICKS, Catalog::default()).expect("a thread");
        let figures = &collector.figures;
        eventually("it fails", || value(&figures.failures) == 1);
        std::fs::remove_file(&newer).expect("unlink");
        assert_eq!(value(&figures.succeeded), 0);
        // As if it had failed three hours ago: it had the lease for two.
        set_age(&part.join("gc"), Duration::from_hours(3));
        eventually("it is repeated", || value(&figures.collections) == 1);
        eventually("all are collected", || value(&figures.succeeded) > 0);
        assert_eq!(value(&figures.failures), 1);
    }

    #[test]
    fn each_tenant_is_collected_once_in_the_interval_by_any_process() {
        let (directory, _runtime, store) = empty_tier();
        for tenant in ["one", "two"] {
            let (tenant, name) = (
                tenant.parse().expect("a label"),
                "task-cache/x".parse().expect("a reference"),
            );
            let id = ObjectId::from_bits(1);
            crate::shared::clear(&store, &tenant, &name, 0, id, now()).expect("a record");
            assert!(look(&store, &tenant, &name).expect("look").is_some());
        }
        let two: Tenant = "two".parse().expect("a label");
        Collector::new(&store, &two, ObjectId::from_bits(2))
            .run(now(), &|| false)
            .expect("collected by another");
        let collector =
            Periodic::every(store.clone(), TICKS, Catalog::default()).expect("a thread");
        let figures = &collector.figures;
        eventually("a round", || value(&figures.succeeded) > 0);
        assert_eq!(value(&figures.collections), 1, "the other is not due");
        drop(collector);
        // With a short interval both are due again and again.
        let often = Intervals {
            every: Duration::ZERO,
            ..TICKS
        };
        let collector = Periodic::every(store, often, Catalog::default()).expect("a thread");
        let figures = Arc::clone(&collector.figures);
        eventually("both twice", || value(&figures.collections) >= 4);
        assert_eq!(value(&figures.failures), 0);
        let mut registry = metrics::registry();
        collector.register(&mut registry);
        metrics::assert_documented(&registry, "collector_");
        drop(collector);
        eventually("the thread ends", || Arc::strong_count(&figures) == 1);
        drop(directory);
    }
}
