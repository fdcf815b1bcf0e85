//! The API server of the simulation: conditional writes, and a log of changes that each watch reads
//! at its own pace. It can be put back to an older state.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::{OrphanVolume, Phase, Volume, VolumeStatus, Wanted};

/// What a backup has.
#[derive(Clone, Default)]
pub(super) struct Stored {
    pub(super) volumes: BTreeMap<String, Volume>,
    /// The pools, each with the orphans that its node reported last.
    pub(super) pools: BTreeMap<String, Vec<OrphanVolume>>,
    pub(super) nodes: BTreeSet<String>,
}

/// The API server.
#[derive(Default)]
pub(super) struct Server {
    pub(super) now: Stored,
    version: u64,
    /// Each change of a volume, in order; `None`: deleted.
    pub(super) log: Vec<(String, Option<Volume>)>,
}

impl Server {
    fn put(&mut self, mut volume: Volume) {
        self.version += 1;
        let name = volume.metadata.name.clone().expect("a name");
        volume.metadata.resource_version = Some(self.version.to_string());
        self.log.push((name.clone(), Some(volume.clone())));
        self.now.volumes.insert(name, volume);
    }

    pub(super) fn create(&mut self, mut volume: Volume) {
        let name = volume.metadata.name.clone().expect("a name");
        if !self.now.volumes.contains_key(&name) {
            volume.metadata.generation = Some(1);
            self.put(volume);
        }
    }

    /// The stored volume, if it is still the one that was read.
    fn unchanged(&self, read: &Volume) -> Option<Volume> {
        let stored = self.now.volumes.get(read.metadata.name.as_deref()?)?;
        let is_same = stored.metadata.resource_version == read.metadata.resource_version;
        is_same.then(|| stored.clone())
    }

    /// Orders the deletion of a volume, unless it was changed. Whether it is ordered now.
    pub(super) fn order_absent(&mut self, read: &Volume) -> bool {
        let Some(mut volume) = self.unchanged(read) else {
            return false;
        };
        volume.spec.wanted = Wanted::Absent;
        volume.metadata.generation = volume.metadata.generation.map(|number| number + 1);
        self.put(volume);
        true
    }

    pub(super) fn report(&mut self, read: &Volume, status: VolumeStatus) {
        if let Some(mut volume) = self.unchanged(read) {
            volume.status = Some(status);
            self.put(volume);
        }
    }

    /// Deletes a volume, unless it was changed. Whether it is gone.
    pub(super) fn remove(&mut self, read: &Volume) -> bool {
        let name = read.metadata.name.clone().expect("a name");
        if self.unchanged(read).is_some() {
            self.now.volumes.remove(&name);
            self.log.push((name.clone(), None));
        }
        !self.now.volumes.contains_key(&name)
    }

    /// Deletes each volume that a condition holds for.
    pub(super) fn remove_all(&mut self, which: impl Fn(&Volume) -> bool) {
        let all = self.now.volumes.values();
        let which: Vec<Volume> = all.filter(|one| which(one)).cloned().collect();
        for volume in which {
            self.remove(&volume);
        }
    }

    pub(super) fn sweep(&mut self) {
        self.remove_all(|volume| {
            volume.spec.wanted == Wanted::Absent && volume.phase() == Some(Phase::Gone)
        });
    }

    /// Whether nothing will answer an order for a node.
    pub(super) fn is_given_up(&self, node: &str) -> bool {
        !self.now.nodes.contains(node) && !self.now.pools.contains_key(node)
    }
}
