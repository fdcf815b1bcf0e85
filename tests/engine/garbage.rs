//! Expiry, destroy, eviction by watermarks, flattening: what is removed and what stays.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baggageclaim::engine::Error;
use baggageclaim::model::{Outcome, Reference};
use baggageclaim::sys::Dir;

use crate::common::bench::{Bench, Ground, eventually, names};
use crate::common::{Fs, Snapshot, assert_same, in_a_guest, require_bench, require_lab};

const MIB: usize = 1 << 20;

fn layers_on_disk(bench: &Bench) -> usize {
    names(&bench.pool().join("layers")).len()
}

async fn destroy(bench: &Bench, name: &str) -> Result<(), Error> {
    let reference: Reference = name.parse().expect("reference");
    bench
        .engine
        .destroy(&"ci".parse().expect("tenant"), &reference)
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_past_its_time_goes_unless_somebody_uses_it() {
    let bench = require_bench!();
    // It is to be found before its time is over.
    let ttl = if in_a_guest() { "20s" } else { "1s" };
    for (volume, attributes) in [
        (
            "short",
            &[("type", "output"), ("name", "short"), ("ttl", ttl)][..],
        ),
        (
            "used",
            &[("type", "task-cache"), ("key", "used"), ("ttl", ttl)],
        ),
        (
            "long",
            &[("type", "output"), ("name", "long"), ("ttl", "1h")],
        ),
        ("ever", &[("type", "task-cache"), ("key", "ever")]),
    ] {
        bench
            .step(volume, attributes, |at| {
                fs::write(at.join("f"), volume).expect("write");
            })
            .await;
    }
    let used = [("type", "input"), ("from", "task-cache/used")];
    let (at, _) = bench.publish("pod", "v", &used).await;
    while bench.artifact("artifact/short").is_some() {
        bench.engine.reap().await.expect("reap");
    }
    let row = bench.artifact("task-cache/used").expect("it is used");
    while row.expires.expect("a ttl") > bench.engine.time() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    bench.engine.reap().await.expect("reap");
    assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "used");
    assert!(bench.artifact("task-cache/used").is_some());
    bench.unpublish("v").await;
    bench.quiet().await;
    bench.engine.reap().await.expect("reap");
    assert!(bench.artifact("task-cache/used").is_none());
    assert!(
        bench.artifact("artifact/long").is_some() && bench.artifact("task-cache/ever").is_some()
    );
    assert_eq!(layers_on_disk(&bench), 2);
    bench.finish().await;
}

/// The clock of a machine that has just booted may be wrong.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_expires_until_the_time_is_known() {
    let bench = require_bench!(|config| config.clock_settles = Duration::MAX);
    let output = [("type", "output"), ("name", "o"), ("ttl", "1s")];
    bench.step("maker", &output, |_| {}).await;
    let row = bench.artifact("artifact/o").expect("sealed");
    let expires = row.expires.expect("a ttl");
    while expires > bench.engine.time() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(bench.engine.reap().await.expect("reap").expired, 0);
    assert!(bench.artifact("artifact/o").is_some());
    bench.engine.set_time(expires);
    bench.engine.reap().await.expect("reap");
    assert!(bench.artifact("artifact/o").is_none());
    bench.finish().await;
}

/// By the end of the fork, not by the next look at the clock: that is an hour away.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_past_its_time_goes_when_its_last_fork_does() {
    let bench = require_bench!();
    let ttl = if in_a_guest() { "20s" } else { "1s" };
    let output = [("type", "output"), ("name", "o"), ("ttl", ttl)];
    bench.step("maker", &output, |_| {}).await;
    let input = [("type", "input"), ("from", "artifact/o")];
    bench.publish("user", "fork", &input).await;
    let row = bench.artifact("artifact/o").expect("sealed");
    while row.expires.expect("a ttl") > bench.engine.time() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bench.engine.reap().await.expect("reap");
    assert!(bench.artifact("artifact/o").is_some(), "it is in use");
    bench.unpublish("fork").await;
    eventually("it goes", || bench.artifact("artifact/o").is_none()).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_cache_was_last_used_is_known_after_a_restart() {
    let bench = require_bench!();
    let task = [("type", "task-cache"), ("key", "k")];
    bench
        .step("v1", &task, |at| {
            fs::write(at.join("f"), "x").expect("write");
        })
        .await;
    bench.engine.reap().await.expect("reap");
    let before = bench.artifact("task-cache/k").expect("sealed").last_used;
    assert!(bench.look("v2", &task, "f").await.is_some());
    let used = bench.artifact("task-cache/k").expect("sealed").last_used;
    assert!(used > before);
    let bench = bench.restart().await;
    assert_eq!(
        bench.artifact("task-cache/k").expect("sealed").last_used,
        used
    );
    bench.finish().await;
}

