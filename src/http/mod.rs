//! What a node says over HTTP to those who look after it: `/healthz`, `/readyz`, `/metrics`.
//! Who asks is not asked back: nothing here changes anything, and nothing tells of a tenant, a pod or a key.
//!
//! - `/healthz`: 200 while the process does its work; what that is, it is handed. 503: restart it.
//! - `/readyz`: 200 while there is an engine whose pool can be used. 503: no pods here, for now; the body says why.
//! - `/metrics`: see `docs/metrics.md`.
//!
//! Whoever can reach the port may ask, and ask often, or not at all, and kubelet must still be answered, or it ends the driver:
//! connections are short, answer one request, and are bounded in number. One more than that ends the oldest, so that
//! who holds them holds up nobody.

mod pages;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::sys::Errno;

pub use pages::{Alive, FindEngine, Sources};

/// How many may ask at once.
const CONNECTIONS: usize = 256;
/// How long a connection may take, slow readers included.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait when the machine is out of something that a connection needs.
const BREATHE: Duration = Duration::from_millis(100);

/// Why it cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be had.
    #[error(
        "cannot serve /healthz, /readyz and /metrics at {address}: {source}; give another address with --http, or --http off"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
}

/// A port that listens.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Listens at an address. From here on callers queue.
    pub async fn bind(address: SocketAddr) -> Result<Self, Error> {
        let failed = |source| Error::Bind { address, source };
        let listener = match TcpListener::bind(address).await {
            Err(error) if lacks_ipv6(&error) && address.ip() == Ipv6Addr::UNSPECIFIED => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
            }
            bound => bound,
        };
        let listener = listener.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        tracing::info!(%address, "health and metrics");
        Ok(Self(listener))
    }

    /// Answers until it is dropped.
    pub async fn serve(self, sources: Sources) -> Infallible {
        let sources = Arc::new(sources);
        // The oldest first. With it go those that are not answered yet.
        let mut connections = VecDeque::new();
        loop {
            let stream = match self.0.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a connection to the HTTP port could not be accepted");
                    tokio::time::sleep(BREATHE).await;
                    continue;
                }
            };
            if connections.len() == CONNECTIONS {
                connections.retain(|connection: &AbortOnDropHandle<()>| !connection.is_finished());
            }
            if connections.len() == CONNECTIONS {
                connections.pop_front();
            }
            let connection = tokio::spawn(answer(stream, sources.clone()));
            connections.push_back(AbortOnDropHandle::new(connection));
        }
    }
}

/// Answers one request.
async fn answer(stream: TcpStream, sources: Arc<Sources>) {
    let service = service_fn(|request| {
        let sources = sources.clone();
        async move { Ok::<_, Infallible>(pages::answer(&sources, &request).await) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service);
    // Whatever went wrong went wrong at the other end.
    let _ = tokio::time::timeout(PATIENCE, connection).await;
}

/// Whether the machine has no IPv6 at all. Else `[::]` takes the callers of IPv4, too.
fn lacks_ipv6(error: &io::Error) -> bool {
    [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL]
        .iter()
        .any(|errno| error.raw_os_error() == Some(*errno as i32))
}
