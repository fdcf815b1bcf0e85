//! A part of a driver or of a controller: a task that runs until the drain ends it. What all roles
//! have in common when they end is here and in `drain`; which parts there are, each role says.

use std::future::Future;

use tokio_util::task::AbortOnDropHandle;

use super::drain::Drain;

/// A defect: a task ended before it was told to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a background task exited unexpectedly: {0}; see the log")]
pub struct Exited(pub &'static str);

/// A task that runs until the drain ends it. Dropping it aborts the task.
#[derive(Debug)]
pub struct Part<E> {
    name: &'static str,
    drain: Drain,
    /// How it ended, and whether it had been told to.
    task: AbortOnDropHandle<(Result<(), E>, bool)>,
}

impl<E: From<Exited> + Send + 'static> Part<E> {
    /// Starts a task. If it ends by itself, also by a panic, the drain begins.
    pub fn start(
        name: &'static str,
        drain: &Drain,
        work: impl Future<Output = Result<(), E>> + Send + 'static,
    ) -> Self {
        let begins = BeginAtEnd(drain.clone());
        let task = tokio::spawn(async move {
            let ended = work.await;
            (ended, begins.0.has_begun())
        });
        Self {
            name,
            drain: drain.clone(),
            task: AbortOnDropHandle::new(task),
        }
    }

    /// Waits until it ends, or the deadline; then it is late. An error if it failed, panicked or
    /// ended by itself.
    pub async fn end(self) -> Result<(), E> {
        match self.drain.finish(self.name, self.task).await {
            None | Some(Ok((Ok(()), true))) => Ok(()),
            Some(Ok((Err(error), _))) => Err(error),
            // A panic was printed where it happened.
            Some(Ok((Ok(()), false)) | Err(_)) => Err(Exited(self.name).into()),
        }
    }

    /// Ends all of them. Returns the first error.
    pub async fn end_all(parts: impl IntoIterator<Item = Self>) -> Result<(), E> {
        let mut ended = Ok(());
        for part in parts {
            ended = ended.and(part.end().await);
        }
        ended
    }
}

struct BeginAtEnd(Drain);

impl Drop for BeginAtEnd {
    fn drop(&mut self) {
        self.0.begin();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn every_late_part_is_named() {
        let drain = Drain::new(Duration::from_millis(20));
        let told = drain.clone();
        let parts = [
            Part::<Exited>::start("hangs", &drain, pending()),
            Part::start("ends", &drain, async move {
                told.closing().await;
                Ok(())
            }),
            Part::start("also hangs", &drain, pending()),
        ];
        drain.close();
        assert_eq!(Part::end_all(parts).await, Ok(()));
        assert_eq!(drain.late(), ["hangs", "also hangs"]);
    }

    #[tokio::test]
    async fn a_part_that_ends_by_itself_begins_the_drain_and_is_named() {
        let drain = Drain::new(Duration::from_secs(60));
        let (waits, told) = (drain.clone(), drain.clone());
        let parts = [
            Part::<Exited>::start("waits", &drain, async move {
                waits.begun().await;
                Ok(())
            }),
            Part::start("panics", &drain, async move {
                assert!(told.has_begun(), "on purpose");
                Ok(())
            }),
        ];
        drain.begun().await;
        assert_eq!(Part::end_all(parts).await, Err(Exited("panics")));
        assert_eq!(drain.late(), [""; 0]);
    }
}
