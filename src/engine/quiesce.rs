//! Quiescing: waiting until no process can change, or holds open, the files of a retired volume.
//!
//! Most backends freeze the content and are told when the last holder is gone. If a backend cannot
//! report holders, the driver checks each file for open writers. The tenant's content decides the
//! length of that walk. So it runs on a thread of its own, for a bounded time, with pauses.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backoff::{look_again, retry_after};
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::lifecycle::{Action, Goal, Observation};
use super::notice::NotCommitted;
use super::pending::tell_if_held_for_long;
use super::shared::Inner;
use super::teardowns::{Pin, Teardown};
use super::threads::Pool;
use super::writeback_failure::note_remembered;
use crate::backend::{self, Freeze};
use crate::model::{LayerId, VolumeRecord};
use crate::sys;

/// A descriptor that tells when a volume is released, if there is one.
type Watch = Option<OwnedFd>;

/// How long an event is trusted to come. After it the kernel is asked anyway.
const TRUST_EVENT: Duration = Duration::from_secs(60);

/// How long the files of one volume are asked at a time, some hundred thousand of them. A volume
/// with more files is not waited for.
const ASKING: Duration = Duration::from_secs(5);

/// How often a failed question is repeated, in some twenty seconds in all.
const ASKED_AGAIN: usize = 5;

/// The rest after a question, as a multiple of the time that it took.
const REST: u32 = 10;

/// Waits until no process can change the volume's content. Returns what is to be done then.
/// `first`: the result of the first attempt to freeze it, if there was one.
pub(super) async fn quiesce(
    inner: &Arc<Inner>,
    left: Teardown,
    first: Option<Result<Freeze>>,
) -> Action {
    let key = left.key;
    if let Some(watch) = until_frozen(inner, left, first).await {
        match inner.goal(key) {
            Some(Goal::Discard) => until_released(inner, key, watch).await,
            Some(Goal::Seal) => {
                if let Some((_, record)) = inner.seal_intent(key) {
                    keep_while_held(inner, key, record.layers, watch);
                }
            }
            None => {}
        }
    }
    point(Point::SealFrozen);
    inner.observe(key, Observation::Quiet)
}

