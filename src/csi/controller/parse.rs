//! Parses the requests of Controller and GroupController; all their INVALID_ARGUMENT come from
//! here. `csi::parse` has the part that the Node service shares.

use std::collections::BTreeMap;

use crate::csi::parse::{
    Invalid, bounded, capability, capacity_range, given, given_capability, no_attributes,
};
use crate::csi::status::Failure;
use crate::csi::topology;
use crate::engine::claims::{CreateClaim, SnapshotFilter};
use crate::model::{
    Attachment, ClaimParameters, ClaimSource, KUBELET, MutableChange, MutableParameters,
    Requirement, VolumeId,
};
use crate::proto::csi::v1 as csi;
use csi::volume_content_source::Type;

/// The most claims of one group: `SnapshotSpec` takes as many.
const MOST_SOURCES: usize = 1000;

/// A parsed CreateVolume.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Create {
    pub claim: CreateClaim,
    pub at: Requirement,
}

pub(super) fn create(request: csi::CreateVolumeRequest) -> Result<Create, Failure> {
    let name = name("name", request.name)?;
    let (required_bytes, limit_bytes) = capacity_range(request.capacity_range.as_ref())?;
    bounded(&[
        ("parameters", &request.parameters),
        ("secrets", &request.secrets),
        ("mutable_parameters", &request.mutable_parameters),
    ])?;
    capabilities(request.volume_capabilities)?;
    let claim = CreateClaim {
        name,
        required_bytes,
        limit_bytes,
        parameters: parameters(request.parameters)?,
        mutable: mutable(request.mutable_parameters)?.over(MutableParameters::default()),
        source: request.volume_content_source.map(source).transpose()?,
    };
    Ok(Create {
        claim,
        at: topology::requirement(request.accessibility_requirements),
    })
}

/// The name of a new object (CSI specification, `CreateVolumeRequest.name`): at most 128 bytes
/// without control characters, except common white space.
fn name(field: &'static str, text: String) -> Result<String, Invalid> {
    given(field, &text)?;
    let problem = |problem| Invalid::Name { field, problem };
    if text.len() > VolumeId::MAX_LEN {
        return Err(problem("is longer than 128 bytes"));
    }
    let white = |c: char| matches!(c, '\t' | '\n' | '\r');
    if text.chars().any(|c| c.is_control() && !white(c)) {
        return Err(problem("holds a control character"));
    }
    Ok(text)
}

/// Every capability must be possible, or the volume is of no use.
pub(super) fn capabilities(wanted: Vec<csi::VolumeCapability>) -> Result<(), Invalid> {
    if wanted.is_empty() {
        return Err(Invalid::Missing("volume_capabilities"));
    }
    wanted
        .into_iter()
        .try_for_each(|one| capability(one).map(drop))
}

pub(super) fn parameters(all: BTreeMap<String, String>) -> Result<ClaimParameters, Invalid> {
    Ok(ClaimParameters::parse(&own(all))?)
}

pub(super) fn mutable(all: BTreeMap<String, String>) -> Result<MutableChange, Invalid> {
    Ok(MutableChange::parse(&own(all))?)
}

/// A class of snapshots has no parameters.
pub(super) fn no_parameters(all: BTreeMap<String, String>) -> Result<(), Invalid> {
    match own(all).into_keys().next() {
        Some(key) => Err(Invalid::SnapshotParameter(key.chars().take(64).collect())),
        None => Ok(()),
    }
}

/// The class's parameters, without those that Kubernetes' sidecars add (`--extra-create-metadata`).
fn own(all: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let theirs = |key: &String| key.starts_with(KUBELET);
    all.into_iter().filter(|(key, _)| !theirs(key)).collect()
}

/// A source with an invalid id does not exist.
fn source(source: csi::VolumeContentSource) -> Result<ClaimSource, Failure> {
    let kind = source.r#type.ok_or(Invalid::NoSourceType)?;
    match kind {
        Type::Snapshot(from) => {
            let id = given("snapshot_id", &from.snapshot_id)?.parse();
            id.map(ClaimSource::Snapshot)
                .map_err(|_| Failure::NotFound("snapshot", from.snapshot_id))
        }
        Type::Volume(from) => {
            let id = given("volume_id", &from.volume_id)?.parse();
            id.map(ClaimSource::Claim)
                .map_err(|_| Failure::NotFound("volume", from.volume_id))
        }
    }
}

/// A parsed ControllerPublishVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attach {
    pub volume: String,
    pub attachment: Attachment,
}

