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

mod context;
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

use crate::engine::claims::{Claims, OneNode};
use crate::model::NodeId;
use crate::proto::csi::v1::controller_server::ControllerServer;
use crate::proto::csi::v1::group_controller_server::GroupControllerServer;
use crate::proto::csi::v1::identity_server::IdentityServer;
use crate::proto::csi::v1::node_server::NodeServer;
use crate::server::{self, Drain, Routes, Socket, Trace};
use crate::telemetry::metrics::Rpcs;

pub use crate::model::DRIVER_NAME;
pub use context::{Features, Readiness, UnmountsOnly};
use context::{FindClaims, engine};
pub use probe::{ProbeError, probe};
pub use topology::node as node_of;

use status::Failure;

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

/// The store in this node's engine.
fn here(node: NodeId, readiness: watch::Receiver<Readiness>) -> FindClaims {
    Arc::new(move || {
        let engine = engine(&readiness)?;
        let node = topology::node(&node, engine.backend());
        Ok(Arc::new(OneNode::new(engine, node)))
    })
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
