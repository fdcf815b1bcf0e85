//! Tests of the mount calls on the running kernel, and of their errors.
//! Needs root. Other tests use no helper from here.

#![allow(clippy::print_stderr, reason = "a skipped test must say so")]

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use rustix::fs::StatVfsMountFlags;

use super::*;
use crate::sys::{
    Dir, IdSwap, Result, UnmountWatches, is_root_or_skip, mount_table, user_namespace,
};

/// Moves this thread into its own mount namespace. Warns and returns `false` if not root.
fn private_namespace() -> bool {
    use nix::mount::MsFlags;
    if !is_root_or_skip() {
        return false;
    }
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("unshare");
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    nix::mount::mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).expect("private");
    true
}

fn tmpfs() -> OwnedFd {
    let context = FsContext::open("tmpfs").expect("fsopen");
    context.string("source", "a source").expect("source");
    context.create().expect("create");
    context.mount(MountAttrFlags::empty()).expect("fsmount")
}

fn scratch() -> (tempfile::TempDir, Dir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let dir = Dir::open(folder.path()).expect("it opens");
    (folder, dir)
}

#[test]
fn a_mount_is_attached_recognised_and_taken_away_by_name() {
    if !private_namespace() {
        return;
    }
    let (_folder, dir) = scratch();
    dir.create_dir("target", 0o755).expect("target");
    assert_eq!(mount_point_at(&dir, "nothing").expect("statx"), None);
    let before = mount_point_at(&dir, "target")
        .expect("statx")
        .expect("it is there");
    assert!(!before.is_root, "{before:?}");
    for _ in 0..3 {
        move_mount_onto(tmpfs().as_fd(), &dir, "target").expect("attach");
    }
    let after = mount_point_at(&dir, "target")
        .expect("statx")
        .expect("it is there");
    assert!(after.is_root && after.id != before.id, "{after:?}");
    for _ in 0..3 {
        detach(&dir, "target").expect("three are stacked");
    }
    let error = detach(&dir, "target").expect_err("none is left");
    assert!(error.is(Errno::EINVAL), "{error}");
    dir.remove_dir("target").expect("rmdir");
}

#[test]
fn a_symlink_as_target_is_never_followed() {
    if !private_namespace() {
        return;
    }
    let (folder, dir) = scratch();
    dir.create_dir("victim", 0o755).expect("victim");
    std::os::unix::fs::symlink("victim", folder.path().join("link")).expect("symlink");
    let mount = tmpfs();
    let error = move_mount_onto(mount.as_fd(), &dir, "link").expect_err("must not follow");
    assert!(error.is(Errno::EINVAL), "{error}");
    move_mount_onto(mount.as_fd(), &dir, "victim").expect("attach");
    let error = detach(&dir, "link").expect_err("must not follow");
    assert!(error.is(Errno::EINVAL), "{error}");
    let victim = mount_point_at(&dir, "victim").expect("statx");
    assert!(victim.expect("it is there").is_root);
}

#[test]
fn a_bind_is_private_and_read_only_only_if_asked() {
    if !private_namespace() {
        return;
    }
    let (_folder, dir) = scratch();
    dir.create_dir("volume", 0o755).expect("volume");
    let volume = dir.open_beneath("volume").expect("volume");
    for (read_only, expected) in [(false, None), (true, Some(Errno::EROFS))] {
        let mount = Dir::from_fd(bind(&volume, read_only).expect("bind"), "bind");
        assert!(mount_point(mount.as_fd()).expect("statx").is_root);
        let result = mount.create_dir("x", 0o755);
        assert_eq!(result.err().map(|error| error.errno()), expected);
        if !read_only {
            mount.remove_dir("x").expect("rmdir");
        }
    }
}

#[test]
fn the_kernels_words_about_a_bad_option_are_in_the_error() {
    if !private_namespace() {
        return;
    }
    let context = FsContext::open("tmpfs").expect("fsopen");
    let error = context
        .string("no_such_option", "1")
        .expect_err("tmpfs does not know it");
    assert!(error.to_string().contains("no_such_option"), "{error}");
    assert!(error.is(Errno::EINVAL), "{error}");
    let error = FsContext::open("nosuchfs").expect_err("no such filesystem");
    assert!(error.is(Errno::ENODEV), "{error}");
}

fn is_readable(watch: &OwnedFd) -> bool {
    matches!(rustix::io::read(watch, &mut [0; 512]), Ok(1..))
}

