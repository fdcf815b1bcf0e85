//! Persistent volumes of a whole cluster: [`Cluster`] asks the nodes through API objects.
//!
//! Each call is a loop: read the objects live, decide (`decide`), do one step, wait on the watch
//! until the node has answered. At most one call runs for a name; a second one is ABORTED.
//!
//! | file | holds |
//! |---|---|
//! | `decide` | the next step of a call, pure |
//! | `objects` | live reads, conditional writes |
//! | `cache` | the watch over one kind |
//! | `volumes` | create, delete and change volumes |
//! | `snapshots` | the same for snapshots and groups |
//! | `temporary` | snapshots that a clone on another node is made of |
//! | `lists` | answers from the watches |
//! | `persistent` | PersistentVolumes: the relevant parts, the watch, live reads |
//! | `contents` | which snapshots are named by snapshot contents |
//! | `leaks` | deletes volumes whose claim was given up |
//! | `orphans` | makes lost objects of data that is named again |
//! | `nodes` | nodes that are gone |
//! | `tell` | events on claims |
//! | `figures` | metrics |

mod cache;
mod contents;
pub(super) mod decide;
mod figures;
pub(super) mod leaks;
mod lists;
mod members;
pub(super) mod nodes;
mod objects;
pub(super) mod orphans;
mod persistent;
mod running;
mod snapshots;
mod tell;
pub(super) mod temporary;
mod volumes;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::Instant;
use tonic::Code;

use crate::api::{Phase, Pool, Snapshot, Volume, Wanted};
use crate::engine::claims::{Capacity, ClaimUse, Claims, CreateClaim, Group, Page, SnapshotFilter};
use crate::engine::{Error, Result};
use crate::model::{
    Attachment, MutableChange, Node, NodeId, PersistentVolume, Placed, Requirement, SnapshotId,
    Topology, VolumeId,
};

pub(super) use volumes::name_on;

use cache::Cache;
use decide::{Place, refusal};
use figures::{Counters, Orders};
pub use members::ClusterMembers;
use objects::Objects;
use persistent::Persistent;
use running::Running;

/// How long an empty volume may take on its node. Less than [`LONGEST`], so that there is time to
/// take the order back.
const TO_MAKE: Duration = Duration::from_secs(20);
/// How long a call waits for a node. Less than the sidecars' `--timeout` (30 s).
const LONGEST: Duration = Duration::from_secs(25);

/// A node with the one label that says where its volumes are.
pub type FindPlace = fn(&NodeId) -> Node;

/// The settings of a cluster's volumes.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// The driver's name in PersistentVolumes.
    pub driver: &'static str,
    /// A node's label, as volumes have it.
    pub place: FindPlace,
    /// How long a volume stays whose claim was given up.
    pub leak_grace: Duration,
    /// How long a Node object is missing before the node is given up.
    pub node_grace: Duration,
}

/// The persistent volumes of a cluster.
pub struct Cluster {
    client: Client,
    driver: &'static str,
    persistent: Persistent,
    nodes: Api<ApiNode>,
    volumes: Objects<Volume>,
    snapshots: Objects<Snapshot>,
    pools: Objects<Pool>,
    seen_volumes: Cache<Volume>,
    seen_snapshots: Cache<Snapshot>,
    seen_pools: Cache<Pool>,
    seen_nodes: Cache<PartialObjectMeta<ApiNode>>,
    place: FindPlace,
    running: Running,
    counters: Counters,
    orders: Orders,
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
        let (seen_volumes, fill_volumes) = Cache::new(volumes.clone(), "Volume", counters.clone());
        let (seen_snapshots, fill_snapshots) =
            Cache::new(snapshots.clone(), "Snapshot", counters.clone());
        let (seen_pools, fill_pools) = Cache::new(pools.clone(), "Pool", counters.clone());
        let (seen_nodes, fill_nodes) =
            Cache::new(Api::all(client.clone()), "Node", counters.clone());
        let (persistent, writer) = Persistent::new(Api::all(client.clone()), setup.driver);
        let cluster = Arc::new(Self {
            persistent,
            nodes: Api::all(client.clone()),
            client,
            driver: setup.driver,
            volumes: Objects(volumes),
            snapshots: Objects(snapshots),
            pools: Objects(pools),
            seen_volumes,
            seen_snapshots,
            seen_pools,
            seen_nodes,
            place: setup.place,
            running: Running::default(),
            counters,
            orders: Orders::default(),
        });
        let sweeper = cluster.clone();
        let work = async move {
            tokio::join!(
                fill_volumes,
                fill_snapshots,
                fill_pools,
                fill_nodes,
                sweeper.sweep_forever(),
                sweeper.mark_forever(writer),
                sweeper.find_leaks_forever(setup.leak_grace),
                sweeper.end_temporary_forever(setup.leak_grace),
                sweeper.keep_forever(),
                sweeper.give_up_forever(setup.node_grace),
                sweeper.tell_forever(),
            );
        };
        (cluster, work)
    }

    /// Ready when all objects have been listed once.
    pub async fn ready(&self) {
        self.seen_volumes.filled().await;
        self.seen_snapshots.filled().await;
        self.seen_pools.filled().await;
        self.seen_nodes.filled().await;
    }

    /// A node, as an answer names it.
    fn node(&self, name: &str) -> Arc<Node> {
        let id = NodeId::new(name).or_else(|_| NodeId::new("unknown"));
        Arc::new((self.place)(&id.expect("a constant id is valid")))
    }

    /// The nodes with a pool.
    fn places(&self) -> Vec<Place> {
        let pools = self.seen_pools.all();
        let places = pools.iter().filter_map(|pool| {
            let has_node = self.seen_nodes.get(&pool.name_any()).is_some();
            lists::place(pool, has_node)
        });
        places.collect()
    }

    /// Deletes the objects of deleted data, whichever call ordered that.
    async fn sweep_forever(&self) {
        let (mut volumes, mut snapshots) =
            (self.seen_volumes.changes(), self.seen_snapshots.changes());
        loop {
            for volume in self.seen_volumes.all() {
                let is_gone = volume.phase() == Some(Phase::Gone);
                if is_gone && volume.spec.wanted == Wanted::Absent {
                    // A call that runs deletes the object itself. Without one, it would order
                    // again.
                    let id = volume.metadata.name.as_deref().unwrap_or_default();
                    if let Ok(id) = id.parse()
                        && let Ok(_alone) = self.running.take(id)
                    {
                        note(self.volumes.remove(&volume).await);
                    }
                }
            }
            for snapshot in self.seen_snapshots.all() {
                let is_gone = snapshot.phase() == Some(Phase::Gone);
                if is_gone && snapshot.spec.wanted == Wanted::Absent {
                    note(self.snapshots.remove(&snapshot).await);
                }
            }
            // The next change tries again what failed.
            let changed = tokio::select! {
                changed = volumes.changed() => changed,
                changed = snapshots.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
        }
    }
}

