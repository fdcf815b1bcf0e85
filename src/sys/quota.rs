//! Project quotas of ext4 and xfs, by `quotactl_fd(2)` (Linux 5.14), which needs no device path.
//!
//! [`Dir::set_project`](super::Dir::set_project) assigns a project id to a directory; this file
//! sets its limit. The VFS interface `Q_SETQUOTA` works on both filesystems (quotactl(2)).

#![expect(unsafe_code, reason = "no library wraps quotactl_fd")]

use std::fmt;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::libc;

use super::dir::Dir;
use super::error::{Error, Result};
use super::statfs::Space;

/// `PRJQUOTA` of `linux/quota.h`.
const PROJECT: u32 = 2;
/// `Q_GETQUOTA`
const Q_GETQUOTA: u32 = 0x0080_0007;
/// `Q_SETQUOTA`
const Q_SETQUOTA: u32 = 0x0080_0008;
/// `Q_XGETQSTAT` of `linux/dqblk_xfs.h`: what is counted and enforced, on all filesystems.
const Q_XGETQSTAT: u32 = 0x5805;
/// `QIF_BLIMITS`, `QIF_SPACE`: the valid fields of a `dqblk`.
const QIF_BLIMITS: u32 = 1;
/// `FS_QUOTA_PDQ_ACCT`: usage is counted by project.
const PROJECT_COUNTED: u16 = 1 << 4;
/// `FS_QUOTA_PDQ_ENFD`: project limits are enforced.
const PROJECT_ENFORCED: u16 = 1 << 5;

/// `struct if_dqblk` of `linux/quota.h`, equal on all 64-bit architectures.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Dqblk {
    /// In units of 1 KiB (`QIF_DQBLKSIZE`).
    block_hard_limit: u64,
    block_soft_limit: u64,
    /// In bytes.
    current_space: u64,
    inode_hard_limit: u64,
    inode_soft_limit: u64,
    current_inodes: u64,
    block_time: u64,
    inode_time: u64,
    valid: u32,
    padding: u32,
}
const _: () = assert!(size_of::<Dqblk>() == 72);

/// `struct fs_quota_stat` of `linux/dqblk_xfs.h`; only the flags are used.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct QuotaStat {
    version: i8,
    flags: u16,
    rest: [u64; 9],
}
const _: () = assert!(size_of::<QuotaStat>() == 80);

/// Why a filesystem cannot enforce project quotas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoQuota {
    /// The kernel has no `quotactl_fd` (before 5.14, built without quotas, or blocked by seccomp).
    NoCall,
    /// The kernel does not support project quotas on this filesystem.
    NotBuilt,
    /// Off: ext4 needs `-O quota,project` and the mount option `prjquota`, xfs the mount option.
    Off,
    /// Counted but not enforced: ext4 without the mount option, or xfs with `pqnoenforce`.
    NotEnforced,
    /// Another errno.
    Other(Errno),
}

impl fmt::Display for NoQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCall => f.write_str("the kernel has no quotactl_fd (Linux 5.14) or no quotas"),
            Self::NotBuilt => {
                f.write_str("the kernel does not support project quotas on this filesystem")
            }
            Self::Off => f.write_str(
                "project quotas are off: mount the pool's filesystem with prjquota (ext4 also \
                 needs mkfs -O quota,project)",
            ),
            Self::NotEnforced => f.write_str(
                "project quotas are counted but not enforced: mount the pool's filesystem with \
                 prjquota",
            ),
            Self::Other(errno) => write!(f, "quotactl_fd: {errno}"),
        }
    }
}

/// A project's usage and limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProjectUsage {
    /// Bytes in use.
    pub bytes: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// The hard limit in bytes; 0 means none.
    pub limit: u64,
}

fn call(
    dir: &Dir,
    command: u32,
    id: u32,
    data: *mut libc::c_void,
) -> std::result::Result<(), Errno> {
    // QCMD(cmd, type) of linux/quota.h.
    let command = (command << 8) | PROJECT;
    // SAFETY: each caller passes a pointer to the structure of its command, alive during the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            dir.as_fd().as_raw_fd(),
            command,
            id,
            data,
        )
    };
    Errno::result(result).map(drop)
}

