//! A tier that is away, hangs, refuses, was wiped, or holds damaged objects.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant, SystemTime};

use baggageclaim::distribution::Settings;
use baggageclaim::engine::notice::What;
use baggageclaim::engine::{ArtifactRow, Error};
use baggageclaim::model::{Outcome, Timestamp};
use baggageclaim::shared::{Budget, Collector, ObjectId, Times, Url};

use crate::common::bench::{Ground, NEVER, eventually};
use crate::common::lab::run;
use crate::common::random::Random;
use crate::common::{Fs, Lab, skip};
use crate::failing::{Fault, Op};
use crate::nodes::{
    INPUT, Node, OUTPUT, RESOURCE, Shared, TASK, apart, reference, require, tenant, text,
    two_nodes, write,
};

const WELL: u8 = 0;
const AWAY: u8 = 1;
const HANGS: u8 = 2;
const FORBIDS: u8 = 3;
const FULL: u8 = 4;

/// A way in which every request fails, and can be changed.
fn plan(mode: &Arc<AtomicU8>) -> impl Fn(Op, &str) -> Fault + Send + Sync + use<> {
    let mode = Arc::clone(mode);
    move |op, _| match mode.load(Ordering::SeqCst) {
        FULL if !matches!(op, Op::Get | Op::List | Op::Delete) => Fault::Status(507),
        AWAY => Fault::Status(500),
        HANGS => Fault::Slow(Duration::from_secs(3600)),
        FORBIDS => Fault::Status(403),
        _ => Fault::None,
    }
}

