//! Claims in memory, on two nodes, for tests of the services above them. They answer correctly, and
//! can fail on purpose. The engine has its own tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use crate::backend::BackendKind;
use crate::csi::{FindClaims, topology};
use crate::engine::claims::{Capacity, ClaimUse, Claims, CreateClaim, Group, Page, SnapshotFilter};
use crate::engine::{Error, Result};
use crate::model::hex;
use crate::model::{
    Attachment, ClaimParameters, ClaimSource, MutableChange, MutableParameters, Node, NodeId,
    OwnerView, PersistentVolume, Placed, Requirement, Snapshot, SnapshotGroup, SnapshotId,
    Timestamp, Topology, VolumeId,
};

/// The nodes, with the capacity of each.
const NODES: [(&str, BackendKind, Capacity); 2] = [
    (
        "node-1",
        BackendKind::Overlay,
        Capacity {
            available: 10,
            largest: 100,
        },
    ),
    (
        "node-2",
        BackendKind::Btrfs,
        Capacity {
            available: 20,
            largest: 200,
        },
    ),
];

/// Claims, snapshots and groups in memory.
#[derive(Debug)]
pub(in crate::csi) struct Fake {
    nodes: Vec<(Arc<Node>, Capacity)>,
    state: Mutex<State>,
}

impl Default for Fake {
    fn default() -> Self {
        let node = |(name, backend, capacity)| {
            let id = NodeId::new(name).expect("an id");
            (Arc::new(topology::node(&id, backend)), capacity)
        };
        Self {
            nodes: NODES.into_iter().map(node).collect(),
            state: Mutex::default(),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    claims: BTreeMap<VolumeId, Placed<PersistentVolume>>,
    snapshots: BTreeMap<SnapshotId, Placed<Snapshot>>,
    groups: BTreeMap<SnapshotId, Placed<SnapshotGroup>>,
    problems: BTreeMap<VolumeId, String>,
    fail: Option<Error>,
}

fn id(prefix: &str, name: &str) -> VolumeId {
    let digest = hex(&Sha256::digest(name)[..16]);
    format!("{prefix}-{digest}").parse().expect("an id")
}

impl Fake {
    /// The next call fails with this.
    pub(in crate::csi) fn fail(&self, error: Error) {
        self.state.lock().fail = Some(error);
    }

    /// A claim is not well from now on.
    pub(in crate::csi) fn spoil(&self, claim: &str, problem: &str) {
        let claim = claim.parse().expect("an id");
        self.state.lock().problems.insert(claim, problem.to_owned());
    }

    /// How the services find it.
    pub(in crate::csi) fn found(self: &Arc<Self>) -> FindClaims {
        let fake = self.clone();
        Arc::new(move || Ok(fake.clone()))
    }

    /// Where a node says that it is.
    pub(in crate::csi) fn at(&self, node: usize) -> crate::proto::csi::v1::Topology {
        topology::message(&self.nodes[node].0)
    }

    pub(in crate::csi) fn a_claim(name: &str) -> PersistentVolume {
        PersistentVolume {
            id: id("vol", name),
            name: name.to_owned(),
            created: Timestamp(1),
            last_used: Timestamp(1),
            capacity: 0,
            parameters: ClaimParameters::default(),
            mutable: MutableParameters::default(),
            made_with: None,
            source: None,
            layers: Vec::new(),
            made: false,
            view: OwnerView::default(),
            attached: Vec::new(),
        }
    }

    pub(in crate::csi) fn a_snapshot(name: &str) -> Snapshot {
        Snapshot {
            id: id("snap", name),
            name: name.to_owned(),
            source: id("vol", "source"),
            created: Timestamp(1),
            size: 0,
            layers: Vec::new(),
            view: OwnerView::default(),
            group: None,
        }
    }

    fn state(&self) -> Result<parking_lot::MutexGuard<'_, State>> {
        let mut state = self.state.lock();
        match state.fail.take() {
            Some(error) => Err(error),
            None => Ok(state),
        }
    }
}

fn find<'a>(state: &'a mut State, id: &str) -> Result<&'a mut Placed<PersistentVolume>> {
    let claim = id
        .parse()
        .ok()
        .and_then(|id: VolumeId| state.claims.get_mut(&id));
    claim.ok_or_else(|| Error::NoSuchClaim(id.to_owned()))
}

/// Where the source of a clone is.
fn node_of(state: &mut State, source: &ClaimSource) -> Result<Arc<Node>> {
    match source {
        ClaimSource::Claim(id) => Ok(find(state, id.as_str())?.node.clone()),
        ClaimSource::Snapshot(id) => {
            let snapshot = state.snapshots.get(id);
            let snapshot = snapshot.ok_or_else(|| Error::NoSuchSnapshot(id.to_string()))?;
            Ok(snapshot.node.clone())
        }
    }
}

