//! The whole driver in one process on one machine, without Kubernetes.
//! A library function, so that tests and the demo run what people run.
//!
//! The CSI socket is there first and answers Probe while the pool is being opened; the admin socket comes when there is
//! something to administer. At the end: nothing new is accepted, what runs is answered within the grace period, the
//! engine stops at a safe point, the sockets go. Mounts stay: pods use them.

use std::future::Future;
use std::path::PathBuf;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};
use tokio::sync::watch;

use crate::csi::{self, Readiness};
use crate::engine::{self, Engine};
use crate::server::{self, Socket};
use crate::sys::Dir;
use crate::{admin, sys};

/// How it is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the CSI services are.
    pub socket: PathBuf,
    /// What they are told.
    pub csi: csi::Config,
    /// The pool and what is done with it.
    pub engine: engine::Config,
}

/// Why it does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A socket cannot be served.
    #[error(transparent)]
    Server(#[from] server::Error),
    /// The pool cannot be opened.
    #[error("{}", server::message_of(.0))]
    Engine(engine::Error),
    /// The pool was opened and is not there.
    #[error("the pool's directory: {0}")]
    Pool(sys::Error),
}

/// What the process needs before it makes its first file: modes are meant as they are written, so no umask; and as many
/// descriptors as the machine allows, since a volume that is being sealed holds some.
pub fn prepare_process() {
    umask(Mode::empty());
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// Serves a pool until `shutdown` is ready and all is put away.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let socket = Socket::bind(&config.socket).await?;
    let (stop, stopped) = watch::channel(false);
    let (ready, readiness) = watch::channel(Readiness::Recovering);
    let grace = config.csi.grace;
    let csi = csi::serve(socket, config.csi, readiness, wait(stopped.clone()));
    tokio::pin!(csi);
    tracing::info!(
        socket = %config.socket.display(),
        pool = %config.engine.pool.display(),
        version = env!("CARGO_PKG_VERSION"),
        "starting"
    );

    let pool = config.engine.pool.clone();
    let engine = tokio::select! {
        opened = Engine::open(config.engine) => opened.map_err(Error::Engine)?,
        ended = &mut csi => return Ok(ended?),
    };
    let dir = Dir::open(&pool).map_err(Error::Pool)?;
    // There before anybody is told that the driver is ready: who waits for that may ask the next moment.
    let socket = admin::bind(dir).await?;
    let admin = admin::serve(socket, engine.clone(), grace, wait(stopped));
    ready.send_replace(Readiness::Ready(engine.clone()));
    tracing::info!("ready");

    let both = async { tokio::join!(csi, admin) };
    tokio::pin!(both, shutdown);
    let (csi, admin) = tokio::select! {
        ended = &mut both => {
            engine.shutdown().await;
            ended
        }
        () = &mut shutdown => {
            tracing::info!("stopping: what runs is answered, nothing new is accepted");
            stop.send_replace(true);
            // At the same time: a publish that waits for content must hear that it waits in vain, or it is late.
            tokio::join!(both, engine.shutdown()).0
        }
    };
    tracing::info!("stopped; mounts stay");
    csi.and(admin)?;
    Ok(())
}

/// Ready when it is time to stop.
async fn wait(mut stopped: watch::Receiver<bool>) {
    // An error means that whoever could say so is gone: the same.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}
