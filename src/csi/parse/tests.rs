//! Requests of the Node service that are valid and that are refused.
//! The parser itself is `csi/parse`.

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
        (
            |r| context(r, "ephemeral", None),
            "volume_id is not a persistent volume's",
        ),
        (
            |r| context(r, "ephemeral", Some("false")),
            "volume_id is not a persistent volume's",
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
