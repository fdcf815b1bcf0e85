//! The server's connections: TCP, then TLS with the other side's key, then HTTP/2. There are only
//! so many connections whose handshake is not done or whose key is not known, for a bounded time,
//! and so many of one known key.
//! Any pod may reach the port, so none of these keeps a node out: a new handshake ends one of the
//! client that has the most.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use super::key::{Key, name_of};
use super::refusals::Refusals;
use super::tls;
use crate::distribution::PlacesOfEach;
use crate::model::Sha256;
use crate::server::{self, Connections, Drain};

/// How many connections may be in their handshake, how many may have an unknown key, and for how
/// long. The holder of an unknown key has that time to read its refusal.
const STRANGERS: usize = 256;
const STRANGER: Duration = Duration::from_secs(10);
/// How many connections one known key may have. A node has one, and after a cut some that no side
/// knows to be dead yet.
const OF_ONE: usize = 16;
/// How many connections wait for the server.
const WAITING: usize = 16;

/// The other end of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Who {
    /// The SHA-256 of its public key, of which it has proved that it has the private part.
    pub key: Sha256,
    /// Where it connects from.
    pub address: SocketAddr,
}

/// A connection after its handshake.
#[derive(Debug)]
pub struct Link {
    stream: TlsStream<TcpStream>,
    who: Who,
    /// The end of a connection whose key is unknown.
    ends: Option<Pin<Box<Sleep>>>,
    /// Its place among those of its key, or of all unknown keys.
    place: Option<OwnedSemaphorePermit>,
}

impl Connected for Link {
    type ConnectInfo = Who;

    fn connect_info(&self) -> Who {
        self.who
    }
}

impl AsyncRead for Link {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(ends) = &mut self.ends
            && ends.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Link {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Whether a key is that of a node.
pub type IsKnown = Arc<dyn Fn(&Sha256) -> bool + Send + Sync>;

/// Accepts connections until the services close. The other side must show a key; a connection whose
/// key is not known ends soon. Fails on a defect of the configuration of TLS. Must be called in a
/// tokio runtime.
pub fn accept(
    key: &Key,
    listener: TcpListener,
    is_known: IsKnown,
    drain: Drain,
) -> Result<ReceiverStream<io::Result<Link>>, rustls::Error> {
    let acceptor = TlsAcceptor::from(tls::server(key)?);
    let (sender, links) = mpsc::channel(WAITING);
    let work = async move {
        let places = Arc::new(Semaphore::new(STRANGERS));
        let of_one = Arc::new(PlacesOfEach::new(OF_ONE));
        let refusals = Arc::new(Refusals::of_strangers());
        let mut handshakes = Connections::new(STRANGERS);
        loop {
            let (stream, address) = tokio::select! {
                accepted = server::accept(&listener, "the nodes' port") => accepted,
                () = drain.closing() => return,
            };
            let (acceptor, sender) = (acceptor.clone(), sender.clone());
            let (is_known, refusals) = (Arc::clone(&is_known), Arc::clone(&refusals));
            let (places, of_one) = (Arc::clone(&places), Arc::clone(&of_one));
            handshakes.spawn(address.ip(), async move {
                let shaken = tokio::time::timeout(STRANGER, shake(&acceptor, stream, address));
                let error = match shaken.await {
                    Ok(Ok(mut link)) => {
                        let key = link.who.key;
                        link.place = if is_known(&key) {
                            let place = of_one.try_take(&key);
                            if place.is_none() && refusals.is_news(key.to_string()) {
                                tracing::warn!(%address, %key, most = OF_ONE,
                                    "refused: a node has as many connections as it may");
                            }
                            place
                        } else {
                            link.ends = Some(Box::pin(sleep(STRANGER)));
                            places.try_acquire_owned().ok()
                        };
                        if link.place.is_none() {
                            return;
                        }
                        // Without a receiver the process ends.
                        let _ended = sender.send(Ok(link)).await;
                        return;
                    }
                    Ok(Err(error)) => error,
                    Err(_) => io::Error::new(io::ErrorKind::TimedOut, "it was not done in time"),
                };
                if refusals.is_news(format!("{}: {error}", address.ip())) {
                    tracing::warn!(%address, %error, "a node's handshake failed");
                }
            });
        }
    };
    tokio::spawn(work);
    Ok(ReceiverStream::new(links))
}

async fn shake(acceptor: &TlsAcceptor, stream: TcpStream, address: SocketAddr) -> io::Result<Link> {
    stream.set_nodelay(true)?;
    let stream = acceptor.accept(stream).await?;
    let keys = stream.get_ref().1.peer_certificates();
    let key = keys.and_then(<[_]>::first).map(|key| name_of(key));
    let key = key.ok_or_else(|| io::Error::other("it showed no key"))?;
    let who = Who { key, address };
    let (ends, place) = (None, None);
    Ok(Link {
        stream,
        who,
        ends,
        place,
    })
}
