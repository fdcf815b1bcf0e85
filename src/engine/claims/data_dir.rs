//! A claim's directory: made whole when the claim is first mounted, or mounted again after its
//! content became a layer.
//!
//! It is made in `incoming/` and then renamed. So a directory in `volumes/` under a claim's id is
//! the claim's content, also after a power cut: the content of unsynced files is then undefined,
//! but the filesystem keeps the order of renames, or is told to ([`keep_place`]).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::entries::{ClaimMount, VolumeEntry};
use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::mounts::start_of_claim;
use crate::engine::shared::Inner;
use crate::model::{ClaimRecord, ClaimTarget, LayerId, PersistentVolume, VolumeId, layout};
use crate::store;
use crate::sys::{self, Dir, Errno, Space};

/// The claim's directory, if it has its content.
pub(super) fn find(inner: &Inner, claim: &PersistentVolume) -> Result<Option<Dir>> {
    let Some(dir) = inner.volume_dir_if_there(&claim.id)? else {
        return Ok(None);
    };
    if is_made(inner, &dir)? {
        sweep(inner, &dir)?;
        return Ok(Some(dir));
    }
    // What a freeze has left.
    clear(inner, &claim.id);
    Ok(None)
}

/// Whether a volume's content was made.
pub(super) fn has_content(inner: &Inner, id: &VolumeId) -> Result<bool> {
    let dir = inner.volume_dir_if_there(id)?;
    dir.map_or(Ok(false), |dir| is_made(inner, &dir))
}

fn is_made(inner: &Inner, dir: &Dir) -> Result<bool> {
    let found = inner.backend.has_content(dir);
    found.context("look at the volume's content")
}

/// Refuses a stack with a missing layer. Otherwise the call would succeed, and no pod could mount
/// the result. Costs one stat per layer.
pub(super) fn refuse_lost(inner: &Inner, of: &VolumeId, layers: &[LayerId]) -> Result<()> {
    for layer in layers {
        let there = inner.dirs.layers.has(layer.to_string());
        if !there.context("look for a layer")? {
            let (of, layer) = (of.clone(), *layer);
            return Err(Error::Lost { of, layer });
        }
    }
    Ok(())
}

/// Work directories of earlier mounts: the volume is not in use, and each mount makes its own.
fn sweep(inner: &Inner, dir: &Dir) -> Result<()> {
    for entry in dir.entries().context("read the volume's directory")? {
        let name = entry.name.to_str().unwrap_or_default();
        if name.starts_with(layout::WORK_PREFIX) {
            inner
                .throw_away(dir, Path::new(name))
                .context("put a work directory aside")?;
        }
    }
    Ok(())
}

/// Moves to the trash what lies at the place of a claim's directory when the index has no such
/// claim: the rest of a deleted one. An id is made from a name, so the next claim of that name
/// would show this content.
///
/// The move is made durable. The transaction that makes the next claim is durable without it,
/// because the index is written in place, which commits no journal.
pub(super) fn put_aside(inner: &Inner, id: &VolumeId) -> Result<()> {
    if inner.state.lock().volumes.live(id).is_some() {
        let (name, what) = (id.to_string(), "owner: it is a pod's volume");
        return Err(Error::Exists { name, what });
    }
    let volumes = &inner.dirs.volumes;
    let thrown = match inner.throw_away(volumes, id.as_ref()) {
        Err(error) if error.is(Errno::ENOENT) => Ok(()),
        thrown => thrown.and_then(|_| volumes.sync()),
    };
    thrown.context("move the data of a deleted volume of that name to trash/")
}

/// Makes the claim's directory, with its content; and why its limit does not hold.
pub(super) fn make(inner: &Inner, claim: &PersistentVolume) -> Result<(Dir, Option<String>)> {
    // Nothing of it can be lost before it is in its place.
    if let Some(held) = inner.state.lock().claims.get_mut(&claim.id) {
        held.damaged = false;
    }
    let incoming = &inner.dirs.incoming;
    let name = LayerId::from_bits(sys::random()).to_string();
    let dir = incoming.make_dir(&name, 0o700);
    let dir = dir.context("make the volume's directory")?;
    let made = fill(inner, claim, &name, &dir);
    if made.is_err()
        && let Err(error) = inner.throw_away(incoming, Path::new(&name))
    {
        tracing::error!(volume.id = %claim.id, %error,
            "an incomplete volume could not be moved to trash/; it stays until the next start");
    }
    let limit_unenforced = made?;
    keep_place(inner)?;
    Ok((inner.volume_dir(&claim.id)?, limit_unenforced))
}

/// Makes durable that the directories of claims are where they are, before a pod can make durable
/// what is in them.
///
/// In a journal the rename stands before whatever is fsynced later. btrfs has no such order, with
/// any backend: an fsync names only directories that the running transaction made, and nothing
/// outside of its subvolume. The directory would still be in `incoming/`, which is swept at start.
pub(super) fn keep_place(inner: &Inner) -> Result<()> {
    let space = inner
        .dirs
        .root
        .space()
        .context("ask for the pool's filesystem")?;
    if space.magic == Space::BTRFS {
        let volumes = &inner.dirs.volumes;
        volumes.sync().context("make the volume's place durable")?;
    }
    Ok(())
}

