//! The node's side of claims in a cluster: it carries out the orders in this node's `Volume`s and
//! `Snapshot`s, and publishes the node's `Pool`.
//!
//! One job runs per object, at most [`JOBS`] at once. A job reads the order, does it in the engine,
//! and writes the status. Each step can be repeated, so a restart needs no state of its own.
//! All jobs run again when the engine has deleted claims by their `ttl`.
//! Without an API server, volumes that exist work; orders wait.
//!
//! | file | holds |
//! |---|---|
//! | `decide` | the next step for an object, pure |
//! | `fetch` | volumes whose content comes from another node |
//! | `health` | the state of the pool |
//! | `pool` | the node's `Pool` |
//!
//! It needs `get`, `list` and `watch` on `volumes` and `snapshots`, `create` on `pools`, and
//! `patch` on the `status` of all three.

pub(super) mod decide;
mod fetch;
mod health;
mod pool;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use kube::runtime::controller::{self, Action, Controller};
use kube::runtime::reflector::Store;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::{Refusal, Snapshot, Volume};
use crate::distribution::FindDistribution;
use crate::engine::claims::SnapshotFilter;
use crate::engine::{self, Engine};
use crate::model::{MutableChange, Node, Ttl};
use crate::server::{code_name, code_of, may_go_on, message_of};

use super::client::{self, patch_status_as_read};
use decide::{SnapshotStep, VolumeStep};
pub use pool::Peering;

/// How many objects are worked on at once.
const JOBS: u16 = 16;
/// The pause before an order that the node refused, or that failed, is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// The pause before an order is tried again, if another operation on the volume runs.
const SOON: Duration = Duration::from_millis(500);

/// Carries out orders until `stop`, and publishes the `Pool`, with how this node is a peer.
pub async fn run(
    kubeconfig: Option<std::path::PathBuf>,
    engine: Engine,
    distribution: FindDistribution,
    node: Node,
    peer: Option<Peering>,
    stop: impl Future<Output = ()>,
) {
    let work = async {
        let client = client::connect(kubeconfig.as_deref()).await;
        let pool = loop {
            match engine.status().await {
                Ok(status) => break status.pool_id,
                Err(error) => tracing::warn!(%error, "could not read the pool's id; retrying"),
            }
            tokio::time::sleep(TRY_AGAIN).await;
        };
        let name = node.id.as_str().to_owned();
        let selector = watcher::Config::default().fields(&format!("spec.nodeName={name}"));
        let volumes = Controller::<Volume>::new(Api::all(client.clone()), selector.clone());
        let snapshots = Controller::<Snapshot>::new(Api::all(client.clone()), selector);
        let seen = pool::Seen {
            volumes: volumes.store(),
            snapshots: snapshots.store(),
        };
        let agent = Arc::new(Agent {
            client: client.clone(),
            engine: engine.clone(),
            distribution,
            pool: pool.clone(),
        });
        let config = controller::Config::default().concurrency(JOBS);
        // No object changes when its `ttl` deletes a claim.
        let expired = stream::unfold(engine.clone(), |engine| async move {
            engine.claims_expired().await;
            Some(((), engine))
        });
        let volumes = volumes.with_config(config.clone());
        let volumes = volumes.reconcile_all_on(expired);
        let volumes = volumes.run(volume, retry, agent.clone());
        let snapshots = snapshots.with_config(config);
        let snapshots = snapshots.run(snapshot, retry, agent);
        tracing::info!(node = %name, "persistent volumes: carrying out the controller's orders");
        tokio::join!(
            volumes.for_each(note),
            snapshots.for_each(note),
            pool::publish(client, engine, node, pool, peer, seen),
        );
    };
    tokio::select! {
        () = work => {}
        () = stop => {}
    }
}

/// A failure of the watch or of a job; each is retried.
fn note<T>(done: Result<T, controller::Error<Error, watcher::Error>>) -> std::future::Ready<()> {
    match done {
        // An object that was deleted before its job began.
        Ok(_) | Err(controller::Error::ObjectNotFound(_)) => {}
        Err(error) => tracing::warn!(%error, "an order of the controller failed; retrying"),
    }
    std::future::ready(())
}

struct Agent {
    client: Client,
    engine: Engine,
    distribution: FindDistribution,
    pool: String,
}

impl Agent {
    /// Writes the status, unless the object was changed or deleted since it was read: then the next
    /// job, which that change begins, does it.
    async fn write_status<K>(&self, object: &K, status: impl Serialize) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned,
    {
        let all = Api::all(self.client.clone());
        patch_status_as_read(&all, object, status).await?;
        Ok(())
    }
}

