//! The end of a retired volume: decides whether it is sealed, then seals, discards or deletes it.
//!
//! [`drive`] does the actions of `lifecycle` in a task of each volume. An artifact can be forked as
//! soon as its content is in place. Whether it is durable (`commit`) matters only to other
//! programs.
//!
//! Seals may end in any order, above all after a restart. The order of commits to one name is the
//! order in which they became due: the later of "its volume was unpublished" and, if its commit is
//! `on-success`, "its outcome became known". A commit that became due before the one that has the
//! name is not sealed. The first that is sealed keeps the name of a resource cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backoff::retry_after;
use super::clock::uptime;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::layers::trash_unreferenced;
use super::lifecycle::{Action, Lifecycle, Missing, Observation};
use super::notice::NotCommitted;
use super::pending::{deleted, trash_pending};
use super::policies;
use super::quiesce::until_unwritten;
use super::shared::Inner;
use super::state::State;
use super::threads::Pool;
use super::volumes::Volume;
use crate::backend;
use crate::model::{
    Artifact, Commit, CommitRight, LayerId, LayerRecord, Maker, Name, Outcome, SealPlan, Sharing,
    Timestamp, VolumeRecord, layout, takes_name,
};
use crate::store::{self, Wait};
use crate::sys::Errno;

/// Does the actions that end the volume's life, however often one fails. The first one is what
/// followed when no process could change the content any more.
pub(super) async fn drive(inner: &Arc<Inner>, key: LayerId, mut action: Action) {
    let mut attempt = 0;
    // Since when the pool has had no space for it.
    let mut short: Option<Instant> = None;
    loop {
        let done = match action {
            Action::Seal => seal_or_give_up(inner, key, short).await,
            Action::Delete => delete(inner, key).await,
            Action::MakeDurable => {
                // If the engine is closed, the next start does the rest.
                inner.durability.commit(key);
                return;
            }
            _ => return,
        };
        let error = match done {
            Ok(next) => {
                action = next;
                continue;
            }
            Err(error) => error,
        };
        short = matches!(error, Error::Full(_)).then(|| short.unwrap_or_else(Instant::now));
        let retry = retry_after(attempt, &error);
        tracing::warn!(layer = %key, %error, ?retry,
            "a step of a volume's teardown did not succeed yet; retrying");
        tokio::time::sleep(retry).await;
        attempt += 1;
    }
}

/// Whether a volume is sealed.
enum Verdict {
    Seal,
    GiveUp(NotCommitted),
    Await(Missing),
}

/// Seals a volume whose content is final, or gives it up. `short`: since when it finds no space; a
/// copy is given up after a while.
async fn seal_or_give_up(
    inner: &Arc<Inner>,
    key: LayerId,
    short: Option<Instant>,
) -> Result<Action> {
    let Some((plan, record)) = inner.seal_intent(key) else {
        return Ok(Action::Forget);
    };
    match decide_at_rest(inner, key, &plan, &record).await? {
        Verdict::Await(missing) => return await_decision(inner, key, missing).await,
        Verdict::GiveUp(why) => return give_up(inner, key, &why).await,
        Verdict::Seal => {}
    }
    let name = plan.name(&record.tenant);
    let is_settled = |state: &mut State| (!state.may_disappear(&name)).then_some(());
    inner.state.when(is_settled).await;
    let began = Instant::now();
    let job = move |inner: &Arc<Inner>| seal(inner, key, &plan, &record);
    match inner.run(Pool::Seals, job).await {
        Ok(Action::MakeDurable) => {
            inner.counters().sealed(began.elapsed());
            Ok(Action::MakeDurable)
        }
        // The policies changed during the seal, or the name got content that may disappear: it is
        // decided again.
        Ok(Action::Seal) => Ok(Action::Seal),
        Ok(action) => {
            inner.counters().given_up();
            Ok(action)
        }
        Err(Error::Backend {
            source: backend::Error::Refused { path, why },
            ..
        }) => {
            let why = NotCommitted::refused(&path, &why);
            give_up(inner, key, &why).await
        }
        Err(Error::Cleared(_)) => give_up(inner, key, &NotCommitted::Cleared).await,
        Err(Error::CopyTooLarge { needs, pool, .. }) => {
            give_up(inner, key, &NotCommitted::TooLarge { needs, pool }).await
        }
        Err(Error::Full(shortage)) => {
            // A seal needs a few blocks of its own. Until it has them, nothing that it holds can be
            // evicted.
            inner.give_back_reserve(shortage.needs);
            // The collector was asked for all that it could evict. Each new attempt of a copy would
            // take, for a moment, the space that others need.
            let waited = inner.config.room_wait;
            if inner.backend.copies() && short.is_some_and(|since| since.elapsed() >= waited) {
                return give_up(inner, key, &NotCommitted::NoRoom { waited }).await;
            }
            Err(Error::Full(shortage))
        }
        Err(error) => Err(error),
    }
}

