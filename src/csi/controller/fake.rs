//! Claims in memory, for tests of what stands above them: right in what they answer, and able to fail on purpose.
//! How claims are really held is the engine's affair and tested there.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

use crate::backend::BackendKind;
use crate::csi::topology::Topology;
use crate::csi::{FindPlace, NodeId, Place, hex};
use crate::engine::claims::{ClaimUse, Claims, CreateClaim, Page, SnapshotFilter};
use crate::engine::{Error, Result};
use crate::model::{
    Attachment, Claim, ClaimParameters, MutableParameters, OwnerView, Snapshot, SnapshotGroup,
    SnapshotId, Timestamp, VolumeId,
};

/// Claims, snapshots and groups in memory.
#[derive(Debug, Default)]
pub(in crate::csi) struct Fake {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    claims: BTreeMap<VolumeId, Claim>,
    snapshots: BTreeMap<SnapshotId, Snapshot>,
    groups: BTreeMap<SnapshotId, SnapshotGroup>,
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

    /// The place where these claims are.
    pub(in crate::csi) fn place(self: &Arc<Self>) -> FindPlace {
        let fake = self.clone();
        Arc::new(move || {
            let node = NodeId::new("node-1").expect("an id");
            Ok(Place {
                claims: fake.clone(),
                topology: Topology::of(&node, BackendKind::Overlay),
            })
        })
    }

    pub(in crate::csi) fn a_claim(name: &str) -> Claim {
        Claim {
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

fn find<'a>(state: &'a mut State, id: &str) -> Result<&'a mut Claim> {
    let claim = id
        .parse()
        .ok()
        .and_then(|id: VolumeId| state.claims.get_mut(&id));
    claim.ok_or_else(|| Error::NoSuchClaim(id.to_owned()))
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
    async fn create_claim(&self, request: CreateClaim) -> Result<Claim> {
        let mut state = self.state()?;
        let wanted = Claim {
            capacity: request.required_bytes,
            parameters: request.parameters,
            mutable: request.mutable,
            source: request.source,
            ..Self::a_claim(&request.name)
        };
        if let Some(there) = state.claims.get(&wanted.id) {
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
            return Ok(there.clone());
        }
        state.claims.insert(wanted.id.clone(), wanted.clone());
        Ok(wanted)
    }

    async fn delete_claim(&self, id: &str) -> Result<()> {
        let mut state = self.state()?;
        if let Ok(id) = id.parse::<VolumeId>() {
            state.claims.remove(&id);
        }
        Ok(())
    }

    async fn claim(&self, id: &str) -> Result<Claim> {
        find(&mut *self.state()?, id).cloned()
    }

    async fn claims(&self, after: Option<&VolumeId>, most: usize) -> Result<Page<Claim>> {
        Ok(page(&self.state()?.claims, after, most, |_| true))
    }

    async fn claim_use(&self, id: &str) -> Result<ClaimUse> {
        let mut state = self.state()?;
        let id = find(&mut state, id)?.id.clone();
        Ok(ClaimUse {
            targets: Vec::new(),
            problems: state.problems.get(&id).cloned().into_iter().collect(),
        })
    }

    async fn expand_claim(&self, id: &str, required: u64, _: Option<u64>) -> Result<Claim> {
        let mut state = self.state()?;
        let claim = find(&mut state, id)?;
        claim.capacity = claim.capacity.max(required);
        Ok(claim.clone())
    }

    async fn modify_claim(&self, id: &str, mutable: MutableParameters) -> Result<Claim> {
        let mut state = self.state()?;
        let claim = find(&mut state, id)?;
        claim.mutable = mutable.over(claim.mutable);
        Ok(claim.clone())
    }

    async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()> {
        let mut state = self.state()?;
        let claim = find(&mut state, id)?;
        let there = claim
            .attached
            .iter()
            .find(|one| one.node == attachment.node);
        match there {
            Some(there) if *there == attachment => Ok(()),
            Some(_) => Err(Error::Different {
                volume: claim.id.clone(),
                what: "access mode",
            }),
            None => {
                claim.attached.push(attachment);
                Ok(())
            }
        }
    }

    async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()> {
        let mut state = self.state()?;
        if let Ok(claim) = find(&mut state, id) {
            claim
                .attached
                .retain(|one| node.is_some_and(|node| one.node != node));
        }
        Ok(())
    }

    async fn create_snapshot(&self, name: &str, source: &str) -> Result<Snapshot> {
        let mut state = self.state()?;
        let source = find(&mut state, source)?.id.clone();
        let wanted = Snapshot {
            source,
            ..Self::a_snapshot(name)
        };
        let there = state.snapshots.entry(wanted.id.clone());
        let there = there.or_insert_with(|| wanted.clone());
        if there.source == wanted.source {
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
    ) -> Result<Page<Snapshot>> {
        let is = |wanted: &Option<String>, id: &VolumeId| {
            wanted.as_ref().is_none_or(|wanted| wanted == id.as_str())
        };
        let wanted = |one: &Snapshot| is(&filter.source, &one.source) && is(&filter.id, &one.id);
        Ok(page(&self.state()?.snapshots, after, most, wanted))
    }

    async fn create_group(
        &self,
        name: &str,
        sources: &[String],
    ) -> Result<(SnapshotGroup, Vec<Snapshot>)> {
        let mut state = self.state()?;
        let group_id = id("group", name);
        let mut snapshots = Vec::new();
        for source in sources {
            let source = find(&mut state, source)?.id.clone();
            snapshots.push(Snapshot {
                group: Some(group_id.clone()),
                ..Self::a_snapshot(&format!("{name}/{source}"))
            });
        }
        let group = SnapshotGroup {
            id: group_id.clone(),
            name: name.to_owned(),
            created: Timestamp(1),
            snapshots: snapshots.iter().map(|one| one.id.clone()).collect(),
        };
        let there = state
            .groups
            .entry(group_id)
            .or_insert_with(|| group.clone());
        if *there != group {
            return exists(name, "sources");
        }
        let entries = snapshots.iter().map(|one| (one.id.clone(), one.clone()));
        state.snapshots.extend(entries);
        Ok((group, snapshots))
    }

    async fn delete_group(&self, id: &str) -> Result<()> {
        let mut state = self.state()?;
        if let Ok(id) = id.parse::<SnapshotId>()
            && let Some(group) = state.groups.remove(&id)
        {
            state
                .snapshots
                .retain(|id, _| !group.snapshots.contains(id));
        }
        Ok(())
    }

    async fn group(&self, id: &str) -> Result<(SnapshotGroup, Vec<Snapshot>)> {
        let state = self.state()?;
        let group = id
            .parse()
            .ok()
            .and_then(|id: SnapshotId| state.groups.get(&id));
        let group = group.ok_or_else(|| Error::NoSuchSnapshot(id.to_owned()))?;
        let of = |id: &SnapshotId| state.snapshots.get(id).cloned();
        Ok((
            group.clone(),
            group.snapshots.iter().filter_map(of).collect(),
        ))
    }

    async fn capacity(&self) -> Result<u64> {
        drop(self.state()?);
        Ok(1 << 30)
    }
}
