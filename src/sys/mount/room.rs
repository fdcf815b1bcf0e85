//! A mount namespace of one thread, holding an empty tmpfs and what we attach to it.
//!
//! Some things the kernel does only with attached mounts: mount(2) itself, layers of an overlay before Linux 6.15, and showing
//! options in mountinfo. Attached anywhere in the driver's own namespace they would be seen by others, propagate to
//! the host where mounts are shared, and stay after a `kill -9`. In here nobody sees them, nothing propagates, and
//! all of it is gone with the process.
//!
//! The thread has its own root and working directory as well. The latter is `/proc/self/fd`, so that in the options of
//! [`Room::mount_classic`] a layer is just the number of a descriptor: one page of options holds 500 layers.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;

use nix::mount::MsFlags;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::context::FsContext;
use crate::sys::error::{Error, Result};

/// Where [`Room::mount_classic`] mounts for a moment.
const STAGE: &str = "/stage";

type Job = Box<dyn FnOnce(&Inside) + Send>;

/// The thread and its namespace; both end when this is dropped.
#[derive(Debug)]
pub struct Room {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What mount(2) is told.
#[derive(Debug)]
pub struct ClassicMount {
    /// The filesystem's type.
    pub filesystem: &'static str,
    /// What the mount table shall say it was mounted from.
    pub source: String,
    /// The options; at most a page. Relative paths start at `/proc/self/fd`.
    pub options: String,
    /// Whether the mount (not the filesystem) is read-only.
    pub read_only: bool,
}

impl Room {
    /// Starts the thread. Costs a copy of the mount table: about a millisecond per thousand mounts.
    pub fn new() -> Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (ready, started) = mpsc::sync_channel(1);
        let body = move || match Inside::enter() {
            Ok(inside) => {
                let _ = ready.send(Ok(()));
                for job in queue {
                    job(&inside);
                }
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        };
        let thread = std::thread::Builder::new()
            .name("mount-room".to_owned())
            .spawn(body)
            .map_err(|error| Error::new("clone", "the mount room's thread", error))?;
        let room = Self {
            jobs: Some(jobs),
            thread: Some(thread),
        };
        started.recv().unwrap_or_else(|_| Err(gone()))?;
        Ok(room)
    }

    /// Attaches a detached mount in here for as long as the room lives, or until [`Room::release`] of the same number.
    pub fn attach(&self, mount: OwnedFd, number: u64) -> Result<()> {
        self.run(move |_| {
            let place = place(number);
            rustix::fs::mkdir(&place, Mode::from_raw_mode(0o700))
                .map_err(|errno| Error::new("mkdir", &place, errno))?;
            attach_at(&mount, &place)?;
            // A clone of a shared mount would go on receiving what is mounted at the original.
            nix::mount::mount(
                None::<&str>,
                place.as_str(),
                None::<&str>,
                MsFlags::MS_PRIVATE,
                None::<&str>,
            )
            .map_err(|errno| Error::new("mount", &place, errno))
        })
    }

    /// Takes an attached mount away.
    pub fn release(&self, number: u64) -> Result<()> {
        self.run(move |_| {
            let place = place(number);
            unmount(&place)?;
            rustix::fs::rmdir(&place).map_err(|errno| Error::new("rmdir", &place, errno))
        })
    }

    /// mount(2), and of the result a detached clone: private, `nosuid,nodev`.
    pub fn mount_classic(&self, what: ClassicMount) -> Result<OwnedFd> {
        self.run(move |_| {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            nix::mount::mount(
                Some(what.source.as_str()),
                STAGE,
                Some(what.filesystem),
                flags,
                Some(what.options.as_str()),
            )
            .map_err(|errno| Error::new("mount", what.filesystem, errno))?;
            let clone = (|| {
                if what.read_only {
                    // MS_RDONLY at mount time would make the filesystem read-only, and with it every other mount of it.
                    change_stage(
                        flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY,
                    )?;
                }
                clone_stage()
            })();
            unmount(STAGE)?;
            clone
        })
    }

