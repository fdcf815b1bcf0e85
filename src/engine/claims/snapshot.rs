//! Snapshots and groups of them: taken and deleted. A snapshot is a record that keeps a stack of
//! layers. How a claim becomes a stack is `freeze`'s.

use std::sync::Arc;

use tokio::time::Instant;

use super::entries::SnapshotSet;
use super::freeze::{self, Moment};
use super::lookup;
use crate::engine::error::{Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::guard::{self, Guard};
use crate::engine::layers;
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::threads::Pool;
use crate::model::{LayerId, Snapshot, SnapshotGroup, SnapshotId, VolumeId};
use crate::store::Change;

/// Takes a snapshot of a claim, or finds the one that an earlier request of the same name took.
pub(super) async fn create(inner: Arc<Inner>, name: String, source: String) -> Result<Snapshot> {
    let id = lookup::id_of(lookup::SNAPSHOT, &name);
    let until = guard::deadline();
    let _guard = Guard::take(&inner, &id, until).await?;
    if let Some(snapshot) = inner.state.lock().claims.snapshots().get(&id).cloned() {
        if snapshot.source.as_str() == source && snapshot.group.is_none() {
            return Ok(snapshot);
        }
        let what = "source";
        return Err(Error::Exists { name, what });
    }
    let source = lookup::parse(&source)?;
    lookup::claim(&inner, &source)?;
    let named = |_: &VolumeId| (id.clone(), name.clone());
    let taken = take(&inner, vec![source], until, Moment::AsItCan, named, None).await?;
    taken
        .snapshots
        .into_iter()
        .next()
        .ok_or(Error::ShuttingDown)
}

/// Takes snapshots of these claims and enters them into the index and into the state: as this
/// group, if it is one. `named` gives the id and the name of the snapshot of a claim.
async fn take(
    inner: &Arc<Inner>,
    claims: Vec<VolumeId>,
    until: Instant,
    moment: Moment,
    named: impl Fn(&VolumeId) -> (SnapshotId, String),
    group: Option<(SnapshotId, String)>,
) -> Result<SnapshotSet> {
    // A caller that holds one guard waits for another only while mounts are being closed, so no
    // order is needed.
    let mut guards = Vec::new();
    for claim in &claims {
        guards.push(Guard::take(inner, claim, until).await?);
    }
    let freezing = freeze::freeze(inner, guards, claims, moment).await?;
    let created = inner.now();
    let snapshots = freezing.frozen.iter().map(|frozen| {
        let (id, name) = named(&frozen.claim.id);
        Snapshot {
            id,
            name,
            source: frozen.claim.id.clone(),
            created,
            size: frozen.claim.capacity,
            layers: frozen.stack.clone(),
            view: frozen.claim.view,
            group: group.as_ref().map(|(id, _)| id.clone()),
        }
    });
    let snapshots: Vec<Snapshot> = snapshots.collect();
    let members = snapshots.iter().map(|snapshot| snapshot.id.clone());
    let group = group.map(|(id, name)| SnapshotGroup {
        id,
        name,
        created,
        snapshots: members.collect(),
    });
    let taken = SnapshotSet { snapshots, group };
    let snapshots = taken.snapshots.iter().cloned().map(Change::PutSnapshot);
    let group = taken.group.iter().cloned().map(Change::PutGroup);
    let (changes, entered) = (snapshots.chain(group).collect(), taken.clone());
    freezing
        .commit(changes, |state| state.claims.enter(entered))
        .await?;
    Ok(taken)
}

fn removal(taken: &SnapshotSet) -> Vec<Change> {
    let snapshots = taken.snapshots.iter();
    let snapshots = snapshots.map(|snapshot| Change::RemoveSnapshot(snapshot.id.clone()));
    let group = taken.group.iter();
    let group = group.map(|group| Change::RemoveGroup(group.id.clone()));
    snapshots.chain(group).collect()
}

/// Deletes a snapshot; succeeds if the id is not that of a snapshot.
pub(super) async fn delete(inner: Arc<Inner>, id: String) -> Result<()> {
    let Ok(id) = id.parse::<SnapshotId>() else {
        return Ok(());
    };
    let guard = Guard::take(&inner, &id, guard::deadline()).await?;
    let snapshot = inner.state.lock().claims.snapshots().get(&id).cloned();
    let Some(snapshot) = snapshot else {
        return Ok(());
    };
    if let Some(group) = snapshot.group {
        return Err(Error::OfGroup {
            snapshot: id,
            group,
        });
    }
    let taken = SnapshotSet {
        snapshots: vec![snapshot],
        group: None,
    };
    remove(&inner, taken, vec![guard]).await
}

/// Takes snapshots of several claims at one instant.
pub(super) async fn create_group(
    inner: Arc<Inner>,
    name: String,
    sources: Vec<String>,
) -> Result<(SnapshotGroup, Vec<Snapshot>)> {
    let id = lookup::id_of(lookup::GROUP, &name);
    let until = guard::deadline();
    let _guard = Guard::take(&inner, &id, until).await?;
    let known = known_group(&inner.state.lock(), &id);
    if let Some((group, snapshots)) = known {
        let mut taken: Vec<&str> = snapshots
            .iter()
            .map(|snapshot| snapshot.source.as_str())
            .collect();
        let mut wanted: Vec<&str> = sources.iter().map(String::as_str).collect();
        taken.sort_unstable();
        wanted.sort_unstable();
        wanted.dedup();
        if taken == wanted {
            return Ok((group, snapshots));
        }
        let what = "set of sources";
        return Err(Error::Exists { name, what });
    }
    let mut claims: Vec<VolumeId> = Vec::new();
    for source in &sources {
        let source = lookup::parse(source)?;
        lookup::claim(&inner, &source)?;
        if !claims.contains(&source) {
            claims.push(source);
        }
    }
    let named = |claim: &VolumeId| {
        let name = format!("{name}/{claim}");
        (lookup::id_of(lookup::MEMBER, &name), name)
    };
    let group = Some((id, name.clone()));
    let taken = take(&inner, claims, until, Moment::One, named, group).await?;
    let group = taken.group.ok_or(Error::ShuttingDown)?;
    Ok((group, taken.snapshots))
}

/// A group and its snapshots.
pub(super) fn group(state: &State, id: &str) -> Result<(SnapshotGroup, Vec<Snapshot>)> {
    let none = || Error::NoSuchSnapshot(id.to_owned());
    let id: SnapshotId = id.parse().map_err(|_| none())?;
    known_group(state, &id).ok_or_else(none)
}

fn known_group(state: &State, id: &SnapshotId) -> Option<(SnapshotGroup, Vec<Snapshot>)> {
    let group = state.claims.groups().get(id)?.clone();
    let snapshots = group
        .snapshots
        .iter()
        .filter_map(|id| state.claims.snapshots().get(id).cloned());
    let snapshots = snapshots.collect();
    Some((group, snapshots))
}

/// Deletes a group and its snapshots.
pub(super) async fn delete_group(inner: Arc<Inner>, id: String) -> Result<()> {
    let Ok(id) = id.parse::<SnapshotId>() else {
        return Ok(());
    };
    let until = guard::deadline();
    let mut guards = vec![Guard::take(&inner, &id, until).await?];
    let known = known_group(&inner.state.lock(), &id);
    let Some((group, _)) = known else {
        return Ok(());
    };
    for member in &group.snapshots {
        guards.push(Guard::take(&inner, member, until).await?);
    }
    // Read again under these guards: a merge may have replaced layers meanwhile.
    let known = known_group(&inner.state.lock(), &id);
    let Some((group, snapshots)) = known else {
        return Ok(());
    };
    let taken = SnapshotSet {
        snapshots,
        group: Some(group),
    };
    remove(&inner, taken, guards).await
}

/// Removes snapshots from memory and from the index, then moves layers to the trash that only they
/// referred to.
async fn remove(inner: &Arc<Inner>, taken: SnapshotSet, guards: Vec<Guard>) -> Result<()> {
    let job = move |inner: &Arc<Inner>| {
        let layers = taken.snapshots.iter().flat_map(|snapshot| &snapshot.layers);
        let layers: Vec<LayerId> = layers.copied().collect();
        // What the index names stays in its place.
        let mut pins = Pins::none(inner);
        {
            let mut state = inner.state.lock();
            pins.add(&mut state, &layers);
            state.claims.leave(&taken);
        }
        if let Err(error) = inner.transact(&removal(&taken)).result() {
            inner.state.lock().claims.enter(taken);
            return Err(error);
        }
        point(Point::SnapshotUnindexed);
        drop(pins);
        layers::trash_unreferenced(inner, &layers);
        point(Point::SnapshotTrashed);
        drop(guards);
        Ok(())
    };
    inner.run(Pool::Calls, job).await?;
    inner.wake_reaper();
    Ok(())
}
