//! Subvolumes that a pod makes in its volume on btrfs, and makes read-only: it needs no privilege.

use std::fs;
use std::path::Path;

use baggageclaim::backend::{BackendKind, Error};
use baggageclaim::model::layout;
use baggageclaim::sys::Dir;

use super::{Bench, MARKER};

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