/// Waits until no process can change the content. If a process still reads it: the descriptor that
/// tells the end of that.
async fn until_frozen(
    inner: &Arc<Inner>,
    left: Teardown,
    mut first: Option<Result<Freeze>>,
) -> Option<Watch> {
    let Teardown { key, mut pin } = left;
    let (mut failures, mut looks) = (0, 0);
    loop {
        let answer = match first.take() {
            Some(answer) => answer,
            None => try_to_freeze(inner, key, pin.take()).await,
        };
        match answer {
            Ok(Freeze::Frozen) => return None,
            Ok(Freeze::Held(watch)) => {
                tracing::info!(layer = %key, "a process still reads the volume");
                return Some(watch);
            }
            Ok(Freeze::Busy(watch)) => {
                if inner.observe(key, Observation::Held) == Action::ReportHeld {
                    tracing::info!(layer = %key,
                        "a process still holds the volume; waiting until it is gone");
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
    let job = move |inner: &Arc<Inner>| {
        let Some(dir) = inner.retired_dir(key)? else {
            return Ok(Freeze::Frozen);
        };
        let (descriptor, _permit) = pin.map(|pin| (pin.descriptor, pin.permit)).unzip();
        // Asked while the mount exists: only a mount remembers a write-back error.
        if let (Some(mount), Some((_, record))) = (&descriptor, inner.seal_intent(key)) {
            note_remembered(inner, &record, mount.as_fd());
        }
        let frozen = inner.backend.freeze(&dir, descriptor);
        frozen.context("freeze the volume's content")
    };
    inner.run(Pool::Freezes, job).await
}

/// Keeps the layers of a sealed volume while a process reads it, of a pod that was deleted by
/// force. Its directory stays in the trash as long, so that the next start knows of it.
pub(super) fn keep_while_held(
    inner: &Arc<Inner>,
    key: LayerId,
    mut layers: Vec<LayerId>,
    watch: Watch,
) {
    layers.push(key);
    inner.state.lock().volumes.retain(key, layers);
    let engine = inner.clone();
    let task = async move {
        tokio::select! {
            () = until_released(&engine, key, watch) => {
                engine.state.lock().volumes.release(key);
                engine.wake_reaper();
            }
            () = engine.lifetime.stopping() => {}
        }
    };
    inner.lifetime.spawn(task);
}

/// Waits until no process has the volume open.
async fn until_released(inner: &Arc<Inner>, key: LayerId, mut watch: Watch) {
    let mut looks = 0;
    loop {
        released(watch.take(), looks).await;
        looks += 1;
        let job = move |inner: &Arc<Inner>| is_held(inner, key);
        match inner.run(Pool::Seals, job).await {
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => {
                tracing::warn!(layer = %key, %error,
                    "could not find out whether the volume is in use; retrying");
            }
        }
    }
}

/// Whether a process has the volume open, wherever its upper directory is by now.
fn is_held(inner: &Inner, key: LayerId) -> Result<bool> {
    let name = key.to_string();
    for parent in [&inner.dirs.pending, &inner.dirs.trash, &inner.dirs.layers] {
        let dir = parent.open_if_there(&name);
        if let Some(dir) = dir.context("open the volume's directory")? {
            let in_use = inner.backend.in_use(&dir);
            if in_use.context("ask whether the volume is in use")? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Waits for the event that the last holder is gone, or for the time to ask again. That is soon at
/// first, because the kernel frees an upper directory a moment after the event.
async fn released(watch: Watch, looks: usize) {
    let look_again = look_again(looks);
    let Some(watch) = watch else {
        return tokio::time::sleep(look_again).await;
    };
    // However the wait ends, the kernel is asked next.
    if let Ok(Err(error)) = tokio::time::timeout(TRUST_EVENT, sys::readable(watch)).await {
        tracing::debug!(%error, "cannot wait for the kernel's event; polling instead");
        tokio::time::sleep(look_again).await;
    }
}

/// Waits until no process has a file of the volume open for writing. Returns whether one had: then
/// time has passed, and an earlier decision to seal is to be made again. If that cannot be found
/// out, the volume is not waited for. The error is why the volume cannot be sealed anyway.
pub(super) async fn until_unwritten(
    inner: &Arc<Inner>,
    key: LayerId,
    record: &VolumeRecord,
) -> std::result::Result<bool, NotCommitted> {
    if inner.backend.stacks() {
        return Ok(false);
    }
    let (mut failures, mut looks) = (0, 0);
    let ended = loop {
        let job = move |inner: &Arc<Inner>| ask(inner, key);
        match inner.run(Pool::Looks, job).await {
            Ok((false, _)) => break Ok(()),
            Ok((true, took)) => {
                if inner.state.lock().write_back.is_tainted(record) {
                    break Ok(());
                }
                if inner.observe(key, Observation::Held) == Action::ReportHeld {
                    tracing::info!(layer = %key,
                        "a process still writes to the volume; waiting until it is gone");
                    tell_if_held_for_long(inner, key);
                }
                failures = 0;
                looks += 1;
                tokio::time::sleep(look_again(looks).max(took * REST)).await;
            }
            // An engine that ends seals nothing that it does not know: the next start asks again.
            Err(_) if inner.lifetime.is_stopping() => std::future::pending().await,
            // The content was made so that it cannot be asked. It could have been changed before
            // the seal, too, so it is not waited for.
            Err(Error::Backend {
                source: backend::Error::Refused { path, why },
                ..
            }) => break Err(NotCommitted::refused(&path, &why)),
            Err(error) if error.is_stopped() => {
                tracing::info!(layer = %key, within = ?ASKING,
                    "the volume has too many files to check each for writers; it is sealed as it \
                     is");
                break Ok(());
            }
            Err(error) if failures == ASKED_AGAIN => {
                tracing::warn!(layer = %key, %error,
                    "could not find out whether a process writes to the volume; it is sealed as it \
                     is");
                break Ok(());
            }
            Err(error) => {
                let retry = retry_after(failures, &error);
                tracing::debug!(layer = %key, %error, ?retry,
                    "could not find out whether a process writes to the volume; retrying");
                failures += 1;
                tokio::time::sleep(retry).await;
            }
        }
    };
    let waited = looks > 0;
    if waited {
        inner.observe(key, Observation::Quiet);
    }
    ended.map(|()| waited)
}

/// Whether a process writes to the volume, and how long it took to find that out.
fn ask(inner: &Inner, key: LayerId) -> Result<(bool, Duration)> {
    let began = Instant::now();
    let Some(dir) = inner.retired_dir(key)? else {
        return Ok((false, Duration::ZERO));
    };
    let stop = || inner.lifetime.is_stopping() || began.elapsed() > ASKING;
    let written = inner.backend.writers(&dir, &stop);
    Ok((
        written.context("ask who writes to the volume")?,
        began.elapsed(),
    ))
}
