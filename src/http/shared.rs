//! One answer for all requests that wait for it. Any client may ask, and each answer takes a thread,
//! a connection to the driver, or the lock that pods need for their volumes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::JoinError;
use tokio::time::{Instant, sleep_until};

/// The longest pause between two answers.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The last answer.
#[derive(Debug)]
pub(super) struct Shared<T> {
    /// Held while an answer is made.
    last: Arc<Mutex<Option<Made<T>>>>,
    pauses: u32,
}

#[derive(Debug)]
struct Made<T> {
    begun: Instant,
    answer: T,
    /// When the next one may begin.
    next: Instant,
}

impl<T: Clone + Send + 'static> Shared<T> {
    /// No answer yet. After each one, none begins to be made for so many times as long as that
    /// took, and at most a second. Without a pause a caller waits for two answers at most.
    pub(super) fn new(pauses: u32) -> Self {
        let last = Arc::default();
        Self { last, pauses }
    }

    /// An answer that began after this call. One is made at a time, and calls that came before it
    /// began share it. It goes on when its callers are gone: otherwise clients that only connect
    /// and leave would begin many. An error is a panic of `make`.
    pub(super) async fn get<F>(&self, make: F) -> Result<T, JoinError>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let asked = Instant::now();
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some(last) = last.as_ref().filter(|last| last.begun >= asked) {
            return Ok(last.answer.clone());
        }
        let pauses = self.pauses;
        let making = tokio::spawn(async move {
            if let Some(last) = last.as_ref() {
                sleep_until(last.next).await;
            }
            let begun = Instant::now();
            let answer = make.await;
            let pause = begun.elapsed().saturating_mul(pauses).min(LONGEST_PAUSE);
            *last = Some(Made {
                begun,
                answer: answer.clone(),
                next: Instant::now() + pause,
            });
            answer
        });
        making.await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Waker};

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test]
    async fn requests_share_an_answer_also_those_whose_clients_leave() {
        let count = Arc::new(AtomicUsize::new(0));
        let shared = Shared::new(9);
        let make = || {
            let count = Arc::clone(&count);
            async move { count.fetch_add(1, Ordering::Relaxed) }
        };
        let answers = join_all((0..2000).map(|_| shared.get(make()))).await;
        for answer in answers {
            assert_eq!(answer.expect("an answer"), 0);
        }
        for _ in 0..2000 {
            let mut request = std::pin::pin!(shared.get(make()));
            let mut context = Context::from_waker(Waker::noop());
            assert!(request.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(shared.get(make()).await.expect("an answer"), 1);
        // What is asked for later is found out later.
        assert_eq!(shared.get(make()).await.expect("an answer"), 2);
    }

    /// As a probe and a pod that asks without end see a slow disk.
    #[tokio::test]
    async fn without_a_pause_a_caller_waits_for_two_answers_at_most() {
        const TAKES: Duration = Duration::from_millis(100);
        const CALLS: u32 = 5;
        let shared = Arc::new(Shared::new(0));
        let make = || async { tokio::time::sleep(TAKES).await };
        let asking = Arc::clone(&shared);
        let asks_without_end = tokio::spawn(async move {
            loop {
                asking.get(make()).await.expect("an answer");
            }
        });
        let began = Instant::now();
        for _ in 0..CALLS {
            shared.get(make()).await.expect("an answer");
        }
        // As long again for a slow machine.
        assert!(began.elapsed() < 4 * TAKES * CALLS, "{:?}", began.elapsed());
        asks_without_end.abort();
    }
}
