//! Parses messages into the model; all INVALID_ARGUMENT come from here. This file has the shared
//! part and the inline volumes of pods. `claim` and `controller::parse` parse requests for
//! persistent volumes.
//!
//! # Inline or persistent volume?
//!
//! A persistent volume has an id that this driver made (`vol-…`), and its context is not marked as
//! ephemeral. All other requests must be for an inline volume.
//!
//! # Whose pod is it?
//!
//! The tenant is the pod's namespace. Kubelet writes it into the volume context, among attributes
//! of the pod's author. Kubelet overwrites the author's keys only if the CSIDriver object says
//! `podInfoOnMount`, and the API server accepts such keys from any author. So the driver trusts
//! these keys only if they match two values that kubelet makes: the target path contains the pod's
//! uid, and the volume's id is the hash of uid and volume name (`makeVolumeHandle` in kubelet's
//! `csi_mounter.go`). To forge them, an author would have to know the uid before the pod exists.

mod claim;
mod maps;

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use crate::engine::PublishRequest;
use crate::engine::claims::MountClaim;
use crate::model::{
    AttributeError, IdError, KUBELET, NameError, ParameterError, Pod, PodUid, Share, Tenant,
    VolumeId, VolumeSpec, hex,
};
use crate::proto::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessType, MountVolume};

pub(super) use claim::{
    capacity_range, expand, health, no_attributes, publish_context, stage, unstage,
};
pub(super) use maps::bounded;

/// Linux' PATH_MAX without the final NUL.
const LONGEST_PATH: usize = 4095;

/// The highest group id of Kubernetes (`fsGroup` is an int64 that must fit a positive int32).
const HIGHEST_GROUP: u32 = 2_147_483_647;

