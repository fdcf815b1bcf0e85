//! The queue of uploads, and many callers of one fetch.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use baggageclaim::engine::{ArtifactRow, ContentSource};
use baggageclaim::model::Outcome;
use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::common::bench::{NEVER, eventually};
use crate::common::random::Random;
use crate::failing::{Fault, Op};
use crate::nodes::{INPUT, Node, OUTPUT, Shared, TASK, require, text, two_nodes, write};
use crate::trouble::files;

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_publishes_of_one_artifact_are_one_fetch() {
    let (_tier, a, b) = two_nodes!();
    a.share("o", &OUTPUT, "made on a").await;
    let publishes = (0..100).map(|number| {
        let b = &b;
        async move {
            let volume = format!("i-{number}");
            b.publish(&volume, &INPUT).await;
            let path = b.bench.target(&volume).join("text");
            assert_eq!(fs::read_to_string(path).expect("read"), "made on a");
        }
    });
    join_all(publishes).await;
    eventually("the fetch ends", || b.fetches() > 0).await;
    let metrics = b.distribution.metrics();
    let fetched = metrics.fetches.from(ContentSource::Shared);
    assert_eq!((fetched.artifacts, fetched.failures), (1, 0));
    assert!(fetched.bytes > 0, "{fetched:?}");
    assert!(metrics.questions < 10, "{metrics:?}");
    for number in 0..100 {
        b.bench.unpublish(&format!("i-{number}")).await;
    }
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_goes_on_without_its_caller_and_serves_the_next() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    a.share("t", &TASK, "slow").await;
    let slow = Arc::new(AtomicBool::new(true));
    let (held, layers) = (Arc::clone(&slow), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&layers);
    let store = tier.failing(move |op, path| {
        if op == Op::Get && path.contains("/layers/") {
            counted.fetch_add(1, Ordering::SeqCst);
            if held.load(Ordering::SeqCst) {
                return Fault::Slow(Duration::from_millis(700));
            }
        }
        Fault::None
    });
    let b = Node::with(&store, |settings| {
        settings.fetch_wait = Duration::from_millis(100);
    });
    let mut b = require!(b.await);
    assert_eq!(b.sees("early", &TASK).await, None, "it starts empty");
    eventually("the fetch ends", || b.fetches() == 1).await;
    assert_eq!(b.sees("late", &TASK).await, text("slow"));
    assert_eq!(layers.load(Ordering::SeqCst), 1);
    let told = b.heard();
    let is = |what: &str| {
        told.iter()
            .any(|told| format!("{told:?}").starts_with(what))
    };
    assert!(is("Fetching") && is("NotFetched"), "{told:?}");
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_uploaded_is_uploaded_after_a_restart_and_only_once() {
    let tier = Shared::file();
    let forbidden = tier.failing(|_, _| Fault::Status(403));
    let a = Node::with(&forbidden, |settings| {
        settings.fresh_wait = Duration::from_millis(100);
        settings.ask = Duration::from_millis(100);
    });
    let a = require!(a.await);
    a.commit("t", &TASK, "kept").await;
    a.commit("o", &OUTPUT, "kept, too").await;
    let bench = a.stop().await.restart().await;
    let a = Node::start(bench, &tier.store, |_| {});
    a.shared().await;
    assert_eq!(a.distribution.metrics().uploads, 2);
    let record = tier.record("task-cache/go").expect("it is there");
    // A node that was killed before it noted the end finds its own artifact.
    let id = a.bench.artifact("task-cache/go").expect("it is there").id;
    let engine = a.bench.engine.clone();
    let change = move || engine.set_sharing(id, |sharing| sharing.number = None);
    let forgot = tokio::task::spawn_blocking(change).await.expect("no panic");
    assert!(forgot.expect("it is noted"));
    a.shared().await;
    assert_eq!(tier.record("task-cache/go"), Some(record));
    assert_eq!(a.distribution.status().uploads_waiting, 0);
    let bench = a.stop().await.restart().await;
    let a = Node::start(bench, &tier.store, |_| {});
    a.shared().await;
    assert_eq!(a.distribution.metrics().uploads, 0);
    a.finish().await;
}

/// Otherwise commits that come faster than they are uploaded would keep the oldest one waiting.
#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_and_the_newest_are_uploaded_in_turn() {
    const KEYS: [&str; 6] = ["0", "1", "2", "3", "4", "5"];
    let tier = Shared::file();
    let forbids = Arc::new(AtomicBool::new(true));
    let (is_forbidden, (named, order)) = (Arc::clone(&forbids), mpsc::channel());
    let store = tier.failing(move |op, path| {
        if is_forbidden.load(Ordering::SeqCst) {
            return Fault::Status(403);
        }
        if op == Op::Create && path.contains("/names/") {
            named.send(path.to_owned()).expect("it is waited for");
        }
        Fault::None
    });
    let a = require!(Node::new(&store).await);
    let commit = async |key: &str| {
        let attributes = [("type", "task-cache"), ("key", key)];
        a.commit(&format!("t-{key}"), &attributes, key).await;
    };
    commit(KEYS[0]).await;
    // It was the newest one, so the oldest one is next. All wait for a person.
    let has_failed = || a.distribution.metrics().upload_failures > 0;
    eventually("its upload has failed", has_failed).await;
    for key in &KEYS[1..] {
        commit(key).await;
    }
    eventually("all can be uploaded", || {
        let rows = a.bench.engine.artifacts(None);
        let can = |row: &ArtifactRow| row.durable && row.tables.iter().all(Option::is_some);
        rows.len() == KEYS.len() && rows.iter().all(can)
    })
    .await;
    forbids.store(false, Ordering::SeqCst);
    a.shared().await;
    let key = |path: String| path.chars().next_back().expect("a key").to_string();
    let order: Vec<String> = order.try_iter().map(key).collect();
    assert_eq!(order, ["0", "5", "1", "4", "2", "3"]);
    a.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_ends_when_a_newer_commit_takes_the_name_and_leaves_it_the_layers() {
    // Commits over commits need conditional writes.
    let tier = require!(Shared::s3());
    let holds = Arc::new(AtomicBool::new(true));
    let (hold, manifests) = (Arc::clone(&holds), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&manifests);
    let layers = Arc::new(Mutex::new(BTreeSet::new()));
    let seen = Arc::clone(&layers);
    let store = tier.failing(move |op, path| {
        if op == Op::Put && path.contains("/manifests/") {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        let is_layer = matches!(op, Op::Put | Op::Multipart) && path.contains("/layers/");
        if is_layer {
            seen.lock().insert(path.to_owned());
        }
        if is_layer && hold.load(Ordering::SeqCst) {
            return Fault::Slow(Duration::from_secs(1));
        }
        Fault::None
    });
    let a = require!(Node::new(&store).await);
    // It goes in several parts, so that its upload can end between two of them.
    let hex = |number: u64| format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let large: String = (0..3 << 19).map(hex).collect();
    a.commit("t-1", &TASK, &large).await;
    eventually("its layer is uploaded", || !layers.lock().is_empty()).await;
    a.commit("t-2", &TASK, "second").await;
    holds.store(false, Ordering::SeqCst);
    a.shared().await;
    assert_eq!(manifests.load(Ordering::SeqCst), 1, "the first was skipped");
    assert_eq!(layers.lock().len(), 2, "{layers:?}: each is uploaded once");
    let b = require!(Node::new(&tier.store).await);
    assert_eq!(b.sees("t", &TASK).await, text("second"));
    // Ten generations over it: each uploads one layer.
    for number in 0..5 {
        b.share(
            &format!("g-{number}"),
            &TASK,
            &format!("generation {number}"),
        )
        .await;
        let seen = a.sees(&format!("s-{number}"), &TASK).await;
        assert_eq!(seen, text(&format!("generation {number}")));
    }
    a.finish().await;
    b.finish().await;
}

/// Otherwise each reader would refuse it, and each upload would bring the damage again.
#[tokio::test(flavor = "multi_thread")]
async fn content_that_is_damaged_on_this_node_does_not_reach_the_tier() {
    let tier = Shared::file();
    let holds = Arc::new(AtomicBool::new(true));
    let hold = Arc::clone(&holds);
    let store = tier.failing(move |op, path| {
        let is_layer = op == Op::Put && path.contains("/layers/");
        if is_layer && hold.load(Ordering::SeqCst) {
            return Fault::Status(500);
        }
        Fault::None
    });
    let a = require!(Node::new(&store).await);
    a.commit("o", &OUTPUT, "good").await;
    a.commit("t", &TASK, "whole").await;
    let artifact = || a.bench.artifact("task-cache/go").expect("it is there");
    let has_table = || artifact().tables.iter().all(Option::is_some);
    eventually("its table is made", has_table).await;
    let layers = files(&a.bench.pool().join("layers"));
    let is_it = |file: &&PathBuf| fs::read(file).is_ok_and(|it| it == b"whole");
    let file = layers.iter().find(is_it).expect("it is there");
    // Its length does not change.
    fs::write(file, "whale").expect("write");
    holds.store(false, Ordering::SeqCst);
    a.shared().await;
    assert!(artifact().sharing.damaged, "{:?}", artifact().sharing);
    assert_eq!(tier.record("task-cache/go"), None);
    assert!(tier.record("artifact/built").is_some());
    assert_eq!(files(&tier.files.join("v1/ci/layers")).len(), 1);
    // It is not tried again, and volumes of this node start from it.
    assert_eq!(a.distribution.metrics().uploads, 1);
    assert_eq!(a.sees("look", &TASK).await, text("whale"));
    // A new commit over it has the damaged layer, too.
    a.commit("t-2", &TASK, "again").await;
    a.shared().await;
    assert_eq!(tier.record("task-cache/go"), None);
    a.finish().await;
}

/// A node makes outputs of these names, each with its name in it, and uploads them.
async fn share_outputs(node: &Node, names: &[&str]) {
    for name in names {
        let attributes = [("type", "output"), ("name", name)];
        node.share(name, &attributes, name).await;
    }
}

/// Publishes inputs of these names at once.
async fn publish_inputs(node: &Node, names: &[&str]) {
    let inputs = names.iter().map(async |name| {
        let from = format!("artifact/{name}");
        let attributes = [("type", "input"), ("from", &*from)];
        node.publish(&format!("reads-{name}"), &attributes).await;
    });
    join_all(inputs).await;
}

async fn end_inputs(node: &Node, names: &[&str]) {
    for name in names {
        node.end(&format!("reads-{name}"), Outcome::Failed).await;
    }
}

/// A namespace has many inputs whose content does not come.
#[tokio::test(flavor = "multi_thread")]
async fn content_of_one_namespace_comes_while_another_one_has_taken_its_fetches() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    let held = Arc::new(AtomicBool::new(true));
    let holds = Arc::clone(&held);
    let store = tier.failing(move |op, path| match op {
        Op::Get if path.contains("/ci/layers/") && holds.load(Ordering::SeqCst) => {
            Fault::Status(500)
        }
        _ => Fault::None,
    });
    let b = require!(Node::new(&store).await);
    let names = ["o-0", "o-1", "o-2", "o-3", "o-4", "o-5"];
    share_outputs(&a, &names).await;
    let published = a.try_publish_of("other", "made", &OUTPUT).await;
    published.expect("publish");
    write(&a.bench.target("made"), "of another");
    a.end("made", Outcome::Succeeded).await;
    a.shared().await;

    let inputs = publish_inputs(&b, &names);
    let other = async {
        let all = || b.distribution.fetching().len() == 4;
        eventually("its places are taken", all).await;
        let published = b.try_publish_of("other", "reads", &INPUT).await;
        published.expect("it comes");
        eventually("it is counted", || b.fetches() > 0).await;
        assert_eq!(b.fetches(), 1, "the others still wait");
        let seen = fs::read_to_string(b.bench.target("reads").join("text"));
        assert_eq!(seen.ok(), text("of another"));
        held.store(false, Ordering::SeqCst);
    };
    tokio::join!(inputs, other);
    eventually("all have come", || b.fetches() == 7).await;
    b.end("reads", Outcome::Failed).await;
    end_inputs(&b, &names).await;
    a.finish().await;
    b.finish().await;
}

/// A pod of the same namespace needs content that comes.
#[tokio::test(flavor = "multi_thread")]
async fn fetches_that_hang_give_their_places_back() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    let names = ["o-0", "o-1", "o-2", "o-3"];
    share_outputs(&a, &names).await;
    share_outputs(&a, &["comes"]).await;
    let comes = a.bench.artifact("artifact/comes").expect("it is there");
    let digest = comes.tables[0].expect("it has a table").to_string();
    let digest = digest.trim_start_matches("sha256:").to_owned();
    let held = Arc::new(AtomicBool::new(true));
    let holds = Arc::clone(&held);
    let store = tier.failing(move |op, path| {
        let is_layer = op == Op::Get && path.contains("/layers/");
        if is_layer && !path.contains(&digest) && holds.load(Ordering::SeqCst) {
            return Fault::Slow(NEVER * 10);
        }
        Fault::None
    });
    let b = require!(Node::new(&store).await);
    let inputs = publish_inputs(&b, &names);
    let other = async {
        let all = || b.distribution.fetching().len() == names.len();
        eventually("all places are taken", all).await;
        let began = Instant::now();
        publish_inputs(&b, &["comes"]).await;
        held.store(false, Ordering::SeqCst);
        // Each of them waits two times for 3 s.
        let took = began.elapsed();
        assert!(took < Duration::from_secs(15), "{took:?}");
    };
    tokio::join!(inputs, other);
    eventually("all have come", || b.fetches() == 5).await;
    end_inputs(&b, &names).await;
    end_inputs(&b, &["comes"]).await;
    a.finish().await;
    b.finish().await;
}

