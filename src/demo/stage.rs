//! Where the demo plays: a mount namespace of its own, a directory for its sockets and pods, and a filesystem for the
//! pool. Made once, cleared at the end; what it holds for others to use are paths.
//!
//! The namespace ends with the last process in it, and the image of the filesystem has no name any more once it is
//! mounted: after a `kill -9` two empty directories in the temporary directory are all that is left.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Pid, Signal};

use super::step::run_program;
use super::{Error, Filesystem, Options};

/// Sparse: what is not written takes nothing.
const IMAGE_BYTES: u64 = 16 << 30;

/// The process groups of the steps that run.
#[derive(Debug, Clone, Default)]
pub(super) struct Groups(Arc<Mutex<HashSet<Pid>>>);

impl Groups {
    pub(super) fn add(&self, leader: Pid) {
        self.0.lock().insert(leader);
    }

    pub(super) fn remove(&self, leader: Pid) {
        self.0.lock().remove(&leader);
    }

    fn kill(&self) {
        for leader in self.0.lock().iter() {
            // Already gone is as good.
            let _ = rustix::process::kill_process_group(*leader, Signal::KILL);
        }
    }
}

/// Where a driver and its pool are.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) pool: PathBuf,
    pub(super) socket: PathBuf,
    /// Kubelet's root directory.
    pub(super) kubelet: PathBuf,
    /// Where the driver writes what it has to say.
    pub(super) log: PathBuf,
    /// A file that an archive may lie in.
    pub(super) archive: PathBuf,
}

/// The stage.
#[derive(Debug)]
pub(super) struct Stage {
    /// A directory in memory: sockets, pods, logs.
    base: PathBuf,
    /// The pool's directory.
    pub(super) pool: PathBuf,
    /// What the pool lies on, for people.
    pub(super) ground: String,
    image: Option<PathBuf>,
    keep: bool,
    cleared: bool,
    /// What runs.
    pub(super) groups: Groups,
}

