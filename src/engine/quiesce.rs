//! Waiting for who still writes to a volume that is to be sealed, where the backend knows of no holders: then each file is asked who has it
//! open.
//!
//! That is a walk, and whoever filled the tree decides how long it is. So it runs on a thread of its own, for a bounded time, and
//! rests in between: a large tree delays nobody but others that are asked, and those for seconds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backoff::{look_again, retry_after};
use super::error::{Context, Error, Result};
use super::notice::NotCommitted;
use super::pending::tell_if_held_for_long;
use super::shared::Inner;
use super::types::VolumeState;
use crate::backend;
use crate::model::{LayerId, VolumeRecord};

/// How long the files of one volume are asked at a time, some hundred thousand of them. Whoever has more is not waited for.
const ASKING: Duration = Duration::from_secs(5);

/// How often it is asked again after that failed, in some twenty seconds in all.
const ASKED_AGAIN: usize = 5;

/// How many times as long as it was asked it is not asked.
const REST: u32 = 10;

/// Waits until no process has a file of the volume open for writing. Says whether there was one: then time has passed, and what was decided
/// before is to be decided anew. Where that cannot be found out it is not waited for; what could not be sealed anyway is given up.
///
/// `waits` is called before the first wait, which may be long.
pub(super) async fn until_unwritten(
    inner: &Arc<Inner>,
    key: LayerId,
    record: &VolumeRecord,
    mut waits: impl FnMut(),
) -> std::result::Result<bool, NotCommitted> {
    if inner.backend.knows_holders() {
        return Ok(false);
    }
    let (mut failures, mut looks) = (0, 0);
    loop {
        let engine = inner.clone();
        let asked = inner.threads.looks.run(move || ask(&engine, key));
        match asked.await.and_then(|asked| asked) {
            Ok((false, _)) => break,
            Ok((true, took)) => {
                if inner.state.lock().write_back.is_tainted(record) {
                    break;
                }
                waits();
                if inner.set_leaving_state(key, VolumeState::InUse) {
                    tracing::info!(layer = %key, "a process still writes to the volume; waiting until it is gone");
                    tell_if_held_for_long(inner, key);
                }
                failures = 0;
                looks += 1;
                tokio::time::sleep(look_again(looks).max(took * REST)).await;
            }
            // What is not known is not sealed by an engine that ends: the next start asks anew.
            Err(_) if inner.lifetime.is_stopping() => std::future::pending().await,
            // Whoever made it so could make it otherwise before it is sealed, and was not waited for.
            Err(Error::Backend {
                source: backend::Error::Refused { path, why },
                ..
            }) => return Err(NotCommitted::refused(&path, &why)),
            Err(error) if is_too_long(&error) => {
                tracing::info!(layer = %key, within = ?ASKING,
                    "the volume has too many files to ask each who has it open; it is sealed as it is");
                break;
            }
            Err(error) if failures == ASKED_AGAIN => {
                tracing::warn!(layer = %key, %error, "it is not known whether a process writes to the volume; it is sealed as it is");
                break;
            }
            Err(error) => {
                let retry = retry_after(failures, &error);
                tracing::debug!(layer = %key, %error, ?retry, "it is asked again who writes to the volume");
                failures += 1;
                tokio::time::sleep(retry).await;
            }
        }
    }
    let waited = looks > 0;
    if waited {
        inner.set_leaving_state(key, VolumeState::Sealing);
    }
    Ok(waited)
}

/// Whether there is one, and how long it took to find that out.
fn ask(inner: &Inner, key: LayerId) -> Result<(bool, Duration)> {
    let began = Instant::now();
    let Some(dir) = inner.leaving_dir(key)? else {
        return Ok((false, Duration::ZERO));
    };
    let stop = || inner.lifetime.is_stopping() || began.elapsed() > ASKING;
    let written = inner.backend.writers(&dir, &stop);
    Ok((
        written.context("ask who writes to the volume")?,
        began.elapsed(),
    ))
}

fn is_too_long(error: &Error) -> bool {
    matches!(
        error,
        Error::Backend {
            source: backend::Error::Stopped,
            ..
        }
    )
}
