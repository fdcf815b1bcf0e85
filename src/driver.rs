//! Serves a pool over the CSI socket and the admin socket, from start to end: the part that all
//! roles share. The roles are `standalone` and `node`, and pass in the rest.
//!
//! The CSI socket comes first, and answers Probe while the pool is being opened. The admin socket
//! comes with the pool. Then the role's own task begins.
//!
//! With a shared tier, a driver that is told to end first uploads the content that waits.
//! Everything serves meanwhile, so that pods can still start on this node.
//!
//! Then it ends in the reverse order. All of the end has one deadline ([`Drain`]). The role
//! withdraws what it added. Then the services accept nothing new and answer the calls that run, the
//! engine stops at a safe point, and the sockets go. Mounts stay: pods use them. What a disk keeps
//! from being done in time is named in the log, and left to the next start, as after a `kill -9`.

use std::convert::Infallible;
use std::future::{Future, pending, ready};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};

use crate::admin;
use crate::csi::{self, Readiness, UnmountsOnly};
use crate::distribution::{self, Distribution, Peers, Sources};
use crate::engine::{self, Engine};
use crate::model::Share;
use crate::peer;
use crate::server::{self, Drain, Part, Socket};
use crate::shared::{Times, Url};

/// How often something is tried again that only needs a disk that takes changes.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// The longest pause before another try to open a pool. Each try tests the pool's backend.
const AT_LEAST_EVERY: Duration = Duration::from_secs(60);

/// How a driver is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The path of the CSI socket.
    pub socket: PathBuf,
    /// The settings of the CSI services.
    pub csi: csi::Config,
    /// The pool and its limits.
    pub engine: engine::Config,
    /// The shared tier, if there is one.
    pub shared: Option<Shared>,
    /// How this node is a peer of others, if it is one.
    pub peers: Option<peer::Config>,
    /// Where content comes from that is not on this node.
    pub sources: Sources,
    /// How long a cache waits for an answer of the tier and of peers.
    pub ask: Duration,
    /// How long a cache waits for its bytes.
    pub fetch_wait: Duration,
    /// How long the end may take.
    pub grace: Duration,
}

/// The shared tier, and how this node uses it.
#[derive(Debug, Clone)]
pub struct Shared {
    /// Where it is.
    pub url: Url,
    /// The most bytes per second of all uploads; `None`: no limit.
    pub bandwidth: Option<NonZeroU64>,
    /// How long the end of the driver waits for uploads.
    pub drain: Duration,
    /// How long each half of a publication may take.
    pub publish_within: Duration,
}

/// Starts to use the tier and the peers; `None`: there is neither. A tier that cannot be opened, or
/// does not answer, keeps no pod from its content on this node: `status` and the log have the
/// error.
fn distribute(
    shared: Option<Shared>,
    peers: Option<Arc<dyn Peers>>,
    engine: &Engine,
    settings: distribution::Settings,
) -> Option<Arc<Distribution>> {
    if shared.is_none() && peers.is_none() {
        return None;
    }
    let share = settings.share;
    let store = shared.as_ref().map(|shared| {
        let url = &shared.url;
        tracing::info!(tier = %url, share, "a shared tier is used");
        let times = Times {
            publish: shared.publish_within,
            ..Times::default()
        };
        url.clone().open_later(Handle::current(), times)
    });
    let distribution = Distribution::start(engine.clone(), store, peers, settings);
    if let Some(shared) = shared {
        tokio::spawn(probe(shared.url, engine.clone(), distribution.clone()));
    }
    Some(distribution)
}

/// A namespace and a name to ask about where there is no content.
const UNKNOWN: (&str, &str) = ("default", "task-cache/probe");

/// Whether the tier can be opened. That can block on a filesystem.
async fn opens(url: Url) -> bool {
    let (tell, told) = oneshot::channel();
    let runtime = Handle::current();
    let open = move || tell.send(url.open(runtime, Times::default()).is_ok());
    let thread = std::thread::Builder::new().name("shared-open".to_owned());
    // Without a thread, a pod meets the error first.
    thread.spawn(open).is_err() || told.await.unwrap_or(true)
}

/// Asks the tier one question, so that the log and `status` have an error that lasts before the
/// first pod meets it. A credential may be limited to some namespaces, so the question is about one
/// that has content here. Without any, it is asked only if the tier cannot be opened at all.
async fn probe(url: Url, engine: Engine, distribution: Arc<Distribution>) {
    let artifacts = engine.artifacts(None);
    let name = artifacts
        .into_iter()
        .find_map(|row| Some((row.tenant, row.name?)));
    let name = match name {
        None if !opens(url).await => UNKNOWN.0.parse().ok().zip(UNKNOWN.1.parse().ok()),
        name => name,
    };
    if let Some((tenant, reference)) = name {
        // The distribution notes an error itself.
        let _number = distribution.base(&tenant, &reference).await;
    }
}

