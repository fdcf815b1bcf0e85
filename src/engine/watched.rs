//! A value behind a mutex, whose changes others wait for without polling.
//! The owner says when something changed that a waiter may be looking for.

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// The value, and those who wait for a change of it.
#[derive(Debug, Default)]
pub(super) struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T> Watched<T> {
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock()
    }

    /// Wakes all who wait: the value changed.
    pub(super) fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until `look` finds something. The lock is held during the look only.
    pub(super) async fn when<F>(&self, mut look: impl FnMut(&mut T) -> Option<F>) -> F {
        loop {
            // Registered before the look: a change in between is not missed.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let found = look(&mut self.value.lock());
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }
}
