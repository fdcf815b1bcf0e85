//! The engine's clock: wall time that never repeats and never goes back while the process runs.
//!
//! These times decide which writer was first and which was last, also across restarts. So the clock
//! starts no earlier than any recorded time. In a cluster they are the controller's time: this
//! machine's clock plus a measured offset.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::SystemTime;

use crate::model::Timestamp;

/// A clock of milliseconds, each given once.
#[derive(Debug, Default)]
pub(super) struct Clock {
    last: AtomicU64,
    /// Milliseconds by which the cluster's time is ahead of this machine's.
    offset: AtomicI64,
}

impl Clock {
    /// Now; later than every time given or seen before.
    pub(super) fn now(&self) -> Timestamp {
        let wall = self.wall();
        let next = |last: u64| Some(wall.max(last + 1));
        let last = self
            .last
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        Timestamp(wall.max(last.unwrap_or_default() + 1))
    }

    /// Makes the clock start after a time that is remembered.
    pub(super) fn seen(&self, time: Timestamp) {
        // A time far in the future was written by a wrong clock. Following it would stop this clock
        // for good.
        const FAR_MS: u64 = 24 * 60 * 60 * 1000;
        if time.0 < self.wall().saturating_add(FAR_MS) {
            self.last.fetch_max(time.0, Ordering::SeqCst);
        }
    }

    /// Follows the cluster's time from now on. It still never goes back.
    pub(super) fn set_offset(&self, milliseconds: i64) {
        self.offset.store(milliseconds, Ordering::SeqCst);
    }

    /// The cluster's time now, whatever was given or seen before.
    pub(super) fn time(&self) -> Timestamp {
        Timestamp(self.wall())
    }

    fn wall(&self) -> u64 {
        wall().saturating_add_signed(self.offset.load(Ordering::SeqCst))
    }
}

/// Seconds since the boot, suspended ones too. This clock cannot be set: for how long something of
/// this boot lasts, over restarts.
pub(super) fn uptime() -> u64 {
    u64::try_from(rustix::system::sysinfo().uptime).unwrap_or_default()
}

fn wall() -> u64 {
    Timestamp::from(SystemTime::now()).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_given_once_and_after_all_that_was_seen() {
        let clock = Clock::default();
        let first = clock.now();
        let ahead = Timestamp(first.0 + 10_000);
        clock.seen(ahead);
        let times: Vec<Timestamp> = (0..100).map(|_| clock.now()).collect();
        assert!(times[0] > ahead && times.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn the_clusters_time_is_followed_and_never_back() {
        const TEN_MINUTES_MS: i64 = 600_000;
        let clock = Clock::default();
        let first = clock.now();
        clock.set_offset(TEN_MINUTES_MS);
        let ahead = clock.now();
        assert!(ahead.since(first).as_millis() >= 600_000);
        clock.set_offset(-TEN_MINUTES_MS);
        assert_eq!(clock.now(), Timestamp(ahead.0 + 1));
    }
}
