//! Waiting until nobody has the files of a volume open any more, whose pod is done with it.
//! What becomes of the volume then is `seal`.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::backoff::look_again;
use super::error::{Context, Result};
use super::shared::Inner;
use crate::model::LayerId;
use crate::sys;

/// What tells that a volume is let go, if anything does.
pub(super) type Watch = Option<OwnedFd>;

/// How long an event is trusted to come; after it the volume is looked at anyway.
const TRUST_EVENT: Duration = Duration::from_secs(60);

/// Keeps what a sealed volume shows while a process looks at it. Such a one is of a pod that was deleted by force. Its directory stays in
/// the trash as long, so that the next start knows of it.
pub(super) fn keep_while_held(
    inner: &Arc<Inner>,
    key: LayerId,
    mut layers: Vec<LayerId>,
    watch: Watch,
) {
    layers.push(key);
    inner
        .state
        .lock()
        .volumes
        .retained_layers
        .insert(key, layers);
    let engine = inner.clone();
    let task = async move {
        tokio::select! {
            () = until_released(&engine, key, watch) => {
                engine.state.lock().volumes.retained_layers.remove(&key);
                engine.wake_reaper();
            }
            () = engine.lifetime.stopping() => {}
        }
    };
    inner.lifetime.spawn(task);
}

/// Waits until nobody has the volume open any more.
pub(super) async fn until_released(inner: &Arc<Inner>, key: LayerId, mut watch: Watch) {
    let mut looks = 0;
    loop {
        released(watch.take(), looks).await;
        looks += 1;
        let engine = inner.clone();
        match inner
            .threads
            .seals
            .run(move || is_held(&engine, key))
            .await
            .and_then(|result| result)
        {
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => {
                tracing::warn!(layer = %key, %error, "it is not known whether the volume is in use");
            }
        }
    }
}

/// Whether somebody has open what is, or was, the top of a leaving volume.
fn is_held(inner: &Inner, key: LayerId) -> Result<bool> {
    let name = key.to_string();
    for place in [&inner.dirs.pending, &inner.dirs.trash, &inner.dirs.layers] {
        let dir = place.open_if_there(&name);
        if let Some(dir) = dir.context("open the volume's directory")? {
            let in_use = inner.backend.in_use(&dir);
            if in_use.context("ask whether the volume is in use")? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Waits for the event that the last holder is gone, or for the time to look again: soon at first, because the kernel lets
/// go of a top a moment after it has told.
pub(super) async fn released(watch: Watch, looks: usize) {
    let look_again = look_again(looks);
    let Some(watch) = watch else {
        return tokio::time::sleep(look_again).await;
    };
    // However the wait ends, it leads to the same question to the kernel.
    if let Ok(Err(error)) = tokio::time::timeout(TRUST_EVENT, sys::readable(watch)).await {
        tracing::debug!(%error, "no event will come");
        tokio::time::sleep(look_again).await;
    }
}
