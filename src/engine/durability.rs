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
        let mut found = Self {
            started,
            ..Self::default()
        };
        found.tainted_until = failed.map(|until| found.begun(until));
        found
    }

    /// When something that this process finds a record of was begun. The clock follows a recorded
    /// date ([`Clock::seen`](super::clock::Clock::seen)) unless it is [`FAR`] ahead: a wrong clock
    /// wrote that. Content with such a date counts as old as the last failed write-back. Otherwise
    /// a failure of today would be older than the content, and would not taint it.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_a_date_far_ahead_of_the_start_counts_as_old_as_the_last_failure() {
        let (hour, now) = (Duration::from_hours(1), Timestamp(1_795_400_000_000));
        let failed = now.before(24 * hour);
        let found = WriteBack::found(now, Some(failed));
        // The controller's time is ahead of this machine's clock.
        let sound = now.after(hour);
        assert_eq!(found.begun(sound), sound);
        assert!(!found.is_tainted_since(found.begun(sound)));
        let wrong = now.after(FAR + hour);
        assert!(found.is_tainted_since(found.begun(wrong)));
        // Such a clock may have dated the failure, too.
        let found = WriteBack::found(now, Some(wrong));
        assert!(found.is_tainted_since(now) && !found.is_tainted_since(sound));
        assert_eq!(WriteBack::found(now, None).begun(wrong), now);
    }
}
