//! The index of durable state: artifacts, their names, layer sizes, claims, snapshots and groups.
//!
//! A redb database. It is read whole at start and written in transactions; each is durable when it
//! returns. After a full disk, redb refuses all writes until it is reopened ([`Index::reopen`]).

use std::fs::File;
use std::io::Read;

use parking_lot::Mutex;
use redb::{Database, StorageBackend};
use rustix::fs::{Advice, IFlags, OFlags};

use super::error::{Error, Result};
use super::index_file::IndexFile;
use super::tables::{
    self, Change, Contents, FORMAT, OLDEST_FORMAT, format, last_transaction, write,
};
use crate::model::layout;
use crate::sys::{self, Dir, Errno};

/// redb's default is up to a gigabyte. The whole index is a few megabytes and is read once.
const CACHE_BYTES: usize = 4 << 20;

/// The open index.
#[derive(Debug)]
pub struct Index {
    root: Dir,
    opened: Mutex<Opened>,
}

/// The database, if it is open.
struct Opened {
    database: Option<Database>,
    /// Set by [`Index::close`]: it is never reopened.
    closed: bool,
    /// The number of the last transaction, if known.
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
    /// Opens a pool's index and reads it whole. Creates it if it is missing.
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

    /// Like [`Index::open`], but an index that is missing, empty or incomplete is an error.
    pub fn open_existing(root: &Dir) -> Result<(Self, Contents)> {
        if !has_begun(root)? {
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
        let contents = tables::read(&database).map_err(|error| damaged(root, &error))?;
        let opened = Opened {
            last: last_transaction(&database)?,
            database: Some(database),
            closed: false,
        };
        let index = Self {
            root: root.try_clone()?,
            opened: Mutex::new(opened),
        };
        Ok((index, contents))
    }

    /// Reads a pool's index, even after an unclean shutdown, without changing the file.
    pub fn read_only(root: &Dir) -> Result<Contents> {
        Self::read_file(root, layout::INDEX)
    }

    /// Whether nothing of the index is lost: it can be read, or a newer version of the driver made
    /// it. Writes nothing.
    pub fn is_readable(root: &Dir) -> Result<bool> {
        if !has_begun(root)? {
            return Ok(false);
        }
        let file = File::from(root.open_file_beneath(layout::INDEX, OFlags::RDONLY, 0)?);
        let read = guarded(root, || {
            let database = copy_of(root, file)?;
            Ok(match format(&database)? {
                None => false,
                Some(found) if found > FORMAT => true,
                Some(_) => tables::read(&database).is_ok(),
            })
        });
        Ok(read.unwrap_or(false))
    }

    /// The same of a file of this name.
    pub(super) fn read_file(root: &Dir, name: &str) -> Result<Contents> {
        let file = File::from(root.open_file_beneath(name, OFlags::RDONLY, 0)?);
        guarded(root, || {
            let database = copy_of(root, file)?;
            match format(&database)? {
                Some(found) if found > FORMAT => Err(newer(root, found)),
                _ => tables::read(&database).map_err(|error| damaged(root, &error)),
            }
        })
    }

    /// Whether the pool has an index.
    pub fn exists(root: &Dir) -> Result<bool> {
        Ok(root.has(layout::INDEX)?)
    }

    /// Writes all changes or none; they are durable when this returns. After an error nothing is
    /// written, unless [`Error::is_unsure`]: the database could not be reopened to find out.
    pub fn commit(&self, changes: &[Change]) -> Result<()> {
        let mut opened = self.opened.lock();
        let number = random_number();
        let written = write(opened.database(&self.root)?, changes, number);
        match written {
            Ok(()) => {
                opened.last = Some(number);
                Ok(())
            }
            Err(error) if error.is_unsure() => {
                if let Err(again) = opened.reopen(&self.root) {
                    tracing::error!(error = %again,
                        "the index cannot be reopened after a failed write");
                    // Reopening needs disk space, which may be full. Reading needs none.
                    match last_on_disk(&self.root) {
                        Ok(last) => opened.last = last,
                        Err(again) => {
                            tracing::error!(error = %again, "the index cannot be read either");
                            return Err(error);
                        }
                    }
                }
                if opened.last == Some(number) {
                    return Ok(());
                }
                Err(error.nothing_written())
            }
            Err(error) => {
                // After a failed call the database refuses all others, whatever the disk says then.
                opened.database = None;
                Err(error)
            }
        }
    }

    /// Closes the database, which writes to it. Later commits fail, and it is never reopened,
    /// because another process may own it.
    pub fn close(&self) {
        let mut opened = self.opened.lock();
        opened.closed = true;
        drop(opened.database.take());
    }

    /// Reopens the database, for example after a full disk.
    pub fn reopen(&self) -> Result<()> {
        self.opened.lock().reopen(&self.root)
    }

    /// Whether a failed commit was written after all. Call it after the index was reopened.
    pub fn has(&self, failed: &Error) -> bool {
        matches!(failed, Error::Unsure { number, .. } if self.opened.lock().last == Some(*number))
    }
}

impl Opened {
    /// The database. Opens it if a failure has closed it.
    fn database(&mut self, root: &Dir) -> Result<&Database> {
        if self.database.is_none() {
            self.reopen(root)?;
        }
        self.database.as_ref().ok_or(Error::Closed)
    }

