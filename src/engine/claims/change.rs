//! Changes to an existing claim: its capacity, its mutable parameters, and its attachments. Each
//! change is one transaction on one claim. It does not touch the content; the size limit follows
//! the capacity.

use std::sync::Arc;

use super::data_dir;
use super::lookup::{self, refuse_too_large};
use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::guard::{self, Guard};
use crate::engine::shared::Inner;
use crate::engine::threads::Pool;
use crate::model::{Attachment, MutableChange, PersistentVolume, VolumeId};
use crate::store::Change;

/// Changes a claim, durably, and what bounds it; `change` tells nothing but errors.
async fn change(
    inner: Arc<Inner>,
    id: VolumeId,
    change: impl FnOnce(&Inner, &mut PersistentVolume) -> Result<()> + Send + 'static,
) -> Result<PersistentVolume> {
    let guard = Guard::take(&inner, &id, guard::deadline()).await?;
    let job = move |inner: &Arc<Inner>| {
        let before = lookup::claim(inner, &id)?;
        let mut after = before.clone();
        change(inner, &mut after)?;
        if after != before {
            inner
                .transact(&[Change::PutClaim(after.clone())])
                .result()?;
            point(Point::ClaimChanged);
            if let Some(held) = inner.state.lock().claims.get_mut(&id) {
                held.claim = after.clone();
            }
        }
        // Also when nothing changed: an earlier call may have got this far and no further.
        limit(inner, &after)?;
        point(Point::ClaimLimited);
        drop(guard);
        Ok(after)
    };
    inner.run(Pool::Calls, job).await
}

/// Bounds the content as the claim says, if it is there.
fn limit(inner: &Inner, claim: &PersistentVolume) -> Result<()> {
    let Some(volume) = inner.volume_dir_if_there(&claim.id)? else {
        return Ok(());
    };
    if !inner
        .backend
        .has_content(&volume)
        .context("look at the volume's content")?
    {
        return Ok(());
    }
    let limit = inner
        .backend
        .set_limit(&volume, claim.limit())
        .context("change the volume's limit")?;
    let limit_unenforced = limit.why_unenforced();
    if let Some(why) = &limit_unenforced {
        data_dir::warn_unenforced(&claim.id, why);
    }
    if let Some(held) = inner.state.lock().claims.get_mut(&claim.id) {
        held.limit_unenforced = limit_unenforced;
    }
    Ok(())
}

/// Makes a claim larger. Never smaller.
pub(super) async fn expand(
    inner: Arc<Inner>,
    id: VolumeId,
    required: u64,
    most: Option<u64>,
) -> Result<PersistentVolume> {
    let grow = move |inner: &Inner, claim: &mut PersistentVolume| {
        let capacity = claim.capacity.max(required);
        if let Some(most) = most
            && capacity > most
        {
            return Err(Error::OutOfRange {
                wanted: capacity,
                why: format!("at most {most} are allowed, and a volume does not shrink"),
            });
        }
        if capacity > claim.capacity {
            refuse_too_large(inner, capacity).map_err(out_of_range)?;
        }
        claim.capacity = capacity;
        Ok(())
    };
    change(inner, id, grow).await
}

/// The pool is too small for the capacity: for an existing volume, CSI calls this OUT_OF_RANGE (CSI
/// specification, "ControllerExpandVolume Errors").
fn out_of_range(error: Error) -> Error {
    match error {
        Error::TooLarge { wanted, pool } => Error::OutOfRange {
            wanted,
            why: format!("the pool has {pool}"),
        },
        error => error,
    }
}

/// Changes the mutable parameters that the request names (CSI specification,
/// `ControllerModifyVolumeRequest.mutable_parameters`).
pub(super) async fn modify(
    inner: Arc<Inner>,
    id: VolumeId,
    mutable: MutableChange,
) -> Result<PersistentVolume> {
    let modify = move |_: &Inner, claim: &mut PersistentVolume| {
        claim.mutable = mutable.over(claim.mutable);
        Ok(())
    };
    change(inner, id, modify).await
}

/// Notes an attachment.
pub(super) async fn attach(inner: Arc<Inner>, id: VolumeId, attachment: Attachment) -> Result<()> {
    let attach = move |_: &Inner, claim: &mut PersistentVolume| {
        let mut known = claim.attached.iter();
        match known.find(|known| known.node == attachment.node) {
            None => claim.attached.push(attachment),
            Some(known) if *known == attachment => {}
            Some(_) => {
                return Err(Error::Exists {
                    name: claim.name.clone(),
                    what: "attachment to this node: readonly or access mode",
                });
            }
        }
        Ok(())
    };
    change(inner, id, attach).await.map(drop)
}

/// Forgets an attachment, or all.
pub(super) async fn detach(inner: Arc<Inner>, id: String, node: Option<String>) -> Result<()> {
    let Ok(id) = id.parse::<VolumeId>() else {
        return Ok(());
    };
    let detach = move |_: &Inner, claim: &mut PersistentVolume| {
        let stays = |known: &Attachment| node.as_ref().is_some_and(|node| known.node != *node);
        claim.attached.retain(stays);
        Ok(())
    };
    match change(inner, id, detach).await {
        Err(Error::NoSuchClaim(_)) => Ok(()),
        result => result.map(drop),
    }
}
