//! The layers' tables of contents, as the running driver knows them: their digests, and the layers
//! that are being read for a table. `tables` makes the tables.
//!
//! A table lies beside the layer's content, as `layers/<id>/table`. Its SHA-256 names the layer
//! between nodes and is an attribute of that file.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::fs::OFlags;
use tokio::sync::Notify;

use super::backoff::Backoff;
use super::types::Tables;
use crate::archive::toc;
use crate::model::{LayerId, Sha256, layout};
use crate::sys::{self, Dir, Errno, OpenFile, Xattrs};

/// The attribute of a table's file that has the table's digest.
pub(super) const DIGEST: &str = "trusted.baggageclaim.sha256";

/// How long the deletion of a layer waits for the job to close its files. The job looks after each
/// read whether it must, which takes milliseconds. On a node whose processors are all busy, its
/// thread of the lowest priority may not run for more than a second.
const CLOSES: Duration = Duration::from_secs(10);

/// The known digests, and what the background job needs to make the others.
#[derive(Debug, Default)]
pub(super) struct TableDigests {
    layers: Mutex<HashMap<LayerId, TableState>>,
    /// A layer after the larger one whose reading it interrupts.
    reading: Mutex<Vec<Reading>>,
    closed: Condvar,
    /// There may be a new layer.
    pub(super) wanted: Notify,
    /// Layers whose table could not be made.
    pub(super) failed: Backoff<LayerId>,
    /// A layer became durable, got its table, or is known to get none now.
    changed: Notify,
}

/// What is known of a layer's table.
#[derive(Debug, Clone, Copy, Default)]
struct TableState {
    /// `None`: it is not made yet.
    digest: Option<Sha256>,
    /// The layer exceeds a limit of tables. It does not change, so this is not tried again.
    is_refused: bool,
    /// The pool had no space for it.
    is_short: bool,
    /// Another node or an upload waits for it.
    is_awaited: bool,
}

impl TableDigests {
    fn of_layer(&self, layer: &LayerId) -> TableState {
        let layers = self.layers.lock();
        layers.get(layer).copied().unwrap_or_default()
    }

    fn change<T>(&self, layer: LayerId, change: impl FnOnce(&mut TableState) -> T) -> T {
        change(self.layers.lock().entry(layer).or_default())
    }

    /// The digest of a layer's table; `None`: it is not made yet.
    pub(super) fn get(&self, layer: &LayerId) -> Option<Sha256> {
        self.of_layer(layer).digest
    }

    pub(super) fn insert(&self, layer: LayerId, digest: Sha256) {
        self.change(layer, |table| {
            *table = TableState {
                digest: Some(digest),
                is_refused: table.is_refused,
                ..TableState::default()
            };
        });
    }

    /// Another node or an upload waits for the layer's table.
    pub(super) fn wait_for(&self, layer: LayerId) {
        self.change(layer, |table| table.is_awaited = true);
        self.wake();
    }

    /// Whether another node or an upload waits for it.
    pub(super) fn is_awaited(&self, layer: &LayerId) -> bool {
        self.of_layer(layer).is_awaited
    }

    /// The layers that another node or an upload waits for, except those that lacked space.
    pub(super) fn awaited(&self) -> Vec<LayerId> {
        let layers = self.layers.lock();
        let awaited = layers
            .iter()
            .filter(|(_, table)| table.is_awaited && !table.is_short);
        awaited.map(|(layer, _)| *layer).collect()
    }

    /// Whether the layer has no table, and may have one.
    pub(super) fn may_be_made(&self, layer: &LayerId) -> bool {
        let table = self.of_layer(layer);
        table.digest.is_none() && !table.is_refused
    }

    /// The pool has no space for the layer's table. `true`: it had some before.
    pub(super) fn lacks_space(&self, layer: LayerId) -> bool {
        !self.change(layer, |table| std::mem::replace(&mut table.is_short, true))
    }

    /// The tables of these layers. `has_space`: whether the pool has some at this moment.
    pub(super) fn of(&self, layers: &[LayerId], has_space: bool) -> Tables {
        let mut found = Tables::Made;
        for layer in layers {
            let table = self.of_layer(layer);
            if table.digest.is_some() {
                continue;
            }
            if !has_space && table.is_short {
                return Tables::NoSpace;
            }
            if self.failed.has(layer) {
                found = Tables::Failed;
            } else if found == Tables::Made {
                found = Tables::Coming;
            }
        }
        found
    }

    /// The layer exceeds a limit of tables.
    pub(super) fn refuse(&self, layer: LayerId) {
        self.failed.forget(&layer);
        self.change(layer, |table| table.is_refused = true);
    }

    /// Whether it exceeds a limit of tables.
    pub(super) fn is_refused(&self, layer: &LayerId) -> bool {
        self.of_layer(layer).is_refused
    }

    /// The layer's table is gone.
    pub(super) fn forget(&self, layer: &LayerId) {
        if let Some(table) = self.layers.lock().get_mut(layer) {
            table.digest = None;
        }
    }

    /// Forgets all layers but these.
    pub(super) fn retain(&self, layers: &HashSet<LayerId>) {
        self.layers.lock().retain(|layer, _| layers.contains(layer));
    }

