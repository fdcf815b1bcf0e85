//! Recover: what the last process, or the last boot, left behind becomes what this one knows.
//!
//! Sources of truth: the index for what is sealed, the records for what is ephemeral, the kernel's mount table for what is
//! mounted. `docs/on-disk.md` has the rules; rule 3 of the product is that after `kill -9` at any instruction nothing
//! published is lost, nothing half-made is visible, and nothing leaks.
//!
//! One odd name must not keep the driver from starting: what cannot be opened, read or moved is told of and left where it is, and
//! nothing that it may need is deleted (`orphans`). Only a whole directory, or the index, that cannot be read ends the start; and what
//! this process lacks itself, which is no fault of the name ([`sys::Error::is_of_this_process`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::catalog::Catalog;
use super::claims::recover as claims;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::layers::confirm;
use super::mounts::find_mounts;
use super::notice::{self, NotCommitted};
use super::orphans::{self, Kept, Place};
use super::seal;
use super::shared::Inner;
use super::state::State;
use super::types::{Measured, VolumeState};
use super::volumes::{Goal, Live, RetiringVolume, Teardown};
use crate::model::{Artifact, ArtifactId, LayerId, Outcome, VolumeId, VolumeRecord};
use crate::store::{self, Change, Contents, Unreadable};
use crate::sys::{self, Dir, Errno, MountEntry};

/// What recovery found to be done once the engine runs.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// Volumes whose end is to be seen to.
    pub(super) leaving: Vec<Teardown>,
    /// Changes that the index needs: what it names and is not there.
    pub(super) changes: Vec<Change>,
    /// What somebody may be using, and nobody can say what it is.
    kept: Kept,
    /// Layers that were volumes which a process still reads, and what those were mounted over.
    pub(super) read: Vec<(LayerId, Vec<LayerId>)>,
}

/// Fills an empty state.
pub(super) fn recover(inner: &Inner, contents: Contents) -> Result<Recovered> {
    let mut recovered = Recovered::default();
    let mut state = State::default();
    if let Some(doom) =
        store::read_doom(&inner.dirs.root, inner.boot()).context("read what was doomed")?
    {
        state.write_back.taint(doom.until);
    }
    inner.spares.sweep()?;
    point(Point::RecoverSwept);
    let on_disk: HashSet<LayerId> = ids(&inner.dirs.layers)?.into_iter().collect();
    recover_index(inner, contents, &on_disk, &mut state, &mut recovered);
    let mounts = sys::mount_table().context("read the mount table")?;
    recover_volumes(inner, &mounts, &mut state, &mut recovered)?;
    recover_pending(inner, &mounts, &mut state, &mut recovered)?;
    recover_trash(inner, &mounts, &mut state, &mut recovered)?;
    if recovered.kept.count() > 0 {
        orphans::hold(inner, &on_disk, &mut state);
        state.volumes.kept = recovered.kept.count();
    }
    trash_unknown_layers(inner, &on_disk, &state);
    let (volumes, leaving) = (state.volumes.live.len(), state.volumes.retiring.len());
    if volumes + leaving > 0 {
        tracing::info!(
            volumes,
            leaving,
            artifacts = state.catalog.artifacts().len(),
            "recovered"
        );
    }
    *inner.state.lock() = state;
    Ok(recovered)
}

