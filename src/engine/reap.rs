//! Reap: what nobody needs any more goes, and what is left is kept in shape.
//!
//! Everything here runs on the one thread for chores, slowly and in this order: expired and unnamed artifacts, layers that
//! nothing refers to and the trash, sizes that are not known yet, eviction when room is short, ends that were put off, the
//! reserve; then stacks that grew long (`flatten`). An artifact leaves the index before its layers leave their place; a
//! layer leaves its place before it is deleted.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::crash::{Point, point};
use super::error::{Doing, Error, Result};
use super::state::{Sealed, State};
use super::types::Reaped;
use super::{Inner, claims, commit, flatten, spares, unpublish};
use crate::backend;
use crate::model::{Artifact, ArtifactId, Candidate, LayerId, Name, Usage, evict, garbage, layout};
use crate::store::{self, Change};
use crate::sys::{Errno, Space};

/// Reaps whenever there is reason to, and now and then without.
pub(super) async fn reap_loop(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = inner.reaper.notified() => {}
            () = tokio::time::sleep(inner.config.reap_interval) => {}
            () = inner.stop.cancelled() => return,
        }
        match reap(&inner).await {
            Ok(done) if done.expired + done.evicted + done.flattened > 0 => {
                tracing::info!(
                    expired = done.expired,
                    evicted = done.evicted,
                    deleted = done.deleted,
                    flattened = done.flattened,
                    "collected garbage"
                );
            }
            Ok(_) => {}
            Err(Error::ShuttingDown) => return,
            Err(error) => {
                tracing::error!(%error, "garbage collection failed; it is tried again later");
            }
        }
    }
}

/// One round of everything.
pub(super) async fn reap(inner: &Arc<Inner>) -> Result<Reaped> {
    let engine = inner.clone();
    inner.chores.run(move || round(&engine)).await?
}

/// All steps, each of them also when the one before it failed: on a full disk it is the later ones that make room. The
/// first failure is the answer.
fn round(inner: &Arc<Inner>) -> Result<Reaped> {
    let _one_at_a_time = inner.collector.lock();
    let mut counted = inner.rounds.begin();
    inner.short.store(false, Ordering::SeqCst);
    let mut failure = None;
    let mut step = |result: Result<usize>| {
        result.unwrap_or_else(|error| {
            tracing::debug!(%error, "a step of garbage collection failed");
            failure.get_or_insert(error);
            0
        })
    };
    let mut done = Reaped {
        expired: step(collect_garbage(inner)),
        ..Reaped::default()
    };
    let (expired, tidied) = claims::tidy::tidy(inner);
    done.expired += expired;
    step(tidied.map(|()| 0));
    done.deleted = step(empty_trash(inner));
    // What is evicted is chosen by its size. After the trash: what only waited to be deleted is no reason to evict anything.
    step(measure_layers(inner));
    step(remember_uses(inner));
    done.evicted = step(make_room(inner));
    if done.evicted > 0 {
        done.deleted += step(empty_trash(inner));
    }
    // There is room again, if there is any: what was put off can begin.
    step(unpublish::promise_abandoned(inner));
    let is_reserved = inner.keep_reserve();
    let merges = flatten::flatten(inner);
    done.flattened = merges.done;
    step(merges.result.map(|()| 0));
    // Also what is left of merges that came to nothing.
    if merges.tried > 0 {
        done.deleted += step(empty_trash(inner));
    }
    done.held = step(held(inner));
    counted.gone(done.expired + done.evicted);
    if failure.is_some() || !is_reserved || inner.state.lock().has_put_off() {
        inner.short.store(true, Ordering::SeqCst);
    }
    failure.map_or(Ok(done), Err)
}

/// How much of the trash could not be deleted.
fn held(inner: &Inner) -> Result<usize> {
    Ok(inner.dirs.trash.entries().doing("read trash/")?.len())
}

