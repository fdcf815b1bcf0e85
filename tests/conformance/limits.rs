//! Size limits, where the backend and the filesystem can enforce them: they hold, they stop nothing that a fork without a
//! limit can do, and nothing is remembered of them when the volume is gone.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use baggageclaim::backend::{BackendKind, Limit};
use baggageclaim::model::{LayerId, RootAttributes};
use baggageclaim::sys::{self, Dir, QuotaGroup};

use super::common::{Snapshot, assert_same, tree as trees};
use super::{Bench, Volume};

pub(super) fn a_size_limit_holds_or_says_why_not(bench: &Bench) {
    const LIMIT: u64 = 16 << 20;
    let layers = bench.artifact(|root| {
        fs::write(root.join("base"), vec![7; 20 << 20]).expect("write");
    });
    let volume = bench.create(&layers, RootAttributes::default(), Some(LIMIT));
    let overflow = |path: PathBuf| {
        let mut file = fs::File::create(path).expect("create");
        let piece: Vec<u8> = (0..1 << 20_u32).map(|i: u32| i.to_le_bytes()[1]).collect();
        (0..48)
            .try_for_each(|_| file.write_all(&piece))
            .and_then(|()| file.sync_all())
    };
    match &volume.limit {
        Limit::Enforced => bench.within(&volume, |root| {
            let error = overflow(root.join("much")).expect_err("the limit holds");
            assert!(
                matches!(
                    error.kind(),
                    std::io::ErrorKind::QuotaExceeded | std::io::ErrorKind::StorageFull
                ),
                "{error}"
            );
            if bench.backend.kind() == BackendKind::Btrfs {
                fs::remove_file(root.join("much")).expect("room again");
                rustix::fs::syncfs(fs::File::open(root).expect("open")).expect("syncfs");
                let dir = Dir::open(root).expect("open");
                dir.create_subvolume("nested").expect("a pod can do this");
                overflow(root.join("nested/much")).expect_err("nor does nesting help");
            }
        }),
        Limit::Unenforced(why) => {
            assert!(!why.is_empty());
            assert!(!bench.must_limit, "{why}");
        }
        Limit::None => panic!("it was asked for"),
    }
    let project = project_of(&volume);
    let quota_group = (bench.backend.kind() == BackendKind::Btrfs).then(|| {
        let fs = volume.dir.open_beneath("fs").expect("open");
        QuotaGroup::around_subvolume(fs.subvolume_id().expect("an id"))
    });
    bench.discard(volume);
    if let Some(group) = quota_group {
        let usage = bench.pool.quota_group_usage(group).expect("asked");
        assert_eq!(usage, None, "the quota group stayed");
    }
    if bench.must_limit {
        assert_ne!(project, 0);
        assert_forgotten(bench, project);
    }
}

/// The project that counts what a volume holds of its own; 0: none.
fn project_of(volume: &Volume) -> u32 {
    let top = volume.dir.open_if_there("top").expect("open");
    top.map_or(0, |top| top.project().unwrap_or(0))
}

/// That a filesystem's quota file has no record of a project any more: nothing held, and no limit.
fn assert_forgotten(bench: &Bench, project: u32) {
    let known = || bench.pool.project_usage(project);
    let empty = || match known() {
        Ok(usage) => (usage.bytes, usage.inodes, usage.limit) == (0, 0, 0),
        Err(error) => error.is(sys::Errno::ENOENT),
    };
    // xfs counts what was deleted until it gets round to it.
    let forgotten = (0..400).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        empty()
    });
    assert!(forgotten, "project {project}: {:?}", known());
}

/// A fork with a limit is changed in every way, and what it becomes lives on without: in forks that have a limit of their
/// own, merged, and deleted. Whatever moves between projects is EXDEV, which nobody here may meet.
pub(super) fn a_limited_fork_can_do_what_others_can(bench: &Bench) {
    const MIB: usize = 1 << 20;
    if !bench.must_limit {
        return;
    }
    let limited = |layers: &[LayerId]| {
        let volume = bench.create(layers, RootAttributes::default(), Some(8 << 20));
        assert_eq!(volume.limit, Limit::Enforced);
        volume
    };
    let base = limited(&[]);
    let before = bench.within(&base, |root| {
        trees::odd(root);
        trees::files(root, 30);
        fs::create_dir_all(root.join("goes/below")).expect("mkdir");
        fs::write(root.join("goes/below/f"), vec![1; MIB]).expect("write");
        fs::write(root.join("f"), vec![1; MIB]).expect("write");
        Snapshot::of(root)
    });
    let base_project = project_of(&base);
    let layers = bench.seal(&base);
    assert_same(&before, &bench.shown(&layers));
    let fork = limited(&layers);
    let projects = [base_project, project_of(&fork)];
    assert_ne!(projects[0], projects[1]);
    let after = bench.within(&fork, |root| {
        // Copied up, deleted, made anew over a deletion, renamed, linked.
        fs::set_permissions(root.join("d0000"), fs::Permissions::from_mode(0o700)).expect("chmod");
        fs::write(root.join("f"), b"changed").expect("write");
        fs::remove_dir_all(root.join("goes")).expect("rm");
        fs::create_dir(root.join("goes")).expect("mkdir");
        fs::create_dir(root.join("new")).expect("mkdir");
        fs::rename(root.join("f"), root.join("new/f")).expect("rename");
        fs::hard_link(root.join("zero"), root.join("new/zero")).expect("link");
        fs::rename(root.join("new"), root.join("newer")).expect("rename");
        Snapshot::of(root)
    });
    // What lies below is not its own: there is room for nearly all of the limit, and for no more.
    let used = fork.dir.project_usage(projects[1]).expect("counted");
    assert!(used.bytes < 2 << 20, "{used:?}");
    assert_eq!(used.limit, 8 << 20);
    bench.within(&fork, |root| {
        let fill = |size| {
            fs::File::create(root.join("fill")).and_then(|mut file| {
                file.write_all(&vec![1; size])
                    .and_then(|()| file.sync_all())
            })
        };
        fill(5 * MIB).expect("below the limit");
        fill(9 * MIB).expect_err("above the limit");
        fs::remove_file(root.join("fill")).expect("rm");
        fill(5 * MIB).expect("there is room again");
        fs::remove_file(root.join("fill")).expect("rm");
    });
    // A limit can be changed while the volume lives, and taken away.
    let change = |bytes| bench.backend.set_limit(&fork.dir, bytes).expect("changed");
    assert_eq!(change(Some(1 << 20)), Limit::Enforced);
    bench.within(&fork, |root| {
        let written = fs::write(root.join("fill"), vec![1; 4 * MIB]);
        let written = written.and_then(|()| fs::File::open(root.join("fill"))?.sync_all());
        written.expect_err("the new limit");
        fs::remove_file(root.join("fill")).expect("rm");
    });
    assert_eq!(change(None), Limit::None);
    bench.within(&fork, |root| {
        fs::write(root.join("fill"), vec![1; 12 * MIB]).expect("no limit");
        fs::remove_file(root.join("fill")).expect("rm");
        trees::times(&root.join("goes"), 1_100_000_000, 42);
    });
    let layers = bench.seal(&fork);
    let shown = bench.shown(&layers);
    assert_eq!(after.len(), shown.len());
    let (id, dir) = bench.layer();
    bench
        .backend
        .flatten(&layers, &dir, true, &|| false)
        .expect("flattened");
    assert_same(&shown, &bench.shown(&[id]));
    for volume in [base, fork] {
        bench.discard(volume);
    }
    bench.empty();
    for project in projects {
        assert_forgotten(bench, project);
    }
}
