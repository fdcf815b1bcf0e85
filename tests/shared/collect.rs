//! The collector on real objects: what it marks, deletes and keeps, beside uploads and a second
//! collector.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use baggageclaim::model::{Coverage, Fence, Fences, Name, Timestamp};
use baggageclaim::shared::{
    ClusterUid, Collected, Collector, Commit, Committed, Error, LayerRef, NameRecord, Publication,
    Resolved, Source as _, Store, clear, look, usage,
};

use crate::common::{Fs, require_lab};
use crate::failing::{Fault, Op};
use crate::tier::{
    Held, Tier, bucket, commit, down, hold, id, never, publish, reference, small_parts, tenant,
};

pub(crate) fn now() -> Timestamp {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .expect("after 1970");
    Timestamp(u64::try_from(since.as_millis()).expect("soon"))
}

fn collect(tier: &Tier) -> Collected {
    let collected = Collector::new(&tier.store, &tenant(), id()).run(now(), &never);
    collected.expect("collect")
}

/// Makes everything that is there older, as the storage's clock shows it.
pub(crate) fn age(tier: &Tier, by: Duration) {
    let mut waiting = vec![tier.files.join("v1")];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(dir).expect("list") {
            let path = entry.expect("entry").path();
            if path.is_dir() {
                waiting.push(path);
            } else {
                let file = File::options().append(true).open(&path).expect("open");
                let old = file.metadata().expect("stat").modified().expect("mtime") - by;
                file.set_modified(old).expect("utimes");
            }
        }
    }
}

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

fn small(lab: &crate::common::Lab, text: &str) -> Held {
    let dir = lab.dir(&format!("layer-{}", id()));
    fs::write(dir.join("file"), text).expect("write");
    hold(lab, &dir)
}

fn markers(tier: &Tier) -> Vec<PathBuf> {
    let (mut markers, mut waiting) = (Vec::new(), vec![tier.files.join("v1")]);
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(dir).expect("list") {
            let path: PathBuf = entry.expect("entry").path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|it| it == "condemned") {
                markers.push(path);
            }
        }
    }
    markers
}

/// Publishes content under a name, with a change of the commit.
fn publish_but(
    tier: &Tier,
    name: &str,
    held: &Held,
    change: impl FnOnce(&mut Commit),
) -> Committed {
    let publication = Publication::begin(&tier.store, &tenant(), id()).expect("begin");
    let layer = publication.layer((&held.table, &held.holder), small_parts(), &never);
    let mut commit = commit(name, vec![layer.expect("upload")]);
    change(&mut commit);
    publication.commit(commit, now()).expect("commit")
}

#[test]
fn what_nothing_shows_goes_after_two_graces_and_nothing_else() {
    let lab = require_lab!(Fs::Ext4);
    // Both tiers keep their objects as files, whose times the test sets back.
    for tier in Tier::both() {
        let (old, new, kept) = (small(&lab, "old"), small(&lab, "new"), small(&lab, "kept"));
        publish(&tier.store, "task-cache/x", &[&old, &kept]).expect("publish");
        publish(&tier.store, "task-cache/x", &[&new, &kept]).expect("publish");
        publish(&tier.store, "artifact/y", &[&kept]).expect("publish");
        assert_eq!(collect(&tier).condemned, 0, "everything is young");
        age(&tier, 25 * HOUR);
        let ci = tenant();
        let dry = Collector {
            dry_run: true,
            ..Collector::new(&tier.store, &ci, id())
        };
        let would = dry.run(now(), &never).expect("collect");
        // The old manifest. Its layer is shown by it until it is gone.
        assert_eq!((would.condemned, markers(&tier).len()), (1, 0));
        let done = collect(&tier);
        assert_eq!(
            (done.condemned, done.deleted, markers(&tier).len()),
            (1, 0, 1)
        );
        assert_eq!(collect(&tier).condemned, 0, "once");
        age(&tier, 25 * HOUR);
        let done = collect(&tier);
        assert_eq!(
            (done.condemned, done.deleted, markers(&tier).len()),
            (0, 1, 0),
            "{done:?}"
        );
        let done = collect(&tier);
        assert_eq!((done.condemned, done.deleted), (1, 0), "the layer");
        age(&tier, 25 * HOUR);
        assert_eq!(collect(&tier).deleted, 1);
        let left = usage(&tier.store, &tenant(), &never).expect("usage");
        // `kept` is small, and was uploaded for each name.
        assert_eq!((left.names, left.manifests, left.layers), (2, 2, 3));
        for name in ["task-cache/x", "artifact/y"] {
            let found = bucket(&tier.store).resolve(&tenant(), &reference(name), None);
            let Resolved::Found(found) = found.expect("resolve") else {
                panic!("{name}")
            };
            for layer in &found.manifest.layers {
                let into = lab.dir(&format!("down-{}", id()));
                down(&lab, &[&bucket(&tier.store)], layer, &into).expect("fetch");
            }
        }
        assert_eq!(
            collect(&tier),
            Collected {
                names: 2,
                manifests: 2,
                layers: 3,
                bytes: left.bytes,
                ..Collected::default()
            }
        );
    }
}

