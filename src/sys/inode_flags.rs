//! `chattr` flags and project ids (ioctl_iflags(2), ioctl_fsgetxattr(2)).
//! What stands in the way of a rename or an unlink, and what a quota counts by; no decision about either.

#![expect(unsafe_code, reason = "it promises that a structure is the kernel's")]

use std::os::fd::{AsFd, BorrowedFd};

use linux_raw_sys::general::fsxattr;
use linux_raw_sys::ioctl::{FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR};
use rustix::fs::{IFlags, OFlags};

use super::dir::{Dir, FileKind};
use super::error::{Error, Result};
use super::ioctl::{Plain, ioctl};
use super::node::Node;

/// `FS_XFLAG_PROJINHERIT` of `linux/fs.h`: what is made in this directory gets its project id.
const PROJECT_INHERITED: u32 = 0x0000_0200;

// SAFETY: integers only, generated from the kernel's own header.
unsafe impl Plain for fsxattr {}

/// Takes away what makes an inode unchangeable for root as well: `chattr +i` and `+a`.
fn clear(fd: BorrowedFd<'_>) -> std::result::Result<bool, rustix::io::Errno> {
    let flags = match rustix::fs::ioctl_getflags(fd) {
        Ok(flags) => flags,
        // Filesystems without flags (overlay before 5.13, FUSE) cannot have set one.
        Err(rustix::io::Errno::NOTTY | rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => {
            return Ok(false);
        }
        Err(errno) => return Err(errno),
    };
    let guards = IFlags::IMMUTABLE | IFlags::APPEND;
    if !flags.intersects(guards) {
        return Ok(false);
    }
    rustix::fs::ioctl_setflags(fd, flags - guards)?;
    Ok(true)
}

impl Dir {
    /// Clears the directory's own immutable and append-only flags; tells whether one was set.
    pub fn clear_guard_flags(&self) -> Result<bool> {
        clear(self.as_fd()).map_err(|errno| Error::new("FS_IOC_SETFLAGS", self.path(), errno))
    }

    /// The directory's project id.
    pub fn project(&self) -> Result<u32> {
        Ok(self.extended_flags()?.fsx_projid)
    }

    /// Gives the directory a project id, which everything made in it from now on inherits.
    pub fn set_project(&self, project: u32) -> Result<()> {
        let mut attributes = self.extended_flags()?;
        attributes.fsx_projid = project;
        attributes.fsx_xflags |= PROJECT_INHERITED;
        ioctl(self, FS_IOC_FSSETXATTR, &mut attributes)
            .map(drop)
            .map_err(|errno| Error::new("FS_IOC_FSSETXATTR", self.path(), errno))
    }

    fn extended_flags(&self) -> Result<fsxattr> {
        let mut attributes = fsxattr {
            fsx_xflags: 0,
            fsx_extsize: 0,
            fsx_nextents: 0,
            fsx_projid: 0,
            fsx_cowextsize: 0,
            fsx_pad: [0; 8],
        };
        ioctl(self, FS_IOC_FSGETXATTR, &mut attributes)
            .map_err(|errno| Error::new("FS_IOC_FSGETXATTR", self.path(), errno))?;
        Ok(attributes)
    }
}

impl Node {
    /// Clears a file's immutable and append-only flags; tells whether one was set.
    ///
    /// Only regular files and directories are opened for it. The others cannot be given flags without CAP_LINUX_IMMUTABLE
    /// and Linux 6.17, and to open a device is to call its driver.
    pub fn clear_guard_flags(&self) -> Result<bool> {
        match FileKind::of_mode(self.stat()?.st_mode) {
            FileKind::File | FileKind::Directory => {}
            _ => return Ok(false),
        }
        let fd = self.open(OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        clear(fd.as_fd()).map_err(|errno| self.error("FS_IOC_SETFLAGS", errno))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_structure_is_the_kernels() {
        assert_eq!(size_of::<super::fsxattr>(), 28);
    }
}
