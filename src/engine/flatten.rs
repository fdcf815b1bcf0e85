//! Flattening: the newest layers of a stack that grew long become one layer of the same content.
//!
//! Artifacts, claims and snapshots that begin with the same layers get the merged one together, in one transaction. A claim
//! that somebody has mounted, or may still hold open, keeps what it is mounted over. On the thread for chores.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::crash::{Point, point};
use super::error::{Doing, Error, Result};
use super::pins::Pins;
use super::state::{Problem, State};
use super::{Guard, Inner, SHARE, claims, commit, reap};
use crate::backend::{self, Stop, Usage};
use crate::model::{Artifact, Claim, LayerId, LayerRecord, Snapshot, VolumeId, flatten_plan};
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
    let mut not_now = inner.unmerged.waiting(inner.state.lock().stacks());
    let mut slow = {
        let state = inner.state.lock();
        let lowest = state.stacks().filter_map(|stack| stack.last());
        inner.slow.waiting(lowest)
    };
    while inner.backend.stacks() && !inner.stop.is_cancelled() {
        let next = longest(&inner.state.lock(), &not_now, &slow);
        let Some((stack, count)) = next else { break };
        let Some(lowest) = stack.last() else { break };
        if tried > 0 && began.elapsed() > SHARE {
            // Others first: what waits for this thread, and the steps of the next round.
            inner.wake_reaper();
            break;
        }
        tried += 1;
        let share = SHARE.saturating_mul(4_u32.saturating_pow(inner.slow.failures(lowest)));
        let share = share.min(LARGEST_SHARE);
        match merge(inner, &stack, count, &inner.patience_of(share)) {
            Ok(true) => {
                inner.slow.forget(lowest);
                done += 1;
            }
            Err(Error::Backend {
                source: backend::Error::Stopped,
                ..
            }) => {
                if inner.stop.is_cancelled() {
                    break;
                }
                let pause = inner.slow.put_off(lowest);
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
                inner.unmerged.put_off(&stack);
                not_now.insert(stack);
            }
            Err(error) => {
                let pause = inner.unmerged.put_off(&stack);
                tracing::warn!(%error, layers = stack.len(), ?pause, "a stack of layers could not be merged");
                not_now.insert(stack);
                // Others may be merged now for all that the index says.
                not_now.extend(inner.unmerged.waiting(inner.state.lock().stacks()));
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

/// The longest stack that is to be merged, none of those that are left alone for now, and how many of its newest layers.
fn longest(
    state: &State,
    not_now: &HashSet<Vec<LayerId>>,
    slow: &HashSet<LayerId>,
) -> Option<(Vec<LayerId>, usize)> {
    let artifacts = state.artifacts.values();
    let named = artifacts.filter(|sealed| sealed.durable && state.is_named(&sealed.artifact));
    let named = named.map(|sealed| &sealed.artifact.layers);
    let claims = state.claims.values().filter(|held| held.is_quiescent());
    let claims = claims.map(|held| &held.claim.layers);
    let snapshots = state.snapshots.values().map(|snapshot| &snapshot.layers);
    let stacks = named.chain(claims).chain(snapshots);
    let planned = stacks
        .filter(|stack| !not_now.contains(*stack))
        .filter(|stack| stack.last().is_none_or(|lowest| !slow.contains(lowest)))
        .filter_map(|stack| {
            let directories = |layer| {
                state
                    .usage
                    .get(layer)
                    .map_or(1, |usage: &Usage| usage.directories)
            };
            let directories: Vec<u64> = stack.iter().map(directories).collect();
            Some((stack, flatten_plan(&directories)?))
        });
    let longest = planned.max_by_key(|(stack, _)| stack.len());
    longest.map(|(stack, count)| (stack.clone(), count))
}

/// Whose stacks begin with the same layers.
#[derive(Debug, Default)]
struct Holders {
    artifacts: Vec<Artifact>,
    claims: Vec<Claim>,
    snapshots: Vec<Snapshot>,
}

impl Holders {
    /// Those that `fits` lets in, but for claims that are in use.
    fn find(state: &State, fits: impl Fn(&[LayerId]) -> bool) -> Self {
        let artifacts = state.artifacts.values().filter(|sealed| sealed.durable);
        let artifacts = artifacts.map(|sealed| &sealed.artifact);
        let claims = state.claims.values().filter(|held| held.is_quiescent());
        let claims = claims.map(|held| &held.claim);
        Self {
            artifacts: artifacts
                .filter(|artifact| fits(&artifact.layers))
                .cloned()
                .collect(),
            claims: claims
                .filter(|claim| fits(&claim.layers))
                .cloned()
                .collect(),
            snapshots: state
                .snapshots
                .values()
                .filter(|snapshot| fits(&snapshot.layers))
                .cloned()
                .collect(),
        }
    }

    /// The same, with a guard of each claim and snapshot: of those nothing else may be written meanwhile. One for which there is no guard
    /// is left out.
    fn take(inner: &Arc<Inner>, fits: impl Fn(&[LayerId]) -> bool) -> (Self, Vec<Guard>) {
        let found = Self::find(&inner.state.lock(), &fits);
        let claims = found.claims.iter().map(|claim| &claim.id);
        let snapshots = found.snapshots.iter().map(|snapshot| &snapshot.id);
        let guards = claims.chain(snapshots);
        let guards = guards.filter_map(|id| Guard::take_for_chore(inner, id).ok());
        let guards: Vec<Guard> = guards.collect();
        let held = |id: &VolumeId| guards.iter().any(|guard| guard.volume == *id);
        // Anew: until there was the guard it may have changed.
        let mut holders = Self::find(&inner.state.lock(), &fits);
        holders.claims.retain(|claim| held(&claim.id));
        holders.snapshots.retain(|snapshot| held(&snapshot.id));
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
            if let Some(sealed) = state.artifacts.get_mut(&artifact.id) {
                sealed.artifact.layers.clone_from(&artifact.layers);
            }
        }
        for claim in &self.claims {
            if let Some(held) = state.claims.get_mut(&claim.id) {
                held.claim.layers.clone_from(&claim.layers);
            }
        }
        for snapshot in &self.snapshots {
            state
                .snapshots
                .insert(snapshot.id.clone(), snapshot.clone());
        }
    }

    /// Nothing is written over what the index may have of these claims.
    fn leave_to_the_next_start(&self, state: &mut State) {
        for claim in &self.claims {
            if let Some(held) = state.claims.get_mut(&claim.id) {
                let why = "the index could not be written while its layers were merged; restart the driver";
                held.problem = Some(Problem::Unsure(why.to_owned()));
            }
        }
    }
}

/// Replaces the newest `count` layers of a stack by one of the same content, for all that begin with them; `false`: nobody
/// is there any more for whom that may be done.
fn merge(inner: &Arc<Inner>, stack: &[LayerId], count: usize, stop: Stop<'_>) -> Result<bool> {
    let (newest, rest) = stack.split_at(count);
    let mut pins = Pins::none(inner);
    pins.add(&mut inner.state.lock(), newest);
    let (merged, usage) = make(inner, newest, rest, stop)?;
    // What marks of deletion would hide in what is below decides whether they are kept.
    let bottom = rest.is_empty();
    let fits = |layers: &[LayerId]| layers.starts_with(newest) && (layers.len() == count) == bottom;
    let (mut holders, guards) = Holders::take(inner, fits);
    if holders.is_empty() {
        throw_away(inner, merged)?;
        return Ok(false);
    }
    give(inner, &mut holders, count, merged, &mut pins)?;
    if let Err(error) = confirm(inner, merged, usage) {
        tracing::warn!(layer = %merged, %error, "not all is said of it yet; it is when it is measured");
    }
    point(Point::FlattenConfirmed);
    let stacks = holders.stacks().count();
    tracing::info!(layer = %merged, layers = count, stacks, "merged layers");
    for claim in &holders.claims {
        claims::content::restack(inner, &claim.id);
    }
    drop((pins, guards));
    reap::trash_unreferenced(inner, newest);
    Ok(true)
}

/// Gives all of them the merged layer for their newest `count`: durably, then in the state. What is known to have failed leaves nothing.
fn give(
    inner: &Inner,
    holders: &mut Holders,
    count: usize,
    merged: LayerId,
    pins: &mut Pins,
) -> Result<()> {
    let unmerged = holders.stacks().cloned().collect();
    holders.replace(count, merged);
    // The index may name it before anything else here does.
    pins.add(&mut inner.state.lock(), &[merged]);
    if let Err(error) = make_durable(inner, &holders.changes()) {
        if error.may_be_indexed() {
            // Both stay until the next start, which knows.
            holders.leave_to_the_next_start(&mut inner.state.lock());
            inner.unmerged.leave_to_the_next_start(unmerged);
            pins.keep();
        } else {
            throw_away(inner, merged)?;
        }
        return Err(error);
    }
    point(Point::FlattenIndexed);
    holders.enter(&mut inner.state.lock());
    Ok(())
}

/// First the content, then the index that names it.
fn make_durable(inner: &Inner, changes: &[Change]) -> Result<()> {
    let syncing = inner.syncing.lock();
    inner.sync(&syncing)?;
    point(Point::FlattenSynced);
    inner.commit_index(changes)
}

fn throw_away(inner: &Inner, merged: LayerId) -> Result<()> {
    let thrown = inner.throw_away(&inner.dirs.layers, merged.to_string().as_ref());
    thrown.doing("throw a merged layer away").map(drop)
}

/// Says in the merged layer that it is named, and only then in the index what it costs: what is not measured is confirmed when it is.
fn confirm(inner: &Inner, merged: LayerId, usage: Usage) -> Result<()> {
    commit::confirm(inner, merged)?;
    inner.state.lock().usage.insert(merged, usage);
    inner.commit_index(&[Change::PutLayer(merged, usage)])
}

/// Makes the merged layer, in its place.
fn make(
    inner: &Inner,
    newest: &[LayerId],
    rest: &[LayerId],
    stop: Stop<'_>,
) -> Result<(LayerId, Usage)> {
    let merged = LayerId::from_bits(inner.random());
    let name = merged.to_string();
    let incoming = &inner.dirs.incoming;
    incoming
        .create_dir(&name, 0o700)
        .doing("make a merged layer")?;
    let result = (|| {
        let into = incoming.open_beneath(&name).doing("open a merged layer")?;
        inner
            .backend
            .flatten(newest, &into, rest.is_empty(), stop)
            .doing("merge layers")?;
        let record = LayerRecord {
            format: LayerRecord::FORMAT,
            id: merged,
            artifact: artifact(inner, newest, rest, merged),
            claim: None,
        };
        store::write_sealing(&into, &record).doing("write a merged layer's record")?;
        point(Point::FlattenMerged);
        let usage = inner.backend.usage(&into, stop);
        let usage = usage.doing("measure a merged layer")?;
        incoming
            .rename(&name, &inner.dirs.layers, &name)
            .doing("place a merged layer")?;
        point(Point::FlattenPlaced);
        Ok(usage)
    })();
    match result {
        Ok(usage) => Ok((merged, usage)),
        Err(error) => {
            let from = if incoming.has(&name).doing("look for a half-merged layer")? {
                incoming
            } else {
                &inner.dirs.layers
            };
            inner
                .throw_away(from, name.as_ref())
                .doing("throw a half-merged layer away")?;
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
    let state = inner.state.lock();
    let mut artifacts = state.artifacts.values().map(|sealed| &sealed.artifact);
    let same = |artifact: &&Artifact| {
        let layers = artifact.layers.strip_prefix(newest);
        layers == Some(rest)
    };
    let found = artifacts.find(same)?;
    let layers = std::iter::once(merged)
        .chain(rest.iter().copied())
        .collect();
    Some(Artifact {
        layers,
        ..found.clone()
    })
}