/// A collector that is killed between the deletion of an object and that of its marker leaves the
/// marker.
#[test]
fn a_marker_goes_after_its_object() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let held = small(&lab, "x");
    publish(&tier.store, "task-cache/x", &[&held]).expect("publish");
    publish(&tier.store, "task-cache/x", &[&held]).expect("publish");
    age(&tier, 25 * HOUR);
    assert_eq!(collect(&tier).condemned, 1);
    let [marker] = &*markers(&tier) else {
        panic!("one marker")
    };
    fs::remove_file(marker.with_extension("")).expect("delete the object");
    let ci = tenant();
    let dry = Collector {
        dry_run: true,
        ..Collector::new(&tier.store, &ci, id())
    };
    dry.run(now(), &never).expect("collect");
    assert!(marker.exists(), "a dry run changes nothing");
    assert_eq!(collect(&tier).deleted, 0);
    assert!(!marker.exists());
}

#[test]
fn names_expire_and_tombstones_go() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let held = small(&lab, "x");
    publish_but(&tier, "task-cache/x", &held, |it| {
        it.ttl_seconds = Some(3600);
    });
    assert_eq!(collect(&tier).expired, 0);
    age(&tier, 2 * HOUR);
    assert_eq!(collect(&tier).expired, 1);
    let nothing = bucket(&tier.store).resolve(&tenant(), &reference("task-cache/x"), None);
    assert!(matches!(nothing.expect("resolve"), Resolved::Nothing { number, .. } if number > 0));
    // It refuses no commit, and goes when none comes.
    publish(&tier.store, "task-cache/x", &[&held]).expect("publish");
    clear(
        &tier.store,
        &tenant(),
        &reference("task-cache/gone"),
        0,
        id(),
        now(),
    )
    .expect("clear");
    age(&tier, 29 * 24 * HOUR);
    assert_eq!(collect(&tier).deleted_names, 0);
    age(&tier, 2 * 24 * HOUR);
    assert_eq!(collect(&tier).deleted_names, 1);
    let gone = look(&tier.store, &tenant(), &reference("task-cache/gone"));
    assert!(gone.expect("look").is_none());
}

/// Publishes a layer that the tier has.
fn publish_layer(store: &Store, name: &str, layer: LayerRef) -> baggageclaim::shared::Result<()> {
    let publication = Publication::begin(store, &tenant(), id())?;
    let committed = publication.commit(commit(name, vec![layer]), now())?;
    assert!(matches!(committed, Committed::Named(_)), "{committed:?}");
    Ok(())
}

