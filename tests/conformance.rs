//! The requirements on every backend, on every filesystem that this machine can make.
//!
//! One list of cases uses only the trait. Each combination runs all cases on its own filesystem.

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    clippy::print_stderr,
    reason = "a suite of many cases says how long each took; a pod runs programs; and what the product deletes safely, a test of it makes and removes in the plain way"
)]

mod common;

#[path = "conformance/acls.rs"]
mod acls;
#[path = "conformance/limits.rs"]
mod limits;
#[path = "conformance/noexec.rs"]
mod noexec;
#[path = "conformance/subvolumes.rs"]
mod subvolumes;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use baggageclaim::backend::{
    Backend, BackendKind, Btrfs, Copy, Error, Freeze, Limit, MountApi, Overlay, Start,
};
use baggageclaim::model::{LayerId, RootAttributes, VolumeId};
use baggageclaim::sys::{self, Dir, Quotas};
use baggageclaim::tree;
use common::random::Random;
use common::{Fs, Lab, Snapshot, assert_same, require_lab, require_quota_lab, tree as trees};
use rustix::fs::IFlags;

const MARKER: &str = ".baggageclaim-commit";

/// One backend on one filesystem.
struct Bench {
    backend: Box<dyn Backend>,
    pool: Dir,
    path: PathBuf,
    targets: Dir,
    targets_path: PathBuf,
    /// Whether limits have to hold here.
    must_limit: bool,
}

/// A volume and what it was started from.
struct Volume {
    id: VolumeId,
    dir: Dir,
    layers: Vec<LayerId>,
    root: RootAttributes,
    size_limit: Option<u64>,
    limit: Limit,
}

impl Volume {
    fn start(&self) -> Start<'_> {
        Start {
            layers: &self.layers,
            root: self.root,
            size_limit: self.size_limit,
            sealable: true,
            owner: None,
            durable: false,
        }
    }
}

impl Bench {
    fn new(lab: &Lab, open: Open) -> Self {
        // The pool is not the filesystem's root: what it is called in the mount table must be found
        // out.
        Self::at(lab, lab.dir("below/pool"), open)
    }

    fn at(lab: &Lab, path: PathBuf, open: Open) -> Self {
        for name in ["volumes", "pending", "layers", "incoming", "trash", "empty"] {
            fs::create_dir(path.join(name)).expect("mkdir");
        }
        let pool = Dir::open(&path).expect("the pool opens");
        let targets_path = lab.kubelet_dir().join("pods");
        Self {
            backend: open(&pool),
            pool,
            path,
            targets: Dir::open(&targets_path).expect("the targets open"),
            targets_path,
            must_limit: Fs::WITH_QUOTA.contains(&lab.fs()),
        }
    }

