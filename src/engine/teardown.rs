//! Teardown: how it begins, a moment after the unpublish was answered.
//!
//! A volume that is discarded, that no process holds and that nothing was written to ends here, on
//! one thread and in one go: most volumes in CI are of this kind. Each other volume has a task of
//! its own ([`seal::drive`]).

use std::sync::Arc;
use std::time::Duration;

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::lifecycle::{Action, Goal, Observation};
use super::pending::deleted;
use super::quiesce::quiesce;
use super::seal;
use super::shared::Inner;
use super::teardowns::{Pin, Teardown};
use super::threads::Pool;
use crate::backend::Freeze;
use crate::model::LayerId;

/// How long a teardown waits before it begins, at least. The kernel evicts a tree's dentries
/// without a pause, which takes milliseconds for thousands of files. A caller that is woken on that
/// processor to read the answer would wait for it, and no event tells that it has read the answer.
const AFTER_THE_ANSWER: Duration = Duration::from_millis(5);

/// Begins the teardown soon, in a task of its own, so that a caller that waits for its answer does
/// not wait for it, too. Ends with the engine: the next start finds the volume by its directory.
pub(super) fn begin_soon(inner: &Arc<Inner>, left: Teardown) {
    let engine = inner.clone();
    inner.lifetime.spawn(async move {
        let key = left.key;
        tokio::select! {
            () = tokio::time::sleep(AFTER_THE_ANSWER) => {}
            () = engine.lifetime.stopping() => {
                // To close a descriptor may take as long as the disk likes.
                drop(engine.threads.run(Pool::Freezes, move || drop(left)));
                return;
            }
        }
        tokio::select! {
            () = tear_down(&engine, left) => {}
            () = engine.lifetime.stopping() => {
                tracing::debug!(layer = %key, "left for the next start");
            }
        }
    });
}

async fn tear_down(inner: &Arc<Inner>, left: Teardown) {
    let key = left.key;
    let action = if inner.goal(key) == Some(Goal::Discard) {
        let engine = inner.clone();
        // The job ends before the engine does.
        let until_then = inner.lifetime.token();
        let job = move || {
            let _until_then = until_then;
            discard_at_once(&engine, left)
        };
        match inner.threads.run(Pool::Freezes, job).await {
            Ok(Ok(action)) => action,
            Ok(Err(found)) => quiesce(inner, Teardown { key, pin: None }, Some(found)).await,
            // When no job is accepted any more, the next start finds the volume.
            Err(_) => return,
        }
    } else {
        quiesce(inner, left, None).await
    };
    seal::drive(inner, key, action).await;
}

/// Deletes a volume that is discarded, if nothing was written to it. Returns what is left to do, or
/// why it is not known that no process holds the volume.
fn discard_at_once(inner: &Inner, left: Teardown) -> Result<Action, Result<Freeze>> {
    let key = left.key;
    if inner.lifetime.is_stopping() {
        return Ok(Action::Nothing);
    }
    let found = close(inner, key, left.pin);
    if !matches!(found, Ok(Freeze::Frozen)) {
        return Err(found);
    }
    point(Point::SealFrozen);
    let action = inner.observe(key, Observation::Quiet);
    let (trash, name) = (&inner.dirs.trash, key.to_string());
    // A failure here is not reported: the next step tries again and reports it.
    let is_deleted = action == Action::Delete
        && inner
            .backend
            .delete_untouched(trash, name.as_ref())
            .unwrap_or(false);
    if !is_deleted {
        return Ok(action);
    }
    deleted(inner, key);
    Ok(Action::Nothing)
}

/// Closes the volume's pin, and finds out whether a process still holds the volume.
fn close(inner: &Inner, key: LayerId, pin: Option<Pin>) -> Result<Freeze> {
    let Some(dir) = inner.retired_dir(key)? else {
        return Ok(Freeze::Frozen);
    };
    let (descriptor, _permit) = pin.map(|pin| (pin.descriptor, pin.permit)).unzip();
    let found = inner.backend.let_go(&dir, descriptor);
    found.context("close the volume")
}
