//! Names in a pool that cannot be opened, read or moved, and records damaged while in use. The
//! driver starts, volumes in use stay intact, and unreadable data is neither trusted nor deleted.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use baggageclaim::engine::VolumeState;
use baggageclaim::model::Outcome;
use rustix::fs::{CWD, FileType, IFlags, Mode};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::common::bench::{Bench, eventually, names};
use crate::common::require_bench;

const ID: &str = "0123456789abcdef0123456789abcdef";
const CACHE: [(&str, &str); 2] = [("type", "task-cache"), ("key", "k")];
const INPUT: [(&str, &str); 2] = [("type", "input"), ("from", "task-cache/k")];

fn layers(bench: &Bench) -> usize {
    names(&bench.pool().join("layers")).len()
}

/// The cache has content that no process has read yet, and loses its name when a process uses it.
async fn fill(bench: &Bench) {
    let write = |at: &Path| {
        fs::create_dir(at.join("below")).expect("mkdir");
        fs::write(at.join("below/unread"), "whole").expect("write");
    };
    bench.step("maker", &CACHE, write).await;
}

async fn destroy(bench: &Bench, name: &str) {
    let (tenant, name) = ("ci".parse().expect("label"), name.parse().expect("name"));
    let destroyed = bench.engine.destroy(&tenant, &name).await;
    destroyed.expect("destroyed");
}

/// As collectors do that have a minute's rest between them.
async fn collect(bench: &Bench) {
    for _ in 0..3 {
        bench.engine.reap().await.expect("reap");
    }
}

