//! What happens to a volume after its pod: it is frozen, its pod's outcome becomes known, and it is sealed or thrown away.
//!
//! One task per leaving volume ([`settle`]), but for those that end at once (`teardown`). An artifact can be forked as soon as its content is in its place; that it is
//! durable (`commit`) matters to others only.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::MutexGuard;

use super::backoff::retry_after;
use super::clock::uptime;
use super::durability::note_remembered;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::layers::trash_unreferenced;
use super::notice::{NotCommitted, say_not_committed};
use super::pending::{discarded, tell_if_held_for_long, trash_pending};
use super::quiesce::until_unwritten;
use super::release::{Watch, keep_while_held, released, until_released};
use super::shared::Inner;
use super::types::VolumeState;
use super::volumes::{Goal, Pin, Teardown};
use crate::backend::{self, Freeze};
use crate::model::{
    Artifact, Commit, LayerId, LayerRecord, Maker, Name, Outcome, SealPlan, Timestamp,
    VolumeRecord, layout, takes_name,
};
use crate::store;
use crate::sys::Errno;

/// For which part of all the time each process tries, at least, before it gives a copy up that finds no room, however long others found none
/// before it: while there was no driver nobody evicted anything, and one that begins has only just asked for that.
const NO_ROOM_AT_LEAST: u32 = 10;

/// Sees a leaving volume to its end, however often a step fails.
/// `found`: what the first attempt to freeze it came to, if there was one.
pub(super) async fn settle(inner: &Arc<Inner>, left: Teardown, found: Option<Result<Freeze>>) {
    let key = left.key;
    if let Some(watch) = freeze(inner, left, found).await {
        match inner.leaving(key) {
            Some((Goal::Discard, _)) => until_released(inner, key, watch).await,
            Some((Goal::Seal(_), record)) => keep_while_held(inner, key, record.layers, watch),
            None => {}
        }
    }
    point(Point::SealFrozen);
    let mut attempt = 0;
    let mut short: Option<Short> = None;
    loop {
        // Copies that found no room go on one at a time: together none of them might ever find it.
        let alone = match short {
            Some(_) => Some(inner.teardown.copying.lock().await),
            None => None,
        };
        match end(inner, key, &mut short, alone).await {
            Ok(()) => return,
            Err(error) => {
                short = match error {
                    Error::Full(_) if is_copy(inner) => short.or_else(|| Some(Short::now())),
                    _ => {
                        if is_copy(inner) {
                            no_longer_short(inner, key).await;
                        }
                        None
                    }
                };
                let retry = retry_after(attempt, &error);
                tracing::warn!(layer = %key, %error, ?retry, "a volume's end did not succeed yet");
                tokio::time::sleep(retry).await;
                attempt += 1;
            }
        }
    }
}

/// That a copy has found no room, as far as this process knows.
#[derive(Debug, Clone, Copy)]
struct Short {
    since: Instant,
    /// When that was, in seconds since the boot.
    uptime: u64,
}

impl Short {
    fn now() -> Self {
        Self {
            since: Instant::now(),
            uptime: uptime(),
        }
    }
}

/// Waits until nobody can change the volume's content any more. If somebody still looks at it, what tells the end of that.
async fn freeze(
    inner: &Arc<Inner>,
    left: Teardown,
    mut found: Option<Result<Freeze>>,
) -> Option<Watch> {
    let Teardown { key, mut pin } = left;
    let (mut failures, mut looks) = (0, 0);
    loop {
        let answer = match found.take() {
            Some(answer) => answer,
            None => try_to_freeze(inner, key, pin.take()).await,
        };
        match answer {
            Ok(Freeze::Frozen) => return None,
            Ok(Freeze::Held(watch)) => {
                tracing::info!(layer = %key, "a process still looks at the volume");
                return Some(watch);
            }
            Ok(Freeze::Busy(watch)) => {
                if inner.set_leaving_state(key, VolumeState::InUse) {
                    tracing::info!(layer = %key, "a process still holds the volume; waiting until it is gone");
                    tell_if_held_for_long(inner, key);
                }
                released(watch, looks).await;
                looks += 1;
                failures = 0;
            }
            Err(error) => {
                let retry = retry_after(failures, &error);
                tracing::warn!(layer = %key, %error, ?retry, "the volume could not be frozen");
                tokio::time::sleep(retry).await;
                failures += 1;
            }
        }
    }
}

