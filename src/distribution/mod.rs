//! Moves content between this node and other places: the shared tier, and peers.
//!
//! The engine knows no bucket, and the tier knows no volume: this module knows both. `peer` knows
//! how to ask a peer, and passes its sources in.
//!
//! ```text
//! clone   ─▶ snapshot of a peer ─▶ Engine::receive_claim                 (clones)
//! publish ─▶ bring ─▶ question ─▶ decide ─▶ fetch ─▶ Engine::receive   (bring, ask, fetch, resume)
//!            └▶ search: peers and tier at once ─▶ choose ─▶ sources   (search, peers, offered)
//! commit  ─▶ Engine::to_share ─▶ layers, manifest, name ─▶ set_sharing    (upload)
//! daily   ─▶ question ─▶ set_sharing, if the tier lost it                 (check)
//! ```
//!
//! `decide` chooses the content, and what a volume waits for, without I/O.
//!
//! # Waiting
//!
//! Calls of the tier block. They run on threads of their own, of which there are few (`work`), and
//! never under a lock. Equal calls are one call (`flight`): a caller that gives up leaves the call
//! running, and the next caller joins it. No caller waits longer than its setting.
//!
//! # State
//!
//! The queue of uploads is computed from the engine's index: all artifacts that are not in the
//! tier. Nothing is stored here, and a restart loses counters only.

mod ask;
mod away;
mod bring;
mod check;
mod clones;
mod context;
mod decide;
mod decoy;
mod fetch;
mod flight;
mod health;
mod offered;
mod pace;
mod peers;
mod places;
mod queue;
mod resume;
pub mod roster;
mod search;
mod sources;
mod turns;
mod types;
mod upload;
mod waiting;
mod work;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

pub use away::Away;
pub use clones::{CloneRequest, Cloned, IsWanted};
pub use pace::Pace;
pub use peers::{Frozen, Holding, NoSnapshot, Patience, PeerAnswer, PeerFigures, Peers};
pub use places::PlacesOfEach;
pub use sources::Sources;
pub use types::{Drained, Fetched, Fetches, Metrics, Moving, Settings, Status};
pub use waiting::{Entered, Waiting, WaitingVolume};

use crate::engine::{self, Engine, PublishRequest, Tables};
use crate::model::{ArtifactId, Name, Reference, Tenant, VolumeId};
use crate::shared::{self, Store, fresh_id, now};

use ask::Asker;
use bring::Bringer;
use check::Checker;
use clones::Cloner;
use context::Context;
use fetch::Fetcher;
use health::Access;
use queue::Queue;
use work::Workers;

/// Finds the shared tier and the peers of this node: once there is an engine, and if it has some.
pub type FindDistribution = Arc<dyn Fn() -> Option<Arc<Distribution>> + Send + Sync>;

/// How long a commit without a volume waits for the number of its name. The controller waits 10
/// seconds for a rollback.
const BASE: Duration = Duration::from_secs(5);
/// How long `clear` waits for the tier.
const CLEAR: Duration = Duration::from_secs(30);
/// How long `stop` waits for threads: a network may not answer.
const STOP: Duration = Duration::from_secs(5);

/// The shared tier and the peers of one engine. Ends with [`Distribution::stop`].
#[derive(Debug)]
pub struct Distribution {
    waiting: Waiting,
    context: Arc<Context>,
    fetcher: Arc<Fetcher>,
    queue: Arc<Queue>,
    bringer: Bringer,
    cloner: Arc<Cloner>,
    clears: Workers,
    looks: Workers,
}

impl Distribution {
    /// Starts the background work. Must run in a tokio runtime, and does not wait for the tier.
    #[must_use]
    pub fn start(
        engine: Engine,
        store: Option<Store>,
        peers: Option<Arc<dyn Peers>>,
        settings: Settings,
    ) -> Arc<Self> {
        let has_tier = store.is_some();
        let context = Arc::new(Context::new(engine, store, peers, settings));
        let asker = Arc::new(Asker::new(Arc::clone(&context)));
        let fetcher = Arc::new(Fetcher::new(Arc::clone(&context), Arc::clone(&asker)));
        let queue = Arc::new(Queue::new(Arc::clone(&context)));
        if has_tier {
            context.tasks.spawn(Arc::clone(&queue).run());
            let checker =
                Checker::new(Arc::clone(&context), Arc::clone(&asker), Arc::clone(&queue));
            context.tasks.spawn(checker.run());
        }
        Arc::new(Self {
            waiting: Waiting::default(),
            bringer: Bringer::new(
                Arc::clone(&context),
                asker,
                Arc::clone(&fetcher),
                Arc::clone(&queue),
            ),
            cloner: Arc::new(Cloner::new(Arc::clone(&context))),
            clears: context.workers("shared-clear", 4),
            looks: context.workers("shared-look", 2),
            context,
            fetcher,
            queue,
        })
    }

    /// Whether there is a shared tier. Without one nothing is uploaded, cleared or counted there.
    #[must_use]
    pub fn has_tier(&self) -> bool {
        self.context.store.is_some()
    }