fn exists<T>(name: &str, what: &'static str) -> Result<T> {
    Err(Error::Exists {
        name: name.to_owned(),
        what,
    })
}

fn page<T: Clone>(
    all: &BTreeMap<VolumeId, T>,
    after: Option<&VolumeId>,
    most: usize,
    wanted: impl Fn(&T) -> bool,
) -> Page<T> {
    let mut rest = all
        .iter()
        .filter(|(id, one)| after.is_none_or(|after| *id > after) && wanted(one));
    let items: Vec<(VolumeId, T)> = rest
        .by_ref()
        .take(most)
        .map(|(id, one)| (id.clone(), one.clone()))
        .collect();
    let next = rest
        .next()
        .and_then(|_| items.last())
        .map(|(id, _)| id.clone());
    Page {
        items: items.into_iter().map(|(_, one)| one).collect(),
        next,
    }
}

#[async_trait::async_trait]
impl Claims for Fake {
    async fn create_claim(
        &self,
        request: CreateClaim,
        at: &Requirement,
    ) -> Result<Placed<PersistentVolume>> {
        let mut state = self.state()?;
        let wanted = PersistentVolume {
            capacity: request.required_bytes,
            parameters: request.parameters,
            mutable: request.mutable,
            source: request.source,
            ..Self::a_claim(&request.name)
        };
        if let Some(placed) = state.claims.get(&wanted.id) {
            let there = &placed.what;
            let limit = request.limit_bytes.unwrap_or(u64::MAX);
            if there.capacity < request.required_bytes || there.capacity > limit {
                return exists(&request.name, "capacity");
            }
            if there.parameters != wanted.parameters {
                return exists(&request.name, "parameters");
            }
            if there.source != wanted.source {
                return exists(&request.name, "source");
            }
            at.choose([&placed.node]).map_err(|elsewhere| {
                let name = request.name;
                Error::ExistsElsewhere { name, elsewhere }
            })?;
            return Ok(placed.clone());
        }
        let source = wanted.source.as_ref();
        let source = source.map(|source| node_of(&mut state, source));
        let source = source.transpose()?;
        let all = self.nodes.iter().map(|(node, _)| node);
        let chosen = at.choose(all.filter(|node| source.as_ref().is_none_or(|at| at == *node)))?;
        let room = |node: &Arc<Node>| {
            let of = self.nodes.iter().find(|(one, _)| one == node);
            of.map_or(0, |(_, capacity)| capacity.largest)
        };
        let node = chosen.iter().find(|node| room(node) >= wanted.capacity);
        let node = node.ok_or_else(|| Error::TooLarge {
            wanted: wanted.capacity,
            pool: room(chosen[0]),
        })?;
        let id = wanted.id.clone();
        let placed = Placed {
            what: wanted,
            node: (*node).clone(),
        };
        state.claims.insert(id, placed.clone());
        Ok(placed)
    }

    async fn delete_claim(&self, id: &str) -> Result<()> {
        let mut state = self.state()?;
        if let Ok(id) = id.parse::<VolumeId>() {
            state.claims.remove(&id);
        }
        Ok(())
    }

    async fn claim(&self, id: &str) -> Result<Placed<PersistentVolume>> {
        find(&mut *self.state()?, id).cloned()
    }

    async fn claims(
        &self,
        after: Option<&VolumeId>,
        most: usize,
    ) -> Result<Page<Placed<PersistentVolume>>> {
        Ok(page(&self.state()?.claims, after, most, |_| true))
    }

    async fn claim_use(&self, id: &str) -> Result<ClaimUse> {
        let mut state = self.state()?;
        let id = find(&mut state, id)?.what.id.clone();
        Ok(ClaimUse {
            targets: Vec::new(),
            problems: state.problems.get(&id).cloned().into_iter().collect(),
        })
    }

    async fn expand_claim(
        &self,
        id: &str,
        required: u64,
        _: Option<u64>,
    ) -> Result<PersistentVolume> {
        let mut state = self.state()?;
        let claim = &mut find(&mut state, id)?.what;
        claim.capacity = claim.capacity.max(required);
        Ok(claim.clone())
    }

    async fn modify_claim(&self, id: &str, mutable: MutableChange) -> Result<PersistentVolume> {
        let mut state = self.state()?;
        let claim = &mut find(&mut state, id)?.what;
        claim.mutable = mutable.over(claim.mutable);
        Ok(claim.clone())
    }

