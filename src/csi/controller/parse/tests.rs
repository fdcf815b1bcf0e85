//! Requests of the Controller service that are valid and that are refused.
//! The parser itself is `csi/controller/parse`.

use super::*;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi::volume_content_source::{SnapshotSource, VolumeSource};
use tonic::{Code, Status};

fn wanted(mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn request() -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: "pvc-1".into(),
        volume_capabilities: vec![wanted(Mode::SingleNodeWriter)],
        ..Default::default()
    }
}

#[test]
fn what_a_provisioner_sends_is_understood() {
    let request = csi::CreateVolumeRequest {
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 1 << 30,
            limit_bytes: 2 << 30,
        }),
        parameters: map(&[
            ("mode", "750"),
            ("csi.storage.k8s.io/pvc/name", "workspace"),
            ("csi.storage.k8s.io/pvc/namespace", "ci"),
        ]),
        mutable_parameters: map(&[("ttl", "1h")]),
        volume_content_source: Some(csi::VolumeContentSource {
            r#type: Some(Type::Volume(VolumeSource {
                volume_id: "vol-1".into(),
            })),
        }),
        ..request()
    };
    let claim = create(request).expect("understood").claim;
    assert_eq!(claim.name, "pvc-1");
    assert_eq!(
        (claim.required_bytes, claim.limit_bytes),
        (1 << 30, Some(2 << 30))
    );
    assert_eq!(claim.parameters.root.mode, Some(0o750));
    assert_eq!(claim.mutable.ttl_seconds, Some(3600));
    let source = ClaimSource::Claim("vol-1".parse().expect("an id"));
    assert_eq!(claim.source, Some(source));
}

#[test]
fn each_access_mode_is_judged() {
    for mode in [
        Mode::SingleNodeWriter,
        Mode::SingleNodeReaderOnly,
        Mode::SingleNodeSingleWriter,
        Mode::SingleNodeMultiWriter,
    ] {
        capabilities(vec![wanted(mode)]).expect("possible");
    }
    for mode in [
        Mode::MultiNodeReaderOnly,
        Mode::MultiNodeSingleWriter,
        Mode::MultiNodeMultiWriter,
    ] {
        let all = vec![wanted(Mode::SingleNodeWriter), wanted(mode)];
        let message = capabilities(all).expect_err("one node").to_string();
        assert!(message.contains(mode.as_str_name()), "{message}");
    }
}

