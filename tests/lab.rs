//! Tests of the lab itself: it makes what it should, leaves nothing behind, and sees every
//! difference between two trees.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{Fs, Snapshot, assert_same, require_lab, require_root, tree};
use rustix::fs::XattrFlags;

fn type_of(path: &Path) -> String {
    baggageclaim::sys::mount_table()
        .expect("the mount table can be read")
        .into_iter()
        .rfind(|mount| mount.mount_point == path)
        .map(|mount| mount.filesystem)
        .unwrap_or_default()
}

#[test]
fn every_kind_of_filesystem_is_made_and_goes_away() {
    require_root!();
    for fs in Fs::ALL {
        let lab = require_lab!(fs);
        let root = lab.path();
        assert_eq!(type_of(&root), fs.name().trim_end_matches("-reflink"));
        tree::odd(&root);
        let seen = Snapshot::of(&root);
        assert!(seen.len() > 25, "{seen}");
        assert_eq!(lab.leftovers(), Vec::<std::path::PathBuf>::new());
        lab.close();
        assert!(!root.exists(), "{} is gone", root.display());
        assert_eq!(type_of(&root), "");
    }
}

#[test]
fn only_one_of_the_two_xfs_shares_blocks() {
    require_root!();
    for (fs, shares) in [
        (Fs::XfsReflink, true),
        (Fs::Btrfs, true),
        (Fs::Xfs, false),
        (Fs::Ext4, false),
    ] {
        let lab = require_lab!(fs);
        fs::write(lab.path().join("a"), vec![7; 1 << 16]).expect("write");
        let from = fs::File::open(lab.path().join("a")).expect("open");
        let to = fs::File::create(lab.path().join("b")).expect("create");
        assert_eq!(
            rustix::fs::ioctl_ficlone(&to, &from).is_ok(),
            shares,
            "{fs:?}"
        );
    }
}

#[test]
fn mounts_that_a_test_left_are_named_and_removed() {
    require_root!();
    let lab = require_lab!(Fs::Tmpfs);
    let source = lab.dir("source");
    let target = lab.kubelet_dir().join("pods/x");
    fs::create_dir(&target).expect("mkdir");
    for _ in 0..2 {
        rustix::mount::mount_bind(&source, &target).expect("bind");
    }
    let base = lab.path().parent().expect("it has one").to_owned();
    assert_eq!(lab.leftovers(), [target.clone(), target.clone()]);
    assert_eq!(lab.close(), [target.clone(), target]);
    assert!(!base.exists());
}

#[test]
fn the_kubelet_directory_is_shared() {
    require_root!();
    let lab = require_lab!(Fs::Tmpfs);
    let dir = lab.kubelet_dir();
    let table = fs::read_to_string("/proc/self/mountinfo").expect("read");
    let line = table
        .lines()
        .find(|line| line.split(' ').nth(4).map(Path::new) == Some(&dir))
        .expect("it is mounted");
    assert!(line.contains("shared:"), "{line}");
    assert!(dir.join("pods").is_dir() && lab.run_dir().is_dir());
}

#[test]
fn a_remount_keeps_what_was_synced_and_unmounts_what_was_below() {
    require_root!();
    let lab = require_lab!(Fs::Ext4);
    fs::write(lab.path().join("kept"), b"yes").expect("write");
    let below = lab.dir("below");
    rustix::mount::mount_bind(lab.dir("other"), &below).expect("bind");
    lab.remount();
    assert_eq!(fs::read(lab.path().join("kept")).expect("read"), b"yes");
    assert!(lab.leftovers().is_empty());
}

/// As a process of another test does that is forked meanwhile.
#[test]
fn a_repaired_disk_takes_changes_though_a_file_on_it_was_open_for_longer() {
    require_root!();
    let lab = require_lab!(Fs::Ext4);
    let path = lab.path().join("held");
    let held = fs::File::create(&path).expect("create");
    lab.disk_fails();
    fs::write(&path, b"x").expect_err("it takes no changes");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let held = held;
            while lab.path().join("held").exists() {
                std::thread::yield_now();
            }
            // It is unmounted, and lives on.
            std::thread::sleep(std::time::Duration::from_millis(500));
            drop(held);
        });
        lab.repair();
    });
    fs::write(&path, b"x").expect("it takes changes again");
}

