//! The engine's clock: time that never repeats and never goes back while the process runs.
//!
//! These times decide which writer was first and which was last, also across restarts. So the clock
//! starts no earlier than any recorded time.
//!
//! The time is that of the boot plus the uptime (`CLOCK_BOOTTIME`), which cannot be set. So a step
//! of the wall clock dates no content and ends no time to live. Slow corrections by NTP change the
//! rate of both clocks (clock_gettime(2)). In a cluster, each answer of the controller sets the
//! time. Without one, the wall clock sets it once: at the start, but not before NTP has had time to
//! correct the clock of a machine that has just booted. A wall clock that is far from the
//! controller's time sets nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

use crate::model::Timestamp;

/// A recorded time that is so far ahead is of a wrong clock. Following it would stop this clock for
/// as long.
pub(super) const FAR: Duration = Duration::from_secs(24 * 60 * 60);

/// A clock of milliseconds, each given once.
#[derive(Debug, Default)]
pub(super) struct Clock {
    last: AtomicU64,
    base: Mutex<Base>,
}

/// What the time counts from.
#[derive(Debug, Default)]
struct Base {
    /// The time of the boot, once it is known.
    booted: Option<Timestamp>,
    /// Whether the controller's time says so, not the wall clock.
    is_told: bool,
    /// The uptime from which the wall clock is right.
    settles: Duration,
}

impl Clock {
    /// A clock for a machine whose wall clock is right from this uptime on.
    pub(super) fn new(settles: Duration) -> Self {
        let base = Base {
            settles,
            ..Base::default()
        };
        Self {
            base: Mutex::new(base),
            ..Self::default()
        }
    }

    /// Now; later than every time given or seen before.
    pub(super) fn now(&self) -> Timestamp {
        let time = self.time().0;
        let next = |last: u64| Some(time.max(last + 1));
        let last = self
            .last
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        Timestamp(time.max(last.unwrap_or_default() + 1))
    }

    /// Makes the clock start after a time that is remembered.
    pub(super) fn seen(&self, time: Timestamp) {
        if time < self.time().after(FAR) {
            self.last.fetch_max(time.0, Ordering::SeqCst);
        }
    }

    /// Follows the cluster's time from now on. [`Clock::now`] still never goes back.
    pub(super) fn set(&self, time: Timestamp) {
        let mut base = self.base.lock();
        base.booted = Some(time.before(uptime()));
        base.is_told = true;
    }

    /// The wall clock is far from the cluster's time, and one of them is wrong. So nothing expires
    /// until the cluster's time is [`Clock::set`], unless it was before.
    pub(super) fn doubt(&self) {
        let mut base = self.base.lock();
        if !base.is_told {
            base.booted = None;
            base.settles = Duration::MAX;
        }
    }

    /// The time now, whatever was given or seen before.
    pub(super) fn time(&self) -> Timestamp {
        let wall = wall();
        self.settled_at(wall, uptime()).unwrap_or(wall)
    }

    /// The time by which content expires. `None` until the wall clock is right, or the cluster's
    /// time is known.
    pub(super) fn settled(&self) -> Option<Timestamp> {
        self.settled_at(wall(), uptime())
    }

    /// The same, given this machine's clocks.
    fn settled_at(&self, wall: Timestamp, uptime: Duration) -> Option<Timestamp> {
        let mut base = self.base.lock();
        if base.booted.is_none() && uptime >= base.settles {
            base.booted = Some(wall.before(uptime));
        }
        base.booted.map(|booted| booted.after(uptime))
    }
}

/// The time since the boot, while suspended too. This clock cannot be set: for how long something
/// of this boot lasts, over restarts.
pub(super) fn uptime() -> Duration {
    let uptime = clock_gettime(ClockId::Boottime);
    uptime.try_into().unwrap_or_default()
}

fn wall() -> Timestamp {
    SystemTime::now().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Timestamp = Timestamp(1_795_400_000_000);
    const MINUTE: Duration = Duration::from_secs(60);
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

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
        let clock = Clock::default();
        let first = clock.now();
        clock.set(first.after(10 * MINUTE));
        let ahead = clock.now();
        assert!(ahead.since(first) >= 10 * MINUTE);
        clock.set(first);
        assert_eq!(clock.now(), Timestamp(ahead.0 + 1));
    }

    #[test]
    fn a_step_of_the_wall_clock_does_not_move_the_time() {
        let clock = Clock::default();
        let walls = [T, T.after(DAY), T.before(DAY), T.after(3 * MINUTE)];
        for (minutes, wall) in (0..).zip(walls) {
            let time = clock.settled_at(wall, DAY + minutes * MINUTE);
            assert_eq!(time, Some(T.after(minutes * MINUTE)));
        }
    }

    #[test]
    fn a_wall_clock_in_doubt_ends_nothing_until_the_clusters_time_is_told() {
        let clock = Clock::default();
        assert_eq!(clock.settled_at(T, DAY), Some(T));
        clock.doubt();
        assert_eq!(clock.settled_at(T, 2 * DAY), None);
        clock.set(T);
        clock.doubt();
        assert!(
            clock.settled().is_some(),
            "the controller has told the time"
        );
    }

    #[test]
    fn after_a_boot_the_wall_clock_is_followed_until_it_is_right() {
        let clock = Clock::new(10 * MINUTE);
        assert_eq!(clock.settled_at(T.after(DAY), MINUTE), None);
        assert_eq!(clock.settled_at(T, 9 * MINUTE), None);
        assert_eq!(clock.settled_at(T, 10 * MINUTE), Some(T));
        let later = clock.settled_at(T.after(DAY), 11 * MINUTE);
        assert_eq!(later, Some(T.after(MINUTE)));

        // A controller knows the time sooner.
        let clock = Clock::new(Duration::MAX);
        assert_eq!(clock.settled(), None);
        clock.set(T);
        let since = clock.settled().map(|time| time.since(T));
        assert!(since.is_some_and(|since| since < DAY), "{since:?}");
    }
}
