//! The catalog for people who ask the controller, and for their rollbacks. Reads in parts, so that
//! streams and questions of nodes do not wait for a long list.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;

use crate::catalog::{Catalog, Explained, NameHash, Part};
use crate::distribution::roster::{Generations, Overview, RollbackOrder, Rollbacks};
use crate::model::{ArtifactId, Name, NodeId, Reference, Tenant, Timestamp};

use super::service::Service;

/// How many names are looked at without the others getting their turn.
const AT_ONCE: usize = 1_000;

#[async_trait]
impl Overview for Service {
    fn is_incomplete(&self) -> bool {
        self.read(Catalog::is_incomplete)
    }

    fn has_nodes(&self) -> bool {
        self.has_streams()
    }

    fn caches(&self, tenant: Option<&Tenant>, after: Option<NameHash>) -> Part {
        self.read(|catalog, _| catalog.caches(tenant, after, AT_ONCE))
    }

    fn explain(&self, name: &Name) -> Explained {
        self.read(|catalog, now| catalog.explain(name, now))
    }

    fn uses(&self, tenant: &Tenant) -> HashMap<Reference, Duration> {
        let (time, mut uses, mut after) = (self.time(), HashMap::new(), None);
        loop {
            let part = self.caches(Some(tenant), after);
            let caches = part.caches.into_iter();
            uses.extend(caches.filter_map(|it| Some((it.name.reference, time.since(it.used?)))));
            after = part.next;
            if after.is_none() {
                return uses;
            }
        }
    }

    async fn generations(&self, name: &Name) -> Generations {
        self.inner().generations(name).await
    }
}

#[async_trait]
impl Rollbacks for Service {
    fn commit_time(&self, name: &Name, told: Timestamp) -> Timestamp {
        self.inner().commit_time(name, told)
    }

    async fn roll_back(&self, node: &NodeId, order: &RollbackOrder) -> Option<Result<(), String>> {
        self.inner().roll_back(node, order).await
    }

    fn withdraw_older(&self, name: &Name, stamp: Timestamp, artifact: ArtifactId) {
        self.inner().withdraw_older(name, stamp, artifact);
    }
}
