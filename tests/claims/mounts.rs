//! Staging and publishing, owners and modes, and what survives a restart or crash.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::Error;
use baggageclaim::engine::claims::{CreateClaim, MountClaim};
use baggageclaim::model::{
    ClaimParameters, ClaimSource, PersistentVolume, RootAttributes, Timestamp,
};
use baggageclaim::sys;

use super::bench::{ALL, Bench, COPY, again, request, say};
use super::common::bench::maps_owners;
use super::common::too_old;

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "one scenario, told in order")]
async fn staged_once_and_published_as_its_access_mode_allows() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let claim = bench.create("claim").await;
        let early = bench
            .engine
            .mount_claim(bench.publish_request(&claim, "early"))
            .await;
        assert!(
            matches!(early, Err(Error::Target { .. })),
            "not staged: {early:?}"
        );
        assert!(!bench.at("early").exists());
        for _ in 0..3 {
            bench.stage(&claim).await.expect("staged");
        }
        let one = bench.publish_request(&claim, "one");
        for _ in 0..3 {
            bench
                .engine
                .mount_claim(one.clone())
                .await
                .expect("published");
        }
        fs::write(bench.at("one").join("file"), "text").expect("written");
        let mounts = sys::mount_table().expect("table");
        let here = |place: &Path| {
            mounts
                .iter()
                .filter(|mount| mount.mount_point == *place)
                .count()
        };
        assert_eq!(
            (here(&bench.staging(&claim)), here(&bench.at("one"))),
            (1, 1)
        );

        let two = bench.publish_request(&claim, "two");
        let second = bench.engine.mount_claim(two.clone()).await;
        assert!(
            matches!(second, Err(Error::PublishedElsewhere { .. })),
            "{second:?}"
        );
        let read_only = MountClaim {
            read_only: true,
            multiple_targets: true,
            ..two.clone()
        };
        bench
            .engine
            .mount_claim(read_only.clone())
            .await
            .expect("published");
        let changed = bench
            .engine
            .mount_claim(MountClaim {
                read_only: false,
                ..read_only
            })
            .await;
        assert!(
            matches!(changed, Err(Error::Different { .. })),
            "{changed:?}"
        );
        assert_eq!(
            fs::read_to_string(bench.at("two").join("file")).expect("read"),
            "text"
        );
        for (changed, what) in [
            (
                MountClaim {
                    multiple_targets: true,
                    ..one.clone()
                },
                "access mode",
            ),
            (
                MountClaim {
                    mount_group: Some(2000),
                    ..one.clone()
                },
                "volume_mount_group (fsGroup)",
            ),
            (
                MountClaim {
                    multiple_targets: true,
                    ..bench.stage_request(&claim)
                },
                "access mode",
            ),
        ] {
            let answer = bench.engine.mount_claim(changed).await;
            assert!(
                matches!(&answer, Err(Error::Different { what: found, .. }) if *found == what),
                "{what}: {answer:?}"
            );
        }
        // Kubelet stages once for the pods of all groups.
        let staged_again = MountClaim {
            mount_group: Some(2000),
            ..bench.stage_request(&claim)
        };
        let staged_again = bench.engine.mount_claim(staged_again).await;
        staged_again.expect("a stage is of no group");
        fs::write(bench.at("two").join("file"), "no").expect_err("read-only");
        fs::write(bench.at("one").join("file"), "new").expect("not read-only");

        let deleted = bench.engine.delete_claim(claim.id.as_str()).await;
        assert!(
            matches!(deleted, Err(Error::ClaimInUse { .. })),
            "{deleted:?}"
        );
        let used = bench
            .engine
            .claim_use(claim.id.as_str())
            .await
            .expect("use");
        assert_eq!(used.targets.len(), 3);
        assert!(used.problems.is_empty(), "{:?}", used.problems);
        let stats = bench
            .engine
            .stats(&claim.id, &bench.at("two"))
            .await
            .expect("stats");
        assert!(stats.total_bytes > 0);
        for place in ["one", "two"] {
            for _ in 0..2 {
                bench.unpublish(&claim, place).await;
            }
        }
        bench.unmount(&claim).await;
        bench.unmount(&claim).await;

        // Without a staging path, and for reading only at first.
        let direct = MountClaim {
            staged_at: None,
            read_only: true,
            multiple_targets: true,
            ..bench.publish_request(&claim, "direct")
        };
        bench
            .engine
            .mount_claim(direct.clone())
            .await
            .expect("published");
        fs::write(bench.at("direct").join("file"), "no").expect_err("read-only");
        let writable = MountClaim {
            target: bench.at("writable"),
            read_only: false,
            ..direct
        };
        bench.engine.mount_claim(writable).await.expect("published");
        fs::write(bench.at("writable").join("file"), "yes").expect("writable");
        for place in ["direct", "writable"] {
            bench
                .engine
                .unpublish(claim.id.as_str(), &bench.at(place))
                .await
                .expect("unpublished");
        }
        bench.finish().await;
    }
}

