//! `ioctl(2)` with a pointer to plain data, in one place.
//! The requests are in the files beside this one.

#![expect(unsafe_code, reason = "no library in use wraps these ioctls")]

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::libc;

/// Data that is valid for any bits that the kernel writes into it.
///
/// # Safety
/// `repr(C)`, only integers and arrays of integers, in the layout that the ioctl expects.
pub(super) unsafe trait Plain {}

/// Calls `request` with `data`, which the kernel may read and write.
///
/// `request` has the type of the kernel's ABI, because C libraries disagree about it.
pub(super) fn ioctl<T: Plain>(fd: impl AsFd, request: u32, data: &mut T) -> Result<i32, Errno> {
    // SAFETY: the descriptor is open and `data` is borrowed exclusively. `Plain` asserts that it
    // has the kernel's layout and that any bits in it are valid.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            fd.as_fd().as_raw_fd(),
            libc::c_ulong::from(request),
            std::ptr::from_mut(data),
        )
    };
    // The kernel returns an int.
    Errno::result(result).map(|value| i32::try_from(value).unwrap_or(0))
}
