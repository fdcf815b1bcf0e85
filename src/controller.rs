//! The controller of a cluster: the CSI services for the sidecars in the same pod, over the
//! volumes of all nodes (`k8s::claims`). It has no pool and needs no privilege.
//!
//! With `--hub-listen` it also serves the catalog (`hub`), and keeps clears, cache policies,
//! budgets and `Cache` objects (`k8s`). With `--webhook-listen` it serves the locality webhook.
//!
//! It is one replica without leader election. Two at a time do no harm, since each write is
//! conditional. Its state is in the API server, so it can be killed at any time.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::distribution::roster::{Controller, Members as _};
use crate::k8s::claims::{Cluster, Setup};
use crate::k8s::mirror::Mirror;
use crate::model::Tenant;
use crate::server::{self, Drain, Exited, Part, Routes, Socket};
use crate::shared::{self, Periodic, Store, Times, Url};
use crate::telemetry::metrics::{Registry, Rpcs};
use crate::{admin, csi, http, hub, k8s, locality, node};

/// How many orders to clear names wait.
const ORDERS: usize = 16;

/// How a controller is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The path of the CSI socket.
    pub socket: PathBuf,
    /// The address of health and metrics, if they are served.
    pub http: Option<SocketAddr>,
    /// A kubeconfig; `None`: the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// How long a volume stays whose claim was given up.
    pub leak_grace: Duration,
    /// The shared tier whose garbage is collected, if there is one.
    pub shared: Option<Url>,
    /// How long a Node object is missing before its node is given up.
    pub node_grace: Duration,
    /// How the nodes reach the catalog, if it is served.
    pub hub: Option<Hub>,
    /// How the API server asks which nodes a pod prefers, if it does. Needs `hub`.
    pub webhook: Option<Webhook>,
    /// How long the end may take.
    pub grace: Duration,
}

/// How the API server reaches the locality webhook.
#[derive(Debug, Clone)]
pub struct Webhook {
    /// The address that serves it.
    pub listen: SocketAddr,
    /// The file with its key and certificate.
    pub identity: PathBuf,
}

/// How the nodes reach the catalog.
#[derive(Debug, Clone, Copy)]
pub struct Hub {
    /// The address that serves them.
    pub listen: SocketAddr,
    /// The IP address that they connect to; `None`: that of `listen`.
    pub ip: Option<IpAddr>,
    /// How many task caches of a namespace the API server shows.
    pub mirror_caches: usize,
    /// How often they report what namespaces use.
    pub usage_interval: Duration,
}

