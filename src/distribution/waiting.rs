//! The publishes that wait for content at this moment, for lists. The engine does not know their
//! volumes yet.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::health::now;
use crate::engine::PublishRequest;
use crate::model::{Pod, Tenant, Timestamp, VolumeId, VolumeSpec};

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

/// The waiting volumes. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Waiting(Arc<Mutex<HashMap<VolumeId, WaitingVolume>>>);

impl Waiting {
    /// Notes a publish until the guard is dropped.
    #[must_use]
    pub fn enter(&self, request: &PublishRequest) -> impl Drop + use<> {
        let volume = WaitingVolume {
            id: request.volume.clone(),
            tenant: request.tenant.clone(),
            pod: request.pod.clone(),
            spec: request.spec.clone(),
            read_only: request.read_only,
            since: now(),
        };
        self.0.lock().insert(request.volume.clone(), volume);
        Left {
            waiting: self.clone(),
            volume: request.volume.clone(),
        }
    }

    /// All of them, by tenant and id.
    #[must_use]
    pub fn list(&self, tenant: Option<&Tenant>) -> Vec<WaitingVolume> {
        let all = self.0.lock();
        let seen = all
            .values()
            .filter(|volume| tenant.is_none_or(|tenant| volume.tenant == *tenant));
        let mut volumes: Vec<WaitingVolume> = seen.cloned().collect();
        volumes.sort_by(|a, b| (&a.tenant, &a.id).cmp(&(&b.tenant, &b.id)));
        volumes
    }
}

/// Ends a wait when it is dropped.
struct Left {
    waiting: Waiting,
    volume: VolumeId,
}

impl Drop for Left {
    fn drop(&mut self) {
        self.waiting.0.lock().remove(&self.volume);
    }
}
