//! Converts objects to the types of the model: one object, or pages of what the watches have seen.
//! Makes no decisions on volumes.

use std::sync::Arc;

use kube::ResourceExt as _;

use super::cluster::{Candidates, Cluster};
use super::decide::Candidate;
use super::temporary;
use crate::api::{self, Phase, Pool, Volume, Wanted, bytes};
use crate::engine::claims::{Group, Page, SnapshotFilter};
use crate::engine::{Error, Result};
use crate::model::{
    ClaimSource, Node, NodeId, OwnerView, PersistentVolume, Placed, Snapshot, SnapshotGroup,
    SnapshotId, Timestamp, Topology, VolumeId,
};

/// The node of a pool that has reported.
pub(super) fn candidate(pool: &Pool, takes_pods: bool) -> Option<Candidate> {
    let status = pool.status.as_ref()?;
    let id = NodeId::new(pool.metadata.name.as_deref()?).ok()?;
    let topology = Topology(status.topology.clone());
    Some(Candidate {
        node: Arc::new(Node { id, topology }),
        bytes: bytes(status.bytes),
        available: bytes(status.available),
        peer: status.peer.is_some(),
        takes_pods,
    })
}

fn node(name: &str) -> Option<Arc<Node>> {
    Some(Arc::new(Node::place(&NodeId::new(name).ok()?)))
}

/// A volume that its node has reported.
fn known_volume(volume: &Volume) -> Option<Placed<PersistentVolume>> {
    let spec = &volume.spec;
    let status = volume.status.as_ref();
    let status = status.filter(|it| it.phase != Phase::Fetching)?;
    let created = volume.metadata.creation_timestamp.as_ref();
    let created = created.map_or(0, |time| time.0.as_millisecond());
    let created = Timestamp(bytes(created));
    let source = match &spec.source {
        None => None,
        Some(source) => Some(ClaimSource::try_from(source).ok()?),
    };
    Some(Placed {
        what: PersistentVolume {
            id: volume.metadata.name.as_deref()?.parse().ok()?,
            name: spec.name.clone(),
            created,
            last_used: created,
            capacity: bytes(status.capacity),
            parameters: spec.parameters.into(),
            mutable: status.mutable.into(),
            made_with: Some(spec.made_with.into()),
            source,
            layers: Vec::new(),
            made: false,
            view: OwnerView::default(),
            attached: Vec::new(),
        },
        node: node(&spec.node_name)?,
    })
}

pub(super) fn volume(volume: &Volume) -> Result<Placed<PersistentVolume>> {
    known_volume(volume).ok_or_else(|| {
        let name = volume.metadata.name.clone();
        Error::NoSuchClaim(name.unwrap_or_default())
    })
}

/// The snapshots of an object that its node has reported; one, or those of a group.
pub(super) fn snapshots(object: &api::Snapshot) -> Option<Placed<Group>> {
    let status = object.status.as_ref()?;
    let spec = &object.spec;
    let id: SnapshotId = object.metadata.name.as_deref()?.parse().ok()?;
    let created = status.created.as_deref()?;
    let created = humantime::parse_rfc3339(created).ok()?;
    let created = Timestamp::from(created);
    let member = |member: &api::Member| {
        Some(Snapshot {
            id: member.id.parse().ok()?,
            name: spec.name.clone(),
            source: member.source.parse().ok()?,
            created,
            size: bytes(member.size),
            layers: Vec::new(),
            view: OwnerView::default(),
            group: spec.group.then(|| id.clone()),
        })
    };
    let members: Option<Vec<Snapshot>> = status.members.iter().map(member).collect();
    let members = members?;
    let group = SnapshotGroup {
        id: id.clone(),
        name: spec.name.clone(),
        created,
        snapshots: members.iter().map(|member| member.id.clone()).collect(),
    };
    Some(Placed {
        what: (group, members),
        node: node(&spec.node_name)?,
    })
}

/// One page, in the order of the ids.
fn page<T>(
    mut all: Vec<T>,
    id: impl Fn(&T) -> &VolumeId,
    after: Option<&VolumeId>,
    most: usize,
) -> Page<T> {
    all.retain(|one| after.is_none_or(|after| id(one) > after));
    all.sort_by(|one, other| id(one).cmp(id(other)));
    let has_more = all.len() > most;
    all.truncate(most);
    let next = all.last().filter(|_| has_more).map(|last| id(last).clone());
    Page { items: all, next }
}

impl Cluster {
    /// The nodes with a pool.
    pub(super) fn candidates(&self) -> Arc<[Candidate]> {
        let version = (self.seen_pools.version(), self.seen_nodes.version());
        let mut known = self.candidates.lock();
        if known.version != version {
            let pools = self.seen_pools.all();
            let candidates = pools.iter().filter_map(|pool| {
                let has_node = self.seen_nodes.get(&pool.name_any()).is_some();
                candidate(pool, has_node)
            });
            *known = Candidates {
                version,
                all: candidates.collect(),
            };
        }
        known.all.clone()
    }

    pub(super) fn list_volumes(
        &self,
        after: Option<&VolumeId>,
        most: usize,
    ) -> Page<Placed<PersistentVolume>> {
        let all = self.seen_volumes.all();
        let is_there = |volume: &&Arc<Volume>| {
            volume.spec.wanted != Wanted::Absent
                && matches!(volume.phase(), Some(Phase::Ready | Phase::Lost))
        };
        let all = all.iter().filter(is_there);
        let all = all.filter_map(|volume| known_volume(volume));
        page(all.collect(), |volume| &volume.what.id, after, most)
    }

    pub(super) async fn list_snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Placed<Snapshot>>> {
        let objects = if let Some(id) = &filter.id {
            // The caller may have just made it, and the watch can be late.
            match self.snapshot_with(id).await {
                Ok(object) => vec![Arc::new(object)],
                Err(Error::NoSuchSnapshot(_)) => Vec::new(),
                Err(error) => return Err(error),
            }
        } else {
            let mut all = self.seen_snapshots.all();
            all.retain(|object| temporary::volume_of(&object.spec.name).is_none());
            all
        };
        let is_there = |object: &&Arc<api::Snapshot>| {
            object.spec.wanted != Wanted::Absent && object.phase() == Some(Phase::Ready)
        };
        let objects = objects.iter().filter(is_there);
        let groups = objects.filter_map(|object| snapshots(object));
        let all = groups.flat_map(|group| {
            let node = group.node;
            let members = group.what.1.into_iter();
            members.map(move |what| Placed {
                what,
                node: node.clone(),
            })
        });
        let is_wanted = |one: &Placed<Snapshot>| {
            let is = |wanted: &Option<String>, id: &VolumeId| {
                wanted.as_deref().is_none_or(|wanted| wanted == id.as_str())
            };
            is(&filter.id, &one.what.id) && is(&filter.source, &one.what.source)
        };
        let all = all.filter(is_wanted).collect();
        Ok(page(all, |one| &one.what.id, after, most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_in_the_order_of_ids_and_the_last_has_no_next() {
        let ids = |text: &str| -> Vec<VolumeId> {
            text.split(' ')
                .map(|id| id.parse().expect("an id"))
                .collect()
        };
        let first = page(ids("c a b"), |id| id, None, 2);
        assert_eq!(first.items, ids("a b"));
        let second = page(ids("c a b"), |id| id, first.next.as_ref(), 2);
        assert_eq!((second.items, second.next), (ids("c"), None));
    }
}
