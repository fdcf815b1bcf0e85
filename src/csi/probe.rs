//! Calls Probe of a driver through its socket, as an orchestrator does.
//! The driver calls itself, so that its health pages show what other callers see.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tonic::transport::{Endpoint, Uri};

use crate::proto::csi::v1 as csi;
use crate::sys;
use csi::identity_client::IdentityClient;

/// Held while a probe connects.
static CONNECTING: Mutex<()> = Mutex::const_new(());

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// No process accepts the call.
    #[error("no driver answers at {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: tonic::transport::Error,
    },
    /// A process accepts the call and does not answer. Probe waits for nothing, so a working driver
    /// is faster.
    #[error("no answer at {} within {patience:?}", path.display())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        patience: Duration,
    },
    /// The directory of the socket hangs, so it is unknown whether a driver is there.
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

/// Whether the driver at `socket` is ready. An error if it does not answer within `patience`.
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

/// As [`probe`], without a time limit. `reached` becomes true when a process has accepted the call.
async fn ask(socket: &Path, reached: Arc<AtomicBool>) -> Result<bool, ProbeError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let (path, reached) = (path.clone(), reached.clone());
        async move {
            // The directory may not answer. Then one thread waits for it, not one for each probe.
            let connecting = CONNECTING.lock().await;
            let connect = async move {
                let connected = UnixStream::connect(path).await;
                drop(connecting);
                connected
            };
            let connected = sys::apart("probe", connect).await?;
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
