//! Tables of contents: made after a seal, kept over restarts, and made again when they are damaged.
//! What a table holds is tested in `tests/archives`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Cursor;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use baggageclaim::archive::{Codec, Limits, toc};
use baggageclaim::backend::BackendKind;
use baggageclaim::engine::Engine;
use baggageclaim::model::{Outcome, Sha256, layout};
use baggageclaim::sys::Dir;

use crate::common::bench::{Bench, Ground, eventually, names};
use crate::common::tree;
use crate::engine::{bench, exported, import, request};

const OUTPUT: [(&str, &str); 2] = [("type", "output"), ("name", "made")];

/// Waits until all layers of an artifact have a table; their digests, newest layer first.
pub(crate) async fn tables(bench: &Bench, name: &str) -> Vec<Sha256> {
    let found = || bench.artifact(name).expect("it is there").tables;
    eventually("all tables are made", || {
        found().iter().all(Option::is_some)
    })
    .await;
    found().into_iter().flatten().collect()
}

/// The tables' files.
fn files(pool: &Path) -> Vec<PathBuf> {
    let layers = pool.join(layout::LAYERS);
    let files = names(&layers).into_iter();
    let files = files.map(|layer| layers.join(layer).join(layout::TABLE));
    files.filter(|file| file.exists()).collect()
}

#[tokio::test]
async fn a_table_is_made_after_a_seal_and_the_same_content_has_the_same_everywhere() {
    let mut archive = None;
    let mut digest = None;
    for ground in Ground::ALL {
        let bench = bench!(ground);
        bench.step("maker", &OUTPUT, tree::odd).await;
        let made = tables(&bench, "artifact/made").await;
        assert_eq!(made.len(), 1);
        // It is a table that a receiver takes.
        let [file] = &files(&bench.pool())[..] else {
            panic!("one layer, one table")
        };
        let opened = toc::Table::open(
            File::open(file).expect("open"),
            Some(made[0].0),
            &Dir::open(bench.lab.path().as_path()).expect("open"),
            Limits::default(),
            &|| false,
        );
        assert!(opened.expect("it is whole").entries() > 10);
        let bytes = match &archive {
            Some(bytes) => Vec::clone(bytes),
            None => exported(&bench, "artifact/made", Codec::Plain).await.0,
        };
        archive = Some(bytes.clone());
        let imported = import(&bench, request("artifact/copy"), Cursor::new(bytes)).await;
        imported.expect("it is imported");
        let copy = tables(&bench, "artifact/copy").await;
        assert_eq!(*digest.get_or_insert(copy[0]), copy[0], "{ground:?}");
        bench.finish().await;
    }
}

#[tokio::test]
async fn a_table_survives_restarts_and_a_damaged_one_is_made_again() {
    for ground in Ground::ALL {
        let bench = bench!(ground);
        bench
            .step("maker", &OUTPUT, |root| tree::files(root, 50))
            .await;
        let before = tables(&bench, "artifact/made").await;
        let file = files(&bench.pool()).remove(0);
        let inode = || fs::metadata(&file).expect("stat").ino();
        let first = inode();
        let bench = bench.restart().await;
        assert_eq!(tables(&bench, "artifact/made").await, before);
        assert_eq!(inode(), first, "it is not made twice");

        let length = fs::metadata(&file).expect("stat").len();
        let cut = |length| {
            let file = File::options().write(true).open(&file).expect("open");
            file.set_len(length).expect("truncate");
        };
        let temporary = file.with_file_name(".table.new");
        let without = |path: &Path| {
            rustix::fs::removexattr(path, "trusted.baggageclaim.sha256").expect("removexattr");
        };
        let damages: [(&str, &dyn Fn()); 5] = [
            ("empty", &|| cut(0)),
            ("torn", &|| cut(length - 1)),
            ("longer", &|| cut(length + 1)),
            ("without its digest", &|| without(&file)),
            ("half-made only", &|| {
                fs::rename(&file, &temporary).expect("rename");
                fs::write(&temporary, "half").expect("write");
            }),
        ];
        let mut bench = bench;
        for (damage, does) in damages {
            let break_it = |pool: &Path| {
                does();
                let found = Engine::check_offline(pool).expect("check");
                let kinds: Vec<&str> = found.iter().map(|finding| finding.kind).collect();
                // A missing table is no damage.
                let is_there = file.exists();
                let expected: &[&str] = if is_there { &["damaged-table"] } else { &[] };
                assert_eq!(kinds, expected, "{damage}");
            };
            bench = bench.restart_after(break_it).await;
            assert_eq!(tables(&bench, "artifact/made").await, before, "{damage}");
            assert!(!temporary.exists(), "{damage}");
            bench.assert_whole().await;
        }
        bench.finish().await;
    }
}

