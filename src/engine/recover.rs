//! Recovery: builds the state in memory from what the last process, or the last boot, left on disk.
//!
//! Sources of truth: the index for sealed content, the records for inline volumes, the kernel's
//! mount table for mounts. `docs/on-disk.md` has the rules; rule 3 of the product is that after
//! `kill -9` at any instruction nothing published is lost, nothing half-made is visible, and
//! nothing leaks.
//!
//! One bad entry must not keep the driver from starting. An entry that cannot be opened, read or
//! moved is logged and left in place, and nothing that it may need is deleted (`orphans`). The
//! start fails only if a whole directory or the index is unreadable, or if this process lacks a
//! resource ([`sys::Error::is_of_this_process`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use super::catalog::Catalog;
use super::claims::recover as claims;
use super::durability::WriteBack;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::layers::confirm;
use super::lifecycle::{Goal, Lifecycle};
use super::mounts;
use super::notice::NotCommitted;
use super::orphans::{self, Orphans, Parent};
use super::policies;
use super::pool_scan::{Found, keys, look};
use super::seal;
use super::shared::Inner;
use super::state::State;
use super::teardowns::Teardown;
use super::volumes::Volume;
use crate::model::{
    Artifact, ArtifactId, LayerId, Outcome, Timestamp, VolumeId, VolumeRecord, layout,
};
use crate::store::{self, Change, Contents, Unreadable};
use crate::sys::{self, Dir, Errno, MountEntry};

const TO_BE_SEALED: Lifecycle = Lifecycle::Quiescing {
    goal: Goal::Seal,
    held: false,
};
const TO_BE_DISCARDED: Lifecycle = Lifecycle::Quiescing {
    goal: Goal::Discard,
    held: false,
};

/// Work that recovery leaves to the running engine.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// Volumes whose end is to be seen to.
    pub(super) leaving: Vec<Teardown>,
    /// Changes that the index needs: it names content that does not exist.
    pub(super) changes: Vec<Change>,
    /// Directories that a process may be using and whose content is unknown.
    orphans: Orphans,
    /// Whether something without a record was moved to the trash.
    put_away: bool,
    /// Layers that were volumes which a process still reads, and what those were mounted over.
    pub(super) read: Vec<(LayerId, Vec<LayerId>)>,
}

/// Deletes `spares/`, in which older versions prepared directories of future volumes. No process
/// uses them.
fn sweep_spares(inner: &Inner) -> Result<()> {
    let root = &inner.dirs.root;
    let spares = root.open_if_there(layout::SPARES);
    let Some(spares) = spares.context("open spares/")? else {
        return Ok(());
    };
    for entry in spares.entries().context("read spares/")? {
        if let Err(error) = inner
            .backend
            .delete(&spares, entry.name.as_ref(), &|| false)
        {
            tracing::error!(%error,
                "a directory of an older version could not be deleted; it stays until the next \
                 start");
        }
    }
    match root.remove_dir(layout::SPARES) {
        Err(error) if !error.is(Errno::ENOTEMPTY) => Err(error).context("delete spares/"),
        _ => Ok(()),
    }
}

/// Fills an empty state.
pub(super) fn recover(inner: &Inner, contents: Contents) -> Result<Recovered> {
    let mut recovered = Recovered::default();
    let failed = store::read_writeback_failure(&inner.dirs.root, inner.boot())
        .context("read the record of a write-back error")?
        .map(|failure| failure.until);
    if let Some(until) = failed {
        inner.saw(until);
    }
    let mut state = State {
        policies: policies::found(inner).into(),
        // Not `now()`, from which the clock would not go back: the controller may tell an earlier
        // time.
        write_back: WriteBack::found(inner.time(), failed),
        ..State::default()
    };
    sweep_spares(inner)?;
    point(Point::RecoverSwept);
    let on_disk: HashSet<LayerId> = keys(&inner.dirs.layers)?.into_iter().collect();
    recover_index(inner, contents, &on_disk, &mut state, &mut recovered);
    let mounts = sys::mount_table().context("read the mount table")?;
    recover_volumes(inner, &mounts, &mut state, &mut recovered)?;
    recover_pending(inner, &mounts, &mut state, &mut recovered)?;
    recover_trash(inner, &mounts, &mut state, &mut recovered)?;
    if recovered.orphans.count() > 0 {
        orphans::keep_all(inner, &on_disk, &mut state);
        state.volumes.add_orphans(recovered.orphans.count());
    }
    trash_unknown_layers(inner, &on_disk, &state);
    let live = state.volumes.all_live().count();
    let retiring = state.volumes.all_retiring().count();
    if live + retiring > 0 {
        tracing::info!(
            volumes = live,
            leaving = retiring,
            artifacts = state.catalog.artifacts().len(),
            "recovered"
        );
    }
    *inner.state.lock() = state;
    Ok(recovered)
}