impl Dir {
    /// Whether the filesystem that contains this directory enforces project limits; if not, why.
    pub fn project_quota(&self) -> std::result::Result<(), NoQuota> {
        // Q_GETFMT is not enough: without the mount option, ext4 has a format but no limits.
        let mut stat = QuotaStat {
            version: 1,
            flags: 0,
            rest: [0; 9],
        };
        match call(self, Q_XGETQSTAT, 0, (&raw mut stat).cast()) {
            Ok(()) if stat.flags & PROJECT_ENFORCED != 0 => Ok(()),
            Ok(()) if stat.flags & PROJECT_COUNTED != 0 => Err(NoQuota::NotEnforced),
            Ok(()) => Err(NoQuota::Off),
            Err(Errno::ENOSYS) if !has_call() => Err(NoQuota::NoCall),
            // If nothing is counted, the kernel answers as for a filesystem without quota support.
            Err(Errno::ENOSYS | Errno::ESRCH) if self.may_have_project_quotas() => {
                Err(NoQuota::Off)
            }
            Err(Errno::ENOSYS | Errno::EINVAL | Errno::EOPNOTSUPP) => Err(NoQuota::NotBuilt),
            Err(errno) => Err(NoQuota::Other(errno)),
        }
    }

    fn may_have_project_quotas(&self) -> bool {
        let magics = [Space::EXT4, Space::XFS];
        self.space()
            .is_ok_and(|space| magics.contains(&space.magic))
    }

    /// Limits the total bytes of a project's files; 0 removes the limit.
    pub fn set_project_limit(&self, project: u32, bytes: u64) -> Result<()> {
        let mut limits = Dqblk {
            // Round up: a limit of 1 byte must not become "no limit".
            block_hard_limit: bytes.div_ceil(1024),
            valid: QIF_BLIMITS,
            ..Dqblk::default()
        };
        call(self, Q_SETQUOTA, project, (&raw mut limits).cast())
            .map_err(|errno| Error::new("quotactl_fd(Q_SETQUOTA)", self.path(), errno))
    }

    /// A project's usage. This call writes nothing back, so it may omit delayed allocations.
    pub fn project_usage(&self, project: u32) -> Result<ProjectUsage> {
        let mut usage = Dqblk::default();
        call(self, Q_GETQUOTA, project, (&raw mut usage).cast())
            .map_err(|errno| Error::new("quotactl_fd(Q_GETQUOTA)", self.path(), errno))?;
        Ok(ProjectUsage {
            bytes: usage.current_space,
            inodes: usage.current_inodes,
            limit: usage.block_hard_limit.saturating_mul(1024),
        })
    }
}

/// Whether the kernel knows the system call.
fn has_call() -> bool {
    // SAFETY: with descriptor -1 the kernel fails before it reads the pointer.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            -1,
            (Q_GETQUOTA << 8) | PROJECT,
            0,
            std::ptr::null::<libc::c_void>(),
        )
    };
    result != -1 || Errno::last() != Errno::ENOSYS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel returns a project's limit as it was set, or explains why it counts nothing.
    #[test]
    fn a_filesystem_keeps_limits_or_says_why_not() {
        /// An unused id: outside the ranges that people or tools assign.
        const PROJECT: u32 = 0x7fff_4711;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = Dir::open(folder.path()).expect("it opens");
        let set = |bytes| dir.set_project_limit(PROJECT, bytes);
        match dir.project_quota() {
            Err(reason) => {
                assert!(!reason.to_string().is_empty());
                assert!(set(1 << 20).is_err(), "{reason}");
                assert!(dir.project_usage(PROJECT).is_err(), "{reason}");
            }
            Ok(()) if nix::unistd::geteuid().is_root() => {
                let limit = || dir.project_usage(PROJECT).map_or(0, |usage| usage.limit);
                assert_eq!(limit(), 0);
                // Rounded up to the kernel's unit.
                for (bytes, kept) in [(1 << 20, 1 << 20), (1, 1024), (0, 0)] {
                    set(bytes).expect("set");
                    assert_eq!(limit(), kept);
                }
            }
            Ok(()) => assert!(set(1 << 20).is_err_and(|error| error.is(Errno::EPERM))),
        }
    }
}
