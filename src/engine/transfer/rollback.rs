//! Rollback: an earlier generation of a name is committed once more.
//!
//! It becomes a new artifact of the same layers, dated now. So it is the newest content of its name
//! on this node, and for the cluster and the shared tier as after any other commit. Nothing is
//! copied. A generation that has lost its name is there only while a volume is a fork of it.

use std::sync::Arc;

use super::half;
use crate::engine::error::{Error, Result};
use crate::engine::pins::Pins;
use crate::engine::policies;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::model::{Artifact, ArtifactId, Name, Sharing, Timestamp};

/// Commits the artifact `to` of this name once more. `base`: the number of the name in the shared
/// tier. Returns the new artifact. `NoSuchName`: the name has no such generation here, or it is not
/// durable; `NameTaken`: newer content took the name meanwhile.
pub(in crate::engine) async fn rollback(
    inner: &Arc<Inner>,
    name: Name,
    to: ArtifactId,
    base: Option<u64>,
) -> Result<ArtifactId> {
    let engine = inner.clone();
    let job = move || rollback_now(&engine, &name, to, base);
    inner.threads.transfers.run(job).await?
}

fn rollback_now(
    inner: &Arc<Inner>,
    name: &Name,
    to: ArtifactId,
    base: Option<u64>,
) -> Result<ArtifactId> {
    let began = inner.now();
    // Its layers stay, also if it is deleted or merged meanwhile.
    let mut pins = Pins::none(inner);
    let (earlier, after_holder) = {
        let mut state = inner.state.lock();
        state.health.refuse_closing()?;
        let earlier = state.catalog.get(&to).filter(|it| it.durable);
        let earlier = earlier.map(|it| it.artifact.clone());
        let earlier = earlier.filter(|artifact| artifact.name() == *name);
        let earlier = earlier.ok_or_else(|| Error::NoSuchName(name.clone()))?;
        pins.add(&mut state, &earlier.layers);
        let holder = state.catalog.owner(name);
        let after = holder.map_or(0, |holder| holder.artifact.created.0 + 1);
        (earlier, after)
    };
    // Newer than the owner of the name, even if a wrong clock dated that.
    let created = Timestamp(began.0.max(after_holder));
    inner.saw(created);
    let id = ArtifactId::from_bits(Inner::random());
    let again = Artifact {
        id,
        created,
        last_used: created,
        sharing: Sharing {
            never: earlier.sharing.never,
            damaged: earlier.sharing.damaged,
            base,
            ..Sharing::default()
        },
        ..earlier
    };
    let described = |state: &State| {
        state.health.refuse_closing()?;
        Ok(Artifact {
            // An administrator has decided that this content is good, whatever was cleared before.
            fence: state.fences.newest(),
            ..again.clone()
        })
    };
    let named = half::enter(inner, Vec::new(), began, described)?;
    inner.state.notify();
    // The previous owner of the name may be deleted.
    inner.wake_reaper();
    if !named {
        return Err(Error::NameTaken(name.clone()));
    }
    tracing::info!(artifact.id = %id, earlier.id = %to, %name,
        "an earlier generation is committed once more");
    let policies = Arc::clone(&inner.state.lock().policies);
    policies::audit_administrator(&policies, &again, Some(to));
    Ok(id)
}
