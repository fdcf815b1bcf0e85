//! Many concurrent callers: the same volume, distinct volumes, a shutdown in the middle. Each call
//! returns Ok or Busy, and afterwards index, directories and mounts agree.

use std::fs;
use std::sync::Arc;

use baggageclaim::engine::{Engine, Error};
use baggageclaim::model::Outcome;
use baggageclaim::sys;

use crate::common::bench::{Bench, Ground};
use crate::common::require_bench;

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o"), ("commit", "always")];

/// Until another operation on the volume is over, as kubelet does it.
async fn insist<T>(call: impl AsyncFn() -> Result<T, Error>) -> T {
    loop {
        match call().await {
            Err(Error::Busy(_)) => tokio::task::yield_now().await,
            result => return result.unwrap_or_else(|error| panic!("{error}")),
        }
    }
}

fn mounts_below(bench: &Bench) -> usize {
    let table = sys::mount_table().expect("mounts");
    let below = |mount: &&sys::MountEntry| {
        mount.mount_point != bench.targets && mount.mount_point.starts_with(&bench.targets)
    };
    table.iter().filter(below).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn publishes_of_one_volume_race_and_one_mount_comes_of_it() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        for round in 0..30 {
            let volume = format!("v{round}");
            let request = bench.request("pod", &volume, OUTPUT);
            let calls = (0..6).map(|_| {
                let (engine, request) = (bench.engine.clone(), request.clone());
                tokio::spawn(async move { engine.publish(request).await })
            });
            let (mut made, mut already) = (0, 0);
            for call in calls.collect::<Vec<_>>() {
                match call.await.expect("no panic") {
                    Ok(published) if published.already => already += 1,
                    Ok(_) => made += 1,
                    Err(Error::Busy(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!(made, 1, "{}: and {already} found it", ground.name());
            assert_eq!(mounts_below(&bench), 1);
            bench.unpublish(&volume).await;
            assert_eq!(mounts_below(&bench), 0);
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn publish_and_unpublish_of_one_volume_race_for_hundreds_of_rounds() {
    for (ground, rounds) in Ground::ALL.into_iter().zip([300, 60, 60]) {
        let bench = require_bench!(on ground);
        let callers = (0..4).map(|caller| {
            let engine = bench.engine.clone();
            // Two kinds of content under one id: whichever comes second is told that it differs.
            let attributes = if caller == 3 { &[][..] } else { OUTPUT };
            let request = bench.request("pod", "v", attributes);
            tokio::spawn(async move {
                let mut done = [0; 2];
                for round in 0..rounds {
                    // A caller that finds another at work calls again, as often as it takes.
                    let result = loop {
                        let result = if (round + caller) % 2 == 0 {
                            engine.publish(request.clone()).await.map(drop)
                        } else {
                            engine.unpublish("v", &request.target).await
                        };
                        match result {
                            Err(Error::Busy(_)) => tokio::task::yield_now().await,
                            result => break result,
                        }
                    };
                    match result {
                        Ok(()) => done[(round + caller) % 2] += 1,
                        Err(Error::Different { .. }) => {}
                        Err(error) => panic!("round {round}: {error}"),
                    }
                }
                done
            })
        });
        let mut done = [0; 2];
        for caller in callers.collect::<Vec<_>>() {
            let of_one = caller.await.expect("no panic");
            done = [done[0] + of_one[0], done[1] + of_one[1]];
        }
        assert!(done[0] > 0 && done[1] > 0, "{}: {done:?}", ground.name());
        let target = bench.target("v");
        insist(async || bench.engine.unpublish("v", &target).await).await;
        assert_eq!(mounts_below(&bench), 0);
        bench.finish().await;
    }
}

/// A step of a pod: a cache, an output, scratch, and an input once there is one.
async fn pod(engine: &Engine, targets: &std::path::Path, caller: usize, round: usize) {
    let uid = format!("pod-{caller}-{round}");
    let task = format!("task-{}", caller % 4);
    let output = format!("out-{caller}");
    let from = format!("artifact/out-{}", (caller + 1) % 16);
    let mut volumes: Vec<(&str, Vec<(&str, &str)>)> = vec![
        ("task", vec![("type", "task-cache"), ("key", &task)]),
        ("out", vec![("type", "output"), ("name", &output)]),
        ("tmp", vec![]),
        ("res", vec![("type", "resource-cache"), ("key", "shared")]),
    ];
    if round > 0 {
        volumes.push(("in", vec![("type", "input"), ("from", &from)]));
    }
    let mut published = Vec::new();
    for (name, attributes) in &volumes {
        let id = format!("{uid}-{name}");
        let request =
            crate::common::bench::request(&targets.join(&id), "ci", &uid, &id, attributes);
        match engine.publish(request).await {
            Ok(_) => {}
            // Its maker may have failed.
            Err(Error::NoSuchContent(_)) if *name == "in" => continue,
            Err(error) => panic!("{id}: {error}"),
        }
        if *name != "in" {
            fs::write(targets.join(&id).join("by"), &uid).expect("write");
        }
        published.push(id);
    }
    let ended = if (caller + round).is_multiple_of(5) {
        Outcome::Failed
    } else {
        Outcome::Succeeded
    };
    engine
        .report_outcome(&uid.parse().expect("uid"), ended)
        .await
        .expect("outcome");
    for id in published {
        engine
            .unpublish(&id, &targets.join(&id))
            .await
            .expect("unpublish");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_callers_with_volumes_of_their_own() {
    for (ground, rounds) in Ground::ALL.into_iter().zip([8, 3, 3]) {
        let bench = require_bench!(on ground);
        let targets = Arc::new(bench.targets.clone());
        let callers = (0..16).map(|caller| {
            let (engine, targets) = (bench.engine.clone(), targets.clone());
            tokio::spawn(async move {
                for round in 0..rounds {
                    pod(&engine, &targets, caller, round).await;
                }
            })
        });
        let callers: Vec<_> = callers.collect();
        while !callers.iter().all(tokio::task::JoinHandle::is_finished) {
            // Collected and compared all the time, nothing of it gets in the way.
            bench.engine.reap().await.expect("reap");
            tokio::task::yield_now().await;
        }
        for caller in callers {
            caller.await.expect("no panic");
        }
        assert_eq!(mounts_below(&bench), 0);
        bench.quiet().await;
        bench.engine.reap().await.expect("reap");
        bench.assert_whole().await;
        // What it says of itself is one of the pods that succeeded.
        for caller in 0..16 {
            let from = format!("artifact/out-{caller}");
            let by = bench
                .look("look", &[("type", "input"), ("from", &from)], "by")
                .await;
            let by = by.expect("sealed");
            assert!(by.starts_with(&format!("pod-{caller}-")), "{by}");
            let round: usize = by
                .rsplit('-')
                .next()
                .and_then(|n| n.parse().ok())
                .expect("a round");
            assert!(!(caller + round).is_multiple_of(5), "{by} failed");
        }
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_shutdown_in_the_middle_of_work_loses_nothing_that_was_answered() {
    for ground in Ground::ALL {
        let mut bench = require_bench!(on ground);
        for round in 0..4 {
            let callers = (0..8).map(|caller| {
                let engine = bench.engine.clone();
                let id = format!("v-{caller}-{round}");
                let name = format!("o-{caller}-{round}");
                let output = [("type", "output"), ("name", &*name), ("commit", "always")];
                let request = bench.request("pod", &id, &output);
                tokio::spawn(async move {
                    let target = request.target.clone();
                    let published = engine.publish(request).await;
                    if published.is_ok() {
                        fs::write(target.join("by"), &name).expect("write");
                    }
                    let unpublished = engine.unpublish(&id, &target).await;
                    for result in [published.as_ref().err(), unpublished.as_ref().err()] {
                        assert!(
                            matches!(result, None | Some(Error::ShuttingDown)),
                            "{result:?}"
                        );
                    }
                    (id, name, published.is_ok(), unpublished.is_ok())
                })
            });
            let callers: Vec<_> = callers.collect();
            // In a different moment each round, wherever that is.
            for _ in 0..round * 4 {
                tokio::task::yield_now().await;
            }
            bench = bench.restart().await;
            let mut promised = Vec::new();
            for caller in callers {
                let (id, name, published, unpublished) = caller.await.expect("no panic");
                let row = bench.row(&id);
                if published && !unpublished {
                    assert_eq!(row.expect("known").targets, [bench.target(&id)]);
                    let by = fs::read_to_string(bench.target(&id).join("by")).expect("read");
                    assert_eq!(by, name, "{}: mounted and usable", ground.name());
                    bench.unpublish(&id).await;
                } else {
                    assert!(!bench.target(&id).exists());
                }
                if published {
                    promised.push(name);
                }
            }
            bench.quiet().await;
            for name in promised {
                let from = format!("artifact/{name}");
                let input = [("type", "input"), ("from", &*from)];
                assert_eq!(
                    bench.look("look", &input, "by").await.as_deref(),
                    Some(&*name)
                );
            }
            bench.assert_whole().await;
        }
        bench.finish().await;
    }
}
