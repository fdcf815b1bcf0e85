//! Garbage collection: rounds that free space, and the walks after them.
//!
//! What frees space runs in rounds, on a thread of its own and in this order: expired and unnamed
//! artifacts, those beyond their namespace's limits, layers that nothing refers to, the trash,
//! eviction when space is short, deferred teardowns, the reserve. Calls that found no space wait
//! for a round, so its length must not depend on a tenant's trees. Steps that walk trees run after
//! each round, on the thread for walks: sizes that are not known yet, then stacks that grew long
//! (`flatten`). An artifact leaves the index before its layers leave their place; a layer leaves
//! its place before it is deleted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claims::maintenance;
use super::error::{Error, Result};
use super::evict::{Gone, make_room};
use super::layers::trash_unreferenced;
use super::measure::measure_layers;
use super::pool_scan::keys;
use super::remove::remove;
use super::shared::{Inner, SHARE};
use super::space::is_nearly_full;
use super::threads::Pool;
use super::types::Reaped;
use super::{budgets, flatten, purge, transfer, unpublish};
use crate::model::{Candidate, garbage};

/// The collector rests this long per artifact between two rounds. Each commit asks for a round, and
/// a round looks at every artifact several times: this bounds its share of a processor.
const REST: Duration = Duration::from_micros(30);

/// How long a round deletes, before it evicts and after. The next round goes on at once.
const SLICE: Duration = Duration::from_millis(250);

/// How long the collector pauses after a round that failed and freed nothing.
const PAUSE: Duration = Duration::from_secs(1);

/// Reaps whenever there is reason to, and now and then without.
pub(super) async fn reap_loop(inner: Arc<Inner>) {
    let mut rested = Instant::now();
    loop {
        tokio::select! {
            () = wanted(&inner, rested) => {}
            () = tokio::time::sleep(inner.config.reap_interval) => {}
            () = inner.lifetime.stopping() => return,
        }
        let round = match inner.run(Pool::Room, |inner| Ok(round(inner))).await {
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
        inner.collector.walker.notify_one();
    }
}

/// Measures layers after rounds; a round that comes meanwhile does not wait for it.
pub(super) async fn walk_loop(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = inner.collector.walker.notified() => {}
            () = inner.lifetime.stopping() => return,
        }
        match inner.run(Pool::Walks, |inner| measure_layers(inner)).await {
            Err(Error::ShuttingDown) => return,
            Err(error) => {
                tracing::error!(%error, "layers could not be measured; retrying later");
                inner.space.set_short(true);
            }
            // Eviction chooses by size.
            Ok(measured) if measured > 0 && is_nearly_full(&inner) => inner.wake_reaper(),
            Ok(_) => {}
        }
        inner.collector.tables.wake();
        inner.collector.merger.notify_one();
    }
}

/// Merges layers once they are measured. Their tenants decide how long that takes.
pub(super) async fn merge_loop(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = inner.collector.merger.notified() => {}
            () = inner.lifetime.stopping() => return,
        }
        let merges = |inner: &Arc<Inner>| Ok(flatten::flatten(inner));
        let merges = match inner.run(Pool::Merges, merges).await {
            Ok(merges) => merges,
            Err(Error::ShuttingDown) => return,
            Err(error) => flatten::Merges::failed(error),
        };
        if merges.done > 0 {
            tracing::info!(flattened = merges.done, "merged layers of long stacks");
            inner.collector.tables.wake();
        }
        if let Some(error) = merges.failure {
            tracing::error!(%error, "layers could not be merged; retrying later");
            inner.space.set_short(true);
        }
        if merges.tried > 0 {
            // Merges, also failed ones, leave something to delete.
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
            () = inner.collector.reaper.notified() => is_asked_for = true,
            () = tokio::time::sleep_until(rested.into()), if is_asked_for => return,
        }
        if inner.space.is_asked() {
            return;
        }
    }
}

