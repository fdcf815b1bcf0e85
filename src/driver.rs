//! What every role of the driver does: it serves a pool, over the CSI socket and the admin socket, from start to end.
//! What a role adds is handed in; roles are `standalone` and `node`.
//!
//! The CSI socket is there first and answers Probe while the pool is being opened; the admin socket comes when there is
//! something to administer; then what the role adds begins. At the end it goes the other way: the role takes back what it
//! added, nothing new is accepted, what runs is answered, the engine stops at a safe point, the sockets go. Mounts stay: pods
//! use them. All of it together has the grace period: what a disk that does not answer keeps from being done is left to the
//! next start, which a `kill -9` leaves as much.

use std::future::Future;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::admin;
use crate::csi::{self, Readiness, UnmountsOnly};
use crate::engine::{self, Engine};
use crate::server::{self, Socket};

/// What the end may take beyond the grace period: to say who was late, and for an engine to which others have left no time.
const AFTER_GRACE: Duration = Duration::from_secs(1);

/// How often it is tried whether a pool that could not be opened takes changes again.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

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
/// `ready` tells the world whether there is an engine. `role` makes what runs beside the services once there is one, or once it is known
/// that there will be none and volumes are only unmounted; it is told by its token when it is time to stop, ends then, and not
/// before, and has ended before the services do.
pub async fn run<Role>(
    config: Config,
    ready: watch::Sender<Readiness>,
    role: impl FnOnce(Option<Engine>, CancellationToken) -> Role,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error>
where
    Role: Future<Output = ()> + Send + 'static,
{
    say_starting(&config);
    let grace = config.csi.grace;
    tokio::pin!(shutdown);
    let told = OnceLock::new();
    let mut too_long = Box::pin(async {
        shutdown.as_mut().await;
        sleep_until(*told.get_or_init(Instant::now) + grace).await;
        tracing::warn!(
            "the grace period is over, and the driver still starts: that is left to the next start"
        );
    });
    let socket = tokio::select! {
        bound = Socket::bind(&config.socket) => bound?,
        () = &mut too_long => return Ok(()),
    };
    let stop = CancellationToken::new();
    let stopped = stop.clone().cancelled_owned();
    let csi = csi::serve(socket, config.csi, ready.subscribe(), stopped);
    tokio::pin!(csi);
    let open = open(config.engine);
    let opened = tokio::select! {
        opened = open => opened.map(Some),
        ended = &mut csi => return Ok(ended?),
        () = &mut too_long => Ok(None),
    };
    let (engine, socket) = match opened {
        Ok(Some(opened)) => opened,
        not_opened => {
            drop(too_long);
            let (opened, ends) = (not_opened.map(drop), told.get().is_some());
            let over = tokio::select! {
                over = unmount_only(opened, ends, &ready, role, shutdown, grace) => over,
                ended = &mut csi => return Ok(ended?),
            };
            stop.cancel();
            let ended = timeout(AFTER_GRACE, csi).await;
            over?;
            return Ok(ended.unwrap_or(Ok(()))?);
        }
    };
    drop(too_long);
    let admin = admin::serve(
        socket,
        engine.clone(),
        grace,
        stop.clone().cancelled_owned(),
    );
    ready.send_replace(Readiness::Ready(engine.clone()));
    tracing::info!("ready");

    let withdraw = CancellationToken::new();
    let mut role =
        AbortOnDropHandle::new(tokio::spawn(role(Some(engine.clone()), withdraw.clone())));
    let over = CancellationToken::new();
    let (served, late) = (CancellationToken::new(), CancellationToken::new());
    let services = async {
        let both = async { tokio::join!(over_with(&over, csi), over_with(&over, admin)) };
        let ended = tokio::select! {
            (csi, admin) = both => csi.and(admin),
            () = late.cancelled() => {
                tracing::warn!("the services do not end; they are left");
                Ok(())
            }
        };
        served.cancel();
        ended
    };
    let end = async {
        let shutdown = async {
            if told.get().is_none() {
                shutdown.await;
            }
        };
        let in_time = tokio::select! {
            () = shutdown => true,
            () = needs_to_end(&over, &engine) => true,
            // Not told to: it panicked, which was printed where it happened.
            _ = &mut role => false,
        };
        tracing::info!("stopping: what runs is answered, nothing new is accepted");
        withdraw.cancel();
        let until = *told.get_or_init(Instant::now) + grace;
        // What is asked until then is still answered.
        if in_time && timeout_at(until, &mut role).await.is_err() {
            tracing::warn!("what runs beside the services does not end; it is left");
        }
        stop.cancel();
        // While the services end: a publish that waits for content must hear that it waits in vain, or it is late.
        let left = until.saturating_duration_since(Instant::now());
        engine.shutdown_within(left.max(AFTER_GRACE)).await;
        if timeout_at(until + AFTER_GRACE, served.cancelled())
            .await
            .is_err()
        {
            late.cancel();
        }
        if in_time { Ok(()) } else { Err(Error::Role) }
    };
    let (services, role) = tokio::join!(services, end);
    tracing::info!("stopped; mounts stay");
    services?;
    role
}

fn say_starting(config: &Config) {
    tracing::info!(
        socket = %config.socket.display(),
        pool = %config.engine.pool.display(),
        version = env!("CARGO_PKG_VERSION"),
        "starting"
    );
}

/// Serves a pool that could not be opened because its filesystem takes no changes: pods can end, which need nothing of it. Until the
/// driver is told to end, or the pool takes changes: then the next start opens it. What else kept it from being opened is returned.
/// `ends`: it was told while the pool was being opened.
async fn unmount_only<Role>(
    opened: Result<(), Error>,
    ends: bool,
    ready: &watch::Sender<Readiness>,
    role: impl FnOnce(Option<Engine>, CancellationToken) -> Role,
    shutdown: impl Future<Output = ()>,
    grace: Duration,
) -> Result<(), Error>
where
    Role: Future<Output = ()> + Send + 'static,
{
    let Err(Error::Engine(error @ engine::Error::PoolReadOnly { path, .. })) = &opened else {
        return opened;
    };
    if ends {
        return opened;
    }
    let Some(backend) = Engine::backend_offline(path) else {
        return opened;
    };
    let why = server::message_of(error);
    tracing::error!(%why, "volumes can be unmounted, and nothing else");
    ready.send_replace(Readiness::UnmountsOnly(UnmountsOnly { backend, why }));
    let withdraw = CancellationToken::new();
    let mut role = AbortOnDropHandle::new(tokio::spawn(role(None, withdraw.clone())));
    let takes_changes = async {
        while !Engine::takes_writes_offline(path).await {
            sleep(LOOK_AGAIN).await;
        }
    };
    tokio::select! {
        () = shutdown => {}
        () = takes_changes => {
            tracing::info!("the pool takes changes again: the driver ends, so that the next start opens it");
        }
        _ = &mut role => return Err(Error::Role),
    }
    withdraw.cancel();
    if timeout(grace, &mut role).await.is_err() {
        tracing::warn!("what runs beside the services does not end; it is left");
    }
    Ok(())
}

/// Opens the pool, and makes its admin socket: that is there before anybody is told that the driver is ready, since who waits for that may
/// ask the next moment.
async fn open(config: engine::Config) -> Result<(Engine, Socket), Error> {
    let pool = config.pool.clone();
    let engine = Engine::open(config).await.map_err(Error::Engine)?;
    match admin::bind(&pool).await {
        Ok(socket) => Ok((engine, socket)),
        Err(error) => {
            engine.shutdown_within(AFTER_GRACE).await;
            Err(error.into())
        }
    }
}

/// Waits until a service has ended, or until only a new start can tell what the engine's index has.
async fn needs_to_end(over: &CancellationToken, engine: &Engine) {
    tokio::select! {
        () = over.cancelled() => {}
        () = engine.needs_restart() => {}
    }
}

/// Says that it is over when a service ends, by itself or because it was told to.
async fn over_with<T>(over: &CancellationToken, service: impl Future<Output = T>) -> T {
    let ended = service.await;
    over.cancel();
    ended
}
