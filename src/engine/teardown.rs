//! Teardown: how it begins, a moment after the unpublish was answered.
//!
//! A volume that is discarded, that no process holds and that nothing was written to ends here, on
//! one thread and in one go: most volumes in CI are of this kind. Each other volume has a task of
//! its own ([`seal::drive`]). The queue is in `teardown_queue`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::lifecycle::{Action, Goal, Observation};
use super::pending::deleted;
use super::quiesce::quiesce;
use super::seal;
use super::shared::Inner;
use super::teardown_queue::{Pin, Teardown};
use crate::backend::Freeze;
use crate::model::LayerId;

/// How long a teardown waits before it begins, at least. The kernel evicts a tree's dentries without
/// a pause, which takes milliseconds for thousands of files. A caller that is woken on that
/// processor to read the answer would wait for it, and no event tells that it has read the answer.
const AFTER_THE_ANSWER: Duration = Duration::from_millis(5);

/// Begins the teardown soon, so that a caller that waits for its answer does not wait for it, too.
pub(super) fn begin_soon(inner: &Inner, left: Teardown) {
    if is_left_to_next_start(inner, left.key) {
        return;
    }
    inner
        .teardown
        .queue
        .add(left, Instant::now() + AFTER_THE_ANSWER);
}

/// Begins every teardown that waits: an unpublish needs the permits that these have.
pub(super) fn begin_now(inner: &Arc<Inner>) {
    for left in inner.teardown.queue.take_all() {
        begin(inner, left);
    }
}

/// Begins each teardown when its time has come, until the engine ends. The next start does the rest.
pub(super) async fn teardown_loop(inner: Arc<Inner>) {
    loop {
        let ripe = tokio::select! {
            ripe = inner.teardown.queue.ripe() => ripe,
            () = inner.lifetime.stopping() => {
                let left = inner.teardown.queue.take_all();
                // To close a descriptor may take as long as the disk likes.
                drop(inner.threads.freezes.run(move || drop(left)));
                return;
            }
        };
        for left in ripe {
            begin(&inner, left);
        }
    }
}

fn begin(inner: &Arc<Inner>, left: Teardown) {
    if inner.goal(left.key) == Some(Goal::Discard) {
        discard_at_once(inner, left);
    } else {
        quiesce_and_drive(inner, left, None);
    }
}

/// Does the teardown in a task of its own. `first`: the answer to the first question whether a
/// process holds the volume.
fn quiesce_and_drive(inner: &Arc<Inner>, left: Teardown, first: Option<Result<Freeze>>) {
    let (engine, key) = (inner.clone(), left.key);
    spawn(inner, key, async move {
        let action = quiesce(&engine, left, first).await;
        seal::drive(&engine, key, action).await;
    });
}

/// Runs a task until the engine stops.
fn spawn(inner: &Arc<Inner>, key: LayerId, task: impl Future<Output = ()> + Send + 'static) {
    if is_left_to_next_start(inner, key) {
        return;
    }
    let engine = inner.clone();
    let until_stop = async move {
        tokio::select! {
            () = task => {}
            () = engine.lifetime.stopping() => {
                is_left_to_next_start(&engine, key);
            }
        }
    };
    inner.lifetime.spawn(until_stop);
}

/// Whether the engine stops. Nothing is lost: the next start finds the volume by its directory.
fn is_left_to_next_start(inner: &Inner, key: LayerId) -> bool {
    let stops = inner.lifetime.is_stopping();
    if stops {
        tracing::debug!(layer = %key, "left for the next start");
    }
    stops
}

/// Deletes a volume that is discarded. If it is held or has content, that goes on in a task.
fn discard_at_once(inner: &Arc<Inner>, left: Teardown) {
    let engine = inner.clone();
    let until_then = inner.lifetime.token();
    // When no job is accepted any more, the next start finds the volume.
    drop(inner.threads.freezes.run(move || {
        let _until_then = until_then;
        let key = left.key;
        if is_left_to_next_start(&engine, key) {
            return;
        }
        let found = close(&engine, key, left.pin);
        if !matches!(found, Ok(Freeze::Frozen)) {
            quiesce_and_drive(&engine, Teardown { key, pin: None }, Some(found));
            return;
        }
        point(Point::SealFrozen);
        let action = engine.observe(key, Observation::Quiet);
        let (trash, name) = (&engine.dirs.trash, key.to_string());
        // A failure here is not reported: the task tries again and reports it.
        let is_deleted = action == Action::Delete
            && engine
                .backend
                .delete_untouched(trash, name.as_ref())
                .unwrap_or(false);
        if is_deleted {
            deleted(&engine, key);
            return;
        }
        let task = engine.clone();
        spawn(&engine, key, async move {
            seal::drive(&task, key, action).await
        });
    }));
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
