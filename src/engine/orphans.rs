//! Orphans: directories of volumes that a process may be using and whose record is damaged or
//! unreadable, so the layers that they need are unknown.
//!
//! A mount works without the driver, but not without the layers below it, and the kernel does not
//! say which those are. So if a start finds an orphan, all layers in the pool stay until the next
//! start, and all artifacts count as in use. `recover` finds the directories.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use super::shared::Inner;
use super::state::State;
use crate::model::{LayerId, VolumeId};
use crate::sys::{Dir, MountEntry};

/// The first pause between two questions to the kernel; each next one is twice as long. The kernel
/// unmounts the files of a killed process a moment after its end: 30 to 60 ms, and more on a busy
/// machine.
const FIRST_LOOK: Duration = Duration::from_millis(2);
/// How long a start asks in all. Then it takes the volumes for used until the next start.
const PATIENCE: Duration = Duration::from_secs(3);

/// The directory of the pool that an orphan is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parent {
    Volumes,
    Pending,
    Trash,
}

impl Parent {
    pub(super) fn dir(self, inner: &Inner) -> &Dir {
        match self {
            Self::Volumes => &inner.dirs.volumes,
            Self::Pending => &inner.dirs.pending,
            Self::Trash => &inner.dirs.trash,
        }
    }
}

/// How many orphans there are, and how long the kernel is asked whether there are more.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    count: usize,
    until: Option<Instant>,
}

impl Orphans {
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// One more, which cannot be read: it is taken for one that is used, and may be a seal intent.
    pub(super) fn add_unknown(&mut self) {
        self.count += 1;
    }

    /// Whether a process uses a directory without a record, which is kept then.
    pub(super) fn add_if_used(
        &mut self,
        inner: &Inner,
        parent: Parent,
        name: &Path,
        dir: &Dir,
        mounts: &[MountEntry],
    ) -> bool {
        let used = is_mounted(inner, parent, name, mounts) || self.is_held(inner, dir);
        self.count += usize::from(used);
        used
    }

    /// The label of its mount was perhaps in the record: so the kernel is asked who uses its
    /// content.
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

/// Whether it is mounted under its own name. Asked first: the kernel logs nothing for it, and it is
/// the only question that works where a volume is no overlay.
fn is_mounted(inner: &Inner, parent: Parent, name: &Path, mounts: &[MountEntry]) -> bool {
    let id = name.to_str().filter(|_| parent == Parent::Volumes);
    let id: Option<VolumeId> = id.and_then(|name| name.parse().ok());
    let shows = |id: &VolumeId| {
        let mut mounts = mounts.iter();
        mounts.any(|mount| inner.backend.shows(mount, id, id.as_str()))
    };
    id.is_some_and(|id| shows(&id))
}

/// The key of the layers that are kept. Keys are random, so no volume has it.
fn kept_as() -> LayerId {
    LayerId::from_bits(0)
}

/// Keeps all layers that were in the pool at the start, unless the backend's volumes need none.
pub(super) fn keep_all(inner: &Inner, on_disk: &HashSet<LayerId>, state: &mut State) {
    if !inner.backend.stacks() {
        return;
    }
    let layers: Vec<LayerId> = on_disk.iter().copied().collect();
    tracing::warn!(
        layers = layers.len(),
        "an unreadable record may use any layer: no sealed content is deleted until the next start"
    );
    state.volumes.retain(kept_as(), layers);
    state
        .volumes
        .may_be_forked(state.catalog.artifacts().keys().copied());
}