/// A name whose record can be deleted.
fn expired(tier: &Tier, name: &str, held: &Held) -> LayerRef {
    publish_but(tier, name, held, |it| it.ttl_seconds = Some(3600));
    let found = bucket(&tier.store).resolve(&tenant(), &reference(name), None);
    let Resolved::Found(found) = found.expect("resolve") else {
        panic!("{name}")
    };
    age(tier, 2 * HOUR);
    assert_eq!(collect(tier).expired, 1);
    age(tier, 25 * HOUR);
    found.manifest.layers[0]
}

#[test]
fn a_commit_beside_the_deletion_of_its_record_is_not_lost() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let held = small(&lab, "x");
    // Directly before the mark, and between the mark and the deletion.
    for (moment, name, deleted) in [
        (Op::Replace, "task-cache/before", 0),
        (Op::Delete, "task-cache/after", 1),
    ] {
        let layer = expired(&tier, name, &held);
        let (direct, committed) = (tier.store.clone(), Arc::new(Mutex::new(None)));
        let result = Arc::clone(&committed);
        let (store, _) = tier.failing(move |op, path| {
            let mut result = result.lock().expect("no panic");
            if op == moment && path.ends_with(&format!("names/{name}")) && result.is_none() {
                let publish = || publish_layer(&direct, name, layer);
                let done = std::thread::scope(|scope| scope.spawn(publish).join());
                *result = Some(done.expect("no panic"));
            }
            Fault::None
        });
        let ci = tenant();
        let done = Collector::new(&store, &ci, id()).run(now(), &never);
        assert_eq!(done.expect("collect").deleted_names, deleted, "{name}");
        let committed = committed.lock().expect("no panic").take();
        match committed.expect("the moment came") {
            Ok(()) => assert_eq!(moment, Op::Replace),
            Err(error) => {
                assert!(matches!(error, Error::Deleting { .. }), "{error}");
                assert!(error.is_temporary() && moment == Op::Delete);
                publish_layer(&tier.store, name, layer).expect("now it is gone");
            }
        }
        assert!(shows(&tier, name));
    }
}

#[test]
fn a_record_that_a_killed_collector_marked_is_deleted_or_written_over_later() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let (held, name) = (small(&lab, "x"), "task-cache/x");
    for is_collected in [true, false] {
        let layer = expired(&tier, name, &held);
        let (store, _) = tier.failing(|op, path| match op {
            Op::Delete if path.contains("names/") => Fault::Status(500),
            _ => Fault::None,
        });
        let ci = tenant();
        let killed = Collector::new(&store, &ci, id()).run(now(), &never);
        let error = killed.expect_err("the deletion fails");
        assert!(matches!(error, Error::Away { .. }), "{error}");
        let marked = record_of(&tier, name);
        assert!(marked.deleting && marked.content().is_none(), "{marked:?}");
        age(&tier, 2 * HOUR);
        assert_eq!(collect(&tier).deleted_names, 0);
        let error = publish_layer(&tier.store, name, layer).expect_err("it waits");
        assert!(matches!(error, Error::Deleting { .. }), "{error}");
        // A node that looks first uploads nothing.
        let mut publication = Publication::begin(&tier.store, &tenant(), id()).expect("begin");
        let error = publication.look(&reference(name), now());
        assert!(matches!(error, Err(Error::Deleting { .. })), "{error:?}");
        age(&tier, HOUR);
        if is_collected {
            assert_eq!(collect(&tier).deleted_names, 1);
        } else {
            let clear = || clear(&tier.store, &tenant(), &reference(name), 0, id(), now());
            let error = clear().expect_err("it writes nothing that shows the storage's time");
            assert!(matches!(error, Error::Deleting { .. }), "{error}");
            // Of a process that has not read the record: a storage gives a changed time of a record
            // only with another ETag, unlike `age`.
            let (fresh, _) = tier.failing(|_, _| Fault::None);
            // The storage's clock decides, whatever the writer's says.
            let publication = Publication::begin(&fresh, &tenant(), id()).expect("begin");
            publication
                .commit(commit(name, vec![layer]), Timestamp(1))
                .expect("commit");
        }
        publish_layer(&tier.store, name, layer).expect("publish");
        assert!(shows(&tier, name));
        assert!(!record_of(&tier, name).deleting);
    }
}

