//! Receive: content of another node appears here, layer by layer, whole and durable, or not at all.
//! It becomes an artifact, or a persistent volume (`claims::receive`). The caller knows where its
//! layers come from.
//!
//! | step | on disk |
//! |---|---|
//! | layers that are here are pinned, space is asked for | nothing |
//! | each missing layer, oldest first: made in `incoming/<layer id>` | incomplete: deleted at start |
//! | its table of contents and `sealing.json` written | the same |
//! | rename to `layers/<layer id>` (pinned) | not in the index: discarded at start |
//! | `syncfs`, one index transaction | **an artifact**, or **a persistent volume** |
//! | `sealing.json` → `layer.json` | the same |
//!
//! Where an artifact is a stack, a layer that is here already is used if all below it are here,
//! too. Elsewhere all layers are applied to one tree.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::half::{self, Belongs, Half, Points};
use super::space::{self, Gate};
use crate::archive::toc::Table;
use crate::archive::{self, Limits};
use crate::backend::Receiving;
use crate::engine::error::{Context, Error};
use crate::engine::failpoint::{Point, point};
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::table_digests::DIGEST;
use crate::engine::types::ReceiveLayer;
use crate::model::{
    Artifact, ArtifactId, Digests, LayerId, Maker, Name, PersistentVolume, Sha256, Sharing,
    Timestamp, VolumeId, counted, layout,
};
use crate::store::Change;
use crate::sys::{Dir, Xattrs};
use crate::tree::{self, Stop};

/// An artifact that is to be received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Its tenant and reference.
    pub name: Name,
    /// Its id, which is the same on all nodes.
    pub artifact: ArtifactId,
    /// When another node sealed it.
    pub created: Timestamp,
    /// Its origin.
    pub made_by: Option<Box<Maker>>,
    /// How long it is kept, as of an output or cache.
    pub ttl: Option<Duration>,
    /// What is known of it and the shared tier.
    pub sharing: Sharing,
    /// The highest fence that its maker's node had applied when the volume was published.
    pub fence: u64,
    /// Its layers, newest first; never empty.
    pub layers: Vec<ReceiveLayer>,
}

/// Where one layer is made.
#[derive(Clone, Copy)]
pub struct LayerPlace<'a> {
    /// The directory in which `fs` is made.
    pub into: &'a Dir,
    /// May hold temporary files.
    pub temporary: &'a Dir,
    /// The limits for the layer.
    pub limits: Limits,
    /// Whether to stop: the engine ends, or there is no space. To be asked often.
    pub stop: Stop<'a>,
    /// Verified bytes are added to this. `stop` looks at the space as it grows.
    pub progress: &'a AtomicU64,
}

/// An artifact that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// The artifact.
    pub artifact: ArtifactId,
    /// Whether its name points at it here. If not, other content keeps the name.
    pub named: bool,
    /// How many layers were here already.
    pub reused: usize,
}

/// Why an artifact was not received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError<E> {
    /// The engine failed, ends, or has no space.
    #[error(transparent)]
    Engine(#[from] Error),
    /// Another artifact of this node has its id.
    #[error("artifact {0} is here under another name; the request is refused")]
    Taken(ArtifactId),
    /// A layer could not be made. The error is the caller's own.
    #[error("make layer {layer}: {source}")]
    Layer {
        /// The layer's place in the request.
        layer: usize,
        /// What failed.
        source: E,
    },
}

const POINTS: Points = Points {
    synced: Point::ReceiveSynced,
    indexed: Point::ReceiveIndexed,
    confirmed: Point::ReceiveConfirmed,
};

/// Where a layer is made in its directory.
const PART: &str = "part";

const MAKE: &str = "make a place for a layer";
const FINISH: &str = "complete a layer";

/// A stack has at most so many layers here: the kernel bounds the options of a mount.
const MOST_LAYERS: usize = 64;

/// Does what is due after something was received, or was not.
pub(in crate::engine) fn finish<T, E>(
    inner: &Inner,
    received: Result<T, ReceiveError<E>>,
) -> Result<T, ReceiveError<E>> {
    if let Err(ReceiveError::Engine(Error::Full(_))) = received {
        // The space that it needed was asked for while it ran.
        inner.ask_for_room(0);
    }
    // A reused layer may have lost its last artifact meanwhile, or the name its old content.
    inner.wake_reaper();
    received
}

