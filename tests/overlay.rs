//! The overlay backend on real filesystems, with both mount APIs: attempts of a hostile pod, when a
//! volume counts as frozen, and the content of a fork.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a test may run a shell, and plays a pod that deletes what is its own"
)]

mod common;

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baggageclaim::backend::{
    Backend, BackendKind, Chosen, Error, Freeze, Limit, MountApi, RootAttributes, Start, Wanted,
    choose,
};
use baggageclaim::model::{LayerId, VolumeId, layout};
use baggageclaim::sys::{self, Dir, Errno, MountEntry};
use common::{
    Fs, Lab, Snapshot, assert_same, has_project_quotas, require_lab, require_quota_lab,
    require_root, skip_outside_guests, too_old, tree,
};
use rustix::fs::{IFlags, XattrFlags};

const APIS: [MountApi; 2] = [MountApi::Descriptors, MountApi::Classic];
const FILESYSTEMS: [Fs; 2] = [Fs::Ext4, Fs::XfsReflink];

const START: Start<'static> = Start {
    layers: &[],
    root: RootAttributes {
        mode: None,
        uid: None,
        gid: None,
        mount_group: None,
    },
    size_limit: None,
    sealable: true,
    owner: None,
    durable: false,
};

/// Overlay, by this API.
fn wanted(api: Option<MountApi>) -> Wanted {
    Wanted {
        kind: Some(BackendKind::Overlay),
        api,
        btrfs_quota: false,
        untested: false,
    }
}

/// A pool with the overlay backend.
struct Pool {
    dir: Dir,
    chosen: Chosen,
}

/// A mounted volume, seen through its detached mount.
struct Mounted(OwnedFd);

impl Mounted {
    fn path(&self) -> PathBuf {
        // For our child processes as well.
        format!("/proc/{}/fd/{}/", std::process::id(), self.0.as_raw_fd()).into()
    }

    fn pin(&self) -> OwnedFd {
        self.0.try_clone().expect("dup")
    }
}