#[test]
fn a_full_storage_loses_what_has_a_marker_and_is_collected_then() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    for text in ["1", "2"] {
        publish(&tier.store, "task-cache/x", &[&small(&lab, text)]).expect("publish");
    }
    age(&tier, 25 * HOUR);
    let marked = collect(&tier).condemned;
    assert!(marked >= 1, "the first layer or its manifest");
    let layer = publish_but(&tier, "task-cache/y", &small(&lab, "3"), |it| {
        it.ttl_seconds = Some(3600);
    });
    assert!(matches!(layer, Committed::Named(_)));
    let writes = |op| matches!(op, Op::Put | Op::Create | Op::Replace);
    let (full, _) = tier.failing(move |op, _| match op {
        _ if writes(op) => Fault::Status(507),
        _ => Fault::None,
    });
    let run = |store: &Store| Collector::new(store, &tenant(), id()).run(now(), &never);
    // Nothing tells the storage's time, so a day is added.
    age(&tier, 47 * HOUR);
    let error = run(&full).expect_err("it stays full");
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert_eq!(markers(&tier).len() as u64, marked);
    age(&tier, HOUR);
    let error = run(&full).expect_err("it stays full");
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert_eq!(markers(&tier).len(), 0, "they are deleted");
    assert!(shows(&tier, "task-cache/x") && shows(&tier, "task-cache/y"));

    // One that has room again after the first deletion.
    assert_eq!(collect(&tier).expired, 1);
    assert_eq!(collect(&tier).condemned, 1, "the manifest of y");
    age(&tier, 49 * HOUR);
    let is_full = Arc::new(AtomicBool::new(true));
    let until = Arc::clone(&is_full);
    let (store, _) = tier.failing(move |op, _| match op {
        Op::Delete => {
            until.store(false, Ordering::SeqCst);
            Fault::None
        }
        _ if writes(op) && until.load(Ordering::SeqCst) => Fault::Status(507),
        _ => Fault::None,
    });
    let done = run(&store).expect("collect");
    assert!(
        done.deleted >= 2 && !is_full.load(Ordering::SeqCst),
        "{done:?}"
    );
    assert_eq!(done.deleted_names, 1);
    let found = bucket(&tier.store).resolve(&tenant(), &reference("task-cache/x"), None);
    let Resolved::Found(found) = found.expect("resolve") else {
        panic!("it is gone")
    };
    let into = lab.dir("down");
    down(
        &lab,
        &[&bucket(&tier.store)],
        &found.manifest.layers[0],
        &into,
    )
    .expect("fetch");
}

#[test]
fn the_last_records_of_a_namespace_go_with_its_content() {
    let lab = require_lab!(Fs::Ext4);
    let held = small(&lab, "x");
    for tier in Tier::both() {
        let tenants = || tier.store.tenants().expect("list");
        let cluster = ClusterUid::new("1").expect("a uid");
        let record = |earlier, uid| {
            let set = tier
                .store
                .set_namespace_of(&tenant(), &cluster, earlier, uid);
            set.expect("record");
        };
        publish_but(&tier, "task-cache/x", &held, |it| {
            it.ttl_seconds = Some(3600);
        });
        record(None, Some("uid"));
        // It expires. Its record is deleted, and then, each a day after its marker, its manifest
        // and its layer.
        for _ in 0..5 {
            age(&tier, 25 * HOUR);
            collect(&tier);
            assert_eq!(tenants(), [tenant()]);
        }
        record(Some("uid"), None);
        collect(&tier);
        assert_eq!(
            tenants(),
            [],
            "nothing was left but the format and the lease"
        );
        // A namespace that begins to use the tier.
        let publication = Publication::begin(&tier.store, &tenant(), id()).expect("begin");
        collect(&tier);
        assert_eq!(tenants(), [tenant()], "its format is new");
        // As if a collector had removed it at this moment.
        age(&tier, 25 * HOUR);
        collect(&tier);
        assert_eq!(tenants(), []);
        let layer = publication.layer((&held.table, &held.holder), small_parts(), &never);
        let commit = commit("task-cache/x", vec![layer.expect("upload")]);
        publication.commit(commit, now()).expect("commit");
        let format = tier.files.join("v1/ci/format");
        assert!(!format.exists());
        collect(&tier);
        assert!(format.exists() && shows(&tier, "task-cache/x"));
    }
}

