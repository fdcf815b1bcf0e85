//! Content from node to node: the server that gives what this node has, and the client that asks
//! the others. `docs/peers.md` says what a user needs to know, `proto/peer.proto` is the protocol.
//!
//! ```text
//! distribution ─▶ client ─▶ TLS, pinned key ─▶ link ─▶ serve ─▶ Engine::open_layers (lease)
//! ```
//!
//! Two traits of `distribution` are the seam to what runs the nodes: [`Roster`] says who the peers
//! are and what their keys are, [`Access`] says what each may read. A standalone driver has a file
//! for both ([`PeerList`]). In Kubernetes the API server answers (`k8s::peers`).
//!
//! Nothing here verifies content or decides what is fetched: `shared::fetch` and `distribution` do.

mod client;
mod clones;
mod counters;
mod damage;
mod lease;
mod list;
mod messages;
mod sent;
mod serve;
mod source;
mod speed;

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::service::interceptor::InterceptedService;

pub use list::{ListError, PeerList};

pub use crate::distribution::roster::{Access, Asked, Directory, Peer, Refusal, Roster};

use crate::distribution::{Away, Pace, Peers};
use crate::engine::Engine;
use crate::link::{self, Key, KeyError};
use crate::proto::peer::v1::peer_server::PeerServer;
use crate::server::{self, Drain};
use client::{Asking, Client};
use counters::Counters;

/// The largest request: a list of wants.
const MOST_REQUEST: usize = 256 << 10;
/// How many calls one connection may have at once.
const CALLS: usize = 64;
/// How often an idle connection is tried, and how long its answer may take.
const ALIVE: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(10);

/// How this node is a peer.
#[derive(Debug, Clone)]
pub struct Config {
    /// The address that serves content to peers; `None`: this node only asks.
    pub listen: Option<SocketAddr>,
    /// The other nodes, and the key by which they know this one.
    pub members: Members,
    /// The most bytes per second that are sent to all peers; `None`: no limit.
    pub bandwidth: Option<NonZeroU64>,
}

/// The other nodes, and the key of this one.
#[derive(Debug, Clone)]
pub enum Members {
    /// Files of this machine.
    Files {
        /// The list of peers.
        list: PathBuf,
        /// The key of this node. Made if it is missing.
        key: PathBuf,
    },
    /// The role has them from elsewhere.
    Given {
        /// The key of this node.
        key: Key,
        /// Who the peers are.
        roster: Arc<dyn Roster>,
        /// What each may read.
        access: Arc<dyn Access>,
        /// Which of them have content, if something knows that.
        directory: Option<Arc<dyn Directory>>,
        /// Where it is noted which of them did not answer lately.
        away: Arc<Away>,
    },
}

/// Why this node cannot be a peer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The list cannot be used.
    #[error(transparent)]
    List(#[from] ListError),
    /// The address cannot be served.
    #[error("--peer-listen {0}")]
    Listen(#[from] server::ListenError),
    /// A defect of the configuration of TLS.
    #[error("TLS with raw public keys: {0}")]
    Tls(#[from] rustls::Error),
    /// The server failed.
    #[error("serving peers: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// This node as a peer, before it has an engine.
#[derive(Debug)]
pub struct Node {
    key: Key,
    roster: Arc<dyn Roster>,
    access: Arc<dyn Access>,
    directory: Option<Arc<dyn Directory>>,
    bandwidth: Option<NonZeroU64>,
    listener: Option<TcpListener>,
    counters: Arc<Counters>,
}

impl Node {
    /// Reads the files, if there are any, and binds the address.
    pub async fn open(config: Config) -> Result<Self, Error> {
        let listener = match config.listen {
            None => None,
            Some(address) => Some(server::listen(address).await?),
        };
        let bandwidth = config.bandwidth;
        Ok(match config.members {
            Members::Files { list, key } => {
                let key = Key::open(&key)?;
                let list = Arc::new(PeerList::read(&list, &key.name())?);
                Self::new(key, list.clone(), list, listener, bandwidth)
            }
            Members::Given {
                key,
                roster,
                access,
                directory,
                away,
            } => Self {
                directory,
                counters: Arc::new(Counters {
                    away,
                    ..Counters::default()
                }),
                ..Self::new(key, roster, access, listener, bandwidth)
            },
        })
    }

    /// A node whose peers and rights these are. Without a listener it only asks.
    #[must_use]
    pub fn new(
        key: Key,
        roster: Arc<dyn Roster>,
        access: Arc<dyn Access>,
        listener: Option<TcpListener>,
        bandwidth: Option<NonZeroU64>,
    ) -> Self {
        Self {
            key,
            roster,
            access,
            directory: None,
            bandwidth,
            listener,
            counters: Arc::default(),
        }
    }

    /// The address that is served.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.as_ref()?.local_addr().ok()
    }

    /// The other nodes, to be asked. Must be called in a tokio runtime.
    #[must_use]
    pub fn peers(&self) -> Arc<dyn Peers> {
        let (key, roster) = (self.key.clone(), Arc::clone(&self.roster));
        let directory = self.directory.clone();
        let client = Client::new(key, roster, directory, Arc::clone(&self.counters));
        Arc::new(Asking(client))
    }

    /// Serves peers until the services close. The streams that run then are cut: the peers ask the
    /// next holder.
    pub async fn serve(self, engine: Engine, drain: Drain) -> Result<(), Error> {
        let Some(listener) = self.listener else {
            drain.closing().await;
            return Ok(());
        };
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, key = %self.key.name(), "serving peers");
        }
        let roster = Arc::clone(&self.roster);
        let is_known: link::IsKnown = Arc::new(move |key| roster.named(key).is_some());
        let links = link::accept(&self.key, listener, is_known, drain.clone())?;
        let service = serve::Service::new(
            engine,
            self.roster,
            self.access,
            Pace::new(self.bandwidth),
            self.counters,
            drain.clone(),
        );
        let expire = tokio::spawn(service.clone().expire());
        let (all, gate) = (service.clone(), service.clone());
        let calls = PeerServer::new(service).max_decoding_message_size(MOST_REQUEST);
        // Before anything of a request is read: a stranger must not fill the memory.
        let calls = InterceptedService::new(calls, move |request| gate.admit_caller(request));
        let served = tonic::transport::Server::builder()
            .concurrency_limit_per_connection(CALLS)
            .http2_keepalive_interval(Some(ALIVE))
            .http2_keepalive_timeout(Some(ANSWER))
            .serve_with_incoming_shutdown(calls, links, drain.closing());
        let ended = tokio::select! {
            served = served => served,
            // A peer may keep its connection open.
            () = async { drain.closing().await; tokio::time::sleep(ANSWER / 50).await } => Ok(()),
        };
        // A panic was printed where it happened.
        let _ended = expire.await;
        all.end().await;
        Ok(ended?)
    }
}