    /// A number that nothing in this process has: the pools that are tested at the same time share
    /// one mount table.
    fn number() -> u32 {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    fn create(&self, layers: &[LayerId], root: RootAttributes, size_limit: Option<u64>) -> Volume {
        let id: VolumeId = format!("volume-{}", Self::number()).parse().expect("an id");
        let volumes = self.pool.open_beneath("volumes").expect("volumes");
        volumes.create_dir(&id, 0o700).expect("mkdir");
        let mut volume = Volume {
            dir: volumes.open_beneath(&id).expect("the volume opens"),
            id,
            layers: layers.to_vec(),
            root,
            size_limit,
            limit: Limit::None,
        };
        volume.limit = self
            .backend
            .create(&volume.dir, &volume.start())
            .expect("created");
        volume
    }

    fn fork(&self, layers: &[LayerId]) -> Volume {
        self.create(layers, RootAttributes::default(), None)
    }

    /// Mounts the volume, does something in it, unmounts it, and expects that it is then free.
    fn within<T>(&self, volume: &Volume, act: impl FnOnce(&Path) -> T) -> T {
        self.mounted(volume, false, act)
    }

    fn mount(&self, volume: &Volume, read_only: bool) -> Result<OwnedFd, Error> {
        let label = volume.id.as_str();
        self.backend
            .mount(&volume.dir, label, &volume.start(), read_only)
    }

    fn mounted<T>(&self, volume: &Volume, read_only: bool, act: impl FnOnce(&Path) -> T) -> T {
        let pin = self.mount(volume, read_only).expect("mounted");
        let name = format!("target-{}", Self::number());
        self.targets.create_dir(&name, 0o755).expect("mkdir");
        sys::move_mount_onto(std::os::fd::AsFd::as_fd(&pin), &self.targets, &name)
            .expect("attached");
        let result = act(&self.targets_path.join(&name));
        sys::detach(&self.targets, &name).expect("detached");
        self.targets.remove_dir(&name).expect("rmdir");
        if !read_only {
            let frozen = self.backend.freeze(&volume.dir, Some(pin)).expect("freeze");
            if !matches!(frozen, Freeze::Frozen) {
                // A child process of another test has a copy of each descriptor until its exec, and
                // under load the kernel closes late.
                eprintln!("{}: closed late", volume.id);
                self.wait_until_free(volume);
            }
            assert!(!self.backend.in_use(&volume.dir).expect("in_use"));
        }
        result
    }

    /// Its holder goes.
    fn wait_until_free(&self, volume: &Volume) {
        let free = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            !self.backend.in_use(&volume.dir).expect("in_use")
        });
        assert!(free, "it is still in use");
    }

    fn see(&self, volume: &Volume) -> Snapshot {
        self.mounted(volume, true, Snapshot::of)
    }

    fn layer(&self) -> (LayerId, Dir) {
        let id = LayerId::from_bits(u128::from(Self::number()));
        let layers = self.pool.open_beneath("layers").expect("layers");
        layers.create_dir(id.to_string(), 0o700).expect("mkdir");
        (id, layers.open_beneath(id.to_string()).expect("open"))
    }

    fn try_seal(&self, volume: &Volume) -> Result<Vec<LayerId>, Error> {
        let (id, dir) = self.layer();
        self.backend.seal(&volume.dir, &dir, MARKER)?;
        let mut layers = vec![id];
        if self.backend.stacks() {
            layers.extend(&volume.layers);
        }
        Ok(layers)
    }

    fn seal(&self, volume: &Volume) -> Vec<LayerId> {
        self.try_seal(volume).expect("sealed")
    }

    /// A new artifact with this content.
    fn artifact(&self, fill: impl FnOnce(&Path)) -> Vec<LayerId> {
        let volume = self.fork(&[]);
        self.within(&volume, fill);
        self.seal(&volume)
    }

    /// The content of an artifact, seen through a fork.
    fn shown(&self, layers: &[LayerId]) -> Snapshot {
        let fork = self.fork(layers);
        let seen = self.see(&fork);
        self.discard(fork);
        seen
    }

    fn discard(&self, volume: Volume) {
        let Volume { id, .. } = volume;
        let volumes = self.pool.open_beneath("volumes").expect("volumes");
        let trash = self.pool.open_beneath("trash").expect("trash");
        volumes.rename(&id, &trash, &id).expect("to the trash");
        self.backend
            .delete(&trash, id.as_ref(), &|| false)
            .expect("deleted");
        assert!(!trash.has(&id).expect("stat"));
    }

    /// Deletes everything that is left, which must be possible.
    fn empty(&self) {
        for room in ["volumes", "layers"] {
            let dir = self.pool.open_beneath(room).expect("open");
            for entry in dir.entries().expect("entries") {
                self.backend
                    .delete(&dir, Path::new(&entry.name), &|| false)
                    .expect("deleted");
            }
            assert!(dir.entries().expect("entries").is_empty());
        }
    }
}

fn owner(path: &Path) -> (u32, u32, u32) {
    let data = fs::symlink_metadata(path).expect("stat");
    (data.uid(), data.gid(), data.mode() & 0o7777)
}

fn an_empty_volume_has_the_root_that_was_asked_for(bench: &Bench) {
    let root = RootAttributes::default();
    let cases = [
        (root, (0, 0, 0o777)),
        (
            RootAttributes {
                mode: Some(0o2750),
                uid: Some(1000),
                gid: Some(2000),
                mount_group: Some(3000),
            },
            (1000, 2000, 0o2750),
        ),
        (
            RootAttributes {
                mode: Some(0o700),
                mount_group: Some(3000),
                ..root
            },
            (0, 3000, 0o2770),
        ),
    ];
    for (root, expected) in cases {
        let volume = bench.create(&[], root, None);
        assert_eq!(bench.within(&volume, owner), expected, "{root:?}");
        let usage = bench.backend.usage(&volume.dir, &|| false).expect("usage");
        assert_eq!((usage.files, usage.directories), (0, 1));
        bench.discard(volume);
    }
}

fn what_is_sealed_is_what_forks_show(bench: &Bench) {
    let volume = bench.fork(&[]);
    let before = bench.within(&volume, |root| {
        trees::odd(root);
        let acl = default_acl();
        for name in ["system.posix_acl_access", "system.posix_acl_default"] {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(root.join("empty"), name, &acl, flags).expect("acl");
        }
        trees::times(&root.join("empty"), 1_100_000_000, 42);
        trees::times(root, 1_234_567_890, 987_654_321);
        Snapshot::of(root)
    });
    let layers = bench.seal(&volume);
    bench.discard(volume);
    assert_same(&before, &bench.shown(&layers));
    let again = bench.fork(&layers);
    let usage = bench.backend.usage(&again.dir, &|| false).expect("usage");
    assert!(usage.directories >= 1);
    // A fork that changes nothing, sealed, is the same again.
    let layers = bench.seal(&again);
    assert_same(&before, &bench.shown(&layers));
}