#[test]
fn a_late_record_of_a_namespace_takes_no_newer_one() {
    let Some(tier) = Tier::s3() else { return };
    let cluster = ClusterUid::new("1").expect("a uid");
    let set = |store: &Store, earlier, uid| {
        store.set_namespace_of(&tenant(), &cluster, earlier, Some(uid))
    };
    let recorded = || tier.store.namespace_of(&tenant(), &cluster).expect("read");
    for (moment, earlier, newer) in [(Op::Create, None, "2"), (Op::Replace, Some("2"), "4")] {
        let direct = tier.store.clone();
        let by = cluster.clone();
        // Another controller of the cluster is faster.
        let (late, _) = tier.failing(move |op, _| {
            if op == moment {
                let (direct, by) = (direct.clone(), by.clone());
                let faster = move || direct.set_namespace_of(&tenant(), &by, earlier, Some(newer));
                std::thread::scope(|scope| scope.spawn(faster).join())
                    .expect("no panic")
                    .expect("it is the first");
            }
            Fault::None
        });
        let error = set(&late, earlier, "3").expect_err("the other one was faster");
        assert!(matches!(error, Error::Conflict { .. }), "{error}");
        assert_eq!(recorded().as_deref(), Some(newer));
    }
    let error = set(&tier.store, Some("2"), "5").expect_err("it read an earlier record");
    assert!(matches!(error, Error::Conflict { .. }), "{error}");
    assert_eq!(recorded().as_deref(), Some("4"));
}

fn record_of(tier: &Tier, name: &str) -> NameRecord {
    let record = look(&tier.store, &tenant(), &reference(name)).expect("look");
    record.expect("a record")
}

fn shows(tier: &Tier, name: &str) -> bool {
    record_of(tier, name).content().is_some()
}

#[test]
fn what_a_fence_cleared_expires_and_newer_content_stays() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let held = small(&lab, "x");
    let made = [
        ("task-cache/a", 0),
        ("task-cache/b", 2),
        ("artifact/c", 1),
        ("artifact/d", 0),
    ];
    for (name, fence) in made {
        publish_but(&tier, name, &held, |it| it.fence = fence);
    }
    let name = |name: &str| {
        Coverage::Name(Name {
            tenant: tenant(),
            reference: reference(name),
        })
    };
    let elsewhere = Coverage::Namespace("other".parse().expect("a label"));
    let covered = [
        name("task-cache/a"),
        name("task-cache/b"),
        name("artifact/c"),
        elsewhere,
    ];
    let mut fences = Fences::default();
    for (previous, covers) in (0..).zip(covered) {
        fences.insert(Fence {
            number: previous + 1,
            previous,
            id: 7,
            covers,
            repeats: Vec::new(),
        });
    }
    let ci = tenant();
    let collect = |fences: &Fences, dry_run| {
        let collector = Collector {
            dry_run,
            fences: fences.clone(),
            ..Collector::new(&tier.store, &ci, id())
        };
        collector.run(now(), &never).expect("collect").expired
    };
    assert_eq!(collect(&fences, true), 2);
    assert!(shows(&tier, "task-cache/a"), "a dry run changes nothing");
    assert_eq!(collect(&fences, false), 2);
    let shown = made.map(|(name, _)| shows(&tier, name));
    assert_eq!(shown, [false, true, false, true]);
    // What forked from it does not come back, whatever it saw in the tier before.
    let before = record_of(&tier, "task-cache/a").number - 1;
    for base in [None, Some(0), Some(before)] {
        let late = publish_but(&tier, "task-cache/a", &held, |it| it.writer.base = base);
        assert_eq!(late, Committed::Cleared, "{base:?}");
    }
    // A later commit is welcome, and stays.
    publish_but(&tier, "task-cache/a", &held, |it| {
        it.fence = 4;
        it.writer.fence = 1;
        it.writer.base = Some(before + 1);
    });
    assert_eq!(collect(&fences, false), 0);
    assert!(shows(&tier, "task-cache/a"));
    fences.insert(Fence {
        number: 5,
        previous: 4,
        id: 7,
        covers: Coverage::Namespace(tenant()),
        repeats: Vec::new(),
    });
    assert_eq!(collect(&fences, false), 3);
    assert_eq!(made.map(|(name, _)| shows(&tier, name)), [false; 4]);
}

