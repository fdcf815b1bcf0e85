//! Wrong requests, and targets that exist already. Each mistake gets its own code and a message
//! that says what to do, and leaves nothing behind.

mod common;

use std::os::unix::fs::symlink;
use std::path::Path;

use baggageclaim::backend::BackendKind;
use baggageclaim::kubelet_double::NO_ATTRIBUTES;
use baggageclaim::proto::csi::v1 as csi;
use common::calls::{OPTIONS, Publish, key, mode, mount, send, text, unpublish};
use common::{Driver, Fs, require_lab};
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessType, BlockVolume};
use tonic::Code;

/// A mistake in a request: what it is called, how it is made, and what the answer must say.
struct Mistake {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    spoil: fn(&mut Publish),
    code: Code,
    says: &'static str,
}

fn attribute(name: &'static str, pairs: &[(&'static str, &str)], says: &'static str) -> Mistake {
    Mistake {
        name,
        attributes: pairs.iter().map(|(k, v)| (*k, (*v).to_owned())).collect(),
        spoil: |_| {},
        code: Code::InvalidArgument,
        says,
    }
}

fn field(name: &'static str, spoil: fn(&mut Publish), says: &'static str) -> Mistake {
    Mistake {
        name,
        attributes: Vec::new(),
        spoil,
        code: Code::InvalidArgument,
        says,
    }
}

fn coded(mistake: Mistake, code: Code) -> Mistake {
    Mistake { code, ..mistake }
}