/// No caller asks for a round here, and no timer does.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_volume_was_the_last_to_need_goes_with_it() {
    let bench = require_bench!(|config| config.reap_interval = Duration::from_secs(3600));
    let task = [("type", "task-cache"), ("key", "k")];
    let write = |text: &'static str| move |at: &Path| fs::write(at.join("f"), text).expect("write");
    bench.step("first", &task, write("old")).await;
    let read = [("type", "input"), ("from", "task-cache/k")];
    let (at, _) = bench.publish("reader", "v", &read).await;
    // It has its name no more, and its reader is the last that needs what only it has.
    destroy(&bench, "task-cache/k").await.expect("destroyed");
    bench.step("second", &task, write("new")).await;
    bench.engine.reap().await.expect("reap");
    assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "old");
    assert_eq!(layers_on_disk(&bench), 2);
    bench.unpublish("v").await;
    eventually("the old content goes", || layers_on_disk(&bench) == 1).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn destroy_takes_a_name_at_once_and_content_when_nobody_uses_it() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        let output = [("type", "output"), ("name", "o")];
        let task = [("type", "task-cache"), ("key", "k")];
        let resource = [("type", "resource-cache"), ("key", "k")];
        for (volume, attributes) in [("o", &output[..]), ("t", &task), ("r", &resource)] {
            bench
                .step(volume, attributes, |at| {
                    fs::write(at.join("f"), volume).expect("write");
                })
                .await;
        }
        let error = destroy(&bench, "artifact/none").await.expect_err("none");
        assert!(matches!(error, Error::NoSuchName(_)), "{error}");

        // An output that is an input somewhere stays.
        let input = [("type", "input"), ("from", "artifact/o")];
        let (at, _) = bench.publish("pod", "in", &input).await;
        let error = destroy(&bench, "artifact/o").await.expect_err("used");
        assert!(matches!(&error, Error::InUse { volumes: 1, .. }), "{error}");
        assert!(bench.artifact("artifact/o").is_some());
        bench.unpublish("in").await;
        bench.quiet().await;
        destroy(&bench, "artifact/o")
            .await
            .expect("not used any more");
        assert!(!at.exists() && bench.artifact("artifact/o").is_none());

        // A cache loses its name now; its forks keep what they have, and may commit again.
        let (at, _) = bench.publish("pod", "fork", &task).await;
        destroy(&bench, "task-cache/k")
            .await
            .expect("a cache may be cleared at any time");
        bench.engine.reap().await.expect("reap");
        let other = bench.publish("other", "empty", &task).await.1;
        assert_eq!(
            other.parent,
            None,
            "{}: it is gone for who comes now",
            ground.name()
        );
        bench.unpublish("empty").await;
        bench.outcome("other", Outcome::Failed).await;
        assert_eq!(fs::read_to_string(at.join("f")).expect("read"), "t");
        fs::write(at.join("g"), "more").expect("write");
        bench.outcome("pod", Outcome::Succeeded).await;
        bench.unpublish("fork").await;
        bench.quiet().await;
        bench.engine.reap().await.expect("reap");
        assert_eq!(bench.look("v1", &task, "f").await.as_deref(), Some("t"));
        assert_eq!(bench.look("v2", &task, "g").await.as_deref(), Some("more"));

        destroy(&bench, "resource-cache/k")
            .await
            .expect("destroyed");
        let bench = bench.restart().await;
        bench.quiet().await;
        let left: Vec<_> = bench.engine.artifacts(None);
        assert_eq!(
            left.iter().filter(|row| row.name.is_some()).count(),
            1,
            "{left:?}"
        );
        destroy(&bench, "task-cache/k").await.expect("destroyed");
        bench.engine.reap().await.expect("reap");
        assert_eq!(
            (bench.engine.artifacts(None).len(), layers_on_disk(&bench)),
            (0, 0)
        );
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn above_the_high_watermark_the_least_recently_used_go_and_nothing_in_use() {
    for fs in [Fs::Ext4, Fs::Tmpfs] {
        let lab = require_lab!(fs, 96 << 20);
        let bench = Bench::with(lab, |config| {
            config.high_watermark = 60;
            config.low_watermark = 30;
        })
        .await;
        let cache = |key: &'static str| [("type", "task-cache"), ("key", key)];
        let fill = |at: &Path| std::fs::write(at.join("f"), vec![b'x'; 8 * MIB]).expect("write");
        for key in ["a", "b", "c", "d", "e"] {
            bench.step(key, &cache(key), fill).await;
        }
        bench.engine.reap().await.expect("reap");
        assert_eq!(
            bench.engine.artifacts(None).len(),
            5,
            "{}: below the mark",
            fs.name()
        );
        // What can be evicted counts as room.
        let evictable = async || {
            let free = bench.engine.status().await.expect("status").available_bytes;
            let room = bench.engine.capacity().await.expect("capacity").available;
            room.saturating_sub(free) / MIB as u64
        };
        let all = evictable().await;
        assert!((39..=42).contains(&all), "{}: {all} MiB", fs.name());
        // "a" is in use, "b" was used last of all.
        let (at, _) = bench
            .publish(
                "pod",
                "use-a",
                &[("type", "input"), ("from", "task-cache/a")],
            )
            .await;
        assert!(bench.look("use-b", &cache("b"), "f").await.is_some());
        let rest = evictable().await;
        assert!((31..=34).contains(&rest), "{}: {rest} MiB", fs.name());
        let (scratch, _) = bench.publish("pod", "scratch", &[]).await;
        std::fs::write(scratch.join("f"), vec![b'x'; 22 * MIB]).expect("write");
        bench.engine.reap().await.expect("reap");
        let left: Vec<String> = ["a", "b", "c", "d", "e"]
            .into_iter()
            .filter(|key| bench.artifact(&format!("task-cache/{key}")).is_some())
            .map(str::to_owned)
            .collect();
        // By this round, or by one that the engine began itself.
        let evicted = 5 - left.len();
        assert!(evicted >= 3, "{}: {left:?}", fs.name());
        assert!(left.contains(&"a".to_owned()), "it is in use: {left:?}");
        let oldest_first = ["c", "d", "e", "b"];
        let gone = oldest_first
            .iter()
            .take_while(|key| !left.contains(&(**key).to_owned()));
        assert_eq!(
            gone.count(),
            evicted,
            "in order of their last use: {left:?}"
        );
        assert_eq!(
            std::fs::metadata(at.join("f")).expect("still there").len(),
            8 * MIB as u64
        );
        // With all of it in use nothing goes.
        std::fs::write(scratch.join("g"), vec![b'x'; 24 * MIB]).expect("write");
        let reaped = bench.engine.reap().await.expect("reap");
        assert!(bench.artifact("task-cache/a").is_some(), "{reaped:?}");
        for volume in ["use-a", "scratch"] {
            bench.unpublish(volume).await;
        }
        bench.finish().await;
    }
}