/// An ACL of version 2 (`linux/posix_acl_xattr.h`): the owner, user 1234, the group, the mask, the
/// others.
fn default_acl() -> Vec<u8> {
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (0x01_u16, 7_u16, u32::MAX),
        (0x02, 5, 1234),
        (0x04, 5, u32::MAX),
        (0x10, 7, u32::MAX),
        (0x20, 0, u32::MAX),
    ] {
        acl.extend(tag.to_le_bytes());
        acl.extend(permissions.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    acl
}

/// Content that comes from an archive may have one.
fn a_marker_of_the_parent_is_none_of_the_fork(bench: &Bench) {
    let (id, layer) = bench.layer();
    let root = bench.backend.receive(&layer).expect("receive");
    for name in [MARKER, "file"] {
        root.write_new(name, b"").expect("write");
    }
    bench.backend.received(&layer).expect("received");
    let fork = bench.fork(&[id]);
    let has_marker = || bench.backend.has_marker(&fork.dir, MARKER).expect("looked");
    assert!(!has_marker());
    bench.within(&fork, |root| {
        assert!(root.join("file").is_file());
        fs::write(root.join(MARKER), b"").expect("write");
    });
    assert!(has_marker());
    bench.discard(fork);
}

fn forks_do_not_see_each_other(bench: &Bench) {
    let layers = bench.artifact(|root| trees::files(root, 50));
    let before = bench.shown(&layers);
    let (one, other) = (bench.fork(&layers), bench.fork(&layers));
    bench.within(&one, |root| {
        for entry in fs::read_dir(root).expect("readdir") {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                fs::remove_dir_all(&path).expect("rm");
            } else {
                fs::write(&path, b"changed").expect("write");
            }
        }
        fs::write(root.join("new"), b"mine").expect("write");
    });
    assert_same(&before, &bench.see(&other));
    assert_same(&before, &bench.shown(&layers));
    assert!(bench.see(&one).get("new").is_some());
    bench.discard(one);
    assert_same(&before, &bench.see(&other));
    bench.discard(other);
}

fn path(random: &mut Random) -> PathBuf {
    (0..=random.index(3))
        .map(|_| ["a", "b", "c", "d", "e"][random.index(5)])
        .collect()
}

/// Changes a tree in some way; what is not possible just fails.
fn change(random: &mut Random, root: &Path) {
    let at = root.join(path(random));
    match random.index(9) {
        0..=1 => drop(fs::create_dir_all(&at)),
        2..=3 => drop(fs::write(&at, [random.next().to_le_bytes()[0]; 20])),
        4 => drop(fs::remove_file(&at)),
        5 => drop(fs::remove_dir_all(&at)),
        6 => drop(fs::rename(&at, root.join(path(random)))),
        7 => {
            // A directory becomes a file, a file a directory.
            if fs::remove_dir_all(&at).is_ok() {
                drop(fs::write(&at, b"was a directory"));
            } else if fs::remove_file(&at).is_ok() {
                drop(fs::create_dir(&at));
            }
        }
        _ => {
            if fs::remove_dir_all(&at).is_ok() {
                drop(fs::create_dir(&at));
            }
        }
    }
}

fn chains_of_forks_show_what_each_of_them_left(bench: &Bench) {
    let mut random = Random::new(1);
    let mut layers: Vec<LayerId> = Vec::new();
    let mut history: Vec<(Vec<LayerId>, Snapshot)> = Vec::new();
    for _ in 0..20 {
        let volume = bench.fork(&layers);
        let left = bench.within(&volume, |root| {
            for _ in 0..15 {
                change(&mut random, root);
            }
            Snapshot::of(root)
        });
        layers = bench.seal(&volume);
        bench.discard(volume);
        assert_same(&left, &bench.shown(&layers));
        history.push((layers.clone(), left));
    }
    for (layers, left) in &history {
        assert_same(left, &bench.shown(layers));
    }
    if !bench.backend.stacks() {
        return;
    }
    let flatten = |range: std::ops::Range<usize>| {
        let (id, dir) = bench.layer();
        let bottom = range.end == layers.len();
        bench
            .backend
            .flatten(&layers[range.clone()], &dir, bottom, &|| false)
            .expect("flattened");
        let mut flat = layers.clone();
        flat.splice(range, [id]);
        flat
    };
    let (_, left) = history.last().expect("twenty");
    for range in [0..20, 0..10, 5..15, 10..20, 3..4] {
        assert_same(left, &bench.shown(&flatten(range)));
    }
}

fn sealing_twice_is_sealing_once(bench: &Bench) {
    let volume = bench.fork(&[]);
    bench.within(&volume, |root| {
        fs::write(root.join("f"), b"x").expect("write");
    });
    let (id, dir) = bench.layer();
    bench.backend.seal(&volume.dir, &dir, MARKER).expect("once");
    bench
        .backend
        .seal(&volume.dir, &dir, MARKER)
        .expect("twice");
    assert_eq!(bench.shown(&[id]).len(), 1);
}

