//! The driver of one node of a cluster: the CSI services for the kubelet of that node, and
//! registration with it. `driver` has what all roles share; this file has what a cluster adds, and
//! the order.
//!
//! The driver registers with kubelet when it can serve and has applied the clears that it missed.
//! When it ends, it withdraws that first.

use std::future::Future;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::api::PoolPeer;
use crate::csi::{self, ProbeError, Readiness};
use crate::distribution::{Away, FindDistribution};
use crate::engine::{Engine, Notice, Notices};
use crate::kubelet::{self, Registration};
use crate::model::NodeId;
use crate::server::{Drain, Part};
use crate::{driver, http, hub, k8s, link, peer};

/// How a node is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The settings of every role.
    pub driver: driver::Config,
    /// Kubelet's root directory.
    pub kubelet_dir: PathBuf,
    /// The address of health and metrics, if they are served.
    pub http: Option<SocketAddr>,
    /// The API server to watch pods in and report events to, if there is one.
    pub kubernetes: Option<k8s::Config>,
    /// Whether to carry out the orders of a controller. Needs `kubernetes`.
    pub cluster: bool,
    /// How this node is a peer of the others, if it is one. Needs `cluster`.
    pub peers: Option<Peers>,
}

/// How a node of a cluster is a peer of the others.
#[derive(Debug, Clone)]
pub struct Peers {
    /// The address that serves content to them.
    pub listen: SocketAddr,
    /// The address that they connect to.
    pub address: SocketAddr,
    /// The most bytes per second that are sent to all of them; `None`: no limit.
    pub bandwidth: Option<NonZeroU64>,
}

impl Peers {
    /// This node as a peer; and the watches over the others and the controller. The key is made for
    /// this run only: a `Pool` tells the others a new one as soon as a new address.
    fn open(
        self,
        node: &NodeId,
        kubeconfig: Option<PathBuf>,
    ) -> Result<(Peering, impl Future<Output = ()> + Send + 'static), Error> {
        let key = link::Key::generate().map_err(|error| driver::Error::Peer(error.into()))?;
        let place = PoolPeer {
            address: self.address.to_string(),
            key: key.name().to_string(),
            catalog: false,
            away: Vec::new(),
        };
        let away: Arc<Away> = Arc::default();
        let (controller, follow) = k8s::endpoint::watch(kubeconfig.clone());
        let (others, watch) = k8s::peers::Peers::new(node.clone(), kubeconfig);
        let catalog = hub::Node::new(node.clone(), key.clone(), controller);
        let config = peer::Config {
            listen: Some(self.listen),
            members: peer::Members::Given {
                key,
                roster: others.clone(),
                access: Arc::new(k8s::checked::Checked::new(others)),
                directory: Some(catalog.clone()),
                away: Arc::clone(&away),
            },
            bandwidth: self.bandwidth,
        };
        let published = k8s::agent::Peering {
            place,
            directory: catalog.clone(),
            away,
        };
        let peering = Peering {
            config,
            published,
            catalog,
        };
        let watches = async {
            tokio::join!(watch, follow);
        };
        Ok((peering, watches))
    }
}

/// A node that is a peer of the others.
struct Peering {
    config: peer::Config,
    /// For its `Pool`.
    published: k8s::agent::Peering,
    catalog: Arc<hub::Node>,
}

