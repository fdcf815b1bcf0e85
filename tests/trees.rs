//! Copying, deleting and merging real trees on real filesystems.

#![expect(
    clippy::disallowed_methods,
    reason = "what the product deletes safely, a test of it makes and removes in the plain way"
)]

mod common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baggageclaim::sys::{Dir, Errno};
use baggageclaim::tree::{self, Error, Marks, Method};
use common::random::Random;
use common::{Fs, Lab, Snapshot, assert_same, require_lab, tree as trees};
use rustix::fs::{CWD, FallocateFlags, FileType, IFlags, Mode, XattrFlags};
use rustix::mount::{MountFlags, UnmountFlags};

fn open(path: &Path) -> Dir {
    Dir::open(path).expect("open")
}

#[test]
fn a_copy_is_the_same_in_everything_that_is_content() {
    for (fs, method) in [
        (Fs::Ext4, Method::Bytes),
        (Fs::XfsReflink, Method::Reflink),
        (Fs::Xfs, Method::Bytes),
        (Fs::Btrfs, Method::Reflink),
        (Fs::Tmpfs, Method::Bytes),
    ] {
        let lab = require_lab!(fs);
        let (from, to) = (lab.dir("from"), lab.dir("to"));
        trees::odd(&from);
        let before = Snapshot::of(&from);
        let sparse = fs::metadata(from.join("sparse")).expect("stat").blocks();
        let used = tree::copy(&open(&from), &open(&to), Method::Reflink, Marks::Refuse)
            .unwrap_or_else(|error| panic!("{}: {error}", fs.name()));
        assert_eq!(used, method, "{}", fs.name());
        assert_same(&before, &Snapshot::of(&to));
        assert_same(&before, &Snapshot::of(&from));
        let copy = fs::metadata(to.join("sparse")).expect("stat").blocks();
        assert!(copy <= sparse + 64, "{}: {sparse} → {copy}", fs.name());
        for name in ["from", "to"] {
            let usage = tree::usage(&open(&lab.path().join(name)), &|| false).expect("usage");
            assert_eq!(usage.files + usage.directories, before.len() as u64 + 1);
        }
        tree::delete(&open(&lab.path()), Path::new("from"), &|| false).expect("delete");
        tree::delete(&open(&lab.path()), Path::new("to"), &|| false).expect("delete");
        assert!(!from.exists() && !to.exists());
        assert!(lab.close().is_empty());
    }
}

#[test]
fn thousands_of_levels_are_copied_measured_merged_and_deleted() {
    const LEVELS: u64 = 3000;
    let lab = require_lab!(Fs::Tmpfs);
    let root = open(&lab.path());
    let (from, to) = (lab.dir("from"), lab.dir("to"));
    trees::deep(&from, 3000);
    let before = tree::usage(&open(&from), &|| false).expect("usage");
    assert_eq!((before.directories, before.files), (LEVELS + 1, 1));
    tree::copy(&open(&from), &open(&to), Method::Bytes, Marks::Keep).expect("copy");
    let copied = tree::usage(&open(&to), &|| false).expect("usage");
    assert_eq!((copied.directories, copied.files), (LEVELS + 1, 1));
    let into = lab.dir("into");
    tree::flatten(&[open(&from), open(&to)], &open(&into), true, &|| false).expect("flatten");
    let merged = tree::usage(&open(&into.join("fs")), &|| false).expect("usage");
    assert_eq!((merged.directories, merged.files), (LEVELS + 1, 1));
    for name in ["from", "to", "into"] {
        tree::delete(&root, Path::new(name), &|| false).expect("delete");
    }
    assert!(root.entries().expect("entries").is_empty());
}

#[test]
fn a_merge_ends_when_it_is_told_to() {
    let lab = require_lab!(Fs::Tmpfs);
    let (from, into) = (lab.dir("from"), lab.dir("into"));
    for number in 0..100 {
        fs::write(from.join(format!("{number}")), b"").expect("write");
    }
    let asked = std::cell::Cell::new(0);
    let stop = || asked.replace(asked.get() + 1) == 50;
    let ended = tree::flatten(&[open(&from)], &open(&into), true, &stop);
    assert!(matches!(ended, Err(Error::Stopped)), "{ended:?}");
    let made = fs::read_dir(into.join("fs")).expect("readdir").count();
    assert_eq!(made, 50);
}

