//! Numbers of bytes as text: Kubernetes quantities that are read, and sizes that people read.
//!
//! The grammar is `k8s.io/apimachinery/pkg/api/resource.Quantity`: a decimal number and one suffix
//! of `Ki Mi Gi Ti Pi Ei`, `m k M G T P E`, or an exponent. Fractions of a byte round up, as there.

/// The bytes that `text` means; `None` if it is not a quantity, is negative, or does not fit.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    // numerator / 10^fraction.len() is exact in 128 bits for all values that fit in 64.
    if whole.len() > 20 || fraction.len() > 9 {
        return None;
    }
    let numerator: u128 = format!("{whole}{fraction}").parse().ok()?;
    let mut denominator = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let multiplier: u128 = match suffix {
        "" => 1,
        "m" => {
            denominator *= 1000;
            1
        }
        "k" => 1000,
        "M" => 1000u128.pow(2),
        "G" => 1000u128.pow(3),
        "T" => 1000u128.pow(4),
        "P" => 1000u128.pow(5),
        "E" => 1000u128.pow(6),
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        "Ei" => 1 << 60,
        exponent => {
            let digits = exponent.strip_prefix(['e', 'E'])?;
            let digits = digits.strip_prefix('+').unwrap_or(digits);
            if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            10u128.pow(digits.parse().ok().filter(|power| *power <= 18)?)
        }
    };
    let bytes = numerator.checked_mul(multiplier)?.div_ceil(denominator);
    // Kubernetes stores quantities in an i64.
    u64::try_from(bytes)
        .ok()
        .filter(|bytes| i64::try_from(*bytes).is_ok())
}

/// Bytes as a quantity of two digits or more, rounded down: 154Gi. [`parse_bytes`] reads it.
#[must_use]
pub fn quantity(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let (mut value, mut unit) = (bytes, 0);
    while value >= 10 << 10 && unit + 1 < UNITS.len() {
        value >>= 10;
        unit += 1;
    }
    format!("{value}{}", UNITS[unit])
}

/// Bytes in powers of 1024, with one decimal where it matters.
#[must_use]
pub fn readable_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit = 0;
    let mut shift = 10;
    // The next unit as soon as this one would show 1000.
    while unit + 1 < UNITS.len() && (bytes >> shift) >= 1000 {
        unit += 1;
        shift += 10;
    }
    // Tenths, rounded down: never more than there is.
    let tenths = (u128::from(bytes) * 10) >> shift;
    if tenths < 100 {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    } else {
        format!("{} {}", tenths / 10, UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::{parse_bytes, readable_bytes};

    #[test]
    fn sizes_have_three_digits_at_most() {
        for (n, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (10 * 1024, "10 KiB"),
            (1000 * 1024, "0.9 MiB"),
            (12_345_678, "11 MiB"),
            (5 << 30, "5.0 GiB"),
            (u64::MAX, "15 EiB"),
        ] {
            assert_eq!(readable_bytes(n), expected, "{n}");
        }
    }

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, bytes) in [
            ("0", 0),
            ("1", 1),
            ("1k", 1000),
            ("1Ki", 1024),
            ("1.5Gi", 1_610_612_736),
            (".5Mi", 524_288),
            ("100m", 1),
            ("1500m", 2),
            ("2e3", 2000),
            ("2E", 2_000_000_000_000_000_000),
            ("1E3", 1000),
            ("7Ei", 7 << 60),
        ] {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
        }
        for bad in [
            "", ".", "-1", "+", "1K", "1KB", "1GiB", "1 Gi", "1..2", "8Ei", "1e", "1e99", "0x10",
            "١",
        ] {
            assert_eq!(parse_bytes(bad), None, "{bad}");
        }
    }
}