/// The digests of a merged stack are those of other layers.
#[tokio::test]
async fn a_merged_layer_gets_a_table_of_its_own() {
    let bench = bench!(Ground(BackendKind::Overlay, crate::common::Fs::Ext4));
    let cache = [("type", "task-cache"), ("key", "chain")];
    for link in 0..20 {
        bench
            .step(&format!("link-{link}"), &cache, |root| {
                fs::write(root.join(format!("of-{link}")), "").expect("write");
            })
            .await;
    }
    bench.engine.reap().await.expect("reap");
    let row = bench.artifact("task-cache/chain").expect("it is there");
    assert!(row.layers < 20, "{row:?}");
    let made: BTreeSet<String> = tables(&bench, "task-cache/chain")
        .await
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(made.len(), row.layers, "each layer has its own");
    bench.finish().await;
}

/// One thread makes all tables, and reading a layer of a tenant can take an hour.
#[tokio::test]
async fn the_awaited_table_of_a_small_layer_does_not_wait_for_that_of_a_large_one() {
    let bench = bench!(Ground(BackendKind::Overlay, crate::common::Fs::Ext4));
    for (name, count) in [("large", 30_000), ("small", 1)] {
        let output = [("type", "output"), ("name", name)];
        let (root, _) = bench.publish(name, name, &output).await;
        for number in 0..count {
            fs::write(root.join(format!("{name}-{number}")), name).expect("write");
        }
        bench.outcome(name, Outcome::Succeeded).await;
    }
    for name in ["large", "small"] {
        bench.unpublish(name).await;
    }
    let layers = bench.pool().join(layout::LAYERS);
    let small = || {
        let mut all = names(&layers).into_iter();
        all.find(|layer| layers.join(layer).join("fs/small-0").exists())
    };
    eventually("both are committed", || {
        let is_there = |name: &str| bench.artifact(&format!("artifact/{name}")).is_some();
        small().is_some() && is_there("small") && is_there("large")
    })
    .await;
    let small = small().expect("it is there");
    let small = small.parse().expect("an id");
    bench.engine.wait_for_tables(&[small]);
    tables(&bench, "artifact/small").await;
    let large = bench.artifact("artifact/large").expect("it is there");
    assert_eq!(large.tables, [None], "it is still being read");
    tables(&bench, "artifact/large").await;
    bench.finish().await;
}

/// A tenant can make a file of any apparent size, which costs nothing.
#[tokio::test]
async fn a_layer_that_exceeds_a_limit_of_tables_stays_here_and_delays_no_other() {
    let bench = bench!(Ground(BackendKind::Overlay, crate::common::Fs::Xfs));
    let cache = [("type", "task-cache"), ("key", "sparse")];
    bench
        .step("sparse", &cache, |root| {
            let file = File::create(root.join("hole")).expect("create");
            file.set_len(1 << 50).expect("truncate");
        })
        .await;
    eventually("it is refused", || {
        let row = bench.artifact("task-cache/sparse").expect("it is there");
        row.is_too_large
    })
    .await;
    bench.step("maker", &OUTPUT, tree::odd).await;
    tables(&bench, "artifact/made").await;
    let row = bench.artifact("task-cache/sparse").expect("it is there");
    assert_eq!(row.tables, [None]);
    assert!(!bench.engine.can_leave(row.id));
    let wanted = bench.engine.to_share();
    assert_eq!(wanted.len(), 1, "only the other is to be uploaded");
    assert_ne!(wanted[0].id, row.id);
    assert_eq!(files(&bench.pool()).len(), 1);
    // An archive holds it, and so does this node.
    let archive = exported(&bench, "task-cache/sparse", Codec::Plain).await.0;
    assert!(archive.len() < 64 << 10, "{}", archive.len());
    let imported = import(&bench, request("artifact/copy"), Cursor::new(archive)).await;
    imported.expect("it is imported");
    let hole = bench.target("look").join("hole");
    let attributes = [("type", "input"), ("from", "artifact/copy")];
    bench.publish("pod", "look", &attributes).await;
    assert_eq!(fs::metadata(hole).expect("stat").len(), 1 << 50);
    bench.unpublish("look").await;
    bench.finish().await;
}
