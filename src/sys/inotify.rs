//! Waiting for the end of a superblock: `IN_UNMOUNT`, which inotify(7) sends when the last mount, open file, mapping,
//! working directory and namespace copy of it is gone. The watch itself keeps nothing alive.
//!
//! And waiting for a directory's entries to change ([`DirWatch`]).

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use parking_lot::Mutex;
use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags};
use tokio::io::unix::AsyncFd;

use super::error::{Error, Result};

fn instance() -> Result<OwnedFd> {
    rustix::fs::inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        .map_err(|errno| Error::new("inotify_init1", "", errno))
}

/// Watches for the ends of many filesystems, one after the other, each of which mostly comes at once.
///
/// To close an inotify instance takes 8 ms (Linux 6.18: it waits until the marks of all of them are put away), to add a watch to one
/// 2 us. So an instance whose watch has fired is used again; there are as many as were ever needed at a time.
#[derive(Debug, Default)]
pub struct UnmountWatches(Mutex<Vec<OwnedFd>>);

/// One of them.
#[derive(Debug)]
pub struct UnmountWatch<'a> {
    idle: &'a UnmountWatches,
    inotify: OwnedFd,
    id: i32,
}

impl UnmountWatches {
    /// Watches for the end of the filesystem that `file` (may be `O_PATH`) lies on: that it is gone from memory.
    ///
    /// `file` itself holds it: close it after this. EMFILE when the user has too many inotify instances.
    pub fn watch(&self, file: BorrowedFd<'_>) -> Result<UnmountWatch<'_>> {
        let idle = self.0.lock().pop();
        let inotify = idle.map_or_else(instance, Ok)?;
        // IN_UNMOUNT comes unasked, but some event must be asked for; a root is never deleted while it is one.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let id = rustix::fs::inotify::add_watch(&inotify, &path, WatchFlags::DELETE_SELF)
            .map_err(|errno| Error::new("inotify_add_watch", path, errno))?;
        Ok(UnmountWatch {
            idle: self,
            inotify,
            id,
        })
    }
}

impl UnmountWatch<'_> {
    /// Whether it has fired already; if not, a descriptor that becomes readable when it does.
    pub fn has_fired(self) -> std::result::Result<(), OwnedFd> {
        let mut buffer = [MaybeUninit::uninit(); 512];
        let mut events = Reader::new(&self.inotify, &mut buffer);
        // What was watched before may have a word left to say, which is that it is not watched any more.
        while let Ok(event) = events.next() {
            if event.wd() == self.id {
                self.idle.0.lock().push(self.inotify);
                return Ok(());
            }
        }
        Err(self.inotify)
    }
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
    let file = unsafe { AsyncFd::register(file) }.map_err(|_| failed())?;
    let ready = file.readable().await;
    ready.map(drop).map_err(|_| failed())
}

/// Tells that names in a directory came, went or changed hands, or that the directory itself did.
///
/// It says that something is different, never what: events are merged and may be lost, so whoever hears of one looks.
#[derive(Debug)]
pub struct DirWatch {
    inotify: AsyncFd<OwnedFd>,
}

impl DirWatch {
    /// Watches a directory from now on. Must run in a tokio runtime. EMFILE when the user has too many inotify instances.
    #[expect(
        unsafe_code,
        reason = "tokio takes a promise about the descriptor's lifetime"
    )]
    pub fn new(dir: BorrowedFd<'_>) -> Result<Self> {
        let inotify = instance()?;
        let path = format!("/proc/self/fd/{}", dir.as_raw_fd());
        let events = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        rustix::fs::inotify::add_watch(&inotify, &path, events)
            .map_err(|errno| Error::new("inotify_add_watch", path, errno))?;
        // SAFETY: the AsyncFd owns the descriptor, hands it to nobody, and closes it only after deregistering it.
        let inotify = unsafe { AsyncFd::register(inotify) }
            .map_err(|_| Error::new("epoll_ctl", "inotify", nix::errno::Errno::EIO))?;
        Ok(Self { inotify })
    }

    /// Waits until something is different from when this was asked last.
    pub async fn changed(&self) -> Result<()> {
        let failed = |errno| Error::new("read", "inotify", errno);
        loop {
            let ready = self.inotify.readable().await;
            let mut ready = ready.map_err(|_| failed(rustix::io::Errno::IO))?;
            let mut buffer = [0; 4096];
            let mut heard = false;
            loop {
                match rustix::io::read(self.inotify.get_ref(), &mut buffer) {
                    Ok(1..) => heard = true,
                    Err(rustix::io::Errno::INTR) => {}
                    Ok(0) | Err(rustix::io::Errno::AGAIN) => break,
                    Err(errno) => return Err(failed(errno)),
                }
            }
            ready.clear_ready();
            if heard {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[tokio::test]
    async fn a_directory_tells_that_a_name_came_went_or_moved() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = std::fs::File::open(folder.path()).expect("open");
        let watch = DirWatch::new(dir.as_fd()).expect("watch");
        let path = folder.path().join("file");
        let quiet = std::time::Duration::from_millis(20);
        for change in [
            (|path| std::fs::write(path, "").expect("write")) as fn(&std::path::Path),
            |path| std::fs::rename(path, path.with_extension("x")).expect("rename"),
            |path| std::fs::remove_file(path.with_extension("x")).expect("unlink"),
        ] {
            let still = tokio::time::timeout(quiet, watch.changed()).await;
            assert!(still.is_err(), "nothing happened");
            change(&path);
            watch.changed().await.expect("it tells");
        }
        let file = std::fs::File::open("/proc/self/status").expect("open");
        let error = DirWatch::new(file.as_fd()).expect_err("no directory");
        assert!(error.is(nix::errno::Errno::ENOTDIR), "{error}");
    }
}