fn short(settings: &mut Settings) {
    settings.ask = Duration::from_millis(300);
    settings.fresh_wait = Duration::from_millis(100);
    settings.input_wait = Duration::from_millis(700);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_whose_content_is_here_run_whatever_the_tier_does() {
    let tier = Shared::file();
    let mode = Arc::new(AtomicU8::new(WELL));
    let store = tier.failing(plan(&mode));
    let node = require!(Node::with(&store, short).await);
    node.share("o", &OUTPUT, "output").await;
    node.share("r", &RESOURCE, "resource").await;
    node.share("t", &TASK, "task").await;
    for (number, fault) in [AWAY, HANGS, FORBIDS].into_iter().enumerate() {
        mode.store(fault, Ordering::SeqCst);
        let began = Instant::now();
        for (volume, attributes, expected) in [
            ("i", INPUT, "output"),
            ("r", RESOURCE, "resource"),
            ("t", TASK, "task"),
        ] {
            let volume = format!("{volume}-{number}");
            assert_eq!(node.sees(&volume, &attributes).await, text(expected));
        }
        // A miss is a miss.
        let miss = [("type", "task-cache"), ("key", "other")];
        assert_eq!(node.sees(&format!("m-{number}"), &miss).await, None);
        assert!(began.elapsed() < NEVER / 4, "{:?}", began.elapsed());
        let input = [("type", "input"), ("from", "artifact/nowhere")];
        let volume = format!("n-{number}");
        let error = node
            .try_publish(&volume, &input)
            .await
            .expect_err("nowhere");
        assert!(matches!(error, Error::Coming { .. }), "{error:?}");
        assert!(
            error.to_string().contains("shared tier") || error.to_string().contains("test://"),
            "{error}"
        );
    }
    node.finish().await;
}

/// The attributes of one of three caches.
fn numbered(key: &str) -> [(&str, &str); 2] {
    [("type", "task-cache"), ("key", key)]
}

/// Commits three caches to a tier that takes nothing. Returns the error that lasts.
async fn three_wait(node: &Node) -> String {
    for number in 0..3 {
        let (volume, key) = (format!("t-{number}"), format!("key-{number}"));
        node.commit(&volume, &numbered(&key), "text").await;
    }
    let status = || node.distribution.status();
    eventually("the error is known", || status().permanent_error.is_some()).await;
    eventually("all are durable", || status().uploads_waiting == 3).await;
    assert!(status().bytes_waiting > 0);
    status().permanent_error.expect("it is known")
}

/// The tier works again, and takes what waits. Returns what pods were told since the last call.
async fn three_are_uploaded(node: &mut Node, mode: &AtomicU8) -> Vec<What> {
    mode.store(WELL, Ordering::SeqCst);
    let drained = node.distribution.drain(NEVER).await;
    assert_eq!((drained.uploaded, drained.left), (3, 0));
    // An error of reading ends with a read.
    assert_eq!(node.sees("well", &TASK).await, None);
    let status = node.distribution.status();
    assert!(
        status.permanent_error.is_none() && status.last_error.is_some(),
        "{status:?}"
    );
    let told = node.heard();
    let shared = |what: &&What| matches!(what, What::Shared { .. });
    assert_eq!(told.iter().filter(shared).count(), 3, "{told:?}");
    told
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_wait_for_the_tier_and_a_permanent_error_is_told_once() {
    let tier = Shared::file();
    let mode = Arc::new(AtomicU8::new(FORBIDS));
    let store = tier.failing(plan(&mode));
    let mut node = require!(Node::with(&store, short).await);
    let error = three_wait(&node).await;
    assert!(error.contains("access is denied"), "{error}");
    assert!(node.distribution.metrics().permanent_error);
    let began = Instant::now();
    let drained = node.distribution.drain(NEVER).await;
    assert_eq!((drained.uploaded, drained.left), (0, 3));
    assert!(
        began.elapsed() < NEVER / 2,
        "a drain does not wait for a person"
    );
    for number in 3..6 {
        assert_eq!(node.sees(&format!("t-{number}"), &TASK).await, None);
    }
    let told = node.heard();
    let unusable = |what: &&What| matches!(what, What::SharedTierUnusable { .. });
    assert_eq!(told.iter().filter(unusable).count(), 1, "{told:?}");

    mode.store(AWAY, Ordering::SeqCst);
    let drained = node.distribution.drain(Duration::from_millis(1500)).await;
    assert_eq!((drained.uploaded, drained.left), (0, 3));
    three_are_uploaded(&mut node, &mode).await;
    node.finish().await;
}

/// The events of a full tier among these.
fn full(told: &[What]) -> usize {
    let full = |what: &&What| matches!(what, What::SharedTierFull { .. });
    told.iter().filter(full).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_wait_for_a_full_tier_which_is_told_once_and_can_be_read() {
    let tier = Shared::file();
    let other = require!(Node::new(&tier.store).await);
    other.share("o", &OUTPUT, "output").await;
    let mode = Arc::new(AtomicU8::new(FULL));
    let store = tier.failing(plan(&mode));
    let mut node = require!(Node::with(&store, short).await);
    let error = three_wait(&node).await;
    assert!(error.contains("the shared tier is full"), "{error}");
    assert!(!node.distribution.metrics().permanent_error);
    // What the tier has comes, and caches start.
    assert_eq!(node.sees_at_last("i", &INPUT).await, text("output"));
    for number in 3..6 {
        assert_eq!(node.sees(&format!("t-{number}"), &TASK).await, None);
    }
    let status = node.distribution.status();
    assert!(status.permanent_error.is_some(), "reading does not end it");
    assert_eq!(full(&node.heard()), 1);
    let drained = node.distribution.drain(Duration::from_millis(1500)).await;
    assert_eq!((drained.uploaded, drained.left), (0, 3));

    let told = three_are_uploaded(&mut node, &mode).await;
    assert_eq!(full(&told), 0);
    for number in 0..3 {
        let (volume, key) = (format!("other-{number}"), format!("key-{number}"));
        assert_eq!(other.sees(&volume, &numbered(&key)).await, text("text"));
    }
    node.finish().await;
    other.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_directory_is_a_full_tier_until_there_is_space() {
    let lab = match Lab::try_sized(Fs::Tmpfs, 1 << 20) {
        Ok(lab) => lab,
        Err(reason) => return skip(&reason),
    };
    let url: Url = format!("file://{}", lab.path().display())
        .parse()
        .expect("a URL");
    let handle = tokio::runtime::Handle::current();
    let store = url.open(handle, Times::default()).expect("open");
    let mut node = require!(Node::with(&store, short).await);
    node.publish("t", &TASK).await;
    let content = Random::new(1).bytes(3 << 20);
    fs::write(node.bench.target("t").join("text"), content).expect("write");
    node.end("t", Outcome::Succeeded).await;
    let status = || node.distribution.status();
    eventually("the error is known", || status().permanent_error.is_some()).await;
    let error = status().permanent_error.expect("it is known");
    assert!(error.contains("the shared tier is full"), "{error}");
    assert_eq!(status().uploads_waiting, 1);
    assert_eq!(
        node.sees("m", &[("type", "task-cache"), ("key", "other")])
            .await,
        None
    );
    assert_eq!(full(&node.heard()), 1);
    run(Command::new("mount")
        .args(["-o", "remount,size=64M"])
        .arg(lab.path()))
    .expect("remount");
    node.shared().await;
    assert!(node.distribution.status().permanent_error.is_none());
    node.finish().await;
    let left = lab.close();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_person_must_mend_for_one_tenant_or_object_stops_no_other_uploads() {
    const PREFIX: u8 = 0;
    const OBJECT: u8 = 1;
    const NOTHING: u8 = 2;
    let tier = Shared::file();
    let bench = match Ground::ALL[0].bench().await {
        Ok(bench) => bench,
        Err(reason) => return skip(&reason),
    };
    // All of it is there before the queue is looked at, and the forbidden content is the newest.
    for (tenant_, key) in [("other", "older"), ("ci", "good"), ("ci", "bad")] {
        let attributes = [("type", "task-cache"), ("key", key)];
        let mut request = bench.request(key, key, &attributes);
        request.tenant = tenant(tenant_);
        request.share = true;
        bench.engine.publish(request).await.expect("publish");
        write(&bench.target(key), key);
        bench.outcome(key, Outcome::Succeeded).await;
        bench.unpublish(key).await;
        bench.quiet().await;
    }
    eventually("all have their tables", || {
        let rows = bench.engine.artifacts(None);
        let has_tables = |row: &ArtifactRow| row.durable && row.tables.iter().all(Option::is_some);
        rows.iter().all(has_tables)
    })
    .await;
    let mode = Arc::new(AtomicU8::new(PREFIX));
    let modes = Arc::clone(&mode);
    let store = tier.failing(move |_, path| match modes.load(Ordering::SeqCst) {
        PREFIX if path.starts_with("v1/ci/") => Fault::Status(403),
        OBJECT if path.ends_with("/task-cache/bad") => Fault::Status(400),
        _ => Fault::None,
    });
    let node = Node::start(bench, &store, short);
    eventually("the other tenant's older content is uploaded", || {
        node.distribution.metrics().uploads == 1
    })
    .await;
    let failures = || node.distribution.metrics().upload_failures;
    assert_eq!(
        failures(),
        1,
        "one request tells that a prefix is forbidden"
    );
    assert!(node.distribution.status().permanent_error.is_some());
    assert!(
        !node.distribution.metrics().permanent_error,
        "the other tenant's part works"
    );
    let began = Instant::now();
    // The object that failed is tried last.
    mode.store(OBJECT, Ordering::SeqCst);
    let drained = node.distribution.drain(NEVER).await;
    assert_eq!((drained.uploaded, drained.left), (1, 1));
    mode.store(PREFIX, Ordering::SeqCst);
    let drained = node.distribution.drain(NEVER).await;
    assert_eq!((drained.uploaded, drained.left), (0, 1));
    assert_eq!(failures(), 3, "each drain tries once more");
    mode.store(NOTHING, Ordering::SeqCst);
    let drained = node.distribution.drain(NEVER).await;
    assert_eq!((drained.uploaded, drained.left), (1, 0));
    assert!(began.elapsed() < NEVER / 2, "{:?}", began.elapsed());
    node.finish().await;
}

/// The files below a directory.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("list");
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_is_reported_once_and_a_node_that_has_the_content_mends_it() {
    let (tier, a, b) = two_nodes!();
    a.share("t", &TASK, "whole").await;
    for object in files(&tier.files.join("v1/ci/layers")) {
        let mut bytes = fs::read(&object).expect("read");
        let last = bytes.len() - 200;
        bytes[last] ^= 1;
        fs::write(&object, &bytes).expect("write");
    }
    assert_eq!(b.sees("miss", &TASK).await, None);
    let metrics = b.distribution.metrics();
    let failures = metrics.fetches.total().failures;
    assert_eq!((failures, metrics.damage_reported), (1, 1));
    assert_eq!(b.sees("miss-2", &TASK).await, None);
    assert_eq!(b.distribution.metrics().damage_reported, 1);
    // The node that has it learns it from its next question.
    assert_eq!(a.sees("look", &TASK).await, text("whole"));
    eventually("it waits", || {
        a.distribution.status().uploads_waiting == 1 || a.distribution.metrics().uploads == 2
    })
    .await;
    a.shared().await;
    assert_eq!(b.sees("mended", &TASK).await, text("whole"));
    a.finish().await;
    b.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_an_older_commit_does_not_take_the_place_of_one_that_was_lost() {
    let (tier, a, b) = two_nodes!();
    a.share("t-1", &TASK, "first").await;
    assert_eq!(b.sees("look", &TASK).await, text("first"));
    a.share("t-2", &TASK, "second").await;
    // A third node finds the damage.
    for object in files(&tier.files.join("v1/ci/layers")) {
        let mut bytes = fs::read(&object).expect("read");
        let last = bytes.len() - 200;
        bytes[last] ^= 1;
        fs::write(&object, &bytes).expect("write");
    }
    let c = require!(Node::new(&tier.store).await);
    assert_eq!(c.sees("miss", &TASK).await, None);
    assert_eq!(b.sees("older", &TASK).await, text("first"));
    b.shared().await;
    assert_eq!(b.distribution.metrics().uploads, 0);
    assert_eq!(a.sees("newer", &TASK).await, text("second"));
    eventually("it is uploaded", || a.distribution.metrics().uploads == 3).await;
    assert_eq!(b.sees("mended", &TASK).await, text("second"));
    for node in [a, b, c] {
        node.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_was_wiped_is_filled_again() {
    let (tier, a, b) = two_nodes!();
    a.share("t", &TASK, "first").await;
    fs::remove_dir_all(tier.files.join("v1")).expect("wipe");
    assert_eq!(b.sees("miss", &TASK).await, None);
    assert_eq!(a.sees("look", &TASK).await, text("first"));
    eventually("it is uploaded", || a.distribution.metrics().uploads == 2).await;
    assert!(tier.files.join("v1/ci/format").is_file());
    assert_eq!(b.sees("again", &TASK).await, text("first"));
    a.share("t-2", &TASK, "second").await;
    assert_eq!(b.sees("newer", &TASK).await, text("second"));
    a.finish().await;
    b.finish().await;
}

/// Takes something away from the files of a tier.
type Damage = fn(&Path);

/// Checks follow each other without a pause that counts.
fn often(settings: &mut Settings) {
    settings.check_every = Duration::from_millis(240);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_mends_outputs_and_resource_caches_that_its_pods_do_not_ask_about() {
    let tier = Shared::file();
    let a = require!(Node::with(&tier.store, often).await);
    let b = require!(Node::new(&tier.store).await);
    a.share("o", &OUTPUT, "output").await;
    a.share("r", &RESOURCE, "resource").await;
    let uploads = || a.distribution.metrics().uploads;
    // A rename takes all away at once, before the next check.
    let damage: [(&str, Damage); 5] = [
        ("wiped", |dir| {
            fs::rename(dir.join("v1"), dir.join("wiped")).expect("wipe");
        }),
        ("lost", |dir| {
            fs::rename(dir.join("v1/ci/layers"), dir.join("lost")).expect("lose");
        }),
        ("manifests lost", |dir| {
            fs::rename(dir.join("v1/ci/manifests"), dir.join("manifests")).expect("lose");
        }),
        ("manifests corrupt", |dir| {
            for object in files(&dir.join("v1/ci/manifests")) {
                fs::write(object, "{").expect("write");
            }
        }),
        ("corrupt", |dir| {
            let is_marker = |path: &Path| path.extension().is_some_and(|it| it == "condemned");
            for object in files(&dir.join("v1/ci/layers")) {
                if !is_marker(&object) {
                    let mut bytes = fs::read(&object).expect("read");
                    let last = bytes.len() - 200;
                    bytes[last] ^= 1;
                    fs::write(&object, &bytes).expect("write");
                }
            }
        }),
    ];
    for (case, damage) in damage {
        let before = uploads();
        damage(&tier.files);
        // A node that lacks the content finds the damage, and its input waits until it is mended.
        let node = require!(Node::new(&tier.store).await);
        assert_eq!(node.sees("i", &INPUT).await, text("output"), "{case}");
        let seen = node.sees("r", &RESOURCE).await;
        assert!(
            seen.is_none() || seen == text("resource"),
            "{case}: {seen:?}"
        );
        eventually(case, || uploads() >= before + 2).await;
        let c = require!(Node::new(&tier.store).await);
        assert_eq!(c.sees("i", &INPUT).await, text("output"), "{case}");
        assert_eq!(c.sees("r", &RESOURCE).await, text("resource"), "{case}");
        c.finish().await;
        node.finish().await;
    }
    let settled = uploads();
    let asked = a.questions();
    eventually("both are checked again", || a.questions() >= asked + 4).await;
    assert_eq!(uploads(), settled, "whole content is not uploaded again");
    // A clear is no loss, and no pod asks about it.
    let names = ["artifact/built", "resource-cache/git"];
    for name in names {
        let cleared = b.distribution.clear(&tenant("ci"), &reference(name)).await;
        cleared.expect("the tier is there");
    }
    eventually("it loses its names", || {
        names.iter().all(|name| a.bench.artifact(name).is_none())
    })
    .await;
    // The tier forgets a clear after 30 days. Then the node has nothing left to upload again.
    for record in files(&tier.files.join("v1/ci/names")) {
        fs::remove_file(record).expect("remove");
    }
    assert_eq!(a.sees("r-2", &RESOURCE).await, None);
    a.shared().await;
    assert_eq!(uploads(), settled, "cleared content does not come back");
    a.finish().await;
    b.finish().await;
}

/// Lets all names of a tier show nothing, as a budget of no artifacts does.
fn evict_all(tier: &Shared) {
    for record in files(&tier.files.join("v1/ci/names")) {
        let file = fs::File::options().append(true).open(record).expect("open");
        let old = SystemTime::now() - Duration::from_hours(2);
        file.set_modified(old).expect("utimes");
    }
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = since.expect("after 1970").as_millis();
    let now = Timestamp(u64::try_from(now).expect("soon"));
    let (ci, store) = (tenant("ci"), tier.store.clone());
    let none = Budget {
        bytes: None,
        artifacts: Some(0),
    };
    let collected = apart(|| {
        let collector = Collector {
            budget: Some(none),
            ..Collector::new(&store, &ci, ObjectId::from_bits(1))
        };
        collector.run(now, &|| false)
    });
    assert_eq!(collected.expect("collect").evicted, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_budget_evicted_comes_back_with_a_use_and_not_by_itself() {
    let tier = Shared::file();
    let a = require!(Node::with(&tier.store, often).await);
    let b = require!(Node::new(&tier.store).await);
    a.share("o", &OUTPUT, "output").await;
    a.share("r", &RESOURCE, "resource").await;
    a.share("t", &TASK, "task").await;
    let uploads = || a.distribution.metrics().uploads;
    let before = uploads();
    evict_all(&tier);
    let asked = a.questions();
    eventually("both are checked twice", || a.questions() >= asked + 4).await;
    a.shared().await;
    assert_eq!(uploads(), before, "no pod uses it");
    let shows = |name: &str| {
        let record = tier.record(name).expect("a record");
        assert_eq!(record.evicted, record.content().is_none(), "{record:?}");
        record.content().is_some()
    };
    let names = ["artifact/built", "resource-cache/git", "task-cache/go"];
    assert_eq!(names.map(shows), [false; 3]);
    // The node that has it goes on with it, and uploads a task cache that is used.
    assert_eq!(a.sees("i", &INPUT).await, text("output"));
    assert_eq!(a.sees("r-2", &RESOURCE).await, text("resource"));
    assert_eq!(a.sees("t-2", &TASK).await, text("task"));
    eventually("it is uploaded", || uploads() == before + 1).await;
    assert_eq!(names.map(shows), [false, false, true]);
    assert_eq!(b.sees("t-3", &TASK).await, text("task"));
    // Another node misses the rest, makes it again, and that is shared.
    assert_eq!(b.sees("miss", &RESOURCE).await, None);
    b.share("r-3", &RESOURCE, "made again").await;
    b.share("o-2", &OUTPUT, "made again").await;
    assert_eq!(names.map(shows), [true; 3]);
    let c = require!(Node::new(&tier.store).await);
    assert_eq!(c.sees("r-4", &RESOURCE).await, text("made again"));
    assert_eq!(c.sees("i-2", &INPUT).await, text("made again"));
    for node in [a, b, c] {
        node.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_cache_on_this_node_is_used_if_the_newer_one_cannot_be_fetched() {
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    a.share("t-1", &TASK, "first").await;
    let mode = Arc::new(AtomicU8::new(WELL));
    let fault = plan(&mode);
    let store = tier.failing(move |op, path| {
        if path.contains("/layers/") {
            fault(op, path)
        } else {
            Fault::None
        }
    });
    let b = Node::with(&store, |settings| {
        // A transfer that stalls is not waited for, unlike one that moves.
        settings.stall = Duration::from_millis(300);
    });
    let b = require!(b.await);
    eventually_sees(&b, "first").await;
    a.share("t-2", &TASK, "second").await;
    for (number, fault) in [AWAY, FORBIDS, HANGS].into_iter().enumerate() {
        mode.store(fault, Ordering::SeqCst);
        let volume = format!("older-{number}");
        assert_eq!(b.sees(&volume, &TASK).await, text("first"));
    }
    mode.store(WELL, Ordering::SeqCst);
    eventually_sees(&b, "second").await;
    a.finish().await;
    b.finish().await;
}

/// The bytes of a table count as those of content do.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_table_is_waited_for_while_it_comes() {
    const STALL: Duration = Duration::from_secs(1);
    let tier = Shared::file();
    let a = require!(Node::new(&tier.store).await);
    a.share("t-1", &TASK, "first").await;
    let read = Arc::new(AtomicU8::new(0));
    let reads = Arc::clone(&read);
    let store = tier.failing(move |op, path| {
        if op != Op::Get || !path.contains("/layers/") {
            return Fault::None;
        }
        // The table of an object of more than 16 MiB is read first. A read that is cut goes on.
        match reads.fetch_add(1, Ordering::SeqCst) {
            1..=10 => {
                std::thread::sleep(STALL * 3 / 10);
                Fault::Cut(64 << 10)
            }
            _ => Fault::None,
        }
    });
    let b = require!(Node::with(&store, |settings| settings.stall = STALL).await);
    assert_eq!(b.sees("older", &TASK).await, text("first"));
    assert_eq!(read.load(Ordering::SeqCst), 1, "it is a small object");
    a.publish("t-2", &TASK).await;
    let target = a.bench.target("t-2");
    fs::write(target.join("noise"), Random::new(1).bytes(17 << 20)).expect("write");
    for number in 0..8000 {
        let random = Random::new(number).bytes(200).into_iter();
        let name: String = random.map(|byte| char::from(b'a' + byte % 26)).collect();
        fs::File::create(target.join(name)).expect("create");
    }
    write(&target, "second");
    a.end("t-2", Outcome::Succeeded).await;
    a.shared().await;
    let began = Instant::now();
    assert_eq!(b.sees("newer", &TASK).await, text("second"));
    assert!(began.elapsed() > 2 * STALL, "{:?}", began.elapsed());
    a.finish().await;
    b.finish().await;
}

/// Publishes until the fetch that an earlier publish began is done.
async fn eventually_sees(node: &Node, expected: &str) {
    let began = Instant::now();
    for number in 0.. {
        let volume = format!("sees-{expected}-{number}");
        if node.sees(&volume, &TASK).await == text(expected) {
            return;
        }
        assert!(began.elapsed() < NEVER, "it never sees {expected}");
    }
}