fn note(removed: Result<bool>) {
    if let Err(error) = removed {
        tracing::warn!(%error, "the object of deleted data could not be deleted; retrying later");
    }
}

/// The error of a call whose node has not answered in time.
fn late(node: &str) -> Error {
    let message = format!(
        "the driver on node {node} has not answered yet; try again. If this lasts, look at its pod \
         in the namespace of the driver"
    );
    refusal(Code::Aborted, message)
}

fn deadline() -> Instant {
    Instant::now() + LONGEST
}

fn no_attachments<T>() -> Result<T> {
    Err(Error::Unsupported {
        what: "attaching a volume".to_owned(),
        why: "the CSIDriver object of a cluster has attachRequired: false".to_owned(),
    })
}

#[async_trait::async_trait]
impl Claims for Cluster {
    async fn create_claim(
        &self,
        request: CreateClaim,
        at: &Requirement,
    ) -> Result<Placed<PersistentVolume>> {
        self.create_volume(&request, at).await
    }

    async fn delete_claim(&self, id: &str) -> Result<()> {
        self.delete_volume(id).await
    }

    async fn claim(&self, id: &str) -> Result<Placed<PersistentVolume>> {
        self.find_volume(id).await
    }

    async fn claims(
        &self,
        after: Option<&VolumeId>,
        most: usize,
    ) -> Result<Page<Placed<PersistentVolume>>> {
        Ok(self.list_volumes(after, most))
    }

    async fn claim_use(&self, id: &str) -> Result<ClaimUse> {
        let found = self.volumes.get(id).await?;
        let volume = found.ok_or_else(|| Error::NoSuchClaim(id.to_owned()))?;
        let given_up = self.is_given_up(&volume.spec.node_name).await?;
        Ok(ClaimUse {
            problems: tell::problem(&volume, given_up).into_iter().collect(),
            ..ClaimUse::default()
        })
    }

    async fn expand_claim(
        &self,
        id: &str,
        required: u64,
        limit: Option<u64>,
    ) -> Result<PersistentVolume> {
        self.expand_volume(id, required, limit).await
    }

    async fn modify_claim(&self, id: &str, mutable: MutableChange) -> Result<PersistentVolume> {
        self.modify_volume(id, mutable).await
    }

    async fn attach_claim(&self, _: &str, _: Attachment) -> Result<()> {
        no_attachments()
    }

    async fn detach_claim(&self, _: &str, _: Option<&str>) -> Result<()> {
        no_attachments()
    }

    async fn create_snapshot(
        &self,
        name: &str,
        source: &str,
        at: &Requirement,
    ) -> Result<Placed<crate::model::Snapshot>> {
        self.take_snapshot(name, source, at).await
    }

    async fn delete_snapshot(&self, id: &str) -> Result<()> {
        self.drop_snapshot(id).await
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Placed<crate::model::Snapshot>>> {
        self.list_snapshots(filter, after, most).await
    }

    async fn create_group(&self, name: &str, sources: &[String]) -> Result<Placed<Group>> {
        self.take_group(name, sources).await
    }

    async fn delete_group(&self, id: &str) -> Result<()> {
        self.drop_group(id).await
    }

    async fn group(&self, id: &str) -> Result<Placed<Group>> {
        self.find_group(id).await
    }

    async fn capacity(&self, within: &Topology) -> Result<Capacity> {
        let places = self.places().into_iter();
        let inside = places.filter(|place| place.node.topology.is_in(within));
        Ok(inside.fold(Capacity::default(), |sum, place| Capacity {
            available: sum.available.saturating_add(place.available),
            largest: sum.largest.max(place.bytes),
        }))
    }
}
