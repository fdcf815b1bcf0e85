//! The guard of one operation on one volume, persistent volume or snapshot: at most one runs at a
//! time. A second caller gets `Busy`, or waits if the running operation is only a chore of the
//! driver. `volumes` keeps which ones are guarded.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::{Error, Result};
use super::shared::Inner;
use super::state::State;
use crate::model::VolumeId;

/// How long an operation waits in all for work of the driver's own: chores, and the close of the
/// descriptors of earlier mounts, which evicts a tree's dentries and writes it back. Kubelet gives
/// up after two minutes; the rest of that is for the operation.
const PATIENCE: Duration = Duration::from_secs(60);

/// Until when an operation that begins now waits in all.
pub(super) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// One operation's hold on one volume.
#[derive(Debug)]
pub(super) struct Guard {
    inner: Arc<Inner>,
    pub(super) volume: VolumeId,
}

impl Guard {
    /// [`Guard::take_to_leave`] for what may change the pool: refused while the engine is degraded.
    pub(super) async fn take(
        inner: &Arc<Inner>,
        volume: &VolumeId,
        until: Instant,
    ) -> Result<Self> {
        Self::hold(inner, volume, until, |state| state.health.refuse_degraded()).await
    }

    /// If another caller's operation runs, the answer is `Busy` at once. A chore is waited for: no
    /// caller knows of it.
    pub(super) async fn take_to_leave(
        inner: &Arc<Inner>,
        volume: &VolumeId,
        until: Instant,
    ) -> Result<Self> {
        Self::hold(inner, volume, until, |_| Ok(())).await
    }

    /// `may_begin` is asked under the lock under which the operation begins.
    async fn hold(
        inner: &Arc<Inner>,
        volume: &VolumeId,
        until: Instant,
        may_begin: impl Fn(&State) -> Result<()>,
    ) -> Result<Self> {
        let taken = inner.state.when(|state| {
            if let Err(error) = may_begin(state) {
                return Some(Err(error));
            }
            match state.begin(volume) {
                Err(Error::Busy(_)) if state.volumes.is_chore(volume) => None,
                answer => Some(answer.map(|()| Self::begun(inner, volume))),
            }
        });
        let taken = tokio::time::timeout_at(until, taken).await;
        taken.unwrap_or_else(|_| Err(Error::Busy(volume.clone())))
    }

    /// The guard of an operation that was just begun in the state.
    fn begun(inner: &Arc<Inner>, volume: &VolumeId) -> Self {
        Self {
            inner: inner.clone(),
            volume: volume.clone(),
        }
    }

    /// The same for a chore, which the driver does of its own accord: callers wait for its end.
    pub(super) fn take_for_chore(inner: &Arc<Inner>, volume: &VolumeId) -> Result<Self> {
        let mut state = inner.state.lock();
        state.begin(volume)?;
        state.volumes.becomes_a_chore(volume);
        Ok(Self::begun(inner, volume))
    }

    /// From here on it guards a chore: the caller has its answer, and the next one waits.
    pub(super) fn becomes_a_chore(&self) {
        let mut state = self.inner.state.lock();
        state.volumes.becomes_a_chore(&self.volume);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.inner.state.lock().volumes.end(&self.volume);
        self.inner.state.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Config, Engine, PublishRequest};

    #[tokio::test]
    async fn a_chore_is_waited_for_and_another_caller_is_told() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = Config::of_copies(folder.path());
        let engine = Engine::open(config).await.expect("it opens");
        let volume: VolumeId = "fork".parse().expect("an id");
        let target = folder.path().join("target");
        let request = PublishRequest {
            target: target.clone(),
            ..PublishRequest::of_nothing("fork")
        };
        let is_busy = |error: &Error| matches!(error, Error::Busy(_));

        let other = Guard::take(&engine.inner, &volume, deadline()).await;
        let published = engine.publish(request.clone()).await;
        assert!(published.as_ref().is_err_and(is_busy), "{published:?}");
        let unpublished = engine.unpublish("fork", &target).await;
        assert!(unpublished.as_ref().is_err_and(is_busy), "{unpublished:?}");
        drop(other.expect("it is free"));

        // Begun first, each is answered after the chore has ended.
        let chore = || Guard::take_for_chore(&engine.inner, &volume).expect("it is free");
        let held = chore();
        let publish = engine.publish(request);
        let (published, ()) = tokio::join!(biased; publish, async { drop(held) });
        let is_of_nothing = |error: &Error| matches!(error, Error::NoSuchContent(_));
        assert!(
            published.as_ref().is_err_and(is_of_nothing),
            "{published:?}"
        );
        let held = chore();
        let unpublish = engine.unpublish("fork", &target);
        let (unpublished, ()) = tokio::join!(biased; unpublish, async { drop(held) });
        unpublished.expect("it waited");
        engine.shutdown().await;
    }
}
