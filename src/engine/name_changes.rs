//! The names whose content changed since they were last taken: what the controller of a cluster
//! does not know yet. The catalog notes names that get and lose content, `volumes` those that
//! volumes are about to get. Nothing is noted unless someone watches.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::model::{Name, VolumeRecord};

/// The changed names, and who is told.
#[derive(Debug, Default)]
pub(super) struct NameChanges {
    names: HashSet<Name>,
    watch: Option<Arc<Notify>>,
}

impl NameChanges {
    /// From now on each change is noted, and this watch is told. Only the last watch is told.
    pub(super) fn watch(&mut self, watch: Arc<Notify>) {
        self.names.clear();
        self.watch = Some(watch);
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

    /// A volume may become the content of a name, or no longer.
    pub(super) fn note_seal(&mut self, record: &VolumeRecord) {
        if self.watch.is_some()
            && let Some(plan) = &record.seal
        {
            self.note(&plan.name(&record.tenant));
        }
    }

    /// What changed since the last call.
    pub(super) fn take(&mut self) -> HashSet<Name> {
        std::mem::take(&mut self.names)
    }
}
