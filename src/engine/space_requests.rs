//! Calls that found no space and wait for some, and whether a cycle of garbage collection is due as
//! soon as space comes free. `reap` decides how space is made.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Requests for space since the last cycle.
#[derive(Debug)]
pub(super) struct SpaceRequests {
    /// How many bytes each call needs at once; 0: a few blocks, or an unknown number.
    asked: Mutex<Vec<u64>>,
    short: AtomicBool,
}

impl Default for SpaceRequests {
    /// What an earlier process left waiting is looked at first.
    fn default() -> Self {
        Self {
            asked: Mutex::default(),
            short: AtomicBool::new(true),
        }
    }
}

impl SpaceRequests {
    /// A call found no space for so many bytes.
    pub(super) fn ask(&self, bytes: u64) {
        self.asked.lock().push(bytes);
        self.set_short(true);
    }

    /// Whether a call waits.
    pub(super) fn is_asked(&self) -> bool {
        !self.asked.lock().is_empty()
    }

    /// The needs of all waiting calls. From here on they count as handled.
    pub(super) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.asked.lock())
    }

    /// Whether something waits for space, or may: then a cycle runs whenever some comes free.
    pub(super) fn is_short(&self) -> bool {
        self.short.load(Ordering::SeqCst)
    }

    pub(super) fn set_short(&self, short: bool) {
        self.short.store(short, Ordering::SeqCst);
    }
}
