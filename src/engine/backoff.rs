//! Back-off: how long to wait before an operation that failed is tried again, and which objects are
//! skipped until then ([`Backoff`]).
//!
//! A costly operation that always fails must not run in every round of the collector: a round that
//! fails makes the next one come soon. A back-off is in memory only, so the next start tries
//! everything. The caller decides what a failure means.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::error::Error;

/// How often a held volume is checked when no event reports that it was released.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How long to wait before a step that failed is tried again: doubled each time, up to the last.
pub(super) const RETRY: [Duration; 6] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
];

/// Space may come free at any moment, and nothing tells the driver.
const RETRY_WHEN_FULL: Duration = Duration::from_secs(5);

pub(super) fn retry_after(attempt: usize, error: &Error) -> Duration {
    let retry = RETRY[attempt.min(RETRY.len() - 1)];
    match error {
        Error::Full(_) => retry.min(RETRY_WHEN_FULL),
        _ => retry,
    }
}

/// How long to wait before the next look.
pub(super) fn look_again(looks: usize) -> Duration {
    Duration::from_millis(1 << looks.min(16)).min(LOOK_AGAIN)
}

/// The objects at which something failed, each with its pause.
#[derive(Debug)]
pub(super) struct Backoff<K>(Mutex<HashMap<K, Failures>>);

/// The failures of one object.
#[derive(Debug)]
struct Failures {
    count: u32,
    /// When it is tried again.
    again: Instant,
}

impl<K> Default for Backoff<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone> Backoff<K> {
    const FIRST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(60 * 60);

    /// The objects that are not tried again now. Those that are gone are forgotten.
    pub(super) fn waiting(&self, is_there: impl Fn(&K) -> bool) -> HashSet<K> {
        let mut failed = self.0.lock();
        failed.retain(|what, _| is_there(what));
        let now = Instant::now();
        let waiting = failed.iter().filter(|(_, one)| one.again > now);
        waiting.map(|(what, _)| what.clone()).collect()
    }

    /// Whether it is not tried again now.
    pub(super) fn is_waiting(&self, what: &K) -> bool {
        let failed = self.0.lock();
        failed
            .get(what)
            .is_some_and(|one| one.again > Instant::now())
    }

    /// Whether it failed the last time, be it to be tried again now or not.
    pub(super) fn has(&self, what: &K) -> bool {
        self.0.lock().contains_key(what)
    }

    /// It failed: for how long it is left alone.
    pub(super) fn put_off(&self, what: &K) -> Duration {
        let mut failed = self.0.lock();
        let one = failed.entry(what.clone()).or_insert(Failures {
            count: 0,
            again: Instant::now(),
        });
        let pause = Self::FIRST.saturating_mul(4_u32.saturating_pow(one.count));
        let pause = pause.min(Self::LONGEST);
        one.count += 1;
        one.again = Instant::now() + pause;
        pause
    }

    /// It went well.
    pub(super) fn forget(&self, what: &K) {
        self.0.lock().remove(what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_tried_ever_more_seldom_and_forgotten_when_it_is_gone() {
        let failed = Backoff::default();
        let there = |what: &i32| [1, 2, 3].contains(what);
        assert!(failed.waiting(there).is_empty());
        let pauses: Vec<u64> = (0..8).map(|_| failed.put_off(&1).as_secs()).collect();
        assert_eq!(pauses, [1, 4, 16, 64, 256, 1024, 3600, 3600]);
        assert!(failed.has(&1) && !failed.has(&2));
        assert!(failed.is_waiting(&1) && !failed.is_waiting(&2));
        failed.put_off(&2);
        assert_eq!(failed.waiting(there), HashSet::from([1, 2]));
        assert_eq!(failed.waiting(|what| *what == 2), HashSet::from([2]));
        assert!(!failed.has(&1), "it was gone");
        failed.forget(&2);
        assert!(failed.waiting(there).is_empty());
    }
}
