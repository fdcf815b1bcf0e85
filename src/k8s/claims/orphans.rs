//! Makes the objects of orphans again: data that a node has, that no object names, and that a
//! PersistentVolume or a snapshot content names. So deleted objects, deleted definitions and an
//! older etcd repair themselves.
//!
//! The new object is an order to keep ([`Wanted::Kept`]), which never makes or deletes data. An
//! orphan that nothing names stays, and is counted in its node's `Pool`.
//!
//! A node may report wrong data. So an order that the API server refuses does not block the other
//! orders. [`MOST_TEMPORARY`] limits the orders that only a node asks for.
//!
//! A `Pool` can be seconds late. So an object may be made of data that was deleted meanwhile. Its
//! node reports it Lost, and the object is deleted if nothing names it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt as _;
use kube::api::ListParams;
use tokio::time::{Instant, sleep, timeout};

use super::cluster::Cluster;
use super::objects::failed;
use super::order::Order as _;
use super::persistent::Named;
use super::temporary;
use super::volumes::name_on;
use crate::api::{
    OrphanSnapshot, OrphanVolume, Pool, Snapshot, SnapshotSpec, Volume, VolumeSpec, Wanted,
};
use crate::engine::Result;
use crate::engine::claims::{claim_id, group_id, snapshot_id};

/// The least time between two looks.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest: a PersistentVolume can be made later than its orphan is reported.
const AGAIN: Duration = Duration::from_secs(10);

/// The time after which contents are listed again for the same orphans: one can be made later. An
/// orphan that nothing names stays for ever, and the list may be long.
const SAME: Duration = Duration::from_secs(30);

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

/// Snapshots by their nodes, at a time.
type Settled = (BTreeSet<(String, String)>, Instant);

fn orphan_volumes(pool: &Pool) -> &[OrphanVolume] {
    let status = pool.status.as_ref();
    status.map_or(&[], |status| &status.orphans.volumes)
}

fn orphan_snapshots(pool: &Pool) -> &[OrphanSnapshot] {
    let status = pool.status.as_ref();
    status.map_or(&[], |status| &status.orphans.snapshots)
}

/// The order to delete a snapshot or a group that one of these pools names.
fn deletion<'a>(id: &str, pools: impl IntoIterator<Item = &'a Pool>) -> Option<Snapshot> {
    pools.into_iter().find_map(|pool| {
        let orphan = orphan_snapshots(pool).iter().find(|one| one.id == id)?;
        snapshot_order(&pool.name_any(), orphan, Wanted::Absent)
    })
}

