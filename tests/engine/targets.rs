//! Target paths: repeated calls, second targets, mounts that other programs remove or add. Targets
//! that are wrong from the start are tested over the socket, in `tests/node.rs`.

#![expect(
    clippy::disallowed_types,
    reason = "a test runs itself in a user namespace of its own"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use baggageclaim::engine::{Engine, Error, VolumeState};
use baggageclaim::model::Outcome;
use baggageclaim::sys;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};

use crate::common::bench::{Bench, Ground, NEVER, eventually};
use crate::common::{in_a_guest, is_root, not_in_guests, require_bench, skip};

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o"), ("commit", "always")];
const INPUT: &[(&str, &str)] = &[("type", "input"), ("from", "artifact/o")];

fn mounts_at(path: &Path) -> usize {
    let table = sys::mount_table().expect("mounts");
    table
        .iter()
        .filter(|mount| mount.mount_point == path)
        .count()
}

fn unmount_behind(path: &Path) {
    unmount(path, UnmountFlags::NOFOLLOW).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

async fn publish_at(
    bench: &Bench,
    target: &str,
    attributes: &[(&str, &str)],
) -> Result<baggageclaim::engine::Published, Error> {
    let mut request = bench.request("pod", "v", attributes);
    request.target = bench.target(target);
    request.multiple_targets = true;
    bench.engine.publish(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_is_repeated_does_nothing_and_one_that_differs_is_refused() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        for attributes in [&[][..], OUTPUT] {
            let (at, first) = bench.publish("pod", "v", attributes).await;
            fs::write(at.join("f"), "mine").expect("write");
            assert!(!first.already);
            for _ in 0..3 {
                let (_, again) = bench.publish("pod", "v", attributes).await;
                assert!(again.already);
            }
            assert_eq!(mounts_at(&at), 1);
            for (pod, different, what) in [
                ("pod2", attributes, "pod"),
                (
                    "pod",
                    &[("type", "output"), ("name", "p")],
                    "type or content",
                ),
                (
                    "pod",
                    &[&[("mode", "0700")], attributes].concat(),
                    "owner, group or mode",
                ),
                (
                    "pod",
                    &[&[("sizeLimit", "1Gi")], attributes].concat(),
                    "sizeLimit",
                ),
            ] {
                let error = bench
                    .try_publish(pod, "v", different)
                    .await
                    .expect_err("another");
                assert!(
                    matches!(&error, Error::Different { what: found, .. } if *found == what),
                    "{error}"
                );
            }
            let mut shared = bench.request("pod", "v", attributes);
            shared.multiple_targets = true;
            let error = bench.engine.publish(shared).await.expect_err("another");
            assert!(
                matches!(&error, Error::Different { what, .. } if *what == "access mode"),
                "{error}"
            );
            assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "mine");
            bench.unpublish("v").await;
            bench.quiet().await;
            // And unpublished, as often as one likes.
            for _ in 0..3 {
                bench.unpublish("v").await;
            }
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_target_is_refused_whatever_the_access_mode_and_the_first_stays() {
    for ground in Ground::ALL {
        let mut bench = require_bench!(on ground);
        publish_at(&bench, "one", OUTPUT).await.expect("first");
        let one = bench.target("one");
        fs::write(one.join("f"), "by one").expect("write");
        for restart in [false, true] {
            if restart {
                bench = bench.restart().await;
            }
            for multiple in [false, true] {
                let mut second = bench.request("pod", "v", OUTPUT);
                second.target = bench.target("two");
                second.multiple_targets = multiple;
                let error = bench
                    .engine
                    .publish(second)
                    .await
                    .expect_err("one target only");
                assert!(
                    matches!(&error, Error::PublishedElsewhere { target, .. } if *target == one),
                    "{error}"
                );
                assert!(!bench.target("two").exists());
            }
            // Kubelet may unpublish what was refused.
            let refused = bench.engine.unpublish("v", &bench.target("two")).await;
            refused.expect("unpublish");
            let row = bench.row("v").expect("row");
            assert_eq!(row.state, VolumeState::Published);
            assert_eq!(row.targets, std::slice::from_ref(&one));
            let again = publish_at(&bench, "one", OUTPUT).await;
            assert!(again.expect("again").already);
        }
        bench.engine.unpublish("v", &one).await.expect("unpublish");
        bench.quiet().await;
        let look = bench.look("in", INPUT, "f").await;
        assert_eq!(look.as_deref(), Some("by one"), "{}", ground.name());
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_mount_vanished_may_come_back_at_another_target() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        publish_at(&bench, "one", OUTPUT).await.expect("first");
        let (one, two) = (bench.target("one"), bench.target("two"));
        fs::write(one.join("f"), "by one").expect("write");
        unmount_behind(&one);
        let moved = publish_at(&bench, "two", OUTPUT).await.expect("second");
        assert!(!moved.already);
        assert_eq!(fs::read_to_string(two.join("f")).expect("read"), "by one");
        let bench = bench.restart().await;
        let row = bench.row("v").expect("row");
        assert_eq!(row.targets, std::slice::from_ref(&two));
        let again = publish_at(&bench, "two", OUTPUT).await;
        assert!(again.expect("again").already);
        // The first target is of no volume any more.
        bench.engine.unpublish("v", &one).await.expect("unpublish");
        assert!(!one.exists());
        let row = bench.row("v").expect("row");
        assert_eq!(row.state, VolumeState::Published);
        bench.engine.unpublish("v", &two).await.expect("unpublish");
        bench.quiet().await;
        let look = bench.look("in", INPUT, "f").await;
        assert_eq!(look.as_deref(), Some("by one"), "{}", ground.name());
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_vanished_is_brought_back_with_its_content() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        for attributes in [&[][..], OUTPUT] {
            for restart_between in [false, true] {
                let bench = &bench;
                let (at, _) = bench.publish("pod", "v", attributes).await;
                fs::write(at.join("f"), "kept").expect("write");
                // Twice: every mount of an overlay needs a work directory of its own.
                for _ in 0..2 {
                    unmount_behind(&at);
                    if restart_between {
                        fs::remove_dir(&at).expect("the mount point too");
                    }
                    let (_, back) = bench.publish("pod", "v", attributes).await;
                    assert!(!back.already, "{}", ground.name());
                    assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "kept");
                }
                assert_eq!(mounts_at(&at), 1);
                unmount_behind(&at);
                bench.unpublish("v").await;
                bench.quiet().await;
            }
        }
        assert_eq!(bench.look("in", INPUT, "f").await.as_deref(), Some("kept"));
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_process_still_holds_is_not_mounted_a_second_time() {
    let bench = require_bench!();
    let (at, _) = bench.publish("pod", "v", OUTPUT).await;
    let held = fs::File::create(at.join("f")).expect("create");
    unmount(&at, UnmountFlags::DETACH).expect("detach");
    let error = bench
        .try_publish("pod", "v", OUTPUT)
        .await
        .expect_err("held");
    assert!(matches!(error, Error::HeldOpen(_)), "{error}");
    assert_eq!(mounts_at(&at), 0);
    drop(held);
    bench.publish("pod", "v", OUTPUT).await;
    assert!(at.join("f").exists());
    bench.unpublish("v").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_stacked_on_a_target_goes_with_it_and_nothing_else() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let elsewhere = bench.lab.dir("elsewhere");
        fs::write(elsewhere.join("precious"), "of somebody else").expect("write");
        for attributes in [&[][..], OUTPUT] {
            let (at, _) = bench.publish("pod", "v", attributes).await;
            fs::write(at.join("f"), "below").expect("write");
            mount("foreign", &at, "tmpfs", MountFlags::empty(), None).expect("tmpfs");
            fs::write(at.join("f"), "in the tmpfs").expect("write");
            mount_bind(&elsewhere, &at).expect("bind");
            mount_bind(&at, &at).expect("bind onto itself");
            assert_eq!(mounts_at(&at), 4);
            bench.unpublish("v").await;
            assert_eq!(mounts_at(&at), 0);
            bench.quiet().await;
            assert!(bench.row("v").is_none());
        }
        assert_eq!(
            bench.look("in", INPUT, "f").await.as_deref(),
            Some("below"),
            "{}: the volume's own content is sealed, not what lay on top",
            ground.name()
        );
        let precious = fs::read_to_string(elsewhere.join("precious")).expect("still there");
        assert_eq!(precious, "of somebody else");
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_no_mount_and_not_empty_stays_untouched() {
    let bench = require_bench!();
    let (at, _) = bench.publish("pod", "v", OUTPUT).await;
    unmount_behind(&at);
    fs::write(at.join("precious"), "not ours").expect("write");
    for volume in ["v", "unknown", "../no id at all"] {
        let error = bench
            .engine
            .unpublish(volume, &at)
            .await
            .expect_err("not empty");
        assert!(matches!(&error, Error::Target { .. }), "{error}");
        assert!(error.to_string().contains("not empty"), "{error}");
        assert!(at.join("precious").exists());
    }
    assert_eq!(
        bench.row("v").expect("still there").state,
        VolumeState::Published
    );
    fs::remove_file(at.join("precious")).expect("moved away");
    bench.unpublish("v").await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/o").is_some());
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unpublish_converges_for_unknown_volumes() {
    let bench = require_bench!();
    let somewhere = bench.target("somewhere");
    for volume in ["unknown", "", "../..", "a/b", "\u{1f9f3}"] {
        bench
            .engine
            .unpublish(volume, &somewhere)
            .await
            .expect("absent");
        let nowhere = bench.target("no/such/directory");
        bench
            .engine
            .unpublish(volume, &nowhere)
            .await
            .expect("not even its parent");
        fs::create_dir(&somewhere).expect("mkdir");
        bench
            .engine
            .unpublish(volume, &somewhere)
            .await
            .expect("an empty directory");
        assert!(!somewhere.exists());
        fs::create_dir(&somewhere).expect("mkdir");
        mount("foreign", &somewhere, "tmpfs", MountFlags::empty(), None).expect("tmpfs");
        bench
            .engine
            .unpublish(volume, &somewhere)
            .await
            .expect("a mount");
        assert!(!somewhere.exists());
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_volume_may_come_back_while_its_predecessor_is_held_open() {
    let bench = require_bench!();
    let (at, _) = bench.publish("pod", "v", OUTPUT).await;
    let held = fs::File::create(at.join("old")).expect("create");
    bench.unpublish("v").await;
    eventually("it is held", || {
        bench
            .row("v")
            .is_some_and(|row| row.state == VolumeState::InUse)
    })
    .await;
    let (at, published) = bench.publish("pod", "v", OUTPUT).await;
    assert!(!published.already);
    assert!(!at.join("old").exists(), "an output starts empty");
    fs::write(at.join("new"), "").expect("write");
    bench.unpublish("v").await;
    eventually("the second is sealed", || {
        bench.artifact("artifact/o").is_some()
    })
    .await;
    drop(held);
    bench.outcome("pod", Outcome::Succeeded).await;
    bench.finish().await;
}

/// An administrator unmounts the target and removes the pod's directory. Kubelet unpublishes the
/// volume, or the collector finds that it will not.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_was_unmounted_from_outside_keeps_no_volume() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        for kubelet_comes in [true, false] {
            let target = bench.target("one/mount");
            let parent = target.parent().expect("a pod's");
            fs::create_dir_all(parent).expect("mkdir");
            let published = publish_at(&bench, "one/mount", OUTPUT).await;
            published.expect("published");
            bench.outcome("pod", Outcome::Succeeded).await;
            unmount_behind(&target);
            fs::remove_dir(&target).expect("rmdir");
            bench.engine.reap().await.expect("reap");
            let row = bench.row("v").expect("kubelet may still come");
            assert_eq!(row.state, VolumeState::Published);
            fs::remove_dir(parent).expect("rmdir");
            if kubelet_comes {
                let unpublished = bench.engine.unpublish("v", &target).await;
                unpublished.expect("unpublished");
            } else {
                bench.engine.reap().await.expect("reap");
            }
            eventually("it is sealed", || {
                bench.row("v").is_none() && bench.artifact("artifact/o").is_some()
            })
            .await;
        }
        bench.finish().await;
    }
}

/// The target of the process that plays a driver in a user namespace of its own.
const LOCKED: &str = "BAGGAGECLAIM_TEST_LOCKED";

/// The kernel locks the mounts that a new user namespace begins with: umount2 is EINVAL for each of
/// them, as if it were none.
#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_the_kernel_has_locked_is_an_error() {
    if let Some(target) = std::env::var_os(LOCKED) {
        let target = PathBuf::from(target);
        let detached = Engine::unmount_offline(&target, true).await;
        let error = detached.expect_err("it is locked").to_string();
        assert!(error.contains("EINVAL"), "{error}");
        return;
    }
    if in_a_guest() {
        return not_in_guests("a guest has no program that makes user namespaces");
    }
    if !is_root() {
        return skip("needs root");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let target = folder.path().join("target");
    fs::create_dir(&target).expect("mkdir");
    mount("locked", &target, "tmpfs", MountFlags::empty(), None).expect("mount");
    let mut child = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "--"])
        .arg(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "targets::a_mount_that_the_kernel_has_locked_is_an_error",
        ])
        .env(LOCKED, &target)
        .spawn()
        .expect("it starts");
    let ended = async {
        loop {
            if let Some(status) = child.try_wait().expect("waited for") {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    };
    let ended = tokio::time::timeout(NEVER, ended).await;
    // One that has ended cannot be killed.
    let _ = child.kill();
    unmount_behind(&target);
    assert!(ended.is_ok_and(|status| status.success()), "the unmount");
}
