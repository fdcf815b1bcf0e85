//! The cache policies of the cluster, as this node knows them: in memory, and in the pool for the
//! next start. `model::Policies` decides; `seal` and `publish` ask.
//!
//! Without a controller, a node has no policies. In a cluster, a node holds commits until the
//! controller has sent the policies. From then on it decides by the last ones that it got.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::error::Context as _;
use super::shared::Inner;
use super::threads::Pool;
use crate::model::{Artifact, ArtifactId, NodeId, Policies, layout};
use crate::store::{self, Unreadable};

/// What this engine remembers between two calls: which policies are in the pool, and what it said.
/// The locks order its steps; the policies that count are in the state.
#[derive(Debug, Default)]
pub(super) struct KeptPolicies {
    /// Held while the policies are changed.
    change: Mutex<()>,
    /// Held while they are written to the pool.
    file: tokio::sync::Mutex<FileState>,
    /// It was said that commits wait for the policies.
    missing: OnceLock<()>,
}

/// What is known of the file in the pool.
#[derive(Debug, Default)]
struct FileState {
    /// The policies that this process wrote last.
    policies: Weak<Policies>,
    /// The last write failed, which was said.
    is_failing: bool,
}

/// The policies that a start finds.
pub(super) fn found(inner: &Inner) -> Policies {
    if !inner.config.policies {
        return Policies::known([]);
    }
    let root = &inner.dirs.root;
    let why = match store::read_policies(root) {
        Ok(Ok(policies)) => return policies,
        Ok(Err(Unreadable::Missing)) => {
            tracing::info!(
                "this node never had the cluster's cache policies: commits wait for them"
            );
            return Policies::default();
        }
        Ok(Err(why)) => why.to_string(),
        Err(error) => error.to_string(),
    };
    tracing::error!(path = %root.path().join(layout::POLICIES_JSON).display(), why,
        "the cluster's cache policies cannot be read on this node: commits wait for new ones");
    Policies::default()
}

/// The policies that this change makes count when this returns. Commits are not held up meanwhile:
/// indexes are built, and dropped, without the lock of the state.
pub(super) fn set(inner: &Inner, change: impl FnOnce(&mut Policies)) {
    let one_at_a_time = inner.policies.change.lock();
    let before = Arc::clone(&inner.state.lock().policies);
    let mut after = Policies::clone(&before);
    change(&mut after);
    let after = Arc::new(after);
    {
        let mut state = inner.state.lock();
        state.policies = Arc::clone(&after);
        state.volumes.policies_changed(&before, &after);
    }
    drop(one_at_a_time);
    // Commits may wait for them.
    inner.state.notify();
}

/// Keeps the policies that count now for the next start. If that fails, it begins with earlier
/// ones. Calls that wait for each other write the file once.
pub(super) async fn keep(inner: Arc<Inner>) {
    let mut kept = inner.policies.file.lock().await;
    let policies = Arc::clone(&inner.state.lock().policies);
    if Weak::ptr_eq(&kept.policies, &Arc::downgrade(&policies)) {
        return;
    }
    kept.policies = Arc::downgrade(&policies);
    let engine = Arc::clone(&inner);
    let written = inner.threads.run(Pool::Room, move || {
        engine.with_reserve(|| store::write_policies(&engine.dirs.root, &policies))?;
        Ok::<_, crate::sys::Error>(())
    });
    let written = written
        .await
        .map(|written| written.context("write the cache policies"));
    let failed = written.and_then(|written| written).err();
    let was_said = std::mem::replace(&mut kept.is_failing, failed.is_some());
    if let Some(error) = failed {
        kept.policies = Weak::new();
        if !was_said {
            tracing::error!(%error,
                "the cluster's cache policies count on this node, but could not be kept in the \
                 pool: after a restart earlier ones count until the controller is reached");
        }
    }
}

/// Says once that commits wait for the policies.
pub(super) fn say_missing(inner: &Inner) {
    inner.policies.missing.get_or_init(|| {
        tracing::warn!(
            "a commit waits until this node knows the cluster's cache policies, and later ones \
             do, too: check that the controller runs, is reached, and is as new as this driver"
        );
    });
}

/// Logs the commit of a name that a policy selects, for an audit: who committed what, and of what
/// it is a fork. The commit logs it before it withdraws its seal intent, and a start that finds the
/// intent of a commit logs it again: so a kill repeats a line rather than losing it.
pub(super) fn audit(policies: &Policies, artifact: &Artifact) {
    let Some(maker) = artifact.made_by.as_ref() else {
        return;
    };
    if !policies.select(&artifact.name()) {
        return;
    }
    tracing::info!(
        target: "baggageclaim::audit",
        tenant = %artifact.tenant,
        name = %artifact.reference,
        artifact.id = %artifact.id,
        parent = maker.parent.as_ref().map(tracing::field::display),
        service_account = maker.pod.service_account,
        pod = maker.pod.name,
        pod.uid = %maker.pod.uid,
        images = maker.images.join(" "),
        node = maker.node.as_ref().map(NodeId::as_str),
        "committed under a cache policy"
    );
}

/// Logs for an audit that an administrator imported content under a name that a policy selects. A
/// kill after the transaction may lose the line.
pub(super) fn audit_import(policies: &Policies, artifact: &Artifact) {
    if !policies.select(&artifact.name()) {
        return;
    }
    tracing::info!(
        target: "baggageclaim::audit",
        tenant = %artifact.tenant,
        name = %artifact.reference,
        artifact.id = %artifact.id,
        "imported under a cache policy"
    );
}

/// The same for a name that was rolled back to an earlier artifact. `by`: the user who wants it;
/// `None`: an administrator of this node.
pub(super) fn audit_rollback(
    policies: &Policies,
    artifact: &Artifact,
    earlier: ArtifactId,
    by: Option<&str>,
) {
    if !policies.select(&artifact.name()) {
        return;
    }
    tracing::info!(
        target: "baggageclaim::audit",
        tenant = %artifact.tenant,
        name = %artifact.reference,
        artifact.id = %artifact.id,
        earlier.id = %earlier,
        by,
        "rolled back under a cache policy"
    );
}