/// Decides whether the volume is sealed, once no process writes to it.
async fn decide_at_rest(
    inner: &Arc<Inner>,
    key: LayerId,
    plan: &SealPlan,
    record: &VolumeRecord,
) -> Result<Verdict> {
    // The marker is content. Everything else can be decided before the walk that a wait costs.
    if plan.keep.commit == Commit::OnMarker {
        let at_rest = until_unwritten(inner, key, record).await;
        // A missing marker is reported before a failure to seal.
        return Ok(match (decide(inner, key, plan, record).await?, at_rest) {
            (Verdict::Seal, Err(why)) => Verdict::GiveUp(why),
            (verdict, _) => verdict,
        });
    }
    let verdict = decide(inner, key, plan, record).await?;
    if !matches!(verdict, Verdict::Seal) {
        return Ok(verdict);
    }
    match until_unwritten(inner, key, record).await {
        Ok(false) => Ok(Verdict::Seal),
        Ok(true) => decide(inner, key, plan, record).await,
        Err(why) => Ok(Verdict::GiveUp(why)),
    }
}

/// Decides whether the volume is sealed: its pod did what its `commit` asks for, no fence has
/// cleared its name since it was published, and the policies as they are now let its pod commit.
async fn decide(
    inner: &Arc<Inner>,
    key: LayerId,
    plan: &SealPlan,
    record: &VolumeRecord,
) -> Result<Verdict> {
    let verdict = decide_by_pod(inner, key, plan, record).await?;
    if !matches!(verdict, Verdict::Seal) {
        return Ok(verdict);
    }
    let name = plan.name(&record.tenant);
    let mut state = inner.state.lock();
    if plan.fence < state.fences.least(&name) {
        return Ok(Verdict::GiveUp(NotCommitted::Cleared));
    }
    Ok(match state.policies.commit_of(plan, record) {
        CommitRight::Allowed => Verdict::Seal,
        CommitRight::NotAllowed => Verdict::GiveUp(NotCommitted::NotAllowed {
            account: record.pod.service_account.clone(),
        }),
        CommitRight::Unknown => {
            let undecided = Observation::Undecided(Missing::Policies);
            state.volumes.observe_retiring(key, undecided);
            Verdict::Await(Missing::Policies)
        }
    })
}

async fn decide_by_pod(
    inner: &Arc<Inner>,
    key: LayerId,
    plan: &SealPlan,
    record: &VolumeRecord,
) -> Result<Verdict> {
    if inner.state.lock().write_back.is_tainted(record) {
        return Ok(Verdict::GiveUp(NotCommitted::Damaged));
    }
    Ok(match plan.keep.commit {
        Commit::Always => Verdict::Seal,
        Commit::Never => Verdict::GiveUp(NotCommitted::Never),
        Commit::OnMarker => {
            let job = move |inner: &Arc<Inner>| {
                let Some(dir) = inner.retired_dir(key)? else {
                    return Ok(false);
                };
                // A seal writes its record, then removes the marker: the record says that there was
                // one.
                if inner.is_recorded(key)? {
                    return Ok(true);
                }
                inner
                    .backend
                    .has_marker(&dir, layout::COMMIT_MARKER)
                    .context("look for the commit marker")
            };
            if inner.run(Pool::Seals, job).await? {
                Verdict::Seal
            } else {
                Verdict::GiveUp(NotCommitted::NoMarker)
            }
        }
        Commit::OnSuccess => {
            // Under one lock with the look: a caller that tells the outcome next finds that it is
            // waited for.
            let mut state = inner.state.lock();
            match state.volumes.retiring(key).and_then(Volume::outcome) {
                Some(Outcome::Succeeded) => Verdict::Seal,
                Some(Outcome::Failed) => Verdict::GiveUp(NotCommitted::PodFailed),
                None => {
                    let undecided = Observation::Undecided(Missing::Outcome);
                    state.volumes.observe_retiring(key, undecided);
                    Verdict::Await(Missing::Outcome)
                }
            }
        }
    })
}

/// Waits until what is missing is known, and gives the volume up if that takes too long.
async fn await_decision(inner: &Arc<Inner>, key: LayerId, missing: Missing) -> Result<Action> {
    let waited = inner.config.outcome_wait;
    let (wait, why) = match missing {
        Missing::Outcome => (Wait::Outcome, NotCommitted::OutcomeUnknown { waited }),
        Missing::Policies => {
            policies::say_missing(inner);
            (Wait::Policies, NotCommitted::PoliciesUnknown { waited })
        }
    };
    let waits = |state: &State| {
        let volume = state.volumes.retiring(key);
        volume.is_some_and(|volume| volume.lifecycle() == Lifecycle::Undecided(missing))
    };
    let earlier = waited_before(inner, key, wait, uptime().as_secs()).await;
    let patience = waited.saturating_sub(earlier);
    let known = inner.state.when(|state| (!waits(state)).then_some(()));
    // What became known in the last moment counts.
    if tokio::time::timeout(patience, known).await.is_err() && waits(&inner.state.lock()) {
        return give_up(inner, key, &why).await;
    }
    Ok(Action::Seal)
}

