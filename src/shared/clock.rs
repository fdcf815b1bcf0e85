//! This machine's clocks: the wall clock, and durations that the protocol limits. `decide` has the
//! limits. A machine may be suspended meanwhile.

use std::time::{Duration, Instant, SystemTime};

use crate::model::Timestamp;

/// The wall clock.
#[must_use]
pub fn now() -> Timestamp {
    SystemTime::now().into()
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
