//! The limit on the bandwidth of uploads, or of content for peers. Each part waits until the parts
//! before it would have been sent at that rate.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::context::Context;

/// A rate in bytes per second.
#[derive(Debug)]
pub struct Pace {
    rate: Option<NonZeroU64>,
    /// When what was allowed so far is sent.
    free: Mutex<Instant>,
}

impl Pace {
    /// No rate: no limit.
    #[must_use]
    pub fn new(rate: Option<NonZeroU64>) -> Self {
        let free = Mutex::new(Instant::now());
        Self { rate, free }
    }

    /// Whether there is a rate.
    #[must_use]
    pub fn has_limit(&self) -> bool {
        self.rate.is_some()
    }

    /// How long a part of so many bytes waits at this moment.
    pub fn take(&self, bytes: usize, now: Instant) -> Duration {
        let Some(rate) = self.rate else {
            return Duration::ZERO;
        };
        let nanos = bytes as u128 * 1_000_000_000 / u128::from(rate.get());
        let lasts = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut free = self.free.lock();
        let starts = (*free).max(now);
        *free = starts + lasts;
        starts.duration_since(now)
    }

    /// Waits until a part may be sent, or everything stops.
    pub(super) fn wait(&self, bytes: usize, context: &Context) {
        let pause = self.take(bytes, Instant::now());
        if !pause.is_zero() {
            // If everything stops, the upload itself sees that.
            let _stopped = context.sleep(pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_wait_for_those_before_them_and_unused_time_is_not_saved() {
        let pace = Pace::new(NonZeroU64::new(1000));
        let now = Instant::now();
        let at = |millis| now + Duration::from_millis(millis);
        assert_eq!(pace.take(500, at(0)), Duration::ZERO);
        assert_eq!(pace.take(500, at(0)), Duration::from_millis(500));
        assert_eq!(pace.take(1000, at(0)), Duration::from_millis(1000));
        assert_eq!(pace.take(1000, at(9000)), Duration::ZERO);
        assert_eq!(pace.take(1000, at(9000)), Duration::from_millis(1000));
        assert_eq!(Pace::new(None).take(1 << 30, now), Duration::ZERO);
    }
}
