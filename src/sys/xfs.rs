//! xfs ioctls for free space (ioctl_xfs(2), `fs/xfs/libxfs/xfs_fs.h`).
//! Callers decide when to wait for it.

#![expect(
    unsafe_code,
    reason = "asserts that a structure matches the kernel's layout"
)]

use super::dir::Dir;
use super::error::{Error, Result};
use super::ioctl::{Plain, ioctl};
use super::statfs::Space;

/// `XFS_IOC_FREE_EOFBLOCKS`
const FREE_EOFBLOCKS: u32 = 0x8080_583a;
/// `XFS_EOFBLOCKS_VERSION`
const VERSION: u32 = 1;
/// `XFS_EOF_FLAGS_MINFILESIZE`
const AT_LEAST: u32 = 1 << 4;

/// `struct xfs_fs_eofblocks`
#[repr(C)]
struct Selection {
    version: u32,
    flags: u32,
    user: u32,
    group: u32,
    project: u32,
    unused: u32,
    file_size: u64,
    unused_too: [u64; 12],
}

// SAFETY: only integers and an array of integers, in the kernel's layout.
unsafe impl Plain for Selection {}

impl Dir {
    /// Waits until `statfs(2)` counts the space of deleted files as free, on xfs.
    ///
    /// Since Linux 5.14 xfs frees that space in the background, and `statfs(2)` does not wait. This
    /// call waits for it after it has trimmed the selected files. The selection matches no file.
    pub fn wait_for_freed_space(&self) -> Result<()> {
        if self.space()?.magic != Space::XFS {
            return Ok(());
        }
        let mut selection = Selection {
            version: VERSION,
            flags: AT_LEAST,
            user: 0,
            group: 0,
            project: 0,
            unused: 0,
            file_size: u64::MAX,
            unused_too: [0; 12],
        };
        ioctl(self, FREE_EOFBLOCKS, &mut selection)
            .map(drop)
            .map_err(|errno| Error::new("XFS_IOC_FREE_EOFBLOCKS", self.path(), errno))
    }
}
