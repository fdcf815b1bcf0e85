//! Asking a driver whether it is ready, through its socket, as an orchestrator does.
//! For the driver's own use: what it says of itself elsewhere should be what others see.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};

use crate::engine;
use crate::proto::csi::v1 as csi;
use csi::identity_client::IdentityClient;

/// Probe asks nobody; who is slower than this is not there.
const PATIENCE: Duration = Duration::from_secs(5);

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
    /// The answer is an error.
    #[error("Probe at {}: {}", path.display(), status.message())]
    Status {
        /// The socket.
        path: PathBuf,
        /// The answer.
        status: Box<tonic::Status>,
    },
}

/// Whether the driver at `socket` says that it is ready.
pub async fn probe(socket: &Path) -> Result<bool, ProbeError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move {
            // Its directory may not answer.
            let connected = engine::apart("probe", UnixStream::connect(path)).await?;
            connected.map(TokioIo::new)
        }
    });
    // The address is for the request's head only.
    let endpoint = Endpoint::from_static("http://localhost")
        .connect_timeout(PATIENCE)
        .timeout(PATIENCE);
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
