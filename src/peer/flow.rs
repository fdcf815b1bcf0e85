//! Whether a peer that sends is fast enough. Decided without I/O and without a clock: the caller
//! measures.

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
}