#[expect(clippy::too_many_lines, reason = "a table, one row per mistake")]
fn mistakes() -> Vec<Mistake> {
    let cache = ("type", "task-cache");
    let long = "k".repeat(10_000);
    vec![
        attribute(
            "unknown attribute",
            &[("colour", "red")],
            r#""colour" is unknown"#,
        ),
        attribute(
            "misspelled attribute",
            &[cache, ("keys", "k")],
            r#""keys" is unknown; known are type"#,
        ),
        attribute(
            "another case",
            &[cache, ("Key", "k")],
            r#"did you mean "key""#,
        ),
        attribute("unknown type", &[("type", "cash")], "allowed are scratch"),
        attribute(
            "does not fit",
            &[("key", "k")],
            r#""key" is not valid for type"#,
        ),
        attribute("missing", &[cache], r#""key" is missing"#),
        attribute("mode", &[("mode", "99999")], r#""mode""#),
        attribute("uid", &[("uid", "-5")], r#""uid""#),
        attribute("gid", &[("gid", "4294967295")], r#""gid""#),
        attribute("size", &[("sizeLimit", "much")], r#""sizeLimit""#),
        attribute("ttl", &[cache, ("key", "k"), ("ttl", "99999y")], r#""ttl""#),
        attribute(
            "commit",
            &[cache, ("key", "k"), ("commit", "maybe")],
            r#""commit""#,
        ),
        attribute(
            "key with NUL",
            &[cache, ("key", "a\0b")],
            "control character",
        ),
        attribute(
            "key with newline",
            &[cache, ("key", "a\nb")],
            "control character",
        ),
        attribute("key of 10 kB", &[cache, ("key", &long)], "at most 256"),
        attribute("empty key", &[cache, ("key", "")], "must not be empty"),
        attribute(
            "name with ../",
            &[("type", "output"), ("name", "../../etc")],
            "DNS label",
        ),
        attribute(
            "from of no kind",
            &[("type", "input"), ("from", "../../etc")],
            "must be artifact/NAME",
        ),
        coded(
            attribute(
                "from that names nothing",
                &[("type", "input"), ("from", "artifact/nothing")],
                "there is no artifact/nothing",
            ),
            Code::NotFound,
        ),
        coded(
            attribute(
                "from that names no cache",
                &[("type", "input"), ("from", "task-cache/../../x")],
                "there is no task-cache/../../x",
            ),
            Code::NotFound,
        ),
        coded(
            attribute(
                "import",
                &[("type", "import"), ("source", "oci://registry.example/x")],
                "type import is not possible here",
            ),
            Code::FailedPrecondition,
        ),
        field(
            "no volume id",
            |r| r.volume_id.clear(),
            "volume_id is missing",
        ),
        field(
            "odd volume id",
            |r| r.volume_id = "../../x".into(),
            "volume_id holds",
        ),
        field(
            "no target",
            |r| r.target_path.clear(),
            "target_path is missing",
        ),
        field(
            "relative target",
            |r| r.target_path = "x".into(),
            "absolute",
        ),
        field(
            "target with ..",
            |r| r.target_path = r.target_path.replace("/mount", "/../x/mount"),
            "without `..`",
        ),
        field(
            "target with NUL",
            |r| r.target_path.insert(5, '\0'),
            "holds a NUL",
        ),
        field(
            "endless target",
            |r| r.target_path = format!("/{}", "x/".repeat(3000)),
            "longer than",
        ),
        field(
            "no capability",
            |r| r.volume_capability = None,
            "volume_capability is missing",
        ),
        field(
            "block device",
            |r| {
                r.volume_capability.as_mut().expect("one").access_type =
                    Some(AccessType::Block(BlockVolume {}));
            },
            "block device",
        ),
        field(
            "many nodes",
            |r| mode(r, Mode::MultiNodeMultiWriter),
            "SINGLE_NODE",
        ),
        field("fs type", |r| mount(r).fs_type = "xfs".into(), "fs_type"),
        field(
            "mount flags",
            |r| mount(r).mount_flags = vec!["hunter2".into()],
            "mount_flags are given",
        ),
        field(
            "mount group",
            |r| mount(r).volume_mount_group = "wheel".into(),
            "volume_mount_group",
        ),
        field(
            "context without end",
            |r| {
                let tokens = "hunter2".repeat(10 << 10);
                key(r, "serviceAccount.tokens", Some(&tokens));
            },
            "bytes in all, and at most 65536 are taken",
        ),
        field(
            "secrets without end",
            |r| {
                let tokens = "hunter2".repeat(10 << 10);
                r.secrets.insert("s".into(), tokens);
            },
            "secrets has 71681 bytes in all, and at most 65536 are taken",
        ),
        field(
            "publish context without end",
            |r| {
                let many = (0..100).map(|n| (format!("{n}"), "hunter2".repeat(10)));
                r.publish_context.extend(many);
            },
            "publish_context has 7190 bytes in all, and at most 4096 are taken",
        ),
        field(
            "no ephemeral marker",
            |r| key(r, "ephemeral", None),
            "not marked as an inline volume",
        ),
        field(
            "not ephemeral",
            |r| key(r, "ephemeral", Some("false")),
            "not marked as an inline volume",
        ),
        field(
            "no namespace",
            |r| key(r, "pod.namespace", None),
            "podInfoOnMount",
        ),
        field(
            "namespace with ../",
            |r| key(r, "pod.namespace", Some("../other")),
            "DNS label",
        ),
        field(
            "another pod's uid",
            |r| key(r, "pod.uid", Some("11111111-1111-4111-8111-111111111111")),
            "belongs to another pod",
        ),
        field(
            "an id that kubelet did not make",
            |r| r.volume_id = "csi-0".into(),
            "volume_id is not the one",
        ),
        field(
            "a target that kubelet did not make",
            |r| r.target_path = "/tmp/somewhere".into(),
            "must end with pods/",
        ),
    ]
}

async fn refuses_every_mistake(driver: &Driver) {
    let pod = driver.kubelet.pod("ci", "build");
    pod.prepare("src").expect("prepare");
    for mistake in mistakes() {
        let name = mistake.name;
        let mut request = pod.publish_request("src", mistake.attributes.clone(), OPTIONS);
        (mistake.spoil)(&mut request);
        for _ in 0..2 {
            let status = send(driver, request.clone()).await.expect_err(name);
            assert_eq!(status.code(), mistake.code, "{name}: {status}");
            assert!(status.message().contains(mistake.says), "{name}: {status}");
            assert!(!status.message().contains("hunter2"), "{name}: {status}");
            assert!(status.message().len() < 1000, "{name}: {status}");
        }
        assert!(!pod.target("src").exists(), "{name}: the target was made");
    }
    driver.assert_nothing_left("refused requests").await;
}

#[tokio::test]
async fn every_mistake_has_its_code_and_words_and_leaves_nothing() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    refuses_every_mistake(&driver).await;
    driver.stop().await;
}

#[tokio::test]
async fn mistakes_are_the_same_on_btrfs_and_by_copy() {
    for (fs, backend) in [
        (Fs::Btrfs, BackendKind::Btrfs),
        (Fs::Tmpfs, BackendKind::Copy),
    ] {
        let driver = Driver::start(require_lab!(fs), Some(backend)).await;
        refuses_every_mistake(&driver).await;
        driver.stop().await;
    }
}

/// More than the specification allows, and what kubelet sends: a token has up to 2 KiB, and a
/// CSIDriver object may ask for several.
#[tokio::test]
async fn tokens_of_a_service_account_are_no_mistake_however_long() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let pod = driver.kubelet.pod("ci", "build");
    pod.prepare("src").expect("prepare");
    let token = |audience: usize| {
        let token = "t".repeat(2 << 10);
        format!(
            r#""{audience}":{{"token":"{token}","expirationTimestamp":"2026-01-01T10:00:00Z"}}"#
        )
    };
    let tokens: Vec<String> = (0..8).map(token).collect();
    let tokens = format!("{{{}}}", tokens.join(","));
    let mut request = pod.publish_request("src", NO_ATTRIBUTES, OPTIONS);
    key(&mut request, "serviceAccount.tokens", Some(&tokens));
    let kubelets = "csi.storage.k8s.io/serviceAccount.tokens";
    request.secrets.insert(kubelets.to_owned(), tokens);
    send(&driver, request).await.expect("published");
    pod.unpublish("src").await.expect("unpublish");
    driver.assert_nothing_left("tokens").await;
    driver.stop().await;
}

#[tokio::test]
async fn keys_of_every_script_are_keys_and_never_paths() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    for (index, cache_key) in [
        "../../../etc/passwd",
        "/",
        ".",
        "..",
        "go-1.24 (π) \"quoted\" 'so' \\ %00 $(reboot)",
        "ключ/鍵/مفتاح/🔑",
        "e\u{301}",
        "é",
        " leading and trailing ",
        &"k".repeat(256),
    ]
    .into_iter()
    .enumerate()
    {
        let pod = driver.kubelet.pod("ci", "build");
        let attributes = [
            ("type", "task-cache"),
            ("key", cache_key),
            ("commit", "always"),
        ];
        let first = pod
            .publish("cache", attributes, OPTIONS)
            .await
            .unwrap_or_else(|status| panic!("{cache_key:?}: {status}"));
        std::fs::write(first.target.join("index"), index.to_string()).expect("write");
        pod.unpublish("cache").await.expect("unpublish");
        driver.engine.settled().await;

        let pod = driver.kubelet.pod("ci", "build");
        let again = pod
            .publish("cache", attributes, OPTIONS)
            .await
            .expect("publish");
        let seen = std::fs::read_to_string(again.target.join("index")).expect("the cache's file");
        assert_eq!(
            seen,
            index.to_string(),
            "{cache_key:?} is another key's cache"
        );
        pod.unpublish("cache").await.expect("unpublish");
    }
    driver.assert_nothing_left("caches").await;
    driver.stop().await;
}

/// Puts something at a target, and says what must still be there after every call.
struct Obstacle {
    name: &'static str,
    make: fn(&Path),
    says: &'static str,
    is_there: fn(&Path) -> bool,
    /// Whether unpublishing fails too.
    stays: bool,
    clear: fn(&Path),
}

const OBSTACLES: [Obstacle; 4] = [
    Obstacle {
        name: "a file",
        make: |target| std::fs::write(target, "precious").expect("write"),
        says: "is not a directory",
        is_there: |target| std::fs::read(target).expect("read") == b"precious",
        stays: true,
        clear: |target| std::fs::remove_file(target).expect("unlink"),
    },
    Obstacle {
        name: "a symlink to a directory",
        make: |target| {
            let elsewhere = target.with_file_name("elsewhere");
            std::fs::create_dir_all(&elsewhere).expect("mkdir");
            symlink(elsewhere, target).expect("symlink");
        },
        says: "is not a directory",
        is_there: |target| {
            target.is_symlink()
                && common::driver::entries(&target.with_file_name("elsewhere")).is_empty()
        },
        stays: true,
        clear: |target| {
            std::fs::remove_file(target).expect("unlink");
            std::fs::remove_dir(target.with_file_name("elsewhere")).expect("rmdir");
        },
    },
    Obstacle {
        name: "a directory that is not empty",
        make: |target| {
            std::fs::create_dir(target).expect("mkdir");
            std::fs::write(target.join("precious"), "").expect("write");
        },
        says: "not empty",
        is_there: |target| target.join("precious").exists(),
        stays: true,
        clear: |target| {
            std::fs::remove_file(target.join("precious")).expect("unlink");
            std::fs::remove_dir(target).expect("rmdir");
        },
    },
    Obstacle {
        name: "a mount of something else",
        make: |target| {
            std::fs::create_dir(target).expect("mkdir");
            rustix::mount::mount(
                "bclab",
                target,
                "tmpfs",
                rustix::mount::MountFlags::empty(),
                None,
            )
            .expect("mount");
        },
        says: "is a mount point of something else",
        is_there: |target| {
            std::fs::write(target.join("probe"), "").expect("the tmpfs is writable");
            true
        },
        stays: false, // kubelet says that no pod needs it any more, and a pod must not end for ever
        clear: |_| {},
    },
];

#[tokio::test]
async fn what_is_in_the_way_of_a_target_is_named_and_stays() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    for obstacle in OBSTACLES {
        let name = obstacle.name;
        let pod = driver.kubelet.pod("ci", "build");
        pod.prepare("src").expect("prepare");
        let target = pod.target("src");
        (obstacle.make)(&target);
        let request = pod.publish_request("src", NO_ATTRIBUTES, OPTIONS);
        for _ in 0..2 {
            let status = send(&driver, request.clone()).await.expect_err(name);
            assert_eq!(status.code(), Code::FailedPrecondition, "{name}: {status}");
            assert!(status.message().contains(obstacle.says), "{name}: {status}");
            assert!(
                status.message().contains(&text(&target)),
                "{name}: {status}"
            );
            assert!((obstacle.is_there)(&target), "{name}: it is gone");
        }
        let unpublished = unpublish(&driver, &request.volume_id, &request.target_path).await;
        if obstacle.stays {
            let status = unpublished.expect_err(name);
            assert_eq!(status.code(), Code::FailedPrecondition, "{name}: {status}");
            assert!((obstacle.is_there)(&target), "{name}: it is gone");
        } else {
            unpublished.expect(name);
            assert!(!target.exists(), "{name}: it is still there");
        }
        (obstacle.clear)(&target);
        // And once it is out of the way, all is well.
        send(&driver, request.clone()).await.expect(name);
        pod.unpublish("src").await.expect(name);
        driver.assert_nothing_left(name).await;
    }
    driver.stop().await;
}

#[tokio::test]
async fn a_target_whose_parent_is_missing_is_refused_and_unpublishes_well() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let pod = driver.kubelet.pod("ci", "build");
    let request = pod.publish_request("src", NO_ATTRIBUTES, OPTIONS);
    let status = send(&driver, request.clone()).await.expect_err("no parent");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("directory above it"), "{status}");
    for _ in 0..2 {
        unpublish(&driver, &request.volume_id, &request.target_path)
            .await
            .expect("nothing is there");
    }
    driver.assert_nothing_left("no parent").await;
    driver.stop().await;
}

