//! Flattening: the newest layers of a stack that grew long become one layer of the same content.
//!
//! Artifacts, claims and snapshots that begin with the same layers get the merged one together, in
//! one transaction. A claim that is mounted, or that a process may still hold open, keeps what it
//! is mounted over. Merges have a thread of their own, because the size of the content decides how
//! long a merge takes. Only the last step, the transaction, holds the collector.

use std::cell::Cell;
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claims::data_dir;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::guard::Guard;
use super::layers::{self, tell_sizes, trash_unreferenced};
use super::pins::Pins;
use super::shared::Inner;
use super::state::State;
use super::transaction::Transaction;
use crate::backend::{self, Stop, Usage};
use crate::model::{
    Artifact, LayerId, LayerRecord, PersistentVolume, Snapshot, VolumeId, flatten_plan,
};
use crate::store::{self, Change};
use crate::sys;

/// The most time that one merge is given, which is some ten million files. Then others have their
/// turn.
const LONGEST: Duration = Duration::from_secs(15 * 60);

/// How often a merge looks whether something still needs what it merges.
const LOOK: Duration = Duration::from_millis(50);

/// The result of a round of merges.
#[derive(Default)]
pub(super) struct Merges {
    /// How many were tried. Each may have left something in the trash.
    pub(super) tried: usize,
    /// How many stacks were merged.
    pub(super) done: usize,
    /// The first failure.
    pub(super) failure: Option<Error>,
    /// Stacks that this round leaves alone because their merge came to nothing, or their lowest
    /// layers.
    not_now: HashSet<Vec<LayerId>>,
}

/// A stack that is to be merged.
struct Next {
    stack: Vec<LayerId>,
    /// How many of its newest layers.
    count: usize,
    lowest: LayerId,
    /// Keeps these layers.
    pins: Pins,
}

/// Merges the newest layers of stacks that grew long. A merge that fails or takes too long delays
/// no other one for longer than [`LONGEST`]: it is tried again later.
pub(super) fn flatten(inner: &Arc<Inner>) -> Merges {
    let mut merges = Merges::begin(inner);
    while inner.backend.stacks() && !inner.lifetime.is_stopping() {
        let Some(next) = choose(inner, &merges) else {
            break;
        };
        merges.tried += 1;
        if merges.try_one(inner, next).is_break() {
            break;
        }
    }
    merges
}

impl Merges {
    /// A setback is forgotten when nothing stacks the layer any more that it is known by.
    fn begin(inner: &Inner) -> Self {
        let state = inner.state.lock();
        let is_top = |stack: &Vec<LayerId>| stack.first().is_some_and(|top| state.is_stacked(top));
        Self {
            not_now: inner.collector.unmerged.waiting(is_top),
            ..Self::default()
        }
    }

    /// A round that ended by a defect.
    pub(super) fn failed(error: Error) -> Self {
        Self {
            failure: Some(error),
            ..Self::default()
        }
    }