/// An invalid request.
///
/// No variant holds a value of mount flags, secrets or tokens, so none can get into a log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Invalid {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("volume_id {0}")]
    VolumeId(#[source] IdError),
    #[error("{field} {problem}")]
    Name {
        field: &'static str,
        problem: &'static str,
    },
    #[error("{field} has {bytes} bytes in all, and at most {limit} are taken")]
    TooLarge {
        field: &'static str,
        bytes: usize,
        limit: usize,
    },
    #[error("{field} is {value}; it must not be negative")]
    Negative { field: &'static str, value: i64 },
    #[error("capacity_range is empty: required_bytes {required} is more than limit_bytes {limit}")]
    EmptyRange { required: i64, limit: i64 },
    #[error("volume_content_source has no type: a snapshot or a volume")]
    NoSourceType,
    #[error("{0} names {1:?} twice")]
    Twice(&'static str, String),
    #[error("{field} has {count} entries, and at most {limit} are taken")]
    TooMany {
        field: &'static str,
        count: usize,
        limit: usize,
    },
    #[error(
        "snapshot_ids names other snapshots than the group has: the group {group} has {}",
        snapshots.join(", ")
    )]
    OtherSnapshots {
        group: String,
        snapshots: Vec<String>,
    },
    #[error(
        "volume_context has {0:?}, but a persistent volume has no attributes there; set parameters \
         in its StorageClass"
    )]
    ClaimAttribute(String),
    #[error(
        "publish_context is not from ControllerPublishVolume of this driver, which returns nothing \
         or readOnly=true"
    )]
    PublishContext,
    #[error("parameter {0:?} is unknown; a snapshot's class has none")]
    SnapshotParameter(String),
    #[error("{field} {problem}")]
    Path {
        field: &'static str,
        problem: &'static str,
    },
    #[error("volume_capability has no access_type; this driver serves mount volumes")]
    NoAccessType,
    #[error("volume_capability asks for a block device; this driver serves mount volumes only")]
    Block,
    #[error("volume_capability has no access_mode")]
    NoAccessMode,
    #[error("access mode {0} is unknown to CSI 1.13")]
    UnknownAccessMode(i32),
    #[error("access mode {0} is not possible: a volume lives on one node; use a SINGLE_NODE mode")]
    ManyNodes(&'static str),
    #[error(
        "fs_type is given; a volume has the filesystem of its node's pool: remove `fsType` from \
         the volume"
    )]
    FsType,
    #[error(
        "mount_flags are given, and this driver honours none: it chooses the options of its mounts \
         itself; remove `mountOptions`"
    )]
    MountFlags,
    #[error("volume_mount_group must be a group id, a number from 0 to {HIGHEST_GROUP}")]
    MountGroup,
    #[error(
        "volume_id is not a persistent volume's (vol-…), and the request is not marked as an \
         inline volume's: volume_context lacks {KUBELET}ephemeral=true, which kubelet adds when \
         the pod has the volume inline (`volumes[].csi`) and the CSIDriver object says \
         podInfoOnMount: true and lists Ephemeral"
    )]
    NotEphemeral,
    #[error(
        "volume_context lacks {KUBELET}{0}, which kubelet adds when the CSIDriver object says \
         podInfoOnMount: true"
    )]
    NoPodInfo(&'static str),
    #[error("{KUBELET}pod.uid {0}")]
    PodUid(#[source] IdError),
    #[error("{KUBELET}pod.namespace {0}")]
    Namespace(#[source] NameError),
    #[error("{KUBELET}pod.name has 1 to 253 bytes and no control characters")]
    PodName,
    #[error(
        "target_path must end with pods/<pod uid>/volumes/kubernetes.io~csi/<volume>/mount, as \
         kubelet's do: otherwise nothing confirms the pod"
    )]
    NotKubeletsPath,
    #[error(
        "target_path belongs to another pod than {KUBELET}pod.uid says, so the volume's attributes \
         are not trusted; remove the {KUBELET}… keys from the pod's spec, and check that the \
         CSIDriver object says podInfoOnMount: true"
    )]
    OtherPod,
    #[error(
        "volume_id is not the one that kubelet makes of this pod's uid and the volume's name, so \
         the volume's attributes are not trusted; remove the {KUBELET}… keys from the pod's spec, \
         and check that the CSIDriver object says podInfoOnMount: true"
    )]
    OtherVolume,
    #[error(transparent)]
    Attribute(#[from] AttributeError),
    #[error(transparent)]
    Parameter(#[from] ParameterError),
}

/// A parsed `NodePublishVolume`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one at a time, and it is taken apart at once"
)]
pub(super) enum Publish {
    /// An inline volume of a pod.
    Inline(PublishRequest),
    /// A persistent volume; not staged if `staged_at` is `None`.
    Claim(MountClaim),
}

/// Parses `NodePublishVolume`.
pub(super) fn publish(request: csi::NodePublishVolumeRequest) -> Result<Publish, Invalid> {
    bounded(&[
        ("publish_context", &request.publish_context),
        ("secrets", &request.secrets),
        ("volume_context", &request.volume_context),
    ])?;
    let ephemeral = request.volume_context.get(&format!("{KUBELET}ephemeral"));
    if is_claim(&request.volume_id) && ephemeral.is_none_or(|value| value != "true") {
        claim::publish(request).map(Publish::Claim)
    } else {
        inline(request).map(Publish::Inline)
    }
}

/// Whether this driver makes such ids for persistent volumes: `vol-` and 32 hex digits.
pub(super) fn is_claim(id: &str) -> bool {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    id.strip_prefix("vol-")
        .is_some_and(|digits| digits.len() == 32 && digits.bytes().all(hex))
}