/// A node fetches four artifacts of a namespace at once, and a step ends while another pod waits
/// for its turn.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_keeps_its_name_when_older_content_comes_late() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    let held = Arc::new(AtomicBool::new(true));
    let holds = Arc::clone(&held);
    let store = tier.failing(move |op, path| match op {
        Op::Get if path.contains("/layers/") && holds.load(Ordering::SeqCst) => Fault::Status(500),
        // Its commit gets no number.
        Op::Put => Fault::Status(500),
        _ => Fault::None,
    });
    let b = require!(Node::new(&store).await);
    b.publish("runs", &TASK).await;
    write(&b.bench.target("runs"), "newer");
    a.share("older", &TASK, "older").await;
    let outputs = ["o-0", "o-1", "o-2", "o-3"];
    share_outputs(&a, &outputs).await;
    let inputs = publish_inputs(&b, &outputs);
    let waits = async {
        let all = || b.distribution.fetching().len() == outputs.len();
        eventually("all places are taken", all).await;
        let asked = b.questions();
        let ends = async {
            eventually("it is asked for", || b.questions() > asked).await;
            b.end("runs", Outcome::Succeeded).await;
            let made = b.bench.artifact("task-cache/go").expect("it is there").id;
            held.store(false, Ordering::SeqCst);
            made
        };
        let (_, made) = tokio::join!(b.publish("waits", &TASK), ends);
        made
    };
    let ((), made) = tokio::join!(inputs, waits);
    eventually("the older one has come, too", || b.fetches() == 5).await;
    let named = b.bench.artifact("task-cache/go").expect("it is there").id;
    assert_eq!(named, made);
    let seen = fs::read_to_string(b.bench.target("waits").join("text"));
    assert_eq!(seen.ok(), text("newer"));
    b.end("waits", Outcome::Failed).await;
    end_inputs(&b, &outputs).await;
    let b = Node::start(b.stop().await, &tier.store, |_| {});
    b.shared().await;
    assert_eq!(a.sees("look", &TASK).await, text("newer"));
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_uploads_what_waits_within_its_limit() {
    let tier = Shared::file();
    let node = Node::with(&tier.store, |settings| {
        settings.bandwidth = std::num::NonZeroU64::new(20_000);
    });
    let node = require!(node.await);
    // The first part goes at once; the next one would wait for seconds.
    for number in 0..3_u64 {
        let volume = format!("o-{number}");
        let name = format!("built-{number}");
        let attributes = [("type", "output"), ("name", &*name)];
        node.publish(&volume, &attributes).await;
        let noise = Random::new(number).bytes(400_000);
        fs::write(node.bench.target(&volume).join("noise"), noise).expect("write");
        write(&node.bench.target(&volume), "text");
        node.end(&volume, Outcome::Succeeded).await;
    }
    eventually("one is uploaded", || {
        node.distribution.metrics().uploads == 1
    })
    .await;
    let began = Instant::now();
    let drained = node.distribution.drain(Duration::from_millis(300)).await;
    assert_eq!((drained.uploaded, drained.left), (0, 2));
    assert!(began.elapsed() < NEVER / 2);
    // The end of the driver does not wait for the pace.
    let began = Instant::now();
    node.distribution.stop().await;
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
    node.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_takes_five_requests_and_a_fetch_three() {
    let tier = require!(Shared::s3());
    let requests = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&requests);
    let store = tier.failing(move |_, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        Fault::None
    });
    let taken = || requests.swap(0, Ordering::SeqCst);
    let a = require!(Node::new(&store).await);
    let b = require!(Node::new(&store).await);
    // The first operation of a process reads the version of the layout.
    a.share("o", &OUTPUT, "made on a").await;
    b.sees("i", &INPUT).await;
    a.publish("t-1", &TASK).await;
    write(&a.bench.target("t-1"), "first");
    taken();
    a.end("t-1", Outcome::Succeeded).await;
    a.shared().await;
    assert_eq!(taken(), 5, "name, format, layer, manifest, name");
    assert_eq!(b.sees("t-2", &TASK).await, text("first"));
    assert_eq!(taken(), 3, "name, manifest, layer");
    assert_eq!(b.sees("t-3", &TASK).await, text("first"));
    assert_eq!(taken(), 1, "the name has not changed");
    a.publish("t-4", &TASK).await;
    write(&a.bench.target("t-4"), "second");
    taken();
    a.end("t-4", Outcome::Succeeded).await;
    a.shared().await;
    assert_eq!(taken(), 5, "name, manifest, layer, manifest, name");
    assert_eq!(b.sees("t-5", &TASK).await, text("second"));
    assert_eq!(taken(), 3, "name, manifest, the one layer that is new");
    a.finish().await;
    b.finish().await;
}