#[test]
fn a_tree_that_changes_while_it_is_copied_leads_nowhere() {
    const ROUNDS: usize = 300;
    let lab = require_lab!(Fs::Tmpfs);
    let (from, outside) = (lab.dir("from"), lab.dir("outside"));
    fs::write(outside.join("secret"), b"secret").expect("write");
    fs::create_dir_all(from.join("dir/below")).expect("mkdir");
    for number in 0..20 {
        fs::write(from.join(format!("dir/below/{number}")), b"mine").expect("write");
    }
    fs::write(from.join("file"), b"mine").expect("write");
    std::os::unix::fs::symlink(&outside, from.join("trap")).expect("symlink");
    std::os::unix::fs::symlink(outside.join("secret"), from.join("bait")).expect("symlink");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let root = open(&from);
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            while !done.load(Ordering::Relaxed) {
                for (one, other) in [("dir", "trap"), ("file", "bait"), ("dir", "file")] {
                    let _ = rustix::fs::renameat_with(&root, one, &root, other, exchange);
                }
            }
        });
        for round in 0..ROUNDS {
            let to = lab.dir("to");
            // It may fail, if the tree is not to be had at that moment; it must not go astray.
            let _ = tree::copy(&open(&from), &open(&to), Method::Bytes, Marks::Refuse);
            for (path, entry) in Snapshot::of(&to).entries {
                let astray = path.ends_with(b"secret") || (entry.kind == 'f' && entry.size == 6);
                assert!(!astray, "round {round}: {}", path.escape_ascii());
            }
            tree::delete(&open(&lab.path()), Path::new("to"), &|| false).expect("delete");
            tree::usage(&open(&from), &|| false).expect("usage");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(fs::read(outside.join("secret")).expect("read"), b"secret");
}

#[test]
fn flags_do_not_stop_a_delete_and_mounts_do() {
    for fs in [Fs::Ext4, Fs::Xfs, Fs::Btrfs] {
        let lab = require_lab!(fs);
        let doomed = lab.dir("doomed");
        trees::files(&lab.dir("doomed/many"), 500);
        for name in ["many/guarded", "many/guarded/append"] {
            fs::create_dir(doomed.join(name)).expect("mkdir");
            fs::write(doomed.join(name).join("file"), b"x").expect("write");
        }
        let flag = |name: &str, flags| {
            let file = fs::File::open(doomed.join(name)).expect("open");
            rustix::fs::ioctl_setflags(&file, flags).expect("chattr");
        };
        flag("many/guarded/append/file", IFlags::IMMUTABLE);
        flag("many/guarded/append", IFlags::APPEND);
        flag("many/guarded", IFlags::IMMUTABLE);

        // A mount in the tree, of the same filesystem: the device number would not tell.
        let (victim, place) = (lab.dir("victim"), lab.dir("doomed/many/mounted"));
        fs::write(victim.join("precious"), b"x").expect("write");
        rustix::mount::mount_bind(&victim, &place).expect("bind");
        let error =
            tree::delete(&open(&lab.path()), Path::new("doomed"), &|| false).expect_err("mount");
        assert!(
            error.to_string().contains("doomed/many/mounted: E"),
            "{error}"
        );
        assert!(victim.join("precious").exists());
        rustix::mount::unmount(&place, UnmountFlags::NOFOLLOW).expect("umount");

        tree::delete(&open(&lab.path()), Path::new("doomed"), &|| false).expect("delete");
        assert!(!doomed.exists());
        assert!(lab.close().is_empty());
    }
}

#[test]
fn a_directory_with_very_many_full_directories_goes_in_one_sweep() {
    let lab = require_lab!(Fs::Tmpfs);
    let doomed = lab.dir("doomed");
    for number in 0..10_000 {
        let dir = doomed.join(format!("{number}"));
        fs::create_dir(&dir).expect("mkdir");
        fs::write(dir.join("f"), b"").expect("write");
    }
    tree::delete(&open(&lab.path()), Path::new("doomed"), &|| false).expect("delete");
    assert!(!doomed.exists());
}

/// A path of up to three levels out of few names, so that layers meet.
fn path(random: &mut Random) -> PathBuf {
    let mut path = PathBuf::new();
    for _ in 0..=random.index(3) {
        path.push(["a", "b", "c", "d"][random.index(4)]);
    }
    path
}