#[test]
fn each_mistake_of_a_creation_has_its_own_message() {
    type Spoil = fn(&mut csi::CreateVolumeRequest);
    let mistakes: &[(Spoil, &str)] = &[
        (|r| r.name.clear(), "name is missing"),
        (|r| r.name = "ü".repeat(65), "name is longer than 128 bytes"),
        (
            |r| r.name = "a\u{7f}".into(),
            "name holds a control character",
        ),
        (
            |r| r.volume_capabilities.clear(),
            "volume_capabilities is missing",
        ),
        (
            |r| r.volume_capabilities[0].access_type = Some(AccessType::Block(BlockVolume {})),
            "block device",
        ),
        (
            |r| r.volume_capabilities[0].access_type = None,
            "no access_type",
        ),
        (
            |r| r.volume_capabilities[0].access_mode = None,
            "no access_mode",
        ),
        (
            |r| {
                r.capacity_range = Some(csi::CapacityRange {
                    required_bytes: -5,
                    limit_bytes: 0,
                });
            },
            "required_bytes is -5",
        ),
        (
            |r| r.parameters = map(&[("mode", &"7".repeat(4 << 10))]),
            "parameters has 4100 bytes in all, and at most 4096 are taken",
        ),
        (
            |r| r.mutable_parameters = map(&[("ttl", &"1".repeat(4 << 10))]),
            "mutable_parameters has 4099 bytes in all, and at most 4096 are taken",
        ),
        (
            |r| r.secrets = map(&[("s", &"hunter2".repeat(10 << 10))]),
            "secrets has 71681 bytes in all, and at most 65536 are taken",
        ),
        (
            |r| r.parameters = map(&[("fstype", "ext4")]),
            r#"parameter "fstype" is unknown"#,
        ),
        (
            |r| r.mutable_parameters = map(&[("x", "y")]),
            r#"mutable parameter "x" is unknown"#,
        ),
        (
            |r| r.volume_content_source = Some(csi::VolumeContentSource::default()),
            "volume_content_source has no type",
        ),
        (
            |r| {
                r.volume_content_source = Some(csi::VolumeContentSource {
                    r#type: Some(Type::Snapshot(SnapshotSource::default())),
                });
            },
            "snapshot_id is missing",
        ),
    ];
    for (spoil, expected) in mistakes {
        let mut request = request();
        spoil(&mut request);
        let status = Status::from(create(request).expect_err(expected));
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(expected), "{expected}: {status}");
    }
    let mut white = request();
    white.name = "a\tb\nü".into();
    create(white).expect("common white space is allowed");
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
fn each_call_that_brings_maps_has_them_bounded() {
    let long = || map(&[("k", &"v".repeat(70_000))]);
    let attach_with = |secrets, volume_context| {
        attach(csi::ControllerPublishVolumeRequest {
            volume_id: "vol-1".into(),
            node_id: "node-1".into(),
            volume_capability: Some(wanted(Mode::SingleNodeWriter)),
            secrets,
            volume_context,
            ..Default::default()
        })
    };
    let snapshot_with = |secrets, parameters| {
        snapshot(csi::CreateSnapshotRequest {
            source_volume_id: "vol-1".into(),
            name: "s".into(),
            secrets,
            parameters,
            ..Default::default()
        })
    };
    let group_with = |secrets, parameters| {
        group(csi::CreateVolumeGroupSnapshotRequest {
            source_volume_ids: vec!["vol-1".into()],
            name: "g".into(),
            secrets,
            parameters,
        })
    };
    let modify_with = |secrets, mutable_parameters| {
        modify(csi::ControllerModifyVolumeRequest {
            volume_id: "vol-1".into(),
            secrets,
            mutable_parameters,
        })
    };
    let expand_with = |secrets| {
        expand(csi::ControllerExpandVolumeRequest {
            volume_id: "vol-1".into(),
            capacity_range: Some(csi::CapacityRange::default()),
            secrets,
            ..Default::default()
        })
    };
    let confirm_with = |volume_context, parameters, secrets, mutable_parameters| {
        confirmed(&csi::ValidateVolumeCapabilitiesRequest {
            volume_id: "vol-1".into(),
            volume_capabilities: vec![wanted(Mode::SingleNodeWriter)],
            volume_context,
            parameters,
            secrets,
            mutable_parameters,
        })
    };
    let none = BTreeMap::new;
    let ttl = || map(&[("ttl", "1h")]);
    confirm_with(none(), none(), none(), none()).expect("understood");
    for (refused, field) in [
        (attach_with(long(), none()).map(drop), "secrets"),
        (attach_with(none(), long()).map(drop), "volume_context"),
        (snapshot_with(long(), none()).map(drop), "secrets"),
        (snapshot_with(none(), long()).map(drop), "parameters"),
        (group_with(long(), none()).map(drop), "secrets"),
        (group_with(none(), long()).map(drop), "parameters"),
        (modify_with(long(), ttl()).map(drop), "secrets"),
        (modify_with(none(), long()).map(drop), "mutable_parameters"),
        (expand_with(long()).map(drop), "secrets"),
        (
            confirm_with(long(), none(), none(), none()),
            "volume_context",
        ),
        (confirm_with(none(), long(), none(), none()), "parameters"),
        (confirm_with(none(), none(), long(), none()), "secrets"),
        (
            confirm_with(none(), none(), none(), long()),
            "mutable_parameters",
        ),
    ] {
        let message = refused.expect_err(field).to_string();
        assert!(
            message.starts_with(&format!("{field} has 70001")),
            "{message}"
        );
    }
}

