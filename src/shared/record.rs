//! The content of the tier's small objects: JSON with a format version, and their random ids.
//! `docs/shared-tier.md` lists the fields. An object is untrusted until its digest and its fields
//! are checked.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256 as Hasher};

use super::error::{Error, Result};
use crate::model::{
    ArtifactId, LayerId, Maker, Reference, Sha256, Tenant, Timestamp, is_false, is_zero,
};
use crate::sys;

/// The format that this version reads and writes.
pub const FORMAT: u64 = 1;
/// The largest record of a name, in bytes.
pub(super) const MOST_NAME: u64 = 16 << 10;
/// The largest manifest, in bytes.
pub(super) const MOST_MANIFEST: u64 = 1 << 20;
/// The most layers of a manifest.
const MOST_LAYERS: usize = 4096;

/// A random id in a key: of an upload or a publication.
pub type ObjectId = LayerId;

/// A fresh random id.
#[must_use]
pub fn fresh_id() -> ObjectId {
    ObjectId::from_bits(sys::random())
}

/// What a name shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum NameState {
    /// An artifact.
    #[serde(rename_all = "camelCase")]
    Content {
        /// The artifact.
        artifact: ArtifactId,
        /// The publication that wrote its manifest.
        publication: ObjectId,
        /// SHA-256 of the manifest's bytes.
        manifest: Sha256,
        /// How long the name lives after the storage wrote the record. `None`: no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ttl_seconds: Option<u64>,
    },
    /// Nothing: a person cleared it.
    Cleared,
    /// Nothing: its time to live was over. Refuses nothing.
    Expired,
}

/// The record of a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NameRecord {
    /// The format's version.
    pub format: u64,
    /// The tenant.
    pub tenant: Tenant,
    /// The reference.
    pub reference: Reference,
    /// Grows by one with each write of the name.
    pub number: u64,
    /// The number of the record that last cleared the name; 0: none did.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cleared: u64,
    /// It shows nothing because the tenant exceeded its budget. Its content was whole, and no node
    /// uploads it again without a use.
    #[serde(default, skip_serializing_if = "is_false")]
    pub evicted: bool,
    /// It shows nothing, and a collector deletes it at this moment: writers wait, as
    /// [`may_write_over_mark`](super::decide::may_write_over_mark) says.
    #[serde(default, skip_serializing_if = "is_false")]
    pub deleting: bool,
    /// Random, of this write: it tells two writes apart that say the same.
    pub write: ObjectId,
    /// When it was written, by the writer's clock. For display.
    pub committed: Timestamp,
    /// What it shows.
    #[serde(flatten)]
    pub state: NameState,
}

/// One layer of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerRef {
    /// SHA-256 of the layer's table.
    pub digest: Sha256,
    /// The upload that wrote the object.
    pub upload: ObjectId,
    /// Bytes of the object.
    pub bytes: u64,
    /// Where the frames end, and table, index and footer begin.
    pub tail: u64,
    /// Bytes of the content.
    pub content: u64,
    /// Bytes of the table.
    pub table: u64,
}

impl LayerRef {
    /// How many bytes it needs on disk while it comes: its content, and its table, which is
    /// verified in a temporary file and then kept beside the content.
    #[must_use]
    pub fn space(&self) -> u64 {
        let tables = self.table.saturating_mul(2);
        self.content.saturating_add(tables)
    }
}

/// The bytes of the content of these layers together. A peer may say any lengths.
#[must_use]
pub fn content_of(layers: &[LayerRef]) -> u64 {
    let lengths = layers.iter().map(|layer| layer.content);
    lengths.fold(0, u64::saturating_add)
}

/// An artifact as one publication of it wrote it down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// The format's version.
    pub format: u64,
    /// The tenant.
    pub tenant: Tenant,
    /// The reference under which it was sealed.
    pub reference: Reference,
    /// The artifact.
    pub artifact: ArtifactId,
    /// The publication.
    pub publication: ObjectId,
    /// The layers, newest first.
    pub layers: Vec<LayerRef>,
    /// When it was sealed.
    pub made: Timestamp,
    /// The pod, service account, images and node that made it, and the artifact that the pod's
    /// volume was a fork of. For display.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<Maker>,
    /// The artifact's [`fence`](crate::model::Artifact::fence), of the cluster that made it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fence: u64,
}

/// The version of a tenant's layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Format {
    pub(super) format: u64,
}

/// The namespace of a cluster that the tenant's content is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NamespaceRecord {
    pub(super) format: u64,
    /// Its uid.
    pub(super) namespace: String,
}

/// The collector's lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Lease {
    pub(super) format: u64,
    pub(super) holder: ObjectId,
    /// How long the holder has it from the time that the storage wrote it. 0: given back.
    /// It is given back when the collection is complete.
    pub(super) seconds: u64,
}

