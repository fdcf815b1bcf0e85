//! Making durable what was sealed: one `syncfs` and one index transaction for as many seals as wait.
//!
//! First the content, then the index that names it; the other order gave, in a trial with a power cut, an artifact with an
//! empty file. What follows the index is told of one seal at a time: a layer that does not say that it is named keeps no other
//! from being durable, nor does a promise that cannot be taken back ([`Standing`]). And what to do when the disk says that it
//! lost something ([`doom`]).

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc;

use super::artifacts::Sealed;
use super::crash::{Point, point};
use super::error::{Doing, Error, Result};
use super::notice::{self, NotCommitted};
use super::seal::{RETRY, retry_after, trash_pending, unpromise};
use super::state::{Goal, Leaving, State};
use super::target::Target;
use super::{Inner, claims, reap, spares};
use crate::backend::Start;
use crate::model::{Artifact, ArtifactId, LayerId, Name, VolumeRecord};
use crate::store::{self, Change, Doom};

/// A promise in `pending/` whose seal is over, and that could not be taken back: while it is there, a start of this boot that does not
/// find the artifact in the index would make it anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) key: LayerId,
    /// What was sealed, if anything was. Until the promise is gone it does not count as durable, and so is not deleted.
    pub(super) artifact: Option<ArtifactId>,
}

/// Makes durable what was sealed, in batches, until the engine closes; and takes back promises that are left over.
pub(super) async fn commit_loop(
    inner: Arc<Inner>,
    mut sealed: mpsc::UnboundedReceiver<LayerId>,
    mut standing: Vec<Standing>,
) {
    const MOST_AT_ONCE: usize = 4096;
    let mut batch = Vec::new();
    let mut again = Again::default();
    loop {
        tokio::select! {
            count = sealed.recv_many(&mut batch, MOST_AT_ONCE) => if count == 0 { return },
            () = again.due(&standing) => {
                let engine = inner.clone();
                let before = standing.clone();
                match inner.syncs.run(move || take_back_again(&engine, before)).await {
                    Ok(left) => {
                        again.tried(left.len() < standing.len());
                        standing = left;
                    }
                    Err(Error::ShuttingDown) => return,
                    Err(error) => {
                        tracing::error!(%error, "promises whose seals are over are still there");
                        again.tried(false);
                    }
                }
                continue;
            }
            () = inner.stop.cancelled() => return,
        }
        let mut attempt = 0;
        loop {
            let engine = inner.clone();
            let keys = batch.clone();
            let began = Instant::now();
            let result = inner.syncs.run(move || commit(&engine, &keys)).await;
            match result.and_then(|result| result) {
                Ok(left) => {
                    inner.counters.committed(began.elapsed());
                    if standing.is_empty() {
                        again = Again::default();
                    }
                    standing.extend(left);
                    break;
                }
                Err(Error::ShuttingDown) => return,
                Err(error) => {
                    let retry = retry_after(attempt, &error);
                    tracing::error!(%error, seals = batch.len(), ?retry, "what was sealed is not durable yet");
                    tokio::select! {
                        () = tokio::time::sleep(retry) => {}
                        () = inner.stop.cancelled() => return,
                    }
                    attempt += 1;
                }
            }
        }
        batch.clear();
        inner.changed.notify_waiters();
        inner.wake_reaper();
    }
}

/// When promises that are left over are tried again. A moment in time, not a pause: seals that come meanwhile do not put it off.
#[derive(Debug, Default)]
struct Again {
    attempt: usize,
    at: Option<Instant>,
}

impl Again {
    /// Waits until it is time; for ever, where nothing is left over.
    async fn due(&mut self, standing: &[Standing]) {
        if standing.is_empty() {
            return std::future::pending().await;
        }
        let retry = RETRY[self.attempt.min(RETRY.len() - 1)];
        let at = *self.at.get_or_insert_with(|| Instant::now() + retry);
        tokio::time::sleep_until(at.into()).await;
    }

    /// They were; whether one of them went.
    fn tried(&mut self, with_success: bool) {
        self.attempt = if with_success { 0 } else { self.attempt + 1 };
        self.at = None;
    }
}