/// Changes a mounted tree in some way; what is not possible just fails.
fn change(random: &mut Random, root: &Path) {
    let at = root.join(path(random));
    match random.index(11) {
        0..=2 => drop(fs::create_dir_all(&at)),
        3..=4 => drop(fs::write(&at, [random.next().to_le_bytes()[0]; 20])),
        5 => drop(fs::remove_file(&at)),
        6 => drop(fs::remove_dir_all(&at)),
        7 => drop(fs::rename(&at, root.join(path(random)))),
        8 => drop(fs::hard_link(&at, root.join(path(random)))),
        9 => {
            let mode = 0o700 + u32::try_from(random.index(0o100)).expect("small");
            drop(fs::set_permissions(&at, fs::Permissions::from_mode(mode)));
            let _ = rustix::fs::lsetxattr(&at, "user.x", b"v", XattrFlags::empty());
        }
        _ => {
            // A directory in the place of another: opaque, and its old content must not shine
            // through.
            if at != root && fs::remove_dir_all(&at).is_ok() {
                drop(fs::create_dir(&at));
            }
        }
    }
}

/// Mounts the layers (newest first) as overlay does, with a top or read-only, shows them to `look`,
/// unmounts.
fn overlaid<T>(
    lab: &Path,
    layers: &[PathBuf],
    top: Option<&Path>,
    look: impl FnOnce(&Path) -> T,
) -> T {
    // An empty lowest layer, since one lower alone cannot be mounted; it changes nothing.
    let mut lowers: Vec<&OsStr> = layers.iter().map(|path| path.as_os_str()).collect();
    let empty = lab.join("empty");
    lowers.push(empty.as_os_str());
    let mut options = b"lowerdir=".to_vec();
    options.extend(lowers.join(OsStr::new(":")).as_bytes());
    if let Some(top) = top {
        let work = lab.join("work");
        let _ = fs::remove_dir_all(&work);
        fs::create_dir(&work).expect("mkdir");
        options.extend(b",upperdir=");
        options.extend(top.as_os_str().as_bytes());
        options.extend(b",workdir=");
        options.extend(work.as_os_str().as_bytes());
    }
    options.extend(b",index=off,metacopy=off,redirect_dir=nofollow,xino=off");
    let options = std::ffi::CString::new(options).expect("no NUL");
    let target = lab.join("merged");
    rustix::mount::mount(
        "overlay",
        &target,
        "overlay",
        MountFlags::empty(),
        options.as_c_str(),
    )
    .expect("overlay");
    let result = look(&target);
    rustix::mount::unmount(&target, UnmountFlags::NOFOLLOW).expect("umount");
    result
}

/// The content of a stack. Overlay gives merged directories the times and attributes of the
/// topmost, so flatten must do that, too.
fn shown(lab: &Path, layers: &[PathBuf]) -> Snapshot {
    overlaid(lab, layers, None, Snapshot::of)
}

/// xfs frees the space of deleted files in the background; the others free it at once.
#[test]
fn the_space_of_deleted_files_is_counted_as_free_once_it_was_waited_for() {
    for fs in [Fs::Ext4, Fs::Xfs, Fs::Tmpfs] {
        let lab = require_lab!(fs);
        let dir = lab.dir("dir");
        for _ in 0..8 {
            let bytes = vec![1_u8; 32 << 20];
            fs::write(dir.join("file"), &bytes).expect("write");
            let dir = open(&dir);
            rustix::fs::syncfs(&dir).expect("syncfs");
            let before = dir.space().expect("statfs").bytes_free;
            dir.remove_file("file").expect("unlink");
            dir.wait_for_freed_space().expect("wait");
            let freed = dir.space().expect("statfs").bytes_free - before;
            assert!(freed > 31 << 20, "{}: {freed} bytes", fs.name());
        }
        assert!(lab.close().is_empty());
    }
}

