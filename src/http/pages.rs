//! The pages and their content. Each metric is defined where it is measured; this module collects
//! them for the requests.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::watch;
use tokio::task::JoinError;

use super::distribution;
use super::shared::Shared;
use crate::distribution::{Distribution, FindDistribution};
use crate::engine::{self, Engine};
use crate::server::{Drain, message_of};
use crate::telemetry::metrics::{self, EncodeLabelSet, Family, Gauge, Registry, Rpcs, gauges};

/// How long the engine may take for its figures. It waits for no volume, but all its threads may
/// wait for a disk.
const PATIENCE: Duration = Duration::from_secs(2);

/// After a collection of the metrics, none begins for so many times as long as that took.
const PAUSES: u32 = 9;

const OPENMETRICS: &str = "application/openmetrics-text";

/// Finds out whether the driver does its work; if not, why.
pub type Alive =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> + Send + Sync>;

/// The engine, or why there is none.
pub type FindEngine = Arc<dyn Fn() -> Result<Engine, String> + Send + Sync>;

/// Adds metrics to those of a request.
pub type AddMetrics = Arc<dyn Fn(&mut Registry) + Send + Sync>;

/// Where the pages take from what they say.
#[derive(Clone)]
pub struct Sources {
    /// For `/healthz`.
    pub alive: Alive,
    /// Whether the process is about to end.
    pub drain: Drain,
    /// The calls that were answered.
    pub rpcs: Rpcs,
    /// The parts that only one role has.
    pub role: Role,
}

/// Where the pages of one role take from what they say.
#[derive(Clone)]
pub enum Role {
    /// A node.
    Node {
        /// For `/readyz` and `/metrics`.
        engine: FindEngine,
        /// For `/metrics`.
        distribution: FindDistribution,
        /// Whether kubelet has the driver.
        registered: watch::Receiver<bool>,
        /// Whether the API server reports how pods end, if it is used.
        watched: Option<watch::Receiver<bool>>,
    },
    /// The controller of a cluster.
    Controller {
        /// Whether the API server has listed all volumes once.
        listed: watch::Receiver<bool>,
        /// For `/metrics`.
        figures: AddMetrics,
    },
}

type Page = Response<Full<Bytes>>;

/// The pages of one port.
pub(super) struct Pages {
    sources: Sources,
    alive: Shared<Result<(), String>>,
    ready: Shared<Result<(), String>>,
    metrics: Shared<Bytes>,
}

impl Pages {
    pub(super) fn new(sources: Sources) -> Self {
        Self {
            sources,
            // Probes of kubelet wait for these, so no answer is held back.
            alive: Shared::new(0),
            ready: Shared::new(0),
            // The engine looks at all that it has, under the lock that volumes need.
            metrics: Shared::new(PAUSES),
        }
    }
}

/// The requested page.
pub(super) async fn answer(pages: &Pages, request: &Request<Incoming>) -> Page {
    let sources = pages.sources.clone();
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut page = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n".into());
        let headers = page.headers_mut();
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return page;
    }
    match request.uri().path() {
        "/healthz" => verdict(pages.alive.get((sources.alive)()).await),
        "/readyz" => {
            let ready = async move { ready(&sources).await };
            verdict(pages.ready.get(ready).await)
        }
        "/metrics" => {
            let metrics = async move { Bytes::from(measure(&sources).await) };
            match pages.metrics.get(metrics).await {
                Ok(text) => metrics_page(text, request),
                Err(defect) => failed(&defect),
            }
        }
        _ => plain(
            StatusCode::NOT_FOUND,
            "there are /healthz, /readyz and /metrics\n".into(),
        ),
    }
}

fn plain(status: StatusCode, text: Bytes) -> Page {
    let mut page = Response::new(Full::new(text));
    *page.status_mut() = status;
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    page.headers_mut().insert(CONTENT_TYPE, text);
    page
}

fn verdict(verdict: Result<Result<(), String>, JoinError>) -> Page {
    match verdict {
        Ok(Ok(())) => plain(StatusCode::OK, "ok\n".into()),
        Ok(Err(why)) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n").into()),
        Err(defect) => failed(&defect),
    }
}

