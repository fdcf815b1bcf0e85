//! A mount namespace of one thread, with an empty tmpfs as its root and what the driver attaches.
//!
//! The kernel needs attached mounts for mount(2), for overlay layers before Linux 6.15, and to show
//! options in mountinfo. In the driver's own namespace, other processes would see them. Shared
//! mounts would propagate them to the host, and they would survive a `kill -9`. This namespace is
//! private and ends with the process.
//!
//! The thread also has its own root and working directory. In `/proc/self/fd`, a descriptor's
//! number names a layer: a page of options holds 500 ([`PrivateMountNs::mount_classic`]).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;

use nix::mount::MsFlags;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::context::FsContext;
use crate::sys::error::{Error, Result};

/// The temporary mount point of [`PrivateMountNs::mount_classic`].
const MOUNT_POINT: &str = "/stage";

type Job = Box<dyn FnOnce(&Inside) + Send>;

/// The thread and its namespace. Both end when this is dropped.
#[derive(Debug)]
pub struct PrivateMountNs {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The arguments of mount(2).
#[derive(Debug)]
pub struct ClassicMount {
    /// The filesystem type.
    pub filesystem: &'static str,
    /// The source that the mount table shows.
    pub source: String,
    /// The options, at most a page. Relative paths start at `/proc/self/fd`.
    pub options: String,
    /// Whether the mount (not the filesystem) is read-only.
    pub read_only: bool,
}

impl PrivateMountNs {
    /// Starts the thread. The kernel copies the mount table: about 1 ms per thousand mounts.
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
            .name("mount-ns".to_owned())
            .spawn(body)
            .map_err(|error| {
                Error::new("clone", "the thread of the private mount namespace", error)
            })?;
        let mount_ns = Self {
            jobs: Some(jobs),
            thread: Some(thread),
        };
        started.recv().unwrap_or_else(|_| Err(gone()))?;
        Ok(mount_ns)
    }

    /// Attaches a detached mount until it is released by its number or this is dropped.
    pub fn attach(&self, mount: OwnedFd, number: u64) -> Result<()> {
        self.run(move |_| {
            let place = place(number);
            rustix::fs::mkdir(&place, Mode::from_raw_mode(0o700))
                .map_err(|errno| Error::new("mkdir", &place, errno))?;
            attach_at(&mount, &place)?;
            // A clone of a shared mount would still receive mounts made at the original.
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

    /// Detaches and removes an attached mount.
    pub fn release(&self, number: u64) -> Result<()> {
        self.run(move |_| {
            let place = place(number);
            unmount(&place)?;
            rustix::fs::rmdir(&place).map_err(|errno| Error::new("rmdir", &place, errno))
        })
    }

    /// mount(2). Returns a detached clone of the mount: private, `nosuid,nodev`.
    pub fn mount_classic(&self, what: ClassicMount) -> Result<OwnedFd> {
        self.run(move |_| {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            nix::mount::mount(
                Some(what.source.as_str()),
                MOUNT_POINT,
                Some(what.filesystem),
                flags,
                Some(what.options.as_str()),
            )
            .map_err(|errno| Error::new("mount", what.filesystem, errno))?;
            let clone = (|| {
                if what.read_only {
                    // MS_RDONLY at mount time would make the filesystem and all its mounts
                    // read-only.
                    change_mount(
                        flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY,
                    )?;
                }
                clone_mount()
            })();
            unmount(MOUNT_POINT)?;
            clone
        })
    }

    /// A clone of a detached mount: private, `nosuid,nodev`, and optionally read-only. Consumes the
    /// mount. Replaces `mount_setattr` before Linux 5.12.
    pub fn confined(&self, mount: OwnedFd, read_only: bool) -> Result<OwnedFd> {
        self.run(move |_| {
            attach_at(&mount, MOUNT_POINT)?;
            let clone = (|| {
                let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
                flags |= MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
                flags.set(MsFlags::MS_RDONLY, read_only);
                change_mount(MsFlags::MS_PRIVATE)?;
                change_mount(flags)?;
                clone_mount()
            })();
            unmount(MOUNT_POINT)?;
            clone
        })
    }

    /// The filesystem options that the mount table shows for a detached mount. Consumes the mount.
    pub fn shown_options(&self, mount: OwnedFd) -> Result<String> {
        self.run(move |inside| {
            attach_at(&mount, MOUNT_POINT)?;
            let table = inside.mount_table();
            unmount(MOUNT_POINT)?;
            let table = table?;
            let line = table.lines().find(|line| {
                line.split(' ')
                    .nth(4)
                    .is_some_and(|point| point == MOUNT_POINT)
            });
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

impl Drop for PrivateMountNs {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has dropped its namespace too.
            let _ = thread.join();
        }
    }
}

/// The thread has ended. Only a panic causes this.
fn gone() -> Error {
    Error::new(
        "recv",
        "the private mount namespace",
        nix::errno::Errno::ESRCH,
    )
}

fn place(number: u64) -> String {
    format!("/{number}")
}

fn attach_at(mount: &OwnedFd, place: &str) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", rustix::fs::CWD, place, flags)
        .map_err(|errno| Error::new("move_mount", place, errno))
}

fn change_mount(flags: MsFlags) -> Result<()> {
    nix::mount::mount(None::<&str>, MOUNT_POINT, None::<&str>, flags, None::<&str>)
        .map_err(|errno| Error::new("mount", MOUNT_POINT, errno))
}

fn clone_mount() -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    rustix::mount::open_tree(rustix::fs::CWD, MOUNT_POINT, flags)
        .map_err(|errno| Error::new("open_tree", MOUNT_POINT, errno))
}

fn unmount(place: &str) -> Result<()> {
    rustix::mount::unmount(place, UnmountFlags::DETACH)
        .map_err(|errno| Error::new("umount2", place, errno))
}

/// The descriptors that the thread keeps from outside the namespace.
struct Inside {
    /// `/proc/thread-self`, from a proc mount that is detached here.
    proc: OwnedFd,
}

impl Inside {
    fn enter() -> Result<Self> {
        // CLONE_NEWNS implies CLONE_FS: the thread now has its own root and working directory.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
            .map_err(|errno| Error::new("unshare", "the mount namespace", errno))?;
        // This must come first: the unmounts below must not propagate to the host.
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
        let failed = |call| move |errno| Error::new(call, "the private mount namespace", errno);
        attach_at(&root, "/")?;
        rustix::process::fchdir(&root).map_err(failed("fchdir"))?;
        // pivot_root stacks the old root below the new one; then it is detached with all its
        // mounts. A namespace that kept copies of published volumes' mounts would keep them busy.
        rustix::process::pivot_root(".", ".").map_err(failed("pivot_root"))?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(failed("umount2"))?;
        rustix::fs::mkdir(MOUNT_POINT, Mode::from_raw_mode(0o700)).map_err(failed("mkdir"))?;
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
