//! The index of what is durable: artifacts, the names that point at them, what their layers cost; claims, snapshots, groups.
//!
//! A redb database that is read whole at start and written in transactions, each durable when it returns. After a full
//! disk redb refuses everything until it is opened anew ([`Index::reopen`]).

use std::fs::File;
use std::io::Read;

use parking_lot::Mutex;
use redb::{
    Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition, WriteTransaction,
};
use rustix::fs::{Advice, OFlags};
use serde::{Serialize, de::DeserializeOwned};

use super::error::{Error, Result};
use super::index_file::IndexFile;
use crate::model::{
    Artifact, ArtifactId, Claim, LayerId, Name, Snapshot, SnapshotGroup, SnapshotId, Usage,
    VolumeId, layout,
};
use crate::sys::{Dir, Errno};

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const ARTIFACTS: TableDefinition<u128, &[u8]> = TableDefinition::new("artifacts");
const NAMES: TableDefinition<(&str, &str), u128> = TableDefinition::new("names");
const LAYERS: TableDefinition<u128, &[u8]> = TableDefinition::new("layers");
/// By id, JSON. Since format 2.
type Records = TableDefinition<'static, &'static str, &'static [u8]>;
const CLAIMS: Records = TableDefinition::new("claims");
const SNAPSHOTS: Records = TableDefinition::new("snapshots");
const GROUPS: Records = TableDefinition::new("groups");

const FORMAT_KEY: &str = "format";
/// A number that each transaction makes up, so that of the last one it can be known whether it is in. Counted, it could be another
/// one's that came after it failed.
const LAST_KEY: &str = "last-transaction";
/// 1 had no claims. It is taken over as it is; but a version that knows no claims would throw their layers away as
/// nobody's, so it must not take over ours.
const FORMAT: u64 = 2;
const OLDEST_FORMAT: u64 = 1;
/// redb would take up to a gigabyte; the whole index is a few megabytes, and is read once.
const CACHE_BYTES: usize = 4 << 20;

/// One change of the index.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// An artifact is there, or is different now.
    PutArtifact(Artifact),
    /// An artifact is gone.
    RemoveArtifact(ArtifactId),
    /// A name points here now.
    PutName(Name, ArtifactId),
    /// A name is gone.
    RemoveName(Name),
    /// What a layer costs.
    PutLayer(LayerId, Usage),
    /// A layer is gone.
    RemoveLayer(LayerId),
    /// A claim is there, or is different now.
    PutClaim(Claim),
    /// A claim is gone.
    RemoveClaim(VolumeId),
    /// A snapshot is there, or is different now.
    PutSnapshot(Snapshot),
    /// A snapshot is gone.
    RemoveSnapshot(SnapshotId),
    /// A group of snapshots is there.
    PutGroup(SnapshotGroup),
    /// A group is gone.
    RemoveGroup(SnapshotId),
}

/// All that the index knows.
#[derive(Debug, Default)]
pub struct Contents {
    /// Every artifact.
    pub artifacts: Vec<Artifact>,
    /// Every name and what it points at.
    pub names: Vec<(Name, ArtifactId)>,
    /// The layers that were measured.
    pub layers: Vec<(LayerId, Usage)>,
    /// Every claim.
    pub claims: Vec<Claim>,
    /// Every snapshot.
    pub snapshots: Vec<Snapshot>,
    /// Every group of snapshots.
    pub groups: Vec<SnapshotGroup>,
}

/// The open index.
#[derive(Debug)]
pub struct Index {
    root: Dir,
    opened: Mutex<Opened>,
}

/// An index made anew, whole, beside the one whose place it takes; that is kept as `index.redb.old`. At no moment is there an index that
/// names less than all of this: there is the old one, or none, or the new one.
#[derive(Debug)]
pub struct NewIndex<'a> {
    root: &'a Dir,
    name: String,
}

impl<'a> NewIndex<'a> {
    /// Makes it, as `index.redb.new`.
    pub fn make(root: &'a Dir, changes: &[Change]) -> Result<Self> {
        let name = format!("{}.new", layout::INDEX);
        match root.remove_file(&name) {
            Err(error) if !error.is(Errno::ENOENT) => return Err(error.into()),
            _ => {}
        }
        let database = open_file(root, &name, OFlags::RDWR | OFlags::CREATE)?;
        make(&database).map_err(|error| Error::database("make the index", error))?;
        write(&database, changes, made_up())?;
        Ok(Self { root, name })
    }

