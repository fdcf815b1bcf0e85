//! The catalog in memory: sealed content, its names, its sizes, and when it was last used.
//! `transaction` keeps it in step with the index. `state` knows who refers to which layer.

use std::collections::{BTreeMap, HashMap};

use super::artifacts::{Artifacts, Sealed};
use super::multiset::Multiset;
use super::name_changes::NameChanges;
use crate::model::{
    Artifact, ArtifactId, CacheKey, KeyIndex, LayerId, Name, Reference, Sha256, Sharing, Tenant,
    Timestamp, Usage, VolumeRecord,
};

mod names;

/// The use of a task cache is told to the controller once in such a period, in milliseconds.
const TELL_USE_MS: u64 = 10 * 60 * 1000;

/// What is sealed.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    artifacts: Artifacts,
    /// The owners of each name, oldest first; at least one. The last one is the current owner: the
    /// newest artifact that was sealed or entered under the name. If it is discarded because it
    /// cannot be made durable, the newest surviving one before it gets the name back. Only the
    /// oldest may be in the index, and then the index's name points at it. An artifact that is
    /// older than that one has lost the name for good.
    names: BTreeMap<Name, Vec<ArtifactId>>,
    /// The task caches among them, with the commit of their owner: finds the newest of those that
    /// begin in one way.
    keys: KeyIndex<(Timestamp, ArtifactId)>,
    usage: HashMap<LayerId, Usage>,
    /// Layers that are gone, and whose sizes the index still has.
    gone: Vec<LayerId>,
    /// Artifacts that were used since the index was last told when, and since when it does not
    /// know.
    used: HashMap<ArtifactId, Timestamp>,
    /// Artifacts that are being exported.
    exported: Multiset<ArtifactId>,
    changes: NameChanges,
}

impl Catalog {
    /// What the index had at the start, and is still there.
    pub(super) fn recovered(
        artifacts: Artifacts,
        names: BTreeMap<Name, ArtifactId>,
        usage: HashMap<LayerId, Usage>,
    ) -> Self {
        let mut catalog = Self {
            artifacts,
            usage,
            ..Self::default()
        };
        for (name, id) in names {
            catalog.set_owners(name, vec![id]);
        }
        catalog
    }

    pub(super) fn artifacts(&self) -> &Artifacts {
        &self.artifacts
    }

    pub(super) fn get(&self, id: &ArtifactId) -> Option<&Sealed> {
        self.artifacts.get(id)
    }

    pub(super) fn contains(&self, id: &ArtifactId) -> bool {
        self.artifacts.contains_key(id)
    }

    /// The names, each with its current owner.
    pub(super) fn names(&self) -> impl Iterator<Item = (&Name, ArtifactId)> {
        let names = self.names.iter();
        names.filter_map(|(name, owners)| Some((name, *owners.last()?)))
    }

    /// The newest commit of all task caches whose key begins so. The cost is bounded, however many
    /// keys begin so ([`KeyIndex`]).
    pub(super) fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<&Sealed> {
        let (_, (_, id)) = self.keys.newest(tenant, prefix)?;
        self.artifacts.get(&id)
    }

    /// The artifact that this name points at.
    pub(super) fn owner(&self, name: &Name) -> Option<&Sealed> {
        self.artifacts.get(&self.owner_id(name)?)
    }

    /// The layers of an equivalent of this volume's parent, which may have been flattened since.
    pub(super) fn parent_layers(&self, record: &VolumeRecord) -> Vec<LayerId> {
        let parent = record.parent.and_then(|id| self.artifacts.get(&id));
        let layers = parent.map_or(&record.layers, |sealed| &sealed.artifact.layers);
        layers.clone()
    }

    /// Replaces an artifact's layers by others of the same content.
    pub(super) fn restack(&mut self, id: &ArtifactId, layers: &[LayerId]) {
        self.artifacts.restack(id, layers);
    }

    pub(super) fn set_durable(&mut self, id: &ArtifactId, durable: bool) {
        self.artifacts.set_durable(id, durable);
        if let Some(sealed) = self.artifacts.get(id) {
            self.changes.note(&sealed.artifact.name());
        }
    }

