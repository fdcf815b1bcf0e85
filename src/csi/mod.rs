//! The Container Storage Interface, CSI 1.13: Identity, Node, Controller and GroupController, for inline ephemeral volumes
//! and for claims.
//!
//! The only code that sees `csi.v1` messages. Each RPC is three lines: parse (where every INVALID_ARGUMENT is born),
//! call the engine, render. What a pod may ask for is `model`'s word, what becomes of it the engine's.
//!
//! The services are there before the engine is: a pool with much in it takes a moment to recover, and an orchestrator
//! that gets no answer to Probe in that moment kills the driver. So they look at a [`Readiness`] that changes.
//!
//! What is alpha in the specification, and what only some want, is behind [`Features`]; what is advertised follows them.

mod controller;
mod group;
mod health;
mod identity;
mod node;
mod parse;
mod probe;
mod render;
mod status;
mod token;
mod topology;

use std::sync::Arc;

use tokio::sync::watch;
use tracing::field::Empty;

use crate::backend::BackendKind;
use crate::engine::Engine;
use crate::engine::claims::{Claims, OneNode};
use crate::model::{Node, NodeId};
use crate::proto::csi::v1::controller_server::ControllerServer;
use crate::proto::csi::v1::group_controller_server::GroupControllerServer;
use crate::proto::csi::v1::identity_server::IdentityServer;
use crate::proto::csi::v1::node_server::NodeServer;
use crate::server::{self, Drain, Routes, Rpc, Socket, Trace};
use crate::telemetry::metrics::Rpcs;

pub use probe::{ProbeError, probe};

use status::Failure;

/// The driver's name: the key by which everything in Kubernetes finds it.
pub const DRIVER_NAME: &str = "baggageclaim.csi.concourse-ci.org";

/// How the services are set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Which node this is.
    pub node: NodeId,
    /// What is switched on.
    pub features: Features,
    /// Where calls are counted.
    pub rpcs: Rpcs,
}

/// What is served and advertised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// Controller and GroupController are served on this socket, too.
    pub controller: bool,
    /// What is alpha in CSI 1.13: health, GetSnapshot, ControllerGetVolume, snapshots with a topology.
    pub alpha: bool,
    /// ControllerPublishVolume, for a CSIDriver object that says `attachRequired: true`.
    pub attach: bool,
    /// How many claims a node may have attached; `None`: as many as the orchestrator likes.
    pub most_volumes: Option<u32>,
}

impl Features {
    /// Where a snapshot can be used: told only by who advertises `SNAPSHOT_ACCESSIBILITY_CONSTRAINTS`.
    fn told_of_snapshots(self, node: &Node) -> Option<&Node> {
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
        }
    }
}

/// Whether there is an engine to ask.
#[derive(Debug, Clone)]
pub enum Readiness {
    /// Not yet: the pool is being opened.
    Recovering,
    /// There is none, since the pool's filesystem takes no changes: volumes are unmounted, so that pods can end, and nothing else.
    UnmountsOnly(UnmountsOnly),
    /// There is. A driver whose pool cannot be opened for another reason ends, and says why.
    Ready(Engine),
}

/// A driver without an engine.
#[derive(Debug, Clone)]
pub struct UnmountsOnly {
    /// The backend that the pool was made with: kubelet asks for it when the driver is registered.
    pub backend: BackendKind,
    /// Why the pool cannot be opened.
    pub why: String,
}

impl Readiness {
    /// A readiness that never changes: the engine is there already.
    #[must_use]
    pub fn ready(engine: Engine) -> watch::Receiver<Self> {
        watch::channel(Self::Ready(engine)).1
    }
}

/// Finds the store of the persistent volumes, or says why there is none at the moment. A controller for a
/// whole cluster passes another one in; the services stay.
type FindClaims = Arc<dyn Fn() -> Result<Arc<dyn Claims>, Failure> + Send + Sync>;

/// The engine of this node holds them.
fn here(node: NodeId, readiness: watch::Receiver<Readiness>) -> FindClaims {
    Arc::new(move || {
        let engine = engine(&readiness)?;
        let node = topology::node(&node, engine.backend());
        Ok(Arc::new(OneNode::new(engine, node)))
    })
}

