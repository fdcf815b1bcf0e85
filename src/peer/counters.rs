//! What is counted of peers: by the client, the connections and the server. `distribution` says
//! what each counter means, and hands them on.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::distribution::{Away, PeerFigures};

/// The counters, since the start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// The client fills in what is of this moment: the peers, and whether there is a controller.
    pub(super) figures: Mutex<PeerFigures>,
    /// The peers that did not answer lately.
    pub(super) away: Arc<Away>,
}

/// A stream that is being sent, until this is dropped.
#[derive(Debug)]
pub(super) struct Sends(Arc<Counters>);

impl Sends {
    pub(super) fn begin(counters: &Arc<Counters>) -> Self {
        counters.figures.lock().sending += 1;
        Self(Arc::clone(counters))
    }
}

impl Drop for Sends {
    fn drop(&mut self) {
        self.0.figures.lock().sending -= 1;
    }
}