/// Takes from a claim's record what older versions did not write there.
fn as_an_older_version_wrote_it(record: &Path) {
    let text = fs::read(record).expect("there");
    let mut known: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    for target in known["targets"].as_array_mut().expect("a list") {
        let asked = target.as_object_mut().expect("an object").remove("asked");
        asked.expect("this version writes it");
    }
    let text = serde_json::to_vec(&known).expect("JSON");
    fs::write(record, text).expect("written");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_mount_was_asked_for_with_is_remembered_and_not_guessed() {
    let Some(bench) = Bench::new(ALL[0]).await else {
        return;
    };
    let claim = bench.create("claim").await;
    bench.stage(&claim).await.expect("staged");
    let of_group = |group| MountClaim {
        mount_group: Some(group),
        ..bench.publish_request(&claim, "pod")
    };
    let (one, other) = (of_group(1000), of_group(2000));
    bench.engine.mount_claim(one.clone()).await.expect("first");
    assert_eq!(fs::metadata(bench.at("pod")).expect("there").gid(), 1000);

    let bench = bench.restart().await;
    bench.engine.mount_claim(one.clone()).await.expect("again");
    let different = bench.engine.mount_claim(other.clone()).await;
    assert!(
        matches!(different, Err(Error::Different { .. })),
        "{different:?}"
    );
    assert_eq!(fs::metadata(bench.at("pod")).expect("there").gid(), 1000);

    // An older version did not write it down: kubelet's repetitions are not refused for that.
    let record = bench.lab.path().join("pool/volumes");
    let record = record.join(claim.id.as_str()).join("claim.json");
    let bench = bench
        .restart_after(|| as_an_older_version_wrote_it(&record))
        .await;
    for request in [one, other] {
        bench.engine.mount_claim(request).await.expect("not known");
    }
    bench.unpublish(&claim, "pod").await;
    bench.unmount(&claim).await;
    bench.finish().await;
}

/// The stage was read-only, so no one may write to it, even if the publish is not read-only.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_staged_for_reading_only_is_published_for_reading_only() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let claim = bench.create("claim").await;
        bench.write(&claim, "file", "text").await;
        let staged = bench.staged_read_only(&claim).await;
        staged.expect("staged");
        let writable = bench.publish_request(&claim, "pod");
        let refused = bench.engine.mount_claim(writable.clone()).await;
        let refused_for = |what: &str| matches!(&refused, Err(Error::Different { what: found, .. }) if *found == what);
        assert!(refused_for("readonly"), "{refused:?}");
        assert!(!bench.at("pod").exists());
        let reading = MountClaim {
            read_only: true,
            ..writable
        };
        bench.engine.mount_claim(reading).await.expect("published");
        let file = bench.at("pod").join("file");
        fs::write(&file, "no").expect_err("read-only");
        assert_eq!(fs::read_to_string(file).expect("read"), "text");
        // Another staging path has its own mode.
        let elsewhere = MountClaim {
            target: bench.at("elsewhere"),
            ..bench.stage_request(&claim)
        };
        fs::create_dir(&elsewhere.target).expect("the staging path");
        let staged = bench.engine.mount_claim(elsewhere.clone()).await;
        staged.expect("staged");
        fs::write(elsewhere.target.join("more"), "more").expect("writable");
        let id = claim.id.as_str();
        let unstaged = bench.engine.unmount_claim(id, &elsewhere.target, true);
        unstaged.await.expect("unstaged");
        bench.unpublish(&claim, "pod").await;
        bench.unmount(&claim).await;
        bench.finish().await;
    }
}

