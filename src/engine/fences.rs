//! Fences: orders to clear names on all nodes of a cluster. This node's part of it: what a fence
//! clears loses its name here, in one transaction, and the node remembers the fence.
//!
//! Content and volumes have a number, the highest fence that was applied when the volume was
//! published. Whatever could bring cleared content back compares its number first: a seal (`seal`),
//! an import, content of another node (`transfer`), and a start (`recover`). So a volume that a
//! fence covers needs no mark, and a restart forgets nothing. `model::Fences` decides.

use std::sync::Arc;

use super::error::Result;
use super::failpoint::{Point, point};
use super::shared::Inner;
use super::threads::Pool;
use crate::model::{Fence, FenceStep, Fences, Name};
use crate::store::Change;

/// Applies fences, in their order. `false`: the stream that brought them has to begin again.
pub(super) async fn apply(inner: &Arc<Inner>, fences: Vec<Fence>) -> Result<bool> {
    let job = move |inner: &Arc<Inner>| apply_now(inner, &fences);
    let goes_on = inner.run(Pool::Room, job).await?;
    // Content without a name is garbage.
    inner.wake_reaper();
    Ok(goes_on)
}

fn apply_now(inner: &Inner, fences: &[Fence]) -> Result<bool> {
    inner.state.lock().health.refuse_changes()?;
    // An artifact that is being removed would come back with its name if that failed.
    let _one_at_a_time = inner.collector.lock();
    let named_as_indexed = inner.durability.lock_names();
    let mut all = inner.state.lock().fences.clone();
    // Those that are new.
    let (mut new, mut changes) = (Fences::default(), Vec::new());
    let (mut misses, mut goes_on) = (false, true);
    for fence in fences {
        match all.step(fence) {
            FenceStep::Known => continue,
            FenceStep::Rejoin => {
                goes_on = false;
                break;
            }
            FenceStep::Apply => {}
            FenceStep::Missed => {
                misses = true;
                all.miss(fence.number);
                changes.push(Change::MissFences(fence.number));
            }
        }
        all.insert(fence.clone());
        new.insert(fence.clone());
        changes.push(Change::PutFence(fence.clone()));
    }
    if changes.is_empty() {
        return Ok(goes_on);
    }
    // The lowest number of content that keeps this name.
    let least = |name: &Name| if misses { u64::MAX } else { new.covering(name) };
    // All publishes wait for the lock, so a namespace pays for its own names only.
    let tenants = (!misses).then(|| new.tenants().cloned().collect::<Vec<_>>());
    let tenants = tenants.as_deref();
    let names = inner.state.lock().catalog.indexed_names(tenants, least);
    let cleared = names.len();
    changes.extend(names.into_iter().map(Change::RemoveName));
    inner.transact(&changes).result()?;
    point(Point::FenceIndexed);
    // A fork that was made since has the lower number, and is not committed.
    let mut state = inner.state.lock();
    state.catalog.clear(tenants, least);
    state.fences = all;
    drop(state);
    drop(named_as_indexed);
    // Callers that wait for content of a cleared volume wait for nothing.
    inner.state.notify();
    tracing::info!(
        fences = new.all().count(),
        newest = new.newest(),
        names = cleared,
        misses,
        "names were cleared in the cluster"
    );
    Ok(goes_on)
}

/// Forgets the fences up to this number. One that this node has not applied stays unknown, so the
/// next fence shows that it was missed.
pub(super) async fn forget(inner: &Arc<Inner>, up_to: u64) -> Result<()> {
    let job = move |inner: &Arc<Inner>| forget_now(inner, up_to);
    inner.run(Pool::Room, job).await
}

fn forget_now(inner: &Inner, up_to: u64) -> Result<()> {
    let _one_at_a_time = inner.collector.lock();
    let mut fences = inner.state.lock().fences.clone();
    // A volume from before a fence may end later, and then the fence must still be known.
    let oldest = inner.state.lock().volumes.oldest_fence();
    let up_to = up_to.min(fences.newest()).min(oldest.unwrap_or(u64::MAX));
    if up_to <= fences.forgotten() {
        return Ok(());
    }
    let forgotten = fences.all().filter(|fence| fence.number <= up_to);
    let forgotten = forgotten.map(|fence| Change::RemoveFence(fence.number));
    let mut changes: Vec<Change> = forgotten.collect();
    changes.push(Change::ForgetFences(up_to));
    inner.transact(&changes).result()?;
    fences.forget(up_to);
    inner.state.lock().fences = fences;
    Ok(())
}