impl Pool {
    /// `None` where this kernel has not that API.
    fn new(lab: &Lab, api: MountApi) -> Option<Self> {
        let path = lab.dir(&format!("pool-{api}"));
        let dir = Dir::open(&path).expect("the pool opens");
        let chosen = match choose(&dir, wanted(Some(api))) {
            Ok(chosen) => chosen,
            Err(error) if api == MountApi::Descriptors && !common::has_descriptors() => {
                let why = error.to_string();
                assert!(why.starts_with("the overlay backend"), "{why}");
                // The first directory that is given by descriptor.
                let said = "overlay (descriptors): fsconfig overlay: workdir: ";
                assert!(why.contains(said), "{why}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        dir.create_dir(layout::VOLUMES, 0o700).expect("volumes");
        Some(Self { dir, chosen })
    }

    fn backend(&self) -> &dyn Backend {
        &*self.chosen.backend
    }

    fn volume(&self, name: &str) -> Dir {
        let volumes = self.dir.open_beneath(layout::VOLUMES).expect("volumes");
        volumes.create_dir(name, 0o700).expect("a new volume");
        volumes.open_beneath(name).expect("it opens")
    }

    fn mount(&self, volume: &Dir, start: &Start<'_>) -> Mounted {
        let name = volume.path().file_name().expect("a name");
        let id: VolumeId = name.to_str().expect("text").parse().expect("an id");
        Mounted(
            self.backend()
                .mount(volume, id.as_str(), start, false)
                .unwrap_or_else(|error| panic!("{error}")),
        )
    }

    fn made(&self, name: &str, start: &Start<'_>) -> (Dir, Mounted) {
        let volume = self.volume(name);
        let limit = self.backend().create(&volume, start).expect("create");
        assert_eq!(limit, Limit::None);
        let mounted = self.mount(&volume, start);
        (volume, mounted)
    }

    fn sealed(&self, volume: &Dir, mounted: Mounted, number: u128) -> LayerId {
        // Another test may start a program at this moment, whose process holds copies of our
        // descriptors until it execs: even of a file that was open for writing.
        let frozen = self.backend().freeze(volume, Some(mounted.0));
        let is_busy = matches!(frozen.expect("freeze"), Freeze::Busy(_));
        eventually("it is free", || {
            !self.backend().in_use(volume).expect("in_use")
        });
        if is_busy {
            let frozen = self.backend().freeze(volume, None).expect("freeze");
            assert!(matches!(frozen, Freeze::Frozen), "not frozen: {frozen:?}");
        }
        let id = LayerId::from_bits(number);
        let layers = self.dir.open_beneath(layout::LAYERS).expect("layers");
        layers.create_dir(id.to_string(), 0o700).expect("a layer");
        let layer = layers.open_beneath(id.to_string()).expect("it opens");
        for _ in 0..2 {
            // Twice: it must be repeatable.
            self.backend()
                .seal(volume, &layer, layout::COMMIT_MARKER)
                .expect("seal");
        }
        id
    }
}

fn top_of(volume: &Dir) -> PathBuf {
    volume.path().join(layout::TOP)
}

/// Runs a case on every filesystem through every API; nothing may be mounted afterwards that was
/// not before.
fn everywhere(case: impl Fn(&Pool)) {
    for fs in FILESYSTEMS {
        let lab = require_lab!(fs);
        for api in APIS {
            if let Some(pool) = Pool::new(&lab, api) {
                eprintln_case(fs, api);
                case(&pool);
            }
        }
        assert_eq!(
            lab.close(),
            Vec::<PathBuf>::new(),
            "mounts were left behind"
        );
    }
}

#[expect(clippy::print_stderr, reason = "says where a failure happened")]
fn eprintln_case(fs: Fs, api: MountApi) {
    eprintln!("-- {} through {api}", fs.name());
}

fn fork(layers: &[LayerId]) -> Start<'_> {
    Start { layers, ..START }
}

fn is_readable(watch: &OwnedFd) -> bool {
    matches!(rustix::io::read(watch, &mut [0; 512]), Ok(1..))
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..500 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never: {what}");
}

#[test]
fn the_probe_picks_overlay_says_why_and_leaves_nothing() {
    require_root!();
    for fs in [Fs::Ext4, Fs::XfsReflink, Fs::Btrfs, Fs::Tmpfs] {
        let lab = require_lab!(fs);
        let dir = Dir::open(&lab.dir("pool")).expect("the pool opens");
        let chosen = choose(&dir, Wanted::default()).expect("overlay works");
        assert_eq!(chosen.kind, BackendKind::Overlay, "{}", chosen.reason);
        assert!(chosen.reason.contains("Linux"), "{}", chosen.reason);
        assert!(chosen.reason.contains("limits are not enforced: "));
        // Older kernels have another way, and the reason says what they have not.
        let api = if common::has_descriptors() {
            MountApi::Descriptors
        } else {
            let without = "; overlay (descriptors): ";
            assert!(chosen.reason.contains(without), "{}", chosen.reason);
            MountApi::Classic
        };
        let works = format!("overlay ({api}) works on ");
        assert!(chosen.reason.starts_with(&works), "{}", chosen.reason);
        for name in [layout::INCOMING, layout::EMPTY, layout::LAYERS] {
            let left = dir.open_beneath(name).expect(name).entries().expect(name);
            assert_eq!(left, [], "{name}");
        }
        assert_eq!(lab.leftovers(), Vec::<PathBuf>::new());
        drop((chosen, dir));
        assert_eq!(lab.close(), Vec::<PathBuf>::new());
    }
}

/// The limit of a project is enforced only where the probe says so: ext4 may count without
/// enforcing.
#[test]
fn the_probe_knows_whether_limits_are_enforced() {
    require_root!();
    for fs in Fs::WITH_QUOTA {
        let lab = require_quota_lab!(fs);
        let dir = Dir::open(&lab.dir("pool")).expect("the pool opens");
        let reason = choose(&dir, Wanted::default()).expect("it works").reason;
        assert!(reason.ends_with("size limits are enforced"), "{reason}");
        drop(dir);
        lab.remount_without_quota();
        let dir = Dir::open(&lab.dir("pool")).expect("the pool opens");
        let reason = choose(&dir, Wanted::default()).expect("it works").reason;
        let why = if fs == Fs::Ext4Quota {
            "counted but not enforced"
        } else {
            "project quotas are off"
        };
        assert!(reason.contains(why), "{reason}");
        assert!(reason.contains("mount the pool's filesystem with prjquota"));
    }
}

#[test]
fn a_pool_where_overlay_cannot_be_says_why() {
    require_root!();
    let lab = require_lab!(Fs::Ext4);
    let pool = Pool::new(&lab, MountApi::Classic).expect("a pool");
    let (volume, mounted) = pool.made("v", &START);
    fs::create_dir(mounted.path().join("pool")).expect("mkdir");
    let nested = Dir::open(&mounted.path().join("pool")).expect("it opens");
    let error = choose(&nested, wanted(None)).expect_err("overlay on overlay");
    let text = error.to_string();
    assert!(
        text.contains("overlay (classic)") && text.contains("EINVAL"),
        "{text}"
    );
    drop((nested, mounted, volume, pool));
    assert_eq!(lab.close(), Vec::<PathBuf>::new());
}

#[test]
fn a_fork_sees_exactly_what_was_sealed_and_a_chain_of_forks_too() {
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("one", &START);
        let root = mounted.path();
        tree::odd(&root);
        tree::files(&root.join("."), 300);
        fs::create_dir_all(root.join("gone/below")).expect("mkdir");
        fs::write(root.join("gone/below/file"), "1").expect("write");
        fs::write(root.join("replaced"), "a file").expect("write");
        // All that a root directory can have.
        rustix::fs::setxattr(&root, "user.note", b"of the root", XattrFlags::empty())
            .expect("xattr");
        rustix::fs::setxattr(&root, "trusted.note", b"too", XattrFlags::empty()).expect("xattr");
        rustix::fs::setxattr(&root, ACL_ACCESS, &acl(), XattrFlags::empty()).expect("acl");
        rustix::fs::setxattr(&root, ACL_DEFAULT, &acl(), XattrFlags::empty()).expect("acl");
        std::os::unix::fs::chown(&root, Some(77), Some(78)).expect("chown");
        fs::set_permissions(&root, fs::Permissions::from_mode(0o3751)).expect("chmod");
        fs::write(root.join(layout::COMMIT_MARKER), "").expect("the marker");
        assert!(
            pool.backend()
                .has_marker(&volume, layout::COMMIT_MARKER)
                .expect("has_marker")
        );
        fs::remove_file(root.join(layout::COMMIT_MARKER)).expect("unlink");
        assert!(
            !pool
                .backend()
                .has_marker(&volume, layout::COMMIT_MARKER)
                .expect("has_marker")
        );
        tree::times(&root, 1_234_567_890, 123_456_789);
        let sealed = Snapshot::of(&root);
        let one = pool.sealed(&volume, mounted, 1);

        let layers = [one];
        let (volume, mounted) = pool.made("two", &fork(&layers));
        let root = mounted.path();
        assert_same(&sealed, &Snapshot::of(&root));
        // A whiteout, an opaque directory, a file in the place of a directory and the other way
        // round.
        fs::remove_file(root.join("gone/below/file")).expect("unlink");
        fs::remove_dir_all(root.join("gone")).expect("rm -r");
        fs::create_dir(root.join("gone")).expect("mkdir over a whiteout");
        fs::write(root.join("gone/new"), "2").expect("write");
        fs::remove_file(root.join("replaced")).expect("unlink");
        fs::create_dir(root.join("replaced")).expect("mkdir");
        fs::write(root.join("replaced/x"), "3").expect("write");
        let second = Snapshot::of(&root);
        let two = pool.sealed(&volume, mounted, 2);

        let layers = [two, one];
        let (volume, mounted) = pool.made("three", &fork(&layers));
        assert_same(&second, &Snapshot::of(&mounted.path()));
        fs::write(mounted.path().join("only-here"), "4").expect("write");
        let layers = [one];
        let (_, other) = pool.made("four", &fork(&layers));
        assert_same(&sealed, &Snapshot::of(&other.path()));
        let usage = pool.backend().usage(&volume, &|| false).expect("usage");
        assert_eq!((usage.files, usage.directories), (1, 1));
    });
}

