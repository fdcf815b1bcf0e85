//! The client side: connects to the driver of a pool. It returns messages; the command line formats
//! them. Each error says what to do next.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::model::layout;
use crate::proto::admin::v1::admin_client::AdminClient;
use crate::proto::admin::v1::cluster_client::ClusterClient as AdminClusterClient;
use crate::server;
use crate::sys::{Dir, Errno};

/// A connection to the controller of a cluster.
pub type ClusterClient = AdminClusterClient<Channel>;

/// Connects to the controller that serves this socket.
pub async fn connect_to_controller(socket: &Path) -> Result<ClusterClient, ClientError> {
    let path = socket.to_owned();
    // Asked once by hand, since what tonic would say of it is "transport error".
    if let Err(source) = UnixStream::connect(socket).await {
        return Err(ClientError::NoController { path, source });
    }
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let path = socket.to_owned();
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .map_err(|source| ClientError::Protocol { path, source })?;
    Ok(ClusterClient::new(channel))
}

/// A connection to the driver of a pool.
pub type Client = AdminClient<Channel>;

/// Why no driver can be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no pool.
    #[error(
        "there is no pool at {}; give its directory with --pool, or start a driver, which creates \
         one", path.display())]
    NoPool {
        /// Where it should be.
        path: PathBuf,
    },
    /// The pool has no driver now.
    #[error(
        "no driver answers at {}; in a cluster, check the pod of the driver; elsewhere, start one \
         with `baggageclaim standalone --pool {}`",
        pool.join(layout::ADMIN_SOCKET).display(),
        pool.display()
    )]
    NotRunning {
        /// The pool.
        pool: PathBuf,
    },
    /// The pool cannot be opened.
    #[error("pool {}: {source}{}", path.display(), hint(source))]
    Pool {
        /// Where it is.
        path: PathBuf,
        /// The cause.
        source: crate::sys::Error,
    },
    /// The socket is there and cannot be used.
    #[error("cannot connect to {}: {source}", path.display())]
    Socket {
        /// Where it is.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// No controller accepts the call.
    #[error(
        "no controller answers at {}: {source}; run this in the controller's pod, or name its \
         socket with --socket", path.display())]
    NoController {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The process that answers is not the driver.
    #[error("the process at {} does not answer like a driver: {source}", path.display())]
    Protocol {
        /// Where it is.
        path: PathBuf,
        /// The cause.
        source: tonic::transport::Error,
    },
}

fn hint(error: &crate::sys::Error) -> &'static str {
    if error.is(Errno::EACCES) || error.is(Errno::EPERM) {
        "; a pool belongs to root: run this as root"
    } else {
        ""
    }
}

/// Connects to the driver of a pool.
pub async fn connect(pool: &Path) -> Result<Client, ClientError> {
    let dir = Dir::open(pool).map_err(|source| {
        let path = pool.to_owned();
        if source.is(Errno::ENOENT) {
            ClientError::NoPool { path }
        } else {
            ClientError::Pool { path, source }
        }
    })?;
    let dir = Arc::new(dir);
    let path = pool.join(layout::ADMIN_SOCKET);
    // Asked once by hand, since what tonic would say of it is "transport error".
    match server::connect(&dir, layout::ADMIN_SOCKET.as_ref()).await {
        Ok(_) => {}
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
        {
            let pool = pool.to_owned();
            return Err(ClientError::NotRunning { pool });
        }
        Err(source) => return Err(ClientError::Socket { path, source }),
    }
    let connector = tower::service_fn(move |_: Uri| {
        let dir = Arc::clone(&dir);
        async move {
            let stream = server::connect(&dir, layout::ADMIN_SOCKET.as_ref()).await?;
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        }
    });
    // The address is never looked up; it is what gRPC over a unix socket says as its authority.
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .map_err(|source| ClientError::Protocol { path, source })?;
    // Lists of a hundred thousand rows are long, and it is our own driver that sends them.
    Ok(AdminClient::new(channel).max_decoding_message_size(usize::MAX))
}