/// Everything, until all that can be deleted is; each step also when the one before it failed. The
/// first failure is the answer.
pub(super) async fn reap(inner: &Arc<Inner>) -> Result<Reaped> {
    let mut all = Round::default();
    let parts = |inner: &Arc<Inner>| Ok(transfer::delete_parts(inner));
    inner.run(Pool::Room, parts).await?;
    rounds(inner, &mut all).await?;
    let measure = |inner: &Arc<Inner>| Ok(measure_layers(inner));
    let measured = inner.run(Pool::Walks, measure).await?;
    // Eviction chooses by size.
    if all.step(measured) > 0 {
        rounds(inner, &mut all).await?;
    }
    let merge = |inner: &Arc<Inner>| Ok(flatten::flatten(inner));
    let merges = inner.run(Pool::Merges, merge).await?;
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
        let round = inner.run(Pool::Room, |inner| Ok(round(inner))).await?;
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

/// The result of a round.
#[derive(Default)]
struct Round {
    done: Reaped,
    /// Whether the next one should come at once.
    more: bool,
    /// The first failure.
    failure: Option<Error>,
}

impl Round {
    /// Adds the result of one of its steps.
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
            tracing::error!(%error, "garbage collection failed; retrying later");
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

/// All steps, each of them also when the one before it failed: on a full disk it is the later ones
/// that make room.
fn round(inner: &Arc<Inner>) -> Round {
    let mut running = inner.collector.rounds.begin();
    inner.space.set_short(false);
    let mut round = Round::default();
    {
        let _one_at_a_time = inner.collector.lock();
        round.done.expired = round.step(collect_garbage(inner));
        let (expired, tidied) = maintenance::tidy(inner);
        round.done.expired += expired;
        round.step(tidied.map(|()| 0));
        round.done.evicted = round.step(budgets::cut_off(inner));
        round.step(trash_unused_layers(inner).map(|()| 0));
        round.step(remember_uses(inner));
    }
    transfer::delete_old_parts(inner);
    // Content that only waits for its deletion is no reason to evict anything.
    let mut freed = empty_trash(inner, &mut round);
    let for_room = {
        let _one_at_a_time = inner.collector.lock();
        make_room(inner)
    };
    let for_room = for_room.unwrap_or_else(|error| {
        round.step(Err(error));
        Gone::default()
    });
    if for_room != Gone::default() {
        round.done.evicted += for_room.artifacts;
        freed |= empty_trash(inner, &mut round) || for_room.parts > 0;
    }
    // There may be space now: deferred teardowns can begin.
    round.step(unpublish::retire_abandoned(inner));
    let is_reserved = inner.keep_reserve();
    round.done.held = round.step(purge::held(inner));
    running.add_gone(round.done.expired + round.done.evicted + usize::from(freed));
    if round.failure.is_some() || !is_reserved || inner.state.lock().volumes.has_deferred() {
        inner.space.set_short(true);
    }
    round
}

/// Deletes for a while. Returns whether that may have freed space.
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
    let now = inner.expiry_time();
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

/// Layers that volumes were the last to refer to: they could not go with their artifact.
fn trash_unused_layers(inner: &Inner) -> Result<()> {
    // In batches: other threads take the state in between.
    for some in keys(&inner.dirs.layers)?.chunks(256) {
        inner.counters().freed(trash_unreferenced(inner, some));
    }
    Ok(())
}

/// Tells the index when artifacts were last used, if it has not known for long: where caches are
/// only read nothing else is written, and after a crash they would expire by a use that was long
/// ago. Returns the number of changes.
fn remember_uses(inner: &Inner) -> Result<usize> {
    let now = inner.time();
    let since = inner.state.lock().catalog.unwritten_since();
    if since.is_none_or(|since| since.after(inner.config.uses_unwritten) > now) {
        return Ok(0);
    }
    inner.transact_with_unwritten(Vec::new())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::engine::artifacts::tests::made;
    use crate::engine::health::Health;
    use crate::engine::transaction::entries;
    use crate::engine::{Config, Engine};
    use crate::model::{LayerId, Usage};

    #[tokio::test]
    async fn after_a_round_only_a_call_that_waits_for_room_starts_the_next_at_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = Config::of_copies(folder.path());
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

    /// As on a full disk.
    #[tokio::test]
    async fn the_index_learns_later_of_a_use_that_it_refused() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config = Config::of_copies(folder.path());
        config.uses_unwritten = Duration::ZERO;
        let engine = Engine::open(config.clone()).await.expect("it opens");
        let inner = &engine.inner;
        inner.lifetime.stop();
        inner.lifetime.ended().await;
        let (artifact, gone) = (made(1, &[1]), LayerId::from_bits(2));
        let id = artifact.id;
        let layer = artifact.layers[0].to_string();
        inner.dirs.layers.create_dir(layer, 0o700).expect("mkdir");
        let named = HashMap::from([(artifact.name(), id)]);
        let changes = entries([&artifact], &named);
        inner.transact(&changes).result().expect("committed");
        let used = {
            let mut state = inner.state.lock();
            state.catalog.add_artifact(artifact);
            state.catalog.set_durable(&id, true);
            let used = inner.time();
            assert!(state.catalog.touch(id, used));
            state.catalog.set_usage(gone, Usage::default());
            state.catalog.forget_usage(&gone).expect("it was known");
            state.health.degrade("refused".to_owned());
            used
        };
        remember_uses(inner).expect_err("refused");
        {
            let mut state = inner.state.lock();
            state.health = Health::default();
            assert_eq!(state.catalog.take_gone(), [gone]);
        }
        engine.shutdown().await;
        drop(engine);
        let engine = Engine::open(config).await.expect("it opens");
        let known = {
            let state = engine.inner.state.lock();
            state.catalog.get(&id).map(|it| it.artifact.last_used)
        };
        assert_eq!(known, Some(used));
        engine.shutdown().await;
    }
}
