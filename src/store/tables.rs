//! The tables of the index: their content, how a transaction writes them, and how they are read.
//! `index.rs` opens the file and knows what to do after an error.

use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};
use serde::{Serialize, de::DeserializeOwned};

use super::error::{Error, Result};
use crate::model::{
    Artifact, ArtifactId, Fence, Fences, LayerId, Name, PersistentVolume, Snapshot, SnapshotGroup,
    SnapshotId, Usage, VolumeId,
};

pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(super) const ARTIFACTS: TableDefinition<u128, &[u8]> = TableDefinition::new("artifacts");
pub(super) const NAMES: TableDefinition<(&str, &str), u128> = TableDefinition::new("names");
pub(super) const LAYERS: TableDefinition<u128, &[u8]> = TableDefinition::new("layers");
/// From id to JSON. Since format 2.
type Records = TableDefinition<'static, &'static str, &'static [u8]>;
const CLAIMS: Records = TableDefinition::new("claims");
const SNAPSHOTS: Records = TableDefinition::new("snapshots");
const GROUPS: Records = TableDefinition::new("groups");
/// From number, in 20 digits, to JSON. Made with the first fence.
const FENCES: Records = TableDefinition::new("fences");

pub(super) const FORMAT_KEY: &str = "format";
/// The random number of the last transaction, by which one in doubt is recognised. A counter could
/// repeat the number of a failed transaction.
const LAST_KEY: &str = "last-transaction";
/// Fences up to this number are forgotten.
const FORGOTTEN_KEY: &str = "fences-forgotten";
/// Fences before this one were missed.
const MISSED_KEY: &str = "fences-missed";
/// Format 1 had no claims; this version upgrades it. A version without claims would delete their
/// layers as unreferenced, so it must refuse this format.
pub(super) const FORMAT: u64 = 2;
pub(super) const OLDEST_FORMAT: u64 = 1;

/// The operation that write errors name.
pub(super) const WRITING: &str = "write to the index";

/// One change of the index.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Adds or replaces an artifact.
    PutArtifact(Artifact),
    /// Removes an artifact.
    RemoveArtifact(ArtifactId),
    /// Points a name at an artifact.
    PutName(Name, ArtifactId),
    /// Removes a name.
    RemoveName(Name),
    /// Sets a layer's size.
    PutLayer(LayerId, Usage),
    /// Removes a layer.
    RemoveLayer(LayerId),
    /// Adds or replaces a claim.
    PutClaim(PersistentVolume),
    /// Removes a claim.
    RemoveClaim(VolumeId),
    /// Adds or replaces a snapshot.
    PutSnapshot(Snapshot),
    /// Removes a snapshot.
    RemoveSnapshot(SnapshotId),
    /// Adds a group of snapshots.
    PutGroup(SnapshotGroup),
    /// Removes a group of snapshots.
    RemoveGroup(SnapshotId),
    /// Adds a fence.
    PutFence(Fence),
    /// Notes that fences before this number were missed.
    MissFences(u64),
    /// Removes the fence of this number.
    RemoveFence(u64),
    /// Notes that fences up to this number are forgotten.
    ForgetFences(u64),
}

/// The whole content of the index.
#[derive(Debug, Default)]
pub struct Contents {
    /// Every artifact.
    pub artifacts: Vec<Artifact>,
    /// Every name and its artifact.
    pub names: Vec<(Name, ArtifactId)>,
    /// The size of each measured layer.
    pub layers: Vec<(LayerId, Usage)>,
    /// Every claim.
    pub claims: Vec<PersistentVolume>,
    /// Every snapshot.
    pub snapshots: Vec<Snapshot>,
    /// Every group of snapshots.
    pub groups: Vec<SnapshotGroup>,
    /// The fences that were applied.
    pub fences: Fences,
}

/// The index's format; `None` if its creation was not completed.
pub(super) fn format(database: &Database) -> Result<Option<u64>> {
    meta(database, FORMAT_KEY)
}

/// The number of the last transaction.
pub(super) fn last_transaction(database: &Database) -> Result<Option<u64>> {
    meta(database, LAST_KEY)
}

