//! Subvolumes that a pod makes in its volume on btrfs, and makes read-only: it needs no privilege.

use std::fs;
use std::path::Path;

use baggageclaim::backend::{BackendKind, Error, Limit};
use baggageclaim::model::{RootAttributes, layout};
use baggageclaim::sys::{Dir, Errno, Space};
use rustix::fs::IFlags;

use super::{Bench, MARKER, Volume};

pub(super) fn nested_subvolumes_are_refused_by_name_and_deleted(bench: &Bench) {
    if bench.backend.kind() != BackendKind::Btrfs {
        return;
    }
    let volume = bench.fork(&[]);
    let mut writer = None;
    bench.within(&volume, |root| {
        fs::create_dir_all(root.join("some/where")).expect("mkdir");
        let dir = Dir::open(&root.join("some/where")).expect("open");
        dir.create_subvolume("nested").expect("create");
        dir.open_beneath("nested")
            .expect("open")
            .create_subvolume("inner")
            .expect("create");
        let file = root.join("some/where/nested/inner/f");
        writer = Some(fs::File::create(file).expect("create"));
    });
    // It is refused at once: the engine waits for no process and checks none of its files, whose
    // number is unlimited.
    let asked = std::cell::Cell::new(false);
    let ask = || asked.replace(true);
    let writers = bench.backend.writers(&volume.dir, &ask).map(drop);
    assert!(!asked.get());
    drop(writer);
    for refused in [writers, bench.try_seal(&volume).map(drop)] {
        match refused {
            Err(Error::Refused { path, .. }) => assert_eq!(path, "some/where/nested"),
            other => panic!("{other:?}"),
        }
    }
    bench.discard(volume);
}

/// It needs no privilege, only that the subvolume is the caller's.
fn set_read_only(subvolume: &Path) {
    let dir = Dir::open(subvolume).expect("open");
    dir.set_subvolume_read_only(true).expect("read-only");
    fs::write(subvolume.join("new"), b"x").expect_err("it is read-only");
}

pub(super) fn what_a_pod_made_read_only_is_sealed_and_deleted(bench: &Bench) {
    if bench.backend.kind() != BackendKind::Btrfs {
        return;
    }
    let volume = bench.fork(&[]);
    bench.within(&volume, |root| {
        fs::write(root.join(MARKER), b"").expect("write");
        fs::write(root.join("f"), b"x").expect("write");
        set_read_only(root);
    });
    let sealed = bench.seal(&volume);
    let seen = bench.shown(&sealed);
    assert!(seen.get("f").is_some() && seen.get(MARKER).is_none());
    bench.discard(volume);

    // The inner ones lie deeper than a path can say.
    let volume = bench.fork(&[]);
    bench.within(&volume, |root| {
        let mut dir = Dir::open(root).expect("open");
        for name in ["outer", "middle", "inner"] {
            for _ in 0..20 {
                let long = "d".repeat(250);
                dir.create_dir(&long, 0o700).expect("mkdir");
                dir = dir.open_beneath(&long).expect("open");
            }
            dir.create_subvolume(name).expect("create");
            let nested = dir.open_beneath(name).expect("open");
            if name != "inner" {
                dir = nested;
            }
        }
        let id = Dir::open(root).and_then(|root| root.subvolume_id());
        let mut ids = vec![id.expect("id")];
        let pool = &bench.pool;
        while let Some(nested) = pool.nested_subvolume(ids[ids.len() - 1], 0).expect("found") {
            ids.push(nested.id);
        }
        assert_eq!(ids.len(), 4);
        for id in ids {
            let subvolume = pool.open_subvolume(id).expect("open");
            assert_eq!(subvolume.subvolume_id().expect("id"), id);
            subvolume.set_subvolume_read_only(true).expect("read-only");
        }
    });
    bench.discard(volume);
}

/// There may be any number of them, and each attempt has a short time.
pub(super) fn each_attempt_to_delete_destroys_a_nested_subvolume(bench: &Bench) {
    if bench.backend.kind() != BackendKind::Btrfs {
        return;
    }
    let volume = bench.fork(&[]);
    bench.within(&volume, |root| {
        let dir = Dir::open(root).expect("open");
        for name in ["a", "b", "c"] {
            dir.create_subvolume(name).expect("create");
        }
    });
    let fs = volume.dir.open_beneath(layout::FS).expect("open");
    let id = fs.subvolume_id().expect("id");
    let volumes = bench.pool.open_beneath("volumes").expect("volumes");
    for left in [2, 1, 0] {
        let stopped = bench.backend.delete(&volumes, volume.id.as_ref(), &|| true);
        assert!(matches!(stopped, Err(Error::Stopped)), "{stopped:?}");
        let mut from = 0;
        for _ in 0..left {
            let nested = fs.nested_subvolume(id, from).expect("asked");
            from = nested.expect("one more").id + 1;
        }
        assert_eq!(fs.nested_subvolume(id, from).expect("asked"), None);
    }
    drop(fs);
    bench.discard(volume);
}

fn set_immutable(path: &Path) {
    let file = fs::File::open(path).expect("open");
    rustix::fs::ioctl_setflags(&file, IFlags::IMMUTABLE).expect("chattr");
}

