//! Disks that fail. [`SmallDisk`] loses writes and can recover: a loop device over a sparse file,
//! in a tmpfs that is too full to allocate blocks. Only the kernel sees the error.
//!
//! [`Frozen`] does not answer, and [`Slow`] is slow.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;

use super::bench::Bench;
use super::lab::run;
use super::{Fs, Lab};

const MIB: u64 = 1 << 20;

/// The disk under a [`Lab`], which must be dropped first.
#[derive(Debug)]
pub struct SmallDisk {
    memory: Lab,
    image: File,
}

/// Such a disk and a bench on it; skips the test with the reason if this machine cannot make one.
macro_rules! require_small_disk {
    () => {
        match $crate::common::disk::SmallDisk::bench().await {
            Ok(made) => made,
            Err(reason) => {
                $crate::common::skip(&reason);
                return;
            }
        }
    };
}

pub(crate) use require_small_disk;

/// A part of a file, and its place on the disk.
#[derive(Debug, Clone, Copy)]
struct Extent {
    on_disk: u64,
    length: u64,
}

impl SmallDisk {
    /// A disk with a small ext4.
    pub fn make() -> Result<(Self, Lab), String> {
        let memory = Lab::try_sized(Fs::Tmpfs, 112 * MIB)?;
        let lab = Lab::try_inside(&memory.path(), Fs::Ext4, 96 * MIB)?;
        let image = lab.image().expect("ext4");
        let image = File::options().read(true).write(true).open(image);
        let image = image.expect("open");
        rustix::fs::fallocate(&image, FallocateFlags::empty(), 0, 96 * MIB).expect("all of it");
        Ok((Self { memory, image }, lab))
    }

    /// A disk with a bench on it: [`require_small_disk`].
    pub async fn bench() -> Result<(Self, Bench), String> {
        let (disk, lab) = Self::make()?;
        Ok((disk, Bench::new(lab).await))
    }

    /// From now on it loses this file's content, and everything written to the same blocks.
    pub fn breaks_at(&self, file: &Path) -> Broken {
        let extents = extents(file);
        let kept = extents.iter().map(|extent| {
            let mut bytes = vec![0; usize::try_from(extent.length).expect("small")];
            let read = self.image.read_exact_at(&mut bytes, extent.on_disk);
            read.expect("read");
            bytes
        });
        let kept = kept.collect();
        for extent in &extents {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.image, flags, extent.on_disk, extent.length)
                .expect("punch");
        }
        let ballast = self.memory.path().join("ballast");
        take_all_space(&ballast);
        Broken {
            image: self.image.try_clone().expect("dup"),
            ballast,
            file: file.to_owned(),
            extents,
            kept,
        }
    }

    /// The mounts that were left below its tmpfs.
    pub fn close(self) -> Vec<PathBuf> {
        self.memory.close()
    }
}

/// A disk with broken blocks.
#[derive(Debug)]
pub struct Broken {
    image: File,
    ballast: PathBuf,
    file: PathBuf,
    extents: Vec<Extent>,
    kept: Vec<Vec<u8>>,
}

impl Broken {
    /// Collects the write-back error, as `sync` does; until then overlayfs mounts nothing.
    pub fn is_heard(&self) {
        let _heard = rustix::fs::syncfs(File::open(&self.file).expect("open"));
    }

    /// It accepts writes again. Lost content stays lost.
    pub fn works_again(self) {
        std::fs::remove_file(&self.ballast).expect("the disk is well again");
    }

    /// It accepts writes again, and lost only those meanwhile. Collects the error, as `sync` does.
    pub fn heals(self) {
        let file = File::open(&self.file).expect("open");
        self.heals_unheard();
        let _heard = rustix::fs::syncfs(file);
    }

    /// Like `heals`, but the write-back error stays uncollected.
    pub fn heals_unheard(self) {
        std::fs::remove_file(&self.ballast).expect("the tmpfs has free space");
        for (extent, kept) in self.extents.iter().zip(&self.kept) {
            let written = self.image.write_all_at(kept, extent.on_disk);
            written.expect("the disk is well again");
        }
    }
}

/// A filesystem on which every write blocks until this is dropped. Drop it before you wait for a
/// process that writes there.
#[derive(Debug)]
pub struct Frozen(PathBuf);

impl Frozen {
    pub fn new(path: PathBuf) -> Self {
        run(Command::new("fsfreeze").arg("--freeze").arg(&path)).expect("freeze");
        Self(path)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        run(Command::new("fsfreeze").arg("--unfreeze").arg(&self.0)).expect("thaw");
    }
}

/// Writes back the filesystem of this path; every block must succeed.
pub fn sync(path: &Path) {
    let dir = File::open(path).expect("open");
    rustix::fs::syncfs(dir).expect("all is well");
}

/// The disk under a [`Lab`], limited to this many bytes per second until it is dropped.
#[derive(Debug)]
pub struct Slow {
    device: String,
}

impl Slow {
    /// The limit in the root of cgroups version 1. Version 2 has none in its root, which is charged
    /// for the write-back of all processes without their own limit.
    const LIMIT: &str = "/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device";

    /// The error is a sentence.
    pub fn new(lab: &Lab, bytes_per_second: u64) -> Result<Self, String> {
        let device = std::fs::metadata(lab.path()).expect("stat").dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let device = format!("{major}:{minor}");
        match Self::limit(&device, bytes_per_second) {
            Ok(()) => Ok(Self { device }),
            Err(error) => Err(format!(
                "no disk can be made slow: {}: {error}",
                Self::LIMIT
            )),
        }
    }

    /// 0: no limit.
    fn limit(device: &str, bytes_per_second: u64) -> std::io::Result<()> {
        std::fs::write(Self::LIMIT, format!("{device} {bytes_per_second}"))
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        Self::limit(&self.device, 0).expect("the limit is lifted");
    }
}

/// The extents of a file.
fn extents(path: &Path) -> Vec<Extent> {
    let output = Command::new("filefrag")
        .args(["-v", "-b1"])
        .arg(path)
        .output()
        .expect("filefrag");
    let text = String::from_utf8(output.stdout).expect("text");
    let first = |range: &str| range.split_once("..")?.0.trim().parse::<u64>().ok();
    let extent = |line: &str| {
        let columns: Vec<&str> = line.split(':').map(str::trim).collect();
        let _number: u64 = columns.first()?.parse().ok()?;
        Some(Extent {
            on_disk: first(columns.get(2)?)?,
            length: columns.get(3)?.parse().ok()?,
        })
    };
    let found: Vec<_> = text.lines().filter_map(extent).collect();
    assert!(!found.is_empty(), "{text}");
    assert!(
        found
            .iter()
            .all(|extent| extent.length > 0 && extent.on_disk > 0),
        "{text}"
    );
    found
}

/// A file that takes all free blocks of a filesystem, without writing any.
pub fn fill(path: &Path) {
    let file = File::create(path).expect("create");
    let free = rustix::fs::fstatvfs(&file).expect("statvfs");
    let (mut at, mut size) = (0, free.f_bfree * free.f_frsize);
    while size > 0 {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), at, size) {
            Ok(()) => at += size,
            Err(_) => size /= 2,
        }
    }
}

/// A file that fills a small tmpfs.
fn take_all_space(path: &Path) {
    use std::io::Write as _;
    let mut file = File::create(path).expect("create");
    let mut size = 1 << 20;
    while size >= 4096 {
        if file.write_all(&vec![0; size]).is_err() {
            size /= 2;
        }
    }
}