/// Why the driver does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A socket cannot be served.
    #[error(transparent)]
    Server(#[from] server::Error),
    /// This node cannot be a peer.
    #[error(transparent)]
    Peer(#[from] peer::Error),
    /// The pool cannot be opened.
    #[error("{}", server::message_of(.0))]
    Engine(engine::Error),
    /// A defect: a task ended before it was told to.
    #[error(transparent)]
    Exited(#[from] server::Exited),
}

/// The tasks that a role adds to the services, each with the name that the log has for it. A task
/// ends when the drain begins, and not before.
pub type Tasks = Vec<(&'static str, BoxFuture<'static, ()>)>;

/// Prepares the process before it makes its first file. It clears the umask, so that files get
/// exactly the modes given. It raises the limit of descriptors to the machine's maximum, since a
/// volume that is being sealed holds some.
pub fn prepare_process() {
    umask(Mode::empty());
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
}

/// Serves a pool until `shutdown` is ready and the drain is over.
///
/// `ready` says whether there is an engine. `role` makes the tasks that run beside the services:
/// once there is an engine, or without one when volumes can only be unmounted. The services end
/// after them.
pub async fn run(
    config: Config,
    drain: Drain,
    ready: watch::Sender<Readiness>,
    role: impl FnOnce(Option<Engine>, Drain) -> Tasks,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let most = config.shared.as_ref().map(|shared| shared.drain);
    let told = async {
        shutdown.await;
        drain.announce(most.unwrap_or_default());
        upload_rest(&ready, &drain).await;
        drain.begin();
        pending::<Infallible>().await
    };
    tokio::select! {
        ended = serve(config, &drain, &ready, role) => ended,
        never = told => match never {},
    }
}

/// Uploads the content that waits. Returns early if the driver ends for another reason.
async fn upload_rest(ready: &watch::Sender<Readiness>, drain: &Drain) {
    let Readiness::Ready(engine, Some(distribution)) = ready.borrow().clone() else {
        return;
    };
    let within = drain.serves_for();
    tracing::info!(?within, "told to end: waiting content is uploaded first");
    let upload = async {
        // A seal that is not durable yet is not in the queue.
        let _in_time = timeout(within, engine.settled()).await;
        distribution.drain(drain.serves_for()).await
    };
    tokio::select! {
        drained = upload => {
            let (uploaded, left) = (drained.uploaded, drained.left);
            if left == 0 {
                tracing::info!(uploaded, left, "uploaded");
            } else {
                tracing::warn!(uploaded, left,
                    "not all content was uploaded in time; the next start on this pool uploads the \
                     rest");
            }
        }
        () = drain.begun() => {}
    }
}

async fn serve(
    config: Config,
    drain: &Drain,
    ready: &watch::Sender<Readiness>,
    role: impl FnOnce(Option<Engine>, Drain) -> Tasks,
) -> Result<(), Error> {
    let bound = drain.finish("making the CSI socket", Socket::bind(&config.socket));
    let Some(socket) = bound.await.transpose()? else {
        return Ok(());
    };
    // Logged once the socket is bound: `/healthz` answers from then on.
    tracing::info!(
        socket = %config.socket.display(),
        pool = %config.engine.pool.display(),
        version = env!("CARGO_PKG_VERSION"),
        "starting"
    );
    let share = config.csi.features.share == Share::Auto;
    let csi = csi::serve(socket, config.csi, ready.subscribe(), drain.clone());
    let csi = Part::start("CSI services", drain, csi.map(|it| it.map_err(Error::from)));
    let shared = config.shared;
    let settings = distribution::Settings {
        share,
        sources: config.sources,
        ask: config.ask,
        fetch_wait: config.fetch_wait,
        input_wait: config.engine.input_wait,
        bandwidth: shared.as_ref().and_then(|shared| shared.bandwidth),
        notices: config.engine.notices.clone(),
        ..distribution::Settings::default()
    };
    let engine_config = config.engine.clone();
    let opened = drain.finish("opening the pool", open(config.engine, config.peers));
    let served = match opened.await {
        Some(Ok((engine, socket, node))) => {
            let peers = node.as_ref().map(peer::Node::peers);
            let distribution = distribute(shared, peers, &engine, settings);
            let node = node.map(|node| serve_peers(drain, node, engine.clone()));
            serve_pool(engine, distribution, node, socket, drain, ready, role).await
        }
        Some(Err(Error::Engine(error))) => {
            unmount_only(error, engine_config, drain, ready, role).await
        }
        Some(Err(error)) => Err(error),
        None => Ok(()),
    };
    drain.close();
    let closed = csi.end().await;
    if served.is_ok() && closed.is_ok() {
        tracing::info!("stopped; mounts stay");
    }
    served.and(closed)
}

/// Serves an open pool until the drain begins, then ends all but the CSI services.
async fn serve_pool(
    engine: Engine,
    distribution: Option<Arc<Distribution>>,
    node: Option<Part<Error>>,
    socket: AdminSocket,
    drain: &Drain,
    ready: &watch::Sender<Readiness>,
    role: impl FnOnce(Option<Engine>, Drain) -> Tasks,
) -> Result<(), Error> {
    let (asked, moves, closing) = (engine.clone(), distribution.clone(), drain.clone());
    let admin = async move {
        let socket = tokio::select! {
            socket = socket => socket?,
            () = closing.closing() => return Ok(()),
        };
        Ok(admin::serve(socket, asked, moves, closing, admin::STALL).await?)
    };
    let admin = Part::start("admin service", drain, admin);
    ready.send_replace(Readiness::Ready(engine.clone(), distribution.clone()));
    tracing::info!("ready");
    let role = start(drain, role(Some(engine.clone()), drain.clone()));
    tokio::select! {
        () = drain.begun() => {}
        () = engine.needs_restart() => drain.begin(),
    }
    tracing::info!("stopping: running calls are answered, new calls are refused");
    // Calls that come until then are still answered.
    let role = Part::end_all(role).await;
    drain.close();
    // A publish that waits for content learns that the driver ends, while the services close.
    if let Some(distribution) = distribution {
        let stopped = distribution.stop();
        drain.finish("uploads and fetches", stopped).await;
    }
    // Peers hold content open.
    let node = match node {
        Some(node) => node.end().await,
        None => Ok(()),
    };
    engine.shutdown_within(drain.left()).await;
    let admin = admin.end().await;
    role.and(node).and(admin)
}

/// Serves without a pool that could not be opened: pods can end, which needs nothing of the pool.
/// Until the drain begins, or the pool can be opened; the next start does that. The error is
/// returned if the directory has nothing of a pool, so that no volume is mounted; and if another
/// process has the pool, which may be about to unmount the same volumes.
async fn unmount_only(
    error: engine::Error,
    config: engine::Config,
    drain: &Drain,
    ready: &watch::Sender<Readiness>,
    role: impl FnOnce(Option<Engine>, Drain) -> Tasks,
) -> Result<(), Error> {
    let pool = if let engine::Error::PoolInUse { .. } = error {
        None
    } else {
        let look = Engine::look_offline(&config.pool);
        drain.finish("looking at the pool", look).await.flatten()
    };
    let Some(pool) = pool.filter(|_| !drain.has_begun()) else {
        return Err(Error::Engine(error));
    };
    let (backend, why) = (pool.backend, server::message_of(&error));
    tracing::error!(%why, "the pool cannot be opened: volumes can only be unmounted");
    ready.send_replace(Readiness::UnmountsOnly(UnmountsOnly { backend, why }));
    let role = start(drain, role(None, drain.clone()));
    let opens = async {
        let mut pause = LOOK_AGAIN;
        loop {
            sleep(pause).await;
            match Engine::open(config.clone()).await {
                Ok(engine) => break engine,
                Err(error) => tracing::debug!(%error, "the pool still cannot be opened"),
            }
            pause = (pause * 2).min(AT_LEAST_EVERY);
        }
    };
    tokio::select! {
        () = drain.begun() => {}
        engine = opens => {
            tracing::info!(
                "the pool can be opened again: the driver exits so that the next start uses it");
            drain.begin();
            engine.shutdown_within(drain.left()).await;
        }
    }
    Part::end_all(role).await
}

/// Starts the tasks of a role.
fn start(drain: &Drain, tasks: Tasks) -> Vec<Part<Error>> {
    let start = |(name, task): (_, BoxFuture<'static, ()>)| Part::start(name, drain, task.map(Ok));
    tasks.into_iter().map(start).collect()
}

/// Serves content to the peers.
fn serve_peers(drain: &Drain, node: peer::Node, engine: Engine) -> Part<Error> {
    let closing = drain.clone();
    let work = async move {
        if let Err(error) = node.serve(engine, closing).await {
            tracing::error!(%error, "peers cannot be served");
        }
        Ok(())
    };
    Part::start("service for peers", drain, work)
}

/// The admin socket, at once or when there is space for it.
type AdminSocket = BoxFuture<'static, server::Result<Socket>>;

/// Opens the pool and makes its admin socket. That is there before the driver says that it is
/// ready, since a caller that waits for that may connect the next moment. The exception is a pool
/// without a free inode: a pod may have them all, and can end only when the driver is ready.
async fn open(
    config: engine::Config,
    peers: Option<peer::Config>,
) -> Result<(Engine, AdminSocket, Option<peer::Node>), Error> {
    // A wrong list is known before the pool takes seconds to open.
    let node = match peers {
        Some(peers) => Some(peer::Node::open(peers).await?),
        None => None,
    };
    let pool = config.pool.clone();
    let engine = Engine::open(config).await.map_err(Error::Engine)?;
    match admin::bind(&pool).await {
        Ok(socket) => Ok((engine, ready(Ok(socket)).boxed(), node)),
        Err(error) if error.is_full() => {
            tracing::error!(%error, pause = ?LOOK_AGAIN,
                "the pool is full: the admin commands do not work until there is space");
            Ok((engine, bind_admin_later(pool).boxed(), node))
        }
        Err(error) => {
            engine.shutdown().await;
            Err(error.into())
        }
    }
}

/// Makes the admin socket as soon as the pool has an inode for it.
async fn bind_admin_later(pool: PathBuf) -> server::Result<Socket> {
    loop {
        sleep(LOOK_AGAIN).await;
        match admin::bind(&pool).await {
            Err(error) if error.is_full() => {}
            bound => break bound,
        }
    }
}
