//! Reap: what nobody needs any more goes, and what is left is kept in shape.
//!
//! What frees space runs in rounds, on a thread of its own and in this order: expired and unnamed artifacts, layers that nothing
//! refers to, the trash, eviction when room is short, ends that were put off, the reserve. How long a round takes no tenant decides:
//! a call that found no room waits for it. What walks their trees runs after each round, on the thread for walks: sizes that are not
//! known yet, then stacks that grew long (`flatten`). An artifact leaves the index before its layers leave their place; a layer leaves
//! its place before it is deleted.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claims::maintenance;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::layers::trash_unreferenced;
use super::measure::measure_layers;
use super::pins::Pins;
use super::shared::{Inner, SHARE};
use super::space::{above, evictable, excess, is_nearly_full};
use super::state::State;
use super::transaction::last_uses;
use super::types::Reaped;
use super::{flatten, purge, unpublish};
use crate::model::{Artifact, ArtifactId, Candidate, LayerId, Name, evict, garbage};
use crate::store::Change;
use crate::sys::Space;

/// The collector rests this long per artifact between two rounds. Each commit asks for a round, and
/// a round looks at every artifact several times: this bounds its share of a processor.
const REST: Duration = Duration::from_micros(30);

/// How long the collector pauses after a round that failed and freed nothing.
const PAUSE: Duration = Duration::from_secs(1);

/// How long a round deletes, before it evicts and after. The next one goes on, at once.
const SLICE: Duration = Duration::from_millis(250);

/// Reaps whenever there is reason to, and now and then without.
pub(super) async fn reap_loop(inner: Arc<Inner>) {
    let mut rested = Instant::now();
    loop {
        tokio::select! {
            () = wanted(&inner, rested) => {}
            () = tokio::time::sleep(inner.config.reap_interval) => {}
            () = inner.lifetime.stopping() => return,
        }
        let engine = inner.clone();
        let round = match inner.threads.room.run(move || round(&engine)).await {
            Ok(round) => round,
            Err(Error::ShuttingDown) => return,
            Err(error) => Round::failed(error),
        };
        round.tell();
        if round.came_to_nothing() {
            // On a full disk a round asks for the next one: without a pause they would never end.
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                () = inner.lifetime.stopping() => return,
            }
        }
        rested = Instant::now();
        if round.more {
            inner.wake_reaper();
        } else {
            let artifacts = inner.state.lock().catalog.artifacts().len();
            rested += REST.saturating_mul(u32::try_from(artifacts).unwrap_or(u32::MAX));
        }
        inner.collector.wake_walker();
    }
}

/// Measures and merges after rounds; one that comes meanwhile does not wait for it.
pub(super) async fn walk_loop(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = inner.collector.walker_woken() => {}
            () = inner.lifetime.stopping() => return,
        }
        let engine = inner.clone();
        let walk = move || {
            let measured = measure_layers(&engine);
            let merges = flatten::flatten(&engine);
            // What is left of merges, also of those that came to nothing, is to be deleted; and what is evicted is chosen by its size.
            let is_for_a_round =
                merges.tried > 0 || matches!(measured, Ok(1..)) && is_nearly_full(&engine);
            let failure = measured.err().or(merges.failure);
            if failure.is_some() {
                engine.space.set_short(true);
            }
            (is_for_a_round, merges.done, failure)
        };
        let (is_for_a_round, flattened, failure) = match inner.threads.walks.run(walk).await {
            Ok(walked) => walked,
            Err(Error::ShuttingDown) => return,
            Err(error) => (false, 0, Some(error)),
        };
        if flattened > 0 {
            tracing::info!(flattened, "merged layers of stacks that grew long");
        }
        if let Some(error) = failure {
            tracing::error!(%error, "layers could not be measured or merged; it is tried again later");
        }
        inner.collector.tables.wake();
        if is_for_a_round {
            inner.wake_reaper();
        }
    }
}

/// Waits for a reason to collect garbage, and then until `rested`. A call that waits for room ends
/// the rest.
async fn wanted(inner: &Inner, rested: Instant) {
    let mut is_asked_for = false;
    loop {
        tokio::select! {
            () = inner.collector.woken() => is_asked_for = true,
            () = tokio::time::sleep_until(rested.into()), if is_asked_for => return,
        }
        if inner.space.is_asked() {
            return;
        }
    }
}

