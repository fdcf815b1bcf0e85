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
use super::state::State;
use super::types::{Awaited, OutcomeReport};
use super::volumes::Volume;
use crate::model::{LayerId, Outcome, PodUid, Timestamp, VolumeId};
use crate::store;
use crate::sys::{Dir, Errno};

/// Where the directory of a volume is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Location {
    Live(VolumeId),
    Pending(LayerId),
}

/// Tells the volumes of a pod how it ended.
pub(super) async fn report(
    inner: &Arc<Inner>,
    pod: &PodUid,
    outcome: Outcome,
) -> Result<OutcomeReport> {
    // A volume that moves between two looks is met again in its new location.
    const LOOKS: usize = 8;
    let mut report = known(inner, pod, outcome);
    for _ in 0..LOOKS {
        let (engine, pod) = (inner.clone(), pod.clone());
        let job = move || note(&engine, &pod, outcome);
        let told = inner.threads.calls.run(job).await??;
        report.news += told.news;
        if told.moving.is_empty() {
            break;
        }
        // The operation that moves the directory may be slow between the disk and the state.
        let moved = |state: &mut State| {
            let is_moving = |id| state.volumes.has_operation(id);
            (!told.moving.iter().any(is_moving)).then_some(())
        };
        inner.state.when(moved).await;
    }
    Ok(report)
}

/// The result of one look.
#[derive(Debug, Default)]
struct OutcomePass {
    /// How many volumes learned the outcome.
    news: usize,
    /// Live volumes whose directory is not in its place.
    moving: Vec<VolumeId>,
}

/// Tells all volumes of the pod that were not told, each in its place.
fn note(inner: &Inner, pod: &PodUid, outcome: Outcome) -> Result<OutcomePass> {
    let (mut told, mut failure) = (OutcomePass::default(), None);
    for location in untold(inner, pod) {
        // On disk first: a crash must not forget an outcome that was acted upon. On a full disk
        // it may be the seal that frees space.
        let due = becomes_due(inner, &location);
        let written = inner.with_reserve(|| {
            let dir = open(inner, &location)?;
            if let Some(due) = due {
                store::write_due(&dir, due)?;
            }
            store::write_outcome(&dir, outcome)
        });
        match written {
            Ok(()) => {}
            Err(error) if error.is(Errno::ENOENT) => {
                if let Location::Live(id) = location {
                    told.moving.push(id);
                }
                continue;
            }
            // The caller comes again for this volume. The others do not depend on it.
            Err(error) => {
                failure.get_or_insert(error);
                continue;
            }
        }
        point(Point::OutcomeNoted);
        told.news += usize::from(tell(inner, &location, outcome, due));
        // For each volume: the next one may take long.
        inner.state.notify();
    }
    failure.map_or(Ok(told), Err).context("note the outcome")
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
fn untold(inner: &Inner, pod: &PodUid) -> Vec<Location> {
    let state = inner.state.lock();
    let is_untold = |volume: &Volume| volume.outcome().is_none() && volume.record.pod.uid == *pod;
    let live = state.volumes.all_live();
    let live = live.filter(|volume| volume.is_made() && is_untold(volume));
    let live = live.map(|volume| Location::Live(volume.record.id.clone()));
    let pending = state.volumes.seals();
    let pending = pending.filter(|(_, volume, _)| is_untold(volume));
    live.chain(pending.map(|(key, ..)| Location::Pending(key)))
        .collect()
}

/// When the commit becomes due, if this outcome is all that it still needs.
fn becomes_due(inner: &Inner, location: &Location) -> Option<Timestamp> {
    let Location::Pending(key) = location else {
        return None;
    };
    let state = inner.state.lock();
    let needed = state.volumes.retiring(*key)?.needs_success();
    needed.then(|| inner.now())
}

fn open(inner: &Inner, location: &Location) -> crate::sys::Result<Dir> {
    match location {
        Location::Live(id) => inner.dirs.volumes.open_beneath(id),
        Location::Pending(key) => inner.dirs.pending.open_beneath(key.to_string()),
    }
}

/// Notes the outcome in memory, and whether that is news. The volume may have moved since its
/// directory was opened.
fn tell(inner: &Inner, location: &Location, outcome: Outcome, due: Option<Timestamp>) -> bool {
    let mut state = inner.state.lock();
    let volumes = &mut state.volumes;
    let key = match location {
        Location::Pending(key) => Some(*key),
        Location::Live(id) => {
            if let Some(volume) = volumes.live_mut(id) {
                return volume.tell(outcome, due);
            }
            let mut seals = volumes.seals();
            let moved =
                seals.find(|(_, volume, _)| volume.record.id == *id && volume.outcome().is_none());
            moved.map(|(key, ..)| key)
        }
    };
    let volume = key.and_then(|key| volumes.retiring_mut(key));
    volume.is_some_and(|volume| volume.tell(outcome, due))
}