#[test]
fn a_name_that_is_committed_during_a_collection_does_not_expire() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let held = small(&lab, "x");
    publish_but(&tier, "task-cache/x", &held, |it| {
        it.ttl_seconds = Some(3600);
    });
    age(&tier, 2 * HOUR);
    let is_committed = AtomicBool::new(false);
    let ci = tenant();
    let collector = Collector {
        progress: &|done| {
            if done.names > 0 && !is_committed.swap(true, Ordering::Relaxed) {
                let publish = || publish_but(&tier, "task-cache/x", &held, |it| it.fence = 0);
                std::thread::scope(|scope| scope.spawn(publish).join().expect("no panic"));
            }
        },
        ..Collector::new(&tier.store, &ci, id())
    };
    let done = collector.run(now(), &never).expect("collect");
    assert!(is_committed.into_inner());
    assert_eq!(done.expired, 0);
    assert!(shows(&tier, "task-cache/x"));
}

/// The tier, on which this happens after the list of the names and before the first read of this
/// one.
fn between_list_and_read(
    tier: &Tier,
    name: &'static str,
    happens: impl Fn(&Store) + Send + Sync + 'static,
) -> Store {
    let (direct, has_happened) = (tier.store.clone(), AtomicBool::new(false));
    let (store, _) = tier.failing(move |op, path| {
        let is_first = op == Op::Get
            && path.ends_with(&format!("names/{name}"))
            && !has_happened.swap(true, Ordering::SeqCst);
        if is_first {
            std::thread::scope(|scope| scope.spawn(|| happens(&direct)).join()).expect("no panic");
        }
        Fault::None
    });
    store
}

