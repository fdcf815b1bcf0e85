//! Parses the Node service's requests for persistent volumes: stage, publish, expand, health. The
//! engine answers NOT_FOUND for an unknown id.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{Invalid, KUBELET, bounded, capability, csi, given, given_capability, path, volume_id};
use crate::engine::claims::MountClaim;
use csi::volume_capability::access_mode::Mode;

/// The key that the provisioner adds to the attributes of every PersistentVolume.
const PROVISIONER: &str = "storage.kubernetes.io/csiProvisionerIdentity";

/// The key in a publish context that says "attached for reading only".
const READ_ONLY: &str = "readOnly";

/// The publish context that ControllerPublishVolume returns for the node. It is empty for reading
/// and writing.
pub(in crate::csi) fn publish_context(read_only: bool) -> BTreeMap<String, String> {
    let context = read_only.then(|| (READ_ONLY.to_owned(), "true".to_owned()));
    context.into_iter().collect()
}

/// Reads a publish context. One that [`publish_context`] never makes is refused: if it were
/// ignored, a pod could write to a volume that is attached for reading only.
fn attached_read_only(context: &BTreeMap<String, String>) -> Result<bool, Invalid> {
    let read_only = context.contains_key(READ_ONLY);
    if *context == publish_context(read_only) {
        Ok(read_only)
    } else {
        Err(Invalid::PublishContext)
    }
}

/// Parses `NodeStageVolume`. The orchestrator has created the staging path (CSI specification,
/// `NodeStageVolumeRequest.staging_target_path`).
pub(in crate::csi) fn stage(request: csi::NodeStageVolumeRequest) -> Result<MountClaim, Invalid> {
    let claim = volume_id(&request.volume_id)?;
    let target = path("staging_target_path", &request.staging_target_path)?;
    bounded(&[
        ("publish_context", &request.publish_context),
        ("secrets", &request.secrets),
        ("volume_context", &request.volume_context),
    ])?;
    let (mount_group, mode) = given_capability(request.volume_capability)?;
    no_attributes(&request.volume_context)?;
    let attached_read_only = attached_read_only(&request.publish_context)?;
    Ok(MountClaim {
        claim,
        target,
        staging: true,
        staged_at: None,
        read_only: attached_read_only || mode == Mode::SingleNodeReaderOnly,
        multiple_targets: mode == Mode::SingleNodeMultiWriter,
        mount_group,
    })
}

/// Parses `NodePublishVolume` of a persistent volume.
pub(super) fn publish(request: csi::NodePublishVolumeRequest) -> Result<MountClaim, Invalid> {
    let claim = volume_id(&request.volume_id)?;
    let target = path("target_path", &request.target_path)?;
    let (mount_group, mode) = given_capability(request.volume_capability)?;
    no_attributes(&request.volume_context)?;
    let attached_read_only = attached_read_only(&request.publish_context)?;
    let staged_at = match request.staging_target_path.as_str() {
        "" => None,
        text => Some(path("staging_target_path", text)?),
    };
    // A mount there would look like the staged volume, or be inside a tenant's content.
    if staged_at.as_ref().is_some_and(|at| target.starts_with(at)) {
        return Err(Invalid::Path {
            field: "target_path",
            problem: "must be outside staging_target_path",
        });
    }
    Ok(MountClaim {
        claim,
        target,
        staging: false,
        staged_at,
        read_only: request.readonly || attached_read_only || mode == Mode::SingleNodeReaderOnly,
        multiple_targets: mode == Mode::SingleNodeMultiWriter,
        mount_group,
    })
}

/// Parses `NodeUnstageVolume`. The id is not parsed: a volume with an invalid id is not staged.
pub(in crate::csi) fn unstage(
    request: &csi::NodeUnstageVolumeRequest,
) -> Result<(&str, PathBuf), Invalid> {
    let volume = given("volume_id", &request.volume_id)?;
    let target = path("staging_target_path", &request.staging_target_path)?;
    Ok((volume, target))
}

