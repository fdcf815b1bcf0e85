//! Flattening: the newest layers of a stack that grew long become one layer of the same content.
//!
//! Artifacts, claims and snapshots that begin with the same layers get the merged one together, in one transaction. A claim
//! that is mounted, or that a process may still hold open, keeps what it is mounted over. On the thread for walks: a merge
//! takes as long as its tenants decide, and only its last step, which enters it, holds the collector.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claims::data_dir;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::guard::Guard;
use super::layers::{self, trash_unreferenced};
use super::pins::Pins;
use super::shared::Inner;
use super::shared::SHARE;
use super::state::State;
use super::transaction::Transaction;
use crate::backend::{self, Stop, Usage};
use crate::model::{
    Artifact, LayerId, LayerRecord, PersistentVolume, Snapshot, VolumeId, flatten_plan,
};
use crate::store::{self, Change};

/// The most time that one merge is given, which is some ten million files.
const LARGEST_SHARE: Duration = Duration::from_secs(15 * 60);

/// What came of a round of merges.
pub(super) struct Merges {
    /// How many were tried: of each something may lie in the trash.
    pub(super) tried: usize,
    /// How many stacks were merged.
    pub(super) done: usize,
    /// The first failure.
    pub(super) result: Result<()>,
}

/// Merges the newest layers of stacks that grew long. One that fails is in no other one's way, and nor is one that takes long, which its
/// tenant decides: it is stopped and tried again later with more time, and with more each time, so that it is merged in the end. By its
/// lowest layer it is known again, since a cache in use is another stack by then.
pub(super) fn flatten(inner: &Arc<Inner>) -> Merges {
    let began = Instant::now();
    let (mut tried, mut done) = (0, 0);
    let mut failure = None;
    let mut not_now = unmerged(inner);
    let mut slow = {
        let state = inner.state.lock();
        inner
            .collector
            .slow
            .waiting(|lowest| state.is_stacked(lowest))
    };
    while inner.backend.stacks() && !inner.lifetime.is_stopping() {
        let next = choose(inner, &not_now, &slow);
        let Some((stack, count, pins)) = next else {
            break;
        };
        let Some(lowest) = stack.last() else { break };
        if tried > 0 && began.elapsed() > SHARE {
            // Others first, that wait for this thread.
            inner.collector.wake_walker();
            break;
        }
        tried += 1;
        let share =
            SHARE.saturating_mul(4_u32.saturating_pow(inner.collector.slow.failures(lowest)));
        let share = share.min(LARGEST_SHARE);
        let merging = Merging::begin(inner, &stack[..count]);
        // An eviction before `begin` has not stopped the merge.
        if !is_stacked(&inner.state.lock(), &stack) {
            continue;
        }
        let patience = inner.patience_of(share);
        let merged = merge(inner, &stack, count, pins, &|| {
            patience() || merging.is_over()
        });
        let gives_way = merging.is_over();
        drop(merging);
        match merged {
            Ok(true) => {
                inner.collector.slow.forget(lowest);
                done += 1;
            }
            Err(Error::Backend {
                source: backend::Error::Stopped,
                ..
            }) => {
                if inner.lifetime.is_stopping() {
                    break;
                }
                if gives_way {
                    // What it kept can go.
                    inner.wake_reaper();
                    continue;
                }
                let pause = inner.collector.slow.put_off(lowest);
                tracing::warn!(
                    layers = stack.len(),
                    ?share,
                    ?pause,
                    "a stack of layers takes long to merge: others have their turn, and then it has more time"
                );
                slow.insert(*lowest);
            }
            // It came into use while it was merged: later, and not in the very next round, or others never have theirs.
            Ok(false) => {
                inner.collector.unmerged.put_off(&stack);
                not_now.insert(stack);
            }
            Err(error) => {
                let pause = inner.collector.unmerged.put_off(&stack);
                tracing::warn!(%error, layers = stack.len(), ?pause, "a stack of layers could not be merged");
                not_now.insert(stack);
                let is_full = matches!(error, Error::Full(_));
                failure.get_or_insert(error);
                if is_full {
                    break;
                }
            }
        }
    }
    let result = failure.map_or(Ok(()), Err);
    Merges {
        tried,
        done,
        result,
    }
}

/// Stacks whose merge failed, and that this round leaves alone. A setback is forgotten when nothing
/// stacks the top layer any more.
fn unmerged(inner: &Inner) -> HashSet<Vec<LayerId>> {
    let state = inner.state.lock();
    let is_there = |stack: &Vec<LayerId>| stack.first().is_some_and(|top| state.is_stacked(top));
    inner.collector.unmerged.waiting(is_there)
}

/// The longest stack that is to be merged next, how many of its newest layers, and these layers pinned.
fn choose(
    inner: &Arc<Inner>,
    not_now: &HashSet<Vec<LayerId>>,
    slow: &HashSet<LayerId>,
) -> Option<(Vec<LayerId>, usize, Pins)> {
    let mut pins = Pins::none(inner);
    loop {
        let (stack, count) = longest(inner, not_now, slow)?;
        let mut state = inner.state.lock();
        // Its last owner may have gone since the look.
        if is_stacked(&state, &stack) {
            pins.add(&mut state, &stack[..count]);
            drop(state);
            return Some((stack, count, pins));
        }
    }
}

