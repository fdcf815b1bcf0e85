//! The counters of the trials, and what they call a failure. Nothing here knows the trials.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Three ways to break a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    /// Acknowledged content is missing.
    Lost,
    /// Deleted content exists.
    Leaked,
    /// Content is wrong, or an answer is not allowed.
    Wrong,
}

/// A broken promise, in words.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) sort: Sort,
    pub(crate) what: String,
}

impl Fault {
    pub(crate) fn lost(what: impl Into<String>) -> Self {
        Self {
            sort: Sort::Lost,
            what: what.into(),
        }
    }

    pub(crate) fn leaked(what: impl Into<String>) -> Self {
        Self {
            sort: Sort::Leaked,
            what: what.into(),
        }
    }

    pub(crate) fn wrong(what: impl Into<String>) -> Self {
        Self {
            sort: Sort::Wrong,
            what: what.into(),
        }
    }

    /// The same, and where it was.
    pub(crate) fn at(mut self, place: impl fmt::Display) -> Self {
        self.what = format!("{place}: {}", self.what);
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.sort, self.what)
    }
}

/// The reason for an early stop.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    /// The driver is gone.
    Died,
    /// A promise is broken.
    Fault(Fault),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// The counts of actions and findings; shared by all trials.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) operations: AtomicU64,
    pub(crate) kills: AtomicU64,
    pub(crate) full_disks: AtomicU64,
    pub(crate) cycles: AtomicU64,
    pub(crate) attacks: AtomicU64,
    pub(crate) tiers: AtomicU64,
    pub(crate) uploads: AtomicU64,
    pub(crate) fetches: AtomicU64,
    pub(crate) peers: AtomicU64,
    pub(crate) from_peers: AtomicU64,
    pub(crate) collected: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) leaked: AtomicU64,
    pub(crate) wrong: AtomicU64,
    /// The faults in words: the last lines of a run repeat them.
    said: Mutex<Vec<String>>,
}

/// One more.
pub(crate) fn count(figure: &AtomicU64) {
    figure.fetch_add(1, Ordering::Relaxed);
}

/// So many more.
pub(crate) fn add(figure: &AtomicU64, more: u64) {
    figure.fetch_add(more, Ordering::Relaxed);
}

impl Figures {
    /// Counts a fault of a trial, and says it now and at the end.
    pub(crate) fn note(&self, trial: impl fmt::Display, fault: &Fault) {
        let line = format!("{trial}: FAULT: {fault}");
        crate::say(&line);
        self.said.lock().expect("no panic holds it").push(line);
        count(match fault.sort {
            Sort::Lost => &self.lost,
            Sort::Leaked => &self.leaked,
            Sort::Wrong => &self.wrong,
        });
    }

    /// All faults in words: long output is often cut, and its end is read first.
    pub(crate) fn said(&self) -> Vec<String> {
        self.said.lock().expect("no panic holds it").clone()
    }

    pub(crate) fn faults(&self) -> u64 {
        let found = [&self.lost, &self.leaked, &self.wrong];
        found.iter().map(|one| one.load(Ordering::Relaxed)).sum()
    }
}

impl fmt::Display for Figures {
    /// The line that `make torture` adds up. Power cuts are made in guests, by another target.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        write!(
            f,
            "figures: operations={} kills={} cuts=0 full_disks={} cycles={} attacks={} \
             tiers={} uploads={} fetches={} peers={} from_peers={} collected={} lost={} leaked={} wrong={}",
            n(&self.operations),
            n(&self.kills),
            n(&self.full_disks),
            n(&self.cycles),
            n(&self.attacks),
            n(&self.tiers),
            n(&self.uploads),
            n(&self.fetches),
            n(&self.peers),
            n(&self.from_peers),
            n(&self.collected),
            n(&self.lost),
            n(&self.leaked),
            n(&self.wrong)
        )
    }
}