fn unread(root: &Path) -> String {
    fs::read_to_string(root.join("below/unread")).expect("it is there")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_volume_is_mounted_over_stays_though_its_record_is_damaged() {
    for damaged in ["{", ""] {
        let bench = require_bench!();
        fill(&bench).await;
        let (at, _) = bench.publish("reader", "reader", &INPUT).await;
        destroy(&bench, "task-cache/k").await;
        let write = |at: &Path| fs::write(at.join("f"), "another").expect("write");
        bench.step("second", &CACHE, write).await;
        collect(&bench).await;
        assert_eq!(layers(&bench), 2, "one of them for the reader alone");
        let bench = bench
            .restart_after(|pool| {
                let record = pool.join("volumes/reader/volume.json");
                match damaged {
                    "" => fs::remove_file(record).expect("rm"),
                    damaged => fs::write(record, damaged).expect("write"),
                }
            })
            .await;
        collect(&bench).await;
        assert_eq!(layers(&bench), 2, "{damaged:?}");
        assert_eq!(bench.engine.status().await.expect("status").damaged, 1);
        let figures = bench.engine.metrics().await.expect("metrics");
        assert!(format!("{figures:?}").contains("damaged: 1"), "{figures:?}");
        assert_eq!(unread(&at), "whole");
        fs::write(at.join("g"), "mine").expect("it can be written to");

        // When it is over, the next start puts it away.
        bench.unpublish("reader").await;
        collect(&bench).await;
        assert_eq!(layers(&bench), 2, "{damaged:?}");
        let bench = bench.restart().await;
        assert_eq!(names(&bench.pool().join("volumes")), [""; 0]);
        collect(&bench).await;
        eventually("what it needed goes with it", || layers(&bench) == 1).await;
        assert_eq!(bench.engine.status().await.expect("status").damaged, 0);
        assert!(bench.artifact("task-cache/k").is_some());
        bench.finish().await;
    }
}

/// Evicting it for space would free nothing, and each later step would make it again.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_evicted_while_the_layers_in_use_are_unknown() {
    let mut bench = require_bench!();
    fill(&bench).await;
    let (at, _) = bench.publish("reader", "reader", &INPUT).await;
    let write = |at: &Path| fs::write(at.join("f"), "other").expect("write");
    let other = [("type", "task-cache"), ("key", "other")];
    bench.step("other", &other, write).await;
    // Everything unused goes at once.
    bench.config.high_watermark = 0;
    bench.config.low_watermark = 0;
    let record = bench.pool().join("volumes/reader/volume.json");
    let bench = bench
        .restart_after(|_| fs::write(record, "{").expect("write"))
        .await;
    collect(&bench).await;
    for name in ["task-cache/k", "task-cache/other"] {
        assert!(bench.artifact(name).is_some(), "{name}");
    }
    assert_eq!(unread(&at), "whole");
    bench.unpublish("reader").await;
    let bench = bench.restart().await;
    eventually("it goes when that is over", || layers(&bench) == 0).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_does_it_where_the_volume_has_left_and_a_process_still_looks_at_it() {
    for (attributes, place) in [(CACHE, "pending"), (INPUT, "trash")] {
        let bench = require_bench!();
        fill(&bench).await;
        let (at, _) = bench.publish("user", "user", &attributes).await;
        let held = fs::File::open(&at).expect("open");
        bench.unpublish("user").await;
        destroy_when_possible(&bench).await;
        collect(&bench).await;
        let bench = bench
            .restart_after(|pool| {
                let place = pool.join(place);
                for name in names(&place) {
                    let record = place.join(name).join("volume.json");
                    if record.exists() {
                        fs::write(record, "{").expect("write");
                    }
                }
            })
            .await;
        collect(&bench).await;
        let seen = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
        assert_eq!(unread(&seen), "whole", "{place}");
        drop(held);
        let bench = bench.restart().await;
        eventually("all of it goes", || {
            layers(&bench) == 0 && names(&bench.pool().join(place)).is_empty()
        })
        .await;
        bench.finish().await;
    }
}

/// The cache has lost its name. Its user keeps the rest.
async fn destroy_when_possible(bench: &Bench) {
    destroy(bench, "task-cache/k").await;
    assert_eq!(layers(bench), 1);
}

/// A layer that cannot be read now may be readable later, so it is no rubbish.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_cannot_be_read_is_read_by_the_start_that_can() {
    let bench = require_bench!();
    fill(&bench).await;
    let (at, _) = bench.publish("user", "user", &CACHE).await;
    fs::write(at.join("g"), "mine").expect("write");
    destroy(&bench, "task-cache/k").await;
    let aside = bench.lab.path().join("aside");
    let bench = bench
        .restart_after(|pool| {
            let record = pool.join("volumes/user/volume.json");
            fs::rename(&record, &aside).expect("rename");
            // No file can be read whose open(2) fails (ENXIO).
            let socket = rustix::fs::mknodat(CWD, &record, FileType::Socket, Mode::RUSR, 0);
            socket.expect("mknod");
        })
        .await;
    collect(&bench).await;
    assert_eq!(unread(&at), "whole");
    // Its pod goes, and is told that all is well.
    bench.unpublish("user").await;
    collect(&bench).await;
    let bench = bench
        .restart_after(|pool| {
            fs::rename(&aside, pool.join("volumes/user/volume.json")).expect("rename");
        })
        .await;
    bench.publish("user", "user", &CACHE).await;
    assert_eq!(unread(&at), "whole");
    bench.outcome("user", Outcome::Succeeded).await;
    bench.unpublish("user").await;
    bench.quiet().await;
    let seen = bench.look("look", &INPUT, "g").await;
    assert_eq!(seen.as_deref(), Some("mine"));
    assert_eq!(
        bench.look("look", &INPUT, "below/unread").await.as_deref(),
        Some("whole")
    );
    bench.finish().await;
}

/// Keeps a name in place: `chattr +i`, or a mount on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stuck {
    Immutable,
    MountPoint,
}

impl Stuck {
    fn set(self, path: &Path) {
        match self {
            Self::Immutable => flag(path, IFlags::IMMUTABLE),
            Self::MountPoint => {
                let flags = MountFlags::empty();
                rustix::mount::mount("odd", path, "tmpfs", flags, None).expect("mount");
            }
        }
    }