/// Everything, until all that can be deleted is; each step also when the one before it failed. The first failure is the answer.
pub(super) async fn reap(inner: &Arc<Inner>) -> Result<Reaped> {
    let mut all = Round::default();
    rounds(inner, &mut all).await?;
    let engine = inner.clone();
    let measured = inner
        .threads
        .walks
        .run(move || measure_layers(&engine))
        .await?;
    // What is evicted is chosen by its size.
    if all.step(measured) > 0 {
        rounds(inner, &mut all).await?;
    }
    let engine = inner.clone();
    let merges = inner
        .threads
        .walks
        .run(move || flatten::flatten(&engine))
        .await?;
    all.done.flattened = merges.done;
    all.step(merges.failure.map_or(Ok(0), Err));
    if merges.tried > 0 {
        rounds(inner, &mut all).await?;
    }
    if all.failure.is_some() {
        inner.space.set_short(true);
    }
    all.failure.map_or(Ok(all.done), Err)
}

/// Rounds until there is nothing left to be done, or nothing has been deleted for long.
async fn rounds(inner: &Arc<Inner>, all: &mut Round) -> Result<()> {
    let mut deleted = Instant::now();
    loop {
        let engine = inner.clone();
        let round = inner.threads.room.run(move || round(&engine)).await?;
        if round.done.deleted > 0 {
            deleted = Instant::now();
        }
        let more = round.more && deleted.elapsed() < SHARE;
        all.add(round);
        if !more || inner.lifetime.is_stopping() {
            return Ok(());
        }
    }
}

/// What came of a round.
#[derive(Default)]
struct Round {
    done: Reaped,
    /// Whether the next one should come at once.
    more: bool,
    /// The first failure.
    failure: Option<Error>,
}

impl Round {
    /// What came of one of its steps.
    fn step(&mut self, result: Result<usize>) -> usize {
        result.unwrap_or_else(|error| {
            tracing::debug!(%error, "a step of garbage collection failed");
            self.failure.get_or_insert(error);
            0
        })
    }

    fn add(&mut self, round: Self) {
        self.done.expired += round.done.expired;
        self.done.evicted += round.done.evicted;
        self.done.deleted += round.done.deleted;
        self.done.held = round.done.held;
        self.failure = self.failure.take().or(round.failure);
    }

    /// One that ended by a defect.
    fn failed(error: Error) -> Self {
        Self {
            failure: Some(error),
            ..Self::default()
        }
    }

    fn came_to_nothing(&self) -> bool {
        let gone = self.done.expired + self.done.evicted + self.done.deleted;
        self.failure.is_some() && gone == 0
    }

    fn tell(&self) {
        let done = &self.done;
        if let Some(error) = &self.failure {
            tracing::error!(%error, "garbage collection failed; it is tried again later");
        } else if done.expired + done.evicted > 0 {
            tracing::info!(
                expired = done.expired,
                evicted = done.evicted,
                deleted = done.deleted,
                "collected garbage"
            );
        }
    }
}

/// All steps, each of them also when the one before it failed: on a full disk it is the later ones that make room.
fn round(inner: &Arc<Inner>) -> Round {
    let mut counted = inner.collector.cycles.begin();
    inner.space.set_short(false);
    let mut round = Round::default();
    {
        let _one_at_a_time = inner.collector.lock();
        round.done.expired = round.step(collect_garbage(inner));
        let (expired, tidied) = maintenance::tidy(inner);
        round.done.expired += expired;
        round.step(tidied.map(|()| 0));
        round.step(trash_unused_layers(inner).map(|()| 0));
        round.step(remember_uses(inner));
    }
    // What only waited to be deleted is no reason to evict anything.
    let mut freed = empty_trash(inner, &mut round);
    {
        let _one_at_a_time = inner.collector.lock();
        round.done.evicted = round.step(make_room(inner));
    }
    if round.done.evicted > 0 {
        freed |= empty_trash(inner, &mut round);
    }
    // There is room again, if there is any: what was put off can begin.
    round.step(unpublish::retire_abandoned(inner));
    let is_reserved = inner.keep_reserve();
    round.done.held = round.step(purge::held(inner));
    counted.gone(round.done.expired + round.done.evicted + usize::from(freed));
    if round.failure.is_some() || !is_reserved || inner.state.lock().volumes.has_deferred() {
        inner.space.set_short(true);
    }
    round
}