#[test]
fn a_source_that_cannot_exist_does_not() {
    for kind in [
        Type::Snapshot(SnapshotSource {
            snapshot_id: "../x".into(),
        }),
        Type::Volume(VolumeSource {
            volume_id: "a/b".into(),
        }),
    ] {
        let mut request = request();
        request.volume_content_source = Some(csi::VolumeContentSource { r#type: Some(kind) });
        let status = Status::from(create(request).expect_err("no such source"));
        assert_eq!(status.code(), Code::NotFound, "{status}");
    }
}

#[test]
fn an_attachment_needs_a_volume_a_node_and_a_capability() {
    type Spoil = fn(&mut csi::ControllerPublishVolumeRequest);

    let full = csi::ControllerPublishVolumeRequest {
        volume_id: "vol-1".into(),
        node_id: "node-1".into(),
        volume_capability: Some(wanted(Mode::SingleNodeWriter)),
        readonly: true,
        ..Default::default()
    };
    let attachment = attach(full.clone()).expect("understood").attachment;
    assert!(attachment.read_only);
    assert_eq!(attachment.access_mode, 1);
    let mistakes: &[(Spoil, &str)] = &[
        (|r| r.volume_id.clear(), "volume_id is missing"),
        (|r| r.node_id.clear(), "node_id is missing"),
        (
            |r| r.volume_capability = None,
            "volume_capability is missing",
        ),
        (
            |r| r.volume_context = map(&[("type", "input")]),
            "has no attributes",
        ),
    ];
    for (spoil, expected) in mistakes {
        let mut request = full.clone();
        spoil(&mut request);
        let message = attach(request).expect_err(expected).to_string();
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn pages_have_any_size_but_a_negative_one() {
    assert_eq!(page(0), Ok(usize::MAX));
    assert_eq!(page(7), Ok(7));
    let message = page(-1).expect_err("negative").to_string();
    assert_eq!(message, "max_entries is -1; it must not be negative");
}

#[test]
fn a_snapshot_needs_a_name_and_a_source_and_takes_no_parameters() {
    type Spoil = fn(&mut csi::CreateSnapshotRequest);

    let full = csi::CreateSnapshotRequest {
        name: "snapshot-1".into(),
        source_volume_id: "vol-1".into(),
        parameters: map(&[("csi.storage.k8s.io/volumesnapshot/name", "x")]),
        ..Default::default()
    };
    snapshot(full.clone()).expect("understood");
    let mistakes: &[(Spoil, &str)] = &[
        (|r| r.name.clear(), "name is missing"),
        (
            |r| r.source_volume_id.clear(),
            "source_volume_id is missing",
        ),
        (
            |r| r.parameters = map(&[("incremental", "true")]),
            r#"parameter "incremental" is unknown; a snapshot's class has none"#,
        ),
    ];
    for (spoil, expected) in mistakes {
        let mut request = full.clone();
        spoil(&mut request);
        let message = snapshot(request).expect_err(expected).to_string();
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn an_expansion_needs_a_range_and_a_change_a_parameter() {
    let mut larger = csi::ControllerExpandVolumeRequest {
        volume_id: "vol-1".into(),
        ..Default::default()
    };
    assert_eq!(
        expand(larger.clone()),
        Err(Invalid::Missing("capacity_range"))
    );
    larger.capacity_range = Some(csi::CapacityRange {
        required_bytes: 5,
        limit_bytes: 0,
    });
    assert_eq!(expand(larger.clone()).expect("understood").required, 5);
    larger.volume_id.clear();
    assert_eq!(expand(larger), Err(Invalid::Missing("volume_id")));

    let mut other = csi::ControllerModifyVolumeRequest {
        volume_id: "vol-1".into(),
        ..Default::default()
    };
    assert_eq!(
        modify(other.clone()),
        Err(Invalid::Missing("mutable_parameters"))
    );
    other.mutable_parameters = map(&[("sizeLimit", "1Gi")]);
    assert_eq!(
        modify(other).expect("understood").1.size_limit,
        Some(1 << 30)
    );
}

#[test]
fn a_group_is_a_set_of_volumes() {
    let wanted = |name: &str, sources: &[&str]| {
        group(csi::CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: sources.iter().map(|id| (*id).to_owned()).collect(),
            ..Default::default()
        })
    };
    let sources = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(wanted("g", &["b", "a"]), Ok(("g".into(), sources)));
    assert_eq!(wanted("", &["a"]), Err(Invalid::Missing("name")));
    for bad in [&[][..], &["a", ""]] {
        assert_eq!(wanted("g", bad), Err(Invalid::Missing("source_volume_ids")));
    }
    let message = wanted("g", &["a", "b", "a"])
        .expect_err("twice")
        .to_string();
    assert_eq!(message, r#"source_volume_ids names "a" twice"#);
    let many: Vec<String> = (0..1001).map(|number| number.to_string()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(wanted("g", &many[..1000]).is_ok());
    let message = wanted("g", &many).expect_err("too many").to_string();
    assert_eq!(
        message,
        "source_volume_ids has 1001 entries, and at most 1000 are taken"
    );
}