/// The files are empty: all of them together take few blocks.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_short_of_inodes_loses_as_many_caches_as_hold_them() {
    // Of about 3000.
    let lab = require_lab!(Fs::Ext4FewInodes, 64 << 20);
    let bench = Bench::with(lab, |config| {
        config.high_watermark = 60;
        config.low_watermark = 30;
    })
    .await;
    let fill = |at: &Path, files: usize| {
        let directory = Dir::open(at).expect("open");
        for number in 0..files {
            let made = directory.write_new(number.to_string(), b"");
            made.expect("an inode is left");
        }
    };
    let names = ["a", "b", "c", "d", "e"];
    for name in names {
        let cache = [("type", "task-cache"), ("key", name)];
        bench.step(name, &cache, |at| fill(at, 300)).await;
    }
    let left = || {
        let is_there = |name: &&str| bench.artifact(&format!("task-cache/{name}")).is_some();
        names.into_iter().filter(is_there).collect::<Vec<_>>()
    };
    bench.engine.reap().await.expect("reap");
    assert_eq!(left(), names, "below the mark");
    let (scratch, _) = bench.publish("pod", "scratch", &[]).await;
    fill(&scratch, 400);
    bench.engine.reap().await.expect("reap");
    assert_eq!(left(), ["e"]);
    bench.unpublish("scratch").await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_finds_no_room_has_caches_evicted() {
    let lab = require_lab!(Fs::Ext4, 48 << 20);
    // Never by watermark: only because a call said so.
    let bench = Bench::with(lab, |config| {
        config.reserve = 4 << 20;
        config.high_watermark = 100;
        config.low_watermark = 20;
    })
    .await;
    let cache = [("type", "task-cache"), ("key", "k")];
    bench
        .step("v1", &cache, |at| {
            fs::write(at.join("f"), vec![1; 16 * MIB]).expect("write");
        })
        .await;
    bench.engine.reap().await.expect("reap");
    let (scratch, _) = bench.publish("pod", "scratch", &[]).await;
    fill_up(&scratch.join("f"));
    bench.engine.reap().await.expect("reap");
    assert!(
        bench.artifact("task-cache/k").is_some(),
        "no volume needed room yet"
    );
    let mut made = 0;
    // None is refused: who finds no room makes some.
    while bench.artifact("task-cache/k").is_some() {
        bench.publish("pod", &format!("w{made}"), &[]).await;
        made += 1;
    }
    for volume in (0..made)
        .map(|n| format!("w{n}"))
        .chain(["scratch".to_owned()])
    {
        bench.unpublish(&volume).await;
    }
    bench.finish().await;
}