    /// The publishes that wait in [`Distribution::bring`].
    #[must_use]
    pub fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// Brings the content that a volume starts from to this node, if it is not here and a peer or
    /// the tier has it, and notes the number of its name. To be called before each
    /// `Engine::publish`.
    ///
    /// Fails only for an input whose content is neither here nor came in time.
    pub async fn bring(&self, request: &mut PublishRequest) -> engine::Result<()> {
        let counters = self.context.engine.counters();
        let _wait = counters.wait(request.spec.kind.type_name());
        self.bringer.bring(request).await
    }

    /// Makes a persistent volume of a snapshot of another node, or joins the call that does, and
    /// waits so long for it. It goes on after that; the next call tells how far it is.
    pub async fn clone_volume(&self, request: CloneRequest, wait: Duration) -> Cloned {
        self.cloner.make(request, wait).await
    }

    /// Ends [`Distribution::clone_volume`] for a volume. After that nothing is left of it, or the
    /// volume exists.
    pub async fn stop_clone(&self, volume: &VolumeId) {
        self.cloner.stop(volume).await;
    }

    /// The number of a name in the tier at this moment, for an artifact that is made now without a
    /// volume (`baggageclaim import` and `rollback`). Waits some seconds for it: without the number
    /// the tier would refuse the artifact if the name was ever cleared, and it would lose its name
    /// here too. `None`: there is no tier. The error says why the tier does not tell it.
    pub async fn base(
        &self,
        tenant: &Tenant,
        reference: &Reference,
    ) -> Result<Option<u64>, Arc<str>> {
        if !self.has_tier() {
            return Ok(None);
        }
        let (tenant, reference) = (tenant.clone(), reference.clone());
        self.bringer.number(&Name { tenant, reference }, BASE).await
    }

    /// Clears a name in the tier: content that exists, or that was forked, before does not come
    /// back. Returns the number of the clear. The caller removes the content on this node. There
    /// must be a tier.
    pub async fn clear(&self, tenant: &Tenant, reference: &Reference) -> shared::Result<u64> {
        let context = Arc::clone(&self.context);
        let name = Name {
            tenant: tenant.clone(),
            reference: reference.clone(),
        };
        let call = move || {
            let Name { tenant, reference } = &name;
            let fence = context.engine.covering(&name);
            let cleared =
                shared::clear(context.store(), tenant, reference, fence, fresh_id(), now());
            context.health.note(tenant, Access::Write, &cleared);
            if let Ok(number) = cleared {
                context.note_clear(name, number);
            }
            cleared
        };
        let cleared = tokio::time::timeout(CLEAR, self.clears.run(|| true, call));
        cleared.await.ok().flatten().unwrap_or_else(|| {
            Err(shared::Error::Away {
                object: format!(
                    "{reference} of namespace {tenant} in {}",
                    self.context.store()
                ),
                cause: "no answer in time".to_owned(),
            })
        })
    }

    /// Looks at this on a thread that may block. `None`: the look panicked.
    pub async fn apart<T: Send + 'static>(
        self: &Arc<Self>,
        look: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Option<T> {
        let this = Arc::clone(self);
        self.looks.run(|| true, move || look(&this)).await
    }

    /// The fetches that run.
    #[must_use]
    pub fn fetching(&self) -> Vec<Moving> {
        self.fetcher.running()
    }

    /// The content that moves or waits, and the errors. Walks over all artifacts.
    #[must_use]
    pub fn status(&self) -> Status {
        let context = &self.context;
        let waiting = context.engine.to_share();
        let rows = context.engine.artifacts(None).into_iter();
        let bytes: HashMap<ArtifactId, u64> = rows
            .filter_map(|row| Some((row.id, row.usage?.bytes)))
            .collect();
        let bytes = waiting
            .iter()
            .filter_map(|artifact| bytes.get(&artifact.id));
        let mut uploads_without_space = 0;
        context.engine.each_to_share(|_, tables| {
            uploads_without_space += u64::from(tables == Tables::NoSpace);
        });
        Status {
            url: context
                .store
                .as_ref()
                .map(Store::to_string)
                .unwrap_or_default(),
            permanent_error: context.health.permanent(),
            last_error: context.health.last(),
            uploads_waiting: waiting.len() as u64,
            bytes_waiting: bytes.sum(),
            uploads_without_space,
            uploading: self.queue.uploader.running(),
            fetching: self.fetching(),
        }
    }

    /// The counters. Walks over all artifacts.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let has_tier = self.has_tier();
        Metrics {
            uploads_waiting: if has_tier { self.context.waiting() } else { 0 },
            fetching: self.fetcher.running().len() as u64,
            permanent_error: self.context.health.is_unusable(),
            has_tier,
            peers: self.context.peers.as_ref().map(|it| it.figures()),
            ..*self.context.counters.lock()
        }
    }

    /// Uploads what waits, at most for so long. Uploads go on afterwards, until `stop`.
    pub async fn drain(&self, within: Duration) -> Drained {
        if !self.has_tier() {
            return Drained::default();
        }
        self.queue.drain(within).await
    }

    /// Ends all work at its next safe point, and waits a few seconds for it. Content that is not
    /// uploaded stays in the queue. To be called before `Engine::shutdown`.
    pub async fn stop(&self) {
        self.context.stop.cancel();
        self.context.tasks.close();
        if tokio::time::timeout(STOP, self.context.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!(
                threads = self.context.tasks.len(),
                "calls to the shared tier did not end in time; they end with the process"
            );
        }
    }
}
