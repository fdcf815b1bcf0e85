//! Back-off: how long to wait before an operation that failed is tried again, and which objects are
//! skipped until then ([`Setbacks`]).
//!
//! A costly operation that always fails must not run in every round of the collector: a round that
//! fails makes the next one come soon. Setbacks are in memory only, so the next start tries
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

/// Things at which something failed.
#[derive(Debug)]
pub(super) struct Setbacks<K>(Mutex<HashMap<K, Setback>>);

/// What is known of one of them.
#[derive(Debug)]
struct Setback {
    failures: u32,
    /// When it is tried again.
    again: Instant,
}

impl<K> Default for Setbacks<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone> Setbacks<K> {
    const FIRST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(60 * 60);

    /// The setbacks that are not retried now. Those of things that are gone are forgotten.
    pub(super) fn waiting(&self, is_there: impl Fn(&K) -> bool) -> HashSet<K> {
        let mut setbacks = self.0.lock();
        setbacks.retain(|what, _| is_there(what));
        let now = Instant::now();
        let waiting = setbacks.iter().filter(|(_, setback)| setback.again > now);
        waiting.map(|(what, _)| what.clone()).collect()
    }

    /// Whether it failed the last time, be it to be tried again now or not.
    pub(super) fn has(&self, what: &K) -> bool {
        self.0.lock().contains_key(what)
    }

    /// It failed: for how long it is left alone.
    pub(super) fn put_off(&self, what: &K) -> Duration {
        let mut setbacks = self.0.lock();
        let setback = setbacks.entry(what.clone()).or_insert(Setback {
            failures: 0,
            again: Instant::now(),
        });
        let pause = Self::FIRST.saturating_mul(4_u32.saturating_pow(setback.failures));
        let pause = pause.min(Self::LONGEST);
        setback.failures += 1;
        setback.again = Instant::now() + pause;
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
        let setbacks = Setbacks::default();
        let there = |what: &i32| [1, 2, 3].contains(what);
        assert!(setbacks.waiting(there).is_empty());
        let pauses: Vec<u64> = (0..8).map(|_| setbacks.put_off(&1).as_secs()).collect();
        assert_eq!(pauses, [1, 4, 16, 64, 256, 1024, 3600, 3600]);
        assert!(setbacks.has(&1) && !setbacks.has(&2));
        setbacks.put_off(&2);
        assert_eq!(setbacks.waiting(there), HashSet::from([1, 2]));
        assert_eq!(setbacks.waiting(|what| *what == 2), HashSet::from([2]));
        assert!(!setbacks.has(&1), "it was gone");
        setbacks.forget(&2);
        assert!(setbacks.waiting(there).is_empty());
    }
}
