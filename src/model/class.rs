//! Parses the parameters of a StorageClass and a VolumeAttributesClass into typed values, strictly.
//!
//! Immutable parameters (`parameters`) and changeable ones (`mutable_parameters`) have separate
//! tables. If a parameter is in the wrong class, the error names the right one.

use std::collections::BTreeMap;
use std::fmt;

use super::attributes::{
    AttributeError, list, parse_root, parse_size_limit, parse_ttl, quote, unknown,
};
use super::persistent_volume::{ClaimParameters, LiveClone, MutableChange, Ttl};

/// An invalid parameter of a class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{table} {parameter:?} {problem}")]
pub struct ParameterError {
    /// The table's name in messages.
    pub table: &'static str,
    /// Its name.
    pub parameter: String,
    /// The problem and the valid values. Continues the sentence.
    pub problem: String,
}

const FIXED: &str = "parameter";
const MUTABLE: &str = "mutable parameter";

/// The parameters of a StorageClass.
const FIXED_NAMES: &[&str] = &["uid", "gid", "mode", "liveClone", "cloneElsewhere"];
/// The parameters of a VolumeAttributesClass.
const MUTABLE_NAMES: &[&str] = &["sizeLimit", "ttl"];

impl ClaimParameters {
    /// Parses a StorageClass's parameters. The caller removes the sidecars' keys first.
    pub fn parse(parameters: &BTreeMap<String, String>) -> Result<Self, ParameterError> {
        known(FIXED, FIXED_NAMES, MUTABLE_NAMES, parameters)?;
        let wrong = |error| of_attribute(FIXED, error);
        Ok(Self {
            root: parse_root(parameters).map_err(wrong)?,
            live_clone: match parameters.get("liveClone").map(String::as_str) {
                None | Some("refuse") => LiveClone::Refuse,
                Some("copy") => LiveClone::Copy,
                Some(other) => {
                    let problem = format_args!("is {}; allowed are refuse, copy", quote(other));
                    return Err(error(FIXED, "liveClone", problem));
                }
            },
            clone_elsewhere: match parameters.get("cloneElsewhere").map(String::as_str) {
                None | Some("false") => false,
                Some("true") => true,
                Some(other) => {
                    let problem = format_args!("is {}; allowed are true, false", quote(other));
                    return Err(error(FIXED, "cloneElsewhere", problem));
                }
            },
        })
    }
}

impl MutableChange {
    /// Parses a VolumeAttributesClass's parameters. An absent one has its default in a new claim
    /// and keeps its value in an existing one ([`MutableChange::over`]).
    pub fn parse(parameters: &BTreeMap<String, String>) -> Result<Self, ParameterError> {
        known(MUTABLE, MUTABLE_NAMES, FIXED_NAMES, parameters)?;
        let get = |name: &str| parameters.get(name).map(String::as_str);
        let wrong = |error| of_attribute(MUTABLE, error);
        Ok(Self {
            size_limit: get("sizeLimit")
                .map(parse_size_limit)
                .transpose()
                .map_err(wrong)?,
            ttl: get("ttl").map(named_ttl).transpose().map_err(wrong)?,
        })
    }
}

fn named_ttl(text: &str) -> Result<Ttl, AttributeError> {
    if text == "never" {
        return Ok(Ttl::Never);
    }
    match parse_ttl(text) {
        Ok(ttl) => Ok(Ttl::Seconds(ttl.as_secs())),
        Err(error) => Err(AttributeError {
            problem: format!("{}, or never", error.problem),
            ..error
        }),
    }
}

fn known(
    table: &'static str,
    names: &[&str],
    elsewhere: &[&str],
    parameters: &BTreeMap<String, String>,
) -> Result<(), ParameterError> {
    let Some(name) = parameters
        .keys()
        .find(|name| !names.contains(&name.as_str()))
    else {
        return Ok(());
    };
    let problem = if elsewhere.contains(&name.as_str()) {
        let class = if table == FIXED {
            "a VolumeAttributesClass"
        } else {
            "a StorageClass"
        };
        format!("belongs in {class}; known here are {}", list(names))
    } else {
        unknown(name, names)
    };
    Err(error(table, name, problem))
}

