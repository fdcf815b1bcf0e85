//! The catalog for people who ask the controller. Reads in parts, so that streams and questions of
//! nodes do not wait for a long list.

use crate::catalog::{Catalog, Explained, NameHash, Part};
use crate::distribution::roster::Overview;
use crate::model::{Name, Tenant};

use super::service::Service;

/// How many names are looked at without the others getting their turn.
const AT_ONCE: usize = 1_000;

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
}
