//! Fetches of single layers from peers. A fetch continues when a peer restarts with another key,
//! when another peer gets the content, and when the pod ends that authorizes the fetch. `fetch` is
//! about whole artifacts.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::context::{Context, value};
use super::fetch::{PAUSE, try_layer};
use super::offered::Offered;
use super::roster::Reader;
use super::search::{Rest, rest};
use crate::archive::toc::Table;
use crate::engine::LayerPlace;
use crate::model::{ArtifactId, Name};
use crate::shared::{Error, LayerRef, Result, Source};

/// How long all sources may give nothing: while a pod waits, and while none does. Then the fetch
/// fails. Its verified bytes stay for the next fetch (`engine::parts`).
const AWAY: Duration = Duration::from_secs(120);
pub(super) const UNAWAITED: Duration = Duration::from_secs(15);
/// How long no node may have the rest, until the pods that can start without it do so. A driver
/// that restarts is back by then.
const GONE: Duration = Duration::from_secs(10);
/// The longest pause between two attempts.
const LONGEST: Duration = Duration::from_secs(2);

/// The pods that wait for fetches now.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<Vec<Weak<Waits>>>);

/// A pod that waits for a fetch, until this is dropped.
#[derive(Debug)]
pub(super) struct Waits {
    name: Name,
    artifact: ArtifactId,
    reader: Reader,
    /// No node has the rest.
    gone: CancellationToken,
}

impl Waits {
    /// Ends when no node has had the rest of the content for a while.
    pub(super) async fn gone(&self) {
        self.gone.cancelled().await;
    }
}

impl Readers {
    /// A pod waits for the fetch of an artifact under this name.
    pub(super) fn wait(&self, name: &Name, artifact: ArtifactId, reader: Reader) -> Arc<Waits> {
        let waits = Arc::new(Waits {
            name: name.clone(),
            artifact,
            reader,
            gone: CancellationToken::new(),
        });
        let mut all = self.0.lock();
        all.retain(|waits| waits.strong_count() > 0);
        all.push(Arc::downgrade(&waits));
        waits
    }

    fn waiting(&self, name: &Name, artifact: ArtifactId) -> Vec<Arc<Waits>> {
        let all = self.0.lock();
        let waits = all.iter().rev().filter_map(Weak::upgrade);
        let waits = waits.filter(|it| it.artifact == artifact && it.name == *name);
        waits.collect()
    }

    /// The pods that wait for it now. The newest come first: the others may have ended.
    pub(super) fn of(&self, name: &Name, artifact: ArtifactId) -> Vec<Reader> {
        let waits = self.waiting(name, artifact);
        waits.iter().map(|it| it.reader.clone()).collect()
    }

    /// No node has the rest.
    fn tell_gone(&self, name: &Name, artifact: ArtifactId) {
        for waits in self.waiting(name, artifact) {
            waits.gone.cancel();
        }
    }
}

/// Fetches a layer of what peers offered. While no source gives anything, the peers are asked again
/// which of them gives it to one of the pods that wait. The sources are then in the order for the
/// next layer. `pause` waits; `false`: everything stops.
pub(super) fn of_peers(
    context: &Context,
    readers: &Readers,
    (name, found, layer): (&Name, &Offered, &LayerRef),
    sources: &mut Vec<Arc<dyn Source>>,
    place: &LayerPlace<'_>,
    moved: &AtomicU64,
    pause: &dyn Fn(Duration) -> bool,
) -> Result<Arc<Table>> {
    let artifact = found.manifest.artifact;
    let mut next = PAUSE;
    // Without content, and without the time that the fetch waits for its place.
    let mut idle = Duration::ZERO;
    let mut began = Instant::now();
    let mut has_searched = false;
    // If no other source had it, the slow ones are all there is.
    let mut is_first = true;
    loop {
        let before = value(place.progress);
        let asked: Vec<&dyn Source> = sources.iter().map(|source| &**source).collect();
        let wanted = (&name.tenant, layer);
        let error = match try_layer(context, &asked, wanted, place, moved, is_first) {
            Ok(fetched) => {
                // A peer that hung is not waited for again: those that failed are asked last.
                sources.rotate_left(fetched.source);
                return Ok(fetched.table);
            }
            Err(error) => error,
        };
        is_first = false;
        if value(place.progress) > before {
            (idle, next, has_searched) = (Duration::ZERO, PAUSE, false);
        } else {
            idle += began.elapsed();
        }
        let is_awaited = !readers.of(name, artifact).is_empty();
        let limit = if is_awaited { AWAY } else { UNAWAITED };
        if !may_pass(&error) || (has_searched && idle >= limit) || (place.stop)() {
            return Err(error);
        }
        idle += next;
        tracing::debug!(%error, pause = ?next, "resuming a fetch after a pause");
        if !pause(next) {
            return Err(Error::Stopped);
        }
        began = Instant::now();
        next = (next * 2).min(LONGEST);
        let asking = readers.of(name, artifact);
        let Rest {
            holders: newer,
            in_other_layers,
        } = context.block_on(rest(context, name, found, &asking));
        if newer.is_empty() {
            if matches!(error, Error::Missing { .. }) {
                return Err(error);
            }
            // A driver that restarts has the rest. Other layers come from their beginning.
            if idle >= GONE && in_other_layers {
                let object = format!("layer {}", layer.digest);
                return Err(Error::Missing { object });
            }
            if idle >= GONE {
                readers.tell_gone(name, artifact);
            }
        }
        has_searched = true;
        *sources = found.sources(newer, context.asked_tier());
    }
}

/// Whether the same layer may come later: from a peer that was away, for another pod, or from
/// another peer. A peer that has just started may not know the key of this node yet.
fn may_pass(error: &Error) -> bool {
    error.is_temporary() || matches!(error, Error::Permanent { .. } | Error::Missing { .. })
}