#[test]
fn a_flattened_stack_shows_what_the_stack_showed() {
    const ROUNDS: u64 = 100;
    let lab = require_lab!(Fs::Xfs);
    for name in ["empty", "merged"] {
        lab.dir(name);
    }
    let mut skipped = 0;
    for seed in 1..=ROUNDS {
        let mut random = Random::new(seed);
        let base = lab.dir("round");
        let mut layers: Vec<PathBuf> = Vec::new();
        for number in 0..2 + random.index(5) {
            let layer = lab.dir(&format!("round/layer{number}"));
            overlaid(&lab.path(), &layers, Some(&layer), |root| {
                for _ in 0..5 + random.index(40) {
                    change(&mut random, root);
                }
            });
            mark_by_hand(&mut random, &layer);
            layers.insert(0, layer);
        }
        // The kernel itself lists a whiteout that is a file, and then says ENOENT, where its
        // directory is merged with nothing: such stacks have no truth to compare with.
        if !overlaid(&lab.path(), &layers, None, is_consistent) {
            skipped += 1;
            tree::delete(&open(&lab.path()), Path::new("round"), &|| false).expect("delete");
            continue;
        }
        let before = shown(&lab.path(), &layers);
        let first = random.index(layers.len());
        let last = first + 1 + random.index(layers.len() - first);
        let bottom = last == layers.len();
        let into = lab.dir("round/into");
        let merged: Vec<Dir> = layers[first..last].iter().map(|path| open(path)).collect();
        tree::flatten(&merged, &open(&into), bottom, &|| false)
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let mut flat = layers.clone();
        flat.splice(first..last, [into.join("fs")]);
        let differences = before.diff(&shown(&lab.path(), &flat));
        assert!(
            differences.is_empty(),
            "seed {seed}, layers {first}..{last} of {}: {differences:#?}",
            layers.len()
        );
        if bottom && first == 0 {
            // It is then a plain tree, which needs no overlay. Linked files still have the
            // attribute of their copy-up, which is invisible through an overlay.
            let mut plain = Snapshot::of(&into.join("fs"));
            for entry in plain.entries.values_mut() {
                entry.xattrs.remove(&b"trusted.overlay.origin"[..]);
                entry.xattrs.remove(&b"trusted.overlay.impure"[..]);
            }
            let differences = before.diff(&plain);
            assert!(differences.is_empty(), "seed {seed}: {differences:#?}");
        }
        tree::delete(&open(&lab.path()), Path::new("round"), &|| false).expect("delete");
        assert!(!base.exists());
    }
    assert!(skipped < ROUNDS / 10, "{skipped} rounds had no truth");
    assert!(lab.close().is_empty());
}

/// Whether everything that is listed is there.
fn is_consistent(dir: &Path) -> bool {
    fs::read_dir(dir).expect("readdir").all(|name| {
        let path = name.expect("readdir").path();
        fs::symlink_metadata(&path).is_ok_and(|data| !data.is_dir() || is_consistent(&path))
    })
}

/// Now and then puts a mark into a layer that overlay itself does not write there, or not always.
fn mark_by_hand(random: &mut Random, layer: &Path) {
    // As overlay does on each directory that it copies up. A directory that is merged with nothing
    // and does not say so is listed whiteouts and all (ovl_get_inode: "non-merge dir that may have
    // whiteouts").
    let copied_up = |dir: &Path| {
        rustix::fs::lsetxattr(dir, "trusted.overlay.origin", b"", XattrFlags::empty())
            .expect("setxattr");
    };
    let path = layer.join(path(random));
    match random.index(4) {
        0 => {
            let device = FileType::CharacterDevice;
            if rustix::fs::mknodat(CWD, &path, device, Mode::empty(), 0).is_ok() {
                copied_up(path.parent().expect("it is below the layer"));
            }
        }
        1 if path.is_dir() => {
            rustix::fs::lsetxattr(&path, "trusted.overlay.opaque", b"y", XattrFlags::empty())
                .expect("setxattr");
        }
        2 if path.is_dir() => {
            let set = |path: &Path, name: &str, value: &[u8]| {
                rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).expect("setxattr");
            };
            // The kernel looks for such whiteouts only in layers whose root says so as well.
            set(layer, "trusted.overlay.opaque", b"x");
            set(&path, "trusted.overlay.opaque", b"x");
            let file = path.join(["a", "b", "c", "d"][random.index(4)]);
            if fs::File::create_new(&file).is_ok() {
                set(&file, "trusted.overlay.whiteout", b"");
                copied_up(&path);
            }
        }
        _ => {}
    }
}

