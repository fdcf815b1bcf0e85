//! `mount_setattr` (Linux 5.12): a mount's flags, propagation and idmapping. Neither nix nor rustix
//! wraps it. Callers decide which attributes to set.

use std::os::fd::{AsRawFd, BorrowedFd};

use linux_raw_sys::general::{AT_EMPTY_PATH, MS_PRIVATE, mount_attr};
use nix::errno::Errno;
use nix::libc;
use rustix::mount::MountAttrFlags;

use crate::sys::error::{Error, Result};

/// The attributes to change.
#[derive(Debug, Clone, Copy)]
pub struct MountAttributes<'a> {
    /// Attributes to set.
    pub set: MountAttrFlags,
    /// Attributes to clear.
    pub clear: MountAttrFlags,
    /// Whether to make the mount private, so that mounts in it do not propagate.
    pub private: bool,
    /// A user namespace with the id maps for file owners. The mount must be a new clone.
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

/// Changes the mount with the root `mount`. ENOSYS before Linux 5.12; EINVAL: no idmapping here.
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
    // SAFETY: the path is a static C string; the kernel only reads `request`, of the size given.
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