impl Stage {
    /// Leaves the mount namespace that this thread shares with others, and sets the stage in a new one. Every process
    /// and thread that this thread starts from here on is in it.
    pub(super) fn set(options: &Options) -> Result<Self, Error> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).map_err(Error::NeedsMounts)?;
        rustix::mount::mount_change(
            "/",
            MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
        )
        .map_err(|errno| Error::io("make private", "/", errno))?;
        let name = format!("baggageclaim-demo-{}", std::process::id());
        let base = std::env::temp_dir().join(&name);
        make_dir(&base)?;
        let mut stage = Self {
            pool: base.join("fs/pool"),
            ground: String::new(),
            image: None,
            keep: options.keep,
            cleared: false,
            groups: Groups::default(),
            base,
        };
        rustix::mount::mount(
            "baggageclaim-demo",
            &stage.base,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            c"mode=0755",
        )
        .map_err(|errno| Error::io("mount a tmpfs on", &stage.base, errno))?;
        for dir in ["kubelet", "step", "fs"] {
            make_dir(&stage.base.join(dir))?;
        }
        if let Some(pool) = &options.pool {
            stage.pool =
                std::path::absolute(pool).map_err(|source| Error::io("find", pool, source))?;
            stage.ground = stage.pool.display().to_string();
        } else {
            stage.ground = stage.make_filesystem(options.filesystem)?;
        }
        Ok(stage)
    }

    /// Kubelet's root directory.
    pub(super) fn kubelet(&self) -> PathBuf {
        self.base.join("kubelet")
    }

    /// Where the driver is.
    pub(super) fn place(&self) -> Place {
        Place {
            pool: self.pool.clone(),
            socket: self.base.join("csi.sock"),
            kubelet: self.kubelet(),
            log: self.log(),
            archive: self.base.join("archive.tar.zst"),
        }
    }

    /// Where another driver is, with a fresh pool.
    pub(super) fn second_place(&self) -> Result<Place, Error> {
        let base = self.base.join("second");
        let place = Place {
            pool: self.base.join("fs/second-pool"),
            socket: base.join("csi.sock"),
            kubelet: base.join("kubelet"),
            log: base.join("driver.log"),
            archive: base.join("archive.tar.zst"),
        };
        make_dir(&base)?;
        make_dir(&place.kubelet)?;
        Ok(place)
    }

    /// Where the driver writes what it has to say.
    pub(super) fn log(&self) -> PathBuf {
        self.base.join("driver.log")
    }

    /// Where a step sees its volumes.
    pub(super) fn step_root(&self) -> PathBuf {
        self.base.join("step")
    }

    /// Makes an image in the temporary directory and mounts it; says what it is.
    fn make_filesystem(&mut self, wanted: Filesystem) -> Result<String, Error> {
        let kinds: &[Filesystem] = match wanted {
            Filesystem::Auto => &[Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs],
            Filesystem::Ext4 => &[Filesystem::Ext4],
            Filesystem::Xfs => &[Filesystem::Xfs],
            Filesystem::Btrfs => &[Filesystem::Btrfs],
        };
        let image = self.base.with_extension("img");
        let target = self.base.join("fs");
        let mut failures = Vec::new();
        for kind in kinds {
            let (name, mkfs, arguments) = mkfs(*kind);
            let file = fs::File::create(&image)
                .and_then(|file| file.set_len(IMAGE_BYTES))
                .map_err(|source| Error::io("make", &image, source));
            self.image = Some(image.clone());
            file?;
            let made = run_program(mkfs, arguments, &[&image])
                .and_then(|()| run_program("mount", &["-o", "loop"], &[&image, &target]));
            match made {
                Ok(()) => {
                    let shown = std::env::temp_dir();
                    if !self.keep {
                        // The mount keeps it, and a killed demo leaves nothing.
                        fs::remove_file(&image)
                            .map_err(|source| Error::io("remove", &image, source))?;
                        self.image = None;
                    }
                    return Ok(format!("{name}, an image in {}", shown.display()));
                }
                Err(error) => failures.push(error.to_string()),
            }
        }
        Err(Error::Missing(format!(
            "a filesystem for its pool: give a directory with --pool, or make one of these work: {}",
            failures.join("; ")
        )))
    }

    /// Kills what steps still run.
    pub(super) fn end_steps(&self) {
        self.groups.kill();
    }

    /// Takes everything down, and says when something stays.
    pub(super) fn clear(mut self) -> Result<(), Error> {
        self.take_down()
    }

    /// Mount points at or below the stage's directory, deepest first.
    fn mounts(&self) -> Result<Vec<PathBuf>, Error> {
        let table = baggageclaim::sys::mount_table().map_err(|error| Error::Left {
            path: self.base.clone(),
            why: error.to_string(),
        })?;
        let mut mounts: Vec<PathBuf> = table
            .into_iter()
            .map(|entry| entry.mount_point)
            .filter(|point| point.starts_with(&self.base))
            .collect();
        mounts.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
        Ok(mounts)
    }

    /// Mounts of pods that are still there.
    pub(super) fn pods_mounts(&self) -> Result<usize, Error> {
        let kubelet = self.kubelet();
        let below = |point: &PathBuf| point.starts_with(&kubelet);
        Ok(self.mounts()?.iter().filter(|point| below(point)).count())
    }

    fn take_down(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.cleared, true) {
            return Ok(());
        }
        self.groups.kill();
        let mut log = None;
        if self.keep {
            let kept = self.base.with_extension("log");
            log = fs::copy(self.log(), &kept).ok().map(|_| kept);
        }
        // Mounts stack, so more than one round may be needed.
        for _ in 0..64 {
            let mounts = self.mounts()?;
            if mounts.is_empty() {
                break;
            }
            for point in mounts {
                let flags = UnmountFlags::NOFOLLOW | UnmountFlags::DETACH;
                // What fails is seen in the next round.
                let _ = rustix::mount::unmount(&point, flags);
            }
        }
        match (&self.image, self.keep) {
            (Some(image), true) => {
                say(&format!(
                    "kept: {} (mount -o loop; the pool is in pool/)",
                    image.display()
                ));
            }
            (Some(image), false) => {
                fs::remove_file(image).map_err(|source| Error::io("remove", image, source))?;
            }
            (None, _) => {}
        }
        if let Some(log) = log {
            say(&format!("kept: {}", log.display()));
        }
        fs::remove_dir(&self.base).map_err(|source| Error::Left {
            path: self.base.clone(),
            why: source.to_string(),
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            say(&error.to_string());
        }
    }
}

/// Prints a line about the stage itself.
pub(super) fn say(line: &str) {
    use std::io::Write as _;
    // Nobody may be there to read it.
    let _ = writeln!(std::io::stdout(), "  {line}");
}

fn make_dir(path: &Path) -> Result<(), Error> {
    fs::DirBuilder::new()
        .mode(0o755)
        .create(path)
        .map_err(|source| Error::io("make", path, source))
}

/// The name of a filesystem, the program that makes it, and its arguments: nothing is written that the kernel can
/// write later.
fn mkfs(kind: Filesystem) -> (&'static str, &'static str, &'static [&'static str]) {
    match kind {
        Filesystem::Auto | Filesystem::Ext4 => (
            "ext4",
            "mkfs.ext4",
            &[
                "-q",
                "-F",
                "-O",
                "has_journal",
                "-E",
                "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
            ],
        ),
        Filesystem::Xfs => ("xfs", "mkfs.xfs", &["-q", "-f", "-K", "-m", "reflink=1"]),
        Filesystem::Btrfs => ("btrfs", "mkfs.btrfs", &["-q", "-f", "-K"]),
    }
}
