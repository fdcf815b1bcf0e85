//! Why flags that are valid alone do not fit together.
//! Each message names the flags and what to do.

use std::net::SocketAddr;

use crate::distribution::Sources;
use crate::model::NodeIdError;
use crate::shared::UrlError;

/// Why flags that are valid alone do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The node would belong to no cluster.
    #[error(
        "--cluster on needs --kubernetes on: the orders for persistent volumes come from the API \
         server; set --cluster off, or --kubernetes on"
    )]
    ClusterAlone,
    /// Eviction would never end, or never begin.
    #[error("--low-watermark {low} must be below --high-watermark {high}")]
    Watermarks {
        /// As given.
        low: u8,
        /// As given.
        high: u8,
    },
    /// A test named no point.
    #[cfg(debug_assertions)]
    #[error("BAGGAGECLAIM_CRASH_AT names no point of engine::failpoint")]
    CrashAt,
    /// The shared tier has no valid URL.
    #[error("the URL of --shared {0}")]
    Shared(UrlError),
    /// The driver is to serve content, and no node may ask for it.
    #[error("--peer-listen needs --peers: the file of the nodes that may ask")]
    NoPeers,
    /// A node without a Pool cannot be found.
    #[error(
        "--peer-listen needs --cluster on and --kubernetes on: nodes find each other by their Pool \
         objects"
    )]
    NoCluster,
    /// No other node can connect to that.
    #[error(
        "other nodes cannot connect to {0}: give this node's IP with --peer-address, and a port \
         with --peer-listen"
    )]
    PeerAddress(SocketAddr),
    /// Content is to come from a source that there is not.
    #[error("--sources {sources} needs {needs}; without it no content comes to this node")]
    Sources {
        /// As given.
        sources: Sources,
        /// The flag that is missing.
        needs: &'static str,
    },
    /// The nodes cannot reach the catalog.
    #[error(
        "nodes cannot connect to {0}: give the controller's IP with --hub-address, and a port with \
         --hub-listen"
    )]
    HubAddress(SocketAddr),
    /// The machine's name cannot be a node's.
    #[error("this machine's host name cannot be a node's name: {0}; give one with --node-id")]
    HostName(NodeIdError),
}
