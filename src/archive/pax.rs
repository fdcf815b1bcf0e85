//! The records of pax extended headers: `LENGTH KEY=VALUE\n`, written and read. A value is any
//! bytes, newlines too, so the length alone says where it ends. The keys are not interpreted here.

/// Appends a record to a header's content.
pub(super) fn push(into: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // A space, an equals sign and a newline; the length counts itself.
    let rest = key.len() + value.len() + 3;
    let mut length = rest + digits(rest);
    if digits(length) > digits(rest) {
        length += 1;
    }
    into.extend_from_slice(length.to_string().as_bytes());
    into.push(b' ');
    into.extend_from_slice(key);
    into.push(b'=');
    into.extend_from_slice(value);
    into.push(b'\n');
}

fn digits(number: usize) -> usize {
    let above_first = number.checked_ilog10().unwrap_or(0);
    usize::try_from(above_first).expect("at most 19") + 1
}

/// Seconds and nanoseconds as pax has them: `-1.5` is half a second later than -2.
pub(super) fn time((seconds, nanoseconds): (i64, u32)) -> String {
    if nanoseconds == 0 {
        return seconds.to_string();
    }
    let (sign, whole, fraction) = if seconds < 0 {
        let whole = (seconds + 1).unsigned_abs();
        ("-", whole, 1_000_000_000 - nanoseconds)
    } else {
        ("", seconds.unsigned_abs(), nanoseconds)
    };
    let text = format!("{sign}{whole}.{fraction:09}");
    text.trim_end_matches('0').to_owned()
}

/// The reverse of [`time`]; digits beyond nanoseconds are cut off.
pub(super) fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) {
        return None;
    }
    let whole: i64 = whole.parse().ok()?;
    let fraction = &fraction[..fraction.len().min(9)];
    let nanoseconds: u32 = format!("{fraction:0<9}").parse().ok()?;
    Some(match (negative, nanoseconds) {
        (false, _) => (whole, nanoseconds),
        (true, 0) => (-whole, 0),
        (true, _) => (-whole - 1, 1_000_000_000 - nanoseconds),
    })
}

/// Decimal digits and nothing else.
pub(super) fn parse_number(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// A key and its value.
pub(super) type Record<'a> = (&'a [u8], &'a [u8]);

/// The records of a header, in order.
pub(super) fn records(mut content: &[u8]) -> Result<Vec<Record<'_>>, &'static str> {
    let mut records = Vec::new();
    while !content.is_empty() {
        let space = content.iter().take(20).position(|&byte| byte == b' ');
        let length = space.and_then(|at| parse_number(&content[..at]));
        let (Some(space), Some(length)) = (space, length) else {
            return Err("a pax record does not begin with its length");
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > content.len() || length < space + 2 || content[length - 1] != b'\n' {
            return Err("a pax record does not have the length that it states");
        }
        let record = &content[space + 1..length - 1];
        let equals = record.iter().position(|&byte| byte == b'=');
        match equals {
            None | Some(0) => return Err("a pax record has no key"),
            Some(at) if record[..at].contains(&0) => return Err("a pax key has a NUL"),
            Some(at) => records.push((&record[..at], &record[at + 1..])),
        }
        content = &content[length..];
    }
    Ok(records)
}

/// An attribute's name as a part of a key: GNU tar's escapes for what would end it.
pub(super) fn escape(name: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(name.len());
    for &byte in name {
        match byte {
            b'%' => escaped.extend_from_slice(b"%25"),
            b'=' => escaped.extend_from_slice(b"%3D"),
            byte => escaped.push(byte),
        }
    }
    escaped
}

/// The reverse of [`escape`].
pub(super) fn unescape(name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        plain.push(match rest {
            [b'2', b'5', after @ ..] if byte == b'%' => {
                rest = after;
                b'%'
            }
            [b'3', b'D', after @ ..] if byte == b'%' => {
                rest = after;
                b'='
            }
            _ => byte,
        });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_itself_and_comes_back() {
        for length in (0..300).chain(9_900..10_100) {
            let value = vec![b'\n'; length];
            let mut content = Vec::new();
            push(&mut content, b"path", &value);
            push(&mut content, b"a", b"=");
            let records = records(&content).expect("records");
            assert_eq!(records, [(&b"path"[..], &*value), (b"a", b"=")]);
        }
    }

    #[test]
    fn times_are_written_short_and_read_exactly() {
        for (time, text) in [
            ((0, 0), "0"),
            ((1, 500_000_000), "1.5"),
            ((1, 1), "1.000000001"),
            ((-1, 0), "-1"),
            ((-2, 500_000_000), "-1.5"),
            ((-1, 999_999_999), "-0.000000001"),
            ((i64::MIN + 1, 1), "-9223372036854775806.999999999"),
        ] {
            assert_eq!(super::time(time), text);
            assert_eq!(parse_time(text.as_bytes()), Some(time), "{text}");
        }
        assert_eq!(parse_time(b"1.0000000019"), Some((1, 1)));
        for bad in ["", "-", "+1", "1.-5", "1e3", ".5", "99999999999999999999"] {
            assert_eq!(parse_time(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn what_is_no_record_is_told() {
        for bad in [
            &b"x"[..],
            b"5 a=b\n",
            b"7 a=b\n",
            b"6 a=bX",
            b"4 a\n",
            b"5 =b\n",
            b" a=b\n",
            b"-6 a=b\n",
            b"99999999999999999999999 a=b\n",
            b"2 \n",
            b"7 a\0=b\n",
        ] {
            records(bad).expect_err(&bad.escape_ascii().to_string());
        }
    }

    #[test]
    fn escapes_come_back() {
        for name in [&b"user.a=b%c"[..], b"%25", b"%3D=", b"%", b"plain"] {
            assert_eq!(unescape(&escape(name)), name);
        }
        assert_eq!(unescape(b"%3d%4"), b"%3d%4");
    }
}