/// One `syncfs`, one transaction: first the content, then the index that names it. What cannot be taken back of the promises is
/// returned; an error is of the whole batch.
fn commit(inner: &Inner, keys: &[LayerId]) -> Result<Vec<Standing>> {
    let syncing = inner.syncing.lock();
    // After a failure nothing of this batch is left to be committed.
    inner.sync(&syncing)?;
    point(Point::CommitSynced);
    let named_as_indexed = inner.naming.lock();
    let (artifacts, names) = sealed_by(inner, keys);
    let mut changes: Vec<Change> = (artifacts.iter())
        .map(|(_, artifact)| Change::PutArtifact(artifact.clone()))
        .collect();
    changes.extend((names.iter()).map(|(name, id)| Change::PutName(name.clone(), *id)));
    inner.commit_index(&changes)?;
    let batch = artifacts.iter().map(|(_, artifact)| artifact.id).collect();
    inner.state.lock().indexed(&batch, names);
    drop(named_as_indexed);
    point(Point::CommitIndexed);
    for (_, artifact) in &artifacts {
        if let Some(newest) = artifact.layers.first()
            && let Err(error) = confirm(inner, *newest)
        {
            // It is tried again when the layer is measured; and where it is gone, `check` says so.
            tracing::warn!(layer = %newest, name = %artifact.name(), %error, "an index made anew would not know this layer");
        }
    }
    point(Point::CommitConfirmed);
    let became = artifacts.iter();
    let became: HashMap<LayerId, ArtifactId> =
        became.map(|(key, artifact)| (*key, artifact.id)).collect();
    let over = keys.iter().map(|key| Standing {
        key: *key,
        artifact: became.get(key).copied(),
    });
    let (gone, standing) = take_back(inner, over.collect());
    let left: Vec<Leaving> = {
        let mut state = inner.state.lock();
        say_durable(&mut state, &gone);
        // Also where the promise stands: the index names it, and whoever hears that the disk lost something must not take it for one
        // that it does not.
        let left = keys.iter().filter_map(|key| state.leaving.remove(key));
        left.collect()
    };
    for leaving in left {
        if let Goal::Seal(plan) = leaving.goal
            && became.contains_key(&plan.layer)
        {
            let reference = plan.reference;
            let committed = || notice::What::Committed { reference };
            notice::say(inner.config.notices.as_ref(), &leaving.record, committed);
        }
    }
    inner.changed.notify_waiters();
    Ok(standing)
}

/// Takes back promises whose seals are over; which of them are gone, and which could not be taken back.
fn take_back(inner: &Inner, over: Vec<Standing>) -> (Vec<Standing>, Vec<Standing>) {
    over.into_iter()
        .partition(|one| match unpromise(inner, one.key) {
            Ok(()) => {
                point(Point::CommitPendingTrashed);
                true
            }
            Err(error) => {
                let path = inner.dirs.pending.path().join(one.key.to_string());
                tracing::error!(path = %path.display(), %error,
                "what is sealed is promised still; until that can be taken back it is not deleted");
                false
            }
        })
}

/// Tries again what could not be taken back; what still cannot.
fn take_back_again(inner: &Inner, over: Vec<Standing>) -> Vec<Standing> {
    let (gone, standing) = take_back(inner, over);
    if !gone.is_empty() {
        say_durable(&mut inner.state.lock(), &gone);
        inner.changed.notify_waiters();
        inner.wake_reaper();
    }
    standing
}

/// What was sealed says that it is durable only when its promise is gone: what is durable may be deleted, and a promise that outlived
/// its artifact would bring it back.
fn say_durable(state: &mut State, gone: &[Standing]) {
    for id in gone.iter().filter_map(|one| one.artifact) {
        state.artifacts.set_durable(&id, true);
    }
}

/// The artifacts of a batch, each with the key of its volume, and the names that the index gets.
type Batch = (Vec<(LayerId, Artifact)>, HashMap<Name, ArtifactId>);

/// The artifacts that these volumes became, and the names that must point at one of them. An
/// artifact that was discarded after a write-back error is not among them.
fn sealed_by(inner: &Inner, keys: &[LayerId]) -> Batch {
    let state = inner.state.lock();
    let plans = keys
        .iter()
        .filter_map(|key| match &state.leaving.get(key)?.goal {
            Goal::Seal(plan) => Some((*key, plan.artifact)),
            Goal::Discard => None,
        });
    let sealed = plans.filter_map(|(key, id)| Some((key, state.artifacts.get(&id)?)));
    let sealed = sealed.map(|(key, Sealed { artifact, .. })| (key, artifact.clone()));
    let sealed: Vec<_> = sealed.collect();
    let names = state.names_of(&sealed.iter().map(|(_, artifact)| artifact.id).collect());
    (sealed, names)
}

/// Says in a layer that the index names it and that it is durable.
pub(super) fn confirm(inner: &Inner, layer: LayerId) -> Result<()> {
    let layer = inner
        .dirs
        .layers
        .open_beneath(layer.to_string())
        .doing("open the layer's directory")?;
    store::confirm_layer(&layer).doing("confirm the layer's record")
}

