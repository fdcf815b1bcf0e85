//! A pool damaged while the driver was stopped. The start fails with advice and changes nothing, or
//! goes on without the lost part. An index rebuilt from the layers names the same content.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::{Engine, Error};
use baggageclaim::model::Outcome;
use baggageclaim::store::{Change, Index, PoolDirs};
use baggageclaim::sys::Dir;

use crate::common::bench::{Bench, Ground, empty_claim, eventually, names, open_again, request};
use crate::common::{Fs, Snapshot, assert_same, require_bench};

/// A pool of some history: caches, outputs, a flattened chain, a name that moved, two tenants.
async fn fill(bench: &Bench) {
    let chain = [("type", "task-cache"), ("key", "chain")];
    for round in 0..20 {
        bench
            .step(&format!("c{round}"), &chain, |at| {
                fs::write(at.join(format!("f{}", round % 4)), format!("{round}")).expect("write");
                fs::create_dir_all(at.join("d")).expect("mkdir");
                let _absent_at_first = fs::remove_file(at.join(format!("d/{}", round - 1)));
                fs::write(at.join(format!("d/{round}")), "").expect("write");
            })
            .await;
    }
    for text in ["first", "second"] {
        let resource = [("type", "resource-cache"), ("key", "r/\u{1f9f3}")];
        bench.publish(text, text, &resource).await;
    }
    for text in ["first", "second"] {
        fs::write(bench.target(text).join("by"), text).expect("write");
        bench.outcome(text, Outcome::Succeeded).await;
        bench.unpublish(text).await;
        bench.quiet().await;
    }
    for tenant in ["one", "two"] {
        let output = [("type", "output"), ("name", "o"), ("commit", "always")];
        let request = request(&bench.target("t"), tenant, tenant, "t", &output);
        bench.engine.publish(request).await.expect("publish");
        fs::write(bench.target("t").join("by"), tenant).expect("write");
        bench.unpublish("t").await;
        bench.quiet().await;
    }
    bench.engine.reap().await.expect("reap");
}

const FILLED: [(&str, &str); 4] = [
    ("ci", "task-cache/chain"),
    ("ci", "resource-cache/r/\u{1f9f3}"),
    ("one", "artifact/o"),
    ("two", "artifact/o"),
];

/// The content of every name.
async fn content(bench: &Bench) -> BTreeMap<String, Snapshot> {
    let mut content = BTreeMap::new();
    for (tenant, from) in FILLED {
        let input = [("type", "input"), ("from", from)];
        let request = request(&bench.target("look"), tenant, "look", "look", &input);
        if bench.engine.publish(request).await.is_ok() {
            let snapshot = Snapshot::of(&bench.target("look"));
            content.insert(format!("{tenant} {from}"), snapshot);
        }
        bench.unpublish("look").await;
        bench.quiet().await;
    }
    content
}

fn assert_same_content(before: &BTreeMap<String, Snapshot>, after: &BTreeMap<String, Snapshot>) {
    let keys = |content: &BTreeMap<String, Snapshot>| content.keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(before), keys(after));
    for (name, snapshot) in before {
        assert_same(snapshot, &after[name]);
    }
}

/// A bench whose engine is shut down.
struct Closed {
    bench: Bench,
    pool: PathBuf,
}

impl Closed {
    async fn new(bench: Bench) -> Self {
        bench.engine.shutdown().await;
        // The engine of the bench is closed but not gone: its lock would be in the way.
        let other = tempfile::tempdir().expect("a temporary folder");
        let pool = bench.pool();
        let mut config = bench.config.clone();
        config.pool = other.path().join("pool");
        config.backend = Some(BackendKind::Copy);
        let Bench {
            lab,
            targets,
            engine,
            config: kept,
        } = bench;
        drop(engine);
        let engine = Engine::open(config)
            .await
            .expect("a pool to put in its place");
        engine.shutdown().await;
        let bench = Bench {
            lab,
            targets,
            engine,
            config: kept,
        };
        Self { bench, pool }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.pool.join(name)
    }

