//! Limits of namespaces over all nodes: what the nodes report, and the orders to evict, to those
//! nodes that have such content. `catalog` decides; `k8s` knows the limits, and asks again and
//! again.

use tonic::Status;

use super::handle::Handle;
use super::messages;
use super::serve::{Attached, WAITING};
use crate::model::{Limits, Tenant};
use crate::proto::hub::v1 as wire;

impl Attached {
    /// What a namespace uses on the node.
    pub(super) fn usage(&self, usage: &wire::Usage) -> Result<(), Status> {
        let session = self.session;
        let session = session.ok_or_else(|| Status::invalid_argument("Hello comes first"))?;
        let (tenant, usage) = messages::received_usage(usage).map_err(Status::invalid_argument)?;
        let mut state = self.inner.state.lock();
        if state.catalog.used(session, tenant, usage) {
            return Ok(());
        }
        Err(Status::resource_exhausted("it has too many namespaces"))
    }
}

/// What a namespace uses on all nodes that report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// Bytes.
    pub bytes: u64,
    /// Artifacts; each copy counts.
    pub artifacts: u64,
    /// Content in use alone exceeds the budget.
    pub over_budget: bool,
}

impl Handle {
    /// Orders the nodes to evict what exceeds the limits of a namespace. Called again and again: an
    /// order may be lost, and is computed from what the nodes have reported since.
    #[must_use]
    pub fn keep_within(&self, namespace: &Tenant, limits: &Limits) -> Used {
        let now = self.0.now();
        let state = self.0.state.lock();
        let time = state.clock.time(now);
        let within = state.catalog.within(namespace, limits, time);
        for session in &within.sessions {
            // The next look repeats the order: it must not fill the way of others.
            let stream = state.streams.get(session);
            if stream.is_some_and(|it| it.is_welcome && it.orders.capacity() > WAITING / 2) {
                state.send(*session, messages::cut_off(namespace, &within.cut_off));
            }
        }
        Used {
            bytes: within.bytes,
            artifacts: within.artifacts,
            over_budget: within.cut_off.over_budget,
        }
    }
}
