//! Size limits, if backend and filesystem enforce them: they hold, they block nothing that a fork
//! without a limit can do, and nothing of them stays after the volume.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::PathBuf;

use baggageclaim::backend::{Backend, BackendKind, Limit, MountApi, Overlay};
use baggageclaim::model::{LayerId, RootAttributes, layout};
use baggageclaim::sys::{self, Dir, QuotaGroup, Xattrs as _};

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
                fs::remove_file(root.join("much")).expect("space again");
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

/// Quotas charge a layer's bytes to the volume that wrote them, which is gone. Eviction must know
/// them all the same.
pub(super) fn a_layer_takes_what_its_volume_has_written(bench: &Bench) {
    const CONTENT: u64 = 3 << 20;
    let volume = bench.create(&[], RootAttributes::default(), Some(16 << 20));
    bench.within(&volume, |root| {
        fs::write(root.join("f"), vec![7; 3 << 20]).expect("write");
    });
    let layer = bench.seal(&volume)[0];
    bench.discard(volume);
    let layer = bench.path.join("layers").join(layer.to_string());
    fs::write(layer.join(layout::LAYER_JSON), "{}").expect("write");
    bench.pool.sync_filesystem().expect("syncfs");
    let layer = Dir::open(&layer).expect("open");
    let usage = bench.backend.usage(&layer, &|| false).expect("counted");
    assert!((CONTENT..CONTENT * 2).contains(&usage.bytes), "{usage:?}");
}

