//! Makes the objects of orphans again: data that a node has, that no object names, and that a
//! PersistentVolume or a snapshot content names. So deleted objects, deleted definitions and an
//! older etcd repair themselves.
//!
//! The new object is an order to keep ([`Wanted::Kept`]), which never makes or deletes data. An
//! orphan that nothing names stays, and is counted in its node's `Pool`.
//!
//! A node may report wrong data, so an order that the API server refuses keeps no other from being
//! made, and [`MOST_TEMPORARY`] limits the orders that nothing but a node asks for.
//!
//! A `Pool` can be seconds late. So an object may be made of data that was deleted meanwhile. Its
//! node reports it Lost, and the object is deleted if nothing names it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use kube::ResourceExt as _;
use kube::api::ListParams;
use tokio::time::{sleep, timeout};

use super::cluster::Cluster;
use super::objects::failed;
use super::persistent::Named;
use super::volumes::name_on;
use super::{contents, temporary};
use crate::api::{
    OrphanSnapshot, OrphanVolume, Phase, Pool, Snapshot, SnapshotSpec, Volume, VolumeSpec, Wanted,
};
use crate::engine::Result;
use crate::engine::claims::{claim_id, group_id, snapshot_id};

/// The least time between two looks.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest: a PersistentVolume can be made later than its orphan is reported.
const AGAIN: Duration = Duration::from_secs(10);

/// The most orders at a node to delete snapshots for clones, which no other object names.
const MOST_TEMPORARY: usize = 100;

/// The order for an orphan volume. `None` if its id is not what its node and name say: then
/// something else than an order made it, or the node reports what is not its own.
pub(in crate::k8s) fn volume_order(
    node: &str,
    orphan: &OrphanVolume,
    wanted: Wanted,
) -> Option<Volume> {
    if claim_id(&name_on(node, &orphan.name)).as_str() != orphan.id {
        return None;
    }
    let spec = VolumeSpec {
        name: orphan.name.clone(),
        node_name: node.to_owned(),
        parameters: orphan.parameters,
        made_with: orphan.made_with,
        source: orphan.source.clone(),
        fetch: None,
        wanted,
        capacity: orphan.capacity,
        limit: 0,
        mutable: orphan.mutable,
    };
    Some(Volume::new(&orphan.id, spec))
}

/// The order for an orphan snapshot, likewise.
pub(in crate::k8s) fn snapshot_order(
    node: &str,
    orphan: &OrphanSnapshot,
    wanted: Wanted,
) -> Option<Snapshot> {
    let id = if orphan.group {
        group_id(&orphan.name)
    } else {
        snapshot_id(&orphan.name)
    };
    if id.as_str() != orphan.id {
        return None;
    }
    let spec = SnapshotSpec {
        name: orphan.name.clone(),
        node_name: node.to_owned(),
        sources: orphan.sources.clone(),
        group: orphan.group,
        wanted,
    };
    Some(Snapshot::new(&orphan.id, spec))
}

/// Whether an object was made of an orphan that is not there any more. A node that was given up may
/// have it all the same.
pub(in crate::k8s) fn is_empty_handed(
    wanted: Wanted,
    phase: Option<Phase>,
    is_node_gone: bool,
) -> bool {
    wanted == Wanted::Kept && phase == Some(Phase::Lost) && !is_node_gone
}

fn orphan_volumes(pool: &Pool) -> &[OrphanVolume] {
    let status = pool.status.as_ref();
    status.map_or(&[], |status| &status.orphans.volumes)
}

fn orphan_snapshots(pool: &Pool) -> &[OrphanSnapshot] {
    let status = pool.status.as_ref();
    status.map_or(&[], |status| &status.orphans.snapshots)
}

impl Cluster {
    /// Makes objects of orphans as nodes report them.
    pub(super) async fn keep_forever(&self) {
        self.ready().await;
        let mut pools = self.seen_pools.changes();
        loop {
            for done in [self.keep_volumes().await, self.keep_snapshots().await] {
                if let Err(error) = done {
                    tracing::warn!(%error,
                        "the object of existing data could not be created again; retrying");
                }
            }
            sleep(PAUSE).await;
            if let Ok(Err(_)) = timeout(AGAIN, pools.changed()).await {
                return;
            }
        }
    }

