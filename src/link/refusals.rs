//! Which refusals were logged lately, for the servers of peers and of the controller. A peer
//! repeats a refused request every few seconds, for each pod that waits. So each refusal is logged
//! once a minute. The counters of the peers count all of them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long the same refusal is not logged again.
const PAUSE: Duration = Duration::from_secs(60);
/// The most refusals of peers that are logged in that time. A peer that was taken over may ask for
/// a new name each time.
const MOST: usize = 1000;
/// The most refusals of callers that are no peers. Each connection may come with a new key.
const MOST_OF_STRANGERS: usize = 20;

/// The refusals that were logged within [`PAUSE`], and when.
#[derive(Debug)]
pub struct Refusals {
    logged: Mutex<HashMap<String, Instant>>,
    most: usize,
}

impl Refusals {
    /// Of calls of peers.
    #[must_use]
    pub fn of_peers() -> Self {
        Self::at_most(MOST)
    }

    /// Of callers that are no peers. They have a limit of their own, so that they keep no refusal
    /// of a peer out of the log.
    #[must_use]
    pub fn of_strangers() -> Self {
        Self::at_most(MOST_OF_STRANGERS)
    }

    fn at_most(most: usize) -> Self {
        let logged = Mutex::default();
        Self { logged, most }
    }

    /// Whether a refusal is to be logged now. `what` tells it from others: who was refused, and
    /// what.
    pub fn is_news(&self, what: String) -> bool {
        self.is_news_at(what, Instant::now())
    }

    fn is_news_at(&self, what: String, now: Instant) -> bool {
        let mut logged = self.logged.lock();
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < PAUSE;
        if logged.get(&what).is_some_and(is_recent) {
            return false;
        }
        if logged.len() >= self.most {
            logged.retain(|_, at| is_recent(at));
        }
        if logged.len() >= self.most {
            return false;
        }
        logged.insert(what, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_logged_once_a_minute_and_others_at_once() {
        let refusals = Refusals::of_peers();
        let began = Instant::now();
        let at = |seconds: u64, what: &str| {
            refusals.is_news_at(what.to_owned(), began + Duration::from_secs(seconds))
        };
        assert!(at(0, "a") && at(1, "b"));
        assert!(!at(1, "a") && !at(59, "a"));
        // A repetition does not make the pause longer.
        assert!(at(60, "a"));
        assert!(!at(61, "a"));
    }

    #[test]
    fn a_peer_with_new_names_fills_neither_the_log_nor_the_memory() {
        let refusals = Refusals::of_peers();
        let began = Instant::now();
        let news = |number: usize, seconds: u64| {
            refusals.is_news_at(number.to_string(), began + Duration::from_secs(seconds))
        };
        let logged = (0..3 * MOST).filter(|number| news(*number, 0)).count();
        assert_eq!(logged, MOST);
        assert!(!news(3 * MOST, 59));
        assert!(news(3 * MOST, 60), "the others are forgotten");
        assert_eq!(refusals.logged.lock().len(), 1);
    }
}
