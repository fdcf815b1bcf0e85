//! Ends: how the end of a volume begins, a moment after the unpublish was answered. Volumes that leave at the same moment begin together.
//!
//! A volume that is thrown away, that nobody holds and in which nothing was written ends here, on one thread and in one go: in CI those are
//! most. All others have a task of their own ([`seal::settle`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::crash::{Point, point};
use super::error::{Doing, Result};
use super::state::{Goal, Left, Pin};
use super::{Inner, seal};
use crate::backend::{self, Freeze};
use crate::model::LayerId;

/// How long a volume's end waits before it begins, at most. The kernel evicts a tree's dentries without a pause, milliseconds for thousands
/// of files, and a caller who is woken on that processor to read the answer would wait for it; nothing tells when he has read it.
const AFTER_THE_ANSWER: Duration = Duration::from_millis(5);

/// How long whoever was the first is trusted to begin with all: the thread where he waits serves calls, and may be blocked by one.
const TRUSTED: Duration = Duration::from_millis(50);

/// The volumes whose end has not begun yet.
#[derive(Debug, Default)]
pub(super) struct Ends(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    all: Vec<Left>,
    /// Since when somebody waits to begin with all.
    since: Option<Instant>,
}

impl Ends {
    /// Whether whoever adds this is the one who is to begin with all.
    fn add(&self, left: Left) -> bool {
        let mut waiting = self.0.lock();
        waiting.all.push(left);
        let somebody_will = waiting.since.is_some_and(|since| since.elapsed() < TRUSTED);
        if !somebody_will {
            waiting.since = Some(Instant::now());
        }
        !somebody_will
    }

    fn take(&self) -> Vec<Left> {
        std::mem::take(&mut *self.0.lock()).all
    }
}

/// Takes care of a volume that left: soon, so that whoever waits for the answer does not wait for this too.
pub(super) fn begin_soon(inner: &Arc<Inner>, left: Left) {
    if !inner.ends.add(left) {
        return;
    }
    let begin = Begin(inner.clone());
    let task = async move {
        tokio::time::sleep(AFTER_THE_ANSWER).await;
        drop(begin);
    };
    drop(inner.spawn_here(task));
}

/// Begins to see to the ends when it is dropped, also by a runtime that ends.
struct Begin(Arc<Inner>);

impl Drop for Begin {
    fn drop(&mut self) {
        let inner = &self.0;
        for left in inner.ends.take() {
            if inner.is_discarded(left.key) {
                let engine = inner.clone();
                // What a job is given for when none is taken any more, the next start finds.
                drop(inner.freezes.run(move || discard(&engine, left)));
            } else {
                settle(inner, left, None);
            }
        }
    }
}

/// Sees to a volume's end in a task of its own. `found`: the answer to the first question whether somebody holds it.
fn settle(inner: &Arc<Inner>, left: Left, found: Option<Result<Freeze>>) {
    let engine = inner.clone();
    let task = async move {
        let key = left.key;
        tokio::select! {
            () = seal::settle(&engine, left, found) => {}
            // Nothing is lost: the directory says what was promised, and the next start takes it up.
            () = engine.stop.cancelled() => tracing::debug!(layer = %key, "left for the next start"),
        }
    };
    inner.tasks.spawn_on(task, &inner.runtime);
}

/// Throws a volume away; if it is held or has content, that goes on in a task.
fn discard(inner: &Arc<Inner>, left: Left) {
    let key = left.key;
    if inner.stop.is_cancelled() {
        tracing::debug!(layer = %key, "left for the next start");
        return;
    }
    let found = let_go(inner, left);
    let is_free = matches!(found, Ok(Freeze::Frozen));
    if is_free {
        point(Point::SealFrozen);
    }
    // What cannot be deleted here is no failure: that comes from there, and is tried again.
    if is_free && is_deleted(inner, key).unwrap_or(false) {
        discarded(inner, key);
    } else {
        settle(inner, Left { key, pin: None }, Some(found));
    }
}

/// Closes the volume's pin, and finds out whether somebody holds the volume still.
fn let_go(inner: &Inner, left: Left) -> Result<Freeze> {
    let Some(dir) = inner.leaving_dir(left.key)? else {
        return Ok(Freeze::Frozen);
    };
    let pin = left
        .pin
        .map(|Pin { descriptor, place }| (descriptor, place));
    let (descriptor, _place) = pin.unzip();
    let found = inner.backend.let_go(&dir, descriptor);
    found.doing("close the volume")
}

/// Deletes the volume if nothing was written in it: what takes a while is the affair of the thread for chores.
fn is_deleted(inner: &Inner, key: LayerId) -> backend::Result<bool> {
    let name = key.to_string();
    inner
        .backend
        .delete_untouched(&inner.dirs.trash, name.as_ref())
}

impl Inner {
    /// Whether a leaving volume is thrown away, whatever its pod did.
    fn is_discarded(&self, key: LayerId) -> bool {
        let state = self.state.lock();
        let leaving = state.leaving.get(&key);
        leaving.is_some_and(|leaving| leaving.goal == Goal::Discard)
    }
}

/// A volume that was thrown away is deleted.
pub(super) fn discarded(inner: &Inner, key: LayerId) {
    point(Point::DiscardDeleted);
    // Not after each: a round looks at everything that is sealed.
    if inner.forget_leaving(key) || inner.short.load(Ordering::SeqCst) {
        inner.wake_reaper();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_waits_for_all_and_if_he_does_not_come_the_next_does() {
        let ends = Ends::default();
        let left = || Left {
            key: LayerId::from_bits(1),
            pin: None,
        };
        assert!(ends.add(left()));
        assert!(!ends.add(left()));
        let since = Instant::now().checked_sub(TRUSTED);
        ends.0.lock().since = since;
        assert!(ends.add(left()), "the first is late");
        assert!(!ends.add(left()));
        assert_eq!(ends.take().len(), 4);
        assert!(ends.add(left()), "nobody waits any more");
    }
}
