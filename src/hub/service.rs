//! The hub as a whole: its address, its key, and the calls of the nodes. What a stream does is in
//! `serve`; what the other parts of the controller get is in `handle`.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status, Streaming};

use super::handle::Handle;
use super::limits::MOST_HELLO;
use super::serve::{Attached, Inner, WAITING};
use crate::distribution::roster::Members;
use crate::link::{self, IsKnown, Key, KeyError};
use crate::model::Sha256;
use crate::proto::hub::v1 as wire;
use crate::server::{self, Drain};
use wire::hub_server::HubServer;

/// How often time passes for the catalog.
const TICK: Duration = Duration::from_secs(1);
/// How many calls one connection may have at once: a stream, and questions that wait.
const CALLS: usize = 256;
/// How often an idle connection is tried, and how long its answer may take.
const ALIVE: Duration = Duration::from_secs(10);
/// How long streams have to see the end.
const END: Duration = Duration::from_millis(200);

/// Why the catalog cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// No key can be made.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The address cannot be served.
    #[error("--hub-listen {0}")]
    Listen(#[from] server::ListenError),
    /// A defect of the configuration of TLS.
    #[error("TLS with raw public keys: {0}")]
    Tls(#[from] rustls::Error),
    /// The server failed.
    #[error("serving the nodes: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// The catalog of a cluster, served to its nodes.
#[derive(Debug)]
pub struct Hub {
    key: Key,
    listener: TcpListener,
    handle: Handle,
}

impl Hub {
    /// Binds the address, and makes a key for this run. The nodes report what namespaces use at
    /// most once in `usage`.
    pub async fn open(
        listen: SocketAddr,
        members: Arc<dyn Members>,
        usage: Duration,
    ) -> Result<Self, ServeError> {
        Ok(Self {
            listener: server::listen(listen).await?,
            key: Key::generate()?,
            handle: Handle(Arc::new(Inner::new(members, usage))),
        })
    }

    /// The SHA-256 of its public key.
    #[must_use]
    pub fn key(&self) -> Sha256 {
        self.key.name()
    }

    /// The port that is served.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The catalog, for the other parts of the controller. No node's account begins before the
    /// fences are loaded.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves the nodes until the services close.
    pub async fn serve(self, drain: Drain) -> Result<(), ServeError> {
        if let Ok(address) = self.listener.local_addr() {
            tracing::info!(%address, key = %self.key.name(), "serving the catalog to the nodes");
        }
        let members = Arc::clone(&self.handle.0.members);
        let is_known: IsKnown = Arc::new(move |key| members.named(key).is_some());
        let links = link::accept(&self.key, self.listener, is_known, drain.clone())?;
        let inner = Arc::clone(&self.handle.0);
        let gate = Arc::clone(&inner);
        let calls = HubServer::new(self.handle).max_decoding_message_size(MOST_HELLO);
        // Before anything of a request is read: a stranger must not fill the memory.
        let calls = InterceptedService::new(calls, move |request: Request<()>| {
            gate.caller(&request).map(|_| request)
        });
        let served = tonic::transport::Server::builder()
            .concurrency_limit_per_connection(CALLS)
            .http2_keepalive_interval(Some(ALIVE))
            .http2_keepalive_timeout(Some(ALIVE))
            .serve_with_incoming_shutdown(calls, links, drain.closing());
        let ticks = async {
            let mut ticks = tokio::time::interval(TICK);
            loop {
                ticks.tick().await;
                inner.tick();
            }
        };
        tokio::select! {
            served = served => Ok(served?),
            () = ticks => Ok(()),
            () = async {
                drain.closing().await;
                // A node keeps its stream open.
                inner.ends.cancel();
                tokio::time::sleep(END).await;
            } => Ok(()),
        }
    }
}

type Orders = Pin<Box<dyn Stream<Item = Result<wire::ToNode, Status>> + Send>>;

#[tonic::async_trait]
impl wire::hub_server::Hub for Handle {
    type AttachStream = Orders;

    async fn attach(
        &self,
        request: Request<Streaming<wire::FromNode>>,
    ) -> Result<Response<Orders>, Status> {
        let (node, key) = self.0.caller(&request)?;
        let (orders, sent) = mpsc::channel(WAITING);
        let attached = Attached::new(Arc::clone(&self.0), node, key, orders);
        tokio::spawn(attached.run(request.into_inner()));
        let sent = ReceiverStream::new(sent).map(|order| order.map(Arc::unwrap_or_clone));
        Ok(Response::new(Box::pin(sent)))
    }

    async fn find(
        &self,
        request: Request<wire::FindRequest>,
    ) -> Result<Response<wire::FindResponse>, Status> {
        let (node, _) = self.0.caller(&request)?;
        self.0.answer(&node, &request.into_inner()).await
    }
}
