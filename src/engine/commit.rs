//! Group commit: one `syncfs` and one index transaction make all seals durable that wait.
//!
//! First the content, then the index that names it: in a trial with a power cut, the other order
//! gave an artifact with an empty file. The steps after the index are done for one seal at a time:
//! a layer that cannot be confirmed blocks no other, nor does a seal intent that cannot be
//! withdrawn. `writeback_failure` handles write-back errors.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc;

use super::artifacts::Sealed;
use super::backoff::retry_after;
use super::error::{Error, Result};
use super::failpoint::{Point, point};
use super::layers::confirm;
use super::lifecycle::Observation;
use super::notice::{NotCommitted, What};
use super::pending::withdraw_seal_intent;
use super::policies;
use super::shared::Inner;
use super::threads::Pool;
use super::transaction::entries;
use crate::model::{Artifact, ArtifactId, LayerId, Name, VolumeRecord};

/// Makes seals durable, in batches, until the engine closes.
pub(super) async fn commit_loop(inner: Arc<Inner>, mut sealed: mpsc::UnboundedReceiver<LayerId>) {
    const MOST_AT_ONCE: usize = 4096;
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            count = sealed.recv_many(&mut batch, MOST_AT_ONCE) => if count == 0 { return },
            () = inner.lifetime.stopping() => return,
        }
        inner.collector.tables.wake();
        let mut attempt = 0;
        loop {
            let keys = batch.clone();
            let began = Instant::now();
            let job = move |inner: &Arc<Inner>| commit(inner, &keys);
            match inner.run(Pool::Syncs, job).await {
                Ok(()) => {
                    inner.counters().committed(began.elapsed());
                    break;
                }
                Err(Error::ShuttingDown) => return,
                Err(error) => {
                    let retry = retry_after(attempt, &error);
                    tracing::error!(%error, seals = batch.len(), ?retry,
                        "sealed content could not be made durable; retrying");
                    tokio::select! {
                        () = tokio::time::sleep(retry) => {}
                        () = inner.lifetime.stopping() => return,
                    }
                    attempt += 1;
                }
            }
        }
        batch.clear();
        inner.state.notify();
        inner.collector.tables.tell();
        // A table may have failed because the disk was full, and a claim's layer may be new.
        inner.collector.tables.wake();
        inner.wake_reaper();
    }
}

/// Makes one batch durable: first the content, then the index that names it. An error is of the
/// whole batch.
fn commit(inner: &Inner, keys: &[LayerId]) -> Result<()> {
    let syncing = inner.durability.lock();
    // After a failure nothing of this batch is left to be committed.
    inner.sync(&syncing)?;
    point(Point::CommitSynced);
    let named_as_indexed = inner.durability.lock_names();
    let (artifacts, names) = sealed_by(inner, keys);
    let changes = entries(artifacts.iter().map(|(_, artifact)| artifact), &names);
    inner.transact(&changes).result()?;
    let batch = artifacts.iter().map(|(_, artifact)| artifact.id).collect();
    inner.state.lock().catalog.indexed(&batch, names);
    drop(named_as_indexed);
    point(Point::CommitIndexed);
    for (_, artifact) in &artifacts {
        if let Some(newest) = artifact.layers.first()
            && let Err(error) = confirm(inner, *newest)
        {
            // It is tried again when the layer is measured; and where it is gone, `check` says so.
            tracing::warn!(layer = %newest, name = %artifact.name(), %error,
                "the layer could not be confirmed: an index rebuilt now would not include it");
        }
    }
    point(Point::CommitConfirmed);
    // Before the intents go: a start that finds one logs the commit again.
    let policies = Arc::clone(&inner.state.lock().policies);
    for (_, artifact) in &artifacts {
        policies::audit(&policies, artifact);
    }
    let became = artifacts.iter();
    let became: HashMap<LayerId, ArtifactId> =
        became.map(|(key, artifact)| (*key, artifact.id)).collect();
    let gone = keys.iter().filter(|key| takes_back(inner, **key));
    let gone: Vec<ArtifactId> = gone.filter_map(|key| became.get(key).copied()).collect();
    let committed: Vec<(VolumeRecord, What)> = {
        let mut state = inner.state.lock();
        for id in &gone {
            state.catalog.set_durable(id, true);
        }
        let seals = state
            .volumes
            .seals()
            .filter(|(key, ..)| became.contains_key(key));
        let seals = seals.map(|(_, volume, plan)| {
            // A fence may have come since the seal.
            let is_cleared = plan.fence < state.fences.least(&plan.name(&volume.record.tenant));
            let reference = plan.reference.clone();
            let what = if is_cleared {
                let why = NotCommitted::Cleared;
                What::NotCommitted { reference, why }
            } else {
                What::Committed { reference }
            };
            (volume.record.clone(), what)
        });
        let committed = seals.collect();
        // Also where the seal intent stays: the index names the artifact, so a write-back error
        // must not take it back.
        for key in keys {
            state.volumes.observe_retiring(*key, Observation::Durable);
        }
        committed
    };
    for (record, what) in committed {
        inner.say(&record, || what);
    }
    inner.state.notify();
    Ok(())
}

/// Withdraws the intent of a seal that is over; whether that worked. If not, the artifact does not
/// count as durable until the next start, and so is not deleted: an intent that outlived its
/// artifact would bring the artifact back.
fn takes_back(inner: &Inner, key: LayerId) -> bool {
    match withdraw_seal_intent(inner, key) {
        Ok(()) => {
            point(Point::CommitPendingTrashed);
            true
        }
        Err(error) => {
            let path = inner.dirs.pending.path().join(key.to_string());
            tracing::error!(path = %path.display(), %error,
                "the seal intent could not be removed from pending/; the artifact is not deleted \
                 before the next start");
            false
        }
    }
}

/// The artifacts of a batch, each with the key of its volume, and the names that the index gets.
type Batch = (Vec<(LayerId, Artifact)>, HashMap<Name, ArtifactId>);

/// The artifacts that these volumes became, and the names that must point at one of them. An
/// artifact that was discarded after a write-back error is not among them.
fn sealed_by(inner: &Inner, keys: &[LayerId]) -> Batch {
    let state = inner.state.lock();
    let plans = keys.iter().filter_map(|key| {
        let plan = state.volumes.retiring(*key)?.seal_intent()?;
        Some((*key, plan.artifact))
    });
    let sealed = plans.filter_map(|(key, id)| Some((key, state.catalog.get(&id)?)));
    let sealed = sealed.map(|(key, Sealed { artifact, .. })| (key, artifact.clone()));
    let sealed: Vec<_> = sealed.collect();
    let names = state
        .catalog
        .names_of(&sealed.iter().map(|(_, artifact)| artifact.id).collect());
    (sealed, names)
}