/// Parses an object whose format is known.
fn parse<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T> {
    if bytes.is_empty() {
        return Err(Error::corrupt(
            key,
            "it is empty, or too large for a record",
        ));
    }
    let format: Format = serde_json::from_slice(bytes)
        .map_err(|error| Error::corrupt(key, format!("it is not JSON with a format: {error}")))?;
    if format.format > FORMAT {
        return Err(Error::Newer {
            object: key.to_owned(),
            found: format.format,
            known: FORMAT,
        });
    }
    if format.format == 0 {
        return Err(Error::corrupt(key, "there is no format 0"));
    }
    serde_json::from_slice(bytes).map_err(|error| Error::corrupt(key, error))
}

pub(super) fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("records have no maps with other keys than text")
}

pub(super) fn sha256(bytes: &[u8]) -> Sha256 {
    Sha256(Hasher::digest(bytes).into())
}

impl NamespaceRecord {
    pub(super) fn parse(key: &str, bytes: &[u8]) -> Result<Self> {
        parse(key, bytes)
    }
}

impl Format {
    pub(super) fn parse(key: &str, bytes: &[u8]) -> Result<Self> {
        parse(key, bytes)
    }
}

impl Lease {
    pub(super) fn parse(key: &str, bytes: &[u8]) -> Result<Self> {
        parse(key, bytes)
    }
}

impl NameRecord {
    /// Parses the record of this name.
    pub(super) fn parse(
        key: &str,
        bytes: &[u8],
        tenant: &Tenant,
        reference: Option<&Reference>,
    ) -> Result<Self> {
        let record: Self = parse(key, bytes)?;
        let same = record.tenant == *tenant && reference.is_none_or(|it| record.reference == *it);
        if !same {
            let cause = format!(
                "it is of {} of namespace {}",
                record.reference, record.tenant
            );
            return Err(Error::corrupt(key, cause));
        }
        if record.number == 0 || record.number == u64::MAX || record.cleared > record.number {
            return Err(Error::corrupt(key, "its number is out of range"));
        }
        Ok(record)
    }

    /// The artifact, the publication and the manifest's digest, if it shows content.
    #[must_use]
    pub fn content(&self) -> Option<(ArtifactId, ObjectId, Sha256)> {
        match self.state {
            NameState::Content {
                artifact,
                publication,
                manifest,
                ..
            } => Some((artifact, publication, manifest)),
            NameState::Cleared | NameState::Expired => None,
        }
    }
}

impl Manifest {
    /// Whether this content was made of the other: it has all layers of the other and more, and
    /// was sealed later. Equal layers alone say nothing: their digests name content, which two
    /// nodes may make independently.
    pub(super) fn follows(&self, other: &Self) -> bool {
        let above = self.layers.len().checked_sub(other.layers.len());
        let Some(above) = above.filter(|&above| above > 0) else {
            return false;
        };
        let below = self.layers[above..].iter().map(|layer| layer.digest);
        self.made > other.made && below.eq(other.layers.iter().map(|layer| layer.digest))
    }

