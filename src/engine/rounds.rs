//! Counts the rounds of garbage collection. A caller that found no space waits for a round that
//! began after its request, together with all other such callers. `reap` does the work of a round.

use std::future::Future;

use tokio::sync::watch;

/// Since the engine was opened.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    begun: u64,
    /// The same as `begun` while none runs.
    done: u64,
    gone: u64,
}

/// The rounds of an engine. They run one at a time.
#[derive(Debug)]
pub(super) struct Rounds(watch::Sender<Count>);

impl Default for Rounds {
    fn default() -> Self {
        Self(watch::Sender::new(Count::default()))
    }
}

/// A round that runs; dropped, it has ended.
pub(super) struct RunningRound<'a> {
    rounds: &'a Rounds,
    gone: usize,
}

impl Rounds {
    /// Begins one.
    pub(super) fn begin(&self) -> RunningRound<'_> {
        self.0.send_modify(|count| count.begun += 1);
        let rounds = self;
        RunningRound { rounds, gone: 0 }
    }

    /// How many artifacts all completed rounds removed, plus how many of these rounds freed space
    /// from the trash.
    pub(super) fn gone(&self) -> u64 {
        self.0.borrow().gone
    }

    /// Waits for the end of a round that begins after this call.
    pub(super) fn next(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut count = self.0.subscribe();
        let now = count.borrow().begun;
        async move {
            // It ends only with the engine, which ends after its callers.
            let _ended = count.wait_for(|count| count.done > now).await;
        }
    }
}

impl RunningRound<'_> {
    /// So many artifacts went in this one, or one more if room came free of the trash.
    pub(super) fn add_gone(&mut self, artifacts: usize) {
        self.gone += artifacts;
    }
}

impl Drop for RunningRound<'_> {
    fn drop(&mut self) {
        self.rounds.0.send_modify(|count| {
            count.done = count.begun;
            count.gone += self.gone as u64;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_round_that_runs_already_is_not_the_one_that_is_waited_for() {
        let rounds = Rounds::default();
        let mut running = rounds.begin();
        let next = rounds.next();
        tokio::pin!(next);
        running.add_gone(2);
        drop(running);
        assert!(futures_util::poll!(&mut next).is_pending());
        assert_eq!(rounds.gone(), 2);
        drop(rounds.begin());
        next.await;
    }
}
