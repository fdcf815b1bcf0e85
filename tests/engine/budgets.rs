//! Budgets and times to live of a namespace: what it uses, and exactly what an order of the
//! controller evicts.

use std::collections::BTreeMap;
use std::fs;

use baggageclaim::model::{Bucket, CutOff, NamespaceUsage, Outcome, Tenant, Timestamp};

use crate::common::bench::{Bench, Ground, empty_claim, request};
use crate::common::require_bench;

const OUTPUT: &[(&str, &str)] = &[("type", "output"), ("name", "o"), ("ttl", "1h")];
const RESOURCE: &[(&str, &str)] = &[("type", "resource-cache"), ("key", "r")];
const SIZE: usize = 200 << 10;

fn task(key: &str) -> [(&str, &str); 2] {
    [("type", "task-cache"), ("key", key)]
}

fn ci() -> Tenant {
    "ci".parse().expect("a label")
}

async fn make(bench: &Bench, volume: &str, attributes: &[(&str, &str)]) {
    let write = |at: &std::path::Path| fs::write(at.join("f"), vec![7; SIZE]).expect("write");
    bench.step(volume, attributes, write).await;
}

/// Content of another namespace, older than all else.
async fn make_elsewhere(bench: &Bench) {
    let target = bench.target("elsewhere");
    let asked = request(&target, "other", "elsewhere", "elsewhere", &task("a"));
    bench.engine.publish(asked).await.expect("published");
    bench.outcome("elsewhere", Outcome::Succeeded).await;
    bench.unpublish("elsewhere").await;
    bench.quiet().await;
}

async fn usage(bench: &Bench) -> BTreeMap<Tenant, NamespaceUsage> {
    // Its size is known from here on.
    bench.engine.reap().await.expect("measured");
    bench.engine.namespaces().await.expect("counted")
}

fn last_used(bench: &Bench, name: &str) -> Timestamp {
    let artifact = bench.artifact(name);
    artifact.unwrap_or_else(|| panic!("no {name}")).last_used
}

/// The names of the namespace that are left after an order.
async fn left_after(bench: &Bench, cut: CutOff) -> Vec<String> {
    bench.engine.cut_off(ci(), cut);
    bench.engine.reap().await.expect("reap");
    let mut names: Vec<String> = bench
        .engine
        .artifacts(Some(&ci()))
        .into_iter()
        .filter_map(|row| row.name.map(|name| name.to_string()))
        .collect();
    names.sort();
    names
}