    /// Parses the manifest of a tenant. `expected`: the digest that the name's record tells.
    pub(super) fn parse(
        key: &str,
        bytes: &[u8],
        tenant: &Tenant,
        id: (ArtifactId, ObjectId),
        expected: Option<Sha256>,
    ) -> Result<Self> {
        if expected.is_some_and(|expected| expected != sha256(bytes)) {
            return Err(Error::corrupt(
                key,
                "its SHA-256 is not the one in the name's record",
            ));
        }
        let manifest: Self = parse(key, bytes)?;
        if manifest.tenant != *tenant || (manifest.artifact, manifest.publication) != id {
            return Err(Error::corrupt(key, "it is of another artifact"));
        }
        if manifest.layers.is_empty() || manifest.layers.len() > MOST_LAYERS {
            return Err(Error::corrupt(key, "it has no layers, or too many"));
        }
        if manifest
            .layers
            .iter()
            .any(|layer| layer.tail >= layer.bytes)
        {
            return Err(Error::corrupt(key, "a layer has no table"));
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of `docs/shared-tier.md`.
    const NAME: &str = concat!(
        r#"{"format":1,"tenant":"ci","reference":"task-cache/go/build","number":7,"#,
        r#""write":"0000000000000000000000000000000b","committed":1700000000000,"#,
        r#""state":"content","artifact":"0000000000000000000000000000000a","#,
        r#""publication":"0000000000000000000000000000000b","#,
        r#""manifest":"sha256:abababababababababababababababababababababababababababababababab","#,
        r#""ttlSeconds":86400}"#
    );

    fn tenant(name: &str) -> Tenant {
        name.parse().expect("a label")
    }

    fn name() -> NameRecord {
        NameRecord {
            format: 1,
            tenant: tenant("ci"),
            reference: "task-cache/go/build".parse().expect("a reference"),
            number: 7,
            cleared: 0,
            evicted: false,
            deleting: false,
            write: ObjectId::from_bits(11),
            committed: Timestamp(1_700_000_000_000),
            state: NameState::Content {
                artifact: ArtifactId::from_bits(10),
                publication: ObjectId::from_bits(11),
                manifest: Sha256([0xab; 32]),
                ttl_seconds: Some(86_400),
            },
        }
    }

    #[test]
    fn lengths_beyond_all_bounds_have_a_sum() {
        let id = ObjectId::from_bits(11);
        let layer = LayerRef {
            digest: Sha256([0xab; 32]),
            upload: id,
            bytes: 0,
            tail: 0,
            content: u64::MAX,
            table: u64::MAX,
        };
        assert_eq!(content_of(&[layer, layer]), u64::MAX);
        assert_eq!(content_of(&[]), 0);
    }

    #[test]
    fn a_names_record_is_what_the_documentation_shows() {
        let bytes = encode(&name());
        assert_eq!(String::from_utf8(bytes.clone()).expect("text"), NAME);
        let docs =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/shared-tier.md"));
        let docs: String = docs.expect("docs").split_whitespace().collect();
        assert!(
            docs.contains(NAME),
            "docs/shared-tier.md has another example"
        );
        let parsed = NameRecord::parse("x", &bytes, &tenant("ci"), Some(&name().reference));
        assert_eq!(parsed.expect("parse"), name());
        for state in [NameState::Cleared, NameState::Expired] {
            for evicted in [false, true] {
                let state = state.clone();
                let record = NameRecord {
                    evicted,
                    state,
                    ..name()
                };
                let bytes = encode(&record);
                let parsed = NameRecord::parse("x", &bytes, &tenant("ci"), None);
                assert_eq!(parsed.expect("parse"), record);
                // A version that does not know the field reads the rest.
                let text = String::from_utf8(bytes).expect("text");
                let other = text.replace("\"evicted\":true", "\"unknown\":true");
                let parsed = NameRecord::parse("x", other.as_bytes(), &tenant("ci"), None);
                let expected = NameRecord {
                    evicted: false,
                    deleting: false,
                    ..record
                };
                assert_eq!(parsed.expect("parse"), expected);
            }
        }
    }

    #[test]
    fn a_manifest_cannot_bring_a_large_name_of_a_pod() {
        let id = (ArtifactId::from_bits(1), ObjectId::from_bits(2));
        let digest = "ab".repeat(32);
        let object = ObjectId::from_bits(3);
        let manifest = serde_json::json!({
            "format": 1,
            "tenant": "ci",
            "reference": "task-cache/k",
            "artifact": id.0,
            "publication": id.1,
            "layers": [{
                "digest": format!("sha256:{digest}"),
                "upload": object,
                "bytes": 9,
                "tail": 8,
                "content": 7,
                "table": 6,
            }],
            "made": 5,
            "madeBy": {"pod": {"uid": "u", "name": "x".repeat(900_000)}},
        });
        let bytes = serde_json::to_vec(&manifest).expect("JSON");
        let read = Manifest::parse("x", &bytes, &tenant("ci"), id, None).expect("it is valid");
        let maker = read.made_by.expect("it is known");
        assert_eq!((maker.pod.uid.as_str(), &*maker.pod.name), ("u", ""));
    }

    #[test]
    fn records_of_others_of_newer_formats_and_without_sense_are_refused() {
        let other: Reference = "task-cache/other".parse().expect("a reference");
        let parse = |bytes: &[u8], of: &str, reference| {
            NameRecord::parse("x", bytes, &tenant(of), reference).expect_err("it is refused")
        };
        let bytes = encode(&name());
        assert!(matches!(parse(&bytes, "ci2", None), Error::Corrupt { .. }));
        assert!(matches!(
            parse(&bytes, "ci", Some(&other)),
            Error::Corrupt { .. }
        ));
        let newer = NAME.replacen(":1,", ":2,", 1);
        let error = parse(newer.as_bytes(), "ci", None);
        assert!(matches!(error, Error::Newer { found: 2, .. }));
        assert!(error.to_string().contains("upgrade this node"), "{error}");
        // A newer format may lack every other field.
        assert!(matches!(
            parse(br#"{"format":9}"#, "ci", None),
            Error::Newer { .. }
        ));
        for bad in [
            &b""[..],
            b"{}",
            b"[]",
            b"\xff",
            br#"{"format":1}"#,
            br#"{"format":0}"#,
        ] {
            assert!(
                matches!(parse(bad, "ci", None), Error::Corrupt { .. }),
                "{bad:?}"
            );
        }
        let zero = NAME.replacen("\"number\":7", "\"number\":0", 1);
        assert!(matches!(
            parse(zero.as_bytes(), "ci", None),
            Error::Corrupt { .. }
        ));
    }
}
