//! The client's connections: TCP, then TLS with the pinned key of the other side, then HTTP/2. Each
//! is made by its first call, and made again after it was lost.

use std::io;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};

use super::key::Key;
use super::tls;
use crate::model::Sha256;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How often an open connection is tried, and how long its answer may take.
const ALIVE: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(5);
/// HTTP/2's windows: what may travel before it is taken.
const STREAM: u32 = 4 << 20;
const CONNECTION: u32 = 16 << 20;
/// The longest frame of HTTP/2 that the other side may send. A larger one wakes fewer tasks.
const FRAME: u32 = 256 << 10;

/// A connection to the holder of a key, which is made by its first call, and again after it was
/// lost. Must be called in a tokio runtime, or by a thread that has entered one.
pub fn connect(key: &Key, pinned: Sha256, address: String) -> Result<Channel, rustls::Error> {
    let connector = TlsConnector::from(tls::client(key, pinned)?);
    let dial = tower::service_fn(move |_: Uri| {
        let (address, connector) = (address.clone(), connector.clone());
        async move {
            let dialled = async {
                let stream = TcpStream::connect(&address).await?;
                stream.set_nodelay(true)?;
                // It is neither sent nor compared.
                let name = ServerName::try_from("node").map_err(io::Error::other)?;
                connector.connect(name, stream).await
            };
            let dialled = timeout(CONNECT, dialled).await;
            let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
            dialled.map_err(late)?.map(TokioIo::new)
        }
    });
    let channel = Endpoint::from_static("http://node")
        .initial_stream_window_size(STREAM)
        .initial_connection_window_size(CONNECTION)
        .max_frame_size(FRAME)
        .http2_keep_alive_interval(ALIVE)
        .keep_alive_timeout(ANSWER)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(dial);
    Ok(channel)
}