/// Whether an artifact, claim or snapshot still stacks each of these layers.
fn is_stacked(state: &State, stack: &[LayerId]) -> bool {
    stack.iter().all(|layer| state.is_stacked(layer))
}

/// The longest stack that is to be merged, none of those that are left alone for now, and how many of its newest layers.
fn longest(
    inner: &Inner,
    not_now: &HashSet<Vec<LayerId>>,
    slow: &HashSet<LayerId>,
) -> Option<(Vec<LayerId>, usize)> {
    let mut longest: Option<(Vec<LayerId>, usize)> = None;
    let mut look = |state: &State, stack: &Vec<LayerId>| {
        let is_longer = longest
            .as_ref()
            .is_none_or(|(known, _)| known.len() < stack.len());
        let is_slow = stack.last().is_some_and(|lowest| slow.contains(lowest));
        if !is_longer || is_slow || not_now.contains(stack) {
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
        // Anew: until there was the guard it may have changed.
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

/// A merge of layers that others may want to free: then it is over before it is done ([`stop_merging`]).
struct Merging<'a>(&'a Inner);

impl<'a> Merging<'a> {
    fn begin(inner: &'a Inner, layers: &[LayerId]) -> Self {
        *inner.collector.merging.lock() = layers.iter().copied().collect();
        Self(inner)
    }

    fn is_over(&self) -> bool {
        self.0.collector.merging.lock().is_empty()
    }
}

impl Drop for Merging<'_> {
    fn drop(&mut self) {
        self.0.collector.merging.lock().clear();
    }
}

/// These layers were an artifact's that is gone. If a merge has some of them, and no stack needs what it merges any more, it stops.
pub(super) fn stop_merging<'a>(inner: &Inner, layers: impl Iterator<Item = &'a LayerId>) {
    let mut merging = inner.collector.merging.lock();
    let mut layers = layers;
    if !layers.any(|layer| merging.contains(layer)) {
        return;
    }
    let is_needed = {
        let state = inner.state.lock();
        merging.iter().any(|layer| state.is_stacked(layer))
    };
    if !is_needed {
        merging.clear();
    }
}

/// Replaces the newest `count` layers of a stack, which are pinned, by one of the same content, for all that begin with them; `false`:
/// no stack is left for which that may be done.
fn merge(
    inner: &Arc<Inner>,
    stack: &[LayerId],
    count: usize,
    mut pins: Pins,
    stop: Stop<'_>,
) -> Result<bool> {
    let (newest, rest) = stack.split_at(count);
    let (merged, usage) = make(inner, newest, rest, &mut pins, stop)?;
    // Held until the index names it. Taken before the collector: no caller is to wait for the disk there.
    let syncing = inner.durability.lock();
    if let Err(error) = inner.sync(&syncing) {
        throw_away(inner, merged)?;
        return Err(error);
    }
    point(Point::FlattenSynced);
    let collector = inner.collector.lock();
    // What marks of deletion would hide in what is below decides whether they are kept.
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
        tracing::warn!(layer = %merged, %error, "not all is said of it yet; it is when it is measured");
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

/// Gives all of them the merged layer for their newest `count`: in the index, then in the state. What is known to have failed leaves nothing.
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
    let thrown = inner.throw_away(&inner.dirs.layers, merged.to_string().as_ref());
    thrown.context("throw a merged layer away").map(drop)
}

/// Says in the merged layer that it is named, and only then in the index what it costs: what is not measured is confirmed when it is.
fn confirm(inner: &Inner, merged: LayerId, usage: Usage) -> Result<()> {
    layers::confirm(inner, merged)?;
    inner.state.lock().catalog.set_usage(merged, usage);
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
    let merged = LayerId::from_bits(inner.random());
    pins.add(&mut inner.state.lock(), &[merged]);
    let name = merged.to_string();
    let incoming = &inner.dirs.incoming;
    incoming
        .create_dir(&name, 0o700)
        .context("make a merged layer")?;
    let result = (|| {
        let into = incoming
            .open_beneath(&name)
            .context("open a merged layer")?;
        inner
            .backend
            .flatten(newest, &into, rest.is_empty(), stop)
            .context("merge layers")?;
        let record = LayerRecord {
            format: LayerRecord::FORMAT,
            id: merged,
            artifact: artifact(inner, newest, rest, merged),
            claim: None,
        };
        store::write_sealing(&into, &record).context("write a merged layer's record")?;
        point(Point::FlattenMerged);
        let usage = inner.backend.usage(&into, stop);
        let usage = usage.context("measure a merged layer")?;
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
                .context("look for a half-merged layer")?
            {
                incoming
            } else {
                &inner.dirs.layers
            };
            inner
                .throw_away(from, name.as_ref())
                .context("throw a half-merged layer away")?;
            Err(error)
        }
    }
}

/// The artifact of exactly this stack, if there is one, as it will be: what makes the index anew needs to know.
fn artifact(
    inner: &Inner,
    newest: &[LayerId],
    rest: &[LayerId],
    merged: LayerId,
) -> Option<Artifact> {
    let mut found = None;
    inner.look_at_artifacts(|_, sealed| {
        let layers = sealed.artifact.layers.strip_prefix(newest);
        if layers == Some(rest) && found.is_none() {
            found = Some(sealed.artifact.clone());
        }
    });
    let found = found?;
    let layers = std::iter::once(merged)
        .chain(rest.iter().copied())
        .collect();
    Some(Artifact { layers, ..found })
}
