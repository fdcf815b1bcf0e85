//! Ends: how the end of a volume begins, a moment after the unpublish was answered.
//!
//! A volume that is thrown away, that nobody holds and in which nothing was written ends here, on one thread and in one go: in CI those are
//! most. All others have a task of their own ([`seal::settle`]). Which of them wait is `teardown_queue`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::pending::discarded;
use super::seal;
use super::shared::Inner;
use super::volumes::{Pin, Teardown};
use crate::backend::Freeze;
use crate::model::LayerId;

/// How long a volume's end waits before it begins, at least. The kernel evicts a tree's dentries without a pause, milliseconds for thousands
/// of files, and a caller who is woken on that processor to read the answer would wait for it; nothing tells when he has read it.
const AFTER_THE_ANSWER: Duration = Duration::from_millis(5);

/// Takes care of a volume that left: soon, so that whoever waits for the answer does not wait for this too.
pub(super) fn begin_soon(inner: &Inner, left: Teardown) {
    if is_left_alone(inner, left.key) {
        return;
    }
    inner
        .teardown
        .queue
        .add(left, Instant::now() + AFTER_THE_ANSWER);
}

/// Begins at once with whatever waits: somebody needs the places that these take.
pub(super) fn begin_now(inner: &Arc<Inner>) {
    for left in inner.teardown.queue.take_all() {
        begin(inner, left);
    }
}

/// Begins with each volume that left when its moment has come, until the engine ends. What waits then is left to the next start.
pub(super) async fn teardown_loop(inner: Arc<Inner>) {
    loop {
        let ripe = tokio::select! {
            ripe = inner.teardown.queue.ripe() => ripe,
            () = inner.lifetime.stopping() => {
                drop(inner.teardown.queue.take_all());
                return;
            }
        };
        for left in ripe {
            begin(&inner, left);
        }
    }
}

fn begin(inner: &Arc<Inner>, left: Teardown) {
    if inner.is_thrown_away(left.key) {
        throw_away(inner, left);
    } else {
        settle(inner, left, None);
    }
}

/// Sees to a volume's end in a task of its own. `found`: the answer to the first question whether somebody holds it.
fn settle(inner: &Arc<Inner>, left: Teardown, found: Option<Result<Freeze>>) {
    if is_left_alone(inner, left.key) {
        return;
    }
    let engine = inner.clone();
    let task = async move {
        let key = left.key;
        tokio::select! {
            () = seal::settle(&engine, left, found) => {}
            () = engine.lifetime.stopping() => {
                is_left_alone(&engine, key);
            }
        }
    };
    inner.lifetime.spawn(task);
}

/// Whether the engine stops. Nothing is lost: the directory says what was promised, and the next start takes it up.
fn is_left_alone(inner: &Inner, key: LayerId) -> bool {
    let stops = inner.lifetime.is_stopping();
    if stops {
        tracing::debug!(layer = %key, "left for the next start");
    }
    stops
}

/// Ends a volume that is thrown away. If it is held or has content, that goes on in a task.
fn throw_away(inner: &Arc<Inner>, left: Teardown) {
    let engine = inner.clone();
    let until_then = inner.lifetime.token();
    // When no job is taken any more, the next start finds what is left.
    drop(inner.threads.freezes.run(move || {
        let _until_then = until_then;
        let key = left.key;
        if is_left_alone(&engine, key) {
            return;
        }
        let found = let_go(&engine, key, left.pin);
        if matches!(found, Ok(Freeze::Frozen)) {
            point(Point::SealFrozen);
            let (trash, name) = (&engine.dirs.trash, key.to_string());
            // What cannot be deleted here is no failure: that comes from where it is tried again.
            let deleted = engine.backend.delete_untouched(trash, name.as_ref());
            if deleted.unwrap_or(false) {
                discarded(&engine, key);
                return;
            }
        }
        settle(&engine, Teardown { key, pin: None }, Some(found));
    }));
}

/// Closes the volume's pin, and finds out whether somebody holds the volume still.
fn let_go(inner: &Inner, key: LayerId, pin: Option<Pin>) -> Result<Freeze> {
    let Some(dir) = inner.leaving_dir(key)? else {
        return Ok(Freeze::Frozen);
    };
    let (descriptor, _place) = pin.map(|pin| (pin.descriptor, pin.place)).unzip();
    let found = inner.backend.let_go(&dir, descriptor);
    found.context("close the volume")
}
