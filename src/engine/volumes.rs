//! Inline volumes in memory: live ones, retired ones, and which of them an operation works on. Only
//! [`lifecycle::step`] changes the state of a volume.
//!
//! What is done to volumes is in `publish`, `unpublish`, `teardown` and `seal`. The state's mutex
//! guards all of it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::error::{Error, Result};
use super::lifecycle::{self, Action, Goal, Lifecycle, Missing, Observation};
use super::name_changes::NameChanges;
use super::types::{Measured, VolumeState};
use crate::model::{
    ArtifactId, Commit, CommitRight, LayerId, Name, Outcome, PodUid, Policies, SealPlan, Timestamp,
    VolumeId, VolumeRecord,
};

/// An inline volume.
#[derive(Debug)]
pub(super) struct Volume {
    pub(super) record: VolumeRecord,
    /// How its pod's work ended, if that was told.
    outcome: Option<Outcome>,
    /// When its commit became due (see `seal`). `None`: it did not yet, or no start found the time.
    pub(super) due: Option<Timestamp>,
    pub(super) measured: Measured,
    lifecycle: Lifecycle,
    /// The layers of the artifact that it is becoming.
    chosen: Vec<LayerId>,
}

impl Volume {
    /// A volume that a start found.
    pub(super) fn found(
        record: VolumeRecord,
        lifecycle: Lifecycle,
        outcome: Option<Outcome>,
    ) -> Self {
        Self {
            record,
            outcome,
            due: None,
            measured: Measured::default(),
            lifecycle,
            chosen: Vec::new(),
        }
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// How far it is.
    pub(super) fn lifecycle(&self) -> Lifecycle {
        self.lifecycle
    }

    /// How far it is, for lists and metrics.
    pub(super) fn state(&self) -> VolumeState {
        self.lifecycle.shown()
    }

    /// The id of its mount.
    pub(super) fn mount(&self) -> Option<u64> {
        match self.lifecycle {
            Lifecycle::Published { mount } => Some(mount),
            _ => None,
        }
    }

    /// Whether its directory and record are in `volumes/`.
    pub(super) fn is_made(&self) -> bool {
        self.lifecycle != Lifecycle::Preparing
    }

    /// Whether it is committed only if its pod succeeds.
    pub(super) fn needs_success(&self) -> bool {
        let plan = self.record.seal.as_ref();
        plan.is_some_and(|plan| plan.keep.commit == Commit::OnSuccess)
    }

    /// The layer that its content becomes, if it may be sealed. In `pending/` its directory has this
    /// name.
    pub(super) fn layer(&self) -> Option<LayerId> {
        self.record.seal.as_ref().map(|plan| plan.layer)
    }

    /// The plan of its seal, if that is what it is retired for.
    pub(super) fn seal_intent(&self) -> Option<&SealPlan> {
        let plan = self.record.seal.as_ref();
        plan.filter(|_| self.lifecycle.goal() == Some(Goal::Seal))
    }

    /// Notes how its pod's work ended; whether that is news. The first report counts. `due`: this
    /// makes its commit due.
    pub(super) fn tell(&mut self, outcome: Outcome, due: Option<Timestamp>) -> bool {
        if self.outcome.is_some() {
            return false;
        }
        self.outcome = Some(outcome);
        self.due = due.or(self.due);
        self.learn(Missing::Outcome);
        true
    }

    /// This node knows this now. The volume's task waits for the change of the state.
    fn learn(&mut self, known: Missing) {
        if self.lifecycle == Lifecycle::Undecided(known) {
            self.observe(Observation::Decidable);
        }
    }

    /// The state after this observation becomes its state.
    fn observe(&mut self, observation: Observation) -> Action {
        let (next, action) = lifecycle::step(self.lifecycle, observation);
        if action == Action::Refuse {
            tracing::error!(volume.id = %self.record.id, state = ?self.lifecycle, ?observation,
                "a defect of the driver: this observation is impossible in the volume's state");
        }
        self.lifecycle = next;
        action
    }
}

/// An operation that is running.
#[derive(Debug, Default)]
struct Operation {
    /// It is the driver's own work, which is soon done: callers wait for it.
    is_chore: bool,
    /// The parent of the volume that it publishes, also while it waits for space.
    wants: Option<ArtifactId>,
}

/// All inline volumes.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    /// Those that their pods have, or are about to get.
    live: HashMap<VolumeId, Volume>,
    /// Retired volumes, which their pods have released, by the name of their directory in
    /// `pending/` or `trash/`. The id of such a volume may be published again.
    retiring: HashMap<LayerId, Volume>,
    /// Those on volumes, persistent volumes and snapshots.
    operations: HashMap<VolumeId, Operation>,
    /// Layers that processes may still read though no volume names them any more.
    retained: HashMap<LayerId, Vec<LayerId>>,
    /// Artifacts whose forks may be volumes with damaged records (`orphans`).
    maybe_forked: HashSet<ArtifactId>,
    /// How many volumes with damaged records may be in use.
    orphans: usize,
    /// Names that volumes are about to get, or no longer.
    changes: NameChanges,
}