    /// The error of a start.
    async fn refused(&self) -> String {
        let before = what_counts(&self.pool);
        let error = loop {
            match Engine::open(self.bench.config.clone()).await {
                Err(error) if error.to_string().contains("in use by another") => {}
                Err(error @ Error::Pool { .. }) => break error.to_string(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(
            before,
            what_counts(&self.pool),
            "a start that fails touches nothing"
        );
        error
    }

    /// Waits until no process has the pool: a program that another test starts may hold its lock a
    /// moment longer.
    async fn let_go(&self) {
        eventually("the pool is let go", || PoolDirs::open(&self.pool).is_ok()).await;
    }

    async fn opened(mut self) -> Bench {
        self.bench.engine = open_again(&self.bench.config).await;
        self.bench
    }
}

/// Every name of the pool that stands for content.
fn what_counts(pool: &Path) -> Vec<Vec<String>> {
    let mut all = vec![names(pool)];
    for name in ["volumes", "pending", "layers", "trash"] {
        all.push(names(&pool.join(name)));
    }
    all
}

fn torn(index: &Path, how: &str) {
    let bytes = fs::read(index).expect("read");
    let bytes = match how {
        "missing" => return fs::remove_file(index).expect("remove"),
        "empty" => Vec::new(),
        "half" => bytes[..bytes.len() / 2].to_vec(),
        "one byte" => bytes[..1].to_vec(),
        "another file" => b"not a database at all".to_vec(),
        "zeros" => vec![0; bytes.len()],
        "body lost" => [&bytes[..4096], &vec![0xa5; bytes.len() - 4096]].concat(),
        "begun" => {
            fs::remove_file(index).expect("remove");
            drop(redb::Database::create(index).expect("an index without tables"));
            return;
        }
        how => panic!("{how}"),
    };
    fs::write(index, bytes).expect("write");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_index_is_rebuilt_and_names_the_same_content() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        fill(&bench).await;
        let before = content(&bench).await;
        assert_eq!(before.len(), FILLED.len());
        let mut closed = Closed::new(bench).await;
        let ways: &[&str] = if ground.0 == BackendKind::Overlay {
            &[
                "missing",
                "empty",
                "half",
                "one byte",
                "another file",
                "zeros",
                "body lost",
                "begun",
            ]
        } else {
            &["missing", "empty"]
        };
        for how in ways {
            torn(&closed.path("index.redb"), how);
            let error = closed.refused().await;
            assert!(error.contains("check --rebuild"), "{how}: {error}");
            assert!(error.contains("index.redb"), "{how}: {error}");
            closed.let_go().await;
            if *how == "missing" {
                let findings = Engine::check_offline(&closed.pool).expect("check");
                assert_eq!(findings[0].kind, "missing-index");
            }
            let made = Engine::rebuild_index(&closed.pool).expect("rebuilt");
            assert!(made.artifacts >= FILLED.len(), "{made:?}");
            let bench = closed.opened().await;
            assert_same_content(&before, &content(&bench).await);
            bench.engine.reap().await.expect("reap");
            bench.assert_whole().await;
            closed = Closed::new(bench).await;
        }
        closed.opened().await.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_of_a_newer_version_is_refused_and_kept() {
    let bench = require_bench!();
    fill(&bench).await;
    let closed = Closed::new(bench).await;
    let index = closed.path("index.redb");
    {
        let database = redb::Database::open(&index).expect("open");
        let transaction = database.begin_write().expect("begin");
        let meta = redb::TableDefinition::<&str, u64>::new("meta");
        transaction
            .open_table(meta)
            .expect("meta")
            .insert("format", 99)
            .expect("set");
        transaction.commit().expect("commit");
    }
    for _ in 0..2 {
        let error = closed.refused().await;
        assert!(
            error.contains("has format 99, this version knows 2"),
            "{error}"
        );
    }
    Engine::rebuild_index(&closed.pool).expect("an explicit rebuild");
    closed.opened().await.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_index_names_sealed_content_whose_seal_intent_was_not_withdrawn() {
    let bench = require_bench!();
    fill(&bench).await;
    let before = content(&bench).await;
    let sealed = bench
        .artifact("resource-cache/r/\u{1f9f3}")
        .expect("there")
        .id;
    let closed = Closed::new(bench).await;
    let layer = names(&closed.path("layers")).into_iter().find(|layer| {
        let record = closed.path("layers").join(layer).join("layer.json");
        fs::read_to_string(record)
            .expect("read")
            .contains(&sealed.to_string())
    });
    // The layer's record says that the content is durable. A power cut, or a failed withdrawal,
    // left the seal intent.
    fs::create_dir(closed.path("pending").join(layer.expect("its layer"))).expect("mkdir");
    fs::remove_file(closed.path("index.redb")).expect("remove");
    Engine::rebuild_index(&closed.pool).expect("rebuilt");
    let bench = closed.opened().await;
    assert_eq!(content(&bench).await, before);
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_says_what_it_is_in_no_known_way_is_not_touched() {
    let bench = require_bench!();
    fill(&bench).await;
    let before = content(&bench).await;
    let mut closed = Closed::new(bench).await;
    closed.bench.config.backend = None;
    let path = closed.path("pool.json");
    let whole = fs::read(&path).expect("read");
    let cases: [(&[u8], &str); 5] = [
        (b"", "pool.json cannot be read"),
        (&whole[..whole.len() / 2], "pool.json cannot be read"),
        (
            br#"{"format":2,"backend":{"new":"shape"}}"#,
            "has format 2, this version knows 1",
        ),
        (
            br#"{"format":1,"id":"0","backend":"zfs"}"#,
            "backend \"zfs\", which is unknown",
        ),
        (
            br#"{"format":1,"id":"0","backend":"btrfs"}"#,
            "it lies on ext4",
        ),
    ];
    for (bytes, words) in cases {
        fs::write(&path, bytes).expect("write");
        let error = closed.refused().await;
        assert!(error.contains(words), "{error}");
    }
    fs::remove_file(&path).expect("remove");
    let error = closed.refused().await;
    assert!(
        error.contains("pool.json is missing and layers/ is not empty"),
        "{error}"
    );
    fs::write(&path, whole).expect("put back");
    let bench = closed.opened().await;
    assert_same_content(&before, &content(&bench).await);
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_keeps_its_backend() {
    let bench = require_bench!(on Ground(BackendKind::Copy, Fs::Ext4));
    bench
        .step("v", &[("type", "output"), ("name", "o")], |_| ())
        .await;
    let mut closed = Closed::new(bench).await;
    closed.bench.config.backend = Some(BackendKind::Overlay);
    let error = closed.refused().await;
    assert!(
        error.contains("made with backend copy, and overlay is asked for"),
        "{error}"
    );
    closed.bench.config.backend = None;
    let bench = closed.opened().await;
    assert_eq!(
        bench.engine.backend(),
        BackendKind::Copy,
        "though overlay would be preferred"
    );
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_on_a_read_only_filesystem_says_so() {
    let bench = require_bench!();
    bench
        .step("v", &[("type", "output"), ("name", "o")], |_| ())
        .await;
    let closed = Closed::new(bench).await;
    closed.bench.lab.set_read_only(true);
    let error = closed.refused().await;
    assert!(error.contains("read-only filesystem"), "{error}");
    closed.bench.lab.set_read_only(false);
    let bench = closed.opened().await;
    assert!(bench.artifact("artifact/o").is_some());
    bench.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_with_a_driver_is_neither_checked_offline_nor_repaired() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        for result in [
            Engine::rebuild_index(&bench.pool()).map(drop),
            Engine::check_offline(&bench.pool()).map(drop),
            Engine::open(bench.config.clone()).await.map(drop),
        ] {
            let error = result.expect_err("it is in use");
            let by_us = format!("in use by another process (pid {})", std::process::id());
            assert!(error.to_string().contains(&by_us), "{error}");
        }
        let nothing = bench.lab.dir("nothing");
        let error = Engine::check_offline(&nothing).expect_err("no pool");
        assert!(error.to_string().contains("this is not a pool"), "{error}");
        assert_eq!(names(&nothing), [""; 0], "and none was made");
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_file_in_a_pool_is_reported_and_in_no_ones_way() {
    const ID: &str = "0123456789abcdef0123456789abcdef";
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        fill(&bench).await;
        let before = content(&bench).await;
        bench.publish("pod", "live", &[]).await;
        fs::write(bench.target("live").join("f"), "live").expect("write");
        let closed = Closed::new(bench).await;
        let precious = closed.bench.lab.dir("precious");
        fs::write(precious.join("file"), "of somebody else").expect("write");
        for place in ["volumes", "pending", "layers", "trash", "incoming"] {
            let place = closed.path(place);
            fs::write(place.join("stray"), "").expect("write");
            symlink(&precious, place.join("link")).expect("symlink");
            fs::create_dir(place.join("directory")).expect("mkdir");
            fs::write(place.join(ID), "a file with the name of an id").expect("write");
            symlink(&precious, place.join(ID.replace('0', "f"))).expect("symlink");
        }
        fs::write(closed.path("stray"), "").expect("write");
        let findings = Engine::check_offline(&closed.pool).expect("check");
        for path in [
            "stray",
            "volumes/stray",
            "volumes/link",
            "volumes/directory",
            "pending/stray",
            "layers/stray",
        ] {
            assert!(
                findings
                    .iter()
                    .any(|finding| finding.path == Path::new(path)),
                "{path}: {findings:#?}"
            );
        }
        let bench = closed.opened().await;
        assert_eq!(
            fs::read_to_string(bench.target("live").join("f")).expect("read"),
            "live"
        );
        assert_same_content(&before, &content(&bench).await);
        bench.engine.reap().await.expect("reap");
        assert_eq!(
            fs::read_to_string(precious.join("file")).expect("kept"),
            "of somebody else"
        );
        assert!(
            bench.pool().join("stray").exists(),
            "the root of a pool is looked at only"
        );
        assert_eq!(names(&bench.pool().join("volumes")), ["live"]);
        fs::remove_file(bench.pool().join("stray")).expect("by hand");
        for name in ["stray", "link"] {
            fs::remove_file(bench.pool().join("layers").join(name)).expect("by hand");
        }
        fs::remove_dir(bench.pool().join("layers/directory")).expect("by hand");
        bench.unpublish("live").await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_whose_layer_is_missing_is_forgotten_and_the_others_stay() {
    for ground in Ground::ALL {
        let bench = require_bench!(on ground);
        fill(&bench).await;
        let mut before = content(&bench).await;
        let lost = bench.artifact("task-cache/chain").expect("there").id;
        let closed = Closed::new(bench).await;
        let layers = closed.path("layers");
        let layer = names(&layers).into_iter().find(|layer| {
            let record = layers.join(layer).join("layer.json");
            fs::read_to_string(record)
                .expect("read")
                .contains(&lost.to_string())
        });
        let aside = closed.bench.lab.path().join("aside");
        fs::rename(layers.join(layer.expect("a layer")), &aside).expect("rename");
        let findings = Engine::check_offline(&closed.pool).expect("check");
        assert!(
            findings
                .iter()
                .any(|finding| finding.kind == "missing-layer"),
            "{findings:?}"
        );
        let bench = closed.opened().await;
        before.remove("ci task-cache/chain");
        assert_same_content(&before, &content(&bench).await);
        // The cache starts again, empty.
        let chain = [("type", "task-cache"), ("key", "chain")];
        bench
            .step("again", &chain, |at| {
                fs::write(at.join("f"), "again").expect("write");
            })
            .await;
        assert_eq!(
            bench.look("look", &chain, "f").await.as_deref(),
            Some("again")
        );
        let bench = bench.restart().await;
        assert_eq!(
            bench.look("look", &chain, "f").await.as_deref(),
            Some("again")
        );
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_in_the_place_of_a_layer_is_a_finding_and_stops_no_round() {
    let bench = require_bench!();
    for name in ["measured", "unmeasured"] {
        bench
            .step(name, &[("type", "output"), ("name", name)], |_| ())
            .await;
    }
    bench.engine.reap().await.expect("reap");
    let layers = names(&bench.pool().join("layers"));
    let aside = bench.lab.dir("aside");
    let damage = |pool: &Path| {
        for layer in &layers {
            let place = pool.join("layers").join(layer);
            fs::rename(&place, aside.join(layer)).expect("rename");
            fs::write(&place, "").expect("write");
        }
        let root = Dir::open(pool).expect("the pool");
        let (index, _) = Index::open_existing(&root).expect("the index");
        let unmeasured = Change::RemoveLayer(layers[0].parse().expect("an id"));
        index.commit(&[unmeasured]).expect("written");
    };
    let bench = bench.restart_after(damage).await;
    for _ in 0..2 {
        bench.engine.reap().await.expect("reap");
        let found = bench.engine.check().await.expect("check");
        let kinds: Vec<&str> = found.iter().map(|finding| finding.kind).collect();
        assert_eq!(kinds, ["empty-layer"; 2]);
    }
    for layer in &layers {
        let place = bench.pool().join("layers").join(layer);
        fs::remove_file(&place).expect("a file");
        fs::rename(aside.join(layer), &place).expect("rename");
    }
    bench.finish().await;
}

/// Disks fail in single places, and a check reports all damage.
#[tokio::test(flavor = "multi_thread")]
async fn a_place_that_cannot_be_read_is_a_finding_and_hides_no_other_one() {
    let bench = require_bench!();
    bench
        .step("v", &[("type", "output"), ("name", "o")], |_| ())
        .await;
    bench.engine.reap().await.expect("reap");
    bench.publish("pod", "live", &[]).await;
    let claim = empty_claim("claim");
    let claim = bench.engine.create_claim(claim).await.expect("made");
    bench.assert_whole().await;

    // No process can open a socket as a file, so this needs no failing disk.
    let layer = format!("layers/{}", names(&bench.pool().join("layers"))[0]);
    let records = [
        format!("{layer}/layer.json"),
        "volumes/live/volume.json".to_owned(),
    ];
    for record in &records {
        let record = bench.pool().join(record);
        fs::rename(&record, record.with_extension("aside")).expect("rename");
        let (socket, mode) = (rustix::fs::FileType::Socket, rustix::fs::Mode::RWXU);
        rustix::fs::mknodat(rustix::fs::CWD, &record, socket, mode, 0).expect("mknod");
    }
    // And two that come after these.
    let of_claim = format!("volumes/{}", claim.id);
    let odd = ["not-ours", of_claim.as_str()];
    for path in odd {
        fs::write(bench.pool().join(path), "").expect("write");
    }
    let found = bench.engine.check().await.expect("it goes on");
    let kinds = found
        .iter()
        .map(|finding| (finding.kind, finding.path.to_str().expect("text")));
    let expected = [
        ("unreadable", layer.as_str()),
        ("unknown-name", "not-ours"),
        ("unreadable", "volumes/live"),
        ("unknown-name", of_claim.as_str()),
    ];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    for finding in found.iter().filter(|finding| finding.kind == "unreadable") {
        assert!(finding.detail.contains("ENXIO"), "{}", finding.detail);
    }

    for path in odd {
        fs::remove_file(bench.pool().join(path)).expect("a file");
    }
    for record in &records {
        let record = bench.pool().join(record);
        fs::rename(record.with_extension("aside"), &record).expect("rename");
    }
    bench.unpublish("live").await;
    bench.finish().await;
}

/// A power cut undoes a rename that no call waited for. The index keeps the later fact that the
/// layer is measured.
#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_no_longer_says_that_it_is_named_says_so_again() {
    let bench = require_bench!();
    let output = [("type", "output"), ("name", "o")];
    bench
        .step("v", &output, |at| {
            fs::write(at.join("f"), "x").expect("write");
        })
        .await;
    bench.engine.reap().await.expect("reap");
    let bench = bench
        .restart_after(|pool| {
            for layer in names(&pool.join("layers")) {
                let layer = pool.join("layers").join(layer);
                fs::rename(layer.join("layer.json"), layer.join("sealing.json")).expect("rename");
            }
        })
        .await;
    bench.engine.reap().await.expect("reap");
    let found = bench.engine.check().await.expect("check");
    assert!(found.is_empty(), "{found:?}");
    bench.finish().await;
}
