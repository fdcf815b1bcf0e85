//! Rollback: an earlier generation of a name is committed once more.
//!
//! It becomes a new artifact of the same layers, dated now. So it is the newest content of its name
//! on this node, and for the cluster and the shared tier as after any other commit. Nothing is
//! copied. A generation that has lost its name is there only while a volume is a fork of it.
//!
//! An administrator of the node brings back any generation. An order of the controller brings back
//! none that was cleared, replaces no content that was committed after the order, and may be
//! repeated.

use std::cell::Cell;
use std::sync::Arc;

use super::half;
use crate::engine::error::{Error, Result};
use crate::engine::pins::Pins;
use crate::engine::policies;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::threads::Pool;
use crate::model::{Artifact, ArtifactId, Name, Sharing, Timestamp, counted};
use crate::sys;

/// What the controller of a cluster says about a rollback that it orders.
#[derive(Debug, Clone)]
pub struct RollbackOrder {
    /// The id of the new artifact. With the same id, the same order is repeated.
    pub id: ArtifactId,
    /// When the new artifact counts as committed.
    pub created: Timestamp,
    /// The user who wants it, for the audit.
    pub by: String,
}

/// Commits the artifact `to` of this name once more; returns the id of the new one. `base`: the
/// number of the name in the shared tier. `order`: that of the controller; `None`: an administrator
/// of this node wants it.
///
/// `NoSuchName`: the name has no such generation here, or it is not durable. `NameTaken`: newer
/// content took the name meanwhile. `Cleared`: the generation was cleared, and may not come back.
pub(in crate::engine) async fn rollback(
    inner: &Arc<Inner>,
    name: Name,
    to: ArtifactId,
    base: Option<u64>,
    order: Option<RollbackOrder>,
) -> Result<ArtifactId> {
    loop {
        let (name, order) = (name.clone(), order.clone());
        let under_way = order.as_ref().map(|order| order.id);
        let job = move |inner: &Arc<Inner>| rollback_now(inner, &name, to, base, order.as_ref());
        if let Some(id) = inner.run(Pool::Transfers, job).await? {
            return Ok(id);
        }
        let is_over = |state: &mut State| {
            let made = under_way.and_then(|id| state.catalog.get(&id));
            made.is_none_or(|made| made.durable).then_some(())
        };
        inner.state.when(is_over).await;
    }
}

/// `None`: the same order came before, and is being carried out.
fn rollback_now(
    inner: &Arc<Inner>,
    name: &Name,
    to: ArtifactId,
    base: Option<u64>,
    order: Option<&RollbackOrder>,
) -> Result<Option<ArtifactId>> {
    let began = inner.now();
    // Its layers stay, also if it is deleted or merged meanwhile.
    let mut pins = Pins::none(inner);
    let (earlier, after_holder) = {
        let mut state = inner.state.lock();
        state.health.refuse_closing()?;
        if let Some(order) = order.filter(|order| is_done(&state, name, order)) {
            return Ok(Some(order.id));
        }
        let earlier = state.catalog.get(&to).filter(|it| it.durable);
        let earlier = earlier.map(|it| it.artifact.clone());
        let earlier = earlier.filter(|artifact| artifact.name() == *name);
        let earlier = earlier.ok_or_else(|| Error::NoSuchName(name.clone()))?;
        pins.add(&mut state, &earlier.layers);
        let holder = state.catalog.owner(name);
        let after = holder.map_or(0, |holder| holder.artifact.created.0 + 1);
        (earlier, after)
    };
    let (id, created) = match order {
        Some(order) => (order.id, order.created),
        None => (
            ArtifactId::from_bits(sys::random()),
            // Newer than the owner of the name, even if a wrong clock dated that.
            Timestamp(began.0.max(after_holder)),
        ),
    };
    // A time that is far ahead of this node's does not move its clock.
    if order.is_none() || counted(created, began) == created {
        inner.saw(created);
    }
    let again = Artifact {
        id,
        created,
        last_used: created,
        sharing: Sharing {
            never: earlier.sharing.never,
            damaged: earlier.sharing.damaged,
            base,
            ..Sharing::default()
        },
        ..earlier.clone()
    };
    let is_under_way = Cell::new(false);
    let described = |state: &State| {
        state.health.refuse_closing()?;
        if order.is_some() {
            let made = state.catalog.get(&id);
            is_under_way.set(made.is_some_and(|made| made.artifact.name() == *name));
            if made.is_some() {
                return Err(Error::NameTaken(name.clone()));
            }
            allow(state, &earlier, created)?;
        }
        Ok(Artifact {
            // For an administrator: this content is good, whatever was cleared before.
            fence: state.fences.newest(),
            ..again.clone()
        })
    };
    let named = match half::enter(inner, Vec::new(), began, described) {
        Ok(named) => named,
        Err(_) if is_under_way.get() => return Ok(None),
        Err(error) => return Err(error),
    };
    // The previous owner of the name may be deleted.
    inner.wake_reaper();
    if !named {
        return Err(Error::NameTaken(name.clone()));
    }
    let by = order.map(|order| order.by.as_str());
    tracing::info!(artifact.id = %id, earlier.id = %to, %name, by,
        "an earlier generation is committed once more");
    let policies = Arc::clone(&inner.state.lock().policies);
    policies::audit_rollback(&policies, &again, to, by);
    Ok(Some(id))
}

/// Whether an order was carried out that comes once more.
fn is_done(state: &State, name: &Name, order: &RollbackOrder) -> bool {
    let made = state.catalog.get(&order.id);
    made.is_some_and(|it| it.durable && it.artifact.name() == *name)
}

/// Refuses an order of the controller for content that was cleared or is never shared, and one that
/// is older than the content that has the name.
fn allow(state: &State, earlier: &Artifact, created: Timestamp) -> Result<()> {
    let name = earlier.name();
    if earlier.sharing.never {
        return Err(Error::Unsupported {
            what: format!("a rollback of {name} in the cluster"),
            why: "this generation is never shared; roll back on its node".to_owned(),
        });
    }
    let holder = state.catalog.owner(&name);
    // The owner of a name is not cleared. Of the others, a fence may be forgotten that did it.
    let is_owner = holder.is_some_and(|holder| holder.artifact.id == earlier.id);
    let least = state.fences.least(&name).max(state.fences.forgotten());
    if !is_owner && earlier.fence < least {
        return Err(Error::Cleared(name));
    }
    if holder.is_some_and(|holder| holder.artifact.created >= created) {
        return Err(Error::NameTaken(name));
    }
    Ok(())
}
