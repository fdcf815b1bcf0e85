//! Numbers as people read them: ages, sizes, and names that are safe to print.
//! Programs get the exact values (`-o json`).

use std::time::Duration;

pub(super) use crate::model::readable_bytes as bytes;

/// A duration as kubectl shows ages: two units where the second matters.
pub(super) fn age(duration: Duration) -> String {
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

/// How long something took: with tenths where a second is much.
pub(super) fn took(duration: Duration) -> String {
    let tenths = duration.as_millis() / 100;
    if tenths < 100 {
        return format!("{}.{}s", tenths / 10, tenths % 10);
    }
    age(duration)
}

/// A number of things: `1 file`, `2 files`.
pub(super) fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// At most `width` characters of a text; the end is what is left out.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(age(Duration::from_secs(seconds)), expected, "{seconds}");
        }
    }

    #[test]
    fn short_times_have_tenths() {
        for (millis, expected) in [(0, "0.0s"), (940, "0.9s"), (9_999, "9.9s"), (10_000, "10s")] {
            assert_eq!(took(Duration::from_millis(millis)), expected, "{millis}");
        }
    }

    #[test]
    fn what_is_long_loses_its_end() {
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!(cut("äöüß", 4), "äöüß");
    }
}