    /// Puts the old one aside, if there is one.
    pub fn clear_place(&self) -> Result<()> {
        if Index::exists(self.root)? {
            let old = format!("{}.old", layout::INDEX);
            self.root.rename_over(layout::INDEX, self.root, &old)?;
        }
        Ok(())
    }

    /// Puts it where the old one was.
    pub fn take_place(self) -> Result<()> {
        self.root.rename(&self.name, self.root, layout::INDEX)?;
        Ok(self.root.sync()?)
    }
}

/// The database, if it could be opened.
struct Opened {
    database: Option<Database>,
    /// It is over ([`Index::close`]): nobody opens it anew.
    closed: bool,
    /// Which transaction was its last, if it is known to have had one that said so.
    last: Option<u64>,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened")
            .field("closed", &self.closed)
            .field("last", &self.last)
            .finish_non_exhaustive()
    }
}

impl Index {
    /// Opens the index of a pool, made when it is missing, and reads it whole.
    pub fn open(root: &Dir) -> Result<(Self, Contents)> {
        if !Self::exists(root)? {
            make_new(root)?;
        }
        guarded(root, || {
            let database = open_database(root)?;
            initialise(root, &database)?;
            Self::opened(root, database)
        })
    }

    /// The same for an index that must be there: one that is missing, empty or only begun is an error.
    pub fn open_existing(root: &Dir) -> Result<(Self, Contents)> {
        let is_begun = root
            .stat_if_there(layout::INDEX)?
            .is_some_and(|stat| stat.st_size > 0);
        if !is_begun {
            return Err(lost(root, "it is missing or empty, and the pool is not"));
        }
        guarded(root, || {
            let database = open_database(root)?;
            if format(&database)?.is_none() {
                return Err(lost(root, "it has no tables"));
            }
            initialise(root, &database)?;
            Self::opened(root, database)
        })
    }

    fn opened(root: &Dir, database: Database) -> Result<(Self, Contents)> {
        let contents = read(root, &database)?;
        let opened = Opened {
            last: meta(&database, LAST_KEY)?,
            database: Some(database),
            closed: false,
        };
        let index = Self {
            root: root.try_clone()?,
            opened: Mutex::new(opened),
        };
        Ok((index, contents))
    }

    /// Reads the index of a pool without changing a byte of it, also when it was not closed cleanly.
    pub fn read_only(root: &Dir) -> Result<Contents> {
        let file = File::from(root.open_file_beneath(layout::INDEX, OFlags::RDONLY, 0)?);
        guarded(root, || {
            let database = copy_of(root, file)?;
            match format(&database)? {
                Some(found) if found > FORMAT => Err(newer(root, found)),
                _ => read(root, &database),
            }
        })
    }

    /// Whether the pool has an index.
    pub fn exists(root: &Dir) -> Result<bool> {
        Ok(root.has(layout::INDEX)?)
    }

    /// Makes all these changes, or none; they are durable when this returns. When it fails, none are made, unless the failure is
    /// unsure ([`Error::is_unsure`]): then the database could not even be opened anew, which would have told.
    pub fn commit(&self, changes: &[Change]) -> Result<()> {
        let mut opened = self.opened.lock();
        if opened.closed {
            return Err(Error::Closed);
        }
        let Some(database) = &opened.database else {
            return Err(Error::database(WRITING, redb::Error::PreviousIo));
        };
        let number = made_up();
        match write(database, changes, number) {
            Ok(()) => {
                opened.last = Some(number);
                Ok(())
            }
            Err(error) if error.is_unsure() => {
                if let Err(again) = opened.reopen(&self.root) {
                    tracing::error!(error = %again, "the index cannot be opened anew after a failed write");
                    // That takes room, which a full disk does not have. To read it takes none.
                    match last_on_disk(&self.root) {
                        Ok(last) => opened.last = last,
                        Err(again) => {
                            tracing::error!(error = %again, "nor can it be read");
                            return Err(error);
                        }
                    }
                }
                if opened.last == Some(number) {
                    return Ok(());
                }
                Err(error.nothing_written())
            }
            Err(error) => Err(error),
        }
    }