impl Cluster {
    /// Makes objects of orphans as nodes report them.
    pub(super) async fn keep_forever(&self) {
        self.ready().await;
        let mut pools = self.seen_pools.changes();
        let mut settled = None;
        loop {
            for done in [
                self.keep_volumes().await,
                self.keep_snapshots(&mut settled).await,
            ] {
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
        empty_handed.retain(|one| one.is_empty_handed());
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

    /// `settled`: the snapshots of the last look, by their nodes, and when that was.
    async fn keep_snapshots(&self, settled: &mut Option<Settled>) -> Result<()> {
        let pools = self.seen_pools.all();
        let named = |id: &str| deletion(id, pools.iter().map(|pool| &**pool));
        self.sought.lock().note(named, &pools, Instant::now());
        let orphans = pools.iter().flat_map(|pool| {
            let of_pool = orphan_snapshots(pool).iter();
            of_pool.map(move |orphan| (pool.name_any(), orphan))
        });
        let orphans: Vec<(String, &OrphanSnapshot)> = orphans.collect();
        let seen = self.seen_snapshots.all();
        let empty_handed = seen.iter().filter(|one| one.is_empty_handed());
        let empty_handed: Vec<_> = empty_handed.collect();
        let of_orphans = orphans
            .iter()
            .map(|(node, one)| (node.clone(), one.id.clone()));
        let others = empty_handed
            .iter()
            .map(|one| (String::new(), one.name_any()));
        let all: BTreeSet<_> = of_orphans.chain(others).collect();
        let is_same = |(last, at): &Settled| *last == all && at.elapsed() < SAME;
        if all.is_empty() || settled.as_ref().is_some_and(is_same) {
            return Ok(());
        }
        *settled = None;
        self.keep_named(&seen, orphans, empty_handed).await?;
        *settled = Some((all, Instant::now()));
        Ok(())
    }

    async fn keep_named(
        &self,
        seen: &[Arc<Snapshot>],
        orphans: Vec<(String, &OrphanSnapshot)>,
        empty_handed: Vec<&Arc<Snapshot>>,
    ) -> Result<()> {
        let named = self.contents.named().await?;
        let mut failure = None;
        for object in empty_handed {
            if !named.contains_key(&object.name_any())
                && let Err(error) = self.snapshots.remove(object).await
            {
                failure.get_or_insert(error);
            }
        }
        let mut waiting: HashMap<String, usize> = HashMap::new();
        for one in seen {
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

    /// The same for a snapshot or a group. A node may have it and not name it yet.
    pub(super) async fn orphan_snapshot(&self, id: &str) -> Result<Option<Snapshot>> {
        let pools = self.pools().await?;
        let named = deletion(id, &pools);
        self.sought.lock().find(id, named, &pools, Instant::now())
    }

    async fn pools(&self) -> Result<Vec<Pool>> {
        let pools = self.pools.0.list(&ListParams::default()).await;
        Ok(pools.map_err(|error| failed(&error))?.items)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use serde_json::json;

    use super::*;
    use crate::api::{Mutable, Orphans, Parameters, PoolSpec, PoolStatus};
    use crate::k8s::client::{client_of, is_watch, list_of};

    #[tokio::test]
    async fn contents_are_listed_once_for_the_same_orphans_and_for_many_deletions() {
        let mut pool = Pool::new("node-1", PoolSpec {});
        let orphan = OrphanSnapshot {
            id: snapshot_id("s").to_string(),
            name: "s".to_owned(),
            sources: Vec::new(),
            members: Vec::new(),
            group: false,
        };
        pool.status = Some(PoolStatus {
            orphans: Orphans {
                snapshots: vec![orphan],
                ..Orphans::default()
            },
            ..PoolStatus::default()
        });
        let lists = Arc::new(AtomicUsize::new(0));
        let count = lists.clone();
        let client = client_of(move |request| {
            let uri = request.uri();
            if is_watch(request) {
                return None;
            }
            let version = "snapshot.storage.k8s.io/v1";
            let answer = match uri.path().rsplit('/').next()? {
                "apis" => {
                    let versions = [json!({"groupVersion": version, "version": "v1"})];
                    let group = json!({"name": "snapshot.storage.k8s.io", "versions": versions});
                    json!({"kind": "APIGroupList", "groups": [group]})
                }
                "v1" => {
                    let contents = json!({
                        "name": "volumesnapshotcontents", "kind": "VolumeSnapshotContent",
                        "singularName": "", "namespaced": false, "verbs": ["list"],
                    });
                    json!({"groupVersion": version, "resources": [contents]})
                }
                "pools" => list_of(&json!([pool])),
                "volumesnapshotcontents" => {
                    count.fetch_add(1, Ordering::Relaxed);
                    let content = json!({
                        "apiVersion": version, "kind": "VolumeSnapshotContent",
                        "metadata": {"name": "c"},
                        "spec": {"driver": crate::model::DRIVER_NAME, "source": {"snapshotHandle": "named"}},
                    });
                    list_of(&json!([content]))
                }
                _ => list_of(&json!([])),
            };
            Some((200, answer))
        });
        let (cluster, work) = Cluster::of_server(client).await;
        drop(work);
        let listed = || lists.swap(0, Ordering::Relaxed);
        listed();
        let mut settled = None;
        for _ in 0..100 {
            let kept = cluster.keep_snapshots(&mut settled).await;
            kept.expect("looked");
        }
        assert_eq!(listed(), 1, "the orphan is the same");

        let checks = join_all((0..20).map(|_| cluster.check_unnamed("named", false)));
        for refused in checks.await {
            let refused = refused.expect_err("a content names it").to_string();
            assert!(refused.contains("\"c\""), "{refused}");
        }
        assert!(listed() <= 2, "the calls share a list");
        let free = cluster.check_unnamed("free", false).await;
        free.expect("nothing names it");
        assert_eq!(listed(), 1, "an older list says nothing");
    }

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
