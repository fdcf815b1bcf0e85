//! What the engine knows, in memory: live volumes, volumes that are leaving, artifacts and their names.
//!
//! One mutex guards all of it, and is held for look-ups and moves only, never across a system call. Everything here can be
//! computed again from the index, the records and the mount table; nothing here is the only copy of anything.
//!
//! **References.** A layer is referred to by the artifacts, claims and snapshots that stack it and by the volumes mounted
//! over it, from the moment a publish picks its parent (under this lock) until nobody holds the volume's files open any
//! more, for reading either; and by whoever pins it, while a claim or snapshot is being made of it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;

use super::artifacts::{Artifacts, Sealed};
use super::error::{Error, Result};
use super::types::{PublishRequest, VolumeState};
use crate::model::{
    ArtifactId, LayerId, MountCapability, Name, Outcome, PersistentVolume, PodUid, Reference,
    SealPlan, Snapshot, SnapshotGroup, SnapshotId, Tenant, Timestamp, Usage, VolumeId,
    VolumeRecord,
};

/// A volume that its pod has, or is about to get.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) record: VolumeRecord,
    /// Where it is mounted, and the id of the mount there.
    pub(super) mounts: HashMap<PathBuf, u64>,
    /// Whether its directory and record exist on disk.
    pub(super) made: bool,
    pub(super) outcome: Option<Outcome>,
    /// Whether its pod is done with it, though its end could not begin yet.
    pub(super) done_with: bool,
    pub(super) measured: Measured,
}

/// What a volume was last found to cost.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Measured {
    pub(super) usage: Option<Usage>,
    pub(super) at: Option<Instant>,
    pub(super) running: bool,
}

/// A volume whose pod is done with it: it is sealed or thrown away as soon as that may be.
#[derive(Debug)]
pub(super) struct RetiringVolume {
    pub(super) record: VolumeRecord,
    pub(super) goal: Goal,
    pub(super) state: VolumeState,
    pub(super) outcome: Option<Outcome>,
    /// What it was last found to cost.
    pub(super) usage: Option<Usage>,
    /// The layers of the artifact that it is becoming: chosen already, and not yet an artifact's.
    pub(super) chosen: Vec<LayerId>,
}

/// A leaving volume's name, and what keeps its filesystem alive.
#[derive(Debug)]
pub(super) struct Teardown {
    pub(super) key: LayerId,
    pub(super) pin: Option<Pin>,
}

/// A descriptor that keeps a filesystem alive which is mounted nowhere any more, and the place among all of them that it takes.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) descriptor: OwnedFd,
    pub(super) place: OwnedSemaphorePermit,
}

/// What becomes of a leaving volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Goal {
    /// It lies in `pending/`, and becomes this if its pod's outcome allows it.
    Seal(SealPlan),
    /// It lies in `trash/`.
    Discard,
}

/// A claim, and how it is used in this boot.
#[derive(Debug)]
pub(super) struct VolumeEntry {
    pub(super) claim: PersistentVolume,
    pub(super) mounts: HashMap<PathBuf, ClaimMount>,
    /// Its last mount, until the kernel says that no process holds that mount's files any more.
    pub(super) busy_layers: Option<BusyLayers>,
    /// Detached mounts of it whose last descriptor is being closed.
    pub(super) closing: usize,
    /// Why it cannot be used.
    pub(super) problem: Option<Problem>,
    /// Its private content was there when the disk failed to write something back: nothing is made of it any more.
    pub(super) damaged: bool,
    pub(super) limit_unenforced: Option<String>,
    pub(super) measured: Measured,
    /// Whether it was used since the index was told when.
    pub(super) used: bool,
    /// There was no room to write down where it is mounted now: it is written when there is.
    pub(super) stale: bool,
}

/// A claim's mount whose files a process may still hold.
#[derive(Debug)]
pub(super) struct BusyLayers {
    /// The layers that it was mounted over.
    pub(super) layers: Vec<LayerId>,
    /// A start assumed it, and has not asked the kernel yet.
    pub(super) assumed: bool,
}

impl BusyLayers {
    /// Of a mount that this process made.
    pub(super) fn known(layers: Vec<LayerId>) -> Self {
        let assumed = false;
        Self { layers, assumed }
    }

    /// Of a mount that there may have been before this process.
    pub(super) fn assumed(layers: Vec<LayerId>) -> Self {
        let assumed = true;
        Self { layers, assumed }
    }
}