#[test]
fn files_that_cannot_be_linked_are_copied() {
    let lab = require_lab!(Fs::Ext4);
    let (layer, into) = (lab.dir("layer"), lab.dir("into"));
    fs::write(layer.join("fixed"), b"immutable").expect("write");
    fs::create_dir(layer.join("dir")).expect("mkdir");
    for name in ["dir/second", "third"] {
        fs::hard_link(layer.join("fixed"), layer.join(name)).expect("link");
    }
    let file = fs::File::open(layer.join("fixed")).expect("open");
    rustix::fs::ioctl_setflags(&file, IFlags::IMMUTABLE).expect("chattr");
    fs::write(layer.join("plain"), b"plain").expect("write");
    let before = Snapshot::of(&layer);
    tree::flatten(&[open(&layer)], &open(&into), true, &|| false).expect("flatten");
    assert_same(&before, &Snapshot::of(&into.join("fs")));
    let nlink = |name: &str| {
        fs::metadata(into.join("fs").join(name))
            .expect("stat")
            .nlink()
    };
    assert_eq!((nlink("fixed"), nlink("plain")), (3, 2));
    let names = open(&into).entries().expect("entries");
    assert_eq!(names.len(), 1, "nothing is left over: {names:?}");
    rustix::fs::ioctl_setflags(&file, IFlags::empty()).expect("chattr");
    drop(file);
    assert!(lab.close().is_empty());
}

/// Access times are content, and the default `relatime` moves those that are as old as the last
/// change.
#[test]
fn reading_a_tree_leaves_its_access_times_alone() {
    for fs in [Fs::Ext4, Fs::XfsReflink, Fs::Btrfs] {
        let lab = require_lab!(fs);
        let from = lab.dir("from");
        trees::odd(&from);
        let mut paths: Vec<PathBuf> = Snapshot::of(&from)
            .entries
            .keys()
            .map(|path| from.join(OsStr::from_bytes(path)))
            .collect();
        // Directories after what is in them.
        paths.reverse();
        for path in &paths {
            trees::times(path, 1_234_567_890, 123_456_789);
        }
        let untouched = |when: &str| {
            for path in &paths {
                let data = fs::symlink_metadata(path).expect("stat");
                let atime = (data.atime(), data.atime_nsec());
                assert_eq!(
                    atime,
                    (1_234_567_890, 123_456_789),
                    "{when}: {}",
                    path.display()
                );
            }
        };
        untouched("at the beginning");
        let dir = open(&from);
        dir.entries().expect("entries");
        untouched("reading names");
        tree::usage(&dir, &|| false).expect("usage");
        untouched("measuring");
        tree::copy(&dir, &open(&lab.dir("to")), Method::Reflink, Marks::Keep).expect("copy");
        untouched("copying");
        tree::flatten(&[open(&from)], &open(&lab.dir("into")), true, &|| false).expect("flatten");
        untouched("merging");
        drop(dir);
        assert!(lab.close().is_empty());
    }
}

#[test]
fn who_makes_files_as_fast_as_they_are_deleted_does_not_hold_a_delete_up() {
    const PATIENCE: Duration = Duration::from_secs(2);
    for fs in [Fs::Ext4, Fs::XfsReflink, Fs::Btrfs, Fs::Tmpfs] {
        let lab = require_lab!(fs);
        let held = open(&lab.dir("doomed"));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (held, done) = (&held, &done);
                scope.spawn(move || {
                    for number in 0_u64.. {
                        if done.load(Ordering::Relaxed) {
                            break;
                        }
                        let _ = held.write_new(format!("{thread}-{number}"), b"");
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(100));
            let began = Instant::now();
            let stop = || began.elapsed() > PATIENCE;
            let result = tree::delete(&open(&lab.path()), Path::new("doomed"), &stop);
            let took = began.elapsed();
            done.store(true, Ordering::Relaxed);
            assert!(took < 2 * PATIENCE, "{}: {took:?}", fs.name());
            let expected = match &result {
                // The makers were not given the processor for a moment.
                Ok(()) | Err(Error::Stopped) => true,
                Err(Error::System(error)) => error.is(Errno::ENOTEMPTY),
                Err(_) => false,
            };
            assert!(expected, "{}: {result:?}", fs.name());
        });
        drop(held);
        tree::delete(&open(&lab.path()), Path::new("doomed"), &|| false).expect("delete");
        assert!(lab.close().is_empty());
    }
}

#[test]
fn what_does_not_fit_leaves_no_torn_file() {
    let lab = Lab::try_sized(Fs::Tmpfs, 1 << 20);
    let Ok(lab) = lab else {
        common::skip("needs root");
        return;
    };
    let dir = open(&lab.path());
    dir.write_new("old", b"old").expect("write");
    let much = vec![1; 2 << 20];
    for error in [dir.write_new("new", &much), dir.replace("old", &much)] {
        assert!(error.expect_err("no space").is_full());
    }
    assert_eq!(dir.entries().expect("entries").len(), 1);
    assert_eq!(dir.read("old", 3).expect("read"), b"old");
    assert!(
        dir.reserve("reserve", 2 << 20)
            .expect_err("no space")
            .is_full()
    );
    assert_eq!(dir.entries().expect("entries").len(), 1);
}

