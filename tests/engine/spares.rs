//! Prewarmed volumes: they behave like any other, and are removed once no request is expected.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use baggageclaim::backend::BackendKind;
use baggageclaim::model::Outcome;

use crate::common::bench::{Bench, eventually, maps_owners, mounted_for, names};
use crate::common::require_bench;

const CACHE: &[(&str, &str)] = &[("type", "task-cache"), ("key", "k")];
const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o")];
const INPUT: &[(&str, &str)] = &[("type", "input"), ("from", "artifact/o")];

/// How many spares are mounted: a mount makes directories of the kernel's in theirs.
fn mounted_spares(bench: &Bench) -> usize {
    let spares = bench.pool().join("spares");
    let is_mounted = |name: &String| spares.join(name).join("work.1/work").exists();
    names(&spares)
        .iter()
        .filter(|name| is_mounted(name))
        .count()
}

/// Publishes such volumes one after the other, whose pods fail, until the last one was mounted
/// beforehand. That one stays.
async fn until_mounted_beforehand(bench: &Bench, attributes: &[(&str, &str)]) -> String {
    for number in 0..10_000 {
        let volume = format!("v{number}");
        let (at, _) = bench.publish(&volume, &volume, attributes).await;
        if !mounted_for(&at, &volume) {
            return volume;
        }
        bench.outcome(&volume, Outcome::Failed).await;
        bench.unpublish(&volume).await;
    }
    panic!("ten thousand alike, and none was mounted beforehand");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_mounted_beforehand_is_as_any_other_also_for_the_next_driver() {
    let bench = require_bench!();
    bench
        .step("maker", CACHE, |at| {
            fs::write(at.join("f"), "of the maker").expect("write");
            fs::set_permissions(at, fs::Permissions::from_mode(0o750)).expect("chmod");
        })
        .await;
    let first = bench.artifact("task-cache/k").expect("sealed").id;
    let volume = until_mounted_beforehand(&bench, CACHE).await;
    let at = bench.target(&volume);
    let seen = fs::read_to_string(at.join("f")).expect("read");
    assert_eq!(seen, "of the maker");
    let mode = fs::metadata(&at).expect("stat").mode();
    assert_eq!(mode & 0o7777, 0o750, "{mode:o}");
    fs::write(at.join("g"), "of the fork").expect("write");

    // The next driver knows it by what its mount is called.
    let bench = bench.restart().await;
    let (_, again) = bench.publish(&volume, &volume, CACHE).await;
    assert!(again.already, "its mount was found");
    assert_eq!(bench.engine.check().await.expect("check"), []);
    bench.outcome(&volume, Outcome::Succeeded).await;
    bench.unpublish(&volume).await;
    bench.quiet().await;
    let sealed = bench.artifact("task-cache/k").expect("sealed");
    assert_ne!(sealed.id, first);
    let seen = bench.look("after", CACHE, "g").await;
    assert_eq!(seen.as_deref(), Some("of the fork"));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_vanished_comes_back_under_the_volumes_own_name() {
    let bench = require_bench!();
    bench.step("maker", OUTPUT, |_| {}).await;
    let volume = until_mounted_beforehand(&bench, INPUT).await;
    let at = bench.target(&volume);
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::NOFOLLOW).expect("umount");
    let (_, again) = bench.publish(&volume, &volume, INPUT).await;
    assert!(!again.already);
    assert!(mounted_for(&at, &volume));
    let bench = bench.restart().await;
    let (_, again) = bench.publish(&volume, &volume, INPUT).await;
    assert!(again.already);
    bench.unpublish(&volume).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_target_after_that_is_found_by_the_next_driver() {
    let bench = require_bench!();
    bench.step("maker", OUTPUT, |_| {}).await;
    let volume = until_mounted_beforehand(&bench, INPUT).await;
    let at = bench.target(&volume);
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::NOFOLLOW).expect("umount");
    bench.publish(&volume, &volume, INPUT).await;
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::NOFOLLOW).expect("umount");
    let mut second = bench.request(&volume, &volume, INPUT);
    second.target = bench.target("second");
    bench.engine.publish(second.clone()).await.expect("second");
    let bench = bench.restart().await;
    let again = bench.engine.publish(second.clone()).await;
    assert!(again.expect("its mount was found").already);
    let id = volume.as_str();
    bench.unpublish(id).await;
    assert!(second.target.exists(), "the first target is not its own");
    let unpublished = bench.engine.unpublish(id, &second.target).await;
    unpublished.expect("unpublish");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_differs_in_what_is_seen_of_it_gets_no_mount_of_another() {
    let bench = require_bench!();
    let write = |at: &Path| fs::write(at.join("f"), "f").expect("write");
    bench.step("maker", OUTPUT, write).await;
    let plain = until_mounted_beforehand(&bench, INPUT).await;
    let file = |volume: &str| bench.target(volume).join("f");
    let mut differing = vec![("mode", "mode", "0711"), ("limit", "sizeLimit", "1Gi")];
    let maps_owners = maps_owners(BackendKind::Overlay, "ext4");
    if maps_owners {
        differing.push(("owner", "uid", "1234"));
    }
    for (volume, key, value) in &differing {
        let attributes = [INPUT, &[(*key, *value)]].concat();
        bench.publish(volume, volume, &attributes).await;
        // Never of those that are ready for the plain ones.
        assert!(mounted_for(&bench.target(volume), volume));
    }
    let mode = fs::metadata(bench.target("mode")).expect("stat").mode();
    assert_eq!(mode & 0o7777, 0o711, "{mode:o}");
    if maps_owners {
        assert_eq!(fs::metadata(file("owner")).expect("stat").uid(), 1234);
    }
    let mut request = bench.request("read-only", "read-only", INPUT);
    request.read_only = true;
    bench.engine.publish(request).await.expect("publish");
    assert!(mounted_for(&bench.target("read-only"), "read-only"));
    let refused = fs::write(file("read-only"), "no").expect_err("read-only");
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    fs::write(file(&plain), "yes").expect("write");
    for (volume, ..) in differing {
        bench.unpublish(volume).await;
    }
    for volume in ["read-only", &plain] {
        bench.unpublish(volume).await;
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_was_damaged_does_not_hide_that_it_is_in_use() {
    let bench = require_bench!();
    bench.step("maker", OUTPUT, |_| {}).await;
    let volume = until_mounted_beforehand(&bench, INPUT).await;
    fs::write(bench.target(&volume).join("g"), "mine").expect("write");
    let record = format!("volumes/{volume}/volume.json");
    let bench = bench
        .restart_after(|pool| fs::write(pool.join(&record), "{").expect("write"))
        .await;
    bench.engine.reap().await.expect("reap");
    let kept = fs::read_to_string(bench.pool().join(format!("volumes/{volume}/top/g")));
    assert_eq!(kept.expect("kept"), "mine");
    bench.unpublish(&volume).await;
    let bench = bench.restart().await;
    let kept = bench.pool().join(format!("volumes/{volume}"));
    // Until it execs, a program that another test starts may hold the mount that is gone.
    eventually("it is thrown away", || !kept.exists()).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_starts_empty_is_as_old_as_its_publish() {
    /// The kernel's clock for files ticks at least so often.
    const TICK: Duration = Duration::from_millis(20);
    let bench = require_bench!();
    let first = until_mounted_beforehand(&bench, OUTPUT).await;
    bench.outcome(&first, Outcome::Failed).await;
    bench.unpublish(&first).await;
    // There are more of them, and they have to be older than the next publish for it to tell.
    std::thread::sleep(4 * TICK);
    let before = SystemTime::now();
    let volume = until_mounted_beforehand(&bench, OUTPUT).await;
    let at = bench.target(&volume);
    let modified = fs::metadata(&at).and_then(|data| data.modified());
    assert!(modified.expect("stat") >= before - TICK);
    bench.outcome(&volume, Outcome::Failed).await;
    bench.unpublish(&volume).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_stays_mounted_over_what_is_deleted() {
    let bench = require_bench!();
    bench.step("maker", OUTPUT, |_| {}).await;
    let volume = until_mounted_beforehand(&bench, INPUT).await;
    bench.unpublish(&volume).await;
    bench.quiet().await;
    eventually("more are mounted", || mounted_spares(&bench) > 0).await;
    let (tenant, name) = ("ci".parse().expect("tenant"), "artifact/o".parse());
    let name = name.expect("reference");
    bench.engine.destroy(&tenant, &name).await.expect("destroy");
    bench.engine.reap().await.expect("reap");
    // One that was just being made goes a moment later.
    eventually("none is mounted", || mounted_spares(&bench) == 0).await;
    assert_eq!(names(&bench.pool().join("layers")).len(), 0);
    bench.finish().await;
}

/// Deletes it with all that is in it, also while the driver is making it.
fn delete(path: &Path) {
    #[expect(
        clippy::disallowed_methods,
        reason = "plays a person who deletes what is the driver's"
    )]
    let deleted = || fs::remove_dir_all(path);
    while path.exists() {
        let _not_yet = deleted();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn spares_that_are_missing_fail_no_publish() {
    let bench = require_bench!();
    bench.step("maker", OUTPUT, |_| {}).await;
    let volume = until_mounted_beforehand(&bench, INPUT).await;
    bench.unpublish(&volume).await;
    bench.quiet().await;
    eventually("more are mounted", || mounted_spares(&bench) > 0).await;
    let spares = bench.pool().join("spares");
    for spare in names(&spares) {
        delete(&spares.join(spare));
    }
    for (name, attributes) in [("in", INPUT), ("out", OUTPUT), ("plain", &[])] {
        for number in 0..20 {
            let volume = format!("{name}-{number}");
            bench.publish(&volume, &volume, attributes).await;
            bench.outcome(&volume, Outcome::Failed).await;
            bench.unpublish(&volume).await;
        }
    }
    // Then their directory, too.
    delete(&spares);
    bench.publish("last", "last", INPUT).await;
    bench.unpublish("last").await;
    bench.quiet().await;
    fs::create_dir(&spares).expect("it was deleted");
    bench.finish().await;
}