async fn try_to_freeze(inner: &Arc<Inner>, key: LayerId, pin: Option<Pin>) -> Result<Freeze> {
    let engine = inner.clone();
    let frozen = inner.threads.freezes.run(move || {
        let Some(dir) = engine.leaving_dir(key)? else {
            return Ok(Freeze::Frozen);
        };
        let (descriptor, _place) = pin.map(|pin| (pin.descriptor, pin.place)).unzip();
        // Asked while it is there: what is mounted nowhere remembers nothing.
        if let (Some(mount), Some((Goal::Seal(_), record))) = (&descriptor, engine.leaving(key)) {
            note_remembered(&engine, &record, mount.as_fd());
        }
        let frozen = engine.backend.freeze(&dir, descriptor);
        frozen.context("freeze the volume's content")
    });
    frozen.await?
}

/// Seals or throws away a volume whose content is final. A copy that finds no room is given up after a while. `alone` is held as long as the
/// copy is made, but not while a process is waited for that still writes to the volume.
async fn end(
    inner: &Arc<Inner>,
    key: LayerId,
    short: &mut Option<Short>,
    mut alone: Option<MutexGuard<'_, ()>>,
) -> Result<()> {
    let Some((goal, record)) = inner.leaving(key) else {
        return Ok(());
    };
    match goal {
        Goal::Seal(plan) => {
            match decide_at_rest(inner, key, &plan, &record, || alone = None).await? {
                Ok(()) => {
                    // It was waited for: whether there is room now nobody has tried.
                    if alone.is_none() && short.take().is_some() {
                        no_longer_short(inner, key).await;
                    }
                    inner.set_leaving_state(key, VolumeState::Sealing);
                    let engine = inner.clone();
                    let began = Instant::now();
                    let sealed = inner
                        .threads
                        .seals
                        .run(move || seal(&engine, key, &plan, &record))
                        .await?;
                    match sealed {
                        Ok(Sealed::Visible) => {
                            inner.counters().sealed(began.elapsed());
                            Ok(())
                        }
                        Ok(Sealed::Not) => {
                            inner.counters().given_up();
                            Ok(())
                        }
                        Err(Error::Backend {
                            source: backend::Error::Refused { path, why },
                            ..
                        }) => {
                            let why = NotCommitted::refused(&path, &why);
                            give_up(inner, key, &why).await
                        }
                        Err(Error::CopyTooLarge { needs, pool, .. }) => {
                            let why = NotCommitted::TooLarge { needs, pool };
                            give_up(inner, key, &why).await
                        }
                        Err(Error::Full(shortage)) => {
                            // A seal needs a few blocks of its own. Until it has them nothing of what it holds can be evicted.
                            inner.give_back_reserve(shortage.needs);
                            without_room(inner, key, *short, Error::Full(shortage)).await
                        }
                        Err(error) => Err(error),
                    }
                }
                Err(why) => give_up(inner, key, &why).await,
            }
        }
        Goal::Discard => discard(inner, key).await,
    }
}

/// Whether a seal copies the content here, and so may need as much room as that has.
fn is_copy(inner: &Inner) -> bool {
    !inner.backend.has_snapshots() && !inner.backend.stacks()
}

/// What becomes of a copy for which there is no room. All that could go for it was asked to: after a while it is given up, or it would be
/// begun again and again, and take for a moment each time the room that others need.
async fn without_room(
    inner: &Arc<Inner>,
    key: LayerId,
    short: Option<Short>,
    error: Error,
) -> Result<()> {
    let waited = inner.config.room_wait;
    let Some(short) = short else {
        return Err(error);
    };
    let earlier = waited_before(inner, key, store::Wait::Room, short.uptime).await;
    let patience = waited.saturating_sub(earlier);
    if short.since.elapsed() >= patience.max(waited / NO_ROOM_AT_LEAST) {
        give_up(inner, key, &NotCommitted::NoRoom { waited }).await
    } else {
        Err(error)
    }
}