    async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()> {
        // A request to a node or the API server takes time: other calls come between.
        tokio::task::yield_now().await;
        let mut state = self.state()?;
        let Placed { what: claim, node } = find(&mut state, id)?;
        let mut nodes = self.nodes.iter();
        if !nodes.any(|(node, _)| node.id.as_str() == attachment.node) {
            return Err(Error::NoSuchNode(attachment.node));
        }
        if node.id.as_str() != attachment.node {
            return Err(Error::ClaimInUse {
                claim: claim.id.clone(),
                how: format!("on node {}", node.id.as_str()),
            });
        }
        let there = claim
            .attached
            .iter()
            .find(|one| one.node == attachment.node);
        match there {
            Some(there) if *there == attachment => Ok(()),
            Some(_) => exists(&claim.name, "attachment"),
            None => {
                claim.attached.push(attachment);
                Ok(())
            }
        }
    }

    async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()> {
        let mut state = self.state()?;
        if let Ok(claim) = find(&mut state, id) {
            let attached = &mut claim.what.attached;
            attached.retain(|one| node.is_some_and(|node| one.node != node));
        }
        Ok(())
    }

    async fn create_snapshot(
        &self,
        name: &str,
        source: &str,
        at: &Requirement,
    ) -> Result<Placed<Snapshot>> {
        let mut state = self.state()?;
        let Placed { what: claim, node } = find(&mut state, source)?.clone();
        at.choose([&node])?;
        let what = Snapshot {
            source: claim.id,
            ..Self::a_snapshot(name)
        };
        let there = state.snapshots.entry(what.id.clone());
        let there = there.or_insert_with(|| Placed {
            what: what.clone(),
            node,
        });
        if there.what.source == what.source {
            Ok(there.clone())
        } else {
            exists(name, "source")
        }
    }

    async fn delete_snapshot(&self, id: &str) -> Result<()> {
        let mut state = self.state()?;
        if let Ok(id) = id.parse::<SnapshotId>() {
            state.snapshots.remove(&id);
        }
        Ok(())
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Placed<Snapshot>>> {
        let is = |wanted: &Option<String>, id: &VolumeId| {
            wanted.as_ref().is_none_or(|wanted| wanted == id.as_str())
        };
        let wanted = |one: &Placed<Snapshot>| {
            is(&filter.source, &one.what.source) && is(&filter.id, &one.what.id)
        };
        Ok(page(&self.state()?.snapshots, after, most, wanted))
    }

    async fn create_group(&self, name: &str, sources: &[String]) -> Result<Placed<Group>> {
        let mut state = self.state()?;
        let group_id = id("group", name);
        let (mut snapshots, mut nodes) = (Vec::new(), Vec::new());
        for source in sources {
            let source = find(&mut state, source)?;
            nodes.push(source.node.clone());
            snapshots.push(Snapshot {
                group: Some(group_id.clone()),
                ..Self::a_snapshot(&format!("{name}/{}", source.what.id))
            });
        }
        nodes.dedup();
        let [node] = nodes.as_slice() else {
            return Err(Error::Unsupported {
                what: "a group over several nodes".to_owned(),
                why: "there is no instant that they share".to_owned(),
            });
        };
        let group = Placed {
            what: SnapshotGroup {
                id: group_id.clone(),
                name: name.to_owned(),
                created: Timestamp(1),
                snapshots: snapshots.iter().map(|one| one.id.clone()).collect(),
            },
            node: node.clone(),
        };
        let there = state
            .groups
            .entry(group_id)
            .or_insert_with(|| group.clone());
        if *there != group {
            return exists(name, "sources");
        }
        let entry = |one: &Snapshot| {
            let (what, node) = (one.clone(), node.clone());
            (one.id.clone(), Placed { what, node })
        };
        state.snapshots.extend(snapshots.iter().map(entry));
        Ok(Placed {
            what: (group.what, snapshots),
            node: group.node,
        })
    }

    async fn delete_group(&self, id: &str) -> Result<()> {
        let mut state = self.state()?;
        if let Ok(id) = id.parse::<SnapshotId>()
            && let Some(group) = state.groups.remove(&id)
        {
            state
                .snapshots
                .retain(|id, _| !group.what.snapshots.contains(id));
        }
        Ok(())
    }

    async fn group(&self, id: &str) -> Result<Placed<Group>> {
        let state = self.state()?;
        let group = id
            .parse()
            .ok()
            .and_then(|id: SnapshotId| state.groups.get(&id));
        let Placed { what: group, node } =
            group.ok_or_else(|| Error::NoSuchSnapshot(id.to_owned()))?;
        let of = |id: &SnapshotId| Some(state.snapshots.get(id)?.what.clone());
        let snapshots = group.snapshots.iter().filter_map(of).collect();
        Ok(Placed {
            what: (group.clone(), snapshots),
            node: node.clone(),
        })
    }

    async fn capacity(&self, within: &Topology) -> Result<Capacity> {
        drop(self.state()?);
        let mut all = Capacity::default();
        for (node, capacity) in &self.nodes {
            if node.topology.is_in(within) {
                all.available += capacity.available;
                all.largest = all.largest.max(capacity.largest);
            }
        }
        Ok(all)
    }
}
