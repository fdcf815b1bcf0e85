//! The HTTP port of a node: `/healthz`, `/readyz`, `/metrics`. No client is authenticated, so the
//! pages change nothing, and name no tenant, pod or key.
//!
//! - `/healthz`: 200 while the process works; the caller of this module defines that. 503: restart
//!   it.
//! - `/readyz`: 200 while the pool can be used. 503: start no pods here for now; the body says why.
//! - `/metrics`: see `docs/metrics.md`.
//!
//! Any client may connect, often, and send nothing. Kubelet must still get its answer, or it
//! restarts the driver. So a connection is short and answers one request, and their number is
//! bounded: one more closes one of the client that has the most. What a page says is found out once
//! for all requests that wait for it.

mod distribution;
mod pages;
mod shared;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

use crate::server::{self, Connections};

use pages::Pages;
pub use pages::{AddMetrics, Alive, FindEngine, Role, Sources};

/// The most connections at a time.
const CONNECTIONS: usize = 256;
/// How long a connection may take, also with a slow reader.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest head of a request.
const MOST_HEAD: usize = 16 << 10;

/// Why the port cannot be served.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot serve /healthz, /readyz and /metrics at {0}; give another address with --http, or \
     --http off"
)]
pub struct Error(#[from] server::ListenError);

/// A listening port.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Listens at an address. Clients queue from here on.
    pub async fn bind(address: SocketAddr) -> Result<Self, Error> {
        let listener = server::listen(address).await?;
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, "health and metrics");
        }
        Ok(Self(listener))
    }

    /// Answers until it is dropped.
    pub async fn serve(self, sources: Sources) -> Infallible {
        let pages = Arc::new(Pages::new(sources));
        let mut connections = Connections::new(CONNECTIONS);
        loop {
            let (stream, client) = server::accept(&self.0, "the HTTP port").await;
            connections.spawn(client.ip(), answer(stream, Arc::clone(&pages)));
        }
    }
}

/// Answers one request.
async fn answer(stream: TcpStream, pages: Arc<Pages>) {
    let service = service_fn(|request| {
        let pages = Arc::clone(&pages);
        async move { Ok::<_, Infallible>(pages::answer(&pages, &request).await) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .header_read_timeout(None)
        .max_buf_size(MOST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    // An error is the client's.
    let _ = tokio::time::timeout(PATIENCE, connection).await;
}
