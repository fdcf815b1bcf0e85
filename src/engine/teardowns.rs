//! What teardowns share: a retired volume with its pin, and the bounds of their resources.
//! The teardown itself is in `teardown`.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::model::LayerId;
use crate::sys::UnmountWatches;

/// How many unmounted volumes may wait for their teardown; the next unpublish waits, too. Each has
/// a descriptor. A process may have as few as some thousands, and without one every call fails.
const PINS: usize = 512;

/// What teardowns share.
#[derive(Debug)]
pub(super) struct Teardowns {
    /// Permits for the pins of unmounted volumes.
    pub(super) pins: Arc<Semaphore>,
    /// Of mounts of persistent volumes.
    pub(super) watches: UnmountWatches,
    /// Held by the one seal that copies.
    pub(super) copying: Mutex<()>,
}

impl Default for Teardowns {
    fn default() -> Self {
        Self {
            pins: Arc::new(Semaphore::new(PINS)),
            watches: UnmountWatches::default(),
            copying: Mutex::default(),
        }
    }
}

/// A retired volume.
#[derive(Debug)]
pub(super) struct Teardown {
    /// The name of its directory.
    pub(super) key: LayerId,
    pub(super) pin: Option<Pin>,
}

/// A descriptor that keeps a filesystem alive which is mounted nowhere. The number of them is
/// bounded by permits.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) descriptor: OwnedFd,
    pub(super) permit: OwnedSemaphorePermit,
}