/// What is sealed: artifacts whose layers are all there, and the names that point at them.
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
                "a layer of this artifact is missing; it is forgotten");
            recovered.changes.push(Change::RemoveArtifact(artifact.id));
        } else {
            artifacts.insert(artifact.id, artifact);
        }
    }
    let mut names = BTreeMap::new();
    for (name, id) in contents.names {
        if artifacts.contains_key(&id) {
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

/// What a directory that should hold a volume holds.
enum Holds {
    /// A volume of this boot.
    Volume(Box<VolumeRecord>),
    /// One of another boot, or of an earlier mount of the pool's filesystem, which nobody has any more.
    Stale(Box<VolumeRecord>),
    /// Nothing that says what it is: never a volume, or one whose record was damaged.
    Rubbish(Unreadable),
    /// Its record could not be read.
    Unknown(sys::Error),
}

fn read(inner: &Inner, dir: &Dir) -> Result<Holds> {
    Ok(match store::read_volume(dir) {
        Err(error) if !error.is_of_this_process() => Holds::Unknown(error),
        record => match record.context("read a volume's record")? {
            Err(unreadable) => Holds::Rubbish(unreadable),
            Ok(record) if !record.is_of(inner.boot(), inner.origin().superblock) => {
                Holds::Stale(Box::new(record))
            }
            Ok(record) => Holds::Volume(Box::new(record)),
        },
    })
}

const OTHER_BOOT: &str = "it is of another boot, or of an earlier mount of the pool's filesystem";

/// Opens what should be the directory of a volume; `None`: it is none, or cannot be opened. What is none is put aside.
fn open(
    inner: &Inner,
    place: Place,
    name: &Path,
    recovered: &mut Recovered,
) -> Result<Option<Dir>> {
    let dir = place.dir(inner);
    match dir.open_beneath(name) {
        Ok(dir) => Ok(Some(dir)),
        // Nobody else should, but it is gone.
        Err(error) if error.is(Errno::ENOENT) => Ok(None),
        Err(error) if error.is_no_directory() => {
            put_away(inner, dir, name, "it is no directory");
            Ok(None)
        }
        Err(error) if !error.is_of_this_process() => {
            leave(inner, place, name, &error, recovered);
            Ok(None)
        }
        Err(error) => Err(error).context("open a volume's directory"),
    }
}

/// Leaves a directory where it is that cannot be opened or read, and what it may need.
fn leave(inner: &Inner, place: Place, name: &Path, error: &sys::Error, recovered: &mut Recovered) {
    let path = place.dir(inner).path().join(name);
    tracing::error!(path = %path.display(), %error, "left as it is: nobody can say what it is");
    recovered.kept.add_unknown();
}

/// Throws rubbish away, unless somebody may be using it: a record is written before the mount, and may have been damaged later.
fn put_away_unless_used(
    inner: &Inner,
    (place, name, dir): (Place, &Path, &Dir),
    why: &str,
    mounts: &[MountEntry],
    recovered: &mut Recovered,
) {
    let from = place.dir(inner);
    if recovered.kept.add_if_used(inner, place, name, dir, mounts) {
        let path = from.path().join(name);
        tracing::error!(path = %path.display(), %why, "kept, because it is mounted");
    } else {
        put_away(inner, from, name, why);
    }
}

/// `volumes/`: published, or on the way to or from it.
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
            // Durable, and not to be guessed at: what is wrong with it ends the start.
            match volumes.open_beneath(name) {
                Err(error) if error.is_no_directory() => {
                    put_away(inner, volumes, name, "it is no directory");
                }
                dir => {
                    let dir = dir.context("open a volume's directory")?;
                    claims::recover_volume(inner, id, &dir, mounts, state)?;
                }
            }
            continue;
        }
        let Some(dir) = open(inner, Place::Volumes, name, recovered)? else {
            continue;
        };
        let record = match read(inner, &dir)? {
            Holds::Volume(record) if id.as_ref() == Some(&record.id) => *record,
            Holds::Stale(record) => {
                if put_away(inner, volumes, name, OTHER_BOOT) {
                    say_rebooted(inner, &record);
                }
                continue;
            }
            Holds::Unknown(error) => {
                leave(inner, Place::Volumes, name, &error, recovered);
                continue;
            }
            rubbish => {
                let why = match rubbish {
                    Holds::Rubbish(why) => why.to_string(),
                    _ => "its record is of another volume".to_owned(),
                };
                let rubbish = (Place::Volumes, name, &dir);
                put_away_unless_used(inner, rubbish, &why, mounts, recovered);
                continue;
            }
        };
        let live = Live {
            mounts: mounts_of(inner, mounts, &record)?,
            outcome: outcome_of(&dir)?,
            record,
            made: true,
            done_with: false,
            measured: Measured::default(),
        };
        inner.saw(live.record.created);
        state.volumes.live.insert(live.record.id.clone(), live);
    }
    Ok(())
}