/// Why a claim cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Problem {
    /// Something of it is gone.
    Broken(String),
    /// It is mounted, and its record cannot be read: nobody knows as what. Once it is mounted nowhere, that is over.
    Unrecorded(String),
}

impl Problem {
    /// In words.
    pub(super) fn why(&self) -> &str {
        match self {
            Self::Broken(why) | Self::Unrecorded(why) => why,
        }
    }
}

/// One mount of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClaimMount {
    /// The id of the mount.
    pub(super) id: u64,
    pub(super) staging: bool,
    pub(super) read_only: bool,
    /// `None`: not known.
    pub(super) asked: Option<MountCapability>,
}

/// What is taken, and deleted, in one transaction: a snapshot, or a group with all of its own.
#[derive(Debug, Clone)]
pub(super) struct SnapshotSet {
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) group: Option<SnapshotGroup>,
}

impl VolumeEntry {
    /// A claim that is not in use.
    pub(super) fn new(claim: PersistentVolume) -> Self {
        Self {
            claim,
            mounts: HashMap::new(),
            busy_layers: None,
            closing: 0,
            problem: None,
            damaged: false,
            limit_unenforced: None,
            measured: Measured::default(),
            used: false,
            stale: false,
        }
    }

    /// Whether nobody knows as what it is mounted.
    pub(super) fn is_unrecorded(&self) -> bool {
        matches!(self.problem, Some(Problem::Unrecorded(_)))
    }

    /// Whether nobody has written to it since.
    pub(super) fn is_idle_since(&self, time: Timestamp) -> bool {
        self.mounts.is_empty()
            && self.closing == 0
            && self.busy_layers.is_none()
            && self.claim.last_used < time
    }

    /// No process holds files of its last mount any more. One that did may have written until now, which is use as before.
    ///
    /// A start only assumes such a process. That is no use, or each start would put the claim's end off; except where a
    /// write may be newer than what `synced` says is on the disk.
    pub(super) fn is_let_go(&mut self, now: Timestamp, synced: Option<Timestamp>) {
        let Some(last) = self.busy_layers.take() else {
            return;
        };
        let on_disk = synced.is_none_or(|synced| synced <= self.claim.last_used);
        if !(last.assumed && on_disk) {
            self.claim.last_used = now;
            self.used = true;
        }
    }

    /// Whether nobody has it mounted, or may still hold files of a mount that is gone.
    pub(super) fn is_quiescent(&self) -> bool {
        self.mounts.is_empty()
            && self.closing == 0
            && self.busy_layers.is_none()
            && self.problem.is_none()
    }
}

/// All that is known.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) volumes: HashMap<VolumeId, Live>,
    /// By the name of its directory in `pending/` or `trash/`.
    pub(super) leaving: HashMap<LayerId, RetiringVolume>,
    pub(super) artifacts: Artifacts,
    /// The current owner of each name: the newest artifact that was sealed under it.
    pub(super) names: BTreeMap<Name, ArtifactId>,
    /// Previous owners of a name, oldest first. If the current owner is discarded after a write-back
    /// error, the newest surviving one gets the name back. Of all owners ([`State::owners`]) only the
    /// oldest may be in the index, and then the index's name points at it. An artifact that is older
    /// than that one has lost the name for good.
    pub(super) earlier: HashMap<Name, Vec<ArtifactId>>,
    pub(super) usage: HashMap<LayerId, Usage>,
    /// Artifacts that were used since the index was last told when, and since when it does not know.
    pub(super) used: HashMap<ArtifactId, Timestamp>,
    /// What frozen volumes show that somebody still has open.
    pub(super) retained_layers: HashMap<LayerId, Vec<LayerId>>,
    /// What those volumes may be forks of that somebody uses, and of which nobody can say what they are (`orphans`).
    pub(super) maybe_forked: HashSet<ArtifactId>,
    /// How many such volumes there are, on whatever backend.
    pub(super) kept: usize,
    /// By id, as the other two: lists are in that order, whatever changes meanwhile.
    pub(super) claims: BTreeMap<VolumeId, VolumeEntry>,
    pub(super) snapshots: BTreeMap<SnapshotId, Snapshot>,
    pub(super) groups: BTreeMap<SnapshotId, SnapshotGroup>,
    /// Layers that an operation needs to stay, and how many do.
    pub(super) pinned: HashMap<LayerId, usize>,
    /// Artifacts that are being exported, and how often.
    pub(super) exported: HashMap<ArtifactId, usize>,
    /// Volumes, claims and snapshots that an operation is running on.
    pub(super) busy: HashSet<VolumeId>,
    /// Those of them that only a chore runs on: it is soon done, and a caller waits for it.
    pub(super) chores: HashSet<VolumeId>,
    /// What volumes that are being published are forked from, also while they wait for room.
    pub(super) wanted: HashMap<VolumeId, ArtifactId>,
    /// Volumes made until then lost bytes in a failed write-back.
    pub(super) tainted_until: Option<Timestamp>,
    /// All that was written before this is on the disk: when the last write-back began that went well.
    pub(super) synced: Option<Timestamp>,
    /// No new volumes.
    pub(super) closing: bool,
    /// Why nothing is changed in the pool any more: it is not known what the index has.
    pub(super) degraded: Option<String>,
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
    /// Content that nobody has and nobody will make.
    Missing,
}

