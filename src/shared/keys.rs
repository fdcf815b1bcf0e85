//! The keys of the objects in a tenant's part of the tier. Each key is formatted and parsed here
//! only. `record` and `object` have the content of the objects.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use super::cluster_uid::ClusterUid;
use super::record::ObjectId;
use crate::model::{ArtifactId, Reference, Sha256 as Digest, Tenant, hex};

/// Everything lies below this: the version of the layout.
const VERSION: &str = "v1";
const CONDEMNED: &str = ".condemned";
/// The longest key of a reference that is written in full. A file's name has at most 255 bytes.
const LONGEST: usize = 200;

/// The keys of one tenant, relative to the URL of the tier.
#[derive(Debug, Clone)]
pub struct Keys {
    base: String,
}

/// An object as the collector finds it in a list.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Listed {
    /// A manifest and its marker's key.
    Manifest(ArtifactId, ObjectId),
    /// A layer.
    Layer([u8; 32], ObjectId),
    /// The marker of another object.
    Marker(Box<Listed>),
    /// A name.
    Name,
}

impl Keys {
    /// The keys of this tenant.
    #[must_use]
    pub fn new(tenant: &Tenant) -> Self {
        let base = format!("{VERSION}/{tenant}");
        Self { base }
    }

    /// The prefix of all tenants.
    #[must_use]
    pub fn tenants() -> &'static str {
        VERSION
    }

    /// The prefix of everything that belongs to the tenant.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The object with the format's version.
    #[must_use]
    pub fn format(&self) -> String {
        format!("{}/format", self.base)
    }

    /// The collector's lease.
    #[must_use]
    pub fn lease(&self) -> String {
        format!("{}/gc", self.base)
    }

    /// The record of a cluster: which of its namespaces the content is of.
    #[must_use]
    pub fn cluster(&self, cluster: &ClusterUid) -> String {
        format!("{}/clusters/{}", self.base, cluster.as_str())
    }

    /// The prefix of all names.
    #[must_use]
    pub fn names(&self) -> String {
        format!("{}/names", self.base)
    }

    /// The record of a name.
    #[must_use]
    pub fn name(&self, reference: &Reference) -> String {
        let (kind, key) = (reference.kind().as_str(), reference.key());
        format!("{}/names/{kind}/{}", self.base, escaped(key))
    }

    /// The prefix of all manifests.
    #[must_use]
    pub fn manifests(&self) -> String {
        format!("{}/manifests", self.base)
    }

    /// The manifest that one publication of an artifact wrote.
    #[must_use]
    pub fn manifest(&self, artifact: ArtifactId, publication: ObjectId) -> String {
        format!("{}/manifests/{artifact}-{publication}", self.base)
    }

    /// The prefix of all layers.
    #[must_use]
    pub fn layers(&self) -> String {
        format!("{}/layers", self.base)
    }

    /// The prefix of all objects with this layer.
    #[must_use]
    pub fn layers_of(&self, digest: &Digest) -> String {
        format!("{}/layers/{}", self.base, hex(&digest.0))
    }

    /// The object that one upload of a layer wrote.
    #[must_use]
    pub fn layer(&self, digest: &Digest, upload: ObjectId) -> String {
        format!("{}/{upload}", self.layers_of(digest))
    }

    /// The collector's marker of an object.
    #[must_use]
    pub fn marker(key: &str) -> String {
        format!("{key}{CONDEMNED}")
    }

    /// Whether a key is a marker, and the object's key if it is.
    #[must_use]
    pub fn marked(key: &str) -> Option<&str> {
        key.strip_suffix(CONDEMNED)
    }

    /// The key of a manifest or a layer.
    pub(super) fn of(&self, listed: &Listed) -> Option<String> {
        match listed {
            Listed::Manifest(artifact, publication) => Some(self.manifest(*artifact, *publication)),
            Listed::Layer(digest, upload) => Some(self.layer(&Digest(*digest), *upload)),
            Listed::Marker(_) | Listed::Name => None,
        }
    }

    /// The kind of object at this key; `None` if no version of this layout writes such a key.
    pub(super) fn parse(&self, key: &str) -> Option<Listed> {
        let rest = key.strip_prefix(&self.base)?.strip_prefix('/')?;
        if let Some(object) = Self::marked(key) {
            return match self.parse(object)? {
                Listed::Marker(_) | Listed::Name => None,
                object => Some(Listed::Marker(Box::new(object))),
            };
        }
        let parts: Vec<&str> = rest.split('/').collect();
        match parts[..] {
            ["names", _, _] => Some(Listed::Name),
            ["manifests", id] => {
                let (artifact, publication) = id.split_once('-')?;
                let (artifact, publication) = (artifact.parse().ok()?, publication.parse().ok()?);
                Some(Listed::Manifest(artifact, publication))
            }
            ["layers", written, upload] => {
                let digest: Digest = format!("sha256:{written}").parse().ok()?;
                // With upper-case digits it would be another key than `of` makes.
                let is_ours = hex(&digest.0) == written;
                is_ours.then_some(Listed::Layer(digest.0, upload.parse().ok()?))
            }
            _ => None,
        }
    }
}