/// How long the volume waited for this in earlier processes, which counted until `now`.
async fn waited_before(inner: &Arc<Inner>, key: LayerId, wait: Wait, now: u64) -> Duration {
    let job = move |inner: &Arc<Inner>| {
        let Some(dir) = inner.retired_dir(key)? else {
            return Ok(Duration::ZERO);
        };
        let since = store::waiting_since(&dir, wait, now).context("record when the wait began")?;
        Ok(Duration::from_secs(now.saturating_sub(since)))
    };
    let waited = inner.run(Pool::Seals, job).await;
    waited.unwrap_or_else(|error| {
        tracing::debug!(layer = %key, %error, ?wait,
            "could not record when the wait began; a restart of the driver begins it again");
        Duration::ZERO
    })
}

/// Moves a volume's content into its layer and makes it visible. Forgets the volume if there is
/// nothing to seal, or if another artifact keeps the name.
fn seal(inner: &Inner, key: LayerId, plan: &SealPlan, record: &VolumeRecord) -> Result<Action> {
    let Some(volume) = inner.retired_dir(key)? else {
        tracing::error!(volume.id = %record.id, "the directory of a volume to be sealed is gone");
        inner.say_not_committed(record, &NotCommitted::Lost);
        inner.forget(key, Observation::Gone);
        return Ok(Action::Forget);
    };
    inner
        .dirs
        .layers
        .ensure_dir(key.to_string(), 0o700)
        .context("make the layer's directory")?;
    let layer = inner.layer_dir(key)?;
    point(Point::SealLayerMade);
    let artifact = if let Some(artifact) = begun(inner, key)? {
        artifact
    } else {
        let artifact = describe(inner, key, plan, record);
        match name_for(inner, &artifact) {
            NameFor::Seal => {}
            NameFor::Unsettled => return Ok(Action::Seal),
            NameFor::Owner => {
                tracing::info!(volume.id = %record.id, name = %artifact.name(),
                    why = %NotCommitted::NameTaken, "not sealed");
                inner.say_not_committed(record, &NotCommitted::NameTaken);
                inner
                    .throw_away(&inner.dirs.layers, key.to_string().as_ref())
                    .context("take back the layer")?;
                point(Point::SealGivenUp);
                trash_pending(inner, key)?;
                return Ok(Action::Forget);
            }
        }
        let known = LayerRecord::of(key, Some(artifact.clone()), None);
        store::write_sealing(&layer, &known).context("write the layer's record")?;
        artifact
    };
    point(Point::SealLayerRecorded);
    // Copies that have no space beside each other may have it one after the other.
    let _one_at_a_time = inner
        .backend
        .copies()
        .then(|| inner.teardown.copying.lock());
    inner
        .backend
        .seal(&volume, &layer, layout::COMMIT_MARKER)
        .context("seal the volume's content")?;
    point(Point::SealContentMoved);
    tracing::info!(volume.id = %record.id, artifact.id = %artifact.id, name = %artifact.name(),
        layers = artifact.layers.len(), "sealed");
    inner.saw(artifact.created);
    let action = {
        let mut state = inner.state.lock();
        if state.write_back.is_tainted(record) {
            // The disk failed during the seal. The caller tries again, and gives the volume up.
            return Err(Error::WritebackFailed);
        }
        // A fence may have been applied during the seal.
        let name = artifact.name();
        if plan.fence < state.fences.least(&name) {
            return Err(Error::Cleared(name));
        }
        // So may a change of the policies.
        if state.policies.commit_of(plan, record) != CommitRight::Allowed {
            return Ok(Action::Seal);
        }
        state.catalog.add_artifact(artifact);
        state.volumes.observe_retiring(key, Observation::Visible)
    };
    inner.state.notify();
    point(Point::SealVisible);
    Ok(action)
}