#[tokio::test]
async fn an_empty_directory_in_the_targets_place_is_no_obstacle() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let pod = driver.kubelet.pod("ci", "build");
    pod.prepare("src").expect("prepare");
    std::fs::create_dir(pod.target("src")).expect("mkdir");
    pod.publish("src", NO_ATTRIBUTES, OPTIONS)
        .await
        .expect("publish");
    pod.unpublish("src").await.expect("unpublish");
    assert!(!pod.target("src").exists());
    driver.assert_nothing_left("an empty directory").await;
    driver.stop().await;
}

#[tokio::test]
async fn unpublish_converges_for_unknown_volumes() {
    let driver = Driver::start(require_lab!(Fs::Ext4), Some(BackendKind::Overlay)).await;
    let nowhere = text(&driver.pods().join("x/volumes/kubernetes.io~csi/y/mount"));
    for volume in [
        "csi-0",
        "../../x",
        "a b",
        "ü",
        &"x".repeat(500),
        ".",
        "a\nb",
    ] {
        unpublish(&driver, volume, &nowhere).await.expect(volume);
        let target = driver.pods().join("leftover");
        std::fs::create_dir(&target).expect("mkdir");
        unpublish(&driver, volume, &text(&target))
            .await
            .expect(volume);
        assert!(!target.exists(), "{volume}: the target is still there");
    }
    for (volume, target) in [
        ("", nowhere.as_str()),
        ("csi-0", ""),
        ("csi-0", "x"),
        ("csi-0", "/a/../b"),
    ] {
        let status = unpublish(&driver, volume, target).await.expect_err(target);
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    driver.assert_nothing_left("unknown volumes").await;
    driver.stop().await;
}