/// Something else kept a copy from being made than that there is no room: that is counted anew.
async fn no_longer_short(inner: &Arc<Inner>, key: LayerId) {
    let engine = inner.clone();
    let forgotten = inner
        .threads
        .seals
        .run(move || match engine.leaving_dir(key)? {
            Some(dir) => store::waits_no_more(&dir, store::Wait::Room)
                .context("forget that no room was found"),
            None => Ok(()),
        });
    if let Err(error) = forgotten.await.and_then(|forgotten| forgotten) {
        tracing::debug!(layer = %key, %error, "an earlier wait for room is counted too");
    }
}

/// Whether the volume is to be sealed, once nobody writes to it any more; if not, why. `waits` is called before that is waited for.
async fn decide_at_rest(
    inner: &Arc<Inner>,
    key: LayerId,
    plan: &SealPlan,
    record: &VolumeRecord,
    waits: impl FnMut(),
) -> Result<Result<(), NotCommitted>> {
    // The marker is content. For all else it costs nothing to know first that nothing is to be sealed.
    if plan.keep.commit == Commit::OnMarker {
        let at_rest = until_unwritten(inner, key, record, waits).await;
        // That its step did not mark it comes before that it could not be sealed.
        let decided = decide(inner, key, plan, record).await?;
        return Ok(decided.and(at_rest.map(drop)));
    }
    if let Err(why) = decide(inner, key, plan, record).await? {
        return Ok(Err(why));
    }
    match until_unwritten(inner, key, record, waits).await {
        Ok(false) => Ok(Ok(())),
        Ok(true) => decide(inner, key, plan, record).await,
        Err(why) => Ok(Err(why)),
    }
}

/// Whether the volume's pod did what its `commit` asks for; if not, why.
async fn decide(
    inner: &Arc<Inner>,
    key: LayerId,
    plan: &SealPlan,
    record: &VolumeRecord,
) -> Result<Result<(), NotCommitted>> {
    if inner.state.lock().write_back.is_tainted(record) {
        return Ok(Err(NotCommitted::Damaged));
    }
    Ok(match plan.keep.commit {
        Commit::Always => Ok(()),
        Commit::Never => Err(NotCommitted::Never),
        Commit::OnMarker => {
            let engine = inner.clone();
            let marked = inner.threads.seals.run(move || {
                let Some(dir) = engine.leaving_dir(key)? else {
                    return Ok(false);
                };
                // Sealing begins with the record and then takes the marker away: the record says that it was there.
                if engine.is_recorded(key)? {
                    return Ok(true);
                }
                engine
                    .backend
                    .has_marker(&dir, layout::COMMIT_MARKER)
                    .context("look for the commit marker")
            });
            if marked.await?? {
                Ok(())
            } else {
                Err(NotCommitted::NoMarker)
            }
        }
        Commit::OnSuccess => match outcome(inner, key).await {
            Some(Outcome::Succeeded) => Ok(()),
            Some(Outcome::Failed) => Err(NotCommitted::PodFailed),
            None => Err(NotCommitted::OutcomeUnknown {
                waited: inner.config.outcome_wait,
            }),
        },
    })
}

/// Waits until the outcome of the volume's pod is known; `None` when it has not become known in time.
async fn outcome(inner: &Arc<Inner>, key: LayerId) -> Option<Outcome> {
    let known = inner.state.when(|state| {
        let Some(leaving) = state.volumes.retiring.get_mut(&key) else {
            return Some(None);
        };
        if leaving.outcome.is_none() {
            // Together with the look: who is told the outcome next finds that it is waited for, and says that no more.
            leaving.state = VolumeState::AwaitingOutcome;
        }
        leaving.outcome.map(Some)
    });
    tokio::pin!(known);
    let waited = tokio::select! {
        biased;
        // Mostly it is: then nothing is noted.
        known = &mut known => return known,
        () = std::future::ready(()) => waited_before(inner, key, store::Wait::Outcome, uptime()).await,
    };
    let patience = inner.config.outcome_wait.saturating_sub(waited);
    match tokio::time::timeout(patience, known).await {
        Ok(known) => known,
        // Whoever told it at the last moment was told that it counts.
        Err(_) => inner.state.lock().volumes.retiring.get(&key)?.outcome,
    }
}