/// Volumes that their pods have.
impl Volumes {
    pub(super) fn live(&self, id: &VolumeId) -> Option<&Volume> {
        self.live.get(id)
    }

    pub(super) fn live_mut(&mut self, id: &VolumeId) -> Option<&mut Volume> {
        self.live.get_mut(id)
    }

    pub(super) fn all_live(&self) -> impl Iterator<Item = &Volume> {
        self.live.values()
    }

    /// Whether the teardown of a volume waits for space.
    pub(super) fn has_deferred(&self) -> bool {
        let deferred = |volume: &Volume| volume.lifecycle == Lifecycle::TeardownDeferred;
        self.live.values().any(deferred)
    }

    pub(super) fn all_live_mut(&mut self) -> impl Iterator<Item = &mut Volume> {
        self.live.values_mut()
    }

    /// Enters a volume that a publish is about to make. Its parent's layers stay from here on.
    pub(super) fn prepare(&mut self, record: VolumeRecord) {
        self.changes.note_seal(&record);
        let volume = Volume::found(record, Lifecycle::Preparing, None);
        self.add_live(volume);
    }

    /// Enters a volume that has its pod.
    pub(super) fn add_live(&mut self, volume: Volume) {
        self.live.insert(volume.record.id.clone(), volume);
    }

    /// A publish mounted it, and wrote this record.
    pub(super) fn mounted(&mut self, record: VolumeRecord, mount: u64) {
        if let Some(volume) = self.live.get_mut(&record.id) {
            volume.observe(Observation::Mounted(mount));
            volume.record = record;
        }
    }

    /// What follows from an observation. A volume that is not there needs nothing.
    pub(super) fn observe(&mut self, id: &VolumeId, observation: Observation) -> Action {
        let Some(volume) = self.live.get_mut(id) else {
            return Action::Nothing;
        };
        let action = volume.observe(observation);
        if action == Action::Forget
            && let Some(volume) = self.live.remove(id)
        {
            self.changes.note_seal(&volume.record);
        }
        action
    }

    /// Its directory is now in `pending/` or `trash/` under the name of `key`.
    pub(super) fn retired(
        &mut self,
        id: &VolumeId,
        key: LayerId,
        goal: Goal,
        due: Timestamp,
    ) -> Action {
        let action = self.observe(id, Observation::Retired(goal));
        if action == Action::Quiesce
            && let Some(mut volume) = self.live.remove(id)
        {
            // The outcome may have been told since the move.
            volume.due = volume.due.max(Some(due));
            self.changes.note_seal(&volume.record);
            self.retiring.insert(key, volume);
        }
        action
    }
}

/// Volumes that their pods are done with.
impl Volumes {
    pub(super) fn retiring(&self, key: LayerId) -> Option<&Volume> {
        self.retiring.get(&key)
    }

    pub(super) fn all_retiring(&self) -> impl Iterator<Item = (LayerId, &Volume)> {
        self.retiring.iter().map(|(key, volume)| (*key, volume))
    }

    /// Enters one that a start found.
    pub(super) fn add_retiring(&mut self, key: LayerId, volume: Volume) {
        self.retiring.insert(key, volume);
    }

