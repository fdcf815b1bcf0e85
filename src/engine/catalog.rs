//! The catalog: what is sealed, in memory and in the index, kept in step.
//! Walks over all artifacts and changes of the index belong here; what is changed is decided by the callers.

use std::ops::Bound;

use parking_lot::MutexGuard;

use super::artifacts::Sealed;
use super::error::{Error, Result};
use super::shared::Inner;
use super::state::State;
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
            for (id, sealed) in state.artifacts.after(from).take(left) {
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

    /// Changes the index. When the disk is full, gives the reserve back, reopens the index and tries once more.
    pub(super) fn commit_index(&self, changes: &[Change]) -> Result<()> {
        let failed = |error: store::Error| {
            if error.is_full() && !error.is_unsure() {
                Error::Full(error.to_string().into())
            } else {
                error.into()
            }
        };
        match self.index.commit(changes) {
            Err(error) if error.is_full() => {
                tracing::warn!(%error, "the index could not be written");
                self.give_back_reserve(0);
                match self.index.reopen() {
                    Err(_) if error.is_unsure() => Err(Error::Index(error)),
                    Err(again) => Err(failed(again)),
                    Ok(()) if self.index.has(&error) => Ok(()),
                    Ok(()) => self.index.commit(changes).map_err(failed),
                }
            }
            result => result.map_err(failed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;
    use crate::engine::artifacts::Artifacts;
    use crate::engine::{Config, Engine};
    use crate::model::{Artifact, ArtifactId, LayerId, Timestamp};

    fn made(id: u128, layers: &[u128]) -> Artifact {
        Artifact {
            id: ArtifactId::from_bits(id),
            tenant: "ci".parse().expect("label"),
            reference: "task-cache/k".parse().expect("reference"),
            layers: layers.iter().copied().map(LayerId::from_bits).collect(),
            created: Timestamp(1),
            ttl_seconds: None,
            last_used: Timestamp(1),
            made_by: None,
            digests: crate::model::Digests::default(),
        }
    }

    #[tokio::test]
    async fn a_walk_sees_every_artifact_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config = Config::new(folder.path().join("pool"));
        config.backend = Some(BackendKind::Copy);
        let engine = Engine::open(config).await.expect("it opens");
        let part = AT_A_TIME as u128;
        for count in [0, 1, part, part + 1, 2 * part, 2 * part + 1] {
            let artifacts = (0..count).map(|id| made(id, &[id]));
            engine.inner.state.lock().artifacts = artifacts.collect();
            let mut seen = Vec::new();
            engine
                .inner
                .look_at_artifacts(|_, sealed| seen.push(sealed.artifact.id.bits()));
            assert!(seen.into_iter().eq(0..count), "{count}");
        }
        engine.inner.state.lock().artifacts = Artifacts::default();
        engine.shutdown().await;
    }
}