fn fill(inner: &Inner, claim: &PersistentVolume, name: &str, dir: &Dir) -> Result<Option<String>> {
    let limit = inner
        .backend
        .create(dir, &start_of_claim(claim))
        .context("make the volume's content")?;
    let limit_unenforced = limit.why_unenforced();
    if let Some(why) = &limit_unenforced {
        warn_unenforced(&claim.id, why);
    }
    let record = new_record(inner, claim, &HashMap::new(), limit_unenforced.clone());
    write(dir, &record)?;
    point(Point::ClaimContentMade);
    if inner.backend.copies() && !claim.layers.is_empty() {
        // A copy: its files must be whole before it has its name.
        dir.sync_filesystem()
            .context("write the volume's content back")?;
    }
    inner
        .dirs
        .incoming
        .rename(name, &inner.dirs.volumes, &claim.id)
        .context("put the volume's directory in its place")?;
    point(Point::ClaimContentPlaced);
    Ok(limit_unenforced)
}

/// Says that a claim may grow beyond its size, each time that it is bounded.
pub(super) fn warn_unenforced(id: &VolumeId, why: &str) {
    tracing::warn!(volume.id = %id, %why, "the volume's size limit is not enforced");
}

/// The record in a claim's directory: where the claim is mounted in this boot, and whether its
/// limit is enforced.
pub(super) fn record(inner: &Inner, held: &VolumeEntry) -> ClaimRecord {
    new_record(
        inner,
        &held.claim,
        &held.mounts,
        held.limit_unenforced.clone(),
    )
}

/// The same of one that is about to be so.
pub(super) fn new_record(
    inner: &Inner,
    claim: &PersistentVolume,
    mounts: &HashMap<PathBuf, ClaimMount>,
    limit_unenforced: Option<String>,
) -> ClaimRecord {
    let target = |(path, mount): (&PathBuf, &ClaimMount)| ClaimTarget {
        path: path.clone(),
        staging: mount.staging,
        read_only: mount.read_only,
        asked: mount.asked,
    };
    ClaimRecord {
        format: ClaimRecord::FORMAT,
        boot: inner.boot().to_owned(),
        claim: claim.clone(),
        targets: mounts.iter().map(target).collect(),
        limit_unenforced,
    }
}

/// Writes the record down.
pub(super) fn write(dir: &Dir, record: &ClaimRecord) -> Result<()> {
    store::write_claim(dir, record).context("write the volume's record")
}

/// Writes a record that no longer says where the volume is mounted, also on a full disk. If that
/// fails, the old record stays until the next mount, unmount or start: a start reads the mount
/// table.
pub(super) fn correct(inner: &Inner, record: &ClaimRecord) {
    let id = &record.claim.id;
    let dir = inner.dirs.volumes.open_beneath(id);
    let written = dir.and_then(|dir| inner.with_reserve(|| store::write_claim(&dir, record)));
    if let Err(error) = written {
        tracing::warn!(volume.id = %id, %error,
            "the volume's record still lists a target where it is not mounted; the next mount, \
             unmount or start corrects it");
    }
}

/// Writes the volume's record again, if it has a directory: its layers have changed. It is not
/// mounted.
pub(in crate::engine) fn restack(inner: &Inner, id: &VolumeId) {
    let dir = match inner.volume_dir_if_there(id) {
        Ok(None) => return,
        Ok(Some(dir)) => Ok(dir),
        Err(error) => Err(error),
    };
    let record = inner
        .state
        .lock()
        .claims
        .get(id)
        .map(|held| record(inner, held));
    let Some(record) = record else { return };
    let written = dir.and_then(|dir| write(&dir, &record));
    if let Err(error) = written {
        tracing::warn!(volume.id = %id, %error,
            "the volume's record could not be written; it still lists layers that the volume no \
             longer has");
    }
}

/// Moves the rest of a claim's directory to the trash after its content has moved: records and work
/// directories.
pub(super) fn clear(inner: &Inner, id: &VolumeId) {
    if let Err(error) = inner.throw_away_if_there(&inner.dirs.volumes, id.as_ref()) {
        tracing::warn!(volume.id = %id, %error,
            "the directory of an empty volume could not be moved to trash/; it stays until the \
             next start");
    }
}

/// Whether a process holds files of a claim that is mounted nowhere. The driver asks the kernel
/// only where it did not see the end of the last mount: the kernel answers with a line in its log,
/// which on a serial console takes a millisecond.
pub(super) fn is_held_open(inner: &Inner, claim: &VolumeId) -> Result<bool> {
    let lingers = {
        let state = inner.state.lock();
        let held = state.claims.get(claim);
        held.is_none_or(|held| held.busy_layers.is_some())
    };
    if !lingers {
        return Ok(false);
    }
    let Some(dir) = inner.volume_dir_if_there(claim)? else {
        return Ok(false);
    };
    let held = inner.backend.in_use(&dir);
    held.context("ask whether the volume is in use")
}