#[test]
fn a_record_that_is_written_between_the_list_and_its_read_is_judged_by_its_own_age() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let (held, ci) = (small(&lab, "x"), tenant());
    let run = |store: &Store| Collector::new(store, &ci, id()).run(now(), &never);
    // Another collector marks a record that can be deleted.
    let marked = "task-cache/marked";
    expired(&tier, marked, &held);
    let (killed, _) = tier.failing(|op, path| match op {
        Op::Delete if path.contains("names/") => Fault::Status(500),
        _ => Fault::None,
    });
    let store = between_list_and_read(&tier, marked, move |_| {
        // It takes the lease, as if that were over.
        let later = Timestamp(now().0 + 3 * 3_600_000);
        let killed = Collector::new(&killed, &tenant(), id()).run(later, &never);
        killed.expect_err("the deletion fails");
    });
    assert_eq!(run(&store).expect("collect").deleted_names, 0);
    assert!(
        record_of(&tier, marked).deleting,
        "its own collector deletes it"
    );
    // A commit with a time to live over one whose time is over.
    let name = "task-cache/again";
    publish_but(&tier, name, &held, |it| it.ttl_seconds = Some(3600));
    let found = bucket(&tier.store).resolve(&ci, &reference(name), None);
    let Resolved::Found(found) = found.expect("resolve") else {
        panic!("{name}")
    };
    age(&tier, 2 * HOUR);
    let layer = found.manifest.layers[0];
    let store = between_list_and_read(&tier, name, move |direct| {
        let publication = Publication::begin(direct, &tenant(), id()).expect("begin");
        let mut commit = commit(name, vec![layer]);
        commit.ttl_seconds = Some(3600);
        publication.commit(commit, now()).expect("commit");
    });
    assert_eq!(run(&store).expect("collect").expired, 0);
    assert!(shows(&tier, name));
    // A clear of content that was written longer ago than a clear is remembered.
    let name = "task-cache/cleared";
    publish(&tier.store, name, &[&held]).expect("publish");
    age(&tier, 31 * 24 * HOUR);
    let store = between_list_and_read(&tier, name, |direct| {
        let cleared = clear(direct, &tenant(), &reference(name), 0, id(), now());
        cleared.expect("clear");
    });
    assert_eq!(
        run(&store).expect("collect").deleted_names,
        1,
        "the marked one"
    );
    let record = record_of(&tier, name);
    assert!(record.cleared > 0 && !record.deleting, "{record:?}");
}

#[test]
fn a_condemned_layer_is_not_found_and_one_that_is_shown_again_lives() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let dir = lab.dir("large");
    fs::write(dir.join("file"), vec![b'x'; 3 << 20]).expect("write");
    let held = hold(&lab, &dir);
    let up = || {
        let publication = Publication::begin(&tier.store, &tenant(), id()).expect("begin");
        let layer = publication.layer((&held.table, &held.holder), small_parts(), &never);
        (publication, layer.expect("upload"))
    };
    let (_, first) = up();
    age(&tier, 25 * HOUR);
    // Found before the collector marks it, and shown after that.
    let (publication, found) = up();
    assert_eq!(found, first);
    assert_eq!(collect(&tier).condemned, 1);
    publication
        .commit(commit("task-cache/x", vec![found]), now())
        .expect("commit");
    let (_, second) = up();
    assert_ne!(second.upload, first.upload, "what has a marker is not used");
    age(&tier, 25 * HOUR);
    let done = collect(&tier);
    assert_eq!(done.deleted, 0, "a name shows it");
    down(&lab, &[&bucket(&tier.store)], &first, &lab.dir("down")).expect("fetch");
}

#[test]
fn a_lease_whose_acknowledgement_is_lost_was_taken() {
    let Some(tier) = Tier::s3() else { return };
    for taken in [Op::Create, Op::Replace] {
        let lost = AtomicBool::new(false);
        let (store, _) = tier.failing(move |op, path| {
            let is_it = op == taken && path.ends_with("/gc");
            if is_it && !lost.swap(true, Ordering::Relaxed) {
                return Fault::LostAnswer;
            }
            Fault::None
        });
        let later = Timestamp(now().0 + 3 * 3_600_000);
        let collected = Collector::new(&store, &tenant(), id()).run(later, &never);
        collected.unwrap_or_else(|error| panic!("{taken:?}: {error}"));
        let again = Collector::new(&tier.store, &tenant(), id()).run(later, &never);
        again.unwrap_or_else(|error| panic!("{taken:?}: {error}"));
    }
}

