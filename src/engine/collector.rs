//! State that the steps of garbage collection share: the lock, the wake-ups, and the objects that
//! are skipped for a while after a failure. The steps themselves have modules of their own.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::backoff::Backoff;
use super::gc_cycles::Rounds;
use super::parts::Parts;
use super::table_digests::TableDigests;
use super::trash::Trash;
use crate::model::{CutOff, LayerId, Tenant};

/// The garbage collector of an engine.
#[derive(Debug, Default)]
pub(super) struct Collector {
    turn: Mutex<()>,
    reaper: Notify,
    walker: Notify,
    merger: Notify,
    expired: Notify,
    /// Every layer that the index names says so.
    confirmed: AtomicBool,
    pub(super) cycles: Rounds,
    pub(super) trash: Trash,
    pub(super) tables: TableDigests,
    /// Partial layers of failed fetches.
    pub(super) parts: Parts,
    /// The layers that are being merged. Empty: none are, or the merge is to stop because only the
    /// merge still needs them.
    pub(super) merging: Mutex<HashSet<LayerId>>,
    /// Stacks whose merge came to nothing. If it failed or took too long, the lowest layer stands
    /// for the stack: a cache in use is another stack by then.
    pub(super) unmerged: Backoff<Vec<LayerId>>,
    /// Layers that could not be confirmed or measured.
    pub(super) unmeasured: Backoff<LayerId>,
    /// The controller's orders that no round has carried out yet.
    cut_offs: Mutex<HashMap<Tenant, CutOff>>,
}

impl Collector {
    /// Held by whatever takes artifacts out of the index, or writes of them what the index may know
    /// better; never across a walk.
    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// A cycle runs soon.
    pub(super) fn wake(&self) {
        self.reaper.notify_one();
    }

    /// Waits until a cycle is asked for.
    pub(super) fn woken(&self) -> Notified<'_> {
        self.reaper.notified()
    }

    /// The `ttl` of claims has deleted them.
    pub(super) fn tell_expired(&self) {
        self.expired.notify_one();
    }

    /// Waits until that is told. If it is told between two waits, the second one ends at once.
    pub(super) fn expired(&self) -> Notified<'_> {
        self.expired.notified()
    }

    /// The next round evicts unused content of this namespace. It is carried out once.
    pub(super) fn cut_off(&self, tenant: Tenant, cut: CutOff) {
        let mut orders = self.cut_offs.lock();
        let order = orders.entry(tenant).or_default();
        *order = order.and(cut);
    }

    /// The orders of [`Collector::cut_off`].
    pub(super) fn take_cut_offs(&self) -> HashMap<Tenant, CutOff> {
        std::mem::take(&mut self.cut_offs.lock())
    }

    /// Layers may be there to be measured.
    pub(super) fn wake_walker(&self) {
        self.walker.notify_one();
    }

    /// Waits until that is said.
    pub(super) fn walker_woken(&self) -> Notified<'_> {
        self.walker.notified()
    }

    /// Layers may be there to be merged, and their sizes are known.
    pub(super) fn wake_merger(&self) {
        self.merger.notify_one();
    }

    /// Waits until that is said.
    pub(super) fn merger_woken(&self) -> Notified<'_> {
        self.merger.notified()
    }

    pub(super) fn is_confirmed(&self) -> bool {
        self.confirmed.load(Ordering::SeqCst)
    }

    pub(super) fn set_confirmed(&self, confirmed: bool) {
        self.confirmed.store(confirmed, Ordering::SeqCst);
    }
}
