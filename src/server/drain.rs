//! How the driver ends: one drain with one deadline, which everything long-lived takes part in.
//!
//! SIGTERM sets the deadline, which never moves back. Before it, the drain has up to three phases:
//!
//! 1. With a shared tier, it uploads waiting content while everything serves.
//! 2. It withdraws what brings calls. Kubelet must be able to call until it knows that the driver
//!    ends.
//! 3. The services answer the calls that run, and close.
//!
//! The drain names every part that was late.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// The least time that a part has from when it is waited for, also when others have used up the
/// rest: enough to stop where no disk hangs.
const MOMENT: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    /// The end is announced, and everything serves.
    Announced {
        until: Instant,
    },
    Withdrawing {
        until: Instant,
    },
    Closing {
        until: Instant,
    },
}

impl Phase {
    fn has_begun(&self) -> bool {
        matches!(self, Self::Withdrawing { .. } | Self::Closing { .. })
    }
}

/// The drain of one driver, or of one server. Clones share it.
#[derive(Debug, Clone)]
pub struct Drain {
    grace: Duration,
    phase: watch::Sender<Phase>,
    /// The parts that were late.
    late: Arc<Mutex<Vec<&'static str>>>,
}

impl Drain {
    /// A drain that has not begun. It lasts `grace` from when it begins.
    #[must_use]
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            phase: watch::Sender::new(Phase::Serving),
            late: Arc::default(),
        }
    }

    /// Sets the deadline, and lets everything serve for `most` yet ([`Drain::serves_for`]), or
    /// until the drain begins. Only the first call counts.
    pub fn announce(&self, most: Duration) {
        let until = Instant::now() + most + self.grace;
        self.phase.send_if_modified(|phase| {
            let is_first = *phase == Phase::Serving;
            if is_first {
                *phase = Phase::Announced { until };
            }
            is_first
        });
    }

    /// How long everything may still serve, once the end is announced.
    #[must_use]
    pub fn serves_for(&self) -> Duration {
        match *self.phase.borrow() {
            Phase::Announced { until } => {
                until.saturating_duration_since(Instant::now() + self.grace)
            }
            _ => Duration::ZERO,
        }
    }

    /// Begins the drain: services stop accepting calls. The deadline is at most `grace` from now,
    /// and not after the one that was announced. Only the first call counts.
    pub fn begin(&self) {
        let now = Instant::now() + self.grace;
        self.phase.send_if_modified(|phase| {
            let until = match *phase {
                Phase::Serving => now,
                Phase::Announced { until } => until.min(now),
                Phase::Withdrawing { .. } | Phase::Closing { .. } => return false,
            };
            *phase = Phase::Withdrawing { until };
            true
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
            Phase::Serving | Phase::Announced { .. } | Phase::Closing { .. } => false,
        });
    }

    /// Whether it has begun.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.phase.borrow().has_begun()
    }

    /// Ready when it has begun.
    pub async fn begun(&self) {
        self.reached(Phase::has_begun).await;
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
            Phase::Serving | Phase::Announced { .. } => self.grace,
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

    /// Waits for a part of the driver until the deadline. `None` if it was late: then the log and
    /// [`Drain::late`] name it.
    pub async fn finish<T>(&self, part: &'static str, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.over() => {
                self.late.lock().push(part);
                tracing::warn!(part,
                    "late: did not finish within the grace period; the driver no longer waits for \
                     it");
                None
            }
        }
    }

    /// The parts that were late so far, in the order in which they were waited for.
    #[must_use]
    pub fn late(&self) -> Vec<&'static str> {
        self.late.lock().clone()
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
        let mut late = drain.late();
        late.sort_unstable();
        assert_eq!(late, ["first", "fourth", "second"]);
    }

    #[tokio::test]
    async fn what_is_announced_has_the_same_deadline() {
        let [grace, most] = [25, 30].map(Duration::from_secs);
        let drain = Drain::new(grace);
        assert_eq!(drain.serves_for(), Duration::ZERO);
        drain.announce(most);
        drain.announce(2 * most);
        let left = drain.serves_for();
        assert!(left <= most && left > most / 2, "{left:?}");
        assert!(!drain.has_begun(), "everything serves");
        drain.begin();
        let left = drain.left();
        assert!(
            left <= grace,
            "the uploads left {left:?}, which nothing else may use"
        );

        let drain = Drain::new(Duration::from_millis(20));
        drain.announce(Duration::ZERO);
        // The uploads do not end in time, and take the time of the rest.
        sleep(Duration::from_millis(30)).await;
        assert_eq!(drain.serves_for(), Duration::ZERO);
        drain.begin();
        assert_eq!(drain.left(), MOMENT);
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
