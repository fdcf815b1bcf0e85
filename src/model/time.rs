//! Points in time in whole milliseconds, and ages as people read them.
//! No clock: the caller passes the current time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Milliseconds since the Unix epoch. Wall-clock time: for ages and order, never for exact
/// intervals.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

/// What this machine's clock shows; the epoch if it is before it.
impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}

impl Timestamp {
    /// The time after this duration.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)),
        )
    }

    /// The time before this duration.
    #[must_use]
    pub fn before(self, duration: Duration) -> Self {
        Self(
            self.0
                .saturating_sub(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)),
        )
    }

    /// The time for RFC 3339, which ends with the year 9999: a wrong clock breaks no text.
    #[must_use]
    pub fn calendar(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.0.min(253_402_300_799_000))
    }

    /// The duration since `earlier`; zero if the clock was set back.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// A duration as kubectl shows ages: two units where the second matters.
#[must_use]
pub fn readable_age(duration: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    const YEAR: u64 = 365 * DAY;
    let seconds = duration.as_secs();
    let two = |large: u64, large_name: char, small: u64, small_name: char| {
        let (whole, rest) = (seconds / large, seconds % large / small);
        if rest == 0 {
            format!("{whole}{large_name}")
        } else {
            format!("{whole}{large_name}{rest}{small_name}")
        }
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 => two(MINUTE, 'm', 1, 's'),
        600..10_800 => format!("{}m", seconds / MINUTE),
        10_800..28_800 => two(HOUR, 'h', MINUTE, 'm'),
        28_800..172_800 => format!("{}h", seconds / HOUR),
        172_800..691_200 => two(DAY, 'd', HOUR, 'h'),
        691_200..63_072_000 => format!("{}d", seconds / DAY),
        63_072_000..252_288_000 => two(YEAR, 'y', DAY, 'd'),
        _ => format!("{}y", seconds / YEAR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_after_the_year_9999_is_the_last_one_of_rfc_3339() {
        let text =
            |at: u64| humantime::format_rfc3339_seconds(Timestamp(at).calendar()).to_string();
        assert_eq!(text(1_000), "1970-01-01T00:00:01Z");
        assert_eq!(text(u64::MAX), "9999-12-31T23:59:59Z");
    }

    #[test]
    fn ages_are_kubectls() {
        for (seconds, expected) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (190, "3m10s"),
            (3 * 3600 - 1, "179m"),
            (3 * 3600, "3h"),
            (3 * 3600 + 61, "3h1m"),
            (8 * 3600, "8h"),
            (47 * 3600, "47h"),
            (49 * 3600, "2d1h"),
            (8 * 86400, "8d"),
            (729 * 86400, "729d"),
            (731 * 86400, "2y1d"),
            (9 * 365 * 86400, "9y"),
        ] {
            assert_eq!(
                readable_age(Duration::from_secs(seconds)),
                expected,
                "{seconds}"
            );
        }
    }
}