fn engine(readiness: &watch::Receiver<Readiness>) -> Result<Engine, Failure> {
    match &*readiness.borrow() {
        Readiness::Recovering => Err(Failure::Recovering),
        Readiness::UnmountsOnly(pool) => Err(Failure::UnmountsOnly(pool.why.clone())),
        Readiness::Ready(engine) => Ok(engine.clone()),
    }
}

/// Serves Identity and Node, and Controller and GroupController if they are switched on, on a socket until the drain
/// closes them; see [`server::serve`] for the end.
///
/// The caller binds the socket before. So clients can connect, and wait, before it is served.
pub async fn serve(
    socket: Socket,
    config: Config,
    readiness: watch::Receiver<Readiness>,
    drain: Drain,
) -> server::Result<()> {
    let features = config.features;
    let claims = here(config.node.clone(), readiness.clone());
    let identity = identity::Service::new(features, readiness.clone());
    let node = node::Service::new(config.node, features, readiness);
    let mut routes = Routes::new()
        .with(IdentityServer::new(identity))
        .with(NodeServer::new(node));
    if features.controller {
        let group = group::Service::new(features, claims.clone());
        let controller = controller::Service::new(features, claims);
        routes = routes
            .with(ControllerServer::new(controller))
            .with(GroupControllerServer::new(group));
    }
    server::serve(
        socket,
        routes,
        Trace::new(new_span, &POLLED).counting(config.rpcs, &METHODS),
        drain,
    )
    .await
}

/// Every method of CSI: the words that a count of calls may be labelled with.
pub const METHODS: [&str; 34] = [
    "ControllerExpandVolume",
    "ControllerGetCapabilities",
    "ControllerGetVolume",
    "ControllerGetVolumeHealth",
    "ControllerListVolumeHealth",
    "ControllerModifyVolume",
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "CreateSnapshot",
    "CreateVolume",
    "CreateVolumeGroupSnapshot",
    "DeleteSnapshot",
    "DeleteVolume",
    "DeleteVolumeGroupSnapshot",
    "GetCapacity",
    "GetPluginCapabilities",
    "GetPluginInfo",
    "GetSnapshot",
    "GetVolumeGroupSnapshot",
    "GroupControllerGetCapabilities",
    "ListSnapshots",
    "ListVolumes",
    "NodeExpandVolume",
    "NodeGetCapabilities",
    "NodeGetInfo",
    "NodeGetStorageHealth",
    "NodeGetVolumeHealth",
    "NodeGetVolumeStats",
    "NodePublishVolume",
    "NodeStageVolume",
    "NodeUnpublishVolume",
    "NodeUnstageVolume",
    "Probe",
    "ValidateVolumeCapabilities",
];

/// Methods that change nothing and that programs poll: kubelet for each mount and each minute, sidecars at
/// intervals, probes. Their successes have no log line at the default level; all other calls have one.
const POLLED: [&str; 10] = [
    "ControllerGetVolume",
    "ControllerGetVolumeHealth",
    "ControllerListVolumeHealth",
    "GetCapacity",
    "ListVolumes",
    "NodeGetCapabilities",
    "NodeGetStorageHealth",
    "NodeGetVolumeHealth",
    "NodeGetVolumeStats",
    "Probe",
];

fn new_span(method: &str) -> tracing::Span {
    tracing::error_span!(
        "rpc",
        csi.method = method,
        volume.id = Empty,
        volume.name = Empty,
        snapshot.id = Empty,
        snapshot.name = Empty,
        group.id = Empty,
        group.name = Empty,
        volume.r#type = Empty,
        volume.from = Empty,
        volume.layers = Empty,
        volume.already = Empty,
        volume.waited = Empty,
        volume.limit_unenforced = Empty,
        tenant = Empty,
        pod = Empty,
    )
}

fn note_volume(rpc: Option<&Rpc>, id: &str) {
    if let Some(rpc) = rpc
        && !id.is_empty()
    {
        rpc.volume(id);
    }
}

fn note(rpc: Option<&Rpc>, field: &str, value: &str) {
    if let Some(rpc) = rpc
        && !value.is_empty()
    {
        rpc.record(field, value);
    }
}

/// Lower-case hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        for digit in [byte >> 4, byte & 0xf] {
            text.extend(char::from_digit(digit.into(), 16));
        }
        text
    })
}