/// A cache key as one path component of letters, digits, `-`, `.` and `_`. The last one escapes:
/// `_2F` is `/`. A long key becomes `__` and its SHA-256; no short one begins with that.
fn escaped(key: &str) -> String {
    let mut text = String::new();
    for (at, byte) in key.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || byte == b'-' || (byte == b'.' && at > 0);
        if plain {
            text.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(text, "_{byte:02X}");
        }
    }
    if text.len() > LONGEST || text.ends_with(CONDEMNED) {
        return format!("__{}", hex(&Sha256::digest(key)));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_key_is_one_safe_component_and_no_two_are_alike() {
        let long = [
            "ü".repeat(128),
            "x".repeat(256),
            format!("{}y", "x".repeat(255)),
        ];
        let keys = [
            ".",
            "..",
            "a/b",
            "a_b",
            "a_2Fb",
            "a_5Fb",
            "git/https://x/y",
            "..x",
            "__",
            "a b",
            "%2F",
            "a%2Fb",
            "A",
            "a",
            "#1",
            "x#1",
            "ключ",
            "a\\b",
            "a.condemned",
            "a?b",
            "~",
            "+",
        ];
        let keys = keys.into_iter().chain(long.iter().map(String::as_str));
        let mut seen = HashSet::new();
        for key in keys {
            let text = escaped(key);
            assert!(text.len() <= LONGEST && !text.is_empty(), "{key}");
            let safe = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
            assert!(
                text.bytes().all(safe) && !text.starts_with('.'),
                "{key}: {text}"
            );
            assert!(!text.ends_with(CONDEMNED), "{key}: {text}");
            assert!(seen.insert(text), "{key}");
        }
        assert_eq!(
            escaped("git/https://x/y_z.1"),
            "git_2Fhttps_3A_2F_2Fx_2Fy_5Fz.1"
        );
    }

    #[test]
    fn keys_are_parsed_as_they_are_made() {
        let keys = Keys::new(&"ci".parse().expect("a label"));
        let (artifact, id) = (ArtifactId::from_bits(7), ObjectId::from_bits(8));
        let manifest = keys.manifest(artifact, id);
        assert_eq!(
            manifest,
            "v1/ci/manifests/00000000000000000000000000000007-00000000000000000000000000000008"
        );
        let parsed = Listed::Manifest(artifact, id);
        assert_eq!(keys.of(&parsed), Some(manifest.clone()));
        assert_eq!(keys.parse(&manifest), Some(parsed));
        let layer = keys.layer(&Digest([0xab; 32]), id);
        let parsed = Listed::Layer([0xab; 32], id);
        assert_eq!(keys.parse(&layer), Some(parsed.clone()));
        assert_eq!(keys.of(&parsed), Some(layer.clone()));
        assert_eq!(keys.parse(&layer.replace("ab", "AB")), None);
        let marker = Keys::marker(&layer);
        assert_eq!(keys.parse(&marker), Some(Listed::Marker(Box::new(parsed))));
        let name = keys.name(&"task-cache/go/build".parse().expect("a reference"));
        assert_eq!(name, "v1/ci/names/task-cache/go_2Fbuild");
        assert_eq!(keys.parse(&name), Some(Listed::Name));
        for other in [
            "v1/ci/format",
            "v1/ci/gc",
            "v1/ci2/format",
            "v1/ci/layers/x/y",
            "v1/ci",
        ] {
            assert_eq!(keys.parse(other), None, "{other}");
        }
        assert_eq!(keys.parse(&Keys::marker(&marker)), None);
    }
}