    /// Closes the database, which writes to it. From here on every commit fails, and it is not opened anew: another process may
    /// have it.
    pub fn close(&self) {
        let mut opened = self.opened.lock();
        opened.closed = true;
        drop(opened.database.take());
    }

    /// Opens the database anew: the way out after a full disk. Until it succeeds every commit fails.
    pub fn reopen(&self) -> Result<()> {
        self.opened.lock().reopen(&self.root)
    }

    /// Whether it has what a commit failed to write, now that it is opened anew.
    pub fn has(&self, failed: &Error) -> bool {
        matches!(failed, Error::Unsure { number, .. } if self.opened.lock().last == Some(*number))
    }
}

impl Opened {
    fn reopen(&mut self, root: &Dir) -> Result<()> {
        if self.closed {
            return Err(Error::Closed);
        }
        // Put away first: that writes to the file, too.
        self.database = None;
        let (database, last) = guarded(root, || {
            let database = open_database(root)?;
            let last = meta(&database, LAST_KEY)?;
            Ok((database, last))
        })?;
        (self.database, self.last) = (Some(database), last);
        Ok(())
    }
}

/// Reads what may be torn. redb takes pages that are no pages for a defect of its own, and panics.
fn guarded<T>(root: &Dir, reading: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(reading))
        .unwrap_or_else(|_| Err(lost(root, "it is torn")))
}

/// Makes an empty index, whole or not at all: redb cannot open what it did not finish to make, and the next start would
/// ask for an index to be made anew that never was one.
fn make_new(root: &Dir) -> Result<()> {
    let half_made = format!(".{}.new", layout::INDEX);
    match root.remove_file(&half_made) {
        Err(error) if !error.is(Errno::ENOENT) => return Err(error.into()),
        _ => {}
    }
    let database = open_file(root, &half_made, OFlags::RDWR | OFlags::CREATE)?;
    initialise(root, &database)?;
    drop(database);
    root.rename(&half_made, root, layout::INDEX)?;
    Ok(())
}

fn open_database(root: &Dir) -> Result<Database> {
    open_file(root, layout::INDEX, OFlags::RDWR)
}

fn open_file(root: &Dir, name: &str, flags: OFlags) -> Result<Database> {
    // openat2 refuses a mode where nothing is made.
    let mode = if flags.contains(OFlags::CREATE) {
        0o600
    } else {
        0
    };
    let file = File::from(root.open_file_beneath(name, flags, mode)?);
    read_anew(root, &file)?;
    redb::Builder::new()
        .set_cache_size(CACHE_BYTES)
        .create_with_backend(IndexFile::new(file, root.try_clone()?))
        .map_err(|error| damaged(root, &error.into()))
}

/// A copy in memory of the index in a file: an unclean end is repaired by writing.
fn copy_of(root: &Dir, mut file: File) -> Result<Database> {
    let path = root.path().join(layout::INDEX);
    let failed = |error| crate::sys::Error::new("read", path.clone(), error);
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed)?;
    let memory = redb::backends::InMemoryBackend::new();
    let copied = memory
        .set_len(bytes.len() as u64)
        .and_then(|()| memory.write(0, &bytes));
    copied.map_err(failed)?;
    redb::Builder::new()
        .set_cache_size(CACHE_BYTES)
        .create_with_backend(memory)
        .map_err(|error| damaged(root, &error.into()))
}

/// Which transaction was the last that is on the disk.
fn last_on_disk(root: &Dir) -> Result<Option<u64>> {
    let file = File::from(root.open_file_beneath(layout::INDEX, OFlags::RDONLY, 0)?);
    read_anew(root, &file)?;
    guarded(root, || meta(&copy_of(root, file)?, LAST_KEY))
}

/// How much a kernel reads ahead that was told nothing else.
const READ_AHEAD: usize = 128 << 10;

