//! Durability: which content is known to be on the disk, which may have lost bytes, and the locks
//! on the way from `syncfs` to the index. `writeback_failure` handles a failed write-back.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedMutexGuard, mpsc};

use super::clock::FAR;
use super::error::{Error, Result};
use crate::model::{LayerId, Timestamp, VolumeRecord};

/// What this boot knows of write-back.
#[derive(Debug, Default)]
pub(super) struct WriteBack {
    /// When this process started.
    started: Timestamp,
    tainted_until: Option<Timestamp>,
    synced: Option<Timestamp>,
}

impl WriteBack {
    /// What a process knows that starts now, and finds the record of a failed write-back, if any.
    pub(super) fn found(started: Timestamp, failed: Option<Timestamp>) -> Self {
        let is_right = |until: &Timestamp| *until <= started.after(FAR);
        Self {
            started,
            tainted_until: failed.map(|until| Some(until).filter(is_right).unwrap_or(started)),
            synced: None,
        }
    }

    /// When content that this process finds was begun. The clock follows dates that it was told
    /// ([`Clock::seen`](super::clock::Clock::seen)), but not far ahead: such a date is of a wrong
    /// clock. Content with it counts as old as the last failed write-back. Otherwise a failure of
    /// today would be older than the content, and would not taint it.
    pub(super) fn begun(&self, dated: Timestamp) -> Timestamp {
        if dated <= self.started.after(FAR) {
            return dated;
        }
        self.tainted_until.unwrap_or(self.started)
    }

    /// A write-back failed: content that existed until now may have lost bytes.
    pub(super) fn taint(&mut self, until: Timestamp) {
        self.tainted_until = Some(until);
    }

    /// When the last failed write-back was noted.
    pub(super) fn tainted_until(&self) -> Option<Timestamp> {
        self.tainted_until
    }

    /// Whether content that was begun at this time may have lost bytes.
    pub(super) fn is_tainted_since(&self, begun: Timestamp) -> bool {
        self.tainted_until.is_some_and(|until| begun <= until)
    }

    /// Refuses content that began to come in at this time and may have lost bytes.
    pub(super) fn refuse_tainted_since(&self, began: Timestamp) -> Result<()> {
        if self.is_tainted_since(began) {
            return Err(Error::WritebackFailed);
        }
        Ok(())
    }

    /// Whether this volume existed when the last write-back failed.
    pub(super) fn is_tainted(&self, record: &VolumeRecord) -> bool {
        self.is_tainted_since(record.created)
    }

    /// A write-back that began then succeeded.
    pub(super) fn set_synced(&mut self, began: Timestamp) {
        self.synced = Some(began);
    }

    /// All that was written before this time is on the disk.
    pub(super) fn synced(&self) -> Option<Timestamp> {
        self.synced
    }
}

/// The locks on the way to the index, and the queue of seals that wait for a commit.
#[derive(Debug)]
pub(super) struct Durability {
    syncing: Mutex<()>,
    naming: Mutex<()>,
    commits: mpsc::UnboundedSender<LayerId>,
    probing: Arc<tokio::sync::Mutex<()>>,
}

impl Durability {
    /// With the end of the queue that the commit loop reads.
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<LayerId>) {
        let (commits, sealed) = mpsc::unbounded_channel();
        let durability = Self {
            syncing: Mutex::default(),
            naming: Mutex::default(),
            commits,
            probing: Arc::default(),
        };
        (durability, sealed)
    }

    /// Held from a `syncfs` until the index names what it made durable.
    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.syncing.lock()
    }

    /// Held from a look at the names in memory until the index has them: the last writer of a name
    /// is then its last owner, in memory and in the index.
    pub(super) fn lock_names(&self) -> MutexGuard<'_, ()> {
        self.naming.lock()
    }

    /// Queues a seal for the next commit.
    pub(super) fn commit(&self, key: LayerId) {
        // The receiver lives until the engine is closed; then the next start does the rest.
        let _received_or_closing = self.commits.send(key);
    }

    /// Held while one caller tries whether the disk answers.
    pub(super) async fn probe(&self) -> OwnedMutexGuard<()> {
        self.probing.clone().lock_owned().await
    }
}
