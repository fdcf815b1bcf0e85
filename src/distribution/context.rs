//! The state that all parts of the distribution share: engine, store, settings, counters, the end.
//! State that one module alone uses belongs to that module.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::decide::Decision;
use super::flight::Flights;
use super::health::Health;
use super::peers::Peers;
use super::types::{Metrics, Settings};
use super::work::Workers;
use crate::engine::{self, Engine};
use crate::model::{Name, Reference, Tenant};
use crate::shared::{Bucket, NameRecord, ObjectId, Publication, Result, Store, now};
use crate::sys;

/// How many cleared names are remembered.
const REMEMBERED: usize = 4096;

/// The state that each part gets.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) engine: Engine,
    /// The shared tier, if there is one.
    pub(super) store: Option<Store>,
    /// The other nodes. They may ask this one, whether it asks them or not.
    pub(super) peers: Option<Arc<dyn Peers>>,
    pub(super) settings: Settings,
    pub(super) health: Health,
    /// The counts since the start. `Distribution::metrics` adds what is of its moment.
    pub(super) counters: Mutex<Metrics>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
    runtime: Handle,
    /// The tenants whose format this process has read.
    checked: Mutex<HashSet<Tenant>>,
    /// The tenants whose format it has written, unless it was there.
    prepared: Mutex<HashSet<Tenant>>,
    /// The names that this node cleared: a fetch that began before may end later.
    cleared: Mutex<HashMap<Name, u64>>,
}

/// The value of a counter.
pub(super) fn value(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// 64 random bits.
pub(super) fn random() -> u64 {
    u64::from_le_bytes(sys::random_bytes())
}

impl Context {
    /// Must be called in a tokio runtime.
    pub(super) fn new(
        engine: Engine,
        store: Option<Store>,
        peers: Option<Arc<dyn Peers>>,
        settings: Settings,
    ) -> Self {
        Self {
            engine,
            store,
            peers,
            settings,
            health: Health::default(),
            counters: Mutex::default(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
            checked: Mutex::default(),
            prepared: Mutex::default(),
            cleared: Mutex::default(),
        }
    }

    /// The tier, for work that begins only where there is one.
    pub(super) fn store(&self) -> &Store {
        let store = self.store.as_ref();
        store.expect("uploads, clears and questions begin only with a tier")
    }

    /// The other nodes, if content may come from them.
    pub(super) fn asked_peers(&self) -> Option<&Arc<dyn Peers>> {
        let sources = self.settings.sources;
        self.peers.as_ref().filter(|_| sources.has_peers())
    }

    /// The tier, if content may come from it.
    pub(super) fn asked_tier(&self) -> Option<Bucket> {
        let sources = self.settings.sources;
        let store = self.store.as_ref().filter(|_| sources.has_tier());
        store.cloned().map(Bucket::new)
    }

    pub(super) fn workers(&self, name: &'static str, most: usize) -> Workers {
        Workers::new(name, most, self.tasks.clone())
    }

    pub(super) fn flights<K, V>(&self) -> Flights<K, V>
    where
        K: Eq + std::hash::Hash + Clone + Send + 'static,
        V: Clone + Send + Sync + 'static,
    {
        Flights::new(self.tasks.clone(), self.runtime.clone())
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Waits. `false`: everything stops.
    pub(super) async fn pause(&self, pause: Duration) -> bool {
        let stopped = tokio::time::timeout(pause, self.stop.cancelled());
        stopped.await.is_err()
    }

    /// The same on a thread that may block.
    pub(super) fn sleep(&self, pause: Duration) -> bool {
        self.block_on(self.pause(pause))
    }

    /// Waits for a future on a thread that may block.
    pub(super) fn block_on<T>(&self, wait: impl Future<Output = T>) -> T {
        self.runtime.block_on(wait)
    }

    /// How many artifacts wait for their upload. Walks over all artifacts.
    pub(super) fn waiting(&self) -> u64 {
        let mut waiting = 0;
        self.engine.each_to_share(|_, _| waiting += 1);
        waiting
    }

    /// Notes that this node cleared a name, with this number.
    pub(super) fn note_clear(&self, name: Name, number: u64) {
        let mut cleared = self.cleared.lock();
        if cleared.len() >= REMEMBERED {
            cleared.clear();
        }
        cleared.insert(name, number);
    }

    /// The number with which this node last cleared a name.
    pub(super) fn cleared(&self, name: &Name) -> Option<u64> {
        self.cleared.lock().get(name).copied()
    }

    /// Takes a name from content that the tier cleared.
    pub(super) async fn discard(&self, name: &Name, decision: Decision) -> engine::Result<()> {
        if let Some(cleared) = decision.discard {
            tracing::info!(
                tenant = %name.tenant, reference = %name.reference, cleared,
                "the name was cleared in the shared tier; this node's content loses the name"
            );
            self.engine.discard_cleared(name, cleared).await?;
        }
        Ok(())
    }

    /// Reads the version of a tenant's layout, once in the life of this process. Blocks.
    pub(super) fn check_format(&self, tenant: &Tenant) -> Result<()> {
        if self.checked.lock().contains(tenant) {
            return Ok(());
        }
        Bucket::new(self.store().clone()).check_format(tenant)?;
        self.checked.lock().insert(tenant.clone());
        Ok(())
    }

    /// Begins a publication, and looks at what its name shows. The version of the tenant's layout
    /// is read or written once, and each time that the name does not exist: the bucket may have
    /// been wiped. Blocks.
    pub(super) fn look(
        &self,
        tenant: &Tenant,
        reference: &Reference,
        id: ObjectId,
    ) -> Result<(Publication<'_>, Option<NameRecord>)> {
        let is_prepared = self.prepared.lock().contains(tenant);
        let mut publication = if is_prepared {
            Publication::resume(self.store(), tenant, id)
        } else {
            Publication::begin(self.store(), tenant, id)?
        };
        let record = publication.look(reference, now())?;
        if is_prepared && record.is_none() {
            Publication::begin(self.store(), tenant, id)?;
        }
        self.prepared.lock().insert(tenant.clone());
        Ok((publication, record))
    }
}
