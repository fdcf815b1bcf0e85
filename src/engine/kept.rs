//! Kept: directories of volumes that somebody may be using, and of which nobody can say what they are mounted over, since their
//! record is damaged or cannot be read.
//!
//! A mount goes on without the driver, but not without the layers below it; and which they are the kernel tells nobody. So while
//! there is such a directory, all layers that were in the pool when the driver started stay, and what was sealed then counts as
//! in use. Here is who asks the kernel, now and then, whether that is over. What is found at a start is `recover`'s.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::guard::Guard;
use super::shared::Inner;
use super::state::State;
use crate::model::{LayerId, VolumeId};
use crate::sys::{self, Dir, Errno, MountEntry};

/// How long after the start it is asked first: of a process that was killed the kernel puts away the mounts a moment after it is gone.
/// Each time it is twice as long …
const FIRST_LOOK: Duration = Duration::from_millis(2);
/// … up to this. A pod may go on for hours, and what is asked of the kernel costs a line of its log.
const LAST_LOOK: Duration = Duration::from_secs(30);

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

/// One of them.
#[derive(Debug)]
pub(super) struct Kept {
    place: Place,
    name: PathBuf,
    /// Open, so that it is known wherever it is moved; `None`: it could not be opened.
    dir: Option<Dir>,
    then: Then,
}

/// What becomes of one that nobody uses any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// It is rubbish.
    ThrowAway,
    /// It lies in the trash, and is deleted from there.
    Nothing,
    /// Its record could not be read, which is not to say that it has none: with all that it may need it is left to a start that can
    /// read it. It may be a promise.
    NextStart,
}

impl Kept {
    /// What will be of no use to anybody, or is not already.
    pub(super) fn rubbish(place: Place, name: &Path, dir: Dir) -> Self {
        Self::new(place, name, Some(dir), Then::ThrowAway)
    }

    /// What could not be read, or, `None`, not even be opened.
    pub(super) fn unknown(place: Place, name: &Path, dir: Option<Dir>) -> Self {
        Self::new(place, name, dir, Then::NextStart)
    }

    fn new(place: Place, name: &Path, dir: Option<Dir>, then: Then) -> Self {
        Self {
            place,
            name: name.to_owned(),
            dir,
            then: match place {
                Place::Trash => Then::Nothing,
                Place::Volumes | Place::Pending => then,
            },
        }
    }

    /// Where it lies, and under which name.
    pub(super) fn lies_in<'a>(&'a self, inner: &'a Inner) -> (&'a Dir, &'a Path) {
        (self.place.dir(inner), &self.name)
    }

    /// The same, in messages.
    pub(super) fn path(&self, inner: &Inner) -> PathBuf {
        self.place.dir(inner).path().join(&self.name)
    }

    /// Whether somebody may be using it, or it is to be taken for that.
    pub(super) fn is_used(&mut self, inner: &Inner, mounts: &[MountEntry]) -> bool {
        if self.then == Then::NextStart {
            return true;
        }
        // Asked first: it costs the kernel no line of its log, and is all that tells of a volume that is no overlay.
        let shows = |id: &VolumeId| {
            let mut mounts = mounts.iter();
            mounts.any(|mount| inner.backend.shows(mount, id, id.as_str()))
        };
        if self.id().is_some_and(|id| shows(&id)) {
            return true;
        }
        if self.dir.is_none() {
            match self.place.dir(inner).open_beneath(&self.name) {
                Ok(dir) => self.dir = Some(dir),
                Err(error) if error.is(Errno::ENOENT) || error.is_no_directory() => return false,
                Err(_) => return true,
            }
        }
        // What its mount is called stood in the record, perhaps.
        let dir = self.dir.as_ref();
        dir.is_some_and(|dir| inner.backend.in_use(dir).unwrap_or(true))
    }

    fn id(&self) -> Option<VolumeId> {
        if self.place != Place::Volumes {
            return None;
        }
        self.name.to_str()?.parse().ok()
    }

    /// Looks at it once; whether it is to be looked at again.
    fn look(&mut self, inner: &Arc<Inner>, mounts: &[MountEntry]) -> bool {
        if self.then == Then::NextStart {
            return true;
        }
        let id = self.id();
        let guard = id.as_ref().map(|id| Guard::take_for_chore(inner, id));
        if matches!(guard, Some(Err(_))) {
            return true;
        }
        // Somebody has asked for a volume of that id since, and what has its name, and is mounted, is that: this one went to the trash.
        let is_another = |id: &VolumeId| {
            let state = inner.state.lock();
            state.volumes.contains_key(id) || state.claims.contains_key(id)
        };
        if id.as_ref().is_some_and(is_another) {
            self.place = Place::Trash;
            self.then = Then::Nothing;
        }
        if self.is_used(inner, mounts) {
            return true;
        }
        if self.then != Then::ThrowAway {
            return false;
        }
        let path = self.path(inner);
        match inner.throw_away(self.place.dir(inner), &self.name) {
            Ok(_) => {
                tracing::info!(path = %path.display(), "thrown away: nobody uses it any more");
            }
            Err(error) if error.is(Errno::ENOENT) => {}
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "left where it is until the next start");
            }
        }
        false
    }
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
        "nothing of what is sealed is deleted meanwhile: nobody knows what is in use"
    );
    state.held.insert(held_as(), layers);
    state.maybe_forked = state.artifacts.keys().copied().collect();
}

/// Waits until nobody uses any of these directories, puts away what is rubbish, and lets go of what was held for them.
pub(super) async fn watch(inner: Arc<Inner>, mut kept: Vec<Kept>) {
    let mut pause = FIRST_LOOK;
    while !kept.is_empty() {
        if kept.iter().all(|one| one.then == Then::NextStart) {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = inner.stop.cancelled() => return,
        }
        pause = (pause * 2).min(LAST_LOOK);
        let engine = inner.clone();
        let look = move || {
            match sys::mount_table() {
                Ok(mounts) => kept.retain_mut(|one| one.look(&engine, &mounts)),
                Err(error) => tracing::debug!(%error, "what is mounted is not known"),
            }
            kept
        };
        // Whatever goes wrong, all is held, until the next start.
        match inner.looks.run(look).await {
            Ok(left) => {
                kept = left;
                // That there is none any more is known together with what follows from it.
                if !kept.is_empty() {
                    inner.state.lock().kept = kept.len();
                }
            }
            Err(error) => {
                tracing::debug!(%error, "it is not known whether what was kept is in use");
                return;
            }
        }
    }
    {
        let mut state = inner.state.lock();
        state.held.remove(&held_as());
        state.maybe_forked.clear();
        state.kept = 0;
    }
    tracing::info!("it is known again what is in use");
    inner.changed.notify_waiters();
    inner.wake_reaper();
}
