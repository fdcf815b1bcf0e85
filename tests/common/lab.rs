//! Filesystems for tests: an image in memory, formatted, mounted, and removed in `Drop`.
//!
//! A mount that a test leaves behind is a fault, so a lab lists them ([`Lab::leftovers`],
//! [`Lab::close`]). The lab removes only what it knows: by `rmdir` and by name.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, OnceLock, mpsc};
use std::time::{Duration, Instant};

use rustix::mount::{MountPropagationFlags, UnmountFlags};

const MIB: u64 = 1 << 20;

/// A kind of filesystem, with the features that matter to copy-on-write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fs {
    /// ext4 with a journal.
    Ext4,
    /// xfs with reflinks.
    XfsReflink,
    /// xfs without reflinks.
    Xfs,
    /// btrfs on one device.
    Btrfs,
    /// ext4 with enforced project quotas, if the kernel can.
    Ext4Quota,
    /// xfs with enforced project quotas.
    XfsQuota,
    /// tmpfs: no reflinks, no durability.
    Tmpfs,
    /// ext4 with 3000 inodes.
    Ext4FewInodes,
    /// xfs that gives a hundredth of its space to inodes.
    XfsFewInodes,
}

impl Fs {
    /// The kinds that every kernel has, for tests on all of them.
    pub const ALL: [Fs; 5] = [Fs::Ext4, Fs::XfsReflink, Fs::Xfs, Fs::Btrfs, Fs::Tmpfs];

    /// The kinds with enforced project quotas; some kernels are built without quotas.
    pub const WITH_QUOTA: [Fs; 2] = [Fs::Ext4Quota, Fs::XfsQuota];

    /// A name for messages and directories.
    pub fn name(self) -> &'static str {
        match self {
            Fs::Ext4 => "ext4",
            Fs::XfsReflink => "xfs-reflink",
            Fs::Xfs => "xfs",
            Fs::Btrfs => "btrfs",
            Fs::Ext4Quota => "ext4-quota",
            Fs::XfsQuota => "xfs-quota",
            Fs::Tmpfs => "tmpfs",
            Fs::Ext4FewInodes => "ext4-few-inodes",
            Fs::XfsFewInodes => "xfs-few-inodes",
        }
    }

    /// The mount options of one in an image. `noinit_itable`: within seconds ext4 would zero its
    /// inode tables in the background, by which a loop device makes holes in the file. A disk whose
    /// memory is full ([`super::disk`]) then loses metadata, too.
    fn options(self) -> &'static str {
        match self {
            Self::Ext4 | Self::Ext4FewInodes => "loop,noinit_itable",
            Self::Ext4Quota => "loop,noinit_itable,prjquota",
            Self::XfsQuota => "loop,prjquota",
            Self::XfsReflink | Self::Xfs | Self::XfsFewInodes | Self::Btrfs | Self::Tmpfs => "loop",
        }
    }

    /// The program that formats one, and its arguments. The kernel writes the rest later.
    fn mkfs(self) -> Option<(&'static str, &'static [&'static str])> {
        match self {
            Fs::Ext4 => Some((
                "mkfs.ext4",
                &[
                    "-q",
                    "-F",
                    // As on large disks; a small one would get 1 KiB.
                    "-b",
                    "4096",
                    "-E",
                    "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
                ],
            )),
            Fs::Ext4Quota => Some((
                "mkfs.ext4",
                &[
                    "-q",
                    "-F",
                    "-b",
                    "4096",
                    "-O",
                    "quota,project",
                    "-E",
                    "lazy_itable_init=1,lazy_journal_init=1,nodiscard,quotatype=prjquota",
                ],
            )),
            Fs::XfsReflink | Fs::XfsQuota => {
                Some(("mkfs.xfs", &["-q", "-f", "-K", "-m", "reflink=1"]))
            }
            Fs::Xfs => Some(("mkfs.xfs", &["-q", "-f", "-K", "-m", "reflink=0"])),
            Fs::Btrfs => Some(("mkfs.btrfs", &["-q", "-f", "-K"])),
            Fs::Tmpfs => None,
            Fs::Ext4FewInodes => Some(("mkfs.ext4", &["-q", "-F", "-b", "4096", "-N", "3000"])),
            Fs::XfsFewInodes => Some(("mkfs.xfs", &["-q", "-f", "-K", "-i", "maxpct=1"])),
        }
    }
}

/// One filesystem, mounted in a directory of its own until the lab is dropped.
#[derive(Debug)]
pub struct Lab {
    fs: Fs,
    base: PathBuf,
    image: Option<PathBuf>,
    kubelet: OnceLock<PathBuf>,
    closed: bool,
}

