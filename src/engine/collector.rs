//! State that the steps of garbage collection share: the lock, the wake-ups, and the objects that
//! are skipped for a while after a failure. The steps themselves have modules of their own.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::backoff::Backoff;
use super::parts::Parts;
use super::rounds::Rounds;
use super::table_digests::TableDigests;
use super::trash::Trash;
use crate::model::{CutOff, LayerId, Tenant};

/// The garbage collector of an engine.
#[derive(Debug, Default)]
pub(super) struct Collector {
    turn: Mutex<()>,
    /// A cycle is to run soon.
    pub(super) reaper: Notify,
    /// Layers may be there to be measured.
    pub(super) walker: Notify,
    /// Layers may be there to be merged, and their sizes are known.
    pub(super) merger: Notify,
    /// The `ttl` of persistent volumes has deleted them.
    pub(super) expired: Notify,
    /// The record of every layer that the index names says so.
    pub(super) confirmed: AtomicBool,
    pub(super) rounds: Rounds,
    pub(super) trash: Trash,
    pub(super) tables: TableDigests,
    /// Partial layers of failed fetches.
    pub(super) parts: Parts,
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
    /// better; never across a walk. A layer whose table is being made may hold it up for seconds.
    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
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
}
