//! The cache policies of the cluster, as this node knows them: in memory, and in the pool for the
//! next start. `model::Policies` decides; `seal` and `publish` ask.
//!
//! A node that has no controller knows that there are none. A node of a cluster that was never told
//! any does not know, and holds commits. Once told, it decides by the last ones that it got.

use std::sync::Arc;

use super::error::Context as _;
use super::shared::Inner;
use crate::model::{Policies, layout};
use crate::store::{self, Unreadable};

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

/// These policies count from now on. They are kept for the next start, too; if that fails, it
/// begins with earlier ones.
pub(super) async fn set(inner: &Arc<Inner>, change: impl FnOnce(&mut Policies)) {
    {
        let mut state = inner.state.lock();
        change(Arc::make_mut(&mut state.policies));
    }
    // Commits may wait for them.
    inner.state.notify();
    let engine = inner.clone();
    let written = inner.threads.room.run(move || {
        let _one_at_a_time = engine.policies_file.lock();
        // A later change may have come: the last one to write writes the newest.
        let policies = Arc::clone(&engine.state.lock().policies);
        engine.with_reserve(|| store::write_policies(&engine.dirs.root, &policies))?;
        Ok::<_, crate::sys::Error>(())
    });
    let written = written.await.map(|written| written.context("write them"));
    if let Err(error) = written.and_then(|written| written) {
        tracing::error!(%error,
            "the cluster's cache policies count on this node, but could not be kept in the pool: \
             after a restart earlier ones count until the controller is reached");
    }
}
