//! Persistent volumes in memory, with their snapshots and groups: their entries in the index, and
//! how they are used in this boot. The other modules here have the operations.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use crate::engine::types::Measured;
use crate::model::{
    LayerId, MountCapability, PersistentVolume, Snapshot, SnapshotGroup, SnapshotId, Timestamp,
    VolumeId,
};

/// A claim, and how it is used in this boot.
#[derive(Debug)]
pub(in crate::engine) struct VolumeEntry {
    pub(in crate::engine) claim: PersistentVolume,
    pub(in crate::engine) mounts: HashMap<PathBuf, ClaimMount>,
    /// The layers of its last mount, until the kernel says that no process holds that mount's files
    /// any more.
    pub(in crate::engine) busy_layers: Option<Vec<LayerId>>,
    /// Why it cannot be used.
    pub(in crate::engine) problem: Option<Problem>,
    /// Its private content was there when the disk failed to write something back: nothing is made
    /// of it any more.
    pub(in crate::engine) damaged: bool,
    pub(in crate::engine) limit_unenforced: Option<String>,
    pub(in crate::engine) measured: Measured,
    /// Whether it was used since the index was told when.
    pub(in crate::engine) used: bool,
}

/// Why a claim cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) enum Problem {
    /// Something of it is gone.
    Broken(String),
    /// It is mounted, and its record cannot be read, so its access mode is unknown. That ends with
    /// its last mount.
    Unrecorded(String),
}

impl Problem {
    /// In words.
    pub(in crate::engine) fn why(&self) -> &str {
        match self {
            Self::Broken(why) | Self::Unrecorded(why) => why,
        }
    }
}

/// One mount of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct ClaimMount {
    /// The id of the mount.
    pub(in crate::engine) id: u64,
    pub(in crate::engine) staging: bool,
    pub(in crate::engine) read_only: bool,
    /// `None`: not known.
    pub(in crate::engine) asked: Option<MountCapability>,
}

/// The unit of one transaction, for creation and deletion: a snapshot, or a group with all its
/// members.
#[derive(Debug, Clone)]
pub(in crate::engine) struct SnapshotSet {
    pub(in crate::engine) snapshots: Vec<Snapshot>,
    pub(in crate::engine) group: Option<SnapshotGroup>,
}

impl VolumeEntry {
    /// A claim that is not in use.
    pub(in crate::engine) fn new(claim: PersistentVolume) -> Self {
        Self {
            claim,
            mounts: HashMap::new(),
            busy_layers: None,
            problem: None,
            damaged: false,
            limit_unenforced: None,
            measured: Measured::default(),
            used: false,
        }
    }

    /// Whether it is mounted and its record cannot be read.
    pub(in crate::engine) fn is_unrecorded(&self) -> bool {
        matches!(self.problem, Some(Problem::Unrecorded(_)))
    }

    /// Whether no pod can have written to it since.
    pub(in crate::engine) fn is_idle_since(&self, time: Timestamp) -> bool {
        self.mounts.is_empty() && self.busy_layers.is_none() && self.claim.last_used < time
    }

    /// No process holds files of its last mount any more. One that did may have written until now,
    /// which is use as before.
    pub(in crate::engine) fn is_let_go(&mut self, now: Timestamp) {
        if self.busy_layers.take().is_some() {
            self.claim.last_used = now;
            self.used = true;
        }
    }

    /// Whether it is mounted nowhere, and no process may still hold files of an earlier mount.
    pub(in crate::engine) fn is_quiescent(&self) -> bool {
        self.mounts.is_empty() && self.busy_layers.is_none() && self.problem.is_none()
    }
}

/// All persistent volumes, snapshots and groups. By id: lists are in that order, whatever changes
/// meanwhile.
#[derive(Debug, Default)]
pub(in crate::engine) struct PersistentVolumes {
    entries: BTreeMap<VolumeId, VolumeEntry>,
    snapshots: BTreeMap<SnapshotId, Snapshot>,
    groups: BTreeMap<SnapshotId, SnapshotGroup>,
}

impl PersistentVolumes {
    pub(in crate::engine) fn entries(&self) -> &BTreeMap<VolumeId, VolumeEntry> {
        &self.entries
    }

    pub(in crate::engine) fn values(&self) -> impl Iterator<Item = &VolumeEntry> {
        self.entries.values()
    }

    pub(in crate::engine) fn contains(&self, id: &VolumeId) -> bool {
        self.entries.contains_key(id)
    }

    pub(in crate::engine) fn get(&self, id: &VolumeId) -> Option<&VolumeEntry> {
        self.entries.get(id)
    }

    pub(in crate::engine) fn get_mut(&mut self, id: &VolumeId) -> Option<&mut VolumeEntry> {
        self.entries.get_mut(id)
    }

    pub(in crate::engine) fn insert(&mut self, entry: VolumeEntry) {
        self.entries.insert(entry.claim.id.clone(), entry);
    }

    pub(in crate::engine) fn remove(&mut self, id: &VolumeId) -> Option<VolumeEntry> {
        self.entries.remove(id)
    }

    pub(in crate::engine) fn snapshots(&self) -> &BTreeMap<SnapshotId, Snapshot> {
        &self.snapshots
    }

    pub(in crate::engine) fn groups(&self) -> &BTreeMap<SnapshotId, SnapshotGroup> {
        &self.groups
    }

    /// Enters snapshots that the index has.
    pub(in crate::engine) fn enter(&mut self, set: SnapshotSet) {
        for snapshot in set.snapshots {
            self.put_snapshot(snapshot);
        }
        if let Some(group) = set.group {
            self.put_group(group);
        }
    }

    pub(in crate::engine) fn put_snapshot(&mut self, snapshot: Snapshot) {
        self.snapshots.insert(snapshot.id.clone(), snapshot);
    }

    pub(in crate::engine) fn put_group(&mut self, group: SnapshotGroup) {
        self.groups.insert(group.id.clone(), group);
    }

    /// Hides snapshots from all callers.
    pub(in crate::engine) fn leave(&mut self, set: &SnapshotSet) {
        for snapshot in &set.snapshots {
            self.snapshots.remove(&snapshot.id);
        }
        if let Some(group) = &set.group {
            self.groups.remove(&group.id);
        }
    }

    /// The stacks of layers of persistent volumes and snapshots, newest layer first.
    pub(in crate::engine) fn stacks(&self) -> impl Iterator<Item = &Vec<LayerId>> {
        let volumes = self.entries.values().map(|entry| &entry.claim.layers);
        let snapshots = self.snapshots.values().map(|snapshot| &snapshot.layers);
        volumes.chain(snapshots)
    }

    /// Every layer that one of them needs, some of them twice.
    pub(in crate::engine) fn layers(&self) -> impl Iterator<Item = &LayerId> {
        let busy = self
            .entries
            .values()
            .filter_map(|entry| entry.busy_layers.as_ref());
        self.stacks().flatten().chain(busy.flatten())
    }
}