/// Receives an artifact. `make` makes one layer at the place that it is given, and returns its
/// table. It is called for each layer that this node lacks, oldest first, with the layer's place in
/// the request. `may_enter` is asked under the lock under which the name is looked at.
pub(in crate::engine) fn receive<E>(
    inner: &Arc<Inner>,
    request: &ReceiveRequest,
    progress: &AtomicU64,
    make: impl FnMut(usize, &LayerPlace<'_>) -> Result<Arc<Table>, E>,
    may_enter: impl Fn() -> Result<(), Error>,
) -> Result<Received, ReceiveError<E>> {
    if let Some(received) = look(inner, request)? {
        return Ok(received);
    }
    let mut pins = Pins::none(inner);
    let reused = reuse(inner, request, &mut pins);
    let owner = Owner::Artifact(request);
    let New {
        layers,
        halves,
        tables,
        began,
        reused: count,
    } = receive_layers(inner, (owner, &request.layers), reused, progress, make)?;
    let described = |state: &State| {
        // Two calls for one artifact at once are not allowed.
        if state.catalog.contains(&request.artifact) {
            return Err(Error::Defect);
        }
        refuse_cleared(state, request)?;
        may_enter()?;
        Ok(describe(inner, state, request, &layers))
    };
    let named = half::enter(inner, halves, began, described, &POINTS)?;
    remember(inner, tables);
    tracing::info!(artifact.id = %request.artifact, name = %request.name, named,
        layers = layers.len(), reused = count, "received");
    inner.state.notify();
    Ok(Received {
        artifact: request.artifact,
        named,
        reused: count,
    })
}

fn remember(inner: &Inner, tables: Vec<(LayerId, Sha256)>) {
    for (layer, digest) in tables {
        inner.collector.tables.insert(layer, digest);
    }
}

/// What received layers become.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) enum Owner<'a> {
    /// The artifact of a request.
    Artifact(&'a ReceiveRequest),
    /// This persistent volume.
    Claim(&'a VolumeId),
}

/// Layers that are in their places. Those that came are discarded if this is dropped.
pub(in crate::engine) struct New<'a> {
    /// All, newest first.
    pub(in crate::engine) layers: Vec<LayerId>,
    halves: Vec<Half<'a>>,
    /// The digests of the tables that were kept.
    tables: Vec<(LayerId, Sha256)>,
    /// When the first was made.
    began: Timestamp,
    /// How many were here already.
    pub(in crate::engine) reused: usize,
}

/// Has the missing layers made, oldest first. `reused`: the layers that are here, from the oldest
/// on, newest first; the caller has pinned them.
pub(in crate::engine) fn receive_layers<'a, E>(
    inner: &'a Arc<Inner>,
    (owner, wanted): (Owner<'_>, &[ReceiveLayer]),
    reused: Vec<LayerId>,
    progress: &AtomicU64,
    make: impl FnMut(usize, &LayerPlace<'_>) -> Result<Arc<Table>, E>,
) -> Result<New<'a>, ReceiveError<E>> {
    refuse_too_many(wanted)?;
    let began = inner.now();
    let missing = &wanted[..wanted.len() - reused.len()];
    let bytes = missing.iter().map(|layer| layer.bytes);
    let bytes = bytes.fold(0, u64::saturating_add);
    space::ask(inner, bytes)?;
    let space = inner.dirs.root.space();
    let space = space.context("ask for the pool's space")?;
    let most = Limits::default();
    let limits = Limits {
        bytes: most.bytes.min(space.bytes),
        ..most
    };
    let plain = || progress.load(Ordering::Relaxed);
    let count = reused.len();
    let mut job = Job {
        inner,
        owner,
        wanted,
        progress,
        limits,
        gate: Gate::new(inner, &plain, Some(bytes)),
        make,
        layers: reused,
        halves: Vec::new(),
        tables: Vec::new(),
    };
    if inner.backend.stacks() {
        for layer in (0..missing.len()).rev() {
            job.stacked(layer)?;
        }
    } else if !missing.is_empty() {
        job.whole()?;
    }
    Ok(New {
        layers: job.layers,
        halves: job.halves,
        tables: job.tables,
        began,
        reused: count,
    })
}

impl New<'_> {
    /// Makes the layers and the persistent volume that stacks them durable, all or nothing. `enter`
    /// enters it into the state.
    pub(in crate::engine) fn become_claim(
        self,
        inner: &Inner,
        claim: &PersistentVolume,
        enter: impl FnOnce(&mut State),
    ) -> Result<(), Error> {
        let decide = |state: &State| {
            state.health.refuse_changes()?;
            Ok((vec![Change::PutClaim(claim.clone())], ()))
        };
        let known = |state: &mut State, ()| enter(state);
        half::settle(inner, self.halves, self.began, &POINTS, decide, known)?;
        remember(inner, self.tables);
        Ok(())
    }
}

