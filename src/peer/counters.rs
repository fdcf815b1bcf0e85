//! What is counted of peers: by the client, the connections and the server. `distribution` says
//! what each counter means, and hands them on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::distribution::{Away, PeerFigures};

/// The counters, since the start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) questions: AtomicU64,
    pub(super) questions_failed: AtomicU64,
    pub(super) received_bytes: AtomicU64,
    pub(super) located: AtomicU64,
    pub(super) offered: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
    pub(super) sending: AtomicU64,
    pub(super) busy: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) damaged: AtomicU64,
    /// The peers that did not answer lately.
    pub(super) away: Arc<Away>,
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// A stream that is being sent, until this is dropped.
#[derive(Debug)]
pub(super) struct Sends(Arc<Counters>);

impl Sends {
    pub(super) fn begin(counters: &Arc<Counters>) -> Self {
        add(&counters.sending, 1);
        Self(Arc::clone(counters))
    }
}

impl Drop for Sends {
    fn drop(&mut self) {
        self.0.sending.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counters {
    pub(super) fn figures(&self, peers: u64) -> PeerFigures {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PeerFigures {
            peers,
            questions: value(&self.questions),
            questions_failed: value(&self.questions_failed),
            received_bytes: value(&self.received_bytes),
            located: value(&self.located),
            connected: false,
            offered: value(&self.offered),
            sent: value(&self.sent),
            sent_bytes: value(&self.sent_bytes),
            sending: value(&self.sending),
            busy: value(&self.busy),
            refused: value(&self.refused),
            damaged: value(&self.damaged),
        }
    }
}
