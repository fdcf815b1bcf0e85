//! Write-back of the pool's dirty data, and the handling of a write-back error. The kernel reports
//! a failed write-back once, to the first caller of `syncfs`: so nothing else in the engine calls
//! `syncfs` on the pool.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};

use super::claims::entries::VolumeEntry;
use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::layers::trash_unreferenced;
use super::mounts;
use super::notice::NotCommitted;
use super::pending::trash_pending;
use super::shared::Inner;
use super::target::Target;
use crate::model::{ArtifactId, LayerId, Timestamp, VolumeId, VolumeRecord, layout};
use crate::store::{self, WritebackFailure};
use crate::sys::Errno;

/// A write-back failed, and the kernel will not say so again: whatever existed may have lost bytes.
/// None of it is sealed.
pub(super) fn taint(inner: &Inner, error: &crate::sys::Error) {
    let (failure, keys, artifacts) = {
        let mut state = inner.state.lock();
        // Under the lock: a fork of tainted content is made either before this, and is tainted too,
        // or not at all.
        let until = inner.now();
        state.write_back.taint(until);
        let artifacts = state.catalog.remove_unindexed();
        let gone: HashSet<ArtifactId> = artifacts.iter().map(|it| it.artifact.id).collect();
        let seals = state.volumes.seals();
        let seals = seals.filter(|(.., plan)| gone.contains(&plan.artifact));
        let keys: Vec<LayerId> = seals.map(|(key, ..)| key).collect();
        let boot = inner.boot().to_owned();
        let unfinished = true;
        let failure = WritebackFailure {
            boot,
            until,
            unfinished,
        };
        (failure, keys, artifacts)
    };
    point(Point::WritebackFailureHeard);
    // Before everything else, even before a log line: the kernel reports the error once, and this
    // process may be killed.
    let noted = inner.with_reserve(|| store::record_writeback_failure(&inner.dirs.root, &failure));
    point(Point::WritebackFailureNoted);
    tracing::error!(%error, seals = keys.len(),
        "the disk failed to write back data: no volume that existed until now will be sealed");
    if let Err(error) = noted {
        tracing::error!(%error,
            "the write-back error could not be recorded in the pool; a restart of the driver \
             forgets it");
    }
    if inner.refuse_degraded().is_err() {
        // The next start does the rest. Seal intents whose artifacts may be in the index stay as
        // they are.
        return;
    }
    finish(inner, failure);
    point(Point::WritebackFailureFinished);
    for key in keys {
        if let Some((_, record)) = inner.seal_intent(key) {
            inner.say_not_committed(&record, &NotCommitted::Damaged);
        }
        if let Err(error) = trash_pending(inner, key) {
            tracing::error!(%error, "a discarded volume could not be moved to trash/ yet");
        }
    }
    for sealed in artifacts {
        // Forks of it keep its layer until they are gone.
        trash_unreferenced(inner, &sealed.artifact.layers);
    }
    inner.state.notify();
}

/// A write-back error that the overlay of a live volume remembers and that no process has recorded:
/// the kernel reported it to a process that died, or to another program while no driver ran. A
/// volume that was unmounted before remembers nothing.
fn unnoted(inner: &Inner) -> Option<crate::sys::Error> {
    let mounted: Vec<VolumeRecord> = {
        let state = inner.state.lock();
        let unknown = state.volumes.all_live();
        let unknown = unknown.filter(|volume| !state.write_back.is_tainted(&volume.record));
        let mounted = unknown.filter(|volume| volume.mount().is_some());
        mounted.map(|volume| volume.record.clone()).collect()
    };
    mounted.iter().find_map(|record| {
        let target = Target::open(record.targets.first()?).ok().flatten()?;
        let mount = target.pin().ok()?;
        let start = mounts::start(record);
        inner.backend.write_back_error(mount.as_fd(), &start)
    })
}

/// Records such an error of a volume that is about to be sealed.
pub(super) fn note_remembered(inner: &Inner, record: &VolumeRecord, mount: BorrowedFd<'_>) {
    if inner.state.lock().write_back.is_tainted(record) {
        return;
    }
    let start = mounts::start(record);
    if let Some(error) = inner.backend.write_back_error(mount, &start) {
        note(inner, &error, || {
            inner.state.lock().write_back.is_tainted(record)
        });
    }
}

