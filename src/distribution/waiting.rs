//! The publishes that run at this moment, for other calls on their volumes; and those of them that
//! wait for content of a peer or the tier, for lists. The engine does not know these volumes yet.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::engine::PublishRequest;
use crate::model::{Pod, Tenant, Timestamp, VolumeId, VolumeSpec};
use crate::shared::now;

/// A volume whose publish waits.
#[derive(Debug, Clone)]
pub struct WaitingVolume {
    /// Its id.
    pub id: VolumeId,
    /// Its tenant.
    pub tenant: Tenant,
    /// Its pod.
    pub pod: Pod,
    /// Its attributes.
    pub spec: VolumeSpec,
    /// Whether the pod may only read it.
    pub read_only: bool,
    /// Since when.
    pub since: Timestamp,
}

/// The volumes whose publish runs, and what is listed of each. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Waiting(Arc<Mutex<HashMap<VolumeId, Option<WaitingVolume>>>>);

impl Waiting {
    /// Notes a publish until the guard is dropped. `None`: another publish of this volume has not
    /// ended.
    #[must_use]
    pub fn enter(&self, request: &PublishRequest) -> Option<Entered> {
        let volume = WaitingVolume {
            id: request.volume.clone(),
            tenant: request.tenant.clone(),
            pod: request.pod.clone(),
            spec: request.spec.clone(),
            read_only: request.read_only,
            since: now(),
        };
        match self.0.lock().entry(request.volume.clone()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(Some(volume)),
        };
        Some(Entered {
            waiting: self.clone(),
            volume: request.volume.clone(),
        })
    }

    /// Whether a publish of this volume has not ended.
    #[must_use]
    pub fn has(&self, volume: &VolumeId) -> bool {
        self.0.lock().contains_key(volume)
    }

    /// Those that wait for content of a peer or the tier, by tenant and id.
    #[must_use]
    pub fn list(&self, tenant: Option<&Tenant>) -> Vec<WaitingVolume> {
        let all = self.0.lock();
        let seen = all
            .values()
            .flatten()
            .filter(|volume| tenant.is_none_or(|tenant| volume.tenant == *tenant));
        let mut volumes: Vec<WaitingVolume> = seen.cloned().collect();
        volumes.sort_by(|a, b| (&a.tenant, &a.id).cmp(&(&b.tenant, &b.id)));
        volumes
    }
}

/// A publish that runs. It ends when this is dropped.
#[derive(Debug)]
pub struct Entered {
    waiting: Waiting,
    volume: VolumeId,
}

impl Entered {
    /// It no longer waits for a peer or the tier. Only the engine knows what it waits for.
    pub fn brought(&self) {
        if let Some(listed) = self.waiting.0.lock().get_mut(&self.volume) {
            *listed = None;
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.waiting.0.lock().remove(&self.volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_publish_of_a_volume_waits_and_it_is_known_until_its_end() {
        let waiting = Waiting::default();
        let (one, other) = (
            PublishRequest::of_nothing("one"),
            PublishRequest::of_nothing("other"),
        );
        let first = waiting.enter(&one);
        assert!(first.is_some() && waiting.has(&one.volume));
        // The refused one does not end the wait of the first.
        assert!(waiting.enter(&one).is_none());
        assert!(waiting.has(&one.volume) && !waiting.has(&other.volume));
        let second = waiting.enter(&other);
        assert_eq!(waiting.list(None).len(), 2);
        // The engine's own wait is no fetch.
        second.as_ref().expect("it was entered").brought();
        assert!(waiting.has(&other.volume));
        assert_eq!(waiting.list(None).len(), 1);
        drop(first);
        assert!(!waiting.has(&one.volume) && waiting.has(&other.volume));
        assert!(waiting.enter(&one).is_some());
        drop(second);
        assert!(waiting.list(None).is_empty());
    }
}