/// A pod with CAP_LINUX_IMMUTABLE can do `chattr +i` to any directory.
pub(super) fn what_is_immutable_around_a_nested_subvolume_does_not_keep_it(bench: &Bench) {
    if bench.backend.kind() != BackendKind::Btrfs {
        return;
    }
    for is_read_only in [false, true] {
        let volume = bench.fork(&[]);
        bench.within(&volume, |root| {
            fs::create_dir(root.join("around")).expect("mkdir");
            for (directory, name) in [("around", "nested"), ("around/nested", "inner")] {
                let dir = Dir::open(&root.join(directory)).expect("open");
                dir.create_subvolume(name).expect("create");
            }
            for path in ["around/nested/inner", "around/nested", "around"] {
                set_immutable(&root.join(path));
            }
            if is_read_only {
                for path in ["around/nested/inner", "around/nested", "."] {
                    let dir = Dir::open(&root.join(path)).expect("open");
                    dir.set_subvolume_read_only(true).expect("read-only");
                }
            }
        });
        bench.discard(volume);
    }
}

/// On btrfs, volumes of the other backends may be directories that pods see: also there they make
/// subvolumes, and make them read-only.
pub(super) fn subvolumes_on_btrfs_are_deleted_by_every_backend(bench: &Bench) {
    if bench.pool.space().expect("statfs").magic != Space::BTRFS {
        return;
    }
    for is_immutable in [false, true] {
        let volume = bench.fork(&[]);
        let dir = bench.path.join("volumes").join(&volume.id);
        let mut roots = ["top", layout::FS].map(|name| dir.join(name)).into_iter();
        let root = roots.find(|root| root.is_dir()).expect("the content");
        let paths = ["nested/inner/empty", "nested/inner", "nested"].map(|path| root.join(path));
        for path in paths.iter().rev() {
            let parent = Dir::open(path.parent().expect("below")).expect("open");
            let name = path.file_name().expect("a name");
            parent.create_subvolume(name).expect("create");
            fs::create_dir_all(path.join("directory/below")).expect("mkdir");
            fs::write(path.join("directory/file"), b"x").expect("write");
        }
        fs::remove_dir_all(paths[0].join("directory")).expect("rm");
        for path in &paths {
            if is_immutable {
                set_immutable(path);
            }
            let dir = Dir::open(path).expect("open");
            dir.set_subvolume_read_only(true).expect("read-only");
        }
        bench.discard(volume);
    }
}

/// A volume with a limit, if simple quotas enforce it here, and the path of its content.
fn limited(bench: &Bench, bytes: u64) -> Option<(Volume, std::path::PathBuf)> {
    if bench.backend.kind() != BackendKind::Btrfs {
        return None;
    }
    let volume = bench.create(&[], RootAttributes::default(), Some(bytes));
    if volume.limit != Limit::Enforced {
        bench.discard(volume);
        return None;
    }
    let content = bench.path.join("volumes").join(&volume.id).join(layout::FS);
    Some((volume, content))
}

/// At its limit, a subvolume refuses every change, also of its flags.
pub(super) fn a_volume_at_its_limit_is_sealed_and_deleted_with_its_flags(bench: &Bench) {
    for is_sealed in [true, false] {
        let Some((volume, content)) = limited(bench, 8 << 20) else {
            return;
        };
        fs::write(content.join(MARKER), b"").expect("write");
        fs::write(content.join("f"), b"x").expect("write");
        set_immutable(&content.join(MARKER));
        set_immutable(&content);
        let root = volume.dir.open_beneath(layout::FS).expect("open");
        root.set_subvolume_read_only(true).expect("read-only");
        // As if the pod had written that much.
        let limit = bench.backend.set_limit(&volume.dir, Some(4096));
        assert_eq!(limit.expect("lowered"), Limit::Enforced);
        let refused = root.set_subvolume_read_only(false);
        let refused = refused.expect_err("nothing can be changed");
        assert!(refused.is(Errno::EDQUOT), "{refused}");
        drop(root);
        if is_sealed {
            let seen = bench.shown(&bench.seal(&volume));
            assert!(seen.get("f").is_some() && seen.get(MARKER).is_none());
        }
        bench.discard(volume);
    }
}

/// A limit may come later than a nested subvolume: a persistent volume gets one, or the driver gets
/// the flag `--btrfs-quota`.
pub(super) fn a_limit_counts_subvolumes_that_were_nested_before_it(bench: &Bench) {
    const LIMIT: u64 = 16 << 20;
    let Some((volume, _)) = limited(bench, LIMIT) else {
        return;
    };
    // Quotas are on from here.
    bench.discard(volume);
    let volume = bench.fork(&[]);
    let set = || {
        let limit = bench.backend.set_limit(&volume.dir, Some(LIMIT));
        assert_eq!(limit.expect("limited"), Limit::Enforced);
    };
    let used = || {
        bench.pool.sync_filesystem().expect("syncfs");
        let usage = bench.backend.usage(&volume.dir, &|| false);
        usage.expect("counted").bytes
    };
    let content = bench.path.join("volumes").join(&volume.id).join(layout::FS);
    let mut deepest = content.clone();
    for name in ["nested", "inner"] {
        let dir = Dir::open(&deepest).expect("open");
        dir.create_subvolume(name).expect("create");
        deepest.push(name);
        fs::write(deepest.join("before"), vec![7; 3 << 20]).expect("write");
    }
    bench.pool.sync_filesystem().expect("syncfs");
    set();
    let before = used();
    assert!((6 << 20..9 << 20).contains(&before), "{before}");
    let much = fs::write(deepest.join("much"), vec![7; 24 << 20]);
    let much = much.expect_err("the limit counts it");
    assert_eq!(much.raw_os_error(), Some(Errno::EDQUOT as i32), "{much}");
    fs::remove_file(deepest.join("much")).expect("rm");
    // Once more, and with one that joined by itself.
    let dir = Dir::open(&content).expect("open");
    dir.create_subvolume("later").expect("create");
    fs::write(content.join("later/f"), vec![7; 3 << 20]).expect("write");
    set();
    let after = used();
    assert!((9 << 20..13 << 20).contains(&after), "{after}");
    drop(dir);
    bench.discard(volume);
}
