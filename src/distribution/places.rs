//! Limits concurrent work of each owner: a namespace, or a peer. So one owner cannot take all
//! permits of a node.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// The places of each owner.
#[derive(Debug)]
pub struct PlacesOfEach<K> {
    most: usize,
    /// Of the owners that have a place, or wait for one.
    owners: Mutex<HashMap<K, Arc<Semaphore>>>,
}

impl<K: Eq + Hash + Clone> PlacesOfEach<K> {
    /// So many places for each owner.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let owners = Mutex::default();
        Self { most, owners }
    }

    /// Waits for a place of this owner, which is free again when the permit is dropped.
    ///
    /// # Errors
    ///
    /// Never: places are not closed.
    pub async fn take(&self, owner: &K) -> Result<OwnedSemaphorePermit, AcquireError> {
        self.of(owner).acquire_owned().await
    }

    /// A place of this owner, if one is free.
    #[must_use]
    pub fn try_take(&self, owner: &K) -> Option<OwnedSemaphorePermit> {
        self.of(owner).try_acquire_owned().ok()
    }

    fn of(&self, owner: &K) -> Arc<Semaphore> {
        let mut owners = self.owners.lock();
        owners.retain(|_, places| Arc::strong_count(places) > 1);
        let places = owners.entry(owner.clone());
        Arc::clone(places.or_insert_with(|| Arc::new(Semaphore::new(self.most))))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn an_owner_waits_for_its_own_places_only_and_is_forgotten_without_any() {
        let places = PlacesOfEach::new(2);
        let take = |owner: &'static str| places.take(&owner).now_or_never();
        let (first, second) = (take("a"), take("a"));
        assert!(first.is_some() && second.is_some());
        assert!(take("a").is_none(), "it has all of its own");
        assert!(places.try_take(&"a").is_none());
        assert!(take("b").is_some());
        drop(first);
        assert!(take("a").is_some());
        drop(second);
        assert!(take("c").is_some());
        assert_eq!(places.owners.lock().len(), 1);
    }
}
