//! The end of volumes after an error: callers that hang up, pods that vanish, readers that stay,
//! wrong clocks, a lost index. Each of these was once a defect.

use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;

use baggageclaim::engine::Engine;
use baggageclaim::model::{Outcome, Timestamp};
use baggageclaim::store::{Change, Index};
use baggageclaim::sys::Dir;

use crate::common::bench::{eventually, names};
use crate::common::require_bench;

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "a"), ("commit", "always")];
const INPUT: &[(&str, &str)] = &[("type", "input"), ("from", "artifact/a")];

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_hangs_up_loses_nothing() {
    let bench = require_bench!();
    let mut attempts = 0..10;
    let (target, artifact) = loop {
        let attempt = attempts.next().expect("one of them is cut short");
        let (volume, name) = (format!("v{attempt}"), format!("a{attempt}"));
        let output = [("type", "output"), ("name", &name), ("commit", "always")];
        let (target, _) = bench.publish("p", &volume, &output).await;
        fs::write(target.join("f"), "x").expect("write");
        let unpublish = bench.engine.unpublish(&volume, &target);
        tokio::select! {
            biased;
            // The other thread was faster than this one.
            done = unpublish => done.expect("unpublish"),
            () = std::future::ready(()) => break (target, format!("artifact/{name}")),
        }
    };
    // Kubelet comes again; it may be told to wait for the call that it gave up.
    eventually("the target is gone", || !target.exists()).await;
    eventually("the seal is durable", || {
        bench
            .artifact(&artifact)
            .is_some_and(|artifact| artifact.durable)
    })
    .await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_vanished_while_no_driver_ran_is_sealed_at_the_next_start() {
    let bench = require_bench!();
    let pod = bench.targets.join("pod");
    fs::create_dir(&pod).expect("pod");
    let mut request = bench.request("p", "v", OUTPUT);
    request.target = pod.join("v");
    bench.engine.publish(request).await.expect("publish");
    fs::write(pod.join("v/f"), "x").expect("write");
    let bench = bench
        .restart_after(|_| {
            nix::mount::umount2(&pod.join("v"), nix::mount::MntFlags::MNT_DETACH).expect("umount");
            fs::remove_dir(pod.join("v")).expect("rmdir");
            fs::remove_dir(&pod).expect("rmdir");
        })
        .await;
    eventually("its end has begun", || {
        bench.engine.volumes(None).is_empty()
    })
    .await;
    assert_eq!(bench.look("i", INPUT, "f").await.as_deref(), Some("x"));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_still_reads_stays() {
    let bench = require_bench!();
    bench
        .step("a", OUTPUT, |target| {
            fs::write(target.join("f"), "precious").expect("write");
        })
        .await;
    let (target, _) = bench.publish("p", "i", INPUT).await;
    let held = fs::File::open(&target).expect("open");
    bench.unpublish("i").await;
    // The artifact may go; what the reader sees may not.
    let destroyed = async || {
        let (tenant, name) = (
            "ci".parse().expect("label"),
            "artifact/a".parse().expect("name"),
        );
        bench.engine.destroy(&tenant, &name).await
    };
    eventually("it is found to be held", || {
        bench.row("i").is_some_and(|row| row.targets.is_empty())
    })
    .await;
    assert!(
        destroyed().await.is_err(),
        "a volume that somebody looks at still uses it"
    );
    bench.engine.reap().await.expect("reap");
    let path = format!("/proc/self/fd/{}/f", held.as_raw_fd());
    assert_eq!(fs::read_to_string(path).expect("read"), "precious");
    drop(held);
    eventually("the volume is gone", || bench.row("i").is_none()).await;
    destroyed().await.expect("no volume uses it now");
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_reads_of_a_sealed_volume_stays() {
    for restarted in [Restarted::Never, Restarted::Sealed, Restarted::InTheSeal] {
        read_of_a_sealed_volume(restarted).await;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restarted {
    Never,
    /// When all is done but the reader.
    Sealed,
    /// When the content is a layer, and the index does not have it.
    InTheSeal,
}

/// Takes a seal back to where its content has just become a layer. `index`: as it was before.
fn unseal(pool: &Path, index: &Path) {
    fs::copy(index, pool.join("index.redb")).expect("copy");
    let trash = pool.join("trash");
    let intents = names(&trash).into_iter().map(|name| trash.join(name));
    let intent = intents.filter(|it| it.join("volume.json").exists());
    let [intent] = &intent.collect::<Vec<_>>()[..] else {
        panic!("one intent is kept for the reader");
    };
    let record = fs::read(intent.join("volume.json")).expect("read");
    let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
    let layer = record["seal"]["layer"].as_str().expect("a layer");
    let layer_dir = pool.join("layers").join(layer);
    fs::rename(layer_dir.join("layer.json"), layer_dir.join("sealing.json")).expect("rename");
    fs::rename(intent, pool.join("pending").join(layer)).expect("rename");
}

async fn read_of_a_sealed_volume(restarted: Restarted) {
    let mut bench = require_bench!();
    bench
        .step("a", OUTPUT, |target| {
            fs::write(target.join("f"), "below").expect("write");
        })
        .await;
    let task = &[("type", "task-cache"), ("key", "k"), ("commit", "always")];
    bench
        .step("t1", task, |target| {
            fs::write(target.join("f"), "one").expect("write");
        })
        .await;
    let aside = bench.lab.path().join("aside");
    bench = bench
        .restart_after(|pool| {
            fs::copy(pool.join("index.redb"), &aside).expect("copy");
        })
        .await;
    let (target, _) = bench.publish("p", "t2", task).await;
    fs::write(target.join("g"), "two").expect("write");
    let held = fs::File::open(&target).expect("open");
    bench.unpublish("t2").await;
    eventually("it is sealed", || {
        bench
            .artifact("task-cache/k")
            .is_some_and(|row| row.durable && row.layers == 2)
    })
    .await;
    eventually("it has left", || bench.row("t2").is_none()).await;
    bench.engine.reap().await.expect("reap");
    match restarted {
        Restarted::Never => {}
        Restarted::Sealed => bench = bench.restart().await,
        Restarted::InTheSeal => {
            bench = bench.restart_after(|pool| unseal(pool, &aside)).await;
            eventually("it is sealed again", || {
                let row = bench.artifact("task-cache/k");
                row.is_some_and(|row| row.durable && row.layers == 2)
            })
            .await;
            eventually("it has left again", || bench.row("t2").is_none()).await;
            bench.engine.reap().await.expect("reap");
        }
    }
    let (tenant, name) = (
        "ci".parse().expect("label"),
        "task-cache/k".parse().expect("name"),
    );
    bench
        .engine
        .destroy(&tenant, &name)
        .await
        .expect("destroyed");
    bench.engine.reap().await.expect("reap");
    let read =
        |name: &str| fs::read_to_string(format!("/proc/self/fd/{}/{name}", held.as_raw_fd()));
    assert_eq!(
        (
            read("f").expect("read").as_str(),
            read("g").expect("read").as_str()
        ),
        ("one", "two")
    );
    drop(held);
    let layers = bench.pool().join("layers");
    eventually("its layers are gone", || names(&layers).len() == 1).await;
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_was_wrong_stops_no_cache() {
    let bench = require_bench!();
    let task = &[("type", "task-cache"), ("key", "k"), ("commit", "always")];
    bench
        .step("t1", task, |target| {
            fs::write(target.join("f"), "one").expect("write");
        })
        .await;
    let bench = bench
        .restart_after(|pool| {
            let root = Dir::open(pool).expect("the pool");
            let (index, contents) = Index::open(&root).expect("the index");
            let mut artifact = contents.artifacts[0].clone();
            artifact.created = Timestamp(artifact.created.0 + 40 * 24 * 60 * 60 * 1000);
            index
                .commit(&[Change::PutArtifact(artifact)])
                .expect("committed");
        })
        .await;
    bench
        .step("t2", task, |target| {
            fs::write(target.join("f"), "two").expect("write");
        })
        .await;
    assert_eq!(bench.look("t3", task, "f").await.as_deref(), Some("two"));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commit_that_became_due_last_has_the_name_in_whichever_order_they_are_sealed() {
    for (restarts, backwards) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut bench = require_bench!();
        // The pod of `b` ends last, and the outcome of `a` is told last.
        let cases = [("always", "b"), ("on-success", "a")];
        let volumes = |commit| ["a", "b"].map(|by| format!("{commit}-{by}"));
        let mut held = Vec::new();
        for (commit, _) in cases {
            let attributes = [("type", "output"), ("name", commit), ("commit", commit)];
            for volume in volumes(commit) {
                let (target, _) = bench.publish(&volume, &volume, &attributes).await;
                fs::write(target.join("f"), &volume).expect("write");
                let file = fs::File::create(target.join("held")).expect("create");
                held.push((volume, file));
            }
            let [a, b] = volumes(commit);
            bench.unpublish(&a).await;
            bench.unpublish(&b).await;
            bench.outcome(&b, Outcome::Succeeded).await;
            bench.outcome(&a, Outcome::Succeeded).await;
        }
        if restarts {
            bench = bench.restart().await;
        }
        if backwards {
            held.reverse();
        }
        for (volume, file) in held {
            drop(file);
            let is_sealed = || bench.row(&volume).is_none();
            eventually("its seal ends", is_sealed).await;
        }
        for (commit, newest) in cases {
            let from = format!("artifact/{commit}");
            let input = [("type", "input"), ("from", &from)];
            let shown = bench.look(&format!("look-{commit}"), &input, "f").await;
            let newest = format!("{commit}-{newest}");
            assert_eq!(shown, Some(newest), "{restarts}, {backwards}");
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_time_at_which_a_commit_became_due_its_seal_counts() {
    let bench = require_bench!();
    let mut held = Vec::new();
    for pod in ["first", "second"] {
        let (target, _) = bench.publish(pod, pod, OUTPUT).await;
        fs::write(target.join("f"), pod).expect("write");
        held.push((pod, fs::File::create(target.join("held")).expect("create")));
        bench.unpublish(pod).await;
    }
    // An older version did not write it, and a kill can tear it.
    let bench = bench
        .restart_after(|pool| {
            let pending = pool.join("pending");
            let mut files = names(&pending).into_iter();
            let mut next = || {
                pending
                    .join(files.next().expect("two are pending"))
                    .join("due")
            };
            fs::remove_file(next()).expect("removed");
            fs::write(next(), "17").expect("torn");
        })
        .await;
    for (pod, file) in held.into_iter().rev() {
        drop(file);
        eventually("its seal ends", || bench.row(pod).is_none()).await;
    }
    let shown = bench.look("look", INPUT, "f").await;
    assert_eq!(shown.as_deref(), Some("first"));
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_made_anew_names_what_was_durable_and_nothing_half_made() {
    let bench = require_bench!();
    bench
        .step("a", OUTPUT, |target| {
            fs::write(target.join("f"), "whole").expect("write");
        })
        .await;
    // A second one of that name is being sealed when the driver dies: its process holds the volume
    // open.
    let (target, _) = bench.publish("p", "b", OUTPUT).await;
    let held = fs::File::create(target.join("f")).expect("create");
    bench.unpublish("b").await;
    let bench = bench
        .restart_after(|pool| {
            let pending = names(&pool.join("pending"));
            let layers = pool.join("layers");
            let durable = names(&layers);
            let begun = layers.join(&pending[0]);
            fs::create_dir(&begun).expect("begun");
            let record = layers.join(&durable[0]).join("layer.json");
            let record = fs::read_to_string(record).expect("read");
            let half_made = record.replace(&durable[0], &pending[0]);
            fs::write(begun.join("sealing.json"), half_made).expect("write");
            drop(held);
            assert_eq!(Engine::rebuild_index(pool).expect("rebuilt").artifacts, 1);
        })
        .await;
    bench.quiet().await;
    assert_eq!(
        bench.look("i", INPUT, "f").await.as_deref(),
        Some(""),
        "what was pending was sealed after it"
    );
    bench.engine.reap().await.expect("reap");
    bench.finish().await;
}