/// The driver makes the root as it was asked to, and only then limits the volume.
pub(super) fn a_small_limit_does_not_refuse_the_root(bench: &Bench) {
    let layers = bench.artifact(|root| fs::write(root.join("f"), b"x").expect("write"));
    // A fork shows another owner only where the kernel can swap owners.
    for (layers, uid) in [(&[][..], 1000), (&layers[..], 0)] {
        let wanted = RootAttributes {
            uid: (uid > 0).then_some(uid),
            mode: Some(0o750),
            mount_group: Some(2000),
            ..RootAttributes::default()
        };
        let volume = bench.create(layers, wanted, Some(1));
        bench.mounted(&volume, false, |root| {
            let root = fs::metadata(root).expect("stat");
            let seen = (root.uid(), root.gid(), root.mode() & 0o777);
            assert_eq!(seen, (uid, 2000, 0o770));
        });
        bench.discard(volume);
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

/// A fork with a limit is changed in every way. Its content lives on without the limit: in forks
/// that have their own limit, merged, and deleted. A move between projects is EXDEV, which must not
/// happen here.
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
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
    let mut fork = limited(&layers);
    let projects = [base_project, project_of(&fork)];
    assert_ne!(projects[0], projects[1]);
    let after = bench.within(&fork, |root| {
        // Copied up, deleted, recreated over a deletion, renamed, linked.
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
    // Shared content does not count: nearly the whole limit can be written, and no more.
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
    let change = |fork: &mut Volume, bytes| {
        fork.size_limit = bytes;
        bench.backend.set_limit(&fork.dir, bytes).expect("changed")
    };
    assert_eq!(change(&mut fork, Some(1 << 20)), Limit::Enforced);
    bench.within(&fork, |root| {
        let written = fs::write(root.join("fill"), vec![1; 4 * MIB]);
        let written = written.and_then(|()| fs::File::open(root.join("fill"))?.sync_all());
        written.expect_err("the new limit");
        fs::remove_file(root.join("fill")).expect("rm");
    });
    assert_eq!(change(&mut fork, None), Limit::None);
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

/// A project that is the administrator's, with a limit of his.
const FOREIGN: (u32, u64) = (4711, 3 << 20);

/// The owner of a file may put it into any project, even through overlay. The limit applies to the
/// project that the driver chose, whatever the files have by then.
pub(super) fn a_tenant_changes_only_its_own_limit(bench: &Bench) {
    const MIB: u64 = 1 << 20;
    if !bench.must_limit {
        return;
    }
    let limited = |bytes| bench.create(&[], RootAttributes::default(), Some(bytes));
    let limit_of = |project| {
        bench
            .pool
            .project_usage(project)
            .map_or(0, |usage| usage.limit)
    };
    bench
        .pool
        .set_project_limit(FOREIGN.0, FOREIGN.1)
        .expect("the administrator may");
    let neighbour = limited(8 * MIB);
    let neighbours = project_of(&neighbour);
    let others_are_as_they_were = |when: &str| {
        assert_eq!(limit_of(neighbours), 8 * MIB, "the neighbour's, {when}");
        assert_eq!(limit_of(FOREIGN.0), FOREIGN.1, "the foreign one, {when}");
    };
    for target in [0, neighbours, FOREIGN.0] {
        for is_sealed in [false, true] {
            let mut hostile = limited(6 * MIB);
            let own = project_of(&hostile);
            assert_eq!(limit_of(own), 6 * MIB);
            bench.within(&hostile, |root| {
                let dir = Dir::open(root).expect("open");
                dir.create_dir("d", 0o755).expect("mkdir");
                for dir in [dir.open_beneath("d").expect("open"), dir] {
                    dir.set_project(target).expect("its owner may");
                }
                fs::write(root.join("d/f"), vec![1; 1 << 20]).expect("write");
            });
            assert_eq!(project_of(&hostile), target);

            let expanded = bench.backend.set_limit(&hostile.dir, Some(7 * MIB));
            assert_eq!(expanded.expect("expanded"), Limit::Enforced);
            hostile.size_limit = Some(7 * MIB);
            assert_eq!(limit_of(own), 7 * MIB, "project {target}");
            others_are_as_they_were("expanded");

            // The next mount gives its root back to the project that counts it, or nothing could be
            // copied up.
            bench.within(&hostile, |root| {
                fs::write(root.join("again"), b"x").expect("write");
            });
            assert_eq!(project_of(&hostile), own);
            bench.within(&hostile, |root| {
                let dir = Dir::open(root).expect("open");
                dir.set_project(target).expect("its owner may");
            });

            let lifted = bench.backend.set_limit(&hostile.dir, None);
            assert_eq!(lifted.expect("lifted"), Limit::None);
            assert_eq!(limit_of(own), 0);
            others_are_as_they_were("lifted");
            let set = bench.backend.set_limit(&hostile.dir, Some(7 * MIB));
            assert_eq!(set.expect("set"), Limit::Enforced);

            let layers = if is_sealed {
                bench.seal(&hostile)
            } else {
                Vec::new()
            };
            bench.discard(hostile);
            others_are_as_they_were("deleted");
            let layers_dir = bench.pool.open_beneath("layers").expect("open");
            for layer in layers {
                let name = layer.to_string();
                let deleted = bench.backend.delete(&layers_dir, name.as_ref(), &|| false);
                deleted.expect("deleted");
            }
            others_are_as_they_were("its layer deleted");
            assert_forgotten(bench, own);
        }
    }
    bench.discard(neighbour);
    assert_forgotten(bench, neighbours);
    bench
        .pool
        .set_project_limit(FOREIGN.0, 0)
        .expect("the administrator may");
}

/// An older version kept a volume's project only in its content. This version trusts that once, at
/// its first start, and not if two volumes have the same project.
pub(super) fn projects_of_an_older_version_are_recorded_once(bench: &Bench) {
    const LIMIT: Option<u64> = Some(4 << 20);
    if !bench.must_limit {
        return;
    }
    let volumes = bench.pool.open_beneath("volumes").expect("open");
    let base = bench.artifact(|root| fs::write(root.join("f"), b"x").expect("write"));
    let limited = || bench.create(&base, RootAttributes::default(), LIMIT);
    let (honest, one, other) = (limited(), limited(), limited());
    let unlimited = bench.fork(&[]);
    let top = |volume: &Volume| volume.dir.open_beneath("top").expect("open");
    top(&other)
        .set_project(project_of(&one))
        .expect("its owner may");
    let forget = |dir: &Dir| {
        let names = dir.xattr_names().expect("listed").into_iter();
        let ours = names.filter(|name| name.to_str().is_some_and(|name| name.contains("baggage")));
        let ours: Vec<_> = ours.collect();
        for name in &ours {
            assert!(dir.remove_xattr(name).expect("removed"));
        }
        ours.len()
    };
    let is_known = |volume: &Volume, bytes| {
        let api = if super::common::has_descriptors() {
            MountApi::Descriptors
        } else {
            MountApi::Classic
        };
        let started = Overlay::open(&bench.pool, api).expect("overlay works");
        let limit = started.set_limit(&volume.dir, Some(bytes)).expect("asked");
        limit == Limit::Enforced
    };
    // As the older version left it.
    let forgotten = [&honest.dir, &one.dir, &other.dir, &unlimited.dir, &volumes].map(forget);
    assert_eq!(forgotten, [1, 1, 1, 0, 1]);
    assert!(is_known(&honest, 5 << 20));
    let usage = bench.pool.project_usage(project_of(&honest));
    assert_eq!(usage.expect("counted").limit, 5 << 20);
    assert!(!is_known(&one, 5 << 20) && !is_known(&other, 5 << 20));
    // They can be used as before: what is copied up stays in the project of its directory.
    bench.within(&one, |root| {
        fs::write(root.join("f"), b"changed").expect("write");
    });
    // Never again.
    forget(&honest.dir);
    top(&unlimited).set_project(4712).expect("its owner may");
    assert!(!is_known(&honest, 6 << 20) && !is_known(&unlimited, 6 << 20));
    let usage = bench.pool.project_usage(project_of(&honest));
    assert_eq!(usage.expect("counted").limit, 5 << 20);
    for project in [&honest, &one].map(project_of) {
        bench.pool.set_project_limit(project, 0).expect("lifted");
    }
    for volume in [honest, one, other, unlimited] {
        bench.discard(volume);
    }
}