    fn clear(self, path: &Path) {
        match self {
            Self::Immutable => flag(path, IFlags::empty()),
            Self::MountPoint => {
                rustix::mount::unmount(path, UnmountFlags::NOFOLLOW).expect("umount");
            }
        }
    }
}

fn flag(path: &Path, flags: IFlags) {
    let file = fs::File::open(path).expect("open");
    rustix::fs::ioctl_setflags(&file, flags).expect("chattr");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_immovable_file_stays_and_is_in_no_ones_way() {
    for (place, name, stuck) in [
        ("volumes", "csi-odd", Stuck::Immutable),
        ("pending", ID, Stuck::Immutable),
        ("layers", ID, Stuck::Immutable),
        ("layers", ID, Stuck::MountPoint),
        ("incoming", "odd", Stuck::Immutable),
        ("incoming", "odd", Stuck::MountPoint),
        ("spares", ID, Stuck::MountPoint),
    ] {
        let bench = require_bench!();
        fill(&bench).await;
        let odd = bench.pool().join(place).join(name);
        let bench = bench
            .restart_after(|_| {
                fs::create_dir_all(&odd).expect("mkdir");
                stuck.set(&odd);
            })
            .await;
        assert!(odd.is_dir(), "{place}, {stuck:?}");
        collect(&bench).await;
        let seen = bench.look("look", &INPUT, "below/unread").await;
        assert_eq!(seen.as_deref(), Some("whole"), "{place}, {stuck:?}");
        let bench = bench.restart_after(|_| stuck.clear(&odd)).await;
        assert!(!odd.exists(), "{place}, {stuck:?}");
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn how_a_pod_ended_is_asked_again_where_it_cannot_be_read() {
    let bench = require_bench!();
    let output = |name| [("type", "output"), ("name", name)];
    for name in ["stays", "left"] {
        let (at, _) = bench.publish(name, name, &output(name)).await;
        fs::write(at.join("f"), name).expect("write");
    }
    bench.unpublish("left").await;
    let waits = |bench: &Bench| {
        let row = bench.row("left");
        row.is_some_and(|row| row.state == VolumeState::AwaitingOutcome)
    };
    eventually("it waits for its outcome", || waits(&bench)).await;
    let bench = bench
        .restart_after(|pool| {
            fs::create_dir(pool.join("volumes/stays/outcome")).expect("mkdir");
            let pending = pool.join("pending");
            let left = pending.join(&names(&pending)[0]);
            // Where it leads to there would be a word.
            fs::write(left.join("word"), "succeeded").expect("write");
            symlink("word", left.join("outcome")).expect("symlink");
        })
        .await;
    eventually("it waits for its outcome still", || waits(&bench)).await;
    assert_eq!(bench.engine.awaited_outcomes().len(), 2);
    assert_eq!(bench.outcome("left", Outcome::Succeeded).await, 1);
    assert_eq!(bench.outcome("stays", Outcome::Failed).await, 1);
    bench.unpublish("stays").await;
    bench.quiet().await;
    assert!(bench.artifact("artifact/stays").is_none(), "it failed");
    let input = [("type", "input"), ("from", "artifact/left")];
    let seen = bench.look("look", &input, "f").await;
    assert_eq!(seen.as_deref(), Some("left"));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_promised_is_sealed_though_a_file_has_its_layers_name() {
    let bench = require_bench!();
    let output = [("type", "output"), ("name", "o")];
    let (at, _) = bench.publish("pod", "v", &output).await;
    fs::write(at.join("f"), "whole").expect("write");
    bench.unpublish("v").await;
    let bench = bench
        .restart_after(|pool| {
            let layer = names(&pool.join("pending")).remove(0);
            fs::write(pool.join("layers").join(layer), "no layer").expect("write");
        })
        .await;
    bench.outcome("pod", Outcome::Succeeded).await;
    bench.quiet().await;
    let input = [("type", "input"), ("from", "artifact/o")];
    let seen = bench.look("look", &input, "f").await;
    assert_eq!(seen.as_deref(), Some("whole"));
    bench.finish().await;
}