/// Sealed content: artifacts whose layers all exist, and the names that point at them.
fn recover_index(
    inner: &Inner,
    contents: Contents,
    on_disk: &HashSet<LayerId>,
    state: &mut State,
    recovered: &mut Recovered,
) {
    let mut artifacts: HashMap<ArtifactId, Artifact> = HashMap::new();
    for artifact in contents.artifacts {
        inner.saw(artifact.created);
        inner.saw(artifact.last_used);
        if let Some(layer) = artifact
            .layers
            .iter()
            .find(|layer| !on_disk.contains(layer))
        {
            tracing::error!(artifact.id = %artifact.id, name = %artifact.name(), %layer,
                "a layer of this artifact is missing; the artifact is removed from the index");
            recovered.changes.push(Change::RemoveArtifact(artifact.id));
        } else {
            artifacts.insert(artifact.id, artifact);
        }
    }
    state.fences = contents.fences;
    let mut names = BTreeMap::new();
    for (name, id) in contents.names {
        // An older version that ran here in between knows no fences.
        let least = state.fences.covering(&name);
        if artifacts.get(&id).is_some_and(|it| it.fence >= least) {
            names.insert(name, id);
        } else {
            recovered.changes.push(Change::RemoveName(name));
        }
    }
    let (there, gone) =
        (contents.layers.into_iter()).partition::<Vec<_>, _>(|(layer, _)| on_disk.contains(layer));
    let usage = there.into_iter().collect();
    let gone = gone
        .into_iter()
        .map(|(layer, _)| Change::RemoveLayer(layer));
    recovered.changes.extend(gone);
    let (claims, snapshots) = (contents.claims, contents.snapshots);
    claims::recover_index(inner, claims, snapshots, contents.groups, on_disk, state);
    let artifacts = artifacts.into_values().collect();
    state.catalog = Catalog::recovered(artifacts, names, usage);
}

/// The volume of this boot under this name in `volumes/` or `pending/`, if there is one. Anything
/// else is moved to the trash, unless it is unreadable or in use. `stale` is called with a volume
/// of another boot.
fn volume_at(
    inner: &Inner,
    (parent, name): (Parent, &Path),
    mounts: &[MountEntry],
    recovered: &mut Recovered,
    stale: impl FnOnce(&VolumeRecord),
) -> Result<Option<(Dir, VolumeRecord)>> {
    let from = parent.dir(inner);
    match look(from, name)? {
        Found::Gone => {}
        Found::Stray => {
            put_away(inner, from, name, "it is not a directory");
        }
        Found::Unreadable(error) => leave(inner, parent, name, &error, recovered),
        Found::Unrecorded(dir, why) => {
            let why = why.to_string();
            put_away_unless_used(inner, (parent, name, &dir), &why, mounts, recovered);
        }
        Found::Volume(_, record) if !is_of_this_boot(inner, &record) => {
            let why = "it is of another boot, or of an earlier mount of the pool's filesystem";
            if put_away(inner, from, name, why) {
                stale(&record);
            }
        }
        Found::Volume(dir, record) => return Ok(Some((dir, *record))),
    }
    Ok(None)
}

/// Whether this boot made the volume, on this mount of the pool's filesystem. No process has any
/// other volume.
fn is_of_this_boot(inner: &Inner, record: &VolumeRecord) -> bool {
    record.is_of(inner.boot(), inner.origin().superblock)
}