const ACL_ACCESS: &str = "system.posix_acl_access";
const ACL_DEFAULT: &str = "system.posix_acl_default";

/// `u::rwx u:1234:r-x g::r-x m::rwx o::--x` in the kernel's words (linux/posix_acl_xattr.h).
fn acl() -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    let none = u32::MAX;
    for (tag, permissions, id) in [
        (0x01_u16, 7_u16, none),
        (0x02, 5, 1234),
        (0x04, 5, none),
        (0x10, 7, none),
        (0x20, 1, none),
    ] {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[test]
fn what_looks_like_a_whiteout_never_acts_as_one() {
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("below", &START);
        let root = mounted.path();
        tree::files(&root, 200);
        let one = pool.sealed(&volume, mounted, 1);

        let layers = [one];
        let (volume, mounted) = pool.made("hostile", &fork(&layers));
        let root = mounted.path();
        let made = tree::whiteout_like(&root);
        for name in [
            "opaque", "redirect", "metacopy", "whiteout", "origin", "impure",
        ] {
            for space in ["trusted", "user"] {
                let key = format!("{space}.overlay.{name}");
                for target in [root.clone(), root.join("d0000")] {
                    let _ = rustix::fs::setxattr(&target, &*key, b"y", XattrFlags::empty());
                }
            }
        }
        let device = rustix::fs::mknodat(
            rustix::fs::CWD,
            root.join("d0001/f000100"),
            rustix::fs::FileType::CharacterDevice,
            rustix::fs::Mode::from_raw_mode(0o666),
            0,
        );
        assert!(device.is_err(), "a whiteout was made from inside: {made:?}");
        let before = Snapshot::of(&root);
        assert!(before.len() >= 202, "something was hidden: {before}");
        let two = pool.sealed(&volume, mounted, 2);

        let layers = [two, one];
        let (_, mounted) = pool.made("victim", &fork(&layers));
        assert_same(&before, &Snapshot::of(&mounted.path()));
    });
}