    /// Merges one stack; whether the round goes on.
    fn try_one(&mut self, inner: &Arc<Inner>, next: Next) -> ControlFlow<()> {
        let patience = inner.patience_of(LONGEST);
        let is_unneeded = || !is_stacked(&inner.state.lock(), &next.stack);
        let looked = Cell::new(Instant::now());
        let seldom = || {
            looked.get().elapsed() > LOOK && {
                looked.set(Instant::now());
                is_unneeded()
            }
        };
        let stop = || patience() || seldom();
        let layers = next.stack.len();
        let error = match merge(inner, &next.stack, next.count, next.pins, &stop) {
            Ok(true) => {
                inner.collector.unmerged.forget(&vec![next.lowest]);
                self.done += 1;
                return ControlFlow::Continue(());
            }
            // The stack came into use during the merge. It is tried again later, not in the next
            // round, so that other stacks get their turn.
            Ok(false) => {
                self.leave_alone(inner, next.stack);
                return ControlFlow::Continue(());
            }
            Err(error) => error,
        };
        if error.is_stopped() && inner.lifetime.is_stopping() {
            return ControlFlow::Break(());
        }
        if error.is_stopped() && is_unneeded() {
            // Only the merge kept its layers. They can go now.
            inner.wake_reaper();
            return ControlFlow::Continue(());
        }
        let pause = self.leave_alone(inner, vec![next.lowest]);
        tracing::warn!(%error, layers, ?pause,
            "a stack of layers could not be merged; retrying after the pause");
        if error.is_stopped() {
            return ControlFlow::Continue(());
        }
        let is_full = matches!(error, Error::Full(_));
        self.failure.get_or_insert(error);
        if is_full {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn leave_alone(&mut self, inner: &Inner, stack: Vec<LayerId>) -> Duration {
        let pause = inner.collector.unmerged.put_off(&stack);
        self.not_now.insert(stack);
        pause
    }

    /// Whether this round leaves the stack alone.
    fn leaves_alone(&self, stack: &[LayerId]) -> bool {
        let lowest = &stack[stack.len().saturating_sub(1)..];
        self.not_now.contains(stack) || self.not_now.contains(lowest)
    }
}

/// The longest stack that is to be merged next.
fn choose(inner: &Arc<Inner>, merges: &Merges) -> Option<Next> {
    let mut pins = Pins::none(inner);
    loop {
        let (stack, count) = longest(inner, merges)?;
        let lowest = *stack.last()?;
        let mut state = inner.state.lock();
        // Its last owner may have gone since the look.
        if is_stacked(&state, &stack) {
            pins.add(&mut state, &stack[..count]);
            drop(state);
            return Some(Next {
                stack,
                count,
                lowest,
                pins,
            });
        }
    }
}

/// Whether an artifact, claim or snapshot still stacks each of these layers.
fn is_stacked<'a>(state: &State, stack: impl IntoIterator<Item = &'a LayerId>) -> bool {
    let mut stack = stack.into_iter();
    stack.all(|layer| state.is_stacked(layer))
}

/// The longest stack that is to be merged, none of those that are left alone for now, and how many
/// of its newest layers.
fn longest(inner: &Inner, merges: &Merges) -> Option<(Vec<LayerId>, usize)> {
    let mut longest: Option<(Vec<LayerId>, usize)> = None;
    let mut look = |state: &State, stack: &Vec<LayerId>| {
        let is_longer = longest
            .as_ref()
            .is_none_or(|(known, _)| known.len() < stack.len());
        if !is_longer || merges.leaves_alone(stack) {
            return;
        }
        let directories = |layer| {
            state
                .catalog
                .usage(layer)
                .map_or(1, |usage: Usage| usage.directories)
        };
        let directories: Vec<u64> = stack.iter().map(directories).collect();
        if let Some(count) = flatten_plan(&directories) {
            longest = Some((stack.clone(), count));
        }
    };
    inner.look_at_artifacts(|state, sealed| {
        let artifact = &sealed.artifact;
        // Most artifacts have one layer: they need no look at their name.
        if artifact.layers.len() > 1 && sealed.durable && state.catalog.is_named(artifact) {
            look(state, &artifact.layers);
        }
    });
    let state = inner.state.lock();
    let claims = state.claims.values().filter(|held| held.is_quiescent());
    claims.for_each(|held| look(&state, &held.claim.layers));
    let snapshots = state.claims.snapshots().values();
    snapshots.for_each(|snapshot| look(&state, &snapshot.layers));
    longest
}

/// Whose stacks begin with the same layers.
#[derive(Debug, Default)]
struct Holders {
    artifacts: Vec<Artifact>,
    claims: Vec<PersistentVolume>,
    snapshots: Vec<Snapshot>,
}

impl Holders {
    /// The claims and snapshots whose layers fit. Claims in use are left out.
    fn besides_artifacts(state: &State, fits: impl Fn(&[LayerId]) -> bool) -> Self {
        let claims = state.claims.values().filter(|held| held.is_quiescent());
        let claims = claims.map(|held| &held.claim);
        let claims = claims.filter(|claim| fits(&claim.layers));
        let snapshots = state.claims.snapshots().values();
        let snapshots = snapshots.filter(|snapshot| fits(&snapshot.layers));
        Self {
            artifacts: Vec::new(),
            claims: claims.cloned().collect(),
            snapshots: snapshots.cloned().collect(),
        }
    }

