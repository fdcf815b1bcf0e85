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

use sha2::{Digest as _, Sha256};

use super::hex;
use crate::engine::PublishRequest;
use crate::engine::claims::MountClaim;
use crate::model::{
    AttributeError, IdError, NameError, ParameterError, Pod, PodUid, Share, Tenant, VolumeId,
    VolumeSpec,
};
use crate::proto::csi::v1 as csi;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessType, MountVolume};

pub(super) use claim::{
    capacity_range, expand, health, no_attributes, publish_context, stage, unstage,
};
pub(super) use maps::bounded;

/// The prefix of the keys that kubelet adds to a pod's attributes, and sidecars to parameters.
pub(super) const KUBELET: &str = "csi.storage.k8s.io/";

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
    #[error(
        "capacity_range holds nothing: required_bytes {required} is more than limit_bytes {limit}"
    )]
    EmptyRange { required: i64, limit: i64 },
    #[error("volume_content_source has no type: a snapshot or a volume")]
    NoSourceType,
    #[error("{0} names {1:?} twice")]
    Twice(&'static str, String),
    #[error(
        "snapshot_ids names other snapshots than the group has: the group {group} has {}",
        snapshots.join(", ")
    )]
    OtherSnapshots {
        group: String,
        snapshots: Vec<String>,
    },
    #[error(
        "volume_context has {0:?}, but a persistent volume has no attributes there; set parameters in \
         its StorageClass"
    )]
    ClaimAttribute(String),
    #[error(
        "publish_context is not from ControllerPublishVolume of this driver, which returns nothing or \
         readOnly=true"
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
        "fs_type is given; a volume has the filesystem of its node's pool: remove `fsType` from the \
         volume"
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
        "volume_id is no claim's (vol-…), and the request is not marked as an inline volume's: \
         volume_context lacks {KUBELET}ephemeral=true, which kubelet adds when the pod has the \
         volume inline (`volumes[].csi`) and the CSIDriver object says podInfoOnMount: true and \
         lists Ephemeral"
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
        "volume_id is not the one that kubelet makes of this pod's uid and the volume's name, so the \
         volume's attributes are not trusted; remove the {KUBELET}… keys from the pod's spec, and \
         check that the CSIDriver object says podInfoOnMount: true"
    )]
    OtherVolume,
    #[error(transparent)]
    Attribute(#[from] AttributeError),
    #[error(transparent)]
    Parameter(#[from] ParameterError),
}

/// A parsed `NodePublishVolume`.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    let capability = request
        .volume_capability
        .ok_or(Invalid::Missing("volume_capability"))?;
    let mount = mount_volume(capability.access_type)?;
    let mode = access_mode(capability.access_mode)?;
    let mut attributes = request.volume_context;
    let kubelets = take_kubelets_keys(&mut attributes);
    let (tenant, pod) = believe(&kubelets, &volume, &target)?;
    let mut spec = VolumeSpec::parse(&attributes)?;
    spec.root.mount_group = mount_group(&mount)?;
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

/// Checks a capability (CSI specification, `VolumeCapability`).
pub(super) fn capability(
    capability: csi::VolumeCapability,
) -> Result<(MountVolume, Mode), Invalid> {
    let mount = mount_volume(capability.access_type)?;
    let mode = access_mode(capability.access_mode)?;
    mount_group(&mount)?;
    Ok((mount, mode))
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
mod tests {
    use super::*;
    use csi::volume_capability::{AccessMode, BlockVolume};

    const UID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

    fn handle(uid: &str, volume: &str) -> String {
        format!("csi-{}", hex(&Sha256::digest(format!("{uid}{volume}"))))
    }

    fn target(uid: &str, volume: &str) -> String {
        format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount")
    }

    /// The context that kubelet sends for a volume `src`.
    fn request(attributes: &[(&str, &str)]) -> csi::NodePublishVolumeRequest {
        let kubelets = [
            ("csi.storage.k8s.io/ephemeral", "true"),
            ("csi.storage.k8s.io/pod.name", "build-42"),
            ("csi.storage.k8s.io/pod.namespace", "ci"),
            ("csi.storage.k8s.io/pod.uid", UID),
            ("csi.storage.k8s.io/serviceAccount.name", "default"),
        ];
        csi::NodePublishVolumeRequest {
            volume_id: handle(UID, "src"),
            target_path: target(UID, "src"),
            volume_capability: Some(csi::VolumeCapability {
                access_mode: Some(AccessMode {
                    mode: Mode::SingleNodeMultiWriter.into(),
                }),
                access_type: Some(AccessType::Mount(MountVolume::default())),
            }),
            volume_context: kubelets
                .iter()
                .chain(attributes)
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            ..Default::default()
        }
    }

    type Spoil = fn(&mut csi::NodePublishVolumeRequest);

    fn mount(request: &mut csi::NodePublishVolumeRequest) -> &mut MountVolume {
        match &mut request.volume_capability {
            Some(csi::VolumeCapability {
                access_type: Some(AccessType::Mount(mount)),
                ..
            }) => mount,
            other => panic!("{other:?}"),
        }
    }

    fn mode(request: &mut csi::NodePublishVolumeRequest, mode: impl Into<i32>) {
        let capability = request.volume_capability.as_mut().expect("a capability");
        capability.access_mode = Some(AccessMode { mode: mode.into() });
    }

    fn context(request: &mut csi::NodePublishVolumeRequest, key: &str, value: Option<&str>) {
        let key = format!("{KUBELET}{key}");
        match value {
            Some(value) => request.volume_context.insert(key, value.to_owned()),
            None => request.volume_context.remove(&key),
        };
    }

    #[test]
    fn what_kubelet_sends_is_understood() {
        let mut request = request(&[("type", "output"), ("name", "binaries"), ("mode", "750")]);
        mount(&mut request).volume_mount_group = "2000".to_owned();
        context(&mut request, "serviceAccount.tokens", Some("{\"x\":1}"));
        context(&mut request, "something.new", Some("1"));
        let wanted = inline(request).expect("understood");
        assert_eq!(wanted.volume.as_str(), handle(UID, "src"));
        assert_eq!(wanted.target, Path::new(&target(UID, "src")));
        assert_eq!(wanted.tenant.as_str(), "ci");
        assert_eq!(
            (wanted.pod.uid.as_str(), wanted.pod.name.as_str()),
            (UID, "build-42")
        );
        assert_eq!(wanted.pod.service_account.as_deref(), Some("default"));
        assert_eq!(wanted.spec.kind.type_name(), "output");
        assert_eq!(wanted.spec.root.mount_group, Some(2000));
        assert!(wanted.multiple_targets && !wanted.read_only);
    }

    #[test]
    fn a_service_account_that_is_none_is_not_known_and_no_mistake() {
        for account in [None, Some(""), Some("a\nb")] {
            let mut request = request(&[]);
            context(&mut request, "serviceAccount.name", account);
            let wanted = inline(request).expect("understood");
            assert_eq!(wanted.pod.service_account, None, "{account:?}");
        }
    }

    #[test]
    fn access_modes_say_how_often_and_whether_to_write() {
        for (wanted, read_only, multiple_targets) in [
            (Mode::SingleNodeWriter, false, false),
            (Mode::SingleNodeSingleWriter, false, false),
            (Mode::SingleNodeMultiWriter, false, true),
            (Mode::SingleNodeReaderOnly, true, false),
        ] {
            let mut request = request(&[]);
            mode(&mut request, wanted);
            let parsed = inline(request).expect("understood");
            assert_eq!(
                (parsed.read_only, parsed.multiple_targets),
                (read_only, multiple_targets),
                "{wanted:?}"
            );
        }
        let mut request = request(&[]);
        request.readonly = true;
        assert!(inline(request).expect("understood").read_only);
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table, one row per mistake")]
    fn each_mistake_has_its_own_message() {
        let mistakes: &[(Spoil, &str)] = &[
            (|r| r.volume_id.clear(), "volume_id is missing"),
            (|r| r.volume_id = "a/../b".into(), "volume_id holds '/'"),
            (|r| r.volume_id = "x".repeat(129), "volume_id is 129 bytes"),
            (|r| r.target_path.clear(), "target_path is missing"),
            (|r| r.target_path = "mnt".into(), "must be absolute"),
            (|r| r.target_path = "/a/../mnt".into(), "without `..`"),
            (|r| r.target_path = "/a//mnt".into(), "without `..`"),
            (|r| r.target_path.push('/'), "final `/`"),
            (|r| r.target_path.push('\0'), "holds a NUL"),
            (|r| r.target_path = "/".into(), "root directory"),
            (|r| r.target_path = format!("/{}", "x".repeat(4095)), "4095"),
            (
                |r| r.volume_capability = None,
                "volume_capability is missing",
            ),
            (
                |r| r.volume_capability.as_mut().expect("some").access_type = None,
                "no access_type",
            ),
            (
                |r| {
                    r.volume_capability.as_mut().expect("some").access_type =
                        Some(AccessType::Block(BlockVolume {}));
                },
                "block device",
            ),
            (|r| mount(r).fs_type = "ext4".into(), "remove `fsType`"),
            (
                |r| mount(r).mount_flags = vec!["hunter2".into()],
                "mount_flags are given",
            ),
            (
                |r| r.volume_capability.as_mut().expect("some").access_mode = None,
                "no access_mode",
            ),
            (|r| mode(r, Mode::Unknown), "no access_mode"),
            (|r| mode(r, 99), "access mode 99 is unknown"),
            (
                |r| mode(r, Mode::MultiNodeMultiWriter),
                "MULTI_NODE_MULTI_WRITER is not possible",
            ),
            (
                |r| mount(r).volume_mount_group = "staff".into(),
                "volume_mount_group must be a group id",
            ),
            (
                |r| mount(r).volume_mount_group = "+5".into(),
                "volume_mount_group must be a group id",
            ),
            (
                |r| mount(r).volume_mount_group = "4294967295".into(),
                "volume_mount_group must be a group id",
            ),
            (|r| context(r, "ephemeral", None), "volume_id is no claim's"),
            (
                |r| context(r, "ephemeral", Some("false")),
                "volume_id is no claim's",
            ),
            (
                |r| context(r, "pod.uid", None),
                "lacks csi.storage.k8s.io/pod.uid",
            ),
            (
                |r| context(r, "pod.uid", Some("../x")),
                "csi.storage.k8s.io/pod.uid holds",
            ),
            (
                |r| context(r, "pod.namespace", None),
                "lacks csi.storage.k8s.io/pod.namespace",
            ),
            (
                |r| context(r, "pod.namespace", Some("../x")),
                "csi.storage.k8s.io/pod.namespace must be a DNS label",
            ),
            (
                |r| context(r, "pod.name", None),
                "lacks csi.storage.k8s.io/pod.name",
            ),
            (
                |r| context(r, "pod.name", Some("a\nb")),
                "csi.storage.k8s.io/pod.name has 1 to 253 bytes",
            ),
            (
                |r| r.target_path = "/mnt/somewhere".into(),
                "must end with pods/<pod uid>/volumes",
            ),
            (
                |r| r.target_path = r.target_path.replace("~csi", "~nfs"),
                "must end with pods/<pod uid>/volumes",
            ),
            (
                |r| context(r, "pod.uid", Some("11111111-d9cb-469f-a165-70867728950e")),
                "belongs to another pod",
            ),
            (
                |r| r.volume_id = handle("11111111-d9cb-469f-a165-70867728950e", "src"),
                "volume_id is not the one that kubelet makes",
            ),
            (
                |r| r.target_path = target(UID, "other"),
                "volume_id is not the one that kubelet makes",
            ),
            (
                |r| {
                    r.volume_context.insert("tpye".into(), "input".into());
                },
                r#"volume attribute "tpye" is unknown"#,
            ),
        ];
        for (spoil, expected) in mistakes {
            let mut request = request(&[]);
            spoil(&mut request);
            let message = inline(request).expect_err(expected).to_string();
            assert!(message.contains(expected), "{expected}: {message}");
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn a_pod_that_claims_another_namespace_cannot_also_forge_what_kubelet_says() {
        // The user wrote the attributes of this PersistentVolume, but not the path and the handle.
        let mut forged = request(&[("type", "input"), ("from", "artifact/secret")]);
        forged.volume_id = "my-volume".into();
        forged.target_path = target(UID, "my-volume");
        assert_eq!(inline(forged), Err(Invalid::OtherVolume));
        let mut forged = request(&[]);
        context(&mut forged, "pod.uid", Some("the-victims-uid"));
        assert_eq!(inline(forged), Err(Invalid::OtherPod));
    }

    #[test]
    fn only_an_id_of_this_driver_that_is_not_marked_ephemeral_is_a_claim() {
        let id = "vol-0123456789abcdef0123456789abcdef";
        assert!(is_claim(id));
        for other in ["vol-1", &id[1..], &id.to_uppercase(), &format!("{id}0")] {
            assert!(!is_claim(other), "{other}");
        }
        let mut claims = request(&[]);
        claims.volume_id = id.into();
        assert_eq!(publish(claims.clone()), Err(Invalid::OtherVolume));
        context(&mut claims, "ephemeral", Some("false"));
        assert!(matches!(publish(claims), Ok(Publish::Claim(_))));
        assert!(matches!(publish(request(&[])), Ok(Publish::Inline(_))));
    }

    #[test]
    fn an_unpublish_needs_an_id_and_a_path_and_no_more() {
        let unpublish = |id: &str, target: &str| {
            super::unpublish(csi::NodeUnpublishVolumeRequest {
                volume_id: id.to_owned(),
                target_path: target.to_owned(),
            })
        };
        let (id, path) = unpublish("../odd id", "/mnt/x").expect("understood");
        assert_eq!(
            (id.as_str(), path.as_path()),
            ("../odd id", Path::new("/mnt/x"))
        );
        assert_eq!(unpublish("", "/mnt/x"), Err(Invalid::Missing("volume_id")));
        assert_eq!(unpublish("x", ""), Err(Invalid::Missing("target_path")));
        for bad in ["mnt", "/mnt/../x", "/mnt\0"] {
            assert!(
                matches!(unpublish("x", bad), Err(Invalid::Path { .. })),
                "{bad}"
            );
        }
    }

    #[test]
    fn stats_need_an_id_and_a_path() {
        let stats = |id: &str, path: &str| {
            let request = csi::NodeGetVolumeStatsRequest {
                volume_id: id.to_owned(),
                volume_path: path.to_owned(),
                ..Default::default()
            };
            super::stats(&request).map(drop)
        };
        stats("x", "/mnt/x").expect("understood");
        assert_eq!(stats("", "/mnt/x"), Err(Invalid::Missing("volume_id")));
        stats("x", "some/path").expect("nothing is there, which is no mistake");
        stats("../odd id", "/mnt/x").expect("there is none, which is no mistake");
        assert_eq!(stats("x", ""), Err(Invalid::Missing("volume_path")));
    }
}
