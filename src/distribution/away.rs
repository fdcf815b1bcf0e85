//! The peers that did not answer lately. `peer` notes each question and its result; the `Pool` of
//! this node shows them. It is for display only.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::model::NodeId;

/// How long a peer that did not answer is remembered, if it is not asked again: it may be gone for
/// good.
const LATELY: Duration = Duration::from_secs(10 * 60);

/// The peers that did not answer the last question, with the time of that question.
#[derive(Debug, Default)]
pub struct Away(Mutex<BTreeMap<String, Instant>>);

impl Away {
    /// Whether a peer has just answered.
    pub fn note(&self, peer: &NodeId, has_answered: bool, now: Instant) {
        let mut away = self.0.lock();
        if has_answered {
            away.remove(peer.as_str());
        } else {
            away.insert(peer.as_str().to_owned(), now);
        }
    }

    /// Their names, in order.
    #[must_use]
    pub fn names(&self, now: Instant) -> Vec<String> {
        let mut away = self.0.lock();
        away.retain(|_, asked| now.saturating_duration_since(*asked) < LATELY);
        away.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_away_until_it_answers_or_is_not_asked_for_long() {
        let (away, now) = (Away::default(), Instant::now());
        let [a, b] = ["a", "b"].map(|name| NodeId::new(name).expect("a name"));
        away.note(&b, true, now);
        assert_eq!(away.names(now), [""; 0]);
        away.note(&b, false, now);
        away.note(&a, false, now);
        assert_eq!(away.names(now), ["a", "b"]);
        away.note(&a, true, now);
        away.note(&b, false, now + Duration::from_secs(1));
        assert_eq!(away.names(now + LATELY), ["b"]);
        let later = now + LATELY + Duration::from_secs(1);
        assert_eq!(away.names(later), [""; 0]);
    }
}