fn a_marker_is_seen_and_is_not_content(bench: &Bench) {
    let volume = bench.fork(&[]);
    let has = |volume: &Volume| {
        bench
            .backend
            .has_marker(&volume.dir, MARKER)
            .expect("asked")
    };
    assert!(!has(&volume));
    bench.within(&volume, |root| {
        std::os::unix::fs::symlink("/etc/passwd", root.join(MARKER)).expect("symlink");
    });
    assert!(!has(&volume), "a symlink is no marker");
    bench.within(&volume, |root| {
        fs::remove_file(root.join(MARKER)).expect("unlink");
        fs::write(root.join(MARKER), b"").expect("write");
        fs::write(root.join("content"), b"x").expect("write");
        trees::times(root, 1_100_000_000, 42);
    });
    assert!(has(&volume));
    let layers = bench.seal(&volume);
    let seen = bench.shown(&layers);
    assert!(seen.get(MARKER).is_none() && seen.get("content").is_some());
    let fork = bench.fork(&layers);
    assert!(!has(&fork));
    // The driver's removal of the marker is no change by the pod.
    bench.mounted(&fork, true, |root| {
        let root = fs::metadata(root).expect("stat");
        assert_eq!((root.mtime(), root.mtime_nsec()), (1_100_000_000, 42));
    });
    bench.discard(fork);
}

fn read_only_is_read_only(bench: &Bench) {
    let layers = bench.artifact(|root| fs::write(root.join("f"), b"x").expect("write"));
    let volume = bench.fork(&layers);
    bench.mounted(&volume, true, |root| {
        let error = fs::write(root.join("f"), b"y").expect_err("read-only");
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(fs::read(root.join("f")).expect("read"), b"x");
    });
    bench.discard(volume);
}

fn the_mount_table_tells_whose_a_mount_is(bench: &Bench) {
    let (volume, other) = (bench.fork(&[]), bench.fork(&[]));
    let lines = |id: &VolumeId| {
        let table = sys::mount_table().expect("the table");
        table
            .iter()
            .filter(|mount| bench.backend.shows(mount, id, id.as_str()))
            .count()
    };
    assert_eq!(lines(&volume.id), 0);
    bench.within(&volume, |root| {
        assert_eq!((lines(&volume.id), lines(&other.id)), (1, 0));
        let options = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let place = root.to_str().expect("the lab's names are text");
        let line = options.lines().find(|line| line.contains(place));
        let line = line.expect("it is there");
        assert!(line.contains("nosuid,nodev"), "{line}");
        // The length of the table costs each reader, and the pool's place is no business of a pod.
        let source = line.split(" - ").nth(1).expect("its second half");
        let pool = bench.path.to_str().expect("text");
        assert!(!source.contains(pool), "{line}");
        // The pool must not see a pod's mount in its volume: a delete would find it there.
        let inside = root.join("inside");
        fs::create_dir(&inside).expect("mkdir");
        rustix::mount::mount_bind("/proc", &inside).expect("bind");
        let table = sys::mount_table().expect("the table");
        let in_pool = table
            .iter()
            .filter(|mount| mount.mount_point.starts_with(&bench.path))
            .count();
        assert_eq!(in_pool, 0);
        rustix::mount::unmount(&inside, rustix::mount::UnmountFlags::DETACH).expect("umount");
    });
    assert_eq!(lines(&volume.id), 0);
    bench.discard(volume);
    bench.discard(other);
}

fn only_a_volume_in_which_nothing_was_written_is_deleted_at_once(bench: &Bench) {
    let overlay = bench.backend.kind() == BackendKind::Overlay;
    let trash = bench.pool.open_beneath("trash").expect("trash");
    let volumes = bench.pool.open_beneath("volumes").expect("volumes");
    let thrown_away = |volume: &Volume| {
        let Volume { id, .. } = volume;
        volumes.rename(id, &trash, id).expect("to the trash");
        bench.backend.delete_untouched(&trash, id.as_ref())
    };
    let untouched = bench.fork(&[]);
    let pin = bench.mount(&untouched, false).expect("mounted");
    let answer = bench.backend.let_go(&untouched.dir, Some(pin));
    assert!(matches!(answer, Ok(Freeze::Frozen)), "{answer:?}");
    let id = untouched.id.clone();
    assert_eq!(thrown_away(&untouched).expect("deleted"), overlay);
    assert_eq!(trash.has(&id).expect("stat"), !overlay);
    // Once more, as after a crash.
    let again = bench.backend.delete_untouched(&trash, id.as_ref());
    assert_eq!(again.expect("asked"), overlay);
    let written = bench.fork(&[]);
    bench.within(&written, |dir| {
        fs::write(dir.join("f"), "content").expect("write");
    });
    assert!(!thrown_away(&written).expect("asked"));
    assert!(trash.has(&written.id).expect("stat"));
    for left in trash.entries().expect("entries") {
        let deleted = bench
            .backend
            .delete(&trash, Path::new(&left.name), &|| false);
        deleted.expect("deleted");
    }
    // A reader holds it, too.
    let held = bench.fork(&[]);
    let pin = bench.mount(&held, false).expect("mounted");
    let holder = pin.try_clone().expect("dup");
    let answer = bench.backend.let_go(&held.dir, Some(pin)).expect("let go");
    assert_eq!(matches!(answer, Freeze::Busy(Some(_))), overlay);
    drop(holder);
    if overlay {
        bench.wait_until_free(&held);
    }
    bench.discard(held);
}

