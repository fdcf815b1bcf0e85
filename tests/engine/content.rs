//! The content of a fork: isolation, immutability, owners and modes, limits, read-only views.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use baggageclaim::backend::BackendKind;
use baggageclaim::model::Outcome;

use crate::common::bench::{Bench, Ground, eventually, maps_owners};
use crate::common::{
    Fs, Snapshot, assert_same, has_project_quotas, kernel_is, require_bench, skip_outside_guests,
    too_old, tree,
};

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o")];
const INPUT: &[(&str, &str)] = &[("type", "input"), ("from", "artifact/o")];

fn with<'a>(
    attributes: &[(&'a str, &'a str)],
    more: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    [attributes, more].concat()
}

/// What a new fork of the artifact looks like.
async fn seen(bench: &Bench, volume: &str) -> Snapshot {
    let (target, _) = bench.publish("looking", volume, INPUT).await;
    let snapshot = Snapshot::of(&target);
    bench.unpublish(volume).await;
    bench.quiet().await;
    snapshot
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_sees_every_odd_file_as_it_was_and_forks_do_not_see_each_other() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let sealed = bench
            .step("out", OUTPUT, |at| {
                tree::odd(at);
                Snapshot::of(at)
            })
            .await;
        assert_same(&sealed, &seen(&bench, "look1").await);

        let (one, _) = bench.publish("one", "one", INPUT).await;
        let (two, _) = bench.publish("two", "two", INPUT).await;
        fs::write(one.join("owned"), "changed by one").expect("write");
        fs::write(one.join("new"), "made by one").expect("write");
        fs::remove_file(one.join("zero")).expect("remove");
        fs::set_permissions(&one, fs::Permissions::from_mode(0o700)).expect("chmod");
        assert_same(&sealed, &Snapshot::of(&two));
        fs::write(two.join("new"), "made by two").expect("write");
        assert_eq!(
            fs::read_to_string(one.join("new")).expect("read"),
            "made by one"
        );
        assert_same(&sealed, &seen(&bench, "look2").await);

        // Not after they are gone either, and not after a restart.
        bench.unpublish("one").await;
        bench.unpublish("two").await;
        bench.outcome("one", Outcome::Succeeded).await;
        let bench = bench.restart().await;
        assert_same(&sealed, &seen(&bench, "look3").await);
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_view_cannot_be_written_and_is_never_committed() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        bench
            .step("out", OUTPUT, |at| {
                fs::write(at.join("f"), "made").expect("write");
            })
            .await;
        let task = [("type", "task-cache"), ("key", "k"), ("commit", "always")];
        for (volume, attributes) in [("in", INPUT), ("task", &task), ("scratch", &[])] {
            let mut request = bench.request("user", volume, attributes);
            request.read_only = true;
            bench
                .engine
                .publish(request.clone())
                .await
                .expect("publish");
            let at = bench.target(volume);
            let error = fs::write(at.join("new"), "x").expect_err("read-only");
            assert_eq!(
                error.kind(),
                ErrorKind::ReadOnlyFilesystem,
                "{volume}: {error}"
            );
            if volume == "in" {
                assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "made");
                let error = fs::remove_file(at.join("f")).expect_err("read-only");
                assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
            }
            // A repetition is the same; one that wants to write is another volume.
            assert!(
                bench
                    .engine
                    .publish(request.clone())
                    .await
                    .expect("again")
                    .already
            );
            request.read_only = false;
            let error = bench.engine.publish(request).await.expect_err("another");
            assert!(error.to_string().contains("another readOnly"), "{error}");
            bench.outcome("user", Outcome::Succeeded).await;
            bench.unpublish(volume).await;
        }
        bench.quiet().await;
        assert_eq!(bench.engine.artifacts(None).len(), 1, "{}", ground.name());
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_volume_has_the_owner_and_mode_it_asked_for() {
    // Attributes, the pod's group, and the owner, group and mode that come of them.
    type Case<'a> = (&'a [(&'a str, &'a str)], Option<u32>, (u32, u32, u32));
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let cases: [Case<'_>; 5] = [
            (&[], None, (0, 0, 0o777)),
            (
                &[("uid", "1000"), ("gid", "2000"), ("mode", "0750")],
                None,
                (1000, 2000, 0o750),
            ),
            (&[("mode", "1777")], None, (0, 0, 0o1777)),
            (&[], Some(3000), (0, 3000, 0o2777)),
            (
                &[("gid", "2000"), ("mode", "0700")],
                Some(3000),
                (0, 2000, 0o700),
            ),
        ];
        for kind in [&[][..], OUTPUT] {
            for (more, mount_group, expected) in cases {
                let mut request = bench.request("pod", "v", &with(kind, more));
                request.spec.root.mount_group = mount_group;
                bench.engine.publish(request).await.expect("publish");
                let data = fs::metadata(bench.target("v")).expect("stat");
                let found = (data.uid(), data.gid(), data.mode() & 0o7777);
                assert_eq!(
                    found,
                    expected,
                    "{}: {kind:?} {more:?} {mount_group:?}",
                    ground.name()
                );
                bench.unpublish("v").await;
                bench.outcome("pod", Outcome::Failed).await;
                bench.quiet().await;
            }
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forks_owner_is_a_view_and_what_is_sealed_keeps_its_own() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let task = [("type", "task-cache"), ("key", "k")];
        let made_by = [("uid", "1000"), ("gid", "1000"), ("mode", "0755")];
        bench
            .step("v1", &with(&task, &made_by), |at| {
                for (name, owner) in [("own", 1000), ("roots", 0), ("other", 5000)] {
                    fs::write(at.join(name), name).expect("write");
                    chown(at.join(name), Some(owner), Some(owner)).expect("chown");
                }
            })
            .await;
        let owner = |at: &Path, name: &str| fs::metadata(at.join(name)).expect("stat").uid();
        let as_another = with(&task, &[("uid", "2000"), ("gid", "2000")]);
        if !maps_owners(ground.0, ground.1.name()) {
            let error = bench.try_publish("pod-v2", "v2", &as_another).await;
            let error = error.expect_err("this kernel maps no owners").to_string();
            assert!(error.contains("fork"), "{}: {error}", ground.name());
            bench.finish().await;
            continue;
        }
        let (at, _) = bench.publish("pod-v2", "v2", &as_another).await;
        assert_eq!(
            fs::metadata(&at).expect("stat").uid(),
            2000,
            "{}",
            ground.name()
        );
        assert_eq!(
            owner(&at, "own"),
            2000,
            "what was the root's owner's is the new one's"
        );
        assert_eq!(
            owner(&at, "other"),
            5000,
            "everybody else stays who they are"
        );
        bench.unpublish("v2").await;
        bench.outcome("pod-v2", Outcome::Failed).await;
        bench.quiet().await;
        let (at, _) = bench.publish("pod-v3", "v3", &task).await;
        assert_eq!(
            (owner(&at, ""), owner(&at, "own"), owner(&at, "roots")),
            (1000, 1000, 0)
        );
        // The pod's group is the root directory's alone.
        bench.unpublish("v3").await;
        bench.outcome("pod-v3", Outcome::Failed).await;
        let mut request = bench.request("pod", "v4", &task);
        request.spec.root.mount_group = Some(3000);
        bench.engine.publish(request).await.expect("publish");
        let data = fs::metadata(bench.target("v4")).expect("stat");
        assert_eq!((data.gid(), data.mode() & 0o7777), (3000, 0o2775));
        assert_eq!(
            fs::metadata(bench.target("v4").join("own"))
                .expect("stat")
                .gid(),
            1000
        );
        bench.unpublish("v4").await;
        bench.outcome("pod", Outcome::Failed).await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_size_limit_holds_or_the_volume_says_why_not() {
    for ground in Ground::ALL {
        limited(require_bench!(on ground), ground).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_size_limit_holds_on_filesystems_with_quota() {
    for fs in Fs::WITH_QUOTA {
        let ground = Ground(BackendKind::Overlay, fs);
        match ground.bench().await {
            Ok(_) if !has_project_quotas() => too_old("limits on projects"),
            Ok(bench) => limited(bench, ground).await,
            Err(reason) => skip_outside_guests(&reason),
        }
    }
}

async fn limited(bench: Bench, ground: Ground) {
    let unused = [("type", "task-cache"), ("key", "unused")];
    bench.step("cache", &unused, |at| tree::files(at, 3)).await;
    let limited = with(OUTPUT, &[("sizeLimit", "4Mi")]);
    let (at, published) = bench.publish("pod", "v", &limited).await;
    let stats = bench
        .engine
        .stats(&"v".parse().expect("id"), &at)
        .await
        .expect("stats");
    let mut file = fs::File::create(at.join("big")).expect("create");
    let written = file
        .write_all(&vec![1; 8 << 20])
        .and_then(|()| file.sync_all());
    drop(file);
    if let Some(why) = &published.limit_unenforced {
        assert!(!why.is_empty());
        assert_eq!(
            bench.row("v").expect("a row").limit_unenforced.as_ref(),
            Some(why)
        );
        assert!(stats.total_bytes > 100 << 20, "the pool's: {stats:?}");
        written.expect("the write succeeds");
        assert!(
            ground.0 != BackendKind::Btrfs || !kernel_is(6, 7),
            "btrfs can: {why}"
        );
        assert!(!Fs::WITH_QUOTA.contains(&ground.1), "{why}");
    } else {
        assert_eq!(stats.total_bytes, 4 << 20);
        let error = written.expect_err("it is limited");
        // xfs says of a project that is full what it says of a full disk.
        let kind = if ground.1 == Fs::XfsQuota {
            ErrorKind::StorageFull
        } else {
            ErrorKind::QuotaExceeded
        };
        assert_eq!(error.kind(), kind, "{}: {error}", ground.name());
        // To the last block.
        (0..)
            .try_for_each(|number| fs::write(at.join(format!("small-{number}")), [1; 4096]))
            .expect_err("it is full");
        // Others are not.
        let (other, _) = bench.publish("other", "w", &[]).await;
        fs::write(other.join("big"), vec![1; 8 << 20]).expect("write");
        bench.unpublish("w").await;
    }
    // At its limit a volume can still get its outcome, be unpublished, sealed and forked; no
    // other volume has to make room for it.
    assert_eq!(bench.outcome("pod", Outcome::Succeeded).await, 1);
    bench.unpublish("v").await;
    bench.quiet().await;
    assert_eq!(bench.engine.reap().await.expect("reap").evicted, 0);
    assert!(
        bench.artifact("task-cache/unused").is_some(),
        "it was evicted"
    );
    let (at, _) = bench.publish("user", "in", INPUT).await;
    assert!(at.join("big").exists());
    bench.unpublish("in").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_count_what_the_volume_holds_of_its_own() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        bench
            .step("out", OUTPUT, |at| tree::fill(at, 50, 10, 8192))
            .await;
        let (at, _) = bench.publish("user", "in", INPUT).await;
        tree::fill(&at.join("mine"), 20, 10, 8192);
        // The filesystem's own counts are of what it has written back.
        fs::File::open(&at)
            .and_then(|dir| dir.sync_all())
            .expect("sync");
        let volume = "in".parse().expect("id");
        let first = bench.engine.stats(&volume, &at).await.expect("stats");
        assert!(first.total_bytes >= first.available_bytes && first.available_bytes > 0);
        eventually("it is measured", || {
            bench.row("in").is_some_and(|row| row.usage.is_some())
        })
        .await;
        let usage = bench
            .engine
            .stats(&volume, &at)
            .await
            .expect("stats")
            .usage
            .expect("measured");
        let own = if ground.0 == BackendKind::Overlay {
            20..=20
        } else {
            70..=70
        };
        assert!(own.contains(&usage.files), "{}: {usage:?}", ground.name());
        assert!(usage.bytes > 0, "{usage:?}");
        let elsewhere = bench.engine.stats(&volume, &bench.target("other")).await;
        assert!(elsewhere.is_err(), "only where it is published");
        bench.unpublish("in").await;
        assert!(bench.engine.stats(&volume, &at).await.is_err());
        bench.finish().await;
    }
}