/// Why the node does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// The HTTP port cannot be served.
    #[error(transparent)]
    Http(#[from] http::Error),
    /// The driver cannot be registered.
    #[error(transparent)]
    Registration(#[from] kubelet::Error),
}

/// How many notices may wait for the API server; more are lost.
const MOST_NOTICES: usize = 1024;
/// How often the driver calls its own socket before it registers with kubelet.
const TRY_AGAIN: Duration = Duration::from_millis(200);
/// How long the driver may take to answer itself. Less than kubelet waits for `/healthz` (5 s,
/// `timeoutSeconds` in deploy/), so that kubelet gets the reason.
const TO_ANSWER: Duration = Duration::from_secs(3);

/// How long the registration with kubelet waits for the clears that this node missed.
const TO_CATCH_UP: Duration = Duration::from_secs(2);

/// Serves this node until `shutdown` is ready and the drain is over.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let socket = config.driver.socket.clone();
    let kubernetes = config.kubernetes.as_ref();
    let watched = kubernetes.map(|kubernetes| kubernetes.watched.subscribe());
    // `k8s` reports it and `kubelet` reads it: an API server that answers the driver also answers
    // kubelet.
    let cluster = kubernetes.map(|kubernetes| kubernetes.answers.subscribe());
    let registration = Registration::new(&kubelet::Config {
        kubelet: config.kubelet_dir,
        driver: csi::DRIVER_NAME,
        endpoint: socket.clone(),
        cluster,
    })?;
    let mut driver = config.driver;
    let kubernetes = config.kubernetes.map(|kubernetes| {
        let (notices, heard) = Notices::channel(MOST_NOTICES);
        driver.engine.notices = Some(notices);
        driver.engine.pods = Some(kubernetes.known.clone());
        (kubernetes, heard)
    });
    let (ready, readiness) = watch::channel(Readiness::Recovering);
    let distribution = find_distribution(readiness.clone());
    let drain = Drain::new(driver.grace);
    let pages = http::Sources {
        alive: alive(&socket, &drain),
        drain: drain.clone(),
        rpcs: driver.csi.rpcs.clone(),
        role: http::Role::Node {
            engine: find_engine(readiness.clone()),
            distribution: find_distribution(readiness),
            registered: registration.registered(),
            watched,
        },
    };
    let http = match config.http {
        Some(address) => Some(http::Listener::bind(address).await?),
        None => None,
    };
    let orders = kubernetes
        .as_ref()
        .filter(|_| config.cluster)
        .map(|(kubernetes, _)| kubernetes.kubeconfig.clone());
    let id = driver.csi.node.clone();
    let (mut published, mut catalog, mut watching) = (None, None, None);
    if let (Some(peers), Some(kubeconfig)) = (config.peers, &orders) {
        let (peering, watch) = peers.open(&id, kubeconfig.clone())?;
        published = Some(peering.published);
        catalog = Some(peering.catalog);
        // The controller tells them with the stream of the catalog.
        driver.engine.policies = true;
        driver.peers = Some(peering.config);
        // It begins while the pool is opened.
        let end = drain.clone();
        let watch = async move {
            tokio::select! {
                () = watch => {}
                () = end.begun() => {}
            }
            Ok(())
        };
        let name = "watches over peers and the controller";
        watching = Some(Part::<driver::Error>::start(name, &drain, watch));
    }
    let tasks = Tasks {
        kubernetes,
        orders: orders.map(|kubeconfig| Orders { kubeconfig }),
        id,
        distribution,
        published,
        catalog,
        socket,
        registration,
    };
    let role = |engine, drain| tasks.start(engine, drain);
    // Until all else has ended, so that a probe sees that the driver is stopping.
    let _http = http.map(|http| AbortOnDropHandle::new(tokio::spawn(http.serve(pages))));
    driver::run(driver, drain, ready, role, shutdown).await?;
    Part::end_all(watching).await?;
    Ok(())
}

/// How the orders of a controller are read.
struct Orders {
    kubeconfig: Option<PathBuf>,
}

/// What the tasks of a node need.
struct Tasks {
    kubernetes: Option<(k8s::Config, mpsc::Receiver<Notice>)>,
    /// If the orders of a controller are carried out.
    orders: Option<Orders>,
    id: NodeId,
    distribution: FindDistribution,
    published: Option<k8s::agent::Peering>,
    catalog: Option<Arc<hub::Node>>,
    socket: PathBuf,
    registration: Registration,
}