fn writers_are_noticed_where_the_backend_promises_it(bench: &Bench) {
    let volume = bench.fork(&[]);
    let pin = bench
        .backend
        .mount(&volume.dir, volume.id.as_str(), &volume.start(), false)
        .expect("mounted");
    bench.targets.create_dir("held", 0o755).expect("mkdir");
    sys::move_mount_onto(std::os::fd::AsFd::as_fd(&pin), &bench.targets, "held").expect("attach");
    let mut file = fs::File::create(bench.targets_path.join("held/f")).expect("create");
    sys::detach(&bench.targets, "held").expect("detach");
    bench.targets.remove_dir("held").expect("rmdir");
    let overlay = bench.backend.kind() == BackendKind::Overlay;
    assert_eq!(bench.backend.in_use(&volume.dir).expect("in_use"), overlay);
    let answer = bench
        .backend
        .freeze(&volume.dir, Some(pin))
        .expect("freeze");
    assert_eq!(matches!(answer, Freeze::Busy(_)), overlay);
    // If holders are unknown, the files are checked.
    assert_eq!(bench.backend.stacks(), overlay);
    let written = || bench.backend.writers(&volume.dir, &|| false);
    assert_eq!(written().expect("writers"), !overlay);
    file.write_all(b"the last word").expect("write");
    drop(file);
    assert!(!written().expect("writers"));
    if overlay {
        bench.wait_until_free(&volume);
    }
    let layers = bench.seal(&volume);
    let size = bench.shown(&layers).get("f").map(|entry| entry.size);
    assert_eq!(size, Some(13));
}

fn thousands_of_levels_are_no_problem(bench: &Bench) {
    let volume = bench.fork(&[]);
    let count = |root: &Path| {
        let usage = tree::usage(&Dir::open(root).expect("open"), &|| false).expect("usage");
        (usage.directories, usage.files)
    };
    let before = bench.within(&volume, |root| {
        trees::deep(root, 3000);
        count(root)
    });
    assert_eq!(before, (3001, 1));
    let layers = bench.seal(&volume);
    let fork = bench.fork(&layers);
    assert_eq!(bench.within(&fork, count), before);
    bench.discard(fork);
    bench.discard(volume);
    if bench.backend.stacks() {
        let (id, dir) = bench.layer();
        bench
            .backend
            .flatten(&layers, &dir, true, &|| false)
            .expect("flatten");
        let fork = bench.fork(&[id]);
        assert_eq!(bench.within(&fork, count), before);
        bench.discard(fork);
    }
}

fn immutable_files_do_not_stop_a_delete(bench: &Bench) {
    let volume = bench.fork(&[]);
    bench.within(&volume, |root| {
        fs::create_dir(root.join("d")).expect("mkdir");
        fs::write(root.join("d/f"), b"x").expect("write");
        for (name, flag) in [("d/f", IFlags::IMMUTABLE), ("d", IFlags::APPEND)] {
            let file = fs::File::open(root.join(name)).expect("open");
            // tmpfs has flags since Linux 6.6.
            let _ = rustix::fs::ioctl_setflags(&file, flag);
        }
    });
    bench.discard(volume);
}

