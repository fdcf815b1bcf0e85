//! The engine does not lose what it knows of an artifact in the shared tier: during a merge, and
//! after an older driver has written the index.

use std::fs;
use std::path::Path;
use std::time::Instant;

use baggageclaim::engine::{ArtifactRow, Engine};
use baggageclaim::model::{ArtifactId, LayerRecord, Sharing};

use crate::common::bench::{Bench, NEVER, names};
use crate::common::layers::apart;
use crate::engine::bench;
use crate::receive::{NAME, OVERLAY, local, opened, write};

async fn set(bench: &Bench, id: ArtifactId, sharing: Sharing) {
    let engine = bench.engine.clone();
    let set = apart(move || engine.set_sharing(id, |known| *known = sharing));
    assert!(set.await.expect("it is written"));
}

/// Waits until a merged layer is in its place and the index does not name it yet; the artifact of
/// which it will be the newest layer.
fn being_merged(engine: &Engine, layers: &Path) -> ArtifactId {
    let record = |name: String| -> Option<LayerRecord> {
        let bytes = fs::read(layers.join(name).join("sealing.json")).ok()?;
        serde_json::from_slice(&bytes).ok()
    };
    let deadline = Instant::now() + NEVER;
    while Instant::now() < deadline {
        for sealing in names(layers).into_iter().filter_map(record) {
            let Some(artifact) = sealing.artifact else {
                continue;
            };
            // A seal's record has as many layers as the index.
            let shorter =
                |row: &ArtifactRow| row.id == artifact.id && row.layers > artifact.layers.len();
            if engine.artifacts(None).iter().any(shorter) {
                return artifact.id;
            }
        }
    }
    panic!("nothing is merged");
}

#[tokio::test]
async fn an_upload_that_ends_during_a_merge_is_known_after_a_rebuild() {
    let bench = bench!(OVERLAY);
    let mut commits = 0;
    let mut attempts = 0..20;
    let id = loop {
        attempts.next().expect("the upload is faster once");
        let (engine, layers) = (bench.engine.clone(), bench.pool().join("layers"));
        let uploads = std::thread::spawn(move || {
            let id = being_merged(&engine, &layers);
            let set = engine.set_sharing(id, |sharing| sharing.number = Some(5));
            set.expect("it is written").then_some(id)
        });
        while !uploads.is_finished() {
            write(&bench, &format!("step-{commits}"), &commits.to_string()).await;
            bench.engine.reap().await.expect("reap");
            commits += 1;
        }
        let id = uploads.join().expect("no panic");
        let row = bench.artifact(NAME).expect("it is there");
        // A commit can be faster than the upload: then the name is another artifact's.
        if Some(row.id) == id {
            assert!(row.layers < commits, "{row:?}");
            assert_eq!(row.sharing.number, Some(5));
            break row.id;
        }
    };
    let rebuild = |pool: &Path| drop(Engine::rebuild_index(pool).expect("it is rebuilt"));
    let bench = bench.restart_after(rebuild).await;
    let row = bench.artifact(NAME).expect("it is there");
    assert_eq!((row.id, row.sharing.number), (id, Some(5)));
    bench.finish().await;
}

#[tokio::test]
async fn an_older_drivers_index_does_not_make_an_artifact_wanted_again() {
    let bench = bench!(OVERLAY);
    write(&bench, "first", "first").await;
    let open = opened(&bench, NAME).await;
    let id = open.artifact.id;
    let layer = bench
        .pool()
        .join("layers")
        .join(open.artifact.layers[0].to_string());
    let record = layer.join("layer.json");
    drop(open);
    let known = [
        Sharing {
            number: Some(5),
            ..Sharing::default()
        },
        Sharing {
            refused: true,
            ..Sharing::default()
        },
        Sharing {
            never: true,
            ..Sharing::default()
        },
        Sharing {
            damaged: true,
            ..Sharing::default()
        },
    ];
    for sharing in known {
        set(&bench, id, sharing).await;
        let kept = fs::read(&record).expect("read");
        // An older driver writes the index only.
        set(&bench, id, Sharing::default()).await;
        fs::write(&record, kept).expect("write");
        assert_eq!(bench.engine.to_share().len(), 1);
        let engine = bench.engine.clone();
        let open = apart(move || engine.open_layers(id)).await;
        assert!(open.expect("it answers").is_none(), "{sharing:?}");
        assert_eq!(local(&bench).expect("it is there").sharing, sharing);
        assert!(bench.engine.to_share().is_empty());
    }
    set(&bench, id, Sharing::default()).await;
    drop(opened(&bench, NAME).await);
    bench.finish().await;
}

#[tokio::test]
async fn damage_is_known_after_a_restart_and_with_a_rebuilt_index() {
    let bench = bench!(OVERLAY);
    write(&bench, "first", "first").await;
    let id = bench.artifact(NAME).expect("it is there").id;
    let damaged = Sharing {
        damaged: true,
        ..Sharing::default()
    };
    assert_eq!(bench.engine.to_share().len(), 1);
    set(&bench, id, damaged).await;
    let bench = bench.restart().await;
    let row = bench.artifact(NAME).expect("it is there");
    assert_eq!((row.id, row.sharing), (id, damaged));
    assert!(bench.engine.to_share().is_empty());
    let rebuild = |pool: &Path| drop(Engine::rebuild_index(pool).expect("it is rebuilt"));
    let bench = bench.restart_after(rebuild).await;
    let row = bench.artifact(NAME).expect("it is there");
    assert_eq!(row.sharing, damaged);
    // New content is not damaged.
    write(&bench, "second", "second").await;
    let row = bench.artifact(NAME).expect("it is there");
    assert!(!row.sharing.damaged, "{row:?}");
    bench.finish().await;
}
