//! What every gRPC server of the driver shares: its unix socket, its one line of log per RPC, its table of codes, and
//! its end.
//!
//! It knows gRPC and what can go wrong in the engine, never a message of a protocol: those are `csi`'s and `admin`'s.
//!
//! # The end
//!
//! On shutdown nothing new is accepted and what runs is answered, for a grace period; who is still not done is named
//! in the log. Then the socket's file goes, if it is still ours.

mod codes;
mod routes;
mod socket;
mod trace;

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_stream::wrappers::UnixListenerStream;

pub use codes::{code_name, code_of, message_of};
pub use routes::Routes;
pub use socket::{Socket, connect};
pub use trace::{Rpc, Trace};

/// A result of this room.
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
    /// It does not name a file in a directory.
    #[error("socket path {} must be absolute and end with a file's name", path.display())]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// Something that is no socket has its name; it may be somebody's.
    #[error("{} is there already and is not a socket: it was left alone; remove it or choose another path", path.display())]
    InTheWay {
        /// The path.
        path: PathBuf,
    },
    /// Somebody serves it.
    #[error("another process answers at {} already: stop it first, or choose another path", path.display())]
    Taken {
        /// The path.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("socket {}: {doing}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What failed.
        source: std::io::Error,
    },
    /// Its directory cannot be used.
    #[error("socket {}: {source}", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
        /// What failed.
        source: crate::sys::Error,
    },
    /// The server ended by itself.
    #[error("serving {}: {source}", path.display())]
    Serve {
        /// The path.
        path: PathBuf,
        /// Why.
        source: tonic::transport::Error,
    },
}

/// Serves `routes` on `socket` until `shutdown` is ready and what runs then is answered, or `grace` is over.
pub async fn serve(
    socket: Socket,
    routes: Routes,
    trace: Trace,
    grace: Duration,
    shutdown: impl Future<Output = ()>,
) -> Result<()> {
    let (listener, name) = socket.into_parts();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tonic::transport::Server::builder()
        .layer(trace.clone())
        .serve_with_incoming_shutdown(routes, UnixListenerStream::new(listener), async {
            // A dropped sender means the same: the server is to end.
            let _ = stopped.await;
        });
    let failed = |source| Error::Serve {
        path: name.path().to_owned(),
        source,
    };
    tokio::pin!(server);
    tokio::select! {
        ended = &mut server => return ended.map_err(failed),
        () = shutdown => {}
    }
    drop(stop);
    if let Ok(ended) = tokio::time::timeout(grace, server).await {
        return ended.map_err(failed);
    }
    trace.name_the_late(name.path());
    Ok(())
}
