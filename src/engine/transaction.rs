//! Transactions: changes of the index, and the handling of a result in doubt. Walks over all
//! artifacts belong here, too. The callers decide what is changed.

use std::collections::HashMap;
use std::ops::Bound;
use std::sync::Arc;

use parking_lot::MutexGuard;

use super::artifacts::Sealed;
use super::backoff::RETRY;
use super::error::{Error, Result};
use super::shared::Inner;
use super::state::State;
use super::threads::Pool;
use crate::model::{Artifact, ArtifactId, Name};
use crate::store::{self, Change};

/// A walk looks at this many artifacts before it releases the state: a fraction of a millisecond.
const AT_A_TIME: usize = 256;

impl Inner {
    /// Looks at all artifacts, and releases the state now and then. An artifact that is sealed
    /// meanwhile may be missed.
    pub(super) fn look_at_artifacts(&self, mut look: impl FnMut(&State, &Sealed)) {
        let mut from = Bound::Unbounded;
        loop {
            let state = self.state.lock();
            let mut left = AT_A_TIME;
            for (id, sealed) in state.catalog.artifacts().after(from).take(left) {
                look(&state, sealed);
                from = Bound::Excluded(*id);
                left -= 1;
            }
            // A plain unlock lets this thread take the lock again before a waiting one wakes.
            MutexGuard::unlock_fair(state);
            if left > 0 {
                return;
            }
        }
    }

    /// Changes the index: all of it or nothing. Where that is not known, the engine is degraded
    /// from then on.
    pub(super) fn transact(&self, changes: &[Change]) -> Transaction {
        if let Err(error) = self.refuse_degraded() {
            return Transaction::RolledBack(error);
        }
        match self.write_index(changes) {
            Ok(()) => Transaction::Committed,
            Err(error) if error.is_unsure() => {
                let error = Error::Index(error);
                self.degrade(&error);
                Transaction::InDoubt(error)
            }
            Err(error) if error.is_full() => {
                Transaction::RolledBack(Error::Full(error.to_string().into()))
            }
            Err(error) => Transaction::RolledBack(error.into()),
        }
    }

    /// Changes the index, and tells it what it does not know yet and need not know soon: when
    /// artifacts were last used, and which measured layers are gone. Returns the number of changes.
    pub(super) fn transact_with_unwritten(&self, mut changes: Vec<Change>) -> Result<usize> {
        let (uses, gone) = {
            let catalog = &mut self.state.lock().catalog;
            (catalog.take_unwritten_uses(), catalog.take_gone())
        };
        let ids: Vec<ArtifactId> = uses.iter().map(|artifact| artifact.id).collect();
        changes.extend(uses.into_iter().map(Change::PutArtifact));
        changes.extend(gone.iter().copied().map(Change::RemoveLayer));
        if changes.is_empty() {
            return Ok(0);
        }
        let transaction = self.transact(&changes);
        if let Transaction::RolledBack(_) = transaction {
            let now = self.time();
            self.state
                .lock()
                .catalog
                .put_unwritten_back(&ids, gone, now);
        }
        transaction.result().map(|()| changes.len())
    }

    /// Writes to the index. When the disk is full, gives the reserve back, reopens the index and
    /// tries once more.
    fn write_index(&self, changes: &[Change]) -> store::Result<()> {
        match self.index.commit(changes) {
            Err(error) if error.is_full() => {
                tracing::warn!(%error,
                    "the disk is full: the index could not be written; trying again with the \
                     reserve's space");
                self.give_back_reserve(0);
                match self.index.reopen() {
                    Err(_) if error.is_unsure() => Err(error),
                    Err(again) => Err(again),
                    Ok(()) if self.index.has(&error) => Ok(()),
                    Ok(()) => self.index.commit(changes),
                }
            }
            result => result,
        }
    }

    /// Degrades the engine: until the next start, only unpublish changes the pool. Background work
    /// stops as at the end of the engine.
    fn degrade(&self, why: &Error) {
        self.state.lock().health.degrade(why.to_string());
        tracing::error!(error = %why,
            "a write to the index is in doubt: the driver changes nothing in the pool until the \
             index can be opened again, and then restarts; volumes are still unmounted");
        self.lifetime.stop();
        self.state.notify();
    }

    /// Refuses what changes the pool while the engine is degraded.
    pub(super) fn refuse_degraded(&self) -> Result<()> {
        self.state.lock().health.refuse_degraded()
    }
}

/// The changes that enter these artifacts and names into the index.
pub(super) fn entries<'a>(
    artifacts: impl IntoIterator<Item = &'a Artifact>,
    names: &HashMap<Name, ArtifactId>,
) -> Vec<Change> {
    let artifacts = artifacts.into_iter();
    let artifacts = artifacts.map(|artifact| Change::PutArtifact(artifact.clone()));
    let names = names.iter();
    let names = names.map(|(name, id)| Change::PutName(name.clone(), *id));
    artifacts.chain(names).collect()
}

/// The result of a transaction.
#[derive(Debug)]
#[must_use]
pub(super) enum Transaction {
    /// The index has all of it, durably.
    Committed,
    /// The index has none of it: the caller undoes its preparations.
    RolledBack(Error),
    /// The result is in doubt. The caller leaves its preparations in place for the next start,
    /// which knows the result. Nothing is deleted meanwhile.
    InDoubt(Error),
}

impl Transaction {
    /// For callers that only undo changes in memory: an engine in doubt ends, and its memory with
    /// it.
    pub(super) fn result(self) -> Result<()> {
        match self {
            Self::Committed => Ok(()),
            Self::RolledBack(error) | Self::InDoubt(error) => Err(error),
        }
    }
}

/// Waits until the index of a degraded engine can be opened again, then asks for a restart: the
/// next start reads what the index has.
pub(super) async fn await_index(inner: Arc<Inner>) {
    inner.lifetime.stopping().await;
    for retry in RETRY
        .iter()
        .chain(std::iter::repeat(&RETRY[RETRY.len() - 1]))
    {
        tokio::select! {
            () = tokio::time::sleep(*retry) => {}
            () = inner.state.when(|state| state.health.is_closing().then_some(())) => return,
        }
        let reopen = |inner: &Arc<Inner>| Ok(inner.index.reopen());
        match inner.run(Pool::Syncs, reopen).await {
            Ok(Ok(())) => break,
            Ok(Err(error)) => tracing::debug!(%error, "the index cannot be opened yet"),
            Err(_) => return,
        }
    }
    tracing::info!(
        "the index can be opened again: the driver exits so that the next start reads it"
    );
    inner.lifetime.ask_for_restart();
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use super::*;
    use crate::engine::artifacts::tests::made;
    use crate::engine::catalog::Catalog;
    use crate::engine::{Config, Engine};

    #[tokio::test]
    async fn a_walk_sees_every_artifact_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = Config::of_copies(folder.path());
        let engine = Engine::open(config).await.expect("it opens");
        let part = AT_A_TIME as u128;
        for count in [0, 1, part, part + 1, 2 * part, 2 * part + 1] {
            let artifacts = (0..count).map(|id| made(id, &[id]));
            engine.inner.state.lock().catalog =
                Catalog::recovered(artifacts.collect(), BTreeMap::new(), HashMap::new());
            let mut seen = Vec::new();
            engine
                .inner
                .look_at_artifacts(|_, sealed| seen.push(sealed.artifact.id.bits()));
            assert!(seen.into_iter().eq(0..count), "{count}");
        }
        engine.inner.state.lock().catalog = Catalog::default();
        engine.shutdown().await;
    }
}