/// Refuses what cannot be received. An answer if nothing need be made: the artifact is here, or
/// other content keeps the name.
fn look<E>(inner: &Inner, request: &ReceiveRequest) -> Result<Option<Received>, ReceiveError<E>> {
    let state = inner.state.lock();
    state.health.refuse_changes()?;
    if let Some(sealed) = state.catalog.get(&request.artifact) {
        if sealed.artifact.name() != request.name {
            return Err(ReceiveError::Taken(request.artifact));
        }
        return Ok(Some(Received {
            artifact: request.artifact,
            named: state.catalog.is_named(&sealed.artifact),
            reused: request.layers.len(),
        }));
    }
    refuse_cleared(&state, request)?;
    refuse_too_many(&request.layers)?;
    if request.layers.is_empty() {
        let (at, why) = (0, "it has no layers".to_owned());
        return Err(refused(archive::Error::Malformed { at, why }).into());
    }
    let described = describe(inner, &state, request, &[]);
    if state.catalog.may_take_name(&described) {
        return Ok(None);
    }
    Ok(Some(Received {
        artifact: request.artifact,
        named: false,
        reused: 0,
    }))
}

/// Refuses content that a fence of this node has cleared.
fn refuse_cleared(state: &State, request: &ReceiveRequest) -> Result<(), Error> {
    if request.fence < state.fences.covering(&request.name) {
        return Err(Error::Cleared(request.name.clone()));
    }
    Ok(())
}

fn refuse_too_many(layers: &[ReceiveLayer]) -> Result<(), Error> {
    if layers.len() <= MOST_LAYERS {
        return Ok(());
    }
    let what = "the number of its layers";
    let limit = u64::try_from(MOST_LAYERS).expect("small");
    Err(refused(archive::Error::Limit { what, limit }))
}

fn refused(source: archive::Error) -> Error {
    let operation = "receive content of another node";
    Error::Archive { operation, source }
}

/// The artifact as it will be here. Its layers are not among what decides about its name.
fn describe(
    inner: &Inner,
    state: &State,
    request: &ReceiveRequest,
    layers: &[LayerId],
) -> Artifact {
    let now = inner.now();
    // A copy keeps its time, so that all nodes agree which content is newest. The clock of another
    // node may be far ahead.
    let mut created = counted(request.created, inner.time());
    inner.saw(created);
    let holder = state.catalog.owner(&request.name);
    let holder = holder.map(|holder| &holder.artifact);
    if let Some(holder) = holder
        && !request.name.reference.first_writer_wins()
        && holder
            .sharing
            .number
            .is_some_and(|number| Some(number) < request.sharing.number)
    {
        // The tier has numbered both, so clocks do not matter.
        created = created.max(Timestamp(holder.created.0 + 1));
    }
    Artifact {
        id: request.artifact,
        tenant: request.name.tenant.clone(),
        reference: request.name.reference.clone(),
        layers: layers.to_vec(),
        created,
        ttl_seconds: request.ttl.map(|ttl| ttl.as_secs()),
        last_used: now,
        made_by: request.made_by.clone(),
        digests: Digests::default(),
        sharing: request.sharing,
        // No fence that this node does not know protects content from the next one.
        fence: request.fence.min(state.fences.newest()),
    }
}