    /// The same as [`Volumes::observe`], for a retired volume.
    pub(super) fn observe_retiring(&mut self, key: LayerId, observation: Observation) -> Action {
        let Some(volume) = self.retiring.get_mut(&key) else {
            return Action::Nothing;
        };
        let action = volume.observe(observation);
        if action == Action::Forget
            && let Some(volume) = self.retiring.remove(&key)
        {
            self.changes.note_seal(&volume.record);
        }
        action
    }

    /// Keeps the layers of the artifact that it is becoming.
    pub(super) fn choose(&mut self, key: LayerId, layers: &[LayerId]) {
        if let Some(volume) = self.retiring.get_mut(&key) {
            volume.chosen = layers.to_vec();
        }
    }

    pub(super) fn retiring_mut(&mut self, key: LayerId) -> Option<&mut Volume> {
        self.retiring.get_mut(&key)
    }

    /// Those that are in `pending/`: their content may become an artifact.
    pub(super) fn seals(&self) -> impl Iterator<Item = (LayerId, &Volume, &SealPlan)> {
        let all = self.all_retiring();
        all.filter_map(|(key, volume)| Some((key, volume, volume.seal_intent()?)))
    }
}

/// Whether the policies as they are do not let this volume be committed.
fn is_refused(record: &VolumeRecord, policies: &Policies) -> bool {
    let plan = record.seal.as_ref();
    plan.is_some_and(|plan| policies.commit_of(plan, record) == CommitRight::NotAllowed)
}

/// Content that volumes are about to become.
impl Volumes {
    /// The names of content that volumes may become and that other nodes may get, each with its
    /// fence; some twice.
    pub(super) fn names_coming(&self, policies: &Policies) -> impl Iterator<Item = (Name, u64)> {
        let seals = self.seals().map(|(_, volume, _)| volume);
        let records = seals.chain(self.live.values()).map(|volume| &volume.record);
        let records = records.filter(|record| !is_refused(record, policies));
        records.filter_map(|record| {
            let plan = record.seal.as_ref().filter(|plan| !plan.never_shared)?;
            Some((plan.name(&record.tenant), plan.fence))
        })
    }

    /// Notes the names that volumes may become only before or only after this change. Volumes that
    /// wait for policies can be decided.
    pub(super) fn policies_changed(&mut self, before: &Policies, after: &Policies) {
        for volume in self.live.values().chain(self.retiring.values()) {
            let record = &volume.record;
            if is_refused(record, before) != is_refused(record, after) {
                self.changes.note_seal(record);
            }
        }
        if after.are_known() {
            let retiring = self.retiring.values_mut();
            retiring.for_each(|volume| volume.learn(Missing::Policies));
        }
    }

    /// The lowest fence of a volume that may be committed.
    pub(super) fn oldest_fence(&self) -> Option<u64> {
        let plans = self.records().filter_map(|record| record.seal.as_ref());
        plans.map(|plan| plan.fence).min()
    }

    /// The names of which [`Volumes::names_coming`] may have changed.
    pub(super) fn changes(&mut self) -> &mut NameChanges {
        &mut self.changes
    }

    /// How far content of this name is, in words; `None`: no volume becomes it. A pod does not wait
    /// for itself: its own output is sealed only after its end. `least`: volumes with a lower fence
    /// are not committed. Nor are those of pods that may not commit.
    pub(super) fn coming(
        &self,
        name: &Name,
        least: u64,
        asking: &PodUid,
        policies: &Policies,
    ) -> Option<String> {
        let makes = |volume: &&Volume| {
            let record = &volume.record;
            let plan = record.seal.as_ref();
            record.tenant == name.tenant
                && record.pod.uid != *asking
                && plan.is_some_and(|it| it.reference == name.reference && it.fence >= least)
                && !is_refused(record, policies)
        };
        let seals = self.seals().map(|(_, volume, _)| volume);
        let mut all = seals.chain(self.live.values()).filter(makes);
        all.next().map(|volume| {
            let pod = &volume.record.pod.name;
            let lacks_policies = volume.lifecycle == Lifecycle::Undecided(Missing::Policies);
            match volume.state() {
                VolumeState::AwaitingOutcome if lacks_policies => {
                    "this node does not know the cluster's cache policies yet".to_owned()
                }
                VolumeState::AwaitingOutcome => {
                    format!("the outcome of pod {pod} is not known yet")
                }
                VolumeState::InUse => format!("a process of pod {pod} still holds it open"),
                VolumeState::Sealing => format!("what pod {pod} made is being sealed"),
                VolumeState::Preparing | VolumeState::Published | VolumeState::Unpublished => {
                    format!("pod {pod} is still making it")
                }
            }
        })
    }
}