    /// What `mount_setattr` does of a detached mount, where there is none (before Linux 5.12): a clone, private,
    /// `nosuid,nodev` and read-only if asked. Uses the mount up.
    pub fn confined(&self, mount: OwnedFd, read_only: bool) -> Result<OwnedFd> {
        self.run(move |_| {
            attach_at(&mount, STAGE)?;
            let clone = (|| {
                let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
                flags |= MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
                flags.set(MsFlags::MS_RDONLY, read_only);
                change_stage(MsFlags::MS_PRIVATE)?;
                change_stage(flags)?;
                clone_stage()
            })();
            unmount(STAGE)?;
            clone
        })
    }

    /// The options that the mount table shows of a detached mount, the filesystem's own ones. Uses the mount up.
    pub fn shown_options(&self, mount: OwnedFd) -> Result<String> {
        self.run(move |inside| {
            attach_at(&mount, STAGE)?;
            let table = inside.mount_table();
            unmount(STAGE)?;
            let table = table?;
            let line = table
                .lines()
                .find(|line| line.split(' ').nth(4).is_some_and(|point| point == STAGE));
            let options = line.and_then(|line| line.rsplit(' ').next());
            Ok(options.unwrap_or_default().to_owned())
        })
    }

    fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Inside) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |inside| {
            let _ = reply.send(job(inside));
        });
        let jobs = self.jobs.as_ref().ok_or_else(gone)?;
        jobs.send(job).map_err(|_| gone())?;
        answer.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has dropped its namespace all the same.
            let _ = thread.join();
        }
    }
}

/// Only a panic in the room's thread leads here.
fn gone() -> Error {
    Error::new("recv", "the mount room", nix::errno::Errno::ESRCH)
}

fn place(number: u64) -> String {
    format!("/{number}")
}

fn attach_at(mount: &OwnedFd, place: &str) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", rustix::fs::CWD, place, flags)
        .map_err(|errno| Error::new("move_mount", place, errno))
}

fn change_stage(flags: MsFlags) -> Result<()> {
    nix::mount::mount(None::<&str>, STAGE, None::<&str>, flags, None::<&str>)
        .map_err(|errno| Error::new("mount", STAGE, errno))
}

fn clone_stage() -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    rustix::mount::open_tree(rustix::fs::CWD, STAGE, flags)
        .map_err(|errno| Error::new("open_tree", STAGE, errno))
}

fn unmount(place: &str) -> Result<()> {
    rustix::mount::unmount(place, UnmountFlags::DETACH)
        .map_err(|errno| Error::new("umount2", place, errno))
}

/// What the thread holds of the world outside.
struct Inside {
    /// `/proc/thread-self`, of a proc that is no longer attached here.
    proc: OwnedFd,
}

impl Inside {
    fn enter() -> Result<Self> {
        // CLONE_NEWNS brings CLONE_FS with it: root and working directory are this thread's own from here on.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
            .map_err(|errno| Error::new("unshare", "the mount namespace", errno))?;
        // Before anything else: what is unmounted below must not be unmounted at the host's.
        nix::mount::mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None::<&str>,
        )
        .map_err(|errno| Error::new("mount", "/", errno))?;
        let open = |path: &str| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty())
                .map_err(|errno| Error::new("open", path, errno))
        };
        let proc = open("/proc/thread-self")?;
        let descriptors = open("/proc/self/fd")?;

        let tmpfs = FsContext::open("tmpfs")?;
        tmpfs.string("mode", "0700")?;
        tmpfs.create()?;
        let root = tmpfs.mount(MountAttrFlags::MOUNT_ATTR_NOSUID)?;
        let failed = |call| move |errno| Error::new(call, "the mount room", errno);
        attach_at(&root, "/")?;
        rustix::process::fchdir(&root).map_err(failed("fchdir"))?;
        // The old root goes below the new one, and then away with all that was mounted in it: a namespace that kept
        // copies of the published volumes' mounts would keep them in use.
        rustix::process::pivot_root(".", ".").map_err(failed("pivot_root"))?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(failed("umount2"))?;
        rustix::fs::mkdir(STAGE, Mode::from_raw_mode(0o700)).map_err(failed("mkdir"))?;
        rustix::process::fchdir(&descriptors).map_err(failed("fchdir"))?;
        Ok(Self { proc })
    }

    fn mount_table(&self) -> Result<String> {
        const NAME: &str = "mountinfo";
        let file = rustix::fs::openat(
            self.proc.as_fd(),
            NAME,
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| Error::new("openat", NAME, errno))?;
        std::io::read_to_string(std::fs::File::from(file))
            .map_err(|error| Error::new("read", NAME, error))
    }
}
