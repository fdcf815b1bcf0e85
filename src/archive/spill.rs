//! The temporary file of a walk that outgrew its memory: a database (redb) without a name and with
//! a small cache. `links` and `sorted` keep their tables in files of their own.

use std::fs::File;

use redb::Database;
use rustix::fs::{Mode, OFlags};

use super::error::{Error, Result};
use crate::sys::Dir;

/// How much of the file is in memory.
const CACHE: usize = 4 << 20;

/// Makes a database in `dir`, which has no name there.
pub(super) fn create(dir: &Dir) -> Result<Database> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, ".", flags, Mode::from_raw_mode(0o600))
        .map_err(|errno| dir.error("openat", ".", errno))?;
    Database::builder()
        .set_cache_size(CACHE)
        .create_file(File::from(file))
        .map_err(failed)
}

pub(super) fn failed(error: impl Into<redb::Error>) -> Error {
    Error::Spill(error.into().to_string())
}
