//! User namespaces as carriers of identity maps: `mount_setattr` takes a map only as the descriptor of one.
//!
//! A process of several threads cannot enter a new user namespace (EINVAL), so a child is made in one, for as long as it
//! takes to write its maps and open its namespace. The child runs no code of ours but two system calls: in a copy of
//! a process with threads, anything that takes a lock (malloc does) may wait for ever.

use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::libc;
use rustix::fs::{Mode, OFlags};

use super::error::{Error, Result};

/// How ids on disk and ids as seen are exchanged: bijective, every id but 4294967295 ("nobody knows") is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdSwap {
    /// All ids are what they are.
    Identity,
    /// These two are each other, all else is what it is.
    Swap(u32, u32),
}

impl IdSwap {
    /// Exchanges two ids; the identity when they are equal.
    #[must_use]
    pub fn between(one: u32, other: u32) -> Self {
        if one == other {
            Self::Identity
        } else {
            Self::Swap(one.min(other), one.max(other))
        }
    }

    /// The map in the words of `/proc/PID/uid_map`: at most five extents, which every kernel allows.
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

/// A user namespace with these maps, that no process is in. About 0.3 ms: keep it, or the mount made with it.
///
/// 4294967295 cannot be mapped (EINVAL). ENOSPC where `user.max_user_namespaces` is 0.
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

/// A process in a user namespace of its own, asleep; killed and reaped in `Drop`.
struct Child(libc::pid_t);

impl Child {
    fn start() -> Result<Self> {
        // CLONE_FILES: the child shares our table of descriptors instead of holding copies, which could keep a
        // volume busy. No exit signal: no SIGCHLD handler hears of it, and only a wait with __WALL finds it.
        let flags = libc::CLONE_NEWUSER | libc::CLONE_FILES;
        let parent = rustix::process::getpid().as_raw_nonzero().get();
        #[expect(
            unsafe_code,
            reason = "clone(2) without fork's handlers has no wrapper"
        )]
        // SAFETY: no stack and no CLONE_VM: the child runs on a copy of this stack in a copy of this memory, and until
        // its end makes only system calls, through libc functions that take no lock and allocate nothing.
        let pid = unsafe {
            let pid = libc::syscall(libc::SYS_clone, libc::c_long::from(flags), 0, 0, 0, 0);
            if pid == 0 {
                // If our thread dies, nobody will kill the child.
                libc::syscall(
                    libc::SYS_prctl,
                    libc::PR_SET_PDEATHSIG,
                    libc::SIGKILL,
                    0,
                    0,
                    0,
                );
                // Seen from the new user namespace, which is not a new pid namespace: it died before the line above?
                if libc::syscall(libc::SYS_getppid) == libc::c_long::from(parent) {
                    // All signals that have a handler in us have one in the copy: none may run. Blocked, and asleep.
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
        // SAFETY: the pid is our unreaped child's, so it names no other process; waitpid writes one int.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            let mut status = 0;
            while libc::waitpid(self.0, &raw mut status, libc::__WALL) < 0
                && Errno::last() == Errno::EINTR
            {}
        }
    }
}