fn owners_are_a_view(bench: &Bench) {
    let layers = bench.artifact(|root| {
        for (name, id) in [
            ("mine", 1000),
            ("root", 0),
            ("theirs", 2000),
            ("far", 70_000),
        ] {
            fs::write(root.join(name), name).expect("write");
            chown(root.join(name), Some(id), Some(id)).expect("chown");
        }
        fs::set_permissions(root, fs::Permissions::from_mode(0o750)).expect("chmod");
        chown(root, Some(1000), Some(1000)).expect("chown");
    });
    let root = RootAttributes {
        uid: Some(2000),
        gid: Some(2000),
        ..RootAttributes::default()
    };
    let volume = bench.create(&layers, root, None);
    let space = bench.pool.space().expect("statfs");
    if !common::bench::maps_owners(bench.backend.kind(), space.filesystem().unwrap_or_default()) {
        // Its owners cannot be mapped. The error says so, and no view with the wrong owners is
        // made.
        let mounted = bench.mount(&volume, false);
        assert!(
            matches!(&mounted, Err(Error::Unsupported { what, .. }) if what.contains("fork")),
            "{mounted:?}"
        );
        bench.discard(volume);
        return;
    }
    bench.within(&volume, |root| {
        let expect = |name: &str, id| {
            let (uid, gid, _) = owner(&root.join(name));
            assert_eq!((uid, gid), (id, id), "{name:?}");
        };
        assert_eq!(owner(root), (2000, 2000, 0o750));
        for (name, id) in [
            ("mine", 2000),
            ("root", 0),
            ("theirs", 1000),
            ("far", 70_000),
        ] {
            expect(name, id);
        }
        // It is writable as such, and what the new owner makes is his.
        fs::write(root.join("mine"), b"changed").expect("write");
        fs::write(root.join("new"), b"new").expect("write");
        chown(root.join("new"), Some(2000), Some(2000)).expect("chown");
        expect("mine", 2000);
        expect("new", 2000);
    });
    let sealed = bench.seal(&volume);
    bench.discard(volume);
    // On disk nothing was turned: the view is this volume's alone.
    let fork = bench.fork(&sealed);
    bench.within(&fork, |root| {
        assert_eq!(owner(root), (1000, 1000, 0o750));
        for (name, id) in [("mine", 1000), ("new", 1000), ("root", 0), ("theirs", 2000)] {
            let (uid, gid, _) = owner(&root.join(name));
            assert_eq!((uid, gid), (id, id), "{name}");
        }
    });
    bench.discard(fork);
    let group = RootAttributes {
        mount_group: Some(4000),
        ..RootAttributes::default()
    };
    let fork = bench.create(&sealed, group, None);
    assert_eq!(bench.within(&fork, owner), (1000, 4000, 0o2770));
    bench.discard(fork);
}

fn what_looks_like_overlays_marks_comes_back_or_is_refused(bench: &Bench) {
    for only in ["whiteout", "attributes"] {
        let base = bench.artifact(|root| {
            fs::create_dir(root.join("opaque")).expect("mkdir");
            fs::write(root.join("opaque/below"), b"x").expect("write");
        });
        let volume = bench.fork(&base);
        let (made, left) = bench.within(&volume, |root| {
            let mut made: BTreeSet<_> = trees::whiteout_like(root).into_iter().collect();
            if only == "attributes" && made.remove("whiteout") {
                fs::remove_file(root.join("whiteout")).expect("unlink");
            }
            (made, Snapshot::of(root))
        });
        match bench.try_seal(&volume) {
            Ok(layers) => {
                let seen = bench.shown(&layers);
                assert_same(&left, &seen);
                assert!(seen.get("opaque/below").is_some(), "a mark acted");
                let fork = bench.fork(&layers);
                let again = bench.seal(&fork);
                assert_same(&left, &bench.shown(&again));
            }
            Err(Error::Refused { path, why }) => {
                assert_eq!(bench.backend.kind(), BackendKind::Copy, "{path}: {why}");
                assert!(path == "whiteout" || path == "opaque", "{path}: {why}");
                assert!(!made.is_empty());
            }
            Err(error) => panic!("{error}"),
        }
        bench.discard(volume);
    }
}

type Case = fn(&Bench);

/// How a backend is opened on a pool.
type Open = fn(&Dir) -> Box<dyn Backend>;

const CASES: &[(&str, Case)] = &[
    (
        "empty root",
        an_empty_volume_has_the_root_that_was_asked_for,
    ),
    ("round trip", what_is_sealed_is_what_forks_show),
    ("late ACLs", acls::acls_that_came_late_are_not_inherited),
    ("isolation", forks_do_not_see_each_other),
    ("chains", chains_of_forks_show_what_each_of_them_left),
    ("seal twice", sealing_twice_is_sealing_once),
    ("marker", a_marker_is_seen_and_is_not_content),
    ("read-only", read_only_is_read_only),
    ("mount table", the_mount_table_tells_whose_a_mount_is),
    ("writers", writers_are_noticed_where_the_backend_promises_it),
    (
        "untouched",
        only_a_volume_in_which_nothing_was_written_is_deleted_at_once,
    ),
    ("depth", thousands_of_levels_are_no_problem),
    ("immutable", immutable_files_do_not_stop_a_delete),
    ("owners", owners_are_a_view),
    (
        "marks",
        what_looks_like_overlays_marks_comes_back_or_is_refused,
    ),
    ("limit", limits::a_size_limit_holds_or_says_why_not),
    (
        "limited forks",
        limits::a_limited_fork_can_do_what_others_can,
    ),
    (
        "hostile projects",
        limits::a_tenant_changes_only_its_own_limit,
    ),
    (
        "older projects",
        limits::projects_of_an_older_version_are_recorded_once,
    ),
    (
        "a marker of the parent",
        a_marker_of_the_parent_is_none_of_the_fork,
    ),
    (
        "nested subvolumes",
        subvolumes::nested_subvolumes_are_refused_by_name_and_deleted,
    ),
    (
        "read-only subvolumes",
        subvolumes::what_a_pod_made_read_only_is_sealed_and_deleted,
    ),
    (
        "many subvolumes",
        subvolumes::each_attempt_to_delete_destroys_a_nested_subvolume,
    ),
    (
        "immutable subvolumes",
        subvolumes::what_is_immutable_around_a_nested_subvolume_does_not_keep_it,
    ),
    (
        "subvolumes on btrfs",
        subvolumes::subvolumes_on_btrfs_are_deleted_by_every_backend,
    ),
    (
        "at the limit",
        subvolumes::a_volume_at_its_limit_is_sealed_and_deleted_with_its_flags,
    ),
    (
        "a later limit",
        subvolumes::a_limit_counts_subvolumes_that_were_nested_before_it,
    ),
    (
        "a small limit",
        limits::a_small_limit_does_not_refuse_the_root,
    ),
    (
        "the size of a layer",
        limits::a_layer_takes_what_its_volume_has_written,
    ),
];

