//! Waiting for the end of a superblock: `IN_UNMOUNT`, which inotify(7) sends when the last mount, open file, mapping,
//! working directory and namespace copy of it is gone. The watch itself keeps nothing alive.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{CreateFlags, WatchFlags};

use super::error::{Error, Result};

/// A descriptor that becomes readable when the filesystem that `file` (may be `O_PATH`) lies on is gone from memory.
///
/// `file` itself holds it: close it after this. EMFILE when the user has too many inotify instances.
pub fn watch_unmount(file: BorrowedFd<'_>) -> Result<OwnedFd> {
    let inotify = rustix::fs::inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        .map_err(|errno| Error::new("inotify_init1", "", errno))?;
    // IN_UNMOUNT comes unasked, but some event must be asked for; a root is never deleted while it is one.
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::inotify::add_watch(&inotify, &path, WatchFlags::DELETE_SELF)
        .map_err(|errno| Error::new("inotify_add_watch", path, errno))?;
    Ok(inotify)
}

/// Whether a watch has fired already. The event is eaten: the descriptor may not be readable afterwards.
#[must_use]
pub fn has_unmounted(watch: &OwnedFd) -> bool {
    let mut buffer = [0; 512];
    matches!(rustix::io::read(watch, &mut buffer), Ok(1..))
}

/// Waits, on the async runtime, until a descriptor that this function owns becomes readable.
///
/// EIO when the runtime cannot watch it; the caller then asks in another way.
#[expect(
    unsafe_code,
    reason = "tokio takes a promise about the descriptor's lifetime"
)]
pub async fn readable(file: OwnedFd) -> Result<()> {
    let failed = || Error::new("epoll_ctl", "an open file", nix::errno::Errno::EIO);
    // SAFETY: the AsyncFd owns the descriptor, hands it to nobody, and closes it only after deregistering it.
    let file = unsafe { tokio::io::unix::AsyncFd::register(file) }.map_err(|_| failed())?;
    let ready = file.readable().await;
    ready.map(drop).map_err(|_| failed())
}
