//! What stands at a place, without reading the mount table: `statx` (0.7 µs) and `statmount` (1.7 µs).
//! Questions only; nothing here changes a mount.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use linux_raw_sys::general::{
    __NR_statmount, STATMOUNT_FS_TYPE, STATMOUNT_SB_SOURCE, STATX_MNT_ID_UNIQUE, mnt_id_req,
    statmount,
};
use nix::errno::Errno;
use nix::libc;
use rustix::fs::{AtFlags, Statx, StatxAttributes, StatxFlags};

use crate::sys::dir::Dir;
use crate::sys::error::{Error, Result};

/// Which mount something lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountPoint {
    /// The mount's id.
    pub id: u64,
    /// Whether the id is never used again (Linux 6.8); before that it is mountinfo's, and is reused.
    pub unique: bool,
    /// Whether it is the root of its mount.
    pub is_root: bool,
    /// `st_dev`, as (major, minor).
    pub device: (u32, u32),
}

/// The mount that the name `name` of `parent` lies on; a symlink is not followed, an automount not triggered.
pub fn mount_point_at(parent: &Dir, name: impl AsRef<Path>) -> Result<MountPoint> {
    let name = name.as_ref();
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    read(parent.as_fd(), name, flags).map_err(|errno| parent.error("statx", name, errno))
}

/// The mount that an open file lies on; its descriptor may be `O_PATH`, the mount detached.
pub fn mount_point(file: BorrowedFd<'_>) -> Result<MountPoint> {
    read(file, Path::new(""), AtFlags::EMPTY_PATH)
        .map_err(|errno| Error::new("statx", "an open file", errno))
}

fn read(
    directory: BorrowedFd<'_>,
    name: &Path,
    flags: AtFlags,
) -> std::result::Result<MountPoint, Errno> {
    let mask = StatxFlags::MNT_ID | StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE);
    // DONT_SYNC: the answer must not wait for a network filesystem that somebody put there.
    let flags = flags | AtFlags::STATX_DONT_SYNC;
    let facts = rustix::fs::statx(directory, name, flags, mask)
        .map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
    let unique = facts.stx_mask & STATX_MNT_ID_UNIQUE != 0;
    if !unique && facts.stx_mask & StatxFlags::MNT_ID.bits() == 0 || !knows_mount_roots(&facts) {
        // Linux before 5.8.
        return Err(Errno::ENOSYS);
    }
    Ok(MountPoint {
        id: facts.stx_mnt_id,
        unique,
        is_root: facts.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
        device: (facts.stx_dev_major, facts.stx_dev_minor),
    })
}

fn knows_mount_roots(facts: &Statx) -> bool {
    facts
        .stx_attributes_mask
        .contains(StatxAttributes::MOUNT_ROOT)
}

/// What the kernel says of one attached mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountFacts {
    /// The filesystem's type.
    pub filesystem: String,
    /// What it says it was mounted from.
    pub source: String,
}

/// `statmount` of a mount of this namespace by its unique id; `None` where the kernel cannot (before 6.8, or 6.13
/// for the source): read the mount table then. ENOENT for a mount that is gone or detached.
pub fn mount_facts(unique_id: u64) -> Result<Option<MountFacts>> {
    const STRINGS: usize = 1024;
    /// The fixed part, then room for the strings.
    #[repr(C)]
    struct Answer {
        fixed: statmount,
        strings: [u8; STRINGS],
    }
    let request = mnt_id_req {
        // MNT_ID_REQ_SIZE_VER0, which every kernel with this call knows: without the namespace, which is ours.
        size: 24,
        spare: 0,
        mnt_id: unique_id,
        param: u64::from(STATMOUNT_FS_TYPE | STATMOUNT_SB_SOURCE),
        mnt_ns_id: 0,
    };
    let mut answer = Box::<Answer>::new_uninit();
    #[expect(unsafe_code, reason = "no wrapper of statmount exists")]
    // SAFETY: the kernel reads 24 bytes of `request`, writes at most `size_of::<Answer>()` bytes, and all-zero is a value
    // of every field.
    let (result, answer) = unsafe {
        answer.as_mut_ptr().write_bytes(0, 1);
        let mut answer = answer.assume_init();
        let result = libc::syscall(
            libc::c_long::from(__NR_statmount),
            &raw const request,
            &raw mut *answer,
            size_of::<Answer>(),
            0,
        );
        (result, answer)
    };
    match Errno::result(result) {
        Ok(_) => {}
        Err(Errno::ENOSYS) => return Ok(None),
        Err(errno) => {
            return Err(Error::new("statmount", format!("mount {unique_id}"), errno));
        }
    }
    if answer.fixed.mask & u64::from(STATMOUNT_SB_SOURCE) == 0 {
        return Ok(None);
    }
    let text = |offset: u32| {
        let bytes = answer.strings.get(offset as usize..).unwrap_or_default();
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    };
    Ok(Some(MountFacts {
        filesystem: text(answer.fixed.fs_type),
        source: text(answer.fixed.sb_source),
    }))
}
