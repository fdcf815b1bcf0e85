//! Whether a source of content sends fast enough. Decided without I/O and without a clock: the
//! caller measures.

use std::time::Duration;

/// In so much waiting a source must send at least so much.
const SPAN: Duration = Duration::from_secs(5);

/// The flow of one stream.
#[derive(Debug)]
pub struct Flow {
    least: u64,
    /// Time and bytes since the span began. Time in which the receiver was busy does not count.
    waited: Duration,
    bytes: u64,
}

impl Flow {
    /// A stream that must bring so many bytes in 5 seconds of waiting.
    #[must_use]
    pub fn new(least: u64) -> Self {
        Self {
            least,
            waited: Duration::ZERO,
            bytes: 0,
        }
    }

    /// So many bytes came after so much waiting.
    ///
    /// # Errors
    ///
    /// The source is too slow. The error tells its bytes and time, for a message.
    pub fn came(&mut self, bytes: u64, waited: Duration) -> Result<(), String> {
        self.bytes += bytes;
        self.waited += waited;
        if self.bytes >= self.least {
            *self = Self::new(self.least);
        } else if self.waited >= SPAN {
            let (bytes, seconds) = (self.bytes, self.waited.as_secs());
            return Err(format!("it sent only {bytes} bytes in {seconds} s"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: u64 = 32 << 10;

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
            let mut flow = Flow::new(LEAST);
            let late = (1..=10_000).find(|_| flow.came(bytes, seconds(pause)).is_err());
            assert_eq!(late, limit, "{bytes} bytes each {pause} s");
        }
    }

    #[test]
    fn what_came_fast_before_is_no_credit() {
        let mut flow = Flow::new(LEAST);
        flow.came(1 << 30, seconds(0.1)).expect("it is fast");
        for _ in 0..4 {
            flow.came(1, seconds(1.0)).expect("the span is not over");
        }
        let late = flow.came(1, seconds(1.0)).expect_err("it trickles");
        assert_eq!(late, "it sent only 5 bytes in 5 s");
    }
}
