//! The pages and their content. Each metric is defined where it is measured; this module collects
//! them for each request.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::watch;

use super::distribution;
use crate::distribution::{Distribution, FindDistribution};
use crate::engine::{self, Engine};
use crate::server::{Drain, message_of};
use crate::telemetry::metrics::{self, EncodeLabelSet, Family, Gauge, Registry, Rpcs, gauges};

/// How long the engine may take for its figures. It waits for no volume, but all its threads may
/// wait for a disk.
const PATIENCE: Duration = Duration::from_secs(2);

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

impl fmt::Debug for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Role").finish_non_exhaustive()
    }
}

impl fmt::Debug for Sources {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sources").finish_non_exhaustive()
    }
}

type Page = Response<Full<Bytes>>;

/// The requested page.
pub(super) async fn answer(sources: &Sources, request: &Request<Incoming>) -> Page {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut page = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n".into());
        let headers = page.headers_mut();
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return page;
    }
    match request.uri().path() {
        "/healthz" => verdict((sources.alive)().await),
        "/readyz" => verdict(ready(sources).await),
        "/metrics" => measures(sources, request).await,
        _ => plain(
            StatusCode::NOT_FOUND,
            "there are /healthz, /readyz and /metrics\n".into(),
        ),
    }
}

fn plain(status: StatusCode, text: String) -> Page {
    let mut page = Response::new(Full::new(Bytes::from(text)));
    *page.status_mut() = status;
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    page.headers_mut().insert(CONTENT_TYPE, text);
    page
}

fn verdict(verdict: Result<(), String>) -> Page {
    match verdict {
        Ok(()) => plain(StatusCode::OK, "ok\n".into()),
        Err(why) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
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

async fn measures(sources: &Sources, request: &Request<Incoming>) -> Page {
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
    match &sources.role {
        Role::Controller { figures, .. } => figures(&mut registry),
        Role::Node {
            engine,
            distribution,
            registered,
            watched,
        } => {
            let registered = *registered.borrow();
            let watched = watched.as_ref().map(|watched| *watched.borrow());
            of_node(&mut registry, registered, watched);
            if let Ok(engine) = engine() {
                of_engine(&mut registry, &engine).await;
            }
            if let Some(distribution) = distribution() {
                of_distribution(&mut registry, &distribution).await;
            }
        }
    }
    let help = "Whether volumes can be published, as /readyz says it";
    let ready = ready(sources).await.is_ok();
    gauges(&mut registry, &[("ready", help, ready.into())]);
    let text = metrics::encode(&registry);
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
