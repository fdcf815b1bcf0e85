//! What the node does next for one object, and the status that it reports. Pure: no I/O, no clock.
//!
//! A claim is made at most once: one that was Ready and is not in the pool any more is Lost, also
//! when the pool is another one.

use std::time::{Duration, UNIX_EPOCH};

use crate::api::{
    Member, Phase, Refusal, Snapshot, SnapshotStatus, Volume, VolumeStatus, Wanted, bytes, number,
};
use crate::engine::claims::CreateClaim;
use crate::k8s::claims::name_on;
use crate::model::{self, ClaimSource, MutableParameters, PersistentVolume, Timestamp};

/// The next step for a `Volume`.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::k8s) enum VolumeStep {
    /// The order was answered.
    Nothing,
    /// Nothing is to be done, but reported.
    Report(VolumeStatus),
    Create(CreateClaim),
    Change {
        capacity: u64,
        mutable: MutableParameters,
    },
    Delete,
}

fn generation(volume: &Volume) -> i64 {
    volume.metadata.generation.unwrap_or_default()
}

/// Decides, given the claim in the engine and the id of the pool.
pub(in crate::k8s) fn volume(
    volume: &Volume,
    pool: &str,
    held: Option<&PersistentVolume>,
) -> VolumeStep {
    let spec = &volume.spec;
    let before = volume.status.as_ref();
    let phase = volume.phase();
    if spec.wanted == Wanted::Absent {
        return match phase {
            Some(Phase::Gone) => VolumeStep::Nothing,
            _ => VolumeStep::Delete,
        };
    }
    let was_elsewhere = before.is_some_and(|status| is_another(&status.pool, pool));
    let was_ready = volume.was_ready();
    let Some(held) = held.filter(|_| !(was_ready && was_elsewhere)) else {
        let lost = was_ready.then(|| lost(volume, pool));
        return match (lost, phase) {
            (lost @ Some(_), _) if lost == volume.status => VolumeStep::Nothing,
            (Some(lost), _) => VolumeStep::Report(lost),
            // The controller withdraws it.
            (None, Some(Phase::Failed)) => VolumeStep::Nothing,
            (None, _) => match request(volume) {
                Ok(request) => VolumeStep::Create(request),
                Err(refusal) => VolumeStep::Report(created(volume, pool, Err(&refusal))),
            },
        };
    };
    let capacity = bytes(spec.capacity).max(held.capacity);
    let mutable = MutableParameters::from(spec.mutable);
    let is_refused = volume.answer().is_some_and(|status| status.error.is_some());
    if (capacity != held.capacity || mutable != held.mutable) && !is_refused {
        return VolumeStep::Change { capacity, mutable };
    }
    let is_known = volume.answer().is_some_and(|status| {
        status.phase == Phase::Ready
            && bytes(status.capacity) == held.capacity
            && MutableParameters::from(status.mutable) == held.mutable
    });
    if is_known {
        VolumeStep::Nothing
    } else {
        VolumeStep::Report(reported(volume, pool, held, None))
    }
}

/// The request to the engine.
fn request(volume: &Volume) -> Result<CreateClaim, Refusal> {
    let spec = &volume.spec;
    let source = match &spec.source {
        None => None,
        Some(source) => Some(ClaimSource::try_from(source).map_err(|error| {
            Refusal::new("INVALID_ARGUMENT", format!("spec.source.name: {error}"))
        })?),
    };
    Ok(CreateClaim {
        name: name_on(&spec.node_name, &spec.name),
        required_bytes: bytes(spec.capacity),
        limit_bytes: Some(bytes(spec.limit)).filter(|limit| *limit > 0),
        parameters: spec.parameters.into(),
        mutable: spec.made_with.into(),
        source,
    })
}

fn status(volume: &Volume, pool: &str, phase: Phase, error: Option<Refusal>) -> VolumeStatus {
    VolumeStatus {
        observed_generation: generation(volume),
        phase,
        pool: pool.to_owned(),
        capacity: 0,
        mutable: MutableParameters::default().into(),
        error,
    }
}

/// The status of a claim that the engine has.
pub(in crate::k8s) fn reported(
    volume: &Volume,
    pool: &str,
    held: &PersistentVolume,
    error: Option<Refusal>,
) -> VolumeStatus {
    VolumeStatus {
        capacity: number(held.capacity),
        mutable: held.mutable.into(),
        ..status(volume, pool, Phase::Ready, error)
    }
}

/// The status after the engine has made it, or refused.
pub(in crate::k8s) fn created(
    volume: &Volume,
    pool: &str,
    done: Result<&PersistentVolume, &Refusal>,
) -> VolumeStatus {
    match done {
        Ok(held) => reported(volume, pool, held, None),
        Err(refusal) => status(volume, pool, Phase::Failed, Some(refusal.clone())),
    }
}

/// The status while its content comes from another node, and what is done for it now.
pub(in crate::k8s) fn fetching(volume: &Volume, pool: &str, now: String) -> VolumeStatus {
    let now = Refusal::new("ABORTED", now);
    status(volume, pool, Phase::Fetching, Some(now))
}

/// The status after the engine has deleted it, or refused.
pub(in crate::k8s) fn deleted(volume: &Volume, pool: &str, error: Option<Refusal>) -> VolumeStatus {
    match (error, &volume.status) {
        (None, _) => status(volume, pool, Phase::Gone, None),
        (error, Some(before)) => VolumeStatus {
            observed_generation: generation(volume),
            error,
            ..before.clone()
        },
        (error, None) => status(volume, pool, Phase::Ready, error),
    }
}