/// Leaves a directory in place that cannot be opened or read, with all that it may need.
fn leave(
    inner: &Inner,
    parent: Parent,
    name: &Path,
    error: &sys::Error,
    recovered: &mut Recovered,
) {
    let path = parent.dir(inner).path().join(name);
    tracing::error!(path = %path.display(), %error,
        "left in place: its record could not be read, so its owner is unknown");
    recovered.orphans.add_unknown();
}

/// Moves an entry without a valid record to the trash, unless a process may be using it: the record
/// may have been damaged after the mount.
fn put_away_unless_used(
    inner: &Inner,
    (parent, name, dir): (Parent, &Path, &Dir),
    why: &str,
    mounts: &[MountEntry],
    recovered: &mut Recovered,
) {
    let from = parent.dir(inner);
    if recovered
        .orphans
        .add_if_used(inner, parent, name, dir, mounts)
    {
        let path = from.path().join(name);
        tracing::error!(path = %path.display(), %why, "kept, because it is mounted");
    } else {
        recovered.put_away |= put_away(inner, from, name, why);
    }
}

/// `volumes/`: published, or on the way to or from it.
///
/// A directory of a claim that the index does not have is moved durably, as in a deletion: the next
/// claim of that name must not find it there after a power cut.
fn recover_volumes(
    inner: &Inner,
    mounts: &[MountEntry],
    state: &mut State,
    recovered: &mut Recovered,
) -> Result<()> {
    let volumes = &inner.dirs.volumes;
    for entry in volumes.entries().context("read volumes/")? {
        let name = Path::new(&entry.name);
        let id: Option<VolumeId> = entry.name.to_str().and_then(|name| name.parse().ok());
        if let Some(id) = id.as_ref().filter(|id| state.claims.contains(id)) {
            // Durable content must not be guessed: an error here fails the start.
            match volumes.open_beneath(name) {
                Err(error) if error.is_no_directory() => {
                    put_away(inner, volumes, name, "it is not a directory");
                }
                dir => {
                    let dir = dir.context("open a volume's directory")?;
                    claims::recover_volume(inner, id, &dir, mounts, state)?;
                }
            }
            continue;
        }
        let at = (Parent::Volumes, name);
        let rebooted = |record: &VolumeRecord| say_rebooted(inner, record);
        let Some((dir, mut record)) = volume_at(inner, at, mounts, recovered, rebooted)? else {
            continue;
        };
        if id.as_ref() != Some(&record.id) {
            let why = "its record is of another volume";
            put_away_unless_used(inner, (at.0, name, &dir), why, mounts, recovered);
            continue;
        }
        let mount = mount_of(inner, mounts, &record)?;
        let outcome = outcome_of(&dir)?;
        let lifecycle = mount.map_or(Lifecycle::Unpublished, |mount| Lifecycle::Published {
            mount,
        });
        inner.saw(record.created);
        record.created = state.write_back.begun(record.created);
        let volume = Volume::found(record, lifecycle, outcome);
        state.volumes.add_live(volume);
    }
    if recovered.put_away
        && let Err(error) = volumes.sync()
    {
        tracing::error!(%error,
            "after a power cut, a volume may have the content of a deleted one of that name");
    }
    Ok(())
}

/// Reports that a volume's content was lost with its boot, before it was sealed. Only once: the
/// volume is then moved to the trash.
fn say_rebooted(inner: &Inner, record: &VolumeRecord) {
    if record.seal.is_some() {
        inner.say_not_committed(record, &NotCommitted::Rebooted);
        inner.counters().given_up();
    }
}

/// The recorded outcome of the pod; `None`: there is no readable record. Then the driver asks
/// again, and does not seal without an answer.
fn outcome_of(dir: &Dir) -> Result<Option<Outcome>> {
    match store::read_outcome(dir) {
        Err(error) if !error.is_of_this_process() => {
            tracing::error!(path = %dir.path().display(), %error,
                "the recorded outcome of the pod is unreadable; it counts as not reported");
            Ok(None)
        }
        outcome => outcome.context("read a volume's outcome"),
    }
}

/// When its commit became due; `None`: there is no readable record. Then the time of its seal
/// counts.
fn due_of(dir: &Dir) -> Result<Option<Timestamp>> {
    match store::read_due(dir) {
        Err(error) if !error.is_of_this_process() => {
            tracing::error!(path = %dir.path().display(), %error,
                "when the commit became due is unreadable; the time of its seal counts");
            Ok(None)
        }
        due => due.context("read when a volume's commit became due"),
    }
}