/// The record of a claim that is mounted is lost, and the driver restarts.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_not_published_while_its_mount_mode_is_unknown() {
    for ground in ALL {
        say(ground);
        let Some(mut bench) = Bench::new(ground).await else {
            return;
        };
        // All pools of this process are in one mount table, where a claim is called by its name.
        let claim = bench.create("torn").await;
        bench.write(&claim, "file", "text").await;
        bench.staged_read_only(&claim).await.expect("staged");
        let reading = |place: &str, bench: &Bench| MountClaim {
            read_only: true,
            ..bench.publish_request(&claim, place)
        };
        let one = reading("one", &bench);
        bench.engine.mount_claim(one.clone()).await.expect("first");
        let record = bench.config.pool.join("volumes").join(claim.id.as_str());
        let record = record.join("claim.json");
        fs::write(&record, "").expect("torn");
        for mounts in [2, 1] {
            // A fact that one start only observed is not a recorded fact for the next start.
            for _ in 0..2 {
                bench = bench.restart().await;
                let findings = bench.engine.check().await.expect("check");
                let kinds: Vec<&str> = findings.iter().map(|finding| finding.kind).collect();
                assert_eq!(kinds, ["unreadable-volume"]);
                let used = bench.engine.claim_use(claim.id.as_str()).await;
                let used = used.expect("there");
                assert_eq!(used.targets.len(), mounts);
                assert_eq!(used.problems.len(), 1, "{:?}", used.problems);
                let id = claim.id.as_str();
                let refused = [
                    bench
                        .engine
                        .mount_claim(bench.publish_request(&claim, "two"))
                        .await,
                    bench.engine.mount_claim(reading("two", &bench)).await,
                    bench.engine.mount_claim(one.clone()).await,
                    bench.stage(&claim).await,
                    bench.engine.create_snapshot("s", id).await.map(drop),
                    bench.engine.delete_claim(id).await,
                ];
                for refused in refused {
                    let how = match &refused {
                        Err(Error::ClaimInUse { how, .. }) => how.as_str(),
                        _ => "",
                    };
                    assert!(how.contains("unmount it"), "{refused:?}");
                }
                assert!(!bench.at("two").exists());
                assert_eq!(fs::read(&record).expect("there"), b"");
            }
            let (path, staging) = match mounts {
                2 => (bench.at("one"), false),
                _ => (bench.staging(&claim), true),
            };
            let unmounted = bench
                .engine
                .unmount_claim(claim.id.as_str(), &path, staging);
            unmounted.await.expect("unmounted");
        }
        bench.assert_sound().await;
        assert_eq!(bench.read(&claim, "file").await.expect("file"), "text");
        bench.write(&claim, "file", "more").await;
        bench.finish().await;
    }
}