/// Says that what was to be kept of a volume did not survive the end of its boot. Once: it is put away.
fn say_rebooted(inner: &Inner, record: &VolumeRecord) {
    if record.seal.is_some() {
        let notices = inner.config.notices.as_ref();
        notice::say_not_committed(notices, record, &NotCommitted::Rebooted);
        inner.counters().given_up();
    }
}

/// How the pod's work ended, if that is noted where it can be read. Else it is asked for again; what nobody says is not sealed.
fn outcome_of(dir: &Dir) -> Result<Option<Outcome>> {
    match store::read_outcome(dir) {
        Err(error) if !error.is_of_this_process() => {
            tracing::error!(path = %dir.path().display(), %error,
                "how its pod ended cannot be read: it is as if nobody had said");
            Ok(None)
        }
        outcome => outcome.context("read a volume's outcome"),
    }
}

/// Where a volume is mounted, as far as that can be seen. Where it cannot, it counts as not mounted: it is unmounted all the same when
/// kubelet asks, and nothing is done to it before the kernel was asked.
fn mounts_of(
    inner: &Inner,
    mounts: &[MountEntry],
    record: &VolumeRecord,
) -> Result<HashMap<PathBuf, u64>> {
    let mut all = HashMap::new();
    for target in &record.targets {
        match find_mounts(
            inner,
            mounts,
            &record.id,
            record.label(),
            &[target.as_path()],
        ) {
            Ok(found) => all.extend(found),
            Err(Error::System { operation, source }) if source.is_of_this_process() => {
                return Err(Error::System { operation, source });
            }
            Err(error) => {
                tracing::error!(volume.id = %record.id, target = %target.display(), %error,
                    "whether it is mounted there cannot be seen");
            }
        }
    }
    Ok(all)
}

/// `pending/`: promised seals.
fn recover_pending(
    inner: &Inner,
    mounts: &[MountEntry],
    state: &mut State,
    recovered: &mut Recovered,
) -> Result<()> {
    let pending = &inner.dirs.pending;
    for entry in pending.entries().context("read pending/")? {
        let name = Path::new(&entry.name);
        let Some(dir) = open(inner, Place::Pending, name, recovered)? else {
            continue;
        };
        let record = match read(inner, &dir)? {
            Holds::Volume(record) => *record,
            Holds::Stale(record) => {
                let is_sealed = (record.seal.as_ref())
                    .is_some_and(|plan| state.catalog.contains(&plan.artifact));
                if put_away(inner, pending, name, OTHER_BOOT) && !is_sealed {
                    say_rebooted(inner, &record);
                }
                continue;
            }
            Holds::Rubbish(why) => {
                let rubbish = (Place::Pending, name, &dir);
                put_away_unless_used(inner, rubbish, &why.to_string(), mounts, recovered);
                continue;
            }
            Holds::Unknown(error) => {
                leave(inner, Place::Pending, name, &error, recovered);
                continue;
            }
        };
        let plan = record
            .seal
            .clone()
            .filter(|plan| Path::new(&plan.layer.to_string()) == name);
        let Some(plan) = plan else {
            let why = "its record says that it is not to be sealed";
            // In the trash its record says what it needs.
            if !put_away(inner, pending, name, why) {
                let kept = &mut recovered.kept;
                kept.add_if_used(inner, Place::Pending, name, &dir, mounts);
            }
            continue;
        };
        inner.saw(record.created);
        let key = plan.layer;
        if state.catalog.contains(&plan.artifact) {
            // Everything was done but tidying up.
            if let Err(error) = confirm(inner, key) {
                tracing::warn!(layer = %key, %error, "an index made anew would not know this layer");
            }
            if !put_away(inner, pending, name, "it is sealed") {
                // As where it could not be taken back by the commit.
                state.catalog.set_durable(&plan.artifact, false);
            }
            continue;
        }
        let leaving = RetiringVolume {
            chosen: chosen(inner, key, &record, state)?,
            record,
            goal: Goal::Seal(plan),
            state: VolumeState::Sealing,
            outcome: outcome_of(&dir)?,
            usage: None,
        };
        state.volumes.retiring.insert(key, leaving);
        recovered.leaving.push(Teardown { key, pin: None });
    }
    Ok(())
}