/// The mount of a volume, as far as that can be seen. Otherwise it counts as not mounted: it is
/// still unmounted when kubelet asks, and the kernel is asked before anything is done to it.
fn mount_of(inner: &Inner, mounts: &[MountEntry], record: &VolumeRecord) -> Result<Option<u64>> {
    for target in &record.targets {
        match mounts::find(inner, mounts, &record.id, record.label(), target) {
            Ok(None) => {}
            Ok(found) => return Ok(found),
            Err(Error::System { operation, source }) if source.is_of_this_process() => {
                return Err(Error::System { operation, source });
            }
            Err(error) => {
                tracing::error!(volume.id = %record.id, target = %target.display(), %error,
                    "could not find out whether the volume is mounted at the target; it counts as \
                     not mounted");
            }
        }
    }
    Ok(None)
}

/// `pending/`: seal intents.
fn recover_pending(
    inner: &Inner,
    mounts: &[MountEntry],
    state: &mut State,
    recovered: &mut Recovered,
) -> Result<()> {
    let pending = &inner.dirs.pending;
    for entry in pending.entries().context("read pending/")? {
        let name = Path::new(&entry.name);
        let at = (Parent::Pending, name);
        let rebooted = |record: &VolumeRecord| {
            let plan = record.seal.as_ref();
            match plan.and_then(|plan| state.catalog.get(&plan.artifact)) {
                Some(sealed) => policies::audit(&state.policies, &sealed.artifact),
                None => say_rebooted(inner, record),
            }
        };
        let Some((dir, mut record)) = volume_at(inner, at, mounts, recovered, rebooted)? else {
            continue;
        };
        let plan = record
            .seal
            .clone()
            .filter(|plan| Path::new(&plan.layer.to_string()) == name);
        let Some(plan) = plan else {
            let why = "its record has no seal intent";
            // In the trash its record says what it needs.
            if !put_away(inner, pending, name, why) {
                let orphans = &mut recovered.orphans;
                orphans.add_if_used(inner, Parent::Pending, name, &dir, mounts);
            }
            continue;
        };
        inner.saw(record.created);
        record.created = state.write_back.begun(record.created);
        let key = plan.layer;
        if let Some(sealed) = state.catalog.get(&plan.artifact) {
            // Only the clean-up was missing, and maybe the line in the log.
            policies::audit(&state.policies, &sealed.artifact);
            if let Err(error) = confirm(inner, key) {
                tracing::warn!(layer = %key, %error,
                    "the layer could not be confirmed: an index rebuilt now would not include it");
            }
            if !put_away(inner, pending, name, "it is sealed") {
                // As when a commit cannot withdraw the intent.
                state.catalog.set_durable(&plan.artifact, false);
            }
            continue;
        }
        let chosen = chosen(inner, key, &record, state)?;
        retain_if_read(inner, &record, state, recovered)?;
        let mut volume = Volume::found(record, TO_BE_SEALED, outcome_of(&dir)?);
        volume.due = due_of(&dir)?;
        if let Some(due) = volume.due {
            inner.saw(due);
        }
        state.volumes.add_retiring(key, volume);
        state.volumes.choose(key, &chosen);
        recovered.leaving.push(Teardown { key, pin: None });
    }
    Ok(())
}

/// The layers that an interrupted seal has chosen. If they are unreadable, the layers that it would
/// choose now. When the seal continues, it does not stack a chosen layer that is missing.
fn chosen(
    inner: &Inner,
    key: LayerId,
    record: &VolumeRecord,
    state: &State,
) -> Result<Vec<LayerId>> {
    let name = key.to_string();
    let error = match inner.dirs.layers.open_if_there(&name) {
        Err(error) if error.is_no_directory() => {
            // The content is still where it was, or is lost: this is no layer.
            put_away(
                inner,
                &inner.dirs.layers,
                name.as_ref(),
                "it is not a directory",
            );
            return Ok(Vec::new());
        }
        Err(error) => error,
        Ok(_) => match seal::layers_chosen(inner, key) {
            Err(Error::System { source, .. }) => source,
            chosen => return chosen,
        },
    };
    if error.is_of_this_process() {
        return Err(error).context("read the record of an interrupted seal");
    }
    tracing::error!(layer = %key, %error,
        "the record of an interrupted seal is unreadable; its layers are chosen again");
    Ok(state.catalog.parent_layers(record))
}