/// Makes the kernel read a file from the disk, whatever it has of it in memory; ahead, since page by page each would be waited for.
///
/// After a write-back that failed the kernel keeps the pages, as clean: they show what is not on the disk and will never be.
/// A database opened upon them would write more that refers to them, and be torn after the next power cut.
fn read_anew(root: &Dir, file: &File) -> Result<()> {
    // What can be written is; what cannot be is no longer dirty, and so can be forgotten. A disk that still refuses says so
    // again when the database is repaired.
    if let Err(error) = file.sync_all() {
        tracing::warn!(%error, "the index could not be written back; it is read from the disk");
        // But where a filesystem has given itself up it stays dirty and cannot be forgotten (ext4, Linux 6.1): what would be read is
        // nowhere but in memory.
        file.sync_all()
            .map_err(|errno| root.error("fsync", layout::INDEX, errno))?;
    }
    if let Err(error) = rustix::fs::fadvise(file, 0, None, Advice::DontNeed) {
        tracing::warn!(%error, "what the kernel remembers of the index is not forgotten");
    }
    // Of more than it reads ahead at once the kernel reads just that much.
    let length = file.metadata().map_or(0, |file| file.len());
    for from in (0..length).step_by(READ_AHEAD) {
        let size = std::num::NonZeroU64::new(READ_AHEAD as u64);
        if let Err(error) = rustix::fs::fadvise(file, from, size, Advice::WillNeed) {
            tracing::debug!(%error, "the index is read page by page");
            break;
        }
    }
    Ok(())
}

/// A database that cannot be opened, in words that say what to do.
fn damaged(root: &Dir, error: &redb::Error) -> Error {
    let path = root.path().join(layout::INDEX);
    match error {
        redb::Error::Io(io) if io.raw_os_error().is_some() => {
            let errno = io.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
            crate::sys::Error::new("open", path, errno).into()
        }
        _ => lost(root, &error.to_string()),
    }
}

/// An index that is not what it must be, and the way out.
fn lost(root: &Dir, why: &str) -> Error {
    Error::Damaged {
        path: root.path().join(layout::INDEX),
        why: format!("{why}; `baggageclaim check --rebuild` makes the index anew from the layers"),
    }
}

/// The form that an index says to have; `None`: it was never completed.
fn format(database: &Database) -> Result<Option<u64>> {
    meta(database, FORMAT_KEY)
}

/// A number that an index says of itself.
fn meta(database: &Database, key: &str) -> Result<Option<u64>> {
    let doing = "read the index";
    let read = database
        .begin_read()
        .map_err(|error| Error::database(doing, error))?;
    match read.open_table(META) {
        Ok(table) => {
            let number = table
                .get(key)
                .map_err(|error| Error::database(doing, error))?;
            Ok(number.map(|number| number.value()))
        }
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(Error::database(doing, error)),
    }
}

/// Makes the tables of an index that is new or of an older form, and refuses one of a newer form.
fn initialise(root: &Dir, database: &Database) -> Result<()> {
    let doing = "make the index";
    match format(database)? {
        Some(FORMAT) => Ok(()),
        None | Some(OLDEST_FORMAT..FORMAT) => {
            make(database).map_err(|error| Error::database(doing, error))
        }
        Some(found) => Err(newer(root, found)),
    }
}

fn newer(root: &Dir, found: u64) -> Error {
    Error::Format {
        path: root.path().join(layout::INDEX),
        found,
        known: FORMAT,
    }
}

fn make(database: &Database) -> Result<(), redb::Error> {
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

/// What is being done when a write fails.
const WRITING: &str = "write to the index";

/// What no other transaction is called.
fn made_up() -> u64 {
    let mut bits = [0; 8];
    getrandom::fill(&mut bits).expect("a booted Linux has random bytes");
    u64::from_ne_bytes(bits)
}

/// Writes what is transaction `number`.
fn write(database: &Database, changes: &[Change], number: u64) -> Result<()> {
    let begun = begin(database, changes, number);
    let begun = begun.map_err(|error| Error::database(WRITING, error))?;
    // Up to here nothing refers to what was written; in here, from some moment on, all does.
    let committed = begun.commit();
    committed.map_err(|error| Error::unsure(WRITING, error.into(), number))
}

/// A transaction of all these changes, which is not yet committed.
fn begin(
    database: &Database,
    changes: &[Change],
    number: u64,
) -> Result<WriteTransaction, redb::Error> {
    let transaction = database.begin_write()?;
    // Each is opened for each change: one that no change is for costs as much to open as a change.
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
        }
    }
    Ok(transaction)
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data serialises")
}