#[test]
fn a_watch_that_is_used_again_does_not_take_the_end_of_one_superblock_for_that_of_the_next() {
    if !private_namespace() {
        return;
    }
    let watches = UnmountWatches::default();
    for _ in 0..100 {
        let gone = tmpfs();
        let watch = watches.watch(gone.as_fd()).expect("watch");
        drop(gone);
        watch.has_fired().expect("ours was the last hold");
    }
    let held = tmpfs();
    let watch = watches.watch(held.as_fd()).expect("watch");
    let watch = watch.has_fired().expect_err("it is held");
    assert!(!is_readable(&watch), "still held");
    drop(held);
    assert!(is_readable(&watch), "ours was the last hold");
}

#[test]
fn the_end_of_a_superblock_is_heard_once_its_last_holder_is_gone() {
    if !private_namespace() {
        return;
    }
    let mount = tmpfs();
    let holder = mount.try_clone().expect("dup");
    let watches = UnmountWatches::default();
    let watch = watches.watch(mount.as_fd()).expect("watch");
    drop(mount);
    let watch = watch.has_fired().expect_err("still held");
    assert!(!is_readable(&watch), "still held");
    drop(holder);
    let mut tries = 0;
    while !is_readable(&watch) {
        tries += 1;
        assert!(tries < 200, "never heard of it");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn swapped_owners_are_seen_through_a_clone() {
    if !private_namespace() {
        return;
    }
    for (uid, owner, seen) in [(1000, 0, 1000), (1000, 1000, 0), (1000, 7, 7), (0, 0, 0)] {
        let namespace =
            user_namespace(IdSwap::between(0, uid), IdSwap::Identity).expect("user namespace");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let place = Dir::open(folder.path()).expect("it opens");
        place.create_dir("d", 0o755).expect("mkdir");
        let inner = place.open_beneath("d").expect("it opens");
        inner.set_owner(Some(owner), Some(5)).expect("chown");
        let clone = clone_tree(&place).expect("open_tree");
        let attributes = MountAttributes {
            identity: Some(namespace.as_fd()),
            ..MountAttributes::default()
        };
        set_mount_attributes(clone.as_fd(), &attributes).expect("idmap");
        let stat = Dir::from_fd(clone, "clone").stat("d").expect("stat");
        assert_eq!((stat.st_uid, stat.st_gid), (seen, 5));
    }
    assert!(user_namespace(IdSwap::between(0, u32::MAX), IdSwap::Identity).is_err());
}

#[test]
fn a_mount_is_confined_alike_with_and_without_mount_setattr() {
    type Confine = fn(OwnedFd, bool) -> Result<OwnedFd>;
    if !private_namespace() {
        return;
    }
    let by_mount_ns: Confine = |mount, read_only| PrivateMountNs::new()?.confined(mount, read_only);
    // Before Linux 5.12 both do the same.
    for (how, confine) in [
        ("the newest way", confined as Confine),
        ("a namespace", by_mount_ns),
    ] {
        for read_only in [true, false] {
            let mount = confine(tmpfs(), read_only).expect(how);
            let flags = rustix::fs::fstatvfs(&mount).expect("statvfs").f_flag;
            let expected = StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV;
            assert!(flags.contains(expected), "{how}: {flags:?}");
            assert_eq!(
                flags.contains(StatVfsMountFlags::RDONLY),
                read_only,
                "{how}"
            );
        }
        // The mount that was read-only is now writable.
        let context = FsContext::open("tmpfs").expect("fsopen");
        context.create().expect("create");
        let mount = context.mount(MountAttrFlags::MOUNT_ATTR_RDONLY);
        let mount = confine(mount.expect("fsmount"), false).expect(how);
        let mount = Dir::from_fd(mount, "writable");
        mount.create_dir("x", 0o755).expect(how);
    }
}

#[test]
fn a_private_namespace_mounts_and_leaves_no_trace_outside() {
    if !private_namespace() {
        return;
    }
    let before = mount_table().expect("mountinfo");
    let mount_ns = PrivateMountNs::new().expect("a namespace");
    for read_only in [false, true] {
        let what = ClassicMount {
            filesystem: "tmpfs",
            source: "classic".to_owned(),
            options: "size=1m,mode=0711".to_owned(),
            read_only,
        };
        let mount = mount_ns.mount_classic(what).expect("mount(2)");
        let dir = Dir::from_fd(mount, "classic");
        assert_eq!(dir.create_dir("x", 0o755).is_err(), read_only);
    }
    let shown = mount_ns.shown_options(tmpfs()).expect("mountinfo");
    assert!(shown.starts_with("rw"), "{shown}");
    mount_ns.attach(tmpfs(), 7).expect("attach");
    mount_ns.release(7).expect("release");
    assert!(mount_ns.release(7).is_err());
    let bad = ClassicMount {
        filesystem: "tmpfs",
        source: String::new(),
        options: "nonsense".to_owned(),
        read_only: false,
    };
    assert!(mount_ns.mount_classic(bad).is_err());
    drop(mount_ns);
    assert_eq!(mount_table().expect("mountinfo"), before);
}