/// A parsed `NodeExpandVolume`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::csi) struct Expand<'a> {
    /// The volume; NOT_FOUND if the id is invalid.
    pub volume: &'a str,
    /// Its path; NOT_FOUND if it is not mounted there.
    pub path: &'a str,
    /// The least capacity.
    pub required: u64,
}

/// Parses `NodeExpandVolume`.
pub(in crate::csi) fn expand(
    request: &csi::NodeExpandVolumeRequest,
) -> Result<Expand<'_>, Invalid> {
    let volume = given("volume_id", &request.volume_id)?;
    let path = given("volume_path", &request.volume_path)?;
    bounded(&[("secrets", &request.secrets)])?;
    if let Some(wanted) = request.volume_capability.clone() {
        capability(wanted)?;
    }
    let (required, _) = capacity_range(request.capacity_range.as_ref())?;
    Ok(Expand {
        volume,
        path,
        required,
    })
}

/// Parses `NodeGetVolumeHealth`. It only checks that the paths are paths.
pub(in crate::csi) fn health(request: &csi::NodeGetVolumeHealthRequest) -> Result<&str, Invalid> {
    let volume = given("volume_id", &request.volume_id)?;
    for (field, text) in [
        ("volume_publish_path", &request.volume_publish_path),
        ("staging_target_path", &request.staging_target_path),
    ] {
        if !text.is_empty() {
            path(field, text)?;
        }
    }
    Ok(volume)
}

/// The least and the most bytes (CSI specification, `CapacityRange`: 0 is absent, negative is
/// invalid).
pub(in crate::csi) fn capacity_range(
    range: Option<&csi::CapacityRange>,
) -> Result<(u64, Option<u64>), Invalid> {
    let Some(range) = range else {
        return Ok((0, None));
    };
    let bytes =
        |field, value: i64| u64::try_from(value).map_err(|_| Invalid::Negative { field, value });
    let required = bytes("required_bytes", range.required_bytes)?;
    let limit = bytes("limit_bytes", range.limit_bytes)?;
    if limit > 0 && limit < required {
        return Err(Invalid::EmptyRange {
            required: range.required_bytes,
            limit: range.limit_bytes,
        });
    }
    Ok((required, (limit > 0).then_some(limit)))
}