/// A shell that waits in `directory` until it is told to go.
fn sitting_in(directory: &Path) -> Child {
    let mut child = Command::new("sh")
        .arg("-c")
        .arg("echo ready; read line")
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // It cannot say where it is.
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell");
    let mut ready = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut ready).expect("ready");
    child
}

fn leave(mut child: Child) {
    drop(child.stdin.take());
    child.wait().expect("it ends");
}

#[test]
fn an_open_file_keeps_a_volume_busy_and_all_that_it_writes_is_sealed() {
    use std::io::Write;
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("v", &START);
        let mut file = fs::File::create(mounted.path().join("log")).expect("create");
        file.write_all(b"before;").expect("write");
        let Ok(Freeze::Busy(Some(watch))) = pool.backend().freeze(&volume, Some(mounted.0)) else {
            panic!("must be busy");
        };
        assert!(!is_readable(&watch));
        file.write_all(b"after;")
            .expect("its pod is gone and still it writes");
        assert!(pool.backend().in_use(&volume).expect("in_use"));
        assert!(matches!(
            pool.backend().freeze(&volume, None),
            Ok(Freeze::Busy(None))
        ));
        drop(file);
        eventually("the watch fires", || is_readable(&watch));
        assert!(matches!(
            pool.backend().freeze(&volume, None),
            Ok(Freeze::Frozen)
        ));
        let content = fs::read(top_of(&volume).join("log")).expect("read");
        assert_eq!(content, b"before;after;");
    });
}

#[test]
#[expect(
    unsafe_code,
    reason = "a mapping without a descriptor is what is tested"
)]
fn a_mapping_keeps_a_volume_busy_and_what_it_stores_is_sealed() {
    use nix::libc;
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("v", &START);
        fs::write(mounted.path().join("map"), [0; 4096]).expect("write");
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(mounted.path().join("map"))
            .expect("open");
        // SAFETY: a fresh shared mapping of a file of that length; unmapped once, below, and not
        // used after that.
        let memory = unsafe {
            let memory = libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            assert_ne!(memory, libc::MAP_FAILED);
            memory.cast::<u8>()
        };
        drop(file);
        let Ok(Freeze::Busy(Some(watch))) = pool.backend().freeze(&volume, Some(mounted.0)) else {
            panic!("must be busy");
        };
        // SAFETY: within the mapping.
        unsafe { memory.write(b'!') };
        assert!(pool.backend().in_use(&volume).expect("in_use"));
        assert!(!is_readable(&watch));
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(memory.cast(), 4096) };
        eventually("the watch fires", || is_readable(&watch));
        assert!(matches!(
            pool.backend().freeze(&volume, None),
            Ok(Freeze::Frozen)
        ));
        let content = fs::read(top_of(&volume).join("map")).expect("read");
        assert_eq!(content[0], b'!');
    });
}

