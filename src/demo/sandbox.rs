//! Where the demo runs: a private mount namespace with a directory for sockets and pods, and a
//! filesystem for the pool.
//!
//! The namespace ends with its last process, and the mounted image is unlinked. So a `kill -9`
//! leaves only two empty directories in the temporary directory.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Pid, Signal};

use super::error::Error;
use super::options::Options;
use super::step::run_program;
use baggageclaim::config::DemoFilesystem as Filesystem;
use baggageclaim::link::Key;

/// The nodes that are peers.
const FIRST: &str = "node-1";
const THIRD: &str = "node-3";
/// A sparse file.
const IMAGE_BYTES: u64 = 16 << 30;

/// The process groups of the running steps.
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
            // It may have ended already.
            let _ = rustix::process::kill_process_group(*leader, Signal::KILL);
        }
    }
}

/// The paths of one driver and its pool.
#[derive(Debug)]
pub(super) struct Paths {
    pub(super) pool: PathBuf,
    pub(super) socket: PathBuf,
    /// Kubelet's root directory.
    pub(super) kubelet: PathBuf,
    pub(super) log: PathBuf,
    /// Where an archive can be written.
    pub(super) archive: PathBuf,
    /// The URL of the shared tier, if the driver has one.
    pub(super) tier: Option<String>,
    /// The flags by which it is a peer, if it is one.
    pub(super) peers: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Sandbox {
    /// A directory in memory: sockets, pods, logs.
    base: PathBuf,
    pub(super) pool: PathBuf,
    /// The filesystem of the pool, as text.
    pub(super) ground: String,
    /// The address at which the first node serves its peers.
    listens: String,
    image: Option<PathBuf>,
    keep: bool,
    cleared: bool,
    /// The running steps.
    pub(super) groups: Groups,
}

impl Sandbox {
    /// Gives this thread a new mount namespace and mounts everything there. Processes and threads
    /// that it starts from then on share the namespace.
    pub(super) fn make(options: &Options) -> Result<Self, Error> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).map_err(Error::NeedsMounts)?;
        rustix::mount::mount_change(
            "/",
            MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
        )
        .map_err(|errno| Error::io("make private", "/", errno))?;
        let name = format!("baggageclaim-demo-{}", std::process::id());
        let base = std::env::temp_dir().join(&name);
        make_dir(&base)?;
        let mut sandbox = Self {
            pool: base.join("fs/pool"),
            ground: String::new(),
            listens: String::new(),
            image: None,
            keep: options.keep,
            cleared: false,
            groups: Groups::default(),
            base,
        };
        rustix::mount::mount(
            "baggageclaim-demo",
            &sandbox.base,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            c"mode=0755",
        )
        .map_err(|errno| Error::io("mount a tmpfs on", &sandbox.base, errno))?;
        for dir in ["kubelet", "step", "fs"] {
            make_dir(&sandbox.base.join(dir))?;
        }
        if let Some(pool) = &options.pool {
            sandbox.pool =
                std::path::absolute(pool).map_err(|source| Error::io("find", pool, source))?;
            sandbox.ground = sandbox.pool.display().to_string();
        } else {
            sandbox.ground = sandbox.make_filesystem(options.filesystem)?;
        }
        make_dir(&sandbox.tier())?;
        sandbox.list_peers()?;
        Ok(sandbox)
    }

    /// Kubelet's root directory.
    pub(super) fn kubelet(&self) -> PathBuf {
        self.base.join("kubelet")
    }

    /// The paths of the driver.
    pub(super) fn paths(&self) -> Paths {
        Paths {
            pool: self.pool.clone(),
            socket: self.base.join("csi.sock"),
            kubelet: self.kubelet(),
            log: self.log(),
            archive: self.base.join("archive.tar.zst"),
            tier: Some(self.tier_url()),
            peers: self.peer_flags(FIRST),
        }
    }

    /// The directory of the shared tier.
    pub(super) fn tier(&self) -> PathBuf {
        self.base.join("fs/tier")
    }

    fn tier_url(&self) -> String {
        format!("file://{}", self.tier().display())
    }

    /// The paths of a further driver with a new pool, which has a peer and no tier.
    pub(super) fn peer_paths(&self, name: &str) -> Result<Paths, Error> {
        let paths = self.node_paths(name)?;
        Ok(Paths {
            tier: None,
            peers: self.peer_flags(name),
            ..paths
        })
    }

    /// Makes the keys of both peers, and the list that names them. Only the first one is asked.
    fn list_peers(&mut self) -> Result<(), Error> {
        let io = |source| Error::io("find a free port", &self.base, source);
        let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
        let port = port.map_err(io)?.port();
        let mut list = String::new();
        for (name, port) in [(FIRST, port), (THIRD, 1)] {
            let key = Key::open(&self.base.join(format!("{name}.key")))?;
            // Writing to a String cannot fail.
            let _ = writeln!(list, "{name} 127.0.0.1:{port} {}", key.name());
        }
        let path = self.base.join("peers");
        fs::write(&path, &list).map_err(|source| Error::io("write", &path, source))?;
        self.listens = format!("127.0.0.1:{port}");
        Ok(())
    }

    fn peer_flags(&self, name: &str) -> Vec<String> {
        let path = |file: &str| self.base.join(file).display().to_string();
        let mut flags = vec![
            format!("--peers={}", path("peers")),
            format!("--peer-key={}", path(&format!("{name}.key"))),
        ];
        if name == FIRST {
            flags.push(format!("--peer-listen={}", self.listens));
        }
        flags
    }

    /// The paths of a second driver with a new pool, and without a tier.
    pub(super) fn second_paths(&self) -> Result<Paths, Error> {
        let paths = self.node_paths("second")?;
        Ok(Paths {
            tier: None,
            ..paths
        })
    }

    /// The paths of a further driver with a new pool.
    pub(super) fn node_paths(&self, name: &str) -> Result<Paths, Error> {
        let base = self.base.join(name);
        let paths = Paths {
            pool: self.base.join("fs").join(format!("{name}-pool")),
            socket: base.join("csi.sock"),
            kubelet: base.join("kubelet"),
            log: base.join("driver.log"),
            archive: base.join("archive.tar.zst"),
            tier: Some(self.tier_url()),
            peers: Vec::new(),
        };
        make_dir(&base)?;
        make_dir(&paths.kubelet)?;
        Ok(paths)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.base.join("driver.log")
    }

    /// The directory of a step's volumes.
    pub(super) fn step_root(&self) -> PathBuf {
        self.base.join("step")
    }

    /// Makes an image in the temporary directory and mounts it; returns its description.
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
                        // The mount keeps the content, and a killed demo leaves no file.
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
            "a filesystem for its pool: give a directory with --pool, or make one of these work: \
             {}",
            failures.join("; ")
        )))
    }

    /// Kills the running steps.
    pub(super) fn end_steps(&self) {
        self.groups.kill();
    }

    /// Unmounts and removes everything; returns an error if something remains.
    pub(super) fn clear(mut self) -> Result<(), Error> {
        self.take_down()
    }

    /// Mount points at or below the base directory, deepest first.
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

    /// The number of mounts of pods.
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
        // Mounts stack, so this may need several rounds.
        for _ in 0..64 {
            let mounts = self.mounts()?;
            if mounts.is_empty() {
                break;
            }
            for point in mounts {
                let flags = UnmountFlags::NOFOLLOW | UnmountFlags::DETACH;
                // The next round sees a mount that failed to go.
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

impl Drop for Sandbox {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            say(&error.to_string());
        }
    }
}

pub(super) fn say(line: &str) {
    use std::io::Write as _;
    // Stdout may be closed.
    let _ = writeln!(std::io::stdout(), "  {line}");
}

fn make_dir(path: &Path) -> Result<(), Error> {
    fs::DirBuilder::new()
        .mode(0o755)
        .create(path)
        .map_err(|source| Error::io("make", path, source))
}

/// The name of a filesystem, its mkfs program, and the arguments. They leave to the kernel all that
/// can be written later.
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
