//! The driver's use of the Kubernetes API: the outcomes of this node's pods, and events on them.
//!
//! No publish waits for this module. Without an API server, pods start and end; only volumes that
//! wait for an outcome go on waiting, until the engine's timeout. No failure here ends the process.
//! After a panic the module restarts.
//!
//! | file | holds |
//! |---|---|
//! | `pod` | the relevant parts of a pod, and the pure decision on its outcome |
//! | `watcher` | the watch over this node's pods, and its retries |
//! | `outcomes` | reports outcomes to the engine, from the watch and by request |
//! | `pod_event` | what an event on a pod says |
//! | `events` | sends the events on pods |
//! | `client` | the client of the API server |
//! | `watched` | all objects of one kind, from a watch that several parts share |
//! | `agent` | the controller's orders for this node's persistent volumes, carried out |
//! | `endpoint` | where the controller is: published by it, watched by the nodes |
//! | `peers` | the other nodes as peers, and the rights of each |
//! | `checked` | rights of peers that were checked within the last minute |
//! | `claims` | the controller's side: persistent volumes of the whole cluster |
//! | `ask` | orders that a person gives through the API server |
//! | `clears` | the controller's side: names that are cleared on all nodes |
//! | `rollbacks` | the controller's side: earlier content of a name that is put back |
//! | `mirror` | the controller's side: the newest task caches as objects, for people |
//! | `policies` | the controller's side: cache policies, for all nodes |
//! | `budgets` | the controller's side: the limits of namespaces |
//! | `conditions` | the status of a cache policy: its conditions, and how it is written |
//!
//! The watch over pods needs `get`, `list` and `watch` on `pods` in all namespaces (RBAC cannot
//! limit that to a node), and `create` and `patch` on `events` of `events.k8s.io`.

pub mod agent;
pub mod ask;
pub mod budgets;
pub mod checked;
pub mod claims;
pub mod clears;
mod client;
mod conditions;
mod config;
pub mod endpoint;
mod events;
pub mod mirror;
mod outcomes;
pub mod peers;
mod pod;
mod pod_event;
pub mod policies;
pub mod rollbacks;
#[cfg(test)]
mod simulation;
mod watched;
mod watcher;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use crate::engine::{Engine, Notice};
use crate::link::Backoff;

pub use client::{UserError, connect, connect_as_user};
pub use config::{Config, LOOK_AGAIN};
pub use outcomes::PodOutcomes;
pub use pod::{OUTCOME, OUTCOME_CONTAINER};
pub use watched::{Namespaces, Watched};

/// Watches this node's pods and sends events, until `stop`. Reconnects as often as needed.
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

/// Restarts `work` after a panic. Pods start and end without it, so a panic must not end the
/// driver. But no volume is kept without it. It needs no earlier state: the engine decides.
async fn over_defects<T>(
    config: &Config,
    notices: &mut T,
    mut work: impl for<'a> FnMut(&'a mut T) -> BoxFuture<'a, ()>,
) {
    let mut backoff = Backoff::default();
    loop {
        // A panic drops the state inside. State shared with the engine protects itself.
        let work = AssertUnwindSafe(work(notices)).catch_unwind();
        if work.await.is_ok() {
            return;
        }
        config.watched.send_replace(false);
        // Unknown now. Kubelet reports its own failures.
        config.answers.send_replace(true);
        let retry = backoff.after_failure(Instant::now());
        tracing::error!(
            ?retry,
            "a defect ended the watch over pods; restarting the watch"
        );
        tokio::time::sleep(retry).await;
    }
}

async fn watch_and_say(config: Config, engine: Engine, notices: &mut mpsc::Receiver<Notice>) {
    let client = client::connect(config.kubeconfig.as_deref()).await;
    let (pod_events, heard) = mpsc::channel(events::MOST_WAITING);
    let watch = outcomes::watch(&config, &client, &engine, &pod_events);
    let lost = || engine.lost_notices();
    let say = events::say(&config, client.clone(), notices, heard, lost);
    tokio::join!(watch, say);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::watch;

    use super::*;

    #[tokio::test]
    async fn a_defect_ends_neither_the_driver_nor_the_watch_and_no_notice_is_lost_by_it() {
        let config = Config {
            node: "here".to_owned(),
            kubeconfig: None,
            look_again: LOOK_AGAIN,
            watched: watch::Sender::new(true),
            answers: watch::Sender::new(false),
            known: Arc::default(),
        };
        let (sender, mut notices) = mpsc::channel(2);
        for number in [1, 2] {
            sender.send(number).await.expect("a receiver");
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
            .expect("it restarted");
        assert_eq!(began, 2);
        assert!(!*config.watched.borrow() && *config.answers.borrow());
    }
}
