//! Recovery of claims at the start, from the index and from `volumes/`.
//!
//! A claim's directory outlives a reboot; only its mounts are forgotten. A freeze that is not in
//! the index is undone. A directory of a claim that the index does not have was being deleted, and
//! the recovery of `volumes/` moves it to the trash.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::data_dir;
use super::entries::{ClaimMount, Problem, VolumeEntry};
use super::freeze::{going_to, return_content};
use crate::engine::error::{Context, Result};
use crate::engine::mounts::find_all;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::model::{
    ClaimRecord, LayerId, PersistentVolume, Snapshot, SnapshotGroup, VolumeId, layout,
};
use crate::store;
use crate::sys::{Dir, MountEntry};

/// What the index has of claims.
pub(in crate::engine) fn recover_index(
    inner: &Inner,
    claims: Vec<PersistentVolume>,
    snapshots: Vec<Snapshot>,
    groups: Vec<SnapshotGroup>,
    on_disk: &HashSet<LayerId>,
    state: &mut State,
) {
    let missing = |layers: &[LayerId]| {
        layers
            .iter()
            .copied()
            .find(|layer| !on_disk.contains(layer))
    };
    for mut claim in claims {
        inner.saw(claim.created);
        claim.created = state.write_back.begun(claim.created);
        inner.saw(claim.last_used);
        let mut held = VolumeEntry::new(claim);
        if let Some(layer) = missing(&held.claim.layers) {
            tracing::error!(volume.id = %held.claim.id, %layer,
                "a layer of this volume is missing; it cannot be used");
            held.problem = Some(Problem::Broken(format!("its layer {layer} is missing")));
        }
        state.claims.insert(held);
    }
    for snapshot in snapshots {
        inner.saw(snapshot.created);
        if let Some(layer) = missing(&snapshot.layers) {
            // It stays, so that a restore of it fails with the reason.
            tracing::error!(snapshot.id = %snapshot.id, %layer,
                "a layer of this snapshot is missing; it cannot be restored");
        }
        state.claims.put_snapshot(snapshot);
    }
    for group in groups {
        state.claims.put_group(group);
    }
}

/// The directory of a claim that the index has.
pub(in crate::engine) fn recover_volume(
    inner: &Inner,
    id: &VolumeId,
    dir: &Dir,
    mounts: &[MountEntry],
    state: &mut State,
) -> Result<()> {
    // A freeze that was committed may have left its marker, and a later merge may have given this
    // volume other layers. Then a clone or a snapshot still has the layer.
    let undone = going_to(dir)?.filter(|layer| !state.is_stacked(layer));
    let Some(held) = state.claims.get_mut(id) else {
        return Ok(());
    };
    if let Some(layer) = undone {
        tracing::info!(volume.id = %id, %layer,
            "undoing an interrupted snapshot or clone of the volume");
        return_content(inner, dir, layer)?;
    }
    if !inner
        .backend
        .has_content(dir)
        .context("look at the volume's content")?
    {
        data_dir::clear(inner, id);
        return Ok(());
    }
    // The process that put it there may have been killed right after.
    super::data_dir::keep_place(inner)?;
    held.damaged = dir
        .has(layout::DAMAGED)
        .context("look whether the volume is marked as damaged")?;
    bound(inner, held, dir);
    let record = store::read_claim(dir).context("read a volume's record")?;
    if let Ok(record) = &record
        && record.claim.last_used > held.claim.last_used
    {
        // The driver updates the index later, and not at all if it is killed before.
        inner.saw(record.claim.last_used);
        held.claim.last_used = record.claim.last_used;
        held.used = true;
    }
    match record {
        Ok(record) if record.boot != inner.boot() => {
            if !record.targets.is_empty() {
                // It was in use when the boot ended, and its last use is not recorded.
                was_used_until_now(inner, held);
            }
        }
        Ok(record) => of_this_boot(inner, held, mounts, record)?,
        Err(why) => {
            held.mounts = unrecorded(inner, mounts, id)?;
            held.busy_layers = Some(held.claim.layers.clone());
            if held.mounts.is_empty() {
                // After a power cut a file may have its name and not its content. It was written at
                // a mount or unmount, of which the index may not know.
                was_used_until_now(inner, held);
            } else {
                tracing::error!(volume.id = %id, %why,
                    "the record of a mounted volume is unreadable: it is unknown whether the mount \
                     is read-only; unmount it everywhere");
                let why = format!(
                    "{why}, so it is unknown whether the mount is read-only; unmount it everywhere"
                );
                held.problem.get_or_insert(Problem::Unrecorded(why));
            }
        }
    }
    // A process may still have files of a recent mount open. Where the kernel says that none has,
    // this start is no use of the volume.
    if held.mounts.is_empty()
        && held.busy_layers.is_some()
        && !inner.backend.in_use(dir).unwrap_or(true)
    {
        held.busy_layers = None;
    }
    Ok(())
}

