//! Snapshots and groups of them: taken and deleted. A snapshot is a record that keeps a stack of layers.
//! How a claim becomes a stack is `freeze`'s.

use std::sync::Arc;

use super::freeze;
use super::hold;
use crate::engine::crash::{Point, point};
use crate::engine::error::{Error, Result};
use crate::engine::pins::Pins;
use crate::engine::state::State;
use crate::engine::{Guard, Inner, reap};
use crate::model::{LayerId, Snapshot, SnapshotGroup, SnapshotId, VolumeId};
use crate::store::Change;

/// Takes a snapshot of a claim, or finds the one that an earlier request of the same name took.
pub(super) async fn create(inner: Arc<Inner>, name: String, source: String) -> Result<Snapshot> {
    let id = hold::id_of(hold::SNAPSHOT, &name);
    let _guard = hold::begin(&inner, &id).await?;
    if let Some(snapshot) = inner.state.lock().snapshots.get(&id).cloned() {
        if snapshot.source.as_str() == source && snapshot.group.is_none() {
            return Ok(snapshot);
        }
        let what = "source";
        return Err(Error::Exists { name, what });
    }
    let source = hold::parse(&source)?;
    hold::claim(&inner, &source)?;
    let guards = vec![hold::take(&inner, &source).await?];
    let freezing = freeze::freeze(&inner, guards, vec![source]).await?;
    let created = inner.clock.now();
    let mut snapshots = freezing
        .frozen
        .iter()
        .map(|frozen| describe(frozen, &id, &name, created, None));
    let Some(snapshot) = snapshots.next() else {
        return Err(Error::ShuttingDown);
    };
    let entered = snapshot.clone();
    let enter = move |state: &mut State| {
        state.snapshots.insert(entered.id.clone(), entered);
    };
    freezing
        .commit(vec![Change::PutSnapshot(snapshot.clone())], enter)
        .await?;
    Ok(snapshot)
}

fn describe(
    frozen: &freeze::Frozen,
    id: &SnapshotId,
    name: &str,
    created: crate::model::Timestamp,
    group: Option<&SnapshotId>,
) -> Snapshot {
    Snapshot {
        id: id.clone(),
        name: name.to_owned(),
        source: frozen.claim.id.clone(),
        created,
        size: frozen.claim.capacity,
        layers: frozen.stack.clone(),
        view: frozen.claim.view,
        group: group.cloned(),
    }
}

/// Deletes a snapshot; what is no id of one is deleted already.
pub(super) async fn delete(inner: Arc<Inner>, id: String) -> Result<()> {
    let Ok(id) = id.parse::<SnapshotId>() else {
        return Ok(());
    };
    let guard = hold::begin(&inner, &id).await?;
    let Some(snapshot) = inner.state.lock().snapshots.get(&id).cloned() else {
        return Ok(());
    };
    if let Some(group) = snapshot.group {
        return Err(Error::OfGroup {
            snapshot: id,
            group,
        });
    }
    remove(&inner, vec![snapshot], None, vec![guard]).await
}

/// Takes snapshots of several claims at one instant.
pub(super) async fn create_group(
    inner: Arc<Inner>,
    name: String,
    sources: Vec<String>,
) -> Result<(SnapshotGroup, Vec<Snapshot>)> {
    let id = hold::id_of(hold::GROUP, &name);
    let _guard = hold::begin(&inner, &id).await?;
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
        let source = hold::parse(source)?;
        hold::claim(&inner, &source)?;
        if !claims.contains(&source) {
            claims.push(source);
        }
    }
    // Nobody waits for one guard with another in hand but for mounts that are being closed, so no order is needed.
    let mut guards = Vec::new();
    for claim in &claims {
        guards.push(hold::take(&inner, claim).await?);
    }
    let freezing = freeze::freeze(&inner, guards, claims).await?;
    let created = inner.clock.now();
    let snapshots: Vec<Snapshot> = freezing
        .frozen
        .iter()
        .map(|frozen| {
            let name = format!("{name}/{}", frozen.claim.id);
            let member = hold::id_of(hold::SNAPSHOT, &name);
            describe(frozen, &member, &name, created, Some(&id))
        })
        .collect();
    let group = SnapshotGroup {
        id,
        name,
        created,
        snapshots: snapshots
            .iter()
            .map(|snapshot| snapshot.id.clone())
            .collect(),
    };
    let mut changes: Vec<Change> = snapshots.iter().cloned().map(Change::PutSnapshot).collect();
    changes.push(Change::PutGroup(group.clone()));
    let entered = (group.clone(), snapshots.clone());
    let enter = move |state: &mut State| {
        let (group, snapshots) = entered;
        for snapshot in snapshots {
            state.snapshots.insert(snapshot.id.clone(), snapshot);
        }
        state.groups.insert(group.id.clone(), group);
    };
    freezing.commit(changes, enter).await?;
    Ok((group, snapshots))
}

/// A group and its snapshots.
pub(super) fn known_group(
    state: &State,
    id: &SnapshotId,
) -> Option<(SnapshotGroup, Vec<Snapshot>)> {
    let group = state.groups.get(id)?.clone();
    let snapshots = group
        .snapshots
        .iter()
        .filter_map(|id| state.snapshots.get(id).cloned());
    let snapshots = snapshots.collect();
    Some((group, snapshots))
}

/// Deletes a group and its snapshots.
pub(super) async fn delete_group(inner: Arc<Inner>, id: String) -> Result<()> {
    let Ok(id) = id.parse::<SnapshotId>() else {
        return Ok(());
    };
    let mut guards = vec![hold::begin(&inner, &id).await?];
    let Some((group, snapshots)) = known_group(&inner.state.lock(), &id) else {
        return Ok(());
    };
    for snapshot in &snapshots {
        guards.push(hold::begin(&inner, &snapshot.id).await?);
    }
    remove(&inner, snapshots, Some(group), guards).await
}

/// Takes snapshots out of sight, out of the index, and then what they alone kept out of its place.
async fn remove(
    inner: &Arc<Inner>,
    snapshots: Vec<Snapshot>,
    group: Option<SnapshotGroup>,
    guards: Vec<Guard>,
) -> Result<()> {
    let engine = inner.clone();
    let job = move || {
        let mut changes: Vec<Change> = Vec::new();
        // What the index names stays in its place.
        let mut pins = Pins::none(&engine);
        {
            let mut state = engine.state.lock();
            for snapshot in &snapshots {
                pins.add(&mut state, &snapshot.layers);
                changes.push(Change::RemoveSnapshot(snapshot.id.clone()));
                state.snapshots.remove(&snapshot.id);
            }
            if let Some(group) = &group {
                changes.push(Change::RemoveGroup(group.id.clone()));
                state.groups.remove(&group.id);
            }
        }
        if let Err(error) = engine.commit_index(&changes) {
            let mut state = engine.state.lock();
            for snapshot in snapshots {
                state.snapshots.insert(snapshot.id.clone(), snapshot);
            }
            if let Some(group) = group {
                state.groups.insert(group.id.clone(), group);
            }
            return Err(error);
        }
        point(Point::SnapshotUnindexed);
        let layers: Vec<LayerId> = snapshots
            .iter()
            .flat_map(|snapshot| &snapshot.layers)
            .copied()
            .collect();
        drop(pins);
        reap::trash_unreferenced(&engine, &layers);
        point(Point::SnapshotTrashed);
        drop(guards);
        Ok(())
    };
    inner.calls.run(job).await??;
    inner.wake_reaper(false);
    Ok(())
}