impl Lab {
    /// Makes a sparse filesystem of 1 GiB.
    ///
    /// # Panics If this machine cannot; `require_lab!` skips the test instead.
    pub fn new(fs: Fs) -> Self {
        Self::try_new(fs).unwrap_or_else(|reason| panic!("{reason}"))
    }

    /// Makes a filesystem of a size: at least 300 MiB for xfs, 110 MiB for btrfs.
    pub fn sized(fs: Fs, bytes: u64) -> Self {
        Self::try_sized(fs, bytes).unwrap_or_else(|reason| panic!("{reason}"))
    }

    /// Like [`Lab::new`]; the error is a sentence.
    pub fn try_new(fs: Fs) -> Result<Self, String> {
        Self::try_sized(fs, 1024 * MIB)
    }

    /// Like [`Lab::sized`]; the error is a sentence.
    pub fn try_sized(fs: Fs, bytes: u64) -> Result<Self, String> {
        Self::try_inside(&memory(), fs, bytes)
    }

    /// Like `try_sized`, with its image in the given directory, for a disk with too little space.
    pub fn try_inside(images: &Path, fs: Fs, bytes: u64) -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !super::is_root() {
            return Err(format!("a lab on {} needs root", fs.name()));
        }
        let name = format!(
            "bcl-{}-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed),
            fs.name()
        );
        let base = std::env::temp_dir().join(&name);
        std::fs::DirBuilder::new()
            .mode(0o755)
            .create(&base)
            .map_err(|error| format!("cannot make {}: {error}", base.display()))?;
        let mut lab = Self {
            fs,
            base,
            image: None,
            kubelet: OnceLock::new(),
            closed: false,
        };
        lab.make(&name, images, bytes)?; // on an error, Drop removes what was made so far
        Ok(lab)
    }

    fn make(&mut self, name: &str, images: &Path, bytes: u64) -> Result<(), String> {
        let target = self.path();
        std::fs::create_dir(&target).map_err(|error| format!("{}: {error}", target.display()))?;
        let Some((mkfs, arguments)) = self.fs.mkfs() else {
            return run(Command::new("mount")
                .args(["-t", "tmpfs", "-o"])
                .arg(format!("size={bytes},mode=755"))
                .arg("bclab")
                .arg(&target));
        };
        let image = images.join(format!("{name}.img"));
        let file = File::create_new(&image).map_err(|e| format!("{}: {e}", image.display()))?;
        self.image = Some(image.clone());
        file.set_len(bytes)
            .map_err(|e| format!("{}: {e}", image.display()))?;
        drop(file);
        format(Command::new(mkfs).args(arguments).arg(&image))?;
        run(Command::new("mount")
            .args(["-o", self.fs.options()])
            .arg(&image)
            .arg(&target))
    }

    /// The kind of filesystem.
    pub fn fs(&self) -> Fs {
        self.fs
    }

    /// The root of the filesystem.
    pub fn path(&self) -> PathBuf {
        self.base.join("fs")
    }

    /// The image file; a tmpfs has none.
    pub fn image(&self) -> Option<&Path> {
        self.image.as_deref()
    }

    /// A new directory in the filesystem.
    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::create_dir_all(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        path
    }

    /// A directory for sockets and the like, outside the filesystem under test. Short, because a
    /// socket's path has less than 108 bytes.
    pub fn run_dir(&self) -> PathBuf {
        self.kubelet_dir().join("run")
    }

    /// The pods' directory, as on a node: not the pool's filesystem, and mounted shared, so that
    /// mounts in it propagate.
    pub fn kubelet_dir(&self) -> PathBuf {
        self.kubelet
            .get_or_init(|| {
                let path = self.base.join("kubelet");
                std::fs::create_dir(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                run(Command::new("mount")
                    .args(["-t", "tmpfs", "-o", "mode=755", "bclab-kubelet"])
                    .arg(&path))
                .unwrap_or_else(|reason| panic!("{reason}"));
                rustix::mount::mount_change(
                    &path,
                    MountPropagationFlags::SHARED | MountPropagationFlags::REC,
                )
                .unwrap_or_else(|e| panic!("make {} shared: {e}", path.display()));
                for dir in ["pods", "run"] {
                    let path = path.join(dir);
                    std::fs::create_dir(&path)
                        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                }
                path
            })
            .clone()
    }

    /// Mount points below the lab's directories that the lab did not make, topmost mount first.
    pub fn leftovers(&self) -> Vec<PathBuf> {
        let own = [self.path(), self.base.join("kubelet")];
        let mut seen_own = [false; 2];
        let mut left = Vec::new();
        for mount in mounts_below(&self.base) {
            match own.iter().position(|path| *path == mount) {
                // A second mount on the lab's own mount point was made by the test.
                Some(index) if !seen_own[index] => seen_own[index] = true,
                _ => left.push(mount),
            }
        }
        left.reverse();
        left
    }

    /// Unmounts and removes everything; returns what [`Lab::leftovers`] returned before.
    pub fn close(mut self) -> Vec<PathBuf> {
        let left = self.leftovers();
        self.tear_down();
        left
    }

    /// Unmounts the filesystem and mounts it again, as a reboot does: its page cache and all mounts
    /// below are gone.
    pub fn remount(&self) {
        self.mount_again(self.fs.options());
    }

    /// Like `remount`, without enforced quotas.
    pub fn remount_without_quota(&self) {
        self.mount_again("loop");
    }

    /// Unmounts an ext4 and all mounts below, runs `e2fsck`, and mounts it again.
    pub fn repair(&self) {
        assert_eq!(self.fs, Fs::Ext4, "only ext4 is repaired by this program");
        unmount_below(&self.base.join("kubelet"), true);
        unmount_below(&self.path(), false);
        let image = self.image.as_ref().expect("ext4");
        await_detached(image);
        // Its exit code 1 says that it repaired something, which is no failure.
        let mended = run(Command::new("e2fsck").args(["-f", "-y"]).arg(image));
        run(Command::new("e2fsck").args(["-f", "-n"]).arg(image))
            .unwrap_or_else(|reason| panic!("{reason} after {mended:?}"));
        run(Command::new("mount")
            .args(["-o", self.fs.options()])
            .arg(image)
            .arg(self.path()))
        .unwrap_or_else(|reason| panic!("{reason}"));
    }

    /// What a power cut at this moment would leave: a copy of the image, mounted. One at a time, of
    /// ext4, xfs, or btrfs on Linux 6.7 or newer.
    pub fn cut(&self) -> Self {
        let image = self.image().expect("an image");
        let cut = Self {
            fs: self.fs,
            base: self.base.with_extension("cut"),
            image: Some(memory().join(image.with_extension("cut").file_name().expect("a name"))),
            kubelet: OnceLock::new(),
            closed: false,
        };
        std::fs::create_dir_all(cut.path()).expect("mkdir");
        let copied = cut.image().expect("just said");
        run(Command::new("cp")
            .arg("--sparse=always")
            .args([image, copied]))
        .unwrap_or_else(|reason| panic!("{reason}"));
        let options = match self.fs {
            Fs::Xfs | Fs::XfsReflink | Fs::XfsQuota | Fs::XfsFewInodes => {
                format!("{},nouuid", self.fs.options())
            }
            _ => self.fs.options().to_owned(),
        };
        run(Command::new("mount")
            .args(["-o", &options])
            .arg(copied)
            .arg(cut.path()))
        .unwrap_or_else(|reason| panic!("{reason}"));
        cut
    }

    fn mount_again(&self, options: &str) {
        assert_ne!(
            self.fs,
            Fs::Tmpfs,
            "a tmpfs does not survive being unmounted"
        );
        unmount_below(&self.base.join("kubelet"), true);
        let target = self.path();
        unmount_below(&target, false);
        let image = self
            .image
            .as_ref()
            .expect("every kind but tmpfs has an image");
        await_detached(image);
        run(Command::new("mount")
            .args(["-o", options])
            .arg(image)
            .arg(&target))
        .unwrap_or_else(|reason| panic!("{reason}"));
    }

    /// Makes the filesystem read-only or writable while it is in use.
    pub fn set_read_only(&self, read_only: bool) {
        let option = if read_only {
            "remount,ro"
        } else {
            "remount,rw"
        };
        // A program that another test starts has copies of files open for writing, until it execs.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(reason) = run(Command::new("mount").args(["-o", option]).arg(self.path())) {
            let is_busy = reason.contains("busy") && Instant::now() < deadline;
            assert!(is_busy, "{reason}");
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    /// Remounts it `noexec`, so that no program on it runs.
    pub fn forbid_programs(&self) {
        run(Command::new("mount")
            .args(["-o", "remount,noexec"])
            .arg(self.path()))
        .unwrap_or_else(|reason| panic!("{reason}"));
    }

    /// Stops all changes to an ext4 in use, as after a disk error. statfs(2) does not show it.
    pub fn disk_fails(&self) {
        assert_eq!(self.fs, Fs::Ext4, "only ext4 can be told so");
        run(Command::new("mount")
            .args(["-o", "remount,errors=remount-ro"])
            .arg(self.path()))
        .unwrap_or_else(|reason| panic!("{reason}"));
        let table = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        let path = self.path();
        let place = path.to_str().expect("text");
        let mut mounts = table.lines().filter_map(|line| line.split_once(' '));
        let this = mounts.find(|(_, rest)| rest.split(' ').next() == Some(place));
        let (device, _) = this.expect("it is mounted");
        let device = device.strip_prefix("/dev/").expect("a loop device");
        std::fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "1").expect("an error");
    }

    fn tear_down(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        unmount_below(&self.base, false);
        for name in ["fs", "kubelet"] {
            // Plain rmdir: a directory with a mount on it stays, with a message.
            let path = self.base.join(name);
            if let Err(error) = std::fs::remove_dir(&path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                eprintln!("lab: {} stays: {error}", path.display());
            }
        }
        if let Err(error) = std::fs::remove_dir(&self.base) {
            eprintln!("lab: {} stays: {error}", self.base.display());
        }
        if let Some(image) = &self.image
            && let Err(error) = std::fs::remove_file(image)
        {
            eprintln!("lab: {} stays: {error}", image.display());
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.tear_down();
    }
}

/// A directory in memory, if there is one.
fn memory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        memory.to_owned()
    } else {
        std::env::temp_dir()
    }
}

