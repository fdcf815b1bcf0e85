//! The interface of the hub for the rest of the controller: questions of users, and metrics. Reads
//! in parts, so that streams and questions of nodes do not wait for a long list. What belongs to
//! fences, policies, budgets, rollbacks and placement is in their files.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::figures::Figures;
use super::serve::Inner;
use crate::catalog::{Catalog, Explained, NameHash, Part};
use crate::model::{Name, Reference, Tenant, Timestamp};

/// How many names are looked at without the others getting their turn.
const AT_ONCE: usize = 1_000;

/// The catalog of a cluster, for the parts of its controller. Cheap to clone: clones share it.
#[derive(Debug, Clone)]
pub struct Handle(pub(super) Arc<Inner>);

impl Handle {
    /// Reads the catalog. The nodes wait meanwhile.
    fn read<T>(&self, read: impl FnOnce(&Catalog, Timestamp) -> T) -> T {
        read(&self.0.state.lock().catalog, self.0.now())
    }

    /// The figures at this moment.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.0.figures()
    }

    /// Whether some nodes have not reported all that they have.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.read(Catalog::is_incomplete)
    }

    /// Whether any node has a stream. Without one, another controller may have the nodes.
    #[must_use]
    pub fn has_nodes(&self) -> bool {
        !self.0.state.lock().streams.is_empty()
    }

    /// Whether what all nodes have is known.
    #[must_use]
    pub fn knows_all(&self) -> bool {
        self.has_nodes() && !self.is_incomplete()
    }

    /// Some caches of a namespace or of all: those after `after`.
    #[must_use]
    pub fn caches(&self, tenant: Option<&Tenant>, after: Option<NameHash>) -> Part {
        self.read(|catalog, _| catalog.caches(tenant, after, AT_ONCE))
    }

    /// All that is known of a name.
    #[must_use]
    pub fn explain(&self, name: &Name) -> Explained {
        self.read(|catalog, now| catalog.explain(name, now))
    }

    /// How long ago the caches of a namespace were used last on any node, up to 10 minutes late.
    #[must_use]
    pub fn uses(&self, tenant: &Tenant) -> HashMap<Reference, Duration> {
        let now = self.0.now();
        let time = self.0.state.lock().clock.time(now);
        let (mut uses, mut after) = (HashMap::new(), None);
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
}
