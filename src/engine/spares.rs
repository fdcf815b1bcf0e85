//! Spares: directories that will be volumes', made before anybody asks for one.
//!
//! A third of what a publish does is making directories and files that are the same for every volume. So a few are kept ready, and a
//! publish takes one by a rename. Where there is none (a burst of pods, a full disk, a volume with a size limit) it makes all itself.
//!
//! Only the process that made them knows them, by descriptors it keeps open; what an earlier one left in `spares/` is swept at
//! start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::Inner;
use super::error::{Doing, Result};
use super::threads::Threads;
use crate::backend::{self, Backend, Prepared};
use crate::model::{LayerId, VolumeRecord};
use crate::store::{self, BlankRecord};
use crate::sys::Dir;

/// How many are kept ready: a pod has a few volumes, and pods come some at a time. Each costs four inodes.
const MOST: usize = 32;

/// With so few left, more are made. Many at a time: publishes seldom meet the thread that makes them.
const FEW: usize = 16;

/// A directory that will be a volume's.
#[derive(Debug)]
pub(super) struct Spare {
    name: String,
    dir: Dir,
    prepared: Option<Prepared>,
    record: BlankRecord,
}

impl Spare {
    /// Its name in `spares/`.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn into_parts(self) -> (Dir, Option<Prepared>, BlankRecord) {
        (self.dir, self.prepared, self.record)
    }

    fn make(inner: &Inner) -> backend::Result<Self> {
        let name = LayerId::from_bits(inner.random()).to_string();
        inner.dirs.spares.create_dir(&name, 0o700)?;
        let made = Self::furnish(inner, &name);
        if made.is_err() {
            // On a full disk, say. What cannot be thrown away is swept at the next start.
            let _ = inner.throw_away(&inner.dirs.spares, name.as_ref());
        }
        made
    }

    fn furnish(inner: &Inner, name: &str) -> backend::Result<Self> {
        let dir = inner.dirs.spares.open_beneath(name)?;
        Ok(Self {
            prepared: inner.backend.prepare(&dir)?,
            record: store::blank_volume(&dir)?,
            name: name.to_owned(),
            dir,
        })
    }
}

/// Those that are ready, and the thread that makes them.
#[derive(Debug)]
pub(super) struct Spares {
    ready: Mutex<Vec<Spare>>,
    thread: Threads,
    being_filled: AtomicBool,
}

impl Spares {
    pub(super) fn new(thread: Threads) -> Self {
        Self {
            ready: Mutex::default(),
            thread,
            being_filled: AtomicBool::new(false),
        }
    }

    /// One for this volume. A limit has to be set before anything is made in the directory.
    pub(super) fn take(&self, volume: &VolumeRecord) -> Option<Spare> {
        if volume.spec.size_limit.is_some() {
            return None;
        }
        self.ready.lock().pop()
    }

    /// One that was not used after all.
    pub(super) fn give_back(&self, spare: Spare) {
        self.ready.lock().push(spare);
    }

    /// Deletes all: the next start may need the room on a full disk. Blocks until the thread has ended.
    pub(super) fn finish(&self, spares: &Dir, backend: &dyn Backend) {
        self.thread.finish();
        for Spare { name, .. } in std::mem::take(&mut *self.ready.lock()) {
            if let Err(error) = backend.delete(spares, name.as_ref(), &|| false) {
                tracing::debug!(%error, "a spare volume is left for the next start");
            }
        }
    }
}

/// Deletes what an earlier process made and did not use. At once, not by way of the trash: it is little, and a driver that is killed
/// again and again before it has emptied that would fill the pool.
pub(super) fn sweep(inner: &Inner) -> Result<()> {
    let spares = &inner.dirs.spares;
    for entry in spares.entries().doing("read spares/")? {
        let name = entry.name.as_ref();
        if let Err(error) = inner.backend.delete(spares, name, &|| false) {
            tracing::debug!(%error, "a spare volume goes to the trash");
            inner.throw_away(spares, name).doing("sweep spares/")?;
        }
    }
    Ok(())
}

/// Has more of them made if there are few. Costs nothing where there are enough.
pub(super) fn fill(inner: &Arc<Inner>) {
    let spares = &inner.spares;
    if spares.ready.lock().len() >= FEW || spares.being_filled.swap(true, Ordering::SeqCst) {
        return;
    }
    let engine = inner.clone();
    // Nobody waits for it; and when no job is taken any more, none is needed.
    drop(spares.thread.run(move || {
        while engine.spares.ready.lock().len() < MOST && !engine.stop.is_cancelled() {
            match Spare::make(&engine) {
                Ok(spare) => engine.spares.ready.lock().push(spare),
                Err(error) => {
                    tracing::debug!(%error, "no spare volume was made");
                    break;
                }
            }
        }
        engine.spares.being_filled.store(false, Ordering::SeqCst);
    }));
}
