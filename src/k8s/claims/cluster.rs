//! The controller's state of a cluster's volumes, the tasks that keep it current, and how long a
//! call waits for a node. The calls are in `volumes` and `snapshots`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};
use tonic::Code;

use super::contents::Contents;
use super::decide::{Candidate, refusal};
use super::figures::Counters;
use super::objects::Objects;
use super::order::Order;
use super::persistent::Persistent;
use super::running::Running;
use super::since::Since;
use super::sought::Sought;
use crate::api::{Pool, Snapshot, Volume};
use crate::engine::{Error, Result};
use crate::k8s::watched::{self, Watched};
use crate::model::{Node, NodeId};

/// How long an empty volume may take on its node. Less than [`LONGEST`], so that there is time to
/// take the order back.
pub(super) const TO_MAKE: Duration = Duration::from_secs(20);
/// How long a call waits for a node. Less than the sidecars' `--timeout` (30 s).
pub(super) const LONGEST: Duration = Duration::from_secs(25);

/// The shortest and the longest time between two looks for objects that are needed no more.
pub(super) const PAUSES: (Duration, Duration) =
    (Duration::from_millis(500), Duration::from_secs(60));

/// The settings of a cluster's volumes.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// How long a volume stays whose claim was given up.
    pub leak_grace: Duration,
    /// How long a Node object is missing before the node is given up.
    pub node_grace: Duration,
}

/// The nodes with a pool, as the watches had them at a version. All calls share them: in a cluster
/// of 1,000 nodes each list takes a MiB, and a call keeps it while it waits for a node.
#[derive(Default)]
pub(super) struct Candidates {
    /// That of the pools, and of the Nodes.
    pub(super) version: (u64, u64),
    pub(super) all: Arc<[Candidate]>,
}

/// The persistent volumes of a cluster.
pub struct Cluster {
    pub(super) client: Client,
    pub(super) persistent: Persistent,
    pub(super) contents: Contents,
    pub(super) nodes: Api<ApiNode>,
    pub(super) volumes: Objects<Volume>,
    pub(super) snapshots: Objects<Snapshot>,
    pub(super) pools: Objects<Pool>,
    pub(super) seen_volumes: Watched<Volume>,
    pub(super) seen_snapshots: Watched<Snapshot>,
    pub(super) seen_pools: Watched<Pool>,
    pub(super) seen_nodes: Watched<PartialObjectMeta<ApiNode>>,
    pub(super) candidates: Mutex<Candidates>,
    pub(super) running: Running,
    pub(super) sought: Mutex<Sought>,
    pub(super) counters: Counters,
    /// The orders that no node has answered: uid and generation.
    pub(super) orders: Mutex<Since<(String, i64)>>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    /// The volumes in this cluster, and the task that watches them and looks after them.
    pub fn new(
        client: Client,
        setup: Setup,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send + 'static) {
        let counters = Counters::new();
        let (volumes, snapshots) = (Api::all(client.clone()), Api::all(client.clone()));
        let pools = Api::all(client.clone());
        let (seen_volumes, fill_volumes) = watch(volumes.clone(), "Volume", &counters);
        let (seen_snapshots, fill_snapshots) = watch(snapshots.clone(), "Snapshot", &counters);
        let (seen_pools, fill_pools) = watch(pools.clone(), "Pool", &counters);
        let (seen_nodes, fill_nodes) = watch(Api::all(client.clone()), "Node", &counters);
        let (persistent, writer) = Persistent::new(Api::all(client.clone()));
        let cluster = Arc::new(Self {
            persistent,
            contents: Contents::new(client.clone()),
            nodes: Api::all(client.clone()),
            client,
            volumes: Objects(volumes),
            snapshots: Objects(snapshots),
            pools: Objects(pools),
            seen_volumes,
            seen_snapshots,
            seen_pools,
            seen_nodes,
            candidates: Mutex::default(),
            running: Running::default(),
            sought: Mutex::default(),
            counters,
            orders: Mutex::default(),
        });
        let tended = cluster.clone();
        let work = async move {
            tokio::join!(
                fill_volumes,
                fill_snapshots,
                fill_pools,
                fill_nodes,
                tended.tidy_forever(setup.leak_grace),
                tended.mark_forever(writer),
                tended.find_leaks_forever(setup.leak_grace),
                tended.keep_forever(),
                tended.give_up_forever(setup.node_grace),
                tended.tell_forever(),
            );
        };
        (cluster, work)
    }

    /// Ready when all objects have been listed once.
    pub async fn ready(&self) {
        self.seen_volumes.listed().await;
        self.seen_snapshots.listed().await;
        self.seen_pools.listed().await;
        self.seen_nodes.listed().await;
    }

    /// Deletes objects that are needed no more, after each change.
    async fn tidy_forever(&self, grace: Duration) {
        self.seen_volumes.listed().await;
        self.seen_snapshots.listed().await;
        let pause = (grace / 4).clamp(PAUSES.0, PAUSES.1);
        let (mut volumes, mut snapshots) =
            (self.seen_volumes.changes(), self.seen_snapshots.changes());
        let mut alone = Since::default();
        loop {
            self.sweep().await;
            self.end_temporary(&mut alone, grace).await;
            let changed = async {
                tokio::select! {
                    changed = volumes.changed() => changed,
                    changed = snapshots.changed() => changed,
                }
            };
            if let Ok(Err(_)) = timeout(pause, changed).await {
                return;
            }
        }
    }

