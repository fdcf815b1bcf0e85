//! How much room a filesystem has, what it is, and reserving some of it.
//! When there is too little of it is for others to say.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FallocateFlags, StatVfsMountFlags};

use super::dir::Dir;
use super::error::{Error, Result};

/// `statfs(2)` in units that need no thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes not in use, the share reserved for root included.
    pub bytes_free: u64,
    /// Bytes that anybody may use.
    pub bytes_available: u64,
    /// Inodes in all; 0 on filesystems that make them as they go (btrfs).
    pub inodes: u64,
    /// Inodes not in use.
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

    /// The filesystem's name, where it is one that we know.
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
    /// How much room the filesystem has that this directory lies on.
    pub fn space(&self) -> Result<Space> {
        let stat =
            rustix::fs::fstatfs(self).map_err(|errno| Error::new("fstatfs", self.path(), errno))?;
        // The fields' types differ between architectures; none is ever negative.
        let wide = |value: i128| u64::try_from(value).unwrap_or(0);
        // f_blocks and friends count in f_frsize, which Linux fills in for every filesystem (fs/statfs.c).
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

    /// Whether no program can be run that lies on the mount through which this directory was
    /// opened.
    pub fn is_noexec(&self) -> Result<bool> {
        let stat = rustix::fs::fstatvfs(self)
            .map_err(|errno| Error::new("fstatvfs", self.path(), errno))?;
        Ok(stat.f_flag.contains(StatVfsMountFlags::NOEXEC))
    }

    /// Whether room that is taken here is gone there: whether they are one filesystem.
    ///
    /// Subvolumes of one btrfs are devices of their own; they are told from other btrfs by their size in all, which two disks
    /// may have in common.
    pub fn shares_room_with(&self, other: &Self) -> Result<bool> {
        if self.stat_self()?.st_dev == other.stat_self()?.st_dev {
            return Ok(true);
        }
        let (here, there) = (self.space()?, other.space()?);
        let what = |space: Space| (space.magic, space.bytes);
        Ok(here.magic == Space::BTRFS && what(here) == what(there))
    }

    /// Makes the new file `name` with `bytes` allocated on disk, so that removing it gives that much room back.
    ///
    /// Zeros are not written: the extents stay "unwritten". What has the name is whole: it grows under another
    /// ([`Dir::free_temporary`]), and is removed again when the room is not there (ENOSPC). EEXIST if there is anything of this name.
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
            // The first error is the one to tell; half a reserve must not stay.
            let _ = self.remove_file(&temporary);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_has_room_and_a_reserve_takes_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let space = dir.space().expect("statfs");
        assert!(space.bytes >= space.bytes_free && space.bytes_free >= space.bytes_available);
        // As kill -9 leaves it between two calls.
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