#[test]
fn a_volume_whose_first_mount_was_not_made_is_in_use_once_it_is_mounted() {
    require_root!();
    everywhere(|pool| {
        let volume = pool.volume("v");
        pool.backend().create(&volume, &START).expect("create");
        // A driver was killed here.
        volume.create_dir("work.1", 0o700).expect("mkdir");
        assert!(!pool.backend().in_use(&volume).expect("in_use"));
        let mounted = pool.mount(&volume, &START);
        assert!(pool.backend().in_use(&volume).expect("in_use"));
        drop(mounted);
        eventually("it is free", || {
            !pool.backend().in_use(&volume).expect("in_use")
        });
    });
}

#[test]
fn a_working_directory_is_in_use_but_writes_nothing_once_frozen() {
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("v", &START);
        let child = sitting_in(&mounted.path());
        // No process has a file open for writing, so it can be frozen at once …
        let pin = mounted.pin();
        assert!(matches!(
            pool.backend().freeze(&volume, Some(pin)),
            Ok(Freeze::Held(Some(_)))
        ));
        let error = fs::write(format!("/proc/{}/cwd/late", child.id()), "x").expect_err("frozen");
        assert_eq!(error.raw_os_error(), Some(Errno::EROFS as i32));
        // … but a restarted driver has no pin, so it must wait until the volume is free.
        drop(mounted);
        assert!(pool.backend().in_use(&volume).expect("in_use"));
        assert!(matches!(
            pool.backend().freeze(&volume, None),
            Ok(Freeze::Busy(None))
        ));
        leave(child);
        eventually("it is free", || {
            !pool.backend().in_use(&volume).expect("in_use")
        });
    });
}

/// Linux before 6.5 refuses a read-only upper directory with the errno that means "free".
#[test]
fn a_read_only_filesystem_does_not_show_a_volume_as_free() {
    require_root!();
    for fs in FILESYSTEMS {
        let lab = require_lab!(fs);
        for api in APIS {
            let Some(pool) = Pool::new(&lab, api) else {
                continue;
            };
            eprintln_case(fs, api);
            let (volume, mounted) = pool.made("v", &START);
            let child = sitting_in(&mounted.path());
            drop(mounted);
            lab.set_read_only(true);
            let in_use = pool.backend().in_use(&volume);
            lab.set_read_only(false);
            assert!(!matches!(in_use, Ok(false)), "{in_use:?}");
            leave(child);
        }
        assert_eq!(
            lab.close(),
            Vec::<PathBuf>::new(),
            "mounts were left behind"
        );
    }
}

#[test]
fn a_volume_can_be_mounted_again_and_again() {
    require_root!();
    everywhere(|pool| {
        let (volume, first) = pool.made("v", &START);
        fs::write(first.path().join("x"), "1").expect("write");
        drop(first);
        eventually("it is free", || {
            !pool.backend().in_use(&volume).expect("in_use")
        });
        // The volatile marker of the first is still there.
        assert!(volume.has("work.1/work/incompat/volatile").unwrap_or(false));
        let second = pool.mount(&volume, &START);
        assert_eq!(fs::read(second.path().join("x")).expect("read"), b"1");
        assert!(volume.has("work.2").expect("stat"));
        drop(second);
        // A durable one leaves no such marker.
        let durable = Start {
            durable: true,
            ..START
        };
        drop(pool.mount(&volume, &durable));
        assert!(!volume.has("work.3/work/incompat/volatile").unwrap_or(false));
    });
}