fn last_used(bench: &Bench, claim: &PersistentVolume) -> Timestamp {
    let claim = bench.engine.claim(claim.id.as_str());
    claim.expect("there").last_used
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_outlives_drivers_and_boots() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let base = bench.create("base").await;
        bench.write(&base, "base", "base").await;
        let claim = bench.clone_of("claim", &base).await;
        let target = bench.mount(&claim).await;
        fs::write(target.join("one"), "one").expect("written");
        let bench = bench.restart().await;
        fs::write(target.join("two"), "two").expect("it is mounted still");
        bench.stage(&claim).await.expect("still staged");
        bench.assert_sound().await;
        assert_eq!(
            bench
                .engine
                .claim_use(claim.id.as_str())
                .await
                .expect("use")
                .targets
                .len(),
            2
        );
        rustix::fs::sync();
        let used = [&base, &claim].map(|claim| last_used(&bench, claim));
        let bench = bench.reboot().await;
        bench.assert_sound().await;
        // Its pod may have used it until the reboot.
        assert_eq!(last_used(&bench, &base), used[0]);
        assert!(last_used(&bench, &claim) > used[1]);
        assert!(
            bench
                .engine
                .claim_use(claim.id.as_str())
                .await
                .expect("use")
                .targets
                .is_empty()
        );
        for name in ["base", "one", "two"] {
            assert_eq!(bench.read(&claim, name).await.expect(name), name);
        }
        let snapshot = bench.snapshot("s", &claim).await;
        let bench = bench.reboot().await;
        let restored = bench.restore("restored", &snapshot).await;
        for name in ["base", "one", "two"] {
            assert_eq!(bench.read(&restored, name).await.expect(name), name);
            assert_eq!(bench.read(&claim, name).await.expect(name), name);
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overlay_of_a_claim_is_not_volatile_and_its_work_directories_do_not_pile_up() {
    for ground in ALL {
        if ground.0 != BackendKind::Overlay {
            continue;
        }
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let claim = bench.create("claim").await;
        for _ in 0..4 {
            let target = bench.mount(&claim).await;
            let table = fs::read_to_string("/proc/thread-self/mountinfo").expect("mountinfo");
            let line = table
                .lines()
                .find(|line| line.contains(target.to_str().expect("text")));
            let line = line.expect("it is mounted");
            assert!(
                !line.contains("volatile") && line.contains("nosuid,nodev"),
                "{line}"
            );
            bench.unmount(&claim).await;
        }
        let dir = format!("volumes/{}", claim.id);
        let work = bench
            .names_in(&dir)
            .iter()
            .filter(|name| name.starts_with("work."))
            .count();
        assert_eq!(work, 1);
        bench.finish().await;
    }
}

/// Owner, group and mode of a path.
fn owner(path: &Path) -> (u32, u32, u32) {
    let data = fs::metadata(path).expect("there");
    (data.uid(), data.gid(), data.mode() & 0o7777)
}

fn class(uid: Option<u32>, mode: Option<u32>) -> ClaimParameters {
    ClaimParameters {
        root: RootAttributes {
            uid,
            gid: uid,
            mode,
            mount_group: None,
        },
        ..ClaimParameters::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_has_the_mode_that_its_class_names_else_its_sources() {
    for ground in ALL {
        say(ground);
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let source = CreateClaim {
            parameters: class(None, Some(0o750)),
            ..request("source")
        };
        let source = bench.engine.create_claim(source).await.expect("made");
        bench.write(&source, "file", "text").await;
        let snapshot = bench.snapshot("s", &source).await;
        for (name, from) in [
            ("clone", ClaimSource::Claim(source.id.clone())),
            ("restored", ClaimSource::Snapshot(snapshot.id.clone())),
        ] {
            for (mode, expected) in [(Some(0o2770), 0o2770), (None, 0o750)] {
                let asked = CreateClaim {
                    parameters: class(None, mode),
                    source: Some(from.clone()),
                    ..request(&format!("{name} {mode:?}"))
                };
                let claim = bench.engine.create_claim(asked).await.expect("made");
                let target = bench.mount(&claim).await;
                assert_eq!(owner(&target).2, expected, "{name} {mode:?}");
                assert!(target.join("file").exists());
                let pods = std::os::unix::fs::PermissionsExt::from_mode(0o700);
                fs::set_permissions(&target, pods).expect("chmod");
                bench.unmount(&claim).await;
                let again = |path: &Path| owner(path).2;
                assert_eq!(bench.inside(&claim, again).await, 0o700);
            }
        }
        bench
            .inside(&source, |path| assert_eq!(owner(path).2, 0o750))
            .await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn owners_are_as_the_class_says_and_then_as_the_pods_say_whatever_is_snapshotted() {
    for ground in ALL {
        say(ground);
        if !maps_owners(ground.0, ground.1.name()) {
            too_old("clones with another owner");
            continue;
        }
        let Some(bench) = Bench::new(ground).await else {
            return;
        };
        let asked = CreateClaim {
            parameters: class(Some(1000), Some(0o750)),
            ..request("claim")
        };
        let claim = bench.engine.create_claim(asked).await.expect("made");
        bench
            .inside(&claim, |path| {
                assert_eq!(owner(path), (1000, 1000, 0o750));
                fs::write(path.join("file"), "").expect("written");
                chown(path.join("file"), Some(1000), Some(1000)).expect("chown");
                chown(path, Some(7), Some(7)).expect("given away");
                fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
                    .expect("chmod");
            })
            .await;
        let looks = |path: &Path| (owner(path), owner(&path.join("file")).0);
        let snapshot = bench.snapshot("s", &claim).await;
        assert_eq!(bench.inside(&claim, looks).await, ((7, 7, 0o700), 1000));

        // A clone of another class: its root's owner changes places with the class's.
        let source = Some(ClaimSource::Snapshot(snapshot.id.clone()));
        let asked = CreateClaim {
            parameters: class(Some(42), None),
            source: source.clone(),
            ..request("other class")
        };
        let other = bench.engine.create_claim(asked).await.expect("made");
        let swapped = bench
            .inside(&other, |path| {
                let seen = looks(path);
                chown(path.join("file"), Some(42), Some(42)).expect("chown");
                chown(path, Some(99), Some(99)).expect("given away");
                seen
            })
            .await;
        assert_eq!(swapped, ((42, 42, 0o700), 1000));
        // That stays so through a snapshot, and in clones of the clone.
        bench.snapshot("t", &other).await;
        assert_eq!(bench.inside(&other, looks).await, ((99, 99, 0o700), 42));
        let clone = bench.clone_of("clone of it", &other).await;
        assert_eq!(bench.inside(&clone, looks).await, ((99, 99, 0o700), 42));
        // On disk it was the root's owner.
        let plain = bench.restore("plain", &snapshot).await;
        assert_eq!(bench.inside(&plain, looks).await, ((7, 7, 0o700), 1000));

        // The pod's group gets the root, at each mount, and nothing below.
        let mut stage = bench.stage_request(&plain);
        stage.mount_group = Some(77);
        let staged = again(|| bench.engine.mount_claim(stage.clone()));
        staged.await.expect("staged");
        assert_eq!(owner(&bench.staging(&plain)), (7, 77, 0o2770));
        bench.unmount(&plain).await;
        if ground.0 != COPY.0 {
            bench.engine.reap().await.expect("reap");
        }
        bench.finish().await;
    }
}