/// Sets the size limit that the index has. The driver may have been killed after it changed the
/// index and before it set the limit, and no caller has to repeat the call.
fn bound(inner: &Inner, held: &mut VolumeEntry, dir: &Dir) {
    let limit = inner.backend.set_limit(dir, held.claim.limit());
    held.limit_unenforced = match limit {
        Ok(limit) => {
            let why = limit.why_unenforced();
            if let Some(why) = &why {
                data_dir::warn_unenforced(&held.claim.id, why);
            }
            why
        }
        Err(error) => {
            tracing::warn!(volume.id = %held.claim.id, %error,
                "the volume's size limit could not be set; an earlier limit may still apply");
            Some(error.to_string())
        }
    };
}

/// The mounts of a persistent volume without a readable record. Their access modes are unknown, and
/// no publish compares them meanwhile.
fn unrecorded(
    inner: &Inner,
    mounts: &[MountEntry],
    id: &VolumeId,
) -> Result<HashMap<PathBuf, ClaimMount>> {
    let shown = |mount: &&MountEntry| inner.backend.shows(mount, id, id.as_str());
    let paths = mounts.iter().filter(shown);
    let paths: Vec<&Path> = paths.map(|mount| mount.mount_point.as_path()).collect();
    let found = find_all(inner, mounts, id, &paths)?;
    let unknown = |id| ClaimMount {
        id,
        staging: false,
        read_only: true,
        asked: None,
    };
    let found = found.into_iter().map(|(path, id)| (path, unknown(id)));
    Ok(found.collect())
}

fn of_this_boot(
    inner: &Inner,
    held: &mut VolumeEntry,
    mounts: &[MountEntry],
    record: ClaimRecord,
) -> Result<()> {
    let paths: Vec<&Path> = record
        .targets
        .iter()
        .map(|target| target.path.as_path())
        .collect();
    let id = &held.claim.id;
    let found: HashMap<PathBuf, u64> = find_all(inner, mounts, id, &paths)?;
    held.busy_layers = Some(record.claim.layers);
    let (there, gone): (Vec<_>, Vec<_>) = record
        .targets
        .into_iter()
        .partition(|target| found.contains_key(&target.path));
    held.mounts = there
        .iter()
        .filter_map(|target| {
            let mount = ClaimMount {
                id: *found.get(&target.path)?,
                staging: target.staging,
                read_only: target.read_only,
                asked: target.asked,
            };
            Some((target.path.clone(), mount))
        })
        .collect();
    if !gone.is_empty() {
        was_used_until_now(inner, held);
    }
    Ok(())
}

/// Records that the volume was in use until now: the true time is unknown, and without a record
/// each start would find it so again.
fn was_used_until_now(inner: &Inner, held: &mut VolumeEntry) {
    held.claim.last_used = inner.now();
    held.used = true;
    data_dir::correct(inner, &data_dir::record(inner, held));
}