/// Why a job ended early.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the API server: {0}")]
    Api(#[from] kube::Error),
    #[error("{}", message_of(.0))]
    Engine(#[from] engine::Error),
}

fn retry<K>(_: Arc<K>, error: &Error, _: Arc<Agent>) -> Action {
    let is_busy = matches!(error, Error::Engine(engine::Error::Busy(_)));
    Action::requeue(if is_busy { SOON } else { TRY_AGAIN })
}

fn refusal(error: &engine::Error) -> Refusal {
    Refusal {
        code: code_name(code_of(error)).to_owned(),
        message: message_of(error),
    }
}

/// Splits a result: a final error goes into the status; after any other the job is tried again.
fn finally<T>(done: engine::Result<T>) -> Result<Result<T, Refusal>, Error> {
    match done {
        Ok(done) => Ok(Ok(done)),
        Err(error) if may_go_on(code_of(&error)) => Err(error.into()),
        Err(error) => Ok(Err(refusal(&error))),
    }
}

/// Whether the node tries again what it has refused: only a deletion, since a mount may end.
fn after(error: Option<&Refusal>, deletes: bool) -> Action {
    if deletes && error.is_some() {
        Action::requeue(TRY_AGAIN)
    } else {
        Action::await_change()
    }
}

async fn volume(volume: Arc<Volume>, agent: Arc<Agent>) -> Result<Action, Error> {
    let id = volume.metadata.name.clone().unwrap_or_default();
    let held = match agent.engine.claim(&id) {
        Ok(held) => Some(held),
        Err(engine::Error::NoSuchClaim(_)) => None,
        Err(error) => return Err(error.into()),
    };
    let step = decide::volume(&volume, &agent.pool, held.as_ref());
    let deletes = matches!(step, VolumeStep::Delete);
    let engine = &agent.engine;
    let status = match step {
        VolumeStep::Nothing => return Ok(Action::await_change()),
        VolumeStep::Report(status) => status,
        VolumeStep::Create(request) if volume.spec.fetch.is_some() => {
            return fetch::create(&volume, request, &agent).await;
        }
        VolumeStep::Create(request) => {
            let created = finally(engine.create_claim(request).await)?;
            decide::created(&volume, &agent.pool, created.as_ref())
        }
        VolumeStep::Change { capacity, mutable } => {
            let changed = async {
                engine.expand_claim(&id, capacity, None).await?;
                let change = MutableChange {
                    size_limit: mutable.size_limit,
                    ttl: Some(mutable.ttl_seconds.map_or(Ttl::Never, Ttl::Seconds)),
                };
                engine.modify_claim(&id, change).await
            };
            let error = finally(changed.await)?.err();
            // Work that an error left undone shows here.
            decide::reported(&volume, &agent.pool, &engine.claim(&id)?, error)
        }
        VolumeStep::Delete => {
            fetch::stop(&id, &agent).await;
            let error = finally(engine.delete_claim(&id).await)?.err();
            decide::deleted(&volume, &agent.pool, error)
        }
    };
    let action = after(status.error.as_ref(), deletes);
    if volume.status.as_ref() != Some(&status) {
        agent.write_status(&*volume, &status).await?;
    }
    Ok(action)
}

async fn snapshot(object: Arc<Snapshot>, agent: Arc<Agent>) -> Result<Action, Error> {
    let id = object.metadata.name.clone().unwrap_or_default();
    let engine = &agent.engine;
    let held = held_snapshots(engine, &id, object.spec.group)?;
    let (pool, spec) = (&agent.pool, &object.spec);
    let step = decide::snapshot(&object, pool, &held);
    let deletes = matches!(step, SnapshotStep::Delete);
    let status = match step {
        SnapshotStep::Nothing => return Ok(Action::await_change()),
        SnapshotStep::Report(status) => status,
        SnapshotStep::Take => {
            let taken = if spec.group {
                let group = engine.create_group(&spec.name, &spec.sources).await;
                group.map(|(_, snapshots)| snapshots)
            } else {
                let source = spec.sources.first().map_or("", String::as_str);
                let snapshot = engine.create_snapshot(&spec.name, source).await;
                snapshot.map(|snapshot| vec![snapshot])
            };
            decide::taken(&object, pool, finally(taken)?)
        }
        SnapshotStep::Delete => {
            let done = if spec.group {
                engine.delete_group(&id).await
            } else {
                engine.delete_snapshot(&id).await
            };
            decide::dropped(&object, pool, finally(done)?.err())
        }
    };
    let action = after(status.error.as_ref(), deletes);
    if object.status.as_ref() != Some(&status) {
        agent.write_status(&*object, &status).await?;
    }
    Ok(action)
}

/// The snapshots of an object that are in the engine.
fn held_snapshots(
    engine: &Engine,
    id: &str,
    group: bool,
) -> Result<Vec<crate::model::Snapshot>, Error> {
    if group {
        return match engine.group(id) {
            Ok((_, snapshots)) => Ok(snapshots),
            Err(engine::Error::NoSuchSnapshot(_)) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        };
    }
    let filter = SnapshotFilter {
        id: Some(id.to_owned()),
        source: None,
    };
    Ok(engine.snapshots(&filter, None, 1)?.items)
}

/// The names of all objects that a watch has seen.
fn names<K>(store: &Store<K>) -> std::collections::HashSet<String>
where
    K: Resource<DynamicType = ()> + Clone,
{
    let all = store.state();
    all.iter()
        .filter_map(|one| one.meta().name.clone())
        .collect()
}
