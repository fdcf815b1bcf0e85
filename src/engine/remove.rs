//! Removal of artifacts: from memory, then from the index, then their layers to the trash.
//! `destroy` removes by name; `reap` and `evict` choose what else goes.

use std::sync::Arc;

use super::artifacts::Sealed;
use super::error::{Error, Result};
use super::failpoint::{Point, point};
use super::layers::trash_unreferenced;
use super::pins::Pins;
use super::shared::Inner;
use super::state::State;
use super::threads::Pool;
use crate::model::{Artifact, ArtifactId, LayerId, Name};
use crate::store::Change;

/// The removed artifacts, and the bytes of the layers that were removed with them.
#[derive(Default)]
pub(super) struct Removed {
    pub(super) artifacts: usize,
    pub(super) bytes: u64,
}

/// Removes artifacts: from memory, then from the index, then their layers to the trash.
pub(super) fn remove(inner: &Arc<Inner>, ids: &[ArtifactId]) -> Result<Removed> {
    // The layers stay in their place while the index may name them.
    let mut pins = Pins::none(inner);
    let (removed, layers) = {
        let mut state = inner.state.lock();
        // Asked again under the lock: a fork may have been made since the choice.
        let in_use = state.artifacts_in_use();
        let free = ids.iter().filter(|id| !in_use.contains(id));
        let removed: Vec<(Artifact, bool)> =
            free.filter_map(|id| state.catalog.take_out(*id)).collect();
        let layers = removed.iter().flat_map(|(artifact, _)| &artifact.layers);
        let layers: Vec<LayerId> = state.unreferenced(layers).into_iter().collect();
        pins.add(&mut state, &layers);
        (removed, layers)
    };
    if removed.is_empty() {
        return Ok(Removed::default());
    }
    let artifacts = || removed.iter().map(|(artifact, _)| artifact);
    let mut changes = Vec::new();
    let named_as_indexed = inner.durability.lock_names();
    {
        let state = inner.state.lock();
        for artifact in artifacts() {
            changes.push(Change::RemoveArtifact(artifact.id));
            // The index has no later owner of the name yet: the name would dangle there.
            if !state.catalog.is_name_indexed(&artifact.name()) {
                changes.push(Change::RemoveName(artifact.name()));
            }
        }
    }
    // First: a kill right after the transaction must not hide why an artifact is gone.
    for artifact in artifacts() {
        tracing::info!(artifact.id = %artifact.id, name = %artifact.name(), "deleting artifact");
    }
    if let Err(error) = inner.transact(&changes).result() {
        // The index still has them, so they are still there.
        let mut state = inner.state.lock();
        for (artifact, had_name) in removed {
            state.catalog.put_back(artifact, had_name);
        }
        return Err(error);
    }
    drop(named_as_indexed);
    point(Point::CollectUnindexed);
    drop(pins);
    let bytes = trash_unreferenced(inner, &layers);
    inner.counters().freed(bytes);
    Ok(Removed {
        artifacts: removed.len(),
        bytes,
    })
}

/// Deletes the artifact with this name. Waits until the artifact is durable, so that the index gets
/// one change at a time.
pub(super) async fn destroy(inner: &Arc<Inner>, name: Name) -> Result<()> {
    loop {
        inner
            .state
            .when(|state| match may_go(state, &name) {
                Ok(false) => None,
                // Another destroy may have taken the name, and put it back. The job waits for that,
                // and looks again.
                Err(Error::NoSuchName(_)) => Some(Ok(true)),
                answer => Some(answer),
            })
            .await?;
        let name = name.clone();
        let job = move |inner: &Arc<Inner>| destroy_now(inner, name, |_| true);
        if inner.run(Pool::Room, job).await? {
            inner.wake_reaper();
            return Ok(());
        }
    }
}

/// Takes this name from the content that has it, if that fits. Its forks keep it. Waits until it is
/// durable. `false`: no such content has the name.
pub(super) async fn discard(
    inner: &Arc<Inner>,
    name: &Name,
    fits: impl Fn(&Artifact) -> bool + Copy + Send + 'static,
) -> Result<bool> {
    loop {
        let is_durable = |state: &mut State| {
            let owner = state.catalog.owner(name);
            let Some(owner) = owner.filter(|owner| fits(&owner.artifact)) else {
                return Some(Ok(false));
            };
            match is_settled(state, owner) {
                Ok(false) => None,
                settled => Some(settled),
            }
        };
        if !inner.state.when(is_durable).await? {
            return Ok(false);
        }
        let named = name.clone();
        let job = move |inner: &Arc<Inner>| destroy_now(inner, named, fits);
        match inner.run(Pool::Room, job).await {
            Err(Error::NoSuchName(_)) => return Ok(false),
            Ok(false) => {}
            done => {
                inner.wake_reaper();
                return done;
            }
        }
    }
}

/// Whether what has this name may be deleted now; `false`: it is not durable yet.
fn may_go(state: &State, name: &Name) -> Result<bool> {
    let owner = state.catalog.owner(name);
    let owner = owner.ok_or_else(|| Error::NoSuchName(name.clone()))?;
    let id = owner.artifact.id;
    let volumes = state.volumes.fork_counts().get(&id).copied().unwrap_or(0);
    if volumes > 0 && name.reference.cache().is_none() {
        let name = name.clone();
        return Err(Error::InUse { name, volumes });
    }
    is_settled(state, owner)
}

/// Whether the index can be told that an artifact goes; `false`: it is not durable yet.
fn is_settled(state: &State, sealed: &Sealed) -> Result<bool> {
    state.health.refuse_changes()?;
    let is_sealing = || {
        state
            .volumes
            .seals()
            .any(|(_, _, plan)| plan.artifact == sealed.artifact.id)
    };
    if sealed.indexed && !sealed.durable && !is_sealing() {
        return Err(Error::SealIntentStays(sealed.artifact.name()));
    }
    Ok(sealed.durable)
}

/// Deletes what has this name, if it fits; `false` when by now that is content which is not
/// durable.
fn destroy_now(inner: &Arc<Inner>, name: Name, fits: impl Fn(&Artifact) -> bool) -> Result<bool> {
    let _one_at_a_time = inner.collector.lock();
    let named_as_indexed = inner.durability.lock_names();
    let id = {
        let mut state = inner.state.lock();
        let owner = state.catalog.owner(&name);
        let owner = owner.filter(|owner| fits(&owner.artifact));
        let owner = owner.ok_or_else(|| Error::NoSuchName(name.clone()))?;
        if !owner.durable {
            return Ok(false);
        }
        let id = owner.artifact.id;
        state.catalog.take_name(&name);
        id
    };
    if let Err(error) = inner.transact(&[Change::RemoveName(name.clone())]).result() {
        inner.state.lock().catalog.put_name_back(name, id);
        return Err(error);
    }
    drop(named_as_indexed);
    point(Point::DestroyUnnamed);
    if let Err(error) = remove(inner, &[id]) {
        // The name is gone, as the caller wants. A repeated call answers that there is no such
        // artifact.
        tracing::warn!(artifact.id = %id, %error,
            "the name is destroyed, but its content could not be deleted yet; retrying later");
    }
    Ok(true)
}