/// The layers that a seal has chosen which was cut short. Where that cannot be read it is what it would choose now: what it did choose and
/// is not there when it goes on, it does not stack.
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
                "it is no directory",
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
        return Err(error).context("read what a seal has begun");
    }
    tracing::error!(layer = %key, %error, "what a seal has begun cannot be read");
    Ok(state.catalog.parent_layers(record))
}

/// `trash/`: a volume of this boot may still be held open by its pod, and then its parent's layers must stay.
fn recover_trash(
    inner: &Inner,
    mounts: &[MountEntry],
    state: &mut State,
    recovered: &mut Recovered,
) -> Result<()> {
    for key in ids(&inner.dirs.trash)? {
        let name = key.to_string();
        let name = Path::new(&name);
        let dir = match inner.dirs.trash.open_beneath(name) {
            Err(error) if error.is_no_directory() || error.is(Errno::ENOENT) => continue,
            Err(error) if !error.is_of_this_process() => {
                leave(inner, Place::Trash, name, &error, recovered);
                continue;
            }
            dir => dir.context("open a directory in the trash")?,
        };
        match read(inner, &dir)? {
            Holds::Volume(record) => {
                if let Some(layer) = still_read(inner, &record)? {
                    let layers = record.layers.iter().copied().chain([layer]);
                    state
                        .volumes
                        .retained_layers
                        .insert(layer, layers.collect());
                    recovered.read.push((layer, record.layers));
                    continue;
                }
                let leaving = RetiringVolume {
                    record: *record,
                    goal: Goal::Discard,
                    state: VolumeState::Sealing,
                    outcome: None,
                    usage: None,
                    chosen: Vec::new(),
                };
                state.volumes.retiring.insert(key, leaving);
                recovered.leaving.push(Teardown { key, pin: None });
            }
            // Without a record it is no volume, and what is none is never mounted.
            Holds::Stale(_) | Holds::Rubbish(Unreadable::Missing) => {}
            Holds::Rubbish(Unreadable::Damaged(_)) => {
                // It is where it belongs, and stays there as long as it is in use.
                let kept = &mut recovered.kept;
                kept.add_if_used(inner, Place::Trash, name, &dir, mounts);
            }
            Holds::Unknown(error) => {
                leave(inner, Place::Trash, name, &error, recovered);
            }
        }
    }
    Ok(())
}

/// The layer that a sealed volume became, if a process still reads it; its promise lies in the trash until that is over. What it was
/// mounted over must stay, whatever became of the artifact.
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

/// Layers that nothing refers to: of a seal that a power cut undid, or of a collection that a crash cut short.
fn trash_unknown_layers(inner: &Inner, on_disk: &HashSet<LayerId>, state: &State) {
    let mut known = state.referenced_layers();
    known.extend(state.volumes.retiring.keys());
    for layer in on_disk.difference(&known) {
        put_away(
            inner,
            &inner.dirs.layers,
            layer.to_string().as_ref(),
            "nothing refers to it",
        );
    }
}

/// Moves something into the trash. What cannot be moved stays where it is, in nobody's way; whether it went.
fn put_away(inner: &Inner, from: &Dir, name: &Path, why: &str) -> bool {
    let path = from.path().join(name);
    match inner.throw_away(from, name) {
        Ok(_) => {
            tracing::info!(path = %path.display(), why, "thrown away");
            point(Point::RecoverThrownAway);
            true
        }
        Err(error) => {
            tracing::error!(path = %path.display(), why, %error, "to be thrown away, and left where it is");
            false
        }
    }
}

/// The names in a directory that are ids.
fn ids(dir: &Dir) -> Result<Vec<LayerId>> {
    let entries = dir.entries().context("read a directory of the pool")?;
    Ok(entries
        .iter()
        .filter_map(|entry| entry.name.to_str()?.parse().ok())
        .collect())
}
