//! The pauses between attempts to reach another process: exponential, with jitter. Clients of the
//! API server and of the controller use it.

use std::time::{Duration, Instant};

use crate::sys;

/// Exponential back-off with jitter, so that the nodes of a cluster do not retry all at once.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    last_failure: Option<Instant>,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            next: Self::FIRST,
            last_failure: None,
        }
    }
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(250);
    const LAST: Duration = Duration::from_secs(15);
    /// After this time without a failure the back-off starts at the beginning.
    const FORGOTTEN: Duration = Duration::from_secs(60);

    /// The wait after a failure. A success does not reset it: a watch whose list succeeds but whose
    /// start is refused would never slow down.
    pub fn after_failure(&mut self, now: Instant) -> Duration {
        let last = self.last_failure.replace(now);
        if last.is_some_and(|last| now - last > Self::FORGOTTEN) {
            self.next = Self::FIRST;
        }
        let wait = self.next;
        self.next = (wait * 2).min(Self::LAST);
        wait.mul_f64(0.5 + spread())
    }

    /// Whether the next wait is the longest one.
    #[must_use]
    pub fn is_longest(&self) -> bool {
        self.next == Self::LAST
    }
}

/// A random number from 0 to below 1.
fn spread() -> f64 {
    let [byte] = sys::random_bytes();
    f64::from(byte) / 256.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_to_its_last_and_starts_over_after_a_good_while() {
        let mut backoff = Backoff::default();
        let now = Instant::now();
        for at in 0..10 {
            let wait = backoff.after_failure(now);
            let middle = (Backoff::FIRST * (1 << at)).min(Backoff::LAST);
            assert!(
                wait >= middle / 2 && wait < middle * 3 / 2,
                "{at}: {wait:?}"
            );
        }
        let later = now + Backoff::FORGOTTEN + Duration::from_secs(1);
        assert!(backoff.after_failure(later) < Backoff::FIRST * 2);
    }
}
