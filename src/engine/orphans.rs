//! Kept: directories of volumes that somebody may be using, and of which nobody can say what they are mounted over, since their
//! record is damaged or cannot be read.
//!
//! A mount goes on without the driver, but not without the layers below it; and which they are the kernel tells nobody. So if a start
//! finds such a directory, all layers that were in the pool then stay until the next start, and what was sealed counts as in
//! use. What is found at a start is `recover`'s.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use super::shared::Inner;
use super::state::State;
use crate::model::{LayerId, VolumeId};
use crate::sys::{Dir, MountEntry};

/// The first pause between two questions to the kernel; each next one is twice as long. The kernel
/// unmounts what a killed process had open a moment after the process is gone: 30 to 60 ms, and more
/// on a busy machine.
const FIRST_LOOK: Duration = Duration::from_millis(2);
/// How long a start asks in all. Then it takes the volumes for used, until the next start.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where such a directory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Volumes,
    Pending,
    Trash,
}

impl Place {
    /// The directory that it lies in.
    pub(super) fn dir(self, inner: &Inner) -> &Dir {
        match self {
            Self::Volumes => &inner.dirs.volumes,
            Self::Pending => &inner.dirs.pending,
            Self::Trash => &inner.dirs.trash,
        }
    }
}

/// How many there are, and how long the kernel is asked whether there are more.
#[derive(Debug, Default)]
pub(super) struct Kept {
    count: usize,
    until: Option<Instant>,
}

impl Kept {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// One more, which cannot be read: it is taken for one that is used, and may be a promise.
    pub(super) fn add_unknown(&mut self) {
        self.count += 1;
    }

    /// Whether somebody uses what has no record, so that it is kept.
    pub(super) fn add_if_used(
        &mut self,
        inner: &Inner,
        place: Place,
        name: &Path,
        dir: &Dir,
        mounts: &[MountEntry],
    ) -> bool {
        let used = is_mounted(inner, place, name, mounts) || self.is_held(inner, dir);
        self.count += usize::from(used);
        used
    }

    /// What its mount is called stood in the record, perhaps: so the kernel is asked who uses its content.
    fn is_held(&mut self, inner: &Inner, dir: &Dir) -> bool {
        let until = *self.until.get_or_insert_with(|| Instant::now() + PATIENCE);
        let mut pause = FIRST_LOOK;
        while inner.backend.in_use(dir).unwrap_or(true) {
            if Instant::now() >= until {
                return true;
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
        false
    }
}

/// Whether it is mounted under its own name. Asked first: it costs the kernel no line of its log, and is all that tells of a volume that is
/// no overlay.
fn is_mounted(inner: &Inner, place: Place, name: &Path, mounts: &[MountEntry]) -> bool {
    let id = name.to_str().filter(|_| place == Place::Volumes);
    let id: Option<VolumeId> = id.and_then(|name| name.parse().ok());
    let shows = |id: &VolumeId| {
        let mut mounts = mounts.iter();
        mounts.any(|mount| inner.backend.shows(mount, id, id.as_str()))
    };
    id.is_some_and(|id| shows(&id))
}

/// Under which name all that may be needed is held: no directory has it, for those are random.
fn held_as() -> LayerId {
    LayerId::from_bits(0)
}

/// Keeps all that was in the pool when the driver started. Where a volume does not need its layers, there is nothing to be kept.
pub(super) fn hold(inner: &Inner, on_disk: &HashSet<LayerId>, state: &mut State) {
    if !inner.backend.stacks() {
        return;
    }
    let layers: Vec<LayerId> = on_disk.iter().copied().collect();
    tracing::warn!(
        layers = layers.len(),
        "nothing of what is sealed is deleted until the next start: nobody knows what is in use"
    );
    state.volumes.retained_layers.insert(held_as(), layers);
    state.volumes.maybe_forked = state.catalog.artifacts().keys().copied().collect();
}
