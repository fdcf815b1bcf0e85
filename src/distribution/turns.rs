//! The fetches that wait for a place: first for one of their namespace, then for a thread. `fetch`
//! asks whether another fetch, for which no pod waits, is in the way of one of them.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::flight::Callers;
use crate::model::{ArtifactId, Tenant};

/// The fetches that wait. `V`: what a fetch answers.
#[derive(Debug)]
pub(super) struct Turns<V>(Mutex<Vec<Weak<Turn<V>>>>);

/// A fetch that waits, until this is dropped.
#[derive(Debug)]
pub(super) struct Turn<V> {
    callers: Callers<ArtifactId, V>,
    tenant: Tenant,
    place: Place,
    since: Instant,
}

/// The place that a fetch waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// One of its namespace. Only fetches for it have one, also while they wait for a thread.
    OfNamespace,
    /// A thread: any fetch that ends makes one free.
    Thread,
}

impl<V: Clone> Turns<V> {
    pub(super) fn new() -> Self {
        Self(Mutex::default())
    }

    /// A fetch begins to wait.
    pub(super) fn wait(
        &self,
        callers: &Callers<ArtifactId, V>,
        tenant: &Tenant,
        place: Place,
    ) -> Arc<Turn<V>> {
        let turn = Arc::new(Turn {
            callers: callers.clone(),
            tenant: tenant.clone(),
            place,
            since: Instant::now(),
        });
        let mut all = self.0.lock();
        all.retain(|turn| turn.strong_count() > 0);
        all.push(Arc::downgrade(&turn));
        turn
    }

    /// Whether a pod has waited so long for a place that the end of a fetch for this namespace may
    /// make free.
    pub(super) fn need(&self, tenant: &Tenant, long: Duration) -> bool {
        let all = self.0.lock();
        let turns: Vec<_> = all.iter().filter_map(Weak::upgrade).collect();
        // The end of any fetch lets one of these go on. Later it gives its namespace's place back.
        let wants_thread = |of: &Tenant| {
            let mut turns = turns.iter();
            turns.any(|turn| turn.place == Place::Thread && turn.tenant == *of)
        };
        turns.iter().any(|turn| {
            let is_of_use = turn.tenant == *tenant || wants_thread(&turn.tenant);
            is_of_use && turn.since.elapsed() >= long && !turn.callers.are_gone()
        })
    }
}