/// Deletes for a while; whether room may have come free of what others needed no more.
fn empty_trash(inner: &Inner, round: &mut Round) -> bool {
    let emptied = purge::empty(inner, Instant::now() + SLICE);
    let emptied = emptied.unwrap_or_else(|error| {
        round.step(Err(error));
        purge::Emptied::default()
    });
    round.done.deleted += emptied.deleted;
    round.more = emptied.more;
    emptied.freed
}

/// Artifacts that expired, or whose name moved on.
fn collect_garbage(inner: &Arc<Inner>) -> Result<usize> {
    let now = inner.now();
    let in_use = inner.state.lock().artifacts_in_use();
    let mut gone = Vec::new();
    inner.look_at_artifacts(|state, sealed| {
        let artifact = &sealed.artifact;
        if sealed.durable {
            let named = !state.catalog.is_superseded(artifact);
            let candidate = Candidate { artifact, named };
            gone.extend(garbage(std::iter::once(candidate), &in_use, now));
        }
    });
    remove(inner, &gone).map(|removed| removed.artifacts)
}

/// Evicts until the pool is below its low watermark, if it is above the high one or a call found no room; and on, until there is what
/// the call needs. Nothing goes for a call that needs more than there would be if all went.
fn make_room(inner: &Arc<Inner>) -> Result<usize> {
    let asked = inner.space.take();
    let space = inner.dirs.root.space().context("ask for the pool's room")?;
    let space = with_what_comes(inner, space);
    // Looks at everything, so only where it decides something. What nobody has come to measure yet may be any size.
    let decides = asked.iter().any(|bytes| *bytes > 0);
    let evictable = if decides {
        evictable(inner, u64::MAX)
    } else {
        0
    };
    let possible = space.bytes_free.saturating_add(evictable);
    // For what has room by now nothing need go either.
    let waits = |bytes: &u64| *bytes == 0 || *bytes > space.bytes_free;
    let asked = asked.into_iter().filter(waits);
    let (helped, others): (Vec<u64>, Vec<u64>) = asked.partition(|bytes| *bytes <= possible);
    if let Some(needs) = others.into_iter().min() {
        tracing::info!(
            needs,
            possible,
            "nothing goes for a copy that would have no room if all unused went"
        );
    }
    let most = helped.into_iter().max();
    let high = if most.is_some() {
        inner.config.low_watermark
    } else {
        inner.config.high_watermark
    };
    let missing = most.unwrap_or(0).saturating_sub(space.bytes_free);
    if missing == 0 && !above(&space, high) {
        return Ok(0);
    }
    // A convenience, and each costs inodes. What is asked for twice again comes back.
    inner.spares.forget_mounted();
    let goal = excess(
        space.bytes,
        space.bytes_available,
        inner.config.low_watermark,
    )
    .max(missing);
    // Inodes are short where bytes are not: whatever is least used goes, one by one, until it is enough.
    let short_of_inodes = goal == 0;
    let gone = {
        let state = inner.state.lock();
        let in_use = state.artifacts_in_use();
        let durable = state
            .catalog
            .artifacts()
            .values()
            .filter(|sealed| sealed.durable)
            .map(|sealed| &sealed.artifact);
        let cost = |layer: LayerId| {
            match state.catalog.usage(&layer) {
                Some(usage) if short_of_inodes => usage.files + usage.directories,
                Some(usage) => usage.bytes,
                // It cannot be measured.
                None if inner.collector.unmeasured.has(&layer) => 0,
                // It is not measured yet. It may be enough: the next round knows.
                None => u64::MAX,
            }
        };
        let inodes = excess(space.inodes, space.inodes_free, inner.config.low_watermark);
        evict(
            durable,
            &in_use,
            cost,
            if short_of_inodes { inodes } else { goal },
        )
    };
    if gone.is_empty() {
        tracing::warn!(
            available_bytes = space.bytes_available,
            available_inodes = space.inodes_free,
            "the pool is nearly full, and everything in it is in use"
        );
    }
    let measured = measure_what_goes(inner, &gone);
    let removed = remove(inner, &gone);
    forget_sizes(inner, &measured);
    let removed = removed?;
    inner.counters().evicted(removed.artifacts, removed.bytes);
    Ok(removed.artifacts)
}

