//! The events for a pod about its volumes: each end once, in order.

use std::fs;
use std::path::Path;
use std::time::Duration;

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::notice::{Forked, NotCommitted, Notice, What};
use baggageclaim::engine::{Notices, VolumeRow, VolumeState};
use baggageclaim::model::{NodeId, Outcome};
use baggageclaim::sys::Dir;
use tokio::sync::mpsc::Receiver;

use crate::common::bench::{Bench, Ground, eventually, names, soon, waits};
use crate::common::{Fs, require_bench};

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o")];

async fn next(heard: &mut Receiver<Notice>) -> (String, What) {
    let notice = soon("a notice", heard.recv())
        .await
        .expect("the engine lives");
    assert_eq!(notice.tenant.to_string(), "ci");
    assert_eq!(notice.pod.uid.as_str(), notice.pod.name);
    (notice.pod.name, notice.what)
}

fn not_committed(reference: &str, why: NotCommitted) -> What {
    let reference = reference.parse().expect("a reference");
    What::NotCommitted { reference, why }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_end_of_a_volume_is_told_with_its_reason() {
    let (notices, mut heard) = Notices::channel(64);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.outcome_wait = Duration::from_millis(30);
    });
    let committed = |reference: &str| What::Committed {
        reference: reference.parse().expect("a reference"),
    };

    bench.step("one", OUTPUT, |_| ()).await;
    let told = next(&mut heard).await;
    assert_eq!(told, ("pod-one".to_owned(), committed("artifact/o")));

    bench.publish("fails", "two", OUTPUT).await;
    bench.outcome("fails", Outcome::Failed).await;
    bench.unpublish("two").await;
    let failed = not_committed("artifact/o", NotCommitted::PodFailed);
    assert_eq!(next(&mut heard).await, ("fails".to_owned(), failed));

    bench.publish("silent", "three", OUTPUT).await;
    bench.unpublish("three").await;
    let waited = Duration::from_millis(30);
    let unknown = not_committed("artifact/o", NotCommitted::OutcomeUnknown { waited });
    assert_eq!(next(&mut heard).await, ("silent".to_owned(), unknown));

    let marked = [OUTPUT, &[("commit", "on-marker")]].concat();
    bench.publish("unmarked", "four", &marked).await;
    bench.unpublish("four").await;
    let unmarked = not_committed("artifact/o", NotCommitted::NoMarker);
    assert_eq!(next(&mut heard).await, ("unmarked".to_owned(), unmarked));

    // Two that fetch the same: the first one's content keeps the name.
    let cache = &[("type", "resource-cache"), ("key", "k")];
    for pod in ["first", "second"] {
        bench.publish(pod, pod, cache).await;
        bench.outcome(pod, Outcome::Succeeded).await;
    }
    bench.unpublish("first").await;
    let told = next(&mut heard).await;
    assert_eq!(told, ("first".to_owned(), committed("resource-cache/k")));
    bench.unpublish("second").await;
    let taken = not_committed("resource-cache/k", NotCommitted::NameTaken);
    assert_eq!(next(&mut heard).await, ("second".to_owned(), taken));

    // Nothing is said of what was never meant to be kept.
    bench.publish("scratch", "five", &[]).await;
    bench.unpublish("five").await;
    bench.finish().await;
    assert!(heard.try_recv().is_err(), "something more was said");
}

