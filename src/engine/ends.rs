//! Ends: how the end of a volume begins, a moment after the unpublish was answered.
//!
//! A volume that is thrown away, that nobody holds and in which nothing was written ends here, on one thread and in one go: in CI those are
//! most, so those of one moment begin together. All others have a task of their own ([`seal::settle`]).

use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::crash::{Point, point};
use super::error::{Doing, Result};
use super::pending::discarded;
use super::seal;
use super::shared::Inner;
use super::state::{Left, Pin};
use crate::backend::Freeze;
use crate::model::LayerId;

/// How long a volume's end waits before it begins, at least. The kernel evicts a tree's dentries without a pause, milliseconds for thousands
/// of files, and a caller who is woken on that processor to read the answer would wait for it; nothing tells when he has read it.
const AFTER_THE_ANSWER: Duration = Duration::from_millis(5);

/// Takes care of a volume that left: soon, so that whoever waits for the answer does not wait for this too.
pub(super) fn begin_soon(inner: &Arc<Inner>, left: Left) {
    if inner.is_thrown_away(left.key) {
        if inner.ends.add(left) {
            drop(inner.spawn(begin_with_all(All(inner.clone()))));
        }
    } else {
        let one = One(Some((inner.clone(), left)));
        drop(inner.spawn(async move {
            tokio::time::sleep(AFTER_THE_ANSWER).await;
            drop(one);
        }));
    }
}

/// Begins at once with whatever waits: somebody needs the places that these take, and whoever was to begin may be blocked.
pub(super) fn begin_now(inner: &Arc<Inner>) {
    drop(All(inner.clone()));
}

async fn begin_with_all(all: All) {
    let (inner, mut others) = (&all.0, true);
    while others {
        tokio::time::sleep(AFTER_THE_ANSWER).await;
        let ripe;
        (ripe, others) = inner.ends.take();
        for left in ripe {
            throw_away(inner, left);
        }
    }
}

/// Begins with all that waits when it is dropped, also by a runtime that ends.
struct All(Arc<Inner>);

impl Drop for All {
    fn drop(&mut self) {
        for left in self.0.ends.take_all() {
            throw_away(&self.0, left);
        }
    }
}

/// The same with one that has a task of its own.
struct One(Option<(Arc<Inner>, Left)>);

impl Drop for One {
    fn drop(&mut self) {
        if let Some((inner, left)) = self.0.take() {
            settle(&inner, left, None);
        }
    }
}

/// Sees to a volume's end in a task of its own. `found`: the answer to the first question whether somebody holds it.
fn settle(inner: &Arc<Inner>, left: Left, found: Option<Result<Freeze>>) {
    if is_left_alone(inner, left.key) {
        return;
    }
    let engine = inner.clone();
    let task = async move {
        let key = left.key;
        tokio::select! {
            () = seal::settle(&engine, left, found) => {}
            () = engine.stop.cancelled() => {
                is_left_alone(&engine, key);
            }
        }
    };
    inner.tasks.spawn_on(task, &inner.runtime);
}

/// Whether the engine stops. Nothing is lost: the directory says what was promised, and the next start takes it up.
fn is_left_alone(inner: &Inner, key: LayerId) -> bool {
    let stops = inner.stop.is_cancelled();
    if stops {
        tracing::debug!(layer = %key, "left for the next start");
    }
    stops
}

fn throw_away(inner: &Arc<Inner>, left: Left) {
    let end = End {
        inner: inner.clone(),
        key: left.key,
        found: None,
        is_over: false,
        _until_then: inner.tasks.token(),
    };
    // When no job is taken any more, the next start finds what is left.
    drop(inner.freezes.run(move || end.come(left.pin)));
}

/// The end of a volume that is thrown away. If it has not come when this is dropped, because the volume is held or has content, or because of
/// a defect, it goes on in a task.
struct End {
    inner: Arc<Inner>,
    key: LayerId,
    found: Option<Result<Freeze>>,
    is_over: bool,
    _until_then: TaskTrackerToken,
}

impl End {
    fn come(mut self, pin: Option<Pin>) {
        let (inner, key) = (&self.inner, self.key);
        if inner.stop.is_cancelled() {
            return;
        }
        let found = let_go(inner, key, pin);
        let is_free = matches!(found, Ok(Freeze::Frozen));
        self.found = Some(found);
        if is_free {
            point(Point::SealFrozen);
            let (trash, name) = (&inner.dirs.trash, key.to_string());
            // What cannot be deleted here is no failure: that comes from where it is tried again.
            let is_deleted = inner.backend.delete_untouched(trash, name.as_ref());
            self.is_over = is_deleted.unwrap_or(false);
        }
        if self.is_over {
            discarded(inner, key);
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if !self.is_over {
            let left = Left {
                key: self.key,
                pin: None,
            };
            settle(&self.inner, left, self.found.take());
        }
    }
}

/// Closes the volume's pin, and finds out whether somebody holds the volume still.
fn let_go(inner: &Inner, key: LayerId, pin: Option<Pin>) -> Result<Freeze> {
    let Some(dir) = inner.leaving_dir(key)? else {
        return Ok(Freeze::Frozen);
    };
    let (descriptor, _place) = pin.map(|pin| (pin.descriptor, pin.place)).unzip();
    let found = inner.backend.let_go(&dir, descriptor);
    found.doing("close the volume")
}