/// How long earlier processes, which began to count, had the volume wait for this when this one began to, at `now`.
async fn waited_before(inner: &Arc<Inner>, key: LayerId, wait: store::Wait, now: u64) -> Duration {
    let engine = inner.clone();
    let noted = inner.threads.seals.run(move || {
        let Some(dir) = engine.leaving_dir(key)? else {
            return Ok(Duration::ZERO);
        };
        let since = store::waiting_since(&dir, wait, now).context("note since when it waits")?;
        Ok(Duration::from_secs(now.saturating_sub(since)))
    });
    let waited = noted.await.and_then(|noted: Result<Duration>| noted);
    waited.unwrap_or_else(|error| {
        tracing::debug!(layer = %key, %error, ?wait, "the wait is counted by this process only");
        Duration::ZERO
    })
}

/// What came of a seal that was decided.
enum Sealed {
    Visible,
    /// There was nothing to seal, or somebody else has the name.
    Not,
}

/// Moves a volume's content into its layer and makes it visible.
fn seal(inner: &Inner, key: LayerId, plan: &SealPlan, record: &VolumeRecord) -> Result<Sealed> {
    let Some(volume) = inner.leaving_dir(key)? else {
        tracing::error!(volume.id = %record.id, "the directory of a volume to be sealed is gone");
        say_not_committed(inner.config.notices.as_ref(), record, &NotCommitted::Lost);
        inner.forget_leaving(key);
        return Ok(Sealed::Not);
    };
    inner
        .dirs
        .layers
        .ensure_dir(key.to_string(), 0o700)
        .context("make the layer's directory")?;
    let layer = inner
        .dirs
        .layers
        .open_beneath(key.to_string())
        .context("open the layer's directory")?;
    point(Point::SealLayerMade);
    let artifact = if let Some(artifact) = begun(inner, key)? {
        artifact
    } else {
        let artifact = describe(inner, key, plan, record);
        if loses_its_name(inner, &artifact) {
            tracing::info!(volume.id = %record.id, name = %artifact.name(), why = %NotCommitted::NameTaken, "not sealed");
            say_not_committed(
                inner.config.notices.as_ref(),
                record,
                &NotCommitted::NameTaken,
            );
            inner
                .throw_away(&inner.dirs.layers, key.to_string().as_ref())
                .context("take back the layer")?;
            point(Point::SealGivenUp);
            trash_pending(inner, key)?;
            return Ok(Sealed::Not);
        }
        let known = LayerRecord {
            format: LayerRecord::FORMAT,
            id: key,
            artifact: Some(artifact.clone()),
            claim: None,
        };
        store::write_sealing(&layer, &known).context("write the layer's record")?;
        artifact
    };
    point(Point::SealLayerRecorded);
    inner
        .backend
        .seal(&volume, &layer, layout::COMMIT_MARKER)
        .context("seal the volume's content")?;
    point(Point::SealContentMoved);
    tracing::info!(volume.id = %record.id, artifact.id = %artifact.id, name = %artifact.name(),
        layers = artifact.layers.len(), "sealed");
    inner.saw(artifact.created);
    {
        let mut state = inner.state.lock();
        if state.write_back.is_tainted(record) {
            // The disk failed while this was under way; the caller comes back and gives it up.
            return Err(Error::Doomed);
        }
        state.catalog.add_artifact(artifact);
    }
    inner.state.notify();
    point(Point::SealVisible);
    inner.durability.commit(key);
    Ok(Sealed::Visible)
}

/// The artifact of a seal that a crash cut short after its content was in its place; what it promised is what is kept.
///
/// Only if all that it stacks is there: the parent may have been flattened or deleted since, and then the layers that
/// the volume itself was mounted over, which are always kept, serve as well.
fn begun(inner: &Inner, key: LayerId) -> Result<Option<Artifact>> {
    let layers = &inner.dirs.layers;
    let layer = layers.open_if_there(key.to_string());
    let Some(layer) = layer.context("open the layer's directory")? else {
        return Ok(None);
    };
    if !layer.has(layout::FS).context("look at the layer")? {
        return Ok(None);
    }
    let Ok(known) = store::read_sealing(&layer).context("read the layer's record")? else {
        return Ok(None);
    };
    let Some(artifact) = known.artifact else {
        return Ok(None);
    };
    for below in &artifact.layers {
        if !layers.has(below.to_string()).context("look for a layer")? {
            return Ok(None);
        }
    }
    Ok(Some(artifact))
}

