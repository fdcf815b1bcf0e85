//! Whether the link to a peer is fast, so that compression would only cost time. Decided without
//! I/O and without a clock: the caller measures.

use std::time::Duration;

/// More bytes in a second than a link of 1 Gb/s carries.
const FAST: u64 = 128 << 20;
/// The bytes of a sample. A connection's buffers may absorb half of the first one, so one sample
/// may show up to twice the speed of the link.
const SAMPLE: u64 = 8 << 20;

/// The speed of what is sent.
#[derive(Debug, Default)]
pub(super) struct Speed {
    /// When the sample began, as time since the stream began, and its bytes.
    since: Duration,
    bytes: u64,
    is_fast: bool,
}

impl Speed {
    /// Notes bytes that were sent, after compression. `now`: the time since the stream began.
    pub(super) fn went(&mut self, bytes: u64, now: Duration) {
        self.bytes += bytes;
        if self.bytes >= SAMPLE {
            let took = now.saturating_sub(self.since);
            *self = Self {
                since: now,
                bytes: 0,
                is_fast: u128::from(FAST) * took.as_micros() <= u128::from(self.bytes) * 1_000_000,
            };
        }
    }

    /// Whether the link is a fast one. If it has time left, the other side or its disk is slower.
    /// Then compressing would take processors' time, and the content would come no sooner.
    pub(super) fn is_fast(&self) -> bool {
        self.is_fast
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_link_is_fast_while_it_carries_more_than_a_gigabit() {
        let (mut speed, mut now) = (Speed::default(), Duration::ZERO);
        let mut went = |rate: f64| {
            for _ in 0..SAMPLE / (256 << 10) {
                now += seconds(f64::from(256 << 10) / rate);
                speed.went(256 << 10, now);
            }
            speed.is_fast()
        };
        assert!(!went(1e8) && went(4e8) && went(1e9) && !went(1e8) && went(2e8));
        let mut new = Speed::default();
        new.went(SAMPLE - 1, Duration::ZERO);
        assert!(!new.is_fast(), "it is not known yet");
    }
}
