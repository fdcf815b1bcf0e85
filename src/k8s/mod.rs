//! The driver's client of the API server: it learns how the pods of this node end, and reports events on
//! them.
//!
//! Nothing here is on the path of a publish: without an API server pods start and end. Only volumes that
//! wait for an outcome go on waiting, until the engine's time limit. No failure here ends the process. After
//! a panic all of it starts again.
//!
//! | file | holds |
//! |---|---|
//! | `pod` | what of a pod matters, and the decision how its work ended; pure |
//! | `watcher` | the watch over this node's pods, and how it is kept alive |
//! | `outcomes` | what the engine is told of them, from the watch and by asking |
//! | `events` | the engine's notices as events on pods |
//! | `client` | the way to the API server |
//!
//! Permissions: `get`, `list` and `watch` on `pods` in all namespaces (a rule cannot be limited to the pods
//! of a node; the watch is), `create` and `patch` on `events` of `events.k8s.io`.

mod client;
mod events;
mod outcomes;
mod pod;
mod watcher;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, watch};

use crate::engine::{Engine, Notice};

pub use outcomes::Known;
pub use pod::{OUTCOME, OUTCOME_CONTAINER};

/// The default of [`Config::look_again`].
pub const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// How the client is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// What Kubernetes calls this node.
    pub node: String,
    /// How the events call who reports them: the driver's name.
    pub reporter: String,
    /// A kubeconfig; `None`: the pod's own service account.
    pub kubeconfig: Option<PathBuf>,
    /// How often to poll for outcomes that the watch did not bring.
    pub look_again: Duration,
    /// Is told whether the watch over this node's pods runs: a few seconds late, for one that is cut at once does not.
    pub watched: watch::Sender<bool>,
    /// Is told whether the API server answers, if only that this driver may not watch. As late, for the same reason.
    pub answers: watch::Sender<bool>,
    /// Is told what is known of this node's pods.
    pub known: Arc<Known>,
}

/// Watches this node's pods for the engine and says its notices, until `stop` is ready. Connects as often as it takes.
pub async fn run(
    config: Config,
    engine: Engine,
    mut notices: mpsc::Receiver<Notice>,
    stop: impl Future<Output = ()>,
) {
    let work = over_defects(&config, &mut notices, |notices| {
        Box::pin(watch_and_say(config.clone(), engine.clone(), notices))
    });
    tokio::select! {
        () = work => {}
        () = stop => {}
    }
}

/// Runs the work, and starts it again after a panic. Pods start and end without it, so a panic must not end
/// the driver. Nothing is committed without it, so a panic must not end it for good. It keeps no state that
/// is needed: the engine has the decisions.
async fn over_defects<T>(
    config: &Config,
    notices: &mut T,
    mut work: impl for<'a> FnMut(&'a mut T) -> BoxFuture<'a, ()>,
) {
    let mut patience = client::Patience::new();
    loop {
        // What is left half done inside is dropped; what is shared with the engine is its own to keep whole.
        let work = AssertUnwindSafe(work(notices)).catch_unwind();
        if work.await.is_ok() {
            return;
        }
        config.watched.send_replace(false);
        // It is unknown now; kubelet finds out by itself.
        config.answers.send_replace(true);
        let retry = patience.after_failure(Instant::now());
        tracing::error!(?retry, "a panic ended the watch over pods; it starts again");
        tokio::time::sleep(retry).await;
    }
}

async fn watch_and_say(config: Config, engine: Engine, notices: &mut mpsc::Receiver<Notice>) {
    let client = client::connect(config.kubeconfig.as_deref()).await;
    let known = &config.known;
    let (sayings, heard) = mpsc::channel(events::MOST_WAITING);
    let watch = outcomes::watch(&config, &client, &engine, known, &sayings);
    let lost = || engine.lost_notices();
    let say = events::say(&config, client.clone(), notices, heard, lost, known.clone());
    tokio::join!(watch, say);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_defect_ends_neither_the_driver_nor_the_watch_and_no_notice_is_lost_by_it() {
        let config = Config {
            node: "here".to_owned(),
            reporter: String::new(),
            kubeconfig: None,
            look_again: LOOK_AGAIN,
            watched: watch::Sender::new(true),
            answers: watch::Sender::new(false),
            known: Arc::default(),
        };
        let (sender, mut notices) = mpsc::channel(2);
        for number in [1, 2] {
            sender.send(number).await.expect("room");
        }
        let mut began = 0;
        let work = over_defects(
            &config,
            &mut notices,
            |notices: &mut mpsc::Receiver<u32>| {
                began += 1;
                let began = began;
                Box::pin(async move {
                    assert_eq!(notices.recv().await, Some(began));
                    assert!(began > 1, "a defect");
                })
            },
        );
        tokio::time::timeout(Duration::from_secs(60), work)
            .await
            .expect("it began anew");
        assert_eq!(began, 2);
        assert!(!*config.watched.borrow() && *config.answers.borrow());
    }
}