/// The layers of the request that this node has, newest first, from the oldest layer on; pinned.
/// Only the tenant's own artifacts are looked at.
fn reuse(inner: &Inner, request: &ReceiveRequest, pins: &mut Pins) -> Vec<LayerId> {
    loop {
        let mut best = None;
        inner.look_at_artifacts(|_, sealed| {
            let artifact = &sealed.artifact;
            if sealed.durable && artifact.tenant == request.name.tenant {
                let count = common(inner, &request.layers, &artifact.layers);
                best = best.max(Some((count, artifact.id)));
            }
        });
        let Some((count @ 1.., id)) = best else {
            return Vec::new();
        };
        // It may have gone or been merged since.
        let mut state = inner.state.lock();
        let sealed = state.catalog.get(&id);
        let layers = sealed.map_or(Vec::new(), |sealed| sealed.artifact.layers.clone());
        if common(inner, &request.layers, &layers) == count {
            let layers = layers[layers.len() - count..].to_vec();
            pins.add(&mut state, &layers);
            return layers;
        }
    }
}

/// The same of the stacks of persistent volumes and snapshots: all of them are looked at, since
/// their nodes check who may have the content, and not this one.
pub(in crate::engine) fn reuse_of_claims(
    inner: &Inner,
    wanted: &[ReceiveLayer],
    pins: &mut Pins,
) -> Vec<LayerId> {
    let mut state = inner.state.lock();
    let stacks = state.claims.stacks();
    let all = stacks.map(|stack| (common(inner, wanted, stack), stack));
    let Some((count @ 1.., stack)) = all.max_by_key(|(count, _)| *count) else {
        return Vec::new();
    };
    let layers = stack[stack.len() - count..].to_vec();
    pins.add(&mut state, &layers);
    layers
}

/// How many wanted layers, from the oldest on, this stack begins with.
fn common(inner: &Inner, wanted: &[ReceiveLayer], stack: &[LayerId]) -> usize {
    if !inner.backend.stacks() && (stack.len(), wanted.len()) != (1, 1) {
        return 0;
    }
    let pairs = stack.iter().rev().zip(wanted.iter().rev());
    let is_same = |(layer, wanted): &(&LayerId, &ReceiveLayer)| {
        inner.collector.tables.get(layer) == Some(wanted.digest)
    };
    pairs.take_while(is_same).count()
}

/// Layers on their way. `'a` is the engine's, `'j` that of the call.
struct Job<'a, 'j, M> {
    inner: &'a Arc<Inner>,
    owner: Owner<'j>,
    wanted: &'j [ReceiveLayer],
    progress: &'j AtomicU64,
    limits: Limits,
    gate: Gate<'j>,
    make: M,
    /// The layers that are here by now, newest first.
    layers: Vec<LayerId>,
    halves: Vec<Half<'a>>,
    /// The digests of the tables that were kept.
    tables: Vec<(LayerId, Sha256)>,
}