    fn reopen(&mut self, root: &Dir) -> Result<()> {
        if self.closed {
            return Err(Error::Closed);
        }
        // Close it first: that writes to the file, too.
        self.database = None;
        let (database, last) = guarded(root, || {
            let database = open_database(root)?;
            let last = last_transaction(&database)?;
            Ok((database, last))
        })?;
        (self.database, self.last) = (Some(database), last);
        Ok(())
    }
}

/// Whether there is an index that is not empty.
fn has_begun(root: &Dir) -> Result<bool> {
    let stat = root.stat_if_there(layout::INDEX)?;
    Ok(stat.is_some_and(|stat| stat.st_size > 0))
}

/// Reads a file that may be corrupt. redb panics on some invalid pages.
fn guarded<T>(root: &Dir, reading: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(reading))
        .unwrap_or_else(|_| Err(lost(root, "it is corrupt")))
}

/// Creates an empty index atomically: redb cannot open an incomplete one, and the next start would
/// demand a rebuild of it.
fn make_new(root: &Dir) -> Result<()> {
    let half_made = format!(".{}.new", layout::INDEX);
    let database = create(root, &half_made)?;
    initialise(root, &database)?;
    drop(database);
    root.rename(&half_made, root, layout::INDEX)?;
    Ok(())
}

/// A random transaction number.
pub(super) fn random_number() -> u64 {
    u64::from_ne_bytes(sys::random_bytes())
}

/// Creates a database in place of one that was not completed.
pub(super) fn create(root: &Dir, name: &str) -> Result<Database> {
    match root.remove_file(name) {
        Err(error) if !error.is(Errno::ENOENT) => return Err(error.into()),
        _ => {}
    }
    open_file(root, name, OFlags::RDWR | OFlags::CREATE)
}

/// Has btrfs overwrite this new file in place, as other filesystems do. Otherwise each write needs
/// free space, also when the database is only opened. redb has checksums of its own.
fn write_in_place(root: &Dir, file: &File) {
    let is_btrfs = root.space().is_ok_and(|it| it.magic == sys::Space::BTRFS);
    if is_btrfs && let Err(error) = rustix::fs::ioctl_setflags(file, IFlags::NOCOW) {
        tracing::warn!(%error, "the index cannot be written in place; it needs free space");
    }
}

fn open_database(root: &Dir) -> Result<Database> {
    open_file(root, layout::INDEX, OFlags::RDWR)
}

fn open_file(root: &Dir, name: &str, flags: OFlags) -> Result<Database> {
    // openat2 refuses a mode without O_CREAT.
    let mode = if flags.contains(OFlags::CREATE) {
        0o600
    } else {
        0
    };
    let file = File::from(root.open_file_beneath(name, flags, mode)?);
    if flags.contains(OFlags::CREATE) {
        write_in_place(root, &file);
    }
    read_from_disk(root, &file)?;
    redb::Builder::new()
        .set_cache_size(CACHE_BYTES)
        .create_with_backend(IndexFile::new(file, root.try_clone()?))
        .map_err(|error| damaged(root, &error.into()))
}

/// Loads the index file into memory, because redb repairs an unclean shutdown by writing.
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

/// The number of the last transaction on disk.
fn last_on_disk(root: &Dir) -> Result<Option<u64>> {
    let file = File::from(root.open_file_beneath(layout::INDEX, OFlags::RDONLY, 0)?);
    read_from_disk(root, &file)?;
    guarded(root, || last_transaction(&copy_of(root, file)?))
}

/// The kernel's default read-ahead.
const READ_AHEAD: usize = 128 << 10;

