//! The client side: connects to the driver of a pool. It returns messages; the command line formats
//! them. Each error says what to do next.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::model::layout;
use crate::proto::admin::v1::admin_client::AdminClient;
use crate::proto::admin::v1::cluster_client::ClusterClient as AdminClusterClient;
use crate::server;
use crate::sys::{Dir, Errno};

/// After this time without an answer, the client sends a PING. The kernel also accepts connections
/// for a process that is stopped or hangs.
const PING_AFTER: Duration = Duration::from_secs(5);

/// A process that does not answer a PING within this time counts as gone. A process that works on a
/// long call answers PINGs.
const PONG_WITHIN: Duration = Duration::from_secs(10);

/// How to connect. The address is never looked up; it is what gRPC over a unix socket says as its
/// authority.
fn endpoint() -> Endpoint {
    Endpoint::from_static("http://localhost")
        .http2_keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PONG_WITHIN)
}

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
    let channel = endpoint()
        .connect_with_connector(connector)
        .await
        .map_err(|source| ClientError::Protocol { path, source })?;
    // All nodes of a cluster answer, each with all generations of a name.
    Ok(ClusterClient::new(channel).max_decoding_message_size(usize::MAX))
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
    /// The process at the socket accepts the connection, and does not keep it.
    #[error("the process at {} closes the connection; see its log", path.display())]
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
    let channel = endpoint()
        .connect_with_connector(connector)
        .await
        .map_err(|source| ClientError::Protocol { path, source })?;
    // Lists of a hundred thousand rows are long, and it is our own driver that sends them.
    Ok(AdminClient::new(channel).max_decoding_message_size(usize::MAX))
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::proto::admin::v1 as admin;
    use admin::cluster_server::{Cluster, ClusterServer};

    /// The controller of a large cluster.
    struct Large(admin::LogResponse);

    #[tonic::async_trait]
    impl Cluster for Large {
        async fn log(
            &self,
            _: Request<admin::LogRequest>,
        ) -> Result<Response<admin::LogResponse>, Status> {
            Ok(Response::new(self.0.clone()))
        }

        type ListCachesStream = tokio_stream::Pending<Result<admin::ListCachesResponse, Status>>;

        async fn list_caches(
            &self,
            _: Request<admin::ListCachesRequest>,
        ) -> Result<Response<Self::ListCachesStream>, Status> {
            Err(Status::unavailable("only the log is asked for"))
        }

        async fn explain(
            &self,
            _: Request<admin::ExplainRequest>,
        ) -> Result<Response<admin::ExplainResponse>, Status> {
            Err(Status::unavailable("only the log is asked for"))
        }

        async fn clear(
            &self,
            _: Request<admin::ClearRequest>,
        ) -> Result<Response<admin::ClearResponse>, Status> {
            Err(Status::unavailable("only the log is asked for"))
        }
    }

    #[tokio::test]
    async fn the_log_of_a_large_cluster_has_no_limit() {
        let generation = |number| admin::Generation {
            node: format!("node-{number}.{}", "a".repeat(200)),
            ..admin::Generation::default()
        };
        let answer = admin::LogResponse {
            generations: (0..30_000).map(generation).collect(),
            silent: Vec::new(),
        };
        let bytes = prost::Message::encoded_len(&answer);
        assert!(bytes > 5 << 20, "{bytes} bytes");
        let dir = tempfile::tempdir().expect("a temporary directory");
        let socket = dir.path().join("controller.sock");
        let listener = UnixListener::bind(&socket).expect("it is bound");
        let calls = ClusterServer::new(Large(answer.clone()));
        let served = tonic::transport::Server::builder()
            .serve_with_incoming(calls, UnixListenerStream::new(listener));
        tokio::spawn(served);
        let client = connect_to_controller(&socket).await;
        let mut client = client.expect("it answers");
        let asked = client.log(admin::LogRequest::default());
        let told = asked.await.expect("the whole answer").into_inner();
        assert!(told == answer);
    }
}