/// Measures the layers of artifacts that are evicted before their turn to be measured, so that the
/// counters tell what came free. A tenant decides how long a walk takes, and callers wait for space:
/// layers that take longer than [`SLICE`] together count as nothing.
fn measure_what_goes(inner: &Inner, ids: &[ArtifactId]) -> Vec<LayerId> {
    let unmeasured: HashSet<LayerId> = {
        let state = inner.state.lock();
        let going = ids.iter().filter_map(|id| state.catalog.get(id));
        let layers = going.flat_map(|sealed| &sealed.artifact.layers).copied();
        layers
            .filter(|layer| state.catalog.usage(layer).is_none())
            .collect()
    };
    let mut measured = Vec::new();
    let patience = inner.patience_of(SLICE);
    for layer in unmeasured {
        let dir = inner.dirs.layers.open_beneath(layer.to_string());
        if let Ok(usage) = dir.map(|dir| inner.backend.usage(&dir, &patience))
            && let Ok(usage) = usage
        {
            inner.state.lock().catalog.set_usage(layer, usage);
            measured.push(layer);
        }
    }
    measured
}

/// Forgets the sizes of layers that stay: the walk that measures them also confirms them, and tells
/// the index.
fn forget_sizes(inner: &Inner, measured: &[LayerId]) {
    let mut state = inner.state.lock();
    for layer in measured {
        if state.is_stacked(layer) {
            state.catalog.forget_usage(layer);
        }
    }
}

/// The pool's room, and that of layers which wait to be deleted: nothing need go for what comes free anyway.
fn with_what_comes(inner: &Inner, space: Space) -> Space {
    let (bytes, inodes) = inner.collector.trash.coming();
    let used = space.bytes.saturating_sub(space.bytes_free);
    let bytes = bytes.min(used);
    let used = space.inodes.saturating_sub(space.inodes_free);
    Space {
        bytes_free: space.bytes_free + bytes,
        bytes_available: space.bytes_available + bytes,
        inodes_free: space.inodes_free + inodes.min(used),
        ..space
    }
}

/// What went, and the bytes of the layers that went with it.
#[derive(Default)]
struct Removed {
    artifacts: usize,
    bytes: u64,
}

/// Removes artifacts: from sight, then from the index, then their layers from their place.
fn remove(inner: &Arc<Inner>, ids: &[ArtifactId]) -> Result<Removed> {
    // The layers stay in their place while the index may name them.
    let mut pins = Pins::none(inner);
    let (removed, layers) = {
        let mut state = inner.state.lock();
        // Asked again under the lock: a fork may have been made since the choice.
        let in_use = state.artifacts_in_use();
        let free = ids.iter().filter(|id| !in_use.contains(id));
        let removed: Vec<(Artifact, bool)> =
            free.filter_map(|id| state.catalog.take_out(*id)).collect();
        let layers = removed.iter().flat_map(|(artifact, _)| &artifact.layers);
        let layers: Vec<LayerId> = state.unreferenced(layers).into_iter().collect();
        pins.add(&mut state, &layers);
        (removed, layers)
    };
    if removed.is_empty() {
        return Ok(Removed::default());
    }
    let artifacts = || removed.iter().map(|(artifact, _)| artifact);
    flatten::stop_merging(inner, artifacts().flat_map(|artifact| &artifact.layers));
    let mut changes = Vec::new();
    let named_as_indexed = inner.durability.lock_names();
    {
        let state = inner.state.lock();
        for artifact in artifacts() {
            changes.push(Change::RemoveArtifact(artifact.id));
            // The index has no later owner of the name yet: the name would dangle there.
            if !state.catalog.is_name_indexed(&artifact.name()) {
                changes.push(Change::RemoveName(artifact.name()));
            }
        }
    }
    changes.extend(layers.iter().copied().map(Change::RemoveLayer));
    if let Err(error) = inner.transact(&changes).result() {
        // The index still has them, so they are still there.
        let mut state = inner.state.lock();
        for (artifact, had_name) in removed {
            state.catalog.put_back(artifact, had_name);
        }
        return Err(error);
    }
    drop(named_as_indexed);
    point(Point::CollectUnindexed);
    for artifact in artifacts() {
        tracing::info!(artifact.id = %artifact.id, name = %artifact.name(), "artifact deleted");
    }
    drop(pins);
    let bytes = trash_unreferenced(inner, &layers);
    inner.counters().freed(bytes);
    Ok(Removed {
        artifacts: removed.len(),
        bytes,
    })
}

