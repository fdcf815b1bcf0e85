//! The engine as a part of a cluster: the names that have content here and their changes, names
//! that other nodes took over, what namespaces use, and the cluster's time. `hub` brings them to
//! the controller. And content that moves between this node, other nodes and the shared tier, for
//! `distribution`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::artifacts::Sealed;
use super::budgets;
use super::fences;
use super::policies;
use super::remove;
use super::shared::Inner;
use super::state::State;
use super::threads::Pool;
use super::transfer::{self, LayerPlace, ReceiveError, ReceiveRequest, Received};
use super::{Engine, Result};
use crate::archive::toc::Table;
use crate::model::{
    Artifact, ArtifactId, CutOff, Fence, Fences, LayerId, Maker, Name, NamespaceUsage, Policies,
    Reference, Tenant, Timestamp, VolumeId,
};

/// What other nodes may know of a name on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameState {
    /// Durable content that they may get.
    Durable(NamedContent),
    /// There is none, but a volume is published whose content may become it.
    Coming {
        /// The highest fence that this node had applied when that volume was published.
        fence: u64,
    },
}

/// The durable content of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedContent {
    /// Its content.
    pub artifact: ArtifactId,
    /// When it was committed.
    pub created: Timestamp,
    /// Its size in bytes; 0: it is not measured yet.
    pub bytes: u64,
    /// Its layers.
    pub layers: usize,
    /// The highest fence that its maker's node had applied when the volume was published.
    pub fence: u64,
    /// When it was last used here. [`NameWatch`] tells a new time at most every 10 minutes, and of
    /// task caches only.
    pub used: Timestamp,
    /// Its origin, of task caches only.
    pub made_by: Option<Box<Maker>>,
}

/// The names of an engine, as they change. One watch at a time sees the changes: the last one.
#[derive(Debug)]
pub struct NameWatch {
    inner: Arc<Inner>,
    signal: Arc<Notify>,
}

impl NameWatch {
    /// All names that have durable content or are about to get some. Those that change meanwhile
    /// are in the next [`NameWatch::take`], too.
    #[must_use]
    pub fn all(&self) -> Vec<(Name, NameState)> {
        let mut all = Vec::new();
        self.inner.look_at_artifacts(|state, sealed| {
            let artifact = &sealed.artifact;
            if sealed.durable && state.catalog.is_named(artifact) {
                all.extend(offered(state, sealed).map(|told| (artifact.name(), told)));
            }
        });
        let state = self.inner.state.lock();
        let coming = coming(&state).into_iter();
        let coming = coming.filter(|(name, _)| state.catalog.owner(name).is_none());
        all.extend(coming.map(|(name, fence)| (name, NameState::Coming { fence })));
        all
    }

    /// Waits until a name may have changed since the last [`NameWatch::take`].
    pub async fn changed(&self) {
        self.signal.notified().await;
    }

    /// The names that may have changed, each with its state; `None`: it has none that other nodes
    /// may know. Content that is not durable yet is not told; it comes later.
    #[must_use]
    pub fn take(&self) -> Vec<(Name, Option<NameState>)> {
        let mut state = self.inner.state.lock();
        let mut names = state.catalog.changes().take();
        names.extend(state.volumes.changes().take());
        let coming = coming(&state);
        let told = names.into_iter().filter_map(|name| {
            let now = match state.catalog.owner(&name) {
                Some(sealed) if !sealed.durable => return None,
                Some(sealed) => offered(&state, sealed),
                None => {
                    let fence = coming.get(&name).copied();
                    fence.map(|fence| NameState::Coming { fence })
                }
            };
            Some((name, now))
        });
        told.collect()
    }
}

impl Drop for NameWatch {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.catalog.changes().end(&self.signal);
        state.volumes.changes().end(&self.signal);
    }
}

/// The names of content that volumes may become and that other nodes may get, each with the highest
/// fence of such a volume. Volumes that a fence clears are not committed.
fn coming(state: &State) -> HashMap<Name, u64> {
    let mut coming = HashMap::new();
    for (name, fence) in state.volumes.names_coming(&state.policies) {
        if fence >= state.fences.least(&name) {
            let highest = coming.entry(name).or_default();
            *highest = fence.max(*highest);
        }
    }
    coming
}

/// What other nodes may know of an artifact; `None`: it stays on this node.
fn offered(state: &State, sealed: &Sealed) -> Option<NameState> {
    let artifact = &sealed.artifact;
    let usage = state.catalog.usage_of(&artifact.layers);
    let content = NamedContent {
        artifact: artifact.id,
        created: artifact.created,
        bytes: usage.unwrap_or_default().bytes,
        layers: artifact.layers.len(),
        fence: artifact.fence,
        used: artifact.last_used,
        made_by: if let Reference::TaskCache(_) = artifact.reference {
            artifact.made_by.clone()
        } else {
            None
        },
    };
    artifact
        .sharing
        .may_leave()
        .then_some(NameState::Durable(content))
}

impl Engine {
    /// An upload waits for the tables of contents of these layers: they are made also while the
    /// pool is above its high watermark, as long as it has some space.
    pub fn wait_for_tables(&self, layers: &[LayerId]) {
        for layer in layers {
            self.inner.collector.tables.wait_for(*layer);
        }
    }

