//! User namespaces that carry id maps: `mount_setattr` takes a map only as a descriptor of one.
//!
//! A process with several threads cannot enter a new user namespace (EINVAL). So a child lives in
//! one until its maps are written and its namespace is open. It makes only system calls: in a copy
//! of a multithreaded process, code that takes a lock (such as malloc) may deadlock.

use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::libc;
use rustix::fs::{Mode, OFlags};

use super::error::{Error, Result};

/// Exchanges ids on disk and ids as seen. Bijective; maps every id but 4294967295 (invalid).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdSwap {
    /// Maps each id to itself.
    Identity,
    /// Exchanges these two ids; maps all others to themselves.
    Swap(u32, u32),
}

impl IdSwap {
    /// Exchanges two ids; the identity if they are equal.
    #[must_use]
    pub fn between(one: u32, other: u32) -> Self {
        if one == other {
            Self::Identity
        } else {
            Self::Swap(one.min(other), one.max(other))
        }
    }

    /// The map in the format of `/proc/PID/uid_map`: at most five extents, as every kernel allows.
    fn extents(self) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        let mut extent = |inside: u32, outside: u32, count: u32| {
            if count > 0 {
                // Writing to a String cannot fail.
                let _ = writeln!(text, "{inside} {outside} {count}");
            }
        };
        match self {
            Self::Identity => extent(0, 0, u32::MAX),
            Self::Swap(low, high) => {
                extent(0, 0, low);
                extent(low, high, 1);
                extent(low + 1, low + 1, high - low - 1);
                extent(high, low, 1);
                extent(high + 1, high + 1, u32::MAX - 1 - high);
            }
        }
        text
    }
}

/// A user namespace with these maps and no process in it. Takes 0.3 ms: keep it or its mount.
///
/// EINVAL for 4294967295. ENOSPC if `user.max_user_namespaces` is 0.
pub fn user_namespace(uids: IdSwap, gids: IdSwap) -> Result<OwnedFd> {
    for swap in [uids, gids] {
        if matches!(swap, IdSwap::Swap(_, u32::MAX)) {
            return Err(Error::new("user_namespace", "id 4294967295", Errno::EINVAL));
        }
    }
    let child = Child::start()?;
    let directory = format!("/proc/{}", child.0);
    let write = |name: &str, map: String| {
        let path = format!("{directory}/{name}");
        std::fs::write(&path, map).map_err(|error| Error::new("write", path, error))
    };
    write("uid_map", uids.extents())?;
    write("gid_map", gids.extents())?;
    let path = format!("{directory}/ns/user");
    rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| Error::new("open", path, errno))
}

/// A sleeping process in its own user namespace. `Drop` kills and reaps it.
struct Child(libc::pid_t);

impl Child {
    fn start() -> Result<Self> {
        // CLONE_FILES: the child shares the descriptor table; copies could keep a volume busy. No
        // exit signal: no SIGCHLD handler runs. Only a wait with __WALL finds the child.
        let flags = libc::CLONE_NEWUSER | libc::CLONE_FILES;
        let parent = rustix::process::getpid().as_raw_nonzero().get();
        #[expect(
            unsafe_code,
            reason = "clone(2) without fork's handlers has no wrapper"
        )]
        // SAFETY: no stack and no CLONE_VM: the child runs on copies of this stack and memory. It
        // makes only system calls, through libc functions that take no lock and allocate nothing.
        let pid = unsafe {
            let pid = libc::syscall(libc::SYS_clone, libc::c_long::from(flags), 0, 0, 0, 0);
            if pid == 0 {
                // If this thread dies, no other would kill the child.
                libc::syscall(
                    libc::SYS_prctl,
                    libc::PR_SET_PDEATHSIG,
                    libc::SIGKILL,
                    0,
                    0,
                    0,
                );
                // The child is in the old pid namespace. Another parent: the thread has died.
                if libc::syscall(libc::SYS_getppid) == libc::c_long::from(parent) {
                    // The child has a copy of all signal handlers. Block all signals, then sleep.
                    let all = [u64::MAX; 1];
                    libc::syscall(
                        libc::SYS_rt_sigprocmask,
                        libc::SIG_SETMASK,
                        all.as_ptr(),
                        std::ptr::null_mut::<u64>(),
                        size_of::<u64>(),
                    );
                    loop {
                        libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0);
                    }
                }
                libc::syscall(libc::SYS_exit_group, 0);
            }
            pid
        };
        let pid = Errno::result(pid)
            .map_err(|errno| Error::new("clone", "a new user namespace", errno))?;
        Ok(Self(
            libc::pid_t::try_from(pid).expect("the kernel's pids fit into pid_t"),
        ))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        #[expect(
            unsafe_code,
            reason = "waiting for a child without an exit signal needs __WALL"
        )]
        // SAFETY: the pid names an unreaped child and no other process; waitpid writes one int.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            let mut status = 0;
            while libc::waitpid(self.0, &raw mut status, libc::__WALL) < 0
                && Errno::last() == Errno::EINTR
            {}
        }
    }
}
