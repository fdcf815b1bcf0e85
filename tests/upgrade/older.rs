//! A pool as an older version left it: what later versions added is removed.
//!
//! Each removed thing must have existed, or an outdated list would go unnoticed. Three depend on
//! the moment of the kill: `sealing.json` is renamed once its layer is durable, `awaited` is
//! written after the wait has begun, and `mountedAs` belongs to a volume that was prewarmed in
//! time. And `superblock` is written only if the kernel reports it. `docs/on-disk.md` says how an
//! older version treats each of them.

use std::fs;
use std::path::{Path, PathBuf};

use baggageclaim::sys::{Dir, Xattrs as _};
use redb::{Database, ReadableTable, TableDefinition};
use serde_json::Value;

use crate::driver::{Place, older};

/// How old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Age {
    /// The index has format 1.
    BeforeClaims,
    /// It has format 2, and claims as they were at first.
    FirstClaims,
}

const META: TableDefinition<'static, &str, u64> = TableDefinition::new("meta");
type Records = TableDefinition<'static, &'static str, &'static [u8]>;
const ARTIFACTS: TableDefinition<'static, u128, &'static [u8]> = TableDefinition::new("artifacts");
const CLAIMS: Records = TableDefinition::new("claims");
const SNAPSHOTS: Records = TableDefinition::new("snapshots");
const GROUPS: Records = TableDefinition::new("groups");

/// Makes the pool that old, unless an older version has made it.
pub(crate) fn make(place: &Place, age: Age) {
    if older().is_some() {
        return;
    }
    let pool = &place.pool;
    records(pool, age);
    // Only overlay bounds volumes by projects.
    let volumes = Dir::open(&pool.join("volumes")).expect("open");
    let taken = volumes.remove_xattr("trusted.baggageclaim.projects-recorded");
    assert_eq!(taken.expect("removed"), place.is_overlay());
    // Directories that were prepared for future volumes.
    fs::create_dir_all(pool.join("spares").join("prepared").join("top")).expect("made");
    index(&pool.join("index.redb"), age);
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries
        .map(|entry| entry.expect("an entry").path())
        .collect()
}

/// Takes from the records what was not written.
fn records(pool: &Path, age: Age) {
    let (mut volumes, mut claims) = (0, 0);
    for dir in entries(&pool.join("volumes")) {
        if dir.join("volume.json").exists() {
            volumes += 1;
            rewrite(&dir.join("volume.json"), |record| {
                // The kernel's name of the mount cannot be changed.
                assert_eq!(record.get("mountedAs"), None, "{}", dir.display());
                take(record, "multipleTargets");
                forget(record, "superblock");
                take(&mut record["pod"], "serviceAccount");
            });
            continue;
        }
        rewrite(&dir.join("claim.json"), |record| {
            for target in record["targets"].as_array_mut().expect("a list") {
                take(target, "asked");
                claims += 1;
            }
            take(&mut record["claim"], "madeWith");
        });
    }
    assert_eq!((volumes, claims > 0), (4, age == Age::FirstClaims));
    for dir in entries(&pool.join("pending")) {
        rewrite(&dir.join("volume.json"), |record| {
            take(record, "multipleTargets");
            forget(record, "superblock");
            take(&mut record["pod"], "serviceAccount");
            // It is mounted no more.
            forget(record, "mountedAs");
        });
        // Only of an outcome that is not known.
        let _ = fs::remove_file(dir.join("awaited"));
    }
    for dir in entries(&pool.join("layers")) {
        let sealing = dir.join("sealing.json");
        for record in [&sealing, &dir.join("layer.json")] {
            if record.exists() {
                rewrite(record, |record| {
                    // A claim's layer has no artifact.
                    if let Some(artifact) = record.get_mut("artifact") {
                        take(artifact, "madeBy");
                    }
                });
            }
        }
        if age == Age::BeforeClaims && sealing.exists() {
            fs::rename(sealing, dir.join("layer.json")).expect("renamed");
        }
    }
}

fn rewrite(path: &Path, change: impl FnOnce(&mut Value)) {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    fs::write(path, changed(&text, change)).expect("written");
}

fn changed(text: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut record = serde_json::from_slice(text).expect("JSON");
    change(&mut record);
    serde_json::to_vec(&record).expect("JSON")
}

fn take(record: &mut Value, field: &str) {
    let fields = record.as_object_mut().expect("an object");
    assert!(fields.remove(field).is_some(), "no {field} in {fields:?}");
}

/// The same of what may not have been there.
fn forget(record: &mut Value, field: &str) {
    record.as_object_mut().expect("an object").remove(field);
}

/// The same for the index.
fn index(path: &Path, age: Age) {
    let database = Database::open(path).expect("the index opens");
    let transaction = database.begin_write().expect("begins");
    {
        let mut meta = transaction.open_table(META).expect("a table");
        let last = meta.remove("last-transaction").expect("removed");
        last.expect("this version writes it");
    }
    {
        let mut artifacts = transaction.open_table(ARTIFACTS).expect("a table");
        let rows = artifacts.iter().expect("rows").map(|row| {
            let (id, artifact) = row.expect("a row");
            let artifact = changed(artifact.value(), |artifact| take(artifact, "madeBy"));
            (id.value(), artifact)
        });
        let rows: Vec<_> = rows.collect();
        for (id, artifact) in &rows {
            artifacts
                .insert(*id, artifact.as_slice())
                .expect("inserted");
        }
        assert!(!rows.is_empty());
    }
    if age == Age::BeforeClaims {
        let mut meta = transaction.open_table(META).expect("a table");
        let format = meta.insert("format", 1).expect("inserted");
        assert_eq!(format.map(|format| format.value()), Some(2));
        drop(meta);
        for table in [CLAIMS, SNAPSHOTS, GROUPS] {
            assert!(transaction.delete_table(table).expect("deleted"));
        }
    } else {
        let mut claims = transaction.open_table(CLAIMS).expect("a table");
        let rows = claims.iter().expect("rows").map(|row| {
            let (id, claim) = row.expect("a row");
            let claim = changed(claim.value(), |claim| take(claim, "madeWith"));
            (id.value().to_owned(), claim)
        });
        let rows: Vec<_> = rows.collect();
        for (id, claim) in &rows {
            claims
                .insert(id.as_str(), claim.as_slice())
                .expect("inserted");
        }
        assert!(!rows.is_empty());
    }
    transaction.commit().expect("committed");
}