/// Operations: at most one works on a volume, persistent volume or snapshot.
impl Volumes {
    /// Reserves it for one operation.
    pub(super) fn begin(&mut self, id: &VolumeId) -> Result<()> {
        match self.operations.entry(id.clone()) {
            Entry::Occupied(_) => Err(Error::Busy(id.clone())),
            Entry::Vacant(free) => {
                free.insert(Operation::default());
                Ok(())
            }
        }
    }

    /// The operation goes on without its caller.
    pub(super) fn becomes_a_chore(&mut self, id: &VolumeId) {
        if let Some(operation) = self.operations.get_mut(id) {
            operation.is_chore = true;
        }
    }

    pub(super) fn is_chore(&self, id: &VolumeId) -> bool {
        let operation = self.operations.get(id);
        operation.is_some_and(|operation| operation.is_chore)
    }

    /// The operation on it is over.
    pub(super) fn end(&mut self, id: &VolumeId) {
        self.operations.remove(id);
    }

    /// Those that an operation works on.
    pub(super) fn busy(&self) -> impl Iterator<Item = &VolumeId> {
        self.operations.keys()
    }

    /// Keeps an artifact for the operation that publishes this volume.
    pub(super) fn want(&mut self, id: &VolumeId, parent: ArtifactId) {
        if let Some(operation) = self.operations.get_mut(id) {
            operation.wants = Some(parent);
        }
    }
}

/// References: layers and artifacts that must stay because of volumes.
impl Volumes {
    /// All volumes, also those that their pods are done with.
    pub(super) fn all(&self) -> impl Iterator<Item = &Volume> {
        self.live.values().chain(self.retiring.values())
    }

    /// The records of all volumes.
    pub(super) fn records(&self) -> impl Iterator<Item = &VolumeRecord> {
        self.all().map(|volume| &volume.record)
    }

    /// All layers that must stay, some of them twice.
    pub(super) fn layers(&self) -> impl Iterator<Item = &LayerId> {
        let chosen = self.retiring.values().flat_map(|volume| &volume.chosen);
        let mounted = self.records().flat_map(|record| &record.layers);
        let retained = self.retained.values().flatten();
        chosen.chain(mounted).chain(retained)
    }

    /// The artifacts that volumes were forked from, are about to be, or may have been.
    pub(super) fn parents(&self) -> impl Iterator<Item = ArtifactId> {
        let parents = self.records().filter_map(|record| record.parent);
        let wanted = self
            .operations
            .values()
            .filter_map(|operation| operation.wants);
        parents
            .chain(wanted)
            .chain(self.maybe_forked.iter().copied())
    }

    /// How many volumes were forked from each artifact.
    pub(super) fn fork_counts(&self) -> HashMap<ArtifactId, usize> {
        let mut counts = HashMap::new();
        for parent in self.records().filter_map(|record| record.parent) {
            *counts.entry(parent).or_default() += 1;
        }
        counts
    }

    /// Keeps layers that processes may still read.
    pub(super) fn retain(&mut self, key: LayerId, layers: Vec<LayerId>) {
        self.retained.insert(key, layers);
    }

    /// No process reads them any more.
    pub(super) fn release(&mut self, key: LayerId) {
        self.retained.remove(&key);
    }

    pub(super) fn retains(&self, key: LayerId) -> bool {
        self.retained.contains_key(&key)
    }

    pub(super) fn retains_any(&self) -> bool {
        !self.retained.is_empty()
    }

    /// How many volumes with damaged records may be in use.
    pub(super) fn orphans(&self) -> usize {
        self.orphans
    }

    /// So many volumes with damaged records may be in use.
    pub(super) fn add_orphans(&mut self, count: usize) {
        self.orphans += count;
    }

    /// Any of these may have a fork among the volumes with damaged records.
    pub(super) fn may_be_forked(&mut self, artifacts: impl Iterator<Item = ArtifactId>) {
        self.maybe_forked.extend(artifacts);
    }
}
