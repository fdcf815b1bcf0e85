//! What a check compares: what the index names, what a running engine moves, and the directories of
//! the pool. How it is compared is `fsck`.

use std::collections::HashSet;

use super::lifecycle::Lifecycle;
use super::state::State;
use crate::model::LayerId;
use crate::store::{Contents, PoolDirs, PoolView};
use crate::sys::Dir;

/// What the index of a running engine names: its memory has all of it.
pub(super) fn named(state: &State) -> Contents {
    let artifacts = state.catalog.artifacts().values();
    let names = state.catalog.names();
    let claims = state.claims.values();
    Contents {
        artifacts: artifacts.map(|sealed| sealed.artifact.clone()).collect(),
        names: names.map(|(name, id)| (name.clone(), id)).collect(),
        claims: claims.map(|held| held.claim.clone()).collect(),
        snapshots: state.claims.snapshots().values().cloned().collect(),
        groups: state.claims.groups().values().cloned().collect(),
        ..Contents::default()
    }
}

/// What a running engine knows that is not on disk: moves that are under way.
#[derive(Default)]
pub(super) struct Moving {
    /// Volumes that an operation is running on.
    pub(super) busy: HashSet<String>,
    /// Directories in `pending/` and `trash/` that a task takes care of.
    pub(super) leaving: HashSet<LayerId>,
    /// Layers that an operation is making, has pinned, or may not have confirmed yet.
    pub(super) pinned: HashSet<LayerId>,
    /// All layers that must stay for whatever reason, those too, be it that a process still looks
    /// at what nothing names any more.
    pub(super) needed: HashSet<LayerId>,
}

impl From<&State> for Moving {
    fn from(state: &State) -> Self {
        let changing = state.volumes.all_live().filter(|volume| {
            let lifecycle = volume.lifecycle();
            matches!(
                lifecycle,
                Lifecycle::Preparing | Lifecycle::TeardownDeferred
            )
        });
        let changing = changing.map(|volume| &volume.record.id);
        let busy = state.volumes.busy().chain(changing);
        let worked_on = state.volumes.busy();
        let worked_on = worked_on.filter_map(|id| state.claims.get(id));
        let stacked = worked_on.flat_map(|held| &held.claim.layers);
        Self {
            busy: busy.map(ToString::to_string).collect(),
            leaving: state.volumes.all_retiring().map(|(key, _)| key).collect(),
            pinned: state.pinned.keys().chain(stacked).copied().collect(),
            needed: state.referenced_layers(),
        }
    }
}

/// The directories that are compared; `None`: one is missing.
#[derive(Clone, Copy)]
pub(super) struct Places<'a> {
    pub(super) root: &'a Dir,
    pub(super) volumes: Option<&'a Dir>,
    pub(super) pending: Option<&'a Dir>,
    pub(super) layers: Option<&'a Dir>,
    pub(super) trash: Option<&'a Dir>,
}

impl<'a> From<&'a PoolDirs> for Places<'a> {
    fn from(dirs: &'a PoolDirs) -> Self {
        Self {
            root: &dirs.root,
            volumes: Some(&dirs.volumes),
            pending: Some(&dirs.pending),
            layers: Some(&dirs.layers),
            trash: Some(&dirs.trash),
        }
    }
}

impl<'a> From<&'a PoolView> for Places<'a> {
    fn from(view: &'a PoolView) -> Self {
        Self {
            root: &view.root,
            volumes: view.volumes.as_ref(),
            pending: view.pending.as_ref(),
            layers: view.layers.as_ref(),
            trash: view.trash.as_ref(),
        }
    }
}