    /// Everything whose layers fit, with a guard of each claim and snapshot: no other operation may
    /// write those meanwhile. A claim or snapshot without a guard is left out. An artifact that is
    /// sealed during the search may be left out, too; it keeps its layers.
    fn take(inner: &Arc<Inner>, fits: impl Fn(&[LayerId]) -> bool) -> (Self, Vec<Guard>) {
        let found = Self::besides_artifacts(&inner.state.lock(), &fits);
        let claims = found.claims.iter().map(|claim| &claim.id);
        let snapshots = found.snapshots.iter().map(|snapshot| &snapshot.id);
        let guards = claims.chain(snapshots);
        let guards = guards.filter_map(|id| Guard::take_for_chore(inner, id).ok());
        let guards: Vec<Guard> = guards.collect();
        let held = |id: &VolumeId| guards.iter().any(|guard| guard.volume == *id);
        // Read again: it may have changed before the guard was there.
        let mut holders = Self::besides_artifacts(&inner.state.lock(), &fits);
        holders.claims.retain(|claim| held(&claim.id));
        holders.snapshots.retain(|snapshot| held(&snapshot.id));
        inner.look_at_artifacts(|_, sealed| {
            if sealed.durable && fits(&sealed.artifact.layers) {
                holders.artifacts.push(sealed.artifact.clone());
            }
        });
        (holders, guards)
    }

    /// Their stacks.
    fn stacks(&self) -> impl Iterator<Item = &Vec<LayerId>> {
        let artifacts = self.artifacts.iter().map(|artifact| &artifact.layers);
        let claims = self.claims.iter().map(|claim| &claim.layers);
        let snapshots = self.snapshots.iter().map(|snapshot| &snapshot.layers);
        artifacts.chain(claims).chain(snapshots)
    }

    fn is_empty(&self) -> bool {
        self.stacks().next().is_none()
    }

    /// Replaces the newest `count` layers of all.
    fn replace(&mut self, count: usize, merged: LayerId) {
        let artifacts = self
            .artifacts
            .iter_mut()
            .map(|artifact| &mut artifact.layers);
        let claims = self.claims.iter_mut().map(|claim| &mut claim.layers);
        let snapshots = self
            .snapshots
            .iter_mut()
            .map(|snapshot| &mut snapshot.layers);
        for layers in artifacts.chain(claims).chain(snapshots) {
            layers.splice(..count, [merged]);
        }
    }

    fn changes(&self) -> Vec<Change> {
        let artifacts = self.artifacts.iter().cloned().map(Change::PutArtifact);
        let claims = self.claims.iter().cloned().map(Change::PutClaim);
        let snapshots = self.snapshots.iter().cloned().map(Change::PutSnapshot);
        artifacts.chain(claims).chain(snapshots).collect()
    }

