//! Whether a peer that sends is fast enough, and whether a link is. Decided without I/O and without
//! a clock: the caller measures.

use std::time::Duration;

/// In so much time a peer must send at least so much, if it sends that long. A peer that sends
/// nothing at all is given up by then, too.
pub(super) const SPAN: Duration = Duration::from_secs(5);
const LEAST: u64 = 32 << 10;

/// The flow of one stream.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Time and bytes since the span began. Time in which the receiver was busy does not count.
    waited: Duration,
    bytes: u64,
}

impl Flow {
    /// So many bytes came after so much waiting. The error is what is known of a peer that is too
    /// slow: the bytes and the time.
    pub(super) fn came(&mut self, bytes: u64, waited: Duration) -> Result<(), (u64, Duration)> {
        self.bytes += bytes;
        self.waited += waited;
        if self.bytes >= LEAST {
            *self = Self::default();
        } else if self.waited >= SPAN {
            return Err((self.bytes, self.waited));
        }
        Ok(())
    }
}

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
    fn a_peer_that_trickles_is_too_slow_and_one_that_sends_large_parts_is_not() {
        for (bytes, pause, limit) in [
            // A few bytes a second.
            (16, 1.0, Some(5)),
            (1, 0.01, Some(500)),
            // Just below the least, and the least.
            ((LEAST - 1) / 5, 1.0, Some(5)),
            (LEAST / 5 + 1, 1.0, None),
            (256 << 10, 4.9, None),
        ] {
            let mut flow = Flow::default();
            let late = (1..=10_000).find(|_| flow.came(bytes, seconds(pause)).is_err());
            assert_eq!(late, limit, "{bytes} bytes each {pause} s");
        }
    }

    #[test]
    fn what_came_fast_before_is_no_credit() {
        let mut flow = Flow::default();
        flow.came(1 << 30, seconds(0.1)).expect("it is fast");
        for _ in 0..4 {
            flow.came(1, seconds(1.0)).expect("the span is not over");
        }
        let late = flow.came(1, seconds(1.0)).expect_err("it trickles");
        assert_eq!(late, (5, seconds(5.0)));
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