/// Why data is Lost: this pool does not have it.
fn not_here(what: &str, pool: &str) -> Refusal {
    let message = format!("the {what} is not in pool {pool} of this node; it is not created again");
    Refusal::new("FAILED_PRECONDITION", message)
}

/// The status of a claim that was Ready and is not here. It keeps the id of the pool that has it.
fn lost(volume: &Volume, pool: &str) -> VolumeStatus {
    let error = not_here("volume", pool);
    match &volume.status {
        Some(before) => VolumeStatus {
            observed_generation: generation(volume),
            phase: Phase::Lost,
            error: Some(error),
            ..before.clone()
        },
        // It was never seen, so its pool is unknown.
        None => status(volume, "", Phase::Lost, Some(error)),
    }
}

/// Whether the pool in a status is known and another one.
fn is_another(reported: &str, pool: &str) -> bool {
    !reported.is_empty() && reported != pool
}

/// The next step for a `Snapshot`.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::k8s) enum SnapshotStep {
    Nothing,
    Report(SnapshotStatus),
    Take,
    Delete,
}

/// Decides, given the snapshots in the engine and the id of the pool.
pub(in crate::k8s) fn snapshot(
    object: &Snapshot,
    pool: &str,
    held: &[model::Snapshot],
) -> SnapshotStep {
    let phase = object.phase();
    if object.spec.wanted == Wanted::Absent {
        return match phase {
            Some(Phase::Gone) => SnapshotStep::Nothing,
            _ => SnapshotStep::Delete,
        };
    }
    let before = object.status.as_ref();
    let was_elsewhere = before.is_some_and(|status| is_another(&status.pool, pool));
    let was_ready =
        matches!(phase, Some(Phase::Ready | Phase::Lost)) || object.spec.wanted == Wanted::Kept;
    if held.is_empty() || (was_ready && was_elsewhere) {
        let lost = was_ready.then(|| lost_snapshot(object, pool));
        return match (lost, phase) {
            (lost @ Some(_), _) if lost == object.status => SnapshotStep::Nothing,
            (Some(lost), _) => SnapshotStep::Report(lost),
            (None, Some(Phase::Failed)) => SnapshotStep::Nothing,
            (None, _) => SnapshotStep::Take,
        };
    }
    if object
        .answer()
        .is_some_and(|status| status.phase == Phase::Ready)
    {
        SnapshotStep::Nothing
    } else {
        SnapshotStep::Report(taken(object, pool, Ok(held.to_vec())))
    }
}

fn snapshot_status(object: &Snapshot, pool: &str, phase: Phase) -> SnapshotStatus {
    SnapshotStatus {
        observed_generation: object.metadata.generation.unwrap_or_default(),
        phase,
        pool: pool.to_owned(),
        created: None,
        members: Vec::new(),
        error: None,
    }
}

/// The status of a snapshot that was Ready and is not here. It keeps the id of the pool that has
/// it.
fn lost_snapshot(object: &Snapshot, pool: &str) -> SnapshotStatus {
    let lost = snapshot_status(object, "", Phase::Lost);
    let before = object.status.clone().unwrap_or_else(|| lost.clone());
    SnapshotStatus {
        observed_generation: lost.observed_generation,
        phase: Phase::Lost,
        error: Some(not_here("snapshot", pool)),
        ..before
    }
}

/// The status after the engine has taken it, or refused.
pub(in crate::k8s) fn taken(
    object: &Snapshot,
    pool: &str,
    done: Result<Vec<model::Snapshot>, Refusal>,
) -> SnapshotStatus {
    let snapshots = match done {
        Ok(snapshots) => snapshots,
        Err(refusal) => {
            return SnapshotStatus {
                error: Some(refusal),
                ..snapshot_status(object, pool, Phase::Failed)
            };
        }
    };
    let member = |one: &model::Snapshot| Member {
        id: one.id.to_string(),
        source: one.source.to_string(),
        size: number(one.size),
    };
    SnapshotStatus {
        created: snapshots.first().map(|first| text(first.created)),
        members: snapshots.iter().map(member).collect(),
        ..snapshot_status(object, pool, Phase::Ready)
    }
}

fn text(Timestamp(millis): Timestamp) -> String {
    let time = UNIX_EPOCH + Duration::from_millis(millis);
    humantime::format_rfc3339_millis(time).to_string()
}

/// The status after the engine has deleted it, or refused.
pub(in crate::k8s) fn dropped(
    object: &Snapshot,
    pool: &str,
    error: Option<Refusal>,
) -> SnapshotStatus {
    let gone = snapshot_status(object, pool, Phase::Gone);
    match (error, &object.status) {
        (None, _) => gone,
        (error, Some(before)) => SnapshotStatus {
            observed_generation: gone.observed_generation,
            error,
            ..before.clone()
        },
        (error, None) => SnapshotStatus {
            phase: Phase::Ready,
            error,
            ..gone
        },
    }
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;

    use super::*;
    use crate::api::{BOUND, VolumeSpec};

    #[test]
    fn a_bound_volume_whose_object_comes_back_without_status_is_not_made_again() {
        let spec = VolumeSpec::empty("pvc-1", "node-1", Wanted::Present);
        let mut object = Volume::new("vol-1", spec);
        assert!(matches!(
            volume(&object, "pool", None),
            VolumeStep::Create(_)
        ));
        let bound = (BOUND.to_owned(), "true".to_owned());
        object.annotations_mut().extend([bound]);
        let step = volume(&object, "pool", None);
        let VolumeStep::Report(status) = step else {
            panic!("{step:?}");
        };
        assert_eq!(status.phase, Phase::Lost);
        object.status = Some(status);
        assert_eq!(volume(&object, "pool", None), VolumeStep::Nothing);
    }
}