pub(super) fn attach(request: csi::ControllerPublishVolumeRequest) -> Result<Attach, Invalid> {
    given("volume_id", &request.volume_id)?;
    given("node_id", &request.node_id)?;
    bounded(&[
        ("secrets", &request.secrets),
        ("volume_context", &request.volume_context),
    ])?;
    let (_, mode) = given_capability(request.volume_capability)?;
    no_attributes(&request.volume_context)?;
    Ok(Attach {
        volume: request.volume_id,
        attachment: Attachment {
            node: request.node_id,
            read_only: request.readonly,
            access_mode: mode.into(),
        },
    })
}

/// Checks ValidateVolumeCapabilities, before its values are compared with the volume.
pub(super) fn confirmed(request: &csi::ValidateVolumeCapabilitiesRequest) -> Result<(), Invalid> {
    given("volume_id", &request.volume_id)?;
    if request.volume_capabilities.is_empty() {
        return Err(Invalid::Missing("volume_capabilities"));
    }
    bounded(&[
        ("volume_context", &request.volume_context),
        ("parameters", &request.parameters),
        ("secrets", &request.secrets),
        ("mutable_parameters", &request.mutable_parameters),
    ])
}

/// The most entries of a page; 0 in the request means all.
pub(super) fn page(max_entries: i32) -> Result<usize, Invalid> {
    match usize::try_from(max_entries) {
        Ok(0) => Ok(usize::MAX),
        Ok(most) => Ok(most),
        Err(_) => Err(Invalid::Negative {
            field: "max_entries",
            value: max_entries.into(),
        }),
    }
}

/// A parsed CreateSnapshot.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Snap {
    pub name: String,
    pub source: String,
    pub at: Requirement,
}

pub(super) fn snapshot(request: csi::CreateSnapshotRequest) -> Result<Snap, Invalid> {
    given("source_volume_id", &request.source_volume_id)?;
    let name = name("name", request.name)?;
    bounded(&[
        ("secrets", &request.secrets),
        ("parameters", &request.parameters),
    ])?;
    no_parameters(request.parameters)?;
    Ok(Snap {
        name,
        source: request.source_volume_id,
        at: topology::requirement(request.accessibility_requirements),
    })
}

pub(super) fn filter(request: &csi::ListSnapshotsRequest) -> SnapshotFilter {
    let some = |text: &String| (!text.is_empty()).then(|| text.clone());
    SnapshotFilter {
        source: some(&request.source_volume_id),
        id: some(&request.snapshot_id),
    }
}

/// A parsed ControllerExpandVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Expand {
    pub volume: String,
    pub required: u64,
    pub limit: Option<u64>,
}

pub(super) fn expand(request: csi::ControllerExpandVolumeRequest) -> Result<Expand, Invalid> {
    given("volume_id", &request.volume_id)?;
    if request.capacity_range.is_none() {
        return Err(Invalid::Missing("capacity_range"));
    }
    let (required, limit) = capacity_range(request.capacity_range.as_ref())?;
    bounded(&[("secrets", &request.secrets)])?;
    if let Some(wanted) = request.volume_capability {
        capability(wanted)?;
    }
    Ok(Expand {
        volume: request.volume_id,
        required,
        limit,
    })
}

/// Parses ControllerModifyVolume. A class without parameters is a mistake: it would change nothing.
pub(super) fn modify(
    request: csi::ControllerModifyVolumeRequest,
) -> Result<(String, MutableChange), Invalid> {
    given("volume_id", &request.volume_id)?;
    if request.mutable_parameters.is_empty() {
        return Err(Invalid::Missing("mutable_parameters"));
    }
    bounded(&[
        ("secrets", &request.secrets),
        ("mutable_parameters", &request.mutable_parameters),
    ])?;
    Ok((request.volume_id, mutable(request.mutable_parameters)?))
}

/// Parses CreateVolumeGroupSnapshot.
pub(in crate::csi) fn group(
    request: csi::CreateVolumeGroupSnapshotRequest,
) -> Result<(String, Vec<String>), Invalid> {
    const FIELD: &str = "source_volume_ids";
    let name = name("name", request.name)?;
    let mut sources = request.source_volume_ids;
    if sources.is_empty() || sources.iter().any(String::is_empty) {
        return Err(Invalid::Missing(FIELD));
    }
    if sources.len() > MOST_SOURCES {
        return Err(Invalid::TooMany {
            field: FIELD,
            count: sources.len(),
            limit: MOST_SOURCES,
        });
    }
    bounded(&[
        ("secrets", &request.secrets),
        ("parameters", &request.parameters),
    ])?;
    no_parameters(request.parameters)?;
    // A group is a set, so the order does not matter.
    sources.sort_unstable();
    match sources.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Invalid::Twice(FIELD, pair[0].chars().take(128).collect())),
        None => Ok((name, sources)),
    }
}

#[cfg(test)]
mod tests;