#[test]
fn two_odd_trees_are_the_same() {
    require_root!();
    let lab = require_lab!(Fs::Ext4);
    let (a, b) = (lab.dir("a"), lab.dir("b"));
    tree::odd(&a);
    tree::odd(&b);
    // Files without an explicit time are as old as the run.
    assert_same(
        &Snapshot::of(&a).without_times(),
        &Snapshot::of(&b).without_times(),
    );
    assert_eq!(
        Snapshot::of(&a).get("").expect("the root").mtime,
        (1_234_567_890, 987_654_321)
    );
}

/// A way to change a tree, and how the difference begins.
type Change = (&'static str, fn(&Path), &'static str);

#[test]
fn every_kind_of_change_is_seen() {
    require_root!();
    let lab = require_lab!(Fs::Ext4);
    let changes: [Change; 9] = [
        (
            "content",
            |p| fs::write(p.join("zero"), b"x").expect("write"),
            "! zero: mtime",
        ),
        (
            "same size",
            |p| {
                fs::write(p.join("owned"), b"of SOMEBODY").expect("write");
            },
            "! owned: mtime",
        ),
        (
            "mode",
            |p| {
                fs::set_permissions(p.join("one"), fs::Permissions::from_mode(0o600))
                    .expect("chmod");
            },
            "! bin/two: mode \"0644\" became \"0600\"",
        ),
        (
            "owner",
            |p| {
                std::os::unix::fs::lchown(p.join("dangling"), Some(1), None).expect("chown");
            },
            "! dangling: owner (77, 88) became (1, 88)",
        ),
        (
            "nanoseconds",
            |p| tree::times(&p.join("fifo"), 1_000_000_002, 1),
            "! fifo: mtime",
        ),
        (
            "xattr",
            |p| {
                let none = XattrFlags::empty();
                rustix::fs::lsetxattr(p.join("empty"), "user.new", b"1", none).expect("setxattr");
            },
            "! empty: user.new None became Some(\"1\")",
        ),
        (
            "unlinked",
            |p| {
                // A copy instead of a second name: same bytes, another inode.
                let bytes = fs::read(p.join("one")).expect("read");
                fs::remove_file(p.join("one")).expect("unlink");
                fs::write(p.join("one"), bytes).expect("write");
            },
            "! .",
        ),
        (
            "gone",
            |p| fs::remove_file(p.join("null")).expect("unlink"),
            "! .",
        ),
        (
            "new",
            |p| fs::create_dir(p.join("sticky/new")).expect("mkdir"),
            "! sticky: mtime",
        ),
    ];
    for (index, (what, change, beginning)) in changes.into_iter().enumerate() {
        let root = lab.dir(&format!("t{index}"));
        tree::odd(&root);
        let before = Snapshot::of(&root);
        change(&root);
        let lines = before.diff(&Snapshot::of(&root));
        assert!(
            lines
                .first()
                .is_some_and(|line| line.starts_with(beginning)),
            "{what}: {lines:#?}"
        );
    }
}

#[test]
fn a_deep_tree_can_be_made() {
    require_root!();
    let lab = require_lab!(Fs::Ext4);
    tree::deep(&lab.path(), 3000);
}

#[test]
fn many_files_are_spread_over_directories() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    tree::files(dir.path(), 250);
    let seen = Snapshot::of(dir.path());
    assert_eq!(seen.len(), 253);
    assert_eq!(seen.get("d0002/f000249").expect("the last").size, 32);
}

#[test]
fn a_lab_can_be_read_only_and_full() {
    require_root!();
    let lab = match common::Lab::try_sized(Fs::Ext4, 16 << 20) {
        Ok(lab) => lab,
        Err(reason) => return common::skip(&reason),
    };
    lab.set_read_only(true);
    let error = fs::write(lab.path().join("x"), b"").expect_err("it is read-only");
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    lab.set_read_only(false);
    let error = fs::write(lab.path().join("x"), vec![1; 32 << 20]).expect_err("it is too small");
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
}