fn run(fs: Fs, open: Open) {
    run_in(require_lab!(fs), open);
}

fn run_in(lab: Lab, open: Open) {
    let fs = lab.fs();
    let bench = Bench::new(&lab, open);
    let mut failed = Vec::new();
    for (name, case) in CASES {
        // Counting changes nothing about depth, and where there is quota a processor may be
        // emulated.
        if *name == "depth" && bench.must_limit {
            continue;
        }
        let started = std::time::Instant::now();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&bench)));
        eprintln!("{name}: {:?}", started.elapsed());
        if result.is_err() {
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "failed on {}: {failed:?}", fs.name());
    bench.empty();
    assert!(
        bench
            .path
            .join("trash")
            .read_dir()
            .expect("trash")
            .next()
            .is_none()
    );
    drop(bench);
    assert!(lab.close().is_empty(), "mounts were left");
}

/// By descriptors, where this kernel knows how to.
fn overlay(pool: &Dir) -> Box<dyn Backend> {
    let api = if common::has_descriptors() {
        MountApi::Descriptors
    } else {
        MountApi::Classic
    };
    Box::new(Overlay::open(pool, api).expect("overlay works"))
}

fn classic_overlay(pool: &Dir) -> Box<dyn Backend> {
    Box::new(Overlay::open(pool, MountApi::Classic).expect("overlay works"))
}

fn copy(pool: &Dir) -> Box<dyn Backend> {
    Box::new(Copy::open(pool).expect("copy works"))
}

#[test]
fn overlay_on_ext4() {
    run(Fs::Ext4, overlay);
}

#[test]
fn classic_overlay_on_ext4() {
    run(Fs::Ext4, classic_overlay);
}

#[test]
fn overlay_on_xfs() {
    run(Fs::XfsReflink, overlay);
}

#[test]
fn classic_overlay_on_xfs() {
    run(Fs::XfsReflink, classic_overlay);
}

/// The default backend of a pool on btrfs.
#[test]
fn overlay_on_btrfs() {
    run(Fs::Btrfs, overlay);
}

/// With limits on projects, which the machine's own kernel may not have.
#[test]
fn overlay_on_ext4_with_quota() {
    run_in(require_quota_lab!(Fs::Ext4Quota), overlay);
}

#[test]
fn overlay_on_xfs_with_quota() {
    run_in(require_quota_lab!(Fs::XfsQuota), overlay);
}

#[test]
fn programs_run_on_a_pool_that_is_mounted_noexec() {
    let grounds: [(Fs, Open); 4] = [
        (Fs::Ext4, overlay),
        (Fs::Ext4, classic_overlay),
        (Fs::XfsReflink, copy),
        (Fs::Btrfs, |pool| {
            Box::new(Btrfs::open(pool, false).expect("btrfs works"))
        }),
    ];
    for (fs, open) in grounds {
        let lab = require_lab!(fs);
        eprintln!("-- {}", fs.name());
        noexec::programs_run_in_volumes(&lab, open);
        assert!(lab.close().is_empty(), "mounts were left");
    }
}

#[test]
fn btrfs() {
    run(Fs::Btrfs, |pool| {
        Box::new(Btrfs::open(pool, true).expect("btrfs works"))
    });
}

