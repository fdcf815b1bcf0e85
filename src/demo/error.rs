//! Why the demo did not come to its end, in words for the person before the screen.
//! One line each: what is missing, or what failed and where.

use std::path::PathBuf;

use tonic::Status;

use baggageclaim::admin;
use baggageclaim::kubelet_double::ConnectError;

/// Why the demo did not come to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Not root.
    #[error(
        "the demo needs root: it mounts overlays with trusted.* attributes, which no user namespace may do. It compiles with your cargo: \
         sudo env \"PATH=$PATH\" \"HOME=$HOME\" {} demo",
        std::env::current_exe().unwrap_or_else(|_| "baggageclaim".into()).display()
    )]
    NeedsRoot,
    /// Root, and yet not allowed to mount.
    #[error("the demo needs CAP_SYS_ADMIN to mount filesystems: {0}")]
    NeedsMounts(nix::errno::Errno),
    /// Something that should be on this machine is not.
    #[error("the demo needs {0}")]
    Missing(String),
    /// A file or directory could not be used.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was being done.
        operation: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A program that a step or the stage runs failed.
    #[error("`{program}` failed: {detail}")]
    Program {
        /// Its command line.
        program: String,
        /// What it said last.
        detail: String,
    },
    /// The driver ended before it was told to.
    #[error("the driver did not stay: {how}; it said:\n{log}")]
    Driver {
        /// How it ended.
        how: String,
        /// The end of its log.
        log: String,
    },
    /// The driver does not answer as kubelet needs it.
    #[error("{source}; the driver said:\n{log}")]
    Connect {
        /// What failed.
        source: ConnectError,
        /// The end of the driver's log.
        log: String,
    },
    /// The driver's admin socket does not answer.
    #[error(transparent)]
    Admin(#[from] admin::ClientError),
    /// The driver refused something.
    #[error("{operation}: {}: {}", status.code(), status.message())]
    Refused {
        /// What was asked of it.
        operation: String,
        /// What it answered.
        status: Box<Status>,
    },
    /// It ran, and not all was as it should be.
    #[error("{failed} of {all} claims were not proved")]
    NotProved {
        /// How many.
        failed: usize,
        /// Of how many.
        all: usize,
    },
    /// Something is left that should be gone.
    #[error("the demo could not clean up {}: {why}", path.display())]
    Left {
        /// What.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Somebody wanted it to end.
    #[error("interrupted; everything was taken down")]
    Interrupted,
    /// A mistake of the demo's own, reported where it happened.
    #[error("the demo itself failed")]
    Panicked,
}

impl Error {
    /// A file or directory could not be used.
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

    /// The driver refused something.
    pub(super) fn refused(operation: impl Into<String>) -> impl FnOnce(Status) -> Self {
        let operation = operation.into();
        move |status| Self::Refused {
            operation,
            status: Box::new(status),
        }
    }
}
