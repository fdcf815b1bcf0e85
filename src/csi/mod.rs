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

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tracing::field::Empty;

use crate::engine::claims::Claims;
use crate::engine::{self, Engine};
use crate::proto::csi::v1::controller_server::ControllerServer;
use crate::proto::csi::v1::group_controller_server::GroupControllerServer;
use crate::proto::csi::v1::identity_server::IdentityServer;
use crate::proto::csi::v1::node_server::NodeServer;
use crate::server::{self, Routes, Rpc, Socket, Trace};
use crate::telemetry::metrics::Rpcs;

pub use probe::{ProbeError, probe};

use status::Failure;
use topology::Topology;

/// The driver's name: the key by which everything in Kubernetes finds it.
pub const DRIVER_NAME: &str = "baggageclaim.csi.concourse-ci.org";

/// How the services are set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Which node this is.
    pub node: NodeId,
    /// How long RPCs that run at the end may still take.
    pub grace: Duration,
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
    /// There is.
    Ready(Engine),
    /// There will be none until somebody does something; the message says what.
    Failed(String),
}

impl Readiness {
    /// A readiness that never changes: the engine is there already.
    #[must_use]
    pub fn ready(engine: Engine) -> watch::Receiver<Self> {
        watch::channel(Self::Ready(engine)).1
    }
}

/// Who holds the claims, and where they are.
#[derive(Debug, Clone)]
struct Place {
    claims: Arc<dyn Claims>,
    topology: Topology,
}

/// Finds the place, or says why there is none at the moment. Whoever serves the Controller for a whole cluster brings
/// another one; the services stay.
type FindPlace = Arc<dyn Fn() -> Result<Place, Failure> + Send + Sync>;

/// The place is this node: its engine holds the claims.
fn here(node: NodeId, readiness: watch::Receiver<Readiness>) -> FindPlace {
    Arc::new(move || {
        let engine = engine(&readiness)?;
        let topology = Topology::of(&node, engine.backend());
        Ok(Place {
            claims: Arc::new(engine),
            topology,
        })
    })
}

fn engine(readiness: &watch::Receiver<Readiness>) -> Result<Engine, Failure> {
    match &*readiness.borrow() {
        Readiness::Recovering => Err(Failure::Recovering),
        Readiness::Ready(engine) => Ok(engine.clone()),
        Readiness::Failed(why) => Err(Failure::CannotServe(why.clone())),
    }
}

/// Which node this is, as CSI tells one from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeId(String);

/// Why a text is no node id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a node id has 1 to 256 bytes and no control characters")]
pub struct NodeIdError;

impl NodeId {
    /// Checks a node id: at most 256 bytes (`NodeGetInfoResponse.node_id`), no control characters.
    pub fn new(text: impl Into<String>) -> Result<Self, NodeIdError> {
        let text = text.into();
        let fits = (1..=256).contains(&text.len()) && !text.chars().any(char::is_control);
        if fits {
            Ok(Self(text))
        } else {
            Err(NodeIdError)
        }
    }

    /// The id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id as the value of a topology segment, which is a label's value: at most 63 letters, digits, `-`, `_` and
    /// `.`, beginning and ending with a letter or digit. What does not fit (names of nodes may have 253 bytes)
    /// becomes the beginning of its sha256.
    #[must_use]
    pub fn topology_value(&self) -> String {
        let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        let outer = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = self.0.as_bytes();
        if bytes.len() <= 63
            && bytes.iter().copied().all(inner)
            && outer(bytes.first())
            && outer(bytes.last())
        {
            self.0.clone()
        } else {
            hex(&Sha256::digest(bytes)[..16])
        }
    }
}

/// Serves Identity and Node, and Controller and GroupController if they are switched on, on a socket until `shutdown` is ready; see [`server::serve`] for the end.
///
/// Who wants to know that the socket is there before it is served binds it first; nobody is refused in between.
pub async fn serve(
    socket: Socket,
    config: Config,
    readiness: watch::Receiver<Readiness>,
    shutdown: impl Future<Output = ()>,
) -> server::Result<()> {
    let features = config.features;
    let place = here(config.node.clone(), readiness.clone());
    let identity = identity::Service::new(features, readiness.clone());
    let node = node::Service::new(config.node.clone(), features, readiness, place.clone());
    let mut routes = Routes::new()
        .with(IdentityServer::new(identity))
        .with(NodeServer::new(node));
    if features.controller {
        let group = group::Service::new(features, place.clone());
        let controller = controller::Service::new(config.node, features, place);
        routes = routes
            .with(ControllerServer::new(controller))
            .with(GroupControllerServer::new(group));
    }
    server::serve(
        socket,
        routes,
        Trace::new(new_span, &FREQUENT).counting(config.rpcs, &METHODS),
        engine::DESKS,
        config.grace,
        shutdown,
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

/// What kubelet and its neighbours ask all the time, and what is not worth a line when it went well.
const FREQUENT: [&str; 16] = [
    "ControllerGetCapabilities",
    "ControllerGetVolume",
    "ControllerGetVolumeHealth",
    "ControllerListVolumeHealth",
    "GetCapacity",
    "GetPluginCapabilities",
    "GetPluginInfo",
    "GroupControllerGetCapabilities",
    "ListSnapshots",
    "ListVolumes",
    "NodeGetCapabilities",
    "NodeGetInfo",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_ids_keep_to_the_specification() {
        assert_eq!(NodeId::new("node-1").expect("ok").as_str(), "node-1");
        NodeId::new("n".repeat(256)).expect("256 bytes are allowed");
        for bad in [String::new(), "n".repeat(257), "a\nb".to_owned()] {
            assert_eq!(NodeId::new(bad), Err(NodeIdError));
        }
    }

    #[test]
    fn a_node_that_is_no_label_still_has_a_topology() {
        let value = |text: &str| NodeId::new(text).expect(text).topology_value();
        assert_eq!(value("ip-10-0-0-1.internal"), "ip-10-0-0-1.internal");
        for odd in ["-node", "node.", "knöten", &"n".repeat(64)] {
            let value = value(odd);
            assert_eq!(value.len(), 32, "{odd}: {value}");
            assert!(value.bytes().all(|b| b.is_ascii_hexdigit()), "{value}");
        }
    }
}
