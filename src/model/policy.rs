//! What cache policies say: rules for names of a namespace, and the limits of volumes that give
//! none. A rule selects names; it says which service accounts may commit them, and which other
//! namespaces may read them. `rights` decides by them.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::budget::smaller_limit;
use super::name::{NameError, NameKind, Reference, Tenant};

/// Names that a rule selects: `task-cache/main`, or `task-cache/main-*`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NamePattern {
    pub(super) kind: NameKind,
    /// The name, or its beginning.
    pub(super) text: Box<str>,
    pub(super) is_prefix: bool,
}

/// Why a text is no pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// The kind is unknown.
    #[error("must begin with artifact/, resource-cache/ or task-cache/")]
    Kind,
    /// `*` is not at the end.
    #[error("may have one `*`, at its end")]
    Star,
    /// The part before `*`, or all of it, is no name.
    #[error("the name {0}")]
    Name(#[from] NameError),
}

impl NamePattern {
    /// All names of this kind.
    fn all(kind: NameKind) -> Self {
        Self {
            kind,
            text: "".into(),
            is_prefix: true,
        }
    }
}

impl FromStr for NamePattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (kind, name) = text.split_once('/').ok_or(PatternError::Kind)?;
        let kind = kind.parse().map_err(|_| PatternError::Kind)?;
        let (name, is_prefix) = match name.strip_suffix('*') {
            Some(prefix) => (prefix, true),
            None => (name, false),
        };
        if name.contains('*') {
            return Err(PatternError::Star);
        }
        // The beginning of a label may end with `-`; a letter completes it.
        let whole = if is_prefix {
            text.replace('*', "x")
        } else {
            text.to_owned()
        };
        // The longest prefix is as long as the longest name, without the letter.
        match whole.parse::<Reference>() {
            Err(NameError::TooLong(length, most)) if is_prefix && length == most + 1 => {}
            parsed => drop(parsed?),
        }
        Ok(Self {
            kind,
            text: name.into(),
            is_prefix,
        })
    }
}

impl TryFrom<String> for NamePattern {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        text.parse()
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let star = if self.is_prefix { "*" } else { "" };
        write!(f, "{}/{}{star}", self.kind.as_str(), self.text)
    }
}

impl From<NamePattern> for String {
    fn from(pattern: NamePattern) -> Self {
        pattern.to_string()
    }
}

/// One rule of a policy. One with a field of a later version is not read: without it the rule might
/// allow too much.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The names that it selects.
    pub names: Vec<NamePattern>,
    /// The service accounts that may commit them. Empty: none. `None`: the rule says nothing about
    /// commits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<BTreeSet<String>>,
    /// Other namespaces that may read them. Selectors of namespaces are resolved before.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub read: BTreeSet<Tenant>,
}

/// What all policies of a namespace say together to the nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NamespacePolicy {
    /// The rules of all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    /// The size limit in bytes of caches that give none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_limit: Option<u64>,
    /// The size limit in bytes of outputs that give none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_limit: Option<u64>,
}

impl NamespacePolicy {
    /// The longest that it may be as JSON, in bytes, so that it fits in one message to a node.
    pub const MOST_BYTES: usize = 512 << 10;

    /// What holds where the real policies cannot be used: no pod may commit anything, no other
    /// namespace may read, and there is no size limit.
    #[must_use]
    pub fn closed() -> Self {
        let rule = Rule {
            names: NameKind::ALL.map(NamePattern::all).to_vec(),
            commit: Some(BTreeSet::new()),
            read: BTreeSet::new(),
        };
        Self {
            rules: vec![rule],
            ..Self::default()
        }
    }

    /// Adds another policy of the namespace: all rules hold, and the smaller limits.
    pub fn add(&mut self, other: Self) {
        self.rules.extend(other.rules);
        self.cache_limit = smaller_limit(self.cache_limit, other.cache_limit);
        self.output_limit = smaller_limit(self.output_limit, other.output_limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_may_stand_at_the_end_only() {
        let longest = format!("task-cache/{}*", "k".repeat(256));
        for good in [
            "artifact/a",
            "artifact/a-*",
            "task-cache/*",
            "resource-cache/a/b*",
            &longest,
        ] {
            good.parse::<NamePattern>().expect(good);
        }
        for (bad, error) in [
            ("main", PatternError::Kind),
            ("*", PatternError::Kind),
            ("cache/a", PatternError::Kind),
            ("task-cache/a*b", PatternError::Star),
            ("task-cache/a**", PatternError::Star),
            ("task-cache/", PatternError::Name(NameError::Empty)),
            ("artifact/A*", PatternError::Name(NameError::NotALabel)),
        ] {
            assert_eq!(bad.parse::<NamePattern>(), Err(error), "{bad}");
        }
    }
}
