//! Waits by inotify(7) for the end of a superblock ([`UnmountWatches`]) or a change in a directory
//! ([`DirWatch`]). The kernel sends `IN_UNMOUNT` when the last mount, open file, mapping, working
//! directory and namespace copy of a filesystem is gone. A watch keeps nothing alive.

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

/// Watches for the end of many filesystems, most of which end at once.
///
/// Closing an inotify instance takes 8 ms (Linux 6.18 waits for the marks of all instances), adding
/// a watch 2 us. So an instance whose watch fired is reused.
#[derive(Debug, Default)]
pub struct UnmountWatches(Mutex<Vec<OwnedFd>>);

/// One watch.
#[derive(Debug)]
pub struct UnmountWatch<'a> {
    idle: &'a UnmountWatches,
    inotify: OwnedFd,
    id: i32,
}

impl UnmountWatches {
    /// Watches for the end of the filesystem that contains `file` (may be `O_PATH`).
    ///
    /// `file` itself keeps that filesystem alive: close it. EMFILE: too many inotify instances.
    pub fn watch(&self, file: BorrowedFd<'_>) -> Result<UnmountWatch<'_>> {
        let idle = self.0.lock().pop();
        let inotify = idle.map_or_else(instance, Ok)?;
        // The kernel sends IN_UNMOUNT unasked, but some event must be asked for: a root never sends
        // this.
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
    /// Whether it has fired. If not, returns a descriptor that becomes readable when it fires.
    pub fn has_fired(self) -> std::result::Result<(), OwnedFd> {
        let mut buffer = [MaybeUninit::uninit(); 512];
        let mut events = Reader::new(&self.inotify, &mut buffer);
        // The instance's previous watch may still deliver its IN_IGNORED.
        while let Ok(event) = events.next() {
            if event.wd() == self.id {
                self.idle.0.lock().push(self.inotify);
                return Ok(());
            }
        }
        Err(self.inotify)
    }
}

/// Waits on the async runtime until `file`, which this function owns, becomes readable.
///
/// EIO if the runtime cannot watch it; the caller must then use another way.
#[expect(
    unsafe_code,
    reason = "tokio takes a promise about the descriptor's lifetime"
)]
pub async fn readable(file: OwnedFd) -> Result<()> {
    let failed = || Error::new("epoll_ctl", "an open file", nix::errno::Errno::EIO);
    // SAFETY: the AsyncFd owns the descriptor and deregisters it before closing it.
    let file = unsafe { AsyncFd::register(file) }.map_err(|_| failed())?;
    let ready = file.readable().await;
    ready.map(drop).map_err(|_| failed())
}

/// Reports that names in a directory were added, removed or renamed, or the directory itself was.
///
/// It does not report which: the kernel merges events and may drop some.
#[derive(Debug)]
pub struct DirWatch {
    inotify: AsyncFd<OwnedFd>,
}

impl DirWatch {
    /// Starts to watch a directory, in a tokio runtime. EMFILE: too many inotify instances.
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
        // SAFETY: the AsyncFd owns the descriptor and deregisters it before closing it.
        let inotify = unsafe { AsyncFd::register(inotify) }
            .map_err(|_| Error::new("epoll_ctl", "inotify", nix::errno::Errno::EIO))?;
        Ok(Self { inotify })
    }

    /// Waits until the directory has changed since the last call.
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