    async fn keep_volumes(&self) -> Result<()> {
        let pools = self.seen_pools.all();
        let orphans = pools.iter().flat_map(|pool| {
            let of_pool = orphan_volumes(pool).iter();
            of_pool.map(move |orphan| (pool.name_any(), orphan))
        });
        let orphans: Vec<(String, &OrphanVolume)> = orphans.collect();
        let mut empty_handed = self.seen_volumes.all();
        empty_handed
            .retain(|one| is_empty_handed(one.spec.wanted, one.phase(), one.is_node_gone()));
        if orphans.is_empty() && empty_handed.is_empty() {
            return Ok(());
        }
        let Some(named) = self.persistent.all() else {
            return Ok(());
        };
        let named = named.into_iter().map(|one| (one.id.clone(), one));
        let named: HashMap<String, Named> = named.collect();
        let mut failure = None;
        for (node, orphan) in orphans {
            if let Some(named) = named.get(&orphan.id).filter(|named| !named.is_ending)
                && let Err(error) = self.keep_volume(&node, orphan, named).await
            {
                failure.get_or_insert(error);
            }
        }
        // After the loss of a disk there may be many that are named: no live list for these.
        empty_handed.retain(|one| !named.contains_key(&one.name_any()));
        if empty_handed.is_empty() {
            return failure.map_or(Ok(()), Err);
        }
        let live = self.persistent.list().await?;
        let live: HashSet<String> = live.into_iter().map(|named| named.id).collect();
        for volume in empty_handed {
            if !live.contains(&volume.name_any())
                && let Err(error) = self.volumes.remove(&volume).await
            {
                failure.get_or_insert(error);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    async fn keep_volume(&self, node: &str, orphan: &OrphanVolume, named: &Named) -> Result<()> {
        let Some(order) = volume_order(node, orphan, Wanted::Kept) else {
            tracing::warn!(volume = %orphan.id, name = %orphan.name, %node,
                "the volume has no object, and its id does not belong to its name: no object is \
                 created");
            return Ok(());
        };
        let Ok(id) = orphan.id.parse() else {
            return Ok(());
        };
        // A call on it does what is needed.
        let Ok(_alone) = self.running.take(id) else {
            return Ok(());
        };
        let now = self.persistent.read(&named.name).await?;
        let is_needed = now.is_some_and(|now| now.id == orphan.id && !now.is_ending);
        if is_needed && self.volumes.make(&order).await?.is_some() {
            self.counters.kept.inc();
            tracing::info!(volume = %orphan.id, name = %orphan.name, %node,
                "created an object again that was lost: its data still exists");
        }
        Ok(())
    }

    async fn keep_snapshots(&self) -> Result<()> {
        let pools = self.seen_pools.all();
        let orphans = pools.iter().flat_map(|pool| {
            let of_pool = orphan_snapshots(pool).iter();
            of_pool.map(move |orphan| (pool.name_any(), orphan))
        });
        let orphans: Vec<(String, &OrphanSnapshot)> = orphans.collect();
        let seen = self.seen_snapshots.all();
        let empty_handed = seen
            .iter()
            .filter(|one| is_empty_handed(one.spec.wanted, one.phase(), one.is_node_gone()));
        let empty_handed: Vec<_> = empty_handed.collect();
        if orphans.is_empty() && empty_handed.is_empty() {
            return Ok(());
        }
        let named = contents::named(&self.client, self.driver).await?;
        let mut failure = None;
        for object in empty_handed {
            if !named.contains_key(&object.name_any())
                && let Err(error) = self.snapshots.remove(object).await
            {
                failure.get_or_insert(error);
            }
        }
        let mut waiting: HashMap<String, usize> = HashMap::new();
        for one in &seen {
            if one.spec.wanted == Wanted::Absent && temporary::volume_of(&one.spec.name).is_some() {
                *waiting.entry(one.spec.node_name.clone()).or_default() += 1;
            }
        }
        for (node, orphan) in orphans {
            let mut ids = orphan.members.iter().chain([&orphan.id]);
            // No content names a snapshot for a clone, and without its object it is of no use.
            let is_temporary = temporary::volume_of(&orphan.name).is_some();
            let wanted = if is_temporary {
                Wanted::Absent
            } else {
                Wanted::Kept
            };
            let (true, Some(order)) = (
                is_temporary || ids.any(|id| named.contains_key(id)),
                snapshot_order(&node, orphan, wanted),
            ) else {
                continue;
            };
            let waiting = waiting.entry(node.clone()).or_default();
            if is_temporary && *waiting >= MOST_TEMPORARY {
                continue;
            }
            match self.keep_snapshot(&node, orphan, &order).await {
                Ok(is_new) => *waiting += usize::from(is_new && is_temporary),
                Err(error) => drop(failure.get_or_insert(error)),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Makes the object of a snapshot. `false`: there is one, or a call is about to make it.
    async fn keep_snapshot(
        &self,
        node: &str,
        orphan: &OrphanSnapshot,
        order: &Snapshot,
    ) -> Result<bool> {
        let Ok(id) = orphan.id.parse() else {
            return Ok(false);
        };
        let Ok(_alone) = self.running.take(id) else {
            return Ok(false);
        };
        let is_new = self.snapshots.make(order).await?.is_some();
        if is_new && order.spec.wanted == Wanted::Kept {
            self.counters.kept.inc();
            tracing::info!(snapshot = %orphan.id, name = %orphan.name, %node,
                "created an object again that was lost: its data still exists");
        }
        Ok(is_new)
    }

    /// The order to delete a volume that a node reports as an orphan, read live.
    pub(super) async fn orphan_volume(&self, id: &str) -> Result<Option<Volume>> {
        let pools = self.pools().await?;
        let mut orders = pools.iter().filter_map(|pool| {
            let orphan = orphan_volumes(pool).iter().find(|one| one.id == id)?;
            volume_order(&pool.name_any(), orphan, Wanted::Absent)
        });
        Ok(orders.next())
    }

    /// The same for a snapshot or a group.
    pub(super) async fn orphan_snapshot(&self, id: &str) -> Result<Option<Snapshot>> {
        let pools = self.pools().await?;
        let mut orders = pools.iter().filter_map(|pool| {
            let orphan = orphan_snapshots(pool).iter().find(|one| one.id == id)?;
            snapshot_order(&pool.name_any(), orphan, Wanted::Absent)
        });
        Ok(orders.next())
    }

    async fn pools(&self) -> Result<Vec<Pool>> {
        let pools = self.pools.0.list(&ListParams::default()).await;
        Ok(pools.map_err(|error| failed(&error))?.items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Mutable, Parameters};

    #[test]
    fn only_what_a_node_can_have_becomes_an_object() {
        let mutable = Mutable {
            ttl_seconds: Some(7),
            ..Mutable::default()
        };
        let orphan = OrphanVolume {
            id: claim_id("pvc-1@node-1").to_string(),
            name: "pvc-1".to_owned(),
            parameters: Parameters::default(),
            made_with: Mutable::default(),
            source: None,
            capacity: 5,
            mutable,
        };
        let kept = volume_order("node-1", &orphan, Wanted::Kept).expect("an order");
        assert_eq!(kept.name_any(), orphan.id);
        assert_eq!(kept.spec.wanted, Wanted::Kept);
        assert_eq!((kept.spec.capacity, kept.spec.mutable), (5, mutable));
        // Another node says that it has the volume.
        assert_eq!(volume_order("node-2", &orphan, Wanted::Kept), None);

        let mut orphan = OrphanSnapshot {
            id: group_id("g").to_string(),
            name: "g".to_owned(),
            sources: vec!["vol-1".to_owned()],
            members: vec!["snap-1".to_owned()],
            group: true,
        };
        let kept = snapshot_order("node-1", &orphan, Wanted::Kept).expect("an order");
        assert!(kept.spec.group && kept.spec.sources == orphan.sources);
        orphan.group = false;
        assert_eq!(snapshot_order("node-1", &orphan, Wanted::Kept), None);
    }
}
