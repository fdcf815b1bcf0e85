//! Short paths for open directories: numbers relative to `/proc/self/fd`.
//!
//! The mount table shows overlay layers as they were passed: a descriptor as its whole path, a
//! string as that string. Each character costs every reader of the table 12 ns, and runc reads it
//! many times per container. A descriptor's number is the shortest string that names a directory.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use nix::sched::CloneFlags;
use rustix::fs::{Mode, OFlags};

use crate::sys::error::{Error, Result};

/// `/proc/self/fd`, and the process's original working directory.
struct WorkingDirs {
    descriptors: OwnedFd,
    home: OwnedFd,
}

/// Runs `work` on this thread with `/proc/self/fd` as its working directory (other threads keep
/// theirs). Then returns to the old one, or to `/` if the process may not open that.
pub fn with_fd_cwd<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    thread_local! {
        static APART: Cell<bool> = const { Cell::new(false) };
    }
    let working_dirs = working_dirs()?;
    if !APART.get() {
        nix::sched::unshare(CloneFlags::CLONE_FS)
            .map_err(|errno| Error::new("unshare", "the working directory", errno))?;
        APART.set(true);
    }
    go(&working_dirs.descriptors)?;
    let done = work();
    go(&working_dirs.home)?;
    done
}

fn go(place: &OwnedFd) -> Result<()> {
    rustix::process::fchdir(place).map_err(|errno| Error::new("fchdir", "/proc/self/fd", errno))
}

fn working_dirs() -> Result<&'static WorkingDirs> {
    static WORKING_DIRS: OnceLock<WorkingDirs> = OnceLock::new();
    if let Some(working_dirs) = WORKING_DIRS.get() {
        return Ok(working_dirs);
    }
    let open = |path: &str| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| Error::new("open", path, errno))
    };
    let descriptors = open("/proc/self/fd")?;
    // Opening `.` may fail, for example in a home directory on an NFS server with root_squash.
    let home = open(".").or_else(|_| open("/"))?;
    Ok(WORKING_DIRS.get_or_init(|| WorkingDirs { descriptors, home }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::sys::Errno;

    #[test]
    fn only_this_thread_is_there_and_only_meanwhile() {
        let here = || std::env::current_dir().expect("a working directory");
        let before = here();
        let file = std::fs::File::open("/").expect("open");
        let inside = with_fd_cwd(|| {
            assert!(std::fs::metadata(file.as_raw_fd().to_string()).is_ok());
            let other = std::thread::scope(|scope| {
                scope
                    .spawn(|| with_fd_cwd(|| Ok(())).map(|()| here()))
                    .join()
                    .expect("it ends")
            });
            Ok((here(), other?))
        });
        let (inside, other) = inside.expect("it works");
        assert!(inside.ends_with("fd"), "{}", inside.display());
        assert_eq!([&before, &before], [&other, &here()]);

        let failed = with_fd_cwd(|| Err::<(), _>(Error::new("a call", "it", Errno::EIO)));
        assert!(failed.expect_err("it fails").is(Errno::EIO));
        assert_eq!(before, here());
    }
}
