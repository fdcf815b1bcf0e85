//! The volumes of pods: those that a pod has, and those whose pod is done with them.
//! What happens to a volume is decided in the modules of its life, from `publish` to `seal`.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use tokio::sync::OwnedSemaphorePermit;

use super::error::{Error, Result};
use super::types::{Measured, VolumeState};
use crate::model::{
    ArtifactId, LayerId, Outcome, PodUid, Reference, SealPlan, Tenant, Usage, VolumeId,
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

/// All volumes of pods, and which volumes of any kind an operation is running on.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    pub(super) live: HashMap<VolumeId, Live>,
    /// By the name of its directory in `pending/` or `trash/`.
    pub(super) retiring: HashMap<LayerId, RetiringVolume>,
    /// Volumes, claims and snapshots that an operation is running on.
    pub(super) busy: HashSet<VolumeId>,
    /// Those of them that only a chore runs on: it is soon done, and a caller waits for it.
    pub(super) chores: HashSet<VolumeId>,
    /// What volumes that are being published are forked from, also while they wait for room.
    pub(super) wanted: HashMap<VolumeId, ArtifactId>,
    /// What frozen volumes show that somebody still has open.
    pub(super) retained_layers: HashMap<LayerId, Vec<LayerId>>,
    /// What those volumes may be forks of that somebody uses, and whose records are unreadable (`orphans`).
    pub(super) maybe_forked: HashSet<ArtifactId>,
    /// How many such volumes there are, on whatever backend.
    pub(super) kept: usize,
}

impl Volumes {
    /// Reserves a volume for one operation.
    pub(super) fn begin(&mut self, volume: &VolumeId) -> Result<()> {
        if self.busy.insert(volume.clone()) {
            Ok(())
        } else {
            Err(Error::Busy(volume.clone()))
        }
    }

    pub(super) fn records(&self) -> impl Iterator<Item = &VolumeRecord> {
        let live = self.live.values().map(|live| &live.record);
        live.chain(self.retiring.values().map(|leaving| &leaving.record))
    }

    /// Every layer that a volume needs, some of them twice.
    pub(super) fn layers(&self) -> impl Iterator<Item = &LayerId> {
        let chosen = self.retiring.values().flat_map(|leaving| &leaving.chosen);
        let mounted = self.records().flat_map(|record| &record.layers);
        let retained = self.retained_layers.values().flatten();
        chosen.chain(mounted).chain(retained)
    }

    /// The artifacts that volumes were forked from, or are about to be, or may have been.
    pub(super) fn parents(&self) -> impl Iterator<Item = ArtifactId> {
        let parents = self.records().filter_map(|record| record.parent);
        let parents = parents.chain(self.wanted.values().copied());
        parents.chain(self.maybe_forked.iter().copied())
    }

    /// How many volumes were forked from each artifact.
    pub(super) fn fork_counts(&self) -> HashMap<ArtifactId, usize> {
        let mut counts = HashMap::new();
        for parent in self.records().filter_map(|record| record.parent) {
            *counts.entry(parent).or_default() += 1;
        }
        counts
    }

    /// Whether the end of a volume waits for room.
    pub(super) fn has_put_off(&self) -> bool {
        self.live.values().any(|live| live.done_with)
    }

    /// How far content of this name is that somebody is known to make; `None` when nobody does. A pod does not wait for
    /// itself: its own output is sealed only after it ended.
    pub(super) fn coming(
        &self,
        tenant: &Tenant,
        reference: &Reference,
        asking: &PodUid,
    ) -> Option<String> {
        let makes = |record: &VolumeRecord| {
            record.tenant == *tenant
                && record.pod.uid != *asking
                && record
                    .seal
                    .as_ref()
                    .is_some_and(|plan| plan.reference == *reference)
        };
        let leaving = self
            .retiring
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
        let live = self.live.values().filter(|live| makes(&live.record));
        let live = live.map(|live| format!("pod {} is still making it", live.record.pod.name));
        leaving.chain(live).next()
    }
}
