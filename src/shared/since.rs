//! This machine's clocks: the wall clock, and durations that the protocol limits. `decide` has the
//! limits. A machine may be suspended meanwhile.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::model::Timestamp;

/// The wall clock.
#[must_use]
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let millis = since.map_or(0, |since| since.as_millis());
    Timestamp(u64::try_from(millis).unwrap_or(u64::MAX))
}

/// Time since something happened, also across a suspended machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Since(Instant, SystemTime);

impl Since {
    pub(super) fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    /// The longer one of both clocks: the monotonic one stands still while a machine is suspended.
    pub(super) fn elapsed(&self) -> Duration {
        self.0.elapsed().max(self.1.elapsed().unwrap_or_default())
    }
}
