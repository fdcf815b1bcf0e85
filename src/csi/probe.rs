//! Asking a driver whether it is ready, through its socket, as an orchestrator does.
//! For the driver's own use: what it says of itself elsewhere should be what others see.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};

use crate::engine;
use crate::proto::csi::v1 as csi;
use csi::identity_client::IdentityClient;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Nobody takes the call.
    #[error("nobody answers at {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: tonic::transport::Error,
    },
    /// Somebody takes the call, and says nothing. Probe asks nobody, so a driver that works is not so slow.
    #[error("no answer at {} within {patience:?}", path.display())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        patience: Duration,
    },
    /// The socket's directory does not answer: nobody can tell who is behind it.
    #[error("the directory of {} does not answer within {patience:?}", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        patience: Duration,
    },
    /// The answer is an error.
    #[error("Probe at {}: {}", path.display(), status.message())]
    Status {
        /// The socket.
        path: PathBuf,
        /// The answer.
        status: Box<tonic::Status>,
    },
}

/// Whether the driver at `socket` says that it is ready, if it says so within `patience`.
pub async fn probe(socket: &Path, patience: Duration) -> Result<bool, ProbeError> {
    let reached = Arc::new(AtomicBool::new(false));
    let asked = tokio::time::timeout(patience, ask(socket, reached.clone())).await;
    asked.unwrap_or_else(|_| {
        let path = socket.to_owned();
        Err(if reached.load(Ordering::Relaxed) {
            ProbeError::Silent { path, patience }
        } else {
            ProbeError::Unreachable { path, patience }
        })
    })
}

/// The same without an end. `reached` becomes true when somebody has taken the call.
async fn ask(socket: &Path, reached: Arc<AtomicBool>) -> Result<bool, ProbeError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let (path, reached) = (path.clone(), reached.clone());
        async move {
            // Its directory may not answer.
            let connected = engine::apart("probe", UnixStream::connect(path)).await?;
            reached.store(connected.is_ok(), Ordering::Relaxed);
            connected.map(TokioIo::new)
        }
    });
    // The address is for the request's head only.
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await;
    let channel = channel.map_err(|source| ProbeError::Connect {
        path: socket.to_owned(),
        source,
    })?;
    let mut client = IdentityClient::new(channel);
    let answer = client.probe(csi::ProbeRequest {}).await;
    let answer = answer.map_err(|status| ProbeError::Status {
        path: socket.to_owned(),
        status: Box::new(status),
    })?;
    Ok(answer.into_inner().ready.unwrap_or(true))
}