impl Tasks {
    /// The tasks, each with its name. Without an engine, kubelet only unmounts.
    fn start(self, engine: Option<Engine>, drain: Drain) -> driver::Tasks {
        let clears = self.catalog.clone().filter(|_| engine.is_some());
        let mut tasks = match engine {
            Some(engine) => {
                let (kubernetes, catalog, orders) = (self.kubernetes, self.catalog, self.orders);
                let node = csi::node_of(&self.id, engine.backend());
                let watch = kubernetes.map(|it| watch_pods(it, engine.clone(), drain.clone()));
                let tier = self.distribution.clone();
                let report = catalog.map(|it| report(it, engine.clone(), tier, drain.clone()));
                let (distribution, published) = (self.distribution, self.published);
                let stop = drain.clone();
                let obey = orders.map(|Orders { kubeconfig }| async move {
                    let stop = stop.begun();
                    k8s::agent::run(kubeconfig, engine, distribution, node, published, stop).await;
                });
                if watch.is_none() {
                    tracing::info!(
                        "pods are not watched: their outcomes come from `baggageclaim outcome` and \
                         markers only"
                    );
                }
                let tasks = [
                    ("watch over pods", watch.map(FutureExt::boxed)),
                    ("reports to the catalog", report.map(FutureExt::boxed)),
                    ("orders of the controller", obey.map(FutureExt::boxed)),
                ];
                let given = |(name, task): (_, Option<_>)| Some((name, task?));
                tasks.into_iter().filter_map(given).collect()
            }
            None => Vec::new(),
        };
        let (socket, registration) = (self.socket, self.registration);
        let offer = async move {
            let can_serve = async {
                answers(&socket).await;
                // No pod starts from content that was cleared while this node was away.
                if let Some(catalog) = clears {
                    catalog.caught_up(TO_CATCH_UP).await;
                }
            };
            tokio::select! {
                () = can_serve => registration.keep(&drain).await,
                () = drain.begun() => {}
            }
        };
        tasks.push(("registration with kubelet", offer.boxed()));
        tasks
    }
}

/// Reports to the controller what this node has, until the drain begins.
async fn report(catalog: Arc<hub::Node>, engine: Engine, tier: FindDistribution, drain: Drain) {
    tokio::select! {
        () = catalog.run(engine, tier) => {}
        () = drain.begun() => {}
    }
}

/// Watches pods in the API server and reports events on them, until the drain begins.
async fn watch_pods(
    (config, heard): (k8s::Config, mpsc::Receiver<Notice>),
    engine: Engine,
    drain: Drain,
) {
    k8s::run(config, engine, heard, drain.begun()).await;
}

/// Whether the CSI services answer at their path, ready or not. A restart can repair only this.
pub(crate) fn alive(socket: &Path, drain: &Drain) -> http::Alive {
    let (socket, drain) = (socket.to_owned(), drain.clone());
    Arc::new(move || {
        let (socket, drain) = (socket.clone(), drain.clone());
        Box::pin(async move {
            match csi::probe(&socket, TO_ANSWER).await {
                // Kubelet would get no answer either. A driver that starts, or whose disk hangs,
                // answers this: no system call that waits for a disk runs on the threads that
                // serve.
                Err(error @ (ProbeError::Connect { .. } | ProbeError::Silent { .. }))
                    if !drain.has_begun() =>
                {
                    Err(error.to_string())
                }
                // It answers, even if with an error. Or it is stopping. Or kubelet's disk hangs,
                // which a restart cannot repair.
                _ => Ok(()),
            }
        })
    })
}

/// The engine, once there is one.
fn find_engine(readiness: watch::Receiver<Readiness>) -> http::FindEngine {
    Arc::new(move || match &*readiness.borrow() {
        Readiness::Recovering => Err("the pool is being opened".to_owned()),
        Readiness::UnmountsOnly(pool) => Err(pool.why.clone()),
        Readiness::Ready(engine, _) => Ok(engine.clone()),
    })
}

/// The shared tier and the peers, once there is an engine.
fn find_distribution(readiness: watch::Receiver<Readiness>) -> FindDistribution {
    Arc::new(move || match &*readiness.borrow() {
        Readiness::Ready(_, distribution) => distribution.clone(),
        Readiness::Recovering | Readiness::UnmountsOnly(_) => None,
    })
}

/// Ready when the CSI services answer at their path that they are ready: kubelet calls them as soon
/// as the driver registers.
async fn answers(socket: &Path) {
    loop {
        match csi::probe(socket, TO_ANSWER).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(socket = %socket.display(), %error, "the driver does not answer at its own socket yet");
            }
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}
