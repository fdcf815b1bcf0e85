//! Which refusals were logged lately. A peer repeats a refused request every few seconds, for each
//! pod that waits. So each refusal is logged once a minute, and `counters` count all of them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long the same refusal is not logged again.
const PAUSE: Duration = Duration::from_secs(60);
/// The most refusals that are logged in that time. A peer that was taken over may ask for a new
/// name each time.
const MOST: usize = 1000;

/// The refusals that were logged within [`PAUSE`], and when.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<String, Instant>>);

impl Refusals {
    /// Whether a refusal is to be logged now. `what` tells it from others: who was refused, and
    /// what.
    pub(super) fn is_news(&self, what: String) -> bool {
        self.is_news_at(what, Instant::now())
    }

    fn is_news_at(&self, what: String, now: Instant) -> bool {
        let mut logged = self.0.lock();
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < PAUSE;
        if logged.get(&what).is_some_and(is_recent) {
            return false;
        }
        if logged.len() >= MOST {
            logged.retain(|_, at| is_recent(at));
        }
        if logged.len() >= MOST {
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
        let refusals = Refusals::default();
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
        let refusals = Refusals::default();
        let began = Instant::now();
        let news = |number: usize, seconds: u64| {
            refusals.is_news_at(number.to_string(), began + Duration::from_secs(seconds))
        };
        let logged = (0..3 * MOST).filter(|number| news(*number, 0)).count();
        assert_eq!(logged, MOST);
        assert!(!news(3 * MOST, 59));
        assert!(news(3 * MOST, 60), "the others are forgotten");
        assert_eq!(refusals.0.lock().len(), 1);
    }
}
