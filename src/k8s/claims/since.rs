//! How long objects or nodes have been in a state, as far as this process has seen. It reads no
//! clock and no watch.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// Those that are in the state, each since a time.
#[derive(Debug, Default)]
pub(super) struct Since<K>(HashMap<K, Instant>);

impl<K: Eq + Hash> Since<K> {
    /// Takes all that are in the state now, and forgets the others. The time of one that comes back
    /// begins again.
    pub(super) fn look(&mut self, all: impl IntoIterator<Item = K>, now: Instant) {
        let since = |one| {
            let first = self.0.get(&one).copied().unwrap_or(now);
            (one, first)
        };
        self.0 = all.into_iter().map(since).collect();
    }

    /// Whether this one has been in the state for `grace`.
    pub(super) fn is_due(&self, one: &K, now: Instant, grace: Duration) -> bool {
        let first = self.0.get(one);
        first.is_some_and(|first| now.duration_since(*first) >= grace)
    }

    /// How many are in the state, and how long the oldest has been in it.
    pub(super) fn oldest(&self, now: Instant) -> (usize, Duration) {
        let oldest = self.0.values().min().copied().unwrap_or(now);
        (self.0.len(), now.duration_since(oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_due_until_nothing_is_left_of_it() {
        let (began, grace) = (Instant::now(), Duration::from_secs(10));
        let mut missing = Since::default();
        let mut due = |nodes: &[&'static str], after: u64| -> Vec<&'static str> {
            let now = began + Duration::from_secs(after);
            missing.look(nodes.iter().copied(), now);
            let due = nodes.iter().copied();
            due.filter(|node| missing.is_due(node, now, grace))
                .collect()
        };
        assert!(due(&["n1"], 0).is_empty());
        assert!(due(&["n1", "n2"], 9).is_empty());
        assert_eq!(due(&["n1", "n2"], 10), ["n1"]);
        // Another writer changed one of its objects meanwhile.
        assert_eq!(due(&["n1", "n2"], 11), ["n1"]);
        assert_eq!(due(&["n2"], 20), ["n2"]);
        assert_eq!(due(&["n1", "n2"], 21), ["n2"]);
        assert!(due(&["n1"], 30).is_empty());
    }

    #[test]
    fn the_oldest_order_is_timed_until_it_is_answered_or_replaced() {
        let mut orders = Since::default();
        let begin = Instant::now();
        let mut look = |seconds, waiting: &[(&'static str, i64)]| {
            let now = begin + Duration::from_secs(seconds);
            orders.look(waiting.iter().copied(), now);
            let (count, oldest) = orders.oldest(now);
            (count, oldest.as_secs())
        };
        assert_eq!(look(0, &[]), (0, 0));
        assert_eq!(look(1, &[("a", 1)]), (1, 0));
        assert_eq!(look(5, &[("a", 1), ("b", 1)]), (2, 4));
        assert_eq!(look(6, &[("a", 2), ("b", 1)]), (2, 1));
        assert_eq!(look(9, &[]), (0, 0));
    }
}
