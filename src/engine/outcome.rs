//! Outcomes: a caller reports how a pod's work ended, and the pod's volumes remember it.
//!
//! The outcome is in memory for this process, and in each volume's directory for the next one. The
//! first report counts.

use std::collections::HashMap;
use std::sync::Arc;

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::lifecycle::Lifecycle;
use super::shared::Inner;
use super::threads::Pool;
use super::types::{Awaited, OutcomeReport};
use super::volumes::Volume;
use crate::model::{LayerId, Outcome, PodUid, Timestamp, VolumeId};
use crate::store;
use crate::sys::{self, Dir, Errno};

/// A volume that was not told the outcome. It may be retired at any moment.
struct Untold {
    id: VolumeId,
    /// The name of its directory in `pending/` once it is retired; `None`: it is never sealed.
    layer: Option<LayerId>,
    is_retired: bool,
    needs_success: bool,
}

impl Untold {
    fn of(volume: &Volume, is_retired: bool) -> Self {
        Self {
            id: volume.record.id.clone(),
            layer: volume.layer(),
            is_retired,
            needs_success: volume.needs_success(),
        }
    }

    /// Its directory, and whether that is in `pending/`. A directory moves there once, and stays.
    fn open(&self, inner: &Inner) -> sys::Result<(Dir, bool)> {
        if !self.is_retired {
            match inner.dirs.volumes.open_beneath(&self.id) {
                Err(error) if error.is(Errno::ENOENT) && self.layer.is_some() => {}
                dir => return Ok((dir?, false)),
            }
        }
        let name = self.layer.map(|layer| layer.to_string());
        let dir = inner.dirs.pending.open_beneath(name.unwrap_or_default())?;
        Ok((dir, true))
    }

    /// Writes the outcome down. Returns when the commit becomes due, if this outcome is all that it
    /// still needs.
    fn write(&self, inner: &Inner, outcome: Outcome) -> sys::Result<Option<Timestamp>> {
        let (dir, is_retired) = self.open(inner)?;
        let due = (is_retired && self.needs_success).then(|| inner.now());
        if let Some(due) = due {
            store::write_due(&dir, due)?;
        }
        store::write_outcome(&dir, outcome)?;
        Ok(due)
    }

    /// Notes the outcome in memory, and whether that is news.
    fn tell(&self, inner: &Inner, outcome: Outcome, due: Option<Timestamp>) -> bool {
        let volumes = &mut inner.state.lock().volumes;
        if let Some(volume) = volumes.live_mut(&self.id)
            && volume.layer() == self.layer
        {
            return volume.tell(outcome, due);
        }
        let volume = self.layer.and_then(|layer| volumes.retiring_mut(layer));
        volume.is_some_and(|volume| volume.tell(outcome, due))
    }
}

/// Tells the volumes of a pod how it ended.
pub(super) async fn report(
    inner: &Arc<Inner>,
    pod: &PodUid,
    outcome: Outcome,
) -> Result<OutcomeReport> {
    let mut report = known(inner, pod, outcome);
    let pod = pod.clone();
    let job = move |inner: &Arc<Inner>| note(inner, &pod, outcome);
    report.news = inner.run(Pool::Calls, job).await?;
    Ok(report)
}

/// Tells all volumes of the pod that were not told. Returns how many learned the outcome.
fn note(inner: &Inner, pod: &PodUid, outcome: Outcome) -> Result<usize> {
    let (mut news, mut failure) = (0, None);
    for volume in untold(inner, pod) {
        // On disk first: a crash must not forget an outcome that was acted upon. On a full disk
        // it may be the seal that frees space.
        let due = match inner.with_reserve(|| volume.write(inner, outcome)) {
            Ok(due) => due,
            // Its end does not depend on the outcome, or it is sealed.
            Err(error) if error.is(Errno::ENOENT) => continue,
            // The caller comes again for this volume. The others do not depend on it.
            Err(error) => {
                failure.get_or_insert(error);
                continue;
            }
        };
        point(Point::OutcomeNoted);
        news += usize::from(volume.tell(inner, outcome, due));
        // For each volume: the next one may take long.
        inner.state.notify();
    }
    failure.map_or(Ok(news), Err).context("note the outcome")
}

/// The outcomes that volumes of this pod were told before, compared with this one.
fn known(inner: &Inner, pod: &PodUid, outcome: Outcome) -> OutcomeReport {
    let state = inner.state.lock();
    let of_pod = state
        .volumes
        .all()
        .filter(|volume| volume.record.pod.uid == *pod);
    let mut report = OutcomeReport::default();
    for before in of_pod.filter_map(Volume::outcome) {
        if before == outcome {
            report.same += 1;
        } else {
            report.other += 1;
        }
    }
    report
}

/// The pods whose outcome decides about a volume, and was not told yet.
pub(super) fn awaited(inner: &Inner) -> Vec<Awaited> {
    let state = inner.state.lock();
    let mut pods: HashMap<&PodUid, Awaited> = HashMap::new();
    for volume in state.volumes.all() {
        let (record, lifecycle) = (&volume.record, volume.lifecycle());
        let unpublished = lifecycle.goal().is_some();
        // The fate of a sealed volume is decided, though it is not durable yet.
        let is_decided = match lifecycle {
            Lifecycle::Preparing | Lifecycle::Sealed => true,
            _ => unpublished && volume.seal_intent().is_none(),
        };
        if !volume.needs_success() || is_decided || volume.outcome().is_some() {
            continue;
        }
        let awaited = pods.entry(&record.pod.uid).or_insert_with(|| Awaited {
            tenant: record.tenant.clone(),
            pod: record.pod.clone(),
            unpublished,
        });
        awaited.unpublished |= unpublished;
    }
    pods.into_values().collect()
}

/// The volumes of this pod that were not told an outcome.
fn untold(inner: &Inner, pod: &PodUid) -> Vec<Untold> {
    let state = inner.state.lock();
    let is_untold = |volume: &&Volume| volume.outcome().is_none() && volume.record.pod.uid == *pod;
    let live = state.volumes.all_live().filter(|volume| volume.is_made());
    let live = live
        .filter(is_untold)
        .map(|volume| Untold::of(volume, false));
    let pending = state.volumes.seals().map(|(_, volume, _)| volume);
    let pending = pending
        .filter(is_untold)
        .map(|volume| Untold::of(volume, true));
    live.chain(pending).collect()
}