/// Parses `NodePublishVolume` of an inline volume, field by field in the order of the
/// specification.
fn inline(request: csi::NodePublishVolumeRequest) -> Result<PublishRequest, Invalid> {
    let volume = volume_id(&request.volume_id)?;
    let target = path("target_path", &request.target_path)?;
    let (mount_group, mode) = given_capability(request.volume_capability)?;
    let mut attributes = request.volume_context;
    let kubelets = take_kubelets_keys(&mut attributes);
    let (tenant, pod) = believe(&kubelets, &volume, &target)?;
    let mut spec = VolumeSpec::parse(&attributes)?;
    spec.root.mount_group = mount_group;
    let share = spec.share != Some(Share::Never);
    Ok(PublishRequest {
        volume,
        target,
        tenant,
        pod,
        spec,
        read_only: request.readonly || mode == Mode::SingleNodeReaderOnly,
        multiple_targets: mode == Mode::SingleNodeMultiWriter,
        base: None,
        cleared: 0,
        share,
        fetched: None,
        waited: Duration::ZERO,
    })
}

/// Parses `NodeUnpublishVolume`. The id is not parsed: an unpublish of a volume that cannot exist
/// succeeds.
pub(super) fn unpublish(
    request: csi::NodeUnpublishVolumeRequest,
) -> Result<(String, PathBuf), Invalid> {
    if request.volume_id.is_empty() {
        return Err(Invalid::Missing("volume_id"));
    }
    let target = path("target_path", &request.target_path)?;
    Ok((request.volume_id, target))
}

/// Parses `NodeGetVolumeStats`. The id and the path are only compared with those of existing
/// volumes, so an invalid one is NOT_FOUND.
pub(super) fn stats(request: &csi::NodeGetVolumeStatsRequest) -> Result<(&str, PathBuf), Invalid> {
    let volume = given("volume_id", &request.volume_id)?;
    let path = given("volume_path", &request.volume_path)?;
    Ok((volume, PathBuf::from(path)))
}

/// A field that must not be empty.
pub(super) fn given<'a>(field: &'static str, text: &'a str) -> Result<&'a str, Invalid> {
    if text.is_empty() {
        Err(Invalid::Missing(field))
    } else {
        Ok(text)
    }
}

fn volume_id(text: &str) -> Result<VolumeId, Invalid> {
    match text.parse() {
        Ok(id) => Ok(id),
        Err(IdError::Empty) => Err(Invalid::Missing("volume_id")),
        Err(error) => Err(Invalid::VolumeId(error)),
    }
}

/// A path with only one meaning: absolute, and in its only spelling.
fn path(field: &'static str, text: &str) -> Result<PathBuf, Invalid> {
    let problem = |problem| Invalid::Path { field, problem };
    if text.is_empty() {
        return Err(Invalid::Missing(field));
    }
    if !text.starts_with('/') {
        return Err(problem("must be absolute"));
    }
    if text.len() > LONGEST_PATH {
        return Err(problem(
            "is longer than the 4095 bytes that the kernel allows",
        ));
    }
    if text.contains('\0') {
        return Err(problem("holds a NUL"));
    }
    if text == "/" {
        return Err(problem("is the root directory"));
    }
    let component = |part: &str| !matches!(part, "" | "." | "..");
    if !text[1..].split('/').all(component) {
        return Err(problem(
            "must be written without `..`, `.`, `//` and a final `/`",
        ));
    }
    Ok(PathBuf::from(text))
}

/// The mount group and the access mode of a capability (CSI specification, `VolumeCapability`).
pub(super) fn capability(
    capability: csi::VolumeCapability,
) -> Result<(Option<u32>, Mode), Invalid> {
    let mount = mount_volume(capability.access_type)?;
    let mode = access_mode(capability.access_mode)?;
    Ok((mount_group(&mount)?, mode))
}

/// The same of one that must not be absent.
pub(super) fn given_capability(
    given: Option<csi::VolumeCapability>,
) -> Result<(Option<u32>, Mode), Invalid> {
    capability(given.ok_or(Invalid::Missing("volume_capability"))?)
}

fn mount_volume(access_type: Option<AccessType>) -> Result<MountVolume, Invalid> {
    let mount = match access_type {
        None => return Err(Invalid::NoAccessType),
        Some(AccessType::Block(_)) => return Err(Invalid::Block),
        Some(AccessType::Mount(mount)) => mount,
    };
    if !mount.fs_type.is_empty() {
        return Err(Invalid::FsType);
    }
    if !mount.mount_flags.is_empty() {
        return Err(Invalid::MountFlags);
    }
    Ok(mount)
}