/// `trash/`: a volume of this boot may still be held open by its pod, and then its parent's layers
/// must stay.
fn recover_trash(
    inner: &Inner,
    mounts: &[MountEntry],
    state: &mut State,
    recovered: &mut Recovered,
) -> Result<()> {
    for key in keys(&inner.dirs.trash)? {
        let name = key.to_string();
        let name = Path::new(&name);
        match look(&inner.dirs.trash, name)? {
            Found::Volume(_, record) if is_of_this_boot(inner, &record) => {
                if retain_if_read(inner, &record, state, recovered)? {
                    continue;
                }
                let volume = Volume::found(*record, TO_BE_DISCARDED, None);
                state.volumes.add_retiring(key, volume);
                recovered.leaving.push(Teardown { key, pin: None });
            }
            Found::Unrecorded(dir, Unreadable::Damaged(_)) => {
                // It is where it belongs, and stays there as long as it is in use.
                let orphans = &mut recovered.orphans;
                orphans.add_if_used(inner, Parent::Trash, name, &dir, mounts);
            }
            Found::Unreadable(error) => leave(inner, Parent::Trash, name, &error, recovered),
            // A directory without a record is no volume, and only volumes are mounted.
            Found::Gone
            | Found::Stray
            | Found::Volume(..)
            | Found::Unrecorded(_, Unreadable::Missing) => {}
        }
    }
    Ok(())
}

/// Keeps the layers of a volume whose content is a layer already, if a process still reads it.
/// Returns whether one does.
fn retain_if_read(
    inner: &Inner,
    record: &VolumeRecord,
    state: &mut State,
    recovered: &mut Recovered,
) -> Result<bool> {
    let Some(layer) = still_read(inner, record)? else {
        return Ok(false);
    };
    let layers = record.layers.iter().copied().chain([layer]);
    state.volumes.retain(layer, layers.collect());
    recovered.read.push((layer, record.layers.clone()));
    Ok(true)
}

/// The layer of a sealed volume that a process still reads. The layers below it must stay, whatever
/// happens to the artifact.
fn still_read(inner: &Inner, record: &VolumeRecord) -> Result<Option<LayerId>> {
    let Some(plan) = &record.seal else {
        return Ok(None);
    };
    let is_read = match inner.dirs.layers.open_if_there(plan.layer.to_string()) {
        Ok(layer) => layer.is_some_and(|layer| inner.backend.in_use(&layer).unwrap_or(true)),
        Err(error) if error.is_no_directory() => false,
        Err(error) if error.is_of_this_process() => return Err(error).context("open a layer"),
        // It is not known, so it may be.
        Err(_) => true,
    };
    Ok(is_read.then_some(plan.layer))
}

/// Moves layers to the trash that nothing refers to: from a seal that a power cut undid, or from a
/// collection that a crash interrupted.
fn trash_unknown_layers(inner: &Inner, on_disk: &HashSet<LayerId>, state: &State) {
    let mut known = state.referenced_layers();
    known.extend(state.volumes.all_retiring().map(|(key, _)| key));
    for layer in on_disk.difference(&known) {
        put_away(
            inner,
            &inner.dirs.layers,
            layer.to_string().as_ref(),
            "nothing refers to it",
        );
    }
}

/// Moves an entry into the trash; whether it could be moved. Otherwise it stays in its place, where
/// it does no harm.
fn put_away(inner: &Inner, from: &Dir, name: &Path, why: &str) -> bool {
    let path = from.path().join(name);
    match inner.throw_away(from, name) {
        Ok(_) => {
            tracing::info!(path = %path.display(), why, "moved to trash/");
            point(Point::RecoverThrownAway);
            true
        }
        Err(error) => {
            tracing::error!(path = %path.display(), why, %error,
                "could not be moved to trash/; it is left in place");
            false
        }
    }
}
