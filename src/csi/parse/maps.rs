//! How large the maps of a request may be: keys and values in all, whatever they are.
//! What may stand in them is judged where they are used.

use std::collections::BTreeMap;

use super::Invalid;

/// As the CSI specification has it ("Size Limits"): 4 KiB for a map of strings.
const LIMIT: usize = 4 << 10;

/// For what Kubernetes fills without regard to that. Kubelet adds the tokens of the pod's service account to `volume_context`, or to the
/// `secrets` if the CSIDriver object asks for that: 1 to 2 KiB for each audience of its `tokenRequests`. And `secrets` is all of a
/// Secret. A pod must not fail for what the driver does not even read, only be kept from having it hold what it likes.
const WIDE: usize = 64 << 10;

/// Refuses maps that are too large, each by the name of its field. Calls that take something away are not asked: they read none, and what
/// they are refused stays for ever.
pub(in crate::csi) fn bounded(
    maps: &[(&'static str, &BTreeMap<String, String>)],
) -> Result<(), Invalid> {
    for (field, map) in maps.iter().copied() {
        let limit = match field {
            "volume_context" | "secrets" => WIDE,
            _ => LIMIT,
        };
        let entries = map.iter().map(|(key, value)| key.len() + value.len());
        let bytes = entries.sum();
        if bytes > limit {
            return Err(Invalid::TooLarge {
                field,
                bytes,
                limit,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_count_in_all_and_none_is_told() {
        for (field, limit) in [
            ("parameters", LIMIT),
            ("mutable_parameters", LIMIT),
            ("publish_context", LIMIT),
            ("volume_context", WIDE),
            ("secrets", WIDE),
        ] {
            let half = "hunter2".repeat(limit)[..limit / 2].to_owned();
            let mut map = BTreeMap::from([(half.clone(), half)]);
            assert_eq!(
                bounded(&[("other", &BTreeMap::new()), (field, &map)]),
                Ok(())
            );
            map.insert("a".to_owned(), String::new());
            let error = bounded(&[(field, &map)]).expect_err(field).to_string();
            let expected = format!(
                "{field} has {} bytes in all, and at most {limit} are taken",
                limit + 1
            );
            assert_eq!(error, expected);
        }
    }
}