/// Simple quotas are the whole filesystem's, and keep older kernels from mounting it for ever
/// after.
#[test]
fn btrfs_quotas_are_switched_on_only_where_they_may_be_and_only_for_a_limit() {
    let lab = require_lab!(Fs::Btrfs);
    for may in [false, true] {
        let name = format!("pool-{may}");
        for room in ["layers", "volume-1", "volume-2"] {
            fs::create_dir_all(lab.dir(&name).join(room)).expect("mkdir");
        }
        let pool = Dir::open(&lab.dir(&name)).expect("open");
        let backend = Btrfs::open(&pool, may).expect("btrfs works");
        let create = |volume: &str, size_limit| {
            let start = Start {
                layers: &[],
                root: RootAttributes::default(),
                size_limit,
                sealable: true,
                owner: None,
                durable: false,
            };
            let volume = pool.open_beneath(volume).expect("open");
            let limit = backend.create(&volume, &start).expect("created");
            backend.usage(&volume, &|| false).expect("usage");
            limit
        };
        assert_eq!(create("volume-1", None), Limit::None);
        assert_eq!(pool.quotas().expect("quotas"), Quotas::Off);
        match (create("volume-2", Some(1 << 20)), pool.quotas()) {
            (Limit::Enforced, Ok(Quotas::Simple)) if may => {}
            (Limit::Unenforced(why), Ok(Quotas::Off)) if may => {
                assert!(why.contains("Linux 6.7"), "{why}");
            }
            (Limit::Unenforced(why), Ok(Quotas::Off)) => {
                assert!(why.contains("--btrfs-quota"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        for volume in ["volume-1", "volume-2"] {
            backend
                .delete(&pool, Path::new(volume), &|| false)
                .expect("delete");
        }
    }
}

/// A limit by full quotas would make every change of the volume slow.
#[test]
fn btrfs_with_full_quotas_says_that_they_are_too_slow() {
    let lab = require_lab!(Fs::Btrfs);
    let bench = Bench::new(&lab, |pool| {
        Box::new(Btrfs::open(pool, true).expect("btrfs works"))
    });
    let mut enable = Command::new("btrfs");
    enable.args(["quota", "enable"]).arg(lab.path());
    if let Err(reason) = common::lab::run(&mut enable) {
        return common::skip(&reason);
    }
    let volume = bench.create(&[], RootAttributes::default(), Some(1 << 20));
    let Limit::Unenforced(why) = &volume.limit else {
        panic!("{:?}", volume.limit)
    };
    assert!(why.contains("too slow"), "{why}");
    bench.within(&volume, |root| {
        fs::write(root.join("f"), vec![7; 2 << 20]).expect("no limit");
    });
    bench.discard(volume);
    bench.empty();
}

/// The table lists mounts that another mount hides, too.
#[test]
fn a_pool_over_a_hidden_mount_knows_its_mounts() {
    let lab = require_lab!(Fs::Ext4);
    let open = |name: &str| Dir::open(&lab.dir(name)).expect("open");
    let attach = |from: &Dir, to: &Dir, name: &str| {
        let mount = sys::bind(from, false).expect("bind");
        sys::move_mount_onto(std::os::fd::AsFd::as_fd(&mount), to, name).expect("attached");
    };
    let (real, other, root) = (open("real"), open("other"), open(""));
    let (hidden, _) = (open("place"), [open("place/pool"), open("real/pool")]);
    attach(&other, &hidden, "pool");
    attach(&real, &root, "place");
    let bench = Bench::at(&lab, lab.path().join("place/pool"), copy);
    let volume = bench.fork(&[]);
    bench.within(&volume, |_| {
        let table = sys::mount_table().expect("the table");
        let label = volume.id.as_str();
        let shown = table.iter();
        let shown = shown.filter(|mount| bench.backend.shows(mount, &volume.id, label));
        assert_eq!(shown.count(), 1);
    });
    bench.discard(volume);
    drop((bench, real, other));
    sys::detach(&root, "place").expect("detached");
    sys::detach(&hidden, "pool").expect("detached");
    drop((root, hidden));
    assert!(lab.close().is_empty(), "mounts were left");
}

/// `kill -9` after the snapshot and before the last look for nested subvolumes.
#[test]
fn a_btrfs_seal_that_was_cut_short_looks_again() {
    let lab = require_lab!(Fs::Btrfs);
    let bench = Bench::new(&lab, |pool| {
        Box::new(Btrfs::open(pool, false).expect("btrfs works"))
    });
    let volume = bench.fork(&[]);
    let (id, layer) = bench.layer();
    let content = volume.dir.open_beneath("fs").expect("open");
    content
        .create_subvolume("nested")
        .expect("a pod can do this");
    layer
        .create_snapshot("fs.new", &content, true)
        .expect("snapshot");
    let refused = bench.backend.seal(&volume.dir, &layer, MARKER);
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert!(layer.entries().expect("entries").is_empty());

    let nested = content.open_beneath("nested").expect("open");
    let nested = nested.subvolume_id().expect("an id");
    bench.pool.destroy_subvolume(nested).expect("destroyed");
    layer
        .create_snapshot("fs.new", &content, true)
        .expect("snapshot");
    content.write_new("later", b"x").expect("write");
    bench
        .backend
        .seal(&volume.dir, &layer, MARKER)
        .expect("sealed");
    assert_eq!(layer.entries().expect("entries").len(), 1);
    assert!(bench.shown(&[id]).get("later").is_some());
    bench.discard(volume);
    bench.empty();
}

#[test]
fn copy_on_xfs_with_reflinks() {
    run(Fs::XfsReflink, copy);
}

#[test]
fn copy_on_ext4() {
    run(Fs::Ext4, copy);
}

#[test]
fn copy_on_tmpfs() {
    run(Fs::Tmpfs, copy);
}
