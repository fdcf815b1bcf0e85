//! The names of content: tenants, output names, cache keys, and the references in attributes.
//!
//! None of them is used as a path. They are compared by bytes, without normalisation.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a string is not a name. The message continues a sentence that begins with the subject.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It is empty.
    #[error("must not be empty")]
    Empty,
    /// It is too long: the number of bytes, and the limit.
    #[error("is {0} bytes long, at most {1} are allowed")]
    TooLong(usize, usize),
    /// It has a control character at this byte.
    #[error("holds the control character {0:?} at byte {1}; any other text is allowed")]
    Control(char, usize),
    /// It is not a DNS label.
    #[error(
        "must be a DNS label: lower-case letters, digits and '-', beginning and ending with a \
         letter or digit"
    )]
    NotALabel,
    /// It is not `KIND/NAME`.
    #[error("must be artifact/NAME, resource-cache/KEY or task-cache/KEY")]
    NotAReference,
    /// It is `*` alone.
    #[error("must not be `*` alone; write the beginning of the keys before it")]
    Any,
}

fn check_label(text: &str) -> Result<(), NameError> {
    const MAX: usize = 63;
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    if text.len() > MAX {
        return Err(NameError::TooLong(text.len(), MAX));
    }
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-') {
        Ok(())
    } else {
        Err(NameError::NotALabel)
    }
}

fn check_key(text: &str) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    if text.len() > CacheKey::MAX_LEN {
        return Err(NameError::TooLong(text.len(), CacheKey::MAX_LEN));
    }
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, c)) => Err(NameError::Control(c, at)),
        None => Ok(()),
    }
}

/// Defines a validated string.
macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $check:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);

        impl $name {
            /// The string.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                $check(text)?;
                Ok(Self(text.into()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0.into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name! {
    /// The scope of a cache or artifact: the pod's namespace, a DNS label.
    Tenant, check_label
}
name! {
    /// The name of an output, unique in its tenant: a DNS label.
    ArtifactName, check_label
}
name! {
    /// The key of a cache: 1 to 256 bytes without control characters.
    CacheKey, check_key
}

impl CacheKey {
    /// The longest key, in bytes.
    pub const MAX_LEN: usize = 256;
}

/// The rule for two writers of one cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheKind {
    /// Fetched once, immutable. The first writer wins.
    Resource,
    /// Carried from run to run. The last writer wins.
    Task,
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resource => "resource",
            Self::Task => "task",
        })
    }
}

/// The kind of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NameKind {
    /// An output: the last commit counts, and older ones lose the name.
    Artifact,
    /// A resource cache: the first commit counts.
    ResourceCache,
    /// A task cache: the last commit counts.
    TaskCache,
}

impl NameKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Artifact, Self::ResourceCache, Self::TaskCache];

    /// As references begin.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Artifact => "artifact",
            Self::ResourceCache => "resource-cache",
            Self::TaskCache => "task-cache",
        }
    }

    /// The kind of cache, if it is of caches.
    #[must_use]
    pub fn cache(self) -> Option<CacheKind> {
        match self {
            Self::Artifact => None,
            Self::ResourceCache => Some(CacheKind::Resource),
            Self::TaskCache => Some(CacheKind::Task),
        }
    }
}

impl FromStr for NameKind {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let mut all = Self::ALL.into_iter();
        let kind = all.find(|kind| kind.as_str() == text);
        kind.ok_or(NameError::NotAReference)
    }
}

impl From<CacheKind> for NameKind {
    fn from(kind: CacheKind) -> Self {
        match kind {
            CacheKind::Resource => Self::ResourceCache,
            CacheKind::Task => Self::TaskCache,
        }
    }
}

/// An artifact's name in its tenant: `artifact/NAME`, `resource-cache/KEY` or `task-cache/KEY`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Reference {
    /// A step's output.
    Artifact(ArtifactName),
    /// A resource cache.
    ResourceCache(CacheKey),
    /// A task cache.
    TaskCache(CacheKey),
}

impl Reference {
    /// The name of this kind with this key. An output's key is its name.
    pub fn new(kind: NameKind, key: &str) -> Result<Self, NameError> {
        match kind {
            NameKind::Artifact => key.parse().map(Self::Artifact),
            NameKind::ResourceCache => key.parse().map(Self::ResourceCache),
            NameKind::TaskCache => key.parse().map(Self::TaskCache),
        }
    }

    /// The first of all in their order.
    #[must_use]
    pub fn first() -> Self {
        Self::Artifact(ArtifactName("0".into()))
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> NameKind {
        match self {
            Self::Artifact(_) => NameKind::Artifact,
            Self::ResourceCache(_) => NameKind::ResourceCache,
            Self::TaskCache(_) => NameKind::TaskCache,
        }
    }

    /// The key of a cache, or the name of an output.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Artifact(name) => name.as_str(),
            Self::ResourceCache(key) | Self::TaskCache(key) => key.as_str(),
        }
    }

    /// Whether the first content with this name keeps it. Otherwise the last content gets it.
    #[must_use]
    pub fn first_writer_wins(&self) -> bool {
        matches!(self, Self::ResourceCache(_))
    }

    /// The kind and key, if it names a cache.
    #[must_use]
    pub fn cache(&self) -> Option<(CacheKind, &CacheKey)> {
        match self {
            Self::Artifact(_) => None,
            Self::ResourceCache(key) => Some((CacheKind::Resource, key)),
            Self::TaskCache(key) => Some((CacheKind::Task, key)),
        }
    }
}

impl FromStr for Reference {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        // Split at the first slash only: a key may contain slashes.
        let (kind, name) = text.split_once('/').ok_or(NameError::NotAReference)?;
        Self::new(kind.parse()?, name)
    }
}

impl TryFrom<String> for Reference {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Reference> for String {
    fn from(reference: Reference) -> Self {
        reference.to_string()
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind().as_str(), self.key())
    }
}

/// A reference and its tenant: the key of the index.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Name {
    /// The tenant.
    pub tenant: Tenant,
    /// The reference within the tenant.
    pub reference: Reference,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of namespace {}", self.reference, self.tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_any_text_but_control_characters() {
        for good in [
            "../../etc/passwd",
            "go-1.26/linux",
            "ключ 鍵 مفتاح 🔑",
            "a,b",
            &"x".repeat(256),
            ".",
        ] {
            assert_eq!(good.parse::<CacheKey>().expect(good).as_str(), good);
        }
        assert_eq!("".parse::<CacheKey>(), Err(NameError::Empty));
        assert_eq!(
            "x".repeat(10_240).parse::<CacheKey>(),
            Err(NameError::TooLong(10_240, 256))
        );
        for bad in ["a\0b", "a\nb", "\u{7f}", "\u{85}"] {
            assert!(
                matches!(bad.parse::<CacheKey>(), Err(NameError::Control(..))),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn references_split_at_the_first_slash_and_print_as_they_are_written() {
        for text in [
            "artifact/build-42-src",
            "resource-cache/git/https://x/y",
            "task-cache/ü/..",
        ] {
            assert_eq!(text.parse::<Reference>().expect(text).to_string(), text);
        }
        for bad in [
            "",
            "artifact",
            "artifact/",
            "artifact/A",
            "artifact/../x",
            "cache/x",
            "/x",
            "Artifact/x",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn labels_are_dns_labels() {
        for bad in ["-a", "a-", "A", "a.b", "a_b", "ä", "a/b", &"a".repeat(64)] {
            assert!(bad.parse::<Tenant>().is_err(), "{bad:?}");
        }
        assert!("a".repeat(63).parse::<ArtifactName>().is_ok());
    }
}
