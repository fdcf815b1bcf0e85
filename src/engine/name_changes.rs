//! The names whose content changed since they were last taken: what the controller of a cluster
//! does not know yet. A part of the catalog in memory; nothing is noted unless someone watches.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::model::Name;

/// The changed names, and who is told.
#[derive(Debug, Default)]
pub(super) struct NameChanges {
    names: HashSet<Name>,
    watch: Option<Arc<Notify>>,
}

impl NameChanges {
    /// From now on each change is noted. Only the last watch is told.
    pub(super) fn watch(&mut self) -> Arc<Notify> {
        self.names.clear();
        Arc::clone(self.watch.insert(Arc::default()))
    }

    /// Notes nothing more, unless there is a later watch.
    pub(super) fn end(&mut self, watch: &Arc<Notify>) {
        if self.watch.as_ref().is_some_and(|it| Arc::ptr_eq(it, watch)) {
            *self = Self::default();
        }
    }

    /// The content of a name may have changed.
    pub(super) fn note(&mut self, name: &Name) {
        if let Some(watch) = &self.watch {
            if !self.names.contains(name) {
                self.names.insert(name.clone());
            }
            watch.notify_one();
        }
    }

    /// What changed since the last call.
    pub(super) fn take(&mut self) -> HashSet<Name> {
        std::mem::take(&mut self.names)
    }
}