fn mount_group(mount: &MountVolume) -> Result<Option<u32>, Invalid> {
    let text = &mount.volume_mount_group;
    if text.is_empty() {
        return Ok(None);
    }
    // `parse` alone would accept "+5".
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    let group = digits.then(|| text.parse().ok()).flatten();
    match group.filter(|group| *group <= HIGHEST_GROUP) {
        Some(group) => Ok(Some(group)),
        None => Err(Invalid::MountGroup),
    }
}

fn access_mode(mode: Option<csi::volume_capability::AccessMode>) -> Result<Mode, Invalid> {
    let number = mode.ok_or(Invalid::NoAccessMode)?.mode;
    let mode = Mode::try_from(number).map_err(|_| Invalid::UnknownAccessMode(number))?;
    match mode {
        Mode::Unknown => Err(Invalid::NoAccessMode),
        Mode::SingleNodeWriter
        | Mode::SingleNodeReaderOnly
        | Mode::SingleNodeSingleWriter
        | Mode::SingleNodeMultiWriter => Ok(mode),
        Mode::MultiNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter => {
            Err(Invalid::ManyNodes(mode.as_str_name()))
        }
    }
}

/// Takes kubelet's keys out of the attributes. Keys that the driver does not need, such as tokens
/// of service accounts, are dropped.
fn take_kubelets_keys(attributes: &mut BTreeMap<String, String>) -> BTreeMap<String, String> {
    let (kubelets, users) = std::mem::take(attributes)
        .into_iter()
        .partition(|(key, _)| key.starts_with(KUBELET));
    *attributes = users;
    kubelets
}

/// The pod and its tenant, if kubelet's keys can be trusted.
fn believe(
    kubelets: &BTreeMap<String, String>,
    volume: &VolumeId,
    target: &Path,
) -> Result<(Tenant, Pod), Invalid> {
    let get = |key: &'static str| {
        kubelets
            .get(&format!("{KUBELET}{key}"))
            .map(String::as_str)
            .ok_or(Invalid::NoPodInfo(key))
    };
    if get("ephemeral") != Ok("true") {
        return Err(Invalid::NotEphemeral);
    }
    let uid: PodUid = get("pod.uid")?.parse().map_err(Invalid::PodUid)?;
    let tenant: Tenant = get("pod.namespace")?.parse().map_err(Invalid::Namespace)?;
    let name = get("pod.name")?;
    let is_name =
        |name: &str| (1..=253).contains(&name.len()) && !name.chars().any(char::is_control);
    if !is_name(name) {
        return Err(Invalid::PodName);
    }
    let (path_uid, volume_name) = kubelets_target(target).ok_or(Invalid::NotKubeletsPath)?;
    if path_uid != uid.as_str() {
        return Err(Invalid::OtherPod);
    }
    let handle = Sha256::digest(format!("{uid}{volume_name}"));
    if volume.as_str() != format!("csi-{}", hex(&handle)) {
        return Err(Invalid::OtherVolume);
    }
    // It decides nothing, so an odd one is no reason to refuse the volume.
    let account = get("serviceAccount.name").ok();
    let pod = Pod {
        uid,
        name: name.to_owned(),
        service_account: account.filter(|name| is_name(name)).map(str::to_owned),
    };
    Ok((tenant, pod))
}

/// The pod's uid and the volume's name in a target path of kubelet.
fn kubelets_target(target: &Path) -> Option<(&str, &str)> {
    let parts: Vec<&str> = target
        .components()
        .filter_map(|part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        })
        .collect();
    match parts[..] {
        [
            ..,
            "pods",
            uid,
            "volumes",
            "kubernetes.io~csi",
            volume,
            "mount",
        ] => Some((uid, volume)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
