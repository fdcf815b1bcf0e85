//! Errors of the demo. Each is one line: what this machine lacks, or the operation that failed and
//! its object.

use std::path::PathBuf;

use tonic::Status;

use baggageclaim::admin;
use baggageclaim::kubelet_double::ConnectError;

/// An error of the demo.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "the demo needs root: it mounts overlays with trusted.* attributes, which no user \
         namespace may do. It compiles with your cargo: sudo env \"PATH=$PATH\" \"HOME=$HOME\" {} \
         demo",
        std::env::current_exe().unwrap_or_else(|_| "baggageclaim".into()).display()
    )]
    NeedsRoot,
    #[error("the demo needs CAP_SYS_ADMIN to mount filesystems: {0}")]
    NeedsMounts(nix::errno::Errno),
    #[error("the demo needs {0}")]
    Missing(String),
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("`{program}` failed: {detail}")]
    Program { program: String, detail: String },
    #[error("the driver ended early: {how}; the end of its log:\n{log}")]
    Driver { how: String, log: String },
    #[error("{source}; the end of the driver's log:\n{log}")]
    Connect { source: ConnectError, log: String },
    #[error(transparent)]
    Admin(#[from] admin::ClientError),
    #[error("{operation}: {}: {}", status.code(), status.message())]
    Refused {
        operation: String,
        status: Box<Status>,
    },
    #[error(transparent)]
    PeerKey(#[from] baggageclaim::link::KeyError),
    #[error("content does not reach the shared tier: {0}")]
    NotShared(String),
    #[error("{failed} of {all} claims were not proved")]
    NotProved { failed: usize, all: usize },
    #[error("the demo could not clean up {}: {why}", path.display())]
    Left { path: PathBuf, why: String },
    #[error("interrupted; all mounts and files were removed")]
    Interrupted,
    #[error("the demo itself failed")]
    Panicked,
}

impl Error {
    pub(super) fn io(
        operation: &'static str,
        path: impl Into<PathBuf>,
        source: impl Into<std::io::Error>,
    ) -> Self {
        Self::Io {
            operation,
            path: path.into(),
            source: source.into(),
        }
    }

    pub(super) fn refused(operation: impl Into<String>) -> impl FnOnce(Status) -> Self {
        let operation = operation.into();
        move |status| Self::Refused {
            operation,
            status: Box::new(status),
        }
    }
}
