//! Export: a read-only view of an artifact, or of a volume that a pod has, and its archive.
//!
//! An artifact that is exported counts as in use, and its layers are pinned: neither eviction nor a
//! merge takes them away. A volume is shown by a snapshot where the backend has snapshots.
//! Elsewhere it is read as it is, while its pod goes on. The pod must still have the volume at the
//! end of the export. Otherwise the export fails: the archive could lack files.
//!
//! What a view needs on disk lies in `incoming/`: a start sweeps it.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::archive::{self, Codec, Hashing, Packed, Progress};
use crate::backend::Usage;
use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::guard::{self, Guard};
use crate::engine::mounts;
use crate::engine::pins::{Pins, Use};
use crate::engine::shared::Inner;
use crate::engine::target::{Found, Target};
use crate::engine::threads::Pool;
use crate::model::{ArtifactId, LayerId, Sha256, Timestamp, VolumeId, VolumeRecord};
use crate::store::Change;
use crate::sys::{self, Dir};

/// What is exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Sealed content.
    Artifact(ArtifactId),
    /// A volume that a pod has.
    Volume(VolumeId),
}

/// What an export shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Sealed content, which never changes.
    Sealed,
    /// A volume as it was at one moment.
    Snapshot,
    /// A volume that its pod may change meanwhile.
    Live,
}

/// Content that is open for an export. Dropped, it is let go.
#[derive(Debug)]
pub struct Export {
    view: View,
    usage: Option<Usage>,
    /// `None` only in `drop`.
    held: Option<ContentGuard>,
}

impl Export {
    /// What it shows.
    #[must_use]
    pub fn view(&self) -> View {
        self.view
    }

    /// Its size on disk, if known: about the size of the archive.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            let inner = held.scratch.inner.clone();
            // Closing a view and deleting what it needed blocks. When the engine ends, the next
            // start sweeps.
            drop(inner.threads.run(Pool::Transfers, move || drop(held)));
        }
    }
}

/// An archive that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    /// What is in it, and its digests.
    pub packed: Packed,
}

/// Guards that keep the content in place. Dropped in this order: the view, then the layers and
/// directories that it needs.
#[derive(Debug)]
struct ContentGuard {
    root: Dir,
    scratch: Scratch,
    of: Of,
    _use: Option<Use>,
    _pins: Pins,
}

/// What is read.
#[derive(Debug, Clone)]
enum Of {
    Artifact(ArtifactId),
    Snapshot,
    /// A volume, and when it was made: another may have its id later.
    Live(VolumeId, Timestamp),
}

/// A directory in `incoming/` for what a view needs.
#[derive(Debug)]
struct Scratch {
    inner: Arc<Inner>,
    name: String,
    dir: Dir,
}

impl Scratch {
    fn make(inner: &Arc<Inner>) -> Result<Self> {
        let name = LayerId::from_bits(sys::random()).to_string();
        let dir = inner.dirs.incoming.make_dir(&name, 0o700);
        let dir = dir.context("make a directory for the export")?;
        Ok(Self {
            inner: inner.clone(),
            name,
            dir,
        })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let (incoming, name) = (&self.inner.dirs.incoming, self.name.as_ref());
        if let Err(error) = self.inner.backend.delete(incoming, name, &|| false) {
            tracing::debug!(%error,
                "the temporary directory of an export could not be deleted; moving it to trash/");
            if let Err(error) = self.inner.throw_away(incoming, name) {
                tracing::error!(%error,
                    "the temporary directory of an export could not be moved to trash/; it stays \
                     until the next start");
            }
        }
    }
}

/// Opens the content. Not on the threads of transfers, which may all wait for their callers: a
/// volume is held meanwhile.
pub(in crate::engine) async fn open(inner: &Arc<Inner>, source: Source) -> Result<Export> {
    let opened = match source {
        Source::Artifact(id) => {
            let job = move |inner: &Arc<Inner>| open_artifact(inner, id);
            inner.run(Pool::Calls, job).await
        }
        Source::Volume(id) => {
            let guard = Guard::take(inner, &id, guard::deadline()).await?;
            let job = move |inner: &Arc<Inner>| {
                let _one_at_a_time = guard;
                open_volume(inner, &id)
            };
            return inner.run(Pool::Calls, job).await;
        }
    };
    inner.ask_for_room_after(&opened);
    opened
}

fn open_artifact(inner: &Arc<Inner>, id: ArtifactId) -> Result<Export> {
    let mut pins = Pins::none(inner);
    let (layers, usage, held) = {
        let mut state = inner.state.lock();
        let state = &mut *state;
        state.health.refuse_closing()?;
        let sealed = state.catalog.get(&id);
        let sealed = sealed.ok_or_else(|| Error::NoSuchArtifact(id))?;
        let layers = sealed.artifact.layers.clone();
        let usage = state.catalog.usage_of(&layers);
        pins.add(state, &layers);
        state.catalog.touch(id, inner.now());
        (layers, usage, Use::begin(inner, state, id))
    };
    let scratch = Scratch::make(inner)?;
    let view = inner
        .backend
        .content(&scratch.dir, &scratch.name, &layers)
        .context("open the artifact's content")?;
    Ok(opened(
        View::Sealed,
        usage,
        view,
        scratch,
        Of::Artifact(id),
        Some(held),
        pins,
    ))
}

