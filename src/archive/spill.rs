//! The temporary file of a walk that outgrew its memory: a database (redb) without a name and with
//! a small cache. `links` and `sorted` keep their tables in files of their own.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use redb::{
    Database, Durability, ReadTransaction, ReadableDatabase, StorageBackend, WriteTransaction,
};
use rustix::fs::{Mode, OFlags};

use super::error::{Error, Result};
use crate::sys::{self, Dir, Errno};

/// How much of the file is in memory.
const CACHE: usize = 4 << 20;

/// A temporary file that is made once something is written to it.
pub(super) struct Spill<'a> {
    dir: &'a Dir,
    database: Option<Database>,
}

impl<'a> Spill<'a> {
    /// None yet; it will lie in `dir`, and have no name there.
    pub(super) fn new(dir: &'a Dir) -> Self {
        let database = None;
        Self { dir, database }
    }

    /// Begins to write. No other process reads the file.
    pub(super) fn write(&mut self) -> Result<WriteTransaction> {
        let database = match self.database.take() {
            Some(database) => database,
            None => create(self.dir)?,
        };
        let database = self.database.insert(database);
        let mut transaction = database.begin_write().map_err(failed)?;
        let fast = transaction.set_durability(Durability::None);
        fast.map_err(failed)?;
        Ok(transaction)
    }

    /// Begins to read; `None`: nothing was written.
    pub(super) fn read(&self) -> Result<Option<ReadTransaction>> {
        let reading = self.database.as_ref().map(ReadableDatabase::begin_read);
        reading.transpose().map_err(failed)
    }
}

fn create(dir: &Dir) -> Result<Database> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, ".", flags, Mode::from_raw_mode(0o600))
        .map_err(|errno| dir.error("openat", ".", errno))?;
    Database::builder()
        .set_cache_size(CACHE)
        .create_with_backend(Nameless(File::from(file)))
        .map_err(failed)
}

/// A full disk is an error of the system, as of every other write.
pub(super) fn failed(error: impl Into<redb::Error>) -> Error {
    let error = error.into();
    match &error {
        redb::Error::Io(io) if io.raw_os_error().is_some() => {
            let errno = io.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
            sys::Error::new("write", Path::new("a temporary file"), errno).into()
        }
        _ => Error::Spill(error.to_string()),
    }
}

/// A file that nothing outlives: it is never written back.
#[derive(Debug)]
struct Nameless(File);

impl StorageBackend for Nameless {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}
