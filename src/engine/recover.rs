//! Recover: what the last process, or the last boot, left behind becomes what this one knows.
//!
//! Sources of truth: the index for what is sealed, the records for what is ephemeral, the kernel's mount table for what is
//! mounted. `docs/on-disk.md` has the rules; rule 3 of the product is that after `kill -9` at any instruction nothing
//! published is lost, nothing half-made is visible, and nothing leaks.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::check::is_stray;
use super::commit::Standing;
use super::crash::{Point, point};
use super::error::{Doing, Result};
use super::state::{Goal, Leaving, Left, Live, Measured, State};
use super::target::{Found, Target};
use super::types::VolumeState;
use super::{Inner, claims, commit, seal, spares};
use crate::model::{Artifact, ArtifactId, LayerId, VolumeId, VolumeRecord};
use crate::store::{self, Change, Contents};
use crate::sys::{self, Dir, MountEntry};

/// What recovery found to be done once the engine runs.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// Volumes whose end is to be seen to.
    pub(super) leaving: Vec<Left>,
    /// Changes that the index needs: what it names and is not there.
    pub(super) changes: Vec<Change>,
    /// Promises whose seals are over, and that could not be taken back.
    pub(super) standing: Vec<Standing>,
}

/// Fills an empty state.
pub(super) fn recover(inner: &Inner, contents: Contents) -> Result<Recovered> {
    let mut recovered = Recovered::default();
    let mut state = State::default();
    if let Some(doom) =
        store::read_doom(&inner.dirs.root, &inner.boot).doing("read what was doomed")?
    {
        state.doomed_until = Some(doom.until);
    }
    spares::sweep(inner)?;
    point(Point::RecoverSwept);
    let on_disk: HashSet<LayerId> = ids(&inner.dirs.layers)?.into_iter().collect();
    recover_index(inner, contents, &on_disk, &mut state, &mut recovered);
    let mounts = sys::mount_table().doing("read the mount table")?;
    recover_volumes(inner, &mounts, &mut state)?;
    recover_pending(inner, &mut state, &mut recovered)?;
    recover_trash(inner, &mut state, &mut recovered)?;
    trash_unknown_layers(inner, &on_disk, &state)?;
    let (volumes, leaving) = (state.volumes.len(), state.leaving.len());
    if volumes + leaving > 0 {
        tracing::info!(
            volumes,
            leaving,
            artifacts = state.artifacts.len(),
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
        inner.clock.seen(artifact.created);
        inner.clock.seen(artifact.last_used);
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
    for (name, id) in contents.names {
        if artifacts.contains_key(&id) {
            state.names.insert(name, id);
        } else {
            recovered.changes.push(Change::RemoveName(name));
        }
    }
    let (there, gone) =
        (contents.layers.into_iter()).partition::<Vec<_>, _>(|(layer, _)| on_disk.contains(layer));
    state.usage = there.into_iter().collect();
    let gone = gone
        .into_iter()
        .map(|(layer, _)| Change::RemoveLayer(layer));
    recovered.changes.extend(gone);
    let (claims, snapshots) = (contents.claims, contents.snapshots);
    claims::recover::recover_index(inner, claims, snapshots, contents.groups, on_disk, state);
    state.artifacts = artifacts
        .into_iter()
        .map(|(id, artifact)| {
            (
                id,
                super::state::Sealed {
                    artifact,
                    durable: true,
                },
            )
        })
        .collect();
}

/// What a directory that should hold a volume holds.
enum Held {
    /// A volume of this boot.
    Volume(Box<VolumeRecord>),
    /// Rubbish, and why.
    Rubbish(String),
}

fn read(inner: &Inner, dir: &Dir) -> Result<Held> {
    Ok(
        match store::read_volume(dir).doing("read a volume's record")? {
            Err(unreadable) => Held::Rubbish(unreadable.to_string()),
            Ok(record) if record.boot != inner.boot => {
                Held::Rubbish("it is of another boot".to_owned())
            }
            Ok(record) => Held::Volume(Box::new(record)),
        },
    )
}

/// Opens what should be the directory of a volume. What is none is put aside: one stray name must not keep the driver from
/// starting.
fn open(inner: &Inner, place: &Dir, name: &Path) -> Result<Option<Dir>> {
    match place.open_beneath(name) {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if is_stray(&error) => {
            if let Err(error) = throw_away(inner, place, name, "it is no directory") {
                tracing::error!(%error, "left where it is");
            }
            Ok(None)
        }
        Err(error) => Err(error).doing("open a volume's directory"),
    }
}

/// `volumes/`: published, or on the way to or from it.
fn recover_volumes(inner: &Inner, mounts: &[MountEntry], state: &mut State) -> Result<()> {
    for entry in inner.dirs.volumes.entries().doing("read volumes/")? {
        let name = Path::new(&entry.name);
        let Some(dir) = open(inner, &inner.dirs.volumes, name)? else {
            continue;
        };
        let id: Option<VolumeId> = entry.name.to_str().and_then(|name| name.parse().ok());
        if let Some(id) = id.as_ref().filter(|id| state.claims.contains_key(id)) {
            claims::recover::recover_volume(inner, id, &dir, mounts, state)?;
            continue;
        }
        let held = match (read(inner, &dir)?, id) {
            (Held::Volume(record), Some(id)) if record.id == id => record,
            (Held::Volume(_), _) => {
                throw_away(
                    inner,
                    &inner.dirs.volumes,
                    name,
                    "its record is of another volume",
                )?;
                continue;
            }
            (Held::Rubbish(why), id) => {
                let shows = |id: VolumeId| {
                    let shows = |mount| inner.backend.shows(mount, &id, id.as_str());
                    mounts.iter().any(shows)
                };
                // What its mount is called stood in the record, perhaps; so the kernel is asked, too.
                let is_visible =
                    || id.is_some_and(shows) || inner.backend.in_use(&dir).unwrap_or(true);
                if !why.contains("another boot") && is_visible() {
                    // A record is written before the mount; this one was damaged later. A pod may be using the volume.
                    tracing::error!(volume = %name.display(), %why, "kept, because it is mounted");
                } else {
                    throw_away(inner, &inner.dirs.volumes, name, &why)?;
                }
                continue;
            }
        };
        let record = *held;
        let outcome = store::read_outcome(&dir).doing("read a volume's outcome")?;
        let targets: Vec<&Path> = record.targets.iter().map(PathBuf::as_path).collect();
        let live = Live {
            mounts: find_mounts(inner, mounts, &record.id, record.label(), &targets)?,
            record,
            made: true,
            outcome,
            done_with: false,
            measured: Measured::default(),
        };
        inner.clock.seen(live.record.created);
        state.volumes.insert(live.record.id.clone(), live);
    }
    Ok(())
}

/// Where the volume is mounted, of the places where it is recorded to be.
pub(super) fn find_mounts(
    inner: &Inner,
    mounts: &[MountEntry],
    id: &VolumeId,
    label: &str,
    targets: &[&Path],
) -> Result<HashMap<PathBuf, u64>> {
    let mut found = HashMap::new();
    for &path in targets {
        // Kubelet's path may lead over a symlink; the table has it resolved.
        let resolved = path.parent().and_then(|parent| parent.canonicalize().ok());
        let resolved = resolved
            .zip(path.file_name())
            .map(|(parent, name)| parent.join(name));
        let resolved = resolved.unwrap_or_else(|| path.to_owned());
        let topmost = mounts
            .iter()
            .rev()
            .find(|mount| mount.mount_point == resolved);
        if !topmost.is_some_and(|mount| inner.backend.shows(mount, id, label)) {
            continue;
        }
        if let Some(target) = Target::open(path)?
            && let Ok(Found::Mount(point)) = target.look()
        {
            found.insert(path.to_owned(), point.id);
        }
    }
    Ok(found)
}

/// `pending/`: promised seals.
fn recover_pending(inner: &Inner, state: &mut State, recovered: &mut Recovered) -> Result<()> {
    let pending = &inner.dirs.pending;
    for entry in pending.entries().doing("read pending/")? {
        let name = Path::new(&entry.name);
        let Some(dir) = open(inner, pending, name)? else {
            continue;
        };
        let record = match read(inner, &dir)? {
            Held::Volume(record) => *record,
            Held::Rubbish(why) => {
                throw_away(inner, pending, name, &why)?;
                continue;
            }
        };
        let plan = record
            .seal
            .clone()
            .filter(|plan| Path::new(&plan.layer.to_string()) == name);
        let Some(plan) = plan else {
            throw_away(
                inner,
                pending,
                name,
                "its record says that it is not to be sealed",
            )?;
            continue;
        };
        inner.clock.seen(record.created);
        let key = plan.layer;
        if let Some(sealed) = state.artifacts.get_mut(&plan.artifact) {
            // Everything was done but tidying up.
            if let Err(error) = commit::confirm(inner, key) {
                tracing::warn!(layer = %key, %error, "an index made anew would not know this layer");
            }
            if let Err(error) = throw_away(inner, pending, name, "it is sealed") {
                tracing::error!(layer = %key, %error, "what is sealed is promised still");
                // As if it had been tried just now.
                sealed.durable = false;
                recovered.standing.push(Standing {
                    key,
                    artifact: Some(plan.artifact),
                });
            }
            continue;
        }
        let outcome = store::read_outcome(&dir).doing("read a volume's outcome")?;
        let leaving = Leaving {
            record,
            goal: Goal::Seal(plan),
            state: VolumeState::Sealing,
            outcome,
            usage: None,
            chosen: seal::layers_chosen(inner, key)?,
        };
        state.leaving.insert(key, leaving);
        recovered.leaving.push(Left { key, pin: None });
    }
    Ok(())
}

/// `trash/`: a volume of this boot may still be held open by its pod, and then its parent's layers must stay.
fn recover_trash(inner: &Inner, state: &mut State, recovered: &mut Recovered) -> Result<()> {
    for key in ids(&inner.dirs.trash)? {
        let dir = match inner.dirs.trash.open_beneath(key.to_string()) {
            Err(error) if is_stray(&error) => continue,
            dir => dir.doing("open a directory in the trash")?,
        };
        if let Held::Volume(record) = read(inner, &dir)? {
            let leaving = Leaving {
                record: *record,
                goal: Goal::Discard,
                state: VolumeState::Sealing,
                outcome: None,
                usage: None,
                chosen: Vec::new(),
            };
            state.leaving.insert(key, leaving);
            recovered.leaving.push(Left { key, pin: None });
        }
    }
    Ok(())
}

/// Layers that nothing refers to: of a seal that a power cut undid, or of a collection that a crash cut short.
fn trash_unknown_layers(inner: &Inner, on_disk: &HashSet<LayerId>, state: &State) -> Result<()> {
    let mut known = state.referenced_layers();
    known.extend(state.leaving.keys());
    for layer in on_disk.difference(&known) {
        throw_away(
            inner,
            &inner.dirs.layers,
            layer.to_string().as_ref(),
            "nothing refers to it",
        )?;
    }
    Ok(())
}

fn throw_away(inner: &Inner, from: &Dir, name: &Path, why: &str) -> Result<()> {
    tracing::info!(path = %from.path().join(name).display(), why, "thrown away");
    inner
        .throw_away(from, name)
        .doing("throw away what is left over")?;
    point(Point::RecoverThrownAway);
    Ok(())
}

/// The names in a directory that are ids.
fn ids(dir: &Dir) -> Result<Vec<LayerId>> {
    let entries = dir.entries().doing("read a directory of the pool")?;
    Ok(entries
        .iter()
        .filter_map(|entry| entry.name.to_str()?.parse().ok())
        .collect())
}
