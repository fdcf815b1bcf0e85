//! The Container Storage Interface, CSI 1.13: Identity, Node, Controller and GroupController, for
//! inline ephemeral volumes and persistent volumes.
//!
//! Only this module sees `csi.v1` messages. Each RPC parses (all INVALID_ARGUMENT come from here),
//! calls the engine, and renders. `model` defines the attributes of volumes; the engine implements
//! them.
//!
//! The services run before the engine does. A large pool takes a moment to recover, and an
//! orchestrator kills a driver that does not answer Probe. So each RPC looks at a [`Readiness`]
//! first.
//!
//! [`Features`] switches alpha and optional parts on. The advertised capabilities follow it.

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
use crate::distribution::Distribution;
use crate::engine::Engine;
use crate::engine::claims::{Claims, OneNode};
use crate::model::{Node, NodeId, Share};
use crate::proto::csi::v1::controller_server::ControllerServer;
use crate::proto::csi::v1::group_controller_server::GroupControllerServer;
use crate::proto::csi::v1::identity_server::IdentityServer;
use crate::proto::csi::v1::node_server::NodeServer;
use crate::server::{self, Drain, Routes, Rpc, Socket, Trace};
use crate::telemetry::metrics::Rpcs;

pub use probe::{ProbeError, probe};
pub use topology::{node as node_of, place as place_of};

use status::Failure;

/// The driver's name in Kubernetes.
pub const DRIVER_NAME: &str = "baggageclaim.csi.concourse-ci.org";

/// The configuration of the services.
#[derive(Debug, Clone)]
pub struct Config {
    /// The node's id.
    pub node: NodeId,
    /// The features that are on.
    pub features: Features,
    /// The counters of calls.
    pub rpcs: Rpcs,
}

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
            share: Share::Auto,
        }
    }
}

/// Whether the engine is available.
#[derive(Debug, Clone)]
pub enum Readiness {
    /// The pool is being opened.
    Recovering,
    /// The pool's filesystem accepts no changes. Volumes can only be unmounted, so that pods can
    /// end.
    UnmountsOnly(UnmountsOnly),
    /// The engine runs, with the shared tier if there is one. If the pool cannot be opened for
    /// another reason, the driver exits.
    Ready(Engine, Option<Arc<Distribution>>),
}

/// A driver without an engine.
#[derive(Debug, Clone)]
pub struct UnmountsOnly {
    /// The backend of the pool. Kubelet asks for the topology when the driver registers.
    pub backend: BackendKind,
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
type FindClaims = Arc<dyn Fn() -> Result<Arc<dyn Claims>, Failure> + Send + Sync>;

/// The store in this node's engine.
fn here(node: NodeId, readiness: watch::Receiver<Readiness>) -> FindClaims {
    Arc::new(move || {
        let engine = engine(&readiness)?;
        let node = topology::node(&node, engine.backend());
        Ok(Arc::new(OneNode::new(engine, node)))
    })
}

fn engine(readiness: &watch::Receiver<Readiness>) -> Result<Engine, Failure> {
    serving(readiness).map(|(engine, _)| engine)
}

/// The engine and its shared tier.
fn serving(
    readiness: &watch::Receiver<Readiness>,
) -> Result<(Engine, Option<Arc<Distribution>>), Failure> {
    match &*readiness.borrow() {
        Readiness::Recovering => Err(Failure::Recovering),
        Readiness::UnmountsOnly(pool) => Err(Failure::UnmountsOnly(pool.why.clone())),
        Readiness::Ready(engine, distribution) => Ok((engine.clone(), distribution.clone())),
    }
}

/// Serves Identity and Node, and with that feature Controller and GroupController, until the drain
/// closes the socket; see [`server::serve`].
///
/// The caller has bound the socket, so clients can already connect and wait.
pub async fn serve(
    socket: Socket,
    config: Config,
    readiness: watch::Receiver<Readiness>,
    drain: Drain,
) -> server::Result<()> {
    let features = config.features;
    let claims = here(config.node.clone(), readiness.clone());
    let known = readiness.clone();
    let ready = Arc::new(move || !matches!(&*known.borrow(), Readiness::Recovering));
    let identity = identity::Service::new(features, ready);
    let node = node::Service::new(config.node, features, readiness);
    let mut routes = Routes::new()
        .with(IdentityServer::new(identity))
        .with(NodeServer::new(node));
    if features.controller {
        routes = with_controller(routes, features, claims);
    }
    server::serve(socket, routes, trace(config.rpcs), drain).await
}

/// Serves Identity, Controller and GroupController for a whole cluster, beside the sidecars, until
/// the drain closes the socket. `ready` says whether the store can be asked. `others` are further
/// services of the socket.
pub async fn serve_controller(
    socket: Socket,
    rpcs: Rpcs,
    claims: Arc<dyn Claims>,
    ready: watch::Receiver<bool>,
    drain: Drain,
    others: Routes,
) -> server::Result<()> {
    let features = Features::default();
    let known = ready.clone();
    let identity = identity::Service::new(features, Arc::new(move || *known.borrow()));
    let claims: FindClaims = Arc::new(move || {
        let is_ready = *ready.borrow();
        is_ready.then(|| claims.clone()).ok_or(Failure::Listing)
    });
    let routes = others.with(IdentityServer::new(identity));
    let routes = with_controller(routes, features, claims);
    server::serve(socket, routes, trace(rpcs), drain).await
}

fn with_controller(routes: Routes, features: Features, claims: FindClaims) -> Routes {
    let group = group::Service::new(features, claims.clone());
    let controller = controller::Service::new(features, claims);
    routes
        .with(ControllerServer::new(controller))
        .with(GroupControllerServer::new(group))
}

fn trace(rpcs: Rpcs) -> Trace {
    Trace::new(new_span, &POLLED).counting(rpcs, &METHODS)
}

/// All methods of CSI: the allowed values of a metric's label.
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

/// Methods that change nothing and that kubelet, sidecars and probes poll. Their successes have no
/// log line at the default level; all other calls have one.
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
