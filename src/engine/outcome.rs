//! Outcomes: somebody says how a pod's work ended, and its volumes remember it.
//!
//! The word is in memory for this process and in each volume's directory for the next. The first word counts.

use std::collections::HashMap;
use std::sync::Arc;

use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use super::types::{Awaited, OutcomeReport, VolumeState};
use super::volumes::Goal;
use crate::model::{Commit, LayerId, Outcome, PodUid, VolumeId, VolumeRecord};
use crate::store;
use crate::sys::{Dir, Errno};

/// Where a volume's directory is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Live(VolumeId),
    Pending(LayerId),
}

/// Tells the volumes of a pod how it ended.
pub(super) async fn report(
    inner: &Arc<Inner>,
    pod: &PodUid,
    outcome: Outcome,
) -> Result<OutcomeReport> {
    let (engine, pod) = (inner.clone(), pod.clone());
    inner
        .threads
        .calls
        .run(move || note(&engine, &pod, outcome))
        .await?
}

fn note(inner: &Inner, pod: &PodUid, outcome: Outcome) -> Result<OutcomeReport> {
    // A volume that moves between two looks is met again in its new place.
    const LOOKS: usize = 8;
    let mut told = known(inner, pod, outcome);
    let (mut failed, mut failure) = (Vec::new(), None);
    for _ in 0..LOOKS {
        let mut places = untold(inner, pod);
        places.retain(|place| !failed.contains(place));
        if places.is_empty() {
            break;
        }
        for place in places {
            // On disk first: what is acted upon must not be forgotten by a crash.
            // What its pods filled the disk with may come free only when they are sealed, and so known.
            let written = inner.with_reserve(|| {
                open(inner, &place).and_then(|dir| store::write_outcome(&dir, outcome))
            });
            match written {
                Ok(()) => {}
                Err(error) if error.is(Errno::ENOENT) => continue,
                // Whoever told it comes again for this one. The others have nothing to do with it.
                Err(error) => {
                    failure.get_or_insert(error);
                    failed.push(place);
                    continue;
                }
            }
            point(Point::OutcomeNoted);
            told.news += usize::from(tell(inner, &place, outcome));
            // Each of them: the next one may take its time.
            inner.state.notify();
        }
    }
    failure.map_or(Ok(told), Err).context("note the outcome")
}

/// What volumes of this pod were told before.
fn known(inner: &Inner, pod: &PodUid, outcome: Outcome) -> OutcomeReport {
    let state = inner.state.lock();
    let live = state.volumes.live.values();
    let live = live.map(|live| (&live.record, live.outcome));
    let leaving = state.volumes.retiring.values();
    let leaving = leaving.map(|leaving| (&leaving.record, leaving.outcome));
    let of_pod = live
        .chain(leaving)
        .filter(|(record, _)| record.pod.uid == *pod);
    let mut told = OutcomeReport::default();
    for before in of_pod.filter_map(|(_, before)| before) {
        if before == outcome {
            told.same += 1;
        } else {
            told.other += 1;
        }
    }
    told
}

/// The pods whose outcome decides about a volume, and was not told yet.
pub(super) fn awaited(inner: &Inner) -> Vec<Awaited> {
    let decides = |record: &VolumeRecord| {
        let plan = record.seal.as_ref();
        plan.is_some_and(|plan| plan.keep.commit == Commit::OnSuccess)
    };
    let state = inner.state.lock();
    let live = state.volumes.live.values();
    let live = live.filter(|live| live.made && live.outcome.is_none());
    let leaving = state.volumes.retiring.values();
    let leaving = leaving
        .filter(|leaving| leaving.outcome.is_none() && leaving.goal != Goal::Discard)
        // Sealed, and only not durable yet: nobody asks any more.
        .filter(|leaving| !matches!(&leaving.goal, Goal::Seal(plan) if state.catalog.contains(&plan.artifact)));
    let live = live.map(|live| (&live.record, false));
    let leaving = leaving.map(|leaving| (&leaving.record, true));
    let mut pods: HashMap<&PodUid, Awaited> = HashMap::new();
    for (record, unpublished) in live.chain(leaving).filter(|(record, _)| decides(record)) {
        let awaited = pods.entry(&record.pod.uid).or_insert_with(|| Awaited {
            tenant: record.tenant.clone(),
            pod: record.pod.clone(),
            unpublished,
        });
        awaited.unpublished |= unpublished;
    }
    pods.into_values().collect()
}

/// The volumes of this pod that await a word.
fn untold(inner: &Inner, pod: &PodUid) -> Vec<Place> {
    let state = inner.state.lock();
    let live = state
        .volumes
        .live
        .values()
        .filter(|live| live.made && live.outcome.is_none() && live.record.pod.uid == *pod);
    let live = live.map(|live| Place::Live(live.record.id.clone()));
    let leaving = state.volumes.retiring.iter().filter(|(_, leaving)| {
        leaving.outcome.is_none() && leaving.goal != Goal::Discard && leaving.record.pod.uid == *pod
    });
    live.chain(leaving.map(|(key, _)| Place::Pending(*key)))
        .collect()
}

fn open(inner: &Inner, place: &Place) -> crate::sys::Result<Dir> {
    match place {
        Place::Live(id) => inner.dirs.volumes.open_beneath(id),
        Place::Pending(key) => inner.dirs.pending.open_beneath(key.to_string()),
    }
}

/// Notes the outcome in memory, where the volume is now: it may have moved since its directory was opened.
fn tell(inner: &Inner, place: &Place, outcome: Outcome) -> bool {
    let mut state = inner.state.lock();
    let leaving = match place {
        Place::Live(id) => {
            if let Some(live) = state.volumes.live.get_mut(id) {
                let is_news = live.outcome.is_none();
                live.outcome.get_or_insert(outcome);
                return is_news;
            }
            state.volumes.retiring.values_mut().find(|leaving| {
                leaving.record.id == *id
                    && leaving.goal != Goal::Discard
                    && leaving.outcome.is_none()
            })
        }
        Place::Pending(key) => state.volumes.retiring.get_mut(key),
    };
    match leaving {
        Some(leaving) if leaving.outcome.is_none() => {
            leaving.outcome = Some(outcome);
            // It waits no longer, though nobody has taken it up yet: whoever waits for it to be settled has to wait.
            if leaving.state == VolumeState::AwaitingOutcome {
                leaving.state = VolumeState::Sealing;
            }
            true
        }
        _ => false,
    }
}
