//! Space in the pool: requests for it, how much eviction would free, and the reserve for a full
//! disk. The collector (`reap`) decides what is evicted, and when.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::artifacts::Sealed;
use super::error::{Error, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use crate::model::{LayerId, layout};
use crate::sys::{Errno, Space};

/// Requests for space since the last cycle.
#[derive(Debug)]
pub(super) struct SpaceRequests {
    /// How many bytes each call needs at once; 0: a few blocks, or an unknown number.
    asked: Mutex<Vec<u64>>,
    short: AtomicBool,
}

impl Default for SpaceRequests {
    /// What an earlier process left waiting is looked at first.
    fn default() -> Self {
        Self {
            asked: Mutex::default(),
            short: AtomicBool::new(true),
        }
    }
}

impl SpaceRequests {
    /// A call found no space for so many bytes.
    pub(super) fn ask(&self, bytes: u64) {
        self.asked.lock().push(bytes);
        self.set_short(true);
    }

    /// Whether a call waits.
    pub(super) fn is_asked(&self) -> bool {
        !self.asked.lock().is_empty()
    }

    /// The needs of all waiting calls. From here on they count as handled.
    pub(super) fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.asked.lock())
    }

    /// Whether something waits for space, or may: then a cycle runs whenever some comes free.
    pub(super) fn is_short(&self) -> bool {
        self.short.load(Ordering::SeqCst)
    }

    pub(super) fn set_short(&self, short: bool) {
        self.short.store(short, Ordering::SeqCst);
    }
}

/// How many bytes the deletion of all partial layers and the eviction of all unused artifacts would
/// free. A layer that is not measured yet counts as `unmeasured`. A layer that cannot be measured
/// counts as 0: it may be impossible to delete, too.
pub(super) fn evictable(inner: &Inner, unmeasured: u64) -> u64 {
    let state = inner.state.lock();
    let in_use = state.artifacts_in_use();
    let goes = |sealed: &Sealed| sealed.durable && !in_use.contains(&sealed.artifact.id);
    let kept = state.referenced_without(goes);
    let going = state
        .catalog
        .artifacts()
        .values()
        .filter(|sealed| goes(sealed));
    let going: HashSet<&LayerId> = going
        .flat_map(|sealed| &sealed.artifact.layers)
        .filter(|layer| !kept.contains(layer))
        .collect();
    let bytes = |layer| match state.catalog.usage(layer) {
        Some(usage) => usage.bytes,
        None if inner.collector.unmeasured.has(layer) => 0,
        None => unmeasured,
    };
    let parts = inner.collector.parts.bytes();
    going
        .into_iter()
        .map(bytes)
        .fold(parts, u64::saturating_add)
}

pub(super) fn is_nearly_full(inner: &Inner) -> bool {
    let space = inner.dirs.root.space();
    space.is_ok_and(|space| above(&space, inner.config.high_watermark))
}

pub(super) fn above(space: &Space, percent: u8) -> bool {
    excess(space.bytes, space.bytes_available, percent) > 0
        || excess(space.inodes, space.inodes_free, percent) > 0
}

/// How much of `total` is in use beyond `percent` of it.
pub(super) fn excess(total: u64, available: u64, percent: u8) -> u64 {
    let allowed = u128::from(total) * u128::from(percent) / 100;
    let used = u128::from(total.saturating_sub(available));
    u64::try_from(used.saturating_sub(allowed)).unwrap_or(u64::MAX)
}

/// Asking for room, and the reserve.
impl Inner {
    /// Wakes the reaper because a call found no space for so many bytes (see [`SpaceRequests`]): it
    /// evicts unused content if that is enough.
    pub(super) fn ask_for_room(&self, bytes: u64) {
        self.space.ask(bytes);
        self.wake_reaper();
    }

    /// Asks for the space that a failed operation lacked.
    pub(super) fn ask_for_room_after<T>(&self, result: &Result<T>) {
        if let Err(Error::Full(shortage)) = result {
            self.ask_for_room(shortage.needs);
        }
    }

    /// Runs an operation that must work on a full disk too. If the disk is full, frees the reserve
    /// and tries once more.
    pub(super) fn with_reserve<T>(
        &self,
        attempt: impl Fn() -> crate::sys::Result<T>,
    ) -> crate::sys::Result<T> {
        match attempt() {
            Err(error) if error.is_full() => {
                self.give_back_reserve(0);
                attempt()
            }
            result => result,
        }
    }

    /// Deletes the reserve for an operation that must work on a full disk, makes the space of
    /// deleted files available ([`Dir::free_deleted`](crate::sys::Dir::free_deleted)), and asks for
    /// more ([`Inner::ask_for_room`]).
    pub(super) fn give_back_reserve(&self, bytes: u64) {
        match self.dirs.root.remove_file(layout::RESERVE) {
            Ok(()) => {
                tracing::warn!("the disk is full: the reserve file was deleted to make room");
                point(Point::ReserveGivenBack);
            }
            Err(error) if error.is(Errno::ENOENT) => {}
            Err(error) => tracing::error!(%error,
                "the disk is full, and the reserve file could not be deleted"),
        }
        if let Err(error) = self.dirs.root.free_deleted() {
            tracing::warn!(%error, "the disk is full, and the space of deleted files is not free");
        }
        self.ask_for_room(bytes);
    }

    /// Creates the reserve if it is missing and there is space for it: at most a sixteenth of a
    /// small pool. Returns whether the whole reserve exists.
    pub(super) fn keep_reserve(&self) -> bool {
        let made = || -> crate::sys::Result<bool> {
            let root = &self.dirs.root;
            if self.config.reserve == 0 || root.has(layout::RESERVE)? {
                return Ok(true);
            }
            let space = root.space()?;
            let bytes = self.config.reserve.min(space.bytes / 16);
            if space.bytes_available < bytes.saturating_mul(2) {
                return Ok(false);
            }
            root.reserve(layout::RESERVE, bytes)?;
            point(Point::ReserveMade);
            Ok(true)
        };
        made().unwrap_or_else(|error| {
            tracing::warn!(%error, "the reserve file could not be created");
            false
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excess_is_what_lies_above_the_watermark() {
        assert_eq!(excess(1000, 100, 85), 50);
        assert_eq!(excess(1000, 150, 85), 0);
        assert_eq!(
            excess(0, 0, 85),
            0,
            "a filesystem without a number of inodes is never short of them"
        );
        assert_eq!(excess(u64::MAX, 0, 0), u64::MAX);
    }
}
