//! Numbers as people read them: ages, sizes, and names that are safe to print.
//! Programs get the exact values (`-o json`).

use std::time::Duration;

pub(super) use crate::model::{readable_age as age, readable_bytes as bytes};

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