/// Every mount point at or below `path`, in mount order.
fn mounts_below(path: &Path) -> Vec<PathBuf> {
    baggageclaim::sys::mount_table()
        .expect("the mount table can be read")
        .into_iter()
        .map(|mount| mount.mount_point)
        .filter(|mount| mount.starts_with(path))
        .collect()
}

/// Unmounts everything at (unless `keep_root`) or below `path`, deepest first, repeatedly because
/// mounts stack. Busy mounts are detached.
fn unmount_below(path: &Path, keep_root: bool) {
    for _ in 0..64 {
        let mut mounts = mounts_below(path);
        if keep_root && let Some(index) = mounts.iter().position(|mount| mount == path) {
            mounts.remove(index);
        }
        if mounts.is_empty() {
            return;
        }
        mounts.sort_by_key(|mount| std::cmp::Reverse(mount.components().count()));
        for mount in mounts {
            let plain = rustix::mount::unmount(&mount, UnmountFlags::NOFOLLOW);
            if plain.is_err() {
                let detach = UnmountFlags::NOFOLLOW | UnmountFlags::DETACH;
                let _ = rustix::mount::unmount(&mount, detach);
            }
        }
    }
    eprintln!("lab: cannot unmount everything below {}", path.display());
}

/// Waits until no loop device has the image. A process that another test forks keeps the filesystem
/// alive until its exec, and then `mount` finds it again, with its page cache and after an error
/// still read-only.
fn await_detached(image: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = output(Command::new("losetup").arg("--associated").arg(image));
        let devices = found.expect("losetup runs").stdout;
        if devices.is_empty() {
            return;
        }
        let devices = String::from_utf8_lossy(&devices);
        assert!(Instant::now() < deadline, "still in use: {devices}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// Runs a mkfs. That of btrfs looks at each mounted loop device, and fails if another test detaches
/// one meanwhile.
fn format(command: &mut Command) -> Result<(), String> {
    let mut result = run(command);
    for _ in 0..20 {
        match &result {
            Err(error) if error.contains("cannot check mount status") => result = run(command),
            _ => break,
        }
    }
    result
}

/// Runs a program to its end; the error has its output.
pub fn run(command: &mut Command) -> Result<(), String> {
    let words: Vec<OsString> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(Into::into)
        .collect();
    let output = output(command).map_err(|error| format!("cannot run {words:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{words:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

/// Starts the program from a thread without the tests' descriptors. Until its exec a child has
/// copies of its parent's descriptors, and would keep files open and mounts busy that another test
/// has just released.
pub fn output(command: &mut Command) -> std::io::Result<Output> {
    type Job = (Command, mpsc::Sender<std::io::Result<Output>>);
    static STARTER: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
        let (starter, jobs) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            forget_descriptors();
            for (mut command, answer) in jobs {
                let _caller_is_gone = answer.send(command.output());
            }
        });
        starter
    });
    let (answer, answered) = mpsc::channel();
    let command = std::mem::replace(command, Command::new(""));
    STARTER.send((command, answer)).expect("the thread lives");
    answered.recv().expect("the thread lives")
}

/// Gives this thread its own descriptor table, with only the standard three in it.
#[expect(unsafe_code, reason = "no crate has this call for one thread")]
fn forget_descriptors() {
    use nix::libc;
    let unshare = libc::CLOSE_RANGE_UNSHARE.cast_signed();
    // SAFETY: the table is copied before anything in it is closed, so no other thread's descriptor
    // is closed. This thread owns none.
    let result = unsafe { libc::close_range(3, libc::c_uint::MAX, unshare) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
