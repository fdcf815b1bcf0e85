//! How the driver ends: one drain with one deadline, which everything long-lived takes part in.
//!
//! It has two phases, because kubelet must be able to call until it knows that the driver goes.
//! First, what brings calls is withdrawn. Then the services answer the calls that run, and close.

use std::future::Future;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// The least time that a part has from when it is waited for, also when others have used up the
/// rest: enough to stop where no disk hangs.
const MOMENT: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    Withdrawing { until: Instant },
    Closing { until: Instant },
}

/// The drain of one driver, or of one server. Clones share it.
#[derive(Debug, Clone)]
pub struct Drain {
    grace: Duration,
    phase: watch::Sender<Phase>,
}

impl Drain {
    /// A drain that has not begun. It lasts `grace` from when it begins.
    #[must_use]
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            phase: watch::Sender::new(Phase::Serving),
        }
    }

    /// Begins the drain: services stop accepting calls, and the deadline is set. Only the first
    /// call counts.
    pub fn begin(&self) {
        let until = Instant::now() + self.grace;
        self.phase.send_if_modified(|phase| {
            let begins = *phase == Phase::Serving;
            if begins {
                *phase = Phase::Withdrawing { until };
            }
            begins
        });
    }

    /// Tells the services to close, and begins if that is still to be done.
    pub fn close(&self) {
        self.begin();
        self.phase.send_if_modified(|phase| match *phase {
            Phase::Withdrawing { until } => {
                *phase = Phase::Closing { until };
                true
            }
            Phase::Serving | Phase::Closing { .. } => false,
        });
    }

    /// Whether it has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        *self.phase.borrow() != Phase::Serving
    }

    /// Ready when it has begun.
    pub async fn begun(&self) {
        self.reached(|phase| *phase != Phase::Serving).await;
    }

    /// Ready when the services are to close.
    pub async fn closing(&self) {
        self.reached(|phase| matches!(phase, Phase::Closing { .. }))
            .await;
    }

    async fn reached(&self, is_it: impl FnMut(&Phase) -> bool) {
        // The sender is `self`, so the channel is open.
        let _ = self.phase.subscribe().wait_for(is_it).await;
    }

    /// How long is left until the deadline, but a moment at least. The whole grace period before it
    /// begins.
    #[must_use]
    pub fn left(&self) -> Duration {
        match *self.phase.borrow() {
            Phase::Serving => self.grace,
            Phase::Withdrawing { until } | Phase::Closing { until } => {
                until.saturating_duration_since(Instant::now()).max(MOMENT)
            }
        }
    }

    /// Ready at the deadline, but not within a moment from now.
    pub async fn over(&self) {
        self.begun().await;
        sleep(self.left()).await;
    }

    /// Waits for a part of the driver until the deadline. `None` if it was late: then the log names
    /// it.
    pub async fn finish<T>(&self, part: &str, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.over() => {
                tracing::warn!(part,
                    "late: did not finish within the grace period; the driver no longer waits for \
                     it");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn all_parts_have_one_deadline() {
        let drain = Drain::new(Duration::from_secs(2));
        assert!(!drain.has_begun());
        assert_eq!(drain.finish("early", async { 1 }).await, Some(1));
        let began = Instant::now();
        drain.begin();
        drain.begun().await;
        let [first, second] = ["first", "second"].map(|part| drain.finish(part, pending::<()>()));
        assert_eq!(tokio::join!(first, second), (None, None));
        // The deadline is over; a part that is done has still a moment to say so.
        assert_eq!(drain.finish("third", async { 3 }).await, Some(3));
        assert_eq!(drain.finish("fourth", pending::<()>()).await, None);
        assert!(began.elapsed() >= Duration::from_secs(2));
        assert_eq!(drain.left(), MOMENT, "the deadline has moved");
    }

    #[tokio::test]
    async fn the_services_close_after_the_withdrawal_and_neither_begins_twice() {
        let drain = Drain::new(Duration::from_secs(60));
        drain.begin();
        let until = *drain.phase.borrow();
        drain.begin();
        assert_eq!(*drain.phase.borrow(), until, "the deadline has moved");
        let closing = tokio::time::timeout(Duration::from_millis(20), drain.closing());
        assert!(closing.await.is_err());
        drain.close();
        drain.close();
        drain.closing().await;
        drain.begin();
        drain.closing().await;

        let drain = Drain::new(Duration::from_secs(60));
        drain.close();
        assert!(drain.has_begun());
        drain.closing().await;
    }
}