fn failed(defect: &JoinError) -> Page {
    plain(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("{defect}\n").into(),
    )
}

/// The engine's answer, if it comes in time.
async fn in_time<T>(answer: impl Future<Output = engine::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, answer).await {
        Ok(answer) => answer.map_err(|error| message_of(&error)),
        Err(_) => Err(format!("the engine does not answer within {PATIENCE:?}")),
    }
}

/// Whether volumes can be published.
async fn ready(sources: &Sources) -> Result<(), String> {
    if sources.drain.has_begun() {
        return Err("stopping".to_owned());
    }
    match &sources.role {
        Role::Node { engine, .. } => in_time(engine()?.takes_writes()).await,
        Role::Controller { listed, .. } if *listed.borrow() => Ok(()),
        Role::Controller { .. } => Err("the API server has not listed the volumes yet".to_owned()),
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    backend: String,
}

fn of_node(registry: &mut Registry, registered: bool, watched: Option<bool>) {
    let help = "Whether kubelet confirmed the driver's registration";
    gauges(registry, &[("kubelet_registered", help, registered.into())]);
    if let Some(watched) = watched {
        let help = "Whether the watch over this node's pods runs, which tells how they end";
        gauges(registry, &[("pods_watched", help, watched.into())]);
    }
}

/// The metrics of the shared tier and of peers.
async fn of_distribution(registry: &mut Registry, distribution: &Arc<Distribution>) {
    let figures = distribution.apart(Distribution::metrics);
    if let Ok(Some(figures)) = tokio::time::timeout(PATIENCE, figures).await {
        distribution::register(&figures, registry);
    } else {
        tracing::warn!("the metrics of the shared tier and peers are left out: no answer in time");
    }
}

async fn of_engine(registry: &mut Registry, engine: &Engine) {
    engine.counters().register(registry);
    let pool = Family::<Pool, Gauge>::default();
    let backend = engine.backend().to_string();
    pool.get_or_create(&Pool { backend }).set(1);
    registry.register("pool_info", "Always 1; the label says which backend", pool);
    // Without them what was counted is still told: it is wanted most when the engine hangs.
    match in_time(engine.metrics()).await {
        Ok(figures) => figures.register(registry),
        Err(error) => tracing::warn!(error, "the engine's metrics are left out"),
    }
}

async fn measure(sources: &Sources) -> String {
    let mut registry = metrics::registry();
    let build = Family::<Build, Gauge>::default();
    let version = env!("CARGO_PKG_VERSION");
    build.get_or_create(&Build { version }).set(1);
    registry.register(
        "build_info",
        "Always 1; the label says which version",
        build,
    );
    sources.rpcs.register(&mut registry);
    // At once: an engine that hangs lets each of them wait.
    let (ready, ()) = tokio::join!(ready(sources), of_role(&mut registry, &sources.role));
    let help = "Whether volumes can be published, as /readyz says it";
    gauges(&mut registry, &[("ready", help, ready.is_ok().into())]);
    metrics::encode(&registry)
}

async fn of_role(registry: &mut Registry, role: &Role) {
    match role {
        Role::Controller { figures, .. } => figures(registry),
        Role::Node {
            engine,
            distribution,
            registered,
            watched,
        } => {
            let registered = *registered.borrow();
            let watched = watched.as_ref().map(|watched| *watched.borrow());
            of_node(registry, registered, watched);
            if let Ok(engine) = engine() {
                of_engine(registry, &engine).await;
            }
            if let Some(distribution) = distribution() {
                of_distribution(registry, &distribution).await;
            }
        }
    }
}

fn metrics_page(text: Bytes, request: &Request<Incoming>) -> Page {
    let mut page = plain(StatusCode::OK, text);
    // The text is OpenMetrics, and good as the older format: counters are merely untyped there.
    let accepted = request.headers().get_all(ACCEPT).iter();
    let open = accepted
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains(OPENMETRICS));
    let kind = if open {
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    } else {
        "text/plain; version=0.0.4; charset=utf-8"
    };
    let kind = HeaderValue::from_static(kind);
    page.headers_mut().insert(CONTENT_TYPE, kind);
    page
}