/// The artifact of a seal that a crash cut short after its content was in its place.
///
/// `None` if a layer below it is gone: the parent was flattened or deleted since. Then the layers
/// that the volume itself was mounted over serve as well; those are always kept.
fn begun(inner: &Inner, key: LayerId) -> Result<Option<Artifact>> {
    let layers = &inner.dirs.layers;
    let Some(layer) = inner.layer_dir_if_there(key)? else {
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

/// The layers that a seal which was cut short has chosen. They must stay until it is an artifact.
pub(super) fn layers_chosen(inner: &Inner, key: LayerId) -> Result<Vec<LayerId>> {
    Ok(begun(inner, key)?
        .map(|artifact| artifact.layers)
        .unwrap_or_default())
}

/// The artifact that the volume becomes. Its layers stay from here on.
fn describe(inner: &Inner, key: LayerId, plan: &SealPlan, record: &VolumeRecord) -> Artifact {
    let mut layers = vec![plan.layer];
    let mut state = inner.state.lock();
    if inner.backend.stacks() {
        layers.extend(state.catalog.parent_layers(record));
        state.volumes.choose(key, &layers);
    }
    let name = Name {
        tenant: record.tenant.clone(),
        reference: plan.reference.clone(),
    };
    let now = inner.now();
    let due = state.volumes.retiring(key).and_then(|volume| volume.due);
    let owner = state
        .catalog
        .owner(&name)
        .map(|owner| owner.artifact.created);
    let created = match owner {
        // The first that was sealed keeps a resource cache. A time ahead of the clock is wrong: any
        // later commit is newer.
        Some(owner) if plan.reference.first_writer_wins() || owner > now => {
            now.max(Timestamp(owner.0 + 1))
        }
        _ => due.map_or(now, |due| due.min(now)),
    };
    drop(state);
    let pods = inner.config.pods.as_ref();
    let images = pods.map_or_else(Vec::new, |pods| pods.images(&record.pod.uid));
    let maker = Maker::new(record.pod.clone(), images, inner.config.node.clone());
    Artifact {
        id: plan.artifact,
        tenant: record.tenant.clone(),
        reference: plan.reference.clone(),
        layers,
        created,
        ttl_seconds: plan.keep.ttl.map(|ttl| ttl.as_secs()),
        last_used: now,
        made_by: Some(Box::new(maker.of_fork(record.parent))),
        digests: crate::model::Digests::default(),
        sharing: Sharing {
            never: plan.never_shared,
            base: plan.base,
            ..Sharing::default()
        },
        fence: plan.fence,
    }
}

/// Which artifact gets a name.
enum NameFor {
    /// The one that is to be sealed.
    Seal,
    /// Its owner keeps it.
    Owner,
    /// The owner would keep it, and may disappear.
    Unsettled,
}

/// Which artifact gets the name of one that is to be sealed.
fn name_for(inner: &Inner, artifact: &Artifact) -> NameFor {
    let state = inner.state.lock();
    let name = artifact.name();
    match state.catalog.owner(&name) {
        Some(owner) if !takes_name(artifact, &owner.artifact) => {
            if state.may_disappear(&name) {
                NameFor::Unsettled
            } else {
                NameFor::Owner
            }
        }
        _ => NameFor::Seal,
    }
}

/// Says why a volume is not sealed, and moves it to the trash.
async fn give_up(inner: &Arc<Inner>, key: LayerId, why: &NotCommitted) -> Result<Action> {
    let intent = inner.seal_intent(key);
    if let Some((_, record)) = &intent {
        tracing::warn!(volume.id = %record.id, pod.uid = %record.pod.uid, %why, "not sealed");
    }
    let job = move |inner: &Arc<Inner>| {
        point(Point::SealGivenUp);
        trash_pending(inner, key)?;
        // The begun layer. If forks were made of it before a crash, it stays until they are gone.
        trash_unreferenced(inner, &[key]);
        Ok::<_, Error>(())
    };
    inner.run(Pool::Seals, job).await?;
    inner.counters().given_up();
    if let Some((_, record)) = &intent {
        inner.say_not_committed(record, why);
    }
    Ok(Action::Forget)
}

/// Deletes a volume in the trash that no process holds. It takes a slice of time for each part, and
/// others have their turn between two slices.
async fn delete(inner: &Arc<Inner>, key: LayerId) -> Result<Action> {
    /// After so many it is a failure, with a pause: a process may create names without end.
    const SLICES: usize = 60;
    const SLICE: Duration = Duration::from_secs(1);
    let mut slices = 0;
    loop {
        let job = move |inner: &Arc<Inner>| {
            let (trash, stop) = (&inner.dirs.trash, inner.patience_of(SLICE));
            let name = key.to_string();
            Ok(inner.backend.delete(trash, name.as_ref(), &stop))
        };
        slices += 1;
        match inner.run(Pool::Deletes, job).await? {
            Err(backend::Error::Stopped) if slices < SLICES && !inner.lifetime.is_stopping() => {}
            Err(backend::Error::System(error)) if error.is(Errno::ENOENT) => break,
            result => break result.context("delete the volume")?,
        }
    }
    deleted(inner, key);
    Ok(Action::Forget)
}
