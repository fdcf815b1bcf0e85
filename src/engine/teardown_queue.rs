//! The queue of retired volumes whose teardown has not begun yet, each with a not-before time.
//! The teardown itself is in `teardown`.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::model::LayerId;
use crate::sys::UnmountWatches;

/// How many unmounted volumes may wait for their teardown; the next unpublish waits, too. Each has a
/// descriptor. A process may have as few as some thousands, and without one every call fails.
const PINS: usize = 512;

/// What teardowns share.
#[derive(Debug)]
pub(super) struct Teardowns {
    pub(super) queue: TeardownQueue,
    /// Permits for the pins of unmounted volumes.
    pub(super) pins: Arc<Semaphore>,
    /// Of mounts of persistent volumes.
    pub(super) watches: UnmountWatches,
    /// Held by the one seal that repeats a copy which found no space.
    pub(super) copying: tokio::sync::Mutex<()>,
}

impl Default for Teardowns {
    fn default() -> Self {
        Self {
            queue: TeardownQueue::default(),
            pins: Arc::new(Semaphore::new(PINS)),
            watches: UnmountWatches::default(),
            copying: tokio::sync::Mutex::default(),
        }
    }
}

/// A retired volume.
#[derive(Debug)]
pub(super) struct Teardown {
    /// The name of its directory.
    pub(super) key: LayerId,
    pub(super) pin: Option<Pin>,
}

/// A descriptor that keeps a filesystem alive which is mounted nowhere. The number of them is
/// bounded by permits.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) descriptor: OwnedFd,
    pub(super) permit: OwnedSemaphorePermit,
}

/// Those whose teardown has not begun yet, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct TeardownQueue {
    waiting: Mutex<VecDeque<(Instant, Teardown)>>,
    added: Notify,
}

impl TeardownQueue {
    /// Adds one. Its time is not before those of earlier ones.
    pub(super) fn add(&self, left: Teardown, not_before: Instant) {
        self.waiting.lock().push_back((not_before, left));
        self.added.notify_one();
    }

    /// Waits until the time of some has come, and takes them. For one task only.
    pub(super) async fn ripe(&self) -> Vec<Teardown> {
        loop {
            let first = self.waiting.lock().front().map(|(at, _)| *at);
            match first {
                None => self.added.notified().await,
                Some(at) if at > Instant::now() => tokio::time::sleep_until(at.into()).await,
                Some(_) => return self.take_until(Instant::now()),
            }
        }
    }

    fn take_until(&self, now: Instant) -> Vec<Teardown> {
        let mut waiting = self.waiting.lock();
        let ripe = waiting.iter().take_while(|(at, _)| *at <= now).count();
        waiting.drain(..ripe).map(|(_, left)| left).collect()
    }

    /// Takes all, whatever their time.
    pub(super) fn take_all(&self) -> Vec<Teardown> {
        let all = std::mem::take(&mut *self.waiting.lock());
        all.into_iter().map(|(_, left)| left).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn left(id: u128) -> Teardown {
        Teardown {
            key: LayerId::from_bits(id),
            pin: None,
        }
    }

    fn ids(all: &[Teardown]) -> Vec<u128> {
        all.iter().map(|left| left.key.bits()).collect()
    }

    #[tokio::test]
    async fn none_is_taken_before_its_moment_and_none_is_forgotten() {
        let queue = TeardownQueue::default();
        let now = Instant::now();
        let later = now + Duration::from_secs(3600);
        for (id, at) in [(1, now), (2, now), (3, later), (4, later)] {
            queue.add(left(id), at);
        }
        assert_eq!(ids(&queue.ripe().await), [1, 2]);
        {
            let waits = queue.ripe();
            tokio::pin!(waits);
            assert!(futures_util::poll!(&mut waits).is_pending());
        }
        assert_eq!(ids(&queue.take_until(later)), [3, 4]);
        queue.add(left(5), later);
        assert_eq!(ids(&queue.take_all()), [5]);
        assert_eq!(ids(&queue.take_all()), [0; 0]);
    }

    #[tokio::test]
    async fn one_that_comes_wakes_the_task_that_waits() {
        let queue = TeardownQueue::default();
        let waits = queue.ripe();
        tokio::pin!(waits);
        assert!(futures_util::poll!(&mut waits).is_pending());
        queue.add(left(1), Instant::now());
        assert_eq!(ids(&waits.await), [1]);
    }
}