/// The step did not ask for a commit, so what would have refused it does not matter.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_marker_is_told_before_a_reason_to_refuse_the_content() {
    let (notices, mut heard) = Notices::channel(64);
    let btrfs = Ground(BackendKind::Btrfs, Fs::Btrfs);
    let bench = require_bench!(on btrfs, |config| config.notices = Some(notices));
    for (pod, has_marker) in [("unmarked", false), ("marked", true)] {
        let marked = [OUTPUT, &[("commit", "on-marker")]].concat();
        let (at, _) = bench.publish(pod, pod, &marked).await;
        let volume = Dir::open(&at).expect("open");
        volume.create_subvolume("nested").expect("a pod may");
        if has_marker {
            fs::write(at.join(".baggageclaim-commit"), "").expect("write");
        }
        drop(volume);
        bench.unpublish(pod).await;
        let (_, told) = next(&mut heard).await;
        let is_unmarked = told == not_committed("artifact/o", NotCommitted::NoMarker);
        assert_eq!(is_unmarked, !has_marker, "{told:?}");
    }
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_held_open_says_so_once_and_one_that_is_thrown_away_does_not() {
    let (notices, mut heard) = Notices::channel(64);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.held_wait = Duration::from_millis(30);
    });
    let (kept, _) = bench.publish("maker", "out", OUTPUT).await;
    let input = &[("type", "task-cache"), ("key", "k"), ("commit", "never")];
    let (thrown, _) = bench.publish("other", "in", input).await;
    let held = [kept, thrown].map(|at| fs::File::create(at.join("f")).expect("create"));
    bench.unpublish("in").await;
    bench.unpublish("out").await;
    bench.outcome("maker", Outcome::Succeeded).await;
    let reference = "artifact/o".parse().expect("a reference");
    let told = next(&mut heard).await;
    assert_eq!(told, ("maker".to_owned(), What::HeldOpen { reference }));
    drop(held);
    let ends = [next(&mut heard).await.1];
    assert!(matches!(ends, [What::Committed { .. }]), "{ends:?}");
    bench.finish().await;
    assert!(heard.try_recv().is_err(), "something more was said");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outcome_is_awaited_for_as_long_in_all_however_often_the_driver_restarts() {
    let (notices, mut heard) = Notices::channel(64);
    // What is noted counts from when the machine was started, which may be just now.
    let uptime = fs::read_to_string("/proc/uptime").expect("Linux tells");
    let uptime: u64 = uptime
        .split('.')
        .next()
        .and_then(|seconds| seconds.parse().ok())
        .expect("seconds");
    let seconds = uptime.min(100);
    let waited = Duration::from_secs(seconds);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.outcome_wait = waited;
    });
    let awaits = async |bench: &Bench| {
        let awaits = |row: VolumeRow| row.state == VolumeState::AwaitingOutcome;
        eventually("it waits", || bench.row("v").is_some_and(awaits)).await;
    };
    bench.publish("silent", "v", OUTPUT).await;
    bench.unpublish("v").await;
    awaits(&bench).await;
    let bench = bench.restart().await;
    awaits(&bench).await;
    // As if that had begun so much earlier.
    let bench = bench
        .restart_after(|pool| {
            let mut pending = fs::read_dir(pool.join("pending")).expect("a directory");
            let noted = pending.next().expect("it waits").expect("an entry").path();
            let noted = noted.join("awaited");
            let since = fs::read_to_string(&noted).expect("it is noted");
            let since: u64 = since.trim().parse().expect("seconds");
            let earlier = since.checked_sub(seconds).expect("after the start");
            fs::write(&noted, format!("{earlier}\n")).expect("write");
        })
        .await;
    let unknown = not_committed("artifact/o", NotCommitted::OutcomeUnknown { waited });
    assert_eq!(next(&mut heard).await, ("silent".to_owned(), unknown));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_reboot_took_is_told_once() {
    let (notices, mut heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    bench.step("sealed", OUTPUT, |_| ()).await;
    assert!(matches!(next(&mut heard).await.1, What::Committed { .. }));
    let (runs, _) = bench.publish("runs", "v1", OUTPUT).await;
    let (scratch, _) = bench.publish("scratch", "v2", &[]).await;
    bench.publish("waits", "v3", OUTPUT).await;
    bench.unpublish("v3").await;

    let reboot = |pool: &Path| {
        for target in [&runs, &scratch] {
            let flags = rustix::mount::UnmountFlags::DETACH;
            rustix::mount::unmount(target, flags).expect("it is mounted");
        }
        for volume in ["volumes/v1", "volumes/v2"]
            .map(|volume| pool.join(volume))
            .into_iter()
            .chain(
                names(&pool.join("pending"))
                    .iter()
                    .map(|name| pool.join("pending").join(name)),
            )
        {
            let file = volume.join("volume.json");
            let text = fs::read(&file).expect("it has a record");
            let mut record: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
            record["boot"] = "another-boot".into();
            fs::write(&file, record.to_string()).expect("write");
        }
    };
    let bench = bench.restart_after(reboot).await;
    let rebooted = || not_committed("artifact/o", NotCommitted::Rebooted);
    let mut told = [next(&mut heard).await, next(&mut heard).await];
    told.sort_by(|(one, _), (other, _)| one.cmp(other));
    let expected = ["runs", "waits"].map(|pod| (pod.to_owned(), rebooted()));
    assert_eq!(told, expected);
    let bench = bench.restart().await;
    bench.quiet().await;
    bench.finish().await;
    assert!(heard.try_recv().is_err(), "something more was said");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_waits_says_for_what_and_once() {
    let (notices, mut heard) = Notices::channel(64);
    let bench = require_bench!(|config| config.notices = Some(notices));
    let (target, _) = bench.publish("maker", "out", OUTPUT).await;
    fs::write(target.join("f"), "made").expect("write");
    let input = &[("type", "input"), ("from", "artifact/o")];
    let mut coming = Box::pin(bench.try_publish("user", "in", input));
    assert!(waits(&mut coming).await);
    bench.unpublish("out").await;
    assert!(waits(&mut coming).await, "its outcome is not known");
    let waiting = What::WaitingForInput {
        reference: "artifact/o".parse().expect("a reference"),
        state: "pod maker is still making it".to_owned(),
        at_most: Duration::from_secs(3600),
    };
    assert_eq!(next(&mut heard).await, ("user".to_owned(), waiting));
    bench.outcome("maker", Outcome::Succeeded).await;
    soon("the input", &mut coming).await.expect("published");
    drop(coming);
    let told = [next(&mut heard).await, next(&mut heard).await];
    let hits = told
        .iter()
        .filter(|(pod, what)| pod == "user" && what.gives_way());
    let commits = told
        .iter()
        .filter(|(_, what)| matches!(what, What::Committed { .. }));
    assert_eq!((hits.count(), commits.count()), (1, 1), "{told:?}");
    bench.unpublish("in").await;
    bench.finish().await;
    assert!(heard.try_recv().is_err(), "something more was said");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hit_says_what_the_volume_started_from_and_once() {
    let (notices, mut heard) = Notices::channel(64);
    let bench = require_bench!(|config| {
        config.notices = Some(notices);
        config.node = NodeId::new("here").ok();
    });
    let cache = |key| {
        [
            ("type", "task-cache"),
            ("key", key),
            ("restoreKeys", "main"),
        ]
    };
    let main = "task-cache/main".parse().expect("a reference");
    bench
        .step("makes", &cache("main"), |at| {
            fs::write(at.join("f"), vec![7; 1 << 20]).expect("write");
        })
        .await;
    let committed = next(&mut heard).await.1;
    assert!(
        matches!(committed, What::Committed { .. }),
        "an empty start is no hit"
    );
    // This measures it.
    bench.engine.reap().await.expect("reap");
    let row = bench.artifact("task-cache/main").expect("it is there");

    let started = bench.publish("user", "v1", &cache("main")).await.1;
    assert!(!started.already);
    let (pod, What::Forked(hit)) = next(&mut heard).await else {
        panic!("a hit is told");
    };
    let expected = Forked {
        reference: main,
        instead_of: None,
        bytes: row.usage.map(|usage| usage.bytes),
        age: hit.age,
        made_on: Some("this node".to_owned()),
        fetched_from: None,
    };
    assert_eq!((pod.as_str(), &hit), ("user", &expected));
    assert!(hit.bytes.is_some_and(|bytes| bytes >= 1 << 20), "{hit:?}");
    assert!(hit.age < Duration::from_secs(600), "{hit:?}");
    let again = bench.publish("user", "v1", &cache("main")).await.1;
    assert!(again.already);

    bench.publish("branch", "v2", &cache("pr-7")).await;
    let expected = Forked {
        instead_of: Some("task-cache/pr-7".parse().expect("a reference")),
        ..expected
    };
    let (pod, What::Forked(hit)) = next(&mut heard).await else {
        panic!("a hit is told");
    };
    let age = hit.age;
    assert_eq!(
        (pod, hit),
        ("branch".to_owned(), Forked { age, ..expected })
    );
    for (pod, volume) in [("user", "v1"), ("branch", "v2")] {
        bench.outcome(pod, Outcome::Failed).await;
        bench.unpublish(volume).await;
        let ended = next(&mut heard).await.1;
        assert!(matches!(ended, What::NotCommitted { .. }), "{ended:?}");
    }
    bench.finish().await;
    assert!(heard.try_recv().is_err(), "something more was said");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_does_not_hold_is_told() {
    let (notices, mut heard) = Notices::channel(64);
    // No quotas there.
    let ground = Ground(BackendKind::Copy, Fs::Tmpfs);
    let bench = require_bench!(on ground, |config| config.notices = Some(notices));
    let (_, published) = bench.publish("limited", "v", &[("sizeLimit", "1Gi")]).await;
    let why = published.limit_unenforced.expect("it is not enforced");
    let told = next(&mut heard).await;
    let limit = What::SizeLimitNotEnforced { why };
    assert_eq!(told, ("limited".to_owned(), limit));
    bench.unpublish("v").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_pods_whose_outcome_decides_are_awaited_and_only_until_it_is_told() {
    let bench = require_bench!();
    let awaited = || {
        let mut names: Vec<String> = (bench.engine.awaited_outcomes().into_iter())
            .map(|awaited| {
                let left = if awaited.unpublished { " left" } else { "" };
                format!("{}/{}{left}", awaited.tenant, awaited.pod.name)
            })
            .collect();
        names.sort();
        names
    };
    bench.publish("scratch", "v1", &[]).await;
    let always = [OUTPUT, &[("commit", "always")]].concat();
    bench.publish("always", "v2", &always).await;
    bench.publish("live", "v3", OUTPUT).await;
    bench
        .publish("live", "v4", &[("type", "output"), ("name", "o2")])
        .await;
    bench
        .publish("left", "v5", &[("type", "output"), ("name", "o3")])
        .await;
    bench.unpublish("v5").await;
    assert_eq!(awaited(), ["ci/left left", "ci/live"]);
    bench.outcome("left", Outcome::Succeeded).await;
    assert_eq!(awaited(), ["ci/live"]);
    bench.unpublish("v4").await;
    assert_eq!(awaited(), ["ci/live left"], "one of its volumes did");
    bench.outcome("live", Outcome::Failed).await;
    assert_eq!(awaited(), [""; 0]);
    for volume in ["v1", "v2", "v3"] {
        bench.unpublish(volume).await;
    }
    bench.finish().await;
}