    /// Begins to read a layer. The caller closes its files before it drops the guard.
    pub(super) fn read(&self, layer: LayerId) -> ReadGuard<'_> {
        let is_gone = false;
        self.reading.lock().push(Reading { layer, is_gone });
        let tables = self;
        ReadGuard { tables, layer }
    }

    /// Stops the job if it reads this layer, which left its place. Waits a moment until the job has
    /// closed its files: an open file keeps its space, and eviction counts on that.
    pub(super) fn let_go(&self, layer: &LayerId) {
        let mut reading = self.reading.lock();
        let is_it = |reading: &Reading| reading.layer == *layer;
        if let Some(reading) = reading.iter_mut().find(|reading| is_it(reading)) {
            reading.is_gone = true;
        }
        let still = |reading: &mut Vec<Reading>| reading.iter().any(is_it);
        let waited = self.closed.wait_while_for(&mut reading, still, CLOSES);
        if waited.timed_out() {
            tracing::debug!(%layer,
                "the job that makes tables of contents still has a file of the layer open");
        }
    }

    /// Layers became durable, or one got its table or is known to get none now.
    pub(super) fn tell(&self) {
        self.changed.notify_one();
    }

    /// Waits until that is told. For one caller.
    pub(super) async fn content_changed(&self) {
        self.changed.notified().await;
    }

    /// Lets the background job look for layers without a table.
    pub(super) fn wake(&self) {
        self.wanted.notify_one();
    }
}

/// The layer whose table is being made.
#[derive(Debug)]
struct Reading {
    layer: LayerId,
    /// It left its place.
    is_gone: bool,
}

/// A layer is being read, until this is dropped.
pub(super) struct ReadGuard<'a> {
    tables: &'a TableDigests,
    layer: LayerId,
}

impl ReadGuard<'_> {
    /// Whether the layer is to be let go.
    pub(super) fn is_gone(&self) -> bool {
        let reading = self.tables.reading.lock();
        let mut reading = reading.iter();
        reading.any(|reading| reading.layer == self.layer && reading.is_gone)
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut reading = self.tables.reading.lock();
        reading.retain(|reading| reading.layer != self.layer);
        drop(reading);
        self.tables.closed.notify_all();
    }
}

/// What lies beside a layer's content under the name of its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recorded {
    /// Nothing.
    Missing,
    /// A table without its digest, of another length than its header says, or no table at all.
    Damaged,
    /// The table with this digest.
    Whole(Sha256),
}

/// Looks at the table of the layer in this directory. Does not read all of it: a transfer does.
pub(super) fn recorded(layer: &Dir) -> sys::Result<Recorded> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let fd = match layer.open_file_beneath(layout::TABLE, flags, 0) {
        Err(error) if error.is(Errno::ENOENT) => return Ok(Recorded::Missing),
        Err(error) if error.is(Errno::ELOOP) || error.is(Errno::ENXIO) => {
            return Ok(Recorded::Damaged);
        }
        fd => OpenFile::new(fd?, layer.path().join(layout::TABLE)),
    };
    let digest = fd.xattr(DIGEST)?;
    let digest = digest.and_then(|text| String::from_utf8(text).ok()?.parse().ok());
    let file = File::from(OwnedFd::from(fd));
    Ok(match digest {
        Some(digest) if toc::has_whole_length(&file) => Recorded::Whole(digest),
        _ => Recorded::Damaged,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn an_upload_waits_for_tables_that_are_coming_and_for_no_others() {
        let tables = TableDigests::default();
        let [made, coming, failed, short] = [1, 2, 3, 4].map(LayerId::from_bits);
        tables.insert(made, Sha256([1; 32]));
        tables.failed.put_off(&failed);
        assert!(tables.lacks_space(short) && !tables.lacks_space(short));
        assert_eq!(tables.of(&[made], false), Tables::Made);
        assert_eq!(tables.of(&[made, coming], false), Tables::Coming);
        assert_eq!(tables.of(&[failed, coming], true), Tables::Failed);
        assert_eq!(tables.of(&[failed, short], false), Tables::NoSpace);
        assert_eq!(tables.of(&[short], true), Tables::Coming, "it is made now");
        tables.insert(short, Sha256([2; 32]));
        assert_eq!(tables.of(&[short], false), Tables::Made);
    }

    #[test]
    fn a_layer_that_is_deleted_is_let_go_first_and_others_are_not_waited_for() {
        let tables = TableDigests::default();
        let (read, other) = (LayerId::from_bits(1), LayerId::from_bits(2));
        let is_closed = AtomicBool::new(false);
        let reading = tables.read(read);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let reading = reading;
                while !reading.is_gone() {
                    std::thread::yield_now();
                }
                is_closed.store(true, Ordering::SeqCst);
            });
            tables.let_go(&other);
            assert!(!is_closed.load(Ordering::SeqCst), "another layer");
            tables.let_go(&read);
            assert!(is_closed.load(Ordering::SeqCst), "it is closed by now");
        });
        assert!(tables.reading.lock().is_empty());
    }
}