#[test]
fn a_fork_with_another_owner_is_a_view_and_the_disk_keeps_its_own() {
    require_root!();
    if !common::bench::maps_owners(BackendKind::Overlay, "ext4") {
        return too_old("forks with another owner");
    }
    everywhere(|pool| {
        let (volume, mounted) = pool.made("v", &START);
        let root = mounted.path();
        for (name, uid) in [("roots", 0), ("users", 1000), ("others", 7)] {
            fs::write(root.join(name), name).expect("write");
            std::os::unix::fs::chown(root.join(name), Some(uid), Some(uid)).expect("chown");
        }
        let one = pool.sealed(&volume, mounted, 1);
        let layers = [one];
        let start = Start {
            root: RootAttributes {
                uid: Some(1000),
                gid: Some(1000),
                ..RootAttributes::default()
            },
            ..fork(&layers)
        };
        let (volume, mounted) = pool.made("fork", &start);
        let root = mounted.path();
        let owner = |path: &Path| {
            let found = fs::symlink_metadata(path).expect("stat");
            (found.uid(), found.gid())
        };
        assert_eq!(owner(&root.join(".")), (1000, 1000));
        assert!(pool.backend().in_use(&volume).expect("in_use"));
        assert_eq!(owner(&root.join("roots")), (1000, 1000));
        assert_eq!(owner(&root.join("users")), (0, 0));
        assert_eq!(owner(&root.join("others")), (7, 7));
        // Changes by the pod's user are stored with the sealed owner.
        fs::write(root.join("new"), "x").expect("write");
        std::os::unix::fs::chown(root.join("new"), Some(1000), Some(1000)).expect("chown");
        fs::write(root.join("roots"), "changed").expect("copy-up");
        let top = top_of(&volume);
        assert_eq!(owner(&top.join("new")), (0, 0));
        assert_eq!(owner(&top.join("roots")), (0, 0));
        assert_eq!(owner(&root.join("roots")), (1000, 1000));
        let two = pool.sealed(&volume, mounted, 2);
        let layers = [two, one];
        let (_, mounted) = pool.made("plain", &fork(&layers));
        assert_eq!(owner(&mounted.path().join("new")), (0, 0));
        assert_eq!(owner(&mounted.path().join("users")), (1000, 1000));

        let start = Start {
            root: RootAttributes {
                uid: Some(u32::MAX),
                ..RootAttributes::default()
            },
            ..fork(&layers)
        };
        let volume = pool.volume("nobody");
        pool.backend().create(&volume, &start).expect("create");
        let id: VolumeId = "nobody".parse().expect("an id");
        let error = pool.backend().mount(&volume, id.as_str(), &start, false);
        assert!(matches!(error, Err(Error::Unsupported { .. })), "{error:?}");
    });
}

#[test]
fn the_root_of_a_new_volume_is_as_asked() {
    require_root!();
    everywhere(|pool| {
        let cases = [
            (RootAttributes::default(), (0o777, 0, 0)),
            (
                RootAttributes {
                    mode: Some(0o1750),
                    uid: Some(5),
                    gid: Some(6),
                    mount_group: Some(9),
                },
                (0o1750, 5, 6),
            ),
            (
                RootAttributes {
                    mode: Some(0o700),
                    mount_group: Some(9),
                    ..RootAttributes::default()
                },
                (0o2770, 0, 9),
            ),
        ];
        for (number, (root, expected)) in cases.into_iter().enumerate() {
            let start = Start { root, ..START };
            let (_, mounted) = pool.made(&format!("v{number}"), &start);
            let found = fs::metadata(mounted.path()).expect("stat");
            assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), expected);
        }
    });
}

#[test]
fn a_hundred_layers_are_mounted_in_order() {
    require_root!();
    everywhere(|pool| {
        let mut layers = Vec::new();
        for number in 0..100_u128 {
            let id = LayerId::from_bits(number);
            let path = pool
                .dir
                .path()
                .join(layout::LAYERS)
                .join(id.to_string())
                .join("fs");
            fs::create_dir_all(&path).expect("mkdir");
            fs::write(path.join("newest"), number.to_string()).expect("write");
            fs::write(path.join(format!("f{number}")), "").expect("write");
            layers.insert(0, id);
        }
        // The older API takes so many by other calls than one more.
        for count in [31, 32, 100] {
            let (_, mounted) = pool.made(&format!("v{count}"), &fork(&layers[..count]));
            assert_eq!(
                fs::read(mounted.path().join("newest")).expect("read"),
                b"99"
            );
            let seen = fs::read_dir(mounted.path()).expect("list").count();
            assert_eq!(seen, count + 1);
        }
    });
}