impl State {
    /// What a volume of this specification starts from, now.
    pub(super) fn resolve(&self, request: &PublishRequest) -> Resolution {
        let wanted = request.spec.kind.starts_from();
        for reference in &wanted {
            let name = Name {
                tenant: request.tenant.clone(),
                reference: reference.clone(),
            };
            if let Some(sealed) = self.names.get(&name).and_then(|id| self.artifacts.get(id)) {
                let artifact = &sealed.artifact;
                return Resolution::Fork(reference.clone(), artifact.id, artifact.layers.clone());
            }
        }
        match (&request.spec.kind, wanted.first()) {
            (crate::model::VolumeKind::Input { .. }, Some(reference)) => {
                match self.coming(&request.tenant, reference, &request.pod.uid) {
                    Some(state) => Resolution::Coming(state),
                    None => Resolution::Missing,
                }
            }
            _ => Resolution::Empty,
        }
    }

    /// How far content of this name is that somebody is known to make; `None` when nobody does. A pod does not wait for
    /// itself: its own output is sealed only after it ended.
    fn coming(&self, tenant: &Tenant, reference: &Reference, asking: &PodUid) -> Option<String> {
        let makes = |record: &VolumeRecord| {
            record.tenant == *tenant
                && record.pod.uid != *asking
                && record
                    .seal
                    .as_ref()
                    .is_some_and(|plan| plan.reference == *reference)
        };
        let leaving = self
            .leaving
            .values()
            .filter(|leaving| leaving.goal != Goal::Discard && makes(&leaving.record));
        let leaving = leaving.map(|leaving| {
            let pod = &leaving.record.pod.name;
            match leaving.state {
                VolumeState::AwaitingOutcome => {
                    format!("the outcome of pod {pod} is not known yet")
                }
                VolumeState::InUse => format!("a process of pod {pod} still holds it open"),
                _ => format!("what pod {pod} made is being sealed"),
            }
        });
        let live = self.volumes.values().filter(|live| makes(&live.record));
        let live = live.map(|live| format!("pod {} is still making it", live.record.pod.name));
        leaving.chain(live).next()
    }

    /// Reserves a volume for one operation.
    pub(super) fn begin(&mut self, volume: &VolumeId) -> Result<()> {
        if self.closing {
            return Err(Error::ShuttingDown);
        }
        if self.busy.insert(volume.clone()) {
            Ok(())
        } else {
            Err(Error::Busy(volume.clone()))
        }
    }

    /// Every layer that something refers to.
    pub(super) fn referenced_layers(&self) -> HashSet<LayerId> {
        self.referenced_without(|_| false)
    }

    /// Every layer that something would refer to if these artifacts were gone.
    pub(super) fn referenced_without(&self, is_gone: impl Fn(&Sealed) -> bool) -> HashSet<LayerId> {
        let artifacts = self.artifacts.values().filter(|sealed| !is_gone(sealed));
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
        let free = layers
            .filter(|layer| !self.artifacts.stack(layer) && !self.leaving.contains_key(layer));
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
        let chosen = self.leaving.values().flat_map(|leaving| &leaving.chosen);
        let mounted = self.records().flat_map(|record| &record.layers);
        let claims = self.claims.values();
        let claims = claims.flat_map(|held| {
            held.claim
                .layers
                .iter()
                .chain(held.busy_layers.iter().flat_map(|last| &last.layers))
        });
        let snapshots = self
            .snapshots
            .values()
            .flat_map(|snapshot| &snapshot.layers);
        let held = self.retained_layers.values().flatten();
        let referenced = chosen.chain(mounted).chain(held).chain(claims);
        referenced.chain(snapshots).chain(self.pinned.keys())
    }

