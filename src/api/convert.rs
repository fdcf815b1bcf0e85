//! Converts the objects' fields to the model and back.
//! Makes no decisions.

use super::volume::{Mutable, Parameters, Source, SourceKind};
use crate::model::{
    ClaimParameters, ClaimSource, IdError, LiveClone, MutableParameters, RootAttributes,
};

/// A number for a field: JSON in the API server has no unsigned numbers.
#[must_use]
pub fn number(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A number from a field that is not negative.
#[must_use]
pub fn bytes(number: i64) -> u64 {
    u64::try_from(number).unwrap_or_default()
}

/// A number that fits, since it was made from one.
fn small(number: i64) -> u32 {
    u32::try_from(number).unwrap_or_default()
}

impl From<ClaimParameters> for Parameters {
    fn from(of: ClaimParameters) -> Self {
        Self {
            uid: of.root.uid.map(Into::into),
            gid: of.root.gid.map(Into::into),
            mode: of.root.mode.map(Into::into),
            live_clone: of.live_clone == LiveClone::Copy,
            clone_elsewhere: of.clone_elsewhere,
        }
    }
}

impl From<Parameters> for ClaimParameters {
    fn from(of: Parameters) -> Self {
        Self {
            root: RootAttributes {
                mode: of.mode.map(small),
                uid: of.uid.map(small),
                gid: of.gid.map(small),
                mount_group: None,
            },
            live_clone: if of.live_clone {
                LiveClone::Copy
            } else {
                LiveClone::Refuse
            },
            clone_elsewhere: of.clone_elsewhere,
        }
    }
}

impl From<MutableParameters> for Mutable {
    fn from(of: MutableParameters) -> Self {
        Self {
            size_limit: of.size_limit.map(number),
            ttl_seconds: of.ttl_seconds.map(number),
        }
    }
}

impl From<Mutable> for MutableParameters {
    fn from(of: Mutable) -> Self {
        Self {
            size_limit: of.size_limit.map(bytes),
            ttl_seconds: of.ttl_seconds.map(bytes),
        }
    }
}

impl From<&ClaimSource> for Source {
    fn from(of: &ClaimSource) -> Self {
        let (kind, name) = match of {
            ClaimSource::Snapshot(id) => (SourceKind::Snapshot, id),
            ClaimSource::Claim(id) => (SourceKind::Volume, id),
        };
        Self {
            kind,
            name: name.to_string(),
        }
    }
}

impl TryFrom<&Source> for ClaimSource {
    type Error = IdError;

    fn try_from(of: &Source) -> Result<Self, IdError> {
        let id = of.name.parse()?;
        Ok(match of.kind {
            SourceKind::Snapshot => Self::Snapshot(id),
            SourceKind::Volume => Self::Claim(id),
        })
    }
}
