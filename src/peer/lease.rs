//! Leases: the artifacts that peers are reading. While one is held, the artifact's layers stay on
//! this node, also if it is evicted or merged. A lease ends some seconds after its last use.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::engine::OpenArtifact;
use crate::model::ArtifactId;

/// How long an artifact is kept after its last use: until the next question of the same fetch.
const LINGERS: Duration = Duration::from_secs(10);
/// How many artifacts are kept for peers that do not read at this moment.
const MOST: usize = 64;

#[derive(Debug)]
struct Lease {
    open: Arc<OpenArtifact>,
    used: Instant,
}

/// The leases of this node.
#[derive(Debug, Default)]
pub(super) struct Leases(Mutex<HashMap<ArtifactId, Lease>>);

impl Leases {
    /// The artifact, if it is kept. That uses it.
    pub(super) fn get(&self, id: ArtifactId) -> Option<Arc<OpenArtifact>> {
        let mut leases = self.0.lock();
        let lease = leases.get_mut(&id)?;
        lease.used = Instant::now();
        Some(Arc::clone(&lease.open))
    }

    /// Keeps an artifact. The one of an earlier caller is kept instead, if there is one. With too
    /// many, it is kept only as long as its caller holds it.
    pub(super) fn keep(&self, open: OpenArtifact) -> Arc<OpenArtifact> {
        let id = open.artifact.id;
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
            let over = |lease: &Lease| {
                Arc::strong_count(&lease.open) == 1 && now.duration_since(lease.used) >= LINGERS
            };
            let ids: Vec<ArtifactId> = leases
                .iter()
                .filter(|(_, lease)| over(lease))
                .map(|(id, _)| *id)
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

    /// Ends the lease of an artifact, once nothing reads it.
    pub(super) fn end(&self, id: ArtifactId) {
        let ended = self.0.lock().remove(&id);
        drop(ended);
    }
}
