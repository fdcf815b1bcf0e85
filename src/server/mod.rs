//! What all gRPC servers of the driver share: the unix socket, one log line per RPC, the table of
//! codes, and the shutdown. Also the limit of connections of the HTTP servers, and how all servers
//! listen at a TCP address.
//!
//! It knows gRPC and the errors of the engine. The messages of the protocols belong to `csi` and
//! `admin`.
//!
//! # The end
//!
//! On shutdown the server accepts nothing new and answers the calls that run, for a grace period.
//! It names the calls that are late in the log. Then the socket's file goes, if it is still ours.

mod codes;
mod connections;
mod drain;
mod listen;
mod part;
mod routes;
mod socket;
mod trace;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::net::{UnixListener, UnixStream};

pub use codes::{code_name, code_named, code_of, may_go_on, message_of};
pub use connections::Connections;
pub use drain::Drain;
use listen::TO_RECOVER;
pub use listen::{ListenError, accept, listen};
pub use part::{Exited, Part};
pub use routes::Routes;
pub use socket::{Socket, SocketPlace, connect};
pub use trace::{Rpc, Trace};

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `sockaddr_un` has 108 bytes, one of them the final NUL.
    #[error(
        "socket path {} is {} bytes long, and the kernel allows {}: choose a shorter one",
        path.display(),
        path.as_os_str().len(),
        socket::LONGEST_PATH
    )]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// The path does not name a file in a directory.
    #[error("socket path {} must be absolute and end with a file's name", path.display())]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// The path is not a socket. It may be a user's file.
    #[error("{} exists and is not a socket; remove it or choose another path", path.display())]
    InTheWay {
        /// The path.
        path: PathBuf,
    },
    /// Another process serves it.
    #[error(
        "another process already serves {}; stop that process or choose another \
         path", path.display())]
    Taken {
        /// The path.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("socket {}: {operation}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The directory cannot be used.
    #[error("socket {}: {source}", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: crate::sys::Error,
    },
    /// The server failed.
    #[error("serving {}: {source}", path.display())]
    Serve {
        /// The path.
        path: PathBuf,
        /// Why.
        source: tonic::transport::Error,
    },
}

impl Error {
    /// Whether the filesystem of the socket has no space or no inode for it.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == ErrorKind::StorageFull)
    }
}

/// How long a finished answer may take to be sent.
const TO_FLUSH: Duration = Duration::from_millis(200);

/// Serves `routes` on `socket` until the drain closes the services. Then it answers the calls that
/// run, until the deadline at most.
pub async fn serve(socket: Socket, routes: Routes, trace: Trace, drain: Drain) -> Result<()> {
    let (listener, name) = socket.into_parts();
    let incoming = connections(listener, name.path());
    let served = tonic::transport::Server::builder()
        .layer(trace.clone())
        .serve_with_incoming_shutdown(routes, incoming, drain.closing());
    let given_up = async {
        drain.closing().await;
        tokio::select! {
            // A client that keeps its connection open and reads nothing, such as a probe.
            () = trace.idle(TO_FLUSH) => {}
            () = drain.over() => trace.name_the_late(name.path()),
        }
    };
    let ended = tokio::select! {
        ended = served => ended.map_err(|source| Error::Serve {
            path: name.path().to_owned(),
            source,
        }),
        () = given_up => Ok(()),
    };
    name.remove().await;
    ended
}

/// The connections that clients open. After an error, such as too few descriptors, it pauses: no
/// event reports that descriptors are available again.
fn connections(
    listener: UnixListener,
    path: &Path,
) -> impl Stream<Item = std::io::Result<UnixStream>> {
    stream::unfold(listener, move |listener| async move {
        loop {
            match listener.accept().await {
                Ok((connection, _)) => return Some((Ok(connection), listener)),
                Err(error) => {
                    tracing::warn!(socket = %path.display(), %error,
                        "a connection could not be accepted");
                    tokio::time::sleep(TO_RECOVER).await;
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::Future;
    use std::time::Instant;

    use hyper_util::rt::TokioIo;
    use tonic::Status;
    use tonic::body::Body;
    use tonic::codegen::http;
    use tonic::transport::{Channel, Endpoint, Uri};

    use super::*;

    /// A service whose every call takes this long.
    #[derive(Clone)]
    struct Slow(Duration);

    impl tonic::server::NamedService for Slow {
        const NAME: &'static str = "test.Slow";
    }

    impl tower::Service<http::Request<Body>> for Slow {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future =
            std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

        fn poll_ready(
            &mut self,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Result<(), Infallible>> {
            std::task::Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Self::Future {
            let takes = self.0;
            Box::pin(async move {
                tokio::time::sleep(takes).await;
                Ok(Status::not_found("slowly").into_http())
            })
        }
    }

    async fn channel(path: &Path) -> Channel {
        let path = path.to_owned();
        Endpoint::from_static("http://localhost")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            }))
            .await
            .expect("connect")
    }

    /// Calls a service that takes `takes` and ends the server at once. Returns the caller's code
    /// and the time that the end took.
    async fn end_during_a_call(takes: Duration, grace: Duration) -> (tonic::Code, Duration) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("s");
        let socket = Socket::bind(&path).await.expect("bind");
        let trace = Trace::new(|method| tracing::error_span!("rpc", method), &[]);
        let drain = Drain::new(grace);
        let served = tokio::spawn(serve(
            socket,
            Routes::new().with(Slow(takes)),
            trace,
            drain.clone(),
        ));
        let idle = channel(&path).await;
        let mut client = tonic::client::Grpc::new(channel(&path).await);
        let call = tokio::spawn(async move {
            client.ready().await.expect("ready");
            let codec = tonic_prost::ProstCodec::<(), ()>::default();
            let path = http::uri::PathAndQuery::from_static("/test.Slow/Call");
            let answer = client.unary(tonic::Request::new(()), path, codec).await;
            answer.expect_err("it never says yes").code()
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        let began = Instant::now();
        drain.close();
        served.await.expect("no panic").expect("served");
        let took = began.elapsed();
        assert!(!path.exists());
        drop(idle);
        // A late call has no answer from this server.
        let code = tokio::time::timeout(Duration::from_millis(500), call).await;
        (
            code.map_or(tonic::Code::Cancelled, |code| code.expect("no panic")),
            took,
        )
    }

    #[tokio::test]
    async fn what_runs_is_answered() {
        let (code, took) =
            end_during_a_call(Duration::from_millis(400), Duration::from_secs(10)).await;
        assert_eq!(code, tonic::Code::NotFound);
        assert!(took < Duration::from_secs(5), "{took:?}");
    }

    #[tokio::test]
    async fn what_is_late_is_not_waited_for() {
        let (_, took) =
            end_during_a_call(Duration::from_secs(60), Duration::from_millis(300)).await;
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}
