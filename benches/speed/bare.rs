//! The baselines: the system calls that an operation needs at least, on one thread, by path names
//! and without checks. The driver adds a record and durability. Empty calls measure the socket
//! (`cases`).

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
};

/// A hand-made volume: its directory and its mount point.
#[derive(Debug)]
pub struct Volume {
    dir: PathBuf,
    target: PathBuf,
    trash: PathBuf,
}

impl Volume {
    /// Makes nothing yet. `pool` is a directory on the filesystem under test; `pods` has the
    /// targets.
    pub fn new(pool: &Path, pods: &Path, number: u64) -> Self {
        Self {
            dir: pool.join(format!("volume-{number}")),
            target: pods.join(format!("target-{number}")),
            trash: pool.join(format!("trash-{number}")),
        }
    }

    /// The mount point.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Four `mkdir`s and an overlay over `lower`, with the driver's options.
    pub fn fork(&self, lower: &Path) -> io::Result<Duration> {
        let began = Instant::now();
        let (top, work) = (self.dir.join("top"), self.dir.join("work"));
        for dir in [&self.dir, &top, &work, &self.target] {
            fs::create_dir(dir)?;
        }
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "source", "bare")?;
        for (key, dir) in [("lowerdir+", lower), ("upperdir", &top)] {
            let dir = open_path(dir)?;
            fsconfig_set_string(&context, key, format!("/proc/self/fd/{}", dir.as_raw_fd()))?;
        }
        fsconfig_set_fd(&context, "workdir", open_path(&work)?)?;
        for (key, value) in [
            ("metacopy", "off"),
            ("redirect_dir", "nofollow"),
            ("index", "off"),
            ("xino", "off"),
        ] {
            fsconfig_set_string(&context, key, value)?;
        }
        fsconfig_set_flag(&context, "volatile")?;
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        attach(&mount, &self.target)?;
        Ok(began.elapsed())
    }

    /// Two `mkdir`s and a bind mount.
    pub fn scratch(&self) -> io::Result<Duration> {
        let began = Instant::now();
        fs::create_dir(&self.dir)?;
        fs::create_dir(&self.target)?;
        rustix::mount::mount_bind(&self.dir, &self.target)?;
        Ok(began.elapsed())
    }

    /// Detaches the mount, removes the mount point, and renames the volume away. Returns the last
    /// descriptor: the kernel's work when it is closed is not measured.
    pub fn leave(&self) -> io::Result<(Duration, OwnedFd)> {
        let began = Instant::now();
        let pin = open_path(&self.target)?;
        rustix::mount::unmount(&self.target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
        fs::remove_dir(&self.target)?;
        fs::rename(&self.dir, &self.trash)?;
        Ok((began.elapsed(), pin))
    }

    /// Deletes the rest; no figure includes this.
    pub fn delete(&self) {
        #[expect(
            clippy::disallowed_methods,
            reason = "the bench's own directory, in which nothing is mounted any more"
        )]
        let _ = fs::remove_dir_all(&self.trash);
    }
}

fn open_path(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn attach(mount: &OwnedFd, target: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(mount, "", rustix::fs::CWD, target, flags)?)
}
