//! Limits the size of the maps in a request: the sum of all keys and values.
//! The parsers of the requests check the content.

use std::collections::BTreeMap;

use super::Invalid;

/// The limit of the CSI specification for a map of strings ("Size Limits").
const LIMIT: usize = 4 << 10;

/// A wider limit for maps that Kubernetes fills. Kubelet adds the tokens of the pod's service
/// account to `volume_context` or `secrets`, 1 to 2 KiB per audience in `tokenRequests`. `secrets`
/// holds a whole Secret. The driver reads neither; it only limits the memory that they take.
const WIDE: usize = 64 << 10;

/// Refuses maps that are too large, and names the field. Calls that remove something are not
/// checked: they read no map, and a refusal would keep the object for ever.
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
