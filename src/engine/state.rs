//! What the engine knows, in memory: volumes, the catalog, persistent volumes, write-back, health.
//!
//! One mutex ([`Watched`]) guards all of it, and is held for look-ups and moves only, never across
//! a system call. Everything here can be computed again from the index, the records and the mount
//! table; nothing here is the only copy of anything.
//!
//! **References.** These refer to a layer: the artifacts, claims and snapshots that stack it; the
//! volumes that are mounted over it; and operations that pin it. A volume's reference begins when a
//! publish picks the parent, under this lock. It ends when no process has a file of the volume
//! open, not even for reading. References are computed here, and never stored.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::artifacts::Sealed;
use super::catalog::Catalog;
use super::claims::entries::PersistentVolumes;
use super::durability::WriteBack;
use super::error::Result;
use super::health::Health;
use super::multiset::Multiset;
use super::types::PublishRequest;
use super::volumes::Volumes;
use crate::model::{
    ArtifactId, Fences, LayerId, Name, Origin, PodUid, Policies, Reference, TenantOrigin,
    Timestamp, VolumeId, VolumeKind, VolumeRecord,
};

/// All that is known. Each part keeps its own state private.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) volumes: Volumes,
    pub(super) catalog: Catalog,
    pub(super) claims: PersistentVolumes,
    /// Layers that an operation needs to stay.
    pub(super) pinned: Multiset<LayerId>,
    pub(super) write_back: WriteBack,
    pub(super) health: Health,
    /// The fences that are applied. No name points at content that one of them clears.
    pub(super) fences: Fences,
    /// The cache policies of the cluster.
    pub(super) policies: Arc<Policies>,
}

/// What a new volume starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Resolution {
    /// Nothing: it starts empty.
    Empty,
    /// This artifact, found under this name.
    Fork(Reference, ArtifactId, Vec<LayerId>),
    /// Content that is not there yet; in words, how far it is.
    Coming(String),
    /// Content that does not exist, and that no volume will become.
    Missing,
}

impl State {
    /// Whether a name shows content of an archive or of another node that the index does not have
    /// yet. It disappears if the index cannot be written. A seal does not: it is tried until then.
    pub(super) fn may_disappear(&self, name: &Name) -> bool {
        let owner = self.catalog.owner(name).filter(|owner| !owner.indexed);
        let newest = owner.and_then(|owner| owner.artifact.layers.first());
        // A volume that is being sealed is found by the layer that it becomes.
        newest.is_some_and(|layer| self.volumes.retiring(*layer).is_none())
    }

    /// What a volume of this specification starts from, now.
    pub(super) fn resolve(&self, request: &PublishRequest) -> Resolution {
        for TenantOrigin { tenant, origin } in request.origins() {
            let found = match origin {
                Origin::Name(reference) => {
                    let readable = self.readable(request, Name { tenant, reference });
                    readable.and_then(|name| self.catalog.owner(&name))
                }
                Origin::Newest(prefix) => {
                    let may_read = self
                        .policies
                        .may_read_all(&tenant, &prefix, &request.tenant);
                    may_read
                        .then(|| self.catalog.newest(&tenant, &prefix))
                        .flatten()
                }
            };
            if let Some(Sealed { artifact, .. }) = found {
                let reference = artifact.reference.clone();
                return Resolution::Fork(reference, artifact.id, artifact.layers.clone());
            }
        }
        match &request.spec.kind {
            VolumeKind::Input { from } => {
                let readable = self.readable(request, request.source(from));
                match readable.and_then(|name| self.coming(&name, &request.pod.uid)) {
                    Some(state) => Resolution::Coming(state),
                    None => Resolution::Missing,
                }
            }
            _ => Resolution::Empty,
        }
    }

    /// This name, if a volume may read it. `None`: the policies of that namespace do not let it, so
    /// the content does not exist for it.
    pub(super) fn readable(&self, request: &PublishRequest, name: Name) -> Option<Name> {
        let may_read = self.policies.may_read(&name, &request.tenant);
        may_read.then_some(name)
    }