    /// Enters snapshots that the index has.
    pub(super) fn enter(&mut self, taken: SnapshotSet) {
        let snapshots = taken.snapshots.into_iter();
        self.snapshots
            .extend(snapshots.map(|snapshot| (snapshot.id.clone(), snapshot)));
        let group = taken.group.into_iter();
        self.groups
            .extend(group.map(|group| (group.id.clone(), group)));
    }

    /// Takes snapshots out of sight.
    pub(super) fn leave(&mut self, taken: &SnapshotSet) {
        for snapshot in &taken.snapshots {
            self.snapshots.remove(&snapshot.id);
        }
        if let Some(group) = &taken.group {
            self.groups.remove(&group.id);
        }
    }

    /// The stacks of layers of claims and snapshots, newest layer first.
    pub(super) fn other_stacks(&self) -> impl Iterator<Item = &Vec<LayerId>> {
        let claims = self.claims.values();
        let claims = claims.map(|held| &held.claim.layers);
        let snapshots = self.snapshots.values().map(|snapshot| &snapshot.layers);
        claims.chain(snapshots)
    }

    /// Whether an artifact, a claim or a snapshot stacks this layer.
    pub(super) fn is_stacked(&self, layer: &LayerId) -> bool {
        let mut others = self.other_stacks();
        self.artifacts.stack(layer) || others.any(|stack| stack.contains(layer))
    }

    /// The artifacts that volumes were forked from, or are about to be, or may have been.
    pub(super) fn artifacts_in_use(&self) -> HashSet<ArtifactId> {
        let parents = self.records().filter_map(|record| record.parent);
        let parents = parents.chain(self.wanted.values().copied());
        let parents = parents.chain(self.exported.keys().copied());
        parents.chain(self.maybe_forked.iter().copied()).collect()
    }

    /// Whether this volume may be the last that needs something. It is not where its parent has its name and time still, and the same
    /// layers: most volumes are forks of what the next ones are forked from, too, or of nothing.
    pub(super) fn may_be_last_of(&self, record: &VolumeRecord, now: Timestamp) -> bool {
        let parent = record.parent.and_then(|id| self.artifacts.get(&id));
        match parent {
            Some(Sealed { artifact, .. }) => {
                artifact.layers != record.layers
                    || !self.is_named(artifact)
                    || artifact.expires().is_some_and(|at| at <= now)
            }
            None => !record.layers.is_empty(),
        }
    }

    /// Whether the end of a volume waits for room.
    pub(super) fn has_put_off(&self) -> bool {
        self.volumes.values().any(|live| live.done_with)
    }

    /// How many volumes were forked from each artifact.
    pub(super) fn fork_counts(&self) -> HashMap<ArtifactId, usize> {
        let mut counts = HashMap::new();
        for parent in self.records().filter_map(|record| record.parent) {
            *counts.entry(parent).or_default() += 1;
        }
        counts
    }

    /// What these layers cost together; `None` while one is not measured yet.
    pub(super) fn usage_of(&self, layers: &[LayerId]) -> Option<Usage> {
        let mut usages = layers.iter().map(|layer| self.usage.get(layer).copied());
        usages.try_fold(Usage::default(), |all, usage| Some(all.and(usage?)))
    }

    fn records(&self) -> impl Iterator<Item = &VolumeRecord> {
        let live = self.volumes.values().map(|live| &live.record);
        live.chain(self.leaving.values().map(|leaving| &leaving.record))
    }

    /// Whether this volume existed when the disk last lost bytes.
    pub(super) fn is_tainted(&self, record: &VolumeRecord) -> bool {
        self.tainted_until
            .is_some_and(|until| record.created <= until)
    }

    /// The layers of an equivalent of this volume's parent: as they are now if it was flattened meanwhile.
    pub(super) fn parent_layers(&self, record: &VolumeRecord) -> Vec<LayerId> {
        let parent = record.parent.and_then(|id| self.artifacts.get(&id));
        parent.map_or_else(
            || record.layers.clone(),
            |sealed| sealed.artifact.layers.clone(),
        )
    }
}

#[cfg(test)]
mod tests;