    /// Whether an artifact can be given to other nodes. `false`: a layer of it exceeds a limit of
    /// tables of contents, or the artifact is gone.
    #[must_use]
    pub fn can_leave(&self, id: ArtifactId) -> bool {
        let tables = &self.inner.collector.tables;
        let state = self.inner.state.lock();
        let sealed = state.catalog.get(&id);
        sealed.is_some_and(|sealed| {
            let mut layers = sealed.artifact.layers.iter();
            !layers.any(|layer| tables.is_refused(layer))
        })
    }

    /// Watches the names that have content. An earlier watch sees no more changes.
    #[must_use]
    pub fn watch_names(&self) -> NameWatch {
        let inner = Arc::clone(&self.inner);
        let signal: Arc<Notify> = Arc::default();
        let mut state = inner.state.lock();
        state.catalog.changes().watch(Arc::clone(&signal));
        state.volumes.changes().watch(Arc::clone(&signal));
        drop(state);
        NameWatch { inner, signal }
    }

    /// Takes a name from content that another node's content replaces: `is_older` tells that of its
    /// time and id. Volumes that are forks of it keep it. `false`: there is no such content.
    pub async fn supersede(
        &self,
        name: &Name,
        is_older: impl Fn(Timestamp, ArtifactId) -> bool + Copy + Send + 'static,
    ) -> Result<bool> {
        // Content that is never shared is this node's own.
        let fits = move |artifact: &Artifact| {
            !artifact.sharing.never && is_older(artifact.created, artifact.id)
        };
        remove::discard(&self.inner, name, fits).await
    }

    /// The fences that this node has applied, and has not forgotten.
    #[must_use]
    pub fn fences(&self) -> Fences {
        self.inner.state.lock().fences.clone()
    }

    /// The highest fence of this node that covers a name. Content with a lower number is not used.
    #[must_use]
    pub fn covering(&self, name: &Name) -> u64 {
        self.inner.state.lock().fences.covering(name)
    }

    /// Applies fences, in their order: all that they clear loses its name, and they are kept, in
    /// one transaction. `false`: at one of them the stream has to begin again
    /// ([`FenceStep::Rejoin`](crate::model::FenceStep::Rejoin)); those before it are applied.
    pub async fn apply_fences(&self, fences: Vec<Fence>) -> Result<bool> {
        fences::apply(&self.inner, fences).await
    }

    /// Forgets the fences up to this number, which all nodes have applied.
    pub async fn forget_fences(&self, up_to: u64) -> Result<()> {
        fences::forget(&self.inner, up_to).await
    }

    /// The cache policies of the cluster, as this node knows them.
    #[must_use]
    pub fn policies(&self) -> Arc<Policies> {
        Arc::clone(&self.inner.state.lock().policies)
    }

    /// Changes the cache policies. They count at once, also for volumes that are published, and
    /// after a restart. They count when this returns, and are on the disk when the future ends.
    pub fn change_policies(&self, change: impl FnOnce(&mut Policies)) -> BoxFuture<'static, ()> {
        policies::set(&self.inner, change);
        Box::pin(policies::keep(Arc::clone(&self.inner)))
    }

    /// What each namespace uses here: one pass over all artifacts.
    pub async fn namespaces(&self) -> Result<BTreeMap<Tenant, NamespaceUsage>> {
        let job = |inner: &Arc<Inner>| Ok(budgets::usage(inner));
        self.inner.run(Pool::Calls, job).await
    }

    /// Evicts content of a namespace that no volume uses, soon: what was last used, or sealed,
    /// before these points in time. Nothing else remembers the order.
    pub fn cut_off(&self, tenant: Tenant, cut: CutOff) {
        self.inner.collector.cut_off(tenant, cut);
        self.inner.wake_reaper();
    }

    /// The cluster's time is this. Content that is committed from now on is dated by it, and
    /// expires by it.
    pub fn set_time(&self, time: Timestamp) {
        self.inner.set_time(time);
    }

    /// This machine's clock and the controller's are far apart, so one of them is wrong. Nothing
    /// expires by this machine's.
    pub fn doubt_time(&self) {
        self.inner.doubt_time();
    }

    /// The cluster's time, as far as this node knows it.
    #[must_use]
    pub fn time(&self) -> Timestamp {
        self.inner.time()
    }

    /// The time by which content is dated. It is given once.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.inner.now()
    }

    /// Whether this volume exists: a publish of it waits for no content.
    #[must_use]
    pub fn has_volume(&self, id: &VolumeId) -> bool {
        self.inner.state.lock().volumes.live(id).is_some()
    }

    /// Receives an artifact of another node. `make` makes one layer at the place that it is given,
    /// and returns its table. It is called for each layer that this node lacks, oldest first, with
    /// the layer's place in the request. The artifact appears whole, or not at all. This returns
    /// when it is durable; [`Engine::shows`] does not wait for that. `may_enter` is asked under the
    /// lock under which it appears, so it must not block or call the engine. Blocks. Two calls for
    /// one artifact at once are not allowed.
    pub fn receive<E>(
        &self,
        request: &ReceiveRequest,
        progress: &AtomicU64,
        make: impl FnMut(usize, &LayerPlace<'_>) -> std::result::Result<Arc<Table>, E>,
        may_enter: impl Fn() -> Result<()>,
    ) -> std::result::Result<Received, ReceiveError<E>> {
        self.inner.refuse_degraded()?;
        let received = transfer::receive(&self.inner, request, progress, make, may_enter);
        transfer::finish(&self.inner, received)
    }
}