/// Records an error that an overlay remembers. The pool is synced first, so that a pending report
/// of this error arrives now and does not taint later content.
fn note(inner: &Inner, error: &crate::sys::Error, is_noted: impl Fn() -> bool) {
    let syncing = inner.durability.lock();
    if is_noted() {
        return;
    }
    let _taints_if_it_fails = inner.sync(&syncing);
    if !is_noted() {
        taint(inner, error);
    }
}

/// Does the same at a start, for all mounted overlays.
pub(super) fn note_unnoted(inner: &Inner) {
    if let Some(error) = unnoted(inner) {
        note(inner, &error, || unnoted(inner).is_none());
    }
}

/// Completes the work of a process that recorded a write-back error in this boot and then died.
pub(super) fn finish_taint(inner: &Inner) -> Result<()> {
    let failure = store::read_writeback_failure(&inner.dirs.root, inner.boot())
        .context("read the record of a write-back error")?;
    if let Some(failure) = failure.filter(|failure| failure.unfinished) {
        finish(inner, failure);
    }
    Ok(())
}

/// Marks the persistent volumes, and records that this is done.
fn finish(inner: &Inner, mut failure: WritebackFailure) {
    taint_claims(inner, failure.until);
    point(Point::WritebackFailureMarked);
    failure.unfinished = false;
    let record = || store::record_writeback_failure(&inner.dirs.root, &failure);
    if let Err(error) = inner.with_reserve(record) {
        tracing::warn!(%error,
            "could not record that all persistent volumes are marked as damaged; the next start \
             marks them again");
    }
}

/// Waiting for the disk. Only this code learns of write-back errors.
impl Inner {
    /// Writes back all that is dirty. The kernel reports a failure once, to the first caller, so
    /// only this function asks. A caller that names durable content in the index holds the lock
    /// until the index has it.
    pub(super) fn sync(&self, _syncing: &parking_lot::MutexGuard<'_, ()>) -> Result<()> {
        self.refuse_degraded()?;
        let began = self.now();
        let synced = self.dirs.root.sync_filesystem();
        match &synced {
            Ok(()) => self.state.lock().write_back.set_synced(began),
            Err(error) => taint(self, error),
        }
        synced.context("write back the content to be sealed")
    }
}

/// Marks persistent volumes from before `until` as damaged after a write-back error: their private
/// content may have lost bytes. Pods can still use it, but it is not snapshotted or cloned. The
/// mark is in the volumes' directories, because these outlive the boot.
fn taint_claims(inner: &Inner, until: Timestamp) {
    let claims: Vec<VolumeId> = {
        let state = inner.state.lock();
        // Content that was on the disk before is intact.
        let synced = state.write_back.synced();
        let whole = |held: &VolumeEntry| {
            // A start may act upon an error that an earlier one could not finish.
            let is_later = held.claim.created > until;
            is_later || synced.is_some_and(|time| held.is_idle_since(time))
        };
        let claims = state
            .claims
            .entries()
            .iter()
            .filter(|(_, held)| !whole(held));
        claims.map(|(id, _)| id.clone()).collect()
    };
    for id in claims {
        taint_claim(inner, &id);
    }
}

/// Marks one claim, if it has content of its own. The mark is made durable at once: a node whose
/// disk fails may be reset next.
pub(super) fn taint_claim(inner: &Inner, id: &VolumeId) {
    let marked = inner.with_reserve(|| {
        let dir = inner.dirs.volumes.open_beneath(id)?;
        dir.ensure_dir(layout::DAMAGED, 0o700)?;
        dir.sync()
    });
    match marked {
        // All its content is in layers, which were durable.
        Err(error) if error.is(Errno::ENOENT) => return,
        Err(error) => {
            tracing::error!(volume.id = %id, %error,
                "could not durably mark the volume as damaged in the pool; a restart of the driver \
                 or of the node may forget the mark");
        }
        Ok(()) => {}
    }
    if let Some(held) = inner.state.lock().claims.get_mut(id) {
        held.damaged = true;
    }
}
