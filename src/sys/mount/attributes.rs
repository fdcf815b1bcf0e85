//! `mount_setattr` (Linux 5.12): what a mount allows and how its owners are seen. Neither nix nor rustix has it.
//! Setting them only; when to is decided upstairs.

use std::os::fd::{AsRawFd, BorrowedFd};

use linux_raw_sys::general::{AT_EMPTY_PATH, MS_PRIVATE, mount_attr};
use nix::errno::Errno;
use nix::libc;
use rustix::mount::MountAttrFlags;

use crate::sys::error::{Error, Result};

/// What to change of a mount.
#[derive(Debug, Clone, Copy)]
pub struct MountAttributes<'a> {
    /// Attributes to set.
    pub set: MountAttrFlags,
    /// Attributes to clear.
    pub clear: MountAttrFlags,
    /// Whether it leaves its peer group, so that mounts made in it are seen nowhere else.
    pub private: bool,
    /// A user namespace through whose maps the owners of files are seen; the mount must be a fresh clone.
    pub identity: Option<BorrowedFd<'a>>,
}

impl Default for MountAttributes<'_> {
    fn default() -> Self {
        Self {
            set: MountAttrFlags::empty(),
            clear: MountAttrFlags::empty(),
            private: false,
            identity: None,
        }
    }
}

/// Changes the mount whose root `mount` is. ENOSYS before Linux 5.12; EINVAL where the filesystem cannot be idmapped.
pub fn set_mount_attributes(mount: BorrowedFd<'_>, attributes: &MountAttributes<'_>) -> Result<()> {
    let mut set = attributes.set;
    if attributes.identity.is_some() {
        set |= MountAttrFlags::MOUNT_ATTR_IDMAP;
    }
    let request = mount_attr {
        attr_set: set.bits().into(),
        attr_clr: attributes.clear.bits().into(),
        propagation: if attributes.private {
            MS_PRIVATE.into()
        } else {
            0
        },
        userns_fd: attributes
            .identity
            .map_or(0, |fd| u64::from(fd.as_raw_fd().unsigned_abs())),
    };
    #[expect(unsafe_code, reason = "no wrapper of mount_setattr exists")]
    // SAFETY: the path is a static C string, and the kernel only reads `size_of(request)` bytes of `request`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            AT_EMPTY_PATH,
            &raw const request,
            size_of::<mount_attr>(),
        )
    };
    Errno::result(result)
        .map(drop)
        .map_err(|errno| Error::new("mount_setattr", "a detached mount", errno))
}
