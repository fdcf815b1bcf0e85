//! Persistent volumes of a whole cluster: [`Cluster`] asks the nodes through API objects.
//!
//! Each call is a loop: read the objects live, decide (`decide`), do one step, wait on the watch
//! until the node has answered. At most one call runs for a name; a second one is ABORTED.
//!
//! | file | holds |
//! |---|---|
//! | `cluster` | the state that all calls share, and the tasks that run all the time |
//! | `decide` | the next step of a call, pure |
//! | `objects` | live reads, conditional writes |
//! | `order` | what a `Volume` and a `Snapshot` have in common |
//! | `volumes` | create, delete and change volumes |
//! | `snapshots` | the same for snapshots and groups |
//! | `since` | how long objects or nodes have been in a state |
//! | `temporary` | snapshots that a clone on another node is made of |
//! | `lists` | answers from the watches |
//! | `persistent` | PersistentVolumes: the relevant parts, the watch, live reads |
//! | `contents` | which snapshots are named by snapshot contents |
//! | `leaks` | deletes volumes whose claim was given up |
//! | `orphans` | makes lost objects of data that is named again |
//! | `sought` | snapshots without an object that are to be deleted |
//! | `nodes` | nodes that are gone |
//! | `tell` | events on claims |
//! | `figures` | metrics |

mod cluster;
mod contents;
pub(super) mod decide;
mod figures;
pub(super) mod leaks;
mod lists;
mod members;
mod nodes;
mod objects;
pub(super) mod order;
pub(super) mod orphans;
mod persistent;
mod running;
mod since;
mod snapshots;
mod sought;
mod tell;
pub(super) mod temporary;
mod volumes;

use crate::engine::claims::{
    Capacity, ClaimUse, Claims, CreateClaim, Group, Page, SnapshotFilter, group_id,
};
use crate::engine::{Error, Result};
use crate::model::{
    Attachment, MutableChange, PersistentVolume, Placed, Requirement, SnapshotId, Topology,
    VolumeId,
};

use decide::Aim;
pub(super) use volumes::name_on;

pub use cluster::{Cluster, Setup};

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
        Ok(ClaimUse {
            problems: tell::problem(&volume).into_iter().collect(),
            ..ClaimUse::default()
        })
    }

    async fn expand_claim(
        &self,
        id: &str,
        required: u64,
        limit: Option<u64>,
    ) -> Result<PersistentVolume> {
        let aim = Aim::Capacity { required, limit };
        self.change_volume(id, aim).await
    }

    async fn modify_claim(&self, id: &str, mutable: MutableChange) -> Result<PersistentVolume> {
        self.change_volume(id, Aim::Mutable(mutable)).await
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
        let anywhere = Requirement::default();
        let id = group_id(name);
        self.take(id, name, sources, true, &anywhere).await
    }

    async fn delete_group(&self, id: &str) -> Result<()> {
        self.order_gone(id, true).await
    }

    async fn group(&self, id: &str) -> Result<Placed<Group>> {
        self.find_group(id).await
    }

    async fn capacity(&self, within: &Topology) -> Result<Capacity> {
        let candidates = self.candidates();
        let inside = candidates
            .iter()
            .filter(|candidate| candidate.node.topology.is_in(within));
        Ok(inside.fold(Capacity::default(), |sum, candidate| Capacity {
            available: sum.available.saturating_add(candidate.available),
            largest: sum.largest.max(candidate.bytes),
        }))
    }
}
