//! A filesystem's free space and type, and reserving space on it.
//! Callers decide how much free space is enough.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FallocateFlags, StatVfsMountFlags};

use super::dir::Dir;
use super::error::{Error, Result};

/// The result of `statfs(2)` in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Total bytes.
    pub bytes: u64,
    /// Free bytes, including those reserved for root.
    pub bytes_free: u64,
    /// Free bytes for unprivileged processes.
    pub bytes_available: u64,
    /// Total inodes; 0 on filesystems that create them on demand (btrfs).
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
    /// The filesystem's magic number (`linux/magic.h`).
    pub magic: u64,
}

impl Space {
    /// `BTRFS_SUPER_MAGIC`
    pub const BTRFS: u64 = 0x9123_683e;
    /// `EXT4_SUPER_MAGIC`, the same for ext2 and ext3
    pub const EXT4: u64 = 0xef53;
    /// `OVERLAYFS_SUPER_MAGIC`
    pub const OVERLAY: u64 = 0x794c_7630;
    /// `TMPFS_MAGIC`
    pub const TMPFS: u64 = 0x0102_1994;
    /// `XFS_SUPER_MAGIC`
    pub const XFS: u64 = 0x5846_5342;

    /// The filesystem's name, if it is known here.
    #[must_use]
    pub fn filesystem(&self) -> Option<&'static str> {
        match self.magic {
            Self::BTRFS => Some("btrfs"),
            Self::EXT4 => Some("ext4"),
            Self::OVERLAY => Some("overlay"),
            Self::TMPFS => Some("tmpfs"),
            Self::XFS => Some("xfs"),
            _ => None,
        }
    }
}

impl Dir {
    /// The space of the filesystem that contains this directory.
    pub fn space(&self) -> Result<Space> {
        let stat =
            rustix::fs::fstatfs(self).map_err(|errno| Error::new("fstatfs", self.path(), errno))?;
        // The fields' types differ between architectures. None is negative.
        let wide = |value: i128| u64::try_from(value).unwrap_or(0);
        // f_blocks and others count in f_frsize, which Linux always sets (fs/statfs.c).
        let unit = i128::from(stat.f_frsize);
        Ok(Space {
            bytes: wide(i128::from(stat.f_blocks) * unit),
            bytes_free: wide(i128::from(stat.f_bfree) * unit),
            bytes_available: wide(i128::from(stat.f_bavail) * unit),
            inodes: wide(i128::from(stat.f_files)),
            inodes_free: wide(i128::from(stat.f_ffree)),
            magic: wide(i128::from(stat.f_type)) & 0xffff_ffff,
        })
    }

    /// Whether the mount through which this directory was opened is `noexec`.
    pub fn is_noexec(&self) -> Result<bool> {
        self.has_flag(StatVfsMountFlags::NOEXEC)
    }

    /// Whether this mount or its filesystem is read-only.
    pub fn is_read_only(&self) -> Result<bool> {
        self.has_flag(StatVfsMountFlags::RDONLY)
    }

    fn has_flag(&self, flag: StatVfsMountFlags) -> Result<bool> {
        let stat = rustix::fs::fstatvfs(self)
            .map_err(|errno| Error::new("fstatvfs", self.path(), errno))?;
        Ok(stat.f_flag.contains(flag))
    }

    /// Whether both directories are on one filesystem and so share its free space.
    ///
    /// Subvolumes of one btrfs have different devices. Two btrfs are distinguished by total size
    /// only, which two disks may have in common.
    pub fn shares_room_with(&self, other: &Self) -> Result<bool> {
        if self.stat_self()?.st_dev == other.stat_self()?.st_dev {
            return Ok(true);
        }
        let (here, there) = (self.space()?, other.space()?);
        let what = |space: Space| (space.magic, space.bytes);
        Ok(here.magic == Space::BTRFS && what(here) == what(there))
    }

    /// Creates the file `name` with `bytes` allocated on disk, so that removing it frees them.
    ///
    /// The extents stay "unwritten": no zeros are written. The file grows under a temporary name
    /// ([`Dir::free_temporary`]), which ENOSPC removes. EEXIST if `name` exists.
    pub fn reserve(&self, name: impl AsRef<Path>, bytes: u64) -> Result<()> {
        let name = name.as_ref();
        let temporary = self.free_temporary(name)?;
        let fd: OwnedFd = self.create_file(&temporary)?;
        let allocated = loop {
            match rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes) {
                Err(rustix::io::Errno::INTR) => {}
                result => break result.map_err(|errno| self.error("fallocate", name, errno)),
            }
        };
        let made = allocated.and_then(|()| self.rename(&temporary, self, name));
        made.inspect_err(|_| {
            // Return the first error. A partial reserve must not stay.
            let _ = self.remove_file(&temporary);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_has_space_and_a_reserve_takes_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let space = dir.space().expect("statfs");
        assert!(space.bytes >= space.bytes_free && space.bytes_free >= space.bytes_available);
        // The state after a kill -9 between two calls.
        dir.write_new(".reserve.new", b"").expect("write");
        dir.reserve("reserve", 1 << 20).expect("fallocate");
        assert_eq!(dir.entries().expect("entries").len(), 1);
        let stat = dir.stat("reserve").expect("stat");
        assert!(stat.st_blocks * 512 >= 1 << 20);
        assert!(
            dir.reserve("reserve", 1)
                .expect_err("once")
                .is(nix::errno::Errno::EEXIST)
        );
        assert!(dir.reserve("huge", 1 << 60).is_err());
        assert_eq!(dir.entries().expect("entries").len(), 1);
    }
}