    /// How far content of this name is, in words; `None`: no volume becomes it.
    pub(super) fn coming(&self, name: &Name, asking: &PodUid) -> Option<String> {
        let least = self.fences.least(name);
        self.volumes.coming(name, least, asking, &self.policies)
    }

    /// Reserves a volume for one operation.
    pub(super) fn begin(&mut self, volume: &VolumeId) -> Result<()> {
        self.health.refuse_closing()?;
        self.volumes.begin(volume)
    }

    /// Every layer that something refers to.
    pub(super) fn referenced_layers(&self) -> HashSet<LayerId> {
        self.referenced_without(|_| false)
    }

    /// Every layer that something would refer to if these artifacts were gone.
    pub(super) fn referenced_without(&self, is_gone: impl Fn(&Sealed) -> bool) -> HashSet<LayerId> {
        let artifacts = self
            .catalog
            .artifacts()
            .values()
            .filter(|sealed| !is_gone(sealed));
        let artifacts = artifacts.flat_map(|sealed| &sealed.artifact.layers);
        artifacts
            .chain(self.referenced_besides())
            .copied()
            .collect()
    }

    /// Those of these layers that nothing refers to. The cost does not depend on the number of
    /// artifacts.
    pub(super) fn unreferenced<'a>(
        &self,
        layers: impl Iterator<Item = &'a LayerId>,
    ) -> HashSet<LayerId> {
        let free = layers.filter(|layer| {
            !self.catalog.artifacts().stack(layer) && self.volumes.retiring(**layer).is_none()
        });
        let mut free: HashSet<LayerId> = free.copied().collect();
        if !free.is_empty() {
            self.referenced_besides().for_each(|layer| {
                free.remove(layer);
            });
        }
        free
    }

    /// Every layer that anything but an artifact refers to, some of them twice.
    fn referenced_besides(&self) -> impl Iterator<Item = &LayerId> {
        let volumes = self.volumes.layers().chain(self.claims.layers());
        volumes.chain(self.pinned.keys())
    }

    /// Whether an artifact, a claim or a snapshot stacks this layer.
    pub(super) fn is_stacked(&self, layer: &LayerId) -> bool {
        let mut others = self.claims.stacks();
        self.catalog.artifacts().stack(layer) || others.any(|stack| stack.contains(layer))
    }

    /// The artifacts that volumes were forked from, or are about to be, or may have been; and those
    /// that are being exported.
    pub(super) fn artifacts_in_use(&self) -> HashSet<ArtifactId> {
        let exported = self.catalog.exported().copied();
        self.volumes.parents().chain(exported).collect()
    }

    /// Whether this volume may be the last user of a layer. It is not if its parent still has its
    /// name, its time and its layers: the next volumes are forks of that, too. Most volumes are of
    /// this kind, or are no forks.
    pub(super) fn may_be_last_of(&self, record: &VolumeRecord, now: Timestamp) -> bool {
        let parent = record.parent.and_then(|id| self.catalog.get(&id));
        match parent {
            Some(Sealed { artifact, .. }) => {
                artifact.layers != record.layers
                    || !self.catalog.is_named(artifact)
                    || artifact.expires().is_some_and(|at| at <= now)
            }
            None => !record.layers.is_empty(),
        }
    }
}

/// A value behind a mutex, and those who wait for a change of it, without polling. The owner says
/// when something changed that they may be looking for.
#[derive(Debug, Default)]
pub(super) struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T> Watched<T> {
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock()
    }

    /// Wakes all who wait: the value changed.
    pub(super) fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until `look` finds something. The lock is held during the look only.
    pub(super) async fn when<F>(&self, mut look: impl FnMut(&mut T) -> Option<F>) -> F {
        loop {
            // Registered before the look: a change in between is not missed.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let found = look(&mut self.value.lock());
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }
}
