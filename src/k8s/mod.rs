//! What the driver asks Kubernetes, and what it says there: how this node's pods end, and events on them.
//!
//! Nothing here is on the path of a publish: without an API server pods start, and end; only what waits for an outcome goes
//! on waiting, until the engine's own time is up. No failure here ends the process.
//!
//! | file | holds |
//! |---|---|
//! | `pod` | what of a pod matters, and the decision how its work ended; pure |
//! | `outcomes` | the watch over this node's pods, and what the engine is told |
//! | `events` | the engine's notices as events on pods |
//! | `client` | the way to the API server |
//!
//! What it must be allowed to do: `get`, `list` and `watch` on `pods` in all namespaces (a rule cannot be limited to the pods
//! of a node; the watch is), `create` and `patch` on `events` of `events.k8s.io`.

mod client;
mod events;
mod outcomes;
mod pod;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use crate::engine::{Engine, Notice};

pub use pod::{OUTCOME, OUTCOME_CONTAINER};

/// How often it is looked for outcomes that the watch did not bring, if nobody says otherwise.
pub const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// How it is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// What Kubernetes calls this node.
    pub node: String,
    /// How the events call who reports them: the driver's name.
    pub reporter: String,
    /// A kubeconfig; `None`: the pod's own service account.
    pub kubeconfig: Option<PathBuf>,
    /// How often it is looked for outcomes that the watch did not bring.
    pub look_again: Duration,
    /// Is told whether the watch over this node's pods runs.
    pub watched: watch::Sender<bool>,
    /// Is told whether the API server answers, if only that this driver may not watch.
    pub answers: watch::Sender<bool>,
}

/// Watches this node's pods for the engine and says its notices, until `stop` is ready. Connects as often as it takes.
pub async fn run(
    config: Config,
    engine: Engine,
    notices: mpsc::Receiver<Notice>,
    stop: impl Future<Output = ()>,
) {
    let work = async {
        let client = client::connect(config.kubeconfig.as_deref()).await;
        let known = Arc::new(outcomes::Known::default());
        let (sayings, heard) = mpsc::channel(events::MOST_WAITING);
        let watch = outcomes::watch(&config, &client, &engine, &known, &sayings);
        let lost = || engine.lost_notices();
        let say = events::say(&config, client.clone(), notices, heard, lost, known.clone());
        tokio::join!(watch, say);
    };
    tokio::select! {
        () = work => {}
        () = stop => {}
    }
}