fn fill_up(path: &Path) {
    use std::io::Write as _;
    let mut file = fs::File::create(path).expect("create");
    let mut size = MIB;
    while size >= 512 {
        if file.write_all(&vec![b'x'; size]).is_err() {
            size /= 2;
        }
    }
}

/// One commit of the model test: changes a few names, in a way that needs whiteouts and opaque
/// directories.
fn change(at: &Path, round: usize, model: &mut BTreeMap<String, String>) {
    let dir = format!("d{}", round % 7);
    if round.is_multiple_of(13) && at.join(&dir).exists() {
        #[expect(
            clippy::disallowed_methods,
            reason = "plays a pod, which deletes what is its own"
        )]
        fs::remove_dir_all(at.join(&dir)).expect("remove");
        model.retain(|name, _| !name.starts_with(&format!("{dir}/")));
    }
    fs::create_dir_all(at.join(&dir)).expect("mkdir");
    let mut put = |name: String| {
        let text = format!("round {round}");
        fs::write(at.join(&name), &text).expect("write");
        model.insert(name, text);
    };
    put(format!("{dir}/f{}", round % 11));
    put(format!("{dir}/only-{round}"));
    put("every".to_owned());
    if round % 3 == 2 {
        let gone = format!("d{}/only-{}", (round - 2) % 7, round - 2);
        if model.remove(&gone).is_some() {
            fs::remove_file(at.join(&gone)).expect("remove");
        }
    }
}