fn error(table: &'static str, name: &str, problem: impl fmt::Display) -> ParameterError {
    ParameterError {
        table,
        // Truncate: a hostile name must not fill the log.
        parameter: name.chars().take(64).collect(),
        problem: problem.to_string(),
    }
}

fn of_attribute(table: &'static str, error: AttributeError) -> ParameterError {
    ParameterError {
        table,
        parameter: error.attribute,
        problem: error.problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn what_classes_say_is_understood() {
        assert_eq!(
            ClaimParameters::parse(&map(&[])),
            Ok(ClaimParameters::default())
        );
        let all = map(&[
            ("uid", "1000"),
            ("gid", "0"),
            ("mode", "2770"),
            ("liveClone", "copy"),
            ("cloneElsewhere", "true"),
        ]);
        let parsed = ClaimParameters::parse(&all).expect("understood");
        assert_eq!(
            (parsed.root.uid, parsed.root.gid, parsed.root.mode),
            (Some(1000), Some(0), Some(0o2770))
        );
        assert_eq!(parsed.live_clone, LiveClone::Copy);
        assert!(parsed.clone_elsewhere);
        let parsed = MutableChange::parse(&map(&[("sizeLimit", "2Gi"), ("ttl", "7d")]));
        assert_eq!(
            parsed,
            Ok(MutableChange {
                size_limit: Some(2 << 30),
                ttl: Some(Ttl::Seconds(7 * 24 * 60 * 60))
            })
        );
        let parsed = MutableChange::parse(&map(&[("ttl", "never")])).expect("understood");
        assert_eq!(parsed.ttl, Some(Ttl::Never));
        let unnamed = MutableChange::parse(&map(&[])).expect("understood");
        assert_eq!(unnamed, MutableChange::default());
    }

    #[test]
    fn each_mistake_names_the_parameter_and_what_is_allowed() {
        for (key, value, expected) in [
            (
                "UID",
                "1",
                r#"parameter "UID" is unknown; did you mean "uid"?"#,
            ),
            (
                "fsType",
                "ext4",
                r#"parameter "fsType" is unknown; known are uid, gid, mode, liveClone, cloneElsewhere"#,
            ),
            (
                "ttl",
                "1h",
                r#"parameter "ttl" belongs in a VolumeAttributesClass"#,
            ),
            ("uid", "root", r#"parameter "uid" is "root"; expected a"#),
            ("gid", "-1", r#"parameter "gid" is "-1""#),
            ("mode", "rwx", r#"parameter "mode" is "rwx"; expected an"#),
            (
                "liveClone",
                "yes",
                r#"parameter "liveClone" is "yes"; allowed are refuse, copy"#,
            ),
            (
                "cloneElsewhere",
                "yes",
                r#"parameter "cloneElsewhere" is "yes"; allowed are true, false"#,
            ),
        ] {
            let message = ClaimParameters::parse(&map(&[(key, value)]))
                .expect_err(key)
                .to_string();
            assert!(message.starts_with(expected), "{message}");
        }
        for (key, value, expected) in [
            (
                "TTL",
                "1h",
                r#"mutable parameter "TTL" is unknown; did you mean "ttl"?"#,
            ),
            (
                "iops",
                "9",
                r#"mutable parameter "iops" is unknown; known are sizeLimit, ttl"#,
            ),
            (
                "uid",
                "1",
                r#"mutable parameter "uid" belongs in a StorageClass"#,
            ),
            (
                "sizeLimit",
                "0",
                r#"mutable parameter "sizeLimit" is "0"; expected a positive"#,
            ),
            (
                "ttl",
                "-1h",
                r#"mutable parameter "ttl" is "-1h"; expected a duration such as 30m, 12h or 7d, from 1s to ten years, or never"#,
            ),
            ("ttl", "Never", r#"mutable parameter "ttl" is "Never""#),
        ] {
            let message = MutableChange::parse(&map(&[(key, value)]))
                .expect_err(key)
                .to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
