//! The pod's own mounts below a target. An unpublish removes them; their content is neither sealed
//! nor deleted, and what they covered is sealed unchanged.

use std::fs;
use std::path::Path;

use baggageclaim::backend::BackendKind;
use baggageclaim::sys;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};

use crate::common::bench::{Bench, Ground, eventually, names, soon};
use crate::common::{Snapshot, assert_same, require_bench};
use crate::{INPUT, LOG, OUTPUT, Process, Victim, seen};

fn mounts_below(path: &Path) -> usize {
    let table = sys::mount_table().expect("mounts");
    let below = |mount: &&sys::MountEntry| mount.mount_point.starts_with(path);
    table.iter().filter(below).count()
}

/// A mount namespace of its own, as a container's: what is unmounted outside is unmounted there,
/// not the other way round.
#[allow(
    unsafe_code,
    reason = "rustix calls it so for who shares descriptors; only mounts are unshared"
)]
pub(crate) fn unshare(root: &Path) {
    // SAFETY: no descriptor is unshared.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
        .expect("unshare");
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change(root, slave).expect("made a slave");
}

pub(crate) fn tmpfs(at: &Path) {
    mount("pods", at, "tmpfs", MountFlags::empty(), None).expect("tmpfs");
    for name in ["f0", "f1"] {
        fs::write(at.join(name), "in the pod's own tmpfs").expect("write");
    }
}

/// Binds what the link `to` in a directory names onto its directory `bound`.
pub(crate) fn bind_below(at: &Path) {
    let to = fs::read_link(at.join("to")).expect("a link");
    mount_bind(&to, at.join("bound")).expect("bind");
    mount_bind(to.join("f0"), at.join("file")).expect("bind of a file");
}

/// Content of a volume with places to mount on; what of it is to be sealed.
fn fill(at: &Path, victim: &Victim) -> Snapshot {
    for name in ["mnt", "bound", "mnt/below"] {
        fs::create_dir(at.join(name)).expect("mkdir");
    }
    for name in ["mnt/f0", "mnt/below/f0", "bound/f1", "file"] {
        fs::write(at.join(name), "the volume's own").expect("write");
    }
    std::os::unix::fs::symlink(&victim.path, at.join("to")).expect("symlink");
    Snapshot::of(at)
}

/// Until the volume is sealed, or gone.
async fn ended(bench: &Bench, volume: &str) {
    bench.quiet().await;
    assert!(bench.row(volume).is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_below_a_target_go_with_it_and_are_no_content() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let victim = Victim::of(&bench);
        for attributes in [&[][..], OUTPUT] {
            let (at, _) = bench.publish("pod", "v", attributes).await;
            let own = fill(&at, &victim);
            tmpfs(&at.join("mnt"));
            fs::create_dir(at.join("mnt/again")).expect("mkdir");
            tmpfs(&at.join("mnt/again"));
            bind_below(&at);
            mount_bind(&at, at.join("mnt/again")).expect("the volume itself, below itself");
            assert!(mounts_below(&at) >= 6, "{}", mounts_below(&at));
            assert_eq!(
                fs::read_to_string(at.join("file")).expect("read"),
                crate::CANARY
            );
            bench.unpublish("v").await;
            assert_eq!(mounts_below(&at), 0);
            ended(&bench, "v").await;
            bench.engine.reap().await.expect("reap");
            victim.is_untouched();
            if attributes == OUTPUT {
                assert_same(&own, &seen(&bench, "in", INPUT).await);
            }
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_in_another_namespace_hold_no_unpublish_up_and_are_no_content() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let victim = Victim::of(&bench);
        for (attributes, sits) in [
            (&[][..], false),
            (OUTPUT, false),
            (&[][..], true),
            (OUTPUT, true),
        ] {
            let (at, _) = bench.publish("pod", "v", attributes).await;
            let own = fill(&at, &victim);
            let mut process = Process::start();
            process.tell("unshare", Path::new("/"));
            process.tell("tmpfs", &at.join("mnt"));
            process.tell("bind-below", &at);
            if sits {
                process.tell("sit", &at.join("mnt"));
            }
            assert_same(&own, &Snapshot::of(&at));
            bench.unpublish("v").await;
            assert_eq!(mounts_below(&at), 0);
            if sits {
                // Held by a process in a mount below it, or not; either way it ends with that
                // process.
                victim.is_untouched();
                process.kill();
                ended(&bench, "v").await;
            } else {
                // That process is there, and has no hold on the volume.
                soon("its end", ended(&bench, "v")).await;
                process.kill();
            }
            bench.engine.reap().await.expect("reap");
            victim.is_untouched();
            if attributes == OUTPUT {
                assert_same(&own, &seen(&bench, "in", INPUT).await);
            }
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_shows_up_in_the_pool_is_never_deleted_through() {
    let log = &*LOG;
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let victim = Victim::of(&bench);
        for attributes in [
            &[][..],
            &[("type", "output"), ("name", "p"), ("commit", "never")],
        ] {
            let (at, _) = bench.publish("pod", "v", attributes).await;
            fill(&at, &victim);
            let room = bench.pool().join("volumes/v");
            let plain = ground.0 != BackendKind::Overlay;
            let place = room.join(if plain { "fs" } else { "top" }).join("mnt");
            mount_bind(&victim.path, &place).expect("bind");
            let of_pool = || {
                let mut table = sys::mount_table().expect("mounts").into_iter();
                table
                    .find(|mount| mount.mount_point.starts_with(bench.pool()))
                    .map(|mount| mount.mount_point)
            };
            bench.unpublish("v").await;
            if ground.0 == BackendKind::Btrfs {
                // The kernel takes a mount away with the subvolume that it is in.
                ended(&bench, "v").await;
                victim.is_untouched();
                assert!(of_pool().is_none());
                continue;
            }
            let trash = bench.pool().join("trash");
            eventually("it is in the trash", || !names(&trash).is_empty()).await;
            let key = names(&trash).remove(0);
            eventually("its deletion fails, aloud", || {
                log.says(&[&key, "did not succeed yet", "delete the volume"])
            })
            .await;
            let place = of_pool().expect("still mounted, and what it is mounted on still there");
            bench.engine.reap().await.expect("it does not stop others");
            victim.is_untouched();
            unmount(&place, UnmountFlags::NOFOLLOW).expect("unmount");
            assert!(of_pool().is_none());
            eventually("the volume is gone", || bench.row("v").is_none()).await;
            victim.is_untouched();
        }
        bench.finish().await;
    }
}
