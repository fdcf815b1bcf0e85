//! A pool whose filesystem became read-only, as ext4 does after a disk error. Pods still end,
//! nothing that may have lost bytes is sealed, and the repaired pool has its earlier artifacts.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use baggageclaim::engine::{Config, Engine, Error};
use baggageclaim::model::PersistentVolume;
use rustix::fs::IFlags;

use crate::common::bench::{
    Bench, Ground, NEVER, empty_claim, mount_request, names, open_again, request, require_bench,
};
use crate::common::disk::sync;

const BASE: [(&str, &str); 2] = [("type", "output"), ("name", "base")];

/// Where kubelet has a volume mounted: in a directory that kubelet makes, and removes when the
/// volume is unpublished.
fn target(bench: &Bench, volume: &str) -> PathBuf {
    bench.target(volume).join("mount")
}

async fn publish(bench: &Bench, volume: &str, attributes: &[(&str, &str)]) -> PathBuf {
    let at = target(bench, volume);
    fs::create_dir(at.parent().expect("kubelet's")).expect("mkdir");
    let request = request(&at, "ci", volume, volume, attributes);
    bench.engine.publish(request).await.expect("published");
    fs::write(at.join("f"), volume).expect("write");
    at
}

/// As kubelet does, which asks again when the answer was lost.
async fn unpublish(bench: &Bench, volume: &str) {
    let at = target(bench, volume);
    for _ in 0..2 {
        let unpublished = bench.engine.unpublish(volume, &at).await;
        unpublished.unwrap_or_else(|error| panic!("unpublish {volume}: {error}"));
        assert!(!at.exists(), "{volume}");
    }
    fs::remove_dir(at.parent().expect("kubelet's")).expect("rmdir");
}

async fn mount(bench: &Bench, claim: &PersistentVolume) -> PathBuf {
    let request = mount_request(claim, &bench.target("claim"));
    bench.engine.mount_claim(request).await.expect("mounted");
    bench.target("claim")
}

async fn unmount(bench: &Bench, claim: &PersistentVolume) {
    let at = bench.target("claim");
    for _ in 0..2 {
        let unmounted = bench.engine.unmount_claim(claim.id.as_str(), &at, false);
        unmounted.await.expect("unmounted");
        assert!(!at.exists());
    }
}

async fn create_claim(bench: &Bench) -> PersistentVolume {
    let request = empty_claim("claim");
    bench.engine.create_claim(request).await.expect("made")
}

/// A base to fork from, and then a volume of each kind, all of it on the disk.
async fn fill(bench: &Bench) -> PersistentVolume {
    let write = |at: &Path| fs::write(at.join("f"), "base").expect("write");
    bench.step("base", &BASE, write).await;
    publish(bench, "scratch", &[]).await;
    publish(bench, "in", &[("type", "input"), ("from", "artifact/base")]).await;
    for name in ["out", "late"] {
        let output = [("type", "output"), ("name", name), ("commit", "always")];
        publish(bench, name, &output).await;
    }
    let claim = create_claim(bench).await;
    fs::write(mount(bench, &claim).await.join("f"), "claim").expect("write");
    sync(&bench.pool());
    claim
}

/// The error of a start.
async fn refused(config: &Config) -> Error {
    let deadline = Instant::now() + NEVER;
    loop {
        match Engine::open(config.clone()).await {
            Err(error) if error.to_string().contains("in use by another") => {
                assert!(Instant::now() < deadline, "{error}");
                tokio::task::yield_now().await;
            }
            opened => break opened.expect_err("it is read-only"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_pool_that_turned_read_only_end_and_nothing_of_them_is_sealed() {
    let bench = require_bench!();
    let claim = fill(&bench).await;
    // A write that never reaches the disk.
    fs::write(target(&bench, "out").join("g"), "lost").expect("write");
    bench.lab.disk_fails();
    for volume in ["scratch", "in", "out"] {
        unpublish(&bench, volume).await;
    }
    unmount(&bench, &claim).await;
    bench.engine.reap().await.expect_err("nothing can be moved");
    assert!(bench.artifact("artifact/out").is_none());

    // A driver that starts has no pool; what is mounted still goes.
    let late = target(&bench, "late");
    let Bench {
        lab,
        targets,
        engine,
        config,
    } = bench;
    engine.shutdown().await;
    drop(engine);
    let error = refused(&config).await;
    assert!(
        error.to_string().contains("read-only filesystem"),
        "{error}"
    );
    for _ in 0..2 {
        let unmounted = Engine::unmount_offline(&late, false).await;
        unmounted.expect("unmounted");
        assert!(!late.exists());
    }
    fs::remove_dir(late.parent().expect("kubelet's")).expect("rmdir");

    // The node is not rebooted, but its disk is repaired.
    lab.repair();
    let engine = open_again(&config).await;
    let bench = Bench {
        lab,
        targets,
        engine,
        config,
    };
    bench.engine.reap().await.expect("reap");
    bench.quiet().await;
    for name in ["artifact/out", "artifact/late"] {
        assert!(bench.artifact(name).is_none(), "{name} may have lost bytes");
    }
    let input = [("type", "input"), ("from", "artifact/base")];
    let base = bench.look("look", &input, "f").await;
    assert_eq!(base.as_deref(), Some("base"));
    let at = mount(&bench, &claim).await;
    assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "claim");
    unmount(&bench, &claim).await;
    let deleted = bench.engine.delete_claim(claim.id.as_str()).await;
    deleted.expect("deleted");
    bench.finish().await;
}

/// Whether a name can be made in, or taken from, a directory.
fn set_immutable(dir: &Path, immutable: bool) {
    let file = fs::File::open(dir).expect("open");
    let mut flags = rustix::fs::ioctl_getflags(&file).expect("flags");
    flags.set(IFlags::IMMUTABLE, immutable);
    rustix::fs::ioctl_setflags(&file, flags).expect("chattr");
}

/// Nothing can be moved for a while, and nothing is lost meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn what_left_while_nothing_could_be_moved_is_sealed_when_it_can() {
    for (ground, restarted) in Ground::ALL
        .into_iter()
        .flat_map(|it| [(it, false), (it, true)])
    {
        let mut bench = require_bench!(on ground);
        let claim = fill(&bench).await;
        unmount(&bench, &claim).await;
        let deleted = bench.engine.delete_claim(claim.id.as_str()).await;
        deleted.expect("deleted");
        bench.engine.reap().await.expect("reap");
        let places = ["pending", "trash"].map(|name| bench.pool().join(name));
        for place in &places {
            set_immutable(place, true);
        }
        for volume in ["scratch", "in", "out", "late"] {
            unpublish(&bench, volume).await;
        }
        bench.engine.reap().await.expect_err("nothing can be moved");
        assert_eq!(names(&bench.pool().join("volumes")).len(), 4);
        for place in &places {
            set_immutable(place, false);
        }
        if restarted {
            bench = bench.restart().await;
        }
        bench.engine.reap().await.expect("reap");
        bench.quiet().await;
        for name in ["out", "late"] {
            let from = format!("artifact/{name}");
            let input = [("type", "input"), ("from", &*from)];
            let content = bench.look("look", &input, "f").await;
            assert_eq!(content.as_deref(), Some(name));
        }
        bench.finish().await;
    }
}