#[test]
fn scratch_is_a_plain_directory_and_freezing_it_does_not_freeze_the_pool() {
    require_root!();
    everywhere(|pool| {
        let start = Start {
            sealable: false,
            ..START
        };
        let (volume, mounted) = pool.made("scratch", &start);
        let seen = Dir::from_fd(mounted.pin(), "scratch");
        assert_ne!(seen.space().expect("statfs").magic, sys::Space::OVERLAY);
        fs::write(mounted.path().join("x"), "1").expect("write");
        // Docker in docker: an overlay on it works, which it would not on an overlay.
        pool.dir.create_dir("target", 0o755).expect("mkdir");
        sys::move_mount_onto(mounted.0.as_fd(), &pool.dir, "target").expect("attached");
        let target = pool.dir.path().join("target");
        let rooms = ["lower", "upper", "work", "merged"].map(|name| target.join(name));
        for room in &rooms {
            fs::create_dir(room).expect("mkdir");
        }
        let [lower, upper, work, merged] = &rooms;
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.display(),
            work.display()
        );
        let options = CString::new(options).expect("no NUL");
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("overlay", merged, "overlay", flags, options.as_c_str())
            .expect("an overlay within");
        fs::write(merged.join("inner"), "1").expect("write");
        rustix::mount::unmount(merged, rustix::mount::UnmountFlags::DETACH).expect("umount");
        assert!(upper.join("inner").exists());
        sys::detach(&pool.dir, "target").expect("detached");
        assert!(matches!(
            pool.backend().freeze(&volume, Some(mounted.0)),
            Ok(Freeze::Frozen)
        ));
        fs::write(top_of(&volume).join("y"), "the pool is writable").expect("write");
    });
}

#[test]
fn the_marker_is_taken_out_at_seal_and_never_followed() {
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("file", &START);
        fs::write(mounted.path().join(layout::COMMIT_MARKER), "").expect("write");
        pool.sealed(&volume, mounted, 1);
        let (volume, mounted) = pool.made("link", &START);
        fs::write(mounted.path().join("victim"), "").expect("write");
        symlink("victim", mounted.path().join(layout::COMMIT_MARKER)).expect("symlink");
        assert!(
            !pool
                .backend()
                .has_marker(&volume, layout::COMMIT_MARKER)
                .expect("has_marker")
        );
        pool.sealed(&volume, mounted, 2);
        let layers = pool.dir.path().join(layout::LAYERS);
        let fs_of = |number| {
            layers
                .join(LayerId::from_bits(number).to_string())
                .join("fs")
        };
        assert_eq!(fs::read_dir(fs_of(1)).expect("list").count(), 0);
        assert_eq!(fs::read_dir(fs_of(2)).expect("list").count(), 2);
    });
}

#[test]
fn mounts_are_told_apart_in_the_mount_table() {
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("shown", &START);
        let start = Start {
            sealable: false,
            ..START
        };
        let (scratch, bound) = pool.made("shown-scratch", &start);
        let place = pool.dir.path().join("targets");
        fs::create_dir(&place).expect("mkdir");
        let place = Dir::open(&place).expect("it opens");
        for (name, mounted, volume) in [("a", &mounted, &volume), ("b", &bound, &scratch)] {
            place.create_dir(name, 0o755).expect("target");
            sys::move_mount_onto(mounted.0.as_fd(), &place, name).expect("attach");
            let point = sys::mount_point_at(&place, name).expect("statx");
            let point = point.expect("it is there");
            let table = sys::mount_table().expect("mountinfo");
            let id: VolumeId = volume
                .path()
                .file_name()
                .and_then(|name| name.to_str())
                .expect("text")
                .parse()
                .expect("an id");
            let other: VolumeId = "other".parse().expect("an id");
            let showing: Vec<_> = table
                .iter()
                .filter(|mount| pool.backend().shows(mount, &id, id.as_str()))
                .collect();
            assert_eq!(showing.len(), 1, "{showing:?}");
            assert!(!pool.backend().shows(showing[0], &other, other.as_str()));
            assert!(point.is_root);
        }
        for name in ["a", "b"] {
            sys::detach(&place, name).expect("detach");
            place.remove_dir(name).expect("rmdir");
        }
    });
}

