//! The driver of one node of a cluster: the CSI services for that node's kubelet, and registration with it.
//! What it shares with a driver on its own is in `driver`; here is only what a cluster adds, and in which order.
//!
//! Kubelet is told of the driver when it can serve, and is the first to hear that it goes.

use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::csi::{self, ProbeError, Readiness};
use crate::engine::{Engine, Notice, Notices};
use crate::kubelet::{self, Registration};
use crate::server::Drain;
use crate::{driver, http, k8s};

/// How it is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// What every driver has.
    pub driver: driver::Config,
    /// Kubelet's root directory.
    pub kubelet_dir: PathBuf,
    /// Where health and metrics are told, if anywhere.
    pub http: Option<SocketAddr>,
    /// The API server to ask and to tell, if there is one.
    pub kubernetes: Option<k8s::Config>,
}

/// Why it does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver itself does not.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// Health and metrics cannot be told.
    #[error(transparent)]
    Http(#[from] http::Error),
    /// It could never be registered.
    #[error(transparent)]
    Registration(#[from] kubelet::Error),
}

/// How many notices may wait for the API server; those beyond are lost.
const MOST_NOTICES: usize = 1024;
/// How often the driver's own socket is tried before it is offered to kubelet.
const TRY_AGAIN: Duration = Duration::from_millis(200);
/// How long the driver may take to answer itself: less than kubelet waits for `/healthz` (5 s, `timeoutSeconds` in deploy/), so that
/// it is told why.
const TO_ANSWER: Duration = Duration::from_secs(3);

/// Serves this node until `shutdown` is ready and all is put away.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let socket = config.driver.socket.clone();
    let kubernetes = config.kubernetes.as_ref();
    let watched = kubernetes.map(|kubernetes| kubernetes.watched.subscribe());
    // Kubernetes' room says it, and kubelet's listens: an API server that answers the driver answers kubelet, which may do more.
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
    let drain = Drain::new(driver.grace);
    let pages = http::Sources {
        alive: alive(&socket, &drain),
        engine: find_engine(readiness),
        drain: drain.clone(),
        rpcs: driver.csi.rpcs.clone(),
        registered: registration.registered(),
        watched,
    };
    let http = match config.http {
        Some(address) => Some(http::Listener::bind(address).await?),
        None => None,
    };
    let role = |engine: Option<Engine>, drain: Drain| async move {
        let watch = async {
            if let Some(engine) = engine {
                watch_pods(kubernetes, engine, &drain).await;
            }
        };
        let offer = async {
            tokio::select! {
                () = answers(&socket) => registration.keep(&drain).await,
                () = drain.begun() => {}
            }
        };
        tokio::join!(watch, offer);
    };
    // Until all else has ended, so that a probe sees that the driver is stopping.
    let _http = http.map(|http| AbortOnDropHandle::new(tokio::spawn(http.serve(pages))));
    driver::run(driver, drain, ready, role, shutdown).await?;
    Ok(())
}

/// Hears from the API server how pods end, and tells it what became of their volumes, until it is time to stop.
async fn watch_pods(
    kubernetes: Option<(k8s::Config, mpsc::Receiver<Notice>)>,
    engine: Engine,
    drain: &Drain,
) {
    let Some((config, heard)) = kubernetes else {
        tracing::info!(
            "pods are not watched: how they end is known from `baggageclaim outcome` and markers"
        );
        return;
    };
    k8s::run(config, engine, heard, drain.begun()).await;
}

/// Whether the CSI services answer at their path, ready or not: all that kubelet needs, and what it cannot restart itself.
fn alive(socket: &Path, drain: &Drain) -> http::Alive {
    let (socket, drain) = (socket.to_owned(), drain.clone());
    Arc::new(move || {
        let (socket, drain) = (socket.clone(), drain.clone());
        Box::pin(async move {
            match csi::probe(&socket, TO_ANSWER).await {
                // Kubelet would get no answer either. A driver that starts, or whose disk hangs, answers
                // this: no system call that waits for a disk runs on the threads that serve.
                Err(error @ (ProbeError::Connect { .. } | ProbeError::Silent { .. }))
                    if !drain.has_begun() =>
                {
                    Err(error.to_string())
                }
                // It answers, be it with an error; or it ends, which is no reason to end it; or kubelet's disk does not answer, which
                // the next driver could not mend.
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
        Readiness::Ready(engine) => Ok(engine.clone()),
    })
}

/// Ready when the CSI services answer at their path that they are: what kubelet calls as soon as it hears of the driver.
async fn answers(socket: &Path) {
    loop {
        match csi::probe(socket, TO_ANSWER).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(socket = %socket.display(), %error, "the driver does not hear itself yet");
            }
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}