fn assert_is(at: &Path, model: &BTreeMap<String, String>) {
    let snapshot = Snapshot::of(at);
    let files: BTreeMap<String, String> = snapshot
        .entries
        .iter()
        .filter(|(_, entry)| entry.kind == 'f')
        .map(|(path, _)| {
            let name = String::from_utf8(path.clone()).expect("text");
            let text = fs::read_to_string(at.join(&name)).expect("read");
            (name, text)
        })
        .collect();
    assert_eq!(&files, model);
    assert!(
        snapshot
            .entries
            .values()
            .all(|entry| matches!(entry.kind, 'f' | 'd'))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_commits_are_flattened_and_the_content_is_that_of_the_model() {
    let bench = require_bench!(on Ground::ALL[0]);
    let task = [("type", "task-cache"), ("key", "k")];
    let mut model = BTreeMap::new();
    let mut mounted: Vec<(String, BTreeMap<String, String>, Snapshot)> = Vec::new();
    let (mut longest, mut most_on_disk) = (0, 0);
    for round in 0..100 {
        let volume = format!("v{round}");
        let (at, published) = bench.publish(&volume, &volume, &task).await;
        assert_is(&at, &model);
        longest = longest.max(published.layers);
        change(&at, round, &mut model);
        bench.outcome(&volume, Outcome::Succeeded).await;
        bench.unpublish(&volume).await;
        bench.quiet().await;
        if round % 10 == 5 {
            // Stays mounted while what it is a fork of is merged below it.
            let volume = format!("fork-{round}");
            let input = [("type", "input"), ("from", "task-cache/k")];
            let (at, _) = bench.publish("user", &volume, &input).await;
            mounted.push((volume, model.clone(), Snapshot::of(&at)));
        }
        bench.engine.reap().await.expect("reap");
        most_on_disk = most_on_disk.max(layers_on_disk(&bench));
    }
    assert!((2..=17).contains(&longest), "{longest} layers");
    let artifact = bench.artifact("task-cache/k").expect("there");
    assert!(artifact.layers <= 16, "{}", artifact.layers);
    for (volume, model, snapshot) in mounted {
        assert_is(&bench.target(&volume), &model);
        assert_same(&snapshot, &Snapshot::of(&bench.target(&volume)));
        bench.unpublish(&volume).await;
    }
    bench.quiet().await;
    bench.engine.reap().await.expect("reap");
    let artifact = bench.artifact("task-cache/k").expect("there");
    assert_eq!(
        layers_on_disk(&bench),
        artifact.layers,
        "the old layers are gone"
    );
    let bench = bench.restart().await;
    let (at, _) = bench.publish("last", "last", &task).await;
    assert_is(&at, &model);
    bench.unpublish("last").await;
    bench.outcome("last", Outcome::Failed).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_engine_on_the_same_pool_is_refused() {
    let bench = Bench::new(require_lab!(Fs::Ext4)).await;
    let error = baggageclaim::engine::Engine::open(bench.config.clone())
        .await
        .expect_err("owned");
    assert!(
        matches!(&error, Error::PoolInUse { .. })
            && error.to_string().contains("in use by another process"),
        "{error}"
    );
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_goes_on_filling_a_volume_that_is_to_go_holds_nobody_else_up() {
    let bench = require_bench!();
    let (at, _) = bench.publish("pod", "v", &[("type", "scratch")]).await;
    let held = std::sync::Arc::new(Dir::open(&at).expect("open"));
    let done = std::sync::Arc::new(AtomicBool::new(false));
    let makers: Vec<_> = (0..2)
        .map(|maker| {
            let (held, done) = (held.clone(), done.clone());
            std::thread::spawn(move || {
                for number in 0_u64.. {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    let _ = held.write_new(format!("{maker}-{number}"), b"");
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    bench.engine.unpublish("v", &at).await.expect("unpublish");
    let reaped = tokio::time::timeout(Duration::from_secs(40), bench.engine.reap()).await;
    let closed = tokio::time::timeout(Duration::from_secs(15), bench.engine.shutdown()).await;
    done.store(true, Ordering::Relaxed);
    for maker in makers {
        maker.join().expect("a maker");
    }
    reaped.expect("others have their turn").expect("reap");
    closed.expect("the engine ends");
}

/// A reader of lost content gets the error. A publish that waits for room does not.
#[tokio::test]
async fn a_layer_that_lost_its_content_before_it_was_measured_stops_no_round() {
    let bench = require_bench!();
    let layers = bench.pool().join("layers");
    // Now and then the collector is faster.
    for attempt in 0.. {
        let name = format!("o{attempt}");
        let before = names(&layers);
        let output = [("type", "output"), ("name", &name)];
        bench.step(&name, &output, |_| ()).await;
        let mut now = names(&layers);
        now.retain(|layer| !before.contains(layer));
        let content = layers.join(&now[0]).join("fs");
        fs::remove_dir(&content).expect("it is empty");
        bench.engine.reap().await.expect("reap");
        let row = bench.artifact(&format!("artifact/{name}"));
        let measured = row.expect("it is there").usage.is_some();
        fs::create_dir(&content).expect("it does not exist");
        if !measured {
            break;
        }
    }
    bench.finish().await;
}

/// A publish of lost content says which it is and what to do. Destroyed, it can be made again.
#[tokio::test]
async fn what_lost_its_content_is_named_to_its_readers() {
    let output = [("type", "output"), ("name", "o")];
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        bench.step("made", &output, |_| ()).await;
        let layers = bench.pool().join("layers");
        let layer = names(&layers).remove(0);
        let aside = bench.lab.path().join("aside");
        fs::rename(layers.join(&layer), aside).expect("it is there");
        let input = [("type", "input"), ("from", "artifact/o")];
        let error = bench.try_publish("pod", "in", &input).await;
        let error = error.expect_err("it is lost");
        assert!(
            matches!(&error, Error::LostContent { layer: lost, .. } if lost.to_string() == layer),
            "{error}"
        );
        destroy(&bench, "artifact/o").await.expect("destroyed");
        bench.step("again", &output, |_| ()).await;
        bench.publish("pod", "in", &input).await;
        bench.unpublish("in").await;
        bench.finish().await;
    }
}
