//! Periodic work on persistent volumes: notices that no process holds an unmounted volume, records
//! the last use, and deletes volumes whose `ttl` has ended. Runs on the thread that frees space.

use std::sync::Arc;

use super::create::delete_now;
use super::data_dir::is_held_open;
use super::entries::VolumeEntry;
use crate::engine::error::{Error, Result};
use crate::engine::guard::Guard;
use crate::engine::shared::Inner;
use crate::model::VolumeId;
use crate::store::Change;

/// One round: how many claims were deleted, and the first failure.
pub(in crate::engine) fn tidy(inner: &Arc<Inner>) -> (usize, Result<()>) {
    notice_free(inner);
    let remembered = remember_uses(inner);
    let (deleted, expired) = expire(inner);
    if deleted > 0 {
        inner.collector.expired.notify_one();
    }
    (deleted, remembered.and(expired))
}

/// When claims were last used that time may delete.
fn remember_uses(inner: &Arc<Inner>) -> Result<()> {
    let used: Vec<VolumeId> = {
        let state = inner.state.lock();
        let used = state.claims.values();
        let used = used.filter(|held| held.used && held.claim.mutable.ttl_seconds.is_some());
        used.map(|held| held.claim.id.clone()).collect()
    };
    // An operation that runs writes the claim itself, and must not be overwritten.
    let guards: Vec<Guard> = used
        .iter()
        .filter_map(|id| Guard::take_for_chore(inner, id).ok())
        .collect();
    let changes: Vec<Change> = {
        let state = inner.state.lock();
        let claims = guards
            .iter()
            .filter_map(|guard| state.claims.get(&guard.volume));
        claims
            .map(|held| Change::PutClaim(held.claim.clone()))
            .collect()
    };
    if changes.is_empty() {
        return Ok(());
    }
    inner.transact(&changes).result()?;
    let mut state = inner.state.lock();
    for guard in &guards {
        if let Some(held) = state.claims.get_mut(&guard.volume) {
            held.used = false;
        }
    }
    Ok(())
}

/// Claims that a process held open when they were unmounted.
fn notice_free(inner: &Arc<Inner>) {
    let gone: Vec<VolumeId> = {
        let state = inner.state.lock();
        let gone = state.claims.values();
        let gone = gone.filter(|held| held.mounts.is_empty() && held.busy_layers.is_some());
        gone.map(|held| held.claim.id.clone()).collect()
    };
    for id in gone {
        let Ok(_guard) = Guard::take_for_chore(inner, &id) else {
            continue;
        };
        let is_free = matches!(is_held_open(inner, &id), Ok(false));
        let mut state = inner.state.lock();
        if let Some(held) = state.claims.get_mut(&id)
            && is_free
            && held.mounts.is_empty()
        {
            held.is_let_go(inner.now());
        }
    }
}

/// When claims were last used, for the index: at the end, when no operation runs any more.
pub(in crate::engine) fn uses(inner: &Inner) -> Vec<Change> {
    let state = inner.state.lock();
    let used = state.claims.values();
    let used = used.filter(|held| held.used);
    used.map(|held| Change::PutClaim(held.claim.clone()))
        .collect()
}

/// Claims whose time is over. One that cannot be deleted is in no other one's way.
fn expire(inner: &Arc<Inner>) -> (usize, Result<()>) {
    let now = inner.expiry_time();
    let is_over = |held: &VolumeEntry| {
        held.is_quiescent()
            && held.claim.attached.is_empty()
            && held.claim.expires().is_some_and(|at| at <= now)
    };
    let over: Vec<VolumeId> = {
        let state = inner.state.lock();
        let over = state.claims.values().filter(|held| is_over(held));
        over.map(|held| held.claim.id.clone()).collect()
    };
    let (mut deleted, mut failure) = (0, None);
    for id in over {
        let Ok(_guard) = Guard::take_for_chore(inner, &id) else {
            continue;
        };
        let still = inner.state.lock().claims.get(&id).is_some_and(is_over);
        if !still {
            continue;
        }
        match delete_now(inner, &id) {
            Ok(()) => {
                tracing::info!(volume.id = %id, "deleted the volume: its ttl has expired");
                deleted += 1;
            }
            Err(Error::ClaimInUse { .. }) => {}
            // An index that takes nothing of this one takes nothing of the next.
            Err(
                error @ (Error::Full(_)
                | Error::Index(_)
                | Error::Degraded(_)
                | Error::ShuttingDown),
            ) => {
                failure.get_or_insert(error);
                break;
            }
            Err(error) => {
                tracing::warn!(volume.id = %id, %error,
                    "the volume's ttl has expired, but the volume could not be deleted");
                failure.get_or_insert(error);
            }
        }
    }
    (deleted, failure.map_or(Ok(()), Err))
}