/// A write-back failed, and the kernel will not say so again: whatever existed may have lost bytes. None of it is sealed.
pub(super) fn doom(inner: &Inner, error: &crate::sys::Error) {
    let (mut doom, keys, artifacts) = {
        let mut state = inner.state.lock();
        // Under the lock: a fork of what is doomed is made either before this, and is doomed with it, or not at all.
        let until = inner.clock.now();
        state.doomed_until = Some(until);
        let visible: Vec<_> = state
            .leaving
            .iter()
            .filter_map(|(key, leaving)| match &leaving.goal {
                Goal::Seal(plan) => Some((*key, plan.artifact)),
                Goal::Discard => None,
            })
            .filter(|(_, id)| {
                let sealed = state.artifacts.get(id);
                sealed.is_some_and(|sealed| !sealed.durable)
            })
            .collect();
        let mut artifacts = Vec::new();
        let mut keys = Vec::new();
        for (key, id) in visible {
            keys.push(key);
            artifacts.extend(state.remove_artifact(id));
        }
        for sealed in &artifacts {
            state.give_name_back(&sealed.artifact.name());
        }
        let boot = inner.boot.clone();
        let unfinished = true;
        let doom = Doom {
            boot,
            until,
            unfinished,
        };
        (doom, keys, artifacts)
    };
    point(Point::DoomHeard);
    // Before all else, even a line of the log: the kernel has said it once, and this process may be killed.
    let noted = inner.with_reserve(|| store::write_doom(&inner.dirs.root, &doom));
    point(Point::DoomNoted);
    tracing::error!(%error, seals = keys.len(),
        "the disk failed to write back data: nothing that existed until now will be sealed");
    if let Err(error) = noted {
        tracing::error!(%error, "this cannot be remembered over a restart of the driver");
    }
    spares::forget_mounted(inner);
    claims::content::doom(inner);
    point(Point::DoomMarked);
    doom.unfinished = false;
    if let Err(error) = store::write_doom(&inner.dirs.root, &doom) {
        tracing::warn!(%error, "claims will be marked once more by the next start");
    }
    point(Point::DoomFinished);
    for key in keys {
        let leaving = inner
            .state
            .lock()
            .leaving
            .get(&key)
            .map(|leaving| leaving.record.clone());
        if let Some(record) = leaving {
            let notices = inner.config.notices.as_ref();
            notice::say_not_committed(notices, &record, &NotCommitted::Damaged);
        }
        if let Err(error) = trash_pending(inner, key) {
            tracing::error!(%error, "a volume that is not sealed could not be thrown away yet");
        }
    }
    for sealed in artifacts {
        // Forks of it keep its layer until they are gone.
        reap::trash_unreferenced(inner, &sealed.artifact.layers);
    }
    inner.changed.notify_waiters();
}

/// An error that the overlay of a live volume remembers, and that no process has noted: the kernel told it to one that died, or to
/// another one while no driver ran. What left before that, and is mounted nowhere, remembers nothing.
fn unnoted(inner: &Inner) -> Option<crate::sys::Error> {
    let live: Vec<(VolumeRecord, PathBuf)> = {
        let state = inner.state.lock();
        let unknown = state.volumes.values();
        let unknown = unknown.filter(|live| !state.is_doomed(&live.record));
        unknown
            .filter_map(|live| Some((live.record.clone(), live.mounts.keys().next()?.clone())))
            .collect()
    };
    live.iter().find_map(|(record, path)| {
        let target = Target::open(path).ok().flatten()?;
        let mount = target.pin().ok()?;
        let start = Start::of(record);
        inner.backend.write_back_error(mount.as_fd(), &start)
    })
}

/// Notes such an error of a volume that is about to be sealed.
pub(super) fn note_remembered(inner: &Inner, record: &VolumeRecord, mount: BorrowedFd<'_>) {
    if inner.state.lock().is_doomed(record) {
        return;
    }
    let start = Start::of(record);
    if let Some(error) = inner.backend.write_back_error(mount, &start) {
        note(inner, &error, || inner.state.lock().is_doomed(record));
    }
}

/// Notes an error that an overlay remembers. The pool is synced first: a report of the same error that waits for this process comes
/// now, and does not doom what is made after this.
fn note(inner: &Inner, error: &crate::sys::Error, is_noted: impl Fn() -> bool) {
    let syncing = inner.syncing.lock();
    if is_noted() {
        return;
    }
    let _dooms_if_it_fails = inner.sync(&syncing);
    if !is_noted() {
        doom(inner, error);
    }
}

/// The same at a start, of all overlays that are mounted.
pub(super) fn note_unnoted(inner: &Inner) {
    if let Some(error) = unnoted(inner) {
        note(inner, &error, || unnoted(inner).is_none());
    }
}

/// Does what a process did not come to that heard of a failed write-back in this boot.
pub(super) fn finish_doom(inner: &Inner) -> Result<()> {
    let root = &inner.dirs.root;
    let doom = store::read_doom(root, &inner.boot).doing("read what was doomed")?;
    if let Some(mut doom) = doom.filter(|doom| doom.unfinished) {
        claims::content::doom(inner);
        point(Point::DoomMarked);
        doom.unfinished = false;
        store::write_doom(root, &doom).doing("write down what was doomed")?;
    }
    Ok(())
}

/// Waiting for the disk, in the one place that hears of what it lost.
impl Inner {
    /// Writes back all that is dirty. The kernel reports a failure once, to whoever asks first: so nobody else asks.
    /// Whoever goes on to name in the index what is durable now holds the lock meanwhile.
    pub(super) fn sync(&self, _syncing: &parking_lot::MutexGuard<'_, ()>) -> Result<()> {
        let began = self.clock.now();
        let synced = self.dirs.root.sync_filesystem();
        match &synced {
            Ok(()) => self.state.lock().synced = Some(began),
            Err(error) => doom(self, error),
        }
        synced.doing("write back what is to be sealed")
    }
}