    /// Deletes the objects of deleted data, whichever call ordered that. The next look tries again
    /// what failed.
    async fn sweep(&self) {
        for volume in self.seen_volumes.all() {
            if volume.is_deleted() {
                // A call that runs deletes the object itself. Without one, it would order again.
                let id = volume.metadata.name.as_deref().unwrap_or_default();
                if let Ok(id) = id.parse()
                    && let Ok(_alone) = self.running.take(id)
                {
                    note(self.volumes.remove(&volume).await);
                }
            }
        }
        for snapshot in self.seen_snapshots.all() {
            if snapshot.is_deleted() {
                let id = snapshot.metadata.name.as_deref().unwrap_or_default();
                if let Ok(held) = id.parse()
                    && let Ok(_alone) = self.running.take(held)
                {
                    let removed = self.snapshots.remove(&snapshot).await;
                    if let Ok(true) = removed {
                        self.sought.lock().note_gone(id, Instant::now());
                    }
                    note(removed);
                }
            }
        }
    }
}

/// A watch whose failures are counted.
fn watch<K>(
    api: Api<K>,
    kind: &'static str,
    counters: &Counters,
) -> (Watched<K>, impl Future<Output = ()> + Send + use<K>)
where
    K: Resource<DynamicType = ()> + Clone + fmt::Debug + DeserializeOwned + Send + Sync + 'static,
{
    let counters = counters.clone();
    let events = watched::quiet_events(api);
    Watched::over(events.inspect_err(move |error| counters.watch_failed(kind, error)))
}

/// A node, as an answer names it.
pub(super) fn node_named(name: &str) -> Arc<Node> {
    let id = NodeId::new(name).or_else(|_| NodeId::new("unknown"));
    Arc::new(Node::place(&id.expect("a constant id is valid")))
}

fn note(removed: Result<bool>) {
    if let Err(error) = removed {
        tracing::warn!(%error, "the object of deleted data could not be deleted; retrying later");
    }
}

/// The error of a call whose node has not answered in time.
pub(super) fn late(node: &str) -> Error {
    let message = format!(
        "the driver on node {node} has not answered yet; try again. If this lasts, look at its pod \
         in the namespace of the driver"
    );
    refusal(Code::Aborted, message)
}

pub(super) fn deadline() -> Instant {
    Instant::now() + LONGEST
}

#[cfg(test)]
impl Cluster {
    /// The volumes of an API server, which are listed, and the task that looks after them.
    pub(super) async fn of_server(
        client: Client,
    ) -> (Arc<Self>, tokio_util::task::AbortOnDropHandle<()>) {
        let hour = Duration::from_secs(3600);
        let setup = Setup {
            leak_grace: hour,
            node_grace: hour,
        };
        let (cluster, work) = Self::new(client, setup);
        let work = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(work));
        cluster.ready().await;
        (cluster, work)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::json;

    use super::super::sought::tests::pool;
    use super::*;
    use crate::engine::claims::snapshot_id;
    use crate::k8s::client::{client_of, is_watch, list_of};

    #[tokio::test]
    async fn a_deleted_snapshot_leaves_its_object_to_its_call_and_the_retry_has_nothing_to_find() {
        let id = snapshot_id("s");
        let snapshot = json!({
            "metadata": {"name": id, "uid": "1", "resourceVersion": "1", "generation": 2},
            "spec": {"name": "s", "nodeName": "node-1", "sources": ["v"], "wanted": "Absent"},
            "status": {"phase": "Gone", "observedGeneration": 2, "pool": "p"},
        });
        // The node has more orphans than it names: a search takes minutes.
        let pool = pool(1_000);
        let deletions = Arc::new(AtomicUsize::new(0));
        let count = deletions.clone();
        let client = client_of(move |request| {
            let path = request.uri().path();
            if is_watch(request) {
                return None;
            }
            if request.method() == "DELETE" {
                count.fetch_add(1, Ordering::Relaxed);
                return Some((200, json!({"kind": "Status", "status": "Success"})));
            }
            let items = match path.rsplit('/').next()? {
                "snapshots" => json!([snapshot]),
                "pools" => json!([pool]),
                name if name == snapshot["metadata"]["name"] => {
                    let none = json!({"kind": "Status", "code": 404, "reason": "NotFound"});
                    return Some((404, none));
                }
                _ => json!([]),
            };
            Some((200, list_of(&items)))
        });
        let hour = Duration::from_secs(3600);
        let setup = Setup {
            leak_grace: hour,
            node_grace: hour,
        };
        let (cluster, work) = Cluster::new(client, setup);
        let call = cluster.running.take(id.clone()).expect("no other call");
        let work = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(work));
        let listed = timeout(LONGEST, cluster.ready()).await;
        listed.expect("all are listed");
        cluster.sweep().await;
        assert_eq!(deletions.load(Ordering::Relaxed), 0, "a call runs");
        drop(call);
        drop(work);
        cluster.sweep().await;
        assert_eq!(deletions.load(Ordering::Relaxed), 1);
        let retried = cluster.order_gone(id.as_str(), false).await;
        retried.expect("it is deleted");
    }
}
