//! The admin service of a running driver: server and client of `admin.sock` in the pool.
//!
//! A controller has no pool: it serves `Cluster` with its CSI services.
//!
//! The only code that sees `baggageclaim.admin.v1` messages. It decides nothing and returns the
//! rows of the engine. Only root on the node can open the socket (the pool is 0700, the socket
//! 0600).
//!
//! The client connects by the descriptor of the directory, since the path of a pool may be longer
//! than a socket's address.

mod client;
mod cluster;
mod service;
mod shared;
mod transfer;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tracing::field::Empty;

pub use client::{Client, ClientError, ClusterClient, connect, connect_to_controller};
pub use cluster::{Cluster, serve_cluster};
pub use transfer::STALL;

use crate::distribution::Distribution;
use crate::engine::Engine;
use crate::model::layout;
use crate::proto::admin::v1::admin_server::AdminServer;
use crate::server::{self, Drain, Routes, Socket, Trace};

/// Makes the socket in a pool. Callers queue from here on, so a driver may say that it is ready.
pub async fn bind(pool: &Path) -> server::Result<Socket> {
    Socket::bind_in(pool, layout::ADMIN_SOCKET.as_ref()).await
}

/// Serves the admin verbs of an engine until the drain closes the services. Exports and imports may
/// take hours: they end when the services are to close, not with the grace period. One whose caller
/// neither sends nor takes a byte for as long as `stall` fails ([`STALL`]).
pub async fn serve(
    socket: Socket,
    engine: Engine,
    distribution: Option<Arc<Distribution>>,
    drain: Drain,
    stall: Duration,
) -> server::Result<()> {
    let service = service::Service::new(engine, distribution, drain.clone(), stall);
    let routes = Routes::new().with(AdminServer::new(service));
    let trace = Trace::new(new_span, &[]);
    server::serve(socket, routes, trace, drain).await
}

fn new_span(method: &str) -> tracing::Span {
    tracing::error_span!(
        "rpc",
        admin.method = method,
        tenant = Empty,
        pod.uid = Empty,
        reference = Empty
    )
}
