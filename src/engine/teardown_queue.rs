//! The queue of volumes that are to be thrown away and whose end has not begun yet.
//! Who takes what from it, and what is done then, is `ends`.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::state::Left;

/// How long whoever waits to begin with all is trusted to: the thread where he waits serves calls, and may be blocked by one.
const TRUSTED: Duration = Duration::from_millis(50);

/// The volumes to be thrown away whose end has not begun yet.
#[derive(Debug, Default)]
pub(super) struct Ends(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    /// With these whoever waits begins next …
    next: Vec<Left>,
    /// … and with those that came meanwhile the time after that.
    later: Vec<Left>,
    /// Since when he waits.
    since: Option<Instant>,
}

impl Ends {
    /// Whether whoever adds this is the one who is to begin with all.
    pub(super) fn add(&self, left: Left) -> bool {
        let mut waiting = self.0.lock();
        if waiting.since.is_some_and(|since| since.elapsed() < TRUSTED) {
            waiting.later.push(left);
            return false;
        }
        waiting.next.push(left);
        waiting.since = Some(Instant::now());
        true
    }

    /// Those that have waited long enough, and whether there are others, for which he waits once more.
    pub(super) fn take(&self) -> (Vec<Left>, bool) {
        let mut waiting = self.0.lock();
        let taken = std::mem::take(&mut waiting.next);
        waiting.next = std::mem::take(&mut waiting.later);
        let others = !waiting.next.is_empty();
        waiting.since = others.then(Instant::now);
        (taken, others)
    }

    pub(super) fn take_all(&self) -> Vec<Left> {
        let Waiting { next, later, .. } = std::mem::take(&mut *self.0.lock());
        next.into_iter().chain(later).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::LayerId;

    fn left() -> Left {
        Left {
            key: LayerId::from_bits(1),
            pin: None,
        }
    }

    #[test]
    fn one_waits_for_all_and_if_he_does_not_come_the_next_does() {
        let ends = Ends::default();
        assert!(ends.add(left()));
        assert!(!ends.add(left()));
        let since = Instant::now().checked_sub(TRUSTED);
        ends.0.lock().since = since;
        assert!(ends.add(left()), "the first is late");
        assert!(!ends.add(left()));
        assert_eq!(ends.take_all().len(), 4);
        assert!(ends.add(left()), "nobody waits any more");
    }

    #[test]
    fn what_came_while_somebody_waited_is_begun_with_the_next_time() {
        let ends = Ends::default();
        assert!(ends.add(left()));
        assert!(!ends.add(left()));
        assert!(!ends.add(left()));
        let begun = || {
            let (taken, others) = ends.take();
            (taken.len(), others)
        };
        assert_eq!(begun(), (1, true));
        assert!(!ends.add(left()), "he waits once more");
        assert_eq!(begun(), (2, true));
        assert_eq!(begun(), (1, false));
        assert!(ends.add(left()), "nobody waits any more");
    }
}