/// Refuses attributes of a persistent volume, except those that Kubernetes adds. A user may have
/// written attributes of an inline volume, which have no effect here.
pub(in crate::csi) fn no_attributes(context: &BTreeMap<String, String>) -> Result<(), Invalid> {
    let ours = |key: &&String| !key.starts_with(KUBELET) && key.as_str() != PROVISIONER;
    match context.keys().find(ours) {
        Some(key) => Err(Invalid::ClaimAttribute(key.chars().take(64).collect())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};

    const ID: &str = "vol-0123456789abcdef0123456789abcdef";

    fn wanted(mode: Mode) -> csi::VolumeCapability {
        csi::VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Mount(MountVolume {
                volume_mount_group: "2000".into(),
                ..Default::default()
            })),
        }
    }

    fn publish_request() -> csi::NodePublishVolumeRequest {
        csi::NodePublishVolumeRequest {
            volume_id: ID.into(),
            staging_target_path: "/stage/1".into(),
            target_path: "/pods/1".into(),
            volume_capability: Some(wanted(Mode::SingleNodeMultiWriter)),
            volume_context: [
                (PROVISIONER.to_owned(), "1-2".to_owned()),
                (format!("{KUBELET}ephemeral"), "false".to_owned()),
            ]
            .into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_publish_is_a_mount_beside_its_stage() {
        let mut request = publish_request();
        let mount = publish(request.clone()).expect("understood");
        assert_eq!(mount.claim.as_str(), ID);
        assert_eq!(mount.staged_at, Some(PathBuf::from("/stage/1")));
        assert_eq!(mount.mount_group, Some(2000));
        assert!(mount.multiple_targets && !mount.read_only && !mount.staging);
        request.readonly = true;
        assert!(publish(request.clone()).expect("understood").read_only);
        request.target_path = "/stage/10".into();
        publish(request.clone()).expect("beside it");
        request.staging_target_path.clear();
        assert_eq!(publish(request).expect("understood").staged_at, None);
    }

    #[test]
    fn what_is_attached_for_reading_only_is_mounted_so() {
        let writable = publish_context(false);
        assert!(writable.is_empty());
        let stage_with = |context: BTreeMap<String, String>| {
            stage(csi::NodeStageVolumeRequest {
                volume_id: ID.into(),
                staging_target_path: "/stage/1".into(),
                volume_capability: Some(wanted(Mode::SingleNodeWriter)),
                publish_context: context,
                ..Default::default()
            })
        };
        let publish_with = |context: BTreeMap<String, String>| {
            publish(csi::NodePublishVolumeRequest {
                publish_context: context,
                ..publish_request()
            })
        };
        for (context, expected) in [(writable, false), (publish_context(true), true)] {
            let staged = stage_with(context.clone()).expect("understood");
            let published = publish_with(context).expect("understood");
            assert_eq!(
                (staged.read_only, published.read_only),
                (expected, expected)
            );
        }
        for (key, value) in [
            ("readOnly", "false"),
            ("readOnly", ""),
            ("devicePath", "/dev/x"),
        ] {
            let made_up = BTreeMap::from([(key.to_owned(), value.to_owned())]);
            assert_eq!(stage_with(made_up.clone()), Err(Invalid::PublishContext));
            assert_eq!(publish_with(made_up.clone()), Err(Invalid::PublishContext));
            let both = made_up.into_iter().chain(publish_context(true)).collect();
            let mixed = publish_with(both);
            assert_eq!(mixed.is_err(), key != READ_ONLY, "{key}");
        }
    }

    #[test]
    fn each_call_that_brings_maps_has_them_bounded() {
        let long = BTreeMap::from([("k".to_owned(), "v".repeat(70_000))]);
        let too_large = |refused: Result<(), Invalid>, field: &str| {
            let message = refused.expect_err(field).to_string();
            assert!(
                message.starts_with(&format!("{field} has 70001")),
                "{message}"
            );
        };
        let staged = |secrets: &_, volume_context: &_, publish_context: &_| {
            stage(csi::NodeStageVolumeRequest {
                volume_id: ID.into(),
                staging_target_path: "/stage/1".into(),
                volume_capability: Some(wanted(Mode::SingleNodeWriter)),
                secrets: BTreeMap::clone(secrets),
                volume_context: BTreeMap::clone(volume_context),
                publish_context: BTreeMap::clone(publish_context),
            })
            .map(drop)
        };
        let none = BTreeMap::new();
        staged(&none, &none, &none).expect("understood");
        too_large(staged(&long, &none, &none), "secrets");
        too_large(staged(&none, &long, &none), "volume_context");
        too_large(staged(&none, &none, &long), "publish_context");
        let expand_with_secrets = csi::NodeExpandVolumeRequest {
            volume_id: ID.into(),
            volume_path: "/pods/1".into(),
            secrets: long,
            ..Default::default()
        };
        too_large(expand(&expand_with_secrets).map(drop), "secrets");
    }

    #[test]
    fn each_mistake_of_a_publish_has_its_own_message() {
        type Spoil = fn(&mut csi::NodePublishVolumeRequest);
        let mistakes: &[(Spoil, &str)] = &[
            (|r| r.target_path.clear(), "target_path is missing"),
            (
                |r| r.staging_target_path = "x".into(),
                "staging_target_path must be absolute",
            ),
            (
                |r| r.target_path = "/stage/1".into(),
                "target_path must be outside staging_target_path",
            ),
            (
                |r| r.target_path = "/stage/1/x".into(),
                "target_path must be outside staging_target_path",
            ),
            (
                |r| r.volume_capability = None,
                "volume_capability is missing",
            ),
            (
                |r| r.volume_capability = Some(wanted(Mode::MultiNodeMultiWriter)),
                "MULTI_NODE_MULTI_WRITER is not possible",
            ),
            (
                |r| {
                    r.volume_context.insert("type".into(), "output".into());
                },
                r#"volume_context has "type", but a persistent volume has no attributes"#,
            ),
        ];
        for (spoil, expected) in mistakes {
            let mut request = publish_request();
            spoil(&mut request);
            let message = publish(request).expect_err(expected).to_string();
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn a_stage_needs_an_id_a_path_and_a_capability() {
        type Spoil = fn(&mut csi::NodeStageVolumeRequest);

        let request = csi::NodeStageVolumeRequest {
            volume_id: ID.into(),
            staging_target_path: "/stage/1".into(),
            volume_capability: Some(wanted(Mode::SingleNodeReaderOnly)),
            ..Default::default()
        };
        let mount = stage(request.clone()).expect("understood");
        assert!(mount.staging && mount.read_only && mount.staged_at.is_none());
        let mistakes: &[(Spoil, &str)] = &[
            (|r| r.volume_id.clear(), "volume_id is missing"),
            (
                |r| r.staging_target_path.clear(),
                "staging_target_path is missing",
            ),
            (
                |r| r.volume_capability = None,
                "volume_capability is missing",
            ),
            (
                |r| {
                    r.volume_capability.as_mut().expect("some").access_type =
                        Some(AccessType::Block(BlockVolume {}));
                },
                "block device",
            ),
        ];
        for (spoil, expected) in mistakes {
            let mut request = request.clone();
            spoil(&mut request);
            let message = stage(request).expect_err(expected).to_string();
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }

    #[test]
    fn an_unstage_needs_an_id_and_a_path() {
        let unstage = |id: &str, path: &str| {
            super::unstage(&csi::NodeUnstageVolumeRequest {
                volume_id: id.into(),
                staging_target_path: path.into(),
            })
            .map(drop)
        };
        assert_eq!(unstage("../odd id", "/stage/1"), Ok(()));
        assert_eq!(unstage("", "/stage/1"), Err(Invalid::Missing("volume_id")));
        assert_eq!(
            unstage("x", ""),
            Err(Invalid::Missing("staging_target_path"))
        );
    }

    #[test]
    fn a_capacity_is_a_range_that_holds_something() {
        let range = |required_bytes, limit_bytes| {
            capacity_range(Some(&csi::CapacityRange {
                required_bytes,
                limit_bytes,
            }))
        };
        assert_eq!(capacity_range(None), Ok((0, None)));
        assert_eq!(range(0, 0), Ok((0, None)));
        assert_eq!(range(5, 5), Ok((5, Some(5))));
        assert_eq!(range(i64::MAX, 0), Ok((i64::MAX.unsigned_abs(), None)));
        for (required, limit, expected) in [
            (-1, 0, "required_bytes is -1; it must not be negative"),
            (0, i64::MIN, "limit_bytes is -9223372036854775808"),
            (6, 5, "required_bytes 6 is more than limit_bytes 5"),
        ] {
            let message = range(required, limit).expect_err(expected).to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn an_expansion_and_a_health_need_an_id() {
        let mut request = csi::NodeExpandVolumeRequest {
            volume_id: "x".into(),
            volume_path: "some/path".into(),
            ..Default::default()
        };
        assert_eq!(
            expand(&request),
            Ok(Expand {
                volume: "x",
                path: "some/path",
                required: 0
            })
        );
        request.volume_path.clear();
        assert_eq!(expand(&request), Err(Invalid::Missing("volume_path")));
        request.volume_id.clear();
        assert_eq!(expand(&request), Err(Invalid::Missing("volume_id")));

        let mut request = csi::NodeGetVolumeHealthRequest::default();
        assert_eq!(health(&request), Err(Invalid::Missing("volume_id")));
        request.volume_id = "x".into();
        assert_eq!(health(&request), Ok("x"));
        request.volume_publish_path = "x".into();
        assert!(matches!(health(&request), Err(Invalid::Path { .. })));
    }
}