/// Why the controller does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket cannot be served.
    #[error(transparent)]
    Server(#[from] server::Error),
    /// The HTTP port cannot be served.
    #[error(transparent)]
    Http(#[from] http::Error),
    /// The catalog cannot be served.
    #[error(transparent)]
    Hub(#[from] hub::ServeError),
    /// The locality webhook cannot be served.
    #[error(transparent)]
    Locality(#[from] locality::Error),
    /// No thread for the collector.
    #[error("the collector of the shared tier cannot be started: {0}")]
    Collector(#[source] std::io::Error),
    /// A defect: a task ended before it was told to.
    #[error(transparent)]
    Exited(#[from] Exited),
}

/// Serves the cluster's volumes until `shutdown` is ready and the running calls are answered.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let drain = Drain::new(config.grace);
    let served = serve(config, drain.clone());
    tokio::pin!(served);
    tokio::select! {
        // It failed.
        served = &mut served => return served,
        () = shutdown => drain.close(),
    }
    served.await
}

async fn serve(config: Config, drain: Drain) -> Result<(), Error> {
    let socket = Socket::bind(&config.socket).await?;
    let listener = match config.http {
        Some(address) => Some(http::Listener::bind(address).await?),
        None => None,
    };
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(socket = %config.socket.display(), version, "starting");
    let client = tokio::select! {
        client = k8s::connect(config.kubeconfig.as_deref()) => client,
        () = drain.begun() => return Ok(()),
    };
    let setup = Setup {
        leak_grace: config.leak_grace,
        node_grace: config.node_grace,
    };
    let (cluster, work) = Cluster::new(client.clone(), setup);
    let hub = match config.hub {
        Some(hub) => Some(open_hub(hub, &cluster).await?),
        None => None,
    };
    // It collects until this function ends, also if no page shows its metrics.
    let collector = config.shared.as_ref().map(|url| collect(url, hub.as_ref()));
    let collector = collector.transpose()?.map(Arc::new);
    let webhook = open_webhook(config.webhook, hub.as_ref()).await?;
    let overview = serve_people(hub.as_ref());
    let tier = collector.as_deref().map(Tier::of);
    let figures = Figures {
        cluster: cluster.clone(),
        catalog: hub.as_ref().map(|it| it.hub.handle()),
        budgets: hub.as_ref().map(|it| it.budgets.clone()),
        locality: webhook.as_ref().map(locality::Webhook::counters),
        collector: collector.clone(),
    };
    let (list, listed) = watch::channel(false);
    let rpcs = Rpcs::default();
    let pages = http::Sources {
        alive: node::alive(&config.socket, &drain),
        drain: drain.clone(),
        rpcs: rpcs.clone(),
        role: http::Role::Controller {
            listed: listed.clone(),
            figures: Arc::new(move |registry: &mut Registry| figures.register(registry)),
        },
    };
    let _http =
        listener.map(|listener| AbortOnDropHandle::new(tokio::spawn(listener.serve(pages))));
    let csi = csi::serve_controller(
        socket,
        rpcs,
        cluster.clone(),
        listed,
        drain.clone(),
        overview,
    );
    // Calls wait for what the watches see, also while the controller ends.
    let services = async move {
        tokio::select! {
            served = csi => served.map_err(Error::from),
            () = work => Err(Error::from(Exited("watch over volumes"))),
        }
    };
    let mut parts = vec![Part::start("CSI services", &drain, services)];
    let catalog = hub.map(|hub| serve_hub(hub, client, tier, &drain));
    parts.extend(catalog);
    parts.extend(webhook.map(|webhook| serve_webhook(webhook, &drain)));
    tokio::select! {
        () = drain.begun() => {}
        () = cluster.ready() => {
            list.send_replace(true);
            tracing::info!("ready");
        }
    }
    drain.begun().await;
    end(&drain, parts).await
}

/// Serves the catalog.
fn serve_hub(hub: Served, client: kube::Client, tier: Option<Tier>, drain: &Drain) -> Part<Error> {
    Part::start("catalog", drain, run_hub(hub, client, tier, drain.clone()))
}

/// Serves the locality webhook.
fn serve_webhook(webhook: locality::Webhook, drain: &Drain) -> Part<Error> {
    let served = webhook.serve(drain.clone()).map(Ok);
    Part::start("locality webhook", drain, served)
}

/// Ends all parts, until the deadline.
async fn end(drain: &Drain, parts: Vec<Part<Error>>) -> Result<(), Error> {
    drain.close();
    let ended = Part::end_all(parts).await;
    tracing::info!(late = %drain.late().join(", "), "stopped");
    ended
}

/// The metrics of the parts that run.
struct Figures {
    cluster: Arc<Cluster>,
    catalog: Option<hub::Handle>,
    budgets: Option<k8s::budgets::Figures>,
    locality: Option<locality::Counters>,
    collector: Option<Arc<Periodic>>,
}

impl Figures {
    fn register(&self, registry: &mut Registry) {
        self.cluster.register(registry);
        if let Some(catalog) = &self.catalog {
            catalog.figures().register(registry);
        }
        if let Some(budgets) = &self.budgets {
            budgets.register(registry);
        }
        if let Some(locality) = &self.locality {
            locality.register(registry);
        }
        if let Some(collector) = &self.collector {
            collector.register(registry);
        }
    }
}

/// The service for people who ask the controller.
fn serve_people(served: Option<&Served>) -> Routes {
    admin::serve_cluster(served.map(|served| admin::Cluster {
        catalog: served.hub.handle(),
        clears: served.mirror.clears.clone(),
    }))
}

/// Collects the garbage of a shared tier from now on, and what the catalog's fences clear. The
/// catalog also tells which names nodes use.
fn collect(url: &Url, hub: Option<&Served>) -> Result<Periodic, Error> {
    let store = url.open_later(Handle::current(), Times::default());
    let catalog = hub.map_or_else(shared::Catalog::default, |served| {
        let catalog = served.hub.handle();
        let (fences, uses) = (catalog.clone(), catalog.clone());
        let uses = move |tenant: &Tenant| {
            let found = uses.knows_all().then(|| uses.uses(tenant));
            // Nodes may have gone meanwhile.
            found.filter(|_| uses.knows_all())
        };
        shared::Catalog {
            is_known: Box::new(move || catalog.knows_fences() && !catalog.is_incomplete()),
            fences: Box::new(move || fences.fences()),
            uses: Box::new(uses),
        }
    });
    Periodic::start(store, catalog).map_err(Error::Collector)
}

/// The shared tier whose garbage this process collects.
struct Tier {
    store: Store,
    budgets: shared::Budgets,
}

impl Tier {
    fn of(collector: &Periodic) -> Self {
        Self {
            store: collector.store(),
            budgets: collector.budgets(),
        }
    }
}

/// The catalog, and what belongs to it.
struct Served {
    hub: hub::Hub,
    /// What the nodes are told of it.
    place: Controller,
    cluster: Arc<Cluster>,
    /// Orders to clear names.
    orders: mpsc::Receiver<hub::ClearOrder>,
    mirror: Mirror,
    usage_interval: Duration,
    budgets: k8s::budgets::Figures,
}

/// Binds the address of the catalog.
async fn open_hub(config: Hub, cluster: &Arc<Cluster>) -> Result<Served, hub::ServeError> {
    let members = Arc::clone(cluster);
    let hub = hub::Hub::open(config.listen, members, config.usage_interval).await?;
    let ip = config.ip.unwrap_or(config.listen.ip());
    let place = Controller {
        address: SocketAddr::new(ip, config.listen.port()).to_string(),
        key: hub.key(),
    };
    let (clears, orders) = mpsc::channel(ORDERS);
    let mirror = Mirror {
        catalog: hub.handle(),
        most: config.mirror_caches,
        clears,
    };
    Ok(Served {
        hub,
        place,
        cluster: Arc::clone(cluster),
        orders,
        mirror,
        usage_interval: config.usage_interval,
        budgets: k8s::budgets::Figures::default(),
    })
}

/// Binds the address of the locality webhook. It asks the catalog of this process.
async fn open_webhook(
    config: Option<Webhook>,
    served: Option<&Served>,
) -> Result<Option<locality::Webhook>, locality::Error> {
    let (Some(Webhook { listen, identity }), Some(served)) = (config, served) else {
        return Ok(None);
    };
    let find = Arc::new(served.hub.handle().finder());
    let bound = locality::Webhook::bind(listen, identity, find);
    Ok(Some(bound.await?))
}

/// Serves the catalog, and tells the nodes where it is once the nodes are known.
async fn run_hub(
    served: Served,
    client: kube::Client,
    tier: Option<Tier>,
    drain: Drain,
) -> Result<(), Error> {
    let Served {
        hub,
        place,
        cluster,
        orders,
        mirror,
        usage_interval,
        budgets,
    } = served;
    let began = shared::now().0;
    let members = Arc::clone(&cluster);
    let pools = Box::new(move || members.expected());
    let catalog = || hub.handle();
    // Several parts read these objects.
    let (policies, watch_policies) = k8s::Watched::open(client.clone(), "CachePolicies");
    let (namespaces, watch_namespaces) = k8s::Namespaces::open(client.clone(), "namespaces");
    let seen = namespaces.clone();
    let (store, tier) = tier.map(|it| (it.store, it.budgets)).unzip();
    let clears = k8s::clears::keep(
        client.clone(),
        catalog(),
        pools,
        orders,
        mirror,
        seen,
        store,
    );
    let budgets = k8s::budgets::Keeper {
        policies: policies.clone(),
        catalog: catalog(),
        every: usage_interval,
        figures: budgets,
        tier,
    };
    let budgets = budgets.run(client.clone());
    let rollbacks = k8s::rollbacks::keep(client.clone(), catalog());
    let policies = k8s::policies::keep(client.clone(), policies, namespaces, catalog());
    let publish = async {
        cluster.ready().await;
        k8s::endpoint::publish(client.clone(), place.clone(), began).await;
    };
    let ended = tokio::select! {
        served = hub.serve(drain) => served.map_err(Error::from),
        () = publish => Ok(()),
        () = watch_policies => Err(Exited("watch over CachePolicies").into()),
        () = watch_namespaces => Err(Exited("watch over namespaces").into()),
        () = clears => Err(Exited("clears").into()),
        () = rollbacks => Err(Exited("rollbacks").into()),
        () = policies => Err(Exited("cache policies").into()),
        () = budgets => Err(Exited("budgets").into()),
    };
    k8s::endpoint::withdraw(client, &place).await;
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_late_part_is_named_and_keeps_no_other_from_its_end() {
        let drain = Drain::new(Duration::from_millis(20));
        let told = drain.clone();
        let served = async move {
            told.closing().await;
            Err(Exited("a part of the services").into())
        };
        let parts = vec![
            Part::start("catalog", &drain, std::future::pending()),
            Part::start("CSI services", &drain, served),
        ];
        let ended = end(&drain, parts).await;
        assert!(matches!(ended, Err(Error::Exited(_))), "{ended:?}");
        assert_eq!(drain.late(), ["catalog"]);
    }
}
