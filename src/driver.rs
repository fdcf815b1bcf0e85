//! What every role of the driver does: it serves a pool, over the CSI socket and the admin socket, from start to end.
//! What a role adds is handed in; roles are `standalone` and `node`.
//!
//! The CSI socket is there first and answers Probe while the pool is being opened; the admin socket comes when there is
//! something to administer; then what the role adds begins. At the end it goes the other way: the role takes back what it
//! added, nothing new is accepted, what runs is answered within the grace period, the engine stops at a safe point, the
//! sockets go. Mounts stay: pods use them.

use std::future::Future;
use std::path::PathBuf;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

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
    /// A defect: what the role adds was not to end.
    #[error("a part of the driver ended that was not to; the log says more")]
    Role,
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
///
/// `ready` tells the world whether there is an engine. `role` makes what runs beside the services once there is one; it is
/// told by its token when it is time to stop, ends then, and not before, and has ended before the services do.
pub async fn run<Role>(
    config: Config,
    ready: watch::Sender<Readiness>,
    role: impl FnOnce(Engine, CancellationToken) -> Role,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error>
where
    Role: Future<Output = ()> + Send + 'static,
{
    let socket = Socket::bind(&config.socket).await?;
    let stop = CancellationToken::new();
    let grace = config.csi.grace;
    let stopped = stop.clone().cancelled_owned();
    let csi = csi::serve(socket, config.csi, ready.subscribe(), stopped);
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
    let admin = admin::serve(
        socket,
        engine.clone(),
        grace,
        stop.clone().cancelled_owned(),
    );
    ready.send_replace(Readiness::Ready(engine.clone()));
    tracing::info!("ready");

    let withdraw = CancellationToken::new();
    let mut role = AbortOnDropHandle::new(tokio::spawn(role(engine.clone(), withdraw.clone())));
    let over = CancellationToken::new();
    let csi = over_with(&over, csi);
    let admin = over_with(&over, admin);
    let end = async {
        let in_time = tokio::select! {
            () = shutdown => true,
            () = over.cancelled() => true,
            // Not told to: it panicked, which was printed where it happened.
            _ = &mut role => false,
        };
        tracing::info!("stopping: what runs is answered, nothing new is accepted");
        withdraw.cancel();
        // What is asked until then is still answered.
        if in_time && tokio::time::timeout(grace, &mut role).await.is_err() {
            tracing::warn!("what runs beside the services does not end; it is left");
        }
        stop.cancel();
        // While the services end: a publish that waits for content must hear that it waits in vain, or it is late.
        engine.shutdown().await;
        if in_time { Ok(()) } else { Err(Error::Role) }
    };
    let (csi, admin, role) = tokio::join!(csi, admin, end);
    tracing::info!("stopped; mounts stay");
    csi.and(admin)?;
    role
}

/// Says that it is over when a service ends, by itself or because it was told to.
async fn over_with<T>(over: &CancellationToken, service: impl Future<Output = T>) -> T {
    let ended = service.await;
    over.cancel();
    ended
}