    /// The names whose content changed.
    pub(super) fn changes(&mut self) -> &mut NameChanges {
        &mut self.changes
    }

    /// Notes the digest of an artifact's content; the artifact, if that is news.
    pub(super) fn set_digest(&mut self, id: &ArtifactId, digest: Sha256) -> Option<&Sealed> {
        self.artifacts.set_digest(id, digest)
    }

    /// Records the state of an artifact in the shared tier. The controller hears of content that
    /// may not leave this node any more.
    pub(super) fn set_sharing(&mut self, id: &ArtifactId, sharing: Sharing) {
        let Some(sealed) = self.artifacts.get(id) else {
            return;
        };
        if sealed.artifact.sharing.may_leave() != sharing.may_leave() {
            self.changes.note(&sealed.artifact.name());
        }
        self.artifacts.set_sharing(id, sharing);
    }

    /// Records that an artifact is used now. Returns whether it exists.
    pub(super) fn touch(&mut self, id: ArtifactId, now: Timestamp) -> bool {
        let Some(before) = self.artifacts.used(&id, now) else {
            return false;
        };
        self.used.entry(id).or_insert(now);
        let step = |at: Timestamp| at.0 / TELL_USE_MS;
        if step(before) != step(now)
            && let Some(sealed) = self.artifacts.get(&id)
            && let Reference::TaskCache(_) = sealed.artifact.reference
        {
            self.changes.note(&sealed.artifact.name());
        }
        true
    }

    /// Since when the index does not know of a use.
    pub(super) fn unwritten_since(&self) -> Option<Timestamp> {
        self.used.values().min().copied()
    }

    /// Artifacts of whose last use the index does not know; from here on it counts as told.
    pub(super) fn take_unwritten_uses(&mut self) -> Vec<Artifact> {
        let mut artifacts = Vec::new();
        self.used.retain(|id, _| match self.artifacts.get(id) {
            Some(sealed) if sealed.durable => {
                artifacts.push(sealed.artifact.clone());
                false
            }
            // The index soon gets the whole artifact.
            Some(_) => true,
            None => false,
        });
        artifacts
    }

    /// An export of this artifact began: it counts as in use.
    pub(super) fn begin_export(&mut self, id: ArtifactId) {
        self.exported.add(id);
    }

    pub(super) fn end_export(&mut self, id: &ArtifactId) {
        self.exported.remove(id);
    }

    /// The artifacts that are being exported.
    pub(super) fn exported(&self) -> impl Iterator<Item = &ArtifactId> {
        self.exported.keys()
    }

    /// The size of a layer; `None` while it is not measured.
    pub(super) fn usage(&self, layer: &LayerId) -> Option<Usage> {
        self.usage.get(layer).copied()
    }

    /// The size of these layers together; `None` while one is not measured yet.
    pub(super) fn usage_of(&self, layers: &[LayerId]) -> Option<Usage> {
        let mut usages = layers.iter().map(|layer| self.usage(layer));
        usages.try_fold(Usage::default(), |all, usage| Some(all.and(usage?)))
    }

    pub(super) fn set_usage(&mut self, layer: LayerId, usage: Usage) {
        self.usage.insert(layer, usage);
    }

    /// The layer goes; its size.
    pub(super) fn forget_usage(&mut self, layer: &LayerId) -> Option<Usage> {
        let usage = self.usage.remove(layer)?;
        self.gone.push(*layer);
        Some(usage)
    }

    /// The layers that are gone, and whose sizes the index still has; from here on it counts as
    /// told.
    pub(super) fn take_gone(&mut self) -> Vec<LayerId> {
        std::mem::take(&mut self.gone)
    }

    /// The index did not get these uses, nor that these layers are gone. The uses count as of now,
    /// so that a full disk does not refuse them again at once.
    pub(super) fn put_unwritten_back(
        &mut self,
        used: &[ArtifactId],
        gone: Vec<LayerId>,
        now: Timestamp,
    ) {
        for id in used {
            self.used.entry(*id).or_insert(now);
        }
        self.gone.extend(gone);
    }
}

#[cfg(test)]
mod tests;
