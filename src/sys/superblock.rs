//! Identifies one mount of a filesystem since boot: a later mount lacks the earlier page cache.
//!
//! Linux has no call for it. ext4 and xfs have a sysfs directory while mounted, and the kernel
//! (`kernfs`) does not reuse its inode number before a reboot. It is equal in all namespaces
//! (6.18).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::Dir;

/// The number of the current mount of `dir`'s filesystem; `None` if the kernel provides none.
#[must_use]
pub fn superblock(dir: &Dir) -> Option<u64> {
    let device = dir.stat_self().ok()?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    let name = link.file_name()?;
    let found = ["ext4", "xfs"].into_iter().find_map(|filesystem| {
        let path = Path::new("/sys/fs").join(filesystem).join(name);
        std::fs::metadata(path).ok()
    });
    found.map(|found| found.ino())
}
