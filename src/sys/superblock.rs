//! Which mount of a filesystem this is, of all that there were in this boot: what was in the page cache went with the one before.
//!
//! Linux has no call for that. But ext4 and xfs have a directory in sysfs for as long as they are mounted, whose inode number
//! the kernel gives once in a boot (`kernfs`). Tried on 6.18; it is the same number in every mount and network namespace.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::Dir;

/// The number of this mount of the filesystem on which a directory lies; `None` where the kernel tells none.
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
