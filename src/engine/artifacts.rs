//! The artifacts in memory, and how many of them stack each layer. A commit asks for single
//! artifacts and layers, so its cost does not depend on the number of artifacts.
//!
//! A node may have 100,000 artifacts, and a walk over all of them takes longer than a commit. A
//! walk therefore releases the state now and then (`transaction`), and sees no single moment. The
//! caller checks again under the lock before it deletes something.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::multiset::Multiset;
use crate::model::{Artifact, ArtifactId, LayerId, Sha256, Sharing, Timestamp};

/// An artifact in memory.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) artifact: Artifact,
    /// Whether the index has it.
    pub(super) indexed: bool,
    /// Whether it may be deleted: the index has it, and its seal intent is withdrawn.
    pub(super) durable: bool,
}

impl Sealed {
    /// An artifact that the index has, and that may be deleted.
    pub(super) fn durable(artifact: Artifact) -> Self {
        Self {
            artifact,
            indexed: true,
            durable: true,
        }
    }
}

/// All artifacts.
#[derive(Debug, Default)]
pub(super) struct Artifacts {
    /// Sorted, so that a walk can continue where it released the state.
    all: BTreeMap<ArtifactId, Sealed>,
    /// How many artifacts stack each layer.
    stacked: Multiset<LayerId>,
}

impl Artifacts {
    pub(super) fn get(&self, id: &ArtifactId) -> Option<&Sealed> {
        self.all.get(id)
    }

    pub(super) fn contains_key(&self, id: &ArtifactId) -> bool {
        self.all.contains_key(id)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &ArtifactId> {
        self.all.keys()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Sealed> {
        self.all.values()
    }

    /// Those from here on, in the order of their ids.
    pub(super) fn after(
        &self,
        from: Bound<ArtifactId>,
    ) -> impl Iterator<Item = (&ArtifactId, &Sealed)> {
        self.all.range((from, Bound::Unbounded))
    }

    /// Whether an artifact stacks this layer.
    pub(super) fn stack(&self, layer: &LayerId) -> bool {
        self.stacked.contains(layer)
    }

    /// Enters an artifact; it replaces one of the same id.
    pub(super) fn insert(&mut self, sealed: Sealed) {
        self.remove(&sealed.artifact.id);
        self.count(&sealed.artifact.layers);
        self.all.insert(sealed.artifact.id, sealed);
    }

    pub(super) fn remove(&mut self, id: &ArtifactId) -> Option<Sealed> {
        let sealed = self.all.remove(id)?;
        self.count_no_more(&sealed.artifact.layers);
        Some(sealed)
    }

    /// Replaces an artifact's layers by others of the same content.
    pub(super) fn restack(&mut self, id: &ArtifactId, layers: &[LayerId]) {
        if let Some(sealed) = self.all.get_mut(id) {
            let before = std::mem::replace(&mut sealed.artifact.layers, layers.to_vec());
            self.count(layers);
            self.count_no_more(&before);
        }
    }

    /// Records that an artifact is used now. Returns when it was used before, if it exists.
    pub(super) fn used(&mut self, id: &ArtifactId, now: Timestamp) -> Option<Timestamp> {
        let sealed = self.all.get_mut(id)?;
        Some(std::mem::replace(&mut sealed.artifact.last_used, now))
    }

    /// Notes the digest of an artifact's content; the artifact, if that is news.
    pub(super) fn set_digest(&mut self, id: &ArtifactId, digest: Sha256) -> Option<&Sealed> {
        let sealed = self.all.get_mut(id)?;
        let known = sealed.artifact.digests.content.replace(digest);
        (known != Some(digest)).then_some(sealed)
    }

    /// Records the state of an artifact in the shared tier.
    pub(super) fn set_sharing(&mut self, id: &ArtifactId, sharing: Sharing) {
        if let Some(sealed) = self.all.get_mut(id) {
            sealed.artifact.sharing = sharing;
        }
    }

    /// Notes that the index has an artifact.
    pub(super) fn set_indexed(&mut self, id: &ArtifactId) {
        if let Some(sealed) = self.all.get_mut(id) {
            sealed.indexed = true;
        }
    }

    pub(super) fn set_durable(&mut self, id: &ArtifactId, durable: bool) {
        if let Some(sealed) = self.all.get_mut(id) {
            sealed.durable = durable;
        }
    }

    fn count(&mut self, layers: &[LayerId]) {
        for layer in layers {
            self.stacked.add(*layer);
        }
    }

    fn count_no_more(&mut self, layers: &[LayerId]) {
        for layer in layers {
            self.stacked.remove(layer);
        }
    }
}

impl FromIterator<Artifact> for Artifacts {
    /// Artifacts that were read from the index.
    fn from_iter<T: IntoIterator<Item = Artifact>>(artifacts: T) -> Self {
        let mut all = Self::default();
        for artifact in artifacts {
            all.insert(Sealed::durable(artifact));
        }
        all
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An artifact of these layers.
    pub(in crate::engine) fn made(id: u128, layers: &[u128]) -> Artifact {
        Artifact {
            id: ArtifactId::from_bits(id),
            tenant: "ci".parse().expect("label"),
            reference: "task-cache/k".parse().expect("reference"),
            layers: layers.iter().copied().map(LayerId::from_bits).collect(),
            created: Timestamp(1),
            ttl_seconds: None,
            last_used: Timestamp(1),
            made_by: None,
            digests: crate::model::Digests::default(),
            sharing: crate::model::Sharing::default(),
            fence: 0,
        }
    }

    #[test]
    fn a_layer_counts_as_long_as_one_stacks_it() {
        let layer = LayerId::from_bits;
        let mut artifacts: Artifacts = [made(1, &[1]), made(2, &[2, 1])].into_iter().collect();
        let stacked = |artifacts: &Artifacts| {
            let layers = (1..=4).filter(|number| artifacts.stack(&layer(*number)));
            layers.collect::<Vec<u128>>()
        };
        assert_eq!(stacked(&artifacts), [1, 2]);
        let first = artifacts.remove(&ArtifactId::from_bits(1)).expect("there");
        assert_eq!(stacked(&artifacts), [1, 2]);
        artifacts.restack(&ArtifactId::from_bits(2), &[layer(3)]);
        assert_eq!(stacked(&artifacts), [3]);
        artifacts.insert(first);
        artifacts.insert(Sealed::durable(made(2, &[4, 1])));
        assert_eq!(stacked(&artifacts), [1, 4]);
        for id in [1, 2, 2] {
            artifacts.remove(&ArtifactId::from_bits(id));
        }
        assert_eq!(stacked(&artifacts), [0; 0]);
        assert_eq!(artifacts.len(), 0);
    }
}