/// Drops the file from the page cache and reads it from disk again, with read-ahead.
///
/// After a failed write-back the kernel marks the pages as clean, although they are not on disk. A
/// database opened from them would write references to them and be corrupt after a power cut.
fn read_from_disk(root: &Dir, file: &File) -> Result<()> {
    // fsync writes what it can. Failed pages become clean and can then be dropped. A disk that
    // still fails reports it again in the repair.
    if let Err(error) = file.sync_all() {
        tracing::warn!(%error,
            "the index could not be written back; reading it from the disk again");
        // On a filesystem that has shut down, pages stay dirty and cannot be dropped (ext4, Linux
        // 6.1). A read would then return data that exists only in memory.
        file.sync_all()
            .map_err(|errno| root.error("fsync", layout::INDEX, errno))?;
    }
    if let Err(error) = rustix::fs::fadvise(file, 0, None, Advice::DontNeed) {
        tracing::warn!(%error, "the index cannot be dropped from the page cache");
    }
    // The kernel reads ahead at most this much per call.
    let length = file.metadata().map_or(0, |file| file.len());
    for from in (0..length).step_by(READ_AHEAD) {
        let size = std::num::NonZeroU64::new(READ_AHEAD as u64);
        if let Err(error) = rustix::fs::fadvise(file, from, size, Advice::WillNeed) {
            tracing::debug!(%error, "the index is read without read-ahead");
            break;
        }
    }
    Ok(())
}

/// The error for a database that cannot be opened.
fn damaged(root: &Dir, error: &redb::Error) -> Error {
    let path = root.path().join(layout::INDEX);
    match error {
        redb::Error::Io(io) if io.raw_os_error().is_some() => {
            let errno = io.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
            crate::sys::Error::new("open", path, errno).into()
        }
        redb::Error::Corrupted(why) => lost(root, why),
        _ => lost(root, &error.to_string()),
    }
}

/// The error for an invalid index, with its remedy.
pub(super) fn lost(root: &Dir, why: &str) -> Error {
    Error::Damaged {
        path: root.path().join(layout::INDEX),
        why: format!(
            "{why}; run `baggageclaim check --rebuild` to rebuild the index from the layers"
        ),
    }
}

/// Creates the tables in a new index or one of an older format. Refuses a newer format.
fn initialise(root: &Dir, database: &Database) -> Result<()> {
    let operation = "make the index";
    match format(database)? {
        Some(FORMAT) => Ok(()),
        None | Some(OLDEST_FORMAT..FORMAT) => {
            tables::make(database).map_err(|error| Error::database(operation, error))
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

#[cfg(test)]
pub(super) mod tests {
    use super::super::tables::{ARTIFACTS, FORMAT_KEY, LAYERS, META, NAMES};
    use super::*;
    use crate::model::{Artifact, ArtifactId, LayerId, Snapshot, Timestamp, Usage};

    pub(in crate::store) fn artifact(id: u128) -> Artifact {
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
            sharing: crate::model::Sharing::default(),
            fence: 0,
        }
    }

    pub(in crate::store) fn put(id: u128) -> [Change; 3] {
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
        assert!(Index::is_readable(&root).expect("looked at"));
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
        // Not closed: the file is as after a crash.
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
        let (_, contents) = Index::open(&root).expect("no process has it open");
        assert!(contents.artifacts.is_empty());
    }

    #[test]
    fn an_index_that_could_not_be_reopened_is_opened_by_the_next_commit() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        let (index, _) = Index::open(&root).expect("made");
        // As after a failed write on a disk that then refused to open it, too.
        index.opened.lock().database = None;
        let aside = folder.path().join("aside");
        std::fs::rename(folder.path().join(layout::INDEX), &aside).expect("renamed");
        let error = index.commit(&put(1)).expect_err("it is not there");
        assert!(!error.is_full() && !error.is_unsure(), "{error}");
        std::fs::rename(&aside, folder.path().join(layout::INDEX)).expect("renamed");
        index.commit(&put(2)).expect("committed");
        let contents = Index::read_only(&root).expect("read");
        assert_eq!(contents.artifacts, [artifact(2)]);
    }

    #[test]
    fn an_index_that_a_crash_left_half_made_is_remade() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let root = Dir::open(folder.path()).expect("it opens");
        // As redb leaves it after a crash: full length, but without its first bytes.
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
            assert!(!Index::is_readable(&root).expect("looked at"));
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
            let bytes = serde_json::to_vec(&artifact(1)).expect("JSON");
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
        // Another version can read it.
        assert!(Index::is_readable(&root).expect("looked at"));
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