fn opened(
    view: View,
    usage: Option<Usage>,
    root: OwnedFd,
    scratch: Scratch,
    of: Of,
    held: Option<Use>,
    pins: Pins,
) -> Export {
    point(Point::ExportOpened);
    let root = Dir::from_fd(root, scratch.dir.path());
    Export {
        view,
        usage,
        held: Some(ContentGuard {
            root,
            scratch,
            of,
            _use: held,
            _pins: pins,
        }),
    }
}

/// A volume that a pod has, where it is mounted.
fn live(
    inner: &Inner,
    id: &VolumeId,
) -> Result<(VolumeRecord, Option<Usage>, std::path::PathBuf, u64)> {
    let not = |why: &str| Error::NotExportable {
        volume: id.clone(),
        why: why.to_owned(),
    };
    let state = inner.state.lock();
    let Some(volume) = state.volumes.live(id) else {
        if state.volumes.records().any(|record| record.id == *id) {
            return Err(not(
                "its pod has released it; export the artifact that it was sealed as",
            ));
        }
        return Err(Error::NoSuchClaim(id.to_string()));
    };
    let target = volume.record.targets.first();
    let Some((target, mount)) = target.zip(volume.mount()) else {
        return Err(not("it is not mounted now"));
    };
    let usage = volume.measured.usage;
    Ok((volume.record.clone(), usage, target.clone(), mount))
}

fn open_volume(inner: &Arc<Inner>, id: &VolumeId) -> Result<Export> {
    let mut pins = Pins::none(inner);
    let (record, own, target, mount) = live(inner, id)?;
    let usage = {
        let mut state = inner.state.lock();
        pins.add(&mut state, &record.layers);
        let below = state.catalog.usage_of(&record.layers);
        below.zip(own).map(|(below, own)| below.and(own))
    };
    let scratch = Scratch::make(inner)?;
    if inner.backend.has_snapshots() {
        let volume = inner.dirs.volumes.open_beneath(id);
        let volume = volume.context("open the volume's directory")?;
        inner
            .backend
            .copy(&volume, &scratch.dir)
            .context("take a snapshot of the volume")?;
        let view = inner
            .backend
            .mount(&scratch.dir, &scratch.name, &mounts::start(&record), true)
            .context("open the snapshot")?;
        let of = Of::Snapshot;
        return Ok(opened(View::Snapshot, usage, view, scratch, of, None, pins));
    }
    let gone = || Error::NotExportable {
        volume: id.clone(),
        why: "its mount is gone".to_owned(),
    };
    let target = Target::open(&target)?.ok_or_else(gone)?;
    match target.look()? {
        Found::Mount(point) if point.id == mount => {}
        _ => return Err(gone()),
    }
    let view = target.clone_mount(true)?;
    let of = Of::Live(id.clone(), record.created);
    Ok(opened(View::Live, usage, view, scratch, of, None, pins))
}

/// Writes the archive.
pub(in crate::engine) async fn pack(
    inner: &Arc<Inner>,
    mut export: Export,
    codec: Codec,
    out: impl Write + Send + 'static,
    progress: Arc<Progress>,
) -> Result<Exported> {
    let held = export.held.take().expect("it is open until it is dropped");
    let job = move |inner: &Arc<Inner>| {
        let how = archive::Pack {
            codec,
            devices: false,
            hashing: Hashing::Both,
            temporary: &held.scratch.dir,
        };
        let stop = || inner.lifetime.is_stopping();
        let packed =
            archive::pack(&held.root, out, how, &progress, &stop).context("export the content")?;
        match &held.of {
            Of::Artifact(id) => {
                if let Some(content) = packed.digests.plain.sha256 {
                    note_digest(inner, *id, Sha256(content));
                }
            }
            Of::Snapshot => {}
            Of::Live(id, made) => still_there(inner, id, *made)?,
        }
        Ok(Exported { packed })
    };
    inner.run(Pool::Transfers, job).await
}

/// Whether the volume was its pod's all the time.
fn still_there(inner: &Inner, id: &VolumeId, made: Timestamp) -> Result<()> {
    let state = inner.state.lock();
    let volume = state.volumes.live(id);
    if volume.is_some_and(|volume| volume.record.created == made && volume.mount().is_some()) {
        return Ok(());
    }
    Err(Error::NotExportable {
        volume: id.clone(),
        why: "its pod ended meanwhile; export the artifact that it was sealed as".to_owned(),
    })
}

/// Keeps the digest with the artifact. It can be computed again, so a failure is no failure of the
/// export.
fn note_digest(inner: &Inner, id: ArtifactId, digest: Sha256) {
    let _one_at_a_time = inner.collector.lock();
    let change = {
        let mut state = inner.state.lock();
        let sealed = state.catalog.set_digest(&id, digest);
        sealed.map(|sealed| (sealed.durable, Change::PutArtifact(sealed.artifact.clone())))
    };
    // What is not durable yet goes to the index as a whole.
    if let Some((true, change)) = change
        && let Err(error) = inner.transact(&[change]).result()
    {
        tracing::warn!(artifact.id = %id, %error,
            "the artifact's digest could not be saved in the index");
    }
}
