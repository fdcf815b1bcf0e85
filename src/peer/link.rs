//! The server's connections: TCP, then TLS with the peer's key, then HTTP/2. There are only so many
//! connections whose handshake is not done or whose key is not in the list, for a bounded time.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::key::name_of;
use crate::distribution::roster::Roster;
use crate::model::Sha256;
use crate::server::Drain;

/// How many connections may be in their handshake or have an unknown key, and for how long. The
/// holder of an unknown key has that time to read its refusal.
const STRANGERS: usize = 256;
const STRANGER: Duration = Duration::from_secs(10);
/// How many connections wait for the server.
const WAITING: usize = 16;
/// The pause after a connection could not be accepted.
const TO_RECOVER: Duration = Duration::from_millis(100);

/// The other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Who {
    /// The SHA-256 of its public key, of which it has proved that it has the private part.
    pub(super) key: Sha256,
    pub(super) address: SocketAddr,
}

/// A connection after its handshake.
#[derive(Debug)]
pub(super) struct Link {
    stream: TlsStream<TcpStream>,
    who: Who,
    /// The end of a connection whose key is unknown, and its place among those.
    ends: Option<(Pin<Box<Sleep>>, OwnedSemaphorePermit)>,
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
        if let Some((ends, _)) = &mut self.ends
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

/// Accepts connections until the services close.
pub(super) fn accept(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    roster: Arc<dyn Roster>,
    drain: Drain,
) -> mpsc::Receiver<io::Result<Link>> {
    let (sender, links) = mpsc::channel(WAITING);
    let work = async move {
        let acceptor = TlsAcceptor::from(tls);
        let places = Arc::new(Semaphore::new(STRANGERS));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = drain.closing() => return,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection of a peer was not accepted");
                    tokio::time::sleep(TO_RECOVER).await;
                    continue;
                }
            };
            let (acceptor, sender) = (acceptor.clone(), sender.clone());
            let roster = Arc::clone(&roster);
            tokio::spawn(async move {
                let shaken = tokio::time::timeout(STRANGER, shake(&acceptor, stream, address));
                match shaken.await {
                    Ok(Ok(mut link)) => {
                        if roster.named(&link.who.key).is_none() {
                            link.ends = Some((Box::pin(sleep(STRANGER)), place));
                        } else {
                            drop(place);
                        }
                        // Without a receiver the driver ends.
                        let _ended = sender.send(Ok(link)).await;
                    }
                    Ok(Err(error)) => {
                        tracing::warn!(%address, %error, "a peer's handshake failed");
                    }
                    Err(_) => tracing::warn!(%address, "a peer's handshake was not done in time"),
                }
            });
        }
    };
    tokio::spawn(work);
    links
}

async fn shake(acceptor: &TlsAcceptor, stream: TcpStream, address: SocketAddr) -> io::Result<Link> {
    stream.set_nodelay(true)?;
    let stream = acceptor.accept(stream).await?;
    let keys = stream.get_ref().1.peer_certificates();
    let key = keys.and_then(<[_]>::first).map(|key| name_of(key));
    let key = key.ok_or_else(|| io::Error::other("it showed no key"))?;
    let who = Who { key, address };
    let ends = None;
    Ok(Link { stream, who, ends })
}
