//! The shared tier as the engine sees it: what this node has under a name, what is still to be
//! uploaded, and what the tier said about an artifact. Nothing here knows where the tier is.

use std::sync::Arc;

use super::error::Result;
use super::shared::Inner;
use super::types::{LocalArtifact, PublishRequest};
use crate::model::{Artifact, ArtifactId, Name, Sharing, VolumeKind};

/// What this node has under a name.
pub(super) fn local(inner: &Inner, name: &Name) -> Option<LocalArtifact> {
    let state = inner.state.lock();
    let sealed = state.catalog.owner(name)?;
    Some(LocalArtifact {
        id: sealed.artifact.id,
        sharing: sealed.artifact.sharing,
        created: sealed.artifact.created,
        durable: sealed.durable,
    })
}

/// Whether a volume on this node will become the content that this request waits for.
pub(super) fn is_coming(inner: &Inner, request: &PublishRequest) -> bool {
    let VolumeKind::Input { from } = &request.spec.kind else {
        return false;
    };
    let state = inner.state.lock();
    let coming = state
        .volumes
        .coming(&request.tenant, from, &request.pod.uid);
    coming.is_some()
}

/// The artifacts that the tier should get, newest first.
pub(super) fn to_share(inner: &Inner) -> Vec<Artifact> {
    let mut wanted = Vec::new();
    inner.look_at_artifacts(|state, sealed| {
        let artifact = &sealed.artifact;
        if sealed.durable && artifact.sharing.is_wanted() && state.catalog.is_named(artifact) {
            wanted.push(artifact.clone());
        }
    });
    wanted.sort_by_key(|artifact| std::cmp::Reverse((artifact.created, artifact.id)));
    wanted
}

/// Changes what is known of an artifact in the tier.
pub(super) fn set_sharing(
    inner: &Inner,
    id: ArtifactId,
    change: impl FnOnce(&mut Sharing),
) -> Result<bool> {
    let _ = (inner, id, change);
    Ok(false)
}

/// Takes a name from content that began before the tier cleared that name.
pub(super) async fn discard_cleared(inner: &Arc<Inner>, name: &Name, cleared: u64) -> Result<bool> {
    let _ = (inner, name, cleared);
    Ok(false)
}