/// Artifacts that expired, or whose name moved on.
fn collect_garbage(inner: &Inner) -> Result<usize> {
    let now = inner.clock.now();
    let gone = {
        let state = inner.state.lock();
        let in_use = state.artifacts_in_use();
        let durable = state.artifacts.values().filter(|sealed| sealed.durable);
        // Most have their name, and everybody waits meanwhile: a name is looked up for the others only.
        let named: HashSet<ArtifactId> = state.names.values().copied().collect();
        let candidates = durable.map(|Sealed { artifact, .. }| Candidate {
            artifact,
            named: named.contains(&artifact.id) || !state.is_superseded(artifact),
        });
        garbage(candidates, &in_use, now)
    };
    remove(inner, &gone).map(|removed| removed.artifacts)
}

/// Evicts until the pool is below its low watermark, if it is above the high one or a call found no room; and on, until there is what
/// the call needs. Nothing goes for a call that needs more than there would be if all went.
fn make_room(inner: &Inner) -> Result<usize> {
    let asked = std::mem::take(&mut *inner.asked.lock());
    let space = inner.dirs.root.space().doing("ask for the pool's room")?;
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
    spares::forget_mounted(inner);
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
            .artifacts
            .values()
            .filter(|sealed| sealed.durable)
            .map(|sealed| &sealed.artifact);
        let cost = |layer: LayerId| {
            let usage = state.usage.get(&layer).copied().unwrap_or_default();
            if short_of_inodes {
                usage.files + usage.directories
            } else {
                usage.bytes
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
    let removed = remove(inner, &gone)?;
    inner.counters.evicted(removed.artifacts, removed.bytes);
    Ok(removed.artifacts)
}

/// How many bytes would come free if all went that nobody uses; a layer that is not measured yet counts as `unmeasured`, and one that
/// cannot be as nothing: what may be lost, or is not to be deleted either, is no room to count on.
pub(super) fn evictable(inner: &Inner, unmeasured: u64) -> u64 {
    let state = inner.state.lock();
    let in_use = state.artifacts_in_use();
    let goes = |sealed: &Sealed| sealed.durable && !in_use.contains(&sealed.artifact.id);
    let kept = state.referenced_without(goes);
    let going = state.artifacts.values().filter(|sealed| goes(sealed));
    let going: HashSet<&LayerId> = going
        .flat_map(|sealed| &sealed.artifact.layers)
        .filter(|layer| !kept.contains(layer))
        .collect();
    let bytes = |layer| match state.usage.get(layer) {
        Some(usage) => usage.bytes,
        None if inner.unmeasured.has(layer) => 0,
        None => unmeasured,
    };
    going.into_iter().map(bytes).fold(0, u64::saturating_add)
}

fn above(space: &Space, percent: u8) -> bool {
    excess(space.bytes, space.bytes_available, percent) > 0
        || excess(space.inodes, space.inodes_free, percent) > 0
}

/// How much of `total` is in use beyond `percent` of it.
fn excess(total: u64, available: u64, percent: u8) -> u64 {
    let allowed = u128::from(total) * u128::from(percent) / 100;
    let used = u128::from(total.saturating_sub(available));
    u64::try_from(used.saturating_sub(allowed)).unwrap_or(u64::MAX)
}

/// What went, and the bytes of the layers that went with it.
#[derive(Default)]
struct Removed {
    artifacts: usize,
    bytes: u64,
}

/// Removes artifacts: from sight, then from the index, then their layers from their place.
fn remove(inner: &Inner, ids: &[ArtifactId]) -> Result<Removed> {
    let removed: Vec<(Artifact, bool)> = {
        let mut state = inner.state.lock();
        // Asked again under the lock: a fork may have been made since the choice.
        let in_use = state.artifacts_in_use();
        let free = ids.iter().filter(|id| !in_use.contains(id));
        free.filter_map(|id| state.take_out(*id)).collect()
    };
    if removed.is_empty() {
        return Ok(Removed::default());
    }
    let artifacts = || removed.iter().map(|(artifact, _)| artifact);
    let layers = unreferenced(inner, artifacts().flat_map(|artifact| &artifact.layers));
    let mut changes = Vec::new();
    let named_as_indexed = inner.naming.lock();
    {
        let state = inner.state.lock();
        for artifact in artifacts() {
            changes.push(Change::RemoveArtifact(artifact.id));
            if !state.names.contains_key(&artifact.name()) {
                changes.push(Change::RemoveName(artifact.name()));
            }
        }
    }
    changes.extend(layers.iter().copied().map(Change::RemoveLayer));
    if let Err(error) = inner.commit_index(&changes) {
        // The index still has them, so they are still there.
        let mut state = inner.state.lock();
        for (artifact, had_name) in removed {
            state.put_back(artifact, had_name);
        }
        return Err(error);
    }
    drop(named_as_indexed);
    point(Point::CollectUnindexed);
    for artifact in artifacts() {
        tracing::info!(artifact.id = %artifact.id, name = %artifact.name(), "artifact deleted");
    }
    let bytes = trash_unreferenced(inner, &layers);
    inner.counters.freed(bytes);
    Ok(Removed {
        artifacts: removed.len(),
        bytes,
    })
}

/// Deletes what has this name. Waits until it is durable, so that the index is told of one thing at a time.
pub(super) async fn destroy(inner: &Arc<Inner>, name: Name) -> Result<()> {
    let may_go = |state: &State| {
        let id = state.names.get(&name);
        let id = id.ok_or_else(|| Error::NoSuchName(name.clone()))?;
        let volumes = state.fork_counts().get(id).copied().unwrap_or(0);
        if volumes > 0 && name.reference.cache().is_none() {
            let name = name.clone();
            return Err(Error::InUse { name, volumes });
        }
        if state.closing {
            return Err(Error::ShuttingDown);
        }
        Ok(state.artifacts.get(id).is_some_and(|sealed| sealed.durable))
    };
    loop {
        inner
            .when(|state| match may_go(state) {
                Ok(false) => None,
                answer => Some(answer),
            })
            .await?;
        let (engine, name) = (inner.clone(), name.clone());
        let destroyed = inner.chores.run(move || destroy_now(&engine, name));
        if destroyed.await?? {
            inner.wake_reaper();
            return Ok(());
        }
    }
}

/// Deletes what has this name; `false` when by now that is content which is not durable.
fn destroy_now(inner: &Inner, name: Name) -> Result<bool> {
    let _one_at_a_time = inner.collector.lock();
    let named_as_indexed = inner.naming.lock();
    let id = {
        let mut state = inner.state.lock();
        let id = state.names.get(&name).copied();
        let id = id.ok_or_else(|| Error::NoSuchName(name.clone()))?;
        if !state
            .artifacts
            .get(&id)
            .is_some_and(|sealed| sealed.durable)
        {
            return Ok(false);
        }
        state.take_name(&name);
        id
    };
    if let Err(error) = inner.commit_index(&[Change::RemoveName(name.clone())]) {
        inner.state.lock().put_name_back(name, id);
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

fn unreferenced<'a>(inner: &Inner, layers: impl Iterator<Item = &'a LayerId>) -> Vec<LayerId> {
    let state = inner.state.lock();
    let referenced = state.referenced_layers();
    let free =
        layers.filter(|layer| !referenced.contains(layer) && !state.leaving.contains_key(layer));
    let distinct: HashSet<LayerId> = free.copied().collect();
    distinct.into_iter().collect()
}

/// Moves those of these layers that nothing refers to into the trash; what they were last found to cost.
pub(super) fn trash_unreferenced(inner: &Inner, layers: &[LayerId]) -> u64 {
    let mut bytes = 0;
    for layer in unreferenced(inner, layers.iter()) {
        let name = layer.to_string();
        let usage = inner.state.lock().usage.remove(&layer);
        bytes += usage.map_or(0, |usage| usage.bytes);
        spares::forget(inner, &layer);
        match inner.throw_away(&inner.dirs.layers, name.as_ref()) {
            Err(error) if error.is(Errno::ENOENT) => {}
            Err(error) => {
                tracing::error!(%layer, %error, "an unused layer stays until the next start");
            }
            Ok(_) => point(Point::CollectTrashed),
        }
    }
    bytes
}

/// Deletes what lies in the trash and is nobody's any more; how much that was.
fn empty_trash(inner: &Inner) -> Result<usize> {
    trash_unused_layers(inner)?;
    let mut deleted = 0;
    for entry in inner.dirs.trash.entries().doing("read trash/")? {
        if inner.stop.is_cancelled() {
            break;
        }
        let key: Option<LayerId> = entry.name.to_str().and_then(|name| name.parse().ok());
        if key.is_some_and(|key| inner.state.lock().leaving.contains_key(&key)) {
            continue;
        }
        match delete(inner, Path::new(&entry.name)) {
            Ok(true) => deleted += 1,
            Ok(false) => {}
            Err(error) => {
                let path = inner.dirs.trash.path().join(&entry.name);
                tracing::error!(path = %path.display(), %error, "could not be deleted");
            }
        }
    }
    Ok(deleted)
}

/// Layers that volumes were the last to refer to: they could not go with their artifact.
fn trash_unused_layers(inner: &Inner) -> Result<()> {
    let on_disk = inner.dirs.layers.entries().doing("read layers/")?;
    let layers: Vec<LayerId> = on_disk
        .iter()
        .filter_map(|entry| entry.name.to_str()?.parse().ok())
        .collect();
    inner.counters.freed(trash_unreferenced(inner, &layers));
    Ok(())
}

/// Deletes one thing in the trash, unless somebody holds it open.
fn delete(inner: &Inner, name: &Path) -> Result<bool> {
    let trash = &inner.dirs.trash;
    let in_use = match trash.open_beneath(name) {
        // Only a volume's top can be mounted; a layer comes here when nothing that may be mounted refers to it.
        Ok(dir) if dir.has(layout::VOLUME_JSON).doing("look into the trash")? => inner
            .backend
            .in_use(&dir)
            .doing("ask whether what is in the trash is in use")?,
        // A layer, or a stray file.
        _ => false,
    };
    if in_use {
        return Ok(false);
    }
    inner
        .backend
        .delete(trash, name, &inner.patience())
        .doing("delete what is in the trash")?;
    Ok(true)
}

/// Finds out what layers cost, and remembers it; how many were new. One at which that fails is left alone for a while: it may have been
/// walked to its last directory, and would be in every round.
fn measure_layers(inner: &Inner) -> Result<usize> {
    let mut changes = Vec::new();
    let mut failure = confirm_layers(inner).err();
    let due: Vec<LayerId> = {
        let state = inner.state.lock();
        let waiting = inner.unmeasured.waiting(state.stacks().flatten());
        let layers: HashSet<LayerId> = state.stacks().flatten().copied().collect();
        let is_due =
            |layer: &LayerId| !state.usage.contains_key(layer) || inner.unmeasured.has(layer);
        layers
            .into_iter()
            .filter(|layer| !waiting.contains(layer) && is_due(layer))
            .collect()
    };
    for layer in due {
        if inner.stop.is_cancelled() {
            break;
        }
        match measure_layer(inner, layer) {
            Ok(Some(usage)) => {
                inner.unmeasured.forget(&layer);
                inner.state.lock().usage.insert(layer, usage);
                changes.push(Change::PutLayer(layer, usage));
            }
            Ok(None) if inner.stop.is_cancelled() => break,
            Ok(None) => drop(inner.unmeasured.put_off(&layer)),
            // The others have nothing to do with it.
            Err(error) => {
                leave_alone(inner, layer, &error);
                failure.get_or_insert(error);
            }
        }
    }
    let measured = changes.len();
    if measured > 0 {
        changes.extend(last_uses(inner));
        inner.commit_index(&changes)?;
    }
    failure.map_or(Ok(measured), Err)
}

/// Says in the layers that the index names that it does, where that is missing: once in the life of this process, since a power cut takes a
/// renaming that nobody waited for, and leaves the index what was written after it.
fn confirm_layers(inner: &Inner) -> Result<()> {
    if inner.confirmed.load(Ordering::SeqCst) {
        return Ok(());
    }
    let named: HashSet<LayerId> = inner.state.lock().stacks().flatten().copied().collect();
    let confirm = |layer: LayerId| {
        let record = Path::new(&layer.to_string()).join(layout::SEALING_JSON);
        match inner.dirs.layers.has(&record) {
            Err(error) if error.is_no_directory() => Ok(()),
            Ok(false) => Ok(()),
            found => found
                .doing("look at a layer")
                .and_then(|_| commit::confirm(inner, layer)),
        }
    };
    let (mut failure, mut confirmed) = (None, true);
    for layer in named {
        if inner.stop.is_cancelled() {
            return Ok(());
        }
        // It is tried again where it would be if it could not be measured.
        if let Err(error) = confirm(layer) {
            confirmed &= leave_alone(inner, layer, &error);
            failure.get_or_insert(error);
        }
    }
    inner.confirmed.store(confirmed, Ordering::SeqCst);
    failure.map_or(Ok(()), Err)
}

/// Something failed at a layer that is done once in its life: it is tried again ever more seldom. Not where it failed for want of room, which
/// is made: then the next round tries again, and this is `false`.
fn leave_alone(inner: &Inner, layer: LayerId, error: &Error) -> bool {
    if matches!(error, Error::Full(_)) {
        return false;
    }
    let pause = inner.unmeasured.put_off(&layer);
    tracing::warn!(%layer, %error, ?pause, "a layer can be neither confirmed nor measured");
    true
}

/// What a layer costs; `None` when the engine stops meanwhile, or the layer or its content is not there, or is something else: `check` says
/// that, and nobody who waits for the rest of a round is to hear of it.
///
/// What is measured is confirmed: whoever named it in the index may have been killed before he said so in the layer, or the disk was full
/// then. No other time is as good, since each layer comes here once, early, and is opened anyway.
fn measure_layer(inner: &Inner, layer: LayerId) -> Result<Option<Usage>> {
    let dir = match inner.dirs.layers.open_beneath(layer.to_string()) {
        Err(error) if error.is(Errno::ENOENT) || error.is_no_directory() => return Ok(None),
        dir => dir.doing("open a layer")?,
    };
    match commit::confirm(inner, layer) {
        Err(Error::System { source, .. }) if source.is(Errno::ENOENT) => {
            tracing::warn!(%layer, "a layer has no record: an index made anew would not know it");
        }
        confirmed => confirmed?,
    }
    let known = inner.state.lock().usage.get(&layer).copied();
    if known.is_some() {
        return Ok(known);
    }
    if !dir.has(layout::FS).doing("look at a layer")? {
        return Ok(None);
    }
    match inner.backend.usage(&dir, &|| inner.stop.is_cancelled()) {
        Err(backend::Error::Stopped) => Ok(None),
        usage => usage.map(Some).doing("measure a layer"),
    }
}

/// Tells the index when artifacts were last used, if it has not known for long: where caches are only read nothing else is written, and after
/// a crash they would expire by a use that was long ago. How many it was told of.
fn remember_uses(inner: &Inner) -> Result<usize> {
    let now = inner.clock.now();
    let since = inner.state.lock().used.values().min().copied();
    if since.is_none_or(|since| since.after(inner.config.uses_unwritten) > now) {
        return Ok(0);
    }
    let uses = last_uses(inner);
    if !uses.is_empty() {
        inner.commit_index(&uses)?;
    }
    Ok(uses.len())
}

/// When artifacts were last used, for the index: written along with something else, if there is something else before long.
pub(super) fn last_uses(inner: &Inner) -> Vec<Change> {
    let mut state = inner.state.lock();
    let state = &mut *state;
    let mut changes = Vec::new();
    state.used.retain(|id, _| match state.artifacts.get(id) {
        Some(sealed) if sealed.durable => {
            changes.push(Change::PutArtifact(sealed.artifact.clone()));
            false
        }
        // The index is told of it as a whole before long.
        Some(_) => true,
        None => false,
    });
    changes
}

/// The reserve, and what to do when the disk is full.
impl Inner {
    /// Changes the index. When the disk is full, gives the reserve back, reopens the index and tries once more.
    pub(super) fn commit_index(&self, changes: &[Change]) -> Result<()> {
        let failed = |error: store::Error| {
            if error.is_full() && !error.is_unsure() {
                Error::Full(error.to_string().into())
            } else {
                error.into()
            }
        };
        match self.index.commit(changes) {
            Err(error) if error.is_full() => {
                tracing::warn!(%error, "the index could not be written");
                self.give_back_reserve(0);
                match self.index.reopen() {
                    Err(_) if error.is_unsure() => Err(Error::Index(error)),
                    Err(again) => Err(failed(again)),
                    Ok(()) if self.index.has(&error) => Ok(()),
                    Ok(()) => self.index.commit(changes).map_err(failed),
                }
            }
            result => result.map_err(failed),
        }
    }

    /// Does what must be possible on a full disk too: once more with the room that is held back, if it found none.
    pub(super) fn with_reserve<T>(
        &self,
        attempt: impl Fn() -> crate::sys::Result<T>,
    ) -> crate::sys::Result<T> {
        match attempt() {
            Err(error) if error.is_full() => {
                self.give_back_reserve(0);
                attempt()
            }
            result => result,
        }
    }

    /// Makes room for what must be possible on a full disk too, and asks for more room to be made ([`Inner::ask_for_room`]).
    pub(super) fn give_back_reserve(&self, bytes: u64) {
        match self.dirs.root.remove_file(layout::RESERVE) {
            Ok(()) => {
                tracing::warn!("the disk is full: the reserve is given back");
                point(Point::ReserveGivenBack);
            }
            Err(error) if error.is(Errno::ENOENT) => {}
            Err(error) => tracing::error!(%error, "the reserve could not be given back"),
        }
        self.ask_for_room(bytes);
    }

    /// Makes the reserve if it is not there and there is room for it: at most a sixteenth of a small pool. Whether all is there that
    /// is to be held back.
    pub(super) fn keep_reserve(&self) -> bool {
        let made = || -> crate::sys::Result<bool> {
            let root = &self.dirs.root;
            if self.config.reserve == 0 || root.has(layout::RESERVE)? {
                return Ok(true);
            }
            let space = root.space()?;
            let bytes = self.config.reserve.min(space.bytes / 16);
            if space.bytes_available < bytes.saturating_mul(2) {
                return Ok(false);
            }
            root.reserve(layout::RESERVE, bytes)?;
            point(Point::ReserveMade);
            Ok(true)
        };
        made().unwrap_or_else(|error| {
            tracing::warn!(%error, "the reserve could not be made");
            false
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excess_is_what_lies_above_the_watermark() {
        assert_eq!(excess(1000, 100, 85), 50);
        assert_eq!(excess(1000, 150, 85), 0);
        assert_eq!(
            excess(0, 0, 85),
            0,
            "a filesystem without a number of inodes is never short of them"
        );
        assert_eq!(excess(u64::MAX, 0, 0), u64::MAX);
    }
}