impl<'a, M, E> Job<'a, '_, M>
where
    M: FnMut(usize, &LayerPlace<'_>) -> Result<Arc<Table>, E>,
{
    /// Makes a layer over those that are here.
    fn stacked(&mut self, layer: usize) -> Result<(), ReceiveError<E>> {
        let (half, dir) = Half::make(self.inner)?;
        dir.create_dir(PART, 0o700).context(MAKE)?;
        let part = dir.open_beneath(PART).context(MAKE)?;
        point(Point::ReceiveMade);
        let table = self.fill(layer, &part, &dir)?;
        // A layer of a stacking backend is a directory in overlayfs' form.
        part.rename(layout::FS, &dir, layout::FS).context(FINISH)?;
        remove(&dir, PART)?;
        point(Point::ReceiveFilled);
        keep(&dir, &table).context("keep a layer's table of contents")?;
        self.tables.push((half.id, self.wanted[layer].digest));
        point(Point::ReceiveTabled);
        self.place(half, &dir, layer == 0)
    }

    /// Makes one layer of all, where a layer is a whole tree. Its table is another one.
    fn whole(&mut self) -> Result<(), ReceiveError<E>> {
        let (half, dir) = Half::make(self.inner)?;
        let receiving = self.inner.backend.receive_layer(&dir, &[]).context(MAKE)?;
        let Receiving::Onto(tree) = receiving else {
            return Err(Error::Defect.into());
        };
        point(Point::ReceiveMade);
        for layer in (0..self.wanted.len()).rev() {
            self.apply(layer, &tree, &dir)?;
        }
        self.inner.backend.received(&dir).context(FINISH)?;
        point(Point::ReceiveFilled);
        self.place(half, &dir, true)
    }

    /// Makes a layer in a directory of `tree`, since a rename does not leave a subvolume, and
    /// applies it.
    fn apply(&mut self, layer: usize, tree: &Dir, temporary: &Dir) -> Result<(), ReceiveError<E>> {
        // No layer can guess the name: the directory must not be a part of the layer.
        let name = format!(".layer-{:032x}", self.inner.random());
        let made = format!("{name}.fs");
        tree.create_dir(&name, 0o700).context(MAKE)?;
        let part = tree.open_beneath(&name).context(MAKE)?;
        // Directories would inherit it.
        part.remove_xattr("system.posix_acl_default")
            .context(MAKE)?;
        self.fill(layer, &part, temporary)?;
        part.rename(layout::FS, tree, &made).context(FINISH)?;
        remove(tree, &name)?;
        let stop = || self.gate.stops();
        let applied = tree::apply(tree, made.as_ref(), &stop);
        match self.gate.why() {
            Some(error) => Err(error.into()),
            None => Ok(applied.map_err(archive::Error::from).context(FINISH)?),
        }
    }

    /// Has a layer made in `into`, and checks that it is the one that was asked for.
    fn fill(
        &mut self,
        layer: usize,
        into: &Dir,
        temporary: &Dir,
    ) -> Result<Arc<Table>, ReceiveError<E>> {
        let stop = || self.gate.stops();
        let place = LayerPlace {
            into,
            temporary,
            limits: self.limits,
            stop: &stop,
            progress: self.progress,
        };
        match (self.make)(layer, &place) {
            Ok(table) if table.digest().sha256 == self.wanted[layer].digest.0 => Ok(table),
            Ok(_) => Err(Error::Defect.into()),
            Err(source) => {
                let shortage = self.gate.why().or_else(|| space::shortage(self.inner));
                Err(match shortage {
                    Some(error) => error.into(),
                    None if self.inner.lifetime.is_stopping() => Error::ShuttingDown.into(),
                    None => ReceiveError::Layer { layer, source },
                })
            }
        }
    }

    /// Records a layer and puts it in its place. The record of the newest one has the artifact.
    fn place(
        &mut self,
        mut half: Half<'a>,
        dir: &Dir,
        is_newest: bool,
    ) -> Result<(), ReceiveError<E>> {
        self.layers.insert(0, half.id);
        match self.owner {
            Owner::Artifact(request) if is_newest => {
                let state = self.inner.state.lock();
                let artifact = describe(self.inner, &state, request, &self.layers);
                drop(state);
                half.record(dir, &Belongs::Artifact(&artifact))?;
            }
            Owner::Artifact(_) => half.record(dir, &Belongs::Older)?,
            Owner::Claim(claim) => half.record(dir, &Belongs::Claim(claim))?,
        }
        point(Point::ReceiveRecorded);
        half.place()?;
        point(Point::ReceivePlaced);
        self.halves.push(half);
        Ok(())
    }
}

/// Deletes a part that is no longer needed.
fn remove(dir: &Dir, name: &str) -> Result<(), Error> {
    let deleted = tree::delete(dir, name.as_ref(), &|| false);
    deleted.map_err(archive::Error::from).context(FINISH)
}

/// Keeps a layer's table beside its content, as the background job would make it.
fn keep(layer: &Dir, table: &Table) -> archive::Result<()> {
    let mut file = File::from(layer.create_file(layout::TABLE)?);
    table.write_to(&mut file)?;
    let digest = Sha256(table.digest().sha256).to_string();
    layer
        .node(layout::TABLE)?
        .set_xattr(DIGEST, digest.as_bytes())?;
    Ok(())
}