fn meta(database: &Database, key: &str) -> Result<Option<u64>> {
    let read = || {
        let transaction = database.begin_read()?;
        match transaction.open_table(META) {
            Ok(table) => Ok(table.get(key)?.map(|number| number.value())),
            Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    read().map_err(|error: redb::Error| Error::database("read the index", error))
}

/// Creates the tables that are missing.
pub(super) fn make(database: &Database) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(META)?.insert(FORMAT_KEY, FORMAT)?;
    transaction.open_table(ARTIFACTS)?;
    transaction.open_table(NAMES)?;
    transaction.open_table(LAYERS)?;
    for table in [CLAIMS, SNAPSHOTS, GROUPS] {
        transaction.open_table(table)?;
    }
    transaction.commit()?;
    Ok(())
}

/// Writes the changes as transaction `number`.
pub(super) fn write(database: &Database, changes: &[Change], number: u64) -> Result<()> {
    let begun = begin(database, changes, number);
    let begun = begun.map_err(|error| Error::database(WRITING, error))?;
    // Before commit, no data refers to the change. During commit it becomes visible at once.
    let committed = begun.commit();
    committed.map_err(|error| Error::unsure(WRITING, error.into(), number))
}

/// An uncommitted transaction with all changes.
fn begin(
    database: &Database,
    changes: &[Change],
    number: u64,
) -> Result<WriteTransaction, redb::Error> {
    let transaction = database.begin_write()?;
    // Open tables only for their changes: opening a table costs as much as a change.
    transaction.open_table(META)?.insert(LAST_KEY, number)?;
    let records = |table: Records| transaction.open_table(table);
    for change in changes {
        match change {
            Change::PutArtifact(artifact) => {
                let mut artifacts = transaction.open_table(ARTIFACTS)?;
                artifacts.insert(artifact.id.bits(), json(artifact).as_slice())?;
            }
            Change::RemoveArtifact(id) => {
                drop(transaction.open_table(ARTIFACTS)?.remove(id.bits())?);
            }
            Change::PutName(name, id) => {
                let reference = name.reference.to_string();
                let key = (name.tenant.as_str(), reference.as_str());
                transaction.open_table(NAMES)?.insert(key, id.bits())?;
            }
            Change::RemoveName(name) => {
                let reference = name.reference.to_string();
                let key = (name.tenant.as_str(), reference.as_str());
                transaction.open_table(NAMES)?.remove(key)?;
            }
            Change::PutLayer(id, usage) => {
                let mut layers = transaction.open_table(LAYERS)?;
                layers.insert(id.bits(), json(usage).as_slice())?;
            }
            Change::RemoveLayer(id) => {
                drop(transaction.open_table(LAYERS)?.remove(id.bits())?);
            }
            Change::PutClaim(claim) => {
                records(CLAIMS)?.insert(claim.id.as_str(), json(claim).as_slice())?;
            }
            Change::RemoveClaim(id) => drop(records(CLAIMS)?.remove(id.as_str())?),
            Change::PutSnapshot(snapshot) => {
                records(SNAPSHOTS)?.insert(snapshot.id.as_str(), json(snapshot).as_slice())?;
            }
            Change::RemoveSnapshot(id) => drop(records(SNAPSHOTS)?.remove(id.as_str())?),
            Change::PutGroup(group) => {
                records(GROUPS)?.insert(group.id.as_str(), json(group).as_slice())?;
            }
            Change::RemoveGroup(id) => drop(records(GROUPS)?.remove(id.as_str())?),
            Change::PutFence(fence) => {
                let key = fence_key(fence.number);
                records(FENCES)?.insert(key.as_str(), json(fence).as_slice())?;
            }
            Change::RemoveFence(number) => {
                drop(records(FENCES)?.remove(fence_key(*number).as_str())?);
            }
            Change::MissFences(number) => {
                transaction.open_table(META)?.insert(MISSED_KEY, number)?;
            }
            Change::ForgetFences(number) => {
                transaction
                    .open_table(META)?
                    .insert(FORGOTTEN_KEY, number)?;
            }
        }
    }
    Ok(transaction)
}

fn fence_key(number: u64) -> String {
    format!("{number:020}")
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data serialises")
}

fn from_json<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("{what}: {error}"))
}

/// Reads all rows of a table. A row that `each` refuses is reported as corrupt.
fn rows<K: redb::Key + 'static, V: redb::Value + 'static>(
    transaction: &ReadTransaction,
    table: TableDefinition<'static, K, V>,
    mut each: impl for<'a> FnMut(K::SelfType<'a>, V::SelfType<'a>) -> Result<(), String>,
) -> Result<(), redb::Error> {
    for row in transaction.open_table(table)?.iter()? {
        let (key, value) = row?;
        each(key.value(), value.value()).map_err(redb::Error::Corrupted)?;
    }
    Ok(())
}

/// Reads all records of a table. Format 1 has no such table.
fn records<T: DeserializeOwned>(
    transaction: &ReadTransaction,
    table: Records,
) -> Result<Vec<T>, redb::Error> {
    let mut records = Vec::new();
    let read = rows(transaction, table, |id, bytes| {
        records.push(from_json(id, bytes)?);
        Ok(())
    });
    match read {
        Ok(()) | Err(redb::Error::TableDoesNotExist(_)) => Ok(records),
        Err(error) => Err(error),
    }
}

/// Reads the whole index.
pub(super) fn read(database: &Database) -> Result<Contents, redb::Error> {
    let mut contents = Contents::default();
    let transaction = database.begin_read()?;
    rows(&transaction, ARTIFACTS, |_, bytes| {
        contents.artifacts.push(from_json("an artifact", bytes)?);
        Ok(())
    })?;
    rows(&transaction, NAMES, |(tenant, reference), id| {
        let name = tenant.parse().and_then(|tenant| {
            let reference = reference.parse()?;
            Ok(Name { tenant, reference })
        });
        let name = name.map_err(|error| format!("the name {tenant:?} {reference:?} {error}"))?;
        contents.names.push((name, ArtifactId::from_bits(id)));
        Ok(())
    })?;
    rows(&transaction, LAYERS, |id, bytes| {
        let usage = from_json("a layer", bytes)?;
        contents.layers.push((LayerId::from_bits(id), usage));
        Ok(())
    })?;
    contents.claims = records(&transaction, CLAIMS)?;
    contents.snapshots = records(&transaction, SNAPSHOTS)?;
    contents.groups = records(&transaction, GROUPS)?;
    contents.fences = fences(&transaction)?;
    Ok(contents)
}

/// Reads the fences. An older version has written none.
fn fences(transaction: &ReadTransaction) -> Result<Fences, redb::Error> {
    let meta = transaction.open_table(META)?;
    let number = |key| Ok::<_, redb::Error>(meta.get(key)?.map_or(0, |number| number.value()));
    let mut fences = Fences::default();
    fences.forget(number(FORGOTTEN_KEY)?);
    fences.miss(number(MISSED_KEY)?);
    for fence in records(transaction, FENCES)? {
        fences.insert(fence);
    }
    Ok(fences)
}