    fn enter(&self, state: &mut State) {
        for artifact in &self.artifacts {
            state.catalog.restack(&artifact.id, &artifact.layers);
        }
        for claim in &self.claims {
            if let Some(held) = state.claims.get_mut(&claim.id) {
                held.claim.layers.clone_from(&claim.layers);
            }
        }
        for snapshot in &self.snapshots {
            state.claims.put_snapshot(snapshot.clone());
        }
    }
}

/// Replaces the newest `count` layers of a stack, which are pinned, by one of the same content, for
/// all that begin with them; `false`: no stack is left for which that may be done.
fn merge(
    inner: &Arc<Inner>,
    stack: &[LayerId],
    count: usize,
    mut pins: Pins,
    stop: Stop<'_>,
) -> Result<bool> {
    let (newest, rest) = stack.split_at(count);
    let began = inner.now();
    let (merged, usage) = make(inner, newest, rest, &mut pins, stop)?;
    // Held until the index names it. Taken before the collector: no caller is to wait for the disk
    // there.
    let syncing = inner.durability.lock();
    // The kernel may have told another caller of a failure to write a part of it.
    let synced = inner.sync(&syncing);
    let whole = synced.and_then(|()| inner.state.lock().write_back.refuse_tainted_since(began));
    if let Err(error) = whole {
        throw_away(inner, merged)?;
        return Err(error);
    }
    point(Point::FlattenSynced);
    let collector = inner.collector.lock();
    // Whiteouts are kept only if there are layers below that they hide something in.
    let bottom = rest.is_empty();
    let fits = |layers: &[LayerId]| layers.starts_with(newest) && (layers.len() == count) == bottom;
    let (mut holders, guards) = Holders::take(inner, fits);
    if holders.is_empty() {
        throw_away(inner, merged)?;
        return Ok(false);
    }
    give(inner, &mut holders, count, merged)?;
    drop(syncing);
    if let Err(error) = confirm(inner, merged, usage) {
        tracing::warn!(layer = %merged, %error,
            "the merged layer could not be confirmed; this is tried again when it is measured");
    }
    // An upload may have ended after `make` wrote the record.
    for artifact in &holders.artifacts {
        layers::note_sharing(inner, artifact);
    }
    point(Point::FlattenConfirmed);
    let stacks = holders.stacks().count();
    tracing::info!(layer = %merged, layers = count, stacks, "merged layers");
    for claim in &holders.claims {
        data_dir::restack(inner, &claim.id);
    }
    drop((pins, guards));
    trash_unreferenced(inner, newest);
    drop(collector);
    Ok(true)
}

/// Gives all of them the merged layer for their newest `count`: in the index, then in the state.
/// What is known to have failed leaves nothing.
fn give(inner: &Inner, holders: &mut Holders, count: usize, merged: LayerId) -> Result<()> {
    holders.replace(count, merged);
    match inner.transact(&holders.changes()) {
        Transaction::Committed => {}
        Transaction::RolledBack(error) => {
            throw_away(inner, merged)?;
            return Err(error);
        }
        Transaction::InDoubt(error) => return Err(error),
    }
    point(Point::FlattenIndexed);
    holders.enter(&mut inner.state.lock());
    Ok(())
}

fn throw_away(inner: &Inner, merged: LayerId) -> Result<()> {
    let name = merged.to_string();
    let thrown = inner.throw_away(&inner.dirs.layers, name.as_ref());
    thrown.context("move a merged layer to trash/").map(drop)
}

/// Confirms the merged layer in its record, and only then writes its size to the index. A layer
/// without a size is confirmed when it is measured.
fn confirm(inner: &Inner, merged: LayerId, usage: Usage) -> Result<()> {
    layers::confirm(inner, merged)?;
    inner.state.lock().catalog.set_usage(merged, usage);
    tell_sizes(inner, &HashSet::from([merged]));
    let measured = inner.transact(&[Change::PutLayer(merged, usage)]);
    measured.result()
}

/// Makes the merged layer, in its place. It is pinned: nothing names it yet.
fn make(
    inner: &Inner,
    newest: &[LayerId],
    rest: &[LayerId],
    pins: &mut Pins,
    stop: Stop<'_>,
) -> Result<(LayerId, Usage)> {
    let merged = LayerId::from_bits(sys::random());
    pins.add(&mut inner.state.lock(), &[merged]);
    let name = merged.to_string();
    let incoming = &inner.dirs.incoming;
    let into = incoming.make_dir(&name, 0o700);
    let into = into.context("make a merged layer")?;
    let result = (|| {
        inner
            .backend
            .flatten(newest, &into, rest.is_empty(), stop)
            .context("merge layers")?;
        let record = LayerRecord::of(merged, artifact(inner, newest, rest, merged), None);
        store::write_sealing(&into, &record).context("write a merged layer's record")?;
        point(Point::FlattenMerged);
        let usage = inner.backend.usage(&into, stop);
        let usage = usage.context("measure a merged layer")?;
        // Asked once more: most merges end before `stop` looks for the first time.
        let is_needed = is_stacked(&inner.state.lock(), newest.iter().chain(rest));
        if !is_needed {
            return Err(backend::Error::Stopped).context("merge layers");
        }
        incoming
            .rename(&name, &inner.dirs.layers, &name)
            .context("place a merged layer")?;
        point(Point::FlattenPlaced);
        Ok(usage)
    })();
    match result {
        Ok(usage) => Ok((merged, usage)),
        Err(error) => {
            let from = if incoming
                .has(&name)
                .context("look for an incomplete merged layer")?
            {
                incoming
            } else {
                &inner.dirs.layers
            };
            let thrown = inner.throw_away(from, name.as_ref());
            thrown.context("move an incomplete merged layer to trash/")?;
            Err(error)
        }
    }
}

/// The durable artifact of exactly this stack, as it will be after the merge. The layer's record
/// names it for a rebuilt index.
fn artifact(
    inner: &Inner,
    newest: &[LayerId],
    rest: &[LayerId],
    merged: LayerId,
) -> Option<Artifact> {
    let mut found = None;
    inner.look_at_artifacts(|_, sealed| {
        let layers = sealed.artifact.layers.strip_prefix(newest);
        if sealed.durable && layers == Some(rest) && found.is_none() {
            found = Some(sealed.artifact.clone());
        }
    });
    let found = found?;
    let layers = std::iter::once(merged)
        .chain(rest.iter().copied())
        .collect();
    Some(Artifact { layers, ..found })
}
