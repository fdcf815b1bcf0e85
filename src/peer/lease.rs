//! Leases: the artifacts and snapshots that peers are reading. While one is held, its layers stay
//! on this node, also if it is deleted, evicted or merged. A lease ends some seconds after its last
//! use.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How long content is kept after its last use: until the next question of the same fetch.
const LINGERS: Duration = Duration::from_secs(10);
/// How much content of a kind is kept for peers that do not read at this moment.
const MOST: usize = 64;

#[derive(Debug)]
struct Lease<T> {
    open: Arc<T>,
    used: Instant,
}

/// The leases of this node, of one kind of content.
#[derive(Debug)]
pub(super) struct Leases<K, T>(Mutex<HashMap<K, Lease<T>>>);

impl<K, T> Default for Leases<K, T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone, T> Leases<K, T> {
    /// The content, if it is kept. That uses it.
    pub(super) fn get(&self, id: &K) -> Option<Arc<T>> {
        let mut leases = self.0.lock();
        let lease = leases.get_mut(id)?;
        lease.used = Instant::now();
        Some(Arc::clone(&lease.open))
    }

    /// Keeps content. That of an earlier caller is kept instead, if there is one. With too
    /// many, it is kept only as long as its caller holds it.
    pub(super) fn keep(&self, id: K, open: T) -> Arc<T> {
        let mut leases = self.0.lock();
        let full = leases.len() >= MOST;
        if let Some(lease) = leases.get_mut(&id) {
            lease.used = Instant::now();
            return Arc::clone(&lease.open);
        }
        let open = Arc::new(open);
        if !full {
            let used = Instant::now();
            let open = Arc::clone(&open);
            leases.insert(id, Lease { open, used });
        }
        open
    }

    /// Ends those that were not used for some time and that nothing reads. Returns when to look
    /// again.
    pub(super) fn expire(&self) -> Instant {
        let now = Instant::now();
        let mut ended = Vec::new();
        {
            let mut leases = self.0.lock();
            let over = |lease: &Lease<T>| {
                Arc::strong_count(&lease.open) == 1 && now.duration_since(lease.used) >= LINGERS
            };
            let ids: Vec<K> = leases
                .iter()
                .filter(|(_, lease)| over(lease))
                .map(|(id, _)| id.clone())
                .collect();
            ended.extend(ids.iter().filter_map(|id| leases.remove(id)));
        }
        // The end of a pin takes the engine's lock.
        drop(ended);
        now + LINGERS / 4
    }

    /// Ends all.
    pub(super) fn clear(&self) {
        let ended = std::mem::take(&mut *self.0.lock());
        drop(ended);
    }

    /// Ends the lease of some content, once nothing reads it.
    pub(super) fn end(&self, id: &K) {
        let ended = self.0.lock().remove(id);
        drop(ended);
    }
}