fn unused_before(time: Timestamp) -> CutOff {
    CutOff {
        unused_before: time,
        ..CutOff::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_off_evicts_exactly_what_is_unused_and_older_and_nothing_else() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        make_elsewhere(&bench).await;
        let claim = empty_claim("claim");
        let claim = bench.engine.create_claim(claim).await.expect("made");
        let snapshot = bench.engine.create_snapshot("s", claim.id.as_str()).await;
        let snapshot = snapshot.expect("taken");
        for (volume, attributes) in [
            ("used", &task("used")[..]),
            ("forked", &task("forked")),
            ("output", OUTPUT),
            ("resource", RESOURCE),
            ("young", &task("young")),
        ] {
            make(&bench, volume, attributes).await;
        }
        // Both are the oldest, and in use: by a reader, and by a writer.
        let read = [("type", "input"), ("from", "task-cache/used")];
        bench.publish("reader", "reader", &read).await;
        bench.publish("writer", "writer", &task("forked")).await;

        let watch = bench.engine.watch_names();
        let all = ["artifact/o", "resource-cache/r", "task-cache/forked"];
        let all = [&all[..], &["task-cache/used", "task-cache/young"]].concat();
        let now = last_used(&bench, "task-cache/young");
        assert_eq!(left_after(&bench, CutOff::default()).await, all);
        let before = unused_before(last_used(&bench, "artifact/o"));
        assert_eq!(left_after(&bench, before).await, all, "{}", ground.name());

        let cut = unused_before(last_used(&bench, "task-cache/young"));
        let left = ["task-cache/forked", "task-cache/used", "task-cache/young"];
        assert_eq!(left_after(&bench, cut).await, left, "{}", ground.name());
        // The controller hears of it as of any other change.
        let told = watch
            .take()
            .into_iter()
            .filter(|(_, state)| state.is_none());
        let mut told: Vec<String> = told.map(|(name, _)| name.reference.to_string()).collect();
        told.sort();
        assert_eq!(told, ["artifact/o", "resource-cache/r"]);

        // An order for all: what volumes use stays, and what another namespace has.
        let cut = unused_before(Timestamp(now.0 + 3_600_000));
        let left = ["task-cache/forked", "task-cache/used"];
        assert_eq!(left_after(&bench, cut).await, left);
        let file = fs::read(bench.target("reader").join("f")).expect("it is there");
        assert_eq!(file.len(), SIZE);
        let others = bench
            .engine
            .artifacts(Some(&"other".parse().expect("a label")));
        assert_eq!(others.len(), 1);
        bench.outcome("writer", Outcome::Succeeded).await;
        for volume in ["reader", "writer"] {
            bench.unpublish(volume).await;
        }
        bench.quiet().await;
        // The order is not kept: by now they were used later than it knew.
        assert_eq!(left_after(&bench, CutOff::default()).await, left);
        let there = bench.engine.claim(claim.id.as_str());
        assert_eq!(there.expect("it is untouched").id, claim.id);
        let id = snapshot.id.to_string();
        bench.engine.delete_snapshot(&id).await.expect("deleted");
        let id = claim.id.to_string();
        bench.engine.delete_claim(&id).await.expect("deleted");
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn caches_go_by_their_last_use_and_outputs_by_their_seal() {
    let bench = require_bench!();
    make(&bench, "cache", &task("cache")).await;
    make(&bench, "output", OUTPUT).await;
    make(&bench, "later", &task("later")).await;
    let resource = [("type", "resource-cache"), ("key", "fetched")];
    make(&bench, "fetched", &resource).await;
    let sealed = bench.artifact("artifact/o").expect("sealed").created;
    // Both are used again.
    let read = [("type", "input"), ("from", "artifact/o")];
    for (volume, attributes) in [("one", &read[..]), ("two", &task("cache")[..])] {
        assert!(bench.look(volume, attributes, "f").await.is_some());
    }
    let cut = CutOff {
        task_caches_before: last_used(&bench, "task-cache/later"),
        resource_caches_before: last_used(&bench, "resource-cache/fetched"),
        outputs_before: sealed,
        ..CutOff::default()
    };
    let all = [
        "artifact/o",
        "resource-cache/fetched",
        "task-cache/cache",
        "task-cache/later",
    ];
    assert_eq!(left_after(&bench, cut).await, all);
    // Each kind has its own time.
    let used = last_used(&bench, "resource-cache/fetched");
    let fetched = CutOff {
        resource_caches_before: Timestamp(used.0 + 1),
        ..cut
    };
    let others = ["artifact/o", "task-cache/cache", "task-cache/later"];
    assert_eq!(left_after(&bench, fetched).await, others);
    let cut = CutOff {
        task_caches_before: last_used(&bench, "task-cache/cache"),
        outputs_before: Timestamp(sealed.0 + 1),
        ..cut
    };
    assert_eq!(left_after(&bench, cut).await, ["task-cache/cache"]);
    bench.finish().await;
}

/// The sum of what eviction would free.
fn sum(buckets: &[Bucket]) -> (u64, u64) {
    let bytes = buckets.iter().map(|bucket| bucket.bytes).sum();
    (bytes, buckets.iter().map(|bucket| bucket.artifacts).sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_namespace_uses_is_counted_with_layers_that_artifacts_share_once() {
    let bench = require_bench!();
    make(&bench, "first", &task("first")).await;
    let one = usage(&bench).await.remove(&ci()).expect("it has content");
    assert_eq!(one.artifacts, 1);
    assert!(
        (SIZE as u64..2 * SIZE as u64).contains(&one.bytes),
        "{one:?}"
    );
    assert_eq!(sum(&one.unused), (one.bytes, 1));
    assert!(one.oldest > Timestamp(0));

    // A fork of it under another name has its layer, too.
    let fork = [
        ("type", "task-cache"),
        ("key", "second"),
        ("restoreKeys", "first"),
    ];
    bench
        .step("second", &fork, |at| {
            assert!(at.join("f").exists());
            fs::write(at.join("g"), "small").expect("write");
        })
        .await;
    let two = usage(&bench).await.remove(&ci()).expect("it has content");
    assert_eq!((two.artifacts, two.oldest), (2, one.oldest));
    assert!(two.bytes < one.bytes + SIZE as u64 / 2, "{one:?} {two:?}");
    assert_eq!(sum(&two.unused), (two.bytes, 2));
    let [first, second] = &two.unused[..] else {
        panic!("two buckets: {two:?}");
    };
    // The shared layer goes with the last artifact that has it.
    assert_eq!(first.bytes, 0);
    assert_eq!(second.bytes, two.bytes);

    // While one is used, only the other could go, and nothing with it.
    let read = [("type", "input"), ("from", "task-cache/second")];
    bench.publish("reader", "reader", &read).await;
    let used = usage(&bench).await.remove(&ci()).expect("it has content");
    assert_eq!((used.bytes, used.artifacts), (two.bytes, 2));
    assert_eq!(sum(&used.unused), (0, 1));
    let cut = unused_before(Timestamp(u64::MAX));
    assert_eq!(left_after(&bench, cut).await, ["task-cache/second"]);
    let left = usage(&bench).await.remove(&ci()).expect("it has content");
    assert_eq!((left.bytes, left.artifacts), (two.bytes, 1));
    bench.unpublish("reader").await;
    bench.quiet().await;
    assert_eq!(left_after(&bench, cut).await, [""; 0]);
    assert_eq!(usage(&bench).await, BTreeMap::new());
    bench.finish().await;
}