/// Deletes what has this name. Waits until it is durable, so that the index is told of one thing at a time.
pub(super) async fn destroy(inner: &Arc<Inner>, name: Name) -> Result<()> {
    let may_go = |state: &State| {
        let owner = state.catalog.owner(&name);
        let owner = owner.ok_or_else(|| Error::NoSuchName(name.clone()))?;
        let id = &owner.artifact.id;
        let volumes = state.volumes.fork_counts().get(id).copied().unwrap_or(0);
        if volumes > 0 && name.reference.cache().is_none() {
            let name = name.clone();
            return Err(Error::InUse { name, volumes });
        }
        state.health.refuse_changes()?;
        Ok(state.catalog.get(id).is_some_and(|sealed| sealed.durable))
    };
    loop {
        inner
            .state
            .when(|state| match may_go(state) {
                Ok(false) => None,
                answer => Some(answer),
            })
            .await?;
        let (engine, name) = (inner.clone(), name.clone());
        let destroyed = inner.threads.room.run(move || destroy_now(&engine, name));
        if destroyed.await?? {
            inner.wake_reaper();
            return Ok(());
        }
    }
}

/// Deletes what has this name; `false` when by now that is content which is not durable.
fn destroy_now(inner: &Arc<Inner>, name: Name) -> Result<bool> {
    let _one_at_a_time = inner.collector.lock();
    let named_as_indexed = inner.durability.lock_names();
    let id = {
        let mut state = inner.state.lock();
        let owner = state.catalog.owner(&name);
        let owner = owner.ok_or_else(|| Error::NoSuchName(name.clone()))?;
        if !owner.durable {
            return Ok(false);
        }
        let id = owner.artifact.id;
        state.catalog.take_name(&name);
        id
    };
    if let Err(error) = inner.transact(&[Change::RemoveName(name.clone())]).result() {
        inner.state.lock().catalog.put_name_back(name, id);
        return Err(error);
    }
    drop(named_as_indexed);
    point(Point::DestroyUnnamed);
    if let Err(error) = remove(inner, &[id]) {
        // Nobody finds it any more, as was asked for; whoever asks again is told that there is none.
        tracing::warn!(artifact.id = %id, %error, "its name is destroyed; what it was of goes later");
    }
    Ok(true)
}

/// Layers that volumes were the last to refer to: they could not go with their artifact.
fn trash_unused_layers(inner: &Inner) -> Result<()> {
    let on_disk = inner.dirs.layers.entries().context("read layers/")?;
    let layers: Vec<LayerId> = on_disk
        .iter()
        .filter_map(|entry| entry.name.to_str()?.parse().ok())
        .collect();
    // In batches: other threads take the state in between.
    for some in layers.chunks(256) {
        inner.counters().freed(trash_unreferenced(inner, some));
    }
    Ok(())
}

/// Tells the index when artifacts were last used, if it has not known for long: where caches are only read nothing else is written, and after
/// a crash they would expire by a use that was long ago. How many it was told of.
fn remember_uses(inner: &Inner) -> Result<usize> {
    let now = inner.now();
    let since = inner.state.lock().catalog.unwritten_since();
    if since.is_none_or(|since| since.after(inner.config.uses_unwritten) > now) {
        return Ok(0);
    }
    let uses = last_uses(inner);
    if !uses.is_empty() {
        inner.transact(&uses).result()?;
    }
    Ok(uses.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;
    use crate::engine::{Config, Engine};

    #[tokio::test]
    async fn after_a_round_only_a_call_that_waits_for_room_starts_the_next_at_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config = Config::new(folder.path().join("pool"));
        config.backend = Some(BackendKind::Copy);
        let engine = Engine::open(config).await.expect("it opens");
        let inner = &engine.inner;
        // Ends the collector's own loop: this test waits in its place.
        inner.lifetime.stop();
        inner.lifetime.ended().await;
        inner.space.take();

        inner.wake_reaper();
        wanted(inner, Instant::now()).await;
        let rests = wanted(inner, Instant::now() + Duration::from_secs(3600));
        tokio::pin!(rests);
        assert!(futures_util::poll!(&mut rests).is_pending());
        inner.wake_reaper();
        assert!(futures_util::poll!(&mut rests).is_pending(), "it rests");
        inner.ask_for_room(0);
        rests.await;
        inner.space.take();

        // A reason that came during the rest is not forgotten at its end.
        inner.wake_reaper();
        wanted(inner, Instant::now() + Duration::from_millis(1)).await;
        engine.shutdown().await;
    }
}