/// All rows of a table; none when an older version has not made it.
fn records<T: DeserializeOwned>(
    transaction: &redb::ReadTransaction,
    table: Records,
    wrong: impl Fn(String) -> Error,
    failed: impl Fn(redb::Error) -> Error,
) -> Result<Vec<T>> {
    let rows = match transaction.open_table(table) {
        Ok(rows) => rows,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
        Err(error) => return Err(failed(error.into())),
    };
    let mut found = Vec::new();
    for row in rows.iter().map_err(|error| failed(error.into()))? {
        let (key, value) = row.map_err(|error| failed(error.into()))?;
        let record = serde_json::from_slice(value.value())
            .map_err(|error| wrong(format!("{}: {error}", key.value())))?;
        found.push(record);
    }
    Ok(found)
}

fn read(root: &Dir, database: &Database) -> Result<Contents> {
    let failed = |error: redb::Error| damaged(root, &error);
    let wrong = |what: String| lost(root, &what);
    let mut contents = Contents::default();
    let transaction = database
        .begin_read()
        .map_err(|error| failed(error.into()))?;
    let artifacts = transaction
        .open_table(ARTIFACTS)
        .map_err(|error| failed(error.into()))?;
    for row in artifacts.iter().map_err(|error| failed(error.into()))? {
        let (_, value) = row.map_err(|error| failed(error.into()))?;
        let artifact = serde_json::from_slice(value.value())
            .map_err(|error| wrong(format!("an artifact: {error}")))?;
        contents.artifacts.push(artifact);
    }
    let names = transaction
        .open_table(NAMES)
        .map_err(|error| failed(error.into()))?;
    for row in names.iter().map_err(|error| failed(error.into()))? {
        let (key, id) = row.map_err(|error| failed(error.into()))?;
        let (tenant, reference) = key.value();
        let name = tenant.parse().and_then(|tenant| {
            Ok(Name {
                tenant,
                reference: reference.parse()?,
            })
        });
        let name =
            name.map_err(|error| wrong(format!("the name {tenant:?} {reference:?} {error}")))?;
        contents
            .names
            .push((name, ArtifactId::from_bits(id.value())));
    }
    let layers = transaction
        .open_table(LAYERS)
        .map_err(|error| failed(error.into()))?;
    for row in layers.iter().map_err(|error| failed(error.into()))? {
        let (id, value) = row.map_err(|error| failed(error.into()))?;
        let usage = serde_json::from_slice(value.value())
            .map_err(|error| wrong(format!("a layer: {error}")))?;
        contents
            .layers
            .push((LayerId::from_bits(id.value()), usage));
    }
    contents.claims = records(&transaction, CLAIMS, wrong, failed)?;
    contents.snapshots = records(&transaction, SNAPSHOTS, wrong, failed)?;
    contents.groups = records(&transaction, GROUPS, wrong, failed)?;
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Timestamp;

    fn artifact(id: u128) -> Artifact {
        Artifact {
            id: ArtifactId::from_bits(id),
            tenant: "ci".parse().expect("label"),
            reference: format!("task-cache/ключ-{id}").parse().expect("reference"),
            layers: vec![LayerId::from_bits(id)],
            created: Timestamp(1),
            ttl_seconds: Some(5),
            last_used: Timestamp(2),
            made_by: None,
            digests: crate::model::Digests::default(),
        }
    }

    fn put(id: u128) -> [Change; 3] {
        let artifact = artifact(id);
        let usage = Usage {
            bytes: 1,
            files: 2,
            directories: 3,
        };
        [
            Change::PutName(artifact.name(), artifact.id),
            Change::PutLayer(artifact.layers[0], usage),
            Change::PutArtifact(artifact),
        ]
    }

    #[test]
    fn what_was_committed_is_there_again_and_what_was_removed_is_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        let (index, contents) = Index::open(&root).expect("made");
        assert!(contents.artifacts.is_empty());
        index.commit(&put(1)).expect("committed");
        index.commit(&put(2)).expect("committed");
        let gone = artifact(1);
        index
            .commit(&[
                Change::RemoveArtifact(gone.id),
                Change::RemoveName(gone.name()),
                Change::RemoveLayer(gone.layers[0]),
            ])
            .expect("committed");
        index.reopen().expect("reopened");
        index.commit(&[]).expect("usable");
        // Not closed: read as a crash leaves it.
        let contents = Index::read_only(&root).expect("read");
        assert_eq!(contents.artifacts, [artifact(2)]);
        drop(index);
        let (_, contents) = Index::open(&root).expect("again");
        assert_eq!(contents.artifacts, [artifact(2)]);
        assert_eq!(contents.names, [(artifact(2).name(), artifact(2).id)]);
        assert_eq!(contents.layers.len(), 1);
    }

    #[test]
    fn an_index_that_was_closed_says_so_and_stays_closed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        let (index, _) = Index::open(&root).expect("made");
        index.close();
        for error in [
            index.commit(&put(1)).expect_err("closed"),
            index.reopen().expect_err("closed"),
            index.commit(&put(1)).expect_err("still closed"),
        ] {
            assert!(matches!(error, Error::Closed), "{error}");
            assert!(!error.is_full() && !error.is_unsure(), "{error}");
        }
        let (_, contents) = Index::open(&root).expect("nobody has it open");
        assert!(contents.artifacts.is_empty());
    }

    #[test]
    fn an_index_that_a_crash_kept_from_being_made_is_made_anew() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        // As redb leaves it: long enough, and without its first bytes.
        root.write_new(".index.redb.new", &[0; 8192]).expect("torn");
        let (index, _) = Index::open(&root).expect("made");
        index.commit(&put(1)).expect("committed");
        assert!(!root.has(".index.redb.new").expect("looked"));
    }

    #[test]
    fn a_torn_index_is_a_clear_error() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        for bytes in [&b"not a database"[..], &[0u8; 8192][..]] {
            root.replace(layout::INDEX, bytes).expect("written");
            let error = Index::open(&root).expect_err("damaged");
            assert!(error.to_string().contains("check --rebuild"), "{error}");
            assert_eq!(
                root.read(layout::INDEX, 1 << 20).expect("still there"),
                bytes
            );
        }
    }

    #[test]
    fn an_index_from_before_there_were_claims_is_taken_over() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        let flags = OFlags::RDWR | OFlags::CREATE;
        let database = open_file(&root, layout::INDEX, flags).expect("made");
        let transaction = database.begin_write().expect("begins");
        {
            let mut meta = transaction.open_table(META).expect("meta");
            meta.insert(FORMAT_KEY, OLDEST_FORMAT).expect("set");
            transaction.open_table(NAMES).expect("names");
            transaction.open_table(LAYERS).expect("layers");
            let mut artifacts = transaction.open_table(ARTIFACTS).expect("artifacts");
            let bytes = json(&artifact(1));
            artifacts.insert(1, bytes.as_slice()).expect("put");
        }
        transaction.commit().expect("committed");
        drop(database);
        assert_eq!(
            Index::read_only(&root).expect("read").artifacts,
            [artifact(1)]
        );
        let (index, contents) = Index::open(&root).expect("taken over");
        assert_eq!(contents.artifacts, [artifact(1)]);
        let snapshot = Snapshot {
            id: "snap-1".parse().expect("id"),
            name: "s".to_owned(),
            source: "vol-1".parse().expect("id"),
            created: Timestamp(1),
            size: 5,
            layers: vec![LayerId::from_bits(1)],
            view: crate::model::OwnerView {
                uid: Some((0, 1000)),
                gid: None,
            },
            group: None,
        };
        let put = Change::PutSnapshot(snapshot.clone());
        index.commit(&[put]).expect("committed");
        drop(index);
        let (_, contents) = Index::open(&root).expect("again");
        assert_eq!(contents.snapshots, [snapshot]);
    }

    #[test]
    fn an_index_of_a_newer_form_is_refused() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        drop(Index::open(&root).expect("made"));
        let database = open_database(&root).expect("opens");
        let transaction = database.begin_write().expect("begins");
        transaction
            .open_table(META)
            .expect("meta")
            .insert(FORMAT_KEY, 9)
            .expect("set");
        transaction.commit().expect("committed");
        drop(database);
        for error in [
            Index::open(&root).expect_err("too new"),
            Index::read_only(&root).expect_err("too new"),
        ] {
            assert!(
                matches!(
                    error,
                    Error::Format {
                        found: 9,
                        known: 2,
                        ..
                    }
                ),
                "{error}"
            );
        }
    }
}
