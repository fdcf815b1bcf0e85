//! `chattr` flags and project ids (ioctl_iflags(2), ioctl_fsgetxattr(2)). Callers decide when to
//! clear a flag that blocks rename or unlink, and which project to set.

#![expect(
    unsafe_code,
    reason = "asserts that a structure matches the kernel's layout"
)]

use std::os::fd::{AsFd, BorrowedFd};

use linux_raw_sys::general::fsxattr;
use linux_raw_sys::ioctl::{FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR};
use rustix::fs::{IFlags, OFlags};

use super::dir::{Dir, FileKind};
use super::error::{Error, Result};
use super::ioctl::{Plain, ioctl};
use super::path_fd::PathFd;

/// `FS_XFLAG_PROJINHERIT` of `linux/fs.h`: new files in this directory inherit its project id.
const PROJECT_INHERITED: u32 = 0x0000_0200;

// SAFETY: only integers, generated from the kernel's own header.
unsafe impl Plain for fsxattr {}

/// Clears `chattr +i` and `+a`, which bind even root.
fn clear(fd: BorrowedFd<'_>) -> std::result::Result<bool, rustix::io::Errno> {
    let flags = match rustix::fs::ioctl_getflags(fd) {
        Ok(flags) => flags,
        // Filesystems without flags (overlay before 5.13, FUSE) cannot have one set.
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
    /// Clears the directory's own immutable and append-only flags; returns whether one was set.
    pub fn clear_guard_flags(&self) -> Result<bool> {
        clear(self.as_fd()).map_err(|errno| Error::new("FS_IOC_SETFLAGS", self.path(), errno))
    }

    /// The directory's project id.
    pub fn project(&self) -> Result<u32> {
        Ok(self.extended_flags()?.fsx_projid)
    }

    /// Sets the directory's project id. New files in it inherit the id.
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

impl PathFd {
    /// Clears a file's immutable and append-only flags; returns whether one was set.
    ///
    /// Opens only regular files and directories. Other types need CAP_LINUX_IMMUTABLE and Linux
    /// 6.17 to have flags, and opening a device calls its driver.
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
