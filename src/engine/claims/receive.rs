//! Makes a persistent volume of a snapshot of another node. The layers come in as those of an
//! artifact do (`transfer::receive`); the volume appears with them in one index transaction.
//!
//! Only then is the volume reserved: while content comes in, nothing of it is known here, and a
//! crash leaves nothing of it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::create::{self, Content};
use super::types::CreateClaim;
use super::{data_dir, lookup};
use crate::archive::toc::Table;
use crate::engine::error::Result;
use crate::engine::guard::Guard;
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::transfer::{
    LayerPlace, Owner, ReceiveError, RetainedLayers, receive_layers, reuse_of_claims,
};
use crate::engine::types::ReceiveLayer;
use crate::model::{OwnerView, PersistentVolume};

/// A claim that starts from a snapshot of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveClaim {
    /// The claim.
    pub claim: CreateClaim,
    /// The layers of the snapshot, newest first. Empty if its volume was empty.
    pub layers: Vec<ReceiveLayer>,
    /// How the owners of the snapshot's volume were seen.
    pub view: OwnerView,
    /// The capacity of the snapshot's volume, in bytes; 0: no limit.
    pub size: u64,
}

/// Receives the content, and makes the volume if `may_enter` allows it then. See
/// [`crate::engine::Engine::receive_claim`].
pub(in crate::engine) fn receive<E>(
    inner: &Arc<Inner>,
    request: ReceiveClaim,
    progress: &AtomicU64,
    make: impl FnMut(usize, &LayerPlace<'_>) -> Result<Arc<Table>, E>,
    may_enter: impl FnOnce() -> Result<()>,
) -> Result<PersistentVolume, ReceiveError<E>> {
    let ReceiveClaim {
        claim,
        layers,
        view,
        size,
    } = request;
    let id = lookup::id_of(lookup::CLAIM, &claim.name);
    if let Some(made) = create::made_before(inner, &id) {
        return Ok(create::repeated(made, &claim)?);
    }
    // Looked at before anything comes: a request that cannot be met costs nothing.
    lookup::refuse_too_large(inner, create::capacity(&claim, size)?)?;
    let mut pins = Pins::none(inner);
    let reused = reuse_of_claims(inner, &layers, &mut pins);
    // Their volumes may be deleted while content comes.
    let kept = RetainedLayers::new(inner, pins);
    data_dir::refuse_lost(inner, &id, &reused)?;
    let owner = Owner::Claim(&id);
    let new = receive_layers(inner, (owner, &layers), reused, progress, make)?;
    let guard = Guard::take_for_chore(inner, &id)?;
    if let Some(made) = create::made_before(inner, &id) {
        return Ok(create::repeated(made, &claim)?);
    }
    may_enter()?;
    let (count, reused) = (new.layers.len(), new.reused);
    let content = Content::kept(&new.layers, view, size);
    let volume = create::describe(inner, id, claim, &content)?;
    new.become_claim(inner, &volume, |state| create::enter(state, volume.clone()))?;
    drop((guard, kept));
    tracing::info!(volume.id = %volume.id, name = volume.name, layers = count, reused,
        "received a volume");
    Ok(volume)
}
