//! What a volume may start from: the content of one name, or the newest content of names that begin
//! in one way.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::name::{CacheKey, Name, NameError, Reference, Tenant};

/// The sign at the end of a restore key that makes it the beginning of keys.
const ANY: char = '*';

/// One of a task cache's restore keys, as its user writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RestoreKey {
    /// A key.
    Key(CacheKey),
    /// `BEGINNING*`: all keys that begin so. The newest commit of them counts.
    Prefix(CacheKey),
}

impl FromStr for RestoreKey {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        // With its star it is a key for older drivers, which must read records of this one.
        let whole: CacheKey = text.parse()?;
        match text.strip_suffix(ANY) {
            // It would be every task cache of the namespace.
            Some("") => Err(NameError::Any),
            Some(prefix) => prefix.parse().map(Self::Prefix),
            None => Ok(Self::Key(whole)),
        }
    }
}

/// From a record. For an older driver `*` was a key.
impl TryFrom<String> for RestoreKey {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        match text.parse() {
            Err(NameError::Any) => text.parse().map(Self::Key),
            parsed => parsed,
        }
    }
}

impl From<RestoreKey> for String {
    fn from(key: RestoreKey) -> Self {
        key.to_string()
    }
}

impl fmt::Display for RestoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key) => write!(f, "{key}"),
            Self::Prefix(prefix) => write!(f, "{prefix}{ANY}"),
        }
    }
}

/// Content that a volume may start from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// That of this name.
    Name(Reference),
    /// The newest commit of all task caches whose key begins so.
    Newest(CacheKey),
}

impl Origin {
    /// Whether content of this name may be it.
    #[must_use]
    pub fn may_be(&self, reference: &Reference) -> bool {
        match (self, reference) {
            (Self::Name(name), _) => name == reference,
            (Self::Newest(prefix), Reference::TaskCache(key)) => {
                key.as_str().starts_with(prefix.as_str())
            }
            (Self::Newest(_), _) => false,
        }
    }
}

impl From<RestoreKey> for Origin {
    fn from(key: RestoreKey) -> Self {
        match key {
            RestoreKey::Key(key) => Self::Name(Reference::TaskCache(key)),
            RestoreKey::Prefix(prefix) => Self::Newest(prefix),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(reference) => write!(f, "{reference}"),
            Self::Newest(prefix) => write!(f, "task-cache/{prefix}{ANY}"),
        }
    }
}

/// An origin in its tenant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TenantOrigin {
    /// The tenant.
    pub tenant: Tenant,
    /// The content.
    pub origin: Origin,
}

impl From<Name> for TenantOrigin {
    fn from(Name { tenant, reference }: Name) -> Self {
        let origin = Origin::Name(reference);
        Self { tenant, origin }
    }
}

impl fmt::Display for TenantOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of namespace {}", self.origin, self.tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_at_the_end_makes_a_restore_key_the_beginning_of_keys() {
        let prefix = |text: &str| RestoreKey::Prefix(text.parse().expect("a key"));
        let whole = |text: &str| RestoreKey::Key(text.parse().expect("a key"));
        let longest = "x".repeat(CacheKey::MAX_LEN - 1);
        for (text, key) in [
            ("main", whole("main")),
            ("*main", whole("*main")),
            ("m*n", whole("m*n")),
            ("main-*", prefix("main-")),
            ("m*n-*", prefix("m*n-")),
            ("main**", prefix("main*")),
            ("ü*", prefix("ü")),
            (&format!("{longest}*"), prefix(&longest)),
        ] {
            assert_eq!(text.parse(), Ok(key.clone()));
            assert_eq!(key.to_string(), text);
            let json = serde_json::to_string(&key).expect("it is text");
            assert_eq!(serde_json::from_str::<RestoreKey>(&json).expect(text), key);
        }
        assert_eq!("".parse::<RestoreKey>(), Err(NameError::Empty));
        assert_eq!("*".parse::<RestoreKey>(), Err(NameError::Any));
        let long = format!("{longest}x*").parse::<RestoreKey>();
        assert_eq!(long, Err(NameError::TooLong(257, 256)));
        assert!("a\nb*".parse::<RestoreKey>().is_err());
    }

    #[test]
    fn every_key_in_the_records_of_an_older_driver_is_read_and_every_key_here_by_it() {
        for text in ["main", "main-*", "*", "**", "a, b", &"*".repeat(256)] {
            text.parse::<CacheKey>().expect("a key of an older driver");
            let json = serde_json::to_string(text).expect("it is text");
            let key: RestoreKey = serde_json::from_str(&json).expect("it is read");
            assert_eq!(serde_json::to_string(&key).expect("it is text"), json);
        }
        serde_json::from_str::<RestoreKey>("\"\"").expect_err("no key");
        let longest: RestoreKey = format!("{}*", "x".repeat(255)).parse().expect("a key");
        let text = longest.to_string();
        text.parse::<CacheKey>().expect("an older driver reads it");
    }

    #[test]
    fn only_task_caches_that_begin_so_are_meant() {
        let of = |text: &str| Origin::from(text.parse::<RestoreKey>().expect("a restore key"));
        for (key, reference, expected) in [
            ("main", "task-cache/main", true),
            ("main", "task-cache/main-1", false),
            ("main-*", "task-cache/main-1", true),
            ("main-*", "task-cache/main-", true),
            ("main-*", "task-cache/main", false),
            ("main-*", "task-cache/x/main-1", false),
            ("main-*", "resource-cache/main-1", false),
            ("main-*", "artifact/main-1", false),
        ] {
            let reference = reference.parse().expect("a reference");
            assert_eq!(of(key).may_be(&reference), expected, "{key} {reference}");
        }
    }
}
