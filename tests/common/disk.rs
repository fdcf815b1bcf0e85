//! A disk that loses what is written to it, and may be well again: a loop device over a file with holes, in a memory that has no
//! room to fill them. To the kernel it is a disk that fails; nobody else is told.
//!
//! One that does not answer ([`Frozen`]). And one that is slow ([`Slow`]).

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;

use super::bench::Bench;
use super::lab::run;
use super::{Fs, Lab};

const MIB: u64 = 1 << 20;

/// The disk under a [`Lab`], which must be gone before it.
#[derive(Debug)]
pub struct SmallDisk {
    memory: Lab,
    image: File,
}

/// Such a disk and a bench on it; says what is missing and ends the test where there can be none.
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

/// A part of a file, and where that is on the disk.
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

    /// One with a bench on it: [`require_small_disk`].
    pub async fn bench() -> Result<(Self, Bench), String> {
        let (disk, lab) = Self::make()?;
        Ok((disk, Bench::new(lab).await))
    }

    /// From now on it loses what is written to the places where this file lies, and what it had there.
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
        take_all_room(&ballast);
        Broken {
            image: self.image.try_clone().expect("dup"),
            ballast,
            file: file.to_owned(),
            extents,
            kept,
        }
    }

    /// The mounts that were left below its memory.
    pub fn close(self) -> Vec<PathBuf> {
        self.memory.close()
    }
}

/// A disk that is broken at some places.
#[derive(Debug)]
pub struct Broken {
    image: File,
    ballast: PathBuf,
    file: PathBuf,
    extents: Vec<Extent>,
    kept: Vec<Vec<u8>>,
}

impl Broken {
    /// Somebody hears that it failed, as by `sync`: until then overlayfs mounts nothing.
    pub fn is_heard(&self) {
        let _heard = rustix::fs::syncfs(File::open(&self.file).expect("open"));
    }

    /// It takes writes again. What it lost stays lost.
    pub fn works_again(self) {
        std::fs::remove_file(&self.ballast).expect("the disk is well again");
    }

    /// It takes writes again, and has lost nothing but what was written meanwhile. Somebody hears of it, as by `sync`.
    pub fn heals(self) {
        let file = File::open(&self.file).expect("open");
        self.heals_unheard();
        let _heard = rustix::fs::syncfs(file);
    }

    /// The same, and nobody asks whether anything was lost.
    pub fn heals_unheard(self) {
        std::fs::remove_file(&self.ballast).expect("there is room");
        for (extent, kept) in self.extents.iter().zip(&self.kept) {
            let written = self.image.write_all_at(kept, extent.on_disk);
            written.expect("the disk is well again");
        }
    }
}

/// A filesystem to which every write waits, until this is dropped. Must be dropped before anybody waits for a process that writes there.
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

/// Writes back what the filesystem of this path holds, all of which the disk takes.
pub fn sync(path: &Path) {
    let dir = File::open(path).expect("open");
    rustix::fs::syncfs(dir).expect("all is well");
}

/// The disk under a [`Lab`], which takes only so many bytes each second, until this is dropped.
#[derive(Debug)]
pub struct Slow {
    device: String,
}

impl Slow {
    /// The limit of the root of version 1 of cgroups. Version 2 has none for its root, to which belongs whatever is written back of
    /// processes that are in no group with a limit of their own.
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

/// Where a file lies.
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

/// A file that takes all the room of a filesystem, in which nothing is written.
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

/// A file in a small memory that takes all of its room.
fn take_all_room(path: &Path) {
    use std::io::Write as _;
    let mut file = File::create(path).expect("create");
    let mut size = 1 << 20;
    while size >= 4096 {
        if file.write_all(&vec![0; size]).is_err() {
            size /= 2;
        }
    }
}