/// More names than are held at a time, with links between the pieces and deletions in the middle of
/// them. As large as the filesystem has bytes free, and as it would have if nothing else were
/// there.
#[test]
fn bytes_are_copied_if_there_is_space_for_all_of_them() {
    const MIB: u64 = 1 << 20;
    let lab = match Lab::try_sized(Fs::Ext4, 48 * MIB) {
        Ok(lab) => lab,
        Err(reason) => return common::skip(&reason),
    };
    let (from, to) = (open(&lab.dir("from")), open(&lab.dir("to")));
    let path = |name: &str| lab.path().join("from").join(name);
    let copied = || tree::copy(&from, &to, Method::Reflink, Marks::Refuse);
    // Allocated and never written to: no copy has it.
    let set_aside = fs::File::create(path("set-aside")).expect("create");
    rustix::fs::fallocate(&set_aside, FallocateFlags::empty(), 0, 20 * MIB).expect("space");
    fs::write(path("a"), vec![1; 4 << 20]).expect("write");
    fs::hard_link(path("a"), path("b")).expect("link");
    let free = || to.space().expect("statfs").bytes_free;
    assert!(free() < 20 * MIB, "all of it would fit");
    copied().expect("what was written fits");
    for name in ["set-aside", "a", "b"] {
        let name = Path::new(name);
        to.remove_file(name).expect("removed");
    }

    fs::write(path("c"), vec![1; 10 << 20]).expect("write");
    let before = free();
    match copied() {
        Err(Error::NoRoom { needs, free, total }) => {
            assert_eq!((needs, free), (14 * MIB, before));
            assert!((32 * MIB..48 * MIB).contains(&total), "{total}");
        }
        copied => panic!("{copied:?}"),
    }
    assert!(free() + MIB > before, "it took room");
    drop((set_aside, from, to));
    assert!(lab.close().is_empty());
}

#[test]
fn what_is_read_in_pieces_is_whole() {
    const NAMES: u64 = 10_000;
    let lab = require_lab!(Fs::Ext4);
    let (lower, upper) = (lab.dir("lower"), lab.dir("upper"));
    for number in 0..NAMES {
        let path = lower.join(format!("{number}"));
        if number % 2 == 0 {
            fs::write(&path, number.to_le_bytes()).expect("write");
        } else {
            fs::hard_link(lower.join(format!("{}", number - 1)), &path).expect("link");
        }
        let above = upper.join(format!("{number}"));
        match number % 5 {
            0 => {
                let device = FileType::CharacterDevice;
                rustix::fs::mknodat(CWD, &above, device, Mode::empty(), 0).expect("mknod");
            }
            1 => fs::create_dir(&above).expect("mkdir"),
            _ => {}
        }
    }
    let before = Snapshot::of(&lower);
    let never = || false;
    let usage = tree::usage(&open(&lower), &never).expect("usage");
    assert_eq!((usage.files, usage.directories), (NAMES, 1));
    assert!(usage.bytes < (NAMES / 2) * 4096 + (1 << 20), "{usage:?}");
    let to = lab.dir("to");
    tree::copy(&open(&lower), &open(&to), Method::Bytes, Marks::Refuse).expect("copy");
    assert_same(&before, &Snapshot::of(&to));
    let into = lab.dir("into");
    tree::flatten(&[open(&upper), open(&lower)], &open(&into), true, &|| false).expect("flatten");
    let merged = Snapshot::of(&into.join("fs"));
    assert_eq!(merged.len() as u64, NAMES / 5 * 4);
    for number in 0..NAMES {
        let kind = merged.get(number.to_string()).map(|entry| entry.kind);
        let expected = [None, Some('d'), Some('f'), Some('f'), Some('f')];
        let index = usize::try_from(number % 5).expect("small");
        assert_eq!(kind, expected[index], "{number}");
    }
    let (dir, name) = (open(&lab.path()), Path::new("into"));
    tree::delete(&dir, name, &never).expect("delete");
    assert!(lab.close().is_empty());
}