/// The layers that a seal cut short has chosen; they must stay until it is an artifact.
pub(super) fn layers_chosen(inner: &Inner, key: LayerId) -> Result<Vec<LayerId>> {
    Ok(begun(inner, key)?
        .map(|artifact| artifact.layers)
        .unwrap_or_default())
}

/// The artifact that the volume becomes. Its layers are kept from here on.
fn describe(inner: &Inner, key: LayerId, plan: &SealPlan, record: &VolumeRecord) -> Artifact {
    let mut layers = vec![plan.layer];
    let mut state = inner.state.lock();
    if inner.backend.stacks() {
        layers.extend(state.catalog.parent_layers(record));
        if let Some(leaving) = state.volumes.retiring.get_mut(&key) {
            leaving.chosen.clone_from(&layers);
        }
    }
    // Who came later is later, whatever a clock said that was wrong when the name's holder was sealed.
    let name = Name {
        tenant: record.tenant.clone(),
        reference: plan.reference.clone(),
    };
    let holder = state.catalog.owner(&name);
    let after_holder = holder.map_or(0, |holder| holder.artifact.created.0 + 1);
    let created = Timestamp(inner.now().0.max(after_holder));
    drop(state);
    let pods = inner.config.pods.as_ref();
    let images = pods.map_or_else(Vec::new, |pods| pods.images(&record.pod.uid));
    Artifact {
        id: plan.artifact,
        tenant: record.tenant.clone(),
        reference: plan.reference.clone(),
        layers,
        created,
        ttl_seconds: plan.keep.ttl.map(|ttl| ttl.as_secs()),
        last_used: created,
        made_by: Some(Box::new(Maker::new(record.pod.clone(), images))),
        digests: crate::model::Digests::default(),
    }
}

fn loses_its_name(inner: &Inner, artifact: &Artifact) -> bool {
    let state = inner.state.lock();
    let holder = state.catalog.owner(&artifact.name());
    holder.is_some_and(|holder| {
        artifact.reference.first_writer_wins() && !takes_name(artifact, &holder.artifact)
    })
}

/// Says why a volume is not sealed, and throws it away.
async fn give_up(inner: &Arc<Inner>, key: LayerId, why: &NotCommitted) -> Result<()> {
    let leaving = inner.leaving(key);
    if let Some((_, record)) = &leaving {
        tracing::warn!(volume.id = %record.id, pod.uid = %record.pod.uid, %why, "not sealed");
    }
    let engine = inner.clone();
    let job = move || {
        point(Point::SealGivenUp);
        trash_pending(&engine, key)?;
        // What was begun of the layer. Forks may have been made of it before a crash: then it stays until they are gone.
        trash_unreferenced(&engine, &[key]);
        Ok::<_, Error>(())
    };
    inner.threads.seals.run(job).await??;
    inner.counters().given_up();
    if let Some((_, record)) = &leaving {
        say_not_committed(inner.config.notices.as_ref(), record, why);
    }
    Ok(())
}

/// Deletes a volume in the trash that no process holds any more: a slice at a time, and between two of them others have their turn.
async fn discard(inner: &Arc<Inner>, key: LayerId) -> Result<()> {
    /// After so many it is a failure: somebody may be filling it as fast as it is deleted.
    const SLICES: usize = 10;
    const SLICE: Duration = Duration::from_secs(1);
    let mut slices = 0;
    loop {
        let engine = inner.clone();
        let job = move || {
            let (trash, stop) = (&engine.dirs.trash, engine.patience_of(SLICE));
            let name = key.to_string();
            engine.backend.delete(trash, name.as_ref(), &stop)
        };
        slices += 1;
        match inner.threads.deletes.run(job).await? {
            Err(backend::Error::Stopped) if slices < SLICES && !inner.lifetime.is_stopping() => {}
            Err(backend::Error::System(error)) if error.is(Errno::ENOENT) => break,
            result => break result.context("delete the volume")?,
        }
    }
    discarded(inner, key);
    Ok(())
}
