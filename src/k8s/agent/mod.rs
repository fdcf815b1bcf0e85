//! The node's side of claims in a cluster: it carries out the orders in this node's `Volume`s and
//! `Snapshot`s, and publishes the node's `Pool`.
//!
//! One job runs per object. A job reads the order, does it in the engine, and writes the status.
//! Each step can be repeated, so a restart needs no state of its own. All jobs run again when the
//! engine has deleted claims by their `ttl`. Without an API server, volumes that exist work; orders
//! wait.
//!
//! The number of jobs has no limit: the engine's pools of threads limit the work. With a limit
//! here, the jobs that wait for slow copies would keep all other orders of the node waiting.
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
use kube::core::object::HasStatus;
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
        work(client, engine, distribution, node, peer).await;
    };
    tokio::select! {
        () = work => {}
        () = stop => {}
    }
}

async fn work(
    client: Client,
    engine: Engine,
    distribution: FindDistribution,
    node: Node,
    peer: Option<Peering>,
) {
    let pool = loop {
        match engine.status().await {
            Ok(status) => break status.pool_id,
            Err(error) => tracing::warn!(%error, "could not read the pool's id; retrying"),
        }
        tokio::time::sleep(TRY_AGAIN).await;
    };
    let name = node.id.as_str().to_owned();
    let selector = client::watch_config().fields(&format!("spec.nodeName={name}"));
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
    // No object changes when its `ttl` deletes a claim.
    let expired = stream::unfold(engine.clone(), |engine| async move {
        engine.claims_expired().await;
        Some(((), engine))
    });
    let volumes = volumes.reconcile_all_on(expired);
    let volumes = volumes.run(volume, retry, agent.clone());
    let snapshots = snapshots.run(snapshot, retry, agent);
    tracing::info!(node = %name, "persistent volumes: carrying out the controller's orders");
    tokio::join!(
        volumes.for_each(note),
        snapshots.for_each(note),
        pool::publish(client, engine, node, pool, peer, seen),
    );
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
    /// Writes the status if it is another one, unless the object was changed or deleted since it
    /// was read: then the next job, which that change begins, does it.
    async fn report<K>(&self, object: &K, status: &K::Status) -> Result<(), Error>
    where
        K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned,
        K: HasStatus<Status: Serialize + PartialEq>,
    {
        if object.status() != Some(status) {
            let all = Api::all(self.client.clone());
            patch_status_as_read(&all, object, status).await?;
        }
        Ok(())
    }
}

/// Why a job ended early.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the API server: {0}")]
    Api(#[from] kube::Error),
    #[error("the API server: no answer within {0:?}")]
    Silent(Duration),
    #[error("{}", message_of(.0))]
    Engine(#[from] engine::Error),
}

fn retry<K>(_: Arc<K>, error: &Error, _: Arc<Agent>) -> Action {
    let is_busy = matches!(error, Error::Engine(engine::Error::Busy(_)));
    Action::requeue(if is_busy { SOON } else { TRY_AGAIN })
}

fn refusal(error: &engine::Error) -> Refusal {
    Refusal::new(code_name(code_of(error)), message_of(error))
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
            let expanded = finally(engine.expand_claim(&id, capacity, None).await)?;
            let change = MutableChange {
                size_limit: mutable.size_limit,
                ttl: Some(mutable.ttl_seconds.map_or(Ttl::Never, Ttl::Seconds)),
            };
            // Another call ordered each of the two: a refused size holds back no `ttl`.
            let modified = finally(engine.modify_claim(&id, change).await)?;
            let error = expanded.and(modified).err();
            // Work that an error left undone shows here.
            decide::reported(&volume, &agent.pool, &engine.claim(&id)?, error)
        }
        VolumeStep::Delete => {
            fetch::stop(&id, &agent).await;
            let error = finally(engine.delete_claim(&id).await)?.err();
            decide::deleted(&volume, &agent.pool, error)
        }
    };
    agent.report(&*volume, &status).await?;
    Ok(after(status.error.as_ref(), deletes))
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
    agent.report(&*object, &status).await?;
    Ok(after(status.error.as_ref(), deletes))
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

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;
    use serde_json::json;
    use tokio::sync::mpsc;

    use super::*;
    use crate::api::{VolumeSpec, Wanted};
    use crate::engine::Config;
    use crate::engine::claims::{CreateClaim, claim_id};
    use crate::k8s::claims::name_on;
    use crate::k8s::client::{client_of, is_watch, list_of};
    use crate::model::{ClaimSource, NodeId, Topology, VolumeId};

    /// An order for a volume of this node, empty or a clone.
    fn order(name: &str, of: Option<VolumeId>) -> Volume {
        let spec = VolumeSpec {
            source: of.map(|id| (&ClaimSource::Claim(id)).into()),
            ..VolumeSpec::empty(name, "node-1", Wanted::Present)
        };
        let mut order = Volume::new(claim_id(&name_on("node-1", name)).as_str(), spec);
        order.metadata.uid = Some(name.to_owned());
        order.metadata.resource_version = Some("1".to_owned());
        order.metadata.generation = Some(1);
        order
    }

    /// An API server with these orders. It tells which of them are answered.
    fn server(orders: Vec<Volume>) -> (Client, mpsc::UnboundedReceiver<String>) {
        let (answered, answers) = mpsc::unbounded_channel();
        let client = client_of(move |request| {
            let (uri, method) = (request.uri(), request.method().as_str());
            let mut path = uri.path().rsplit('/');
            match (method, path.next()?) {
                ("GET", _) if is_watch(request) => None,
                ("GET", "volumes") => Some((200, list_of(&json!(orders)))),
                ("GET", "snapshots") => Some((200, list_of(&json!([])))),
                ("PATCH", "status") => {
                    let name = path.next()?;
                    let order = orders.iter().find(|order| order.name_any() == name)?;
                    answered.send(order.spec.name.clone()).ok()?;
                    Some((200, json!(order)))
                }
                _ => None,
            }
        });
        (client, answers)
    }

    #[tokio::test]
    async fn volumes_that_wait_for_copies_keep_no_other_order_waiting() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = Config::of_copies(folder.path());
        let engine = Engine::open(config).await.expect("it opens");
        let mut orders = Vec::new();
        for number in 0..50 {
            let source = engine.create_claim(CreateClaim::empty(format!("source-{number}")));
            let source = source.await.expect("made").id;
            orders.push(order(&format!("clone-{number}"), Some(source)));
        }
        orders.push(order("empty", None));
        let hold = engine.hold_copies();
        let (client, mut answers) = server(orders);
        let node = Node {
            id: NodeId::new("node-1").expect("an id"),
            topology: Topology::default(),
        };
        let agent = tokio::spawn(work(client, engine.clone(), Arc::new(|| None), node, None));
        let first = tokio::time::timeout(Duration::from_secs(30), answers.recv()).await;
        let first = first.expect("it waits for the copies");
        assert_eq!(first.as_deref(), Some("empty"));
        drop(hold);
        let second = tokio::time::timeout(Duration::from_secs(30), answers.recv()).await;
        let second = second.expect("the copies go on").expect("an answer");
        assert!(second.starts_with("clone-"), "{second}");
        agent.abort();
        engine.shutdown().await;
    }
}