#[test]
fn the_lease_and_a_storage_that_fails() {
    let lab = require_lab!(Fs::Ext4);
    let Some(tier) = Tier::s3() else { return };
    let held = small(&lab, "x");
    publish(&tier.store, "task-cache/x", &[&held]).expect("publish");
    publish(&tier.store, "task-cache/x", &[&held]).expect("publish");
    age(&tier, 25 * HOUR);
    // A collector that dies with the lease: the next one waits for its end.
    let (dies, _) = tier.failing(|op, path| match op {
        Op::List if path.ends_with("layers") => Fault::Status(500),
        Op::Replace if path.ends_with("/gc") => Fault::Status(500),
        _ => Fault::None,
    });
    let error = Collector::new(&dies, &tenant(), id())
        .run(now(), &never)
        .expect_err("it fails");
    assert!(matches!(error, Error::Away { .. }), "{error:?}");
    assert_eq!(
        markers(&tier).len(),
        0,
        "it knows nothing, so it does nothing"
    );
    let error = Collector::new(&tier.store, &tenant(), id()).run(now(), &never);
    let error = error.expect_err("the lease is taken");
    assert!(
        matches!(
            error,
            Error::Leased {
                minutes: 1..=120,
                ..
            }
        ),
        "{error:?}"
    );
    let later = Timestamp(now().0 + 3 * 3_600_000);
    // One that fails gives the lease back.
    let (fails, _) = tier.failing(|op, path| match op {
        Op::List if path.ends_with("layers") => Fault::Status(500),
        _ => Fault::None,
    });
    let error = Collector::new(&fails, &tenant(), id())
        .run(later, &never)
        .expect_err("it fails");
    assert!(matches!(error, Error::Away { .. }), "{error:?}");
    let soon = Timestamp(now().0 + 2000);
    let done = Collector::new(&tier.store, &tenant(), id())
        .run(soon, &never)
        .expect("collect");
    assert_eq!(done.condemned, 1);
    // A stale list shows too little. Nothing is lost by that.
    let (stale, _) = tier.failing(|op, path| match op {
        Op::List if path.ends_with("layers") => Fault::Empty,
        _ => Fault::None,
    });
    age(&tier, 3 * HOUR);
    Collector::new(&stale, &tenant(), id())
        .run(now(), &never)
        .expect("collect");
    let found = bucket(&tier.store).resolve(&tenant(), &reference("task-cache/x"), None);
    assert!(matches!(found.expect("resolve"), Resolved::Found(_)));
    // A newer layout is not touched.
    fs::write(tier.files.join("v1/ci/format"), "{\"format\":2}").expect("write");
    let error = Collector::new(&tier.store, &tenant(), id()).run(later, &never);
    assert!(matches!(error, Err(Error::Newer { .. })), "{error:?}");
}

#[test]
fn nodes_publish_while_two_collectors_work() {
    let lab = require_lab!(Fs::Ext4);
    let tier = Tier::file();
    let held: Vec<_> = (0..4)
        .map(|number| small(&lab, &format!("content {number}")))
        .collect();
    // Old garbage with markers: all but the last publication.
    for held in held.iter().cycle().take(20) {
        publish(&tier.store, "task-cache/x", &[held]).expect("publish");
    }
    age(&tier, 25 * HOUR);
    assert_eq!(collect(&tier).condemned, 19);
    age(&tier, 25 * HOUR);
    let collector = || {
        let (mut deleted, ci) = (0, tenant());
        for _ in 0..10 {
            match Collector::new(&tier.store, &ci, id()).run(now(), &never) {
                Ok(done) => deleted += done.deleted,
                Err(Error::Leased { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        deleted
    };
    let node = |held| {
        for _ in 0..10 {
            publish(&tier.store, "task-cache/x", &[held]).expect("publish");
        }
    };
    let deleted: u64 = std::thread::scope(|scope| {
        let collectors = [scope.spawn(collector), scope.spawn(collector)];
        for held in &held {
            scope.spawn(move || node(held));
        }
        let collectors = collectors.into_iter();
        collectors.map(|it| it.join().expect("join")).sum()
    });
    assert!(deleted >= 19, "{deleted}");
    let found = bucket(&tier.store).resolve(&tenant(), &reference("task-cache/x"), None);
    let Resolved::Found(found) = found.expect("resolve") else {
        panic!("it is gone")
    };
    let into: &Path = &lab.dir("down");
    let layer = &found.manifest.layers[0];
    down(&lab, &[&bucket(&tier.store)], layer, into).expect("fetch");
}