/// Everybody who reads the mount table pays for each character of it.
#[test]
fn a_line_of_the_mount_table_says_no_more_than_which_volume_it_is() {
    require_root!();
    everywhere(|pool| {
        let name = format!("csi-{:064x}", 0xab_cdef);
        let (layered, mounted) = pool.made("below", &START);
        let layers = [pool.sealed(&layered, mounted, 1)];
        let (_volume, mounted) = pool.made(&name, &fork(&layers));
        let place = pool.dir.path().join("a-target");
        fs::create_dir(&place).expect("mkdir");
        let place = Dir::open(&place).expect("it opens");
        sys::move_mount_onto(mounted.0.as_fd(), &place, ".").expect("attach");
        let text = fs::read_to_string("/proc/thread-self/mountinfo").expect("mountinfo");
        let line = text.lines().find(|line| line.contains("/a-target "));
        let (_, shown) = line
            .expect("it is there")
            .split_once(" - ")
            .expect("fields");
        let (source, options) = shown
            .strip_prefix("overlay ")
            .and_then(|shown| shown.split_once(' '))
            .expect("source and options");
        assert_eq!(source, "baggageclaim:0000000000abcdef");
        assert!(!options.contains('/'), "{options}");

        let id: VolumeId = name.parse().expect("an id");
        let other: VolumeId = "csi-0000000000abcdef".parse().expect("an id");
        let mut seen = MountEntry {
            source: source.into(),
            ..sys::mount_table()
                .expect("mountinfo")
                .into_iter()
                .find(|mount| mount.mount_point.ends_with("a-target"))
                .expect("it is there")
        };
        assert!(pool.backend().shows(&seen, &id, id.as_str()));
        // As versions before called it.
        seen.source = format!("baggageclaim:{name}").into();
        assert!(pool.backend().shows(&seen, &id, id.as_str()));
        assert!(!pool.backend().shows(&seen, &other, other.as_str()));
        sys::detach(
            &Dir::open(place.path().parent().expect("a parent")).expect("it opens"),
            "a-target",
        )
        .expect("detach");
    });
}

/// An administrator limits the pool as a whole by a project. Each layer inherits it, and nothing of
/// another project can be moved there. So such a pool limits no volume, says so, and seals all.
#[test]
fn a_pool_that_is_in_a_project_limits_no_volume_of_its_own_with_quota() {
    require_root!();
    let with_quota = Fs::WITH_QUOTA.into_iter().filter(|_| has_project_quotas());
    // Every xfs has projects; only the kernel may have no quotas.
    for fs in [Fs::XfsReflink].into_iter().chain(with_quota) {
        let lab = match Lab::try_new(fs) {
            Ok(lab) => lab,
            Err(reason) => {
                skip_outside_guests(&reason);
                continue;
            }
        };
        for api in APIS {
            let pool = Dir::open(&lab.dir(&format!("pool-{api}"))).expect("it opens");
            pool.set_project(42).expect("the administrator may");
            let Some(pool) = Pool::new(&lab, api) else {
                continue;
            };
            eprintln_case(fs, api);
            let limited = Start {
                size_limit: Some(8 << 20),
                ..START
            };
            let volume = pool.volume("limited");
            let limit = pool.backend().create(&volume, &limited).expect("create");
            let why = limit.why_unenforced().expect("it is not enforced");
            assert!(why.contains("the pool is in project 42"), "{why}");
            let mounted = pool.mount(&volume, &limited);
            fs::write(mounted.path().join("f"), "x").expect("write");
            pool.sealed(&volume, mounted, 1);
        }
        assert!(lab.close().is_empty(), "mounts were left behind");
    }
}

/// Before Linux 5.15 overlayfs sets the flags of a pod's `chattr +i` in the upper directory.
#[test]
fn a_top_with_flags_that_forbid_changes_is_sealed() {
    require_root!();
    everywhere(|pool| {
        let (volume, mounted) = pool.made("flagged", &START);
        let marker = layout::COMMIT_MARKER;
        for name in ["f", marker] {
            fs::write(mounted.path().join(name), "x").expect("write");
        }
        let top = top_of(&volume);
        for path in [top.join("f"), top.join(marker), top] {
            let file = fs::File::open(&path).expect("open");
            let flags = rustix::fs::ioctl_getflags(&file).expect("its flags");
            rustix::fs::ioctl_setflags(&file, flags | IFlags::IMMUTABLE).expect("chattr");
        }
        let layer = pool.sealed(&volume, mounted, 1);
        let layer = pool.dir.path().join(format!("layers/{layer}/fs"));
        assert!(layer.join("f").exists() && !layer.join(marker).exists());
        let layers = pool.dir.open_beneath(layout::LAYERS).expect("layers");
        let name = layer.parent().and_then(Path::file_name).expect("a name");
        let deleted = pool.backend().delete(&layers, name.as_ref(), &|| false);
        deleted.expect("deleted");
    });
}
