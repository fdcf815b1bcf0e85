//! Receive: content of another node comes here, layer by layer. It becomes an artifact, or a
//! persistent volume (`claims::receive`). It appears whole, or not at all. The caller knows where
//! its layers come from.
//!
//! | step | on disk |
//! |---|---|
//! | layers that are here are pinned, space is asked for | nothing |
//! | missing layers, oldest first: each in `incoming/<layer id>` | incomplete: see below |
//! | its table of contents written | the same |
//! | each: `sealing.json` written | the same |
//! | each: rename to `layers/<layer id>` (pinned) | not in the index: discarded at start |
//! | an artifact gets its name in memory | the same: **volumes can be forks of it** |
//! | `syncfs`, one index transaction | **an artifact**, or **a persistent volume** |
//! | `sealing.json` → `layer.json` | the same |
//!
//! An incomplete layer is deleted at start. A driver that goes on keeps it for some minutes
//! (`engine::parts`). A layer that the index does not have is discarded at start, too, unless a
//! volume is a fork of it.
//!
//! Where an artifact is a stack, a layer that is here already is used if all below it are here,
//! too. Elsewhere all layers are applied to one tree.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::half;
use super::making::{self, Job, Placed, describe};
use super::space::{self, Gate};
use super::wanted::{LayerPlace, Owner, ReceiveError, ReceiveRequest, Received};
use crate::archive;
use crate::archive::toc::Table;
use crate::engine::error::Error;
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::types::ReceiveLayer;
use crate::model::{LayerId, PersistentVolume, Sha256};
use crate::store::Change;

/// A stack has at most so many layers here: the kernel bounds the options of a mount.
const MOST_LAYERS: usize = 64;

/// Does what is due after something was received, or was not.
pub(in crate::engine) fn finish<T, E>(
    inner: &Inner,
    received: Result<T, ReceiveError<E>>,
) -> Result<T, ReceiveError<E>> {
    if let Err(ReceiveError::Engine(error)) = &received {
        space::ask_for_some(inner, error);
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
    let placed = receive_layers(inner, (owner, &request.layers), reused, progress, make)?;
    let described = |state: &State| {
        // Two calls for one artifact at once are not allowed.
        if state.catalog.contains(&request.artifact) {
            return Err(Error::Defect);
        }
        refuse_cleared(state, request)?;
        may_enter()?;
        Ok(describe(inner, state, request, &placed.layers))
    };
    let named = half::enter(inner, placed.halves, placed.began, described)?;
    remember(inner, placed.tables);
    tracing::info!(artifact.id = %request.artifact, name = %request.name, named,
        layers = placed.layers.len(), reused = placed.reused, kept = placed.kept, "received");
    Ok(Received {
        artifact: request.artifact,
        named,
        reused: placed.reused,
        kept: placed.kept,
    })
}

fn remember(inner: &Inner, tables: Vec<(LayerId, Sha256)>) {
    for (layer, digest) in tables {
        inner.collector.tables.insert(layer, digest);
    }
}

/// Has the missing layers made, oldest first. `reused`: the layers that are here, from the oldest
/// on, newest first; the caller has pinned them.
pub(in crate::engine) fn receive_layers<'a, E>(
    inner: &'a Arc<Inner>,
    (owner, wanted): (Owner<'_>, &[ReceiveLayer]),
    reused: Vec<LayerId>,
    progress: &AtomicU64,
    make: impl FnMut(usize, &LayerPlace<'_>) -> Result<Arc<Table>, E>,
) -> Result<Placed<'a>, ReceiveError<E>> {
    refuse_too_many(wanted)?;
    let missing = &wanted[..wanted.len() - reused.len()];
    // Taken first: making room deletes parts that no fetch has taken.
    let taken = making::take(inner, owner, missing);
    let kept = taken.iter().map(|it| it.part.bytes).sum();
    let bytes = missing.iter().map(|layer| layer.bytes);
    let bytes = bytes.fold(0, u64::saturating_add);
    space::ask(inner, bytes.saturating_sub(kept))?;
    progress.fetch_add(kept, Ordering::Relaxed);
    let plain = || progress.load(Ordering::Relaxed);
    // Pods use an artifact at once. The caller of a clone waits until that is on the disk.
    let writes_back = matches!(owner, Owner::Claim(_));
    let job = Job {
        inner,
        owner,
        wanted,
        progress,
        gate: Gate::new(inner, &plain, Some(bytes), writes_back),
        make,
        taken,
        made: Vec::new(),
        placed: Placed {
            reused: reused.len(),
            kept,
            layers: reused,
            halves: Vec::new(),
            tables: Vec::new(),
            began: inner.now(),
        },
    };
    job.run(missing.len())
}

impl Placed<'_> {
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
        half::settle(inner, self.halves, self.began, decide, known)?;
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
            kept: 0,
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
        kept: 0,
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

/// The layers of the request that this node has, newest first, from the oldest layer on; pinned.
/// Only the tenant's own artifacts are looked at.
fn reuse(inner: &Inner, request: &ReceiveRequest, pins: &mut Pins) -> Vec<LayerId> {
    loop {
        let mut best = None;
        inner.look_at_artifacts(|_, sealed| {
            let artifact = &sealed.artifact;
            let is_good = sealed.durable && !artifact.sharing.damaged;
            if is_good && artifact.tenant == request.name.tenant {
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
