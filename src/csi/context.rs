//! All services share these: the features that are on, whether the engine is available, and how
//! they find it.

use std::sync::Arc;

use tokio::sync::watch;

use super::status::Failure;
use crate::backend::BackendKind;
use crate::distribution::Distribution;
use crate::engine::Engine;
use crate::engine::claims::Claims;
use crate::model::{Node, Share};

/// The parts that are served and advertised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// Serve Controller and GroupController on this socket.
    pub controller: bool,
    /// The alpha parts of CSI 1.13: health, GetSnapshot, ControllerGetVolume, snapshots with a
    /// topology.
    pub alpha: bool,
    /// ControllerPublishVolume, for a CSIDriver object with `attachRequired: true`.
    pub attach: bool,
    /// The most attached volumes of a node; `None`: no limit.
    pub most_volumes: Option<u32>,
    /// Whether content may leave this node if its volume does not say.
    pub share: Share,
}

impl Features {
    /// A snapshot's node. Only a driver that advertises `SNAPSHOT_ACCESSIBILITY_CONSTRAINTS`
    /// returns it.
    pub(super) fn told_of_snapshots(self, node: &Node) -> Option<&Node> {
        self.alpha.then_some(node)
    }
}

impl Default for Features {
    fn default() -> Self {
        Self {
            controller: true,
            alpha: false,
            attach: false,
            most_volumes: None,
            share: Share::Auto,
        }
    }
}

/// Whether the engine is available.
#[derive(Debug, Clone)]
pub enum Readiness {
    /// The pool is being opened.
    Recovering,
    /// There is a pool, and it cannot be opened. Volumes can only be unmounted, so that pods can
    /// end.
    UnmountsOnly(UnmountsOnly),
    /// The engine runs, with the shared tier if there is one.
    Ready(Engine, Option<Arc<Distribution>>),
}

/// A driver without an engine.
#[derive(Debug, Clone)]
pub struct UnmountsOnly {
    /// The backend of the pool, if it says it. Kubelet asks for the topology when the driver
    /// registers.
    pub backend: Option<BackendKind>,
    /// Why the pool cannot be opened.
    pub why: String,
}

impl Readiness {
    /// A readiness that never changes, for an engine that runs already, without a shared tier.
    #[must_use]
    pub fn ready(engine: Engine) -> watch::Receiver<Self> {
        watch::channel(Self::Ready(engine, None)).1
    }
}

/// Finds the store of the persistent volumes, or returns why there is none now. A controller for a
/// whole cluster passes another store.
pub(super) type FindClaims = Arc<dyn Fn() -> Result<Arc<dyn Claims>, Failure> + Send + Sync>;

pub(super) fn engine(readiness: &watch::Receiver<Readiness>) -> Result<Engine, Failure> {
    serving(readiness).map(|(engine, _)| engine)
}

/// The engine and its shared tier.
pub(super) fn serving(
    readiness: &watch::Receiver<Readiness>,
) -> Result<(Engine, Option<Arc<Distribution>>), Failure> {
    match &*readiness.borrow() {
        Readiness::Recovering => Err(Failure::Recovering),
        Readiness::UnmountsOnly(pool) => Err(Failure::UnmountsOnly(pool.why.clone())),
        Readiness::Ready(engine, distribution) => Ok((engine.clone(), distribution.clone())),
    }
}
